"""What several processes cost and give: speed and memory of a DPO step, on CPU cores or GPUs.

    python benchmarks/processes.py           # 1 and 2 processes, each pinned to one core
    python benchmarks/processes.py --tiny    # does it run?

On a machine with GPUs every process takes one, and forwards are in bfloat16:

    python benchmarks/processes.py --hidden 2048 --layers 24 --vocab 32000 --processes 1 2 4 8

Tokens per second of the training steps, without the first two; the ways alternate, medians of the rounds. Memory: of a
GPU the peak; on a CPU the private memory (USS, Linux) after the last step, less that before the model. Weights and
AdamW's moments have 12 bytes per parameter, divided by the processes.
"""
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import tyro

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    hidden: int = 384
    layers: int = 6
    vocab: int = 8192
    words: int = 360  # of a text, at most
    batch_size: int = 16  # pairs per step, and this times the number of processes
    steps: int = 8
    rounds: int = 3
    processes: tuple[int, ...] = (1, 2)
    tiny: bool = False  # does it run?


def private_gib() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 2**20


def make_files(folder: Path, args: Args):
    """A random model in bfloat16, as users download it, and pairs of very different length."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo/model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=max(args.vocab, len(tokenizer)), hidden_size=args.hidden, intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64, max_position_embeddings=2048)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    words = [tokenizer.decode([i]) for i in range(20, len(tokenizer))]
    with open(folder / "pairs.jsonl", "w") as file:
        for _ in range(args.batch_size * 16):
            texts = [" ".join(rng.choice(words, n)) for n in rng.integers(10, args.words, 3)]
            file.write(json.dumps(dict(zip(("prompt", "chosen", "rejected"), texts))) + "\n")


# ---- One process of torchrun: the first prints what it measured ------

def work(folder: str, batch_size: int, steps: int):
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"]) % os.cpu_count()})
    sys.path.insert(0, str(ROOT))
    import dpo
    import torch
    torch.set_num_threads(1)
    ends, tokens, memory = [], [], []
    log, run_batch = dpo.log, dpo.run_batch

    def timed_log(*values):
        log(*values)
        ends.append(time.perf_counter())
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is not the model's
        memory.append(private_gib() - before)

    def counted(policy, rows, *values, **names):
        tokens.append(sum(len(row.prompt) + len(row.chosen) + len(row.rejected) for row in rows))
        return run_batch(policy, rows, *values, **names)

    dpo.log, dpo.run_batch = timed_log, counted
    dpo.save_checkpoint = dpo.save_model = dpo.report = lambda *values: None
    dpo.start_processes()
    before = private_gib()
    dpo.main(dpo.Args(
        model=f"{folder}/model", data=f"{folder}/pairs.jsonl", out=f"{folder}/out-{os.getppid()}", ref="none",
        loss=("simpo",), batch_size=batch_size, steps=steps, eval_size=0, samples=0, tokens_per_forward=4096,
        max_length=2048))
    if torch.cuda.is_available():
        memory.append(torch.cuda.max_memory_allocated() / 2**30)
    if dpo.processes()[0] == 0:
        print("RESULT " + json.dumps([sum(tokens[2:]) / (ends[-1] - ends[2]), memory[-1]]), flush=True)


# ---- All of them -----------------------------------------------------

def launch(n: int, *words) -> list[float]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
    done = subprocess.run([*torchrun, __file__, "--work", *map(str, words)], capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(done.stderr[-3000:])
    return json.loads(lines[0].removeprefix("RESULT "))


def main(args: Args):
    if args.tiny:
        args = replace(args, hidden=64, layers=2, words=40, batch_size=4, steps=3, rounds=1)
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder), args)
        found = {(n, batch): [] for n in args.processes for batch in (args.batch_size, args.batch_size * n)}
        for _ in range(args.rounds):
            for n, batch in found:
                found[n, batch].append(launch(n, folder, batch, args.steps))
    print("| processes | pairs per step | tokens/s | of the first row | GiB per process |\n" + "|---" * 5 + "|")
    first = None
    for (n, batch), runs in found.items():
        speed, memory = map(median, zip(*runs))
        first = first or speed
        print(f"| {n} | {batch} | {speed:,.0f} | {speed / first:.2f}x | {memory:.2f} |")


if __name__ == "__main__":
    if "--work" in sys.argv:
        folder, *sizes = sys.argv[-3:]
        work(folder, *map(int, sizes))
    else:
        main(tyro.cli(Args, use_underscores=True))
