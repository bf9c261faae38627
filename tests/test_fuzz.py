"""Files that nobody meant to train on. load_rows gives every row back whole or counts it as dropped, or refuses the file in one
sentence that says where; it never does anything else. Few examples by default, many with `python -m pytest -m fuzz`."""
import csv
import io
import json
import re
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import dpo
import kto
from refcache import BadInput

ROOT = Path(dpo.__file__).parent
MODEL = str(ROOT / "demo/model")
END, LIMIT = "<|end|>", 60  # tokens: some rows are longer
DEEP = b"[" * 100_000

BOTH = pytest.mark.parametrize("script", [dpo, kto], ids=["dpo", "kto"])
SUFFIXES = pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
EXAMPLES = pytest.mark.parametrize("examples", [15, pytest.param(400, marks=pytest.mark.fuzz)], ids=["few", "many"])


def variant(template="as it is", **tokens):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    if template != "as it is":
        tokenizer.chat_template = template
    return tokenizer


def byte_level(**tokens):
    """No merges, no template; a BOS before any text, where there is one."""
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["<s>", "</s>"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if "bos_token" in tokens:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary.index("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)


TOKENIZER, MANY = variant(), "{% for m in messages %}"
TOKENIZERS = {
    "no pad": variant(pad_token=None), "no EOS": variant(eos_token=None), "bytes": byte_level(eos_token="</s>"), "bytes, no EOS": byte_level(),
    "bytes, BOS": byte_level(bos_token="<s>", eos_token="</s>"), "no template": variant(None), "empty": variant(""), "broken": variant("{% if %}"),
    "raises": variant("{{ raise_exception('no\nsuch role') }}"), "divides": variant("{{ 1 / 0 }}"), "constant": variant("Hello."),
    "turns around": variant("{% for m in messages | reverse %}{{ m.content }}{% endfor %}"), "deaf": variant(MANY + "{{ m.role }};{% endfor %}"),
    "bare": variant(MANY + "{{ m.content }}{% endfor %}"), "trims": variant(MANY + "{{ m.role }}\n{{ m.content | trim }}" + END + "{% endfor %}"),
    "line break": variant(MANY + "{{ m.role }}\n\n{{ m.content }}" + END + "{% endfor %}{% if add_generation_prompt %}assistant\n\n{% endif %}")}

ODD = ["\ufeff", "\0", "\r\n", "\u2028", "\u202eשלום", "👩‍👩‍👧", "e\u0301", " ", "\n\n", " \t ", "<|end|>", "<|assistant|>", "</s>", "[" * 99, "1e999", '"",', "long " * 40]
texts = st.builds("".join, st.lists(st.sampled_from(ODD) | st.text(max_size=9), min_size=1, max_size=4)).filter(bool)
apart = st.tuples(texts, texts).filter(lambda two: two[0].removesuffix(END) != two[1].removesuffix(END))
chats = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "a\nb"]) | texts, "content": texts}), min_size=1, max_size=3)
extra = st.dictionaries(st.sampled_from(["id", "", "a\nb", "\ud800", "label "]), st.sampled_from([None, 10**400, float("nan"), -float("inf"), [[{}]]]), max_size=2)
labels = st.sampled_from([True, False, 1, 0, 1.0, "1", "0", "true", "False"])


def said(text):
    return [{"role": "assistant", "content": text}]


def good_rows(script, suffix):
    """Rows that must be kept, or dropped and counted."""
    pair = st.builds(lambda prompt, two, more: {**more, "prompt": prompt, "chosen": two[0], "rejected": two[1]}, texts, apart, extra)
    chat = st.builds(lambda row, prompt: {**row, "prompt": prompt, "chosen": said(row["chosen"]), "rejected": said(row["rejected"])}, pair, chats)
    kinds = pair if suffix == ".csv" else pair | chat
    one = st.builds(lambda row, label: {"prompt": row["prompt"], "completion": row["chosen"], "label": label}, kinds, labels)
    if suffix == ".csv":  # where everything is text, and the columns are the first row's
        pair, one = (kind.map(lambda row: {name: str(value).replace("\ud800", "") for name, value in row.items() if name in NAMES})
                     for kind in (pair, one.filter(lambda row: row["label"] != 1.0 or not isinstance(row["label"], float))))
        return pair if script is dpo else one
    return kinds if script is dpo else kinds | one


