"""On a GPU: first that the numbers are right, then the speed and memory of steps beside TRL's.

    pip install trl==1.16.0 peft datasets
    python benchmarks/gpu.py           # all tables, in at most fifteen minutes on one H100 or H200
    python benchmarks/gpu.py --tiny    # does it run? Also without a GPU

The models are random, the rows are those of against_trl.py. Memory is what was allocated.

first     the kernel of half precision against a loop of ordinary attention; log-probs of the sampler against those of
          a forward; the loss of the first step, which is ln 2 if policy and reference agree
speed     the reference pass, a DPO step, ways to train with less memory; an RLOO step at 3,100 tokens
"""
import json
import math
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, replace
from unittest.mock import patch

import against_trl
import torch
import tyro
from against_trl import DEVICE, clock, dpo, quiet, read_rows, rloo, settings

import refcache


@dataclass
class Args:
    shapes: tuple[str, ...] = ("Qwen2.5-1.5B",)  # of against_trl.py
    pairs: int = 4096  # of the reference pass
    reference_batch: int = 32  # pairs in a forward of TRL's reference pass
    batch_size: int = 16  # pairs of a DPO step
    max_length: int = 768  # tokens of a row
    new_tokens: int = 64  # per sample of a rollout
    tiny: bool = False  # does it run?


WAYS = [  # work, side, more flags of the script
    ("reference", "refcache", {}), ("reference", "trl", {}), ("dpo", "refcache", {}), ("dpo", "trl", {}),
    ("dpo", "refcache", {"gradient_checkpointing": True}), ("dpo", "refcache", {"lora_r": 16}),
    ("dpo", "refcache", {"lora_r": 16, "gradient_checkpointing": True})]
POLICIES = {  # how a model is loaded that samples: name -> (whether it trains, flags)
    "frozen, float32": (False, {"dtype": "float32"}),
    "frozen, bfloat16": (False, {"dtype": "bfloat16"}),
    "FSDP2, bfloat16": (True, {"dtype": "bfloat16"}),
    "LoRA, bfloat16": (True, {"dtype": "bfloat16", "lora_r": 16}),
}


def files_of(args: Args, folder: str) -> against_trl.Args:
    given = against_trl.Args(
        folder=folder, pairs=args.pairs, max_length=args.max_length, steps=10, batch_size=args.batch_size,
        reference_batch=args.reference_batch, tiny=args.tiny)
    return against_trl.shrink(given) if args.tiny else given


# ---- First: are the numbers right? -----------------------------------

def print_first(args: Args, shape: str):
    with tempfile.TemporaryDirectory() as folder:
        given = files_of(replace(args, pairs=64), folder)
        against_trl.make_files(given, shape)
        work = "rloo 16+4, k=2" if args.tiny else "rloo 256+16, k=4"
        flags = replace(settings(given, shape, work), max_new_tokens=args.new_tokens)
        print(f"\n{shape}, first\n\n| what | found | expected |\n|---|---|---|", flush=True)

        print_kernel(flags, read_rows(dpo, settings(given, shape, "dpo"))[:8])
        for name, (trains, more) in POLICIES.items():
            print_rollout(name, trains, replace(flags, **more))
        for more in ({}, {"lora_r": 16}):
            run = against_trl.start(replace(given, steps=2, extra=json.dumps(more)), "refcache", shape, "dpo", 0)
            print(f"| loss of step 1 {more or ''} | {run['losses'][0]:.6f} | {math.log(2):.6f} |", flush=True)


@torch.no_grad()
def print_kernel(flags, rows: list):
    """Mean errors of log-probs in bfloat16, in nats per token, against the loop of attentions in float32."""
    values = {}
    for dtype in ("float32", "bfloat16"):
        with quiet():
            model = rloo.load_model(flags.model, DEVICE, replace(flags, dtype=dtype))
        for way in ("loop", "kernel"):
            with patch.object(refcache, "one_kernel_serves", refcache.one_kernel_serves if way == "kernel" else never):
                logps = dpo.completion_logprobs(model, dpo.groups(rows))
            values[dtype, way] = torch.cat([tokens for group in logps for tokens in group])
    errors = [(values["bfloat16", way] - values["float32", "loop"]).abs().mean() for way in ("kernel", "loop")]
    print(f"| kernel in bfloat16, mean error | {errors[0]:.2e} | about the loop's {errors[1]:.2e} |", flush=True)


def never(*_) -> bool:
    return False


def print_rollout(name: str, trains: bool, flags):
    """How far the sampler's log-probs are from those of a forward, and the time of a rollout."""
    with quiet():
        policy = rloo.load_model(flags.model, DEVICE, flags, trains)
        prompts = [row.prompt for row in read_rows(rloo, flags)][:8]
        tokenizer = rloo.load_tokenizer(flags.model)

        rloo.rollout(policy, tokenizer, prompts, flags.k, 1, flags)  # the first one compiles kernels
        begin = clock()
        samples = rloo.rollout(policy, tokenizer, prompts, flags.k, 1, flags)
        milliseconds = 1e3 * (clock() - begin) / flags.max_new_tokens
        logps = rloo.compute_logprobs(nullcontext(policy), samples, DEVICE, flags)

    difference = (samples.logps - logps.cpu()).abs().sum() / samples.mask.sum()
    print(f"| rollout, {name}: nats per token from a forward; ms per token | {difference:.1e}; {milliseconds:.1f} "
          f"| below {'1e-3' if flags.dtype == 'float32' else '5e-2'} |", flush=True)


# ---- Then: speed and memory ------------------------------------------

def print_ways(args: Args, shape: str):
    with tempfile.TemporaryDirectory() as folder:
        given = files_of(args, folder)
        pairs, tokens = against_trl.make_files(given, shape)
        torch.cuda.empty_cache()  # for the processes
        print(f"\n{shape}: {len(pairs):,} pairs, {tokens:,} tokens\n\n"
              "| work | side | flags | seconds | tokens/s | peak GB |\n" + "|---" * 6 + "|", flush=True)
        for work, side, flags in WAYS:
            try:
                run = against_trl.start(replace(given, extra=json.dumps(flags)), side, shape, work, 0)
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
    shapes = ("tiny",) if args.tiny else args.shapes
    for shape in shapes:
        print_first(args, shape)
    for shape in shapes:
        print_ways(args, shape)
    if not args.tiny:
        against_trl.main(against_trl.Args(shapes=("long",), works=("long",), steps=1, rounds=1))


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
