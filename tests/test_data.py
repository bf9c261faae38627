"""How rows of a file become token ids: formats, rendering, the boundary of prompt and answer, and counted rows.

What is the same text in every script (tests/test_scripts.py) is tested through dpo.py.
"""
import json
import re
import sys
from datetime import date
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import bad_input, build, parametrize
from runs import EACH, ROOT, SCRIPTS, TINY, TOKENIZER, data, read, save, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import dpo
import kto
import rloo
from demo import prepare_chat

END = "<|end|>"
CHATS = read(data("dpo")[0])
PROMPT, CHOSEN, REJECTED = (CHATS[0][name] for name in ("prompt", "chosen", "rejected"))
TEXT = dict(prompt="The tea", chosen=" was warm.", rejected=" was bad.")
RATED = dict(prompt="The tea", completion=" was warm.", label=True)
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" \
        "{% if add_generation_prompt %}<assistant>{% endif %}"
CALLS = "{% if tools %}{{ tools | tojson }}{% endif %}{{ loud }}" + PLAIN.replace(
    "{{ m.content", "{% if 'tool_calls' in m %}{{ m.tool_calls | tojson }}{% endif %}{{ m.content")


@pytest.fixture
def load(tmp_path):
    """The rows that a script makes from rows (dicts, or lines of text) or from a file."""
    def load(rows, tokenizer=TOKENIZER, script=dpo, **flags):
        path = rows
        if isinstance(rows, list):
            path = tmp_path / "rows.jsonl"
            path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return script.load_rows(str(path), tokenizer, script.Args(**flags))
    return load


def decode(row, tokenizer=TOKENIZER):
    return [tokenizer.decode(ids) for ids in (row.prompt, row.chosen, row.rejected)]


def said(text, role="assistant"):
    return [{"role": role, "content": text}]


BRIEF = said("Be brief.", "system")


def chat(prompt="q", chosen="a", rejected="b"):
    return dict(prompt=said(prompt, "user"), chosen=said(chosen), rejected=said(rejected))


def byte_level(front=(), back=(), **options):
    """One token per byte, and special tokens before and after every text."""
    special = ["<s>", "</s>", "<en>"]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing(
        single=[*front, "$A", *back], special_tokens=list(zip(special, range(3))))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **dict(bos_token="<s>", eos_token="</s>") | options)


# --- Rendering

def test_prompts_of_chats_may_stand_in_the_answers_too_or_only_there(load):
    question = PROMPT[0]["content"]
    for script, answers in (
            (dpo, dict(chosen=CHOSEN, rejected=REJECTED)), (kto, dict(completion=CHOSEN, label=True)),
            (kto, dict(completion=PROMPT + CHOSEN, label=True))):
        one, two = load([answers | dict(prompt=prompt) for prompt in (PROMPT, question)], script=script)
        assert one == two and TOKENIZER.decode(one.prompt).count(question) == 1

    tokenizer = byte_level(chat_template=PLAIN)
    for before, script in product((BRIEF + PROMPT, PROMPT + said("Yes.") + said("And?", "user")), (dpo, kto)):
        expected = load([dict(prompt=before, chosen=CHOSEN, rejected=REJECTED)], tokenizer, script)
        pair = dict(chosen=before + CHOSEN, rejected=before + REJECTED)
        for prompt in (before, None, question):  # a string may be any question of what both begin with
            assert load([pair | dict(prompt=prompt)], tokenizer, script) == expected
        assert load([pair], tokenizer, script) == expected


def test_prompt_with_a_begun_answer_is_continued_by_rloo(load):
    tokenizer = byte_level(chat_template=PLAIN.replace("m.content }}", "m.content }}."))
    row, = load([dict(prompt=said("q", "user") + said("The tea is"))], tokenizer, rloo)
    assert tokenizer.decode(row.prompt) == "<user>q.<assistant>The tea is"


def test_flags_and_columns_reach_the_template(load):
    tokenizer = byte_level(chat_template="{{ tools }}{{ loud }}" + PLAIN)
    for columns, begin in (
            (dict(tools=[{}], chat_template_kwargs=dict(loud="LOUD")), "[{}]LOUD"),
            (dict(tools=[]), "None7"), (dict(tools="[]"), "None7"), ({}, "None7")):
        row, = load([chat() | columns], tokenizer, chat_template_kwargs=dict(loud=7))
        assert decode(row, tokenizer) == [f"{begin}<user>q<assistant>", "a", "b"]


