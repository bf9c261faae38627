"""Memory and seconds of a DPO step with each way to hold the reference: the real script, one process per run.

    python benchmarks/references.py                                       # a random Llama of 26 M parameters, on a CPU
    python benchmarks/references.py --hidden 2048 --layers 24 --dtype bfloat16    # 1.3 B, for a GPU
    python benchmarks/references.py --hidden 64 --layers 1 --words 20 --steps 2 --rounds 1    # tiny: does it run?

peak is what the GPU had allocated at most, on a CPU the resident set, in which a swap's host copies count too. The
share of the training in which weights were moving comes with the rate that they moved at. The ways alternate; medians
of the rounds.
"""
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

import tyro

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
WAYS = {"none": dict(ref="none"), "cache": {}, "swap": dict(ref="swap"),
        "swap every step": dict(ref="swap", sync_reference=1), "live": dict(ref="live"), "LoRA cache": dict(lora_r=16),
        "LoRA swap": dict(ref="swap", lora_r=16), "LoRA live": dict(ref="live", lora_r=16)}


@dataclass
class Args:
    hidden: int = 512
    layers: int = 6
    batch_size: int = 4  # pairs
    words: int = 100  # of a prompt, about as many tokens; half of that per answer
    steps: int = 8
    rounds: int = 3
    dtype: str = "float32"
    tokens_per_forward: int = 2048
    way: str | None = None  # run this one and print JSON, for the processes
    folder: str | None = None


def make_files(args: Args):
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo/model")
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=args.hidden, intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64, max_position_embeddings=4096,
        tie_word_embeddings=True)).save_pretrained(f"{args.folder}/model")
    tokenizer.save_pretrained(f"{args.folder}/model")
    words = [word for word in (ROOT / "demo/score.py").read_text().split() if word.isalpha()]
    draw = Random(0)
    with open(f"{args.folder}/pairs.jsonl", "w") as file:
        for _ in range(args.batch_size * args.steps):
            sizes = args.words, args.words // 2, args.words // 2
            prompt, chosen, rejected = (" ".join(draw.choices(words, k=n)) for n in sizes)
            print(json.dumps(dict(prompt=prompt, chosen=" " + chosen, rejected=" " + rejected)), file=file)


def one(args: Args):
    """Trains with args.way. Prints seconds per step, the share of them in which weights moved, their rate, the peak."""
    import torch

    import dpo
    import refcache
    moves, ticks = [], []  # (seconds, bytes) of each copy; the time when each step was logged
    copy, write = refcache.copy, dpo.Log.write

    def timed_copy(source, target):
        begin = time.monotonic()
        copy(source, target)
        moves.append((time.monotonic() - begin, sum(tensor.nbytes for tensor in target.values())))

    def timed_write(self, *values):
        write(self, *values)
        if not ticks:
            moves.clear()  # until now models were loaded
        ticks.append(time.monotonic())

    refcache.copy, dpo.Log.write = timed_copy, timed_write
    dpo.main(dpo.Args(
        model=f"{args.folder}/model", data=f"{args.folder}/pairs.jsonl", out=f"{args.folder}/{args.way}", eval_size=0,
        samples=0, steps=args.steps, batch_size=args.batch_size, tokens_per_forward=args.tokens_per_forward,
        dtype=args.dtype, save_every=10**6, **WAYS[args.way]))
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    total, moving, moved = ticks[-1] - ticks[0], sum(seconds for seconds, _ in moves), sum(size for _, size in moves)
    rate = moved / moving if moving else 0
    print("\n" + json.dumps(dict(seconds=total / args.steps, moving=moving / total, rate=rate, peak=peak)))


def main(args: Args):
    with tempfile.TemporaryDirectory() as folder:
        flags = asdict(args) | {"folder": folder}
        flags = [f"--{name}={value}" for name, value in flags.items() if value is not None]
        subprocess.run([sys.executable, __file__, *flags, "--way=make"], check=True)
        environment, found = os.environ | {"HF_HUB_OFFLINE": "1"}, {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                subprocess.run(["rm", "-rf", f"{folder}/{way}"], check=True)
                command = [sys.executable, __file__, *flags, f"--way={way}"]
                ended = subprocess.run(command, capture_output=True, text=True, env=environment)
                if ended.returncode:
                    sys.exit(ended.stderr)
                found[way].append(json.loads(ended.stdout.splitlines()[-1]))
    names = "peak", "seconds", "moving", "rate"
    print("| reference | peak GiB | seconds per step | weights moving, share of the training | GB/s |")
    print("|---" * 5 + "|")
    for way, rounds in found.items():
        peak, seconds, moving, rate = (median(values[name] for values in rounds) for name in names)
        moves = f"{moving:.1%} | {rate / 1e9:.1f}" if rate else " |"
        print(f"| {way} | {peak / 2**30:.2f} | {seconds:.2f} | {moves} |")


if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    make_files(args) if args.way == "make" else one(args) if args.way else main(args)
