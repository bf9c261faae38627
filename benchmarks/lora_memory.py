"""Memory of a LoRA run with bfloat16 forwards: its frozen base stored as it was saved, in bfloat16, or in float32.

    python benchmarks/lora_memory.py                                # a random Llama of 370 M parameters, on a CPU
    python benchmarks/lora_memory.py --hidden 4096 --layers 32      # 8 B, for a GPU
    python benchmarks/lora_memory.py --hidden 64 --layers 2 --rounds 1    # tiny: does it run?

The same numbers are saved twice, in either dtype. resident is what the process holds after its steps, on a GPU what was
allocated at most. One process per row; the rows alternate; medians of the rounds.
"""
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import tyro
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
import dpo  # noqa: E402
import refcache  # noqa: E402


@dataclass
class Args:
    hidden: int = 1024
    layers: int = 20
    rank: int = 16
    rounds: int = 3
    folder: str | None = None  # train on this checkpoint, for the processes


def one(args: Args):
    """Prints GiB of the weights, GiB resident, and seconds of a forward and backward of a pair of 300 tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = dpo.load_model(args.folder, device, dpo.Args(dtype="bfloat16", lora_r=args.rank), trains=True)
    group, seconds = ((5,) * 200, [(7,) * 100, (9,) * 100]), []
    for _ in range(4):
        begin = time.monotonic()
        (logps,) = refcache.completion_logprobs(policy, [group], dtype="bfloat16")
        sum(y.sum() for y in logps).backward()
        seconds.append(time.monotonic() - begin)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = torch.cuda.max_memory_allocated() if device == "cuda" else 4096 * pages
    weights = sum(p.nbytes for p in policy.parameters())
    print("\n", weights / 2**30, resident / 2**30, median(seconds[1:]))


def main(args: Args):
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=32_000, hidden_size=args.hidden, intermediate_size=4 * args.hidden,
            num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64, tie_word_embeddings=True)).bfloat16()
        model.save_pretrained(f"{folder}/bfloat16")
        model.float().save_pretrained(f"{folder}/float32")
        del model
        found = {"bfloat16": [], "float32": []}
        for _ in range(args.rounds):
            for stored, rows in found.items():
                command = [sys.executable, __file__, f"--folder={folder}/{stored}", f"--rank={args.rank}"]
                ended = subprocess.run(command, capture_output=True, text=True)
                if ended.returncode:
                    sys.exit(ended.stderr)
                rows.append([float(x) for x in ended.stdout.splitlines()[-1].split()])
    print("| frozen base | weights GiB | resident GiB | seconds |\n|---|---|---|---|")
    for stored, rows in found.items():
        print(f"| {stored} | " + " | ".join(f"{median(column):.2f}" for column in zip(*rows)) + " |")


if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    one(args) if args.folder else main(args)
