"""How rows of a file become token ids: formats, rendering, the boundary of prompt and answer, and counted rows.

The code is the same text in every script (tests/test_scripts.py), so most of it is tested through dpo.py.
"""
import csv
import gzip
import io
import json
import re
import runpy
import sys
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import bad_input, parametrize
from runs import EACH, ROOT, SCRIPTS, TOKENIZER, read
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import dpo
import kto
import rloo

END = "<|end|>"
with open(ROOT / "demo/pairs.jsonl") as lines:
    CHATS = [json.loads(next(lines)) for _ in range(12)]
PROMPT, CHOSEN, REJECTED = (CHATS[0][name] for name in ("prompt", "chosen", "rejected"))
TEXT = dict(prompt="The tea", chosen=" was warm.", rejected=" was bad.")
LONG = "Here is once more the tea of today."
NO_PROMPT = dict(chosen="The tea was warm.", rejected="The tea was bad.")
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" \
        "{% if add_generation_prompt %}<assistant>{% endif %}"


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


@pytest.fixture
def texts(load):
    return lambda row, tokenizer=TOKENIZER, **flags: decode(load([row], tokenizer, **flags)[0], tokenizer)


def decode(row, tokenizer=TOKENIZER):
    return [tokenizer.decode(ids) for ids in (row.prompt, row.chosen, row.rejected)]


def said(text, role="assistant"):
    return [{"role": role, "content": text}]


BRIEF = said("Be brief.", "system")


def chat(prompt="q", chosen="a", rejected="b", system=()):
    return dict(prompt=[*system, *said(prompt, "user")], chosen=said(chosen), rejected=said(rejected))


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

def test_chats_end_as_their_template_ends_them(load):
    for row, source in zip(load(CHATS), CHATS, strict=True):
        prompt, *answers = decode(row)
        assert prompt == TOKENIZER.apply_chat_template(source["prompt"], tokenize=False, add_generation_prompt=True)
        for name, answer in zip(("chosen", "rejected"), answers):
            assert prompt + answer == TOKENIZER.apply_chat_template(source["prompt"] + source[name], tokenize=False)


def test_strings_end_with_one_eos_token(load):
    first, second = load([TEXT, dict(TEXT, chosen=TEXT["chosen"] + END)])
    assert decode(first) == ["The tea", " was warm." + END, " was bad." + END]
    assert first[:3] == second[:3]
    assert load([TEXT], script=rloo)[0].prompt == first.prompt


@EACH
def test_tokenizer_without_eos_is_refused(script, tmp_path):
    """Also with a chat template: no answer would end."""
    byte_level(eos_token=None).save_pretrained(tmp_path)
    with bad_input("no EOS token"):
        SCRIPTS[script].load_tokenizer(str(tmp_path))


def test_prompts_may_stand_in_the_answers_too_or_only_there(load, capsys):
    named = dict(prompt="The tea was", chosen=" warm.", rejected=" bad.")  # no space ends the prompt
    assert load([NO_PROMPT])[0][:3] == load([named])[0][:3]
    assert "1 of 1 rows; 1 without a prompt\n" in capsys.readouterr().out  # a column of another name
    expected = load(CHATS[:1])[0][:3]
    for prompt, before in product((PROMPT, PROMPT[0]["content"], None), ([], PROMPT)):
        if prompt or before:
            row, = load([dict(prompt=prompt, chosen=before + CHOSEN, rejected=before + REJECTED)])
            assert row[:3] == expected
        if prompt:
            row, = load([dict(prompt=prompt, completion=before + CHOSEN, label=True)], script=kto)
            assert row[:2] == expected[:2]


def test_prompt_with_a_begun_answer_is_continued_by_rloo_and_refused_by_others(load):
    row = chat(chosen=" warm.", rejected=" cold.")
    row["prompt"] += said("The tea is")
    tokenizer = byte_level(chat_template=PLAIN)
    prompt, = load([row], tokenizer, rloo)
    assert tokenizer.decode(prompt.prompt) == "<user>q<assistant>The tea is"
    with bad_input("jsonl:1: the prompt ends with a begun answer"):
        load([row], tokenizer)


