"""On a GPU: whether the numbers are right, then speed and memory, then TRL's trainers beside the scripts.

    python benchmarks/gpu.py numbers                   # first, on every new card or version of torch
    python benchmarks/gpu.py numbers speed --results h100.jsonl
    python benchmarks/gpu.py trl                       # pip install trl==1.16.0 peft datasets
    python benchmarks/gpu.py numbers speed trl --tiny  # do they run? Also without a GPU

Each check prints a line as soon as it is known, and appends it to --results, with the commit ("-dirty": with
changes). Where git cannot tell it, set COMMIT. A check that fails does not stop the others, but the exit code
is 1. A part takes at most --limit seconds. The models are random.

numbers   the tests marked gpu; log-probs and gradients of the attention kernel, against one forward per
          sequence in float32; log-probs of the sampler, against a forward; samples of CUDA graphs, against
          those without; the loss of the first step, which is ln 2 if policy and reference agree; in rloo.py
          the sampler's difference there; a resumed run, a saved model, and torchrun with one process
speed     the reference pass, steps of dpo.py with several flags, and where the time of a step goes; steps and
          rollouts of rloo.py with one prompt of 3,100 tokens; how long a reference is swapped in and out
trl       RLOO steps of 3,100 tokens, a reference pass, and a DPO step: here and in TRL, by against_trl.py

CUDA graphs are those of changes/cuda_graph.patch, or of rloo.py once it has them. A patch is applied to a
copy of its script. peak_gb is the most memory that was allocated in a run, loading included. reserved_gb is
what the process took from the card. FLOPs are those of linear layers.
"""
import atexit
import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Literal, get_args
from unittest.mock import patch

import against_trl
import numpy as np
import torch
import torch.distributed as dist
import tyro
from against_trl import DEVICE, ROOT, SHAPES, clock, dpo, quiet, rloo
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(ROOT / "tests"))
from models import flat, slow, values_and_gradients

import logprobs
from logprobs import completion_logprobs, count_tokens
from refcache import ReferenceCache, Swap


@dataclass
class Args:
    parts: tyro.conf.Positional[tuple[Literal["numbers", "speed", "trl"], ...]]  # what to run, in this order
    results: str | None = None  # .jsonl file to which every line is appended
    shapes: tuple[str, ...] = ("Qwen2.5-0.5B", "Qwen2.5-1.5B")  # of speed and trl: see against_trl.py
    limit: int = 280  # seconds of a part; checks that would begin later are left out
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
RUNS = {ref: dict(ref=ref) for ref in get_args(dpo.Args.__annotations__["ref"]) if ref != "none"}
RUNS |= {  # flags of dpo.py
    "cache, checkpointing": dict(ref="cache", gradient_checkpointing=True),
    "cache, LoRA": dict(ref="cache", lora_r=16),
    "cache, LoRA, checkpointing": dict(ref="cache", lora_r=16, gradient_checkpointing=True),
}
TRAINED = {  # flags of rloo.py
    "float32": dict(dtype="float32"),
    "bfloat16": dict(dtype="bfloat16"),
    "bfloat16, LoRA": dict(dtype="bfloat16", lora_r=16),
}
STRIDES = (1, 32, 64, 128)  # tokens for which a CUDA graph serves; 1: no graph
COMMON = dict(schedule="constant", warmup=0.0, dtype="bfloat16")  # flags of both scripts
REWARD = (f"{against_trl.__file__}:even_words",)
SHAPES["numbers"] = ("llama", 896, 4864, 4, 14, 2, 64, 65_536, True)


# ---- Lines -----------------------------------------------------------

class Lines:
    """Prints lines, and appends them to a file, with the commit. `ok` is None if nothing was checked."""

    def __init__(self, path: str | None):
        self.path = path
        self.commit = against_trl.commit()
        self.n_wrong = 0
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)

    def write(self, part: str, what: str, ok: bool | None, **found):
        self.n_wrong += ok is False
        if self.path:
            with open(self.path, "a") as file:
                line = dict(part=part, what=what, commit=self.commit, ok=ok) | found
                file.write(json.dumps(line) + "\n")

        mark = {True: "ok", False: "WRONG", None: ""}[ok]
        words = [f"{name} {as_text(value)}" for name, value in found.items()]
        print(f"{mark:6}{what} | {', '.join(words)}", flush=True)


