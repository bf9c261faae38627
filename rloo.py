"""RLOO: learn from a reward. The other samples of a prompt are the baseline.

Ahmadian et al. 2024, Back to Basics: Revisiting REINFORCE Style Optimization, arXiv:2402.14740:

    (1)   ∇J(θ) = E 1/k Σ_i [ R(y_i, x) − 1/(k−1) Σ_{j≠i} R(y_j, x) ] ∇ log π(y_i|x), y_i ~ π(·|x)
    (2)   R(y, x) = reward(y, x) − β log π(y|x)/π_ref(y|x)

    python rloo.py  # the demo: offline, 10 s
    python rloo.py --model Qwen/Qwen3-0.6B --data prompts/train.jsonl --reward rewards.py:helpful
    python rloo.py --steps 0 --model out/dpo/model --data prompts/test.jsonl --reward rewards.py:helpful

The last command only samples and scores, whatever has trained the model. A killed run resumes if the same
command is given again. docs/recipes.md has starting values for lr and β.

Data: JSON Lines with `prompt`, a string or chat messages, and any columns that the reward needs.
tools/prepare.py writes such files from other data:

    {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}

A reward is a function(prompts, completions, **columns). It returns a number for each completion, or None to
leave it out, also from the baseline. A completion is a string if the prompt is one, else a list with one
message. The columns are those of the file and two more: completion_ids, and ended, which is false for a
sample that was cut off. demo/reward_model.py is a reward to copy.

Shapes: B prompts per step, k samples each, T tokens in the longest. Rewards and advantages are (B, k).
Log-probs of tokens are (B, k, T), 0 after the end of a sample. A micro-batch has b prompts.

Metrics: loss, learning_rate, seconds, tokens_per_second, and
    kl, kl_per_answer                        log π − log π_ref of a token; summed over an answer
    reward, reward_std, rewards/NAME         of all samples, before KL; of one function
    frac_reward_none, frac_reward_zero_std   samples without a reward; prompts whose rewards are all equal
    entropy, samples/distinct                nats per token; different samples
    completions/mean_length                  tokens
    completions/clipped_ratio, clip_ratio    samples that were cut off; samples whose ratio is clipped
    sampling/sampling_logp_difference/mean, sampling/sampling_logp_difference/max
                                             |log π − log π of the sampler| per token
    grad_norm, memory_gb                     before clipping (of the last update, as loss); peak of the GPU
    eval_*, eval_*_stderr                    of samples of held-out prompts; the standard error of a mean

Not here: other formats (tools/prepare.py), a critic, another engine for sampling, images.
"""
import hashlib
import inspect
import json
import math
import os
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
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
from huggingface_hub import snapshot_download
from jinja2 import TemplateError  # comes with torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from refcache import (
    BadInput, Swap, all_gather, all_reduce, apply_fsdp, barrier, check_agreement, checkpoint_digest,
    completion_logprobs, context_length, count_tokens, divide_batches, enable_shared_prompts, full_tensor,
    has_shared_prompts, is_first_process, mask_of_samples, micro_batches, names_in_float32, process_count,
    process_group, process_rank, progress_bar, to_device, unsharded, unwrap_model, write_whole)

HERE = Path(__file__).parent
DEMO = dict(
    model=f"{HERE}/demo/model", data=f"{HERE}/demo/prompts.jsonl",
    eval_data=f"{HERE}/demo/prompts_test.jsonl", reward=(f"{HERE}/demo/score.py:sentiment",), lr=2e-4)
TOKENS = {}  # id -> id, see as_tuple
ALL, NONE = -1, -2  # owners of columns, see sample_batch
LOGS = ("metrics.jsonl", "samples.jsonl")
MAY_CHANGE = {  # flags that may differ when a run is resumed
    "out", "ref", "wandb", "tokens_per_forward", "rollout_tokens", "gradient_checkpointing", "save_every",
    "eval_every", "chat_template_kwargs"}
ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}  # of messages


