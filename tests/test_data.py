"""How rows of a file become token ids: formats, rendering, the boundary of prompt and answer, and counted rows.

What is the same text in every script (tests/test_scripts.py) is tested through dpo.py.
"""
import csv
import io
import json
import re
import sys
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import bad_input, parametrize
from runs import ROOT, TOKENIZER
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
RATED = dict(prompt="The tea", completion=" was warm.", label=True)
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
    assert load([dict(TEXT, chosen='{"content": 1}')])  # JSON is text, too


def test_prompts_may_stand_in_the_answers_too_or_only_there(load, capsys):
    named = dict(prompt="The tea was", chosen=" warm.", rejected=" bad.")  # no space ends the prompt
    assert load([NO_PROMPT])[0] == load([named])[0]
    assert "1 of 1 rows; 1 without a prompt; " in capsys.readouterr().out  # a column of another name
    expected = load(CHATS[:1])[0][:3]
    for prompt, before in product((PROMPT, PROMPT[0]["content"], None), ([], PROMPT)):
        if prompt or before:
            row, = load([dict(prompt=prompt, chosen=before + CHOSEN, rejected=before + REJECTED)])
            assert row[:3] == expected
        if prompt:
            row, = load([dict(prompt=prompt, completion=before + CHOSEN, label=True)], script=kto)
            assert row[:2] == expected[:2]


def test_prompt_with_a_begun_answer_is_continued_by_rloo(load):
    tokenizer = byte_level(chat_template=PLAIN.replace("m.content }}", "m.content }}."))
    row, = load([dict(prompt=said("q", "user") + said("The tea is"))], tokenizer, rloo)
    assert tokenizer.decode(row.prompt) == "<user>q.<assistant>The tea is"


def test_flags_and_columns_reach_the_template(load):
    tokenizer = byte_level(chat_template="{{ tools }}{{ loud }}" + PLAIN)
    row = chat() | dict(tools=[{}], chat_template_kwargs=dict(loud="LOUD"))
    assert decode(load([row], tokenizer)[0], tokenizer) == ["[{}]LOUD<user>q<assistant>", "a", "b"]
    assert decode(load([chat()], tokenizer, chat_template_kwargs=dict(loud=7))[0], tokenizer)[0].startswith("None7<")


def test_messages_lose_null_columns_and_are_joined_from_parts_of_text(load, capsys):
    """As the hub's data have them. An image is no text."""
    tokenizer = byte_level(chat_template=PLAIN)

    def rows(change):
        whole = {name: [change(message) for message in messages] for name, messages in chat("Hot?", "a", "b").items()}
        return load([whole], tokenizer)[0][:3], load([whole], tokenizer, rloo)[0].prompt

    plain = rows(lambda message: message)
    assert rows(lambda message: message | dict(tool_calls=None)) == plain
    assert "ignores" not in capsys.readouterr().out
    for parts in (["Hot?"], ["H", "ot?"]):
        content = [dict(type="text", text=text, image=None) for text in parts]
        assert rows(lambda m, c=content: m | dict(content=c) if m["role"] == "user" else m) == plain
    for image in (dict(type="image"), dict(type="image", text=None, image="a.png")):
        for role in ("user", "assistant"):
            with bad_input("row 1: "):
                rows(lambda m, i=image, r=role: m | dict(content=[i]) if m["role"] == r else m)


@parametrize("row, tokenizer, is_reported", [
    (TEXT, TOKENIZER, True), (TEXT, byte_level(), False), (CHATS[0], TOKENIZER, False)])
def test_strings_beside_a_template_are_reported(load, capsys, row, tokenizer, is_reported):
    load([row], tokenizer)
    assert ("demo/prepare_chat.py" in capsys.readouterr().out) == is_reported


# --- The boundary between prompt and answer

@parametrize("ends", [("s warm.", "s bad."), ("s warm.", ", bad."), (", warm.", "s bad.")])
def test_token_across_the_boundary_moves_to_both_answers(load, ends):
    """Also if it spans the end of the prompt in one of them: a pair has one prompt."""
    row, = load([dict(prompt="The tea wa", chosen=ends[0], rejected=ends[1])])
    assert row.prompt == tuple(TOKENIZER("The tea").input_ids)
    for answer, end in zip((row.chosen, row.rejected), ends):
        assert row.prompt + answer == tuple(TOKENIZER(f"The tea wa{end}{END}", add_special_tokens=False).input_ids)


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" \
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LLAMA3 = "{{ bos_token }}" + CHATML.replace("m.content", "m.content | trim").replace("im_end", "eot_id")
NOTHING = "<think>\n\n</think>\n\n"
QWEN3 = CHATML.replace("{{ m.content", f"{{{{ '{NOTHING}' if m.role == 'assistant' and loop.last }}}}{{{{ m.content")
R1 = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}" \
     "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}" \
     "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
