"""tools/prepare.py: how every format becomes plain rows, and what --model tells of them."""
import json
import random
import re
import runpy
import shutil
import sys
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from tools import prepare

parametrize = pytest.mark.parametrize
ROOT = Path(prepare.__file__).parent.parent
PAIR = dict(prompt="The tea", chosen=" was warm.", rejected=" was bad.")
RATED = dict(prompt="The tea", completion=" was warm.", label=True)
ASK = "\n\nHuman: Hot?\n\nAssistant: Yes.\n\nHuman: Good?\n\nAssistant:"

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" \
        "{% if add_generation_prompt %}<assistant>{% endif %}"
CALLS = "{{ tools | tojson if tools }}{{ loud }}" + PLAIN.replace(
    "{{ m.content", "{{ m.tool_calls | tojson if m.tool_calls }}{{ m.content")
R1 = "{{ bos_token }}" + PLAIN.replace("m.content", "m.content.split('</think>')[-1]").replace(
    "{% if add_generation_prompt %}<assistant>", "{% if add_generation_prompt %}<assistant><think>")
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" \
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # SmolLM2's
LLAMA3 = "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n" \
         "{{ m.content | trim }}<|eot_id|>{% endfor %}" \
         "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
GEMMA3 = "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" \
         "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}" \
         "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n" \
         "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
SPECIAL = ["<s>", "</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>"]


def said(text, role="assistant", **keys):
    return [dict(role=role, content=text, **keys)]


def chat(prompt="q", chosen="a", rejected="b"):
    return dict(prompt=said(prompt, "user"), chosen=said(chosen), rejected=said(rejected))


CALL = [dict(name="f", arguments=dict(port="Brest"))]
TOOLS = [dict(name="f", parameters=dict(port=dict(enum=["Brest", None])))]
CALLING = said("q", "user") + said("", tool_calls=CALL) + said("rain", "tool")


@pytest.fixture
def run(tmp_path, capsys):
    """Prepares rows (dicts, or lines of text) or a file. Returns the rows of train.jsonl and what was printed."""
    def run(data, /, **flags):
        path = data
        if isinstance(data, list):
            path = tmp_path / "rows.jsonl"
            lines = [row if isinstance(row, str) else json.dumps(row) for row in data]
            path.write_bytes("\n".join(lines).encode())
        capsys.readouterr()
        prepare.main(prepare.Args(**dict(data=str(path), out=f"{tmp_path}/out", eval_size=0) | flags))
        return read(tmp_path / "out/train.jsonl"), capsys.readouterr().out
    return run


@pytest.fixture
def look(run, tmp_path):
    """What --model tells of rows. The tokenizer has one token per byte, and special ones."""
    def look(rows, template, stops=("</s>",), adds=(), config=GenerationConfig, **flags):
        tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(SPECIAL)
        backend.post_processor = processors.TemplateProcessing(
            single=[*adds, "$A"], special_tokens=[("<s>", 0), ("</s>", 1)])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template)
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        tokenizer.save_pretrained(tmp_path / "model")
        ids = [tokens.index(stop) for stop in stops]
        config(eos_token_id=ids).save_pretrained(tmp_path / "model")
        return run(rows, model=f"{tmp_path}/model", **flags)[1]
    return look


def read(path):
    return [json.loads(line) for line in Path(path).read_text().split("\n") if line]


def refused(words):
    return pytest.raises(prepare.BadInput, match=words)


# --- Formats

def test_plain_rows_stay_as_they_are(run):
    rows = [PAIR, chat(), dict(PAIR, chosen_reward=0.0, rejected_reward=-1.5), chat() | dict(tools=TOOLS, source="x")]
    assert run(rows)[0] == rows
    for rows in ([RATED, RATED | dict(label=False)], [dict(prompt="q", answer=4), dict(prompt=said("q", "user"))]):
        assert run(rows)[0] == rows


