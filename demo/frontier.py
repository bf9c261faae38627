"""Reward against KL, the figure of the DPO paper (figure 2, left) in small, on two CPU cores.

    pip install gguf accelerate vadersentiment matplotlib    # and trl==1.16.0 for its two points
    python demo/get_model.py smollm2 out/smollm2
    python demo/frontier.py --model out/smollm2              # 83 minutes; goes on after the last run that has ended
    python demo/frontier.py --results benchmarks/frontier.jsonl --figure docs/frontier.png  # only table and figure

The model is asked for a sentence about some thing. The reward is how positive the sentence is: VADER's compound score,
−1 to 1 (Hutto and Gilbert, 2014). rloo.py gets 252 prompts and the score. For dpo.py and kto.py, eight samples of the
model before training are scored: the best and the worst one of each prompt are a pair, or two rated answers.

Each run has a value of β, and a seed. Its model is scored by eight samples for each of 48 held-out prompts, which are
about other things. KL is the mean of log π(y|x) − log π_ref(y|x) over these samples, in nats per answer.
"""
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
THINGS = """
    a rainy day, a long train ride, an old bicycle, a crowded market, a quiet library, a broken umbrella,
    a cold winter, a busy airport, a small village, a traffic jam, a birthday party, a school exam, a lost wallet,
    a night at the theatre, a visit to the dentist, a burnt dinner, a new neighbour, a walk in the forest,
    a noisy street, a job interview, a summer storm, a garden in spring, a late bus, an empty house,
    a football match, a dusty attic, a sore throat, a fishing trip, a letter from home, a power cut,
    a camping weekend, a leaking roof, a museum, a mountain path, a cup of coffee, a flat tyre, a wedding,
    a stray dog, a long meeting, a foggy morning, a chess game, a full inbox, a hot bath, a steep hill,
    a parking ticket, a choir, a muddy field, a family dinner, a delayed flight, the sea at night"""
N_HELD_OUT = 8  # of the 50 things, the last ones
FORMS = (
    "Describe {} in one sentence.",
    "Write one sentence about {}.",
    "What is {} like? Answer in one sentence.",
    "How does {} feel? Answer in one sentence.",
    "Tell me about {} in one sentence.",
    "In one sentence, what do you think of {}?",
)

SAMPLES = f"--reward {__file__}:positive --k 8 --max_new_tokens 32"
TRAINING = "--lr 1e-5 --schedule constant --warmup 0 --dtype bfloat16 --save_every 0"
RATED = f"kto.py --data rated.jsonl --ref_cache rated.pkl --batch_size 16 {TRAINING}"
SCRIPTS = {
    "rloo": f"rloo.py --data prompts.jsonl --batch_size 4 --steps 24 {TRAINING} {SAMPLES}",
    "dpo": f"dpo.py --data pairs.jsonl --ref_cache pairs.pkl --batch_size 8 {TRAINING}",
    "kto": RATED,
    "kto_no_z": RATED + " --loss apo_zero_unpaired",
    "trl_rloo": "benchmarks/frontier_trl.py rloo",
    "trl_dpo": "benchmarks/frontier_trl.py dpo",
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**34), "MALLOC_TRIM_THRESHOLD_": str(2**34)}  # memory is kept: 11 to 23 % less time
CURVES = {"rloo": "#D55E00", "dpo": "#0072B2", "kto": "#009E73"}  # colours of Okabe and Ito
POINTS = {  # label, marker and colour
    "kto_no_z": ("KTO without z, β = 1", "x", "#009E73"),
    "trl_rloo": ("RLOO of TRL, β = 0.05", "s", "#D55E00"),
    "trl_dpo": ("DPO of TRL, β = 0.05", "s", "#0072B2"),
}
BETAS = (0.01, 0.05, 0.2, 1.0)
RUNS = [(name, beta, seed) for seed in (0, 1) for beta in BETAS for name in CURVES]
RUNS += [("kto_no_z", 1.0, 0), ("kto_no_z", 1.0, 1)]
if find_spec("trl"):
    RUNS += [("trl_rloo", 0.05, 0), ("trl_dpo", 0.05, 0)]


