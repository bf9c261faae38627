"""RLOO: learn from a reward. The other samples of a prompt are the baseline.

Ahmadian et al. 2024, Back to Basics: Revisiting REINFORCE Style Optimization, arXiv:2402.14740, leave-one-out:

    (1)   ∇J(θ) = E 1/k Σ_i [ R(y_i, x) − 1/(k−1) Σ_{j≠i} R(y_j, x) ] ∇ log π(y_i|x), y_i ~ π(·|x)
    (2)   R(y, x) = reward(y, x) − β log π(y|x)/π_ref(y|x)

    python rloo.py  # the demo
    python rloo.py --model Qwen/Qwen3-0.6B --data prompts.jsonl --reward rewards.py:helpful

A prompt is encoded once for its k samples.

Data      rows `prompt`, a string or chat messages, and any columns for the reward:
          {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}
          A reward is a function(prompts, completions, **columns) -> a float or None per completion.
Shapes    B prompts per step, k samples each, T tokens in the longest: rewards and advantages are (B, k); log-probs of
          tokens are (B, k, T), 0 after the end of a sample. b: prompts in a micro-batch.
Metrics   reward, reward_std: over all samples, before KL | rewards/NAME: of one function | frac_reward_zero_std:
          fraction of prompts with equal rewards | kl: log π − log π_ref per token | entropy: nats per token |
          completions/mean_length | completions/clipped_ratio: fraction cut off by max_new_tokens | loss | clip_ratio |
          sampling/sampling_logp_difference/mean, /max: |log π − log π of the sampler| per token | grad_norm |
          learning_rate | seconds | tokens_per_second | memory_gb: GPU peak | eval_*: of one sample per held-out prompt
"""
import csv
import hashlib
import json
import math
import os
import re
import runpy
import shutil
import sys
import time
import warnings
from collections import Counter, defaultdict
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Callable, Iterator, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
import tyro
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, DynamicCache, DynamicLayer)
from transformers.modeling_layers import GradientCheckpointingLayer

from refcache import (
    BadInput, Swap, all_gather, all_reduce, barrier, check_agreement, checkpoint_digest, completion_logprobs,
    context_length, count_tokens, divide_batches, enable_shared_prompts, full_tensor, has_shared_prompts,
    memory_share, micro_batches, pack, process_group, processes, progress_bar, shard, to_device, unsharded,
    unwrap_model, write_whole)

HERE = Path(__file__).parent
DEMO = dict(
    model=f"{HERE}/demo/model",
    data=f"{HERE}/demo/prompts.jsonl",
    eval_data=f"{HERE}/demo/prompts_test.jsonl",
    reward=(f"{HERE}/demo/score.py:sentiment",),
    lr=2e-4,
)
LOGS = ("metrics.jsonl", "samples.jsonl")
MAY_CHANGE = ("out ref_cache save_every eval_every samples tokens_per_forward rollout_tokens "
              "gradient_checkpointing").split()  # when a run is resumed


@dataclass
class Args:
    model: str | None = None  # checkpoint folder or hub name; None: the demo
    data: str | None = None  # prompts: .jsonl .json .csv .parquet, or hub NAME[:SPLIT]
    eval_data: str | None = None  # held-out prompts; None: split off data
    eval_size: int = 64  # prompts split off data, at most a tenth
    as_chat: bool = False  # strings become messages of a user and an assistant
    chat_template_kwargs: str = "{}"  # JSON for the template, such as {"enable_thinking": false}
    max_length: int = 1024  # tokens of a prompt; longer ones are dropped and counted
    out: str = f"out/{Path(__file__).stem}"  # folder of the run

    reward: tuple[str, ...] = ()  # FILE.py:FUNCTION; several are summed
    reward_model: str | None = None  # classifier with one output: folder or hub name
    reward_weights: tuple[float, ...] = ()  # of the functions, then the model; empty: 1 each

    ref: Literal["swap", "live"] = "swap"  # see README
    ref_model: str | None = None  # None: the policy before training
    sync_reference: int | None = None  # steps between copies of the policy into the reference
    sync_mix: float = 1.0  # weight of the policy in each copy

    lora_r: int | None = None  # train a LoRA adapter of this rank instead of all weights
    lora_alpha: float | None = None  # LoRA's scale is alpha / r; None: 2 r
    lora_target: str = "all-linear"  # or names of layers: q_proj,v_proj

    k: int = 4  # samples per prompt
    beta: float = 0.05  # KL penalty per nat, part of the reward; 0: none
    updates_per_rollout: int = 1  # optimizer steps per rollout
    clip_eps: float = 0.2  # the ratio is clipped to 1 ± clip_eps
    mask_truncated: bool = False  # leave out samples without EOS, also from the baseline
    temperature: float = 1.0  # of sampling, and of all log-probs
    max_new_tokens: int = 128  # per sample

    epochs: float = 1.0  # passes over the data
    steps: int | None = None  # rollouts; None, -1: from epochs; 0: only evaluate
    batch_size: int = 8  # prompts per step
    lr: float | None = None  # peak learning rate; None: 1e-6, in the demo 2e-4
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # after the warmup
    warmup: float = 0.1  # steps in which lr rises, or their fraction if below 1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0: no clipping
    seed: int = 0

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of forwards; auto: bfloat16 on CUDA
    tokens_per_forward: int = 16384  # memory and speed only, never the result
    rollout_tokens: int = 65536  # places in the key-value cache; likewise
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"  # likewise; auto: on if the GPU is too small

    save_every: int = 50  # steps between checkpoints; 0: none
    eval_every: int | None = None  # steps between evaluations; None: before and after only


# ---- The loss --------------------------------------------------------

def compute_advantages(rewards: torch.Tensor, old_logps: torch.Tensor, ref_logps: torch.Tensor, beta: float):
    """Equation (2), then (1): rewards (B, k), log-probs (B, k, T) -> (B, k)."""
    kl = (old_logps - ref_logps).sum(dim=2)  # k1: in a reward it is unbiased, k3 in a loss is not (arXiv:2512.21852)
    return leave_one_out(rewards - beta * kl)


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """(B, k) -> (B, k): each reward minus the mean of the prompt's other samples. A sample with NaN is left out: its
    advantage is 0, and no baseline contains it. Division by the standard deviation would bias the gradient."""
    counts = (~rewards.isnan()).sum(dim=1, keepdim=True)  # (B, 1)
    sum_of_others = rewards.nansum(dim=1, keepdim=True) - rewards
    advantages = rewards - sum_of_others / (counts - 1)  # of (1)
    return torch.where(counts > 1, advantages, 0.0).nan_to_num(0.0)


