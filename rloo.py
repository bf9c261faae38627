"""RLOO: learn from a reward. The other samples of a prompt are the baseline.

Ahmadian et al. 2024, Back to Basics: Revisiting REINFORCE Style Optimization, arXiv:2402.14740:

    (1)   ∇J(θ) = E 1/k Σ_i [ R(y_i, x) − 1/(k−1) Σ_{j≠i} R(y_j, x) ] ∇ log π(y_i|x), y_i ~ π(·|x)
    (2)   R(y, x) = reward(y, x) − β log π(y|x)/π_ref(y|x)

    python rloo.py  # the demo: offline, 10 s
    python rloo.py --model Qwen/Qwen3-0.6B --data prompts.jsonl --reward rewards.py:helpful --out out/qwen

A killed run resumes if the same command is given again. docs/recipes.md has starting values for lr and β.

Data: rows with `prompt`, a string or chat messages, and any columns that the reward needs:

    {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}

A reward is a function(prompts, completions, **columns), async or not. It returns a number or None for each
completion. The columns are those of the file and two more: completion_ids, and ended, which is false for a
sample that was cut off.

Shapes: B prompts per step, k samples each, T tokens in the longest. Rewards and advantages are (B, k).
Log-probs of tokens are (B, k, T), 0 after the end of a sample. A micro-batch has b prompts.

Metrics: loss, kl, learning_rate, seconds, tokens_per_second, and
    reward, reward_std, rewards/NAME         of all samples, before KL; of one function
    frac_reward_none, frac_reward_zero_std   samples without a reward; prompts whose rewards are all equal
    entropy, samples/distinct                nats per token; different samples
    completions/mean_length                  tokens
    completions/clipped_ratio, clip_ratio    samples that were cut off; samples whose ratio is clipped
    sampling/sampling_logp_difference/mean, sampling/sampling_logp_difference/max
                                             |log π − log π of the sampler| per token
    grad_norm, memory_gb                     before clipping (of the last update, as loss); peak of the GPU
    eval_*                                   of one sample per held-out prompt

Not here: a critic, another engine for sampling, tensor or pipeline parallelism, images.
"""
import asyncio
import hashlib
import importlib.util
import inspect
import json
import math
import os
import random
import re
import shutil
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
import tyro
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict)
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Cache, DynamicCache)
from transformers.modeling_layers import GradientCheckpointingLayer

from refcache import (
    BadInput, Swap, all_gather, all_reduce, apply_fsdp, barrier, check_agreement, checkpoint_digest,
    completion_logprobs, context_length, count_tokens, divide_batches, enable_shared_prompts, full_tensor,
    has_shared_prompts, is_first_process, micro_batches, names_in_float32, pack, process_count, process_group,
    process_rank, progress_bar, to_device, unsharded, unwrap_model, write_whole)

HERE = Path(__file__).parent
DEMO = dict(
    model=f"{HERE}/demo/model",
    data=f"{HERE}/demo/prompts.jsonl",
    eval_data=f"{HERE}/demo/prompts_test.jsonl",
    reward=(f"{HERE}/demo/score.py:sentiment",),
    lr=2e-4,
)
TOKENS = {}  # id -> id, see as_tuple
ENDINGS = (".jsonl", ".json", ".csv", ".parquet")  # of files
LOGS = ("metrics.jsonl", "samples.jsonl")
MAY_CHANGE = {  # flags that may differ when a run is resumed
    "out", "ref", "wandb", "tokens_per_forward", "rollout_tokens", "gradient_checkpointing", "save_every",
    "eval_every", "chat_template_kwargs"}


@dataclass
class Args:
    model: str | None = None  # checkpoint folder or hub name; None: the demo
    data: str | None = None  # prompts: .jsonl .json .csv .parquet, or hub data NAME[:CONFIG][:SPLIT]
    eval_data: str | None = None  # held-out prompts; None: they are split off --data
    eval_size: int = 64  # number of prompts that are split off --data, at most a tenth of them
    chat_template_kwargs: dict[str, bool | int | str] = field(default_factory=dict)  # enable_thinking False
    max_length: int = 1024  # tokens of a prompt; longer ones are dropped and counted
    out: str | None = None  # folder of the run; None: out/rloo, or out/rloo-2 if that is finished

    reward: tuple[str, ...] = ()  # FILE.py:FUNCTION; several are summed: rewards.py:right rewards.py:short
    reward_model: str | None = None  # classifier with one output: folder or hub name
    reward_weights: tuple[float, ...] = ()  # weights of the functions, then of the model; empty: all are 1

    ref: Literal["swap", "live"] = "swap"  # the reference's weights: on the CPU, swapped in, or on the GPU
    ref_model: str | None = None  # the reference, with --ref live; None: the policy before training

    lora_r: int | None = None  # train a LoRA adapter of this rank instead of all weights
    lora_alpha: float | None = None  # LoRA's scale is alpha / r; None: alpha = 2 r
    lora_target: tuple[str, ...] = ()  # names of the layers with an adapter: q_proj v_proj; empty: all linear

    k: int = 4  # samples per prompt
    beta: float = 0.05  # KL penalty per nat, part of the reward; 0: none
    updates_per_rollout: int = 1  # optimizer steps per rollout
    clip_eps: float = 0.2  # a ratio is clipped to 1 ± clip_eps; no effect with one update per rollout
    mask_truncated: bool = False  # leave out samples without EOS, also from the baseline
    temperature: float = 1.0  # divides the logits in sampling and in all log-probs
    max_new_tokens: int = 128  # tokens per sample

    epochs: float = 1.0  # passes over the data
    steps: int = -1  # rollouts; -1: as many as --epochs needs; 0: only evaluate
    batch_size: int = 8  # prompts per step
    lr: float | None = None  # peak learning rate; None: 1e-6, with LoRA 1e-5, in the demo 2e-4
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # of the learning rate after the warmup
    warmup: float = 0.1  # steps in which the learning rate rises; below 1: their fraction of all steps
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # gradients are clipped to this norm; 0: no clipping
    seed: int = 0

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of forward passes; auto: bfloat16 on a GPU
    tokens_per_forward: int = 16384  # limits memory, but the k samples of a prompt stay together
    rollout_tokens: int = 65536  # limits the memory of a rollout, as tokens in its key-value cache
    gradient_checkpointing: bool = False  # saves memory, costs time; never changes what is learned

    save_every: int = 50  # steps between checkpoints, from which a killed run resumes; 0: none
    eval_every: int | None = None  # steps between evaluations; None: only before and after training
    wandb: bool = False  # log to Weights & Biases, in the project of $WANDB_PROJECT


# ---- The loss --------------------------------------------------------