def test_prompts_of_chats_may_stand_in_the_answers_too_or_only_there(run):
    question = said("And?", "user")
    for before in (question, said("Be brief.", "system") + question, said("Yes?", "user") + said("Yes.") + question):
        pair = dict(chosen=before + said("a"), rejected=before + said("b"))
        expected = dict(prompt=before, chosen=said("a"), rejected=said("b"))
        for prompt in (before, None, "And?"):  # a string may be any question of what both begin with
            assert run([pair | dict(prompt=prompt)])[0] == [expected]
        assert run([pair])[0] == [expected]
    rated = dict(prompt=question, completion=said("a"), label=True)
    assert run([rated, rated | dict(prompt="And?"), rated | dict(completion=question + said("a"))])[0] == [rated] * 3


def test_dialogues_are_divided_at_their_last_answer(run):
    pair = dict(chosen=" Only warm.", rejected=" Oh.")
    whole = {name: ASK + text for name, text in pair.items()}
    assert run([pair | dict(prompt=ASK), whole])[0] == [pair | dict(prompt=ASK)] * 2
    turns = said("Hot?", "user") + said("Yes.") + said("Good?", "user")
    expected = dict(prompt=turns, chosen=said("Only warm."), rejected=said("Oh."))
    assert run([pair | dict(prompt=ASK), whole], chat=True)[0] == [expected] * 2


def test_chat_makes_messages_of_strings(run):
    assert run([PAIR], chat=True)[0] == [chat("The tea", "was warm.", "was bad.")]
    assert run([chat()], chat=True)[0] == [chat()]
    quoted = "Go on:\n\nHuman: Hot?"  # is no dialogue
    assert run([dict(prompt=quoted)], chat=True)[0] == [dict(prompt=said(quoted, "user"))]
    assert run([dict(prompt="q")], chat=True)[0] == [dict(prompt=said("q", "user"))]


def test_pairs_become_two_rated_answers(run):
    rows, _ = run([PAIR | dict(id=7)], rows="rated")
    assert rows == [RATED | dict(id=7), RATED | dict(completion=PAIR["rejected"], label=False, id=7)]
    assert run([RATED], rows="rated")[0] == [RATED]


def test_any_data_become_prompts(run):
    rows = [PAIR, dict(prompt="q", completion="", label="none", answer=4), chat(chosen="b")]
    expected = [dict(prompt="The tea"), dict(prompt="q", label="none", answer=4), dict(prompt=chat()["prompt"])]
    assert run(rows, rows="prompts")[0] == expected


def test_parts_of_text_are_joined(run):
    assert run([chat([dict(type="text", text=text, image=None) for text in ("Ho", "t?")])])[0] == [chat("Hot?")]


def test_nulls_are_no_values_at_any_depth(run):
    """But an item of a list is one, such as null in an enum."""
    row = dict(prompt=CALLING, chosen=said("a"), rejected=said("b"), tools=TOOLS, chat_template_kwargs=dict(loud=1))
    call = CALLING[1] | dict(name=None, tool_calls=[CALL[0] | dict(id=None)])
    assert run([
        row | dict(tools=[TOOLS[0] | dict(strict=None)], chat_template_kwargs=dict(loud=1, low=None)),
        row | dict(prompt=[CALLING[0] | dict(tool_calls=None), call, CALLING[2]]),
        row | dict(prompt=[CALLING[0] | dict(tool_calls=[]), *CALLING[1:]]),
        row | dict(tools=json.dumps(TOOLS), chat_template_kwargs='{"loud": 1}'),
        row | dict(tools=[json.dumps(tool) for tool in TOOLS])])[0] == [row] * 5


def test_labels(run):
    labels = [True, 1, 1.0, "1", "true", "True", False, 0, 0.0, "0", "false", "False"]
    rows, _ = run([RATED | dict(label=label) for label in labels])
    assert [row["label"] for row in rows] == [True] * 6 + [False] * 6


def test_dates_become_text():
    assert prepare.to_json([dict(day=date(2026, 11, 26))], "prompt") == [dict(day="2026-11-26")]


