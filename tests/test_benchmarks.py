"""Benchmarks with tiny sizes, tables and pictures of committed results, and the help of each program."""
import ast
import os
import re
import runpy
import subprocess
import sys
from unittest import mock

import pytest
from models import cases
from runs import ROOT


def start(name, *flags, folder="benchmarks"):
    command = [sys.executable, f"{ROOT}/{folder}/{name}.py", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@cases("line, row", [
    (f"against_trl --tiny --works dpo rloo --baseline {ROOT}", "| rloo 16+4, k=2 | baseline | "),
    ("against_trl --tiny --works reference", "| reference | trl + cache | "),
    ("gpu speed --tiny", "tiny, rloo.py, k=8 | prompt 40,")])
def test_benchmark_prints_rows(line, row):
    if "works reference" in line:
        pytest.importorskip("trl")
    assert row in start(*line.split())


@pytest.mark.slow
def test_tables_and_pictures_of_results(tmp_path):
    pytest.importorskip("matplotlib")
    table = start("trl_table", ROOT / "benchmarks/smollm2.json", folder="benchmarks")
    assert "| reference pass of `dpo` | " in table
    table = start("plot", *ROOT.glob("benchmarks/runs/kto_sums-*"), folder="tools")
    assert re.search(r"\| eval_(score|reward) \| 0\.\d+ ± 0\.\d+ \| ", table)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval_kl": 0.5}\n{"step": 1, "eval_kl": null}\n')
    assert "| eval_kl | 0.500 | 0.500 |" in start("plot", tmp_path, folder="tools")

    results = ROOT / "benchmarks/frontier.jsonl"
    table = start("frontier", "--results", results, "--figure", tmp_path / "frontier.png", folder="demo")
    assert "| `dpo` | 0.05 | 2.52, 2.95 | " in table and (tmp_path / "frontier.png").exists()


# Modules without a command line, such as demo/score.py, are no programs.
FILES = sorted(path for folder in ("demo", "tools", "benchmarks") for path in ROOT.glob(f"{folder}/*.py"))
PROGRAMS = [path for path in FILES if "__main__" in path.read_text()]


@cases("path", PROGRAMS, ids=lambda path: path.name)
def test_help_is_printed_and_nothing_else_is_done(path, tmp_path, monkeypatch, capsys):
    text = path.read_text()
    if "\nfrom trl" in text:
        pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as end:  # an import may set variables
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0
    first_words = " ".join(ast.get_docstring(ast.parse(text)).split()[:4])
    assert first_words in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
