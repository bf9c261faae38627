"""How rows of a file become token ids: formats, rendering, the boundary of prompt and answer, and counted rows.

The code is the same text in every script (tests/test_scripts.py), so most of it is tested through dpo.py.
"""
import csv
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import ROOT, TOKENIZER
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

import dpo
import kto
import rloo
from refcache import BadInput

END = "<|end|>"
with open(ROOT / "demo/pairs.jsonl") as lines:
    CHATS = [json.loads(next(lines)) for _ in range(12)]
TEXT = dict(prompt="The tea", chosen=" was warm.", rejected=" was bad.")
LONG = "Here is once more the tea of today."
EACH = pytest.mark.parametrize("script", [dpo, kto])
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


def texts(row, tokenizer=TOKENIZER):
    return [tokenizer.decode(ids) for ids in (row.prompt, row.chosen, row.rejected)]


def said(text, role="assistant"):
    return [{"role": role, "content": text}]


def chat(prompt="q", chosen="a", rejected="b"):
    return dict(prompt=said(prompt, "user"), chosen=said(chosen), rejected=said(rejected))


def variant(template):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo/model")
    tokenizer.chat_template = template
    return tokenizer


def byte_level(front=(), back=(), **tokens):
    """One token per byte, and special tokens before and after every text."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["<s>", "</s>", "<en>"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<en>"])
    backend.post_processor = processors.TemplateProcessing(
        single=[*front, "$A", *back], special_tokens=[(name, names.index(name)) for name in ("<s>", "</s>", "<en>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **dict(bos_token="<s>", eos_token="</s>") | tokens)


# ---- Rendering -------------------------------------------------------


def test_chats_end_as_their_template_ends_them(load):
    for row, source in zip(load(CHATS), CHATS, strict=True):
        prompt, chosen, rejected = texts(row)
        assert prompt == TOKENIZER.apply_chat_template(source["prompt"], tokenize=False, add_generation_prompt=True)
        assert prompt + chosen == TOKENIZER.apply_chat_template(source["prompt"] + source["chosen"], tokenize=False)
        assert prompt + rejected == TOKENIZER.apply_chat_template(source["prompt"] + source["rejected"], tokenize=False)


def test_strings_end_with_one_eos_token(load):
    first, second = load([TEXT, dict(TEXT, chosen=TEXT["chosen"] + END)])
    assert texts(first) == ["The tea", " was warm." + END, " was bad." + END]
    assert first[:3] == second[:3]
    assert load([TEXT], script=rloo)[0].prompt == first.prompt


def test_pairs_without_a_prompt_share_the_beginning_of_their_answers(load):
    named = load([dict(prompt="How was it? It", chosen=" was fine.", rejected=" stank.")])
    shared = load([dict(chosen="How was it? It was fine.", rejected="How was it? It stank.")])
    assert named[0][:3] == shared[0][:3]
    prompt, chosen, rejected = (CHATS[0][name] for name in ("prompt", "chosen", "rejected"))
    assert load([dict(chosen=prompt + chosen, rejected=prompt + rejected)])[0][:3] == load(CHATS[:1])[0][:3]


def test_whole_conversations_and_a_string_before_messages(load):
    prompt, chosen, rejected = (CHATS[0][name] for name in ("prompt", "chosen", "rejected"))
    expected = load(CHATS[:1])[0][:3]
    for question in (prompt, prompt[0]["content"]):
        for before in ([], prompt):
            row, = load([dict(prompt=question, chosen=before + chosen, rejected=before + rejected)])
            assert row[:3] == expected
            row, = load([dict(prompt=question, completion=before + chosen, label=True)], script=kto)
            assert row[:2] == expected[:2]


def test_a_prompt_that_ends_with_a_beginning_of_the_answer_is_continued(load):
    row = dict(prompt=said("q", "user") + said("The tea is"), chosen=said(" warm."), rejected=said(" cold."))
    tokenizer = variant(PLAIN)
    assert texts(load([row], tokenizer)[0], tokenizer) == ["<user>q<assistant>The tea is", " warm.", " cold."]
    prompt, = load([row], tokenizer, rloo)
    assert tokenizer.decode(prompt.prompt) == "<user>q<assistant>The tea is"


def test_flags_and_columns_reach_the_template(load):
    tokenizer = variant("{{ tools }}{{ loud }}" + PLAIN)
    quiet, = load([chat()], tokenizer)
    row, = load([chat() | dict(tools=[{}], chat_template_kwargs=dict(loud="LOUD"))], tokenizer)
    assert texts(row)[0].startswith("[{}]LOUD<user>") and texts(row)[1:] == texts(quiet)[1:]
    assert texts(load([chat()], tokenizer, chat_template_kwargs='{"loud": 7}')[0])[0].startswith("None7<user>")
    with pytest.raises(BadInput, match="chat_template_kwargs"):
        load([TEXT], chat_template_kwargs='{"loud": 7}')


@pytest.mark.parametrize("tokenizer", [byte_level(), ByT5Tokenizer()])
def test_tokenizers_in_rust_and_in_python(load, tokenizer):
    if tokenizer.is_fast:  # its file may ask for these
        tokenizer.backend_tokenizer.enable_truncation(4)
        tokenizer.backend_tokenizer.enable_padding()
    row, = load([TEXT], tokenizer)
    assert texts(row, tokenizer) == ["The tea", " was warm.</s>", " was bad.</s>"]


def test_as_chat_makes_messages_of_strings(load):
    strings = dict(prompt="How was it?", chosen="Good.", rejected="Bad.")
    messages = chat("How was it?", "Good.", "Bad.")
    for script in (dpo, kto, rloo):
        ours, theirs = load([strings], script=script, as_chat=True), load([messages], script=script)
        assert ours and [row.prompt for row in ours] == [row.prompt for row in theirs]
    assert load([strings], as_chat=True)[0][:3] == load([messages])[0][:3]


def test_as_chat_does_not_make_a_turn_of_what_two_answers_have_in_common(load):
    with pytest.raises(BadInput, match="rows.jsonl:1: --as_chat.*prompt"):
        load([dict(chosen="The tea was warm.", rejected="The tea was bad.")], as_chat=True)


def test_strings_that_meet_a_chat_template_are_reported(load, capsys):
    load([TEXT])
    assert "--as_chat" in capsys.readouterr().out
    load([TEXT], byte_level())  # it has no template
    load(CHATS)
    load([dict(chosen="The tea was warm.", rejected="The tea was bad.")])
    load([TEXT], as_chat=True)
    assert "--as_chat" not in capsys.readouterr().out


# ---- The boundary between prompt and answer --------------------------


def test_a_token_that_spans_the_end_of_the_prompt_moves_to_the_answers(load):
    """No token is lost."""
    row, = load([dict(prompt="The tea wa", chosen="s warm.", rejected="s bad.")])
    assert row.prompt + row.chosen == tuple(TOKENIZER("The tea was warm." + END, add_special_tokens=False).input_ids)
    assert row.prompt + row.rejected == tuple(TOKENIZER("The tea was bad." + END, add_special_tokens=False).input_ids)
    assert texts(row)[0] == "The tea"


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" \
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LLAMA3 = "{{ bos_token }}" + CHATML.replace("m.content", "m.content | trim")
GEMMA = LLAMA3.replace("m.role", "'model' if m.role == 'assistant' else m.role").replace(">assistant", ">model")
QWEN3 = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n" \
        "{{ m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content }}\n</think>\n\n" \
        "{% endif %}{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n{% endfor %}" \
        "{% if add_generation_prompt %}<|im_start|>assistant\n{{ nothing }}{% endif %}"
MISTRAL = "{{ bos_token }}{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] " \
          "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}" \
          "{{ m.content }}[/INST]{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
R1 = "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<assistant>" \
     "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}" \
     "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
NOTHING = "<think>\n\n</think>\n\n"
SYSTEM = said("Be brief.", "system")
SHAPES = [  # template, what it makes of an answer, of an answer between spaces, whether it renders the prompt differently
    (CHATML, "{}<|im_end|>\n", " {} <|im_end|>\n", False), (LLAMA3, "{}<|im_end|>\n", "{}<|im_end|>\n", False),
    (GEMMA, "{}<|im_end|>\n", "{}<|im_end|>\n", False),
    (QWEN3, NOTHING + "{}<|im_end|>\n", NOTHING + " {} <|im_end|>\n", False),
    (QWEN3.replace("nothing", repr(NOTHING)), "{}<|im_end|>\n", " {} <|im_end|>\n", False),
    (MISTRAL, " {}</s>", " {}</s>", True), (R1, "{}</s>", " {} </s>", True),
    (R1.replace("<think>\n", "Well, ").replace("{{ eos_token }}", ""), "{}", "{} ", True)]


@pytest.mark.parametrize("template, trained, spaced, differs", SHAPES)
@EACH
def test_prompts_are_those_of_rloo_and_answers_are_whole(load, capsys, script, template, trained, spaced, differs):
    tokenizer = byte_level()
    tokenizer.chat_template = template
    prompt = SYSTEM + said("Warm?", "user") + said("Warm.") + said("And s?", "user")
    pair = dict(prompt=prompt, chosen=said("Warm."), rejected=said("s"))  # both stand in the prompt, s also in </s>
    rows = load([pair, pair | dict(chosen=said(" Warm. "))], tokenizer, script)
    assert ("; 2 whose prompt reads differently before an answer" in capsys.readouterr().out) == differs
    sampled, = load([pair], tokenizer, rloo)
    assert {row.prompt for row in rows} == {sampled.prompt}
    assert tokenizer.decode(sampled.prompt).count("Be brief.") == 1
    answers = [tokenizer.decode(y) for row in rows for y in row[1:3 if script is dpo else 2]]
    assert answers == [trained.format("Warm."), trained.format("s"), spaced.format("Warm."), trained.format("s")]


@pytest.mark.parametrize("system, beginning", [([], ""), (SYSTEM, "Be brief.\n\n")])
def test_an_answer_of_several_turns_is_rendered_whole(load, system, beginning):
    tokenizer = byte_level()
    tokenizer.chat_template = MISTRAL
    row = dict(prompt=system + said("q", "user"), chosen=said("Yes.") + said("?", "user") + said("Yes."),
               rejected=said("No."))
    expected = [f"<s>[INST] {beginning}q[/INST]", " Yes.</s>[INST] ?[/INST] Yes.</s>", " No.</s>"]
    assert texts(load([row], tokenizer)[0], tokenizer) == expected


def test_an_answer_of_which_the_template_leaves_out_the_reasoning_is_refused(load):
    bad = chat(chosen="<think>\nHm.\n</think>\n\nWarm.")
    assert len(load([bad], variant(QWEN3))) == 1
    with pytest.raises(BadInput, match="jsonl:2: .*leaves out words"):
        load([chat(), bad], variant(R1))


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no such role') }}", "{{ messages[0].content }}"])
def test_a_template_that_fails_or_leaves_out_the_answers_is_refused(load, template):
    with pytest.raises(BadInput, match=r"rows.jsonl:(1| too few)\b"):
        load(CHATS, variant(template))


@pytest.mark.parametrize("front", [(), ("<s>",), ("<s>", "<en>")])
@pytest.mark.parametrize("back", [(), ("</s>",)])
def test_a_text_gets_the_tokenizers_beginning_once_and_one_eos(load, front, back):
    tokenizer = byte_level(front, back)
    prompt = "".join(front) + "The tea"
    for source in (TEXT, dict(TEXT, prompt=prompt)):
        assert texts(load([source], tokenizer)[0], tokenizer) == [prompt, " was warm.</s>", " was bad.</s>"]


@pytest.mark.parametrize("beginning", ["", "<s>"])
def test_a_chat_gets_no_bos_beyond_its_template(load, beginning):
    tokenizer = byte_level(("<s>",))
    tokenizer.chat_template = beginning + PLAIN
    assert texts(load([chat()], tokenizer)[0], tokenizer) == [beginning + "<user>q<assistant>", "a", "b"]


def test_each_of_many_rows_is_tokenized_as_it_would_be_alone(load):
    sources = [dict(prompt=f"The tea {n}", chosen=f" was {n}.", rejected=f" is {n}.") for n in range(4000)]
    for row, source in zip(load(sources), sources, strict=True):
        assert texts(row) == [source["prompt"], source["chosen"] + END, source["rejected"] + END]


# ---- Rows that are left out ------------------------------------------


def test_rows_that_are_too_long_are_dropped_and_counted(load, capsys):
    limit = max(len(row.prompt) + max(len(row.chosen), len(row.rejected)) for row in load(CHATS))
    assert len(load([*CHATS, chat(rejected="and so on " * 50)], max_length=limit)) == 12
    assert re.search(rf"12 of 13 rows.*1 .*{limit}", capsys.readouterr().out)
    assert len(load(CHATS, max_length=limit - 1)) < 12


def test_if_most_rows_are_too_long_the_length_that_keeps_95_percent_is_named(load):
    rows = [dict(TEXT, prompt=" tea" * n) for n in (*range(1, 20), 500)]
    with pytest.raises(BadInput, match=r"--max_length \d+") as error:
        load(rows, max_length=8)
    limit = int(re.search(r"--max_length (\d+)", str(error.value))[1])
    assert len(load(rows, max_length=limit)) == 19
    assert limit < 100
    with pytest.raises(BadInput, match="too few rows") as error:
        load([*rows, *[dict(TEXT, chosen="")] * 30], max_length=limit)
    assert "--max_length" not in str(error.value), "most are empty"


@pytest.mark.parametrize("bad, words", [
    (dict(TEXT, prompt=""), "empty"), (dict(TEXT, chosen=""), "empty"), (dict(TEXT, chosen=" \n"), "empty"),
    (dict(TEXT, chosen=END), "empty"), (dict(chosen="x", rejected="y"), "empty.*common beginning"),
    (dict(TEXT, chosen=" was bad."), "equal"), (dict(TEXT, chosen=" same" + END, rejected=" same"), "equal"),
    (chat(chosen=" "), "empty"), (chat(chosen="b"), "equal")])
@EACH
def test_rows_that_teach_nothing_are_dropped_and_counted(load, capsys, script, bad, words):
    good = TEXT if "prompt" in bad else dict(chosen="The tea was warm.", rejected="The tea was bad.")
    good = chat() if isinstance(bad["chosen"], list) else good
    per_row = len(load([good], script=script))
    assert len(load([good, bad, good, bad], script=script)) == 2 * per_row
    assert re.search(rf"2 of 4 rows.*2 .*{words}", capsys.readouterr().out)
    with pytest.raises(BadInput, match="rows.jsonl"):
        load([good, bad, bad], script=script)  # more than half


def test_answers_that_repeat_a_long_string_prompt_are_stripped_of_it_and_counted(load, capsys):
    expected = load([dict(prompt=LONG, chosen=" Warm.", rejected=" Cold.")])[0][:3]
    assert not re.search("[1-9] .*prompt", capsys.readouterr().out.partition("rows")[2].splitlines()[0])
    assert load([dict(prompt=LONG, chosen=LONG + " Warm.", rejected=LONG + " Cold.")])[0][:3] == expected
    assert re.search("1 of 1 rows.*1 .*prompt", capsys.readouterr().out)


@pytest.mark.parametrize("row", [
    dict(prompt="Hello", chosen="Hello! How are you?", rejected="Hello you"),
    dict(prompt=LONG, chosen="Warm.", rejected=LONG + " Cold.")])
def test_answers_that_begin_with_a_short_prompt_and_a_single_one_stay_whole(load, row):
    loaded, = load([row])
    assert "".join(texts(loaded)[:2]) == row["prompt"] + row["chosen"] + END
    assert "".join(texts(loaded)[::2]) == row["prompt"] + row["rejected"] + END


# ---- Rows that are refused -------------------------------------------


@pytest.mark.parametrize("bad, words", [
    ({"prompt": "x", "chosen": "y"}, "expected.*found prompt, chosen in"), (dict(TEXT, chosen=5), "expected.*5"),
    (dict(TEXT, chosen=None), "expected.*null"), (dict(TEXT, chosen=dict(said("a")[0])), "expected"),
    (dict(TEXT, chosen=[{"from": "gpt", "value": "a"}]), "expected.*found.*from.*value"), (dict(chat(), prompt=[]), "expected"),
    ('["a list"]', "column"), ("7", "column"), ('{"prompt": ', ""), (dict(TEXT, prompt=None), "prompt"),
    (dict(TEXT, chosen=json.dumps(said("a"))), "string"), (dict(TEXT, chosen=str(said("a")[0])), "string"),
    (dict(TEXT, prompt=str(said("q", "user"))), "string"), (dict(TEXT, chosen=said("a")), ""), (chat(), "messages")])
def test_rows_that_cannot_be_read_are_refused_with_file_and_row(load, bad, words):
    with pytest.raises(BadInput, match=rf"rows.jsonl:3: .*{words}"):
        load([TEXT, "", bad, TEXT, TEXT])


@pytest.mark.parametrize("script, columns", [
    (dpo, "prompt, chosen, rejected"), (kto, "prompt, completion, label"), (rloo, "prompt")])
def test_rows_with_other_columns_are_told_which_are_expected(load, script, columns):
    for row in (dict(question="q", answer="a"), dict(completion="a", label=1)):
        with pytest.raises(BadInput, match=f"jsonl:1: expected {columns}.*, as [^;]*; found {', '.join(row)} in"):
            load([row], script=script)


@pytest.mark.parametrize("role", ["user", "system"])
def test_answers_that_begin_or_end_with_another_role_are_refused(load, role):
    for answer in (said("x", role) + said("a"), said("a") + said("x", role)):
        with pytest.raises(BadInput, match=r"jsonl:2: .*(user|system)"):
            load([chat(), dict(chat(), chosen=answer)])


def test_answers_that_are_json_are_not_messages(load):
    answer = json.dumps({"content": "tea", "temperature": [{"warm": True}]})
    for chosen in (answer, f"[{answer}]", '{"role": "cook"}'):
        tokenizer = byte_level()
        assert texts(load([dict(TEXT, chosen=chosen)], tokenizer)[0], tokenizer)[1] == chosen + "</s>"


def test_strings_without_an_eos_token_are_refused(load):
    with pytest.raises(BadInput, match="EOS"):
        load([TEXT], byte_level(eos_token=None))


def test_labels_are_what_json_python_and_spreadsheets_write(load):
    labels = [True, 1, 1.0, "1", "true", "True", False, 0, 0.0, "0", "false", "False"]
    rows = load([dict(prompt="The tea", completion=" was warm.", label=label) for label in labels], script=kto)
    assert [row.is_desirable for row in rows] == [True] * 6 + [False] * 6


@pytest.mark.parametrize("label", [dict(), dict(label=0.5), dict(label="good"), dict(label=None)])
def test_other_labels_are_refused(load, label):
    with pytest.raises(BadInput, match="rows.jsonl.*label"):
        load([dict(prompt="The tea", completion=" was warm.", **label)], script=kto)


def test_pairs_give_kto_one_row_of_each_kind_which_do_not_depend_on_each_other(load):
    spanning = dict(prompt="The tea wa", chosen=", it was warm.", rejected="s bad.")  # a token spans the prompt's end
    rows = load([TEXT, spanning], script=kto)
    assert [row.is_desirable for row in rows] == [True, False] * 2
    single = [dict(prompt=pair["prompt"], completion=pair[name], label=name == "chosen")
              for pair in (TEXT, spanning) for name in ("chosen", "rejected")]
    assert [row[:3] for row in rows] == [row[:3] for row in load(single, script=kto)]
    assert rows[2].prompt != rows[3].prompt and load([spanning])[0].prompt == rows[3].prompt


def test_rewards_of_the_data_are_read_for_the_rpo_losses_and_missing_ones_refused(load):
    scores = dict(chosen_reward=0.75, rejected_reward="-2")
    assert load([TEXT | scores], loss=("rpo_sq",))[0][3:5] == (0.75, -2.0)
    for name in scores:
        with pytest.raises(BadInput, match="need chosen_reward and rejected_reward"):
            load([TEXT | {name: 1.0}], loss=("sigmoid", "rpo_fwd_kl"))


# ---- Files -----------------------------------------------------------

ROWS = [dict(prompt=f"The tea, {n}", chosen=' was "warm",\r\nvery.', rejected=" was bad.", id="0070") for n in range(3)]


def write_as(path, rows):
    if path.suffix == ".jsonl":  # with a byte order mark, CRLF and empty lines
        path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(map(json.dumps, rows)).encode())
    elif path.suffix == ".json":
        lines = path.stem == "lines"  # as Dataset.to_json writes it
        path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        arrow = pytest.importorskip("pyarrow")
        arrow.parquet = pytest.importorskip("pyarrow.parquet")
        arrow.parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "lines.json", "a.csv", "a.parquet"])
def test_every_format_gives_the_same_rows(load, tmp_path, name):
    loaded = load(write_as(tmp_path / name, ROWS))
    assert [row[:3] for row in loaded] == [row[:3] for row in load(ROWS)]
    assert [row.columns for row in loaded] == ROWS
    if name != "a.csv":
        assert [row[:3] for row in load(write_as(tmp_path / name, CHATS))] == [row[:3] for row in load(CHATS)]


@pytest.mark.parametrize("line", ["p, good, bad, and more", "p, good"])
def test_lines_of_a_csv_file_with_more_or_fewer_cells_than_the_header_are_refused(load, tmp_path, line):
    """A comma outside of quotes would shift the columns: part of an answer would become the other answer."""
    (tmp_path / "rows.csv").write_text(f"prompt,chosen,rejected\np, good, bad\n{line}\n")
    with pytest.raises(BadInput, match="rows.csv:2"):
        load(tmp_path / "rows.csv")


@pytest.mark.parametrize("name", ["no.jsonl", "no.parquet", "a.jsonl", "a.json", "b.json", "a.csv", "a.parquet",
                                  "empty.jsonl", "empty.json", "empty.csv", "header.csv", "no/such/dataset"])
def test_files_that_cannot_be_read_or_hold_no_rows_are_named(load, tmp_path, name):
    contents = {"a": b"\xff{", "b": b'{"data": 1}', "empty": b"\n", "header": b"prompt,chosen,rejected\n"}
    path = tmp_path / name
    if path.stem in contents:
        path.write_bytes(b"[]" if name == "empty.json" else contents[path.stem])
    with pytest.raises(BadInput, match=name):
        load(name if "/" in name else path)


def test_other_files_and_folders_are_told_which_endings_are_read(load, tmp_path):
    (tmp_path / "a.tsv").touch()
    for path in (tmp_path, tmp_path / "a.tsv"):
        with pytest.raises(BadInput, match=r"\.jsonl, \.json, \.csv or \.parquet"):
            load(path)


def test_hub_datasets_are_loaded_by_name_and_split(load, monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return CHATS
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert len(load(Path("some/dataset"))) == len(load(Path("some/dataset:test"))) == len(CHATS)
    assert asked == [("some/dataset", "train"), ("some/dataset", "test")]