SHAPES = [  # template, what it makes of an answer, and of spaces around it, whether the prompt reads differently
    (LLAMA3, "{}<|eot_id|>\n", "Warm.", False), (QWEN3, NOTHING + "{}<|im_end|>\n", " Warm. ", False),
    (R1, "{}</s>", " Warm. ", True)]


@parametrize("template, trained, spaced, differs", SHAPES)
def test_templates_give_the_prompts_of_rloo_without_a_second_bos(load, capsys, template, trained, spaced, differs):
    """What differs belongs to the answers, as in TRL."""
    tokenizer = byte_level(["<s>"], chat_template=template)
    prompt = BRIEF + said("Warm?", "user") + said("Warm.") + said("And s?", "user")
    pair = dict(prompt=prompt, chosen=said("Warm."), rejected=said("s"))  # both stand in the prompt, s also in </s>
    rows = load([pair, pair | dict(chosen=said(" Warm. "))], tokenizer)
    assert ("; 4 answers whose prompt the template changes" in capsys.readouterr().out) == differs

    sampled, = load([pair], tokenizer, rloo)
    assert {row.whole_prompt for row in rows} == {sampled.prompt}
    text = tokenizer.decode(sampled.prompt)
    assert text.count("Be brief.") == 1 and text.count("<s>") == template.count("bos_token")
    for row, answer in zip(rows, ("Warm.", spaced), strict=True):
        assert decode(row, tokenizer)[1:] == [trained.format(answer), trained.format("s")]
        assert (row.prompt == sampled.prompt) != differs and sampled.prompt[:len(row.prompt)] == row.prompt


def test_columns_of_an_answer_are_trained_or_counted_as_lost(load, capsys):
    thought = [said("a")[0] | dict(reasoning_content="Hm.")]
    rows = [chat(), dict(chat(), chosen=thought), dict(chat(), rejected=thought)]
    load(rows, byte_level(chat_template=PLAIN))
    assert "3 of 3 rows; 2 answers with columns that the template ignores\n" in capsys.readouterr().out
    tokenizer = byte_level(chat_template=PLAIN.replace("m.role }}>", "m.role }}>{{ m.reasoning_content }}"))
    assert decode(load(rows, tokenizer)[1], tokenizer) == ["<user>q<assistant>", "Hm.a", "b"]
    assert "ignores" not in capsys.readouterr().out


@parametrize("beginning, tokenizer", [
    ("", byte_level(back=["</s>"])), ("<s><en>", byte_level(["<s>", "<en>"], ["</s>"])), ("", ByT5Tokenizer())])
def test_text_gets_one_bos_and_one_eos(load, beginning, tokenizer):
    prompt = beginning + "The tea"
    for row in (TEXT, dict(TEXT, prompt=prompt)):
        assert decode(load([row], tokenizer)[0], tokenizer) == [prompt, " was warm.</s>", " was bad.</s>"]
        assert tokenizer.decode(load([row], tokenizer, rloo)[0].prompt) == prompt


def test_rows_are_divided_by_whole_prompts(load, tmp_path):
    """A prompt's last token may merge with one answer alone."""
    rows = [dict(prompt=f"The tea {i} wa", chosen=f"{end} warm {i}.", rejected=f"{end} bad {i}.")
            for i in range(40) for end in ("s", ",")]
    loaded = load(rows, script=kto)
    assert len({row.prompt for row in loaded}) == 80
    train_rows, held_out = kto.load_data(TOKENIZER, kto.Args(data=f"{tmp_path}/rows.jsonl"))
    train_prompts, held_out_prompts = ({row.whole_prompt for row in some} for some in (train_rows, held_out))
    assert len(held_out_prompts) == 4 and len(train_prompts) == 36 and not train_prompts & held_out_prompts
    for row in kto.draw_others(loaded, loaded, kto.Args()):
        assert {source.whole_prompt for source in loaded if source.completion == row.other} != {row.whole_prompt}


# --- Rows that are left out

def test_long_rows_are_dropped_and_counted(load, capsys):
    rows = [dict(TEXT, prompt=" tea" * n) for n in (*range(1, 20), 500)]
    limit = max(len(row.prompt + answer) for row in load(rows[:-1]) for answer in (row.chosen, row.rejected))
    capsys.readouterr()
    assert len(load(rows, max_length=limit)) == 19
    assert re.search(rf"19 of 20 rows.*1 dropped: longer than {limit} tokens", capsys.readouterr().out)
    assert len(load(rows, max_length=limit - 1)) == 18


