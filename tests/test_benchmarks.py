"""Every benchmark runs, with tiny sizes."""
import json
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")


def start(name, *flags):
    command = [sys.executable, f"{ROOT}/benchmarks/{name}.py", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


TINY = [
    "logprobs exactness", "logprobs bytes --pairs 200",
    "logprobs reference --hidden 64 --layers 1 --vocab 200 --rows 9 --repeats 1",
    "logprobs step --hidden 64 --layers 1 --vocab 200 --tokens 50 --repeats 1",
    "references --hidden 64 --layers 1 --words 20 --steps 2 --rounds 1", "growth --tiny",
    "lora_memory --hidden 64 --layers 2 --rounds 1",
    "rloo_memory --systems ours --k 2 --prompt_tokens 99 --new_tokens 8",
    "rollouts --hidden 64 --layers 1 --vocab 500 --new_tokens 8 --rounds 1 --ways usual loop static",
    "processes --processes 2 --hidden 64 --layers 2 --steps 3 --rounds 1", "against_trl --tiny",
    "demo --scripts dpo --seeds 0"]
PEFT, TRL = {"references", "lora_memory"}, {"against_trl"}


@pytest.mark.parametrize("line", TINY)
def test_benchmark_runs_with_tiny_sizes(line):
    name, *flags = line.split()
    for package in (["peft"] if name in PEFT else ["trl"] if name in TRL else []):
        pytest.importorskip(package)
    assert start(name, *flags).strip()


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 60_000


@needs_matplotlib
def test_plot_draws_the_curves_of_two_runs(tmp_path):
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        lines = [{"step": step, "loss": random.random(), "kl": 0.0} for step in range(30)]
        (tmp_path / run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = start("plot", tmp_path / "a", tmp_path / "b", "--smooth", "0.5", "--out", tmp_path / "curves.png")
    assert said.startswith("1 metrics of 2 runs")  # kl is 0 throughout
    assert is_picture(tmp_path / "curves.png")


@needs_matplotlib
def test_frontier_gives_a_table_and_a_picture(tmp_path):
    start("frontier", "--methods", "dpo", "--betas", "0.1", "--seeds", "0", "--epochs", "0.1", "--prompts", "4",
          "--samples", "2", "--best_samples", "8", "--out", tmp_path)
    assert "| DPO | 0.1 | " in (tmp_path / "frontier.md").read_text()
    assert is_picture(tmp_path / "frontier.png")


@needs_trl
def test_hh_gives_a_row_for_every_way(tmp_path):
    rows = [{"prompt": f"\n\nHuman: {n}?\n\nAssistant:", "chosen": f" I see {n}.", "rejected": f" No {n * n}, no."}
            for n in range(80)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = start("hh", "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "out", "--hidden", "32", "--layers", "1",
                 "--vocab", "300", "--max_length", "64", "--lm_epochs", "1", "--pairs", "16", "--test", "8",
                 "--new_tokens", "4", "--seeds", "0")
    for way in ("dpo", "trl dpo", "kto", "trl kto", "rloo"):
        assert f"\n| {way} | " in said
    assert "rloo, reward of samples" in said


@needs_trl
def test_five_runs_computes_the_reference_once_for_ours(tmp_path):
    said = start("five_runs", "--lrs", "1e-5", "1e-4", "--steps", "1", "--batch_size", "2")
    assert "| dpo.py, one --ref_cache | 1 | 2,000 |" in said
    assert "| TRL, precompute_ref_log_probs | " in said
