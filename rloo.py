"""RLOO: learn from a reward. The other samples of a prompt are the baseline.

Ahmadian et al. 2024, Back to Basics: Revisiting REINFORCE Style Optimization, arXiv:2402.14740, leave-one-out:

    (1)   ∇J(θ) = E 1/k Σ_i [ R(y_i, x) − 1/(k−1) Σ_{j≠i} R(y_j, x) ] ∇ log π(y_i|x), y_i ~ π(·|x)
    (2)   R(y, x) = reward(y, x) − β log π(y|x)/π_ref(y|x)

    python rloo.py  # the demo
    python rloo.py --model Qwen/Qwen3-0.6B --data prompts.jsonl --reward rewards.py:helpful

A prompt is encoded once for its k samples. A killed run resumes if the same command is given again.
docs/recipes.md has starting values for lr and β.

Data: rows with `prompt`, a string or chat messages, and any columns that the reward needs:

    {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}

A reward is a function(prompts, completions, **columns) that returns a number or None for each completion. Its columns
are those of the file and two more: completion_ids, and ended, which is false for a sample that was cut off.

Shapes: B prompts per step, k samples each, T tokens in the longest. Rewards and advantages are (B, k). Log-probs of
tokens are (B, k, T), 0 after the end of a sample. b is the number of prompts in a micro-batch.

Metrics: reward, reward_std: over all samples, before KL | rewards/NAME: of one function | frac_reward_zero_std:
fraction of prompts whose rewards are all equal; at 1 only the KL penalty is learned | kl: log π − log π_ref per token
| entropy: nats per token | samples/distinct: how many of the samples differ | completions/mean_length |
completions/clipped_ratio: fraction cut off by max_new_tokens | loss | clip_ratio: fraction of samples whose ratio is
clipped | sampling/sampling_logp_difference/mean, /max: |log π − log π of the sampler| per token | grad_norm: before
clipping | learning_rate | seconds | tokens_per_second | memory_gb: GPU peak | eval_*: of one sample per held-out
prompt
"""
import asyncio
import csv
import gzip
import hashlib
import inspect
import json
import math
import os
import re
import runpy
import shutil
import sys
import time
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Callable, Literal, NamedTuple, get_args, get_origin
from weakref import WeakSet

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
from tqdm import tqdm
from transformers import (
    AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, DynamicCache, DynamicLayer)
from transformers.modeling_layers import GradientCheckpointingLayer

from refcache import (
    BadInput, Swap, all_gather, all_reduce, barrier, check_agreement, checkpoint_digest, checkpoint_folder,
    completion_logprobs, context_length, count_tokens, divide_batches, enable_shared_prompts, full_tensor,
    has_shared_prompts, is_first_process, micro_batches, one_line, pack, process_count, process_group, process_rank,
    progress_bar, shard, step_memory, to_device, unsharded, unwrap_model, write_whole)

HERE = Path(__file__).parent
DEMO = dict(
    model=f"{HERE}/demo/model",
    data=f"{HERE}/demo/prompts.jsonl",
    eval_data=f"{HERE}/demo/prompts_test.jsonl",
    reward=(f"{HERE}/demo/score.py:sentiment",),
    lr=2e-4,
)
LOGS = ("metrics.jsonl", "samples.jsonl")
# What may differ when a run is resumed. Of models and data the content is compared, not the path.
MAY_CHANGE = ("model ref_model reward_model data eval_data out ref tokens_per_forward rollout_tokens "
              "gradient_checkpointing save_every save_dtype eval_every wandb code").split()
SMALLEST = dict(steps=-1, epochs=1e-6, batch_size=1, lora_r=1, lora_alpha=1e-6, k=2, temperature=1e-6,
                max_new_tokens=1, updates_per_rollout=1)  # values; 0 for all other flags
EAGER = WeakSet()  # models whose decoding steps cannot be recorded as a CUDA graph


@dataclass
class Args:
    model: str | None = None  # checkpoint folder or hub name; None: the demo
    data: str | None = None  # prompts: .jsonl[.gz] .json .csv .parquet, or hub data NAME[:CONFIG][:SPLIT]
    eval_data: str | None = None  # held-out prompts; None: they are split off --data
    eval_size: int = 64  # number of prompts that are split off --data, at most a tenth of them
    chat_template_kwargs: dict[str, bool | int | str] = field(default_factory=dict)  # such as enable_thinking False
    max_length: int = 1024  # tokens of a prompt; longer ones are dropped and counted
    out: str | None = None  # folder of the run; None: out/rloo, or out/rloo-2 if that is finished

    reward: tuple[str, ...] = ()  # FILE.py:FUNCTION; the values of several functions are summed
    reward_model: str | None = None  # classifier with one output: folder or hub name
    reward_weights: tuple[float, ...] = ()  # weights of the functions, then of the model; empty: all are 1

    ref: Literal["auto", "swap", "live"] = "auto"  # swap: weights on the host; live: on the GPU; auto: live if it fits
    ref_model: str | None = None  # the reference; None: the policy before training
    sync_reference: int | None = None  # number of steps between copies of the policy into the reference
    sync_mix: float = 1.0  # weight of the policy in each such copy

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
    tokens_per_forward: int = 16384  # limits memory; never changes the result
    rollout_tokens: int = 65536  # limits the memory of a rollout, as tokens in its key-value cache
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"  # saves memory, costs time; auto: if the GPU is small

    save_every: int = 50  # steps between checkpoints, from which a killed run resumes; 0: none
    save_dtype: Literal["auto", "float32"] = "auto"  # of the saved model; auto: as in forward passes
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

    whole_prompt = property(lambda row: row.prompt)  # load_data splits the rows by it


class Samples(NamedTuple):
    groups: list  # [(prompt, [completion_1 .. completion_k]), ..] for B prompts: token ids, with stop tokens
    texts: list[list[str]]  # k per prompt
    mask: torch.Tensor  # (B, k, T) bool: whether the sample has a token t
    ended: torch.Tensor  # (B, k) bool: not cut off by max_new_tokens
    logps: torch.Tensor  # (B, k, T): of the sampler, 0 after the end
    entropy: torch.Tensor  # (B, k): summed over tokens


def token_logprobs(model, groups: list, T: int, args: Args) -> torch.Tensor:
    """log π of each token of these samples, (b, k, T), 0 after the end."""
    padded = []
    for logps in completion_logprobs(model, groups, temperature=args.temperature):
        padded.append(torch.stack([F.pad(logp, (0, T - len(logp))) for logp in logps]))
    return torch.stack(padded)


@torch.no_grad()
def score_reference(reference, samples: Samples, device: str, args: Args) -> torch.Tensor:
    """log π_ref of each token, (B, k, T), in the micro-batches of run_batch; 0 without a reference."""
    ref_logps = torch.zeros(samples.mask.shape, device=device)
    if reference is None:
        return ref_logps

    with reference as model:
        for indices, is_real in micro_batches(model, samples.groups, args.tokens_per_forward):
            micro = [samples.groups[i] for i in indices]
            indices = to_device(indices, device)
            ref_logps[indices] += token_logprobs(model, micro, ref_logps.shape[2], args) * is_real
    return all_reduce(ref_logps)


