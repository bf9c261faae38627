"""The README's section "Change it" and docs/change_it.md: each diff is applied to a copy of its script, which is run."""
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

import dpo

ROOT = Path(dpo.__file__).parent
README = (ROOT / "README.md").read_text()
CHANGES = README + (ROOT / "docs/change_it.md").read_text()
DIFFS = re.findall(r"\n([^\n]+)\n\n```diff\n--- (\w+\.py)\n(.*?)```", CHANGES, re.S)  # (title, script, body)
FILES = {"dpo.py": "pairs", "rloo.py": "prompts"}


def patched(script: str, diff: str) -> str:
    """The script with every run of `-` lines replaced by the `+` lines that follow it."""
    text = (ROOT / script).read_text()
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", diff, re.M):
        old, new = ("".join(line[1:] for line in part.splitlines(True)) for part in (old, new))
        assert text.count(old) == 1, f"{script} holds {text.count(old)} times: {old}"
        text = text.replace(old, new)
    return text


def load(text: str, path: Path):
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module, script: str, folder: Path, name: str, **changes) -> list[dict]:
    rows = (ROOT / f"demo/{FILES[script]}.jsonl").read_text().splitlines(True)
    (folder / "train.jsonl").write_text("".join(rows[:24]))
    (folder / "test.jsonl").write_text("".join(rows[24:28]))
    common = dict(model=str(ROOT / "demo/model"), data=f"{folder}/train.jsonl", eval_data=f"{folder}/test.jsonl",
                  out=str(folder / name), steps=3, batch_size=8, lr=1e-3, warmup=0.0, samples=0)
    if script == "rloo.py":
        common |= dict(reward=(str(ROOT / "demo/score.py:sentiment"),), max_new_tokens=12, batch_size=4)
    return module.main(module.Args(**common | changes))


def test_readme_has_a_diff_for_every_promise():
    assert [script for _, script, _ in DIFFS] == ["dpo.py"] * 5 + ["rloo.py"]


@pytest.mark.parametrize("number", [0, 2, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
def test_change_from_the_readme_applies_and_runs(number, tmp_path):
    title, script, diff = DIFFS[number]
    changed = load(patched(script, diff), tmp_path / f"changed{number}.py")
    plain = sys.modules[script.removesuffix(".py")] if script == "dpo.py" else importlib.import_module("rloo")
    new = re.search(r'\+ +"sft", "(\w+)"', diff)
    flags = dict(loss=(new[1],)) if new else {}
    history, before = run(changed, script, tmp_path, "changed", **flags), run(plain, script, tmp_path, "plain")
    assert [line["step"] for line in history] == [0, 1, 2, 3]
    assert (history[3]["loss"] == before[3]["loss"]) == ("average" in title), "all but an average change the training"
    if "whole batch" in title:  # micro-batches change memory only
        split = run(changed, script, tmp_path, "split", tokens_per_forward=150, **flags)
        assert all(a["loss"] == pytest.approx(b["loss"], abs=1e-5) for a, b in zip(history[1:], split[1:]))
    if "average" in title:  # the averaged weights are what is saved
        from safetensors.torch import load_file
        one, two = (load_file(tmp_path / name / "model/model.safetensors") for name in ("changed", "plain"))
        assert any((one[name] - two[name]).abs().max() > 1e-6 for name in one)


def test_python_snippet_in_readme_runs(tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n(.*?)```", CHANGES, re.S)[1]
    monkeypatch.chdir(tmp_path)
    exec(code.replace("demo/model", str(ROOT / "demo/model")), {})
    assert "completions share their prompt" in capsys.readouterr().out


def test_line_counts_in_readme_are_true():
    for name, count in re.findall(r"\| `(\w+\.py)` \| (\d+) \|", README):
        assert len((ROOT / name).read_text().splitlines()) == int(count), name


def test_output_in_readme_has_the_names_of_the_metrics():
    names = re.findall(r"^(eval_[\w/]+) ", README, re.M)
    assert names and all(name.removeprefix("eval_") in dpo.__doc__ + " eval_score score" for name in names)


def test_data_rows_in_readme_are_json():
    rows = re.findall(r"`(\{\"prompt\".*?\})`", README)
    assert len(rows) == 3 and all("prompt" in json.loads(row) for row in rows)
