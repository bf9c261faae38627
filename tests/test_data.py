"""How plain rows become token ids: the text that a model reads, the boundary of prompt and answer, dropped rows.

What is the same text in every script (tests/test_scripts.py) is tested through dpo.py. Formats: test_prepare.py.
"""
import json
import math

import pytest
from models import bad_input, cases
from runs import BOTH, PLAIN, SCRIPTS, TOKENIZER, arguments, byte_level, said

import dpo
import kto
import rloo

NAMES = "{{ tools }}{{ loud }}" + PLAIN
THINKS = "{{ bos_token }}" + PLAIN.replace("m.content", "m.content.split('</think>')[-1]").replace(
    "<assistant>", "<assistant><think>")  # where no answer follows
COUNTS = "{{ messages | length if messages[0].content == 'n' }}"  # another prompt where an answer follows
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
Q, A, B = said("q", "user"), said("a"), said("b")


def text(columns):
    """A row of strings, of "prompt|chosen|rejected"."""
    prompt, chosen, rejected = columns.split("|")
    return dict(prompt=prompt, chosen=chosen, rejected=rejected, completion=chosen, label=True)


def chat(prompt=Q, chosen=A, rejected=B, **columns):
    return dict(prompt=prompt, chosen=chosen, rejected=rejected, completion=chosen, label=True, **columns)


TEXT = text("The tea| was warm.| was bad.")
BRIEF = said("Be brief.", "system") + Q
LONG = said("W?", "user") + said("<think>Hm.</think>Warm.") + said("And s?", "user")
TOOLS = [dict(name="f", strict=None)]  # a key that is null is absent
BYTES, BEGINS = byte_level(), byte_level(front=["<s>", "<en>"])


@pytest.fixture
def load(tmp_path):
    """The rows that a script makes from rows: dicts, or lines of text. The file begins with a BOM."""
    def load(rows, tokenizer=BYTES, script=dpo, **flags):
        path = tmp_path / "rows.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines), encoding="utf-8-sig")
        return script.load_rows(str(path), tokenizer, script.Args(**flags))
    return load


# --- The text that a model reads

@cases("tokenizer, row, texts", [
    (BYTES, TEXT, "The tea| was warm.</s>| was bad.</s>"),
    (BEGINS, text("q|a|b"), "<s><en>q|a</s>|b</s>"),
    (BEGINS, text("<s><en>q|a</s>|b"), "<s><en>q|a</s>|b</s>"),  # what is there is not added again
    (byte_level(PLAIN), chat(BRIEF), "<system>Be brief.<user>q<assistant>|a|b"),
    (byte_level(PLAIN, front=["<s>"]), chat(), "<user>q<assistant>|a|b"),  # a template alone writes BOS
    (byte_level(NAMES), chat(tools=[], chat_template_kwargs=None), "None<user>q<assistant>|a|b"),
    (byte_level(NAMES), chat(chat_template_kwargs=dict(loud=8), tools=TOOLS), "[{'name': 'f'}]8<user>q<assistant>|a|b"),
    (byte_level(THINKS, ["<s>"]), chat(LONG), "<s><user>W?<assistant>Warm.<user>And s?<assistant>|a|b"),
    (byte_level(COUNTS + PLAIN), chat(), "<user>q<assistant>|a|b")])
def test_token_ids_are_those_of_the_text(load, tokenizer, row, texts):
    """These tokenizers have a token for each byte, and special tokens."""
    pair, = load([row], tokenizer)
    expected = [tuple(tokenizer(part, add_special_tokens=False).input_ids) for part in texts.split("|")]
    assert [pair.prompt, pair.chosen, pair.rejected] == expected

    single, = load([row], tokenizer, kto)
    assert (single.prompt, single.completion) == (pair.prompt, pair.chosen)
    sampled, = load([row], tokenizer, rloo)
    assert tokenizer.decode(sampled.prompt).removesuffix("<think>") == texts.split("|")[0]
    assert single.whole_prompt == sampled.prompt


def test_a_begun_answer_is_continued_by_rloo(load):
    row, = load([dict(prompt=Q + said("The tea is"))], byte_level(PLAIN + "."), rloo)
    assert BYTES.decode(row.prompt) == "<user>q<assistant>The tea is"