@dataclass
class Args:
    model: str | None = None  # checkpoint folder or hub name; None: the demo
    data: str | None = None  # prompts, a .jsonl file of plain rows: see tools/prepare.py
    eval_data: str | None = None  # held-out prompts, such a file; None: no evaluation
    chat_template_kwargs: dict[str, bool | int | str] = field(default_factory=dict)  # enable_thinking False
    max_length: int = 1024  # tokens of a prompt; longer ones are dropped and counted
    out: str | None = None  # folder of the run; None: out/rloo, or out/rloo-2 if that is finished

    reward: tuple[str, ...] = ()  # FILE.py:FUNCTION; several are summed: rewards.py:right rewards.py:short
    reward_weights: tuple[float, ...] = ()  # one weight per function; empty: all are 1

    ref: Literal["swap", "live"] = "swap"  # reference: its weights wait on the CPU; live: on the GPU, faster
    ref_model: str | None = None  # the reference, with --ref live or --steps 0; None: the first policy

    lora_r: int | None = None  # train a LoRA adapter of this rank instead of all weights
    lora_alpha: float | None = None  # LoRA's scale is alpha / r; None: alpha = 2 r
    lora_target: tuple[str, ...] = ()  # names of the layers with an adapter: q_proj v_proj; empty: all linear

    k: int = 4  # samples per prompt; in evaluations during training 1
    beta: float = 0.05  # KL penalty per nat, part of the reward; 0: none
    updates_per_rollout: int = 1  # optimizer steps per rollout
    clip_eps: float = 0.2  # a ratio is clipped to 1 ± clip_eps; no effect with one update per rollout
    mask_truncated: bool = False  # leave out samples without EOS, also from the baseline
    temperature: float = 1.0  # divides the logits in sampling and in all log-probs
    max_new_tokens: int = 128  # tokens per sample

    epochs: float = 1.0  # passes over the data
    steps: int = -1  # rollouts; -1: as many as --epochs needs; 0: only sample --eval_data, or else --data
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
    # One number less in all rewards of a prompt changes no advantage of (1). Without this, equal rewards have
    # advantages of 1e-8, and Adam makes a whole step of them.
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
    """Yields for each micro-batch the indices of its prompts, (b,), and log π of the tokens of their samples,
    (b, k, T). b is 0 if only FSDP needs this forward (see micro_batches)."""
    T = samples.mask.shape[2]
    for indices, n_used in micro_batches(model, samples.groups, args.tokens_per_forward):
        groups = [samples.groups[i] for i in indices]
        logps = chain(*completion_logprobs(model, groups, temperature=args.temperature))
        padded = torch.stack([F.pad(logp, (0, T - len(logp))) for logp in logps])  # (b · k, T)
        yield to_device(indices, padded.device)[:n_used], padded.view(len(groups), -1, T)[:n_used]


@torch.no_grad()
def compute_logprobs(reference, samples: Samples, device: str, args: Args) -> torch.Tensor:
    """log π_ref of each token, (B, k, T); 0 without a reference."""
    all_logps = torch.zeros(samples.mask.shape, device=device)
    if reference:
        with reference as model:
            for indices, logps in micro_batch_logprobs(model, samples, args):
                all_logps[indices] = logps
    return all_reduce(all_logps)  # each process has filled in its own prompts: the sum has all of them


def run_batch(policy, samples: Samples, rewards, ref_logps, old_logps, args: Args) -> tuple:
    """Adds the gradient of the mean loss: rewards (B, k), log-probs (B, k, T). old_logps are those of the
    policy that sampled; None: it is this policy. Returns log π of each token, (B, k, T), and metrics."""
    all_logps = torch.zeros_like(ref_logps)
    totals = torch.zeros(2, device=ref_logps.device)  # of the loss, and of clipped ratios

    for indices, logps in micro_batch_logprobs(policy, samples, args):
        old = logps.detach() if old_logps is None else old_logps[indices]
        advantages = compute_advantages(rewards[indices], old, ref_logps[indices], args.beta)  # (b, k)
        losses, is_clipped = policy_loss(logps.sum(dim=2), old.sum(dim=2), advantages, args.clip_eps)

        scale = 1 / rewards.numel()
        loss = losses.sum() * scale
        loss.backward()
        totals += torch.stack([loss.detach(), is_clipped.sum() * scale])
        all_logps[indices] = logps.detach()

    # Each process has its own prompts: the sums have all of them.
    loss, clip_ratio = all_reduce(totals).tolist()
    return all_reduce(all_logps), {"loss": loss, "clip_ratio": clip_ratio}


def metrics(samples: Samples, rewards, function_rewards: dict, logps, ref_logps, args: Args) -> dict:
    """Metrics of samples. Rewards are (B, k), also those of each function; NaN are left out. Log-probs are
    (B, k, T)."""
    known = rewards[~rewards.isnan()]
    n_samples, n_tokens = rewards.numel(), samples.mask.sum()
    values = {
        "reward": known.mean().item(),  # NaN if no reward is known
        "reward_std": known.std(correction=min(1, len(known) - 1)).item(),
        "frac_reward_none": rewards.isnan().float().mean().item(),
        "samples/distinct": len(set(chain(*samples.texts))),
        "completions/mean_length": (n_tokens / n_samples).item(),
        "completions/clipped_ratio": 1 - samples.ended.float().mean().item(),
        "entropy": (samples.entropy.sum() / n_tokens).item(),
    }

    if args.beta:
        kl = (logps - ref_logps).sum()
        values["kl"] = (kl / n_tokens).item()
        values["kl_per_answer"] = (kl / n_samples).item()
    for name, its_rewards in function_rewards.items():
        values[f"rewards/{name}"] = its_rewards.nanmean().item()
    return values


def all_rewards_equal(rewards: torch.Tensor) -> torch.Tensor:
    """(B, k) -> (B,) bool: whether all rewards of a prompt are equal or NaN, so that it teaches nothing."""
    return ~leave_one_out(rewards).any(dim=1)


def standard_error(rewards: torch.Tensor) -> float:
    """That of the mean of rewards (B, k). Only prompts are independent. NaN if fewer than two are left."""
    prompt_means = rewards.nanmean(dim=1)
    prompt_means = prompt_means[~prompt_means.isnan()]
    return (prompt_means.std() / len(prompt_means) ** 0.5).item() if len(prompt_means) > 1 else math.nan