def run_batch(policy, samples: Samples, rewards: torch.Tensor, ref_logps: torch.Tensor,
              old_logps: torch.Tensor | None, args: Args) -> tuple[torch.Tensor, dict]:
    """Adds the gradient of the mean loss. rewards (B, k), log-probs (B, k, T). old_logps is None before the first
    update of a rollout: this forward then gives them, also for the KL penalty. Returns log π and metrics."""
    divisor = rewards.numel()  # the loss is a mean over samples
    all_logps = torch.zeros(samples.mask.shape, device=rewards.device)
    loss_sum = torch.zeros((), device=rewards.device)
    clip_sum = torch.zeros((), device=rewards.device)

    for indices, is_real in micro_batches(policy, samples.groups, args.tokens_per_forward):
        micro = [samples.groups[i] for i in indices]
        indices = to_device(indices, rewards.device)  # a list as an index would wait for the GPU
        logps = token_logprobs(policy, micro, all_logps.shape[2], args)  # (b, k, T)

        old = logps.detach() if old_logps is None else old_logps[indices]
        advantages = compute_advantages(rewards[indices], old, ref_logps[indices], args.beta)  # (b, k)
        losses, is_clipped = policy_loss(logps.sum(dim=2), old.sum(dim=2), advantages, args.clip_eps)  # (b, k)
        loss = losses.sum() / divisor * is_real  # an empty micro-batch, which FSDP needs, counts 0 times
        loss.backward()

        all_logps[indices] += logps.detach() * is_real
        loss_sum += loss.detach()
        clip_sum += is_clipped.sum() * is_real

    values = {"loss": all_reduce(loss_sum).item(), "clip_ratio": all_reduce(clip_sum).item() / divisor}
    return all_reduce(all_logps), values


def metrics(samples: Samples, rewards: torch.Tensor) -> dict[str, float]:
    """Metrics of samples and their rewards, (B, k). A sample whose reward is NaN is left out of the reward metrics."""
    is_known = ~rewards.isnan()
    known = rewards[is_known]
    highest = rewards.nan_to_num(-math.inf).amax(dim=1)
    lowest = rewards.nan_to_num(math.inf).amin(dim=1)
    return {
        "reward": known.mean().item(),
        "reward_std": known.std(correction=min(1, len(known) - 1)).item(),
        "frac_reward_zero_std": ((highest <= lowest) & (is_known.sum(dim=1) > 1)).float().mean().item(),
        "samples/distinct": len(set(chain(*samples.texts))),
        "completions/mean_length": samples.mask.sum(dim=2).float().mean().item(),
        "completions/clipped_ratio": 1 - samples.ended.float().mean().item(),
        "entropy": (samples.entropy.sum() / samples.mask.sum()).item(),
    }


@torch.no_grad()
def evaluate(policy, tokenizer, rows: list[Row], reference, functions: list, step: int, out: Path, args: Args) -> dict:
    """Metrics of one sample per held-out prompt. Writes the samples to samples.jsonl."""
    if not rows:
        return {}
    samples = rollout(policy, tokenizer, [row.prompt for row in rows], 1, 0, args)
    rewards, means = compute_rewards(samples, rows, functions)
    log_samples(out, step, True, samples, rows, rewards)

    values = metrics(samples, rewards) | means
    del values["frac_reward_zero_std"]  # it needs two samples per prompt
    if reference:
        ref_logps = score_reference(reference, samples, policy.device, args)
        values["kl"] = ((samples.logps - ref_logps.cpu()).sum() / samples.mask.sum()).item()
    return {f"eval_{name}": value for name, value in values.items()}


# ---- Training --------------------------------------------------------

def main(args: Args) -> list[dict]:
    """Trains. Returns the lines of metrics.jsonl, one dict per step."""
    with process_group():
        args = resolve(args)
        out = Path(args.out)
        with lock_folder(out):
            return train(args, out)


