"""What a LoRA run's frozen base takes under bfloat16 forwards: stored as it was saved, in bfloat16, or in float32. One process a row.

    python benchmarks/lora_memory.py                                # a random Llama of 370 M parameters, on a CPU
    python benchmarks/lora_memory.py --hidden 4096 --layers 32      # 8 B, for a GPU

resident is what the process holds after its steps, or on a GPU what was allocated at most; the rows alternate, medians of the rounds.
"""
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
import tyro
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
import refcache  # noqa: E402


@dataclass
class Args:
    hidden: int = 1024
    layers: int = 20
    rank: int = 16
    rounds: int = 3
    stored: str | None = None  # run this one, for the processes
    folder: str | None = None


def one(args: Args):
    """-> GiB of the weights, GiB resident, seconds a forward and backward of a pair of 300 tokens."""
    if args.stored == "float32":
        refcache.store_frozen = lambda model, dtype: model
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = refcache.load_policy(SimpleNamespace(
        model=args.folder, dtype="bfloat16", lora_r=args.rank, lora_alpha=None, lora_dropout=0.0, lora_target="all-linear", gradient_checkpointing=False), device)
    seconds = []
    for _ in range(4):
        begin = time.monotonic()
        with refcache.autocast(policy, "bfloat16"):
            logps = refcache.completion_logprobs(policy, [((5,) * 200, [(7,) * 100, (9,) * 100])])
        sum(x.sum() for x in logps[0]).backward()
        seconds.append(time.monotonic() - begin)
    resident = torch.cuda.max_memory_allocated() if device == "cuda" else 4096 * int(Path("/proc/self/statm").read_text().split()[1])
    print("\n", sum(p.nbytes for p in policy.parameters()) / 2**30, resident / 2**30, median(seconds[1:]))


def main(args: Args):
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(vocab_size=32_000, hidden_size=args.hidden, intermediate_size=4 * args.hidden, num_hidden_layers=args.layers,
                                     num_attention_heads=args.hidden // 64, tie_word_embeddings=True)).bfloat16().save_pretrained(folder)
        found = {"bfloat16": [], "float32": []}
        for _ in range(args.rounds):
            for stored, rows in found.items():
                done = subprocess.run([sys.executable, __file__, f"--folder={folder}", f"--stored={stored}", f"--rank={args.rank}"], capture_output=True, text=True, check=True)
                rows.append(list(map(float, done.stdout.splitlines()[-1].split())))
        print("| frozen base | weights GiB | resident GiB | seconds |\n|---|---|---|---|")
        for stored, rows in found.items():
            print(f"| {stored} | " + " | ".join(f"{median(column):.2f}" for column in zip(*rows)) + " |")


if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    one(args) if args.stored else main(args)
