"""Real people's pairs: dpo.py and TRL's DPOTrainer learn from the same pairs of HH, and are scored alike.

    pip install gguf accelerate trl==1.16.0 peft datasets
    python demo/get_model.py smollm2 out/smollm2
    python tools/prepare.py --data hh_train.jsonl --out out/hh --chat    # or --data Anthropic/hh-rlhf
    for run in "dpo.py 0" "trl 0" "dpo.py 1" "dpo.py 2"; do python benchmarks/real_pairs.py --run $run; done
    python benchmarks/real_pairs.py    # only the table

The first pairs that have at most --max_length tokens are trained on, each once, and the next ones, of other
prompts, are held out. TRL gets the rows in the order of dpo.py's seed. Both sides train all weights with
AdamW, a constant learning rate and bfloat16 (TRL: autocast), and compute the reference's log-probs before.
The models are saved in bfloat16, and the functions of dpo.py score them: the accuracy over held-out pairs,
and the margin, β times the difference of the two log-ratios. ± is the standard error over pairs.
"""
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from against_trl import ROOT, commit, dpo, versions, write_lines


@dataclass
class Args:
    run: tuple[Literal["dpo.py", "trl"], int] | None = None  # a side and a seed; None: only prints the table
    model: str = "out/smollm2"  # see demo/get_model.py
    data: str = "out/hh/train.jsonl"  # pairs
    train_rows: int = 160  # pairs to train on
    test_rows: int = 256  # pairs that are held out
    max_length: int = 256  # tokens of prompt + answer; longer rows are left out
    batch_size: int = 8  # pairs per step
    trl_forward: int = 4  # pairs per forward of TRL, which adds up the gradients of a step
    lr: float = 2e-5
    beta: float = 0.1
    dtype: str = "bfloat16"
    out: str = "out/real_pairs"  # folder of the rows and the runs
    results: str = str(ROOT / "benchmarks/real_pairs.jsonl")


def write_rows(args: Args):
    """Writes train.jsonl and test.jsonl."""
    columns = [json.loads(line) for line in open(args.data)]
    sequences = dpo.tokenize_rows(args.data, ("chosen", "rejected"), dpo.load_tokenizer(args.model))
    lengths = [max(map(len, ids)) for _, ids in sequences]
    rows = [row for row, length in zip(columns, lengths, strict=True) if length <= args.max_length]

    train = rows[:args.train_rows]
    prompts = [row["prompt"] for row in train]
    others = [row for row in rows[args.train_rows:] if row["prompt"] not in prompts]
    Path(args.out).mkdir(parents=True, exist_ok=True)
    write_lines(Path(args.out, "train.jsonl"), train)
    write_lines(Path(args.out, "test.jsonl"), others[:args.test_rows])


def train_trl(args: Args, folder: Path, seed: int) -> float:
    """Trains and saves a model as dpo.py does. Returns the seconds per step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in open(f"{args.out}/train.jsonl")]
    rows = dpo.rows_in_order(rows, len(rows), seed)
    config = DPOConfig(
        output_dir=str(folder), seed=seed, num_train_epochs=1, train_sampling_strategy="sequential",
        per_device_train_batch_size=args.trl_forward, max_length=args.max_length,
        gradient_accumulation_steps=args.batch_size // args.trl_forward, gradient_checkpointing=False,
        precompute_ref_log_probs=True, precompute_ref_batch_size=args.trl_forward,
        beta=args.beta, learning_rate=args.lr, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
        bf16=args.dtype == "bfloat16", use_cpu=True, dataloader_pin_memory=False, logging_steps=1,
        report_to="none", save_strategy="no")
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32), args=config,
        train_dataset=Dataset.from_list(rows), processing_class=dpo.load_tokenizer(args.model))
    found = trainer.train()

    write_lines(folder / "metrics.jsonl", trainer.state.log_history)
    dpo.load_tokenizer(args.model).save_pretrained(folder / "model")
    trainer.model.to(getattr(torch, args.dtype)).save_pretrained(folder / "model")
    return found.metrics["train_runtime"] / found.global_step


@torch.no_grad()
def score(given: dpo.Args) -> dict[str, float]:
    """Accuracy and margin of the trained model over the held-out pairs, with their standard errors."""
    rows = dpo.load_rows(given.eval_data, dpo.load_tokenizer(given.model), given)
    groups = dpo.groups_of(rows)
    digest = dpo.checkpoint_digest(given.model)
    reference = dpo.ReferenceCache(name=given.model, reference=digest, dtype=given.dtype)
    reference.fill(lambda: dpo.load_model(given.model, "cpu", given), groups, path=given.ref_cache)

    policy = dpo.load_model(f"{given.out}/model", "cpu", given)
    found = {"accuracy": [], "margin": []}
    for indices, _ in dpo.micro_batches(policy, groups, given.tokens_per_forward):
        batch = dpo.compute_batch(policy, [rows[i] for i in indices], reference)
        values = dpo.metrics(batch, given)
        found["accuracy"] += values["rewards/accuracies"].tolist()
        found["margin"] += values["rewards/margins"].tolist()

    line = {"test_rows": len(rows)}
    for name, values in found.items():
        line[name] = np.mean(values)
        line[f"{name}_stderr"] = np.std(values, ddof=1) / len(values)**0.5
    return line


def run(args: Args):
    side, seed = args.run
    folder = Path(args.out, f"{side.removesuffix('.py')}-{seed}")
    if not Path(args.out, "train.jsonl").exists():
        write_rows(args)

    given = dpo.resolve(dpo.Args(
        model=args.model, data=f"{args.out}/train.jsonl", eval_data=f"{args.out}/test.jsonl", out=str(folder),
        ref_cache=f"{args.out}/reference_{args.dtype}.pkl", max_length=args.max_length, beta=args.beta,
        batch_size=args.batch_size, lr=args.lr, schedule="constant", warmup=0, seed=seed, dtype=args.dtype,
        save_every=0))
    if side == "trl":
        seconds = train_trl(args, folder, seed)
    else:
        seconds = float(np.mean([line["seconds"] for line in dpo.main(given)[1:]]))
    line = {
        "run": folder.name, "command": shlex.join(["python", *sys.argv]), "commit": commit(),
        "versions": versions(), "threads": torch.get_num_threads(), "dtype": args.dtype, "lr": args.lr,
        "train_rows": args.train_rows, "seconds_per_step": seconds}
    with open(args.results, "a") as file:
        file.write(json.dumps(line | score(given)) + "\n")


def main(args: Args):
    if args.run:
        run(args)
    print("| run | accuracy | margin | seconds per step |\n|---|---|---|---|")
    for line in map(json.loads, open(args.results)):
        scores = [f"{line[name]:.3f} ± {line[name + '_stderr']:.3f}" for name in ("accuracy", "margin")]
        print(f"| `{line['run']}` | {' | '.join(scores)} | {line['seconds_per_step']:.1f} |")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