def evaluate(policy, tokenizer, rows: list[Row], reference, functions, step: int, out: Path, args: Args):
    """Metrics of samples of held-out prompts, which it writes to samples.jsonl. Prints some of them."""
    if not rows:
        return {}
    k = args.k if args.steps == 0 else 1
    prompts = [row.prompt for row in rows]
    samples = rollout(policy, tokenizer, prompts, k=k, step=0, args=args)  # each time the same random numbers
    rewards, function_rewards = compute_rewards(samples, rows, functions)
    if args.steps == 0:  # no step will check them
        logps = compute_logprobs(nullcontext(policy), samples, policy.device, args)
        check_sampler(samples, logps.cpu(), args)
    log_samples(out, samples, rows, rewards, step=step, held_out=True)

    ref_logps = compute_logprobs(reference, samples, policy.device, args).cpu()
    values = metrics(samples, rewards, function_rewards, samples.logps, ref_logps, args)
    values["reward_stderr"] = standard_error(rewards)
    for name, its_rewards in function_rewards.items():
        values[f"rewards/{name}_stderr"] = standard_error(its_rewards)

    shown = [f"Samples at step {step}, with their rewards:"]
    for row, texts, numbers in zip(rows[:3], samples.texts, rewards.tolist()):
        shown.append(f"  {tokenizer.decode(row.prompt)[-100:]!r}")  # its end is answered
        for text, reward in zip(texts[:4], numbers):
            shown.append(f"  {reward:8.3f}  {text[:100]!r}")
    tqdm.write("\n".join(shown))
    return {f"eval_{name}": value for name, value in values.items()}


# ---- Training --------------------------------------------------------

def main(args: Args) -> list[dict]:
    """Trains. Returns the lines of metrics.jsonl, one dict per step."""
    transformers.utils.logging.disable_progress_bar()  # of loading a model
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
    train_rows = load_rows(args.data, tokenizer, args)
    eval_rows = load_rows(args.eval_data, tokenizer, args) if args.eval_data else []
    print(f"The first prompt:\n{tokenizer.decode(train_rows[0].prompt)}")

    functions = load_rewards(args)
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
    if steps == 0:
        eval_rows = eval_rows or train_rows
        print(f"{args.k} samples for each of {len(eval_rows)} prompts")
    else:
        print(f"{steps} steps of {batch_size} prompts, lr {args.lr:g}")

    run = describe_run(train_rows, eval_rows, args)
    last_step = open_folder(out, run)  # before anything that takes long

    torch.manual_seed(args.seed)  # for a new adapter
    policy = load_model(args.model, device, args, trains=steps > 0)
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

    if last_step:
        restore_checkpoint(out, last_step, run, policy, optimizer)
    else:
        values = {"step": 0} | evaluate(policy, tokenizer, eval_rows, reference, functions, 0, out, args)
        append(out / "metrics.jsonl", [values], args.wandb)
    if steps == 0:
        barrier()  # the first process has written the line
        return report(out)

    progress = progress_bar(range(last_step + 1, steps + 1), desc="train", initial=last_step, total=steps)
    for step in progress:
        began = time.monotonic()
        torch.manual_seed(args.seed + step)  # a resumed run needs no saved random state
        rows = ordered_rows[(step - 1) * batch_size:step * batch_size]

        samples = rollout(policy, tokenizer, [row.prompt for row in rows], k=args.k, step=step, args=args)
        rewards, function_rewards = compute_rewards(samples, rows, functions)
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
            logps, update_metrics = run_batch(policy, samples, used_rewards, ref_logps, old_logps, args)
            if old_logps is None:
                old_logps = logps

            grad_norm = torch.nn.utils.clip_grad_norm_(weights, args.max_grad_norm or math.inf)
            update_metrics["grad_norm"] = full_tensor(grad_norm).item()
            if not math.isfinite(update_metrics["loss"] + update_metrics["grad_norm"]):
                raise BadInput(f"step {step}: loss or gradient is not finite: lower --lr")
            if not used_rewards.isnan().all():  # else Adam's momentum would go on
                optimizer.step()
            optimizer.zero_grad()

        old_logps, ref_logps = old_logps.cpu(), ref_logps.cpu()
        values = {"step": step} | update_metrics
        values |= metrics(samples, rewards, function_rewards, old_logps, ref_logps, args)
        is_equal = all_rewards_equal(rewards)  # (B,)
        values["frac_reward_zero_std"] = is_equal.float().mean().item()
        difference = (old_logps - samples.logps).abs()
        values["sampling/sampling_logp_difference/mean"] = (difference.sum() / samples.mask.sum()).item()
        values["sampling/sampling_logp_difference/max"] = difference.max().item()

        if step == 1:
            check_sampler(samples, old_logps, args)
            if args.beta and args.ref_model == args.model:
                kls = (old_logps - ref_logps).sum(dim=2) / samples.mask.sum(dim=2)  # (B, k), per token
                check_agreement(kls.abs().mean().item(), args.dtype)
            if rewards.isnan().all():
                progress.write("No sample has a reward: nothing is learned")
            elif is_equal.all():
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
            save_checkpoint(out, step, run, policy, optimizer)
        progress.set_postfix({name: values[name] for name in ("reward", "tokens_per_second")}, refresh=False)

    save_model(policy, tokenizer, out, args)
    return report(out)


