"""The results of the demo: every script with some seeds, as a user starts it.

    python benchmarks/demo.py                           # seeds 0, 1, 2 of all three scripts
    python benchmarks/demo.py --scripts dpo --seeds 0   # one run
"""
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import tyro

ROOT = Path(__file__).parent.parent
PAIRS = ["eval_score", "eval_rewards/accuracies", "eval_rewards/margins"]
COLUMNS = {"dpo": PAIRS, "kto": PAIRS, "rloo": ["eval_score", "eval_reward", "eval_kl"]}


@dataclass
class Args:
    seeds: tuple[int, ...] = (0, 1, 2)
    scripts: tuple[str, ...] = ("dpo", "kto", "rloo")


def run(script: str, seed: int) -> tuple[dict, dict, float]:
    """The first and the last line of its metrics, and seconds from start to end."""
    with tempfile.TemporaryDirectory() as out:
        begin = time.monotonic()
        command = [sys.executable, f"{script}.py", "--seed", str(seed), "--out", out]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        seconds = time.monotonic() - begin
        lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[0]), json.loads(lines[-1]), seconds


def spread(values: list[float]) -> str:
    return f"{mean(values):.2f} ± {stdev(values) if len(values) > 1 else 0:.2f}"


def main(args: Args):
    for script in args.scripts:
        firsts, lasts, seconds = zip(*(run(script, seed) for seed in args.seeds))
        cells = []
        for name in COLUMNS[script]:
            before, after = (spread([lines[name] for lines in ends]) for ends in (firsts, lasts))
            cells.append(f"{name} {before} -> {after}")
        print(f"| `python {script}.py` | " + " | ".join(cells) + f" | {mean(seconds):.0f} s |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