def compute_advantages(rewards: torch.Tensor, old_logps: torch.Tensor, ref_logps: torch.Tensor, beta: float):
    """Equation (2), then (1): rewards (B, k), log-probs (B, k, T) -> (B, k)."""
    kl = (old_logps - ref_logps).sum(dim=2)  # the estimator k1 is unbiased in a reward (arXiv:2512.21852)
    return leave_one_out(rewards - beta * kl)


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """(B, k) -> (B, k): each reward minus the mean of the prompt's other samples. A sample with NaN is left
    out: its advantage is 0, and no baseline contains it. Dividing by the standard deviation adds a bias."""
    # One reward of the prompt, which cancels out in (1). Without it, equal rewards would have advantages of
    # 1e-8, and Adam would make a whole step of them.
    rewards = rewards - rewards.nanmedian(dim=1, keepdim=True).values

    counts = (~rewards.isnan()).sum(dim=1, keepdim=True)  # (B, 1)
    sum_of_others = rewards.nansum(dim=1, keepdim=True) - rewards
    advantages = rewards - sum_of_others / (counts - 1)  # of (1)
    return advantages.nan_to_num(nan=0.0)  # NaN: left out, or the only sample (0 / 0)


def policy_loss(logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, clip_eps: float):
    """The loss of each sample, (B, k), or of each token, (B, k, T), and whether its ratio is clipped. Where
    old_logp = logp the gradient is −advantage · ∇ log π(y|x), as in (1)."""
    ratio = (logp - old_logp).clamp(max=88).exp()  # e^89 is inf, and inf · 0 is NaN
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages
    return -torch.minimum(unclipped, clipped), clipped < unclipped


# ---- A batch ---------------------------------------------------------

class Row(NamedTuple):
    prompt: tuple[int, ...]  # token ids
    columns: dict  # of the file: the prompt, and what the reward needs


class Samples(NamedTuple):
    groups: list  # [(prompt, [completion_1 .. completion_k]), ..] for B prompts: token ids, with stop tokens
    texts: list[list[str]]  # k per prompt
    mask: torch.Tensor  # (B, k, T) bool: whether the sample has a token t
    ended: torch.Tensor  # (B, k) bool: not cut off by max_new_tokens
    logps: torch.Tensor  # (B, k, T): of the sampler, 0 after the end
    entropy: torch.Tensor  # (B, k): summed over tokens


def micro_batch_logprobs(model, samples: Samples, args: Args):
    """Yields for each micro-batch the indices of its prompts, log π of the tokens of their samples,
    (b, k, T), and its weight in a sum: 1, or 0 if only FSDP needs this forward (see micro_batches)."""
    T = samples.mask.shape[2]
    for indices, weight in micro_batches(model, samples.groups, args.tokens_per_forward):
        groups = [samples.groups[i] for i in indices]
        logps = chain(*completion_logprobs(model, groups, temperature=args.temperature))
        padded = torch.stack([F.pad(logp, (0, T - len(logp))) for logp in logps])  # (b · k, T)
        yield to_device(indices, padded.device), padded.view(len(groups), -1, T), weight


@torch.no_grad()
def compute_logprobs(reference, samples: Samples, device: str, args: Args) -> torch.Tensor:
    """log π_ref of each token, (B, k, T); 0 without a reference."""
    all_logps = torch.zeros(samples.mask.shape, device=device)
    if reference:
        with reference as model:
            for indices, logps, weight in micro_batch_logprobs(model, samples, args):
                if weight:
                    all_logps[indices] = logps
    return all_reduce(all_logps)  # each process has filled in its own prompts: the sum has all of them


def run_batch(policy, samples: Samples, rewards, ref_logps, old_logps, args: Args) -> tuple:
    """Adds the gradient of the mean loss: rewards (B, k), log-probs (B, k, T). old_logps are those of the
    policy that sampled; None: it is this policy. Returns log π of each token, (B, k, T), and metrics."""
    all_logps = torch.zeros_like(ref_logps)
    totals = torch.zeros(2, device=ref_logps.device)  # of the loss, and of clipped ratios

    for indices, logps, weight in micro_batch_logprobs(policy, samples, args):
        old = logps.detach() if old_logps is None else old_logps[indices]
        advantages = compute_advantages(rewards[indices], old, ref_logps[indices], args.beta)  # (b, k)
        losses, is_clipped = policy_loss(logps.sum(dim=2), old.sum(dim=2), advantages, args.clip_eps)

        n_samples = rewards.numel()
        scale = weight / n_samples
        loss = losses.sum() * scale
        loss.backward()

        totals += torch.stack([loss.detach(), is_clipped.sum() * scale])
        if weight:
            all_logps[indices] = logps.detach()

    # Each process has its own prompts: the sums have all of them.
    loss, clip_ratio = all_reduce(totals).tolist()
    return all_reduce(all_logps), {"loss": loss, "clip_ratio": clip_ratio}


def metrics(samples: Samples, rewards, logps, ref_logps, args: Args) -> dict[str, float]:
    """Metrics of samples: rewards (B, k), of which NaN are left out, and log-probs (B, k, T)."""
    known = rewards[~rewards.isnan()]
    n_tokens = samples.mask.sum()
    values = {
        "reward": known.mean().item(),  # NaN if no reward is known
        "reward_std": known.std(correction=min(1, len(known) - 1)).item(),
        "frac_reward_none": rewards.isnan().float().mean().item(),
        "samples/distinct": len(set(chain(*samples.texts))),
        "completions/mean_length": (n_tokens / samples.ended.numel()).item(),
        "completions/clipped_ratio": 1 - samples.ended.float().mean().item(),
        "entropy": (samples.entropy.sum() / n_tokens).item(),
    }
    if args.beta:
        values["kl"] = ((logps - ref_logps).sum() / n_tokens).item()
    return values


def all_rewards_equal(rewards: torch.Tensor) -> torch.Tensor:
    """(B, k) -> (B,) bool: whether all rewards of a prompt are equal or NaN, so that it teaches nothing."""
    return ~leave_one_out(rewards).any(dim=1)


def evaluate(policy, tokenizer, rows: list[Row], reference, functions, step: int, out: Path, args: Args):
    """Metrics of one sample per held-out prompt. Writes the samples to samples.jsonl."""
    if not rows:
        return {}
    # With step=0 the random numbers are always the same.
    samples = rollout(policy, tokenizer, [row.prompt for row in rows], k=1, step=0, args=args)
    rewards, means = compute_rewards(samples, rows, functions)
    log_samples(out, samples, rows, rewards, step=step, held_out=True)

    ref_logps = compute_logprobs(reference, samples, policy.device, args).cpu()
    values = metrics(samples, rewards, samples.logps, ref_logps, args) | means
    return {f"eval_{name}": value for name, value in values.items()}


# ---- Training --------------------------------------------------------

def main(args: Args) -> list[dict]:
    """Trains. Returns the lines of metrics.jsonl, one dict per step."""
    with process_group():
        args = resolve(args)
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(out / f".lock-{process_rank()}", timeout=0):
                return train(args, out)
        except Timeout:
            raise BadInput(f"{out} is used by a run that has not ended: name another --out") from None
        except KeyboardInterrupt:
            last_step = max(checkpoints(out), default=0)
            raise KeyboardInterrupt(f"stopped: the same command continues after step {last_step}") from None