def check_sampler(samples: Samples, logps: torch.Tensor, args: Args):
    """log π of the samples, (B, k, T), is what they were drawn with, up to rounding."""
    difference = (logps - samples.logps).abs().sum() / samples.mask.sum()
    limit = 5e-2 if args.dtype == "bfloat16" else 1e-3
    if not difference * min(1, args.temperature) < limit:  # a low temperature magnifies rounding
        raise BadInput(f"{args.model}: a key-value cache changes its log-probs")


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


def log_samples(out: Path, samples: Samples, rows: list[Row], rewards, step: int, held_out: bool):
    """Adds the samples to samples.jsonl."""
    lines = []
    for row, texts, values in zip(rows, samples.texts, rewards.tolist()):
        shared = {"step": step, "held_out": held_out, "prompt": row.columns["prompt"]}
        for text, reward in zip(texts, values):
            lines.append(shared | {"completion": text, "reward": reward})
    append(out / "samples.jsonl", lines)


def mean_and_error(values: dict, name: str) -> str:
    """A metric as text, with its standard error if it has one."""
    mean, error = values.get(name), values.get(f"{name}_stderr")
    text = "-" if mean is None else f"{mean:.3f}"
    return text if error is None else f"{text} ± {error:.3f}"


def report(out: Path) -> list[dict]:
    """Prints the metrics of held-out prompts, before training and now. Returns all metrics."""
    history = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    shown = [history[0], history[-1]] if len(history) > 1 else history
    print(f"{'held out':31}", *(f"step {line['step']:<13}" for line in shown))
    for name in history[0]:
        if name.startswith("eval_") and not name.endswith("_stderr"):
            cells = [mean_and_error(line, name) for line in shown]
            print(f"{name:31}", *(f"{cell:18}" for cell in cells))
    print(f"see {out}")
    return history


# ---- Flags -----------------------------------------------------------

def resolve(args: Args) -> Args:
    """A copy of the flags in which nothing is left to be chosen. Refuses flags that no run can have."""
    args = replace(args)
    if not (args.model or args.data) and (HERE / "demo").exists():
        torch.set_num_threads(1)  # the demo's tiny model gains nothing from more
        unset = {flag: value for flag, value in DEMO.items() if vars(args)[flag] in (None, ())}
        args = replace(args, **unset)
    if not (args.model and args.data and (args.reward or args.steps == 0)):
        raise BadInput("give --model, --data and --reward, or neither --model nor --data for the demo")

    # A reward may change the working directory, so paths are absolute.
    args.ref_model = args.ref_model or args.model
    check_model(args.model)
    check_model(args.ref_model)
    args.model, args.ref_model = absolute(args.model), absolute(args.ref_model)
    for file in (args.data, args.eval_data):
        if file and not Path(file).is_file():
            raise BadInput(f"{file} is no file: give a .jsonl file, such as tools/prepare.py writes")

    # A finished run is never changed. A kill at its end may have left a checkpoint.
    default = "out/rloo" if args.steps else "out/samples"
    last_file = "model" if args.steps else "metrics.jsonl"
    out, n = args.out or default, 1
    while Path(out, last_file).exists() and Path(out, last_file).stat().st_size:
        remove_checkpoints(Path(out))
        if args.out:
            raise BadInput(f"{out} holds a finished run: name another --out")
        n += 1
        out = f"{default}-{n}"
    args.out = str(Path(out).absolute())
    if Path(out, "config.json").exists() or Path(out, ".git").exists():
        raise BadInput(f"--out {out} is a checkpoint or a checkout: name a folder for the run")

    # tyro reads only True and False as truth values. Any other word is a string, which counts as true.
    truths = {"true": True, "false": False}
    options = args.chat_template_kwargs.items()
    args.chat_template_kwargs = {name: truths.get(value, value) for name, value in options}

    is_adapter = base_of(args.model) != args.model
    if args.lora_r and is_adapter:
        raise BadInput("--lora_r makes a new adapter, but --model is one")
    if (args.lora_alpha or args.lora_target) and not args.lora_r:
        raise BadInput("--lora_alpha and --lora_target need --lora_r")
    if args.lora_r or is_adapter:
        import_module("peft")  # if it is missing, the error comes before the reference's pass

    if args.dtype == "auto":
        args.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    if args.lr is None:
        args.lr = 1e-5 if args.lora_r or is_adapter else 1e-6
    if args.steps == 0:  # nothing is trained: only another model can be the reference
        args.ref = "live"
        args.beta = float(args.ref_model != args.model)  # 0: no KL is computed
    if args.ref == "swap" and args.ref_model != args.model:
        raise BadInput("--ref swap holds the policy's own start: with --ref_model choose live")
    if len(args.reward_weights) not in (0, len(args.reward)):
        raise BadInput("give one of --reward_weights for each --reward, or none")

    # Values that would turn learning off, or around.
    if args.k < 2 and args.steps:
        raise BadInput("--k must be at least 2: the other samples are the baseline")
    sizes = ("k", "batch_size", "updates_per_rollout", "max_new_tokens")
    for flag in (*sizes, "lr", "temperature", "epochs", "clip_eps"):
        if not vars(args)[flag] > 0:  # also NaN
            raise BadInput(f"--{flag} must be above 0")
    for flag in ("beta", "warmup", "max_grad_norm", "save_every"):
        if not vars(args)[flag] >= 0:
            raise BadInput(f"--{flag} must be 0 or more")
    if args.steps < -1 or args.lora_r == 0:
        raise BadInput("--steps must be -1 or more, --lora_r 1 or more")

    context = context_length(AutoConfig.from_pretrained(base_of(args.model)))
    args.max_length = min(args.max_length, context - args.max_new_tokens)
    if args.max_length < 1:
        raise BadInput(f"--max_new_tokens {args.max_new_tokens}: the model has {context} positions")
    return args


