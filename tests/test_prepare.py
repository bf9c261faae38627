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
BEGUN = Q + said("The tea is")


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


def notes(printed):
    """The number of rows, the note and the number of the first row, of each note."""
    return re.findall(r"^ +(\d+) (.*) \(first: row (\d+)\)$", printed, re.M)


def refused(words):
    return pytest.raises(prepare.BadInput, match=words)


# --- Formats

def test_plain_rows_stay_as_they_are(run):
    """Columns for a reward, too, whose nulls may mean something."""
    for rows in (
            [PAIR, dict(PAIR, chosen_reward=0.0, rejected_reward=-1.5), chat(tools=TOOLS, source="x")],
            [RATED, RATED | dict(label=False)], [dict(prompt="q", answer=[dict(x=None)], n=None), dict(prompt=Q)]):
        assert run(rows)[0] == rows


def test_prompts_of_chats_may_stand_in_the_answers_too_or_only_there(run):
    question = said("And?", "user")
    for before in (question, said("Be brief.", "system") + question, said("Yes?", "user") + said("Yes.") + question):
        pair = dict(chosen=before + A, rejected=before + B)
        expected = dict(prompt=before, chosen=A, rejected=B)
        # a string may be any question of what both begin with
        assert run([pair, *(pair | dict(prompt=prompt) for prompt in (before, None, "And?"))])[0] == [expected] * 4
    rated = dict(prompt=question, completion=A, label=True)
    others = [dict(prompt="And?"), dict(completion=question + A), dict(completion="a")]
    assert run([rated | other for other in others])[0] == [rated] * 3


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
    rows, _ = run([PAIR] + [RATED | dict(label=label) for label in labels], rows="rated")
    assert rows[2:] == [RATED] * 6 + [RATED | dict(label=False)] * 6


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
    assert rows == [row] * 5 and ("3", "have keys that are null, which are left out", "2") in notes(out)


USER, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
WRONG = GPT | dict(value="b")
CALLS = said("", tool_calls=[dict(type="function", function=CALL[0])])
ASKED = said("Old?\nYes.", "user") + said("No.")
ALPACA = dict(instruction="q", input="", system="")


@parametrize("row, expected", [
    (dict(conversations=[USER], chosen=GPT, rejected=WRONG, system="Hm."), chat(said("Hm.", "system") + Q)),
    (dict(conversations=[USER, GPT, USER], chosen=[GPT], rejected="b"), chat(Q + A + Q)),
    (dict(conversations=[USER, GPT], kto_tag=False), dict(prompt=Q, completion=A, label=False)),
    (dict(messages=Q + A, label=True), dict(prompt=Q, completion=A, label=True)),
    (dict(messages=Q, chosen=A[0], rejected=B[0]), chat()),
    (dict(conversations=[USER], source="x"), dict(prompt=Q, source="x")),
    (dict(conversations=[USER, {"from": "function_call", "value": json.dumps(CALL[0])},
                         {"from": "observation", "value": "rain"}], tools=json.dumps(TOOLS), chosen=GPT, rejected=WRONG),
     chat(Q + CALLS + said("rain", "tool"), tools=TOOLS)),
    (ALPACA | dict(chosen="a", rejected="b"), chat()),
    (ALPACA | dict(chosen=A, rejected=B, output="c"), chat(output="c")),
    (ALPACA | dict(input="x", output="a", label=1), dict(prompt=said("q\nx", "user"), completion=A, label=True)),
    (ALPACA | dict(history=[["Old?\nYes.", "No."]], output="a", kto_tag=True, system="Be brief."),
     dict(prompt=said("Be brief.", "system") + ASKED + Q, completion=A, label=True)),
    (ALPACA | dict(prompt="p"), dict(prompt="p", instruction="q", input=""))])
def test_sharegpt_and_alpaca_are_read(run, row, expected):
    assert run([row], chat="prompt" not in row)[0] == [expected]


def test_answers_without_a_label_are_refused_unless_prompts_are_asked_for(run):
    for row in (ALPACA | dict(output="a"), dict(conversations=[USER, GPT]), dict(prompt=Q, completion=A)):
        with refused("row 1: label is None: expected true or false, or --rows prompts"):
            run([row])
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
    assert run([no_messages])[0] == [no_messages]


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
    rename = ("question=prompt", "good=chosen")
    assert run([row], rename=rename)[0] == [PAIR]
    assert "do not use: source, lang\n" in run([PAIR | dict(source="x"), dict(PAIR, chosen_reward=1, lang="en")])[1]
    assert run([PAIR | row], rename=("good=best",))[0] == [PAIR | dict(question="The tea", best=PAIR["chosen"])]
    with refused("row 1: --rename gives two columns one name: the columns are prompt, chosen, rejected"):
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
    system = said("Be brief.", "system")
    assert run([chat(system="Be brief."), chat(system="")])[0] == [chat(system + Q), chat()]
    assert run([PAIR | dict(system="Be brief.")], chat=True)[0][0]["prompt"] == system + said("The tea", "user")
    for row in (PAIR, chat(system + Q)):
        with refused("row 1: a column system needs a prompt of messages"):
            run([row | dict(system="Be kind.")])


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
    with refused(f"rows.jsonl: no row is left; dropped: {reason}.*; the columns are prompt.*`convert`"):
        run([good | bad])


END = said("Say <|im_end|> twice.", "user")


