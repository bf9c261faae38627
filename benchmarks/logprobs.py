"""The parts, one by one: shared prompts, tokenizing, looking up.

    python benchmarks/logprobs.py                                # all tables, or those that are named:
    CHECKOUT=../older python benchmarks/logprobs.py tokenize     # the scripts of another checkout
    python benchmarks/logprobs.py --tiny                         # does it run?

step        forward + backward of a batch: k completions that share their prompt, against a prompt for each
tokenize    load_rows of dpo.py: seconds, and the memory that its rows keep
missing     ReferenceCache.missing, which every start of a run calls: with an empty cache, and with a full one

Models are random. The ways alternate in one process. Seconds: CPU seconds of one thread, medians (lowest to highest).
"""
import ctypes
import json
import os
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from against_trl import DEVICE, NAMES, ROOT, SHAPES, clock, dpo, peak_gib, read_rows, spread
from transformers import AutoConfig, AutoModelForCausalLM


@dataclass
class Args:
    what: Annotated[tuple[Literal["step", "tokenize", "missing"], ...],
                    tyro.conf.Positional] = ("step", "tokenize", "missing")
    shape: str = "head-heavy"  # of against_trl.py
    tokens: int = 500  # of a sequence, in a step
    completions: tuple[int, ...] = (2, 8)  # per prompt, in a step
    loaded_pairs: tuple[int, ...] = (20_000, 80_000)  # that are tokenized
    cached_pairs: int = 60_000  # that are looked up
    rounds: int = 3
    tiny: bool = False  # does it run?


def random_model(shape: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**dict(zip(NAMES, SHAPES[shape])), bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE).eval()
    print(f"{shape}: {model.num_parameters() / 1e6:.1f} M parameters, on {DEVICE}")
    dpo.completion_logprobs(model, [((1,), [(1,)])])  # prints whether prompts are shared
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


# ---- Shared prompts --------------------------------------------------

def step(args: Args):
    model = random_model(args.shape)
    rng = np.random.default_rng(0)
    print("| tokens per sequence | k | prompt : completion | alone s | shared s | speed |\n" + "|---" * 6 + "|")
    for k in args.completions:
        for prompt, completion in ((4, 1), (1, 1), (1, 4)):
            n = args.tokens * prompt // (prompt + completion)
            groups = [random_group(rng, model.config.vocab_size, n, *[args.tokens - n] * k) for _ in range(4)]

            def run(groups):
                logps = dpo.completion_logprobs(model, groups)
                torch.cat(sum(logps, [])).sum().backward()
                model.zero_grad()

            ways = {"alone": [(x, [y]) for x, ys in groups for y in ys], "shared": groups}
            seconds = timed({name: partial(run, way) for name, way in ways.items()}, args.rounds)
            alone, shared = (median(times) for times in seconds.values())
            print(f"| {args.tokens} | {k} | {prompt}:{completion} | {alone:.2f} | {shared:.2f} "
                  f"| {alone / shared:.2f}x |", flush=True)


# ---- On the host -----------------------------------------------------

def tokenize(args: Args):
    """Pairs of the demo's words: a prompt of 60 words, answers of 30. Wall clock; `taskset -c 0` for one core."""
    rng = np.random.default_rng(0)
    words = [word for word in (ROOT / "demo/score.py").read_text().split() if word.isalpha()]
    cores = len(os.sched_getaffinity(0))
    print("| pairs | cores | seconds | bytes per token |\n|---|---|---|---|")
    for pairs in args.loaded_pairs:
        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/pairs.jsonl", "w") as file:
                for number in range(pairs):
                    prompt, chosen, rejected = (" ".join(rng.choice(words, n)) for n in (60, 30, 30))
                    row = {"prompt": f"{number} {prompt}", "chosen": f" a {chosen}", "rejected": f" b {rejected}"}
                    file.write(json.dumps(row) + "\n")
            given = dpo.Args(model=f"{ROOT}/demo/model", data=f"{folder}/pairs.jsonl")
            seconds, sizes = [], []
            for _ in range(args.rounds):
                before, begin = peak_gib(now=True), time.perf_counter()
                rows = read_rows(dpo, given)
                seconds.append(time.perf_counter() - begin)
                ctypes.CDLL(None).malloc_trim(0)
                sizes.append(2**30 * (peak_gib(now=True) - before) / dpo.count_tokens(dpo.groups(rows)))
                assert len(rows) == pairs
                del rows
        print(f"| {pairs:,} | {cores} | {spread(seconds)} | {max(sizes):.1f} |", flush=True)


def missing(args: Args):
    """Pairs of a prompt of 200 tokens and two answers of 100."""
    rng = np.random.default_rng(0)
    groups = [random_group(rng, 50_000, 200, 100, 100) for _ in range(args.cached_pairs)]
    empty, full = dpo.ReferenceCache(), dpo.ReferenceCache()
    for prompt, completions in groups:
        ids, *keys = (np.uint32(x).tobytes() for x in (prompt, *completions))  # of docs/cache.md
        full.table[ids] = {key: bytes(len(key)) for key in keys}
    assert len(empty.missing(groups)) == len(groups) and not full.missing(groups)
    print("| pairs | cache | seconds |\n|---|---|---|")
    ways = {"empty": partial(empty.missing, groups), "full": partial(full.missing, groups)}
    for name, seconds in timed(ways, args.rounds).items():
        print(f"| {args.cached_pairs:,} | {name} | {spread(seconds)} |", flush=True)


def main(args: Args):
    torch.set_num_threads(1)
    if args.tiny:
        args = replace(args, shape="tiny", tokens=50, completions=(2,), loaded_pairs=(200,),
                       cached_pairs=200, rounds=1)
    for name in args.what:
        print(f"\n{name}")
        {"step": step, "tokenize": tokenize, "missing": missing}[name](args)


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