def train(args: Args, out: Path) -> list[dict]:
    """The run: prompts, rewards, the policy and its reference, the loop."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(args.model, args.ref_model)
    train_rows, eval_rows = load_data(tokenizer, args)
    print(f"The first prompt:\n{tokenizer.decode(train_rows[0].prompt)}")

    functions = load_rewards(device, args)
    # The rewards are tried on one row, so that they do not fail after the models are loaded.
    trial = Samples([((), [(1,)])], [["a"]], None, ended=torch.tensor([[True]]), logps=None, entropy=None)
    compute_rewards(trial, train_rows[:1], functions)

    batch_size = min(args.batch_size, len(train_rows))
    steps = args.steps
    if steps == -1:
        steps = math.ceil(args.epochs * len(train_rows) / batch_size)
    if args.warmup > max(1, steps):
        raise BadInput(f"--warmup {args.warmup:g}: the run has only {steps} steps")
    ordered_rows = rows_in_order(train_rows, steps * batch_size, args.seed)
    print(f"{steps} steps of {batch_size} prompts, lr {args.lr:g}")
    run = describe_run(train_rows, eval_rows, args)
    check_folder(out, run)  # before anything that takes long

    torch.manual_seed(args.seed)  # for a new adapter
    policy = load_model(args.model, device, args, trains=True)
    reference = None
    if args.beta and args.ref == "live":
        reference = nullcontext(load_model(args.ref_model, device, args))
    elif args.beta:
        reference = Swap(policy)  # the policy as it is now

    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    matrices = [weight for weight in weights if weight.dim() > 1]
    vectors = [weight for weight in weights if weight.dim() <= 1]  # norms and biases do not decay
    optimizer = torch.optim.AdamW([
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0}], fused=True)  # the loop sets lr

    last_step = restore_checkpoint(out, run, policy, optimizer)
    if last_step == 0:
        values = {"step": 0} | evaluate(policy, tokenizer, eval_rows, reference, functions, 0, out, args)
        append(out / "metrics.jsonl", [values], args.wandb)

    progress = progress_bar(range(last_step + 1, steps + 1), desc="train", initial=last_step, total=steps)
    for step in progress:
        began = time.monotonic()
        torch.manual_seed(args.seed + step)  # a resumed run needs no saved random state
        rows = ordered_rows[(step - 1) * batch_size:step * batch_size]

        samples = rollout(policy, tokenizer, [row.prompt for row in rows], k=args.k, step=step, args=args)
        rewards, means = compute_rewards(samples, rows, functions)
        log_samples(out, samples, rows, rewards, step=step, held_out=False)
        ref_logps = compute_logprobs(reference, samples, device, args)
        used_rewards = rewards.to(device)
        if args.mask_truncated:  # the metrics count all samples, the loss those that ended
            used_rewards = used_rewards.where(samples.ended.to(device), math.nan)

        lr = learning_rate(step, steps, args)
        for group in optimizer.param_groups:
            group["lr"] = lr

        old_logps = None  # log π of the policy that sampled: the first update's forward gives it
        for _ in range(args.updates_per_rollout):
            # This calls loss.backward().
            logps, of_update = run_batch(policy, samples, used_rewards, ref_logps, old_logps, args)
            if old_logps is None:
                old_logps = logps

            grad_norm = torch.nn.utils.clip_grad_norm_(weights, args.max_grad_norm or math.inf)
            of_update["grad_norm"] = full_tensor(grad_norm).item()
            if not used_rewards.isnan().all():  # else Adam's momentum would go on
                optimizer.step()
            optimizer.zero_grad()
            weight_norm = full_tensor(torch.nn.utils.get_total_norm(weights)).item()
            if not math.isfinite(of_update["loss"] + of_update["grad_norm"] + weight_norm):
                raise BadInput(f"step {step}: loss, gradient or weights are not finite: lower --lr")

        old_logps, ref_logps = old_logps.cpu(), ref_logps.cpu()
        values = {"step": step} | metrics(samples, rewards, old_logps, ref_logps, args) | means | of_update
        is_equal = all_rewards_equal(rewards)  # (B,)
        values["frac_reward_zero_std"] = is_equal.float().mean().item()
        difference = (old_logps - samples.logps).abs()
        values["sampling/sampling_logp_difference/mean"] = (difference.sum() / samples.mask.sum()).item()
        values["sampling/sampling_logp_difference/max"] = difference.max().item()

        if step == 1:
            check_first_step(samples, old_logps, ref_logps, args)
            if is_equal.all():
                progress.write("The rewards of each prompt are equal: nothing is learned")
            if not samples.ended.any():
                progress.write("No sample ends: raise --max_new_tokens or fix the template")

        values["learning_rate"] = lr
        values["seconds"] = time.monotonic() - began
        values["tokens_per_second"] = count_tokens(samples.groups) / values["seconds"]
        values["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9  # peak, 0 on a CPU

        if step == steps or (args.eval_every and step % args.eval_every == 0):
            values |= evaluate(policy, tokenizer, eval_rows, reference, functions, step, out, args)
        append(out / "metrics.jsonl", [values], args.wandb)

        if args.save_every and (step == steps or step % args.save_every == 0):
            save_checkpoint(out, step, policy, optimizer)
        progress.set_postfix({name: values[name] for name in ("reward", "tokens_per_second")}, refresh=False)

    if steps:
        save_model(policy, tokenizer, out, args)
    barrier()  # the first process has written all lines
    return report(out)


def check_first_step(samples: Samples, logps: torch.Tensor, ref_logps: torch.Tensor, args: Args):
    """Before the first update, log π of the samples is the sampler's and the reference's, up to rounding."""
    lengths = samples.mask.sum(dim=2)  # (B, k)
    difference = (logps - samples.logps).abs().sum() / lengths.sum()
    limit = 5e-2 if args.dtype == "bfloat16" else 1e-3
    if not difference * min(1, args.temperature) < limit:  # a low temperature magnifies rounding
        raise BadInput(f"{args.model}: a key-value cache changes its log-probs")

    if args.beta and args.ref_model == args.model:
        kls = (logps - ref_logps).sum(dim=2) / lengths
        check_agreement(kls.abs().mean().item(), args.dtype)


def rows_in_order(rows: list[Row], n: int, seed: int) -> list[Row]:
    """The first n rows in the order of training. Each epoch is a new permutation of all rows."""
    ordered = []
    for epoch in range(math.ceil(n / len(rows))):
        permutation = np.random.default_rng([seed, epoch, *b"order"]).permutation(len(rows))
        ordered += [rows[i] for i in permutation]
    return ordered[:n]


def learning_rate(step: int, steps: int, args: Args) -> float:
    """Linear warmup to --lr, then constant, or falling to 0 at steps + 1."""
    warmup_steps = round(args.warmup * steps if args.warmup < 1 else args.warmup)
    if step <= warmup_steps:
        return args.lr * (step / warmup_steps)
    remaining = (steps - step + 1) / (steps - warmup_steps)
    factors = {"constant": 1.0, "linear": remaining, "cosine": (1 - math.cos(math.pi * remaining)) / 2}
    return args.lr * factors[args.schedule]


# ---- Flags -----------------------------------------------------------

def resolve(args: Args) -> Args:
    """A copy of the flags, with those filled in that depend on others. Refuses flags that no run can have."""
    args = replace(args)
    if not (args.model or args.data) and (HERE / "demo").exists():
        torch.set_num_threads(1)  # the demo's tiny model gains nothing from more
        unset = {flag: value for flag, value in DEMO.items() if vars(args)[flag] in (None, ())}
        args = replace(args, **unset)
    if not (args.model and args.data):
        raise BadInput("give both --model and --data, or neither for the demo")

    # tyro reads only True and False as truth values. Any other word is a string, which counts as true.
    truths = {"true": True, "false": False}
    options = args.chat_template_kwargs.items()
    args.chat_template_kwargs = {name: truths.get(value, value) for name, value in options}

    # Absolute paths: a user's function may change the working directory.
    args.model, args.ref_model = find_path(args.model), find_path(args.ref_model or args.model)
    args.data, args.eval_data = find_path(args.data), find_path(args.eval_data)
    args.reward, args.reward_model = tuple(map(absolute, args.reward)), find_path(args.reward_model)
    out, n = args.out or "out/rloo", 1
    while args.out is None and Path(out, "model").exists():
        n += 1
        out = f"out/rloo-{n}"
    args.out = absolute(out)
    if Path(args.out, "model").exists():
        raise BadInput(f"{args.out} holds a finished run: name another --out")

    is_adapter = find_path(base_of(args.model)) != args.model
    if args.lora_r and is_adapter:
        raise BadInput("--lora_r makes a new adapter, but --model is one")
    if (args.lora_alpha or args.lora_target) and not args.lora_r:
        raise BadInput("--lora_alpha and --lora_target need --lora_r")
    if args.dtype == "auto":
        args.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    if args.lr is None:
        args.lr = 1e-5 if args.lora_r or is_adapter else 1e-6

    n_rewards = len(args.reward) + bool(args.reward_model)
    for spec in args.reward:
        if not Path(spec.rpartition(":")[0]).is_file():
            raise BadInput(f"--reward {spec}: expected FILE.py:FUNCTION, and a file that exists")
    if n_rewards == 0 or len(args.reward_weights) not in (0, n_rewards):
        raise BadInput("give --reward or --reward_model, and one of --reward_weights for each or none")
    if args.ref == "swap" and args.ref_model != args.model:
        raise BadInput("--ref swap holds the policy's own start: with --ref_model choose live")

    # Values that would turn learning off, or around.
    if args.k < 2 or min(args.updates_per_rollout, args.batch_size, args.max_new_tokens) < 1:
        raise BadInput("--k must be at least 2; --updates_per_rollout, --batch_size, --max_new_tokens 1")
    if args.lora_r == 0:
        raise BadInput("--lora_r 0: at least 1; leave it out to train all weights")
    positive = (args.lr, args.temperature, args.epochs, args.clip_eps)
    if not all(value > 0 for value in positive):  # `not >` also catches NaN
        raise BadInput("--lr, --temperature, --epochs and --clip_eps must be above 0")
    if args.steps < -1 or not (args.beta >= 0 and args.max_grad_norm >= 0 and args.warmup >= 0):
        raise BadInput("--steps is -1 or more; --beta, --max_grad_norm and --warmup are 0 or more")

    context = context_length(AutoConfig.from_pretrained(base_of(args.model)))
    args.max_length = min(args.max_length, context - args.max_new_tokens)
    if args.max_length < 1:
        raise BadInput(f"--max_new_tokens {args.max_new_tokens}: the model has {context} positions")
    return args


def absolute(path: str | None) -> str | None:
    return path and str(Path(path).expanduser().absolute())


def find_path(name: str | None) -> str | None:
    """An absolute path, or a name of the hub. A path to nothing is refused before the hub is asked."""
    if name and Path(name).expanduser().exists():
        return absolute(name)
    if name and (name.startswith(("/", ".", "~")) or Path(name).suffix in (*ENDINGS, ".gz", ".txt")):
        raise BadInput(f"{name} does not exist")
    return name


# ---- Sampling --------------------------------------------------------

@torch.no_grad()
def rollout(policy, tokenizer, prompts: list[tuple], k: int, step: int, args: Args) -> Samples:
    """y_1 .. y_k ~ π(·|x) of (1). Token t of sample i of prompt b is drawn with the uniform number
    u[b, i, t], which depends on seed and step: batching changes no sample."""
    core = unwrap_model(policy)
    shape = (len(prompts), k, args.max_new_tokens)
    u = np.random.default_rng([args.seed, step, *b"rollout"]).random(shape)
    own_stops = np.atleast_1d(core.generation_config.eos_token_id).tolist()  # of a number, a list or None
    stops = to_device(sorted({tokenizer.eos_token_id, *own_stops} - {None}), core.device)

    # The processes divide the prompts.
    copies = copies_of_prompts(core, prompts, k, args)
    if has_shared_prompts(core):
        columns = [copies * len(prompt) + k * args.max_new_tokens for prompt in prompts]  # of the cache
        batches = divide_batches(columns, args.rollout_tokens, is_padded=True)
    else:  # padding could change samples, so each prompt is a batch of its own
        batches = [[i] for i in range(process_rank(), len(prompts), process_count())]

    tokens = torch.zeros(shape, dtype=torch.long, device=core.device)
    logps, entropies = torch.zeros(2, *shape, device=core.device)
    with unsharded(policy):
        for batch in filter(None, batches):  # a process may have an empty one
            drawn = sample_batch(
                core, [prompts[i] for i in batch], to_device(u[batch], core.device), stops, copies, args)
            tokens[batch], logps[batch], entropies[batch] = drawn
    # Each process has filled in its own prompts: the sums have all of them.
    tokens, logps, entropies = (all_reduce(tensor).cpu() for tensor in (tokens, logps, entropies))

    mask = tokens >= 0
    T = mask.sum(dim=2).max()
    completions = [[tuple(ids[ids >= 0].tolist()) for ids in group] for group in tokens]
    return Samples(
        groups=list(zip(prompts, completions)),
        texts=[tokenizer.batch_decode(group, skip_special_tokens=True) for group in completions],
        mask=mask[..., :T],
        ended=torch.isin(tokens, stops.cpu()).any(dim=2),
        logps=logps.where(mask, 0.0)[..., :T],
        entropy=entropies.where(mask, 0.0).sum(dim=2),
    )


def copies_of_prompts(core, prompts: list[tuple], k: int, args: Args) -> int:
    """How often the key-value cache holds each prompt: once for all of its samples, or once for each. With
    one, a sample reads the tokens of the others, too: slower where they may be longer than the prompt."""
    longest = max(len(prompt) for prompt in prompts)
    if args.max_new_tokens > longest or not has_shared_prompts(core):
        return k
    has_windows = any(DynamicCache(config=core.config).is_sliding)  # they keep the last columns of a row
    return k if has_windows else 1


def sample_batch(core, prompts: list[tuple], u: torch.Tensor, stops: torch.Tensor, copies: int, args: Args):
    """Samples of some prompts, (B, k, T) each: tokens, -1 after the end, their log-probs and entropies.

    A row of the cache has a prompt once, and behind it the tokens of its S samples: each step adds a column
    for each of them, which it alone sees. S is k, or 1 where each sample has a copy of the prompt."""
    B, k, T = u.shape
    device = core.device

    # Each prompt is encoded once. Shorter ones are padded on the left.
    is_shared = has_shared_prompts(core)
    if not is_shared:  # not every cache can be copied: the one prompt is encoded for each of its samples
        prompts = [prompts[0] for _ in range(k)]
    ids = [torch.tensor(prompt) for prompt in prompts]
    ids = to_device(pad_sequence(ids, batch_first=True, padding_value=-1, padding_side="left"), device)
    mask = ids >= 0  # (B, longest)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    inputs = dict(attention_mask=mask.long(), position_ids=positions, use_cache=True)
    out = core(ids.clamp(min=0), **inputs, logits_to_keep=1)
    cache_name = next(name for name in out if isinstance(out[name], Cache))  # "past_key_values" or "cache"
    kv_cache = out[cache_name]

    logits = out.logits  # (rows, 1, V)
    if is_shared and copies > 1:
        row_of_copy = torch.arange(B, device=device).repeat_interleave(copies)
        kv_cache.reorder_cache(row_of_copy)
        logits, mask = logits[row_of_copy], mask[row_of_copy]

    # For each row of the cache: its samples, whether they have no end yet, and which columns they see.
    samples = torch.arange(B * k, device=device).view(len(mask), -1)  # (rows, S)
    is_open = torch.ones_like(samples, dtype=torch.bool)
    sees = mask[:, None].expand(*samples.shape, -1)  # (rows, S, columns)
    lengths = mask.sum(dim=1, keepdim=True)  # of the prompts
    logits = logits.expand(*samples.shape, -1)

    u = u.view(B * k, T)
    tokens = torch.full((B * k, T), -1, device=device)
    logps, entropies = torch.zeros(2, B * k, T, device=device)

    for t in progress_bar(range(T), desc="sample", unit="tok", delay=1):
        token, logps[samples, t], entropies[samples, t] = draw(logits, u[samples, t], args.temperature)
        tokens[samples, t] = token.where(is_open, -1)
        is_open &= ~torch.isin(token, stops)
        n_open = is_open.sum(dim=1).tolist()  # waits for the GPU
        if t == T - 1 or not any(n_open):
            break

        # A row leaves the cache when all its samples have ended. The others keep equally many samples: first
        # the open ones, and then as many ended ones as that takes.
        stay = to_device([row for row, n in enumerate(n_open) if n > 0 or not is_shared], device)
        if len(stay) < len(n_open):
            kv_cache.reorder_cache(stay)
        order = is_open[stay].int().argsort(dim=1, descending=True, stable=True)
        kept = stay[:, None], order[:, :max(n_open)]
        samples, is_open, token, sees = samples[kept], is_open[kept], token[kept], sees[kept]
        lengths = lengths[stay]

        # A sample sees what it saw before, and its own new column.
        own = torch.eye(token.shape[1], dtype=torch.bool, device=device)
        sees = torch.cat([sees, own.expand(len(stay), -1, -1)], dim=2)
        mask = sees[:, None]  # (rows, 1, samples, columns)
        if copies == k:
            mask = sees[:, 0].long()  # (rows, columns): the model adds its windows
        if not is_shared:
            mask = None  # nothing is padded, and a recurrent model would misread a mask

        positions = (lengths + t).expand(token.shape)
        inputs = dict(attention_mask=mask, position_ids=positions, use_cache=True)
        logits = core(token, **inputs, **{cache_name: kv_cache}).logits
    return tokens.view(B, k, T), logps.view(B, k, T), entropies.view(B, k, T)


def draw(logits: torch.Tensor, u: torch.Tensor, temperature=1.0) -> tuple[torch.Tensor, ...]:
    """Logits (.., V), uniform numbers (..) -> tokens, their log-probs, and entropies, (..) each."""
    logps = torch.log_softmax(logits.float() / temperature, dim=-1)
    probs = logps.exp()
    entropies = -(probs * logps.clamp(min=-200)).sum(dim=-1)  # 0 · −inf is NaN

    # It is the first token at which the sum of the probabilities exceeds u.
    sums = probs.double().cumsum(dim=-1)  # in float32 the tail of 150,000 tokens would be lost
    tokens = torch.searchsorted(sums, u[..., None] * sums[..., -1:], right=True)  # right: never probability 0
    return tokens[..., 0], logps.gather(-1, tokens)[..., 0], entropies


# ---- Rewards ---------------------------------------------------------

def load_rewards(device: str, args: Args) -> list[tuple]:
    """[(name, function, weight), ..]"""
    load = cache(load_module)  # a file is loaded once, also if several rewards are in it
    names, functions = [], []
    for spec in args.reward:
        file, _, name = spec.rpartition(":")
        names.append(spec if name in names else name)  # each has a metric of its own
        functions.append(getattr(load(file), name))

    if args.reward_model:
        names.append(Path(args.reward_model).name)
        functions.append(load_reward_model(args.reward_model, device, args))
    return list(zip(names, functions, args.reward_weights or [1.0] * len(names)))


def load_module(file: str):
    """A user's file, as it is now, as a module. By the module's name a process pool finds its functions."""
    path = os.path.abspath(file)
    sys.path.insert(0, os.path.dirname(path))  # for its own imports, and for those of the pool
    name = Path(path).stem
    while name in sys.modules and getattr(sys.modules[name], "__file__", None) != path:
        name += "_"  # another module has this name

    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
    sys.modules[name] = module
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))  # a cache of bytecode may be old
    return module


def compute_rewards(samples: Samples, rows: list[Row], functions: list[tuple]) -> tuple[torch.Tensor, dict]:
    """The weighted sum of the rewards, (B, k), NaN where all are None; and the mean of each reward."""
    # What a function receives: lists with an item for each sample. The processes divide the rows.
    inputs = defaultdict(list)
    for i in np.array_split(range(len(rows)), process_count())[process_rank()]:
        prompt = rows[i].columns["prompt"]
        for text, ids, ended in zip(samples.texts[i], samples.groups[i][1], samples.ended[i].tolist()):
            completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            sample = dict(prompts=prompt, completions=completion, completion_ids=list(ids), ended=ended)
            for name, value in deepcopy(rows[i].columns | sample).items():  # a function may change its inputs
                inputs[name].append(value)
    inputs.pop("prompt", None)

    total = torch.full(samples.ended.shape, math.nan)  # (B, k)
    means = {}
    n = len(inputs["ended"])
    for name, function, weight in functions:
        values = function(**inputs) if n else []
        if inspect.iscoroutine(values):
            values = asyncio.run_coroutine_threadsafe(values, event_loop()).result()
        rewards = [] if isinstance(values, (dict, set, str)) else list(values)
        if len(rewards) != n:
            raise BadInput(f"{name} returned {str(values)[:99]}: expected {n} numbers or None")

        rewards = [math.nan if reward is None else float(reward) for reward in rewards]
        rewards = torch.tensor(list(chain(*all_gather(rewards)))).view(total.shape)
        if rewards.isinf().any():
            raise BadInput(f"{name} returned an infinite reward")
        total = torch.where(rewards.isnan(), total, total.nan_to_num(nan=0.0) + weight * rewards)
        means[f"rewards/{name}"] = rewards.nanmean().item()
    return total, means


@cache
def event_loop():
    """One loop for all calls, so that a client in a reward function can be used again. It runs in a thread of
    its own, because a notebook runs one in this thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def load_reward_model(name: str, device: str, args: Args):
    """A classifier as a reward function. Its weights wait on the CPU; a call copies them to the GPU."""
    tokenizer = load_tokenizer(name)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        name, dtype="auto", output_loading_info=True)
    if info["missing_keys"] or model.config.num_labels != 1:  # missing weights would stay random
        raise BadInput(f"--reward_model {name} is no classifier with one output, or lacks weights")
    if device == "cuda":
        model._apply(torch.Tensor.pin_memory)  # pinned memory is copied faster
    pad = model.config.get_text_config().pad_token_id  # by it the model finds the end of a row

    @torch.no_grad()
    def score(prompts, completions, ended, **columns) -> list[float]:
        rows = []
        for i, (prompt, completion, has_ended) in enumerate(zip(prompts, completions, ended)):
            if isinstance(prompt, str):
                eos = tokenizer.eos_token or ""
                rows.append(torch.tensor(tokenizer(prompt + completion + eos * has_ended).input_ids))
                continue

            row = {name: values[i] for name, values in columns.items()}
            apply_template = template_of(row, tokenizer, args)
            text = completion[0]["content"]
            is_begun = prompt[-1]["role"] == "assistant"  # an answer that the sample continues
            if not has_ended:  # the end of a turn is missing
                options = dict(add_generation_prompt=not is_begun, continue_final_message=is_begun)
                text = apply_template(prompt, **options) + text
            elif is_begun:
                message = prompt[-1] | {"content": prompt[-1]["content"] + text}
                text = apply_template(prompt[:-1] + [message])
            else:
                text = apply_template(prompt + completion)
            rows.append(torch.tensor(tokenizer(text, add_special_tokens=False).input_ids))

        # A sample that is too long for this model gets no reward, NaN.
        scores = torch.full((len(rows),), math.nan)
        fitting = [i for i, ids in enumerate(rows) if len(ids) <= context_length(model.config)]
        parts = [[n] for n in range(len(fitting))]
        if pad is not None:
            parts = pack([len(rows[i]) for i in fitting], args.tokens_per_forward, is_padded=True)

        weights = chain(model.named_parameters(), model.named_buffers())
        weights = {name: weight.to(device) for name, weight in weights}
        for part in parts:
            batch = [fitting[n] for n in part]
            ids = pad_sequence([rows[i] for i in batch], batch_first=True, padding_value=-1).to(device)
            inputs = dict(input_ids=ids.where(ids >= 0, pad or 0), attention_mask=(ids >= 0).long())
            logits = torch.func.functional_call(model, weights, kwargs=inputs).logits
            scores[batch] = logits[:, 0].float().cpu()
        return scores.tolist()

    return score