def test_flags_and_columns_reach_the_template(texts):
    tokenizer = byte_level(chat_template="{{ tools }}{{ loud }}" + PLAIN)
    row = chat() | dict(tools=[{}], chat_template_kwargs=dict(loud="LOUD"))
    assert texts(row, tokenizer) == ["[{}]LOUD<user>q<assistant>", "a", "b"]
    assert texts(chat(), tokenizer, chat_template_kwargs=dict(loud=7))[0].startswith("None7<user>")


@parametrize("row, tokenizer, is_reported", [
    (TEXT, TOKENIZER, True), (TEXT, byte_level(), False), (CHATS[0], TOKENIZER, False)])
def test_strings_beside_a_template_are_reported(load, capsys, row, tokenizer, is_reported):
    load([row], tokenizer)
    assert ("demo/prepare_chat.py" in capsys.readouterr().out) == is_reported


# --- demo/prepare_chat.py

def prepare(folder, rows, source="strings.jsonl"):
    """The rows that it makes of these."""
    with (gzip.open if source.endswith(".gz") else open)(folder / source, "wt") as file:
        file.write("\n\n".join(map(json.dumps, rows)))
    runpy.run_path(str(ROOT / "demo/prepare_chat.py"))["main"](str(folder / source), f"{folder}/messages.jsonl")
    return read(folder / "messages.jsonl")


def test_strings_become_messages_for_each_script(load, tmp_path):
    question = dict(prompt="How was it?", id=7)
    pair, rated = dict(chosen=" Good. ", rejected="Bad."), dict(completion="Good.", label=False)
    messages = chat("How was it?", "Good.", "Bad.")
    for row, script, expected in (
            (pair, dpo, messages), (rated, kto, rated | dict(completion=messages["chosen"])), ({}, rloo, {})):
        rows = prepare(tmp_path, [question | row])
        assert rows == [question | expected | dict(prompt=messages["prompt"])]
        assert load(rows, script=script)


def test_dialogues_of_hh_become_messages(texts, tmp_path, capsys):
    start = "\n\nHuman: Warm?\n\nAssistant: No.\n\nHuman: Now?\n\nAssistant:"
    good = dict(chosen=start + " It is.", rejected=start + " It was.")
    early, empty = dict(good, rejected=good["rejected"].replace("No", "Yes")), dict(good, chosen=start)
    rows = [good, early, empty, dict(prompt=start, chosen=" It is.", rejected=" It was.")]
    first, last = prepare(tmp_path, rows, "hh.jsonl.gz")
    assert "2 of 4 rows" in capsys.readouterr().out and first == last
    prompt = "<user>Warm?<assistant>No.<user>Now?<assistant>"
    assert texts(first, byte_level(chat_template=PLAIN)) == [prompt, "It is.", "It was."]


# --- The boundary between prompt and answer

def test_token_across_the_boundary_moves_to_the_answers(load):
    row, = load([dict(prompt="The tea wa", chosen="s warm.", rejected="s bad.")])
    assert decode(row) == ["The tea", f" was warm.{END}", f" was bad.{END}"]
    assert row.prompt + row.chosen == tuple(TOKENIZER(f"The tea was warm.{END}", add_special_tokens=False).input_ids)


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" \
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LLAMA3 = "{{ bos_token }}" + CHATML.replace("m.content", "m.content | trim").replace("im_end", "eot_id")
NOTHING = "<think>\n\n</think>\n\n"
QWEN3 = CHATML.replace("{{ m.content", f"{{{{ '{NOTHING}' if m.role == 'assistant' and loop.last }}}}{{{{ m.content")
MISTRAL = "{{ bos_token }}{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] " \
          "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}" \
          "{{ m.content }}[/INST]{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
R1 = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}" \
     "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}" \
     "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
SHAPES = [  # template, what it makes of an answer, and of spaces around it, whether the prompt reads differently
    (LLAMA3, "{}<|eot_id|>\n", "Warm.", False), (QWEN3, NOTHING + "{}<|im_end|>\n", " Warm. ", False),
    (MISTRAL, " {}</s>", "Warm.", True), (R1, "{}</s>", " Warm. ", True)]