@parametrize("good, bad, script", [
    (TEXT, dict(prompt=""), dpo), (TEXT, dict(chosen=" \n"), dpo), (TEXT, dict(rejected=None), dpo),
    (NO_PROMPT, dict(chosen="x"), dpo), (RATED, dict(completion=None), kto), (RATED, dict(prompt=None), rloo)])
def test_rows_that_teach_nothing_are_dropped(load, capsys, good, bad, script):
    bad = good | bad
    assert len(load([good, bad, good, bad], script=script)) == 2
    assert re.search("2 of 4 rows;.* 2 dropped: (an )?empty", capsys.readouterr().out)
    with bad_input("rows.jsonl: too few rows"):
        load([good, bad, bad], script=script)


# --- Rows that are refused

@parametrize("bad, words", [
    (dict(TEXT, chosen=5), "int.*5"), (dict(prompt="p", chosen="a"), "KeyError.'rejected'"),
    (dict(TEXT, chosen=[{"from": "gpt", "value": "a"}]), "from.*value"), ('{"prompt": ', "JSONDecodeError"),
    (dict(TEXT, chosen=json.dumps(said("a"))), "messages written as a string"),
    (dict(TEXT, prompt=str(said("q"))), "messages written as a string"), (dict(TEXT, chosen=said("a")), "")],
    ids=count())
def test_unreadable_rows_are_refused_by_number_in_a_short_sentence(load, bad, words):
    with bad_input(rf"rows.jsonl, row 2: .*{words}") as error:
        load([TEXT, "", bad, TEXT, TEXT])
    assert len(str(error.value)) < 1000 and error.value.__cause__


def test_answers_of_another_role_are_refused(load):
    for other in (said("x", "user"), said("x", "system")):
        for answer in (other + said("a"), said("a") + other):
            with bad_input("jsonl, row 2: .*user or system"):
                load([chat(), dict(chat(), chosen=answer)])


def test_labels(load):
    row = dict(prompt="The tea", completion=" was warm.")
    labels = [True, 1, 1.0, "1", "true", "True", False, 0, 0.0, "0", "false", "False"]
    rows = load([dict(row, label=label) for label in labels], script=kto)
    assert [row.is_desirable for row in rows] == [True] * 6 + [False] * 6
    for bad in (row, dict(row, label=2), dict(row, label="good")):
        with bad_input("rows.jsonl, row 1: KeyError"):
            load([bad], script=kto)


def test_rows_of_a_pair_do_not_depend_on_each_other(load):
    spanning = dict(prompt="The tea wa", chosen=", it was warm.", rejected="s bad.")  # a token spans the prompt's end
    rows = load([TEXT, spanning], script=kto)
    single = [dict(prompt=pair["prompt"], completion=pair[name], label=name == "chosen")
              for pair in (TEXT, spanning) for name in ("chosen", "rejected")]
    assert [row[:3] for row in rows] == [row[:3] for row in load(single, script=kto)]
    assert rows[2].prompt != rows[3].prompt


# --- Files

ROWS = [dict(prompt=f"The tea,\u2028{n}", chosen=' was "warm",\r\nvery.', rejected=" was bad.", id="A")
        for n in range(3)]


def content_of(name, rows):
    if name.endswith(".csv"):
        file = io.StringIO(newline="")
        csv.writer(file).writerows([rows[0], *map(dict.values, rows)])
        return file.getvalue().encode()
    if name.endswith(".parquet"):
        arrow, parquet, file = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet"), io.BytesIO()
        parquet.write_table(arrow.Table.from_pylist(rows), file)
        return file.getvalue()
    if name.endswith(".json"):
        return json.dumps(rows).encode()
    # A byte order mark, empty lines, and in the rows a character that str.splitlines takes for the end of a line.
    return b"\xef\xbb\xbf" + "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()


@parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_every_format_gives_the_same_rows(load, tmp_path, monkeypatch, name):
    if name != "a.jsonl":
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
        datasets.disable_progress_bars()
    for i, rows in enumerate((ROWS, *[CHATS] * ("csv" not in name))):
        path = tmp_path / f"{i}{name}"
        path.write_bytes(content_of(name, rows))
        loaded = load(path, score="FILE:FUNCTION")
        assert [row[:3] for row in loaded] == [row[:3] for row in load(rows)]
        assert [row.columns for row in loaded] == rows


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
