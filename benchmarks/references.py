"""What does each way to hold the reference cost? Memory and seconds of a DPO step, the real script, one process a way.

    python benchmarks/references.py                                       # a random Llama of 26 M parameters, float32, on a CPU
    python benchmarks/references.py --hidden 2048 --layers 24 --dtype bfloat16    # 1.3 B, for a GPU

peak is what the GPU had allocated at most, or on a CPU the resident set, in which a swap's host copies count too; swap is the share of
the training that weights were moving in, and the rate that they moved at. The ways alternate; figures are medians over the rounds.
"""
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
WAYS = {"none": dict(ref="none"), "cache": {}, "swap": dict(ref="swap"), "swap every batch": dict(ref="swap", ref_ahead=1), "live": dict(ref="live"),
        "LoRA cache": dict(lora_r=16), "LoRA adapter": dict(ref="adapter", lora_r=16), "LoRA live": dict(ref="live", lora_r=16)}


@dataclass
class Args:
    hidden: int = 512
    layers: int = 6
    batch_size: int = 4  # pairs
    words: int = 100  # of a prompt, about as many tokens; half of that an answer
    steps: int = 8
    rounds: int = 3
    dtype: str = "float32"
    tokens_per_forward: int = 2048
    way: str | None = None  # run this one and print JSON, for the processes
    folder: str | None = None


def make_files(args: Args):
    import random

    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parent.parent / "demo/model")
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=args.hidden, intermediate_size=4 * args.hidden, num_hidden_layers=args.layers,
                         num_attention_heads=args.hidden // 64, max_position_embeddings=4096, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(f"{args.folder}/model")
    tokenizer.save_pretrained(f"{args.folder}/model")
    words = [w for w in (Path(__file__).parent.parent / "demo/score.py").read_text().split() if w.isalpha()]
    draw = random.Random(0)
    with open(f"{args.folder}/pairs.jsonl", "w") as file:
        for _ in range(args.batch_size * args.steps):
            prompt, chosen, rejected = (" ".join(draw.choices(words, k=n)) for n in (args.words, args.words // 2, args.words // 2))
            print(json.dumps(dict(prompt=prompt, chosen=" " + chosen, rejected=" " + rejected)), file=file)


def one(args: Args):
    """Trains with args.way, and prints the seconds of the training, of what moved in it, and the peak."""
    import resource

    import torch

    import dpo
    import refcache
    moved, moving, ticks = 0, 0.0, []
    put = refcache.Swap._put

    def timed_put(self, source, keep=()):
        nonlocal moved, moving
        begin = time.monotonic()
        put(self, source, keep)
        moving += time.monotonic() - begin
        moved += sum(t.nbytes for t in (*source, *keep))
    refcache.Swap._put = timed_put
    write = refcache.Run.write
    refcache.Run.write = lambda self, *a, **k: (write(self, *a, **k), ticks.append(time.monotonic()))[0]
    dpo.main(dpo.Args(model=f"{args.folder}/model", data=f"{args.folder}/pairs.jsonl", out=f"{args.folder}/{args.way}", eval_size=0, samples=0, steps=args.steps,
                      batch_size=args.batch_size, tokens_per_forward=args.tokens_per_forward, dtype=args.dtype, save_every=10**6, **WAYS[args.way]))
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("\n" + json.dumps(dict(seconds=(ticks[-1] - ticks[0]) / args.steps, moving=moving / (ticks[-1] - ticks[0]), rate=moved / moving if moving else 0, peak=peak)))


def main(args: Args):
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--{name}={value}" for name, value in (asdict(args) | {"folder": folder}).items() if value is not None]
        subprocess.run([sys.executable, __file__, *flags, "--way=make"], check=True)
        found = {way: [] for way in WAYS}
        for n in range(args.rounds):
            for way in WAYS:
                subprocess.run(["rm", "-rf", f"{folder}/{way}"], check=True)
                done = subprocess.run([sys.executable, __file__, *flags, f"--way={way}"], capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
                if done.returncode:
                    sys.exit(done.stderr)
                found[way].append(json.loads(done.stdout.splitlines()[-1]))
        print("| reference | peak GiB | seconds a step | weights moving, share of the training | GB/s |\n|---|---|---|---|---|")
        for way, rounds in found.items():
            peak, seconds, moving, rate = (median(one[name] for one in rounds) for name in ("peak", "seconds", "moving", "rate"))
            print(f"| {way} | {peak / 2**30:.2f} | {seconds:.2f} | " + (f"{moving:.1%} | {rate / 1e9:.1f} |" if rate else "| |"))


if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    make_files(args) if args.way == "make" else one(args) if args.way else main(args)
