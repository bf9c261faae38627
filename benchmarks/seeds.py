"""What SmolLM2 learns on the sums with several seeds: the held-out metrics of dpo.py, kto.py and rloo.py.

    python benchmarks/seeds.py --model out/smollm2                  # 25 minutes on two CPU cores
    python benchmarks/seeds.py --model out/smollm2 --runs kto_sums  # one of them
    python benchmarks/plot.py benchmarks/runs/kto_sums-*            # mean ± std over the seeds, and a picture

Writes the metrics of each run to benchmarks/runs/NAME-SEED/metrics.jsonl, and prints its command and how long
it took in all. `rloo_sums` is the README's hello world.
"""
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "rloo_sums":
        "rloo.py --data out/sums/prompts.jsonl --eval_data out/sums/prompts_test.jsonl "
        "--reward demo/sums.py:right --k 8 --lr 1e-5 --beta 0.01 --schedule constant --max_new_tokens 12 "
        "--steps 20 --dtype bfloat16",
    "dpo_sums":
        "dpo.py --data out/sums/pairs.jsonl --eval_data out/sums/pairs_test.jsonl "
        "--score demo/sums.py:right --max_new_tokens 12 --loss sigmoid sft --lr 1e-5 --batch_size 16 "
        "--steps 24 --schedule constant",
    "kto_sums":
        "kto.py --data out/sums/rated.jsonl --eval_data out/sums/rated_test.jsonl "
        "--score demo/sums.py:right --max_new_tokens 12 --batch_size 8 --lr 2e-5",
}


@dataclass
class Args:
    model: str  # folder of SmolLM2, see demo/get_model.py
    runs: tuple[str, ...] = tuple(COMMANDS)  # of COMMANDS
    seeds: tuple[int, ...] = (0, 1, 2)
    flags: str = ""  # more flags of the scripts, as in --flags="--steps 1"
    out: str = str(ROOT / "benchmarks/runs")
    threads: int = 2


def run(name: str, seed: int, folder: str, args: Args):
    command = f"{COMMANDS[name]} {args.flags} --save_every 0 --seed {seed}"
    print(f"{name}-{seed}: {command}", flush=True)
    out = f"{folder}/{name}-{seed}"
    words = shlex.split(command) + ["--model", os.path.abspath(args.model), "--out", out]

    begin = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    minutes, seconds = divmod(round(time.monotonic() - begin), 60)
    print(f"{name}-{seed}: {minutes} min {seconds} s in all", flush=True)

    kept = Path(args.out, f"{name}-{seed}")
    kept.mkdir(parents=True, exist_ok=True)
    shutil.copy(f"{out}/metrics.jsonl", kept)


def main(args: Args):
    command = [sys.executable, "demo/sums.py", "out/sums"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    with tempfile.TemporaryDirectory() as folder:
        for name in args.runs:
            for seed in args.seeds:
                run(name, seed, folder, args)


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
