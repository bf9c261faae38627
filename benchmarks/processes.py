"""What several processes cost and give: speed and memory of a DPO step, on CPU cores or GPUs.

    python benchmarks/processes.py                                          # 1 and 2 processes, each on one core
    python benchmarks/processes.py --shape Qwen3-0.6B --processes 1 2 4 8   # on GPUs, one for each process
    python benchmarks/processes.py --tiny                                   # does it run?

Tokens per second of the training steps, without the first two; the ways alternate, medians of the rounds. Memory: of a
GPU the peak; on a CPU the resident set (Linux) after the last step, less that before the model.
"""
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from statistics import median

import against_trl
import torch
import tyro
from against_trl import DEVICE, dpo, peak_gib


@dataclass
class Args:
    shape: str = "body-heavy"  # of against_trl.py
    max_length: int = 2048  # tokens of a row
    batch_size: int = 16  # pairs per step, and this times the number of processes
    steps: int = 8
    rounds: int = 3
    processes: tuple[int, ...] = (1, 2)
    folder: str = ""  # of model and data; for the processes of torchrun
    tiny: bool = False  # does it run?


def files_of(args: Args) -> against_trl.Args:
    return against_trl.Args(folder=args.folder, pairs=16 * args.batch_size, max_length=args.max_length,
                            steps=args.steps, batch_size=args.batch_size)


def work(args: Args):
    """One process. The first prints what it measured."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"]) % os.cpu_count()})
    torch.set_num_threads(1)
    ends, tokens, memory = [], [], []
    run_batch = dpo.run_batch

    def end_of_step():
        ends.append(time.perf_counter())
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is not the model's
        memory.append(peak_gib() if DEVICE == "cuda" else peak_gib(now=True) - before)

    def counted(policy, rows, *values, **names):
        tokens.append(sum(len(row.prompt) + len(row.chosen) + len(row.rejected) for row in rows))
        return run_batch(policy, rows, *values, **names)

    against_trl.call_after_steps(dpo, end_of_step)
    dpo.run_batch = counted
    dpo.save_checkpoint = dpo.save_model = lambda *values: None
    given = against_trl.settings(files_of(args), args.shape, "dpo", out=f"out-{os.getppid()}")
    with dpo.process_group():
        before = peak_gib(now=True)
        dpo.main(replace(given, ref="none", loss=("simpo",), tokens_per_forward=4096))
    if int(os.environ["RANK"]) == 0:
        print("RESULT " + json.dumps([sum(tokens[2:]) / (ends[-1] - ends[2]), memory[-1]]), flush=True)


def launch(args: Args, n: int, batch_size: int) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", __file__]
    for name in ("shape", "max_length", "steps", "folder"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run([*command, "--batch_size", str(batch_size)], capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(done.stderr[-3000:])
    return json.loads(lines[0].removeprefix("RESULT "))


def main(args: Args):
    if args.tiny:
        args = replace(args, shape="tiny", max_length=256, batch_size=4, steps=3, rounds=1)
    with tempfile.TemporaryDirectory() as folder:
        args = replace(args, folder=folder)
        against_trl.make_files(files_of(args), args.shape)
        found = {(n, batch): [] for n in args.processes for batch in (args.batch_size, args.batch_size * n)}
        for _ in range(args.rounds):
            for n, batch in found:
                found[n, batch].append(launch(args, n, batch))
    print("| processes | pairs per step | tokens/s | of the first row | GiB per process |\n" + "|---" * 5 + "|")
    first = None
    for (n, batch), runs in found.items():
        speed, memory = map(median, zip(*runs))
        first = first or speed
        print(f"| {n} | {batch} | {speed:,.0f} | {speed / first:.2f}x | {memory:.2f} |")


if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    work(args) if "RANK" in os.environ else main(args)