def test_parts_of_text_are_joined(load):
    parts = [dict(type="text", text=text, image=None) for text in ("Ho", "t?")]
    assert load([chat(parts)]) == load([chat("Hot?")])


def calling(schema, arguments, options):
    answer = dict(role="assistant", content="a", tool_calls=[dict(name="f", arguments=arguments)])
    return chat() | dict(chosen=[answer], tools=[dict(name="f", parameters=schema)], chat_template_kwargs=options)


TOOLS = [calling(dict(port=dict(enum=["Brest", None])), dict(port="Brest"), None),
         calling(dict(width=dict(type="int")), dict(width="1\n\"m\""), dict(loud="LOUD"))]


def test_nulls_are_no_values_at_any_depth(load):
    """But an item of a list is one, such as null in an enum."""
    tokenizer = byte_level(chat_template=CALLS)
    row, (tool,), (question,) = TOOLS[0], TOOLS[0]["tools"], TOOLS[0]["prompt"]
    first, *others = load([
        row,
        row | dict(tools=[tool | dict(strict=None)], chat_template_kwargs=dict(loud=None)),
        row | dict(prompt=[question | dict(tool_calls=None)]),
        row | dict(prompt=[question | dict(tool_calls=[])]),
        row | dict(tools=json.dumps([tool])),
        row | dict(tools=[json.dumps(tool)])], tokenizer, chat_template_kwargs=dict(loud="!"))
    assert others == [first] * 5
    prompt, chosen, _ = decode(first, tokenizer)
    assert '"enum": ["Brest", null]' in prompt and "]!<user>" in prompt and '{"port": "Brest"}' in chosen


@parametrize("script", [dpo, rloo])
def test_strings_beside_a_template_are_reported(load, capsys, script):
    for row, tokenizer, is_reported in (
            (TEXT, TOKENIZER, True), (TEXT, byte_level(), False), (CHATS[0], TOKENIZER, False)):
        load([row], tokenizer, script)
        assert ("; 1 strings, without the chat template" in capsys.readouterr().out) == is_reported


# --- The boundary between prompt and answer

@parametrize("ends", [("s warm.", "s bad."), ("s warm.", ", bad."), (", warm.", "s bad.")])
def test_token_across_the_boundary_moves_to_both_answers_and_is_counted(load, capsys, ends):
    """Also if it spans the prompt's end in one of them."""
    pair = dict(prompt="The tea wa", chosen=ends[0], rejected=ends[1])
    row, = load([pair])
    assert row.prompt == tuple(TOKENIZER("The tea").input_ids)
    for answer, end in zip((row.chosen, row.rejected), ends):
        assert row.prompt + answer == tuple(TOKENIZER(f"The tea wa{end}{END}", add_special_tokens=False).input_ids)
    assert "; 1 whose prompt ends early" in capsys.readouterr().out

    load([pair], script=kto)  # where each answer has a prompt of its own
    assert f"; {sum(end[0] == 's' for end in ends)} whose prompt ends early" in capsys.readouterr().out


R1 = "{{ bos_token }}" + PLAIN.replace("m.content", "m.content.split('</think>')[-1]").replace(
    "<assistant>", "<assistant><think>")


@parametrize("template, differs", [(PLAIN, False), (R1, True)])  # from the prompt alone where an answer follows
def test_templates_give_the_prompts_of_rloo_without_a_second_bos(load, capsys, template, differs):
    tokenizer = byte_level(["<s>"], chat_template=template)
    prompt = BRIEF + said("Warm?", "user") + said("Warm.") + said("And s?", "user")
    pair = dict(prompt=prompt, chosen=said("Warm."), rejected=said("s"))  # both stand in the prompt
    row, = load([pair], tokenizer)
    assert ("; 1 whose prompt ends early" in capsys.readouterr().out) == differs
    assert decode(row, tokenizer)[1:] == ["Warm.", "s"]

    sampled, = load([pair], tokenizer, rloo)
    assert row.whole_prompt == sampled.prompt and sampled.prompt[:len(row.prompt)] == row.prompt
    assert (row.prompt == sampled.prompt) != differs
    text = tokenizer.decode(sampled.prompt)
    assert text.count("Be brief.") == 1 and text.count("<s>") == template.count("bos_token")