DAY = "2026-11-26"
ROWS = [dict(prompt=f"Tea,\u2028{n}", chosen=' was "warm",\r\nvery.', rejected="None", id="NA", zip="00501", day=DAY)
        for n in range(3)]


@parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_every_format_gives_the_same_rows(run, tmp_path, monkeypatch, name):
    datasets = pytest.importorskip("datasets") if name in ("a.csv", "a.parquet") else None
    if datasets:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    chats = [chat(), dict(prompt=CALLING, chosen=said("a"), rejected=said("b"))]
    for i, rows in enumerate([ROWS] if name == "a.csv" else [ROWS, chats]):
        path = tmp_path / f"{i}{name}"
        if name == "a.jsonl":  # with a byte order mark, empty lines, and what str.splitlines takes for an end
            lines = [json.dumps(row, ensure_ascii=False) for row in rows]
            path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(lines).encode())
        elif name == "a.json":
            path.write_text(json.dumps(rows, indent=1))
        else:
            table = datasets.Dataset.from_list(rows)
            table.to_csv(path) if name == "a.csv" else table.to_parquet(path)
        assert run(path)[0] == rows


def test_messages_tools_and_rewards_are_read_from_cells_of_csv(run, tmp_path):
    cells = [json.dumps(chat()[name]) for name in chat()] + [json.dumps(TOOLS), "1.50", ""]
    quoted = ",".join('"' + cell.replace('"', '""') + '"' for cell in cells)
    (tmp_path / "a.csv").write_text(f"prompt,chosen,rejected,tools,chosen_reward,chat_template_kwargs\n{quoted}\n")
    expected = chat() | dict(tools=TOOLS, chosen_reward=1.5, chat_template_kwargs=None)
    assert run(tmp_path / "a.csv")[0] == [expected]
    (tmp_path / "long.csv").write_text("prompt\n" + "q" * 200_000 + "\n")
    assert run(tmp_path / "long.csv")[0] == [dict(prompt="q" * 200_000)]
    assert run([dict(chat(), prompt=json.dumps(chat()["prompt"]))])[0] == [chat()]
    assert run([dict(PAIR, chosen='[{"port": "Brest"}]')])[0] == [dict(PAIR, chosen='[{"port": "Brest"}]')]


def test_hub_data_is_loaded_by_name_configuration_and_split(run, monkeypatch):
    asked = []
    hub = SimpleNamespace(load_dataset=lambda *names, split: asked.append((*names, split)) or [PAIR])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    for source in ("some/data", "some/data:train[5:9]", "some/data:en:test"):
        assert run(source)[0] == [PAIR]
    assert asked == [("some/data", "train"), ("some/data", "train[5:9]"), ("some/data", "en", "test")]


# --- Columns (65.A.4)

def test_columns_are_renamed(run):
    row = dict(question="The tea", good=PAIR["chosen"], rejected=PAIR["rejected"])
    assert run([row], rename=("question=prompt", "good=chosen"))[0] == [PAIR]
    with refused("row 1: --rename gives two columns one name: the columns are prompt, chosen, rejected"):
        run([PAIR], rename=("chosen=rejected",))


def test_the_example_of_convert_reads_sharegpt(run, monkeypatch):
    code = "def convert(columns, args):\n    " + prepare.convert.__doc__.partition("\n")[2].strip()
    exec(code, found := {})
    monkeypatch.setattr(prepare, "convert", found["convert"])
    turn = dict(conversations=[{"from": "human", "value": "q"}], chosen={"from": "gpt", "value": "a"})
    assert run([turn | dict(rejected={"from": "gpt", "value": "b"})])[0] == [chat()]


def test_a_column_system_becomes_the_system_message(run):
    system = said("Be brief.", "system")
    assert run([chat() | dict(system="Be brief."), chat() | dict(system="")])[0] == [
        chat() | dict(prompt=system + chat()["prompt"]), chat()]
    assert run([PAIR | dict(system="Be brief.")], chat=True)[0][0]["prompt"] == system + said("The tea", "user")
    for row in (PAIR, dict(chat(), prompt=system + said("q", "user"))):
        with refused("row 1: a column system needs a prompt of messages"):
            run([row | dict(system="Be kind.")])