def check_model(name: str):
    """Refuses a folder that is no checkpoint, before the hub is asked for it."""
    if Path(name, "args.json").exists():
        raise BadInput(f"{name} is the folder of a run: did you mean {name}/model?")
    # gpt2 and org/gpt2 are names of the hub. out/gpt2 is a path if the folder out exists.
    parent = Path(name).parent
    if not Path(name).exists() and parent.is_dir() and parent != Path("."):
        raise BadInput(f"{name} does not exist")


def absolute(name: str) -> str:
    """An absolute path, or a name of the hub."""
    return str(Path(name).absolute()) if Path(name).exists() else name


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
    columns = [copies * len(prompt) + k * args.max_new_tokens for prompt in prompts]  # of the cache
    batches = divide_batches(columns, args.rollout_tokens, is_padded=True)
    if not has_shared_prompts(core):  # padding could change samples, so each prompt is a batch of its own
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
    has_windows = any(DynamicCache(config=core.config).is_sliding)  # they keep the last columns of a row
    is_alone = not has_shared_prompts(core)
    return k if has_windows or is_alone or args.max_new_tokens > longest else 1


def sample_batch(core, prompts: list[tuple], u: torch.Tensor, stops, copies: int, args: Args):
    """Samples of some prompts, (B, k, T) each: tokens, -1 after the end, their log-probs and entropies.

    A row of the cache has a prompt once, and behind it the tokens of its S samples: each step adds a column
    for each of them, which it alone sees. S is k, or 1 where each sample has a copy of the prompt."""
    B, k, T = u.shape
    device = core.device
    is_shared = has_shared_prompts(core)

    # Each prompt is encoded once, or for each sample if the cache may not be copied. Padding is on the left.
    encoded = prompts if is_shared else prompts * k  # the latter is k times one prompt
    ids = [torch.tensor(prompt) for prompt in encoded]
    ids = to_device(pad_sequence(ids, batch_first=True, padding_value=-1, padding_side="left"), device)
    mask = ids >= 0  # (rows, longest)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    inputs = dict(attention_mask=mask.long(), position_ids=positions, use_cache=True)
    out = core(ids.clamp(min=0), **inputs, logits_to_keep=1)
    cache_name = next((name for name in out if isinstance(out[name], Cache)), None)
    if cache_name is None:
        raise BadInput(f"{args.model} has no key-value cache that rloo.py can sample with")
    kv_cache = out[cache_name]

    cache_rows = torch.arange(len(ids), device=device)
    if is_shared and copies > 1:
        cache_rows = cache_rows.repeat_interleave(copies)
        kv_cache.reorder_cache(cache_rows)

    # A column of the cache is seen by one sample, its owner, by ALL of its row, or by NONE (padding).
    samples = torch.arange(B * k, device=device).view(len(cache_rows), -1)  # (rows, S)
    owners = torch.where(mask, ALL, NONE)[cache_rows]  # (rows, columns)
    logits = out.logits[cache_rows].expand(*samples.shape, -1)  # (rows, S, V)

    # These have an item for each sample.
    u = u.view(B * k, T)
    lengths = to_device([len(prompt) for prompt in prompts], device).repeat_interleave(k)
    is_open = torch.ones(B * k, dtype=torch.bool, device=device)  # the sample has no end yet
    tokens = torch.full((B * k, T), -1, device=device)
    logps, entropies = torch.zeros(2, B * k, T, device=device)

    for t in progress_bar(range(T), desc="sample", unit="tok", delay=1):
        drawn, logps[samples, t], entropies[samples, t] = draw(logits, u[samples, t], args.temperature)
        tokens[samples, t] = drawn.where(is_open[samples], -1)
        is_open[samples] &= ~torch.isin(drawn, stops)
        n_open = is_open[samples].sum(dim=1).tolist()  # waits for the GPU
        if t == T - 1 or not any(n_open):
            break

        # A row leaves the cache when all its samples have ended. The others keep equally many samples: first
        # the open ones, and then as many ended ones as that takes.
        if is_shared and not all(n_open):
            stay = to_device([row for row, n in enumerate(n_open) if n > 0], device)
            kv_cache.reorder_cache(stay)
            samples, owners = samples[stay], owners[stay]
        order = is_open[samples].int().argsort(dim=1, descending=True, stable=True)
        samples = samples.gather(1, order[:, :max(n_open)])

        # Each sample adds a column, which it alone sees.
        owners = torch.cat([owners, samples], dim=1)
        mask = (owners == ALL)[:, None] | (owners[:, None] == samples[..., None])
        mask = mask[:, None]  # (rows, 1, S, columns)
        inputs = dict(attention_mask=mask, sample_mask=mask_of_samples(mask))
        if copies == k:
            inputs = dict(attention_mask=(owners != NONE).long())  # the model adds its windows
        if not is_shared:
            inputs = {}  # nothing is padded, and a recurrent model would misread a mask

        inputs |= {cache_name: kv_cache, "use_cache": True, "position_ids": lengths[samples] + t}
        logits = core(tokens[samples, t].clamp(min=0), **inputs).logits
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

