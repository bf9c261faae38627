"""Shared prompts: forward + backward of a batch whose k completions share their prompt, against a prompt for each.

    python benchmarks/logprobs.py
    CHECKOUT=../older python benchmarks/logprobs.py    # the scripts of another checkout
    python benchmarks/logprobs.py --tiny               # does it run?

The model is random. The two ways alternate in one process. Seconds: CPU seconds of one thread, medians.
"""
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
import tyro
from against_trl import DEVICE, NAMES, SHAPES, clock, dpo
from transformers import AutoConfig, AutoModelForCausalLM


@dataclass
class Args:
    shape: str = "head-heavy"  # of against_trl.py
    tokens: int = 500  # of a sequence
    completions: tuple[int, ...] = (2, 8)  # per prompt
    rounds: int = 3
    tiny: bool = False  # does it run?


def random_model(shape: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**dict(zip(NAMES, SHAPES[shape])), bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE).eval()
    print(f"{shape}: {model.num_parameters() / 1e6:.1f} M parameters, on {DEVICE}")
    dpo.completion_logprobs(model, [((1,), [(1,)])])  # prints whether prompts are shared
    return model


def random_group(rng, vocab: int, *lengths: int) -> tuple:
    """A prompt and completions of these lengths."""
    x, *ys = (tuple(rng.integers(1, vocab, n).tolist()) for n in lengths)
    return x, ys


def timed(model, ways: dict, rounds: int) -> list[float]:
    """Median seconds of each way. The first round does not count."""
    seconds = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, groups in ways.items():
            begin = clock()
            logps = dpo.completion_logprobs(model, groups)
            torch.cat(sum(logps, [])).sum().backward()
            model.zero_grad()
            if number:
                seconds[name].append(clock() - begin)
    return [median(values) for values in seconds.values()]


def main(args: Args):
    torch.set_num_threads(1)
    if args.tiny:
        args = replace(args, shape="tiny", tokens=50, completions=(2,), rounds=1)
    model = random_model(args.shape)
    rng = np.random.default_rng(0)
    print("\n| tokens per sequence | k | prompt : completion | alone s | shared s | speed |\n" + "|---" * 6 + "|")
    for k in args.completions:
        for prompt, completion in ((4, 1), (1, 1), (1, 4)):
            n = args.tokens * prompt // (prompt + completion)
            lengths = [n] + [args.tokens - n] * k
            shared = [random_group(rng, model.config.vocab_size, *lengths) for _ in range(4)]
            ways = {"alone": [(x, [y]) for x, ys in shared for y in ys], "shared": shared}
            alone, together = timed(model, ways, args.rounds)
            print(f"| {args.tokens} | {k} | {prompt}:{completion} | {alone:.2f} | {together:.2f} "
                  f"| {alone / together:.2f}x |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
