"""Curves of runs, one panel per metric; and a table of the held-out metrics, mean ± std over the runs.

    python benchmarks/plot.py out/dpo                                       # the folder of any run's --out
    python benchmarks/plot.py out/a out/b --metrics loss eval_score --out curves.png
    python benchmarks/plot.py benchmarks/smollm2.json --out docs/smollm2.png  # of against_trl.py

Metrics of few steps, such as eval_*, get dots.
"""
import json
import math
import sys
from dataclasses import dataclass
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


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]  # folders with a metrics.jsonl; or a .json of against_trl.py
    metrics: tuple[str, ...] = ()  # panels; none: what the runs have of the usual ones
    out: str | None = "curves.png"  # None: only the table


def import_pyplot():
    import matplotlib
    matplotlib.use("Agg")  # no window
    matplotlib.rcParams.update(LOOK)
    from matplotlib import pyplot
    return pyplot


def save(figure, path: str):
    """A PNG of 64 colours, which is a quarter of the bytes; another format as it is."""
    if not path.endswith(".png"):
        figure.savefig(path)
        return
    from PIL import Image  # comes with matplotlib
    figure.savefig(path, dpi=90)
    Image.open(path).convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def draw(panel, lines: list[dict], name: str, colour: str):
    """One run's line in one panel. Returns its handle for the legend."""
    steps, values = ([line[key] for line in lines if name in line] for key in ("step", name))
    marker = "o" if len(steps) < 20 else None
    return panel.plot(steps, values, color=colour, linewidth=1.6, marker=marker, markersize=3.5)[0]


def read_run(name: str) -> list[dict]:
    """The lines of metrics.jsonl in the folder of a run."""
    path = Path(name)
    if path.name != "metrics.jsonl":
        path = path / "metrics.jsonl"
    if not path.exists():
        sys.exit(f"{name} has no metrics.jsonl: name the folder of a run, its --out")
    return [json.loads(line) for line in path.read_text().splitlines()]


def print_table(runs: dict[str, list[dict]]):
    """Held-out metrics: the mean over the runs before and after, and where each of several runs ended."""
    columns = list(runs) if len(runs) > 1 else []
    print("| " + " | ".join(["held out", "before", "after", *columns]) + " |\n" + "|---" * (3 + len(columns)) + "|")
    all_lines = list(runs.values())
    for name in dict.fromkeys(name for lines in all_lines for name in lines[-1] if name.startswith("eval_")):
        ends = [[lines[i][name] for lines in all_lines if name in lines[i]] for i in (0, -1)]
        cells = [mean_std(values) if values else "" for values in ends]
        cells += [f"{runs[run][-1][name]:.3f}" if name in runs[run][-1] else "" for run in columns]
        print(f"| {name} | " + " | ".join(cells) + " |")


# ---- A real model, here and in TRL -----------------------------------

SIDES = {"refcache": "this project", "trl": "TRL"}


def print_comparison(results: dict):
    """A row per work: medians over the runs of each side, and the highest memory. Then what was computed."""
    print("| work | here: s per step | TRL | TRL / here | here: peak GiB | TRL | tokens per sample "
          "| timed steps |\n" + "|---" * 8 + "|")
    for work, entry in results.items():
        sides = [[run for run in entry[side] if run] for side in SIDES]  # without runs that were killed
        cells = [format_median(runs, "seconds") for runs in sides] + [format_ratio(*sides, "seconds")]
        cells += [f"{max(run['peak'] for run in runs):.1f}" if runs else "killed" for runs in sides]
        cells.append(" / ".join(filter(None, map(format_lengths, sides))))
        cells.append(" / ".join(map(format_steps, sides)))
        print(f"| `{work}` | " + " | ".join(cells) + " |")
        if entry["refcache"][0]["reference"]:
            cells = [format_median(runs, "reference") for runs in sides] + [format_ratio(*sides, "reference")]
            print(f"| reference pass of `{work}` | " + " | ".join(cells) + " | | | | |")

    print()
    for work, entry in results.items():
        ours, theirs = ([run for run in entry[side] if run] for side in SIDES)
        if ours and theirs and not ours[0]["lengths"][0]:
            gap = max(abs(x - y) for x, y in zip(ours[0]["losses"], theirs[0]["losses"]))
            print(f"{work}: the losses of {entry['steps']} steps differ by at most {gap:.1e}")
        for name, runs in zip(SIDES.values(), (ours, theirs)):
            if runs and runs[0]["held_out"]:
                before, after = ([run["held_out"][i][1] for run in runs] for i in (0, -1))
                seconds = [sum(run["steps"]) for run in runs]
                print(f"{work}, {name}, {len(runs)} runs: held-out reward {mean_std(before)} to "
                      f"{mean_std(after)} in {mean_std(seconds, 0)} s of training")


