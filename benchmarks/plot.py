"""Curves of runs: one panel per metric, one line per run.

    python benchmarks/plot.py out/dpo                                       # the folder of any run's --out
    python benchmarks/plot.py out/a out/b --metrics loss eval_score --out curves.png
    python benchmarks/plot.py out/a out/b --smooth 0.9                      # thin lines: as logged

A run's line has its folder's name. --smooth s draws an exponential moving average, the mean of about 1 / (1 − s) steps.
Metrics that are logged at few steps, such as eval_*, get dots and no smoothing.
"""
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

METRICS = ["loss", "rewards/margins", "rewards/accuracies", "reward", "kl", "eval_loss", "eval_rewards/margins",
           "eval_rewards/accuracies", "eval_reward", "eval_kl", "eval_score", "grad_norm"]
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe, Ito
STYLES = ["-", "--", ":", "-."]  # for more runs than colours


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]  # folders with a metrics.jsonl
    metrics: tuple[str, ...] = ()  # panels; none: what the runs have of the usual ones
    out: str = "curves.png"
    smooth: float = 0.0  # weight of the past in the moving average; 0: none
    columns: int = 3  # panels side by side


def read(folder: str) -> list[dict]:
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        sys.exit(f"plot.py: {path}: there is no such file; name the --out of a run")
    return [json.loads(line) for line in path.read_text().splitlines()]


def moving_average(values: list[float], weight: float) -> list[float]:
    averages, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + value, weight * norm + 1
        averages.append(total / norm)  # a mean of what there is: no pull towards 0 at the beginning
    return averages


def import_pyplot():
    try:
        import matplotlib
    except ImportError:
        sys.exit("this picture needs `pip install matplotlib`")
    matplotlib.use("Agg")  # no window
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
                                "axes.grid": True, "grid.color": "#e4e4e4", "axes.axisbelow": True,
                                "axes.titlesize": 11, "legend.frameon": False})
    from matplotlib import pyplot
    return pyplot


def save(figure, path: str):
    """A PNG of 64 colours: a quarter of the bytes, and no visible difference."""
    from PIL import Image  # comes with matplotlib
    figure.savefig(path, dpi=90)
    Image.open(path).convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def draw(panel, lines: list[dict], name: str, number: int, smooth: float):
    """One run's line in one panel. Returns its handle for the legend."""
    logged = [line for line in lines if name in line]
    steps, values = [line["step"] for line in logged], [line[name] for line in logged]
    look = dict(color=COLOURS[number % len(COLOURS)], linestyle=STYLES[number // len(COLOURS) % len(STYLES)])
    few = len(steps) < 20
    if smooth and not few:
        panel.plot(steps, values, **look, alpha=0.25, linewidth=0.8)
        values = moving_average(values, smooth)
    return panel.plot(steps, values, **look, linewidth=1.6, marker="o" if few else None, markersize=3.5)[0]


def main(args: Args):
    plt, runs = import_pyplot(), {folder: read(folder) for folder in args.runs}
    found = {name for lines in runs.values() for line in lines for name in line}
    names = list(args.metrics) or [name for name in METRICS if name in found]
    unknown = [name for name in names if name not in found]
    if unknown or not names:
        sys.exit(f"plot.py: no run has {unknown or 'metrics'}; there are {', '.join(sorted(found))}")
    columns = min(args.columns, len(names))
    rows = math.ceil(len(names) / columns)
    figure, panels = plt.subplots(rows, columns, figsize=(3.4 * columns, 2.3 * rows + 0.4), squeeze=False)
    for panel, name in zip(panels.flat, names):
        handles = [draw(panel, lines, name, n, args.smooth) for n, lines in enumerate(runs.values())]
        panel.set_title(name, loc="left")
        panel.set_xlabel("step")
    for panel in panels.flat[len(names):]:
        panel.axis("off")
    figure.legend(handles, [Path(folder).name for folder in runs], ncols=min(6, len(runs)), loc="upper center")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / figure.get_figheight()))
    save(figure, args.out)
    print(f"{len(names)} metrics of {len(runs)} runs: {args.out}")


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
