"""Every benchmark runs with tiny sizes; the demo/trl_cache.py runs."""
import re
import subprocess
import sys

import pytest
from models import parametrize
from runs import ROOT



def start(name, *flags, folder="benchmarks"):
    command = [sys.executable, f"{ROOT}/{folder}/{name}.py", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@parametrize("line, row", [
    (f"against_trl --tiny --works rloo --baseline {ROOT}", "| rloo 16+4, k=2 | baseline | "),
    ("against_trl --tiny", "| reference | trl + cache | "),
    ("gpu numbers --tiny", "ok    a saved model, loaded again | max_nats 0,"),
    ("gpu trl --tiny", "| dpo | trl | "),
    ("trl_precompute 1", "learning_rate=2e-06 | yes |"), ("trl_precompute 7", "bf16=True | no | -9.9")])
def test_benchmark_prints_rows(line, row):
    if "trl" in line:
        pytest.importorskip("trl")
    assert row in start(*line.split())


@pytest.mark.slow
def test_plot_prints_tables_and_draws(tmp_path):
    """Of a model's measurements, and of runs: a metric that is null at a step is left out there."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    table = start("plot", ROOT / "benchmarks/smollm2.json", "--out", picture, folder="tools")
    assert "| reference pass of `dpo` | " in table and picture.exists()
    table = start("plot", *ROOT.glob("benchmarks/runs/kto_sums-*"), "--out", picture, folder="tools")
    assert re.search(r"\| eval_(score|reward) \| 0\.\d+ ± 0\.\d+ \| ", table)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval_kl": 0.5}\n{"step": 1, "eval_kl": null}\n')
    assert "| eval_kl | 0.500 | 0.500 |" in start("plot", tmp_path, "--out", picture, folder="tools")

    results = ROOT / "benchmarks/frontier.jsonl"
    table = start("frontier", "--results", results, "--figure", tmp_path / "frontier.png", folder="demo")
    assert (ROOT / "benchmarks/README.md").read_text().count(table) == 1 and (tmp_path / "frontier.png").exists()
