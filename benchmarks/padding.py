"""How many tokens go through a model for each useful token, by counting: here, in TRL, and packed into fixed rows.

    python benchmarks/padding.py --data hh_train.jsonl
    python benchmarks/padding.py --tiny    # does it run?

A useful token is one of a prompt or an answer; a prompt counts once for both answers. A forward computes everything in
its tensor, also prompts that are repeated, and padding. No model is run. The rows are those of against_trl.py, in
random order.

here              the forwards of micro_batches for each step; also for a model whose answers cannot share a prompt
TRL's collator    prompt + chosen and prompt + rejected are rows, padded to the longest row of their batch
fixed rows        two rows of a fixed length, one for chosen and one for rejected answers, filled with as many pairs as
                  fit, in order, as TensorDataCollatorWithFlatteningDPO of allenai/open-instruct does
"""
from dataclasses import dataclass, replace
from types import SimpleNamespace

import against_trl  # finds the checkout
import numpy as np
import tyro

from refcache import SHARED, count_tokens, micro_batches


@dataclass
class Args:
    data: str | None = None  # .jsonl with prompt, chosen and rejected as strings; None: rows of preference-like lengths
    max_length: int = 1024  # tokens of a row; longer ones are left out
    vocab: int = 20_480  # of the tokenizer that is trained on the data
    batch_size: int = 32  # pairs of a step
    tokens_per_forward: int = 16384
    trl_batches: tuple[int, ...] = (1, 8, 32)  # pairs of a forward
    row_lengths: tuple[int, ...] = (2048, 4096, 16384)  # of fixed rows
    tiny: bool = False  # does it run?


def tokens_here(groups: list, is_shared: bool, args: Args) -> int:
    """Tokens of all forwards of one pass over these groups."""
    attention = SHARED if is_shared else "sdpa"
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=attention))  # all that micro_batches looks at
    total = 0
    for start in range(0, len(groups), args.batch_size):
        step = groups[start:start + args.batch_size]
        for indices, _ in micro_batches(model, step, args.tokens_per_forward):
            micro = [step[i] for i in indices]
            total += count_tokens(micro) if is_shared else padded_tokens(micro)
    return total


def tokens_of_collator(groups: list, batch_size: int) -> int:
    starts = range(0, len(groups), batch_size)
    return sum(padded_tokens(groups[start:start + batch_size]) for start in starts)


def tokens_of_fixed_rows(groups: list, row_length: int) -> int:
    n_forwards = 0
    used = [row_length, row_length]  # tokens in the row of chosen, and in that of rejected answers
    for group in groups:
        lengths = rows_of([group])
        if any(n + length > row_length for n, length in zip(used, lengths)):
            n_forwards += 1
            used = [0, 0]
        used = [n + length for n, length in zip(used, lengths)]
    return n_forwards * 2 * row_length


def padded_tokens(groups: list) -> int:
    rows = rows_of(groups)
    return len(rows) * max(rows)


def rows_of(groups: list) -> list[int]:
    """Lengths of prompt + answer."""
    return [len(prompt) + len(answer) for prompt, answers in groups for answer in answers]


def main(args: Args):
    given = against_trl.Args(data=args.data, pairs=1000, max_length=args.max_length)
    if args.data:
        given = replace(given, pairs=10**9)  # all
    if args.tiny:
        given = replace(given, pairs=20)
    pairs = against_trl.read_pairs(given, args.vocab)
    order = np.random.default_rng(0).permutation(len(pairs))
    groups = [(pairs[i][0], [[*answer, 1] for answer in pairs[i][1:]]) for i in order]  # 1: EOS
    useful = count_tokens(groups)

    lengths = np.array([[len(prompt), *map(len, answers)] for prompt, answers in groups])
    prompt, chosen, rejected = np.median(lengths, axis=0)
    print(f"{len(groups):,} pairs, {useful:,} useful tokens; medians: prompt {prompt:.0f}, chosen {chosen:.0f}, "
          f"rejected {rejected:.0f}\n\n| way | tokens computed per useful token |\n|---|---|")

    ways = {
        "here": tokens_here(groups, True, args),
        "here, without shared prompts": tokens_here(groups, False, args),
        "each answer with its own prompt, no padding": sum(rows_of(groups)),
    }
    for batch_size in args.trl_batches:
        ways[f"TRL's collator, {batch_size} pairs"] = tokens_of_collator(groups, batch_size)
    for row_length in args.row_lengths:
        ways[f"fixed rows of {row_length:,} tokens"] = tokens_of_fixed_rows(groups, row_length)
    for way, tokens in ways.items():
        print(f"| {way} | {tokens / useful:.2f} |")


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