def train(args: Args, out: Path) -> list[dict]:
    """The run: prompts, the policy, its reference, the loop."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(args.model, args.ref_model)
    train_rows, eval_rows = load_data(tokenizer, args)
    print(f"The first prompt:\n{tokenizer.decode(train_rows[0].prompt)}")

    batch_size = min(args.batch_size, len(train_rows))
    steps = args.steps
    if steps == -1:
        steps = math.ceil(args.epochs * len(train_rows) / batch_size)
    functions = load_rewards(device, args)
    run = describe_run(train_rows, eval_rows, args)

    torch.manual_seed(args.seed)  # for a new adapter
    policy = load_model(args.model, device, args, trains=True)
    check_sampler(policy, tokenizer, args)
    reference = None
    if args.beta:
        args = replace(args, ref=choose_reference(policy, args))
        reference = load_reference(policy, device, args)

    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    matrices = {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": args.weight_decay}
    vectors = {"params": [weight for weight in weights if weight.dim() <= 1]}  # norms and biases do not decay
    optimizer = torch.optim.AdamW([matrices, vectors], lr=0.0, weight_decay=0.0, fused=True)  # the loop sets lr

    state = {"training": init_training_state(policy, optimizer)}  # what a checkpoint holds
    if args.sync_reference and reference:
        state["reference"] = reference
    last_step = restore_checkpoint(out, run, state)
    if last_step == 0:
        values = {"step": 0} | evaluate(policy, tokenizer, eval_rows, reference, functions, 0, out, args)
        log_metrics(out, values, args)

    progress = progress_bar(range(last_step + 1, steps + 1), desc="train", initial=last_step, total=steps)
    for step in progress:
        began = time.monotonic()
        torch.manual_seed(args.seed + step)  # a resumed run needs no saved random state
        rows = batch_rows(step, train_rows, batch_size, args.seed)
        samples = rollout(policy, tokenizer, [row.prompt for row in rows], args.k, step, args)
        rewards, means = compute_rewards(samples, rows, functions)
        log_samples(out, step, False, samples, rows, rewards)
        values = {"step": step} | metrics(samples, rewards) | means

        if step == 1 and device == "cuda":  # no update has run: the peak is the model, Adam's state and a rollout
            progress.write(f"loading and rollouts need {torch.cuda.max_memory_allocated() / 1e9:.1f} GB of the GPU")
        if step == 1 and not samples.ended.any():
            stops = tokenizer.convert_ids_to_tokens(stop_tokens(policy, tokenizer))
            progress.write(f"No sample ends with one of {stops}: raise --max_new_tokens, or mend the template")

        # The metrics above count these samples, the loss does not.
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
                raise BadInput(f"step {step}: loss or gradient is not finite: lower --lr")

            for group in optimizer.param_groups:
                group["lr"] = values["learning_rate"]
            optimizer.step()
            optimizer.zero_grad()

        # How far log π was from what the sampler computed, and from the reference.
        difference = (old_logps.cpu() - samples.logps).abs()
        values["sampling/sampling_logp_difference/mean"] = (difference.sum() / samples.mask.sum()).item()
        values["sampling/sampling_logp_difference/max"] = difference.max().item()
        if reference:
            lengths = samples.mask.sum(dim=2).to(device)  # (B, k)
            kls = (old_logps - ref_logps).sum(dim=2)  # (B, k)
            values["kl"] = (kls.sum() / lengths.sum()).item()
            if step == 1 and args.ref_model == args.model:
                check_agreement((kls / lengths).abs().mean().item(), args.dtype)
        if "reference" in state and step % args.sync_reference == 0:
            reference.sync(args.sync_mix)

        values["seconds"] = time.monotonic() - began
        values["tokens_per_second"] = count_tokens(samples.groups) / values["seconds"]
        if device == "cuda":
            values["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9  # peak

        if step == steps or (args.eval_every and step % args.eval_every == 0):
            values |= evaluate(policy, tokenizer, eval_rows, reference, functions, step, out, args)
        log_metrics(out, values, args)

        if args.save_every and (step == steps or step % args.save_every == 0):
            save_checkpoint(out, step, run, state)
        progress.set_postfix(reward=values["reward"], tokens_per_second=values["tokens_per_second"], refresh=False)

    if steps:
        save_model(policy, tokenizer, out / "model", args)
        remove_checkpoints(out)  # the run is finished
        print(f"see {out}")
    barrier()  # the first process has written
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def choose_reference(policy, args: Args) -> str:
    """--ref auto: a live reference saves the time of exchanging all weights, where it fits into 85 % of the GPU."""
    is_frozen = any(not weight.requires_grad for weight in policy.parameters())  # in part, by LoRA
    if args.ref != "auto" or args.sync_reference or is_frozen or not torch.cuda.is_available():
        return args.ref.replace("auto", "swap")
    memory = step_memory(policy, args.tokens_per_forward)
    live = memory.optimizer / (6 if args.dtype == "bfloat16" else 3)  # gradients and Adam: three float32 copies
    ref = "live" if memory.used + live / memory.gpu < 0.85 else "swap"
    print(f"--ref {ref}: a live reference takes {live / 1e9:.1f} GB")
    return ref


# ---- Flags -----------------------------------------------------------

def resolve(args: Args) -> Args:
    """Checks the flags, and fills in those that depend on others."""
    return complete_flags(args, new_tokens=args.max_new_tokens)


def describe_run(train_rows: list, eval_rows: list, args: Args) -> dict:
    """The flags, data, models and code of a run. A resumed run must have the same, except for MAY_CHANGE."""
    run = vars(args) | {"rows": digest_of(train_rows), "held-out rows": digest_of(eval_rows)}
    models = {flag: vars(args)[flag] for flag in ("model", "ref_model", "reward_model") if vars(args)[flag]}
    run |= describe_files(models, args.reward)
    return json.loads(json.dumps(run))  # tuples become lists


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
        for batch in filter(None, progress_bar(batches, desc="sample", unit="batch")):  # a process may have none
            try:
                drawn = decode(core, [prompts[i] for i in batch], to_device(u[batch], core.device), stops, args)
            except torch.OutOfMemoryError as error:
                raise BadInput("out of memory in a rollout: lower --rollout_tokens") from error
            places = to_device(batch, core.device)
            tokens[places], logps[places], entropy[places] = drawn
    tokens, logps, entropy = (all_reduce(tensor).cpu() for tensor in (tokens, logps, entropy))

    mask = tokens >= 0
    T = mask.sum(dim=2).max()
    completions = [[tuple(ids[ids >= 0].tolist()) for ids in rows] for rows in tokens]
    return Samples(
        groups=list(zip(prompts, completions)),
        texts=[tokenizer.batch_decode(rows, skip_special_tokens=True) for rows in completions],
        mask=mask[..., :T],
        ended=torch.tensor([[ids[-1] in stops for ids in rows] for rows in completions]),
        logps=logps[..., :T],
        entropy=entropy,
    )


class FixedLayer(DynamicLayer):
    """Keys and values of the prompts, with room for all new tokens at one address: torch.cat would copy all of them for
    each token, and a CUDA graph could not repeat that. `place`, (1,), says where the next token is written."""
    is_compileable = True  # so transformers does not search the mask for zeros, which would wait for the GPU

    def __init__(self, prompts: DynamicLayer, n_tokens: int, place: torch.Tensor):
        super().__init__()
        self.is_sliding = prompts.is_sliding  # True: the mask also hides what is before the window
        self.place = place
        self.keys, self.values = (F.pad(tensor, (0, 0, 0, n_tokens)) for tensor in (prompts.keys, prompts.values))

    @property
    def n_read(self) -> int:
        """Tokens that attention reads. On a GPU it is always the whole room, because a CUDA graph cannot change a size;
        the mask hides what is not written yet. On a CPU it is what is written."""
        return self.keys.shape[2] if self.keys.is_cuda else int(self.place) + 1

    def update(self, key, value, *args, **kwargs):
        self.keys.index_copy_(2, self.place, key)
        self.values.index_copy_(2, self.place, value)
        return self.keys[:, :, :self.n_read], self.values[:, :, :self.n_read]

    def get_seq_length(self):
        return self.place[0]

    def get_mask_sizes(self, query_length: int):
        return self.n_read, 0


def decode(core, prompts: list[tuple], u: torch.Tensor, stops: list[int], args: Args) -> tuple[torch.Tensor, ...]:
    """Samples of some prompts: tokens (B, k, T), -1 after the end; log-probs (B, k, T), 0 after it; entropy (B, k)."""
    B, k, T = u.shape
    device = core.device
    is_shared = has_shared_prompts(core)
    is_recorded = can_record(core)

    ids = [torch.tensor(prompt) for prompt in prompts]
    ids = to_device(pad_sequence(ids, batch_first=True, padding_value=-1, padding_side="left"), device)  # (B, longest)
    mask = (ids >= 0).long()
    ids = ids.clamp(min=0)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    place = to_device([ids.shape[1]], device)  # of the next token in the cache

    inputs = {}  # of the next step; sample() changes them in place
    if is_shared:  # encode every prompt once, then copy its keys and values to k rows
        cache = DynamicCache(config=core.config)
        cache.activate_past_recording()  # keep keys before the window, too
        out = core(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
                   logits_to_keep=1)
        logits = out.logits[:, -1].repeat_interleave(k, dim=0)
        cache.batch_repeat_interleave(k)
        for i, layer in enumerate(cache.layers):
            if isinstance(layer, DynamicLayer):  # others hold nothing
                cache.layers[i] = FixedLayer(layer, T, place)
        inputs["attention_mask"] = F.pad(mask, (0, T), value=1).repeat_interleave(k, dim=0)
    else:
        out = core(input_ids=ids.repeat_interleave(k, dim=0), use_cache=True)
        logits = out.logits[:, -1]

    inputs["position_ids"] = positions[:, -1:].repeat_interleave(k, dim=0)
    inputs["input_ids"] = torch.zeros_like(inputs["position_ids"])
    cache = {name: out[name] for name in ("past_key_values", "cache_params") if name in out}

    u = u.flatten(0, 1)  # (B · k, T): below, each sample is a row
    stops = to_device(torch.tensor(stops, dtype=torch.long), device)
    tokens = torch.full((B * k, T), -1, device=device)
    scores = torch.zeros(2, B * k, T, device=device)  # log-probs and entropies
    rows = torch.arange(B * k, device=device)  # which samples are still in the cache
    alive = rows >= 0
    t = torch.zeros(1, dtype=torch.long, device=device)

    def sample(logits):
        """Draws token t of all rows. As `step`, it changes tensors in place, so that a CUDA graph can repeat it."""
        token, *drawn = draw(logits, u[rows, t], args.temperature)
        tokens[rows, t] = torch.where(alive, token, -1)
        scores[:, rows, t] = torch.where(alive, torch.stack(drawn), 0.0)
        alive.logical_and_((token[:, None] != stops).all(dim=1))
        inputs["input_ids"].copy_(token[:, None])
        inputs["position_ids"].add_(1)
        t.add_(1)

    def step():
        sample(core(**inputs, **cache, use_cache=True).logits[:, -1])
        place.add_(1)

    # To count the unfinished rows, the CPU waits for the GPU; a graph is recorded again after rows were removed.
    sample(logits)
    interval, limit = (16, 0.5) if is_recorded else (1, 0.75)
    replay = None
    for n in range(T - 1):
        if n % interval == 0:
            unfinished = alive.sum().item()  # waits for the GPU
            if not unfinished:
                break
            if is_shared and unfinished <= limit * len(rows):  # many at once: each removal copies the cache
                stay = alive.nonzero()[:, 0]
                cache["past_key_values"].batch_select_indices(stay)
                inputs = {name: tensor[stay] for name, tensor in inputs.items()}
                rows, alive = rows[stay], alive[stay]
                replay = None

        if replay:
            replay()
        elif is_recorded:
            replay = record(core, step)
        else:
            step()
    logps, entropies = scores.view(2, B, k, T)
    return tokens.view(B, k, T), logps, entropies.sum(dim=2)


def can_record(core) -> bool:
    """Whether steps of decoding are recorded as a CUDA graph."""
    return has_shared_prompts(core) and core.device.type == "cuda" and core not in EAGER


def record(core, step: Callable) -> Callable:
    """Runs a step and records it as a CUDA graph: one launch then replaces a thousand. Returns what repeats the step:
    the graph, or the step itself if it cannot be recorded. Some mixtures of experts wait for the GPU, which a graph
    cannot."""
    stream = torch.cuda.current_stream()
    has_run = False

    try:
        torch.cuda.set_sync_debug_mode("error")  # an operation that waits raises; a forward can be repeated
        step()
        has_run = True

        torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay
    except RuntimeError as error:
        EAGER.add(core)
        print(f"no CUDA graph for decoding: {one_line(error)}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.set_stream(stream)  # a failed recording leaves its own
    if not has_run:
        step()
    return step


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
    """The sampler's log-probs, with a key-value cache, must be the trainer's, without it. On a GPU the samples are so
    long that a CUDA graph is replayed: if its log-probs differ, decoding goes on without it."""
    core = unwrap_model(policy)
    args = replace(args, max_new_tokens=24 if can_record(core) else 8)
    ids = torch.linspace(1, policy.config.get_text_config().vocab_size - 1, 13).long().tolist()
    samples = rollout(policy, tokenizer, [tuple(ids[:8]), tuple(ids[8:])], 2, 0, args)
    with torch.no_grad():
        logp = token_logprobs(policy, samples.groups, samples.mask.shape[2], args).sum(dim=2).cpu()

    difference = ((samples.logps.sum(dim=2) - logp).abs() / samples.mask.sum(dim=2)).max()
    if difference < (5e-2 if args.dtype == "bfloat16" else 1e-3):
        return
    problem = f"changes log-probs by {difference:.2g} nats per token"
    if not can_record(core):
        raise BadInput(f"{args.model}: a key-value cache {problem}")
    EAGER.add(core)
    print(f"no CUDA graph for decoding: it {problem}")
    check_sampler(policy, tokenizer, args)


# ---- Rewards ---------------------------------------------------------

def load_rewards(device: str, args: Args) -> list[tuple]:
    """[(name, function, weight), ..]"""
    names = [spec.partition(":")[2] for spec in args.reward]
    if len(set(names)) < len(names):
        names = list(args.reward)
    functions = list(map(load_function, args.reward))
    if args.reward_model:
        names.append(Path(args.reward_model).name)
        functions.append(RewardModel(args.reward_model, device, args))
    weights = args.reward_weights or [1.0] * len(names)
    if not len(names) == len(weights) > 0:
        raise BadInput("give --reward or --reward_model, one of --reward_weights for each")
    return list(zip(names, functions, weights))


def compute_rewards(samples: Samples, rows: list[Row], functions: list[tuple]) -> tuple[torch.Tensor, dict]:
    """The weighted sum of the rewards, (B, k), or NaN; and the mean of each reward. The processes divide the rows."""
    rank, ranks = process_rank(), process_count()
    own = slice(len(rows) * rank // ranks, len(rows) * (rank + 1) // ranks)
    k = samples.mask.shape[1]
    rows = [row for row in rows[own] for _ in range(k)]  # one per sample
    texts = list(chain(*samples.texts[own]))
    ids = [list(completion) for _, completions in samples.groups[own] for completion in completions]
    ended = samples.ended[own].flatten().tolist()

    all_values = []
    means = {}
    for name, function, weight in functions:
        values = []
        if rows:
            values = call_function(name, function, rows, texts, completion_ids=ids, ended=ended)
        values = torch.tensor(list(chain(*all_gather(values))))  # (B · k,)
        means[f"rewards/{name}"] = values.nanmean().item()
        all_values.append(weight * values)

    all_values = torch.stack(all_values)
    has_reward = ~all_values.isnan().all(dim=0)
    total = torch.where(has_reward, all_values.nansum(dim=0), math.nan)
    if total.isinf().any() or total.isnan().all():
        raise BadInput("rewards are infinite, or all None")
    return total.view(-1, k), means


def log_samples(out: Path, step: int, held_out: bool, samples: Samples, rows: list[Row], rewards: torch.Tensor):
    """Adds lines to samples.jsonl. After an evaluation, prints three answers beside those before training."""
    lines = []
    for row, texts, scores in zip(rows, samples.texts, rewards.tolist()):
        for text, score in zip(texts, scores):
            lines.append(dict(step=step, held_out=held_out, prompt=row.columns["prompt"], completion=text,
                              reward=None if math.isnan(score) else score))
    append(out / "samples.jsonl", lines)

    if held_out and step and is_first_process():
        tqdm.write("Held-out prompts, each with its answer before and now:")
        with open(out / "samples.jsonl") as file:
            for now, before in zip(lines[:3], map(json.loads, file)):
                for text in (now["prompt"], before["completion"], now["completion"]):
                    tqdm.write(repr(text)[:shutil.get_terminal_size().columns])


class RewardModel:
    """A classifier as a reward function. Its weights wait on the host, pinned; a call copies them to the GPU."""

    def __init__(self, name: str, device: str, args: Args):
        self.device = device
        self.args = args
        self.tokenizer = load_tokenizer(name)
        self.model = load_checkpoint(AutoModelForSequenceClassification, name)
        if self.model.config.num_labels != 1:
            raise BadInput(f"{name} has {self.model.config.num_labels} outputs instead of 1")
        self.weights = dict(chain(self.model.named_parameters(), self.model.named_buffers()))
        if device == "cuda":
            for weight in self.weights.values():
                weight.data = weight.data.pin_memory()

    @torch.no_grad()
    def __call__(self, prompts, completions, ended, **columns) -> list[float]:
        texts = []
        for prompt, completion, has_ended in zip(prompts, completions, ended):
            mark = "" if has_ended else "\uffff"  # is in no text; the text is cut there
            if isinstance(prompt, str):
                completion += mark
            else:
                completion[0]["content"] += mark
            text = render(self.tokenizer, prompt, [completion], self.args, {}, Counter())[1]
            texts.append(text.partition("\uffff")[0])

        rows = [torch.tensor(ids) for ids in tokenize(self.tokenizer, texts, add_bos=isinstance(prompts[0], str))]
        if max(map(len, rows)) > context_length(self.model.config):
            raise BadInput("a sample is too long for the reward model")
        pad = self.model.config.get_text_config().pad_token_id  # the model finds the end of a row by it
        budget = 0 if pad is None else self.args.tokens_per_forward  # 0: each row alone

        scores = torch.zeros(len(rows))
        weights = {name: weight.to(self.device, non_blocking=True) for name, weight in self.weights.items()}
        for batch in pack([len(row) for row in rows], budget, [1] * len(rows)):
            ids = [rows[i] for i in batch]
            ids = to_device(pad_sequence(ids, batch_first=True, padding_value=-1), self.device)
            inputs = dict(input_ids=ids.where(ids >= 0, pad or 0), attention_mask=(ids >= 0).long())
            logits = torch.func.functional_call(self.model, weights, kwargs=inputs).logits
            scores[batch] = logits[:, 0].float().cpu()
        return scores.tolist()


# ---- Rows of the data ------------------------------------------------

COLUMNS = 'prompt, as a string or a list of {"role", "content"}'


def load_rows(source: str, tokenizer, args: Args) -> list[Row]:
    rows = [Row(prompt, columns) for prompt, *_, columns in encode(tokenizer, source, lambda row: [], args)]
    names = {name: None for row in rows for name in row.columns}
    return [row._replace(columns=names | row.columns) for row in rows]  # what a row lacks is None


# ======================================================================
# The algorithm ends here. What follows reads data, loads models and keeps the files of a run. It is the same text in
# dpo.py, kto.py and rloo.py, so that each script is whole: in your fork it is yours, change what you need.
# ======================================================================

# ---- Data: the same in dpo.py, kto.py and rloo.py --------------------

def load_data(tokenizer, args) -> tuple[list, list]:
    """Rows to train on, and held-out rows: those of --eval_data, or all rows of some prompts."""
    rows = load_rows(args.data, tokenizer, args)
    prompts = {row.whole_prompt for row in rows}
    if args.eval_data:
        eval_rows = load_rows(args.eval_data, tokenizer, args)
        shared = prompts & {row.whole_prompt for row in eval_rows}
        if shared:
            print(f"{len(shared)} held-out prompts are trained on, too")
    else:
        prompts = sorted(prompts)
        order = generator(0, "hold_out").permutation(len(prompts))  # --seed changes nothing here
        held_out = {prompts[i] for i in order[:min(args.eval_size, len(prompts) // 10)]}
        eval_rows = [row for row in rows if row.whole_prompt in held_out]
        rows = [row for row in rows if row.whole_prompt not in held_out]

    print(f"{len(rows)} rows to train on, {len(eval_rows)} held out" + ": nothing is evaluated" * (not eval_rows))
    return rows, eval_rows


def read_rows(source: str) -> list:
    """The rows of a file, or of hub data NAME, NAME:SPLIT or NAME:CONFIG:SPLIT. A row of JSON Lines is its line; a file
    with an unknown ending is read as that."""
    open_file = partial(gzip.open if source.endswith(".gz") else open, mode="rt", encoding="utf-8-sig", newline="")
    match Path(source.removesuffix(".gz")).suffix:
        case ".csv":
            return list(csv.DictReader(open_file(source)))
        case ".parquet":
            import pyarrow.parquet
            return pyarrow.parquet.read_table(source).to_pylist()
        case ending if ".json" in ending or Path(source).is_file():
            text = open_file(source).read()
            return json.loads(text) if text.lstrip()[:1] == "[" else text.split("\n")
        case _:
            import datasets
            name, *config = re.split(r":(?![^\[]*\])", source)  # but not at the colon of a slice, train[:1000]
            split = config.pop() if config else "train"
            return list(datasets.load_dataset(name, *config, split=split))


def encode(tokenizer, source: str, answers_of: Callable, args):
    """Reads and tokenizes a file. Yields for each row the ids of the prompt, the ids of prompt + answer for each
    answer, the place where each answer begins, and the columns. Rows that cannot be trained on are dropped and counted.
    """
    try:
        file_rows = read_rows(source)
    except Exception as error:
        raise BadInput(f"{source}: expected .jsonl[.gz] .json .csv .parquet (needs pyarrow) or hub data "
                       f"(needs datasets): {error}") from None

    counts = Counter(rows=0)
    kinds = set()
    n_kept = 0
    ints = {}  # one object for equal ids: 8 bytes per token instead of 36
    for number, row in enumerate(progress_bar(file_rows, desc="tokenize"), 1):
        if isinstance(row, str) and not row.strip():
            continue  # an empty line

        columns = {}
        try:
            columns = dict(json.loads(row) if isinstance(row, str) else row)
            if None in columns:
                raise ValueError("more cells than the header")

            prompt, answers = split_prompt(columns.get("prompt"), answers_of(columns), counts)
            kinds.add((type(prompt), columns.get("prompt") is None))
            if len(kinds) > 1:
                raise ValueError("the rows before have another kind of prompt")

            texts = render(tokenizer, prompt, answers, args, columns, counts)
            all_ids = tokenize(tokenizer, texts, add_bos=isinstance(prompt, str))
        except Exception as error:
            if isinstance(error, (LookupError, TypeError, AttributeError)):
                error = f"expected {COLUMNS}"
            raise BadInput(f"{source}:{number}: {error}; "
                           f"found {', '.join(map(str, columns))[:200]}: {str(row)[:200]}") from None

        # An answer begins where the ids first differ, and not at len(prompt): a token may span the end of the prompt.
        prompt_ids, *sequences = [tuple(ints.setdefault(i, i) for i in ids) for ids in all_ids]
        begins = [len(os.path.commonprefix([prompt_ids, ids])) for ids in sequences]
        words = [tokenizer.decode(ids[i:], skip_special_tokens=True).strip() for ids, i in zip(sequences, begins)]

        counts["rows"] += 1
        if not prompt_ids or 0 in begins or not all(words):
            counts["dropped: empty, or no prompt and no common beginning"] += 1
        elif max(map(len, (prompt_ids, *sequences))) > args.max_length:
            counts[f"dropped: longer than {args.max_length} tokens"] += 1
        else:
            n_kept += 1
            yield prompt_ids, sequences, begins, columns | {"prompt": prompt}

    found = f"{source}: {n_kept} of " + "; ".join(f"{count} {note}" for note, count in counts.items())
    if n_kept < max(1, counts["rows"] / 2):
        raise BadInput(f"{found}: too few rows")
    print(found)
    if kinds.pop()[0] is str and tokenizer.chat_template:
        print(f"{source}: strings are trained without the chat template; demo/prepare_chat.py makes messages")


def tokenize(tokenizer, texts: list[str], add_bos: bool) -> list[list[int]]:
    """Token ids of each text. With add_bos they begin with the tokenizer's BOS, once."""
    bos = bos_of(tokenizer) if add_bos else []
    all_ids = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
    return [ids if ids[:len(bos)] == bos else bos + ids for ids in all_ids]