# ---- Samples and the report ------------------------------------------

def log_samples(out: Path, samples: Samples, rows: list[Row], rewards, step: int, held_out: bool):
    """Adds the samples to samples.jsonl."""
    lines = []
    for row, texts, values in zip(rows, samples.texts, rewards.tolist()):
        of_prompt = {"step": step, "held_out": held_out, "prompt": row.columns["prompt"]}
        for text, value in zip(texts, values):
            reward = None if math.isnan(value) else value
            lines.append(of_prompt | {"completion": text, "reward": reward})
    append(out / "samples.jsonl", lines)


def report(out: Path) -> list[dict]:
    """Prints three answers and the metrics of held-out prompts, before training and now. Returns metrics."""
    history = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    samples = map(json.loads, (out / "samples.jsonl").open())
    held_out = [sample for sample in samples if sample["held_out"]]
    now = [sample for sample in held_out if sample["step"] == history[-1]["step"]]
    for old, new in zip(held_out[:3], now):  # their prompts are the same
        prompt = new["prompt"] if isinstance(new["prompt"], str) else new["prompt"][-1]["content"]
        print("prompt ", repr(prompt if len(prompt) <= 80 else "…" + prompt[-79:]))  # its end is answered
        print("before ", repr(old["completion"][:100]))
        print("now    ", repr(new["completion"][:100]))

    print(f"{'held out':31} before      now")
    for name in list(history[0])[1:]:  # all but the step
        values = [history[0][name], history[-1].get(name)]
        cells = [f"{value:8.3f}" if isinstance(value, int | float) else str(value) for value in values]
        print(f"{name:30}", *cells)
    print(f"see {out}")
    return history


