"""Tables of results, and a picture of those beside TRL, which needs matplotlib.

    python tools/plot.py out/dpo out/kto  # held-out metrics: mean ± standard deviation over the runs
    python tools/plot.py benchmarks/smollm2.json --out docs/smollm2.png  # of benchmarks/against_trl.py

tools/look.py draws the curves of runs.
"""
import io
import json
import re
import sys
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import mean, median, stdev

import numpy as np
import tyro

METRICS = [
    "loss", "rewards/margins", "rewards/accuracies", "reward", "kl", "eval_loss", "eval_rewards/margins",
    "eval_rewards/accuracies", "eval_reward", "eval_kl", "eval_score", "samples/distinct", "grad_norm"]
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito
LOOK = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4",
        "axes.titlesize": 11, "axes.titlelocation": "left", "legend.frameon": False}
SIDES = {"refcache": "this project", "trl": "TRL"}  # of a .json of against_trl.py


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]  # folders with a metrics.jsonl; or a .json of against_trl.py
    out: str = "curves.png"  # the picture of a .json


def main(args: Args):
    if not args.runs:
        sys.exit("name the folders of runs, or a .json of against_trl.py")
    if args.runs[0].endswith(".json"):
        results = json.loads(Path(args.runs[0]).read_text())
        print_comparison(results)
        draw_comparison(results, args.out)
    else:
        print_table(held_out_table({name.rstrip("/"): read_run(name) for name in args.runs}))


def print_table(rows: list[list[str]]):
    """A table in Markdown, whose first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    print("\n".join(lines))


def mean_std(values: list[float], digits: int = 3) -> str:
    text = f"{mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {stdev(values):.{digits}f}"
    return text


def import_pyplot():
    import matplotlib
    matplotlib.use("Agg")  # no window
    matplotlib.rcParams.update(LOOK)
    from matplotlib import pyplot
    return pyplot


def save(figure, path: str):
    """A PNG has 64 colours, which is a quarter of the bytes."""
    figure.savefig(path, dpi=90)
    if path.endswith(".png"):
        from PIL import Image  # comes with matplotlib
        Image.open(path).convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


# ---- Runs ------------------------------------------------------------

def read_run(folder: str) -> dict[str, dict[int, float]]:
    """The metrics of a run: name -> step -> value. Null, the mean of nothing, is left out."""
    path = Path(folder, "metrics.jsonl")
    if not path.exists():
        sys.exit(f"{folder} has no metrics.jsonl: name the folder of a run, its --out")

    run = {}
    for line in path.open():
        values = json.loads(line)
        step = values.pop("step")
        for metric, value in values.items():
            if value is not None:
                run.setdefault(metric, {})[step] = value
    return run


def held_out_table(runs: dict[str, dict]) -> list[list[str]]:
    """The mean over the runs of their first and of their last values, and the last value of each run."""
    columns = list(runs) if len(runs) > 1 else []
    rows = [["held out", "before", "after", *(Path(folder).name for folder in columns)]]
    names = [name for run in runs.values() for name in run if name.startswith("eval_")]
    for name in dict.fromkeys(names):  # each name once
        found = {folder: list(run[name].values()) for folder, run in runs.items() if name in run}
        before = mean_std([values[0] for values in found.values()])
        after = mean_std([values[-1] for values in found.values()])
        ends = [f"{found[folder][-1]:.3f}" if folder in found else "" for folder in columns]
        rows.append([name, before, after, *ends])
    return rows


def usual_metrics(runs: dict[str, dict]) -> list[str]:
    """Those of METRICS that one of the runs has."""
    found = set().union(*runs.values())
    return [name for name in METRICS if name in found]


def draw_svg(runs: dict[str, dict], name: str) -> str:
    """A picture of a metric for a page, as a <svg> in the page's colours. Each run has a line."""
    pyplot = import_pyplot()
    pyplot.rcParams["svg.fonttype"] = "none"  # text stays text
    figure, panel = pyplot.subplots(figsize=(3.4, 2.2))
    for values, colour in zip((run.get(name, {}) for run in runs.values()), cycle(COLOURS)):
        marker = "o" if len(values) < 20 else None
        panel.plot(
            list(values), list(values.values()), color=colour, linewidth=1.6, marker=marker, markersize=3.5)
    panel.set(title=name, xlabel="step")
    figure.subplots_adjust(left=0.16, right=0.98, bottom=0.21, top=0.83)

    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True)
    pyplot.close(figure)
    svg = re.sub("^.*(?=<svg)|<metadata>.*</metadata>", "", file.getvalue(), flags=re.DOTALL)
    return svg.replace("#000000", "currentColor").replace("#e4e4e4", "var(--line)")


# ---- A real model, here and in TRL: results of against_trl.py ---------

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


def draw_comparison(results: dict, path: str):
    """Held-out reward against seconds of training, mean ± std; and the losses of DPO, both curves."""
    works = [work for work in results if work.startswith("rloo sums")]
    if not works or "dpo" not in results:
        sys.exit("no picture: it needs the works dpo and rloo sums")
    sums = results[works[0]]

    figure, (left, right) = import_pyplot().subplots(1, 2, figsize=(9, 3.4))
    for name, colour, runs in zip(SIDES.values(), COLOURS, runs_of(sums)):
        steps = [step for step, _ in runs[0]["held_out"]]
        rewards = np.array([[reward for _, reward in run["held_out"]] for run in runs])  # (runs, evaluations)
        seconds = np.mean([np.cumsum([0, *run["steps"]])[steps] for run in runs], axis=0)
        middle, spread = rewards.mean(axis=0), rewards.std(axis=0, ddof=min(1, len(runs) - 1))
        left.fill_between(seconds, middle - spread, middle + spread, color=colour, alpha=0.2, linewidth=0)
        label = f"{name}, {len(runs)} seeds" if len(runs) > 1 else f"{name}, one seed"
        left.plot(seconds, middle, color=colour, linewidth=1.8, marker="o", markersize=4, label=label)

    styles = [dict(linewidth=5, alpha=0.4), dict(linewidth=1.4)]  # ours is the broad one below
    for (side, name), colour, style in zip(SIDES.items(), COLOURS, styles):
        losses = results["dpo"][side][0]["losses"]
        right.plot(range(1, len(losses) + 1), losses, color=colour, label=name, **style)

    left.set(title=f"RLOO, {sums['steps']} steps: held-out reward", xlabel="seconds of training", ylim=(0, 1))
    right.set(title="DPO: loss", xlabel="step")
    for panel in (left, right):
        panel.legend()
    figure.tight_layout()
    save(figure, path)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
