"""tools/prepare.py: how every format becomes plain rows, and what --model tells of them."""
import csv
import json
import random
import re
import sys
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
import runs
from models import parametrize
from runs import ROOT, byte_level, read, said
from transformers import GenerationConfig, LlamaConfig

from tools import prepare

PAIR = dict(prompt="The tea", chosen=" was warm.", rejected=" was bad.")
RATED = dict(prompt="The tea", completion=" was warm.", label=True)
ASK = "\n\nHuman: Hot?\n\nAssistant: Yes.\n\nHuman: Good?\n\nAssistant:"

PLAIN = runs.PLAIN.replace("{{ m.content }}", "{{ m.content }}</s>")
BEGINS = "{{ bos_token }}" + PLAIN
CALLS = "{{ tools | tojson if tools }}{{ loud }}" + PLAIN.replace(
    "{{ m.content", "{{ m.tool_calls | tojson if m.tool_calls }}{{ m.content")
NAMES = CALLS.replace("m.tool_calls | tojson", "m.tool_calls[0].name")
THOUGHTLESS = PLAIN.replace("m.content", "m.content.split('</think>')[-1]")
TRIMS = PLAIN.replace("m.content", "m.content | trim")
USERS = PLAIN.replace("in messages", "in messages if m.role != 'tool'")
COUNTS = "{{ messages | length if messages[0].role == 'system' }}" + PLAIN  # another prompt where an answer follows
STRICT = "{% if messages | length > 2 %}{{ raise_exception('Roles must alternate') }}{% endif %}" + PLAIN

Q, A, B = said("q", "user"), said("a"), said("b")
CALL = [dict(name="f", arguments=dict(port="Brest"))]
TOOLS = [dict(name="f", parameters=dict(port=dict(enum=["Brest", None])))]
CALLING = Q + said("", tool_calls=CALL) + said("rain", "tool")
BEGUN = Q + said("The tea is")


def chat(prompt=Q, chosen=A, rejected=B, **columns):
    return dict(prompt=prompt, chosen=chosen, rejected=rejected) | columns


@pytest.fixture
def run(tmp_path, capsys):
    """Prepares rows (dicts, or lines of text) or a file. Returns the rows of train.jsonl and what was printed."""
    def run(data, /, **flags):
        path = data
        if isinstance(data, list):
            path = tmp_path / "rows.jsonl"
            path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in data))
        capsys.readouterr()
        prepare.main(prepare.Args(**dict(data=str(path), out=f"{tmp_path}/out", eval_size=0) | flags))
        return read(tmp_path / "out/train.jsonl"), capsys.readouterr().out
    return run


@pytest.fixture
def look(run, tmp_path):
    """What --model tells of rows. The tokenizer has one token per byte, and special ones."""
    def look(rows, template, stops=("</s>", "<en>"), adds=(), config=GenerationConfig, **flags):
        tokenizer = byte_level(template, front=adds)
        folder = mkdtemp(dir=tmp_path)
        tokenizer.save_pretrained(folder)
        stop_ids = tokenizer.convert_tokens_to_ids(stops)
        LlamaConfig(eos_token_id=stop_ids, max_position_embeddings=1500).save_pretrained(folder)
        if config is GenerationConfig:
            config(eos_token_id=stop_ids).save_pretrained(folder)
        return run(rows, model=folder, **flags)[1]
    return look


def notes(printed):
    """The number of rows, the note and the number of the first row, of each note."""
    return re.findall(r"^ +(\d+) (.*) \(first: row (\d+)\)$", printed, re.M)


def refused(words):
    return pytest.raises(prepare.BadInput, match=words)


# --- Formats

def test_plain_rows_stay_as_they_are(run):
    for rows in (
            [PAIR, chat(), dict(PAIR, chosen_reward=0.0, rejected_reward=-1.5), chat(tools=TOOLS, source="x")],
            [RATED, RATED | dict(label=False)], [dict(prompt="q", answer=4), dict(prompt=Q)]):
        assert run(rows)[0] == rows


