"""RLOO: learn from a reward. The other samples of a prompt are the baseline.

Ahmadian et al. 2024, Back to Basics: Revisiting REINFORCE Style Optimization, arXiv:2402.14740, leave-one-out:

    (1)   ∇J(θ) = E 1/k Σ_i [ R(y_i, x) − 1/(k−1) Σ_{j≠i} R(y_j, x) ] ∇ log π(y_i|x), y_i ~ π(·|x)
    (2)   R(y, x) = reward(y, x) − β log π(y|x)/π_ref(y|x)

    python rloo.py  # the demo: offline, 10 s
    python rloo.py --model Qwen/Qwen3-0.6B --data prompts.jsonl --reward rewards.py:helpful --out out/qwen

A killed run resumes if the same command is given again. docs/recipes.md has starting values for lr and β.

Data: rows with `prompt`, a string or chat messages, and any columns that the reward needs:

    {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}

A reward is a function(prompts, completions, **columns), async or not. It returns a number or None per completion. The
columns are those of the file and two more: completion_ids, and ended, which is false for a sample that was cut off.

Shapes: B prompts per step, k samples each, T tokens in the longest. Rewards and advantages are (B, k). Log-probs of
tokens are (B, k, T), 0 after the end of a sample. b is the number of prompts in a micro-batch.

Metrics: reward, reward_std: over all samples, before KL | rewards/NAME: of one function | frac_reward_zero_std:
fraction of prompts whose rewards are all equal | kl: log π − log π_ref per token | entropy: nats per token |
samples/distinct: how many of the samples differ | completions/mean_length | completions/clipped_ratio: fraction cut
off by max_new_tokens | loss | clip_ratio: fraction of samples whose ratio is clipped |
sampling/sampling_logp_difference/mean, /max: |log π − log π of the sampler| per token | grad_norm: before clipping |
learning_rate | seconds | tokens_per_second | memory_gb: GPU peak | eval_*: of one sample per held-out prompt

Not here: a critic, another engine for sampling, tensor or pipeline parallelism, images.
"""
import asyncio
import hashlib
import json
import math
import os
import random
import re
import runpy
import shutil
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
import tyro
from filelock import FileLock
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from refcache import (
    BadInput, Swap, all_gather, all_reduce, apply_fsdp, barrier, check_agreement, checkpoint_digest,
    completion_logprobs, context_length, count_tokens, divide_batches, enable_shared_prompts, full_tensor,
    has_shared_prompts, is_first_process, micro_batches, names_in_float32, pack, process_count, process_group,
    process_rank, progress_bar, to_device, unsharded, unwrap_model, write_whole)

HERE = Path(__file__).parent
RUNNER = asyncio.Runner()  # one event loop for all calls, so that a client in a reward function can be used again
DEMO = dict(
    model=f"{HERE}/demo/model",
    data=f"{HERE}/demo/prompts.jsonl",
    eval_data=f"{HERE}/demo/prompts_test.jsonl",
    reward=(f"{HERE}/demo/score.py:sentiment",),
    lr=2e-4,
)
MAY_CHANGE = ("out ref wandb tokens_per_forward rollout_tokens gradient_checkpointing save_every eval_every "
              "chat_template_kwargs").split()  # flags that may differ when a run is resumed
SMALLEST = Counter(steps=-1, epochs=1e-6, batch_size=1, lora_r=1, lora_alpha=1e-6, k=2, temperature=1e-6,
                max_new_tokens=1, updates_per_rollout=1)  # or 0


@dataclass
class Args:
    model: str | None = None  # checkpoint folder or hub name; None: the demo
    data: str | None = None  # prompts: .jsonl .json .csv .parquet, or hub data NAME[:CONFIG][:SPLIT]
    eval_data: str | None = None  # held-out prompts; None: they are split off --data
    eval_size: int = 64  # number of prompts that are split off --data, at most a tenth of them
    chat_template_kwargs: dict[str, bool | int | str] = field(default_factory=dict)  # such as enable_thinking False
    max_length: int = 1024  # tokens of a prompt; longer ones are dropped and counted
    out: str | None = None  # folder of the run; None: out/rloo, or out/rloo-2 if that is finished

    reward: tuple[str, ...] = ()  # FILE.py:FUNCTION; the values of several functions are summed
    reward_model: str | None = None  # classifier with one output: folder or hub name
    reward_weights: tuple[float, ...] = ()  # weights of the functions, then of the model; empty: all are 1

    ref: Literal["swap", "live"] = "swap"  # the reference's weights: on the host until they are needed, or on the GPU
    ref_model: str | None = None  # the reference; None: the policy before training

    lora_r: int | None = None  # train a LoRA adapter of this rank instead of all weights
    lora_alpha: float | None = None  # LoRA's scale is alpha / r; None: alpha = 2 r
    lora_target: tuple[str, ...] = ()  # names of the layers with an adapter: q_proj v_proj; empty: all linear layers

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
    lr: float | None = None  # peak learning rate; None: 1e-6, with LoRA 1e-5, in the demo 2e-4; see docs/recipes.md
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # of the learning rate after the warmup
    warmup: float = 0.1  # steps in which the learning rate rises; below 1: their fraction of all steps
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # gradients are clipped to this norm; 0: no clipping
    seed: int = 0

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of forward passes; auto: bfloat16 on a GPU
    tokens_per_forward: int = 16384  # limits memory; never changes what is learned
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
    """(B, k) -> (B, k): each reward minus the mean of the prompt's other samples. A sample with NaN is left out: its
    advantage is 0, and no baseline contains it. Division by the standard deviation would bias the gradient."""
    counts = (~rewards.isnan()).sum(dim=1, keepdim=True)  # (B, 1)
    sum_of_others = rewards.nansum(dim=1, keepdim=True) - rewards
    advantages = rewards - sum_of_others / (counts - 1)  # of (1)
    return advantages.nan_to_num(0.0)  # NaN: left out, or the only sample (0 / 0)


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
    """Yields for each micro-batch the indices of its prompts, log π of the tokens of their samples, (b, k, T), and its
    weight in a sum (see micro_batches)."""
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
                all_logps[indices] += logps * weight
    return all_reduce(all_logps)


