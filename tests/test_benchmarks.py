"""Tables and pictures of committed results."""
import re
import subprocess
import sys

import pytest
from runs import ROOT


def start(name, *flags, folder="benchmarks"):
    command = [sys.executable, f"{ROOT}/{folder}/{name}.py", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_tables_and_pictures_of_results(tmp_path):
    """Of a model's measurements, and of runs: a metric that is null at a step is left out there."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "smollm2.png"
    table = start("trl_table", ROOT / "benchmarks/smollm2.json", "--out", picture, folder="benchmarks")
    assert "| reference pass of `dpo` | " in table and picture.exists()
    table = start("plot", *ROOT.glob("benchmarks/runs/kto_sums-*"), folder="tools")
    assert re.search(r"\| eval_(score|reward) \| 0\.\d+ ± 0\.\d+ \| ", table)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval_kl": 0.5}\n{"step": 1, "eval_kl": null}\n')
    assert "| eval_kl | 0.500 | 0.500 |" in start("plot", tmp_path, folder="tools")

    results = ROOT / "benchmarks/frontier.jsonl"
    table = start("frontier", "--results", results, "--figure", tmp_path / "frontier.png", folder="demo")
    assert (ROOT / "benchmarks/README.md").read_text().count(table) == 1 and (tmp_path / "frontier.png").exists()
