"""How plain rows become token ids: the text that a model reads, the boundary of prompt and answer, counted rows.

What is the same text in every script (tests/test_scripts.py) is tested through dpo.py. Formats: test_prepare.py.
"""
import json
import re

import pytest
from models import bad_input, build, parametrize
from runs import EACH, PLAIN, SCRIPTS, TINY, TOKENIZER, arguments, byte_level, data, said, save, tiny

import dpo
import kto
import rloo

ENDS = PLAIN.replace("m.content }}", "m.content }}</s>")
NAMES = "{{ tools }}{{ loud }}" + PLAIN.replace("m.content", "m.content }}{{ m.tool_calls")
THINKS = "{{ bos_token }}" + PLAIN.replace("m.content", "m.content.split('</think>')[-1]").replace(
    "<assistant>", "<assistant><think>")  # where no answer follows
COUNTS = "{{ messages | length if messages[0].role == 'system' }}" + PLAIN  # another prompt where an answer follows
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
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
CALLING = chat(rejected=said("b", tool_calls=[dict(function=dict(name="f", arguments={}))]))
TOOLS = dict(tools=[dict(name="f")])
BYTES, BEGINS = byte_level(), byte_level(front=["<s>", "<en>"])


@pytest.fixture
def load(tmp_path):
    """The rows that a script makes from rows: dicts, or lines of text."""
    def load(rows, tokenizer=BYTES, script=dpo, **flags):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return script.load_rows(str(path), tokenizer, script.Args(**dict(model=tiny()) | flags))
    return load


# --- The text that a model reads

@parametrize("tokenizer, row, texts", [
    (BYTES, TEXT, "The tea| was warm.</s>| was bad.</s>"),
    (BEGINS, text("q|a|b"), "<s><en>q|a</s>|b</s>"),
    (BEGINS, text("<s><en>q|a|b"), "<s><en>q|a</s>|b</s>"),
    (BYTES, text("q|a</s>|b<en> \n"), "q|a</s>|b<en> \n"),  # any special token ends an answer, also before white space
    (byte_level(PLAIN), chat(BRIEF), "<system>Be brief.<user>q<assistant>|a|b"),
    (byte_level(PLAIN, front=["<s>"]), chat(), "<user>q<assistant>|a|b"),  # a template alone writes BOS
    (byte_level(NAMES), chat(tools=[], chat_template_kwargs=None), "None7<user>q<assistant>|a|b"),
    (byte_level(NAMES), chat(chat_template_kwargs=dict(loud=8), **TOOLS), "[{'name': 'f'}]8<user>q<assistant>|a|b"),
    (byte_level(THINKS, ["<s>"]), chat(LONG), "<s><user>W?<assistant>Warm.<user>And s?<assistant>|a|b"),
    (byte_level(COUNTS), chat(), "<user>q<assistant>|a|b")])
def test_token_ids_are_those_of_the_text(load, tokenizer, row, texts):
    """These tokenizers have a token for each byte, and special tokens."""
    pair, = load([row], tokenizer, chat_template_kwargs=dict(loud=7))
    expected = [tuple(tokenizer(part, add_special_tokens=False).input_ids) for part in texts.split("|")]
    assert [pair.prompt, pair.chosen, pair.rejected] == expected

    single, = load([row], tokenizer, kto, chat_template_kwargs=dict(loud=7))
    assert (single.prompt, single.completion) == (pair.prompt, pair.chosen)
    sampled, = load([row], tokenizer, rloo, chat_template_kwargs=dict(loud=7))
    assert tokenizer.decode(sampled.prompt).removesuffix("<think>") == texts.split("|")[0]
    assert single.whole_prompt == sampled.prompt


def test_a_begun_answer_is_continued_by_rloo(load):
    row, = load([dict(prompt=Q + said("The tea is"))], byte_level(PLAIN + "."), rloo)
    assert BYTES.decode(row.prompt) == "<user>q<assistant>The tea is"


