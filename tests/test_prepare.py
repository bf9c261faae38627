"""tools/prepare.py: how every format becomes plain rows, what is told of them, and which files are written."""
import csv
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import parametrize
from runs import read, said

from tools import prepare

PAIR = dict(prompt="The tea", chosen=" was warm.", rejected=" was bad.")
RATED = dict(prompt="The tea", completion=" was warm.", label=True)
ASK = "\n\nHuman: Hot?\n\nAssistant: Yes.\n\nHuman: Good?\n\nAssistant:"

Q, A, B = said("q", "user"), said("a"), said("b")
CALL = [dict(name="f", arguments=dict(port="Brest"))]
TOOLS = [dict(name="f", parameters=dict(port=dict(enum=["Brest", None])))]
CALLING = Q + said("", tool_calls=CALL) + said("rain", "tool")
BRIEF = said("Be brief.", "system")
GOOD = dict(prompt=Q, completion=A, label=True)


def chat(prompt=Q, chosen=A, rejected=B, **columns):
    return dict(prompt=prompt, chosen=chosen, rejected=rejected) | columns


@pytest.fixture
def run(tmp_path, capsys):
    """Prepares rows (dicts, or lines of text) or a file. Returns the rows of train.jsonl and what was printed."""
    def run(data, /, **flags):
        path, out = data, tmp_path / f"out-{Path(str(data)).name}"
        if isinstance(data, list):
            path, out = tmp_path / "rows.jsonl", tmp_path / "out"
            path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in data))
        capsys.readouterr()
        prepare.main(prepare.Args(**dict(data=str(path), out=str(out), eval_size=0) | flags))
        return read(out / "train.jsonl"), capsys.readouterr().out
    return run


def refused(words):
    return pytest.raises(prepare.BadInput, match=words)


# --- Formats

@parametrize("rows", [
    [PAIR, dict(PAIR, chosen_reward=0.0, rejected_reward=-1.5), chat(tools=TOOLS, source="x")],
    [RATED, RATED | dict(label=False)],
    [dict(prompt="q", answer=[dict(x=None)], n=None), dict(prompt=Q), dict(prompt=BRIEF)]])
def test_plain_rows_stay_as_they_are(run, rows):
    """Also nulls in columns for a reward."""
    assert run(rows)[0] == rows


def test_prompts_of_chats_may_stand_in_the_answers_too_or_only_there(run):
    """A string may be any question of what both begin with."""
    for before in (Q, BRIEF + Q, said("Yes?", "user") + B + Q):
        pair = dict(chosen=before + A, rejected=before + B)
        rows = [pair, *(pair | dict(prompt=prompt) for prompt in (before, None, "q"))]
        assert run(rows)[0] == [chat(before)] * 4
    rows = [GOOD | other for other in (dict(prompt="q"), dict(completion=Q + A), dict(completion="a"))]
    assert run(rows)[0] == [GOOD] * 3


def test_dialogues_are_divided_at_their_last_answer(run):
    pair = dict(chosen=" a", rejected=" b")
    rows = [pair | dict(prompt=ASK), {name: ASK + text for name, text in pair.items()}]
    assert run(rows)[0] == [rows[0]] * 2
    assert run(rows, chat=True)[0] == [chat(said("Hot?", "user") + said("Yes.") + said("Good?", "user"))] * 2


@parametrize("row, expected", [
    (dict(prompt=" q", chosen="a", rejected=" b\n"), chat()), (chat(), chat()),
    (dict(prompt="Go on:\n\nHuman: Hot?"), dict(prompt=said("Go on:\n\nHuman: Hot?", "user")))])  # is no dialogue
def test_chat_makes_messages_of_strings(run, row, expected):
    assert run([row], chat=True)[0] == [expected]


def test_rated_answers_that_contradict_are_counted(run):
    out = run([PAIR, PAIR | dict(chosen=" b.", rejected=PAIR["chosen"])], rows="rated")[1]
    assert "\n       1 contradict an earlier row" in out and "repeat" not in out


def test_pairs_become_two_rated_answers_and_labels_are_true_or_false(run):
    rows, _ = run([PAIR | dict(id=7)], rows="rated")
    assert rows == [RATED | dict(id=7), RATED | dict(completion=PAIR["rejected"], label=False, id=7)]
    labels = [True, 1.0, "1", "True", False, 0, "0.0", "false"]
    rows, _ = run([PAIR] + [RATED | dict(label=label) for label in labels], rows="rated")
    assert rows[2:] == [RATED] * 4 + [RATED | dict(label=False)] * 4


