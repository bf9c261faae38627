"""Real preferences on a CPU: Anthropic's HH, dpo.py and kto.py beside TRL's trainers.

    python benchmarks/hh.py --data hh_train.jsonl
    python benchmarks/hh.py --data hh_train.jsonl --tiny    # does it run?

From rows prompt, chosen, rejected a small Llama with its own tokenizer learns the dialogues (prompt + chosen) as a
language model. Then the jobs "dpo" and "kto" of against_trl.py start from it, for one pass over the training pairs. The
table has held-out pairs: the share where β (log π − log π_ref) is higher for chosen (ties 1/2), and by how much, mean ±
std over the seeds, which change the order of the pairs; and CPU seconds of a step, medians.
"""
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev

import against_trl
import torch
import tyro
from against_trl import NAMES, SHAPES, dpo, read_rows, settings
from transformers import AutoModelForCausalLM


@dataclass
class Args:
    data: str
    seeds: tuple[int, ...] = (0, 1, 2)
    test: int = 256  # held-out pairs
    pairs: int = 512  # training pairs of a run; the language model learns from all
    max_length: int = 256  # longer rows are left out
    batch_size: int = 16  # pairs; of KTO twice as many rows
    lm_epochs: int = 3
    tiny: bool = False  # does it run?


def train_language_model(folder: Path, train: list, test: list, args: Args):
    def blocks(rows):  # (n, max_length): the dialogues one after the other, cut into rows
        ids = torch.tensor([token for prompt, chosen, _ in rows for token in (*prompt, *chosen, 1)])
        return ids[:len(ids) // args.max_length * args.max_length].view(-1, args.max_length)

    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = blocks(train)
    batches = [ids[part] for _ in range(args.lm_epochs) for part in torch.randperm(len(ids)).split(8)]
    for step, batch in enumerate(batches):
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / len(batches))
        optimizer.param_groups[0]["lr"] = 1e-3 * min((step + 1) / 20, cosine)
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses = [model(input_ids=x, labels=x).loss.item() for x in blocks(test).split(8)]
    print(f"{model.num_parameters():,} parameters, {ids.numel():,} tokens; held out {mean(losses):.2f} nats per token")
    model.save_pretrained(folder)


def held_out(model: str, given) -> tuple[float, float]:
    """Accuracy and mean margin of a model on the held-out pairs."""
    flags = settings(given, "hh", "dpo")
    rows = read_rows(dpo, replace(flags, data=f"{given.folder}/hh/test.jsonl"))
    cache = dpo.ReferenceCache()
    with against_trl.quiet():
        cache.score(dpo.load_model(flags.model, "cpu", flags), dpo.groups(rows))
        values = dpo.evaluate(dpo.load_model(model, "cpu", flags), rows, cache, flags)
    return values["eval_rewards/accuracies"], values["eval_rewards/margins"]


def spread(values) -> str:
    return f"{mean(values):.3f} ± {stdev(values) if len(values) > 1 else 0:.3f}"


def main(args: Args, folder: str):
    against_trl.require_trl()
    if args.tiny:
        SHAPES["hh"] = SHAPES["tiny"]
        args = replace(args, seeds=(0,), test=8, pairs=16, max_length=64, batch_size=8, lm_epochs=1)
    given = against_trl.Args(folder=folder, data=args.data, pairs=10**9, max_length=args.max_length,
                             batch_size=args.batch_size, steps=args.pairs // args.batch_size, eps=1e-8)
    rows = against_trl.read_pairs(given, SHAPES["hh"][NAMES.index("vocab_size")])
    test = rows[:args.test]
    train = [row for row in rows if row[0] not in [prompt for prompt, *_ in test]]
    model = Path(folder, "hh/model")
    against_trl.make_model(model, "hh")
    against_trl.write_pairs(Path(folder, "hh/pairs.jsonl"), train[:args.pairs])
    against_trl.write_pairs(Path(folder, "hh/test.jsonl"), test)
    train_language_model(model, train, test, args)

    found = {(work, side): [] for work in ("dpo", "kto") for side in ("refcache", "trl")}
    for seed in args.seeds:
        given = replace(given, seed=seed)
        against_trl.write_orders(given, "hh")
        for (work, side), values in found.items():
            run = against_trl.start(given, side, "hh", work, seed)
            values.append((*held_out(run["model"], given), run["seconds"]))
    print("\n| work | side | held-out accuracy | held-out margin | CPU seconds |\n" + "|---" * 5 + "|")
    for (work, side), values in found.items():
        accuracies, margins, seconds = zip(*values)
        print(f"| {work} | {side} | {spread(accuracies)} | {spread(margins)} | {median(seconds):.2f} |")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(tyro.cli(Args, use_underscores=True), folder)