NAMES = ("prompt", "chosen", "rejected", "completion", "label")
WRONG = st.sampled_from([None, "", 5, 10**400, float("nan"), [], {}, [1], [[]], [{}], "\ud800", "half \udfff", [{"role": "user"}], [{"content": "x"}],
                         [{"role": None, "content": "x"}], [{"role": "user", "content": [{"type": "text"}]}], said(""), said("\ud800")])


def bad_rows(script, suffix):
    """Rows that must be refused: one column wrong, or gone."""
    wrong = st.builds(lambda row, name, value: {**row, name: value}, good_rows(dpo, ".json"), st.sampled_from(NAMES[:3]), WRONG)
    gone = st.builds(lambda row, name: {k: v for k, v in row.items() if k != name}, good_rows(dpo, ".json"), st.sampled_from(NAMES[1:3]))
    unlabelled = st.builds(lambda label, name: {"prompt": "a", "completion": " b", name: label}, st.sampled_from([None, 2, "", "yes\n" * 999, [], float("nan")]),
                           st.sampled_from(["label", "lab\nel" * 99]))
    same = st.builds(lambda text: {"prompt": END, "chosen": text, "rejected": text + END}, texts.filter(lambda text: not text.endswith(END)))
    if suffix == ".csv":
        return st.sampled_from([{"prompt": "a"}, {"prompt": "", "chosen": "b", "rejected": "c", "completion": "", "label": "1"}])
    return wrong | gone | same | unlabelled | st.sampled_from([None, 7, "text", [], [{}], True])


def write(path, rows):
    if path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8-sig") as file:
            (writer := csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))).writeheader()
            writer.writerows(rows)
    else:
        path.write_text("\ufeff" + ("\r\n".join(map(json.dumps, rows)) if path.suffix == ".jsonl" else json.dumps(rows, indent=1)), encoding="utf-8")


def outcome(script, path, tokenizer=TOKENIZER, truncate=False):
    """"kept", after a look at every row, or the sentence that refuses the file."""
    try:
        with redirect_stdout(io.StringIO()) as out:
            rows = script.load_rows(str(path), tokenizer, LIMIT, script.Args(truncate=truncate))
    except BadInput as error:
        assert len(str(error).splitlines()) == 1 and path.name in str(error) and len(str(error)) < 700
        return str(error)
    kept, of = map(int, re.search(r": (\d+) of (\d+) rows", out.getvalue()).groups())
    assert kept == len({id(row.row) for row in rows}) and kept + sum(map(int, re.findall(r"; (\d+) dropped", out.getvalue()))) == of
    for row in rows:
        for answer, name in ((row.chosen, "chosen"), (row.rejected, "rejected")) if script is dpo else [
                (row.completion, "completion" if "chosen" not in row.row else "chosen" if row.label else "rejected")]:
            assert row.prompt and answer and len(row.prompt + answer) <= LIMIT and all(type(i) is int and 0 <= i < len(tokenizer) for i in row.prompt + answer)
            value, end, read = row.row[name], tokenizer.eos_token, tokenizer.decode(answer)
            if isinstance(value, str):
                prompt, values = row.row["prompt"], [row.row[n] for n in ("chosen", "rejected") if n in row.row]
                wholes = [prompt + value] + [value] * (len(values) == 2 and all(v.startswith(prompt) for v in values))  # the prompt may be in them
                wholes = [whole + ("" if value.endswith(end) else end) for whole in wholes]
                start = tokenizer.bos_token if tokenizer.bos_token and row.prompt[0] == tokenizer.bos_token_id else ""
                assert wholes[0].endswith(read)
                assert "truncated" in out.getvalue() or tokenizer.decode(row.prompt + answer) in [start + whole for whole in wholes]
            elif "content" in (tokenizer.chat_template or ""):
                assert value[-1]["role"] == "system" or value[-1]["content"].strip() in read
        assert script is kto or row.chosen != row.rejected
        assert script is dpo or "label" not in row.row or "chosen" in row.row or row.label == (row.row["label"] in (1, "1", "true", "True"))
    return "kept"


def every(strategy, check, examples) -> Counter:
    """Checks so many examples, always the same ones: how often the check said what."""
    said = Counter()
    settings(max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))(
        given(strategy)(lambda example: said.update([check(*example)])))()
    return said