def test_any_data_become_prompts(run):
    rows = [PAIR, dict(prompt="q", completion="", label="none", answer=4), chat(chosen=B)]
    expected = [dict(prompt="The tea"), dict(prompt="q", label="none", answer=4), dict(prompt=Q)]
    assert run(rows, rows="prompts")[0] == expected


def test_keys_that_are_null_are_absent_and_parts_of_text_are_joined(run):
    """An item of a list is a value, such as null in an enum."""
    parts = [dict(type="text", text=text, image=None) for text in ("Ho", "t?")]
    assert run([chat(said(parts, "user"))])[0] == [chat(said("Hot?", "user"))]
    row = chat(CALLING, tools=TOOLS, chat_template_kwargs=dict(loud=1))
    call = CALLING[1] | dict(name=None, tool_calls=[CALL[0] | dict(id=None)])
    rows, out = run([
        row | dict(prompt=[CALLING[0] | dict(tool_calls=[]), *CALLING[1:]]),
        row | dict(tools=[TOOLS[0] | dict(strict=None)], chat_template_kwargs=dict(loud=1, low=None)),
        row | dict(prompt=[CALLING[0] | dict(tool_calls=None), call, CALLING[2]]),
        row | dict(tools=json.dumps(TOOLS), chat_template_kwargs='{"loud": 1, "low": null}'),
        row | dict(tools=[json.dumps(tool) for tool in TOOLS])])
    assert rows == [row] * 5 and "\n       3 have keys that are null, which are left out (first: row 2)\n" in out


USER, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
PAIRED = dict(chosen=GPT, rejected=GPT | dict(value="b"))
USES = [{"from": "function_call", "value": json.dumps(CALL[0])}, {"from": "observation", "value": "rain"}]
USED = said("", tool_calls=[dict(type="function", function=CALL[0])]) + said("rain", "tool")
ALPACA = dict(instruction="q", input="")


@parametrize("row, expected", [
    (dict(conversations=[USER], system="Be brief.") | PAIRED, chat(BRIEF + Q)),
    (dict(conversations=[USER, GPT, USER], chosen=[GPT], rejected="b"), chat(Q + A + Q)),
    (dict(conversations=[USER, *USES], tools=json.dumps(TOOLS)) | PAIRED, chat(Q + USED, tools=TOOLS)),
    (dict(conversations=[USER, GPT], kto_tag=True), GOOD),
    (dict(conversations=[USER], source="x"), dict(prompt=Q, source="x")),
    (dict(messages=Q + A, label=True), GOOD), (dict(messages=Q, chosen=A[0], rejected=B[0]), chat()),
    (ALPACA | dict(chosen="a", rejected="b"), chat()),
    (ALPACA | dict(chosen=A, rejected=B, output="c"), chat(output="c")),
    (ALPACA | dict(input="x", output="a", label=1), GOOD | dict(prompt=said("q\nx", "user"))),
    (ALPACA | dict(history=[["Old?", "b"]], output="a", kto_tag=True, system="Be brief."),
     GOOD | dict(prompt=BRIEF + said("Old?", "user") + B + Q)),
    (ALPACA | dict(prompt="p"), ALPACA | dict(prompt="p"))])
def test_sharegpt_and_alpaca_are_read(run, row, expected):
    assert run([row])[0] == [expected]


@parametrize("row", [ALPACA | dict(output="a"), dict(conversations=[USER, GPT]), dict(prompt=Q, completion=A)])
def test_answers_without_a_label_are_refused_unless_prompts_are_asked_for(run, row):
    with refused("row 1: label is None: .*--rows prompts"):
        run([row])
    with refused("row 1: has no answer for --rows rated: the columns are prompt"):
        run([dict(prompt=Q)], rows="rated")
    assert run([row], rows="prompts")[0] == [dict(prompt=Q)]


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
    path, rows = tmp_path / name, [chat(), chat(CALLING)] if name == "a.parquet" else ROWS
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
    cells |= dict(chosen_reward="1.50", rejected_reward="", chat_template_kwargs="")
    row = chat(tools=TOOLS, chosen_reward=1.5, rejected_reward=None, chat_template_kwargs=None)
    assert run(write_csv(tmp_path / "a.csv", cells))[0] == [row]
    rows = [dict(PAIR, chosen='[{"port": "Brest"}]', rejected="b" * 200_000)]  # no messages
    assert run(write_csv(tmp_path / "a.csv", *rows))[0] == rows


def test_hub_data_is_loaded_by_name_configuration_and_split(run, monkeypatch):
    asked = []
    hub = SimpleNamespace(load_dataset=lambda *names, split: asked.append((*names, split)) or [PAIR])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    for source in ("some/data", "some/data:train[5:9]", "some/data:en:test"):
        assert run(source)[0] == [PAIR]
    assert asked == [("some/data", "train"), ("some/data", "train[5:9]"), ("some/data", "en", "test")]


