"""The parts, one by one: exactness, shared prompts, tokenizing, decoding.

    python benchmarks/logprobs.py                                # all tables, or those that are named:
    CHECKOUT=../older python benchmarks/logprobs.py tokenize     # the scripts of another checkout
    python benchmarks/logprobs.py --tiny                         # does it run?

exactness   largest error of values and gradients, against one forward per sequence
step        forward + backward of a batch: shared prompts against padded rows
tokenize    load_rows of dpo.py
rollout     32 rows of rloo.py: GrowingLayer against torch.cat

Models are random. The ways alternate in one process. Seconds: CPU seconds of one thread, medians (lowest to highest).
"""
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from against_trl import DEVICE, ROOT, clock, dpo, quiet, read_rows, resolve, rloo, spread
from transformers import AutoConfig, AutoModelForCausalLM, DynamicLayer

sys.path.append(str(ROOT / "tests"))
import refcache  # noqa: E402
from models import MODELS, make  # noqa: E402
from refcache import completion_logprobs, lay_out_padded, share_prompts, shares_prompts  # noqa: E402


@dataclass
class Args:
    what: Annotated[tuple[Literal["exactness", "step", "tokenize", "rollout"], ...],
                    tyro.conf.Positional] = ("exactness", "step", "tokenize", "rollout")
    hidden: int = 256  # of the random Llama
    layers: int = 4
    vocab: int = 32_000
    tokens: int = 500  # of a sequence, in a step
    completions: tuple[int, ...] = (2, 8)  # per prompt, in a step
    loaded_pairs: tuple[int, ...] = (20_000, 80_000)  # that are tokenized
    prompt_tokens: int = 256  # of a rollout
    new_tokens: int = 128
    rounds: int = 3
    tiny: bool = False  # does it run?


def random_llama(args: Args):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "llama", hidden_size=args.hidden, intermediate_size=args.hidden * 8 // 3, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64, num_key_value_heads=max(1, args.hidden // 128), vocab_size=args.vocab,
        max_position_embeddings=8192, bos_token_id=None, eos_token_id=None)).to(DEVICE).eval()
    print(f"{model.num_parameters() / 1e6:.1f} M parameters, vocabulary {args.vocab:,}, on {DEVICE}")
    share_prompts(model)
    return model