def policy_loss(logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, clip_eps: float):
    """The loss of each sample, (B, k), or of each token, (B, k, T), and whether its ratio is clipped. Where
    old_logp = logp the gradient is −advantage · ∇ log π(y|x), as in (1)."""
    log_ratio = (logp - old_logp).clamp(max=88)  # e^89 is inf, and inf · 0 is NaN
    ratio = torch.exp(log_ratio)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages
    return -torch.minimum(unclipped, clipped), clipped < unclipped


# ---- A batch ---------------------------------------------------------

class Row(NamedTuple):
    prompt: tuple[int, ...]  # token ids
    columns: dict  # of the file: the prompt, and what the reward needs


class Samples(NamedTuple):
    groups: list  # [(prompt, [y_1 .. y_k]), ..] for B prompts: token ids, with stop tokens
    texts: list[list[str]]  # k per prompt
    mask: torch.Tensor  # (B, k, T) bool: whether the sample has a token t
    ended: torch.Tensor  # (B, k) bool: not cut off by max_new_tokens
    logps: torch.Tensor  # (B, k, T): of the sampler, 0 after the end
    entropy: torch.Tensor  # (B, k): summed over tokens


def token_logprobs(model, groups: list, T: int, args: Args) -> torch.Tensor:
    """log π of each token of these samples, (b, k, T), 0 after the end."""
    logps = completion_logprobs(model, groups, temperature=args.temperature)
    return torch.stack([torch.stack([F.pad(y, (0, T - len(y))) for y in completions]) for completions in logps])


@torch.no_grad()
def score_reference(reference, samples: Samples, device: str, args: Args) -> torch.Tensor:
    """log π_ref of each token, (B, k, T), in the micro-batches of run_batch; 0 without a reference."""
    ref_logps = torch.zeros(samples.mask.shape, device=device)
    if reference is None:
        return ref_logps
    with reference as model:
        for indices, counts in micro_batches(model, samples.groups, args.tokens_per_forward):
            micro = [samples.groups[i] for i in indices]
            indices = to_device(indices, device)
            ref_logps[indices] += token_logprobs(model, micro, ref_logps.shape[2], args) * counts
    return all_reduce(ref_logps)


def run_batch(policy, samples: Samples, rewards: torch.Tensor, ref_logps: torch.Tensor,
              old_logps: torch.Tensor | None, args: Args) -> tuple[torch.Tensor, dict]:
    """Adds the gradient of the mean loss. rewards (B, k), log-probs (B, k, T). old_logps None: no update since rollout,
    so this forward gives them, and the KL penalty in the advantages. Returns log π and metrics."""
    divisor = rewards.numel()  # the loss is a mean over samples
    all_logps = torch.zeros(samples.mask.shape, device=rewards.device)
    loss_sum = torch.zeros((), device=rewards.device)
    clip_sum = torch.zeros((), device=rewards.device)
    for indices, counts in micro_batches(policy, samples.groups, args.tokens_per_forward):
        micro = [samples.groups[i] for i in indices]
        indices = to_device(indices, rewards.device)  # a list as an index would wait for the GPU
        logps = token_logprobs(policy, micro, all_logps.shape[2], args)  # (b, k, T)
        old = logps.detach() if old_logps is None else old_logps[indices]
        advantages = compute_advantages(rewards[indices], old, ref_logps[indices], args.beta)  # (b, k)
        losses, is_clipped = policy_loss(logps.sum(dim=2), old.sum(dim=2), advantages, args.clip_eps)  # (b, k)
        loss = losses.sum() / divisor * counts
        loss.backward()

        all_logps[indices] += logps.detach() * counts
        loss_sum += loss.detach()
        clip_sum += is_clipped.sum() * counts
    values = {"loss": all_reduce(loss_sum).item(), "clip_ratio": all_reduce(clip_sum).item() / divisor}
    return all_reduce(all_logps), values


def metrics(samples: Samples, rewards: torch.Tensor) -> dict[str, float]:
    """Of samples and their rewards, (B, k)."""
    is_known = ~rewards.isnan()
    known = rewards[is_known]
    highest = rewards.nan_to_num(-math.inf).amax(dim=1)
    lowest = rewards.nan_to_num(math.inf).amin(dim=1)
    return {
        "reward": known.mean().item(),
        "reward_std": known.std(correction=min(1, len(known) - 1)).item(),
        "frac_reward_zero_std": ((highest <= lowest) & (is_known.sum(dim=1) > 1)).float().mean().item(),
        "completions/mean_length": samples.mask.sum(dim=2).float().mean().item(),
        "completions/clipped_ratio": 1 - samples.ended.float().mean().item(),
        "entropy": (samples.entropy.sum() / samples.mask.sum()).item(),
    }


@torch.no_grad()
def evaluate(policy, tokenizer, rows: list[Row], reference, functions: list, step: int, out: Path, args: Args) -> dict:
    if not rows:
        return {}
    samples = rollout(policy, tokenizer, [row.prompt for row in rows], 1, 0, args)
    rewards, reward_means = compute_rewards(samples, rows, functions)
    log_samples(out, step, True, samples, rows, rewards)
    values = metrics(samples, rewards) | reward_means
    del values["frac_reward_zero_std"]  # of one sample
    ref_logps = score_reference(reference, samples, policy.device, args)
    if reference:
        values["kl"] = ((samples.logps - ref_logps.cpu()).sum() / samples.mask.sum()).item()
    return {f"eval_{name}": value for name, value in values.items()}


# ---- Training --------------------------------------------------------