@lru_cache
def bos_of(tokenizer) -> list:
    plain, full = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    return full[:full.index(plain[0])]


def split_prompt(prompt, answers: list, counts: Counter) -> tuple[str | list, list]:
    """Prompt and answers as strings or messages. A prompt of None becomes what the answers have in common."""
    key = """['"](role|content)['"]:"""
    for text in (prompt, *answers):
        if isinstance(text, str) and re.match(rf"(?s)\s*\[?{{{key}.*{key}", text):
            raise ValueError("messages written as a string")

    if prompt is None:
        if len(answers) < 2:
            raise KeyError("prompt")
        counts["without a prompt"] += 1
        common = os.path.commonprefix([list(map(str, answer)) for answer in answers])  # characters or messages
        prompt = answers[0][:len(common)]
        if isinstance(prompt, str):
            prompt = prompt.removesuffix(" ")  # a space belongs to the token that follows it
        answers = [answer[len(prompt):] for answer in answers]
    if isinstance(prompt, str) and answers and not isinstance(answers[0], str):
        prompt = [{"role": "user", "content": prompt}]

    # Answers that repeat the prompt lose it. A short prompt stays: an answer may begin with the same word.
    is_short = isinstance(prompt, str) and len(prompt) <= 20
    if answers and not is_short and all(answer[:len(prompt)] == prompt for answer in answers):
        answers = [answer[len(prompt):] for answer in answers]
        counts["with answers that repeat the prompt"] += 1

    for answer in answers:
        if not isinstance(answer, str) and any(message["role"] in ("user", "system") for message in answer):
            raise ValueError("an answer contains a user or system message")
    return prompt, answers


