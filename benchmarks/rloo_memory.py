"""Memory of one RLOO step at true length: TRL's RLOOTrainer and rloo.py, on the same model, prompts and reward.

    python benchmarks/rloo_memory.py                                 # both sides and all k, one process each
    python benchmarks/rloo_memory.py --sides refcache --k 2 --tiny   # does it run?

The setting is a published one: a tiny random Qwen3 with the full vocabulary of 151,936, sequences of 3,100 tokens (a
prompt of 2,900, 200 new ones), 4 prompts of k samples in one optimizer step. One rollout and one update without
gradient checkpointing: on a CPU in float32, on a GPU (the same commands) with bfloat16 forwards. Nothing is truncated:
EOS ends one sample in 760 early. peak is the largest resident set of the process, before is its resident set once
everything is loaded; the difference is what the step adds. On a GPU both are what torch has allocated there.
"""
import tempfile
from dataclasses import dataclass

import against_trl
import tyro


@dataclass
class Args:
    sides: tuple[str, ...] = ("refcache", "trl")
    k: tuple[int, ...] = (2, 4, 8)  # samples per prompt
    tiny: bool = False  # does it run?


def rows(args: Args):
    """Yields (side, k, what against_trl.py found)."""
    with tempfile.TemporaryDirectory() as folder:
        given = against_trl.Args(folder=folder, steps=1, batch_size=4, tiny=args.tiny, pairs=20)
        shape = "tiny" if args.tiny else "long"
        if args.tiny:
            given = against_trl.shrink(given)
        against_trl.make_files(given, shape)
        for k in args.k:
            work = "rloo 16+4, k=2" if args.tiny else f"long, k={k}"
            for side in args.sides:
                yield side, k, against_trl.start(given, side, shape, work, 0)


def main(args: Args):
    if "trl" in args.sides:
        against_trl.require_trl()
    print(f"{against_trl.versions()}\n\n| side | k | before GiB | peak GiB | the step adds GiB | seconds | "
          "tokens per sample |\n" + "|---" * 7 + "|", flush=True)
    for side, k, found in rows(args):
        print(f"| {side} | {k} | {found['before']:.2f} | {found['peak']:.2f} | {found['peak'] - found['before']:.2f} "
              f"| {found['seconds']:.0f} | {found['length']:.0f} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
