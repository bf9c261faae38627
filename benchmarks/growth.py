"""How cost grows on a CPU with rows, row length, vocabulary and k, to find what is superlinear and need not be.

    python benchmarks/growth.py         # some minutes of one core
    python benchmarks/growth.py --tiny  # does it run?

Each line is a work, with CPU seconds of one thread per size, the lowest of --repeats (or of what fits into 10 s); the
exponent e of seconds ~ size^e over all sizes, then over the last two (1 is linear); and of works by rows the MiB that
Python had allocated at most for up to 10,000 rows, with its exponent. Every row has a prompt of its own. A step is
completion_logprobs, forward and backward.
"""
import contextlib
import io
import json
import math
import sys
import tempfile
import time
import tracemalloc
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import tyro
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
import dpo  # noqa: E402
import kto  # noqa: E402
import rloo  # noqa: E402
from refcache import ReferenceCache, bytes_of, completion_logprobs, micro_batches, share_prompts  # noqa: E402


@dataclass
class Args:
    rows: tuple[int, ...] = (1_000, 10_000, 100_000)
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)  # tokens of a row, half of them prompt
    vocabularies: tuple[int, ...] = (2_000, 8_000, 32_000, 128_000)
    ks: tuple[int, ...] = (2, 4, 8, 16)  # completions per prompt
    new_tokens: tuple[int, ...] = (64, 128, 256, 512)  # per sample of a rollout
    hidden: int = 128  # of a random Llama with 2 layers
    repeats: int = 3
    tiny: bool = False


def measure(name: str, sizes: tuple, prepare, args: Args, by_rows: bool = False):
    """Prints a line. prepare(size) returns the function to measure."""
    seconds, peaks = [], []
    for size in sizes:
        with contextlib.redirect_stdout(io.StringIO()):
            work, times = prepare(size), []
            while len(times) < args.repeats and sum(times) < 10:  # enough for what is slow
                begin = time.process_time()
                work()
                times.append(time.process_time() - begin)
            seconds.append(min(times))
            if by_rows and size <= 10_000:  # it slows the work down
                tracemalloc.start()
                work()
                peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
                tracemalloc.stop()

    def exponent(costs, first):
        return math.log(costs[-1] / costs[first]) / math.log(sizes[len(costs) - 1] / sizes[range(len(costs))[first]])

    cells = ", ".join(f"{size:,}: {cost:.3g} s" for size, cost in zip(sizes, seconds))
    memory = f"{peaks[-1]:,.0f} MiB, {exponent(peaks, 0):.2f}" if by_rows else ""
    print(f"| {name} | {cells} | {exponent(seconds, 0):.2f}, {exponent(seconds, -2):.2f} | {memory} |", flush=True)


def main(args: Args):
    rng, folder = np.random.default_rng(0), tempfile.TemporaryDirectory()
    tokenizer, _ = dpo.load_tokenizer(str(Path(dpo.__file__).parent / "demo/model"))
    words = "the soup in that place was good but service slow and they never came back to us".split()

    def draw(vocab, prompt, *completions):
        x, *ys = (tuple(rng.integers(2, vocab, n).tolist()) for n in (prompt, *completions))
        return x, ys

    def draw_groups(rows): return [draw(100_000, *rng.integers(20, 140, 3)) for _ in range(rows)]

    def llama(vocab=2_000):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=vocab, hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None))
        share_prompts(model.eval())
        return model

    def load(rows):
        def text(n): return " ".join(rng.choice(words, n))
        pairs = [dict(prompt=f"{i} {text(8)}", chosen=f" a {text(4)}", rejected=f" b {text(4)}") for i in range(rows)]
        path = Path(folder.name) / f"{rows}.jsonl"
        path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        return lambda: dpo.load_rows(str(path), tokenizer, 1024, dpo.Args())

    def others(rows):  # a tenth of them held out
        feedback = [kto.Row(x, w, True, (), {}) for x, (w, _) in draw_groups(rows)]
        return lambda: kto.draw_others(feedback[rows // 10:], feedback[:rows // 10], 1024, 0)

    def plan(rows):  # a pass over all rows, and the rows of one step
        groups, model = draw_groups(rows), llama()
        return lambda: (micro_batches(model, groups, 16384), dpo.batch_rows(1, groups, 32, 0))

    def fill(groups):
        cache = ReferenceCache(reference="random")
        for x, ys in groups:
            cache.table[bytes_of(x)] = {bytes_of(y): np.zeros(len(y), "f4").tobytes() for y in ys}
        return cache

    def lookup(rows):
        groups = draw_groups(rows)
        cache = fill(groups)
        return lambda: (cache.missing(groups, 16384), [cache[x, y] for x, ys in groups for y in ys])

    def save_and_load(rows):
        cache, path = fill(draw_groups(rows)), Path(folder.name) / "cache.pkl"
        return lambda: (path.unlink(missing_ok=True), cache.save(path), ReferenceCache(reference="random").load(path))

    def step(vocab=2_000, length=512, k=2):
        model, groups = llama(vocab), [draw(vocab, length // 2, *[length // 2] * k) for _ in range(2)]
        return lambda: sum(y.sum() for ys in completion_logprobs(model, groups) for y in ys).backward()

    def rollout(new=64, k=4):
        model, settings = llama(), rloo.Args(model="random", max_new_tokens=new, dtype="float32")
        prompts, tokenizer = [draw(2_000, 64)[0] for _ in range(4)], SimpleNamespace(eos_token_id=None)
        return lambda: rloo.rollout(model, tokenizer, prompts, k, 1, settings)

    print("| work | seconds | exponents | memory, exponent |\n" + "|---" * 4 + "|")
    by_rows = {"load_rows": load, "draw_others": others, "micro_batches, batch_rows": plan,
               "cache: missing, look up": lookup, "cache: save, load": save_and_load}
    for name, work in by_rows.items():
        measure(f"{name}, by rows", args.rows, work, args, by_rows=True)
    measure("step, by length", args.lengths, lambda n: step(length=n), args)
    measure("step, by vocabulary", args.vocabularies, lambda n: step(vocab=n), args)
    measure("step, by k", args.ks, lambda n: step(k=n), args)
    measure("rollout, by new tokens", args.new_tokens, lambda n: rollout(new=n), args)
    measure("rollout, by k", args.ks, lambda n: rollout(k=n), args)


if __name__ == "__main__":
    args, two = tyro.cli(Args, use_underscores=True), (2, 4)
    torch.set_num_threads(1)
    tiny = dict(rows=(100, 200), lengths=(64, 128), vocabularies=(500, 1000), ks=two, new_tokens=two, repeats=1)
    main(replace(args, **tiny) if args.tiny else args)