def test_columns_that_are_not_used_are_named(run):
    _, out = run([PAIR | dict(source="x"), chat() | dict(tools=TOOLS, chosen_reward=1, lang="en")])
    assert "columns that are kept, and that the scripts do not use: source, lang\n" in out
    assert "kept" not in run([PAIR])[1]


# --- Rows that are dropped or told

@parametrize("good, bad, reason", [
    (PAIR, dict(prompt=""), "no prompt, and chosen and rejected do not begin alike"),
    (PAIR, dict(chosen=" \n"), "an empty answer"),
    (PAIR, dict(rejected=None), "an empty answer"),
    (PAIR, dict(chosen=PAIR["rejected"]), "equal answers"),
    (chat(), dict(chosen=None), "an empty answer"),
    (chat(), dict(rejected=said(" ")), "an empty answer"),
    (chat(), dict(prompt=None), "no prompt, and chosen and rejected do not begin alike"),
    (chat(), dict(chosen=said("b")), "equal answers"),
    (chat(), dict(chosen=said("a") + said("x", "user")), "an answer has a message of the user"),
    (PAIR, dict(prompt=None, chosen=ASK + " a", rejected="\n\nHuman: Hot?\n\nAssistant: b"), "dialogues that diff"),
    (PAIR, dict(prompt=None, chosen=ASK + " a", rejected=ASK + " b\n\nHuman: c"), "dialogues .* end with the human"),
    (RATED, dict(completion=None), "an empty answer"),
    (RATED, dict(prompt=None), "no prompt"),
    (dict(prompt="q"), dict(prompt=" "), "no prompt")])
def test_rows_that_teach_nothing_are_dropped_and_counted(run, good, bad, reason):
    rows, out = run([good, good | bad, good, good | bad])
    assert rows == [good, good] and re.search(rf"\n +2 dropped: {reason}[^\n]* \(first: row 2\)\n", out)
    with refused(f"rows.jsonl: no row is left; dropped: {reason}.*; the columns are prompt"):
        run([good | bad])


def test_calls_and_thoughts_are_no_empty_answers(run):
    rows = [dict(prompt=said("q", "user"), chosen=said("", tool_calls=CALL), rejected=said("", thinking="Hm"))]
    assert run(rows)[0] == rows


def test_answers_that_begin_with_their_prompt_are_counted(run):
    _, out = run([PAIR, dict(PAIR, chosen="The tea was warm.")])
    assert "       1 have an answer that begins with its prompt, which is then read twice (first: row 2)" in out


def test_prompts_that_end_with_an_answer_are_counted(run):
    begun = chat() | dict(prompt=said("q", "user") + said("Well,"))
    assert "       1 have a prompt that ends with an answer, which only rloo.py" in run([chat(), begun])[1]
    assert "only rloo.py" not in run([dict(prompt=begun["prompt"])])[1]


# --- What is refused

HALF = '{"prompt": "\\ud800", "chosen": "a", "rejected": "b"}'


@parametrize("bad, words", [
    (dict(PAIR, completion="a"), "has chosen, rejected, completion: expected chosen and rejected, or"),
    (dict(prompt="q", completion="a"), "label is None: expected true, false"),
    (dict(PAIR, chosen=5), "chosen has 5: expected a string, or messages of system,"),
    (dict(PAIR, prompt=0), "prompt has 0: expected a string"),
    (dict(PAIR, prompt=False), "prompt has False: expected a string"),
    (dict(PAIR, chosen=[{"from": "gpt"}]), "chosen has {'from': 'gpt'}: expected"),
    (chat() | dict(prompt=said("q", "usr")), "prompt has {'role': 'usr', 'content': 'q'}: expected"),
    (chat() | dict(prompt=said("q", "human")), "prompt has {'role': 'human'"),
    (chat([dict(type="image", image="a.png")]), "prompt has the content .*a.png.*: expected a string, or parts with"),
    (chat([dict(type="text", text=None)]), "prompt has the content .*: expected a string, or parts with text"),
    (chat(["Hot?"]), r"prompt has the content \['Hot\?'\]: expected"),
    (chat(chosen=0), "chosen has the content 0: expected a string"),
    (chat(chosen=False), "chosen has the content False: expected a string"),
    (chat() | dict(chosen="a"), "strings and messages are mixed"),
    (dict(PAIR, prompt="[{'role': 'user', 'content': 'q'}]"), "prompt is no JSON: ..{'role': 'user', 'content': 'q'}"),
    ("[1]", "is 1: expected a value for each column"),
    (HALF, r"prompt is no JSON: '\\ud800' .*surrogates not allowed")])
