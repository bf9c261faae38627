"""On a GPU: whether the numbers are right, then speed and memory, then TRL's trainers beside the scripts.

    python benchmarks/gpu.py numbers                                # first, on every new card or version of torch
    python benchmarks/gpu.py numbers speed --results out/h100.jsonl
    python benchmarks/gpu.py trl                                    # pip install trl==1.16.0 peft datasets
    python benchmarks/gpu.py numbers speed trl --tiny               # do they run? Also without a GPU

Every check prints a line as soon as it is known, and appends it to --results. A check that fails does not stop the
others, but the exit code is 1. A part takes at most four minutes on an H100: see --limit. The models are random.

numbers   the tests marked gpu; the attention kernel of half precision, a loop of ordinary attention and one forward per
          sequence; log-probs of the sampler and of a forward; the loss of the first step, which is ln 2 if policy and
          reference agree; torchrun with one process; a run that is interrupted and resumed; a saved model, loaded again
speed     the reference pass; steps of dpo.py, and what they need with other flags; where the time of a step goes; steps
          of rloo.py with one prompt of 3,100 tokens
trl       the reference pass, a DPO step and an RLOO step of 3,100 tokens, here and in TRL

Memory is what was allocated at the peak of a run from the first model that is loaded to the last step, in GB of 1e9
bytes; "reserved" is what the process took from the card. FLOPs are those of linear layers, without attention.
"""
import atexit
import gc
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest.mock import patch

import against_trl
import numpy as np
import torch
import torch.distributed as dist
import tyro
from against_trl import DEVICE, ROOT, SHAPES, dpo, make_model, quiet, rloo, text_of, write_lines, write_pairs
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(ROOT / "tests"))
from models import flat, slow, values_and_gradients

import refcache
from refcache import ReferenceCache, completion_logprobs, count_tokens


@dataclass
class Args:
    parts: tyro.conf.Positional[tuple[Literal["numbers", "speed", "trl"], ...]]  # what to run, in this order
    results: str | None = None  # .jsonl file that gets every line
    shapes: tuple[str, ...] = ("Qwen2.5-0.5B", "Qwen2.5-1.5B")  # of speed and trl; see against_trl.py
    limit: int = 225  # seconds of a part; checks that would begin later are left out
    tiny: bool = False  # does it run?


CASES = {  # of the kernel: type of the model, heads of queries and of keys, more of the config
    "Qwen2": ("qwen2", 14, 2, {}),
    "Qwen3": ("qwen3", 16, 8, {}),
    "Mistral, window 100": ("mistral", 16, 4, {"sliding_window": 100}),
}
POLICIES = {  # how a model is loaded that samples: whether it trains, and flags
    "frozen, float32": (False, dict(dtype="float32")),
    "frozen, bfloat16": (False, dict(dtype="bfloat16")),
    "FSDP2, bfloat16": (True, dict(dtype="bfloat16")),
    "LoRA, bfloat16": (True, dict(dtype="bfloat16", lora_r=16)),
}
KEPT = {"long prompts": (200, 48), "short prompts": (24, 64)}  # tokens of the longest prompt, and of its samples
RUNS = {  # flags of dpo.py
    "cache": dict(ref="cache"),
    "swap": dict(ref="swap"),
    "live": dict(ref="live"),
    "cache, checkpointing": dict(ref="cache", gradient_checkpointing=True),
    "cache, LoRA": dict(ref="cache", lora_r=16),
    "cache, LoRA, checkpointing": dict(ref="cache", lora_r=16, gradient_checkpointing=True),
}
SHAPES["numbers"] = ("qwen2", 896, 4864, 4, 14, 2, 64, 65_536, True)


# ---- Lines -----------------------------------------------------------

class Lines:
    """Prints lines, and appends them to a file."""

    def __init__(self, path: str | None):
        self.path = path
        self.n_bad = 0

    def write(self, **line):
        """`ok` is False if a check failed, and None if nothing was checked."""
        if line.get("ok") is False:
            self.n_bad += 1
        if self.path:
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")
        mark = {True: "ok    ", False: "WRONG "}.get(line.pop("ok", None), "      ")
        words = [f"{name} {number(value)}" for name, value in line.items() if name not in ("part", "what")]
        print(f"{mark}{line['part']} | {line['what']} | {', '.join(words)}", flush=True)