@parametrize("template, trained, spaced, differs", SHAPES)
def test_templates_give_the_prompts_of_rloo_without_a_second_bos(load, capsys, template, trained, spaced, differs):
    tokenizer = byte_level(["<s>"], chat_template=template)
    prompt = BRIEF + said("Warm?", "user") + said("Warm.") + said("And s?", "user")
    pair = dict(prompt=prompt, chosen=said("Warm."), rejected=said("s"))  # both stand in the prompt, s also in </s>
    rows = load([pair, pair | dict(chosen=said(" Warm. "))], tokenizer)
    printed = capsys.readouterr().out
    assert ("; 4 answers whose prompt the template changes" in printed) == differs
    assert "changes a message of the prompt" not in printed

    sampled, = load([pair], tokenizer, rloo)
    assert {row.prompt for row in rows} == {sampled.prompt}
    text = tokenizer.decode(sampled.prompt)
    assert text.count("Be brief.") == 1 and text.count("<s>") == template.count("bos_token")
    for row, answer in zip(rows, ("Warm.", spaced), strict=True):
        assert decode(row, tokenizer)[1:] == [trained.format(answer), trained.format("s")]


def test_what_a_template_renders_before_the_words_of_an_answer_is_trained(texts):
    template = PLAIN.replace("m.role }}>", "m.role }}>{{ m.reasoning_content }}")
    row = dict(chat(), chosen=[said("a")[0] | dict(reasoning_content="Hm.")])
    assert texts(row, byte_level(chat_template=template)) == ["<user>q<assistant>", "Hm.a", "b"]


@parametrize("answer, words", [
    (dict(content="a", reasoning_content="Hm."), "more than role and content"),
    (dict(content="<think>\nHm.\n</think>\n\nWarm."), "leaves out words")])
def test_answer_that_a_changed_prompt_would_lose_is_refused(load, answer, words):
    with bad_input(f"jsonl:2: .*{words}"):
        load([chat(), dict(chat(), chosen=[said("")[0] | answer])], byte_level(chat_template=R1))


def test_prompts_whose_template_leaves_out_a_message_are_counted(load, capsys):
    template = PLAIN.replace("messages %}", "messages if m.role != 'system' %}")
    load([chat(system=BRIEF)], byte_level(chat_template=template))
    assert "; 1 whose template changes a message of the prompt" in capsys.readouterr().out


@parametrize("beginning, tokenizer", [
    ("", byte_level(back=["</s>"])), ("<s><en>", byte_level(["<s>", "<en>"], ["</s>"])), ("", ByT5Tokenizer())])
def test_text_gets_one_bos_and_one_eos(texts, beginning, tokenizer):
    prompt = beginning + "The tea"
    for row in (TEXT, dict(TEXT, prompt=prompt)):
        assert texts(row, tokenizer) == [prompt, " was warm.</s>", " was bad.</s>"]


@parametrize("script", [dpo, kto])
def test_rows_are_divided_by_whole_prompts(load, script, tmp_path):
    """Not by their tokens: the last one of a prompt may merge with one answer, and not with another."""
    rows = [dict(prompt=f"The tea {i} wa", chosen=f"{end} warm {i}.", rejected=f"{end} bad {i}.")
            for i in range(40) for end in ("s", ",")]
    loaded = load(rows, script=script)
    assert len({row.prompt for row in loaded}) == 80
    train_rows, held_out = script.load_data(TOKENIZER, script.Args(data=f"{tmp_path}/rows.jsonl"))
    train_prompts, held_out_prompts = ({row.whole_prompt for row in some} for some in (train_rows, held_out))
    assert len(held_out_prompts) == 4 and len(train_prompts) == 36 and not train_prompts & held_out_prompts
    assert len(train_rows) + len(held_out) == len(loaded)
    if script is kto:
        for row in kto.draw_others(loaded, loaded, kto.Args()):
            assert {source.whole_prompt for source in loaded if source.completion == row.other} != {row.whole_prompt}


