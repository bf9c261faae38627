"""refcache against the usual way (stacked padded rows, full logits, log_softmax): exactness, memory and speed.

    python benchmarks/logprobs.py exactness     largest error of values and gradients against one forward per sequence
    python benchmarks/logprobs.py bytes         of the cache per token, in memory and on disk; seconds to save and load
    python benchmarks/logprobs.py reference     tokens/s of the reference pass
    python benchmarks/logprobs.py step          forward + backward of a DPO batch, by prompt : completion ratio
    python benchmarks/logprobs.py step --hidden 64 --layers 1 --vocab 200 --repeats 1    # tiny: does it run?

The model is random; the sizes are flags. The ways alternate in one process; figures are medians, and ratios of medians.
"""
import os
import sys
import tempfile
import time
import tracemalloc
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]
import refcache  # noqa: E402
from refcache import ReferenceCache, completion_logprobs, lay_out_padded, share_prompts, shares_prompts  # noqa: E402


@dataclass
class Args:
    what: Annotated[Literal["exactness", "bytes", "reference", "step"], tyro.conf.Positional]
    hidden: int = 256  # hidden size of the random Llama
    layers: int = 4  # its layers
    vocab: int = 32_000  # its vocabulary
    rows: int = 192  # pairs of the reference pass
    tokens: int = 500  # of a sequence, in a step
    completions: tuple[int, ...] = (2, 8)  # per prompt, in a step
    groups: int = 4  # groups in a step
    tokens_per_forward: int = 8192
    repeats: int = 5
    pairs: int = 20_000  # in the cache whose bytes are counted


def random_llama(args: Args):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=args.hidden, intermediate_size=args.hidden * 8 // 3, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64, num_key_value_heads=max(1, args.hidden // 128), vocab_size=args.vocab,
        max_position_embeddings=8192)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = AutoModelForCausalLM.from_config(config).to(device, dtype).eval()
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"Llama of {parameters:.1f} M parameters, vocabulary {args.vocab:,}, {model.dtype} on {device}")
    share_prompts(model)
    return model


def stacked(model, groups):
    """The usual way: every completion with its prompt is a row, rows are padded to the longest, all logits exist."""
    inputs, sources, targets = lay_out_padded(groups, model.device)
    logits = model(**inputs, use_cache=False).logits.flatten(0, 1)
    return F.log_softmax(logits.float(), -1)[sources, targets]


def clock() -> float:
    """On a CPU the CPU seconds of all threads, which depend little on other work; on a GPU the clock's."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def timed(ways: dict, repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, in turn, after one round that does not count."""
    seconds = {name: [] for name in ways}
    for repeat in tqdm(range(repeats + 1), leave=False):
        for name, way in ways.items():
            start = clock()
            way()
            if repeat:
                seconds[name].append(clock() - start)
    return seconds


def draw(rng, vocab, prompt, *completions):
    ids = lambda n: tuple(rng.integers(1, vocab, n).tolist())  # noqa: E731
    return ids(prompt), [ids(n) for n in completions]


def exactness(args: Args):
    from models import MODELS, make
    from test_logprobs import GROUPS, slow, values_and_gradients
    rows = ["| model | rows | log-probs | gradients (of the largest) |", "|---|---|---|---|"]
    for name in MODELS:
        model = make(name)
        share_prompts(model)
        truth, truth_grad = values_and_gradients(slow, model, GROUPS)
        logps, grad = values_and_gradients(completion_logprobs, model, GROUPS)
        error, grad_error = (logps - truth).abs().max(), (grad - truth_grad).abs().max() / truth_grad.abs().max()
        rows.append(f"| {name} | {'shared' if shares_prompts(model) else 'padded'} | {error:.1e} | {grad_error:.1e} |")
    print(*rows, sep="\n")