def number(value) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"


def run_part(part: str, checks: list, lines: Lines, args: Args):
    """Runs checks, (what, function) each. A function returns `ok` and a dict of what it found."""
    began = time.monotonic()
    for what, check in checks:
        left = int(args.limit - (time.monotonic() - began))
        if left < 1:
            lines.write(part=part, what=what, ok=False, error="no time was left")
            continue

        start = time.monotonic()
        clean_up()
        signal.alarm(left)  # raises TimeoutError here
        try:
            ok, found = check()
        except (Exception, SystemExit) as error:  # such as out of memory: the other lines are still wanted
            ok, found = False, {"error": f"{type(error).__name__}: {str(error)[-1000:]}"}
        finally:
            signal.alarm(0)
        lines.write(part=part, what=what, ok=ok, **found, took=round(time.monotonic() - start, 1))
    lines.write(part=part, what="all", seconds=round(time.monotonic() - began, 1))


def clean_up():
    """Nothing of one check stays on the GPU for the next."""
    if dist.is_initialized():  # load_model leaves a process group behind
        dist.destroy_process_group()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def on_alarm(*_):
    raise TimeoutError("the part's time is over")


def random_ids(n: int, vocab: int, rng) -> tuple[int, ...]:
    return tuple(rng.integers(2, vocab, n).tolist())


def random_pairs(n: int, lengths: tuple[int, int], vocab: int) -> list:
    """n triples (prompt, chosen, rejected) of ids: about as long as `lengths`, prompt and answer."""
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(n):
        spread = rng.uniform(0.5, 1.5, 3)
        sizes = [int(length * factor) for length, factor in zip((lengths[0], lengths[1], lengths[1]), spread)]
        pairs.append([random_ids(size, vocab, rng) for size in sizes])
    return pairs


# ---- numbers ---------------------------------------------------------