def test_unreadable_rows_are_refused_by_number(run, tmp_path, bad, words):
    with refused(f"^{tmp_path}/rows.jsonl, row 2: {words}"):
        run([PAIR, "", bad, PAIR])
    assert not (tmp_path / "out").exists()


@parametrize("name, content, words", [
    ("a.jsonl", b"", "a.jsonl is empty"),
    ("a.jsonl", b'{"prompt": "q"}\nhello\n', "a.jsonl, line 2 is not JSON: 'hello'"),
    ("a.json", b'[{"prompt": ', "a.json, line 1 is not JSON"),
    ("a.jsonl", b'{"prompt": "q"}\n{"prompt": "caf\xe9"}', "a.jsonl, line 2 is not UTF-8 text: save the file as"),
    ("a.csv", "prompt\nq\n".encode("utf-16"), "a.csv, line 1 is not UTF-8 text"),
    ("a.csv", b"prompt,label\nq,1,2\n", "a.csv, row 1: is .*: expected a value for each column"),
    ("a.csv", b"question\nq\n", "no row is left; dropped: no prompt; the columns are question"),
    ("a.txt", b"q\n", "a.txt: expected a .jsonl, .json, .csv or .parquet file"),
    ("a.jsonl", None, "a.jsonl does not exist")])