def test_prompts_of_chats_may_stand_in_the_answers_too_or_only_there(run):
    question = said("And?", "user")
    for before in (question, said("Be brief.", "system") + question, said("Yes?", "user") + said("Yes.") + question):
        pair = dict(chosen=before + A, rejected=before + B)
        expected = dict(prompt=before, chosen=A, rejected=B)
        # a string may be any question of what both begin with
        assert run([pair, *(pair | dict(prompt=prompt) for prompt in (before, None, "And?"))])[0] == [expected] * 4
    rated = dict(prompt=question, completion=A, label=True)
    assert run([rated, rated | dict(prompt="And?"), rated | dict(completion=question + A)])[0] == [rated] * 3


def test_dialogues_are_divided_at_their_last_answer(run):
    pair = dict(chosen=" Only warm.", rejected=" Oh.")
    rows = [pair | dict(prompt=ASK), {name: ASK + text for name, text in pair.items()}]
    assert run(rows)[0] == [rows[0]] * 2
    turns = said("Hot?", "user") + said("Yes.") + said("Good?", "user")
    assert run(rows, chat=True)[0] == [dict(prompt=turns, chosen=said("Only warm."), rejected=said("Oh."))] * 2


def test_chat_makes_messages_of_strings(run):
    quoted = "Go on:\n\nHuman: Hot?"  # is no dialogue
    for row, expected in ((PAIR, chat(said("The tea", "user"), said("was warm."), said("was bad."))), (chat(), chat()),
                          (dict(prompt=quoted), dict(prompt=said(quoted, "user")))):
        assert run([row], chat=True)[0] == [expected]


def test_pairs_become_two_rated_answers_and_labels_are_true_or_false(run):
    rows, _ = run([PAIR | dict(id=7)], rows="rated")
    assert rows == [RATED | dict(id=7), RATED | dict(completion=PAIR["rejected"], label=False, id=7)]
    labels = [True, 1, 1.0, "1", "true", "True", False, 0, 0.0, "0", "false", "False"]
    rows, _ = run([RATED | dict(label=label) for label in labels], rows="rated")
    assert rows == [RATED] * 6 + [RATED | dict(label=False)] * 6


def test_any_data_become_prompts(run):
    rows = [PAIR, dict(prompt="q", completion="", label="none", answer=4), chat(chosen=B)]
    expected = [dict(prompt="The tea"), dict(prompt="q", label="none", answer=4), dict(prompt=Q)]
    assert run(rows, rows="prompts")[0] == expected


def test_nulls_are_no_values_at_any_depth_and_parts_of_text_are_joined(run):
    """An item of a list is a value, such as null in an enum."""
    parts = [dict(type="text", text=text, image=None) for text in ("Ho", "t?")]
    assert run([chat(said(parts, "user"))])[0] == [chat(said("Hot?", "user"))]
    row = chat(CALLING, tools=TOOLS, chat_template_kwargs=dict(loud=1))
    call = CALLING[1] | dict(name=None, tool_calls=[CALL[0] | dict(id=None)])
    assert run([
        row | dict(tools=[TOOLS[0] | dict(strict=None)], chat_template_kwargs=dict(loud=1, low=None)),
        row | dict(prompt=[CALLING[0] | dict(tool_calls=None), call, CALLING[2]]),
        row | dict(prompt=[CALLING[0] | dict(tool_calls=[]), *CALLING[1:]]),
        row | dict(tools=json.dumps(TOOLS), chat_template_kwargs='{"loud": 1}'),
        row | dict(tools=[json.dumps(tool) for tool in TOOLS])])[0] == [row] * 5


ROWS = [dict(prompt=f"Tea,\u2028{n}", chosen=' was "warm",\r\nvery.', rejected="None", id="NA", zip="00501")
        for n in range(3)]