# --- Columns

def test_columns_are_renamed_and_those_that_are_not_used_are_named(run):
    row = dict(question="The tea", good=PAIR["chosen"], rejected=PAIR["rejected"])
    assert run([PAIR, row], rename=("question=prompt", "good=chosen"))[0] == [PAIR] * 2
    assert "do not use: source, lang\n" in run([PAIR | dict(source="x"), dict(PAIR, chosen_reward=1, lang="en")])[1]
    with refused("row 1: --rename gives two columns one name"):
        run([PAIR], rename=("chosen=rejected",))
    with refused("^no column questoin: the columns are question, good, rejected$"):
        run([row], rename=("questoin=prompt", "good=chosen"))


def test_the_example_of_convert_reads_another_format(run, monkeypatch):
    code = "def convert(columns, args):\n    " + prepare.convert.__doc__.partition("\n")[2].strip()
    exec(code, found := {})
    monkeypatch.setattr(prepare, "convert", found["convert"])
    row = dict(question=Q, answers=[dict(text=A, score=5), dict(text=B, score=1)])
    assert run([row])[0] == [chat()]
    with refused("row 2: KeyError.'answers'"):
        run([row, PAIR])


def test_a_column_system_becomes_the_system_message(run):
    assert run([chat(system="Be brief."), chat(system="")])[0] == [chat(BRIEF + Q), chat()]
    assert run([PAIR | dict(system="Be brief.")], chat=True)[0][0]["prompt"] == BRIEF + said("The tea", "user")
    for row in (PAIR, chat(BRIEF + Q)):
        with refused("row 1: a column system needs a prompt of messages"):
            run([row | dict(system="Be kind.")])


# --- Rows that are dropped or told

@parametrize("good, bad, reason", [
    (PAIR, dict(prompt=""), "no prompt"), (dict(prompt="q"), dict(prompt=" "), "no prompt"),
    (PAIR, dict(chosen=" \n"), "an empty answer"), (chat(), dict(rejected=said(" ")), "an empty answer"),
    (chat(), dict(chosen=None), "an empty answer"), (PAIR, dict(chosen=PAIR["rejected"]), "equal answers"),
    (chat(), dict(chosen=A + Q), "an answer has a message of the user"),
    (PAIR, dict(prompt=None, chosen=ASK + " a", rejected=ASK[15:] + " b"), "dialogues"),
    (PAIR, dict(prompt=None, chosen=ASK + " a", rejected=ASK + " b\n\nHuman: c"), "dialogues")])
def test_rows_that_teach_nothing_are_dropped_and_counted(run, good, bad, reason):
    rows, out = run([good, good | bad, good, good | bad])
    assert rows == [good, good] and re.search(rf"\n +2 dropped: {reason}[^\n]* \(first: row 2\)\n", out)
    with refused(f"no row is left; dropped: {reason}.*; the columns are prompt.*`convert`"):
        run([good | bad])


@parametrize("note, row", [
    ("an answer that begins with its prompt", dict(chosen="The tea was warm.")),
    ("a prompt that ends with an answer", chat(Q + B)),
    ("an answer that is a dialogue", dict(rejected=" b\n\nHuman: Hot?")),
    ("repeat the prompt", dict(id=7)),
    ("contradict an earlier row", dict(chosen=PAIR["rejected"], rejected=PAIR["chosen"])),
    ("a control token", chat(rejected=said("a</s>b"))),
    *(("a control token", dict(prompt=f"It has {token}")) for token in (
        "<|im_end|>", "[INST]", "<start_of_turn>", "<｜User｜>", "<bos>")),
    (None, dict(prompt="a < b | c > d, [inst] <b>")), (None, dict(chosen=" b."))])
def test_rows_that_are_kept_but_look_wrong_are_counted(run, note, row):
    rows, out = run([PAIR, PAIR | row])
    assert len(rows) == 2
    found = re.findall(rf"\n +1 .*{note}.* \(first: row 2\)", out)
    assert len(found) == out.count("first:") == bool(note)


# --- What is refused

@parametrize("bad, words", [
    (dict(completion="a"), ""), (dict(prompt="[{'role': 'user', 'content': 'q'}]"), ""),
    (dict(prompt=False), "prompt has False: .* edit `convert`"), (chat(said("q", "human")), "prompt has"),
    (chat(said([dict(type="text", text=None)], "user")), ""), (chat(said(["Hot?"], "user")), "prompt has the content"),
    ("[1]", ""), ('{"prompt": "\\ud800"}', ".* surrogates not allowed"),
    (json.dumps(RATED), "is not one of the pairs"), ('{"prompt": "q"}', "is not one of the pairs"),
    ({"Prompt": "q"}, "has a column 'Prompt'"), ({"label ": 1}, "has a column 'label '"),
    *((dict(rejected_reward=reward), "") for reward in (float("nan"), "inf", "good", True))])
