"""On a GPU: the reference pass and a DPO step beside TRL's, ways to train with less memory, and an RLOO step.

    pip install trl==1.16.0 peft datasets
    python benchmarks/gpu.py           # both tables, in at most ten minutes on one H100 or H200
    python benchmarks/gpu.py --tiny    # does it run? Also without a GPU

The rows are those of against_trl.py for random models; memory: allocated.
"""
import json
import sys
import tempfile
from dataclasses import dataclass, replace

import against_trl
import torch
import tyro
from against_trl import DEVICE


@dataclass
class Args:
    shapes: tuple[str, ...] = ("Qwen2.5-1.5B",)  # of against_trl.py
    pairs: int = 4096  # of the reference pass
    reference_batch: int = 32  # pairs in a forward of TRL's reference pass
    batch_size: int = 16  # pairs of a DPO step
    max_length: int = 768  # tokens of a row
    tiny: bool = False  # does it run?


WAYS = [  # work, side, more flags of the script
    ("reference", "refcache", {}), ("reference", "trl", {}), ("dpo", "refcache", {}), ("dpo", "trl", {}),
    ("dpo", "refcache", {"gradient_checkpointing": "on"}), ("dpo", "refcache", {"lora_r": 16}),
    ("dpo", "refcache", {"lora_r": 16, "gradient_checkpointing": "on"})]


def print_ways(args: Args, shape: str):
    with tempfile.TemporaryDirectory() as folder:
        given = against_trl.Args(
            folder=folder, pairs=args.pairs, max_length=args.max_length, steps=10, batch_size=args.batch_size,
            reference_batch=args.reference_batch, tiny=args.tiny)
        if args.tiny:
            given = against_trl.shrink(given)
        pairs, tokens = against_trl.make_files(given, shape)
        torch.cuda.empty_cache()  # for the processes
        print(f"\n{shape}: {len(pairs):,} pairs, {tokens:,} tokens\n\n"
              "| work | side | flags | seconds | tokens/s | peak GB |\n" + "|---" * 6 + "|", flush=True)
        for work, side, flags in WAYS:
            try:
                extra = json.dumps({"gradient_checkpointing": "off"} | flags)
                run = against_trl.start(replace(given, extra=extra), side, shape, work, 0)
            except SystemExit as error:  # out of memory, say: the other rows are still wanted
                print(f"| {work} | {side} | {' '.join(flags)} | {str(error).splitlines()[-1]} |", flush=True)
                continue
            seconds, peak = run["seconds"], run["peak"] * 2**30 / 1e9
            speed = f"{tokens / seconds:,.0f}" if work == "reference" else ""
            print(f"| {work} | {side} | {' '.join(flags)} | {seconds:.3f} | {speed} | {peak:.1f} |", flush=True)


def main(args: Args):
    if DEVICE == "cpu" and not args.tiny:
        sys.exit("gpu.py needs a GPU, and torch finds none here; --tiny shows on a CPU that it runs.")
    against_trl.require_trl()
    print(against_trl.versions())
    for shape in ("tiny",) if args.tiny else args.shapes:
        print_ways(args, shape)
    if not args.tiny:
        against_trl.main(against_trl.Args(shapes=("long",), works=("long",), steps=1, rounds=1))


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