def run_batch(policy, samples: Samples, rewards: torch.Tensor, ref_logps: torch.Tensor,
              old_logps: torch.Tensor | None, args: Args) -> tuple[torch.Tensor, dict]:
    """Adds the gradient of the mean loss. rewards (B, k), log-probs (B, k, T). old_logps is None before the first
    update of a rollout: this forward then gives them, also for the KL penalty. Returns them, and metrics."""
    all_logps = torch.zeros_like(ref_logps)
    totals = torch.zeros(2, device=ref_logps.device)  # of the loss, and of clipped ratios

    for indices, logps, weight in micro_batch_logprobs(policy, samples, args):
        old = logps.detach() if old_logps is None else old_logps[indices]
        advantages = compute_advantages(rewards[indices], old, ref_logps[indices], args.beta)  # (b, k)
        losses, is_clipped = policy_loss(logps.sum(dim=2), old.sum(dim=2), advantages, args.clip_eps)  # (b, k)

        # The loss is a mean over all samples.
        scale = weight / rewards.numel()
        loss = losses.sum() * scale
        loss.backward()

        all_logps[indices] += old * weight
        totals += torch.stack([loss.detach(), is_clipped.sum() * scale])

    loss, clip_ratio = all_reduce(totals).tolist()
    return all_reduce(all_logps), {"loss": loss, "clip_ratio": clip_ratio}


def metrics(samples: Samples, rewards: torch.Tensor) -> dict[str, float]:
    """Metrics of samples and their rewards, (B, k). A sample whose reward is NaN is left out of the reward metrics."""
    known = rewards[~rewards.isnan()]
    return {
        "reward": known.mean().item(),
        "reward_std": known.std(correction=min(1, len(known) - 1)).item(),
        "samples/distinct": len(set(chain(*samples.texts))),
        "completions/mean_length": samples.mask.sum(dim=2).float().mean().item(),
        "completions/clipped_ratio": 1 - samples.ended.float().mean().item(),
        "entropy": (samples.entropy.sum() / samples.mask.sum()).item(),
    }


def evaluate(policy, tokenizer, rows: list[Row], reference, functions: list, step: int, out: Path, args: Args) -> dict:
    """Metrics of one sample per held-out prompt. Writes the samples to samples.jsonl."""
    if not rows:
        return {}
    samples = rollout(policy, tokenizer, [row.prompt for row in rows], 1, 0, args)  # step 0: a fixed seed
    rewards, means = compute_rewards(samples, rows, functions)
    log_samples(out, step, True, samples, rows, rewards)

    values = metrics(samples, rewards) | means
    if reference:
        ref_logps = compute_logprobs(reference, samples, policy.device, args)
        values["kl"] = ((samples.logps - ref_logps.cpu()).sum() / samples.mask.sum()).item()
    return {f"eval_{name}": value for name, value in values.items()}


# ---- Training --------------------------------------------------------

def main(args: Args) -> list[dict]:
    """Trains. Returns the lines of metrics.jsonl, one dict per step."""
    with process_group():
        args = replace(args, **all_gather(vars(resolve(args)))[0])  # the first process's flags, sent as a dict
        out = Path(args.out).absolute()  # a user's function may change the working directory
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / ".lock", timeout=0) if is_first_process() else nullcontext():
            return train(args, out)


