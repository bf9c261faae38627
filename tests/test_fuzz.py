"""Random, odd and damaged data files. load_rows keeps a row whole, or drops and counts it, or refuses the file in one
sentence that says where. Few examples by default, many with `python -m pytest -m fuzz`."""
import csv
import io
import json
import re
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stdout
from copy import deepcopy
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import ROOT, TOKENIZER, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import dpo
import kto
from refcache import BadInput

END, LIMIT = "<|end|>", 60  # LIMIT in tokens: some rows are longer
DEEP = b"[" * 100_000
BOTH = pytest.mark.parametrize("script", [dpo, kto], ids=["dpo", "kto"])


def examples(few, many):
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.fuzz)], ids=["few", "many"])


def variant(template="as it is", **tokens):
    tokenizer = deepcopy(TOKENIZER)
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    if template != "as it is":
        tokenizer.chat_template = template
    return tokenizer


def byte_level(**tokens):
    """A token per byte, no template; a BOS in front of any text if there is one."""
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["<s>", "</s>"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if "bos_token" in tokens:
        bos = ("<s>", vocabulary.index("<s>"))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)


MANY = "{% for m in messages %}"
TOKENIZERS = {
    "no pad": variant(pad_token=None), "no EOS": variant(eos_token=None), "bytes": byte_level(eos_token="</s>"),
    "bytes, no EOS": byte_level(), "bytes, BOS": byte_level(bos_token="<s>", eos_token="</s>"),
    "no template": variant(None), "empty": variant(""), "broken": variant("{% if %}"),
    "divides": variant("{{ 1 / 0 }}"), "raises": variant("{{ raise_exception('no\nsuch role') }}"),
    "constant": variant("Hello."), "ignores": variant(MANY + "{{ m.role }};{% endfor %}"),
    "reversed": variant("{% for m in messages | reverse %}{{ m.content }}{% endfor %}"),
    "bare": variant(MANY + "{{ m.content }}{% endfor %}"),
    "trims": variant(MANY + "{{ m.role }}\n{{ m.content | trim }}" + END + "{% endfor %}"),
    "line break": variant(MANY + "{{ m.role }}\n\n{{ m.content }}" + END + "{% endfor %}"
                          "{% if add_generation_prompt %}assistant\n\n{% endif %}")}

ODD = ["\ufeff", "\0", "\r\n", "\u2028", "\u202eשלום", "👩‍👩‍👧", "e\u0301", " ", "\n\n", " \t ",
       "<|end|>", "<|assistant|>", "</s>", "[" * 99, "1e999", '"",', "long " * 40]
texts = st.builds("".join, st.lists(st.sampled_from(ODD) | st.text(max_size=9), min_size=1, max_size=4)).filter(bool)
apart = st.tuples(texts, texts).filter(lambda two: two[0].removesuffix(END) != two[1].removesuffix(END))
roles = st.sampled_from(["user", "tool", "a\nb"]) | texts
chats = st.lists(st.fixed_dictionaries({"role": roles, "content": texts}), min_size=1, max_size=3)
extra = st.dictionaries(st.sampled_from(["id", "", "a\nb", "\ud800", "label "]),
                        st.sampled_from([None, 10**400, float("nan"), -float("inf"), [[{}]]]), max_size=2)
labels = st.sampled_from([True, False, 1, 0, 1.0, "1", "0", "true", "False"])


def said(text):
    return [{"role": "assistant", "content": text}]


def pair(prompt, answers, more):
    return {**more, "prompt": prompt, "chosen": answers[0], "rejected": answers[1]}


def as_chat(row, prompt):
    return {**row, "prompt": prompt, "chosen": said(row["chosen"]), "rejected": said(row["rejected"])}


def single(row, label):
    return {"prompt": row["prompt"], "completion": row["chosen"], "label": label}


pairs = st.builds(pair, texts, apart, extra)
both = pairs | st.builds(as_chat, pairs, chats)


def good_rows(script):
    """Rows that must be kept, or dropped and counted."""
    return both if script is dpo else both | st.builds(single, both, labels)


NAMES = ("prompt", "chosen", "rejected")
WRONG = st.sampled_from([
    None, "", 5, 10**400, float("nan"), [], {}, [1], [[]], [{}], "\ud800", "half \udfff", [{"role": "user"}],
    [{"content": "x"}], [{"role": None, "content": "x"}], [{"role": "user", "content": [{"type": "text"}]}], said(""),
    said("\ud800")])
