"""A point of TRL for demo/frontier.py: DPO or RLOO, with the flags that it gives to dpo.py and rloo.py.

It needs `pip install trl==1.16.0 vadersentiment`, and reads pairs.jsonl or prompts.jsonl of the folder where it is
started. demo/frontier.py starts it in its --out.
"""
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RLOOConfig, RLOOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demo"))
from frontier import positive


@dataclass
class Args:
    algorithm: tyro.conf.Positional[Literal["dpo", "rloo"]]
    model: str
    beta: float
    seed: int
    out: str


def main(args: Args):
    common = dict(
        output_dir=args.out, learning_rate=1e-5, lr_scheduler_type="constant", warmup_steps=0, beta=args.beta,
        seed=args.seed, bf16=True, use_cpu=True, gradient_checkpointing=False, dataloader_pin_memory=False,
        report_to="none", save_strategy="no", logging_steps=1)
    if args.algorithm == "dpo":
        trainer_class, rows = DPOTrainer, "pairs.jsonl"
        config = DPOConfig(
            **common, per_device_train_batch_size=8, num_train_epochs=1, max_length=1024,
            precompute_ref_log_probs=True)
        extra = {}
    else:
        trainer_class, rows = RLOOTrainer, "prompts.jsonl"
        config = RLOOConfig(
            **common, per_device_train_batch_size=32, num_generations=8, max_steps=24, max_completion_length=32)
        extra = {"reward_funcs": positive}

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    dataset = load_dataset("json", data_files=rows, split="train")
    trainer = trainer_class(
        model=model, args=config, train_dataset=dataset, processing_class=tokenizer, **extra)
    trainer.train()
    trainer.model.to(torch.bfloat16).save_pretrained(f"{args.out}/model")
    tokenizer.save_pretrained(f"{args.out}/model")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