def render(tokenizer, prompt, answers: list, args, columns: dict, counts: Counter) -> list[str]:
    """The text of the prompt, and of prompt + each answer. Strings end with EOS, chats as their template says."""
    if isinstance(prompt, str):
        eos = tokenizer.eos_token
        return [prompt] + [prompt + answer.removesuffix(eos) + eos for answer in answers]

    options = args.chat_template_kwargs | (columns.get("chat_template_kwargs") or {})
    apply = partial(tokenizer.apply_chat_template, tokenize=False, tools=columns.get("tools"), **options)
    is_begun = prompt[-1]["role"] == "assistant"
    texts = [apply(prompt, continue_final_message=is_begun, add_generation_prompt=not is_begun)]
    if not all(str(message.get("content") or "").strip() in texts[0] for message in prompt):
        counts["whose template changes a message of the prompt"] += 1

    for answer in answers:
        if is_begun:
            raise ValueError("the prompt ends with a begun answer")
        text = apply(prompt + answer)
        if not text.startswith(texts[0]):  # some templates, as Mistral's, render another prompt before an answer
            start = find_answer(apply, prompt, answer)
            if text[:start].endswith(" ") and not texts[0].endswith(" "):
                start -= 1  # Mistral's space before an answer
            text = texts[0] + text[start:]
            counts["answers whose prompt the template changes"] += 1
        texts.append(text)
    return texts