@process_group()
def main(args: Args) -> list[dict]:
    """Trains. Returns the lines of metrics.jsonl, one dict per step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.k < 2:
        raise BadInput("--k must be at least 2")
    args = resolve(args, new_tokens=args.max_new_tokens)
    out = Path(args.out)
    lock = lock_folder(out)

    tokenizer = load_tokenizer(args.model, args.ref_model)
    train_rows, eval_rows = load_data(tokenizer, args)
    print(f"{len(train_rows)} prompts to train on, {len(eval_rows)} held out. The first:")
    print(tokenizer.decode(train_rows[0].prompt))
    functions = load_rewards(device, args)
    batch_size = min(args.batch_size, len(train_rows))
    steps = math.ceil(args.epochs * len(train_rows) / batch_size) if args.steps in (None, -1) else args.steps
    run = describe_run(train_rows, eval_rows, args.reward, args)

    torch.manual_seed(args.seed)  # for a new adapter
    policy = load_model(args.model, device, args, trains=True)
    check_sampler(policy, tokenizer, args)
    reference = load_reference(policy, device, args) if args.beta else None
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    decaying = {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": args.weight_decay}
    others = {"params": [weight for weight in weights if weight.dim() <= 1], "weight_decay": 0.0}  # norms and biases
    optimizer = torch.optim.AdamW([decaying, others], lr=0.0, fused=True)  # lr is set in the loop
    state = {"training": init_training_state(policy, optimizer)}  # what a checkpoint holds
    if args.sync_reference and reference:
        state["reference"] = reference
    last_step = restore_checkpoint(out, run, state)
    if last_step == 0:
        values = {"step": 0}
        values |= evaluate(policy, tokenizer, eval_rows, reference, functions, 0, out, args)
        append(out / "metrics.jsonl", [values])
    if steps < 1:
        barrier()  # the first process has written
        return report(out)

    progress = progress_bar(range(last_step + 1, steps + 1), desc="train", initial=last_step, total=steps)
    for step in progress:
        began = time.monotonic()
        torch.manual_seed(args.seed + step)  # the same in a resumed run
        rows = batch_rows(step, train_rows, batch_size, args.seed)
        samples = rollout(policy, tokenizer, [row.prompt for row in rows], args.k, step, args)
        rewards, reward_means = compute_rewards(samples, rows, functions)
        values = {"step": step, **metrics(samples, rewards), **reward_means}
        log_samples(out, step, False, samples, rows, rewards)
        if step == 10 and values["frac_reward_zero_std"] == 1:
            progress.write("All samples of each prompt have equal rewards: nothing is learned")
        if step == 1 and not samples.ended.any():
            stops = tokenizer.convert_ids_to_tokens(stop_tokens(policy, tokenizer))
            progress.write(f"No sample ends: raise --max_new_tokens? Does the template end turns with one of {stops}?")
        if args.mask_truncated:
            rewards = torch.where(samples.ended, rewards, math.nan)

        ref_logps = score_reference(reference, samples, device, args)
        old_logps = None  # log π of the policy that sampled: the first update's forward gives it
        for _ in range(args.updates_per_rollout):
            logps, losses = run_batch(policy, samples, rewards.to(device), ref_logps, old_logps, args)
            if old_logps is None:
                old_logps = logps
            values |= losses
            grad_norm = torch.nn.utils.clip_grad_norm_(weights, args.max_grad_norm or math.inf)
            values["grad_norm"] = full_tensor(grad_norm).item()
            values["learning_rate"] = learning_rate(step, steps, args)
            if not math.isfinite(values["loss"] + values["grad_norm"]):
                raise BadInput(f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}: lower --lr")
            for group in optimizer.param_groups:
                group["lr"] = values["learning_rate"]
            optimizer.step()
            optimizer.zero_grad()

        difference = (old_logps.cpu() - samples.logps).abs()
        values["sampling/sampling_logp_difference/mean"] = (difference.sum() / samples.mask.sum()).item()
        values["sampling/sampling_logp_difference/max"] = difference.max().item()
        if reference:
            lengths = samples.mask.sum(dim=2).to(device)  # (B, k)
            ratios = (old_logps - ref_logps).sum(dim=2)  # (B, k)
            values["kl"] = (ratios.sum() / lengths.sum()).item()
            if step == 1 and args.ref_model == args.model:
                check_agreement((ratios / lengths).abs().mean().item(), args.dtype)
        if args.sync_reference and reference and step % args.sync_reference == 0:
            reference.sync(args.sync_mix)
        values["seconds"] = time.monotonic() - began
        values["tokens_per_second"] = count_tokens(samples.groups) / values["seconds"]
        if device == "cuda":
            values["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9  # peak

        if step == steps or (args.eval_every and step % args.eval_every == 0):
            values |= evaluate(policy, tokenizer, eval_rows, reference, functions, step, out, args)
        append(out / "metrics.jsonl", [values])
        if args.save_every and (step == steps or step % args.save_every == 0):
            save_checkpoint(out, step, run, state)
        progress.set_postfix(reward=values["reward"], tokens_per_second=values["tokens_per_second"], refresh=False)

    save_model(policy, tokenizer, out / "model")
    lock.release()
    history = report(out)
    print(f"see {out}/model and {out}/samples.jsonl; for curves: python benchmarks/plot.py {out}")
    return history


# ---- Sampling --------------------------------------------------------

@torch.no_grad()
def rollout(policy, tokenizer, prompts: list[tuple], k: int, step: int, args: Args) -> Samples:
    """y_1 .. y_k ~ π(·|x) of (1). Token t of sample i of prompt b is drawn with the uniform number u[b, i, t], which
    depends on seed and step: batching changes no sample."""
    shape = (len(prompts), k, args.max_new_tokens)
    u = torch.from_numpy(generator(args.seed, "rollout", step).random(shape))
    core = unwrap_model(policy)
    stops = stop_tokens(core, tokenizer)
    lengths = [len(prompt) + args.max_new_tokens for prompt in prompts]
    budget = args.rollout_tokens if has_shared_prompts(policy) else 0  # 0: one by one, padding could change samples
    batches = divide_batches(partial(pack, lengths, rows=[k] * len(prompts)), budget)

    tokens = torch.zeros(shape, dtype=torch.long, device=core.device)
    logps = torch.zeros(shape, device=core.device)
    entropy = torch.zeros(shape[:2], device=core.device)
    with unsharded(policy):
        for batch in progress_bar(batches, desc="sample", unit="batch"):
            if batch:
                drawn = decode(core, [prompts[i] for i in batch], u[batch].to(core.device), stops, args)
                places = to_device(batch, core.device)
                tokens[places], logps[places], entropy[places] = drawn
    tokens, logps, entropy = (all_reduce(tensor).cpu() for tensor in (tokens, logps, entropy))
    mask = tokens >= 0
    T = mask.sum(dim=2).max()
    completions = [[tuple(y[y >= 0].tolist()) for y in ys] for ys in tokens]
    return Samples(
        groups=list(zip(prompts, completions)),
        texts=[tokenizer.batch_decode(ys, skip_special_tokens=True) for ys in completions],
        mask=mask[..., :T],
        ended=torch.tensor([[y[-1] in stops for y in ys] for ys in completions]),
        logps=logps[..., :T],
        entropy=entropy,
    )


class GrowingLayer(DynamicLayer):
    """A key-value cache with room for 64 more tokens: torch.cat would copy all of it for each token."""
    room = None

    def update(self, key, value, *args, **kwargs):
        n = self.get_seq_length()
        if n == 0:  # the prompts
            return super().update(key, value, *args, **kwargs)
        if self.room is None or self.room[0].shape[2] == n:
            self.room = [F.pad(x, (0, 0, 0, 64)) for x in (self.keys, self.values)]
        for buffer, new in zip(self.room, (key, value)):
            buffer[:, :, n:n + 1] = new
        self.keys, self.values = (buffer[:, :, :n + 1] for buffer in self.room)
        return self.keys, self.values

    def batch_select_indices(self, indices):
        super().batch_select_indices(indices)
        self.room = None


def decode(core, prompts: list[tuple], u: torch.Tensor, stops: list[int], args: Args) -> tuple[torch.Tensor, ...]:
    """Samples of some prompts: tokens (B, k, T), -1 after the end; log-probs (B, k, T), 0 after it; entropy (B, k)."""
    B, k, T = u.shape
    device = core.device
    stops = torch.tensor(stops, dtype=torch.long, device=device)
    share = has_shared_prompts(core)
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], True, -1, "left").to(device)  # (B, longest)
    mask = (ids >= 0).long()
    ids = ids.clamp(min=0)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    if share:  # encode every prompt once, then copy its keys and values to k rows
        cache = DynamicCache(config=core.config)
        cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
        out = core(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
                   logits_to_keep=1)
        cache.batch_repeat_interleave(k)
        out.logits = out.logits.repeat_interleave(k, 0)
        mask = mask.repeat_interleave(k, 0)
    else:
        out = core(input_ids=ids.repeat_interleave(k, 0), use_cache=True)
    logits = out.logits[:, -1]
    positions = positions[:, -1:].repeat_interleave(k, 0)
    cache = {name: out[name] for name in ("past_key_values", "cache_params") if out.get(name) is not None}

    u = u.flatten(0, 1)  # (B · k, T), as all that follows
    tokens = torch.full((B * k, T), -1, device=device)
    logps, entropies = torch.zeros(2, B * k, T, device=device)
    rows = torch.arange(B * k, device=device)  # the samples in the rows of the cache
    alive = rows >= 0
    for t in range(T):
        token, logp, entropy = draw(logits, u[rows, t], args.temperature)
        tokens[rows, t] = torch.where(alive, token, -1)
        logps[rows, t] = torch.where(alive, logp, 0.0)
        entropies[rows, t] = torch.where(alive, entropy, 0.0)
        alive = alive & ~torch.isin(token, stops)
        unfinished = alive.sum().item()  # waits for the GPU
        if not unfinished or t == T - 1:
            break
        if share and unfinished <= 0.75 * len(rows):  # together: each removal copies the cache
            stay = alive.nonzero()[:, 0]
            cache["past_key_values"].batch_select_indices(stay)
            rows, mask, positions, token, alive = (x[stay] for x in (rows, mask, positions, token, alive))
        positions = positions + 1
        inputs = {"input_ids": token[:, None], "position_ids": positions}
        if share:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            inputs["attention_mask"] = mask
        logits = core(**inputs, **cache, use_cache=True).logits[:, -1]

    return tokens.view(B, k, T), logps.view(B, k, T), entropies.sum(dim=1).view(B, k)


def draw(logits: torch.Tensor, u: torch.Tensor, temperature=1.0) -> tuple[torch.Tensor, ...]:
    """(n, V) logits, (n,) uniform numbers -> (n,) tokens, their log-probs, and entropies."""
    logps = torch.log_softmax(logits.float() / temperature, dim=-1)
    probs = logps.exp()
    entropy = -(probs * logps.clamp(min=-200)).sum(-1)  # 0 · −inf is NaN
    cdf = probs.double().cumsum(-1)  # in float32 the tail of 150,000 tokens would be lost
    token = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)  # right: never probability 0
    token = token.clamp(max=probs.shape[-1] - 1)
    return token[:, 0], logps.gather(-1, token)[:, 0], entropy


def check_sampler(policy, tokenizer, args: Args):
    """Log-probs with a key-value cache must be those without."""
    args = replace(args, max_new_tokens=8)
    ids = torch.linspace(1, policy.config.get_text_config().vocab_size - 1, 13).long().tolist()
    samples = rollout(policy, tokenizer, [tuple(ids[:8]), tuple(ids[8:])], 2, 0, args)
    with torch.no_grad():
        logp = token_logprobs(policy, samples.groups, samples.mask.shape[2], args).sum(dim=2).cpu()
    difference = ((samples.logps.sum(dim=2) - logp).abs() / samples.mask.sum(dim=2)).max()  # nats per token
    if not difference < (5e-2 if args.dtype == "bfloat16" else 1e-3):
        raise BadInput(f"{args.model}: a key-value cache changes log-probs by {difference:.2g} nats per token")


# ---- Rewards ---------------------------------------------------------

def compute_rewards(samples: Samples, rows: list[Row], functions: list[tuple]) -> tuple[torch.Tensor, dict]:
    """The weighted sum of the rewards, (B, k), or NaN; and the mean of each."""
    rank, ranks = processes()
    own = slice(len(rows) * rank // ranks, len(rows) * (rank + 1) // ranks)  # of this process
    k = samples.mask.shape[1]
    repeated = [row.columns for row in rows[own] for _ in range(k)]
    names = {name for row in rows for name in row.columns}
    inputs = {name: [columns.get(name) for columns in repeated] for name in names}
    inputs["prompts"] = inputs.pop("prompt")
    inputs["completions"] = [text for texts in samples.texts[own] for text in texts]
    inputs["completion_ids"] = [list(y) for _, ys in samples.groups[own] for y in ys]
    inputs["ended"] = samples.ended[own].flatten().tolist()
    if not isinstance(rows[0].columns["prompt"], str):
        inputs["completions"] = [[{"role": "assistant", "content": text}] for text in inputs["completions"]]
    all_values = []
    means = {}
    for name, function, weight in functions:
        values = function(**deepcopy(inputs)) if repeated else []  # a function may change its arguments
        if len(values) != len(repeated):
            raise BadInput(f"{name} gave {len(values)} rewards for {len(repeated)} completions")
        values = [math.nan if value is None else float(value) for value in values]
        values = torch.tensor([value for part in all_gather(values) for value in part])  # (B · k,)
        if values.isinf().any():
            raise BadInput(f"{name} gave an infinite reward: None would leave a completion out")
        means[f"rewards/{name}"] = values.nanmean().item()
        all_values.append(weight * values)
    all_values = torch.stack(all_values)
    has_reward = ~all_values.isnan().all(dim=0)
    if not has_reward.any():
        raise BadInput("no completion of a step has a reward")
    return torch.where(has_reward, all_values.nansum(dim=0), math.nan).view(-1, k), means


def log_samples(out: Path, step: int, held_out: bool, samples: Samples, rows: list[Row], rewards: torch.Tensor):
    lines = []
    for row, texts, row_rewards in zip(rows, samples.texts, rewards.tolist()):
        for text, reward in zip(texts, row_rewards):
            line = dict(step=step, held_out=held_out, prompt=row.columns["prompt"], completion=text)
            lines.append(line | {"reward": None if math.isnan(reward) else reward})
    append(out / "samples.jsonl", lines)


def load_rewards(device: str, args: Args) -> list[tuple]:
    """[(name, function, weight), ..]"""
    names = [spec.partition(":")[2] for spec in args.reward]
    if len(set(names)) < len(names):
        names = list(args.reward)
    functions = [load_function(spec) for spec in args.reward]
    if args.reward_model:
        names.append(Path(args.reward_model).name)
        functions.append(RewardModel(args.reward_model, device, args))
    if not names:
        raise BadInput("give --reward or --reward_model")
    return list(zip(names, functions, args.reward_weights or [1.0] * len(names), strict=True))


class RewardModel:
    """A classifier as a reward function. Between calls it is on the CPU."""

    def __init__(self, name: str, device: str, args: Args):
        self.device = device
        self.args = args
        self.tokenizer = load_tokenizer(name)
        self.model = load_checkpoint(AutoModelForSequenceClassification, name)
        if self.model.config.num_labels != 1:
            raise BadInput(f"{name} has {self.model.config.num_labels} outputs instead of 1")

    @torch.no_grad()
    def __call__(self, prompts, completions, ended, **columns) -> list[float]:
        texts = []
        for prompt, completion, has_ended in zip(prompts, completions, ended):
            mark = "" if has_ended else "\uffff"  # in no text; what follows it was not sampled
            if isinstance(prompt, str):
                completion += mark
            else:
                completion = [completion[0] | {"content": completion[0]["content"] + mark}]
            text = render(self.tokenizer, prompt, [completion], self.args, {})[1]
            texts.append(text.partition("\uffff")[0])
        rows = [torch.tensor(ids) for ids in tokenize(self.tokenizer, texts, add_bos=isinstance(prompts[0], str))]
        if max(map(len, rows)) > context_length(self.model.config):
            raise BadInput("too long for the reward model")
        pad = self.model.config.pad_token_id  # the model finds a row's end by it
        budget = 0 if pad is None else self.args.tokens_per_forward  # 0: each row alone
        scores = torch.zeros(len(rows))
        self.model.to(self.device)
        for batch in pack([len(row) for row in rows], budget, [1] * len(rows)):
            ids = pad_sequence([rows[i] for i in batch], True, pad or 0).to(self.device)
            mask = pad_sequence([torch.ones_like(rows[i]) for i in batch], True).to(self.device)
            scores[batch] = self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float().cpu()
        self.model.to("cpu")
        torch.cuda.empty_cache()
        return scores.tolist()


# ---- Rows of the data ------------------------------------------------

COLUMNS = 'prompt, as a string or a list of {"role", "content"}'


def load_rows(source: str, tokenizer, args: Args) -> list[Row]:
    return [Row(prompt, columns) for prompt, _, _, columns in encode(tokenizer, source, lambda row: [], args)]


# ---- Data: the same in dpo.py, kto.py and rloo.py --------------------

def load_data(tokenizer, args) -> tuple[list, list]:
    """Rows to train on, and held-out rows: of --eval_data, or all rows of some prompts."""
    rows = load_rows(args.data, tokenizer, args)
    if args.eval_data:
        return rows, load_rows(args.eval_data, tokenizer, args)
    prompts = sorted({row.prompt for row in rows})
    order = generator(0, "hold_out").permutation(len(prompts))
    held_out = {prompts[i] for i in order[:min(args.eval_size, len(prompts) // 10)]}
    return [row for row in rows if row.prompt not in held_out], [row for row in rows if row.prompt in held_out]


def read_rows(source: str) -> list:
    """The rows of a file (of JSON Lines the lines), or of a hub dataset NAME[:SPLIT]."""
    match Path(source).suffix:
        case ".jsonl" | ".json":
            text = Path(source).read_text(encoding="utf-8-sig")
            return json.loads(text) if text.lstrip().startswith("[") else text.split("\n")
        case ".csv":
            return list(csv.DictReader(open(source, encoding="utf-8-sig", newline="")))
        case ".parquet":
            import pyarrow.parquet
            return pyarrow.parquet.read_table(source).to_pylist()
        case _:
            import datasets
            name, _, split = source.partition(":")
            return list(datasets.load_dataset(name, split=split or "train"))


def encode(tokenizer, source: str, answers_of: Callable, args) -> Iterator[tuple]:
    """Tokenizes a file: prompt ids, [ids of prompt + answer, ..], [where the answer begins, ..], columns.
    Drops rows that cannot be trained on, and counts them."""
    try:
        file_rows = read_rows(source)
    except Exception as error:
        raise BadInput(f"{source}: no .jsonl .json .csv .parquet (needs pyarrow) or hub data (needs datasets): {error}")
    rows = []
    kinds = set()
    counts = Counter()
    for number, row in enumerate(file_rows, 1):
        if isinstance(row, str) and not row.strip():
            continue
        columns = {}
        try:
            columns = dict(json.loads(row) if isinstance(row, str) else row)
            if None in columns:
                raise ValueError("more cells than the header")
            prompt, answers = split_prompt(columns.get("prompt"), answers_of(columns), args.as_chat, counts)
            texts = render(tokenizer, prompt, answers, args, columns)
            rows.append((restore_prompt(texts, answers, tokenizer.eos_token, counts), columns | {"prompt": prompt}))
            kinds.add((type(prompt), columns.get("prompt") is None))
            if len(kinds) > 1:
                raise ValueError("unlike the rows before: strings, messages, or no prompt")
        except Exception as error:
            if isinstance(error, (LookupError, TypeError, AttributeError)):
                error = f"expected {COLUMNS}"
            raise BadInput(f"{source}:{number}: {error}; found {', '.join(map(str, columns))}: {str(row)[:200]}")
    if not rows:
        raise BadInput(f"{source} holds no rows")
    kind, lacks_prompt = kinds.pop()
    if kind is str and tokenizer.chat_template and not lacks_prompt:
        print(f"{source}: strings are trained without the model's chat template; --as_chat applies it")

    kept = 0
    lengths = []
    same = {}  # one object for equal ids: 8 bytes per token instead of 40
    all_ids = tokenize(tokenizer, [text for texts, _ in rows for text in texts], add_bos=kind is str)
    for texts, columns in rows:
        prompt, *sequences = [tuple(same.setdefault(i, i) for i in next(all_ids)) for _ in texts]
        begins = [len(os.path.commonprefix([prompt, ids])) for ids in sequences]  # a token may span the prompt's end
        answers = [ids[begin:] for ids, begin in zip(sequences, begins)]
        short = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers if len(ids) < 20]
        length = max(map(len, [prompt, *sequences]))
        if not min(begins, default=len(prompt)) or not all(text.strip() for text in short):
            counts["dropped: empty, or no prompt and no common beginning"] += 1
        elif len(set(sequences)) < len(sequences):
            counts["dropped: equal answers"] += 1
        elif length > args.max_length:
            counts[f"dropped: longer than {args.max_length} tokens"] += 1
            lengths.append(length)
        else:
            kept += 1
            lengths.append(length)
            yield prompt, sequences, begins, columns
    next(all_ids, None)  # ends its progress bar
    notes = [f"{count} {note}" for note, count in counts.items() if count]
    print(f"{source}: {kept} of {len(rows)} rows", *notes, sep="; ")
    if 2 * kept < len(rows):
        if 2 * len(lengths) >= len(rows):
            enough = np.quantile(lengths, 0.95, method="inverted_cdf")
            notes.append(f"--max_length {enough} keeps 95 %, if the model allows it")
        raise BadInput(f"{source}: too few rows ({', '.join(notes)})")


def split_prompt(prompt, answers: list, as_chat: bool, counts: Counter) -> tuple[str | list, list]:
    """Prompt and answers as strings or messages. A prompt of None becomes what the answers have in common."""
    for text in (prompt, *answers):
        if isinstance(text, str) and re.match(r"""(?s)\s*\[?\{.*['"]role['"]:""", text) and "content" in text:
            raise ValueError("messages written as a string")
    if as_chat and (prompt is None or "\n\nHuman:" in prompt) and isinstance(prompt or answers[0], str):
        raise ValueError("--as_chat needs a prompt of one turn (Anthropic's HH: demo/prepare_hh.py)")
    if prompt is None:
        if len(answers) < 2:
            raise KeyError("prompt")
        common = os.path.commonprefix([list(map(str, answer)) for answer in answers])  # characters or messages
        prompt = answers[0][:len(common)]
        if isinstance(prompt, str):
            prompt = prompt.removesuffix(" ")  # a space belongs to the token that follows it
        answers = [answer[len(prompt):] for answer in answers]
    if isinstance(prompt, str) and answers and not isinstance(answers[0], str):
        prompt = [{"role": "user", "content": prompt}]
    is_short = isinstance(prompt, str) and len(prompt) <= 20  # an answer may begin with the same word
    if answers and not is_short and all(answer[:len(prompt)] == prompt for answer in answers):
        answers = [answer[len(prompt):] for answer in answers]
        counts["with answers that repeat the prompt"] += 1
    roles = {message["role"] for answer in answers if isinstance(answer, list) for message in answer[:1] + answer[-1:]}
    if roles & {"user", "system"}:
        raise ValueError("an answer begins or ends with a user or system message")
    if as_chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt.strip()}]
        answers = [[{"role": "assistant", "content": answer.strip()}] for answer in answers]
    return prompt, answers


