"""Reward against KL: the frontier of the DPO paper (arXiv:2305.18290, figure 2, left), on the demo's task.

    python benchmarks/frontier.py                                              # about ten minutes on one CPU core
    python benchmarks/frontier.py --methods dpo rloo --seeds 0 --betas 0.1 1   # a part of it
    python benchmarks/frontier.py --out out/frontier-tiny --tiny               # does it run?

Every method trains the demo's model with several β and seeds. Then all models are measured in one way: samples for
held-out prompts, their true reward (demo/score.py: the share of opinions that are good; −1 for a broken sentence), and
their mean log π − log π_ref in nats per answer, which estimates KL(π || π_ref). For each KL the highest possible reward
is that of π*(y|x) ∝ π_ref(y|x) exp(reward / β) (equation 4), here from samples of the reference, weighted.

Writes frontier.png, frontier.md and every run's folder into --out. The same command goes on where it was stopped.
"""
import math
import os
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
import tyro
from against_trl import ROOT, arguments, dpo, kto, read_rows, rloo
from plot import COLOURS, import_pyplot, save

SUM_BETAS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # of losses that sum over tokens
METHODS = {  # name -> its name in the picture, script, flags, β
    "dpo": ("DPO", dpo, {}, (*SUM_BETAS, 30.0)),
    "ipo": ("IPO", dpo, {"loss": ("ipo",)}, (0.1, 0.3, 1.0, 2.0, 3.0, 10.0)),  # per token, so other values
    "apo_zero": ("APO-zero", dpo, {"loss": ("apo_zero",)}, SUM_BETAS),
    "kto": ("KTO", kto, {}, SUM_BETAS),
    "rloo": ("RLOO", rloo, {}, (0.03, 0.1, 0.2, 0.3, 0.5, 1.0)),
}
MARKERS = "osD^v"


@dataclass
class Args:
    methods: tuple[str, ...] = tuple(METHODS)
    betas: tuple[float, ...] = ()  # the same for all methods; none: those in METHODS
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: float = 1.0  # passes of each run over its data
    prompts: int = 64  # held-out prompts
    samples: int = 16  # per prompt and model
    best_samples: int = 256  # per prompt, of the reference, for the best that is possible
    out: str = "out/frontier"
    tiny: bool = False  # does it run?


def train(method: str, beta: float, seed: int, args: Args) -> Path:
    """One run of a script. Returns the folder of its model."""
    _, script, flags, _ = METHODS[method]
    out = Path(args.out) / f"{method}-{beta:g}-{seed}"
    if not (out / "model").exists():
        flags = flags | dict(beta=beta, seed=seed, epochs=args.epochs, samples=0, out=str(out),
                             ref_cache=f"{args.out}/reference_logprobs.pkl")
        script.main(arguments(script, flags))
    return out / "model"


@torch.no_grad()
def measure(model: Path | str, k: int, args: Args) -> np.ndarray:
    """(prompts, k, 3): reward, success and log π − log π_ref of k samples from the model for held-out prompts."""
    flags = rloo.resolve(rloo.Args())  # the demo's, with nothing that bends the distribution
    rows = read_rows(rloo, replace(flags, data=flags.eval_data))[:args.prompts]
    policy, reference = (rloo.load_model(str(folder), "cpu", flags) for folder in (model, flags.model))
    samples = rloo.rollout(policy, rloo.load_tokenizer(flags.model), [row.prompt for row in rows], k, 0, flags)
    logps, ref_logps = (rloo.completion_logprobs(model, samples.groups) for model in (policy, reference))
    ratios = [(y - z).sum().item() for ys, zs in zip(logps, ref_logps) for y, z in zip(ys, zs)]
    columns = {name: [row.columns[name] for row in rows for _ in range(k)] for name in ("thing", "place")}
    texts = [text for answers in samples.texts for text in answers]
    scores = [rloo.load_function(f"{ROOT}/demo/score.py:{name}")(None, texts, **columns)
              for name in ("sentiment", "success")]
    return np.array([*scores, ratios]).T.reshape(-1, k, 3)