def find_answer(apply: Callable, prompt: list, answer: list) -> int:
    """Where the answer's words begin in the text of prompt + answer: where a mark before them is rendered."""
    if set().union(*answer) != {"role", "content"}:
        raise ValueError("the template changes the prompt, and the answer has more than role and content")
    mark = "\uffff"  # is in no text
    start = apply([*prompt, answer[0] | {"content": mark + answer[0]["content"]}, *answer[1:]]).find(mark)
    if start < 0:
        raise ValueError("the chat template leaves out words of the answer")
    return start


# ---- Models: the same in dpo.py, kto.py and rloo.py ------------------

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
    if not tokenizer.eos_token:
        raise BadInput(f"{name}: no EOS token, set eos_token in tokenizer_config.json")
    return tokenizer


def stop_tokens(core, tokenizer) -> list:
    """The ids that end a completion."""
    # The model's own are a number, a list or None.
    return sorted({tokenizer.eos_token_id, *np.atleast_1d(core.generation_config.eos_token_id).tolist()} - {None})


def load_model(name: str, device: str, args, trains: bool = False):
    """The policy if it `trains`, else a frozen reference in the dtype of forward passes. It is in eval mode: dropout
    would be noise in every log-ratio."""
    base = base_of(name)
    trains_all = trains and base == name and not args.lora_r
    model = load_checkpoint(AutoModelForCausalLM, base, dtype="auto" if trains_all else args.dtype)
    model.requires_grad_(trains_all)
    if base != name or (trains and args.lora_r):
        model = add_adapter(model, name if base != name else None, trains, args)

    if process_count() > 1 or (trains and args.dtype == "bfloat16"):
        shard(model, device, args.dtype)
    model.eval().to(device)
    if trains_all:
        model.float()  # after shard: no process holds the whole model in float32
    enable_shared_prompts(model)

    turns_on = ["on"]  # values of --gradient_checkpointing
    if trains and device == "cuda":
        memory = step_memory(model, args.tokens_per_forward)
        print(memory)
        if memory.used > 0.85:
            turns_on.append("auto")
    if trains and args.gradient_checkpointing in turns_on:
        print("gradient checkpointing is on")
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):  # transformers' own way needs training mode
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return model


def load_checkpoint(kind, name: str, dtype: str = "auto"):
    """A model of a transformers class. Refuses a checkpoint that lacks weights, which would stay random."""
    name = os.path.abspath(name) if Path(name).is_dir() else name  # an adapter's config stores it
    model, info = kind.from_pretrained(name, dtype=dtype, output_loading_info=True)
    if info["missing_keys"]:
        raise BadInput(f"{name} has no weights for {min(info['missing_keys'])}")
    return model


def add_adapter(model, folder: str | None, trains: bool, args):
    """The model with the LoRA adapter of a folder, or with a new one."""
    import peft
    if not folder:
        model = peft.get_peft_model(model, peft.LoraConfig(
            r=args.lora_r, lora_alpha=args.lora_alpha or 2 * args.lora_r, task_type="CAUSAL_LM",
            target_modules=list(args.lora_target) or "all-linear"))
        print("LoRA in", *sorted({name.split(".")[-1] for name in model.targeted_module_names}))
        return model

    config = peft.PeftConfig.from_pretrained(folder)
    if config.is_prompt_learning or config.is_adaption_prompt or vars(config).get("alora_invocation_tokens"):
        raise BadInput(f"{folder} changes more than weights: merge it, or choose another")
    config.base_model_name_or_path = model.name_or_path
    for name, module in model.named_modules():
        if trains and name.endswith(tuple(config.modules_to_save or ())):
            module.float()  # peft loads the trained weights into a copy of it, which must be float32
    warnings.filterwarnings("error", "Found missing adapter keys")
    return peft.PeftModel.from_pretrained(model, folder, config=config, is_trainable=trains,
                                          autocast_adapter_dtype=trains)  # float32 weights train


