"""The README's table of results: every script on the demo with some seeds, as a user starts them.

    python benchmarks/demo.py    # seeds 0, 1, 2
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
COLUMNS = {"dpo": ["eval_rewards/accuracies", "eval_rewards/margins"], "kto": ["eval_rewards/accuracies", "eval_rewards/margins"], "rloo": ["eval_reward", "eval_kl"]}


@dataclass
class Args:
    seeds: tuple[int, ...] = (0, 1, 2)
    scripts: tuple[str, ...] = ("dpo", "kto", "rloo")


def main(args: Args):
    for script in args.scripts:
        runs, seconds = [], []
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as out:
                begin = time.monotonic()
                subprocess.run([sys.executable, f"{script}.py", "--seed", str(seed), "--out", out], cwd=ROOT, check=True, capture_output=True)
                seconds.append(time.monotonic() - begin)
                lines = [json.loads(line) for line in open(Path(out) / "metrics.jsonl")]
                runs.append((lines[0], lines[-1]))

        def spread(name, last):
            values = [run[last][name] for run in runs if name in run[last]]
            return f"{mean(values):.2f} ± {stdev(values) if len(values) > 1 else 0:.2f}" if values else ""
        print(f"| `python {script}.py` | success {spread('eval_score', 0)} -> {spread('eval_score', 1)} | " + " | ".join(
            f"{name} {spread(name, 0)} -> {spread(name, 1)}" for name in COLUMNS[script]) + f" | {mean(seconds):.0f} s |")


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