def best_possible(samples: np.ndarray, betas) -> list[tuple[float, float]]:
    """(KL, reward) of π* for each β, from samples of the reference. Z is the mean of exp(reward / β)."""
    rewards = samples[..., 0]  # (prompts, samples)
    points = []
    for beta in betas:
        tilt = np.exp((rewards - 1) / beta)  # the highest reward is 1
        weights = tilt / tilt.sum(1, keepdims=True)  # π* / π_ref, up to the number of samples
        kl = (weights * np.log(np.maximum(weights * rewards.shape[1], 1e-300))).sum(1)
        points.append((kl.mean(), (weights * rewards).sum(1).mean()))
    return points


def draw(points: dict, start: float, best: list, path: str):
    """points: method -> for each β [(reward, success, KL) of a seed, ..]"""
    figure, panel = import_pyplot().subplots(figsize=(7, 4.6))
    farthest = max(kl for row in points.values() for values in row for *_, kl in values)
    best = [*best, (max(farthest, best[-1][0]), best[-1][1])]  # more KL is no use
    panel.plot(*zip(*best), "--", color="#777777", linewidth=1.4, label="best possible")
    panel.plot(0, start, "*", color="black", markersize=11, clip_on=False, label="reference", zorder=5)
    for method, colour, marker in zip(METHODS, COLOURS, MARKERS):
        seeds = [list(zip(*values)) for values in points.get(method, [])]  # of a β: rewards, successes, KLs
        if seeds:
            reward, kl = ([mean(values[i]) for values in seeds] for i in (0, 2))
            reward_std, kl_std = ([deviation(values[i]) for values in seeds] for i in (0, 2))
            panel.errorbar(kl, reward, reward_std, kl_std, color=colour, marker=marker, markersize=6, linewidth=1.3,
                           elinewidth=0.9, markeredgecolor="white", zorder=3, label=METHODS[method][0])
    panel.set_xscale("function", functions=(np.sqrt, np.square))  # much happens at small KL
    panel.set_xlim(left=0)
    panel.set_xticks([0, 0.1, 0.5, *range(1, math.ceil(farthest) + 1)])
    panel.set_xlabel("KL(policy || reference), nats per answer (square-root scale)")
    panel.set_ylabel("true reward")
    panel.legend(loc="lower right")
    figure.tight_layout()
    save(figure, path)


def deviation(values) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def main(args: Args):
    if args.tiny:
        args = replace(args, methods=("dpo", "rloo"), betas=(0.1,), seeds=(0,), epochs=0.1, prompts=4, samples=2,
                       best_samples=8)
    os.environ["HF_HUB_OFFLINE"] = "1"
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    points = {method: [] for method in args.methods}
    with open(out / "log.txt", "a") as log:
        with redirect_stdout(log):
            untrained = measure(ROOT / "demo/model", args.best_samples, args)
        start = untrained.mean((0, 1))
        table = ["| method | β | reward | success | KL, nats |", "|---|---|---|---|---|",
                 f"| reference | | {start[0]:.3f} | {start[1]:.3f} | 0 |"]
        print(*table, sep="\n")
        for method in args.methods:
            for beta in args.betas or METHODS[method][-1]:
                values = []  # of each seed: (reward, success, KL)
                for seed in args.seeds:
                    with redirect_stdout(log):
                        samples = measure(train(method, beta, seed, args), args.samples, args)
                    values.append(tuple(samples.mean((0, 1)).tolist()))
                points[method].append(values)
                cells = (f"{mean(x):.3f} ± {deviation(x):.3f}" for x in zip(*values))
                table.append(f"| {METHODS[method][0]} | {beta:g} | " + " | ".join(cells) + " |")
                print(table[-1], flush=True)
    draw(points, start[0], best_possible(untrained, np.geomspace(100, 0.02, 60)), f"{out}/frontier.png")
    (out / "frontier.md").write_text("\n".join(table) + "\n")
    print(f"{out}/frontier.png")


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