def render(tokenizer, prompt, answers: list, args, columns: dict) -> list[str]:
    """The text of the prompt, and of prompt + each answer. Strings end with EOS, chats as their template says."""
    if isinstance(prompt, str):
        eos = tokenizer.eos_token
        if answers and eos is None:
            raise ValueError("the tokenizer has no EOS token")
        return [prompt] + [prompt + answer.removesuffix(eos) + eos for answer in answers]
    options = {"tokenize": False, "tools": columns.get("tools"), **json.loads(args.chat_template_kwargs)}
    options |= columns.get("chat_template_kwargs") or {}
    ending = "continue_final_message" if prompt[-1]["role"] == "assistant" else "add_generation_prompt"
    texts = [tokenizer.apply_chat_template(prompt, **{ending: True}, **options)]
    for answer in answers:
        before = prompt
        if answer and before[-1]["role"] == answer[0]["role"] == "assistant":  # one message, not two
            answer = [answer[0] | {"content": before[-1]["content"] + answer[0]["content"]}, *answer[1:]]
            before = before[:-1]
        texts.append(tokenizer.apply_chat_template(before + answer, **options))
    return texts


def restore_prompt(texts: list[str], answers: list, eos: str, counts: Counter) -> list[str]:
    """The texts with the prompt that a model samples after: some templates, as Mistral's, render another before an
    answer. What follows it begins at the last place where the answer's words stand."""
    restored = texts[:1]
    for text, answer in zip(texts[1:], answers):
        if not text.startswith(texts[0]):
            start = len(text.rpartition(eos)[0] or text)
            for message in reversed(answer):
                start = text.rfind(message["content"].strip(), 0, start)
                if start < 0:
                    raise ValueError("the chat template leaves out words of the answer")
            if text[:start].endswith(" ") and not texts[0].endswith(" "):
                start -= 1  # Mistral's space before an answer
            text = texts[0] + text[start:]
        restored.append(text)
    counts["whose prompt reads differently before an answer"] += restored != texts
    return restored