def load_reference(policy, device: str, args):
    """The reference as a context manager that yields a model: --ref live or swap."""
    if args.ref == "live":
        return nullcontext(load_model(args.ref_model, device, args))
    return Swap(policy, None if args.ref_model == args.model else load_model(args.ref_model, "cpu", args))


def load_function(spec: str) -> Callable:
    """The function that FILE.py:FUNCTION names, from the file as it is now."""
    file, _, name = spec.partition(":")
    sys.path.insert(0, str(Path(file).resolve().parent))  # for its own imports
    function = runpy.run_path(file).get(name)  # unlike import, it allows two files of one name
    if not callable(function):
        raise BadInput(f"{spec}: no such function, expected FILE.py:FUNCTION")
    return function


def call_function(spec: str, function: Callable, rows: list, texts: list[str], **inputs) -> list[float]:
    """What a user's reward or score returns for answers to the prompts of the first rows: one number per answer, NaN
    for None. It receives all columns that the rows have, and `inputs`. A coroutine is awaited. What the function itself
    raises keeps its traceback."""
    names = set().union(*(row.columns for row in rows))
    inputs = {name: [deepcopy(row.columns.get(name)) for row in rows[:len(texts)]] for name in names} | inputs
    if not isinstance(inputs["prompt"][0], str):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    inputs |= {"prompts": inputs.pop("prompt"), "completions": texts}

    try:
        inspect.signature(function).bind(**inputs)
    except TypeError as error:
        raise BadInput(f"{spec}: {error}: it gets {', '.join(inputs)}, add **columns") from None

    try:
        values = function(**deepcopy(inputs))  # it may change its arguments
        if inspect.iscoroutine(values):
            values = asyncio.run(values)
    except OSError as error:  # such as a judge that cannot be reached: an OSError alone would print no traceback
        raise RuntimeError(f"{spec}: {error}") from error

    try:
        numbers = [math.nan if value is None else float(value) for value in values]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != len(texts):
        raise BadInput(f"{spec} returned {str(values)[:99]}: expected a list of {len(texts)} numbers or None")
    return numbers


# ---- Flags: the same in dpo.py, kto.py and rloo.py -------------------

def complete_flags(args, new_tokens: int = 0):
    """Checks the flags that the scripts share, and fills in those that depend on others. new_tokens: how many are
    sampled after each row."""
    if not (args.model or args.data):
        args = replace(args, **{flag: value for flag, value in DEMO.items() if vars(args)[flag] in (None, ())})
        torch.set_num_threads(1)  # a tiny model gains nothing from more
    if not (args.model and args.data):
        raise BadInput("give both --model and --data, or neither for the demo")

    # Values that no run can have.
    for flag, kind in type(args).__annotations__.items():
        value = vars(args)[flag]
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise BadInput(f"--{flag} {value}: choose one of {', '.join(get_args(kind))}")
        if "'false'" in str(value):  # a string, which a template takes for true
            raise BadInput(f"--{flag} {value}: write False")
        smallest = SMALLEST.get(flag, 0)
        if isinstance(value, (int, float)) and not value >= smallest:  # `not >=` also catches NaN
            raise BadInput(f"--{flag} {value}: must be at least {smallest}")

    # Flags that contradict each other or the model.
    if args.sync_reference and args.ref not in ("swap", "auto"):
        raise BadInput("--sync_reference needs --ref swap")
    if not args.lora_r and (args.lora_target or args.lora_alpha):
        raise BadInput("--lora_target, --lora_alpha need --lora_r")
    try:
        base = base_of(args.model)
        room = context_length(AutoConfig.from_pretrained(base)) - new_tokens
    except (OSError, ValueError) as error:
        raise BadInput(f"--model {args.model} is no model: {error}") from None
    if args.lora_r and base != args.model:
        raise BadInput(f"{args.model} is an adapter already: leave out --lora_r")

    # What depends on other flags and on the model.
    args = replace(args)  # a copy, so that the caller's flags stay as they are
    if args.dtype == "auto":
        args.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    if args.lr is None:
        args.lr = 1e-5 if args.lora_r or base != args.model else 1e-6
    if not args.out:
        name = args.out = f"out/{Path(__file__).stem}"
        n = 1
        while Path(args.out, "model").exists():
            n += 1
            args.out = f"{name}-{n}"
    args.ref_model = args.ref_model or args.model
    args.max_length = min(args.max_length, room)
    return args


# ---- Order and learning rate: the same in dpo.py, kto.py and rloo.py -

def generator(seed: int, purpose: str, n: int = 0) -> np.random.Generator:
    """A random generator that depends on these arguments only, so a resumed run needs no saved state."""
    return np.random.default_rng([seed, n, *purpose.encode()])


@lru_cache(maxsize=2)  # a step may be in two epochs
def order_of_epoch(epoch: int, n_rows: int, seed: int) -> list[int]:
    return generator(seed, "order", epoch).permutation(n_rows).tolist()


def batch_rows(step: int, rows: list, batch_size: int, seed: int) -> list:
    """The rows of a step. Each epoch is a new permutation of all rows."""
    batch = []
    for position in range((step - 1) * batch_size, step * batch_size):
        epoch, place = divmod(position, len(rows))
        batch.append(rows[order_of_epoch(epoch, len(rows), seed)[place]])
    return batch


def learning_rate(step: int, steps: int, args) -> float:
    """Linear warmup to --lr, then constant, or falling to 0 at steps + 1."""
    warmup_steps = round(args.warmup * steps) if args.warmup < 1 else args.warmup
    if step <= warmup_steps:
        return args.lr * (step / warmup_steps)

    remaining = (steps - step + 1) / (steps - warmup_steps)
    return args.lr * {
        "constant": 1.0,
        "linear": remaining,
        "cosine": (1 - math.cos(math.pi * remaining)) / 2,
    }[args.schedule]


# ---- Files of a run: the same in dpo.py, kto.py and rloo.py ----------

@contextmanager
def lock_folder(out: Path):
    """Creates the folder of a run, and locks it until the run ends in any way."""
    if (out / "model").exists():
        raise BadInput(f"{out} holds a finished run: name another --out")
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / ".lock", timeout=0)

    try:
        if is_first_process():
            lock.acquire()
        yield
    except Timeout:
        raise BadInput(f"another run writes into {out}: name another --out") from None
    except BaseException as error:
        if "No space left" in str(error):  # torch and safetensors have exceptions of their own for it
            raise BadInput(f"{out}: the disk is full, the same command resumes") from error
        raise
    finally:
        lock.release()