class Numbers:
    """The checks of the numbers, and the files that they share."""

    def __init__(self, folder: Path, args: Args):
        self.folder, self.tiny = folder, args.tiny
        self.shape = "tiny" if args.tiny else "numbers"
        self.vocab = SHAPES[self.shape][7]
        self.lengths = (12, 6) if args.tiny else (160, 80)  # tokens of a prompt and an answer
        self.gpu_tests = start_process("-m", "pytest", "-q", "-m", "gpu", "tests/test_gpu.py")  # beside all else

    def checks(self) -> list:
        checks = []
        for case in CASES:
            checks += [(f"kernel, {case}, k={k}", partial(self.kernel, case, k)) for k in (1, 2, 8)]
        checks.append(("a model and data are written", self.write_files))
        for name in POLICIES:
            checks += [(f"sampler, {name}, {kept}", partial(self.sampler, name, kept)) for kept in KEPT]
        checks += [(f"step 1, {name}", partial(self.first_step, name)) for name in RUNS]
        checks += [
            ("the same run again", partial(self.same, "cache", "again")),
            ("an interrupted and resumed run", partial(self.same, "cache", "resumed")),
            ("saved model, loaded again", self.saved_model),
            ("one process of torchrun", self.torchrun),
            ("pytest -m gpu", self.pytest),
        ]
        return [(what, check) for what, check in checks if "LoRA" not in what or find_spec("peft")]

    def kernel(self, case: str, k: int):
        """bfloat16 through the kernel and through the loop, against one forward per sequence in float32."""
        model_type, heads, key_heads, more = CASES[case]
        size, vocab = (8, 512) if self.tiny else (64, 65_536)
        config = AutoConfig.for_model(
            model_type, vocab_size=vocab, hidden_size=14 * size, intermediate_size=32 * size, num_hidden_layers=3,
            num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=size, tie_word_embeddings=True,
            initializer_range=0.04, pad_token_id=0, bos_token_id=None, eos_token_id=1, **more)
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(config).eval().bfloat16()
        exact = deepcopy(model).float()  # the same weights

        groups = []
        rng = np.random.default_rng(k)
        prompt, answer = self.lengths
        for n in (2 * prompt, prompt, 1):
            completions = [random_ids(rng.integers(1, 2 * answer), vocab, rng) for _ in range(k)]
            groups.append((random_ids(n, vocab, rng), completions))

        with quiet():
            truth = values_and_gradients(slow, exact, groups)
            flat_row = errors(truth, values_and_gradients(completion_logprobs, exact, groups))
            with patch.object(refcache, "varlen_attn", wraps=refcache.varlen_attn) as attention:
                kernel = errors(truth, values_and_gradients(completion_logprobs, model, groups))
            with patch.object(refcache, "one_kernel_serves", lambda *_: False):
                loop = errors(truth, values_and_gradients(completion_logprobs, deepcopy(model), groups))

        ok = max(flat_row) < 1e-4 and (attention.called or DEVICE == "cpu")
        ok = ok and all(mine < 1.5 * theirs + 1e-4 for mine, theirs in zip(kernel, loop))
        return ok, dict(
            float32_nats=flat_row[0], float32_gradient=flat_row[1], kernel_nats=kernel[0], loop_nats=loop[0],
            kernel_gradient=kernel[1], loop_gradient=loop[1], kernel_calls=attention.call_count)

    def write_files(self):
        """Weights so large that every token matters; one token of 40 ends a sample; two epochs of two steps."""
        make_model(self.folder / "model", self.shape, initializer_range=0.15 if self.tiny else 0.04,
                   eos_token_id=[1, *range(40, self.vocab, 40)])
        write_pairs(self.folder / "pairs.jsonl", random_pairs(16, self.lengths, self.vocab))
        return None, {}

    @torch.no_grad()
    def sampler(self, name: str, kept: str):
        """Log-probs that the sampler found, against those of a forward of the same samples."""
        trains, flags = POLICIES[name]
        longest, new_tokens = (n // 4 if self.tiny else n for n in KEPT[kept])
        args = rloo.Args(model=f"{self.folder}/model", max_new_tokens=new_tokens, **flags)
        rng = np.random.default_rng(0)
        prompts = [random_ids(longest - longest * n // 8, self.vocab, rng) for n in range(6)]

        with quiet():
            policy = rloo.load_model(args.model, DEVICE, args, trains)
            tokenizer = rloo.load_tokenizer(args.model)
            for weight_name, weight in policy.named_parameters():
                if "lora_B" in weight_name:
                    weight.add_(0.01)  # a new adapter has zeros, which change nothing
            samples = rloo.rollout(policy, tokenizer, prompts, 4, 1, args)
            logps = flat(completion_logprobs(policy, samples.groups)).cpu()

        difference = (samples.logps[samples.mask] - logps).abs()
        bound = 1e-3 if args.dtype == "float32" else 5e-2
        found = dict(mean_nats=difference.mean().item(), bound=bound, max_nats=difference.max().item())
        ended = samples.ended.float().mean().item()
        return found["mean_nats"] < bound, found | dict(tokens=len(logps), samples_that_end=ended)

    @cache
    def run(self, name: str, way: str = "whole"):
        """A run of dpo.py of 4 steps. `resumed`: its third step raises, and the same command is given again."""
        out = self.folder / f"{name}, {way}"
        args = dpo.Args(**self.flags(out), save_every=2, **RUNS[name])
        found = SimpleNamespace(out=out, logps=None)
        save_model, append = dpo.save_model, dpo.append

        def save_and_measure(policy, *rest):
            with torch.no_grad():
                found.logps = flat(completion_logprobs(policy, dpo.groups(self.rows(args)))).cpu()
            save_model(policy, *rest)

        def raise_in_third_step(path, rows):
            if path.name == "metrics.jsonl" and rows[0]["step"] == 3:
                raise InterruptedError
            append(path, rows)

        with quiet(), patch.object(dpo, "save_model", save_and_measure):
            if way == "resumed":
                try:
                    with patch.object(dpo, "append", raise_in_third_step):
                        dpo.main(args)
                except InterruptedError:
                    clean_up()
            found.history = dpo.main(args)
        return found

    def flags(self, out: Path) -> dict:
        return dict(
            model=f"{self.folder}/model", data=f"{self.folder}/pairs.jsonl", out=str(out), eval_size=0, samples=0,
            steps=4, batch_size=8, lr=1e-3, schedule="constant", warmup=0.0, dtype="bfloat16")

    def rows(self, args):
        return dpo.load_rows(args.data, dpo.load_tokenizer(args.model), args)[:8]

    def first_step(self, name: str):
        """ln 2 if policy and reference agree. In the second epoch it is lower. With a cache it is the same."""
        history = self.run(name).history
        cached = self.run("cache, LoRA" if "LoRA" in name else "cache").history
        first, last = history[1]["loss"], history[4]["loss"]
        gap = max(abs(one["loss"] - two["loss"]) for one, two in zip(history[1:], cached[1:]))
        ok = abs(first - math.log(2)) < 5e-3 and last < math.log(2) - 1e-3 and gap < 1e-2
        return ok, dict(
            loss=first, from_ln_2=first - math.log(2), nats_per_token=history[1]["logratio"], loss_of_step_4=last,
            from_cached_run=gap)

    def same(self, name: str, way: str):
        """On CUDA the order of some sums is not fixed, so two equal runs may differ."""
        one, two = self.run(name), self.run(name, way)
        found = differences(one.history, two.history)
        weights = [load_file(run.out / "model/model.safetensors") for run in (one, two)]
        gaps = [(weights[0][key].float() - weights[1][key].float()).abs().max().item() for key in weights[0]]
        return found["loss"] < 1e-2, found | dict(weights=max(gaps), bitwise=max([*found.values(), *gaps]) == 0)

    @torch.no_grad()
    def saved_model(self):
        run = self.run("cache")
        args = dpo.Args(**self.flags(run.out))
        with quiet():
            model = dpo.load_model(f"{run.out}/model", DEVICE, args)
            logps = flat(completion_logprobs(model, dpo.groups(self.rows(args)))).cpu()
        difference = (logps - run.logps).abs().max().item()
        return difference == 0, dict(max_nats=difference, bitwise=difference == 0)

    def torchrun(self):
        """FSDP2 and, on a GPU, NCCL."""
        out = self.folder / "torchrun"
        flags = [f"--{name}={value}" for name, value in self.flags(out).items()]
        process = start_process("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "dpo.py",
                                *flags, "--save_every=0")
        output = process.communicate(timeout=120)[0]
        if process.returncode:
            raise RuntimeError(output)
        history = [json.loads(line) for line in (out / "metrics.jsonl").open()]
        found = differences(self.run("cache").history, history)
        return found["loss"] < 1e-2, found

    def pytest(self):
        output = self.gpu_tests.communicate(timeout=120)[0]
        last_line = output.strip().splitlines()[-1]
        return self.gpu_tests.returncode == 0, dict(result=last_line if "FAILED" not in output else output[-1500:])


def errors(truth, found) -> tuple[float, float]:
    """Of log-probs: the mean error in nats. Of the gradient: its error as a fraction of its norm."""
    values, gradient = ((x.float(), y.float()) for x, y in zip(truth, found))
    return (values[1] - values[0]).abs().mean().item(), ((gradient[1] - gradient[0]).norm() / gradient[0].norm()).item()


def differences(one: list[dict], two: list[dict]) -> dict[str, float]:
    """The largest differences between the metrics of two runs."""
    pairs = list(zip(one[1:], two[1:], strict=True))
    return {name: max(abs(x[name] - y[name]) for x, y in pairs) for name in ("loss", "grad_norm")}


def start_process(*command):
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    atexit.register(process.kill)
    return process


# ---- All parts -------------------------------------------------------

def main(args: Args) -> int:
    """Returns the exit code."""
    if DEVICE == "cpu" and not args.tiny:
        sys.exit("gpu.py needs a GPU, and torch finds none here; --tiny shows on a CPU that it runs.")
    signal.signal(signal.SIGALRM, on_alarm)
    lines = Lines(args.results)
    lines.write(part="all", what=against_trl.versions(), command=" ".join(sys.argv), python=sys.version.split()[0])
    for part in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            checks = {"numbers": Numbers}[part](Path(folder), args).checks()
            run_part(part, checks, lines, args)
    return int(lines.n_bad > 0)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, use_underscores=True)))