def tokenize(tokenizer, texts: list[str], add_bos: bool) -> Iterator[list[int]]:
    """Token ids of each text, with the tokenizer's BOS unless it is there already."""
    plain, full = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    bos = full[:full.index(plain[0])] if add_bos else []
    for start in progress_bar(range(0, len(texts), 1024), desc="tokenize", unit="batch"):
        for ids in tokenizer(texts[start:start + 1024], add_special_tokens=False, verbose=False).input_ids:
            yield ids if ids[:len(bos)] == bos else bos + ids


# ---- Models: the same in dpo.py, kto.py and rloo.py ------------------

def base_of(name: str) -> str:
    """The base of an adapter, or the checkpoint itself."""
    config = transformers.utils.find_adapter_config_file(name)
    return json.loads(Path(config).read_text())["base_model_name_or_path"] if config else name


def load_tokenizer(name: str, ref_name: str | None = None):
    """Of a checkpoint or its base. Refuses a reference with another one."""
    is_missing = Path(name).is_dir() and not any(Path(name).glob("tokenizer*"))
    tokenizer = AutoTokenizer.from_pretrained(base_of(name) if is_missing else name)
    if ref_name and load_tokenizer(ref_name).get_vocab() != tokenizer.get_vocab():
        raise BadInput(f"{ref_name} has another tokenizer than {name}")
    return tokenizer


