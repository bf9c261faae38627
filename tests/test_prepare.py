"""tools/prepare.py: how every format becomes plain rows, what is told of them, and which files are written."""
import csv
import json
import random
import re
from pathlib import Path

import pytest
from models import cases
from runs import CALL, CALLING, PAIR, RATED, TOOLS, A, B, Q, chat, read, said

from tools import prepare

ASK = "\n\nHuman: Hot?\n\nAssistant: Yes.\n\nHuman: Good?\n\nAssistant:"

BRIEF = said("Be brief.", "system")
GOOD = dict(prompt=Q, completion=A, label=True)


@pytest.fixture
def run(tmp_path, capsys):
    """Prepares rows (dicts, or lines of text) or a file. Returns train.jsonl and what was printed."""
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

def test_plain_rows_stay_as_they_are(run):
    """Also nulls in columns for a reward."""
    for rows in ([PAIR, dict(PAIR, chosen_reward=0.0, rejected_reward=-1.5), chat(tools=TOOLS, source="x")], [RATED],
                 [dict(prompt="q", answer=[dict(x=None)], n=None), dict(prompt=Q), dict(prompt=BRIEF)]):
        assert run(rows)[0] == rows


def test_prompts_of_chats_may_stand_in_the_answers(run):
    """A string may be any question of what both begin with."""
    for before in (Q, BRIEF + Q, said("Yes?", "user") + B + Q):
        pair = dict(chosen=before + A, rejected=before + B)
        rows = [pair, *(pair | dict(prompt=prompt) for prompt in (before, None, "q"))]
        assert run(rows)[0] == [chat(before)] * 4
    rows = [GOOD | other for other in (dict(prompt="q"), dict(completion=Q + A), dict(completion="a"))]
    assert run(rows)[0] == [GOOD] * 3


def test_dialogues_are_divided_at_their_last_answer(run):
    pair = dict(prompt=ASK, chosen=" a", rejected=" b")
    rows = [pair, dict(chosen=ASK + " a", rejected=ASK + " b")]
    assert run(rows)[0] == [pair] * 2
    assert run(rows, chat=True)[0] == [chat(said("Hot?", "user") + said("Yes.") + said("Good?", "user"))] * 2


def test_chat_makes_messages_of_strings(run):
    pair = dict(prompt=" q", chosen="a", rejected=" b\n")
    rows = [pair, pair | dict(system="Be brief."), chat(system="")]
    assert run(rows, chat=True)[0] == [chat(), chat(BRIEF + Q), chat()]
    no_dialogue = "Go on:\n\nHuman: Hot?"
    assert run([dict(prompt=no_dialogue)], chat=True)[0] == [dict(prompt=said(no_dialogue, "user"))]


def test_pairs_become_rated_answers(run):
    rows, out = run([PAIR | dict(id=7), PAIR | dict(chosen=" b.", rejected=PAIR["chosen"])], rows="rated")
    assert rows[:2] == [RATED | dict(id=7), RATED | dict(completion=PAIR["rejected"], label=False, id=7)]
    assert "\n       1 contradict an earlier row" in out and "repeat" not in out
    rows, _ = run([RATED | dict(label=label) for label in (True, 1.0, "True", False, 0, "0.0")])
    assert [row["label"] for row in rows] == [True] * 3 + [False] * 3


def test_keys_that_are_null_are_absent(run):
    """An item of a list is a value, such as null in an enum."""
    parts = [dict(type="text", text=text, image=None) for text in ("", "a")]
    row = chat(CALLING, tools=TOOLS, chat_template_kwargs=dict(loud=1))
    call = CALLING[1] | dict(name=None, tool_calls=[CALL[0] | dict(id=None)])
    rows, out = run([
        row | dict(prompt=[CALLING[0] | dict(tool_calls=[]), *CALLING[1:]], tools=[json.dumps(TOOLS[0])]),
        row | dict(prompt=[CALLING[0] | dict(tool_calls=None), call, CALLING[2]], chosen=said(parts)),
        row | dict(tools=json.dumps(TOOLS), chat_template_kwargs='{"loud": 1, "low": null}')])
    assert rows == [row] * 3 and "\n       2 have keys that are null, which are left out (first: row 2)\n" in out


USER, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
PAIRED = dict(chosen=GPT, rejected=GPT | dict(value="b"))
USES = [{"from": "function_call", "value": json.dumps(CALL[0])}, {"from": "observation", "value": "rain"}]
USED = said("", tool_calls=[dict(type="function", function=CALL[0])]) + said("rain", "tool")
ALPACA = dict(instruction="q", input="")