def load_rewards(args: Args) -> list[tuple]:
    """[(name, function, weight), ..]"""
    load = cache(load_module)  # a file is loaded once, also if several rewards are in it
    names, functions = [], []
    for spec in args.reward:
        file, _, name = spec.rpartition(":")
        if not Path(file).is_file():
            raise BadInput(f"--reward {spec}: expected FILE.py:FUNCTION, and a file that exists")

        names_in_file = vars(load(file))
        if not callable(names_in_file.get(name)):
            others = [other for other, value in names_in_file.items()
                      if inspect.isfunction(value) and value.__module__ == names_in_file["__name__"]]
            raise BadInput(f"{file} has no function {name!r}: it has {', '.join(others)}")
        names.append(spec if name in names else name)  # each has a metric of its own
        functions.append(names_in_file[name])
    return list(zip(names, functions, args.reward_weights or [1.0] * len(names)))


def load_module(file: str):
    """A user's file as a module. By the module's name a process pool finds its functions."""
    path = Path(file).absolute()
    sys.path.insert(0, str(path.parent))  # for its own imports, and for those of the pool
    name = path.stem
    while name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        name += "_"  # another module has this name

    spec = spec_from_file_location(name, path)
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def compute_rewards(samples: Samples, rows: list[Row], functions: list[tuple]) -> tuple[torch.Tensor, dict]:
    """The weighted sum of the rewards, (B, k), NaN where all are None; and the rewards of each function."""
    # What a function receives: lists with an item for each sample. The processes divide the rows.
    inputs = defaultdict(list)
    for i in np.array_split(range(len(rows)), process_count())[process_rank()]:
        columns = dict(rows[i].columns)
        prompt = columns.pop("prompt")
        for text, ids, ended in zip(samples.texts[i], samples.groups[i][1], samples.ended[i].tolist()):
            completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            sample = dict(prompts=prompt, completions=completion, completion_ids=list(ids), ended=ended)
            for name, value in deepcopy(columns | sample).items():  # a function may change its inputs
                inputs[name].append(value)

    total = torch.full(samples.ended.shape, math.nan)  # (B, k)
    function_rewards = {}
    for name, function, weight in functions:
        rewards = call_reward(name, function, inputs) if inputs else []
        rewards = torch.tensor(list(chain(*all_gather(rewards)))).view(total.shape)
        total = torch.where(rewards.isnan(), total, total.nan_to_num(nan=0.0) + weight * rewards)
        function_rewards[name] = rewards
    return total, function_rewards


def call_reward(name: str, function, inputs: dict[str, list]) -> list[float]:
    """The reward of each sample, NaN for None. Errors of the user's own lines keep their traceback."""
    try:
        inspect.signature(function).bind(**inputs)
    except TypeError as error:
        raise BadInput(f"{name}: {error}: it is called with {', '.join(inputs)}; take **columns") from None
    try:
        values = function(**inputs)
        values = list(values) if isinstance(values, Iterator) else values
    except TypeError as error:
        error.add_note("A completion is a string if the row's prompt is one, else a list of messages.")
        raise

    n = len(inputs["ended"])
    try:
        rewards = [math.nan if value is None else float(value) for value in values]
    except (TypeError, ValueError):
        rewards = []
    if len(rewards) != n or isinstance(values, dict | set | str):
        raise BadInput(f"{name} returned {values!r:.99}: expected {n} numbers or None")
    if not all(math.isfinite(reward) or value is None for reward, value in zip(rewards, values)):
        raise BadInput(f"{name} returned {values!r:.99}: a reward is finite, or None")
    return rewards


# ---- Data ------------------------------------------------------------

def load_rows(file: str, tokenizer, args: Args) -> list[Row]:
    """The prompts of a file as token ids. Those that cannot be answered are dropped and counted."""
    config = AutoConfig.from_pretrained(base_of(args.model))
    is_context = args.max_length == context_length(config) - args.max_new_tokens
    limit = "the model's context without --max_new_tokens" if is_context else "--max_length"

    rows = []
    counts = Counter(rows=0)
    for columns, prompt in tokenize_rows(file, tokenizer, args, counts):
        if not prompt:
            counts["dropped: an empty prompt"] += 1
        elif len(prompt) > args.max_length:
            counts[f"dropped: longer than {args.max_length} tokens, {limit}"] += 1
        elif max(prompt) >= config.get_text_config().vocab_size:
            raise BadInput(f"{args.model} has no embedding for some tokens of its tokenizer")
        else:
            rows.append(Row(as_tuple(prompt), columns))

    counted = "; ".join(f"{count} {note}" for note, count in counts.items())
    print(f"{file}: {len(rows)} of {counted}")
    if len(rows) < max(1, counts["rows"] / 2):
        raise BadInput(f"{file}: fewer than half of the rows are left: {len(rows)} of {counted}")
    names = dict.fromkeys(chain(*(row.columns for row in rows)))
    return [Row(row.prompt, names | row.columns) for row in rows]  # what a row lacks is None


