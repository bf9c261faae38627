"""What a reference costs in DPO: peak memory and seconds of --ref cache, swap and live, and of a second run
that reads the cache of the first.

    python benchmarks/references.py --model out/smollm2 --data out/hh/train.jsonl --steps 10

It takes ten minutes on two CPU cores. The data, rows, sizes and clock are those of `dpo` in against_trl.py
--model. Every run is a process of its own. A step of swap and live contains the reference's forward. Writes
benchmarks/references.json, and prints it as a table.
"""
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import against_trl
import torch
import tyro
from against_trl import ROOT, clock, dpo, quiet, settings

from refcache import Swap


@dataclass
class Args:
    model: str  # folder of a chat model, see demo/get_model.py
    data: str  # pairs of chats, plain rows as tools/prepare.py writes them
    steps: int = 20
    batch_size: int = 4  # pairs per step
    threads: int = 2
    results: str = str(ROOT / "benchmarks/references.json")


def time_of_exchange(given: against_trl.Args) -> float:
    """Seconds that the policy and its reference take to change places. `swap` does it twice per step."""
    torch.set_num_threads(given.threads)
    flags = settings(given, "model", "dpo")
    with quiet():
        policy = dpo.load_model(flags.model, against_trl.DEVICE, flags, trains=True)
    swap = Swap(policy)
    swap.exchange()  # the first one also touches new memory

    begin = clock()
    for _ in range(10):
        swap.exchange()
    return (clock() - begin) / 10


def main(args: Args):
    against_trl.ROLLOUTS.clear()  # no prompts for rollouts are needed
    with tempfile.TemporaryDirectory() as folder:
        given = against_trl.Args(
            model=args.model, data=args.data, folder=folder, steps=args.steps,
            batch_size=args.batch_size, pairs=max(8, args.steps * args.batch_size), lr=1e-5, eps=1e-8,
            threads=args.threads)
        against_trl.make_files(given, "model")

        cache = {"ref_cache": f"{folder}/reference_logprobs.pkl"}
        ways = {"cache": cache, "cache, second run": cache, "swap": {"ref": "swap"}, "live": {"ref": "live"}}
        runs = {}
        for name, flags in ways.items():
            given.extra = json.dumps(flags)
            runs[name] = against_trl.start(given, "refcache", "model", "dpo", 0)
        given.extra = "{}"
        exchange = time_of_exchange(given)

    results = {"commit": against_trl.commit(), "versions": against_trl.versions(), **vars(args)}
    results |= {"exchange": exchange, "runs": runs}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in results.items()]
    Path(args.results).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print_table(results)


def print_table(results: dict):
    print(f"commit {results['commit']}, {results['versions']}")
    print(f"{results['steps']} steps of {results['batch_size']} pairs\n\n"
          "| `--ref` | reference pass, s | s per step | pass and steps, s | peak GiB |\n" + "|---" * 5 + "|")
    for name, run in results["runs"].items():
        total = sum(run["steps"])
        reference = "in the steps"
        if name.startswith("cache"):
            total += run["reference"]
            reference = f"{run['reference']:.1f}"
        print(f"| {name} | {reference} | {run['seconds']:.2f} | {total:.0f} | {run['peak']:.2f} |")

    losses = [run["losses"] for run in results["runs"].values()]
    gap = max(abs(loss - losses[0][i]) for run in losses for i, loss in enumerate(run))
    print(f"\nThe losses differ by at most {gap:.1e}. "
          f"Policy and reference change places in {results['exchange']:.3f} s, twice per step of swap.")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