def stop_tokens(core, tokenizer) -> list[int]:
    """The ids that end a completion."""
    stops = np.atleast_1d(core.generation_config.eos_token_id).tolist()  # it is a number, a list or None
    return sorted({tokenizer.eos_token_id, *stops} - {None})


def load_model(name: str, device: str, args, trains: bool = False):
    """The policy if it `trains`, else a frozen reference in the dtype of forwards. In eval mode: dropout would be noise
    in every log-ratio."""
    base = base_of(name)
    trains_all = trains and base == name and not args.lora_r
    model = load_checkpoint(AutoModelForCausalLM, base, "auto" if trains_all else args.dtype)
    model.requires_grad_(trains_all)
    for target in args.lora_target.split(","):
        if target != "all-linear" and not any(f".{name}".endswith(f".{target}") for name, _ in model.named_modules()):
            raise BadInput(f"--lora_target {target}: {base} has no such layer")
    if base != name or (trains and args.lora_r):
        model = add_adapter(model, name if base != name else None, trains, args)
    if processes()[1] > 1 or (trains and args.dtype == "bfloat16"):
        shard(model, device, args.dtype)
    model.eval().to(device)
    if trains_all:
        model.float()
    enable_shared_prompts(model)
    is_large = trains and device == "cuda" and memory_share(model, args.tokens_per_forward) > 0.85
    if trains and (args.gradient_checkpointing == "on" or (is_large and args.gradient_checkpointing == "auto")):
        print("gradient checkpointing is on")
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):  # transformers' own way needs training mode
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return model