# ---- Data ------------------------------------------------------------

def load_data(tokenizer, args: Args) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and held-out rows: those of --eval_data, or all rows of some prompts."""
    rows = load_rows(args.data, tokenizer, args)
    if args.eval_data:
        eval_rows = load_rows(args.eval_data, tokenizer, args)
    else:
        prompts = sorted({row.prompt for row in rows})
        n = min(args.eval_size, len(prompts) // 10)
        held_out = set(random.Random(0).sample(prompts, n))  # --seed changes nothing here
        eval_rows = [row for row in rows if row.prompt in held_out]
        rows = [row for row in rows if row.prompt not in held_out]

    prompts = {row.prompt for row in rows}
    n_known = sum(row.prompt in prompts for row in eval_rows)
    print(f"{len(rows)} rows to train on, {len(eval_rows)} held out ({n_known} with a prompt of the former)")

    config = AutoConfig.from_pretrained(base_of(args.model)).get_text_config()
    largest = max(max(row.prompt) for row in rows + eval_rows)
    if largest >= config.vocab_size:
        raise BadInput(f"{args.model} has no embedding for token {largest} of its tokenizer")
    return rows, eval_rows


def load_rows(source: str, tokenizer, args: Args) -> list[Row]:
    """The rows of a file or of hub data. Rows that cannot be trained on are dropped and counted."""
    rows = []
    counts = Counter(rows=0)
    for columns, (prompt,) in tokenize_rows(source, tokenizer, args, counts):
        if len(prompt) > args.max_length:
            counts[f"dropped: longer than {args.max_length} tokens"] += 1
        else:
            rows.append(Row(as_tuple(prompt), columns))

    print(f"{source}: {len(rows)} of", "; ".join(f"{count} {note}" for note, count in counts.items()))
    if len(rows) < max(1, counts["rows"] / 2):
        raise BadInput(f"{source}: too few rows")
    names = dict.fromkeys(chain(*(row.columns for row in rows)))
    return [Row(row.prompt, names | row.columns) for row in rows]  # what a row lacks is None


def tokenize_rows(source: str, tokenizer, args: Args, counts: Counter):
    """Yields the columns of each row, and the token ids of its texts, here the prompt alone."""
    plain = tokenizer("a", add_special_tokens=False).input_ids
    full = tokenizer("a").input_ids
    bos = full[:full.index(plain[0])] if plain else []  # what the tokenizer puts before a text

    lines = iter(progress_bar(read_rows(source), desc="tokenize"))
    while batch := list(islice(lines, 350)):
        rendered = []
        for line in batch:
            counts["rows"] += 1
            try:
                columns = json.loads(line) if isinstance(line, str) else line
                rendered += render(columns, tokenizer, args, counts)
            except Exception as error:  # of JSON, of these columns, or of the chat template
                raise BadInput(f"{source}, row {counts['rows']}: {error}") from error

        # One call for about 1,000 texts, which the tokenizer divides over the cores.
        texts = chain(*(texts for _, texts in rendered))
        options = dict(add_special_tokens=False, return_attention_mask=False, verbose=False)
        all_ids = iter(tokenizer([*texts, ""], **options).input_ids)
        for columns, texts in rendered:
            sequences = [next(all_ids) for _ in texts]
            if isinstance(columns["prompt"], str):  # a chat template writes BOS
                sequences = [ids if ids[:len(bos)] == bos else bos + ids for ids in sequences]
            yield columns, sequences


def read_rows(source: str):
    """The rows of a file, or of hub data NAME, NAME:SPLIT or NAME:CONFIG:SPLIT. JSON Lines stay lines."""
    ending = Path(source).suffix
    if Path(source).is_file() and ending not in ENDINGS:
        raise BadInput(f"{source}: expected a file that ends with {', '.join(ENDINGS)}")
    if ending in (".jsonl", ".json"):
        with open(source, encoding="utf-8-sig") as file:
            lines = [line for line in file if line.strip()]
        is_list = bool(lines) and lines[0].startswith("[")  # one JSON list, on any number of lines
        return json.loads("".join(lines)) if is_list else lines

    import datasets
    if ending in ENDINGS:
        options = {"keep_default_na": False} if ending == ".csv" else {}  # else an answer "None" is a null
        return datasets.load_dataset(ending[1:], data_files=source, split="train", **options)
    names, bracket, part = source.partition("[")  # a split may be a slice, train[:1000]
    name, *config = names.split(":")
    split = config.pop() if config else "train"
    return datasets.load_dataset(name, *config, split=split + bracket + part)


def render(columns: dict, tokenizer, args: Args, counts: Counter) -> list[tuple]:
    """[(columns, [text])] of a row. [] if the prompt is empty."""
    prompt = read_text(columns, "prompt")
    if not "".join(texts_in(prompt)).strip():
        counts["dropped: an empty prompt"] += 1
        return []
    columns = columns | {"prompt": prompt}

    if isinstance(prompt, str):
        if tokenizer.chat_template:
            counts["strings, without the chat template; see demo/prepare_chat.py"] += 1
        return [(columns, [prompt])]

    is_begun = prompt[-1]["role"] == "assistant"  # an answer that the samples continue
    text = template_of(columns, tokenizer, args)(
        prompt, add_generation_prompt=not is_begun, continue_final_message=is_begun)

    # A template may drop the thoughts of earlier answers, but no other text.
    kept = [message for message in prompt[:-1] if message["role"] != "assistant"]
    if drops_text(text, kept + prompt[-1:]):
        counts["with text that the template drops"] += 1
    return [(columns, [text])]


def template_of(columns: dict, tokenizer, args: Args):
    """The chat template as a function of messages, with the tools and the options of a row."""
    tools = without_nulls(columns.get("tools")) or []
    if isinstance(tools, str):
        tools = json.loads(tools)
    tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]  # some files hold strings
    options = args.chat_template_kwargs | without_nulls(columns.get("chat_template_kwargs") or {})
    return partial(tokenizer.apply_chat_template, tokenize=False, tools=tools or None, **options)


def drops_text(rendered: str, messages: list[dict]) -> bool:
    """Whether a text of these messages is missing in what the template has written."""
    noise = re.compile(r"\\[nrt]|\W")  # what a template changes when it strips a text or writes it as JSON
    written = noise.sub("", rendered)
    return any(noise.sub("", text) not in written for text in texts_in(messages))


def read_text(columns: dict, name: str) -> str | list[dict]:
    """A prompt or an answer: a string, or messages, whose parts of text are joined. Null is empty."""
    if name not in columns:
        raise ValueError(f"has no column {name!r}: it has {', '.join(columns)}")
    text = without_nulls(columns[name]) or ""  # a copy
    if isinstance(text, str):
        return text

    if not isinstance(text, list) or any("role" not in message for message in text):
        raise ValueError(f"{name} is {text!r:.99}: expected a string, or a list of messages with a role")
    for message in text:
        if message.get("tool_calls") == []:  # some templates take an empty list for calls
            del message["tool_calls"]
        parts = message.get("content")
        if isinstance(parts, list):
            if any(part.get("type", "text") != "text" for part in parts):
                raise ValueError(f"{name} has {parts!r:.99}: expected only parts of type text")
            message["content"] = "".join(part["text"] for part in parts)
    return text


def texts_in(value) -> list[str]:
    """The texts of a string or of messages, at any depth."""
    if isinstance(value, dict):
        value = [item for name, item in value.items() if name not in ("role", "type", "id", "tool_call_id")]
    if isinstance(value, list):
        return list(chain(*map(texts_in, value)))
    return [value] if isinstance(value, str) else []


def without_nulls(value):
    """A JSON value without keys that are null, at any depth: files of columns fill them in."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if not isinstance(value, str | int | float | None):  # a template would write "<datetime>"
        raise ValueError(f"{value!r:.99} is no JSON value: give it as a string, for example in a .jsonl file")
    return value


