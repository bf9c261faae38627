"""What invalidates the reference log-probs that TRL precomputes, and what does not.

    pip install trl==1.16.0 datasets
    python benchmarks/trl_precompute.py              # all cases, or those whose numbers are given

Two runs of DPOTrainer share a data set and its cache. Was it scored again in the second run? And what does it
use as log π_ref, where a run with an empty cache computes another value: of the 16 chosen answers, the one
that differs most.
"""
import os
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
import tyro
from datasets import disable_progress_bars, load_dataset
from trl import DPOConfig, DPOTrainer

DEMO = Path(__file__).resolve().parent.parent / "demo"
LONG = {"max_length": None}
CASES = [  # settings of the first run, and what is other in the second
    ({}, {}), ({}, {"learning_rate": 2e-6}), ({}, {"beta": 0.2}), ({}, {"seed": 1}),
    ({}, {"output_dir": "other"}),
    (LONG, {}), (LONG, {"learning_rate": 2e-6}), (LONG, {"bf16": True}),
    (LONG, {"truncation_mode": "keep_end", "max_length": 8}), (LONG, {"ld_alpha": 0.5})]


def precompute(folder: str, settings: dict) -> tuple[bool, list[float]]:
    """Whether it scored, and the log-probs of the chosen answers."""
    calls = []
    score = DPOTrainer.compute_ref_log_probs
    DPOTrainer.compute_ref_log_probs = lambda *values: calls.append(1) or score(*values)
    rows = load_dataset("json", data_files=f"{DEMO}/pairs.jsonl", split="train[:16]", cache_dir=folder)
    config = dict(output_dir="out", use_cpu=True, bf16=False, report_to="none", precompute_ref_log_probs=True)
    trainer = DPOTrainer(f"{DEMO}/model", args=DPOConfig(**config | settings), train_dataset=rows)
    DPOTrainer.compute_ref_log_probs = score
    return bool(calls), trainer.train_dataset["ref_chosen_logps"]


def main(numbers: tyro.conf.Positional[tuple[int, ...]] = ()):
    disable_progress_bars()
    print("| case | first run | then | scored again | uses | empty cache |\n" + "|---" * 6 + "|", flush=True)
    for number in numbers or range(len(CASES)):
        settings, changes = CASES[number]
        with tempfile.TemporaryDirectory() as shared, tempfile.TemporaryDirectory() as empty:
            precompute(shared, settings)
            scored, values = precompute(shared, settings | changes)
            _, truths = precompute(empty, settings | changes)
        value, truth = max(zip(values, truths), key=lambda pair: abs(pair[0] - pair[1]))
        texts = (", ".join(f"{name}={x}" for name, x in case.items()) for case in CASES[number])
        answer = 'yes' if scored else 'no'
        print(f"| {number} | {' | '.join(texts)} | {answer} | {value:.4f} | {truth:.4f} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__, use_underscores=True)