def write_csv(path, *rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


@parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_every_format_gives_the_same_rows(run, tmp_path, monkeypatch, name):
    chats = [chat(), chat(CALLING)]
    for i, rows in enumerate([ROWS] if name == "a.csv" else [ROWS, chats]):
        path = tmp_path / f"{i}{name}"
        if name == "a.jsonl":  # with a byte order mark, empty lines, and what str.splitlines takes for an end
            lines = [json.dumps(row, ensure_ascii=False) for row in rows]
            path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(lines).encode())
        elif name == "a.json":
            path.write_text(json.dumps(rows, indent=1))
        elif name == "a.csv":
            write_csv(path, *rows)
        else:
            datasets = pytest.importorskip("datasets")
            monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
            datasets.Dataset.from_list(rows).to_parquet(path)
        assert run(path)[0] == rows


def test_messages_tools_and_rewards_are_read_from_cells_of_csv(run, tmp_path):
    cells = {name: json.dumps(value) for name, value in chat(tools=TOOLS).items()}
    path = write_csv(tmp_path / "a.csv", cells | dict(chosen_reward="1.50", chat_template_kwargs=""))
    assert run(path)[0] == [chat(tools=TOOLS, chosen_reward=1.5, chat_template_kwargs=None)]
    long = dict(prompt="q" * 200_000)
    assert run(write_csv(tmp_path / "a.csv", long))[0] == [long]
    no_messages = dict(PAIR, chosen='[{"port": "Brest"}]')
    assert run([chat(json.dumps(Q)), no_messages])[0] == [chat(), no_messages]


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
    assert run([chat(system="Be brief."), chat(system="")])[0] == [chat(system + Q), chat()]
    assert run([PAIR | dict(system="Be brief.")], chat=True)[0][0]["prompt"] == system + said("The tea", "user")
    for row in (PAIR, chat(system + Q)):
        with refused("row 1: a column system needs a prompt of messages"):
            run([row | dict(system="Be kind.")])


def test_columns_that_are_not_used_are_named(run):
    _, out = run([PAIR | dict(source="x"), chat(tools=TOOLS, chosen_reward=1, lang="en")])
    assert "columns that are kept, and that the scripts do not use: source, lang\n" in out
    assert "kept" not in run([PAIR])[1]


# --- Rows that are dropped or told

@parametrize("good, bad, reason", [
    (PAIR, dict(prompt=""), "no prompt, and chosen and rejected do not begin alike"),
    (PAIR, dict(chosen=" \n"), "an empty answer"),
    (PAIR, dict(chosen=PAIR["rejected"]), "equal answers"),
    (chat(), dict(chosen=None), "an empty answer"),
    (chat(), dict(rejected=said(" ")), "an empty answer"),
    (chat(), dict(chosen=A + Q), "an answer has a message of the user"),
    (PAIR, dict(prompt=None, chosen=ASK + " a", rejected="\n\nHuman: Hot?\n\nAssistant: b"), "dialogues that diff"),
    (PAIR, dict(prompt=None, chosen=ASK + " a", rejected=ASK + " b\n\nHuman: c"), "dialogues .* end with the human"),
    (dict(prompt="q"), dict(prompt=" "), "no prompt")])
def test_rows_that_teach_nothing_are_dropped_and_counted(run, good, bad, reason):
    rows, out = run([good, good | bad, good, good | bad])
    assert rows == [good, good] and re.search(rf"\n +2 dropped: {reason}[^\n]* \(first: row 2\)\n", out)
    with refused(f"rows.jsonl: no row is left; dropped: {reason}.*; the columns are prompt"):
        run([good | bad])


@parametrize("row, note", [
    (dict(PAIR, chosen="The tea was warm."), "have an answer that begins with its prompt, which is then read twice"),
    (chat(BEGUN), "have a prompt that ends with an answer, which only rloo.py continues"),
    (dict(prompt=BEGUN), "")])
def test_rows_that_are_kept_but_look_wrong_are_counted(run, row, note):
    assert notes(run([PAIR, row])[1]) == ([("1", note, "2")] if note else [])


# --- What is refused