def test_unreadable_files_are_refused(run, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    if name == "a.txt":
        pytest.importorskip("datasets")
    with refused(words):
        run(tmp_path / name)


def test_the_folder_of_the_data_is_refused(run, tmp_path):
    with refused("is the folder of --data"):
        run([PAIR], out=str(tmp_path))


def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--data", "none.jsonl", "--out", f"{tmp_path}/out"])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(prepare.__file__, run_name="__main__")
    assert error.value.code == 2
    assert capsys.readouterr().err.endswith("\nprepare.py: none.jsonl does not exist\n")


# --- The files

MANY = [dict(prompt=f"q{n}", chosen=f"a{m}", rejected="b") for n in range(40) for m in range(3)]


def test_all_rows_of_a_prompt_are_held_out_whatever_their_order(run, tmp_path):
    def parts(rows, **flags):
        train, _ = run(rows, **flags)
        test = read(tmp_path / "out/test.jsonl")
        prompts = {row["prompt"] for row in test}
        assert not prompts & {row["prompt"] for row in train} and len(test) == 3 * len(prompts)
        assert sorted(map(str, train + test)) == sorted(map(str, rows))
        return prompts

    held_out = parts(MANY, eval_size=128)
    assert len(held_out) == 4 and len(parts(MANY, eval_size=2)) == 2 and not parts(MANY)
    assert held_out == parts(random.Random(1).sample(MANY, len(MANY)), eval_size=128)


def test_files_are_whole_or_not_there(run, tmp_path, monkeypatch):
    run([dict(PAIR, chosen=" old")] * 2)
    for event, left in (("fsync", ["test.jsonl", "train.jsonl"]), ("replace", ["test.jsonl"])):
        with monkeypatch.context() as patch, pytest.raises(OSError):
            patch.setattr(prepare.os, event, lambda *paths: open("/no/such/file"))
            run([PAIR])
        assert sorted(path.name for path in (tmp_path / "out").glob("*.jsonl")) == left
    assert run([PAIR])[0] == [PAIR]


# --- What a model reads (65.A.1 to 3 and 5)

def test_the_files_are_the_same_for_every_model(run, look):
    rows = [PAIR, chat(), chat() | dict(tools=TOOLS)]
    expected, _ = run(rows)
    look(rows, GEMMA3)
    assert run(rows)[0] == expected


def test_the_first_row_is_shown_as_the_model_reads_it(look):
    out = look([chat("Hot?"), chat()], LLAMA3, adds=["<s>"], stops=["<|eot_id|>"])
    assert "model reads 2 of 2 rows\n      " in out and "row 1, | where training begins:\n" \
        "  '<s><|start_header_id|>user<|end_header_id|>\\n\\nHot?<|eot_id|><|start_header_id|>assistant" \
        "<|end_header_id|>\\n\\n'\n  | 'a<|eot_id|>'\n  | 'b<|eot_id|>'\n" in out
    assert "\n  '<s>The tea'\n  | ' was warm.</s>'\n  | ' was bad.</s>'\n" in look([PAIR, chat()], PLAIN, adds=["<s>"])


def test_lengths_are_told_with_rows_that_exceed_them(look):
    out = look([dict(prompt="x" * n) for n in (10, 100, 1025, 3000)], PLAIN)
    assert "     562 tokens per row (median)" in out and "   3,000 tokens per row (longest)" in out
    assert "       2 rows are longer than 1,024 tokens\n       1 rows are longer than 2,048" in out


def test_flags_columns_and_begun_answers_reach_the_template(look):
    row = chat() | dict(tools=TOOLS, chat_template_kwargs=dict(loud="LOUD"))
    assert '"enum": ["Brest", null]' in look([row], CALLS) and "]LOUD<user>" in look([row], CALLS)
    assert "\n  'False<user>q<assistant>'" in look([chat()], CALLS, chat_template_kwargs=dict(loud="false"))
    assert "\n  '<user>q<assistant>The tea is'\n" in look([dict(prompt=said("q", "user") + said("The tea is"))], PLAIN)


UNWRITTEN = "dropped by the scripts: an answer of which nothing is written"
LOST = "have text that the template does not write"
USERS = PLAIN.replace("in messages", "in messages if m.role != 'tool'")


@parametrize("template, row, note", [
    (GEMMA3, chat() | dict(tools=TOOLS), "have tools that the template does not write"),
    (CALLS, chat() | dict(tools=TOOLS), None),
    (LLAMA3, dict(prompt=CALLING), LOST),  # calls of an earlier turn
    (R1, dict(prompt=CALLING), LOST),
    (CALLS, dict(prompt=CALLING), None),
    (USERS, dict(prompt=said("Q?", "user") + said("as", "tool")), LOST),  # "as" stands in <assistant>
    (USERS, dict(prompt=said("?!", "tool") + said("Q?", "user")), LOST),
    (PLAIN, dict(prompt=said("?!", "tool") + said("Q?", "user")), None),
    (PLAIN, chat() | dict(prompt=said("q", "user", name="Ann", language="en", day=DAY)), None),
    (R1, chat(chosen="<think>Hm.</think>a"), LOST),
    (R1, dict(prompt=said("<think>Hm.</think>a") + said("q", "user")), None),  # an earlier thought
    (PLAIN, dict(prompt=said("a", thinking="Hm.") + said("q", "user")), None),
    (PLAIN, dict(chat(), chosen=said("a", thinking="Hm.")), LOST),
    (PLAIN.replace("m.content", "m.content | trim"), chat(" q ", "a\n"), None),
    (CALLS, dict(chat(), chosen=said("a", tool_calls=[dict(name="f", arguments=dict(to='1\n"m"'))])), None),
    (CHATML, dict(chat(), chosen=said("", tool_calls=CALL)), UNWRITTEN),
    (CALLS.replace("m.tool_calls | tojson", "m.tool_calls[0].name"),
     dict(chat(), chosen=said("", tool_calls=[dict(id="c1", type="function", name="f")])), None),
    (CALLS, dict(chat(), chosen=said("", tool_calls=CALL)), None)])
def test_what_the_template_does_not_write_is_counted(look, template, row, note):
    out = look([chat(), row, row], template, stops=["</s>", "<|im_end|>"])
    found = re.findall(r" +(\d+) (.*(?:write|written)) \(first: row (\d)\)", out)
    assert found == ([("2", note, "2")] if note else [])


def test_rows_that_the_template_refuses_are_told_with_its_words(look):
    twice = dict(prompt=said("q", "user") + said("a"), completion=said("b"), label=True)
    rated = dict(prompt=said("q", "user"), completion=said("b"), label=True)
    words = r"dropped by the scripts: the chat template says Conversation roles must alternate user/assistant/"
    out = look([rated, twice, twice], GEMMA3)
    assert "model reads 1 of 3 rows\n" in out and re.search(rf"\n +2 {words}.* \(first: row 2\)\n", out)
    with refused(f"model reads no row of .*rows.jsonl: {words}"):
        look([twice], GEMMA3)
    with refused("tokenizer.chat_template is not set"):
        look([chat()], None)


def test_rows_whose_question_would_be_trained_are_told(look):
    """As Mistral's template may, this one writes a system message differently where an answer follows."""
    template = "{{ messages | length if messages[0].role == 'system' }}" + PLAIN
    out = look([chat(), chat() | dict(prompt=said("Be brief.", "system") + said("q", "user"))], template)
    assert " 1 dropped by the scripts: the template writes another prompt where an answer follows (first: row 2)" in out


@parametrize("row, is_early", [
    (PAIR, False), (dict(PAIR, prompt="The tea wa", chosen="s warm.", rejected=", bad."), True),
    (dict(RATED, prompt="The tea wa", completion="s warm."), True)])
def test_prompts_that_end_early_are_told(run, row, is_early):
    _, out = run([PAIR if "chosen" in row else RATED, row], model=f"{ROOT}/demo/model")
    assert (" 1 have a prompt that ends early: a token spans its end, or" in out) == is_early
    assert "(first: row 2)" in out or not is_early


def test_a_template_that_begins_an_answer_otherwise_is_told(look):
    out = look([chat()], R1)
    assert " 1 have a prompt that ends early" in out and "\n  '<s><user>q<assistant>'\n  | 'a'\n  | 'b'\n" in out


@parametrize("template, row, is_told", [
    (PLAIN, chat(), True), (LLAMA3, chat(), False), (PLAIN, PAIR, False), (PLAIN, dict(PAIR, prompt="<s>q"), False)])
def test_chats_without_bos_are_told(look, template, row, is_told):
    out = look([row], template, adds=["<s>"])
    assert (" 1 do not begin with <s>, which the template does not write (first: row 1)" in out) == is_told
    assert "<s><s>" not in out and "do not begin" not in look([row], template)  # here the tokenizer adds none


def test_strings_are_told_that_need_a_template_or_get_eos(look):
    out = look([PAIR, dict(PAIR, chosen=" a</s>\n", rejected=" b<|im_end|>")], PLAIN, stops=["</s>", "<|im_end|>"])
    assert " 2 are strings, to which the chat template is not applied: --chat makes messages of them" in out
    assert " 1 have an answer that gets </s> (first: row 1)" in out
    out = look([chat()], PLAIN) + look([dict(prompt="q")], None)
    assert "are strings" not in out and "that gets" not in out


def test_an_end_token_at_which_generation_does_not_stop_is_told(look):
    told = " 1 have an answer that does not end with </s>, where generation stops (first: row 1)"
    assert told in look([chat()], CHATML)
    assert "generation stops" not in look([chat(), PAIR], CHATML, stops=["</s>", "<|im_end|>"])
    assert "<|eot_id|> or </s>, where" in look([chat()], PLAIN, stops=["<|eot_id|>", "</s>"])
    assert told in look([chat()], CHATML, config=LlamaConfig)  # there is no generation_config.json