@parametrize("row, note, flags", [
    (dict(PAIR, chosen="The tea was warm."), "an answer that begins with its prompt", {}),
    (chat(BEGUN), "a prompt that ends with an answer", {}),
    (dict(PAIR, rejected=" b\n\nHuman: Hot?"), "an answer that is a dialogue", dict(chat=True)),
    (PAIR, "repeat the prompt", {}),
    (dict(PAIR, chosen=PAIR["rejected"], rejected=PAIR["chosen"]), "contradict an earlier row", {}),
    (dict(PAIR, chosen=" b.", rejected=PAIR["chosen"]), "contradict an earlier row", dict(rows="rated")),
    (dict(PAIR, chosen=PAIR["rejected"], rejected=" b."), "contradict an earlier row", dict(rows="rated")),
    (chat(END), "a control token", {}), (chat(rejected=END[:0] + said("a</s>b")), "a control token", {}),
    *((dict(PAIR, prompt=f"It has {token}"), "a control token", {}) for token in (
        "<|eot_id|>", "[INST]", "<start_of_turn>", "<｜User｜>", "<bos>")),
    (dict(PAIR, prompt="a < b | c > d, [inst] <b>"), "", {}),
    (dict(PAIR, chosen=" b."), "", {})])
def test_rows_that_are_kept_but_look_wrong_are_counted(run, row, note, flags):
    rows, out = run([PAIR, row], **flags)
    assert len(rows) == (4 if flags.get("rows") else 2)
    assert [(n, first) for n, text, first in notes(out) if note in text] == ([("1", "2")] if note else [])
    assert len(notes(out)) == bool(note)


# --- What is refused

HALF = '{"prompt": "\\ud800", "chosen": "a", "rejected": "b"}'


@parametrize("bad, words", [
    (dict(PAIR, completion="a"), "has chosen, rejected, completion: expected chosen and rejected, or"),
    (dict(PAIR, prompt=False), "prompt has False: expected a string, or messages of system,.* edit `convert`"),
    (chat(said("q", "human")), "prompt has {'role': 'human', 'content': 'q'}: expected"),
    (chat(said([dict(type="text", text=None)], "user")), "prompt has the content .*: expected a string, or parts w"),
    (chat(said(["Hot?"], "user")), r"prompt has the content \['Hot\?'\]: expected"),
    (chat(chosen=said(0)), "chosen has the content 0: expected a string"),
    (dict(PAIR, prompt="[{'role': 'user', 'content': 'q'}]"), "Expecting property name"),
    ("[1]", "is 1: expected a value for each column"),
    (HALF, ".* surrogates not allowed"),
    (RATED, "is not one of the pairs, for dpo.py, as row 1 is"), (dict(prompt="q"), "is not one of the pairs"),
    ({"Prompt": "q"} | PAIR, "has a column 'Prompt': give --rename 'Prompt=prompt'"),
    (PAIR | {"label ": 1}, "has a column 'label '"),
    *((PAIR | dict(rejected_reward=reward), "") for reward in (float("nan"), "inf", "good", True, [1]))])
def test_unreadable_rows_are_refused_by_number(run, tmp_path, bad, words):
    with refused(f"^{tmp_path}/rows.jsonl, row 2: {words}"):
        run([PAIR, "", bad, PAIR])
    assert not (tmp_path / "out").exists()


def test_rated_rows_without_answers_are_refused(run):
    with refused("row 1: has no answer for --rows rated: the columns are prompt, answer"):
        run([dict(prompt="q", answer=4)], rows="rated")


@parametrize("name, content, words", [
    ("a.jsonl", b"", "a.jsonl is empty"),
    ("a.jsonl", b'{"prompt": "q"}\nhello\n', "a.jsonl, line 2 is not JSON: 'hello'"),
    ("a.jsonl", b'{"prompt": "caf\xe9"}', "a.jsonl is not UTF-8 text"),
    ("a.csv", b"prompt,label\nq,1,2\n", "a.csv, row 1: is .*: expected a value for each column"),
    ("a.csv", b"question\nq\n", "no row is left; dropped: no prompt; the columns are question")])
def test_unreadable_files_are_refused(run, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with refused(words):
        run(tmp_path / name)


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
    assert len(held_out) == 4 and len(parts(MANY, eval_size=2)) == 2
    assert held_out == parts(random.Random(1).sample(MANY, len(MANY)), eval_size=128)


@parametrize("other", [
    lambda text: [dict(content=text, role="user")], lambda text: said(f" {text} \n", "user"),
    lambda text: said(f"Be brief, {text}.", "system") + said(text, "user")])
def test_a_prompt_is_held_out_with_its_variants(run, tmp_path, other):
    texts = [f"q {n}" for n in range(20)]
    train, _ = run([chat(said(text, "user")) for text in texts] + [chat(other(text)) for text in texts], eval_size=9)
    tests = read(tmp_path / "out/test.jsonl")
    asked = [{row["prompt"][-1]["content"].strip() for row in rows} for rows in (train, tests)]
    assert len(tests) == 4 and len(asked[0]) == 18 and not asked[0] & asked[1]


def test_it_says_what_was_written_and_for_whom(run, tmp_path):
    """Fewer than ten prompts are all trained on. Then an older test.jsonl does not stay."""
    for rows, kind in ((MANY, "pairs, for dpo.py"), ([RATED | row for row in PROMPTS], "rated answers, for kto.py"),
                       (PROMPTS, "prompts, for rloo.py")):
        out = run(rows, eval_size=1)[1]
        n = len(rows) // 40
        assert out.endswith(f"out/train.jsonl: {39 * n} {kind}\n{tmp_path}/out/test.jsonl: {n} {kind}\n")
    assert run(PROMPTS[:9])[1].endswith("no prompt is held out: there are 9, and --eval_size is 0\n")
    assert not (tmp_path / "out/test.jsonl").exists()


PROMPTS = [dict(prompt=f"q{n}") for n in range(40)]


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