def bytes_per_token(args: Args):
    """Of pairs of about 300 tokens with invented log-probs."""
    from models import make
    rng, model = np.random.default_rng(0), make("llama")
    groups = [draw(rng, 150_000, int(rng.integers(60, 240)), *rng.integers(20, 130, 2)) for _ in range(args.pairs)]
    tokens = sum(len(p) + sum(map(len, ys)) for p, ys in groups)
    refcache.completion_logprobs = lambda model, groups, *_: [[torch.rand(len(y)) for y in ys] for _, ys in groups]
    refcache.micro_batches = lambda model, groups, *_: [[i] for i in range(len(groups))]
    cache, again = ReferenceCache(reference="a"), ReferenceCache(reference="a")
    tracemalloc.start()
    cache.score(model, groups)
    after_fill = tracemalloc.get_traced_memory()[0] / tokens
    tracemalloc.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/cache.pkl"
        start = time.perf_counter()
        cache.save(path)
        saved = time.perf_counter() - start
        ReferenceCache(reference="a").load(path)
        loaded = time.perf_counter() - start - saved
        tracemalloc.start()
        again.load(path)
        after_load = tracemalloc.get_traced_memory()[0] / tokens
        on_disk = os.path.getsize(path) / tokens
    print(f"{len(cache):,} completions, {tokens:,} tokens: {after_fill:.1f} bytes per token after fill, "
          f"{after_load:.1f} after load, {on_disk:.1f} on disk; saved in {saved:.1f} s, loaded in {loaded:.1f} s")


def reference(args: Args):
    """Lengths as in preference data: lognormal, prompts of 120 tokens in the median, answers of 60."""
    model, rng = random_llama(args), np.random.default_rng(0)
    length = lambda median: int(np.clip(rng.lognormal(np.log(median), 0.8), 4, 1024))  # noqa: E731
    groups = [draw(rng, args.vocab, length(120), length(60), length(60)) for _ in range(args.rows)]
    tokens = sum(len(ys) * len(p) + sum(map(len, ys)) for p, ys in groups)  # that the usual way reads, without padding

    @torch.no_grad()
    def usual():  # batches of 8 pairs, in data order
        for at in range(0, len(groups), 8):
            stacked(model, groups[at:at + 8]).cpu()

    @torch.no_grad()
    def padded():  # sorted by length into forwards of tokens_per_forward, completion rows only
        rows = [(p, [y]) for p, ys in groups for y in ys]
        rows.sort(key=lambda row: -len(row[0]) - len(row[1][0]))
        while rows:
            n = max(1, args.tokens_per_forward // (len(rows[0][0]) + len(rows[0][1][0])))
            batch, rows = rows[:n], rows[n:]
            torch.cat(sum(refcache.forward(model, batch, lay_out_padded), [])).cpu()

    def ours():
        ReferenceCache().fill(lambda: model, groups, args.tokens_per_forward)

    seconds = timed({"usual": usual, "sorted, completion rows": padded, "refcache": ours}, args.repeats)
    print("| reference pass | tokens/s | speed |\n|---|---|---|")
    for name, times in seconds.items():
        speed = median(seconds["usual"]) / median(times)
        print(f"| {name} | {tokens / median(times):,.0f} | {speed:.2f}x |")


def step(args: Args):
    """usual: stacked rows and all logits; padded: stacked rows, but through our chunked head; refcache: flat rows."""
    model, rng = random_llama(args), np.random.default_rng(0)
    print("| tokens per sequence | k | prompt : completion | usual s | padded s | refcache s | against usual "
          "| against padded | peaks |\n" + "|---" * 9 + "|")
    for k in args.completions:
        for prompt, completion in ((4, 1), (1, 1), (1, 4)):
            n = args.tokens * prompt // (prompt + completion)
            groups = [draw(rng, args.vocab, n, *[args.tokens - n] * k) for _ in range(args.groups)]
            peaks = {}

            def run(name, forward):
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
                forward().sum().backward()
                model.zero_grad()
                if torch.cuda.is_available():
                    peaks[name] = torch.cuda.max_memory_allocated() / 2**30

            ways = {"usual": lambda: stacked(model, groups),
                    "padded": lambda: torch.cat(sum(refcache.forward(model, groups, lay_out_padded), [])),
                    "refcache": lambda: torch.cat(sum(completion_logprobs(model, groups, 10**9), []))}
            seconds = timed({name: partial(run, name, way) for name, way in ways.items()}, args.repeats)
            usual, padded, ours = (median(times) for times in seconds.values())
            memory = " / ".join(f"{peaks[name]:.1f} GiB" for name in ways) if peaks else "not on a CPU"
            print(f"| {args.tokens} | {k} | {prompt}:{completion} | {usual:.2f} | {padded:.2f} | {ours:.2f} "
                  f"| {usual / ours:.2f}x | {padded / ours:.2f}x | {memory} |", flush=True)


if __name__ == "__main__":
    args = tyro.cli(Args)
    {"exactness": exactness, "bytes": bytes_per_token, "reference": reference, "step": step}[args.what](args)
