"""What dpo.py, kto.py and rloo.py reach with several seeds: SmolLM2 on the sums, and the demo's model.

    python benchmarks/seeds.py --model out/smollm2                    # 25 minutes on two CPU cores
    python benchmarks/seeds.py --model out/smollm2 --runs kto_sums    # one of them
    python benchmarks/seeds.py --runs demo_dpo demo_kto demo_rloo     # 5 minutes on one core
    python tools/plot.py benchmarks/runs/kto_sums-*                   # mean ± std of the seeds

Writes the metrics of each run to benchmarks/runs/NAME-SEED/metrics.jsonl, and prints its command and how long
it took in all. `rloo_sums` is the README's hello world. dpo.py and kto.py do not sample: `rloo.py --steps 0`
scores samples of the held-out prompts before and after, and the first and the last line get its eval_reward.
Of a demo, only lines with held-out metrics are kept.
"""
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tyro
from against_trl import ROOT, commit, write_lines

COMMANDS = {
    "rloo_sums":
        "rloo.py --data out/sums/prompts.jsonl --eval_data out/sums/prompts_test.jsonl "
        "--reward demo/sums.py:right --k 8 --lr 1e-5 --beta 0.01 --schedule constant --max_new_tokens 12 "
        "--steps 20 --dtype bfloat16",
    "dpo_sums":
        "dpo.py --data out/sums/pairs.jsonl --eval_data out/sums/pairs_test.jsonl --loss sigmoid sft "
        "--lr 1e-5 --batch_size 16 --steps 24 --schedule constant",
    "kto_sums":
        "kto.py --data out/sums/rated.jsonl --eval_data out/sums/rated_test.jsonl --batch_size 8 --lr 2e-5",
    "demo_dpo": "dpo.py",
    "demo_kto": "kto.py",
    "demo_rloo": "rloo.py",
}
SCORES = {
    "sums":
        "rloo.py --steps 0 --data out/sums/prompts_test.jsonl --reward demo/sums.py:right --k 16 "
        "--max_new_tokens 12",
    "demo": "rloo.py --steps 0 --data demo/prompts_test.jsonl --reward demo/score.py:sentiment --k 4",
}


@dataclass
class Args:
    model: str | None = None  # folder of SmolLM2, see demo/get_model.py; None: only for the demo
    runs: tuple[str, ...] = ("rloo_sums", "dpo_sums", "kto_sums")  # of COMMANDS
    seeds: tuple[int, ...] = (0, 1, 2)
    flags: str = ""  # more flags of the scripts, as in --flags="--steps 1"
    out: str = str(ROOT / "benchmarks/runs")
    threads: int = 2


def start(command: str, out: str, threads: int) -> list[dict]:
    """Runs a script. Returns the lines of its metrics.jsonl."""
    words = shlex.split(command) + ["--out", out]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in open(f"{out}/metrics.jsonl")]


@cache  # the model before training is that of several runs
def score(data: str, model: str, seed: int, threads: int) -> dict:
    with tempfile.TemporaryDirectory() as out:
        (line,) = start(f"{SCORES[data]} --seed {seed} --model {shlex.quote(model)}", out, threads)
    return {name: line[name] for name in ("eval_reward", "eval_reward_stderr")}


def run(name: str, seed: int, folder: str, args: Args):
    is_demo = name.startswith("demo")
    model = f"{ROOT}/demo/model"
    command = f"{COMMANDS[name]} {args.flags} --save_every 0 --seed {seed}"
    if not is_demo:
        model = os.path.abspath(args.model)
        command += f" --model {shlex.quote(model)}"
    print(f"{name}-{seed}: {command}", flush=True)
    out = f"{folder}/{name}-{seed}"

    begin = time.monotonic()
    history = start(command, out, args.threads)
    minutes, seconds = divmod(round(time.monotonic() - begin), 60)
    print(f"{name}-{seed}: {minutes} min {seconds} s in all", flush=True)

    if "rloo" not in name:
        data = "demo" if is_demo else "sums"
        history[0] |= score(data, model, seed, args.threads)
        history[-1] |= score(data, f"{out}/model", seed, args.threads)
    if is_demo:
        history = [line for line in history if any(key.startswith("eval_") for key in line)]
    kept = Path(args.out, f"{name}-{seed}")
    kept.mkdir(parents=True, exist_ok=True)
    write_lines(kept / "metrics.jsonl", history)


def main(args: Args):
    print("commit", commit())
    command = [sys.executable, "demo/sums.py", "out/sums"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    with tempfile.TemporaryDirectory() as folder:
        for name in args.runs:
            for seed in args.seeds:
                run(name, seed, folder, args)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
