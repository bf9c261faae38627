"""A table of what against_trl.py has measured.

    python benchmarks/trl_table.py benchmarks/smollm2.json
"""
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from plot import mean_std, print_table

SIDES = {"refcache": "this project", "trl": "TRL"}


@dataclass
class Args:
    results: tyro.conf.Positional[str]  # a .json of against_trl.py


def main(args: Args):
    results = json.loads(Path(args.results).read_text())
    print_comparison(results)


def runs_of(entry: dict) -> list[list[dict]]:
    """The runs of a work, here and in TRL. A run that was killed, out of memory, is left out."""
    return [[run for run in entry[side] if run] for side in SIDES]


def print_comparison(results: dict):
    """A row per work: medians over the runs of each side, and the highest memory. Then what was computed."""
    rows = [["work", "here: s per step", "TRL", "TRL / here", "here: peak GiB", "TRL", "tokens per sample",
             "timed steps"]]
    for work, entry in results.items():
        sides = runs_of(entry)
        peaks = [f"{max(run['peak'] for run in runs):.1f}" if runs else "killed" for runs in sides]
        lengths = [length for length in map(mean_length, sides) if length]
        # The first step of each run is not timed, unless it is the only one.
        steps = [f"{max(1, len(runs[0]['steps']) - 1)} × {len(runs)}" if runs else "" for runs in sides]
        rows.append([f"`{work}`", *compare(sides, "seconds"), *peaks, " / ".join(lengths), " / ".join(steps)])
        if entry["refcache"][0]["reference"]:
            rows.append([f"reference pass of `{work}`", *compare(sides, "reference"), "", "", "", ""])
    print_table(rows)

    print()
    for work, entry in results.items():
        ours, theirs = runs_of(entry)
        if ours and theirs and not ours[0]["lengths"][0]:  # no samples, so both sides have the same data
            gap = max(abs(x - y) for x, y in zip(ours[0]["losses"], theirs[0]["losses"]))
            print(f"{work}: the losses of {entry['steps']} steps differ by at most {gap:.1e}")

        for name, runs in zip(SIDES.values(), (ours, theirs)):
            if runs and runs[0]["held_out"]:
                before = mean_std([run["held_out"][0][1] for run in runs])
                after = mean_std([run["held_out"][-1][1] for run in runs])
                seconds = mean_std([sum(run["steps"]) for run in runs], digits=0)
                print(f"{work}, {name}, {len(runs)} runs: held-out reward {before} to {after} in {seconds} s "
                      "of training")


def compare(sides: list[list[dict]], name: str) -> list[str]:
    """The median of a number here and in TRL, and their ratio."""
    medians = [median(run[name] for run in runs) if runs else None for runs in sides]
    ours, theirs = medians
    cells = ["killed, out of memory" if number is None else f"{number:.2f}" for number in medians]
    return cells + ["" if None in medians else f"{theirs / ours:.1f}"]


def mean_length(runs: list[dict]) -> str:
    """The mean over all samples of all runs, or nothing if there are none."""
    lengths = [length for run in runs for length in run["lengths"] if length]
    return f"{mean(lengths):.1f}" if lengths else ""


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