LABELS = st.sampled_from([None, 2, "", "yes\n" * 999, [], float("nan")])
endless = texts.filter(lambda text: not text.endswith(END))
wrong = st.builds(lambda row, name, value: {**row, name: value}, both, st.sampled_from(NAMES), WRONG)
gone = st.builds(lambda row, name: {k: v for k, v in row.items() if k != name}, both, st.sampled_from(NAMES[1:]))
unlabelled = st.builds(lambda label, name: {"prompt": "a", "completion": " b", name: label},
                       LABELS, st.sampled_from(["label", "lab\nel" * 9]))
equal = st.builds(lambda text: {"prompt": END, "chosen": text, "rejected": text + END}, endless)
bad_rows = wrong | gone | equal | unlabelled | st.sampled_from([None, 7, "text", [], [{}], True])


def write(path, rows):
    if path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows(rows)
    else:
        text = "\r\n".join(map(json.dumps, rows)) if path.suffix == ".jsonl" else json.dumps(rows, indent=1)
        path.write_text("\ufeff" + text, encoding="utf-8")


def outcome(script, path, tokenizer=TOKENIZER, truncate=False):
    """How many rows were kept, after a look at each, and what was printed; of a refused file 0, and that sentence."""
    try:
        with redirect_stdout(io.StringIO()) as out:
            rows = script.load_rows(str(path), tokenizer, LIMIT, script.Args(truncate=truncate))
    except BadInput as error:
        assert len(str(error).splitlines()) == 1 and path.name in str(error) and len(str(error)) < 1000
        return 0, out.getvalue() + str(error)
    kept, of = map(int, re.search(r": (\d+) of (\d+) rows", out.getvalue()).groups())
    dropped = sum(map(int, re.findall(r"; (\d+) dropped", out.getvalue())))
    assert kept == len({id(row.row) for row in rows}) == of - dropped
    for row in rows:
        if script is dpo:
            assert row.chosen != row.rejected
            answers = {"chosen": row.chosen, "rejected": row.rejected}
        elif "chosen" in row.row:
            answers = {"chosen" if row.label else "rejected": row.completion}
        else:
            assert row.label == (row.row["label"] in (1, "1", "true", "True"))
            answers = {"completion": row.completion}
        for name, answer in answers.items():
            check_answer(row, name, answer, tokenizer, "truncated" in out.getvalue())
    return kept, out.getvalue()


def check_answer(row, name, answer, tokenizer, truncated):
    """The tokens of prompt and answer are those of the row's text."""
    ids, value, end = row.prompt + answer, row.row[name], tokenizer.eos_token
    assert row.prompt and answer and len(ids) <= LIMIT and all(type(i) is int and 0 <= i < len(tokenizer) for i in ids)
    if isinstance(value, str):
        whole = row.row["prompt"] + value.removesuffix(end) + end
        front = tokenizer.bos_token if tokenizer.bos_token and row.prompt[0] == tokenizer.bos_token_id else ""
        read = tokenizer.decode(ids).removeprefix(front)
        # the cut may lie inside of a character
        assert whole.endswith(read.lstrip("\ufffd")) if truncated else read == whole
        assert read.endswith(value.removesuffix(end) + end), "an answer is never cut"
    elif "content" in (tokenizer.chat_template or ""):
        assert value[-1]["content"].strip() in tokenizer.decode(ids)


def every(strategy, check, examples) -> Counter:
    """Checks so many examples, always the same ones. Counts what the check returned."""
    said = Counter()
    always = settings(max_examples=examples, derandomize=True, deadline=None, database=None,
                      suppress_health_check=list(HealthCheck))
    always(given(strategy)(lambda example: said.update([check(*example)])))()
    return said


@BOTH
@examples(25, 200)
def test_good_rows_are_kept_whole_or_counted(tmp_path, script, examples):
    def check(rows, truncate):
        write(path := tmp_path / "rows.jsonl", rows)
        kept, words = outcome(script, path, truncate=truncate)
        assert kept or "too few rows" in words
        return kept > 0
    rows = st.lists(good_rows(script), min_size=1, max_size=4)
    assert every(st.tuples(rows, st.booleans()), check, examples)[True] > examples / 5