@cases("ends", [("s warm.", "s bad."), ("s warm.", ", bad."), (", warm.", "s bad."), (" warm.", " bad.")])
def test_a_token_across_the_boundary_belongs_to_both_answers(load, ends):
    """Also if it spans the prompt's end in one of them. In kto.py each answer has a prompt of its own."""
    row, = load([text("The tea wa|" + "|".join(ends))], TOKENIZER)
    tea, prompt = (tuple(TOKENIZER(begin).input_ids) for begin in ("The tea", "The tea wa"))
    assert row.prompt == (prompt if ends[0] == " warm." else tea)
    for end, answer in zip(ends, (row.chosen, row.rejected)):
        single, = load([text(f"The tea wa|{end}|")], TOKENIZER, kto)
        assert single.prompt == (tea if end[0] == "s" else prompt)
        ids = tuple(TOKENIZER(f"The tea wa{end}<|end|>").input_ids)
        assert row.prompt + answer == single.prompt + single.completion == ids


def test_labels_scores_and_columns_of_rloo(load):
    labels = [True, 1, 1.0, False, 0, 0.0]
    rows = load([TEXT | dict(label=label) for label in labels], script=kto)
    assert [row.is_desirable for row in rows] == list(map(bool, labels))
    with bad_input("a label is 'true': expected true or false"):  # it would count as true
        load([TEXT | dict(label="true")], script=kto)

    rated = TEXT | dict(chosen_reward=2, rejected_reward=-0.5)
    assert all(map(math.isnan, load([rated])[0].scores))  # a loss that reads them without rpo in its name fails
    assert load([rated], loss=("sft", "rpo_sq"))[0].scores == (2.0, -0.5)
    rows = [dict(prompt="The tea"), dict(prompt="The soup", answer=[4, dict(note=None)])]
    assert [row.columns for row in load(rows, script=rloo)] == [rows[0] | dict(answer=None), rows[1]]


# --- Rows that are dropped, or raise

@cases("script, bad", [
    ("dpo", "q|b</s>|b"), ("dpo", "|a|b"), ("dpo", "q|| b"), ("dpo", "q|a|</s>"), ("dpo", "q| \n|b"),
    ("kto", "|a|b"), ("kto", "q|</s>|b"), ("rloo", "|a|b")])
def test_equal_and_empty_rows_are_dropped_and_counted(load, capsys, script, bad):
    assert len(load([TEXT, "", text(bad), TEXT], script=SCRIPTS[script])) == 2
    assert "rows.jsonl: 2 of 3 " in capsys.readouterr().out
    with bad_input("rows.jsonl: no row is left"):
        load([text(bad)], script=SCRIPTS[script])


@cases("script, n_tokens", [("dpo", 18), ("kto", 18), ("rloo", 7)])  # "The tea was warm.</s>"
def test_long_rows_are_dropped(load, script, n_tokens):
    module = SCRIPTS[script]
    assert len(load([TEXT, TEXT | dict(prompt="The tea!"), TEXT], script=module, max_length=n_tokens)) == 2
    args = module.resolve(arguments(script, max_length=1000))  # the model has 256 positions, a sample 6 of them
    assert args.max_length == (250 if script == "rloo" else 256)


@cases("answer", ["chosen", "rejected"])
def test_one_answer_that_is_too_long_drops_the_pair(load, answer):
    rows = [dict(prompt="q", chosen="a", rejected="b") | {answer: "c" * n} for n in (8, 9)]  # 10 and 11 tokens
    assert len(load(rows, max_length=10)) == 1


@BOTH
@cases("bad, error, words", [
    ("{no JSON", ValueError, "Expecting"), (dict(note=1), KeyError, "prompt"),
    (chat(BRIEF), Exception, "no system"), (chat(said("n", "user")), ValueError, "changes a prompt")])
def test_row_that_raises_is_named(load, script, bad, error, words):
    """Prompts that a template writes otherwise where an answer follows would be trained."""
    with pytest.raises(error, match=words) as raised:
        load([chat(), "", *[chat()] * 999, bad], byte_level(STRICT + COUNTS + PLAIN), SCRIPTS[script])
    assert raised.value.__notes__[0].endswith("rows.jsonl, row 1001")