def test_unreadable_rows_are_refused_by_number(run, tmp_path, bad, words):
    with refused(f"^{tmp_path}/rows.jsonl, row 2: {words}"):
        run([PAIR, "", bad if isinstance(bad, str) else PAIR | bad, PAIR])
    assert not (tmp_path / "out").exists()


@parametrize("name, content, words", [
    ("a.jsonl", b"", " is empty"), ("a.jsonl", b'{"prompt": "q"}\nhello\n', ", line 2 is not JSON: 'hello'"),
    ("a.jsonl", b'{"prompt": "caf\xe9"}', " is not UTF-8"), ("a.jsonl.gz", b"", ": expected a .jsonl"),
    ("a.csv", b"prompt,label\nq,1,2\n", ", row 1: is ")])
def test_unreadable_files_are_refused(run, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with refused(name + words):
        run(tmp_path / name)


# --- The files

MANY = [dict(prompt=f"q{n}", chosen=f"a{m}", rejected="b") for n in range(40) for m in range(3)]
PROMPTS = [dict(prompt=f"q{n}") for n in range(40)]


def test_all_rows_of_a_prompt_are_held_out_whatever_their_order(run, tmp_path):
    def parts(rows, **flags):
        train, _ = run(rows, **flags)
        test = read(tmp_path / "out/test.jsonl")
        prompts = {row["prompt"] for row in test}
        assert not prompts & {row["prompt"] for row in train} and len(test) == 3 * len(prompts)
        assert sorted(map(str, train + test)) == sorted(map(str, rows))
        return prompts

    held_out = parts(MANY, eval_size=128)
    assert len(held_out) == 4 and len(parts(MANY, eval_size=2)) == 2
    assert held_out == parts(random.Random(1).sample(MANY, len(MANY)), eval_size=128)


@parametrize("other", [
    lambda text: [dict(content=text, role="user")], lambda text: said(f" {text} \n", "user"),
    lambda text: BRIEF + said(text, "user")])
def test_a_prompt_is_held_out_with_its_variants(run, tmp_path, other):
    texts = [f"q {n}" for n in range(20)]
    train, _ = run([chat(said(text, "user")) for text in texts] + [chat(other(text)) for text in texts], eval_size=9)
    tests = read(tmp_path / "out/test.jsonl")
    held_out, asked = [{row["prompt"][-1]["content"].strip() for row in rows} for rows in (tests, train)]
    assert len(tests) == 4 and len(held_out) == 2 and not held_out & asked


def test_it_says_what_was_written_and_for_whom(run, tmp_path):
    """Fewer than ten prompts are all trained on. Then an older test.jsonl does not stay."""
    for rows, kind in ((MANY, "pairs, for dpo.py"), ([RATED | row for row in PROMPTS], "rated answers, for kto.py"),
                       (PROMPTS, "prompts, for rloo.py")):
        out = run(rows, eval_size=1)[1]
        n = len(rows) // 40
        assert out.endswith(f"out/train.jsonl: {39 * n} {kind}\n{tmp_path}/out/test.jsonl: {n} {kind}\n")
    assert "\nno prompt of 9 is held out" in run(PROMPTS[:9], eval_size=128)[1]
    assert not (tmp_path / "out/test.jsonl").exists()


def test_the_files_of_other_data_are_not_overwritten(tmp_path):
    def prepared(name, **flags):
        (tmp_path / name).write_text(json.dumps(PAIR))
        prepare.main(prepare.Args(data=f"{tmp_path}/{name}", out=f"{tmp_path}/out", **flags))

    prepared("a.jsonl")
    prepared("a.jsonl", chat=True)
    assert read(tmp_path / "out/train.jsonl")[0]["chosen"] == said("was warm.")
    with refused("out holds rows of .*/a.jsonl: name another --out"):
        prepared("b.jsonl")
    (tmp_path / "out/prepared.json").unlink()
    with refused("out holds rows of other data"):  # also those of --data
        prepared("out/train.jsonl")


def test_files_are_whole_or_not_there(run, tmp_path, monkeypatch):
    run(PROMPTS, eval_size=1)
    for event, left in (("sync", ["prepared.json", "test.jsonl", "train.jsonl"]), ("replace", ["prepared.json"])):
        with monkeypatch.context() as patch, pytest.raises(OSError):
            patch.setattr(prepare.os, event, lambda *paths: open("/no/such/file"))
            run([PAIR])
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == left
    assert run([PAIR])[0] == [PAIR]