def test_held_out_prompts_that_are_trained_on_are_counted(load, tmp_path, capsys):
    load([TEXT, TEXT])
    path = f"{tmp_path}/rows.jsonl"
    for flags in (dict(eval_data=path), dict(eval_size=0)):
        dpo.load_data(TOKENIZER, dpo.Args(data=path, **flags))
    printed = capsys.readouterr()
    assert "1 held-out prompts are trained on" in printed.out and "2 held out\n" in printed.out
    assert "0 held out: nothing is evaluated" in printed.out and "tokenize: 100%" in printed.err


# --- Rows that are left out

def test_long_rows_are_dropped_and_counted(load, capsys):
    rows = [dict(TEXT, prompt=" tea" * n) for n in (*range(1, 20), 500)]
    limit = max(len(row.prompt + answer) for row in load(rows[:-1]) for answer in (row.chosen, row.rejected))
    capsys.readouterr()
    assert len(load(rows, max_length=limit)) == 19
    assert re.search(rf"19 of 20 rows.*1 dropped: longer than {limit} tokens", capsys.readouterr().out)
    assert len(load(rows, max_length=limit - 1)) == 18


@parametrize("good, bad, words", [
    (TEXT, dict(prompt=""), "empty"), (TEXT, dict(chosen=" \n"), "empty"),
    (NO_PROMPT, dict(chosen="x"), "empty.*common beginning")])
def test_rows_that_teach_nothing_are_dropped(load, capsys, good, bad, words):
    bad = good | bad
    assert len(load([good, bad, good, bad])) == 2
    assert re.search(rf"2 of 4 rows.*2 .*{words}", capsys.readouterr().out)
    with bad_input(rf"rows.jsonl: 1 of 3 rows;.* 2 .*{words}.*: too few rows"):
        load([good, bad, bad])


@parametrize("prompt, chosen, rejected, is_repeated", [
    (LONG, LONG + " Warm.", LONG + " Cold.", True), (LONG, " Warm.", LONG + " Cold.", False),
    ("Hello", "Hello! How are you?", "Hello you", False)], ids=["both answers", "one answer", "a short prompt"])
def test_answers_that_both_repeat_a_long_prompt_are_stripped(texts, capsys, prompt, chosen, rejected, is_repeated):
    prompt_text, *answers = texts(dict(prompt=prompt, chosen=chosen, rejected=rejected))
    expected = [chosen, rejected] if is_repeated else [prompt + chosen, prompt + rejected]
    assert [prompt_text + answer for answer in answers] == [text + END for text in expected]
    assert ("; 1 with answers that repeat the prompt" in capsys.readouterr().out) == is_repeated


# --- Rows that are refused

@parametrize("bad, words", [
    (dict(TEXT, chosen=5), "expected.*5"),
    (dict(TEXT, chosen=[{"from": "gpt", "value": "a"}]), "expected.*found.*from.*value"),
    ('{"prompt": ', ""),
    (dict(TEXT, chosen=json.dumps(said("a")[0])), "string"), (dict(TEXT, prompt=str(said("q"))), "string"),
    (dict(TEXT, prompt=None), "prompt"), (dict(TEXT, chosen=said("a")), ""),
    (chat(), "another kind")], ids=count())
def test_unreadable_rows_are_refused_by_name_in_a_short_sentence(load, bad, words):
    with bad_input(rf"rows.jsonl:3: .*{words}") as error:
        load([TEXT, "", bad, TEXT, TEXT])
    assert len(str(error.value)) < 1000


def test_answers_of_another_role_are_refused(load):
    for other in (said("x", "user"), said("x", "system")):
        for answer in (other + said("a"), said("a") + other):
            with bad_input("jsonl:2: .*user or system"):
                load([chat(), dict(chat(), chosen=answer)])


def test_labels(load):
    row = dict(prompt="The tea", completion=" was warm.")
    labels = [True, 1, 1.0, "1", "true", "True", False, 0, 0.0, "0", "false", "False"]
    rows = load([dict(row, label=label) for label in labels], script=kto)
    assert [row.is_desirable for row in rows] == [True] * 6 + [False] * 6
    for bad in (row, dict(row, label=2), dict(row, label="good")):
        with bad_input("rows.jsonl.*label .true or false"):
            load([bad], script=kto)