def tokenize_rows(file: str, tokenizer, args: Args, counts: Counter):
    """Yields each row, and the token ids of its prompt."""
    plain = tokenizer("a", add_special_tokens=False).input_ids
    full = tokenizer("a").input_ids
    bos = full[:full.index(plain[0])] if plain else []  # what the tokenizer puts before a text

    rows = iter(progress_bar(read_rows(file, ("prompt",)), desc="tokenize"))
    while batch := list(islice(rows, 1000)):
        counts["rows"] += len(batch)
        texts = [render(row, tokenizer, args, counts) for row in batch]

        # One call for many texts, which the tokenizer divides over the cores.
        options = dict(add_special_tokens=False, return_attention_mask=False, verbose=False)
        all_ids = tokenizer([text or "" for text in texts], **options).input_ids
        for row, text, ids in zip(batch, texts, all_ids):
            if isinstance(row["prompt"], str) and ids[:len(bos)] != bos:  # a chat template writes BOS
                ids = bos + ids
            if text is not None:
                yield row, ids


def read_rows(file: str, names: tuple[str, ...]) -> list[dict]:
    """The rows of a file of JSON Lines. The columns `names` must hold only strings or only messages."""
    rows = []
    with open(file, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                kinds = {name: kind_of(row.get(name)) for name in names}
            except (ValueError, AttributeError):  # no JSON, or no object
                raise BadInput(f"{file}, line {number} is not a row of JSON, {line.strip()[:50]!r}: "
                               "tools/prepare.py reads other formats") from None

            if set(kinds.values()) not in ({"a string"}, {"messages"}):
                found = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
                raise BadInput(f"{file}, line {number}: {found}; the columns are {', '.join(row)}: "
                               "tools/prepare.py makes plain rows")
            rows.append(row)

    if not rows:
        raise BadInput(f"{file} is empty")
    return rows


def kind_of(text) -> str:
    """What a column holds: a string, messages, or something else, which is shown."""
    if isinstance(text, str):
        return "a string"
    if text is None:
        return "missing"
    try:
        texts = [message["role"] + (message.get("content") or "") for message in text]
        is_messages = all(message["role"] in ROLES for message in text)
    except (TypeError, KeyError, AttributeError):
        is_messages = False
    return "messages" if is_messages and texts else f"{text!r:.60}"


def render(row: dict, tokenizer, args: Args, counts: Counter) -> str | None:
    """The prompt as the model reads it. None if the row is dropped."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if tokenizer.chat_template:
            counts["strings, to which the chat template is not applied"] += 1
        return prompt

    tools = row.get("tools") or []
    options = args.chat_template_kwargs | (row.get("chat_template_kwargs") or {})
    is_begun = prompt[-1]["role"] == "assistant"  # an answer that the samples continue
    try:
        text = tokenizer.apply_chat_template(
            prompt, tokenize=False, tools=tools or None, add_generation_prompt=not is_begun,
            continue_final_message=is_begun, **options)
    except TemplateError as error:
        counts[f"dropped: the template says {error}"] += 1
        return None

    # Earlier answers are not looked up: a template may drop their thoughts.
    kept = [message for message in prompt[:-1] if message["role"] != "assistant"]
    if leaves_out(text, kept + prompt[-1:], tools):
        counts["of which the template leaves out text or tools, see tools/prepare.py --model"] += 1
    return text


def leaves_out(rendered: str, messages: list[dict], tools: list[dict]) -> bool:
    """Whether a text of these messages, or the name of a tool, is not in what the template has written."""
    words = [message.get("content") or "" for message in messages]
    calls = chain(*(message.get("tool_calls") or [] for message in messages))
    words += [call.get("function", call)["name"] for call in [*calls, *tools]]
    return any(word.strip() not in rendered for word in words)


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
    model = peft.PeftModel.from_pretrained(
        model, name, is_trainable=trains, autocast_adapter_dtype=trains)  # float32 weights train
    missing = set(peft.get_peft_model_state_dict(model)) - set(peft.utils.load_peft_weights(name, "cpu"))
    if missing:  # they would be those of a new adapter
        raise BadInput(f"{name} has no weights for {min(missing)}")
    return model


# ---- Files of a run --------------------------------------------------

def describe_run(train_rows: list[Row], eval_rows: list[Row], args: Args) -> dict:
    """The script, flags, rows and weights of a run. A resumed run may differ only in MAY_CHANGE."""
    digest = hashlib.sha256()
    for row in train_rows + [None] + eval_rows:  # None: where the held-out rows begin
        digest.update(repr(row).encode())

    digest_of = cache(checkpoint_digest)  # reads a model once that is policy and reference
    run = vars(args) | {"script": Path(__file__).name, "rows": digest.hexdigest()}
    run |= {"model's weights": digest_of(args.model), "ref_model's weights": digest_of(args.ref_model)}
    run = json.loads(json.dumps(run))  # tuples become lists
    if any(other != run for other in all_gather(run)):
        raise BadInput("the processes have other flags, rows or weights: give all of them the same files")
    return run


def open_folder(out: Path, run: dict) -> int:
    """Returns the step after which the run in this folder resumes, or 0, and cuts the logs to this step.
    Refuses the folder of another run."""
    file = out / "args.json"
    logs = [out / name for name in LOGS if (out / name).exists()]
    last_step = max(checkpoints(out), default=0)
    if any(log.stat().st_size for log in logs):  # else there is nothing to lose
        saved = json.loads(file.read_text()) if file.exists() else {}
        script = saved.get("script", "another program")
        if script != run["script"]:
            raise BadInput(f"{out} holds a run of {script}: name another --out")
        differing = [name for name in run if saved.get(name) != run[name] and name not in MAY_CHANGE]
        if differing:
            raise BadInput(f"{out} holds a run with other {', '.join(differing)}: name another --out")

    if is_first_process():
        write_whole(file, [json.dumps(run, indent=1).encode()])
        for log in logs:  # the lines of later steps will be written again
            lines = log.read_bytes().splitlines(keepends=True) if last_step else []
            kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= last_step]
            write_whole(log, kept)
        if run["wandb"]:
            import wandb
            wandb.init(name=out.name, dir=out, config=run, resume="auto")
    return last_step


def checkpoints(out: Path) -> set[int]:
    """The steps of complete checkpoints, out/resume-STEP. Other names are the user's."""
    steps = [file.parent.name.removeprefix("resume-") for file in out.glob("resume-*/.metadata")]
    return {int(step) for step in steps if step.isdigit()}


def training_state(policy, optimizer, run: dict, step: int) -> dict:
    """What a step changes, and which run and step it is: what a checkpoint holds."""
    options = StateDictOptions(ignore_frozen_params=True)
    weights, moments = get_state_dict(policy, optimizer, options=options)
    fixed = {name: value for name, value in run.items() if name not in MAY_CHANGE}
    return {"weights": weights, "optimizer": moments, "run": json.dumps(fixed), "step": step}


def save_checkpoint(out: Path, step: int, run: dict, policy, optimizer):
    """Writes out/resume-STEP, which gets its name when it is complete. Removes older ones."""
    writer = dcp.FileSystemWriter(out / ".resume", overwrite=True)  # that of a killed save
    dcp.save(training_state(policy, optimizer, run, step), storage_writer=writer)
    if is_first_process():
        os.replace(out / ".resume", out / f"resume-{step}")
        remove_checkpoints(out, all_but=step)


def restore_checkpoint(out: Path, step: int, run: dict, policy, optimizer):
    """Restores out/resume-STEP. Refuses that of another run."""
    folder = out / f"resume-{step}"
    state = training_state(policy, optimizer, run, step)
    found = {"run": "", "step": 0}
    dcp.load(found, checkpoint_id=folder)
    if found != {"run": state["run"], "step": step}:
        raise BadInput(f"{folder} is a checkpoint of another run: move it away")

    # A weight that had no gradient yet has no saved state of the optimizer. get_state_dict has made one.
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    moments = state["optimizer"]["state"]
    for name in list(moments):
        if not any(f"optimizer.state.{name}.{key}" in saved for key in moments[name]):
            del moments[name]

    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        policy, optimizer, model_state_dict=state["weights"], optim_state_dict=state["optimizer"],
        options=StateDictOptions(ignore_frozen_params=True, strict=False))
    print(f"resumes after step {step}")


