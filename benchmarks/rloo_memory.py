"""Memory of one RLOO step at true length: TRL's RLOOTrainer and rloo.py, on the same model, prompts and reward.

    pip install trl==1.16.0 peft                                           # needed only here
    python benchmarks/rloo_memory.py                                       # both systems and all k, one process each
    python benchmarks/rloo_memory.py --systems trl --k 2 --prompt_tokens 1024    # cut, as a published remedy does
    python benchmarks/rloo_memory.py --systems ours --k 2 --prompt_tokens 99 --new_tokens 8    # does it run?

The setting is a published one: a tiny random Qwen3 with the full vocabulary of 151,936, sequences of 3,100 tokens (a
prompt of 2,900, 200 new ones), 4 prompts of k samples in one optimizer step, all rows of it in one forward. One rollout
and one update without gradient checkpointing: on a CPU in float32, on a GPU (the same commands) with bfloat16 forwards.
peak is the largest resident set of the process, before is its resident set once everything is loaded; the difference is
what the step adds. On a GPU both are what torch has allocated there. On a CPU a process that wants more than --limit
GiB is out of memory.
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
from typing import Literal

import tyro  # torch is imported by the processes only: on Linux a child's ru_maxrss starts at its parent's resident set

sys.path.insert(0, str(Path(__file__).parent.parent))
GIB = 2**30
REWARD = '''\
def reward(prompts, completions, **columns):
    """Share of words with an even number: a reward that any two completions disagree about."""
    return [sum(int(word[1:]) % 2 == 0 for word in text.split()) / max(1, len(text.split())) for text in completions]
'''


@dataclass
class Args:
    systems: tuple[Literal["trl", "ours"], ...] = ("trl", "ours")
    k: tuple[int, ...] = (2, 4, 8)  # samples per prompt
    prompts: int = 4  # in the optimizer step; fewer where the limit is too small for 4
    prompt_tokens: int = 2900
    new_tokens: int = 200  # per sample; EOS ends one sample in 760 early
    hidden: int = 64  # hidden size of the random Qwen3; its other sizes keep the proportions of Qwen3-0.6B
    layers: int = 2
    vocab: int = 151_936
    beta: float = 0.05
    limit: float = 14.0  # GiB of private memory a process may have, on a CPU
    timeout: int = 600  # seconds of a process
    verbose: bool = False  # show what the processes print to stderr
    folder: str | None = None  # the files are here already: run this one system and k, for the processes


# ---------------------------------------------------------------------------------------------------------------------
# What both systems read: a checkpoint with its tokenizer, prompts.jsonl, reward.py


def make_files(args: Args):
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    folder = Path(args.folder)
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, args.vocab)}  # word i is token i
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=4, num_key_value_heads=2, head_dim=args.hidden // 2,
        tie_word_embeddings=True, max_position_embeddings=8192, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")  # weights so small that samples are all but uniform
    rng = np.random.default_rng(0)
    prompts = [" ".join(f"w{i}" for i in rng.integers(2, args.vocab, args.prompt_tokens)) for _ in range(args.prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (folder / "reward.py").write_text(REWARD)


# ---------------------------------------------------------------------------------------------------------------------
# The systems: load, measure() once, run one rollout and one update, return the mean length of the samples


def trl(args: Args, k: int, measure) -> float:
    import runpy

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import RLOOConfig, RLOOTrainer
    folder = Path(args.folder)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    gpu = torch.cuda.is_available()
    config = RLOOConfig(
        output_dir=str(folder / "trl"), num_generations=k, per_device_train_batch_size=args.prompts * k, max_steps=1,
        max_completion_length=args.new_tokens, beta=args.beta, gradient_checkpointing=False, bf16=gpu, use_cpu=not gpu,
        report_to="none", save_strategy="no", logging_steps=1, dataloader_pin_memory=False, disable_tqdm=True)
    trainer = RLOOTrainer(
        model=str(folder / "model"), reward_funcs=runpy.run_path(str(folder / "reward.py"))["reward"], args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"))
    measure()
    trainer.train()
    name = "completions/mean_length"
    return next(row[name] for row in trainer.state.log_history if name in row)


def ours(args: Args, k: int, measure) -> float:
    import rloo
    log = rloo.Log

    def log_and_measure(*parts):
        measure()  # everything is loaded now
        return log(*parts)

    rloo.Log = log_and_measure
    history = rloo.main(rloo.Args(
        model=f"{args.folder}/model", data=f"{args.folder}/prompts.jsonl", reward=(f"{args.folder}/reward.py:reward",),
        out=f"{args.folder}/ours-{k}", k=k, batch_size=args.prompts, steps=1, max_new_tokens=args.new_tokens,
        max_length=args.prompt_tokens + args.new_tokens, beta=args.beta, eval_size=0, samples=0))
    return history[-1]["completions/mean_length"]


# ---------------------------------------------------------------------------------------------------------------------
# One process a cell


def allocated() -> float:
    import torch
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / GIB
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB


def one(args: Args):
    """Run args.systems[0] at args.k[0] under the limit, and print what it took as JSON."""
    import torch
    gpu = torch.cuda.is_available()
    if not gpu:  # private writable memory; files mapped for reading are free
        resource.setrlimit(resource.RLIMIT_DATA, (int(args.limit * GIB),) * 2)
    found, begin = {}, time.perf_counter()

    def measure():
        nonlocal begin
        found["before"], begin = allocated(), time.perf_counter()

    try:
        found["length"] = {"trl": trl, "ours": ours}[args.systems[0]](args, args.k[0], measure)
    except NotImplementedError as error:
        found["failed"] = str(error)
    except (MemoryError, RuntimeError) as error:
        signs = ("allocate memory", "bad_alloc", "new thread", "out of memory")
        if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in signs):
            raise
        print(error, file=sys.stderr)
        found["failed"] = "out of memory" if gpu else f"out of memory (> {args.limit:g} GiB)"
    found["seconds"] = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found["peak"] = peak / GIB
    print("\n" + json.dumps(found))


def cell(args: Args, system: str, k: int) -> dict:
    flags = asdict(args) | {"systems": system, "k": k}
    flags = [f"--{name}={value}" for name, value in flags.items() if name != "verbose"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen([sys.executable, __file__, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, env=environment)
    try:
        out, err = process.communicate(timeout=args.timeout)
    except subprocess.TimeoutExpired:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        process.kill()
        process.communicate()
        peak = int(status["VmHWM"].split()[0]) * 1024 / GIB
        return {"failed": f"not done in {args.timeout} s; until then {peak:.2f}"}
    if args.verbose:
        print(err, file=sys.stderr)
    if process.returncode == -9:
        return {"failed": "killed by the system"}
    if process.returncode:
        return {"failed": f"failed: {(err.strip() or str(process.returncode)).splitlines()[-1]}"}
    return json.loads(out.splitlines()[-1])


def main(args: Args):
    with tempfile.TemporaryDirectory() as folder:
        args.folder = folder
        make = ("import sys; sys.path.insert(0, sys.argv[1]); import json, rloo_memory as r; "
                "r.make_files(r.Args(**json.loads(sys.argv[2])))")
        subprocess.run([sys.executable, "-c", make, str(Path(__file__).parent), json.dumps(asdict(args))], check=True)
        print(f"{args.prompts} prompts, {args.prompt_tokens:,} + {args.new_tokens} tokens, vocabulary {args.vocab:,}, "
              f"hidden {args.hidden}, {args.layers} layers\n")
        print("| system | k | before GiB | peak GiB | the step adds GiB | seconds | tokens per sample |\n"
              + "|---" * 7 + "|", flush=True)
        for k in args.k:
            for system in args.systems:
                got = cell(args, system, k)
                if "length" in got:
                    added = got["peak"] - got["before"]
                    numbers = f"{got['peak']:.2f} | {added:.2f} | {got['seconds']:.0f} | {got['length']:.0f}"
                else:
                    numbers = f"{got['failed']} | | |"
                before = f"{got['before']:.2f}" if "before" in got else ""
                print(f"| {system} | {k} | {before} | {numbers} |", flush=True)


if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    (one if args.folder else main)(args)
