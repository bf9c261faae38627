"""Prints a table of the held-out metrics of runs. tools/look.py draws their curves with this file.

    python tools/plot.py out/dpo out/kto  # mean ± standard deviation over the runs
"""
import io
import json
import re
import sys
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import mean, stdev

import tyro

METRICS = [
    "loss", "rewards/margins", "rewards/accuracies", "reward", "kl", "eval_loss", "eval_rewards/margins",
    "eval_rewards/accuracies", "eval_reward", "eval_kl", "eval_score", "samples/distinct", "grad_norm"]
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito
LOOK = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4",
        "axes.titlesize": 11, "axes.titlelocation": "left", "legend.frameon": False}


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]  # their folders


def main(args: Args):
    print_table(held_out_table({folder: read_run(folder) for folder in args.runs}))


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


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