HALF = '{"prompt": "\\ud800", "chosen": "a", "rejected": "b"}'


@parametrize("bad, words", [
    (dict(PAIR, completion="a"), "has chosen, rejected, completion: expected chosen and rejected, or"),
    (dict(prompt="q", completion="a"), "label is None: expected true, false"),
    (dict(PAIR, prompt=False), "prompt has False: expected a string, or messages of system,"),
    (chat(said("q", "human")), "prompt has {'role': 'human', 'content': 'q'}: expected"),
    (chat(said([dict(type="text", text=None)], "user")), "prompt has the content .*: expected a string, or parts w"),
    (chat(said(["Hot?"], "user")), r"prompt has the content \['Hot\?'\]: expected"),
    (chat(chosen=said(0)), "chosen has the content 0: expected a string"),
    (chat(chosen="a"), "strings and messages are mixed"),
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
    ("a.jsonl", b'{"prompt": "q"}\n{"prompt": "caf\xe9"}', "a.jsonl, line 2 is not UTF-8 text: save the file as"),
    ("a.csv", "prompt\nq\n".encode("utf-16"), "a.csv, line 1 is not UTF-8 text"),
    ("a.csv", b"prompt,label\nq,1,2\n", "a.csv, row 1: is .*: expected a value for each column"),
    ("a.csv", b"question\nq\n", "no row is left; dropped: no prompt; the columns are question"),
    ("a.jsonl", None, "a.jsonl does not exist")])