@parametrize("ends", [("s warm.", "s bad."), ("s warm.", ", bad."), (", warm.", "s bad."), (" warm.", " bad.")])
def test_a_token_across_the_boundary_belongs_to_both_answers(load, ends):
    """Also if it spans the prompt's end in one of them. In kto.py each answer has a prompt of its own."""
    row, = load([text("The tea wa|" + "|".join(ends))], TOKENIZER)
    tea, prompt = (tuple(TOKENIZER(begin).input_ids) for begin in ("The tea", "The tea wa"))
    assert row.prompt == (tea if "s" in ends[0][0] + ends[1][0] else prompt)
    for end, answer in zip(ends, (row.chosen, row.rejected)):
        ids = tuple(TOKENIZER(f"The tea wa{end}<|end|>").input_ids)
        single, = load([text(f"The tea wa|{end}|")], TOKENIZER, kto)
        assert row.prompt + answer == single.prompt + single.completion == ids
        assert single.prompt == (tea if end[0] == "s" else prompt)


@EACH
def test_rows_keep_their_order_over_several_batches_and_share_their_numbers(load, script):
    rows = [text(f"Tea {i}|{' warm' * (i % 3 + 1)}| b") for i in range(1100)]
    loaded = load(rows, TOKENIZER, SCRIPTS[script])
    assert [TOKENIZER.decode(row.prompt) for row in loaded] == [row["prompt"] for row in rows]
    numbers = [number for row in loaded for number in row.prompt]
    assert len(set(map(id, numbers))) == len(set(numbers))
    assert script != "dpo" or TOKENIZER.decode(loaded[-1].chosen) == rows[-1]["chosen"] + "<|end|>"


def test_labels_rewards_and_columns_of_rloo(load):
    labels = [True, 1, 1.0, False, 0, 0.0]
    rows = load([TEXT | dict(label=label) for label in labels], script=kto)
    assert [row.is_desirable for row in rows] == list(map(bool, labels))

    rated = TEXT | dict(chosen_reward=2, rejected_reward=-0.5)
    assert load([rated])[0].rewards == (0.0, 0.0)
    assert load([rated], loss=("sft", "rpo_sq"))[0].rewards == (2.0, -0.5)
    with bad_input("needs numbers in chosen_reward and rejected_reward"):
        load([TEXT | dict(chosen_reward=1)], loss=("rpo_sq",))

    rows = [dict(prompt="The tea"), dict(prompt="The soup", answer=[4])]
    assert [row.columns for row in load(rows, script=rloo)] == [rows[0] | dict(answer=None), rows[1]]


# --- What is counted, dropped or refused

LEFT_OUT = "of which the template leaves out text or tools"


@parametrize("tokenizer, row, note", [
    (TOKENIZER, TEXT, "strings, to which the chat template is not applied"),
    (BYTES, TEXT, "with </s> added"), (BYTES, text("q|a</s>|b"), "with </s> added"), (BYTES, text("q|a</s>|b<en>"), ""),
    (byte_level(PLAIN.replace("m.content", "m.content | trim")), chat(said(" q ", "user"), said("a\n")), ""),
    (byte_level(PLAIN.replace("messages", "messages if m.role != 'system'")), chat(BRIEF), LEFT_OUT),
    (byte_level(PLAIN), chat(**TOOLS), LEFT_OUT), (byte_level(NAMES), chat(**TOOLS), ""),
    (byte_level(PLAIN), CALLING, LEFT_OUT), (byte_level(NAMES), CALLING, ""),
    (byte_level(THINKS), chat(chosen=said("<think>Hm.</think>a")), LEFT_OUT),
    (byte_level(THINKS), chat(LONG), ""),  # an old thought
    (byte_level(COUNTS), chat(BRIEF), "dropped: the template writes another prompt where an answer follows"),
    (byte_level(STRICT), chat(BRIEF), "dropped: the template says no system"),
    (BYTES, text("q|b</s>|b"), "dropped: equal answers"), (BYTES, text("|a|b"), "dropped: equal answers"),
    (BYTES, text("q||b"), "dropped: an answer without text"), (BYTES, text("q|a|</s>"), "dropped: an answer without"),
    (byte_level(ENDS), chat(chosen=said("")), "dropped: an answer without text")])