def as_tuple(ids: list[int]) -> tuple[int, ...]:
    """Equal ids become one object: the data then takes 8 bytes per token instead of 36."""
    return tuple([TOKENS.setdefault(token, token) for token in ids])


# ---- Models ----------------------------------------------------------

def base_of(name: str) -> str:
    """The base of an adapter, or the checkpoint itself."""
    config = transformers.utils.find_adapter_config_file(name)
    return json.loads(Path(config).read_text())["base_model_name_or_path"] if config else name


def load_tokenizer(name: str, ref_name: str | None = None):
    """The tokenizer of a checkpoint, or of an adapter's base. A reference with another one is refused."""
    is_missing = Path(name).is_dir() and not any(Path(name).glob("tokenizer*"))
    # mistral-common, if it is installed, would give Mistral's models a tokenizer without a chat template.
    tokenizer = AutoTokenizer.from_pretrained(base_of(name) if is_missing else name, mistral_format=False)
    if ref_name and load_tokenizer(ref_name).get_vocab() != tokenizer.get_vocab():
        raise BadInput(f"{ref_name} has another tokenizer than {name}")
    return tokenizer


def load_model(name: str, device: str, args: Args, trains: bool = False):
    """The policy if it `trains`, else a frozen reference in the dtype of forward passes."""
    base = base_of(name)
    has_adapter = base != name or (trains and args.lora_r)
    trains_all = trains and not has_adapter
    dtype = "auto" if trains_all else args.dtype  # auto: as it is stored
    model, info = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, output_loading_info=True)
    if info["missing_keys"]:  # they would stay random
        raise BadInput(f"{base} has no weights for {min(info['missing_keys'])}")

    model.requires_grad_(trains_all)
    if has_adapter:
        model = add_adapter(model, name, trains, args)
    if process_count() > 1 or (trains and args.dtype == "bfloat16"):
        apply_fsdp(model, device, args.dtype)
    model.eval().to(device)  # dropout would be noise in every log-ratio
    if trains_all:
        model.float()  # after apply_fsdp: no process holds the whole model in float32
    enable_shared_prompts(model)

    if trains and args.gradient_checkpointing:
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):  # transformers' own way needs training mode
                layer.forward = partial(
                    checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return model


def add_adapter(model, name: str, trains: bool, args: Args):
    """The model with the LoRA adapter of a folder or hub name, or with a new one."""
    import peft
    if name == base_of(name):
        config = peft.LoraConfig(
            r=args.lora_r, lora_alpha=args.lora_alpha or 2 * args.lora_r,
            target_modules=list(args.lora_target) or "all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
        print("LoRA in", *sorted({name.split(".")[-1] for name in model.targeted_module_names}))
        return model

    config = peft.PeftConfig.from_pretrained(name)
    if config.peft_type != "LORA" or config.alora_invocation_tokens:
        raise BadInput(f"{name} is no LoRA adapter: merge it")
    for part, module in model.named_modules():
        if trains and part.endswith(tuple(config.modules_to_save or ())):
            module.float()  # peft loads the trained weights into a copy of it, which must be float32
    return peft.PeftModel.from_pretrained(
        model, name, is_trainable=trains, autocast_adapter_dtype=trains)  # float32 weights train


# ---- Files of a run --------------------------------------------------

def describe_run(train_rows: list[Row], eval_rows: list[Row], args: Args) -> dict:
    """The script, flags, rows and weights of a run. A resumed run may differ only in MAY_CHANGE."""
    digest = hashlib.sha256()
    for row in train_rows + [None] + eval_rows:  # None: where the held-out rows begin
        digest.update(repr(row).encode())

    digest_of = cache(checkpoint_digest)  # reads a model once that is policy and reference
    run = vars(args) | {"script": Path(__file__).name, "rows": digest.hexdigest()}
    for flag in ("model", "ref_model", "reward_model"):
        run[f"{flag}'s weights"] = run[flag] and digest_of(run[flag])
    run = json.loads(json.dumps(run))  # tuples become lists
    if any(other != run for other in all_gather(run)):
        raise BadInput("the processes have other flags, rows or weights: give all of them the same files")
    return run


def check_folder(out: Path, run: dict):
    """Refuses a folder that holds another run, or logs of another program."""
    file = out / "args.json"
    if file.exists():
        saved = json.loads(file.read_text())
        differing = [name for name in run if saved.get(name) != run[name] and name not in MAY_CHANGE]
        if differing:
            raise BadInput(f"{out} holds a run with other {', '.join(differing)}: name another --out")
    elif any((out / log).exists() for log in LOGS):
        raise BadInput(f"{out} has logs, but not of a run of this script: name another --out")


def training_state(policy, optimizer) -> dict:
    """What a step changes: weights and their optimizer state, in place. A number, such as the step that some
    optimizers count, becomes a tensor."""
    state = {}
    for name, weight in policy.named_parameters():  # a tied weight once
        if weight.requires_grad:
            state[name] = weight
            for key, value in optimizer.state[weight].items():
                state[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    return state


def checkpoints(out: Path) -> set[int]:
    """The steps of complete checkpoints, out/resume-STEP. Other names are the user's."""
    steps = [file.parent.name[7:] for file in out.glob("resume-*/run.json")]
    return {int(step) for step in steps if step.isdigit()}


def save_checkpoint(out: Path, step: int, policy, optimizer):
    """Writes out/resume-STEP, run.json last: without it a folder is no checkpoint. Removes older ones."""
    folder = out / f"resume-{step}"
    shutil.rmtree(folder, ignore_errors=True)  # of a killed save
    barrier()
    state = training_state(policy, optimizer)
    files = {name: 1 + n // 64 for n, name in enumerate(state)}  # the writer holds a whole file in memory
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(folder, files, save_distributed=True))

    if is_first_process():
        write_whole(folder / "run.json", [b"{}"])  # marks the folder as complete
        for other in checkpoints(out) - {step}:
            shutil.rmtree(out / f"resume-{other}")


def restore_checkpoint(out: Path, run: dict, policy, optimizer) -> int:
    """Restores the newest checkpoint, and cuts the logs to its step. Returns it, or 0."""
    step = max(checkpoints(out), default=0)
    if step:
        get_optimizer_state_dict(policy, optimizer)  # creates the optimizer's state, for dcp.load to fill in
        reader = dcp.HuggingFaceStorageReader(out / f"resume-{step}")
        saved = reader.read_metadata().state_dict_metadata.keys()
        state = training_state(policy, optimizer)
        unsaved = {name for name in state if name.startswith("optimizer.")} - saved
        state = {name: value for name, value in state.items() if name not in unsaved}
        dcp.load(state, storage_reader=reader)

        for name, weight in policy.named_parameters():
            for key, value in list(optimizer.state.get(weight, {}).items()):
                place = f"optimizer.{name}.{key}"
                if place in unsaved:  # this weight had no gradient yet
                    del optimizer.state[weight][key]
                elif not torch.is_tensor(value):
                    optimizer.state[weight][key] = state[place].item()
        print(f"resumes after step {step}")

    if is_first_process():
        write_whole(out / "args.json", [json.dumps(run, indent=1).encode()])
        for log in LOGS:  # the lines of later steps will be written again
            lines = (out / log).read_bytes().splitlines(keepends=True) if step else []
            kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step]
            write_whole(out / log, kept)
        if run["wandb"]:
            import wandb
            wandb.init(name=out.name, dir=out, config=run, resume="auto")
    return step


def append(log: Path, lines: list[dict], to_wandb=False):
    """Adds lines to a log, on the disk before a checkpoint of their step is, and to Weights & Biases."""
    if not is_first_process():
        return
    with open(log, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    if to_wandb:
        import wandb
        for line in lines:
            wandb.log(line, step=line["step"])


def save_model(model, tokenizer, out: Path, args: Args):
    """Writes out/model, the model or adapter in the dtype of forward passes. Then the run is finished."""
    state = get_model_state_dict(model, options=StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=True))
    if not is_first_process():
        return

    core = unwrap_model(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    converted = {}  # by parameter, so that tied weights stay one tensor
    for name, weight in state.items():
        if weight.is_floating_point() and not names_in_float32(core).search(name):
            key = parameters.get(name, name)  # a buffer has no other name
            state[name] = converted.setdefault(key, weight.to(getattr(torch, args.dtype)))

    hidden = out / ".model"
    shutil.rmtree(hidden, ignore_errors=True)  # left by a killed save
    model.save_pretrained(hidden, state_dict=state)
    tokenizer.save_pretrained(hidden)
    if model is core:  # no adapter: the config still names the dtype of training
        core.config.dtype = args.dtype
        core.config.save_pretrained(hidden)

    os.sync()  # all of it is on the disk before the folder gets its name
    os.replace(hidden, out / "model")
    for step in checkpoints(out):
        shutil.rmtree(out / f"resume-{step}")


if __name__ == "__main__":
    if int(os.environ.get("RANK", 0)):  # under torchrun only the first process prints
        sys.stdout = open(os.devnull, "w")
    try:
        main(tyro.cli(Args, description=__doc__, use_underscores=True))
    except (BadInput, KeyboardInterrupt) as error:
        print("rloo.py:", error, file=sys.stderr)
        sys.exit(2)
    except torch.OutOfMemoryError as error:
        error.add_note("lower --tokens_per_forward or --rollout_tokens, or add --gradient_checkpointing")
        raise