def train(args: Args, out: Path) -> list[dict]:
    """The run: prompts, rewards, the policy and its reference, the loop."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(args.model, args.ref_model)
    train_rows, eval_rows = load_data(tokenizer, args)
    print(f"The first prompt:\n{tokenizer.decode(train_rows[0].prompt)}")

    batch_size = min(args.batch_size, len(train_rows))
    steps = args.steps
    if steps == -1:
        steps = math.ceil(args.epochs * len(train_rows) / batch_size)
    ordered_rows = rows_in_order(train_rows, steps * batch_size, args.seed)
    print(f"{steps} steps of {batch_size} prompts, lr {args.lr:g}, reference: {args.ref if args.beta else 'none'}")

    functions = load_rewards(device, args)
    run = describe_run(train_rows, eval_rows, args)

    torch.manual_seed(args.seed)  # for a new adapter
    policy = load_model(args.model, device, args, trains=True)
    reference = None
    if args.beta and args.ref == "live":
        reference = nullcontext(load_model(args.ref_model, device, args))
    elif args.beta:
        other = None
        if args.ref_model != args.model:
            other = load_model(args.ref_model, "cpu", args)
        reference = Swap(policy, other)

    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    matrices = [weight for weight in weights if weight.dim() > 1]
    vectors = [weight for weight in weights if weight.dim() <= 1]  # norms and biases do not decay
    optimizer = torch.optim.AdamW([
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ], lr=0.0, fused=True)  # the loop sets lr

    state = training_state(policy, optimizer)  # what a checkpoint holds
    last_step = restore_checkpoint(out, run, state)
    if last_step == 0:
        values = {"step": 0} | evaluate(policy, tokenizer, eval_rows, reference, functions, 0, out, args)
        log_metrics(out, values, args)

    progress = progress_bar(range(last_step + 1, steps + 1), desc="train", initial=last_step, total=steps)
    for step in progress:
        began = time.monotonic()
        torch.manual_seed(args.seed + step)  # a resumed run needs no saved random state
        rows = ordered_rows[(step - 1) * batch_size:step * batch_size]
        samples = rollout(policy, tokenizer, [row.prompt for row in rows], args.k, step, args)
        rewards, means = compute_rewards(samples, rows, functions)
        log_samples(out, step, False, samples, rows, rewards)
        values = {"step": step} | metrics(samples, rewards) | means
        spread = rewards.nan_to_num(-math.inf).amax(dim=1) - rewards.nan_to_num(math.inf).amin(dim=1)
        is_equal = spread == 0  # for each prompt
        values["frac_reward_zero_std"] = is_equal.float().mean().item()

        if step == 1 and not samples.ended.any():
            progress.write("No sample ends: raise --max_new_tokens or fix the template")
        if step == 1 and is_equal.all():
            progress.write("The rewards of each prompt are equal: nothing is learned")
        if args.mask_truncated:  # the metrics above count these samples, the loss does not
            rewards = rewards.where(samples.ended, math.nan)

        ref_logps = compute_logprobs(reference, samples, device, args)
        old_logps = None  # log π of the policy that sampled: the first update's forward gives it
        for _ in range(args.updates_per_rollout):
            old_logps, measured = run_batch(policy, samples, rewards.to(device), ref_logps, old_logps, args)  # backward
            values |= measured  # the last update's are logged
            grad_norm = torch.nn.utils.clip_grad_norm_(weights, args.max_grad_norm or math.inf)
            values["learning_rate"] = learning_rate(step, steps, args)
            for group in optimizer.param_groups:
                group["lr"] = values["learning_rate"]
            optimizer.step()
            optimizer.zero_grad()

            values["grad_norm"] = full_tensor(grad_norm).item()
            weight_norm = full_tensor(torch.nn.utils.get_total_norm(weights)).item()
            if not math.isfinite(values["loss"] + values["grad_norm"] + weight_norm):
                raise BadInput(f"step {step}: loss, gradient or weights are not finite: lower --lr")

        # How far log π was from what the sampler computed, and from the reference.
        difference = (old_logps.cpu() - samples.logps).abs()
        mean_difference = (difference.sum() / samples.mask.sum()).item()
        values["sampling/sampling_logp_difference/mean"] = mean_difference
        values["sampling/sampling_logp_difference/max"] = difference.max().item()
        limit = (5e-2 if args.dtype == "bfloat16" else 1e-3) / min(1, args.temperature)  # a low one magnifies rounding
        if step == 1 and not mean_difference < limit:
            raise BadInput(f"{args.model}: a key-value cache changes its log-probs")

        if reference:
            lengths = samples.mask.sum(dim=2)  # (B, k)
            kls = (old_logps - ref_logps).sum(dim=2).cpu()  # (B, k)
            values["kl"] = (kls.sum() / lengths.sum()).item()
            if step == 1 and args.ref_model == args.model:
                check_agreement((kls / lengths).abs().mean().item(), args.dtype)

        values["seconds"] = time.monotonic() - began
        values["tokens_per_second"] = count_tokens(samples.groups) / values["seconds"]
        values["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9  # peak, 0 on a CPU

        if step == steps or (args.eval_every and step % args.eval_every == 0):
            values |= evaluate(policy, tokenizer, eval_rows, reference, functions, step, out, args)
        log_metrics(out, values, args)

        if args.save_every and (step == steps or step % args.save_every == 0):
            save_checkpoint(out, step, state)
        progress.set_postfix(reward=values["reward"], tokens_per_second=values["tokens_per_second"], refresh=False)

    if steps:
        save_model(policy, tokenizer, out, args)
    barrier()  # the first process has written all lines
    return report(out)


def rows_in_order(rows: list[Row], n: int, seed: int) -> list[Row]:
    """The first n rows in the order of training. Each epoch is a new permutation of all rows."""
    ordered = []
    for epoch in range(math.ceil(n / len(rows))):
        permutation = np.random.default_rng([seed, epoch, *b"order"]).permutation(len(rows))
        ordered += [rows[i] for i in permutation]
    return ordered[:n]


def learning_rate(step: int, steps: int, args: Args) -> float:
    """Linear warmup to --lr, then constant, or falling to 0 at steps + 1."""
    warmup_steps = round(args.warmup * steps) if args.warmup < 1 else args.warmup
    if step <= warmup_steps:
        return args.lr * (step / warmup_steps)
    remaining = (steps - step + 1) / (steps - warmup_steps)
    factors = {"constant": 1.0, "linear": remaining, "cosine": (1 - math.cos(math.pi * remaining)) / 2}
    return args.lr * factors[args.schedule]


# ---- Flags -----------------------------------------------------------

def resolve(args: Args) -> Args:
    """A copy of the flags, with those filled in that depend on others. Refuses flags that no run can have."""
    unset = {}
    if not (args.model or args.data) and (HERE / "demo").exists():
        torch.set_num_threads(1)  # the demo's tiny model gains nothing from more
        unset = {flag: value for flag, value in DEMO.items() if vars(args)[flag] in (None, ())}
    args = replace(args, **unset)

    for flag, value in vars(args).items():
        if isinstance(value, (int, float)) and not value >= SMALLEST[flag]:  # `not >=` also catches NaN
            raise BadInput(f"--{flag} {value} is below {SMALLEST[flag]}")

    if args.out is None:
        args.out, n = "out/rloo", 1
        while Path(args.out, "model").exists():
            n += 1
            args.out = f"out/rloo-{n}"
    is_adapter = args.model and base_of(args.model) != args.model
    n_rewards = len(args.reward) + bool(args.reward_model)

    mistakes = {
        "give both --model and --data, or neither for the demo": not (args.model and args.data),
        "give --reward or --reward_model, and one of --reward_weights for each or none":
            n_rewards == 0 or len(args.reward_weights) not in (0, n_rewards),
        "--lora_alpha and --lora_target need --lora_r": not args.lora_r and (args.lora_alpha or args.lora_target),
        "--lora_r makes a new adapter, but --model is one": args.lora_r and is_adapter,
        f"{args.out} holds a finished run: name another --out": Path(args.out, "model").exists(),
    }
    for sentence, is_made in mistakes.items():
        if is_made:
            raise BadInput(sentence)

    if args.dtype == "auto":
        args.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    if args.lr is None:
        args.lr = 1e-5 if args.lora_r or is_adapter else 1e-6
    args.ref_model = args.ref_model or args.model
    context = context_length(AutoConfig.from_pretrained(base_of(args.model)))
    args.max_length = min(args.max_length, context - args.max_new_tokens)
    return args


# ---- Sampling --------------------------------------------------------

@torch.no_grad()
def rollout(policy, tokenizer, prompts: list[tuple], k: int, step: int, args: Args) -> Samples:
    """y_1 .. y_k ~ π(·|x) of (1). Token t of sample i of prompt b is drawn with the uniform number u[b, i, t], which
    depends on seed and step: batching changes no sample."""
    core = unwrap_model(policy)
    shape = (len(prompts), k, args.max_new_tokens)
    u = np.random.default_rng([args.seed, step, *b"rollout"]).random(shape)
    own_stops = np.atleast_1d(core.generation_config.eos_token_id).tolist()  # from a number, a list or None
    stops = to_device([*{tokenizer.eos_token_id, *own_stops} - {None}], core.device)

    # The processes divide the prompts. Without shared prompts each is a batch, because padding could change samples.
    lengths = [len(prompt) + args.max_new_tokens for prompt in prompts]
    budget = args.rollout_tokens if has_shared_prompts(policy) else 0
    batches = divide_batches(lengths, budget, rows=[k] * len(prompts))

    tokens = torch.zeros(shape, dtype=torch.long, device=core.device)
    logps, entropies = torch.zeros(2, *shape, device=core.device)
    with unsharded(policy):
        for batch in filter(None, batches):  # a process may have an empty one
            drawn = sample_batch(core, [prompts[i] for i in batch], to_device(u[batch], core.device), stops, args)
            tokens[batch], logps[batch], entropies[batch] = drawn
    tokens, logps, entropies = (all_reduce(tensor).cpu() for tensor in (tokens, logps, entropies))

    is_stop = torch.isin(tokens, stops.cpu())
    mask = is_stop.cumsum(dim=2) == is_stop  # up to the first stop token: 0 = 0 before it, 1 = 1 at it
    T = mask.sum(dim=2).max()
    completions = [[tuple(ids[ids >= 0].tolist()) for ids in rows] for rows in tokens.where(mask, -1)]
    return Samples(
        groups=list(zip(prompts, completions)),
        texts=[tokenizer.batch_decode(rows, skip_special_tokens=True) for rows in completions],
        mask=mask[..., :T],
        ended=is_stop.any(dim=2),
        logps=logps.where(mask, 0.0)[..., :T],
        entropy=entropies.where(mask, 0.0).sum(dim=2),
    )


def sample_batch(core, prompts: list[tuple], u: torch.Tensor, stops: torch.Tensor, args: Args) -> tuple:
    """Samples of some prompts: tokens, log-probs and entropies, (B, k, T). They are undefined after the end."""
    B, k, T = u.shape
    is_shared = has_shared_prompts(core)
    if not is_shared:  # one prompt, encoded k times: not every cache can be copied
        prompts = prompts * k
    ids = [torch.tensor(prompt) for prompt in prompts]
    ids = to_device(pad_sequence(ids, batch_first=True, padding_value=-1, padding_side="left"), core.device)
    mask = (ids >= 0).long()  # (B, longest)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)

    out = core(
        input_ids=ids.clamp(min=0),
        attention_mask=mask,
        position_ids=positions,
        logits_to_keep=1,
        use_cache=True,
    )
    cache_name = next(name for name in out if isinstance(out[name], Cache))  # transformers 5.24 has renamed it
    kv_cache = out[cache_name]
    logits = out.logits[:, -1]
    if is_shared:  # every prompt was encoded once: copy its keys and values to k rows
        kv_cache.batch_repeat_interleave(k)
        logits, mask = (tensor.repeat_interleave(k, dim=0) for tensor in (logits, mask))

    # From here on each sample is a row.
    u = u.flatten(0, 1)  # (B · k, T)
    lengths = mask.sum(dim=1)  # of the prompts
    mask = F.pad(mask, (0, T), value=1)
    tokens = torch.full((B * k, T), -1, device=core.device)
    logps, entropies = torch.zeros(2, B * k, T, device=core.device)
    rows = torch.arange(B * k, device=core.device)  # the samples in the cache

    for t in progress_bar(range(T), desc="sample", unit="tok", delay=1):
        tokens[rows, t], logps[rows, t], entropies[rows, t] = draw(logits, u[rows, t], args.temperature)
        has_ended = torch.isin(tokens[rows], stops).any(dim=1)
        stay = (~has_ended).nonzero()[:, 0]  # waits for the GPU
        if len(stay) == 0 or t == T - 1:
            break

        if is_shared and len(stay) < len(rows):
            kv_cache.batch_select_indices(stay)
            rows = rows[stay]
        inputs = dict(input_ids=tokens[rows, t, None], position_ids=lengths[rows, None] + t)
        if is_shared:  # a recurrent model would misread it
            inputs["attention_mask"] = mask[rows, :ids.shape[1] + t + 1]
        logits = core(**inputs, **{cache_name: kv_cache}, use_cache=True).logits[:, -1]
    return tokens.view(B, k, T), logps.view(B, k, T), entropies.view(B, k, T)


def draw(logits: torch.Tensor, u: torch.Tensor, temperature=1.0) -> tuple[torch.Tensor, ...]:
    """(n, V) logits, (n,) uniform numbers -> (n,) tokens, their log-probs, and entropies."""
    logps = torch.log_softmax(logits.float() / temperature, dim=-1)
    probs = logps.exp()
    entropy = -(probs * logps.clamp(min=-200)).sum(-1)  # 0 · −inf is NaN
    cdf = probs.double().cumsum(-1)  # in float32 the tail of 150,000 tokens would be lost
    token = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)  # right: never probability 0
    return token[:, 0], logps.gather(-1, token)[:, 0], entropy


def log_samples(out: Path, step: int, held_out: bool, samples: Samples, rows: list[Row], rewards: torch.Tensor):
    """Adds the samples to samples.jsonl."""
    lines = []
    for row, texts, values in zip(rows, samples.texts, rewards.tolist()):
        for text, value in zip(texts, values):
            lines.append(dict(
                step=step,
                held_out=held_out,
                prompt=row.columns["prompt"],
                completion=text,
                reward=None if math.isnan(value) else value,
            ))
    append(out / "samples.jsonl", lines)


def report(out: Path) -> list[dict]:
    """Prints three answers and the metrics of held-out prompts, before training and now. Returns all metrics."""
    history = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    samples = [json.loads(line) for line in (out / "samples.jsonl").open()]
    held_out = [sample for sample in samples if sample["held_out"]]
    now = [sample for sample in held_out if sample["step"] == history[-1]["step"]]
    for old, new in zip(held_out[:3], now):  # their prompts are the same
        prompt = new["prompt"] if isinstance(new["prompt"], str) else new["prompt"][-1]["content"]
        print(f"prompt  {prompt[-80:]!r}")  # its end, which is answered
        print(f"before  {old['completion'][:100]!r}\nnow     {new['completion'][:100]!r}")

    print(f"{'held out':31} before      now")
    for name, before in list(history[0].items())[1:]:  # all but the step
        print(f"{name:30} {before:8.3f} {history[-1][name]:8.3f}")
    print(f"see {out}")
    return history


# ---- Rewards ---------------------------------------------------------

def load_rewards(device: str, args: Args) -> list[tuple]:
    """[(name, function, weight), ..]"""
    names = [spec.partition(":")[2] for spec in args.reward]
    functions = [load_function(spec) for spec in args.reward]
    if args.reward_model:
        names.append(Path(args.reward_model).name)
        functions.append(load_reward_model(args.reward_model, device, args))
    weights = args.reward_weights or [1.0] * len(functions)
    return list(zip(names, functions, weights))


def load_function(spec: str):
    """The function that FILE.py:FUNCTION names, from the file as it is now."""
    file, _, name = spec.partition(":")
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))  # for its own imports
    return runpy.run_path(file)[name]


def compute_rewards(samples: Samples, rows: list[Row], functions: list[tuple]) -> tuple[torch.Tensor, dict]:
    """The weighted sum of the rewards, (B, k), NaN where all are None; and the mean of each reward."""
    n, rank, ranks = len(rows), process_rank(), process_count()
    own = slice(n * rank // ranks, n * (rank + 1) // ranks)  # the processes divide the rows
    texts = list(chain(*samples.texts[own]))
    k = samples.mask.shape[1]
    columns = np.repeat([row.columns for row in rows[own]], k)  # one dict per sample

    # What a function receives: lists with an item for each sample.
    inputs = {name: [row[name] for row in columns] for name in rows[0].columns}
    inputs["prompts"] = inputs.pop("prompt")
    inputs["completions"] = [text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                             for prompt, text in zip(inputs["prompts"], texts)]
    completion_ids = chain(*(completions for _, completions in samples.groups[own]))
    inputs["completion_ids"] = list(map(list, completion_ids))
    inputs["ended"] = samples.ended[own].flatten().tolist()

    total = torch.full(samples.ended.shape, math.nan)  # (B, k)
    means = {}
    for name, function, weight in functions:
        values = function(**inputs) if texts else []
        if asyncio.iscoroutine(values):
            values = RUNNER.run(values)
        if isinstance(values, (dict, set, str)) or len(values) != len(texts):
            raise BadInput(f"{name} returned {str(values)[:99]}: expected {len(texts)} numbers or None")

        values = [math.nan if value is None else float(value) for value in values]
        values = torch.tensor(sum(all_gather(values), [])).view(total.shape)
        total = torch.where(values.isnan(), total, total.nan_to_num(0.0) + weight * values)
        means[f"rewards/{name}"] = values.nanmean().item()

    if not total.nanmean().isfinite():
        raise BadInput("rewards are infinite, or all None")
    return total, means


def load_reward_model(name: str, device: str, args: Args):
    """A classifier as a reward function. Its weights wait on the host; a call copies them to the GPU."""
    tokenizer = load_tokenizer(name)
    model, info = AutoModelForSequenceClassification.from_pretrained(name, dtype="auto", output_loading_info=True)
    if info["missing_keys"] or model.config.num_labels != 1:  # missing weights would stay random
        raise BadInput(f"--reward_model {name} is no classifier with one output, or lacks weights")
    if device == "cuda":
        model._apply(torch.Tensor.pin_memory)  # pinned memory is copied faster

    @torch.no_grad()
    def score(prompts, completions, ended, **columns) -> list[float]:
        rows = []
        for prompt, completion, has_ended in zip(prompts, completions, ended):
            if isinstance(prompt, str):
                ids = tokenize(tokenizer, prompt + completion + tokenizer.eos_token * has_ended)
            else:
                *before, last = prompt
                if last["role"] == "assistant":  # a begun answer, which the sample continues
                    prompt, completion = before, [last | {"content": last["content"] + completion[0]["content"]}]
                ids = tokenizer.apply_chat_template(prompt + completion, continue_final_message=not has_ended,
                                                    return_dict=False, **args.chat_template_kwargs)
            rows.append(torch.tensor(ids))
        if max(map(len, rows)) > context_length(model.config):
            raise BadInput("a sample is too long for the reward model")

        scores = torch.zeros(len(rows))
        pad = model.config.get_text_config().pad_token_id  # the model finds the end of a row by it
        budget = 0 if pad is None else args.tokens_per_forward  # 0: each row alone
        weights = chain(model.named_parameters(), model.named_buffers())
        weights = {name: weight.to(device) for name, weight in weights}
        for batch in pack(list(map(len, rows)), budget, [1] * len(rows)):
            ids = pad_sequence([rows[i] for i in batch], batch_first=True, padding_value=-1).to(device)
            inputs = dict(input_ids=ids.where(ids >= 0, pad or 0), attention_mask=(ids >= 0).long())
            logits = torch.func.functional_call(model, weights, kwargs=inputs).logits
            scores[batch] = logits[:, 0].float().cpu()
        return scores.tolist()

    return score


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

    print(f"{len(rows)} rows to train on, {len(eval_rows)} held out")
    return rows, eval_rows


def load_rows(source: str, tokenizer, args: Args) -> list[Row]:
    """The rows of a file or of hub data. Rows that cannot be trained on are dropped and counted."""
    rows = []
    counts = Counter(rows=0)
    for number, columns in enumerate(progress_bar(read_rows(source), desc="tokenize"), 1):
        try:
            row = encode(columns, tokenizer, args)
        except Exception as error:
            raise BadInput(f"{source}, row {number}: {error!r} in {str(columns)[:300]}") from error

        counts["rows"] += 1
        if not row.prompt:
            counts["dropped: empty"] += 1
        elif len(row.prompt) > args.max_length:
            counts[f"dropped: longer than {args.max_length} tokens"] += 1
        else:
            rows.append(row)

    print(f"{source}: {len(rows)} of", "; ".join(f"{count} {note}" for note, count in counts.items()))
    if len(rows) < max(1, counts["rows"] / 2):
        raise BadInput(f"{source}: too few rows")
    names = dict.fromkeys(chain(*(row.columns for row in rows)))
    return [Row(row.prompt, names | row.columns) for row in rows]  # what a row lacks is None


def read_rows(source: str):
    """The rows of a file, or of hub data NAME, NAME:SPLIT or NAME:CONFIG:SPLIT. A row of JSON Lines is its line."""
    ending = Path(source).suffix
    if ending == ".jsonl":
        text = Path(source).read_text(encoding="utf-8-sig")
        return [line for line in text.split("\n") if line.strip()]

    import datasets
    if ending in (".json", ".csv", ".parquet"):
        return datasets.load_dataset(ending[1:], data_files=source, split="train")
    name, *config = re.split(r":(?![^\[]*\])", source)  # but not at the colon of a slice, train[:1000]
    split = config.pop() if config else "train"
    return datasets.load_dataset(name, *config, split=split)


def encode(columns: dict | str, tokenizer, args: Args) -> Row:
    """Tokenizes the prompt of a row, a dict or a line of JSON."""
    if isinstance(columns, str):
        columns = json.loads(columns)
    prompt = clean(columns["prompt"] or "")  # None: an empty cell of a CSV file
    if isinstance(prompt, str):
        ids = tokenize(tokenizer, prompt)
    else:
        options = args.chat_template_kwargs | (columns.get("chat_template_kwargs") or {})
        is_begun = prompt[-1]["role"] == "assistant"  # an answer that the samples continue
        ids = tokenizer.apply_chat_template(
            prompt, tools=columns.get("tools"), return_dict=False, add_generation_prompt=not is_begun,
            continue_final_message=is_begun, **options)
    return Row(tuple(ids), columns | {"prompt": prompt})


def clean(text: str | list | None):
    """A prompt or an answer. Messages lose columns that are null, and their parts of text are joined."""
    if isinstance(text, str) and re.match(r"\s*\[\{.(role|content).:", text):
        raise ValueError("messages written as a string")
    if not isinstance(text, list):
        return text

    messages = [{name: value for name, value in message.items() if value is not None} for message in text]
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])  # KeyError: an image
    return messages


def tokenize(tokenizer, text: str) -> list[int]:
    """Token ids of a text. They begin with the tokenizer's BOS, once, and do not end with EOS."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    full = tokenizer("a").input_ids
    plain = tokenizer("a", add_special_tokens=False).input_ids
    bos = full[:full.index(plain[0])]  # what the tokenizer puts before a text
    return ids if ids[:len(bos)] == bos else bos + ids