@dataclass
class Args:
    model: str | None = None  # a chat model's folder; None: only the table and the figure
    out: str = "out/frontier"  # folder of the data, the runs, and results.jsonl
    results: str | None = None  # None: results.jsonl in --out
    figure: str | None = None  # None: frontier.png in --out
    jobs: int = 2  # runs at the same time, with one thread each: faster than one run with two threads


# ---- The task --------------------------------------------------------

@cache
def vader():
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    return SentimentIntensityAnalyzer()


def positive(completions, **columns) -> list[float]:
    """The reward: VADER's compound score of each completion."""
    return [vader().polarity_scores(completion[-1]["content"])["compound"] for completion in completions]


def write_lines(path: Path, rows: list[dict]):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.open()]


def write_prompts(folder: Path):
    things = [" ".join(thing.split()) for thing in THINGS.split(",")]
    for name, chosen in (("prompts", things[:-N_HELD_OUT]), ("prompts_test", things[-N_HELD_OUT:])):
        questions = [form.format(thing) for thing in chosen for form in FORMS]
        rows = [{"prompt": [{"role": "user", "content": question}]} for question in questions]
        write_lines(folder / f"{name}.jsonl", rows)


def write_pairs(folder: Path, samples: list[dict]):
    """The best and the worst sample of each prompt, as a pair and as two rated answers."""
    by_prompt = defaultdict(list)
    for sample in samples:
        by_prompt[sample["prompt"][-1]["content"]].append(sample)

    pairs, rated = [], []
    for group in by_prompt.values():
        prompt = {"prompt": group[0]["prompt"]}
        best, worst = (choose(group, key=lambda sample: sample["reward"]) for choose in (max, min))
        if best["reward"] == worst["reward"]:
            continue

        chosen, rejected = ([{"role": "assistant", "content": sample["completion"]}] for sample in (best, worst))
        pairs.append(prompt | {"chosen": chosen, "rejected": rejected})
        rated.append(prompt | {"completion": chosen, "label": True})
        rated.append(prompt | {"completion": rejected, "label": False})
    print(f"{len(pairs)} of {len(by_prompt)} prompts gave a pair")
    write_lines(folder / "rated.jsonl", rated)
    write_lines(folder / "pairs.jsonl", pairs)


# ---- The runs --------------------------------------------------------

def commit() -> str:
    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + "-dirty" * bool(git("status", "--porcelain", "--", "*.py"))


def call(command: str, folder: Path, log: str):
    """Runs a script in the folder. What it prints is in the file `log`."""
    script, *flags = shlex.split(command)
    with open(folder / log, "w") as output:
        ended = subprocess.run(
            [sys.executable, ROOT / script, *flags], cwd=folder, stdout=output, stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT)
    if ended.returncode:
        raise RuntimeError(f"{command}\nfailed: see {folder / log}")


def sample(flags: str, name: str, folder: Path) -> dict:
    """Samples and scores. Returns the metrics."""
    shutil.rmtree(folder / name, ignore_errors=True)  # of a call that was cut off
    call(f"rloo.py --steps 0 {SAMPLES} --dtype bfloat16 {flags} --out {name}", folder, f"{name}.log")
    (metrics,) = read_lines(folder / name / "metrics.jsonl")
    return metrics


def train_and_sample(name: str, beta: float, seed: int, model: str, folder: Path) -> dict:
    """A line of results.jsonl."""
    out = f"{name}-{beta}-{seed}"
    command = f"{SCRIPTS[name]} --beta {beta} --seed {seed}"

    shutil.rmtree(folder / out, ignore_errors=True)  # of a call that was cut off
    begin = time.monotonic()
    call(f"{command} --model {model} --out {out}", folder, f"{out}.log")
    seconds = time.monotonic() - begin

    flags = f"--model {out}/model --ref_model {model} --data prompts_test.jsonl --seed {seed}"
    found = sample(flags, f"{out}-samples", folder)
    shutil.rmtree(folder / out / "model")  # 270 MB
    line = dict(
        run=name, beta=beta, seed=seed, reward=found["eval_reward"], stderr=found["eval_reward_stderr"],
        kl=found["eval_kl_per_answer"], seconds=round(seconds),
        command=command.replace(f"{ROOT}/", ""), commit=commit())
    if name.startswith("kto"):
        _, *steps = read_lines(folder / out / "metrics.jsonl")
        line["z"] = mean(step["kl"] for step in steps)
    return line