@cases("row, expected", [
    (dict(conversations=[USER], system="Be brief.") | PAIRED, chat(BRIEF + Q)),
    (dict(conversations=[USER, GPT, USER], chosen=[GPT], rejected="b"), chat(Q + A + Q)),
    (dict(conversations=[USER, *USES], tools=json.dumps(TOOLS)) | PAIRED, chat(Q + USED, tools=TOOLS)),
    (dict(conversations=[USER, GPT], kto_tag=True), GOOD),
    (dict(messages=Q + A, label=True), GOOD), (dict(messages=Q, chosen=A[0], rejected=B[0]), chat()),
    (ALPACA | dict(chosen=A, rejected=B, output="c"), chat(output="c")),
    (ALPACA | dict(input="x", history=[["Old?", "b"]], output="a", kto_tag=True, system="Be brief."),
     GOOD | dict(prompt=BRIEF + said("Old?", "user") + B + said("q\nx", "user")))])
def test_sharegpt_and_alpaca_are_read(run, row, expected):
    assert run([row])[0] == [expected]


def test_rows_that_no_script_could_use_are_refused(run):
    for row in (ALPACA | dict(output="a"), dict(conversations=[USER, GPT])):
        with refused("row 1: label is None: .*--rows prompts"):
            run([row])
        rows = [row, chat(chosen=B), dict(prompt=Q, completion="", answer=4)]
        assert run(rows, rows="prompts")[0] == [dict(prompt=Q), dict(prompt=Q), dict(prompt=Q, answer=4)]
    with refused("row 1: has no answer for --rows rated: the columns are prompt"):
        run([dict(prompt=Q)], rows="rated")