# ---- Models ----------------------------------------------------------

def base_of(name: str) -> str:
    """The base of an adapter, or the checkpoint itself."""
    config = transformers.utils.find_adapter_config_file(name)
    return json.loads(Path(config).read_text())["base_model_name_or_path"] if config else name


def load_tokenizer(name: str, ref_name: str | None = None):
    """The tokenizer of a checkpoint, or of the base of an adapter. A reference with another one is refused."""
    is_missing = Path(name).is_dir() and not any(Path(name).glob("tokenizer*"))
    tokenizer = AutoTokenizer.from_pretrained(base_of(name) if is_missing else name)
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
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return model


def add_adapter(model, name: str, trains: bool, args: Args):
    """The model with the LoRA adapter of a folder or hub name, or with a new one."""
    import peft
    if name == base_of(name):
        targets = ",".join(args.lora_target).split(",") if args.lora_target else "all-linear"
        config = peft.LoraConfig(
            r=args.lora_r,
            lora_alpha=args.lora_alpha or 2 * args.lora_r,
            target_modules=targets,
            task_type="CAUSAL_LM",
        )
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
    """The script, flags, rows and weights of a run. A resumed run must have the same, except for MAY_CHANGE."""
    digest = hashlib.sha256()
    for row in train_rows + [None] + eval_rows:  # None: where the held-out rows begin
        digest.update(repr(row).encode())

    digest_of = cache(checkpoint_digest)  # reads a model once that is policy and reference
    run = vars(args) | {"script": Path(__file__).name, "rows": digest.hexdigest()}
    for flag in ("model", "ref_model", "reward_model"):
        run[f"{flag}'s weights"] = run[flag] and digest_of(run[flag])
    return json.loads(json.dumps(run))  # tuples become lists