def load_checkpoint(kind, name: str, dtype: str = "auto"):
    name = os.path.abspath(name) if Path(name).is_dir() else name  # an adapter's config stores it
    model, info = kind.from_pretrained(name, dtype=dtype, output_loading_info=True)
    if info["missing_keys"]:
        raise BadInput(f"{name} has no weights for {min(info['missing_keys'])}")
    return model


def add_adapter(model, folder: str | None, trains: bool, args):
    """The model with the LoRA adapter of a folder, or with a new one."""
    import peft
    if folder is None:
        target = args.lora_target if args.lora_target == "all-linear" else args.lora_target.split(",")
        config = peft.LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha or 2 * args.lora_r, task_type="CAUSAL_LM",
                                 target_modules=target)
        return peft.get_peft_model(model, config)
    config = peft.PeftConfig.from_pretrained(folder)
    if config.is_prompt_learning or vars(config).get("alora_invocation_tokens"):
        raise BadInput(f"{folder} changes more than weights: merge it, or choose another")
    config.base_model_name_or_path = model.name_or_path
    for name, module in model.named_modules():
        if trains and name.endswith(tuple(config.modules_to_save or ())):
            module.float()  # peft loads into a copy of it: must be float32
    warnings.filterwarnings("error", "Found missing adapter keys")
    return peft.PeftModel.from_pretrained(model, folder, config=config, is_trainable=trains,
                                          autocast_adapter_dtype=trains)  # float32 weights train


def load_reference(policy, device: str, args):
    """The reference as a context manager that yields a model: --ref live or swap."""
    if args.ref == "live":
        return nullcontext(load_model(args.ref_model, device, args))
    return Swap(policy, None if args.ref_model == args.model else load_model(args.ref_model, "cpu", args))


@lru_cache
def load_function(spec: str) -> Callable:
    file, _, name = spec.partition(":")
    sys.path.insert(0, str(Path(file).resolve().parent))  # for its own imports
    functions = runpy.run_path(file)  # unlike import, it allows two files of one name
    if name not in functions:
        raise BadInput(f"{spec}: no such function, expected FILE.py:FUNCTION")
    return functions[name]


# ---- Flags: the same in dpo.py, kto.py and rloo.py -------------------

def resolve(args, new_tokens: int = 0):
    """Checks and completes the flags. new_tokens: sampled after each row."""
    if args.model is None and args.data is None and (HERE / "demo").exists():
        args = replace(args, **{name: value for name, value in DEMO.items() if vars(args)[name] in (None, ())})
        torch.set_num_threads(1)  # a tiny model gains nothing from more
    if not args.model or not args.data:
        raise BadInput("give both --model and --data, or neither for the demo")
    moves = [flag for flag in ("sync_reference", "humanline") if vars(args).get(flag)]
    if len(moves) > 1 or (moves and args.ref != "swap"):
        raise BadInput("--sync_reference or --humanline, which syncs every step, needs --ref swap")
    if args.lora_r and base_of(args.model) != args.model:
        raise BadInput(f"{args.model} is an adapter already: leave out --lora_r")
    if args.lora_target != "all-linear" and not args.lora_r:
        raise BadInput("--lora_target needs --lora_r")
    if args.dtype == "auto":
        args = replace(args, dtype="bfloat16" if torch.cuda.is_available() else "float32")
    context = context_length(AutoConfig.from_pretrained(base_of(args.model)))
    if args.max_new_tokens >= context:
        raise BadInput(f"--max_new_tokens {args.max_new_tokens} leaves no room for a prompt in a context of {context}")
    return replace(args, max_length=min(args.max_length, context - new_tokens), ref_model=args.ref_model or args.model,
                   lr=1e-6 if args.lr is None else args.lr)


# ---- Order and learning rate: the same in dpo.py, kto.py and rloo.py -

def generator(seed: int, purpose: str, n: int = 0) -> np.random.Generator:
    """A function of its arguments: a resumed run needs no saved state."""
    return np.random.default_rng([seed, n, *purpose.encode()])


@lru_cache(maxsize=2)  # a step may be in two epochs
def order_of_epoch(epoch: int, n_rows: int, seed: int) -> list[int]:
    return generator(seed, "order", epoch).permutation(n_rows).tolist()