@parametrize("template, row, lost", [
    (PLAIN.replace("m.content", "m.content | trim"), chat(" q ", "a\n"), False),
    (CALLS, TOOLS[1], False),
    (PLAIN, TOOLS[1], True),
    (R1, chat(chosen="<think>Hm.</think>a"), True),
    (R1, chat() | dict(prompt=said("<think>Hm.</think>a") + said("q", "user")), False),  # an old thought
    (PLAIN.replace("messages", "messages if m.role != 'human'"), chat() | dict(prompt=said("Q?", "human")), True),
    (PLAIN.replace("messages", "messages if m.role != 'human'"),
     chat() | dict(prompt=said("Hm?", "human") + said("Q?", "user")), True)])
def test_text_that_the_template_drops_is_counted(load, capsys, template, row, lost):
    for script in (dpo, rloo) if row["chosen"] == said("a") else (dpo,):
        load([row, row], byte_level(chat_template=template), script)
        assert ("2 with text that the template drops" in capsys.readouterr().out) == lost


def test_rows_whose_question_would_be_trained_are_dropped(load, capsys):
    """As Mistral's template may, this one writes a system message differently where an answer follows."""
    tokenizer = byte_level(chat_template="{{ messages | length if messages[0].role == 'system' }}" + PLAIN)
    rows = load([chat(), chat(), chat() | dict(prompt=BRIEF + said("q", "user"))], tokenizer)
    assert rows == load([chat(), chat()], tokenizer)
    assert "; 1 dropped: the template writes another prompt" in capsys.readouterr().out


@parametrize("beginning, tokenizer", [
    ("", byte_level(back=["</s>"])), ("<s><en>", byte_level(["<s>", "<en>"], ["</s>"])), ("", ByT5Tokenizer())])
def test_text_gets_one_bos_and_one_eos(load, beginning, tokenizer):
    prompt = beginning + "The tea"
    for row in (TEXT, dict(TEXT, prompt=prompt), dict(TEXT, chosen=" was warm.</s>")):
        assert decode(load([row], tokenizer)[0], tokenizer) == [prompt, " was warm.</s>", " was bad.</s>"]
        assert tokenizer.decode(load([row], tokenizer, rloo)[0].prompt) == prompt


def test_rows_are_divided_by_whole_prompts(load, tmp_path):
    """A prompt's last token may merge with one answer alone."""
    rows = [dict(prompt=f"The tea {i} wa", chosen=f"{end} warm {i}.", rejected=f"{end} bad {i}.")
            for i in range(40) for end in ("s", ",")]
    assert len({row.prompt for row in load(rows, script=kto)}) == 80
    parts = kto.load_data(TOKENIZER, kto.Args(model=tiny(), data=f"{tmp_path}/rows.jsonl"))
    train_prompts, held_out_prompts = ({row.whole_prompt for row in part} for part in parts)
    assert len(held_out_prompts) == 4 and not train_prompts & held_out_prompts
    assert [len(part) for part in parts] == [144, 16]


# --- Rows that are left out

@parametrize("script, answers", [(dpo, ("chosen", "rejected")), (kto, ("completion",)), (rloo, ())])
def test_long_rows_are_dropped_and_counted(load, capsys, script, answers):
    rows = [dict(RATED if script is kto else TEXT, prompt=" tea" * n) for n in (1, 2, 3, 500)]
    last = load(rows[:3], script=script)[-1]
    limit = len(last.prompt) + max((len(getattr(last, name)) for name in answers), default=0)
    assert len(load(rows, script=script, max_length=limit)) == 3
    assert re.search(rf"3 (answers )?of 4 rows.*1 dropped: longer than {limit}", capsys.readouterr().out)
    assert len(load(rows, script=script, max_length=limit - 1)) == 2


@parametrize("script, good, bad, words", [
    (dpo, TEXT, dict(prompt=""), "an empty"),
    (dpo, TEXT, dict(chosen=" \n"), "an empty"),
    (dpo, TEXT, dict(rejected=None), "an empty"),
    (dpo, TEXT, dict(chosen=TEXT["rejected"] + END), "equal"),
    (dpo, CHATS[0], dict(chosen=None), "an empty"),
    (dpo, CHATS[0], dict(rejected=said(" ")), "an empty"),
    (dpo, CHATS[0], dict(prompt=None), "an empty"),
    (kto, CHATS[0], dict(chosen=REJECTED), "equal"),
    (kto, RATED, dict(completion=None), "an empty"),
    (rloo, RATED, dict(prompt=None), "an empty")])
