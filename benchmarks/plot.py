"""Curves of runs, one panel per metric; and a table of the held-out metrics, mean ± std over the runs.

    python benchmarks/plot.py out/dpo                                       # the folder of any run's --out
    python benchmarks/plot.py out/a out/b --metrics loss eval_score --out curves.png
    python benchmarks/plot.py benchmarks/smollm2.json --out docs/smollm2.png  # of against_trl.py --model, and its table

Metrics that are 0 in all runs are left out. Metrics of few steps, such as eval_*, get dots.
"""
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev

import numpy as np
import tyro

METRICS = ["loss", "rewards/margins", "rewards/accuracies", "reward", "kl", "eval_loss", "eval_rewards/margins",
           "eval_rewards/accuracies", "eval_reward", "eval_kl", "eval_score", "samples/distinct", "grad_norm"]
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito
LOOK = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4",
        "axes.titlesize": 11, "axes.titlelocation": "left", "legend.frameon": False}


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]  # folders with a metrics.jsonl; or one file of against_trl.py --model
    metrics: tuple[str, ...] = ()  # panels; none: what the runs have of the usual ones
    out: str = "curves.png"


def import_pyplot():
    import matplotlib
    matplotlib.use("Agg")  # no window
    matplotlib.rcParams.update(LOOK)
    from matplotlib import pyplot
    return pyplot


def save(figure, path: str):
    """A PNG of 64 colours: a quarter of the bytes."""
    from PIL import Image  # comes with matplotlib
    figure.savefig(path, dpi=90)
    Image.open(path).convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def draw(panel, lines: list[dict], name: str, colour: str):
    """One run's line in one panel. Returns its handle for the legend."""
    steps, values = ([line[key] for line in lines if name in line] for key in ("step", name))
    marker = "o" if len(steps) < 20 else None
    return panel.plot(steps, values, color=colour, linewidth=1.6, marker=marker, markersize=3.5)[0]


def print_table(runs: list[list[dict]]):
    """Of the runs that have a metric at their beginning, or at their end."""
    print("| held out | before | after |\n|---|---|---|")
    for name in dict.fromkeys(name for lines in runs for name in lines[-1] if name.startswith("eval_")):
        ends = [[lines[i][name] for lines in runs if name in lines[i]] for i in (0, -1)]
        cells = [f"{mean(x):.3f} ± {stdev(x) if len(x) > 1 else 0:.3f}" if x else "" for x in ends]
        print(f"| {name} | " + " | ".join(cells) + " |")


# ---- A real model, here and in TRL -----------------------------------

SIDES = {"refcache": "this project", "trl": "TRL"}


def print_comparison(results: dict):
    """Medians over the runs of each side; of rewards the mean."""
    print("| work | side | s per step | times ours | peak GiB | reference pass, s | result |\n" + "|---" * 7 + "|")
    for work, entry in results.items():
        ours = entry["refcache"]
        for side, name in SIDES.items():
            runs = entry[side]
            if None in runs:
                print(f"| {work} | {name} | killed, out of memory | | | | |")
                continue
            seconds, base = (median(run["seconds"] for run in some) for some in (runs, ours))
            gap = max(abs(x - y) for x, y in zip(runs[0]["losses"], ours[0]["losses"]))
            result = f"losses at most {gap:.1e} from ours"
            if runs[0]["length"]:
                result = f"{mean(run['length'] for run in runs):.1f} tokens per sample in step 1"
            if runs[0]["held_out"]:
                before, after = (mean(run["held_out"][i][1] for run in runs) for i in (0, -1))
                total = mean(sum(run["steps"]) for run in runs)
                result = f"held-out reward {before:.3f} to {after:.3f} in {total:.0f} s"
            print(f"| {work} | {name} | {seconds:.2f} | {seconds / base:.1f} | {max(run['peak'] for run in runs):.1f} "
                  f"| {median(run['reference'] for run in runs):.1f} | {result} |")


def draw_comparison(results: dict, path: str):
    """Held-out reward against seconds of training; and the losses of DPO, one curve on top of the other."""
    sums = next((entry for work, entry in results.items() if work.startswith("rloo sums")), None)
    if not (sums and "dpo" in results):
        sys.exit("no picture: it needs the works dpo and rloo sums")
    figure, (left, right) = import_pyplot().subplots(1, 2, figsize=(9, 3.4))
    for (side, name), colour in zip(SIDES.items(), COLOURS):
        curves = []  # of each run: the seconds before its evaluations, and their rewards
        for run in sums[side]:
            seconds = np.cumsum([0, *run["steps"]])
            curves.append(([seconds[step] for step, _ in run["held_out"]], [reward for _, reward in run["held_out"]]))
            left.plot(*curves[-1], color=colour, linewidth=0.8, alpha=0.4)
        left.plot(*np.mean(curves, axis=0), color=colour, linewidth=1.8, marker="o", markersize=4, label=name)

        losses = results["dpo"][side][0]["losses"]
        style = dict(linewidth=5, alpha=0.4) if side == "refcache" else dict(linewidth=1.4)
        right.plot(range(1, len(losses) + 1), losses, color=colour, label=name, **style)
    left.set(title=f"RLOO, {sums['steps']} steps: held-out reward", xlabel="seconds of training", ylim=(0, 1))
    right.set(title="DPO: loss", xlabel="step")
    for panel in (left, right):
        panel.legend()
    figure.tight_layout()
    save(figure, path)


def main(args: Args):
    if args.runs[0].endswith(".json"):
        results = json.loads(Path(args.runs[0]).read_text())
        print_comparison(results)
        draw_comparison(results, args.out)
        return

    plt = import_pyplot()
    texts = [Path(folder, "metrics.jsonl").read_text() for folder in args.runs]
    runs = [[json.loads(line) for line in text.splitlines()] for text in texts]
    print_table(runs)
    found = {name for lines in runs for line in lines for name in line if abs(line[name]) > 1e-6}
    names = list(args.metrics) or [name for name in METRICS if name in found]
    if not names:
        sys.exit("none of the usual metrics is in these runs: name some with --metrics")
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    figure, panels = plt.subplots(rows, columns, figsize=(3.4 * columns, 2.3 * rows + 0.4), squeeze=False)
    for panel, name in zip(panels.flat, names):
        handles = [draw(panel, lines, name, COLOURS[n % 7]) for n, lines in enumerate(runs)]
        panel.set(title=name, xlabel="step")
    for panel in panels.flat[len(names):]:
        panel.axis("off")
    figure.legend(handles, [Path(folder).name for folder in args.runs], ncols=min(6, len(runs)), loc="upper center")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / figure.get_figheight()))
    save(figure, args.out)
    print(f"{len(names)} metrics of {len(runs)} runs: {args.out}")


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