def batch_rows(step: int, rows: list, batch_size: int, seed: int, n_steps: int = 1) -> list:
    """The rows of a step, or of n_steps. Each epoch is a new permutation of all rows."""
    batch = []
    start = (step - 1) * batch_size
    for position in range(start, start + n_steps * batch_size):
        epoch, place = divmod(position, len(rows))
        batch.append(rows[order_of_epoch(epoch, len(rows), seed)[place]])
    return batch


def learning_rate(step: int, steps: int, args) -> float:
    """Linear warmup to --lr, then constant, or falling to 0 at steps + 1."""
    warmup_steps = round(args.warmup * steps) if args.warmup < 1 else args.warmup
    if step <= warmup_steps:
        return args.lr * (step / warmup_steps)
    remaining = (steps - step + 1) / (steps - warmup_steps)
    cosine = 0.5 - 0.5 * math.cos(math.pi * remaining)
    return args.lr * {"constant": 1.0, "linear": remaining, "cosine": cosine}[args.schedule]


# ---- Files of a run: the same in dpo.py, kto.py and rloo.py ----------

def lock_folder(out: Path) -> FileLock:
    """Creates and locks the output folder."""
    out.mkdir(parents=True, exist_ok=True)
    if (out / "model").exists():
        raise BadInput(f"{out} holds a finished run: name another --out")
    lock = FileLock(out / ".lock", timeout=0)
    if processes()[0] == 0:
        try:
            lock.acquire()
        except Timeout:
            raise BadInput(f"another run writes into {out}: name another --out") from None
    return lock


def describe_run(train_rows: list, eval_rows: list, functions, args) -> dict:
    """Flags, versions, and digests of all that a run reads."""
    run = asdict(args) | {"torch": torch.__version__, "transformers": transformers.__version__}
    models = {args.model, args.ref_model, vars(args).get("reward_model")} - {None}
    run["weights"] = {name: checkpoint_digest(name) for name in models}
    run["functions"] = {spec: digest_of([Path(spec.partition(":")[0]).read_bytes()]) for spec in functions if spec}
    run["rows"] = digest_of(train_rows)
    run["held-out rows"] = digest_of(eval_rows)
    for file in (Path(__file__), HERE / "refcache.py"):
        run[file.name] = digest_of([file.read_bytes()])
    return json.loads(json.dumps(run))  # tuples become lists


def digest_of(items: list) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode())
    return digest.hexdigest()


def init_training_state(policy, optimizer) -> dict[str, torch.Tensor]:
    """What a step changes in place: weights, and their optimizer state, which a step with lr 0 creates."""
    state = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}  # tied ones once
    for weight in state.values():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    for name, weight in list(state.items()):
        state |= {f"optimizer.{name}.{key}": value.zero_() for key, value in optimizer.state[weight].items()}
    return state


def save_checkpoint(out: Path, step: int, run: dict, state: dict):
    """Writes out/resume-STEP, run.json last: without it a folder is no checkpoint."""
    folder = out / f"resume-{step}"
    shutil.rmtree(folder, ignore_errors=True)  # of a killed save
    barrier()
    # 64 tensors per file: the writer holds a whole file in memory
    files = defaultdict(int, {f"training.{name}": n // 64 for n, name in enumerate(state["training"])})
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(folder, files, save_distributed=True))
    if processes()[0] == 0:
        log_sizes = {name: (out / name).stat().st_size for name in LOGS}
        write_whole(folder / "run.json", [json.dumps({"step": step, "run": run, "log_sizes": log_sizes}).encode()])
        for older in set(out.glob("resume-*")) - {folder}:
            shutil.rmtree(older)


def restore_checkpoint(out: Path, run: dict, state: dict) -> int:
    """Restores the newest checkpoint, and the logs of its step. Returns the step, or 0."""
    checkpoints = [json.loads(file.read_text()) for file in out.glob("resume-*/run.json")]
    checkpoints.append({"step": 0, "run": run, "log_sizes": dict.fromkeys(LOGS, 0)})
    saved = max(checkpoints, key=lambda checkpoint: checkpoint["step"])
    differing = [name for name in run if saved["run"].get(name) != run[name] and name not in MAY_CHANGE]
    code = [name for name in differing if name.endswith((".py", "torch", "transformers"))]  # edited code may go on
    if differing != code:
        raise BadInput(f"{out} holds a run with other {', '.join(differing)}: name another --out")
    if saved["step"]:
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(out / f"resume-{saved['step']}"))
        print(f"resumes after step {saved['step']}", *(f"{name} has changed since" for name in code), sep="; ")
    if processes()[0] == 0:
        write_whole(out / "args.json", [json.dumps(run, indent=1).encode()])
        for name, size in saved["log_sizes"].items():
            (out / name).touch()
            os.truncate(out / name, size)
    return saved["step"]


def append(path: Path, lines: list[dict]):
    if processes()[0] == 0:
        with open(path, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def report(out: Path) -> list[dict]:
    """Prints held-out answers and metrics, before and after. Returns the lines of metrics.jsonl."""
    history, samples = ([json.loads(line) for line in (out / name).read_text().splitlines()] for name in LOGS)
    before, after = history[0], history[-1]
    held_out = [sample for sample in samples if sample.get("held_out", True)]
    answers = [[sample for sample in held_out if sample["step"] == line["step"]] for line in (before, after)]
    print("held out: prompt, answer before, answer after")
    for first, last in list(zip(*answers))[:3]:
        for text in (first["prompt"], first["completion"], last["completion"]):
            print(repr(text)[:shutil.get_terminal_size().columns])
    print(f"{'held out':29} before   after")
    for name in after:
        if name.startswith("eval_"):
            print(f"{name:28} {before[name]:z7.3f} {after[name]:z7.3f}")
    return history


def save_model(model, tokenizer, folder: Path):
    """Writes the model, or its LoRA adapter, as from_pretrained() reads it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    if processes()[0] == 0:
        hidden = folder.with_name(f".{folder.name}")
        model.save_pretrained(hidden, state_dict=state)
        tokenizer.save_pretrained(hidden)
        os.replace(hidden, folder)


if __name__ == "__main__":
    if int(os.environ.get("RANK", 0)):  # under torchrun only the first process prints
        sys.stdout = open(os.devnull, "w")
    try:
        main(tyro.cli(Args, description=__doc__, use_underscores=True))
    except (BadInput, ImportError, torch.OutOfMemoryError) as error:
        advice = f": pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        if isinstance(error, torch.OutOfMemoryError):
            advice = ": lower --tokens_per_forward, or add --gradient_checkpointing on"
        print(f"{Path(__file__).name}: {error}{advice}", file=sys.stderr)
        sys.exit(2)