def test_what_becomes_of_a_row_is_counted_and_told(load, capsys, tokenizer, row, note):
    other = chat() if tokenizer.chat_template else text("q|a</s>|b</s>")
    n_left = 3 if note.startswith("dropped") else 5
    assert len(load([other, other, other, row, row], tokenizer)) == n_left
    printed = capsys.readouterr().out
    assert f" {n_left} of 5 rows" in printed
    assert f"; 2 {note}" in printed if note else not re.search("; [1-9]", printed)
    if n_left == 3:
        with bad_input(f"fewer than half of the rows are left: 1 of 3 rows;.* 2 {note}"):
            load([other, row, row], tokenizer)


def test_rows_of_other_scripts_are_dropped_and_counted(load, capsys):
    for script, row, note in ((kto, text("q||b"), "an answer without text"), (rloo, text("||"), "an empty prompt"),
                              (rloo, chat(BRIEF), "the template says no system")):
        load([TEXT, TEXT, row], byte_level(STRICT), script)
        assert re.search(rf" 2 of 3 rows;.*; 1 dropped: {note}", capsys.readouterr().out)


@parametrize("script, n_tokens", [("dpo", 18), ("kto", 18), ("rloo", 7)])  # "The tea was warm.</s>"
def test_long_rows_are_dropped_and_the_limit_is_named(load, capsys, script, n_tokens):
    rows = [TEXT | dict(prompt=prompt) for prompt in ("The tea", "The tea", "The tea!", "!" * 300)]
    module = SCRIPTS[script]
    assert len(load(rows, script=module, max_length=n_tokens)) == 2
    assert f"; 2 dropped: longer than {n_tokens} tokens, --max_length" in capsys.readouterr().out
    args = module.resolve(arguments(script, max_length=1000))  # the model has 256 positions
    assert len(load(rows, script=module, **vars(args))) == 3
    words = "250 tokens, the model's context without" if script == "rloo" else "256 tokens, the model's context"
    assert f"; 1 dropped: longer than {words}" in capsys.readouterr().out


@parametrize("script, bad, words", [
    (dpo, dict(question="q"), "prompt is missing, .*, rejected is missing; the columns are question: "),
    (rloo, dict(prompt=said("q", "human")), r"prompt is \[{'role': 'human'"),
    (kto, dict(prompt="q"), "prompt is a string, completion is missing"), (rloo, dict(prompt=5), "prompt is 5"),
    (dpo, TEXT | dict(chosen=B), "prompt is a string, chosen is messages, rejected is a string"),
    (dpo, chat([]), r"prompt is \[\]"), (dpo, chat(said([dict(type="text", text="q")])), r"prompt is \[{'role'"),
    (dpo, "hello", "'hello"), (dpo, "5", "'5"),
    (kto, TEXT | dict(label="true"), "'true': expected true or"), (kto, TEXT | dict(label=None), "None: expected")])
def test_other_rows_are_refused_in_a_sentence(load, script, bad, words):
    with bad_input(f"rows.jsonl(, line 3: |, line 3 is not a row of JSON, |: a label is ){words}"):
        load([TEXT, "", bad, TEXT], script=script)
    with bad_input("rows.jsonl is empty"):
        load(["", " "], script=script)


@EACH
def test_tokens_that_the_model_lacks_are_refused(script):
    folder = save(build("llama", TINY | dict(vocab_size=300)), "few_tokens")
    with bad_input("no embedding for some tokens"):
        SCRIPTS[script].load_rows(data(script)[0], TOKENIZER, SCRIPTS[script].Args(model=folder))
