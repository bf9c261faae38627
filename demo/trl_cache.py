"""TRL's DPOTrainer with log-probs of the reference from a ReferenceCache, which many runs share.

    pip install trl==1.16.0
    python demo/trl_cache.py             # ten steps on the demo's pairs; again: the reference is not even loaded

TRL has no hook for log-probs of your own (github.com/huggingface/trl/issues/3985). In TRL 1.16 one method fills the two
columns, so a subclass can fill them. It works in one process, with each `loss_type`. It does not work with `ld_alpha`,
`truncation_mode="keep_end"`, `quantization_config`, or an adapter that was trained before: merge that one first.

The reference is the checkpoint at `name_or_path`: save a policy that was changed after loading, or pass `ref_model`.
`dpo.py --ref_cache FILE` reads the same file. It finds answers of the same token ids, if `--dtype` is the same.
"""
import sys
from pathlib import Path

import numpy as np
import torch
import tyro
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from refcache import ReferenceCache, bytes_of, checkpoint_digest


class CachedDPOTrainer(DPOTrainer):
    cache_file = "reference_logprobs.pkl"

    def _precompute_ref_logps(self, dataset, name, batch_size):
        folder = (self.ref_model or self.model).name_or_path
        dtype = "bfloat16" if self.args.bf16 else "float32"
        cache = ReferenceCache(name=folder, reference=checkpoint_digest(folder), dtype=dtype)

        groups = []
        for prompt, *answers in zip(dataset["prompt_ids"], dataset["chosen_ids"], dataset["rejected_ids"]):
            rows = [(prompt + answer)[:self.args.max_length] for answer in answers]  # truncated as in TRL
            groups.append((tuple(prompt), [tuple(row[len(prompt):]) for row in rows]))
        cache.fill(lambda: self.load_reference(folder, dtype), groups, path=self.cache_file)

        for i, column in enumerate(["ref_chosen_logps", "ref_rejected_logps"]):
            sums = [float(cache[prompt, answers[i]].sum()) for prompt, answers in groups]
            dataset = dataset.add_column(column, sums)
        return dataset

    def load_reference(self, folder, dtype):
        """A model of its own, because scoring switches the attention of a model."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model.to(self.accelerator.device).eval()


# ---- Log-probs as columns of a data set, which can be published ------
# The data set has prompt_ids, chosen_ids and rejected_ids. If the two sums are there, TRL 1.16 fails on them, but
# a subclass whose `_precompute_ref_logps(self, dataset, *_)` returns `dataset` uses them. They need max_length=None.

def add_columns(dataset, cache: ReferenceCache):
    def columns(row):
        logps = [cache[row["prompt_ids"], row[f"{name}_ids"]] for name in ("chosen", "rejected")]
        return {"ref_chosen_logps": logps[0].sum(), "ref_rejected_logps": logps[1].sum(), "ref_token_logps": logps}
    return dataset.map(columns)


def read_columns(dataset, **header) -> ReferenceCache:
    """`header`: reference=checkpoint_digest(folder), dtype="float32"."""
    cache = ReferenceCache(**header)
    for row in dataset:
        for name, logps in zip(("chosen", "rejected"), row["ref_token_logps"]):
            key = bytes_of(row["prompt_ids"]), bytes_of(row[f"{name}_ids"])
            cache.table[key] = np.float32(logps).tobytes()
    return cache


def main():
    demo = Path(__file__).resolve().parent
    pairs = load_dataset("json", data_files=f"{demo}/pairs.jsonl", split="train")
    on_gpu = torch.cuda.is_available()
    config = DPOConfig(
        output_dir="out/trl", precompute_ref_log_probs=True, max_steps=10, bf16=on_gpu, use_cpu=not on_gpu)
    CachedDPOTrainer(model=f"{demo}/model", args=config, train_dataset=pairs).train()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__, use_underscores=True)
