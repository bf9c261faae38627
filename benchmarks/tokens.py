"""Which token of a wrong sum did a run learn from? Figure 1 of "From r to Q*" in small.

Rafailov et al. 2024, From r to Q*: Your Language Model is Secretly a Q-Function, arXiv:2404.12358: after DPO
the implicit reward of a token, log π − log π_ref, is low where an answer is wrong.

    python demo/get_model.py smollm2 out/smollm2    # pip install gguf accelerate
    python demo/sums.py out/sums
    RATE="python tools/prepare.py --rows rated --eval_size 0"    # the same pairs as rows for kto.py
    $RATE --data out/sums/pairs.jsonl --out out/rated
    $RATE --data out/sums/pairs_test.jsonl --out out/rated_test
    FLAGS="--model out/smollm2 --lr 1e-5 --schedule constant --dtype bfloat16"
    PAIRS="--data out/sums/pairs.jsonl --eval_data out/sums/pairs_test.jsonl --batch_size 8"
    RATED="--data out/rated/train.jsonl --eval_data out/rated_test/train.jsonl --batch_size 16"
    for seed in 0 1 2; do
        python dpo.py $FLAGS $PAIRS --seed $seed --out out/dpo_sigmoid-$seed
        python dpo.py $FLAGS $PAIRS --seed $seed --out out/dpo_sigmoid_sft-$seed --loss sigmoid sft
        python dpo.py $FLAGS $PAIRS --seed $seed --out out/dpo_ipo-$seed --loss ipo --beta 0.5
        python kto.py $FLAGS $RATED --seed $seed --out out/kto-$seed
    done
    python benchmarks/tokens.py --runs out/dpo_*-? out/kto-?
    python benchmarks/tokens.py    # only the table

Of the held-out pairs, those count whose wrong answer has the right form, "3 + 1 = 6" beside "3 + 1 = 4". Each
answer is divided into the tokens that both begin with, the first digit that differs, the end token, and the
rest: a second digit, and the line break of the chat template. What a part adds to the margin is its sum of
log π − log π_ref in the right answer, minus that in the wrong one. What both begin with adds 0.
"""
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
import tyro
from against_trl import ROOT, commit, dpo, versions

PARTS = ("before", "digit", "end", "rest")
FLAGS = ("model", "data", "eval_data", "loss", "beta", "batch_size", "lr", "schedule", "dtype", "seed", "out")


@dataclass
class Args:
    runs: tuple[str, ...] = ()  # folders of runs to measure; none: only prints the table
    data: str = "out/sums/pairs_test.jsonl"  # held-out pairs
    results: str = str(ROOT / "benchmarks/tokens.jsonl")


def divide(nats: list[float], n_before: int, end: int) -> dict[str, float]:
    """The sum of each part of an answer, whose first `n_before` tokens are in the other one, too."""
    sums = {"before": sum(nats[:n_before]), "digit": nats[n_before], "end": nats[end]}
    return sums | {"rest": sum(nats) - sum(sums.values())}


@torch.no_grad()
def measure(folder: str, run: dict, file: str) -> dict:
    """Means over the pairs, parts in nats. `even` is the digit's share of a margin that is spread evenly over
    all tokens, `even_after` over those behind the common beginning."""
    args = dpo.Args(model=run["model"], dtype=run["dtype"])
    tokenizer = dpo.load_tokenizer(args.model)
    policy = dpo.load_model(f"{folder}/model", "cpu", args)
    digest = dpo.checkpoint_digest(run["ref_model"])
    reference = dpo.ReferenceCache(name=run["ref_model"], reference=digest, dtype=run["dtype"])
    reference.load(run["ref_cache"] or f"{folder}/reference_logprobs.pkl")

    found = defaultdict(list)  # name -> a value for each pair
    for row in dpo.load_rows(file, tokenizer, args):
        answers = {"right": row.chosen, "wrong": row.rejected}
        n_before = [a == b for a, b in zip(*answers.values())].index(False)
        ends = {side: ids.index(tokenizer.eos_token_id) for side, ids in answers.items()}
        has_form = re.match(r"\d \+ \d = \d+\s*$", tokenizer.decode(row.rejected, skip_special_tokens=True))
        if not has_form or n_before in ends.values():  # 11 beside 1: they differ first in where they end
            continue

        groups = dpo.groups_of([row])
        logps = dpo.completion_logprobs(policy, groups)
        (ratios,) = dpo.log_ratios(logps, groups, reference)
        for side, nats in zip(answers, ratios):
            for part, value in divide(nats.tolist(), n_before, ends[side]).items():
                found[f"{side}_{part}"].append(value)
        found["pair_margin"].append((ratios[0].sum() - ratios[1].sum()).item())

        end = ends["right"]
        found["p_end"].append(logps[0][0][end].exp().item())
        found["p_end_before"].append((logps[0][0][end] - ratios[0][end]).exp().item())
        found["digit_is_lowest"].append(float(ratios[1].argmin() == n_before))
        n_tokens = len(row.chosen) + len(row.rejected)
        found["even"].append(2 / n_tokens)
        found["even_after"].append(2 / (n_tokens - 2 * n_before))
    counts = {"pairs": len(found["even"]), "lowest_pair_margin": min(found["pair_margin"])}
    return counts | {name: mean(values) for name, values in found.items()}


def print_table(lines: list[dict]):
    """Mean ± std over the runs with the same loss. Shares are those of the mean margin."""
    runs = defaultdict(list)
    for line in lines:
        nats = {part: line[f"right_{part}"] - line[f"wrong_{part}"] for part in PARTS}
        margin = sum(nats.values())
        shares = {f"{part} / margin": value / margin for part, value in nats.items()}
        runs[line["loss"]].append(line | nats | shares | {"margin": margin})

    names = ("margin", "digit", "end", "rest", "digit / margin", "end / margin", "wrong_digit", "wrong_end",
             "right_digit", "right_end", "p_end", "digit_is_lowest")
    print(f"| loss | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    for loss, found in runs.items():
        cells = [mean_std([line[name] for line in found]) for name in names]
        print(f"| `{loss}` | {' | '.join(cells)} |")


def mean_std(values: list[float]) -> str:
    return f"{mean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else f"{mean(values):.2f}"


def main(args: Args):
    for folder in args.runs:
        run = json.loads(Path(folder, "args.json").read_text())
        if isinstance(run["loss"], list):
            run["loss"] = " ".join(run["loss"])
        flags = " ".join(f"--{name} {run[name]}" for name in FLAGS)
        line = {"run": Path(folder).name, "loss": run["loss"], "seed": run["seed"], "commit": commit(),
                "command": f"python {run['script']} {flags}", "versions": versions()}
        line |= measure(folder, run, args.data)
        with open(args.results, "a") as file:
            file.write(json.dumps(line) + "\n")
    print_table([json.loads(line) for line in open(args.results)])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
