"""On a GPU: the attention kernel, its launches, the reference pass and a DPO step beside TRL's, the memory of RLOO.

    pip install trl==1.16.0 peft datasets
    python benchmarks/gpu.py           # all tables, in at most ten minutes on one H100 or H200
    python benchmarks/gpu.py --tiny    # does it run? Also without a GPU

kernel    bfloat16 forwards through one varlen_attn call, and through the loop over spans: errors of log-probs (mean)
          and gradient (share of its norm), against one float32 forward per sequence
launches  per layer of a forward of 32 pairs: those of 6 layers minus those of 2, divided by 4
speed     the rows "reference" and "dpo" of against_trl.py for a random Llama. MFU: the matrix products that are needed
          (each prompt once, the head for tokens of answers, attention's not counted) per second, of --peak_tflops
memory    rloo_memory.py: a step at 3,100 tokens
"""
import gc
import sys
import tempfile
from dataclasses import dataclass, replace

import against_trl
import numpy as np
import refcache
import rloo_memory
import torch
import tyro
from against_trl import DEVICE, NAMES, SHAPES, quiet
from logprobs import one_by_one, random_group, values_and_gradient
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM


@dataclass
class Args:
    shape: str = "Llama-3.2-1B"  # or Llama-3.2-3B, whose DPO step does not fit into 80 GB
    pairs: int = 4096  # of the reference pass
    reference_batch: int = 32  # pairs in a forward of TRL's reference pass
    batch_size: int = 8  # pairs of a DPO step
    max_length: int = 768  # tokens of a row
    peak_tflops: float = 989.0  # of the GPU in bfloat16, dense; an H100 or H200 SXM
    tiny: bool = False  # does it run?


def small_model(layers: int, window: int | None = None):
    """A random Mistral whose weights are so large that every token matters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mistral", hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=1000, sliding_window=window, initializer_range=0.06)
    return AutoModelForCausalLM.from_config(config).to(DEVICE).eval()


def ways():
    """Switches between the paths through the attention."""
    original = refcache.one_kernel_serves
    yield "kernel"
    refcache.one_kernel_serves = lambda query, value: False
    yield "loop"
    refcache.one_kernel_serves = original


def bfloat16_logprobs(model, groups):
    return refcache.completion_logprobs(model, groups, dtype="bfloat16")


def print_errors(groups: list):
    print("\n| attention | way | calls of varlen_attn | log-probs, nats | gradient |\n|---|---|---|---|---|")
    for window in (None, 64):
        model = small_model(2, window)
        truth, true_gradient = values_and_gradient(one_by_one, model, groups)
        with quiet():
            refcache.share_prompts(model, "bfloat16")
        kernel = refcache.varlen_attn
        for name in ways():
            calls = []
            refcache.varlen_attn = lambda *values, **options: calls.append(1) or kernel(*values, **options)
            values, gradient = values_and_gradient(bfloat16_logprobs, model, groups)
            refcache.varlen_attn = kernel
            error = (values - truth).abs().mean()
            gradient_error = (gradient - true_gradient).norm() / true_gradient.norm()
            attention = f"window of {window}" if window else "full"
            print(f"| {attention} | {name} | {len(calls)} | {error:.1e} | {gradient_error:.1e} |", flush=True)


@torch.no_grad()
def launches(layers: int, groups: list) -> int:
    """Kernels that a forward starts; on a CPU its operators."""
    model = small_model(layers).bfloat16()
    with quiet():
        refcache.share_prompts(model, "bfloat16")
    bfloat16_logprobs(model, groups)  # the first time compiles kernels
    with profile(activities=[getattr(ProfilerActivity, DEVICE.upper())]) as found:
        bfloat16_logprobs(model, groups)
    kind = DeviceType.CUDA if DEVICE == "cuda" else DeviceType.CPU
    return sum(event.device_type == kind and not event.name.startswith("Mem") for event in found.events())


def print_launches(groups: list):
    print("\n| way | launches per layer |\n|---|---|")
    for name in ways():
        print(f"| {name} | {(launches(6, groups) - launches(2, groups)) / 4:.1f} |", flush=True)


def necessary_flops(shape: str, pairs: list) -> float:
    """Of the matrix products of a forward. An embedding is no product, the head is one."""
    sizes = dict(zip(NAMES, SHAPES[shape]))
    hidden, head_dim = sizes["hidden_size"], sizes["head_dim"]
    attention = 2 * hidden * head_dim * (sizes["num_attention_heads"] + sizes["num_key_value_heads"])
    layer = attention + 3 * hidden * sizes["intermediate_size"]
    answers = sum(len(row.chosen) + len(row.rejected) for row in pairs)
    tokens = answers + sum(len(row.prompt) for row in pairs)
    return 2 * (tokens * layer * sizes["num_hidden_layers"] + answers * hidden * sizes["vocab_size"])


def print_speed(args: Args, work: str):
    with tempfile.TemporaryDirectory() as folder:
        given = against_trl.Args(
            folder=folder, pairs=args.pairs, max_length=args.max_length, steps=10, batch_size=args.batch_size,
            reference_batch=args.reference_batch, tiny=args.tiny)
        if args.tiny:
            given = against_trl.shrink(given)
        pairs, tokens = against_trl.make_files(given, args.shape)
        torch.cuda.empty_cache()  # for the processes
        print(f"\n{args.shape}: {len(pairs):,} pairs, {tokens:,} tokens\n\n| work | side | seconds | tokens/s | MFU "
              "| times refcache's | peak GiB |\n" + "|---" * 7 + "|", flush=True)
        ours = None
        for side in ("refcache", "trl"):
            run = against_trl.start(given, side, args.shape, work, 0)
            seconds = run["seconds"]
            ours = ours or seconds
            speed = mfu = ""
            if work == "reference":
                speed = f"{tokens / seconds:,.0f}"
                mfu = f"{necessary_flops(args.shape, pairs) / seconds / args.peak_tflops / 1e12:.0%}"
            print(f"| {work} | {side} | {seconds:.3f} | {speed} | {mfu} | {seconds / ours:.2f} "
                  f"| {run['peak']:.1f} |", flush=True)


def print_memory(args: Args):
    print("\n| RLOO, 2,900 + 200 tokens | k | peak GB | GB before | seconds | tokens per sample |\n" + "|---" * 6 + "|")
    sizes = rloo_memory.Args(tiny=args.tiny, k=(2,) if args.tiny else (2, 4, 8))
    for side, k, found in rloo_memory.rows(sizes):
        peak, before = (found[name] * 2**30 / 1e9 for name in ("peak", "before"))
        print(f"| {side} | {k} | {peak:.2f} | {before:.2f} | {found['seconds']:.1f} | {found['length']:.0f} |",
              flush=True)


def main(args: Args):
    if DEVICE == "cpu" and not args.tiny:
        sys.exit("gpu.py needs a GPU, and torch finds none here; --tiny shows on a CPU that it runs.")
    against_trl.require_trl()
    if args.tiny:
        args = replace(args, shape="tiny")
    print(against_trl.versions())
    rng = np.random.default_rng(0)
    groups = [random_group(rng, 1000, *rng.integers(20, 200, 3)) for _ in range(4 if args.tiny else 32)]
    failures = []
    for part, *inputs in (
            (print_errors, groups), (print_launches, groups), (print_speed, args, "reference"),
            (print_speed, args, "dpo"), (print_memory, args)):
        gc.collect()
        torch.cuda.empty_cache()
        try:
            part(*inputs)
        except (SystemExit, torch.OutOfMemoryError) as error:  # the other tables are still wanted
            failures.append(f"{part.__name__}: {error}")
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