def test_rows_that_teach_nothing_are_dropped_and_counted(load, capsys, script, good, bad, words):
    bad = good | bad
    n_rows = len(load([good, bad, good, bad], script=script))
    assert n_rows == len(load([good, good], script=script))
    assert re.search(f"of 4 rows;.* 2 dropped: {words}", capsys.readouterr().out)
    with bad_input("too few rows"):
        load([good, bad, bad, bad, bad, bad], script=script)


# --- Rows that are refused

@parametrize("script, bad, words", [
    ("dpo", dict(question="q", good="a"), "has no column 'chosen': it has question, good"),
    ("kto", dict(prompt="q", completion="a"), "label is None: expected true, false"),
    ("rloo", dict(question="q"), "has no column 'prompt': it has question"),
    ("dpo", dict(chosen=" a b", rejected=" a c"), "strings need a column 'prompt'"),
    ("kto", dict(completion=said("a"), label=1), "has no column 'prompt'"),
    ("dpo", dict(TEXT, chosen=5), "chosen is 5: expected a string, or a list"),
    ("dpo", dict(TEXT, chosen=[{"from": "gpt"}]), "chosen is .*: expected a string, or a list"),
    ("dpo", chat([dict(type="image", image="a.png")]), "prompt has .*: expected only parts of type text"),
    ("dpo", dict(TEXT, chosen=CHOSEN), "strings and messages are mixed"),
    ("dpo", dict(chat(), chosen=said("x", "user") + said("a")), ".*user or system message"),
    ("dpo", dict(chat(), rejected=said("a") + said("x", "system")), ".*user or system message"),
    ("rloo", '{"prompt": ', "Expecting value")])
def test_unreadable_rows_are_refused_by_number(load, script, bad, words):
    good = RATED if script == "kto" else TEXT
    with bad_input(f"rows.jsonl, row 2: {words}"):
        load([good, "", bad, good, good], script=SCRIPTS[script])


def test_strings_need_an_eos_token(load):
    with bad_input("row 1: strings need an EOS"):
        load([TEXT], byte_level(eos_token=None))


def test_rewards_of_the_data_are_read_for_rpo_only(load):
    rated = TEXT | dict(chosen_reward=2, rejected_reward=-0.5)
    assert load([rated])[0].rewards == (0.0, 0.0)
    assert load([rated], loss=("sft", "rpo_sq"))[0].rewards == (2.0, -0.5)
    with bad_input("needs numbers in"):
        load([rated, TEXT | dict(chosen_reward=1)], loss=("rpo_sq",))


def test_labels(load):
    labels = [True, 1, 1.0, "1", "true", "True", False, 0, 0.0, "0", "false", "False"]
    rows = load([RATED | dict(label=label) for label in labels], script=kto)
    assert [row.is_desirable for row in rows] == [True] * 6 + [False] * 6


def test_rows_of_a_pair_do_not_depend_on_each_other(load):
    spanning = dict(prompt="The tea wa", chosen=", it was warm.", rejected="s bad.")  # a token spans the prompt's end
    rows = load([TEXT, spanning], script=kto)
    single = [dict(prompt=pair["prompt"], completion=pair[name], label=name == "chosen")
              for pair in (TEXT, spanning) for name in ("chosen", "rejected")]
    assert [row[:3] for row in rows] == [row[:3] for row in load(single, script=kto)]
    assert rows[2].prompt != rows[3].prompt


# --- Files

DAY = "2026-11-26"
ROWS = [dict(prompt=f"The tea,\u2028{n}", chosen=' was "warm",\r\nvery.', rejected=" was bad.", id="NA", day=DAY)
        for n in range(3)]


@parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_every_format_gives_the_same_rows(load, tmp_path, monkeypatch, name):
    def write(rows):
        if name == "a.jsonl":  # with a byte order mark, empty lines, and what str.splitlines takes for an end
            lines = [json.dumps(row, ensure_ascii=False) for row in rows]
            path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(lines).encode())
        elif name == "a.json":
            path.write_text(json.dumps(rows, indent=1))
        else:
            table = datasets.Dataset.from_list(rows)
            table.to_csv(path) if name == "a.csv" else table.to_parquet(path)

    if name in ("a.csv", "a.parquet"):
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    tokenizer = byte_level(chat_template=CALLS)
    for i, rows in enumerate([ROWS] if name == "a.csv" else [ROWS, CHATS, TOOLS]):
        path = tmp_path / f"{i}{name}"
        write(rows)
        loaded = load(path, tokenizer, score="FILE:FUNCTION")
        assert [row[:3] for row in loaded] == [row[:3] for row in load(rows, tokenizer)]
        assert rows is TOOLS or [row.columns for row in loaded] == rows