def test_rows_of_a_pair_do_not_depend_on_each_other(load):
    spanning = dict(prompt="The tea wa", chosen=", it was warm.", rejected="s bad.")  # a token spans the prompt's end
    rows = load([TEXT, spanning], script=kto)
    single = [dict(prompt=pair["prompt"], completion=pair[name], label=name == "chosen")
              for pair in (TEXT, spanning) for name in ("chosen", "rejected")]
    assert [row[:3] for row in rows] == [row[:3] for row in load(single, script=kto)]
    assert rows[2].prompt != rows[3].prompt


# --- Files

ROWS = [dict(prompt=f"The tea, {n}", chosen=' was "warm",\r\nvery.', rejected=" was bad.", id="0070") for n in range(3)]


def content_of(name, rows):
    if name.endswith(".gz"):
        return gzip.compress(content_of(name.removesuffix(".gz"), rows))
    if name.endswith(".csv"):
        file = io.StringIO(newline="")
        csv.writer(file).writerows([rows[0], *map(dict.values, rows)])
        return file.getvalue().encode()
    if name.endswith(".parquet"):
        arrow, parquet, file = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet"), io.BytesIO()
        parquet.write_table(arrow.Table.from_pylist(rows), file)
        return file.getvalue()
    if name == "a.json":
        return json.dumps(rows).encode()
    return b"\xef\xbb\xbf" + "\r\n\n".join(map(json.dumps, rows)).encode()  # a byte order mark and empty lines


@parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.csv", "a.parquet", "a.jsonl.gz"])
def test_every_format_gives_the_same_rows(load, tmp_path, name):
    for rows in (ROWS, *[CHATS] * ("csv" not in name)):
        (tmp_path / name).write_bytes(content_of(name, rows))
        loaded = load(tmp_path / name, score="FILE:FUNCTION")
        assert [row[:3] for row in loaded] == [row[:3] for row in load(rows)]
        assert [row.columns for row in loaded] == rows


@parametrize("name, content", [
    ("no.jsonl: .*pyarrow.*datasets", None), ("a.jsonl.gz", b"not compressed"), ("a.jsonl", b"\n"),
    ("a.json", b"\xff{"), ("a.json", b'{"data": 1}'), ("a.tsv:1: Expecting value", b"prompt"),
    ("a.csv:1", b"prompt,chosen,rejected\np, good, bad, and more\n"),  # a comma outside of quotes
    ("a.csv:1", b"prompt,chosen,rejected\np, good\n")])
def test_bad_files_are_named(load, tmp_path, monkeypatch, name, content):
    monkeypatch.setitem(sys.modules, "datasets", None)
    path = tmp_path / name.partition(":")[0]
    if content:
        path.write_bytes(content)
    with bad_input(name):
        load(path)


def test_hub_data_is_loaded_by_name_configuration_and_split(load, monkeypatch):
    asked = []
    hub = SimpleNamespace(load_dataset=lambda *names, split: asked.append((*names, split)) or CHATS)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    for source in ("some/data", "some/data:train[5:9]", "some/data:en:test"):
        assert len(load(Path(source))) == len(CHATS)
    assert asked == [("some/data", "train"), ("some/data", "train[5:9]"), ("some/data", "en", "test")]


def test_prompts_of_rloo_have_the_columns_of_all_rows(load):
    """Else a batch without one would end the run."""
    rows = [dict(prompt="The tea"), dict(prompt="The soup", answer=[4])]
    assert [row.columns for row in load(rows, script=rloo)] == [rows[0] | dict(answer=None), rows[1]]


def test_ids_are_shared_objects_and_columns_are_kept_only_for_score(load):
    first, second = load(CHATS[:2])
    numbers = {id(number): number for row in (first, second) for ids in row[:3] for number in ids}
    assert len(numbers) == len(set(numbers.values())) and first.columns == {}
    assert load(CHATS[:1], score="FILE:FUNCTION")[0].columns["chosen"] == CHOSEN