def test_unreadable_files_are_refused(run, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with refused(words):
        run(tmp_path / name)


def test_a_model_that_is_not_there_is_refused(run, tmp_path):
    with refused("nosuch does not exist"):
        run([PAIR], model=f"{tmp_path}/nosuch")


def test_the_folder_of_the_data_is_refused(run, tmp_path):
    with refused("is the folder of --data"):
        run([PAIR], out=str(tmp_path))


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

def test_the_first_row_is_shown_as_the_model_reads_it_and_no_file_is_changed(look, tmp_path):
    rows = [chat(said("Hot?", "user")), chat(tools=[])]
    out = look(rows, BEGINS, adds=["<s>"])
    assert read(tmp_path / "out/train.jsonl") == rows
    assert " reads 2 of 2 rows\n      " in out
    assert "row 1, | where training begins:\n  '<s><user>Hot?</s><assistant>'\n  | 'a</s>'\n  | 'b</s>'\n" in out
    assert "\n  '<s>The tea'\n  | ' was warm.</s>'\n  | ' was bad.</s>'\n" in look([PAIR], PLAIN, adds=["<s>"])


def test_flags_columns_and_begun_answers_reach_the_template(look):
    row = chat(tools=TOOLS, chat_template_kwargs=dict(loud="LOUD"))
    assert re.search(r'"enum": \["Brest", null\].*\]LOUD<user>', look([row], CALLS))
    assert "\n  'False<user>q</s><assistant>'" in look([chat()], CALLS, chat_template_kwargs=dict(loud="false"))
    assert "\n  '<user>q</s><assistant>The tea is'\n" in look([dict(prompt=BEGUN)], PLAIN)


UNWRITTEN = "dropped by the scripts: an answer of which nothing is written"
LOST = "have text that the template does not write"
STRINGS = "are strings, to which the chat template is not applied: --chat makes messages of them"


@parametrize("template, row, expected", [
    (PLAIN, chat(tools=TOOLS), ["have tools that the template does not write"]),
    (CALLS, chat(tools=TOOLS), []),
    (PLAIN, chat(CALLING), [LOST]),  # calls of an earlier turn
    (CALLS, chat(CALLING), []),
    (USERS, chat(said("as", "tool") + Q), [LOST]),  # "as" stands in <assistant>
    (USERS, chat(said("?!", "tool") + Q), [LOST]),
    (PLAIN, chat(said("?!", "tool") + Q), []),
    (PLAIN, chat(said("q", "user", name="Ann", language="en")), []),
    (THOUGHTLESS, chat(chosen=said("<think>Hm.</think>a")), [LOST]),
    (THOUGHTLESS, chat(said("<think>Hm.</think>a") + Q), []),  # an earlier thought
    (PLAIN, chat(chosen=said("a", thinking="Hm.")), [LOST]),
    (TRIMS, chat(said(" q ", "user"), said("a\n")), []),
    (CALLS, chat(chosen=said("a", tool_calls=[dict(name="f", arguments=dict(to='1\n"m"'))])), []),
    (NAMES, chat(chosen=said("", tool_calls=[dict(id="c1", type="function", name="f")])), []),
    (PLAIN, chat(chosen=said("", tool_calls=CALL)), [UNWRITTEN]),
    (CALLS, chat(chosen=said("", tool_calls=CALL)), []),
    (COUNTS, chat(said("Be brief.", "system") + Q), [
        "dropped by the scripts: the template writes another prompt where an answer follows"]),
    (STRICT, chat(BEGUN), [
        "have a prompt that ends with an answer, which only rloo.py continues",
        "dropped by the scripts: the chat template says Roles must alternate"]),
    (PLAIN, PAIR, [STRINGS, "have an answer without </s>, which the scripts add"]),
    (PLAIN, dict(PAIR, chosen=" a</s>\n", rejected=" b<en>"), [STRINGS])])
def test_what_the_template_does_with_a_row_is_counted(look, template, row, expected):
    """Rows that it refuses are told with its words."""
    out = look([chat(), row, row], template)
    assert notes(out) == [("2", note, "2") for note in expected]
    assert f" reads {1 if 'dropped' in ''.join(expected) else 3} of 3 rows\n" in out


def test_a_model_that_reads_no_row_is_refused_with_the_reason(look):
    with refused(" reads no row of .*rows.jsonl: dropped by the scripts: the chat template says Roles"):
        look([chat(BEGUN)], STRICT)
    with refused("tokenizer.chat_template is not set"):
        look([chat()], None)
    assert not notes(look([dict(prompt="q")], None)), "strings need no template"


EARLY = "have a prompt that ends early: a token spans its end, or the template changes it"


def test_prompts_that_end_early_are_told(run, look):
    ends = [dict(PAIR, prompt="The tea wa", chosen="s warm.", rejected=", bad."),
            dict(RATED, prompt="The tea wa", completion="s warm.")]
    for row, begin in zip(ends, (PAIR, RATED)):
        assert ("1", EARLY, "2") in notes(run([begin, row], model=f"{ROOT}/demo/model")[1])

    out = look([chat()], PLAIN.replace("%}<assistant>", "%}<assistant><think>"))
    assert notes(out) == [("1", EARLY, "1")] and "\n  '<user>q</s><assistant>'\n  | 'a</s>'\n  | 'b</s>'\n" in out


def test_rows_beyond_the_context_of_the_model_are_counted(look):
    found = re.findall(r"(\S+) rows are longer than (\S+) tokens", look([chat("q" * 1600), chat("q" * 1100)], PLAIN))
    assert found == [("2", "1,024"), ("1", "1,500")]


def test_chats_without_bos_are_told(look):
    note = "do not begin with <s>, which the template does not write"
    assert notes(look([chat()], PLAIN, adds=["<s>"])) == [("1", note, "1")]
    for template, row in ((BEGINS, chat()), (PLAIN, PAIR), (PLAIN, dict(PAIR, prompt="<s>q"))):
        out = look([row], template, adds=["<s>"])
        assert note not in out and "<s><s>" not in out


def test_an_end_token_at_which_generation_does_not_stop_is_told(look):
    for config in (GenerationConfig, LlamaConfig):  # the latter without generation_config.json
        assert notes(look([chat()], PLAIN, stops=["<en>"], config=config)) == [
            ("1", "have an answer that does not end with <en>, where generation stops", "1")]
    assert "<en> or <s>, where" in look([chat()], PLAIN, stops=["<en>", "<s>"])