def training_state(policy, optimizer) -> dict:
    """What a step changes in place: weights, and their optimizer state, which torch creates by a step with lr 0."""
    state = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}  # a tied weight once
    moments = get_optimizer_state_dict(policy, optimizer)["state"]
    for name, values in moments.items():
        for key, value in values.items():
            state[f"optimizer.{name}.{key}"] = value.zero_()  # that step was counted
    return state


def checkpoints(out: Path) -> set[int]:
    """The steps of complete checkpoints, out/resume-STEP. Other folders that begin with resume- are the user's."""
    steps = [file.parent.name[7:] for file in out.glob("resume-*/run.json")]
    return {int(step) for step in steps if step.isdigit()}


def save_checkpoint(out: Path, step: int, state: dict):
    """Writes out/resume-STEP, run.json last: without it a folder is no checkpoint. Removes older ones."""
    folder = out / f"resume-{step}"
    shutil.rmtree(folder, ignore_errors=True)  # of a killed save
    barrier()
    files = {name: 1 + n // 64 for n, name in enumerate(state)}  # the writer holds a whole file in memory
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(folder, files, save_distributed=True))

    if is_first_process():
        write_whole(folder / "run.json", [b"{}"])  # marks the folder as complete
        for other in checkpoints(out) - {step}:
            shutil.rmtree(out / f"resume-{other}")