def test_a_date_in_a_message_is_refused():
    """A template would write <datetime>. Some files hold dates, where a JSON file has strings."""
    message = said("q") + [dict(role="tool", content="", day=date.fromisoformat(DAY))]
    with pytest.raises(ValueError, match="is no JSON value: give it as a string"):
        dpo.read_text(dict(prompt=message), "prompt")


def test_hub_data_is_loaded_by_name_configuration_and_split(monkeypatch):
    asked = []
    hub = SimpleNamespace(load_dataset=lambda *names, split: asked.append((*names, split)) or CHATS)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    for source in ("some/data", "some/data:train[5:9]", "some/data:en:test"):
        assert dpo.read_rows(source) is CHATS
    assert asked == [("some/data", "train"), ("some/data", "train[5:9]"), ("some/data", "en", "test")]


def test_prompts_of_rloo_have_the_columns_of_all_rows(load):
    rows = [dict(prompt="The tea"), dict(prompt="The soup", answer=[4])]
    assert [row.columns for row in load(rows, script=rloo)] == [rows[0] | dict(answer=None), rows[1]]


def test_ids_are_shared_objects_and_columns_are_not_kept(load):
    first, second = load(CHATS[:2])
    numbers = {id(number): number for row in (first, second) for ids in row[:3] for number in ids}
    assert len(numbers) == len(set(numbers.values())) and first.columns == {}


def test_rows_keep_their_order_over_several_batches(load):
    rows = [dict(TEXT, prompt=f"Tea {i}", chosen=" warm" * (i % 3 + 1)) for i in range(800)]
    for script in (dpo, rloo):
        loaded = load(rows, script=script)
        assert [TOKENIZER.decode(row.prompt) for row in loaded] == [row["prompt"] for row in rows]
    assert decode(load(rows)[-1])[1] == rows[-1]["chosen"] + END


def test_prepare_chat_divides_dialogues_into_strings(load, tmp_path):
    begin = "\n\nHuman: Hot?\n\nAssistant: Yes.\n\nHuman: Good?\n\nAssistant:"
    pair = dict(chosen=" Only warm.", rejected=" Oh.")
    rows = [pair | dict(prompt=begin), {name: begin + text for name, text in pair.items()}]
    source, strings, messages = (f"{tmp_path}/{name}.jsonl" for name in ("source", "strings", "messages"))
    Path(source).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8-sig")
    prepare_chat.main(source, strings, change=prepare_chat.divide)
    assert [decode(row) for row in load(strings)] == [[begin, pair["chosen"] + END, pair["rejected"] + END]] * 2
    prepare_chat.main(source, messages)
    assert [row["chosen"] for row in read(messages)] == [said("Only warm.")] * 2


# --- Held-out rows, and paths

@EACH
def test_held_out_prompts_that_are_trained_on_are_counted(capsys, script):
    path = data("dpo")[0]
    for eval_data, words in ((path, r"(\d+) held out \(\1 with"), (None, r"held out \(0 with")):
        args = SCRIPTS[script].Args(model=tiny(), data=path, eval_data=eval_data)
        SCRIPTS[script].load_data(TOKENIZER, args)
        assert re.search(words, capsys.readouterr().out)


@EACH
def test_tokens_that_the_model_lacks_are_refused(script):
    folder = save(build("llama", TINY | dict(vocab_size=300)), "few_tokens")
    with bad_input("no embedding for token"):
        SCRIPTS[script].load_data(TOKENIZER, SCRIPTS[script].Args(model=folder, data=data("dpo")[0]))


def test_a_path_to_nothing_is_refused_at_once():
    for name in ("Qwen/Qwen2.5-0.5B", "some/data:train[5:9]", "gpt2"):
        assert dpo.find_path(name) == name
    for name in ("/no/model", "./model", "~/model", "rows.json"):
        with bad_input(f"{name} does not exist"):
            dpo.find_path(name)
    with bad_input("expected a file that ends with .jsonl, .json"):
        dpo.read_rows(f"{ROOT}/pyproject.toml")