def as_text(value) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"
    return str(value)


def run_part(part: str, checks: list, lines: Lines, limit: int):
    """Runs checks: what they are called, and a function that returns `ok` and a dict of what it found."""
    began = time.monotonic()
    for what, check in checks:
        start = time.monotonic()
        left = int(limit - (start - began))
        if left < 1:
            lines.write(part, what, False, error="no time was left")
            continue

        clean_up()
        signal.alarm(left)  # raises TimeoutError
        try:
            ok, found = check()
        except (Exception, SystemExit) as error:  # such as out of memory: the other lines are still wanted
            ok, found = False, dict(error=f"{type(error).__name__}: {str(error)[-1000:]}")
        signal.alarm(0)
        lines.write(part, what, ok, **found, took=round(time.monotonic() - start, 1))
    lines.write(part, part, None, took=round(time.monotonic() - began, 1))


def stop(*_):
    raise TimeoutError("the time of this part is over")


def clean_up():
    """Nothing of one check stays on the GPU for the next."""
    if dist.is_initialized():  # load_model leaves a process group behind
        dist.destroy_process_group()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def write_patched(script, name: str, copy: Path):
    """Writes a copy of the script with changes/NAME.patch."""
    file = ROOT / f"changes/{name}.patch"
    command = ["patch", "--fuzz=0", script.__file__, str(file), "-o", str(copy)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{file}: {result.stdout}{result.stderr}")


def patched(script, name: str):
    """A copy of the script with changes/NAME.patch, as a module."""
    copy = Path(tempfile.mkdtemp(), f"{script.__name__}_{name}.py")
    write_patched(script, name, copy)
    return rloo.load_module(str(copy))


def has_graph_patch() -> bool:
    return (ROOT / "changes/cuda_graph.patch").exists()


@cache
def rloo_with_graphs():
    """rloo.py with CUDA graphs, or None if there are none."""
    if hasattr(rloo, "tokens_per_graph"):
        return rloo
    return patched(rloo, "cuda_graph") if has_graph_patch() else None


def with_stride(script, stride: int):
    """In this block a graph of this script serves for so many tokens."""
    return patch.object(script, "tokens_per_graph", lambda core: stride)


def random_ids(n: int, vocab: int, rng) -> tuple[int, ...]:
    return tuple(rng.integers(2, vocab, n).tolist())


def random_pairs(n: int, mean_lengths, vocab: int) -> list:
    """n lists [prompt, chosen, rejected] of token ids."""
    rng = np.random.default_rng(0)
    lengths = rng.uniform(0.5, 1.5, (n, 3)) * mean_lengths
    return [[random_ids(int(length), vocab, rng) for length in row] for row in lengths]


# ---- numbers ---------------------------------------------------------

class Numbers:
    """The checks of the first part, and what they share."""

    def __init__(self, folder: Path, args: Args):
        self.folder, self.tiny = folder, args.tiny
        self.shape = "tiny" if args.tiny else "numbers"
        self.vocab = SHAPES[self.shape][7]
        self.lengths = (12, 6, 6) if args.tiny else (160, 80, 80)  # of prompts and answers
        self.run = cache(self.run)  # each run is made once

        # They run beside the other checks.
        self.tests = start_process("-m", "pytest", "-q", "--tb=short", "-m", "gpu", "tests/test_gpu.py")

    def checks(self) -> list:
        checks = []
        for case in CASES:
            checks += [(f"kernel, {case}, k={k}", partial(self.kernel, case, k)) for k in (1, 2, 8)]
        checks.append(("files are written", self.write_files))
        for name in POLICIES:
            for longest, new_tokens in ((200, 48), (24, 64)):  # prompts longer and shorter than their samples
                checks.append((f"sampler, {name}, {longest}+{new_tokens} tokens",
                               partial(self.sampler, name, longest, new_tokens)))
        checks += [(f"CUDA graph, {name}", partial(self.graph, name)) for name in POLICIES]
        checks += [(f"rloo.py, step 1, {name}", partial(self.sampler_at_step_1, name)) for name in TRAINED]
        checks += [(f"dpo.py, step 1, {name}", partial(self.first_step, name)) for name in RUNS]
        return checks + [
            ("the same run again", partial(self.compare, "again")),
            ("an interrupted and resumed run", partial(self.compare, "resumed")),
            ("a saved model, loaded again", self.saved_model),
            ("torchrun with one process", self.torchrun),
            ("pytest -m gpu", self.pytest),
        ]

    def kernel(self, case: str, k: int):
        """The kernel of half precision, and a loop of attentions, against one forward per sequence."""
        model_type, heads, key_heads, more = CASES[case]
        size, vocab = (8, 512) if self.tiny else (64, 65_536)
        config = AutoConfig.for_model(
            model_type, vocab_size=vocab, hidden_size=14 * size, intermediate_size=32 * size,
            num_hidden_layers=3, num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=size,
            tie_word_embeddings=True, initializer_range=0.04, pad_token_id=0, bos_token_id=None,
            eos_token_id=1, **more)
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(config).eval().bfloat16()
        exact = deepcopy(model).float()  # the same weights

        groups = []
        rng = np.random.default_rng(k)
        prompt, answer, _ = self.lengths
        for n in (2 * prompt, prompt, 1):
            answers = [random_ids(rng.integers(1, 2 * answer), vocab, rng) for _ in range(k)]
            groups.append((random_ids(n, vocab, rng), answers))

        with quiet():
            truth = values_and_gradients(slow, exact, groups)
            flat_row = errors(truth, values_and_gradients(completion_logprobs, exact, groups))
            with patch.object(logprobs, "varlen_attn", wraps=logprobs.varlen_attn) as attention:
                kernel = errors(truth, values_and_gradients(completion_logprobs, model, groups))
            with patch.object(logprobs, "one_kernel_serves", lambda *_: False):
                loop = errors(truth, values_and_gradients(completion_logprobs, deepcopy(model), groups))

        ok = max(flat_row) < 1e-4 and (attention.called or DEVICE == "cpu")
        ok = ok and all(mine < 1.5 * theirs + 1e-4 for mine, theirs in zip(kernel, loop))
        return ok, dict(
            float32_nats=flat_row[0], kernel_nats=kernel[0], loop_nats=loop[0],
            float32_gradient=flat_row[1], kernel_gradient=kernel[1], loop_gradient=loop[1])

    def write_files(self):
        """Large weights, so that every token matters. One token of 40 ends a sample. Two epochs."""
        against_trl.make_model(
            self.folder / "model", self.shape, initializer_range=0.15 if self.tiny else 0.04,
            eos_token_id=[1, *range(40, self.vocab, 40)])
        pairs = random_pairs(16, self.lengths, self.vocab)
        against_trl.write_pairs(self.folder / "pairs.jsonl", pairs)
        prompts = [{"prompt": against_trl.text_of(prompt)} for prompt, *_ in pairs]
        against_trl.write_lines(self.folder / "prompts.jsonl", prompts)
        return None, {}

    def policy(self, name: str, longest: int, new_tokens: int):
        """A model that samples, prompts of several lengths, and flags."""
        trains, flags = POLICIES[name]
        scale = 4 if self.tiny else 1
        Args = (rloo_with_graphs() or rloo).Args  # a patch may have a flag more
        args = Args(model=f"{self.folder}/model", max_new_tokens=new_tokens // scale, **flags)
        rng = np.random.default_rng(0)
        prompts = [random_ids(longest * (8 - n) // (8 * scale), self.vocab, rng) for n in range(6)]
        with quiet():
            policy = rloo.load_model(args.model, DEVICE, args, trains)
        for weight_name, weight in policy.named_parameters():
            if "lora_B" in weight_name:
                weight.data.add_(0.01)  # a new adapter has zeros, which change nothing
        return policy, prompts, args

    def sample(self, script, policy, prompts, args):
        """Samples, and how far their log-probs are from those of a forward. `ok` if that is rounding."""
        with quiet(), torch.no_grad():
            samples = script.rollout(policy, rloo.load_tokenizer(args.model), prompts, 4, 1, args)
            logps = flat(completion_logprobs(policy, samples.groups)).cpu()
        difference = (samples.logps[samples.mask] - logps).abs()
        found = dict(
            mean_nats=difference.mean().item(),
            bound=1e-3 if args.dtype == "float32" else 5e-2,
            max_nats=difference.max().item(),
            tokens=len(logps),
            ended=samples.ended.float().mean().item(),
        )
        return samples, found["mean_nats"] < found["bound"], found

    def sampler(self, name: str, longest: int, new_tokens: int):
        """Log-probs that the sampler found, against those of a forward of the same samples."""
        _, ok, found = self.sample(rloo, *self.policy(name, longest, new_tokens))
        return ok, found

    def graph(self, name: str):
        """The same with CUDA graphs, for a part of the samples and for another. Rounding may change a token,
        after which a sample is another one: in float32 hardly ever."""
        script = rloo_with_graphs()
        if not script:
            return None, dict(error="no patch: changes/cuda_graph.patch")
        policy, prompts, args = self.policy(name, 200, 130)
        with with_stride(script, 1):
            eager, _, _ = self.sample(script, policy, prompts, args)
        with with_stride(script, 4 if self.tiny else 64):  # on a CPU: its steps, without a graph
            with patch.object(torch.cuda, "CUDAGraph", wraps=torch.cuda.CUDAGraph) as graphs:
                samples, ok, found = self.sample(script, policy, prompts, args)

        equal = []
        for (_, ones), (_, others) in zip(eager.groups, samples.groups):
            equal += [one == other for one, other in zip(ones, others)]
        found |= dict(equal_samples=float(np.mean(equal)), graphs=graphs.call_count)
        ok = ok and (graphs.called or DEVICE == "cpu")
        return ok and (args.dtype == "bfloat16" or found["equal_samples"] > 0.9), found

    def sampler_at_step_1(self, name: str):
        """The metrics of rloo.py, which refuses a sampler that differs by more than rounding."""
        if "LoRA" in name and not find_spec("peft"):
            return None, dict(error="peft is not installed")
        found = {}
        for script in dict.fromkeys(filter(None, (rloo, rloo_with_graphs()))):  # each once
            args = script.Args(**COMMON | TRAINED[name] | dict(
                model=f"{self.folder}/model", data=f"{self.folder}/prompts.jsonl", reward=REWARD, steps=1,
                out=tempfile.mkdtemp(dir=self.folder), max_new_tokens=16 if self.tiny else 130, save_every=0))
            with quiet():
                line = script.main(args)[1]
            clean_up()
            for part in ("mean", "max"):
                found[f"{script.__name__}_{part}_nats"] = line[f"sampling/sampling_logp_difference/{part}"]
            found[f"{script.__name__}_kl"] = line["kl"]
        return True, found

    def flags(self, way: str) -> dict:
        return COMMON | dict(
            model=f"{self.folder}/model", data=f"{self.folder}/pairs.jsonl", out=f"{self.folder}/{way}",
            steps=4, batch_size=8, lr=1e-3, save_every=2)

    def run(self, name: str, way: str = "first"):
        """dpo.py, 4 steps. `resumed`: the third step raises, and the same command is given again."""
        args = dpo.Args(**self.flags(f"{name}, {way}"), **RUNS[name])
        found = SimpleNamespace(out=Path(args.out))
        save_model, append = dpo.save_model, dpo.append

        def save_and_measure(policy, *rest):
            found.logps = self.logprobs(policy)
            save_model(policy, *rest)

        def append_until_step_3(path, values, *rest):
            if way == "resumed" and values["step"] == 3:
                raise InterruptedError
            append(path, values, *rest)

        with quiet(), patch.object(dpo, "save_model", save_and_measure):
            try:
                with patch.object(dpo, "append", append_until_step_3):
                    found.history = dpo.main(args)
            except InterruptedError:
                clean_up()
                found.history = dpo.main(args)
        return found

    @torch.no_grad()
    def logprobs(self, model):
        pairs = random_pairs(8, self.lengths, self.vocab)
        return flat(completion_logprobs(model, [(prompt, answers) for prompt, *answers in pairs])).cpu()

    def first_step(self, name: str):
        """The loss is ln 2 if policy and reference agree. In the second epoch it is lower."""
        if "LoRA" in name and not find_spec("peft"):
            return None, dict(error="peft is not installed")
        history = self.run(name).history[1:]
        cached = self.run("cache, LoRA" if "LoRA" in name else "cache").history[1:]
        gap = max(abs(line["loss"] - other["loss"]) for line, other in zip(history, cached))
        from_ln_2 = history[0]["loss"] - math.log(2)
        last = history[3]["loss"]

        ok = abs(from_ln_2) < 5e-3 and last < math.log(2) - 1e-3 and gap < 1e-2
        return ok, dict(
            from_ln_2=from_ln_2, nats_per_token=history[0]["abs_logratio"], loss_of_step_4=last,
            from_cached_run=gap)

    def compare(self, way: str):
        """On CUDA the order of some sums is not fixed, so two equal runs may differ."""
        one, two = self.run("cache"), self.run("cache", way)
        found = differences(one.history, two.history)
        weights, others = (load_file(run.out / "model/model.safetensors") for run in (one, two))
        found["weights"] = max((weights[name] - others[name]).abs().max().item() for name in weights)
        return found["loss"] < 1e-2, found | dict(bitwise=max(found.values()) == 0)

    def saved_model(self):
        run = self.run("cache")
        with quiet():
            model = dpo.load_model(f"{run.out}/model", DEVICE, dpo.Args(dtype="bfloat16"))
            difference = (self.logprobs(model) - run.logps).abs().max().item()
        return difference == 0, dict(max_nats=difference)

    def torchrun(self):
        """FSDP2 and, on a GPU, NCCL."""
        flags = [f"--{name}={value}" for name, value in self.flags("torchrun").items()]
        process = start_process(
            "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "dpo.py", *flags)
        output = process.communicate()[0]
        if process.returncode:
            raise RuntimeError(output)
        history = [json.loads(line) for line in (self.folder / "torchrun/metrics.jsonl").open()]
        found = differences(self.run("cache").history, history)
        return found["loss"] < 1e-2, found

    def pytest(self):
        output = self.tests.communicate()[0]
        failed = self.tests.returncode != 0
        return not failed, dict(result=output[-3000:] if failed else output.strip().splitlines()[-1])


def errors(truth, found) -> tuple[float, float]:
    """Of log-probs: the mean error in nats. Of the gradient: its error as a fraction of its norm."""
    values, gradient = (new.float() - old for old, new in zip(truth, found))
    return values.abs().mean().item(), (gradient.norm() / truth[1].norm()).item()


def differences(one: list[dict], two: list[dict]) -> dict[str, float]:
    """The largest differences between the metrics of two runs."""
    steps = list(zip(one[1:], two[1:], strict=True))
    return {name: max(abs(x[name] - y[name]) for x, y in steps) for name in ("loss", "grad_norm")}


def start_process(*command):
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    atexit.register(process.kill)
    return process


# ---- speed -----------------------------------------------------------

class Speed:
    """The checks of the second part. A run is main() of a script, which saves nothing."""

    def __init__(self, folder: Path, args: Args):
        self.folder, self.tiny = folder, args.tiny
        self.shapes = ("tiny",) if args.tiny else args.shapes
        self.lengths = (24, 12, 12) if args.tiny else (256, 256, 256)
        self.pairs = 8 if args.tiny else 512  # of the reference pass
        self.batch_size = 2 if args.tiny else 16
        self.long = (40, 8) if args.tiny else (3100, 128)  # tokens of a prompt of rloo.py, and of its samples
        self.peak = math.nan  # FLOPs per second

    def checks(self) -> list:
        checks = [("a product of bfloat16 matrices", self.matrix_product)]
        for shape in self.shapes:
            checks += [
                (f"{shape}, files are written", partial(self.write_files, shape)),
                (f"{shape}, reference pass", partial(self.reference_pass, shape))]
            checks += [(f"{shape}, dpo.py, {name}", partial(self.dpo, shape, name)) for name in RUNS]
            checks.append((f"{shape}, dpo.py, where a step goes", partial(self.profile, shape)))
            checks.append((f"{shape}, swap", partial(self.swap, shape)))
            checks += [(f"{shape}, rollout, k={k}", partial(self.rollout, shape, k)) for k in (2, 4, 8)]
            if shape == self.shapes[0]:
                checks += [(f"{shape}, rloo.py, k={k}", partial(self.rloo, shape, k)) for k in (2, 4, 8)]
            if shape == self.shapes[0] and has_graph_patch():
                name = f"{shape}, rloo.py with cuda_graph.patch, k=4"
                checks.append((name, lambda shape=shape: self.rloo(shape, 4, rloo_with_graphs())))
        for shape in self.shapes:  # last, because compilation takes long
            checks.append((f"{shape}, dpo.py, cache, compile.patch", partial(self.compiled, shape)))
        return checks

    def matrix_product(self):
        """What the card reaches: the peak of all shares below."""
        n = 256 if self.tiny else 8192
        a, b = torch.randn(2, n, n, device=DEVICE, dtype=torch.bfloat16)
        for repeats in (3, 20):  # the first ones do not count
            begin = clock()
            for _ in range(repeats):
                a @ b
            self.peak = 2 * n**3 * repeats / (clock() - begin)
        return None, dict(tflops=self.peak / 1e12)

    def write_files(self, shape: str):
        folder, vocab = self.folder / shape, SHAPES[shape][7]
        against_trl.make_model(folder, shape)
        pairs = random_pairs(6 * self.batch_size, self.lengths, vocab)  # those of six steps
        against_trl.write_pairs(folder / "pairs.jsonl", pairs)
        ids = random_ids(self.long[0], vocab, np.random.default_rng(0))
        against_trl.write_lines(folder / "prompts.jsonl", [{"prompt": against_trl.text_of(ids)}] * 3)
        return None, {}

    def train(self, script, shape: str, data: str, **flags) -> list[dict]:
        folder = self.folder / shape
        args = script.Args(
            model=str(folder), data=f"{folder}/{data}", out=tempfile.mkdtemp(dir=folder), save_every=0,
            **COMMON, **flags)
        with quiet(), patch.object(script, "save_model", lambda *_: None):
            with patch.object(script, "checkpoint_digest", lambda name: name, create=True):  # rloo.py has none
                return script.main(args)

    def reference_pass(self, shape: str):
        pairs = random_pairs(self.pairs, self.lengths, SHAPES[shape][7])
        groups = [(prompt, answers) for prompt, *answers in pairs]
        with quiet():
            model = dpo.load_model(str(self.folder / shape), DEVICE, dpo.Args(dtype="bfloat16"))
            for part in (groups[:32], groups):  # the first forwards compile kernels
                begin = clock()
                ReferenceCache().compute(model, part)
                seconds = clock() - begin

        # Each token goes through the linear layers, and each token of an answer through the head.
        head = model.get_output_embeddings()
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        n_tokens, n_prompts = count_tokens(groups), sum(len(prompt) for prompt, _ in groups)
        flops = 2 * n_tokens * sum(module.weight.numel() for module in linear if module is not head)
        flops += 2 * (n_tokens - n_prompts) * head.weight.numel()
        return None, dict(tokens=n_tokens, seconds=seconds, tokens_per_second=n_tokens / seconds,
                          share_of_peak=flops / seconds / self.peak) | memory()

    def dpo(self, shape: str, name: str, script=dpo):
        """The median of steps 2 to 6. With a cache, the reference's pass comes before them."""
        if "LoRA" in name and not find_spec("peft"):
            return None, dict(error="peft is not installed")
        history = self.train(script, shape, "pairs.jsonl", steps=6, batch_size=self.batch_size, **RUNS[name])
        found = {key: median(line[key] for line in history[2:]) for key in ("seconds", "tokens_per_second")}
        return None, found | dict(first_step=history[1]["seconds"]) | memory()

    def compiled(self, shape: str):
        """The first step compiles what the reference's pass has not."""
        if DEVICE == "cpu":
            return None, dict(error="not on a CPU, where it takes minutes to compile")
        with patch.object(logprobs, "log_softmax_at", logprobs.log_softmax_at):  # the patch compiles it
            return self.dpo(shape, "cache", patched(dpo, "compile"))

    @torch.no_grad()
    def swap(self, shape: str):
        """How long policy and reference take to change places, which a step does twice."""
        with quiet():
            policy = dpo.load_model(str(self.folder / shape), DEVICE, dpo.Args(dtype="bfloat16"), trains=True)
        swap = Swap(policy)
        swap.exchange()  # the first one also touches new memory
        begin = clock()
        swap.exchange()
        return None, dict(seconds=clock() - begin) | memory()

    def rollout(self, shape: str, k: int):
        """Milliseconds per token of one prompt and k samples, without graphs and with them."""
        script = rloo_with_graphs() or rloo
        length, new_tokens = self.long
        args = script.Args(model=str(self.folder / shape), dtype="bfloat16", max_new_tokens=new_tokens + 1)
        prompts = [random_ids(length, SHAPES[shape][7], np.random.default_rng(0))]
        with quiet():
            policy = rloo.load_model(args.model, DEVICE, args, trains=True)
            tokenizer = rloo.load_tokenizer(args.model)
            few = replace(args, max_new_tokens=2)
            script.rollout(policy, tokenizer, prompts, k, 1, few)  # the first forwards compile kernels

        found = {}
        for stride in STRIDES if rloo_with_graphs() else STRIDES[:1]:
            with with_stride(script, stride) if rloo_with_graphs() else nullcontext():
                begin = clock()
                samples = script.rollout(policy, tokenizer, prompts, k, 1, args)
                n_tokens = samples.mask.shape[2]
                found[f"ms_per_token_{stride}"] = 1e3 * (clock() - begin) / n_tokens
        return None, found | dict(prompt=length, new_tokens=n_tokens) | memory()

    def rloo(self, shape: str, k: int, script=rloo):
        """The second step, of one prompt and k samples."""
        rollout, seconds = script.rollout, []

        def timed(*inputs, **options):
            begin = clock()
            samples = rollout(*inputs, **options)
            seconds.append(clock() - begin)
            return samples

        length, new_tokens = self.long
        with patch.object(script, "rollout", timed):
            history = self.train(
                script, shape, "prompts.jsonl", reward=REWARD, k=k, steps=2, batch_size=1, max_length=length,
                max_new_tokens=new_tokens)
        return None, dict(
            prompt=length, new_tokens=history[2]["completions/mean_length"], seconds=history[2]["seconds"],
            rollout_seconds=seconds[1], ms_per_token=1e3 * seconds[1] / new_tokens) | memory()

    def profile(self, shape: str):
        """The third step: the kernels that take longest, how many there are, and how often the host waits.
        One wait, a cudaDeviceSynchronize, is the clock's."""
        profiler = torch.profiler.profile()
        append, times = dpo.append, []

        def append_and_profile(path, values, *rest):
            append(path, values, *rest)
            if values["step"] in (2, 3):
                times.append(clock())
                profiler.start() if values["step"] == 2 else profiler.stop()

        with patch.object(dpo, "append", append_and_profile):
            self.train(dpo, shape, "pairs.jsonl", steps=3, batch_size=self.batch_size)

        events = profiler.key_averages()
        calls = {event.key: event.count for event in events}
        kernels = {}  # name -> its milliseconds in all
        for event in events:
            if DEVICE == "cpu":
                kernels[event.key] = event.self_cpu_time_total / 1e3
            elif event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
                kernels[event.key] = event.self_device_time_total / 1e3
        total = sum(kernels.values())
        longest = sorted(kernels, key=kernels.get, reverse=True)[:5]
        return None, dict(
            milliseconds=1e3 * (times[1] - times[0]), kernel_milliseconds=total,
            launches=sum(n for name, n in calls.items() if "LaunchKernel" in name),
            waits={name: n for name, n in calls.items() if name.startswith("cuda") and "Synchronize" in name},
            copies={name: n for name, n in calls.items() if name.startswith("Memcpy")},
            longest=[f"{kernels[name] / total:.1%} {calls[name]} x {name[:80]}" for name in longest])


def memory() -> dict:
    if DEVICE == "cpu":
        return {}
    return dict(
        peak_gb=torch.cuda.max_memory_allocated() / 1e9,
        reserved_gb=torch.cuda.max_memory_reserved() / 1e9)


# ---- trl -------------------------------------------------------------

class Trl:
    """The checks of the third part: tables of against_trl.py."""

    def __init__(self, folder: Path, args: Args):
        self.shape = "tiny" if args.tiny else args.shapes[0]
        self.tiny = args.tiny

        # Our side is a checkout of its own if CUDA graphs are a patch.
        self.checkout, self.graphs = ROOT, ""
        if has_graph_patch():
            for script in ROOT.glob("*.py"):
                shutil.copy(script, folder)
            write_patched(rloo, "cuda_graph", folder / "rloo.py")
            self.checkout, self.graphs = folder, " with cuda_graph.patch"

    def checks(self) -> list:
        if not all(map(find_spec, ("trl", "peft", "datasets"))):
            return [("TRL is not installed: pip install trl==1.16.0 peft datasets", lambda: (None, {}))]
        if self.tiny:
            return [("dpo, rloo", partial(self.table, "--tiny", "--works", "dpo", "rloo"))]

        sizes = ["--shapes", self.shape, "--pairs", "256", "--batch_size", "16", "--max_length", "768"]
        long = ["--shapes", self.shape, "--steps", "2", "--batch_size", "1"]
        checks = []
        for k in (4, 8, 2):  # k = 2 was measured before
            flags = [*long, "--works", f"long, k={k}"]
            checks.append((f"{self.shape}, rloo{self.graphs}, k={k}", partial(self.table, *flags)))
        for work in ("reference", "dpo"):
            checks.append((f"{self.shape}, {work}", partial(self.table, *sizes, "--works", work)))
        return checks

    def table(self, *flags):
        os.environ["CHECKOUT"] = str(self.checkout)  # of the scripts that against_trl.py runs
        process = start_process("benchmarks/against_trl.py", "--rounds", "1", *flags)
        output = process.communicate()[0]
        if process.returncode:
            raise RuntimeError(output)
        return None, dict(lines=[line for line in output.splitlines() if line.startswith("| ")])


# ---- All parts -------------------------------------------------------

def main(args: Args) -> int:
    """Returns the exit code."""
    if DEVICE == "cpu" and not args.tiny:
        sys.exit("gpu.py needs a GPU, and torch finds none here; --tiny shows on a CPU that it runs.")
    signal.signal(signal.SIGALRM, stop)
    lines = Lines(args.results)
    python = sys.version.split()[0]
    lines.write("all", against_trl.versions(), None, python=python, command=" ".join(sys.argv))

    for part in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            checks = {"numbers": Numbers, "speed": Speed, "trl": Trl}[part](Path(folder), args).checks()
            run_part(part, checks, lines, args.limit)
    return int(lines.n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__, use_underscores=True)))