def format_median(runs: list[dict], name: str) -> str:
    return f"{median(run[name] for run in runs):.2f}" if runs else "killed, out of memory"


def format_ratio(ours: list[dict], theirs: list[dict], name: str) -> str:
    if not (ours and theirs):
        return ""
    return f"{median(run[name] for run in theirs) / median(run[name] for run in ours):.1f}"


def format_lengths(runs: list[dict]) -> str:
    """The mean over all samples of all runs; nothing if there are none."""
    lengths = [length for run in runs for length in run["lengths"] if length]
    return f"{mean(lengths):.1f}" if lengths else ""


def format_steps(runs: list[dict]) -> str:
    """The first step of each run is not timed, unless it is the only one."""
    return f"{max(1, len(runs[0]['steps']) - 1)} × {len(runs)}" if runs else ""


def mean_std(values: list[float], digits: int = 3) -> str:
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def draw_comparison(results: dict, path: str):
    """Held-out reward against seconds of training, mean ± std; and the losses of DPO, both curves."""
    sums = next((entry for work, entry in results.items() if work.startswith("rloo sums")), None)
    if not (sums and "dpo" in results):
        sys.exit("no picture: it needs the works dpo and rloo sums")
    figure, (left, right) = import_pyplot().subplots(1, 2, figsize=(9, 3.4))
    for (side, name), colour in zip(SIDES.items(), COLOURS):
        runs = [run for run in sums[side] if run]
        steps = [step for step, _ in runs[0]["held_out"]]
        rewards = np.array([[reward for _, reward in run["held_out"]] for run in runs])  # (runs, evaluations)
        seconds = np.mean([np.cumsum([0, *run["steps"]])[steps] for run in runs], axis=0)
        middle, spread = rewards.mean(axis=0), rewards.std(axis=0, ddof=min(1, len(runs) - 1))
        left.fill_between(seconds, middle - spread, middle + spread, color=colour, alpha=0.2, linewidth=0)
        seeds = f"{len(runs)} seeds" if len(runs) > 1 else "one seed"
        style = dict(linewidth=1.8, marker="o", markersize=4, label=f"{name}, {seeds}")
        left.plot(seconds, middle, color=colour, **style)

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
    if not args.runs:
        sys.exit("name the folders of runs, or a .json of against_trl.py")
    if args.runs[0].endswith(".json"):
        results = json.loads(Path(args.runs[0]).read_text())
        print_comparison(results)
        if args.out:
            draw_comparison(results, args.out)
        return

    runs = {name.removesuffix("/metrics.jsonl").rstrip("/"): read_run(name) for name in args.runs}
    print_table(runs)
    if args.out is None:
        return
    plt = import_pyplot()

    found = {name for lines in runs.values() for line in lines for name in line if name != "step"}
    names = list(args.metrics) or [name for name in METRICS if name in found]
    unknown = set(names) - found
    if unknown or not names:
        sys.exit(f"no metric {', '.join(unknown)} in these runs, which have {', '.join(sorted(found))}")
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    figure, panels = plt.subplots(rows, columns, figsize=(3.4 * columns, 2.3 * rows + 0.4), squeeze=False)
    for panel, name in zip(panels.flat, names):
        handles = [draw(panel, lines, name, COLOURS[n % 7]) for n, lines in enumerate(runs.values())]
        panel.set(title=name, xlabel="step")
    for panel in panels.flat[len(names):]:
        panel.axis("off")
    names_of_runs = [Path(folder).name for folder in runs]
    figure.legend(handles, names_of_runs, ncols=min(6, len(runs)), loc="upper center")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / figure.get_figheight()))
    save(figure, args.out)
    print(f"{len(names)} metrics of {len(runs)} runs: {args.out}")


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