def write_csv(path, *rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_files_of_text_give_the_same_rows(run, tmp_path):
    """Also with a byte order mark, empty lines, and what str.splitlines takes for an end."""
    rows = [dict(prompt=f"Tea,\u2028{n}", chosen=' was "warm",\r\nvery.', rejected="None") for n in range(3)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(lines).encode())
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for path in (tmp_path / "a.jsonl", tmp_path / "a.json", write_csv(tmp_path / "a.csv", *rows)):
        assert run(path)[0] == rows


def test_cells_of_csv_hold_messages_and_rewards(run, tmp_path):
    cells = {name: json.dumps(value) for name, value in chat(tools=TOOLS).items()}
    texts = dict(zip="00501", page='[{"port": "Brest"}]' * 9_999)
    cells |= dict(chosen_reward="1.50", rejected_reward="", chat_template_kwargs="") | texts
    row = chat(tools=TOOLS, chosen_reward=1.5, rejected_reward=None, chat_template_kwargs=None) | texts
    assert run(write_csv(tmp_path / "a.csv", cells))[0] == [row]


# --- Columns

def test_columns_are_renamed(run):
    row = dict(question="The tea", good=PAIR["chosen"], rejected=PAIR["rejected"])
    assert run([PAIR, row], rename=("question=prompt", "good=chosen"))[0] == [PAIR] * 2
    with refused("^no column questoin: the columns are question, good"):
        run([row], rename=("questoin=prompt", "good=chosen"))


# --- Rows that are dropped or told

@cases("good, bad, reason", [
    (PAIR, dict(prompt=""), "no prompt"), (chat(), dict(rejected=said(" ")), "an empty answer"),
    (PAIR, dict(chosen=None), "an empty answer"), (PAIR, dict(chosen=PAIR["rejected"]), "equal answers"),
    (chat(), dict(chosen=A + Q), "an answer has a message of the user"),
    (PAIR, dict(prompt=None, chosen=ASK + " a", rejected=ASK + " b\n\nHuman: c"), "dialogues")])
def test_rows_that_teach_nothing_are_dropped_and_counted(run, good, bad, reason):
    rows, out = run([good, good | bad, good, good | bad])
    assert rows == [good, good] and re.search(rf"\n +2 dropped: {reason}[^\n]* \(first: row 2\)\n", out)
    with refused(f"no row is left; dropped: {reason}.*; the columns are prompt.*`convert`"):
        run([good | bad])


@cases("note, row", [
    ("an answer that begins with its prompt", dict(chosen="The tea was warm.")),
    ("a prompt that ends with an answer", chat(Q + B)),
    ("an answer that is a dialogue", dict(rejected=" b\n\nHuman: Hot?")),
    ("repeat the prompt", dict(id=7)),
    ("contradict an earlier row", dict(chosen=PAIR["rejected"], rejected=PAIR["chosen"])),
    ("a control token", chat(rejected=said("a</s>b"))), ("a control token", dict(prompt="It has <|im_end|>")),
    (None, dict(prompt="a < b | c > d, [inst] <b>"))])
def test_rows_that_are_kept_but_look_wrong_are_counted(run, note, row):
    rows, out = run([PAIR, PAIR | row])
    assert len(rows) == 2
    assert len(re.findall(rf"\n +1 .*{note}.* \(first: row 2\)", out)) == out.count("first:") == bool(note)


# --- What is refused

@cases("bad, words", [
    (dict(completion="a"), ""), (dict(prompt=False), "prompt has False: .* edit `convert`"),
    (chat(said("q", "human")), "prompt has"), (chat(said([dict(type="text", text=None)], "user")), "prompt has the"),
    ("[1]", ""), (json.dumps(RATED), "is not one of the pairs"), ('{"prompt": "q"}', "is not one of"),
    ({"Prompt": "q"}, "has a column 'Prompt'"), ({"label ": 1}, "has a column 'label '"),
    (dict(system="Be brief."), "a column system needs a prompt of messages"),
    *((dict(rejected_reward=reward), "") for reward in (float("nan"), "good", True))])
def test_unreadable_rows_are_refused_by_number(run, tmp_path, bad, words):
    with refused(f"^{tmp_path}/rows.jsonl, row 2: {words}"):
        run([PAIR, "", bad if isinstance(bad, str) else PAIR | bad, PAIR])
    assert not (tmp_path / "out").exists()


# --- The files

PROMPTS = [dict(prompt=f"q{n}") for n in range(40)]


def test_a_prompt_is_held_out_with_all_its_variants(run, tmp_path):
    """Variants differ in white space, in the order of keys and in the system message."""
    def parts(rows, **flags):
        train, _ = run(rows, **flags)
        test = read(tmp_path / "out/test.jsonl")
        held_out, asked = [{row["prompt"][-1]["content"].strip() for row in part} for part in (test, train)]
        assert not held_out & asked and len(test) == 4 * len(held_out)
        assert sorted(map(str, train + test)) == sorted(map(str, rows))
        return held_out

    rows = []
    for n in range(40):
        prompt = said(f"q {n}", "user")
        reversed_keys = [dict(content=f"q {n}", role="user")]
        rows += map(chat, (prompt, reversed_keys, said(f" q {n}\n", "user"), BRIEF + prompt))
    held_out = parts(rows, eval_size=128)
    assert len(held_out) == 4 and len(parts(rows, eval_size=2)) == 2
    assert held_out == parts(random.Random(1).sample(rows, len(rows)), eval_size=128)


def test_it_says_what_was_written_and_for_whom(run, tmp_path):
    for columns, kind in ((PAIR, "pairs, for dpo.py"), (RATED, "rated answers, for kto.py")):
        out = run([columns | row for row in PROMPTS], eval_size=1)[1]
        assert out.endswith(f"out/train.jsonl: 39 {kind}\n{tmp_path}/out/test.jsonl: 1 {kind}\n")
    assert "\nno prompt of 9 is held out" in run(PROMPTS[:9], eval_size=128)[1]
    assert not (tmp_path / "out/test.jsonl").exists()


def test_the_files_of_other_data_are_not_overwritten(run, tmp_path):
    assert run([PAIR])[0] == [PAIR] and run([PAIR], chat=True)[0][0]["chosen"] == said("was warm.")
    with refused("out holds rows of .*/rows.jsonl: name another --out"):
        run(tmp_path / "b.jsonl", out=f"{tmp_path}/out")
    (tmp_path / "out/prepared.json").unlink()
    with refused("out holds rows of other data"):
        run([PAIR])


def test_files_are_whole_or_not_there(run, tmp_path, monkeypatch):
    run(PROMPTS, eval_size=1)
    for event, left in (("sync", ["prepared.json", "test.jsonl", "train.jsonl"]), ("replace", ["prepared.json"])):
        with monkeypatch.context() as patch, pytest.raises(OSError):
            patch.setattr(prepare.os, event, lambda *paths: open("/no/such/file"))
            run([PAIR])
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == left
    assert run([PAIR])[0] == [PAIR]