def remove_checkpoints(out: Path, all_but: int | None = None):
    for step in checkpoints(out) - {all_but}:
        shutil.rmtree(out / f"resume-{step}", ignore_errors=True)  # another process may be quicker


def append(log: Path, lines: list[dict], to_wandb=False):
    """Adds lines to a log, on the disk before a checkpoint of their step is, and to Weights & Biases."""
    if not is_first_process():
        return
    with open(log, "a") as file:
        for line in lines:
            values = {name: None if value != value else value for name, value in line.items()}  # no NaN
            file.write(json.dumps(values) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if to_wandb:
        import wandb
        for line in lines:
            wandb.log(line, step=line["step"])


def save_model(model, tokenizer, out: Path, args: Args):
    """Writes out/model, the model or adapter in the dtype of forward passes. It marks the run as finished."""
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
    model.save_pretrained(hidden, state_dict=state)
    tokenizer.save_pretrained(hidden)
    if model is core:  # no adapter: the config still names the dtype of training
        core.config.dtype = args.dtype
        core.config.save_pretrained(hidden)

    pattern = "*processor_config.json"  # of a model that reads images, too
    base = base_of(args.model)
    folder = base if Path(base).is_dir() else snapshot_download(base, allow_patterns=pattern)
    for file in Path(folder).glob(pattern):
        shutil.copy(file, hidden)

    os.sync()  # all of it is on the disk before the folder gets its name
    os.replace(hidden, out / "model")
    remove_checkpoints(out)


if __name__ == "__main__":
    if int(os.environ.get("RANK", 0)):  # under torchrun only the first process prints
        sys.stdout = open(os.devnull, "w")
    args = tyro.cli(Args, description=__doc__, use_underscores=True)
    try:
        main(args)
    except SystemExit as error:  # it would look like success
        raise RuntimeError("a reward has ended the process") from error
    except (BadInput, KeyboardInterrupt) as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except torch.OutOfMemoryError as error:
        error.add_note("lower --tokens_per_forward or --rollout_tokens, or add --gradient_checkpointing")
        raise