@BOTH
@SUFFIXES
@EXAMPLES
def test_good_rows_are_kept_whole_or_counted(tmp_path, script, suffix, examples):
    def check(rows, truncate):
        write(path := tmp_path / f"rows{suffix}", rows)
        said = outcome(script, path, truncate=truncate)
        assert said == "kept" or "no row fits" in said
        return said == "kept"
    assert every(st.tuples(st.lists(good_rows(script, suffix), min_size=1, max_size=4), st.booleans()), check, examples)[True] > examples / 2


@BOTH
@SUFFIXES
@EXAMPLES
def test_one_bad_row_is_named(tmp_path, script, suffix, examples):
    def check(rows, bad, at):
        write(path := tmp_path / f"rows{suffix}", rows[:at] + [bad] + rows[at:])
        said, n = outcome(script, path), min(at, len(rows)) + 1
        assert re.search(rf"rows{suffix} (line|row) {n if suffix != '.csv' else '[0-9]+'}\b", said), said
    every(st.tuples(st.lists(good_rows(script, suffix), max_size=3), bad_rows(script, suffix), st.integers(0, 3)), check, examples)


@BOTH
@SUFFIXES
@EXAMPLES
def test_damaged_files_are_read_or_refused(tmp_path, script, suffix, examples):
    junk = st.sampled_from([b"", b"x", DEEP, b'{"a":' * 999, b"NaN", b"9" * 5000, b'"', b'""', b",", b"\\ud800", b"\xff", b"\0", b"\r", b"\n\n", b"\xef\xbb\xbf",
                            b"\xe2\x80\xa8", b'{"prompt": 1, "prompt": "a"}', b"null", b"{}", b"]"]) | st.binary(max_size=9)
    def check(rows, at, lost, new):
        write(path := tmp_path / f"rows{suffix}", rows)
        whole = path.read_bytes()
        at %= len(whole) + 1
        path.write_bytes(whole[:at] + new + whole[at + lost:])
        return outcome(script, path) == "kept"
    damage = st.integers(0, 2000), st.sampled_from([0, 0, 1, 3, 9999]), junk
    said = every(st.tuples(st.lists(good_rows(script, suffix), min_size=1, max_size=3), *damage), check, examples)
    assert said[False] and (said[True] or examples < 100)  # both happen


@BOTH
@EXAMPLES
@pytest.mark.parametrize("name", TOKENIZERS)
def test_other_tokenizers_and_templates_lose_nothing(tmp_path, script, examples, name):
    def check(row, truncate):
        write(path := tmp_path / "rows.jsonl", [row])
        return outcome(script, path, TOKENIZERS[name], truncate) == "kept"
    every(st.tuples(good_rows(script, ".jsonl"), st.booleans()), check, examples // 3)


HOSTILE = {"deep.jsonl": DEEP, "columns.jsonl": b'{"a\\nb\\u2028\\ud800": 1}', "quote.csv": b'prompt,chosen,rejected\na, b, c\n"a"b, b, c\n',
           "bytes.json": bytes(range(256)), "empty.jsonl": b"", "long.jsonl": json.dumps(dict(prompt="and so on " * 999, chosen=" a", rejected=" b")).encode()}


@pytest.mark.parametrize("script, name", [("dpo.py", name) if name == "long.jsonl" else pytest.param(script, name, marks=pytest.mark.fuzz)
                                          for name in HOSTILE for script in ("dpo.py", "kto.py")][:-1])
def test_the_command_line_says_one_line(tmp_path, script, name):
    (tmp_path / name).write_bytes(HOSTILE[name])
    done = subprocess.run([sys.executable, script, "--data", str(tmp_path / name), "--model", MODEL, "--out", str(tmp_path / "out")],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"{script}: ") and len(done.stderr.splitlines()) == 1 and name in done.stderr


def test_a_broken_quote_names_its_line(tmp_path):
    (tmp_path / "rows.csv").write_bytes(HOSTILE["quote.csv"])
    assert "rows.csv line 3" in outcome(dpo, tmp_path / "rows.csv")


def test_a_token_over_the_end_of_a_chat_s_prompt_costs_one_row_only(tmp_path):
    write(path := tmp_path / "rows.jsonl", [dict(prompt=said("q"), chosen=said(start + "a"), rejected=said(start + "b")) for start in ("", "\n")])
    assert outcome(dpo, path, TOKENIZERS["line break"]) == "kept"