def run_all(model: str, folder: Path, results: Path, jobs: int):
    folder.mkdir(parents=True, exist_ok=True)
    if not results.exists():
        write_prompts(folder)
        sample(f"--model {model} --data prompts.jsonl", "samples", folder)
        write_pairs(folder, read_lines(folder / "samples/samples.jsonl"))
        found = sample(f"--model {model} --data prompts_test.jsonl", "before", folder)
        scores = dict(reward=found["eval_reward"], stderr=found["eval_reward_stderr"], kl=0.0)
        write_lines(results, [dict(run="before", beta=0.0, seed=0, **scores, commit=commit())])

    known = {(line["run"], line["beta"], line["seed"]) for line in read_lines(results)}
    runs = [run for run in RUNS if run not in known]

    pool = ThreadPoolExecutor(jobs)
    try:
        lines = as_completed([pool.submit(train_and_sample, *run, model, folder) for run in runs])
        for line in tqdm(lines, total=len(runs), desc="runs"):
            with results.open("a") as file:
                file.write(json.dumps(line.result()) + "\n")
    finally:
        pool.shutdown(cancel_futures=True)


# ---- The table and the figure ----------------------------------------

def by_run(lines: list[dict]) -> dict[tuple, list[dict]]:
    """(name, β) -> a line of each seed, in the order of RUNS."""
    groups = defaultdict(list)
    for line in sorted(lines, key=lambda line: line["seed"]):
        groups[line["run"], line["beta"]].append(line)
    names = ["before", *SCRIPTS]
    return dict(sorted(groups.items(), key=lambda item: (names.index(item[0][0]), item[0][1])))


def print_table(lines: list[dict]):
    """A table in Markdown."""
    print("| run | β | KL, nats per answer | reward |\n|---|---|---|---|")
    for (name, beta), seeds in by_run(lines).items():
        kl = ", ".join(f"{line['kl']:.2f}" for line in seeds)
        reward = ", ".join(f"{line['reward']:.3f} ± {line['stderr']:.3f}" for line in seeds)
        print(f"| `{name}` | {beta} | {kl} | {reward} |")


def draw(lines: list[dict], path: str):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = by_run(lines)
    figure, panel = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, colour in CURVES.items():
        points = {beta: seeds for (other, beta), seeds in groups.items() if other == name}
        middles = [[mean(line[key] for line in seeds) for seeds in points.values()] for key in ("kl", "reward")]
        panel.plot(*middles, color=colour, label=name.upper())
        for beta, x, y in zip(points, *middles):
            panel.annotate(f"{beta:g}", (x, y), (4, -11), textcoords="offset points", color=colour, fontsize=8)
        for line in sum(points.values(), []):
            panel.errorbar(line["kl"], line["reward"], line["stderr"], fmt="o", ms=4, lw=0.7, color=colour)

    for name, (label, marker, colour) in POINTS.items():
        points = [line for line in lines if line["run"] == name]
        kl, reward = ([line[key] for line in points] for key in ("kl", "reward"))
        panel.plot(kl, reward, marker, color=colour, label=label, ms=8, mfc="none")

    (before,) = groups["before", 0.0]
    panel.plot(0, before["reward"], "k*", label="before training", ms=9)
    panel.set(xlabel="KL from the model before, nats per answer", ylabel="held-out reward (VADER)")
    panel.set_title("SmolLM2-135M: each curve has four values of β, and two seeds", loc="left", fontsize=11)
    panel.grid(color="#e4e4e4")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)


def main(args: Args):
    results = Path(args.results or f"{args.out}/results.jsonl")
    if args.model:
        run_all(os.path.abspath(args.model), Path(args.out), results, args.jobs)
    lines = read_lines(results)
    print_table(lines)
    draw(lines, args.figure or f"{args.out}/frontier.png")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