@BOTH
@examples(25, 200)
def test_one_bad_row_is_dropped_or_its_line_is_named(tmp_path, script, examples):
    def check(rows, bad, at):
        write(path := tmp_path / "rows.jsonl", rows)
        before, _ = outcome(script, path)
        write(path, rows[:at] + [bad] + rows[at:])
        kept, words = outcome(script, path)
        if kept or "too few rows" in words:
            assert "dropped" in words and kept in (before, 0)
        else:
            assert f"rows.jsonl line {min(at, len(rows)) + 1}" in words
        return kept > 0
    said = every(st.tuples(st.lists(good_rows(script), max_size=3), bad_rows, st.integers(0, 3)), check, examples)
    assert said[False] and (said[True] or examples < 100)  # both happen


JUNK = [b"", b"x", DEEP, b'{"a":' * 999, b"NaN", b"9" * 5000, b'"', b'""', b",", b"\\ud800", b"\xff", b"\0", b"\r",
        b"\n\n", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b'{"prompt": 1, "prompt": "a"}', b"null", b"{}", b"]"]
damage = st.integers(0, 2000), st.sampled_from([0, 0, 1, 3, 9999]), st.sampled_from(JUNK) | st.binary(max_size=9)


@BOTH
@examples(25, 200)
def test_damaged_files_are_read_or_refused(tmp_path, script, examples):
    def check(rows, at, lost, new):
        write(path := tmp_path / "rows.jsonl", rows)
        whole = path.read_bytes()
        at %= len(whole) + 1
        path.write_bytes(whole[:at] + new + whole[at + lost:])
        return outcome(script, path)[0] > 0
    said = every(st.tuples(st.lists(good_rows(script), min_size=1, max_size=3), *damage), check, examples)
    assert said[False] and (said[True] or examples < 100)  # both happen


@BOTH
@examples(3, 60)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_other_tokenizers_and_templates_lose_nothing(tmp_path, script, examples, name):
    def check(row, truncate):
        write(path := tmp_path / "rows.jsonl", [row])
        return outcome(script, path, TOKENIZERS[name], truncate)[0] > 0
    every(st.tuples(good_rows(script), st.booleans()), check, examples)


@BOTH
@examples(2, 40)
@pytest.mark.skipif(find_spec("datasets") is None, reason="needs datasets")
@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_files_that_datasets_reads_are_kept_whole_or_refused(tmp_path, monkeypatch, script, suffix, examples):
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    numbers = iter(range(10**6))

    def check(rows, at, lost, new, damaged):
        path = tmp_path / f"rows{next(numbers)}{suffix}"
        rows = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in rows]
        try:
            write(path, rows)
        except UnicodeEncodeError:  # half of a surrogate pair, which no UTF-8 file can hold
            return None
        whole = path.read_bytes()
        at %= len(whole) + 1
        path.write_bytes(whole[:at] + new + whole[at + lost:] if damaged else whole)
        return outcome(script, path)[0] > 0
    kinds = pairs if suffix == ".csv" else both
    every(st.tuples(st.lists(kinds, min_size=1, max_size=3), *damage, st.booleans()), check, examples)


HOSTILE = {"deep.jsonl": DEEP, "columns.jsonl": b'{"a\\nb\\u2028\\ud800": 1}', "bytes.jsonl": bytes(range(256)),
           "empty.jsonl": b"",
           "long.jsonl": json.dumps(dict(prompt="and so on " * 999, chosen=" a", rejected=" b", label=True)).encode()}


@pytest.mark.slow
@pytest.mark.parametrize("script", ["dpo.py", "kto.py"])
@pytest.mark.parametrize("name", HOSTILE)
def test_command_line_refuses_a_hostile_file_in_one_line(tmp_path, script, name):
    (tmp_path / name).write_bytes(HOSTILE[name])
    flags = ["--data", str(tmp_path / name), "--model", tiny(), "--out", str(tmp_path / "out")]
    ended = subprocess.run([sys.executable, script, *flags], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2 and name in ended.stderr
    assert ended.stderr.startswith(f"{script}: ") and len(ended.stderr.splitlines()) == 1


def test_token_across_the_end_of_a_chat_prompt_costs_no_row(tmp_path):
    rows = [dict(prompt=said("q"), chosen=said(start + "a"), rejected=said(start + "b")) for start in ("", "\n")]
    write(path := tmp_path / "rows.jsonl", rows)
    assert outcome(dpo, path, TOKENIZERS["line break"])[0] == 2
