"""What several processes cost and give: memory of loading, and speed of a DPO step, fsdp and ddp, on CPU cores or GPUs.

    python benchmarks/processes.py                                   # 1 and 2 processes, each pinned to one core
    python benchmarks/processes.py --hidden 64 --layers 2 --steps 3 --rounds 1   # only shows that it runs

On a machine with GPUs every process takes one, and the model is in bfloat16:

    python benchmarks/processes.py --hidden 2048 --layers 24 --vocabulary 32000 --processes 1 2 4 8

Tokens per second of the training steps, without the first two; the ways alternate, medians of the rounds. "private" is
the memory that a process does not share with others (USS): while a model is loaded its weights lie in the page cache.
"""
import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def private_gib() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 2**20


def watch(peaks: list):
    while True:
        peaks.append(private_gib())
        time.sleep(0.02)


def prepare(folder: Path, sizes: argparse.Namespace):
    """A random model in bfloat16, as users download it, and pairs of very different length."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo/model")
    config = LlamaConfig(vocab_size=max(sizes.vocabulary, len(tokenizer)), hidden_size=sizes.hidden, head_dim=64,
                         intermediate_size=3 * sizes.hidden, num_hidden_layers=sizes.layers,
                         num_attention_heads=max(1, sizes.hidden // 64), num_key_value_heads=max(1, sizes.hidden // 64),
                         max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    words = [tokenizer.decode([i]) for i in range(20, len(tokenizer))]
    with open(folder / "pairs.jsonl", "w") as file:
        for _ in range(sizes.batch_size * 16):
            texts = [" ".join(random.choice(words, n)) for n in random.integers(10, sizes.length, 3)]
            file.write(json.dumps(dict(zip(("prompt", "chosen", "rejected"), texts))) + "\n")


def work(folder: str, parallel: str, batch_size: int, steps: int, load_only: bool):
    """One process: trains, or loads the model only. The first one prints what it measured."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"]) % os.cpu_count()})
    import torch

    import dpo
    from refcache import processes
    torch.set_num_threads(1)
    args = dpo.Args(model=f"{folder}/model", data=f"{folder}/pairs.jsonl", out=f"{folder}/out{os.getppid()}",
                    parallel=parallel, batch_size=batch_size, steps=steps, ref="none", loss=("simpo",), eval_size=0,
                    samples=0, tokens_per_forward=4096, max_length=2048)
    if load_only:
        device, peaks = dpo.init_processes(), []
        args, before = dpo.resolve_args(args), private_gib()
        threading.Thread(target=watch, args=(peaks,), daemon=True).start()
        model = dpo.load_model(args.model, device, args, trains=True)
        peak = max(peaks) - before
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is not the model's
        loaded, optimizer = private_gib() - before, torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        ctypes.CDLL(None).malloc_trim(0)
        result = {"peak": peak, "loaded": loaded, "trained": private_gib() - before,
                  "model": sum(p.numel() * 4 for p in model.parameters()) / 2**30}
    else:
        ends, write = [], dpo.Log.write

        def timed(self, values, samples):
            write(self, values, samples)
            ends.append((time.perf_counter(), values.get("num_tokens", 0)))

        dpo.Log.write, dpo.save_checkpoint = timed, lambda *_, **__: None
        dpo.save_model = dpo.move_model = lambda *_: None
        dpo.report = lambda *_: None
        dpo.main(args)
        (start, seen), (stop, tokens) = ends[2], ends[-1]
        result = {"tokens per second": (tokens - seen) / (stop - start)}
        if torch.cuda.is_available():
            result["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    if processes()[0] == 0:
        print("RESULT " + json.dumps(result), flush=True)


def launch(n: int, *words) -> dict:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
    command = [*torchrun, __file__, "--work"]
    done = subprocess.run([*command, *map(str, words)], capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(done.stderr[-3000:])
    return json.loads(lines[0].removeprefix("RESULT "))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", nargs="*", help=argparse.SUPPRESS)
    for name, default in dict(hidden=512, layers=8, vocabulary=8192, length=120, batch_size=16, steps=12,
                              rounds=3).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    sizes = parser.parse_args()
    if sizes.work:
        folder, parallel, batch_size, steps, load_only = sizes.work
        return work(folder, parallel, int(batch_size), int(steps), load_only == "True")
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), sizes)
        print("| private GiB | processes | loading, peak | loaded | arithmetic | after AdamW | arithmetic |")
        print("|---|---|---|---|---|---|---|")
        for n in sizes.processes:
            for parallel in ("fsdp", "ddp"):
                found = launch(n, name, parallel, sizes.batch_size, sizes.steps, True)
                size = found["model"] / (n if parallel == "fsdp" else 1)
                print(f"| {parallel} | {n} | {found['peak']:.2f} | {found['loaded']:.2f} | {size:.2f} | "
                      f"{found['trained']:.2f} | {4 * size:.2f} |")
        ways = {(n, parallel, batch): [] for n in sizes.processes for parallel in ("fsdp", "ddp")
                for batch in {sizes.batch_size: 0, sizes.batch_size * n: 0}}
        if not sizes.rounds:
            return
        for _ in range(sizes.rounds):
            for (n, parallel, batch), found in ways.items():
                found.append(launch(n, name, parallel, batch, sizes.steps, False))
        print("\n| processes | | pairs a step | tokens/s | of one process | peak GiB on the GPU |")
        print("|---|---|---|---|---|---|")
        one = median(x["tokens per second"] for x in ways[sizes.processes[0], "fsdp", sizes.batch_size])
        for (n, parallel, batch), found in ways.items():
            speed = median(x["tokens per second"] for x in found)
            peak = median(x.get("peak GiB", 0) for x in found)
            gib = f"{peak:.1f}" if peak else ""
            print(f"| {n} | {parallel} | {batch} | {speed:,.0f} | {speed / one:.2f}x | {gib} |")


if __name__ == "__main__":
    main()
