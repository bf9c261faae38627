"""Five learning rates on the same pairs: how often is the reference computed, and what do all runs cost?

    python benchmarks/five_runs.py                                      # the demo's model and pairs
    python benchmarks/five_runs.py --model out/hh/model --data out/hh/train.jsonl      # after benchmarks/hh.py
    python benchmarks/five_runs.py --lrs 1e-5 --steps 2                 # does it run?

dpo.py with one --ref_cache for all runs, and TRL's DPOTrainer with precompute_ref_log_probs=True: the same pairs, batch
size, steps and β, every run a process as a user starts it. They alternate. A reference pass is a run that computed
log-probs with the reference. TRL's rows come from load_dataset, whose cache folder the runs share, so that it can find
what an earlier one computed. Needs `pip install trl==1.16.0`.
"""
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


@dataclass
class Args:
    model: str = str(ROOT / "demo/model")
    data: str = str(ROOT / "demo/pairs.jsonl")
    lrs: tuple[float, ...] = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
    batch_size: int = 16  # pairs
    steps: int | None = None  # of a run; None: one pass over the data
    max_length: int = 256
    system: str = ""  # run this one with the first lr, for the processes
    folder: str = ""


def ours(args: Args):
    """Prints among other things: `reference: N completions scored`."""
    import dpo
    out = f"{args.folder}/ours-{args.lrs[0]}"
    dpo.main(dpo.Args(model=args.model, data=args.data, out=out, ref_cache=f"{args.folder}/reference_logprobs.pkl",
                      lr=args.lrs[0], batch_size=args.batch_size, steps=args.steps, eval_size=0, samples=0,
                      max_length=args.max_length, schedule="constant", warmup=0.0, dtype="float32"))


def trl(args: Args):
    import trl
    from datasets import load_dataset
    scored = [0]

    class Trainer(trl.DPOTrainer):
        def compute_ref_log_probs(self, model, inputs):
            scored[0] += len(inputs["input_ids"])  # chosen and rejected, under each other
            return super().compute_ref_log_probs(model, inputs)

    rows = load_dataset("json", data_files=args.data, split="train", cache_dir=f"{args.folder}/datasets")
    config = trl.DPOConfig(
        output_dir=f"{args.folder}/trl-{args.lrs[0]}", precompute_ref_log_probs=True, learning_rate=args.lrs[0],
        per_device_train_batch_size=args.batch_size, max_steps=args.steps or -1, num_train_epochs=1,
        max_length=args.max_length, lr_scheduler_type="constant", gradient_checkpointing=False, bf16=False,
        use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = Trainer(model=args.model, args=config, train_dataset=rows)
    trainer.train()
    trainer.save_model(f"{config.output_dir}/model")
    print(f"reference: {scored[0]} completions scored")


def main(args: Args):
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found = {"dpo.py, one --ref_cache": [], "TRL, precompute_ref_log_probs": []}  # (scored, CPU seconds, seconds)
    with tempfile.TemporaryDirectory() as folder:
        for lr in args.lrs:
            for name in found:
                flags = asdict(args) | {"lrs": lr, "system": name.split()[0], "folder": folder}
                flags = [f"--{key}={value}" for key, value in flags.items() if value is not None]
                before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
                done = subprocess.run([sys.executable, __file__, *flags], capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stderr)
                after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begin
                cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                scored = int(re.findall(r"reference: (\d+) completions scored", done.stdout)[-1])
                found[name].append((scored, cpu, seconds))
                print(f"{name}, lr {lr:g}: {scored} scored, {cpu:.0f} CPU s, {seconds:.0f} s", flush=True)
    print(f"\n| {len(args.lrs)} learning rates | reference passes | completions scored | CPU seconds | seconds |")
    print("|---" * 5 + "|")
    for name, runs in found.items():
        scored, cpu, seconds = map(sum, zip(*runs))
        passes = sum(count > 0 for count, *_ in runs)
        print(f"| {name} | {passes} | {scored:,} | {cpu:.0f} | {seconds:.0f} |")


if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    {"": main, "dpo.py,": ours, "TRL,": trl}[args.system](args)