def describe_files(models: dict[str, str], functions: list[str]) -> dict:
    """Digests of models, of their tokenizers and templates, and of functions; and `code`: the script and libraries."""
    run = {"script": Path(__file__).name}
    digest = lru_cache(checkpoint_digest)  # reads a model once that is policy and reference
    for flag, name in models.items():
        run[f"{flag}'s weights"] = digest(name)
        run[f"{flag}'s settings"] = digest_of([  # .json and .jinja: tokenizer, template, generation
            file.read_bytes() for file in sorted(checkpoint_folder(name).glob("*.j[is]*"))])
    run["functions"] = digest_of([Path(spec.partition(":")[0]).read_bytes() for spec in functions])

    run["code"] = {file.name: digest_of([file.read_bytes()]) for file in (Path(__file__), HERE / "refcache.py")}
    run["code"] |= {"torch": torch.__version__, "transformers": transformers.__version__}
    return run


def digest_of(items: list) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode())
    return digest.hexdigest()


def init_training_state(policy, optimizer) -> dict:
    """What a step changes in place: weights, and their optimizer state, which a step with lr 0 creates."""
    state = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}  # tied ones once
    for weight in state.values():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()  # changes no weight: the optimizer was made with lr 0
    optimizer.zero_grad()

    for name, weight in list(state.items()):
        for key, value in optimizer.state[weight].items():
            state[f"optimizer.{name}.{key}"] = value.zero_()
    return state


def checkpoint_steps(out: Path) -> list[int]:
    """Steps of the complete checkpoints out/resume-STEP. Other folders that begin with resume- are the user's."""
    names = [file.parent.name.partition("-")[2] for file in out.glob("resume-*/run.json")]
    return [int(name) for name in names if name.isdigit()]


def save_checkpoint(out: Path, step: int, run: dict, state: dict):
    """Writes out/resume-STEP, run.json last: without it a folder is no checkpoint. Removes older ones."""
    folder = out / f"resume-{step}"
    shutil.rmtree(folder, ignore_errors=True)  # of a killed save
    barrier()
    # 64 tensors per file, because the writer holds a whole file in memory. A moving reference goes into file 0.
    files = Counter({f"training.{name}": n // 64 for n, name in enumerate(state["training"])})
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(folder, files, save_distributed=True))
    if is_first_process():
        sizes = {str(path.relative_to(out)): path.stat().st_size
                 for path in (*(out / name for name in LOGS), *folder.iterdir())}
        write_whole(folder / "run.json", [json.dumps({"run": run, "sizes": sizes}).encode()])
    remove_checkpoints(out, but=step)


def remove_checkpoints(out: Path, but: int | None = None):
    """Removes all, or all but that of one step."""
    for step in checkpoint_steps(out):
        if step != but and is_first_process():
            shutil.rmtree(out / f"resume-{step}")


def restore_checkpoint(out: Path, run: dict, state: dict) -> int:
    """Restores the newest checkpoint, and the logs of its step. Returns the step, or 0. Refuses a checkpoint of another
    run, missing or shortened files, a folder of another program, and processes that would train different runs."""
    step = max(checkpoint_steps(out), default=0)
    files = [out / name for name in ("args.json", *LOGS) if (out / name).exists()]  # before the first process writes
    mine = [run, str(out), step]
    if all_gather(mine) != [mine] * process_count():
        raise BadInput("the processes differ in flags, data, models or --out")

    saved = {"run": run, "sizes": dict.fromkeys(LOGS, 0)}
    if step:
        saved = json.loads((out / f"resume-{step}/run.json").read_text())
    elif files and "held-out rows" not in files[0].read_text():
        raise BadInput(f"{files[0]} is of another program: name another --out")
    differing = [name for name in run if saved["run"].get(name) != run[name] and name not in MAY_CHANGE]
    if differing:
        raise BadInput(f"{out} holds a run with other {', '.join(differing)}: name another --out")
    for name, size in saved["sizes"].items():
        if size and not ((out / name).exists() and (out / name).stat().st_size >= size):
            raise BadInput(f"{out / name} had {size} bytes: restore it")

    if step:
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(out / f"resume-{step}"))
        print(f"resumes after step {step}", *(f"{name} has changed since" for name in run["code"]
                                              if saved["run"]["code"].get(name) != run["code"][name]), sep="; ")
    if is_first_process():
        write_whole(out / "args.json", [json.dumps(run, indent=1).encode()])
        for name in LOGS:
            (out / name).touch()
            os.truncate(out / name, saved["sizes"][name])
        if run["wandb"]:
            import wandb
            run["wandb id"] = wandb.init(  # a resumed run goes on in the same one
                name=out.name, id=saved["run"].get("wandb id"), resume="allow", config=run, reinit="finish_previous").id
    return step


def log_metrics(out: Path, values: dict, args):
    """Adds a line to metrics.jsonl, and to Weights & Biases. After an evaluation, prints what held-out rows gave before
    training and what they give now."""
    append(out / "metrics.jsonl", [values])
    if not is_first_process():
        return
    with open(out / "metrics.jsonl") as file:
        before = json.loads(file.readline())
    if len(before) > 1 and before.keys() < values.keys():
        tqdm.write(f"{'held out':31} before     now")
        for name in before:
            tqdm.write(f"{name:30} {before[name]:z7.3f} {values[name]:z7.3f}")
    if args.wandb:
        import wandb
        wandb.log(values, step=values["step"])


def append(path: Path, lines: list[dict]):
    if is_first_process():
        with open(path, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def save_model(model, tokenizer, folder: Path, args):
    """Writes the model, or its LoRA adapter, as from_pretrained() reads it, in the dtype of --save_dtype."""
    state = get_model_state_dict(model, options=StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=True))
    if not is_first_process():
        return

    hidden = folder.with_name(f".{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)  # left by a killed save
    dtype = args.dtype if args.save_dtype == "auto" else "float32"
    cast = {}  # by address, so that tied weights stay one tensor
    for name, weight in state.items():
        to = getattr(torch, dtype) if weight.is_floating_point() else weight.dtype
        state[name] = cast.setdefault(weight.data_ptr(), weight.to(to))
    model.save_pretrained(hidden, state_dict=state)
    tokenizer.save_pretrained(hidden)
    config = hidden / "config.json"
    if config.exists():  # an adapter has none. The config names the dtype of training, not that of the saved weights
        config.write_text(config.read_text().replace('"dtype": "float32"', f'"dtype": "{dtype}"'))
    os.replace(hidden, folder)


if __name__ == "__main__":
    if int(os.environ.get("RANK", 0)):  # under torchrun only the first process prints
        sys.stdout = open(os.devnull, "w")
    try:
        main(tyro.cli(Args, description=__doc__, use_underscores=True))
    except (BadInput, ImportError, OSError, torch.OutOfMemoryError, KeyboardInterrupt) as error:
        what = str(error) or "stopped, the same command resumes"
        if isinstance(error, ModuleNotFoundError):
            what += f": pip install {error.name}"
        if isinstance(error, torch.OutOfMemoryError):
            what += ": lower --tokens_per_forward, or add --gradient_checkpointing on"
        print(f"{Path(__file__).name}: {what}", file=sys.stderr)
        sys.exit(2)