def timed(ways: dict, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, in turn, after a round that does not count."""
    seconds = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            begin = clock()
            way()
            if number:
                seconds[name].append(clock() - begin)
    return seconds


def random_group(rng, vocab: int, prompt: int, *completions: int) -> tuple:
    x, *ys = (tuple(rng.integers(1, vocab, n).tolist()) for n in (prompt, *completions))
    return x, ys


# ---- Exactness -------------------------------------------------------

def one_by_one(model, groups) -> list:
    """One forward per sequence, with all logits: what completion_logprobs must give."""
    logprobs = []
    for prompt, completions in groups:
        for y in completions:
            ids = torch.tensor([prompt + y], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1:-1].float()
            logprobs.append([logits.log_softmax(-1)[range(len(y)), y]])
    return logprobs


def values_and_gradient(function, model, groups) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all tokens, and the gradient of a weighted sum of them."""
    model.zero_grad()
    values = torch.cat([y for ys in function(model, groups) for y in ys])
    (values * torch.linspace(0.5, 1.5, len(values), device=values.device)).sum().backward()
    return values.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def exactness(args: Args):
    rng = np.random.default_rng(0)
    groups = [random_group(rng, 97, *lengths) for lengths in ((7, 5, 9, 3), (12, 1), (1, 4, 4), (20, 11, 30))]
    print("| model | rows | log-probs | gradients (of the largest) |\n|---|---|---|---|")
    for name in ["llama", "mamba"] if args.tiny else MODELS:
        model = make(name)
        truth, true_gradient = values_and_gradient(one_by_one, model, groups)
        with quiet():
            share_prompts(model)
        values, gradient = values_and_gradient(completion_logprobs, model, groups)
        error = (values - truth).abs().max()
        gradient_error = (gradient - true_gradient).abs().max() / true_gradient.abs().max()
        rows = "shared" if shares_prompts(model) else "padded"
        print(f"| {name} | {rows} | {error:.1e} | {gradient_error:.1e} |", flush=True)


# ---- Shared prompts against padded rows ------------------------------

def step(args: Args):
    model = random_llama(args)
    rng = np.random.default_rng(0)
    print("| tokens per sequence | k | prompt : completion | padded s | shared s | speed |\n" + "|---" * 6 + "|")
    for k in args.completions:
        for prompt, completion in ((4, 1), (1, 1), (1, 4)):
            n = args.tokens * prompt // (prompt + completion)
            groups = [random_group(rng, args.vocab, n, *[args.tokens - n] * k) for _ in range(4)]

            def run(function):
                torch.cat(sum(function(model, groups), [])).sum().backward()
                model.zero_grad()

            ways = {"padded": partial(refcache.forward, lay_out=lay_out_padded), "shared": refcache.forward}
            seconds = timed({name: partial(run, way) for name, way in ways.items()}, args.rounds)
            padded, shared = (median(times) for times in seconds.values())
            print(f"| {args.tokens} | {k} | {prompt}:{completion} | {padded:.2f} | {shared:.2f} "
                  f"| {padded / shared:.2f}x |", flush=True)


# ---- Tokenizing, and decoding ----------------------------------------

def tokenize(args: Args):
    """Pairs of the demo's words: a prompt of 60 words, answers of 30. Wall clock; `taskset -c 0` for one core."""
    rng = np.random.default_rng(0)
    words = [word for word in (ROOT / "demo/score.py").read_text().split() if word.isalpha()]
    cores = len(os.sched_getaffinity(0))
    print("| pairs | cores | seconds |\n|---|---|---|")
    for pairs in args.loaded_pairs:
        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/pairs.jsonl", "w") as file:
                for number in range(pairs):
                    prompt, chosen, rejected = (" ".join(rng.choice(words, n)) for n in (60, 30, 30))
                    row = {"prompt": f"{number} {prompt}", "chosen": f" a {chosen}", "rejected": f" b {rejected}"}
                    file.write(json.dumps(row) + "\n")
            given = resolve(dpo, dict(model=f"{ROOT}/demo/model", data=f"{folder}/pairs.jsonl", out=folder))
            seconds = []
            for _ in range(args.rounds):
                begin = time.perf_counter()
                assert len(read_rows(dpo, given)) == pairs
                seconds.append(time.perf_counter() - begin)
        print(f"| {pairs:,} | {cores} | {spread(seconds)} |", flush=True)


@torch.no_grad()
def rollout(args: Args):
    """8 prompts of equal length, 4 samples of each; no sample ends early."""
    model = random_llama(args)
    rng = np.random.default_rng(0)
    prompts = [random_group(rng, args.vocab, args.prompt_tokens)[0] for _ in range(8)]
    given = rloo.Args(dtype="float32", max_new_tokens=args.new_tokens)
    growing = vars(rloo).get("GrowingLayer", DynamicLayer)  # an older checkout may have none
    tokenizer = SimpleNamespace(eos_token_id=None, batch_decode=lambda rows, **options: [""] * len(rows))

    def ours(layer):
        rloo.GrowingLayer = layer
        rloo.rollout(model, tokenizer, prompts, 4, 1, given)

    ways = {"GrowingLayer": partial(ours, growing), "torch.cat": partial(ours, DynamicLayer)}
    print(f"| 32 rows, {args.prompt_tokens} + {args.new_tokens} tokens | seconds | tokens/s |\n|---|---|---|")
    for name, seconds in timed(ways, args.rounds).items():
        print(f"| {name} | {spread(seconds)} | {32 * args.new_tokens / median(seconds):,.0f} |")


def main(args: Args):
    torch.set_num_threads(1)
    if args.tiny:
        args = replace(args, hidden=64, layers=1, vocab=200, tokens=50, completions=(2,), loaded_pairs=(200,),
                       prompt_tokens=8, new_tokens=4, rounds=1)
    for name in args.what:
        print(f"\n{name}")
        {"exactness": exactness, "step": step, "tokenize": tokenize, "rollout": rollout}[name](args)


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