def restore_checkpoint(out: Path, run: dict, state: dict) -> int:
    """Refuses another run's folder, restores the newest checkpoint, cuts the logs to its step. Returns it, or 0."""
    file = out / "args.json"
    if file.exists() or (out / "metrics.jsonl").exists():  # a log without args.json is another program's
        saved = json.loads(file.read_text())
        differing = [name for name in run if saved.get(name) != run[name] and name not in MAY_CHANGE]
        if differing:
            raise BadInput(f"{out} holds a run with other {', '.join(differing)}: name another --out")

    step = max(checkpoints(out), default=0)
    if step:
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(out / f"resume-{step}"))
        print(f"resumes after step {step}")

    if is_first_process():
        write_whole(file, [json.dumps(run, indent=1).encode()])
        for log in (out / "metrics.jsonl", out / "samples.jsonl"):  # the lines of later steps will be written again
            lines = log.read_bytes().splitlines(keepends=True) if step else []
            kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step]
            write_whole(log, kept)
        if run["wandb"]:
            import wandb
            wandb.init(name=out.name, dir=out, config=run, resume="auto")
    return step


def log_metrics(out: Path, values: dict, args: Args):
    """Adds a line to metrics.jsonl, and to Weights & Biases."""
    append(out / "metrics.jsonl", [values])
    if args.wandb and is_first_process():
        import wandb
        wandb.log(values, step=values["step"])


def append(log: Path, lines: list[dict]):
    """Adds lines to a log. They are on the disk before a checkpoint of their step is."""
    if is_first_process():
        with open(log, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())


def save_model(model, tokenizer, out: Path, args: Args):
    """Writes out/model, the model or adapter in the dtype of forward passes. Then the run is finished."""
    state = get_model_state_dict(model, options=StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=True))
    if not is_first_process():
        return

    core = unwrap_model(model)
    converted = {}  # by address, so that tied weights stay one tensor
    for name, weight in state.items():
        if weight.is_floating_point() and not names_in_float32(core).search(name):
            state[name] = converted.setdefault(weight.data_ptr(), weight.to(getattr(torch, args.dtype)))

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
    except BadInput as error:
        print("rloo.py:", error, file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        error.add_note(f"pip install {error.name}")
        raise
    except torch.OutOfMemoryError as error:
        error.add_note("lower --tokens_per_forward or --rollout_tokens, or add --gradient_checkpointing")
        raise
