"""KTO: learn from single answers that are labelled good or bad.

Ethayarajh et al. 2024, KTO: Model Alignment as Prospect Theoretic Optimization, arXiv:2402.01306, equation 7:

    ρ = log π(y|x) − log π_ref(y|x)       z = max(0, mean over the batch of log π(y'|x) − log π_ref(y'|x))
    L(θ) = E  λ_D (1 − σ(β (ρ − z)))  if y is desirable,     λ_U (1 − σ(β (z − ρ)))  if not

    python kto.py  # the demo: offline, 10 s
    python kto.py --model Qwen/Qwen3-0.6B --data feedback.jsonl --out out/qwen  # your model, your data

z estimates KL(π || π_ref), without gradient. y' answers another prompt. The paper draws it in each batch.
Here each row keeps one, so that its reference log-probs are cached. docs/recipes.md has values for lr and β.

Data: `prompt, completion, label` (true, false, 1, 0), or pairs `prompt, chosen, rejected`, which give a row
of each kind; strings or chat messages:

    {"prompt": [{"role": "user", "content": "2 + 2?"}], "completion": [{..}], "label": true}

Shapes: B rows in a batch; (B,) is one value per row.

Metrics: loss, learning_rate, seconds, tokens_per_second, and
    kl                                 z
    rewards/chosen, rewards/rejected   β ρ of desirable rows, and of undesirable ones
    rewards/margins                    their difference
    rewards/accuracies                 fraction of rows where ρ has the sign of the label, ties count 1/2
    logps/chosen, logps/rejected       log π(y|x)
    logratio, nll/chosen               |ρ| per token; −log π(y|x) per token of desirable rows
    grad_norm, memory_gb               before clipping; peak of the GPU
    eval_*, eval_score                 of held-out rows; the mean of --score
    samples/distinct, samples/ended    different answers; fraction that ends before max_new_tokens

Not here: tensor or pipeline parallelism, images, truncated rows.
"""
import hashlib
import importlib.util
import json
import math
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import transformers
import tyro
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict)
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from refcache import (
    BadInput, ReferenceCache, Swap, all_gather, all_reduce, apply_fsdp, barrier, check_agreement,
    checkpoint_digest, completion_logprobs, context_length, count_tokens, enable_shared_prompts, full_tensor,
    is_first_process, log_ratios, micro_batches, names_in_float32, process_count, process_group, process_rank,
    progress_bar, reference_logprobs, sum_tokens, to_device, unsharded, unwrap_model, write_whole)

HERE = Path(__file__).parent
DEMO = dict(
    model=f"{HERE}/demo/model",
    data=f"{HERE}/demo/feedback.jsonl",
    eval_data=f"{HERE}/demo/feedback_test.jsonl",
    score=f"{HERE}/demo/score.py:success",
    lr=2e-4,
    beta=1.0,  # with 0.1 all answers become alike
)
TOKENS = {}  # id -> id, see as_tuple
ENDINGS = (".jsonl", ".json", ".csv", ".parquet")  # of files
LOGS = ("metrics.jsonl", "samples.jsonl")
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
MAY_CHANGE = {  # flags that may differ when a run is resumed
    "out", "ref_cache", "wandb", "tokens_per_forward", "gradient_checkpointing", "save_every", "eval_every",
    "chat_template_kwargs"}


@dataclass
class Args:
    model: str | None = None  # checkpoint folder or hub name; None: the demo
    data: str | None = None  # rows: .jsonl .json .csv .parquet, or hub data NAME[:CONFIG][:SPLIT]
    eval_data: str | None = None  # held-out rows; None: they are split off --data
    eval_size: int = 128  # number of prompts that are split off --data, at most a tenth of them
    chat_template_kwargs: dict[str, bool | int | str] = field(default_factory=dict)  # enable_thinking False
    max_length: int = 1024  # tokens of prompt + answer; longer rows are dropped and counted
    out: str | None = None  # folder of the run; None: out/kto, or out/kto-2 if that is finished

    ref: Literal["cache", "swap", "live"] = "cache"  # the reference: cached, swapped in, or on the GPU
    ref_model: str | None = None  # the reference, for cache and live; None: the policy before training
    ref_cache: str | None = None  # file of reference log-probs, which runs can share; None: a file in --out

    lora_r: int | None = None  # train a LoRA adapter of this rank instead of all weights
    lora_alpha: float | None = None  # LoRA's scale is alpha / r; None: alpha = 2 r
    lora_target: tuple[str, ...] = ()  # names of the layers with an adapter: q_proj v_proj; empty: all linear

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"  # apo_zero_unpaired has no z
    beta: float | None = None  # strength of the KL penalty; None: 0.1, in the demo 1
    desirable_weight: float = 1.0  # λ_D, the weight of desirable rows
    undesirable_weight: float = 1.0  # λ_U, the weight of undesirable rows

    epochs: float = 1.0  # passes over the data
    steps: int = -1  # optimizer steps; -1: as many as --epochs needs; 0: only fill the cache
    batch_size: int = 32  # rows per optimizer step
    lr: float | None = None  # peak learning rate; None: 1e-6, with LoRA 1e-5, in the demo 2e-4
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # of the learning rate after the warmup
    warmup: float = 0.1  # steps in which the learning rate rises; below 1: their fraction of all steps
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # gradients are clipped to this norm; 0: no clipping
    seed: int = 0

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of forward passes; auto: bfloat16 on a GPU
    tokens_per_forward: int = 16384  # limits memory; never changes what is learned
    gradient_checkpointing: bool = False  # saves memory, costs time; never changes what is learned

    save_every: int = 50  # steps between checkpoints, from which a killed run resumes; 0: none
    eval_every: int | None = None  # steps between evaluations; None: only before and after training
    samples: int = 64  # held-out prompts to answer in each evaluation
    max_new_tokens: int = 128  # tokens per such answer
    score: str | None = None  # FILE.py:FUNCTION(prompts, completions, **columns) -> a number per answer
    wandb: bool = False  # log to Weights & Biases, in the project of $WANDB_PROJECT


# ---- The loss --------------------------------------------------------

class Row(NamedTuple):
    prompt: tuple[int, ...]  # token ids, which get no loss
    completion: tuple[int, ...]
    is_desirable: bool
    other: tuple[int, ...]  # y'; () if the loss needs none
    whole_prompt: tuple[int, ...]  # the prompt tokenized alone; longer than `prompt` if a token spans its end
    columns: dict  # the row of the file, for --score; else empty


class Batch(NamedTuple):
    """B rows, (B,) each. logp and ratio are sums over the tokens of an answer."""
    logp: torch.Tensor  # log π(y|x)
    ratio: torch.Tensor  # ρ = log π(y|x) − log π_ref(y|x)
    is_desirable: torch.Tensor  # bool
    length: torch.Tensor  # |y| in tokens


def feedback_loss(batch: Batch, z: torch.Tensor, args: Args) -> torch.Tensor:
    """The loss of every row, (B,), float32. z is a scalar in nats, without gradient."""
    sign = torch.where(batch.is_desirable, 1.0, -1.0)
    weight = torch.where(batch.is_desirable, args.desirable_weight, args.undesirable_weight)  # λ_D or λ_U

    match args.loss:
        case "kto":  # equation 7
            return weight * (1 - torch.sigmoid(args.beta * sign * (batch.ratio - z)))
        case "apo_zero_unpaired":  # arXiv:2408.06266
            return weight * (1 - torch.sigmoid(args.beta * sign * batch.ratio))
        case _:
            raise ValueError(f"no loss is named {args.loss}")


def metrics(batch: Batch, args: Args) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What is logged beside the loss: for every row a value, (B,), and whether the row counts, (B,)."""
    desirable = batch.is_desirable
    everything = torch.ones_like(desirable)
    is_tie = batch.ratio.abs() < 1e-4  # up to rounding
    is_right = (batch.ratio > 0) == desirable

    return {
        "rewards/accuracies": (torch.where(is_tie, 0.5, is_right.float()), everything),
        "logratio": ((batch.ratio / batch.length).abs(), everything),
        "nll/chosen": (-batch.logp / batch.length, desirable),
        "rewards/chosen": (args.beta * batch.ratio, desirable),
        "rewards/rejected": (args.beta * batch.ratio, ~desirable),
        "logps/chosen": (batch.logp, desirable),
        "logps/rejected": (batch.logp, ~desirable),
    }


# ---- A batch ---------------------------------------------------------

def groups_of(rows: list[Row]) -> list:
    """The rows as refcache takes them: [(prompt, [completion]), ..]"""
    return [(row.prompt, [row.completion]) for row in rows]


def with_others(rows: list[Row]) -> list[Row]:
    """The rows with y' instead of y."""
    return [row._replace(completion=row.other) for row in rows if row.other]


def compute_batch(policy, rows: list[Row], ref_logps) -> Batch:
    """The Batch of these rows. ref_logps[prompt, answer]: the reference's token log-probs."""
    groups = groups_of(rows)
    logps = completion_logprobs(policy, groups)  # for each row [(|y|,)]
    ratios = log_ratios(logps, groups, ref_logps)

    return Batch(
        logp=sum_tokens(logps).squeeze(1),
        ratio=sum_tokens(ratios).squeeze(1),
        is_desirable=to_device([row.is_desirable for row in rows], policy.device),
        length=to_device([len(row.completion) for row in rows], policy.device),
    )


@torch.no_grad()
def estimate_kl(policy, rows: list[Row], ref_logps, args: Args) -> torch.Tensor:
    """z of equation 7, a scalar: the mean over the whole batch, clamped."""
    others = with_others(rows)
    total = torch.zeros((), device=policy.device)
    for indices, weight in micro_batches(policy, groups_of(others), args.tokens_per_forward):
        batch = compute_batch(policy, [others[i] for i in indices], ref_logps)
        total += batch.ratio.sum() * weight
    mean = all_reduce(total) / max(1, len(others))
    return mean.clamp(min=0)


def run_batch(policy, rows: list[Row], ref_logps, args: Args, train: bool) -> dict[str, float]:
    """Mean metrics of a batch. The processes divide its micro-batches. With `train`, adds the gradient."""
    z = estimate_kl(policy, rows, ref_logps, args)
    totals = {}  # (2,) for each metric: the sum over the rows that count, and their number
    for indices, weight in micro_batches(policy, groups_of(rows), args.tokens_per_forward):
        with torch.set_grad_enabled(train):
            batch = compute_batch(policy, [rows[i] for i in indices], ref_logps)
            losses = feedback_loss(batch, z, args)
            loss = losses.sum() * weight / len(rows)  # all micro-batches add up to the mean over the batch
        if train:
            loss.backward()

        values = {"loss": (losses, torch.ones_like(batch.is_desirable))} | metrics(batch, args)
        for name, (value, counts) in values.items():
            total = torch.stack([(value.detach() * counts).sum(), counts.sum()]) * weight
            totals[name] = totals.get(name, 0) + total

    means = {"kl": z.item()}
    for name, (total, number) in zip(totals, all_reduce(torch.stack(list(totals.values()))).tolist()):
        if number:
            means[name] = total / number
    if "rewards/chosen" in means and "rewards/rejected" in means:
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return means


def evaluate(policy, tokenizer, rows: list[Row], reference, score, step: int, out: Path, args: Args) -> dict:
    """Mean metrics of held-out rows, and of answers to their prompts."""
    values = write_samples(policy, tokenizer, rows, score, step, out, args)
    if not rows:
        return values
    ref_logps = reference_logprobs(reference, groups_of(rows + with_others(rows)), args.tokens_per_forward)
    means = run_batch(policy, rows, ref_logps, args, train=False)
    return values | {f"eval_{name}": value for name, value in means.items()}


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
    """The run: rows, the reference's log-probs, the policy, the loop."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(args.model, args.ref_model)
    train_rows, eval_rows = load_data(tokenizer, args)
    print("The first row, | before each trained token:")
    print(tokenizer.decode(train_rows[0].prompt), *map(tokenizer.decode, train_rows[0].completion), sep="|")
    print_balance(train_rows, args)
    if args.loss != "apo_zero_unpaired":  # z needs an answer to another prompt
        eval_rows = draw_others(eval_rows, train_rows, args)
        train_rows = draw_others(train_rows, train_rows, args)

    batch_size = min(args.batch_size, len(train_rows))
    steps = args.steps
    if steps == -1:
        steps = math.ceil(args.epochs * len(train_rows) / batch_size)
    if args.warmup > max(1, steps):
        raise BadInput(f"--warmup {args.warmup:g}: the run has only {steps} steps")
    ordered_rows = rows_in_order(train_rows, steps * batch_size, args.seed)
    print(f"{steps} steps of {batch_size} rows, lr {args.lr:g}, reference: {args.ref}")

    run = describe_run(train_rows, eval_rows, args)
    check_folder(out, run)  # before anything that takes long
    score = None
    if args.score and is_first_process():
        file, _, name = args.score.rpartition(":")
        score = getattr(load_module(file), name)
    if score and eval_rows:  # try it on one answer, so that it does not fail after the reference's pass
        answer = tokenizer.decode(eval_rows[0].completion, skip_special_tokens=True)
        score_answers(score, eval_rows[:1], [answer], args)

    # The reference comes first, so that memory never holds both models.
    if args.ref == "cache":
        digest = run["ref_model's weights"]
        reference = ReferenceCache(name=args.ref_model, reference=digest, dtype=args.dtype)
        path = args.ref_cache or out / "reference_logprobs.pkl"
        scored = (ordered_rows or train_rows) + eval_rows  # --steps 0 fills the cache with all rows
        load = partial(load_model, args.ref_model, device, args)
        groups = groups_of(scored + with_others(scored))
        reference.fill(load, groups, args.tokens_per_forward, path)  # frees what it has loaded
    if steps == 0:
        return []

    torch.manual_seed(args.seed)  # for a new adapter, and for the samples of step 0
    policy = load_model(args.model, device, args, trains=True)
    if args.ref == "live":
        reference = nullcontext(load_model(args.ref_model, device, args))
    elif args.ref == "swap":
        reference = Swap(policy)

    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    matrices = [weight for weight in weights if weight.dim() > 1]
    vectors = [weight for weight in weights if weight.dim() <= 1]  # norms and biases do not decay
    optimizer = torch.optim.AdamW([
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0}], fused=True)  # the loop sets lr

    last_step = restore_checkpoint(out, run, policy, optimizer)
    if last_step == 0:
        values = {"step": 0} | evaluate(policy, tokenizer, eval_rows, reference, score, 0, out, args)
        append(out / "metrics.jsonl", [values], args.wandb)

    progress = progress_bar(range(last_step + 1, steps + 1), desc="train", initial=last_step, total=steps)
    for step in progress:
        began = time.monotonic()
        torch.manual_seed(args.seed + step)  # a resumed run needs no saved random state
        rows = ordered_rows[(step - 1) * batch_size:step * batch_size]
        ref_logps = reference_logprobs(
            reference, groups_of(rows + with_others(rows)), args.tokens_per_forward)
        values = {"step": step}
        values |= run_batch(policy, rows, ref_logps, args, train=True)  # calls loss.backward()
        if step == 1 and args.ref_model == args.model:
            check_agreement(values["logratio"], args.dtype)

        grad_norm = torch.nn.utils.clip_grad_norm_(weights, args.max_grad_norm or math.inf)
        values["grad_norm"] = full_tensor(grad_norm).item()
        values["learning_rate"] = learning_rate(step, steps, args)
        for group in optimizer.param_groups:
            group["lr"] = values["learning_rate"]
        optimizer.step()
        optimizer.zero_grad()

        weight_norm = full_tensor(torch.nn.utils.get_total_norm(weights)).item()
        if not math.isfinite(values["loss"] + values["grad_norm"] + weight_norm):
            raise BadInput(f"step {step}: loss, gradient or weights are not finite: lower --lr")

        values["seconds"] = time.monotonic() - began
        values["tokens_per_second"] = count_tokens(groups_of(rows)) / values["seconds"]
        values["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9  # peak, 0 on a CPU

        if step == steps or (args.eval_every and step % args.eval_every == 0):
            values |= evaluate(policy, tokenizer, eval_rows, reference, score, step, out, args)
        append(out / "metrics.jsonl", [values], args.wandb)

        if args.save_every and (step == steps or step % args.save_every == 0):
            save_checkpoint(out, step, policy, optimizer)
        progress.set_postfix({name: values[name] for name in ("loss", "tokens_per_second")}, refresh=False)

    save_model(policy, tokenizer, out, args)
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
    warmup_steps = round(args.warmup * steps if args.warmup < 1 else args.warmup)
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
        unset = {flag: value for flag, value in DEMO.items() if vars(args)[flag] is None}
    args = replace(args, **unset)
    if not (args.model and args.data):
        raise BadInput("give both --model and --data, or neither for the demo")
    if args.batch_size < 1 or args.max_new_tokens < 1:
        raise BadInput("--batch_size and --max_new_tokens must be at least 1")

    # tyro reads only True and False as truth values. Any other word is a string, which counts as true.
    truths = {"true": True, "false": False}
    options = args.chat_template_kwargs.items()
    args.chat_template_kwargs = {name: truths.get(value, value) for name, value in options}

    # Absolute paths: a user's function may change the working directory.
    args.model, args.ref_model = find_path(args.model), find_path(args.ref_model or args.model)
    args.data, args.eval_data = find_path(args.data), find_path(args.eval_data)
    args.ref_cache, args.score = absolute(args.ref_cache), absolute(args.score)
    out, n = args.out or "out/kto", 1
    while args.out is None and Path(out, "model").exists():
        n += 1
        out = f"out/kto-{n}"
    args.out = absolute(out)
    if Path(args.out, "model").exists():
        raise BadInput(f"{args.out} holds a finished run: name another --out")
    if args.score and not Path(args.score.rpartition(":")[0]).is_file():
        raise BadInput(f"--score {args.score}: expected FILE.py:FUNCTION, and a file that exists")

    is_adapter = find_path(base_of(args.model)) != args.model
    if args.lora_r and is_adapter:
        raise BadInput("--lora_r makes a new adapter, but --model is one")
    if (args.lora_alpha or args.lora_target) and not args.lora_r:
        raise BadInput("--lora_alpha and --lora_target need --lora_r")
    if args.dtype == "auto":
        args.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    if args.beta is None:
        args.beta = 0.1
    if args.lr is None:
        args.lr = 1e-5 if args.lora_r or is_adapter else 1e-6
    args.max_length = min(args.max_length, context_length(AutoConfig.from_pretrained(base_of(args.model))))

    if args.ref == "swap" and args.ref_model != args.model:
        raise BadInput("--ref swap holds the policy's own start: with --ref_model choose cache or live")
    # Values that would turn learning off, or around.
    if not (args.lr > 0 and args.beta > 0 and args.epochs > 0):  # `not >` also catches NaN
        raise BadInput(f"--lr {args.lr:g}, --beta {args.beta:g}, --epochs {args.epochs:g}: must be above 0")
    if args.lora_r == 0:
        raise BadInput("--lora_r 0: at least 1; leave it out to train all weights")
    if args.steps < -1 or not (args.warmup >= 0 and args.max_grad_norm >= 0):
        raise BadInput("--steps must be at least -1, --warmup and --max_grad_norm at least 0")
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


# ---- Answers to held-out prompts -------------------------------------

def write_samples(policy, tokenizer, rows: list[Row], score, step: int, out: Path, args: Args) -> dict:
    """Writes answers to held-out prompts to samples.jsonl. Returns metrics, such as the mean of --score."""
    # One row for each prompt that leaves room for an answer.
    longest = context_length(policy.config) - args.max_new_tokens
    row_of_prompt = {row.whole_prompt: row for row in rows if len(row.whole_prompt) <= longest}
    rows = list(row_of_prompt.values())[:args.samples]
    if not rows:
        print(f"no samples: --samples 0, or no held-out prompt with room for {args.max_new_tokens} tokens")
        return {}

    prompts = [row.whole_prompt for row in rows]
    answers = generate(policy, tokenizer, prompts, args)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    n_ended = sum(len(answer) < args.max_new_tokens for answer in answers)
    values = {"samples/distinct": len(set(texts)), "samples/ended": n_ended / len(answers)}

    scores = [None] * len(rows)
    if score:
        scores = score_answers(score, rows, texts, args)
        values["eval_score"] = float(np.mean([value for value in scores if value is not None]))
    lines = []
    for prompt, text, value in zip(prompts, texts, scores):
        lines.append(dict(step=step, prompt=tokenizer.decode(prompt), completion=text, score=value))
    append(out / "samples.jsonl", lines)
    return values


@torch.no_grad()
def generate(policy, tokenizer, prompts: list[tuple], args: Args) -> list[tuple]:
    """Token ids of one sample for each prompt, at temperature 1, without its stop token."""
    core = unwrap_model(policy)
    own_config = core.generation_config
    own_stops = np.atleast_1d(own_config.eos_token_id).tolist()  # of a number, a list or None
    stops = {tokenizer.eos_token_id, *own_stops} - {None}
    core.generation_config = GenerationConfig()  # else generate() would use repetition_penalty, min_p, ..

    answers = []
    try:
        with unsharded(policy):
            for start in progress_bar(range(0, len(prompts), 64), desc="answer", delay=1):
                ids = [torch.tensor(prompt) for prompt in prompts[start:start + 64]]
                ids = pad_sequence(ids, batch_first=True, padding_value=-1, padding_side="left")
                ids = ids.to(policy.device)
                sampled = core.generate(
                    ids.clamp(min=0), attention_mask=(ids >= 0).long(), do_sample=True, top_k=0,
                    max_new_tokens=args.max_new_tokens, eos_token_id=sorted(stops), pad_token_id=0)
                for row in sampled[:, ids.shape[1]:].tolist():
                    answers.append(tuple(takewhile(lambda token: token not in stops, row)))
    finally:
        core.generation_config = own_config
    return answers


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


def score_answers(score, rows: list[Row], texts: list[str], args: Args) -> list[float | None]:
    """What --score returns for answers to the prompts of these rows. It is called as TRL calls a reward."""
    names = set().union(*(row.columns for row in rows))
    columns = {name: [deepcopy(row.columns.get(name)) for row in rows] for name in names}  # copies
    prompts = columns.pop("prompt")
    completions = []
    for prompt, text in zip(prompts, texts):
        completions.append(text if isinstance(prompt, str) else [{"role": "assistant", "content": text}])

    values = score(**columns | dict(prompts=prompts, completions=completions))
    values = list(values) if isinstance(values, Iterator) else values
    if isinstance(values, dict | set | str) or len(values) != len(texts):
        raise BadInput(f"{args.score} returned {str(values)[:99]}: expected {len(texts)} numbers or None")
    return [None if value is None else float(value) for value in values]


def report(out: Path) -> list[dict]:
    """Prints three answers and the metrics of held-out rows, before training and now. Returns all metrics."""
    history = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    samples = [json.loads(line) for line in (out / "samples.jsonl").open()]
    now = [sample for sample in samples if sample["step"] == history[-1]["step"]]
    for old, new in zip(samples[:3], now):  # their prompts are the same
        prompt = new["prompt"]
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
        prompts = sorted({row.whole_prompt for row in rows})
        n = min(args.eval_size, len(prompts) // 10)
        held_out = set(random.Random(0).sample(prompts, n))  # --seed changes nothing here
        eval_rows = [row for row in rows if row.whole_prompt in held_out]
        rows = [row for row in rows if row.whole_prompt not in held_out]

    prompts = {row.whole_prompt for row in rows}
    n_known = sum(row.whole_prompt in prompts for row in eval_rows)
    print(f"{len(rows)} rows to train on, {len(eval_rows)} held out ({n_known} with a prompt of the former)")

    config = AutoConfig.from_pretrained(base_of(args.model)).get_text_config()
    largest = max(max(row.whole_prompt + row.completion) for row in rows + eval_rows)
    if largest >= config.vocab_size:
        raise BadInput(f"{args.model} has no embedding for token {largest} of its tokenizer")
    return rows, eval_rows


def load_rows(source: str, tokenizer, args: Args) -> list[Row]:
    """The rows of a file or of hub data, two for a pair. Unusable ones are dropped and counted."""
    rows = []
    counts = Counter(rows=0)
    for columns, (prompt, *sequences) in tokenize_rows(source, tokenizer, args, counts):
        labels = [True, False]  # of a pair
        if len(sequences) == 1:
            labels = [LABELS[str(columns["label"]).lower()]]
        elif sequences[0] == sequences[1]:
            counts["dropped: equal answers"] += 1
            continue

        for with_answer, is_desirable in zip(sequences, labels):
            # The prompt gets no loss. It ends where the two sequences begin to differ.
            end = common_length(prompt, with_answer)
            if end < len(prompt):
                counts["whose prompt ends early: a token spans its end, or the template changes it"] += 1

            whole_prompt = as_tuple(prompt)
            row = Row(
                whole_prompt[:end], as_tuple(with_answer[end:]), is_desirable, other=(),
                whole_prompt=whole_prompt, columns=columns if args.score else {})
            if not (row.prompt and row.completion):
                counts["dropped: an answer that ends within the prompt"] += 1
            elif len(row.prompt) + len(row.completion) > args.max_length:
                counts[f"dropped: longer than {args.max_length} tokens"] += 1
            else:
                rows.append(row)

    print(f"{source}: {len(rows)} answers of", "; ".join(f"{count} {note}" for note, count in counts.items()))
    if len(rows) < max(1, counts["rows"] / 2):
        raise BadInput(f"{source}: too few rows")
    return rows


def tokenize_rows(source: str, tokenizer, args: Args, counts: Counter):
    """Yields the columns of each row, and the token ids of its texts: the prompt, and it with each answer."""
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
    """[(columns, texts)] of a row: the prompt, and the prompt with each answer. [] if one is empty."""
    prompt, *answers = split_prompt(columns)
    if any(not "".join(texts_in(part)).strip() for part in (prompt, *answers)):
        counts["dropped: an empty prompt or answer"] += 1
        return []
    columns = columns | {"prompt": prompt}

    if isinstance(prompt, str):  # strings end with EOS, chats as their template ends them
        eos = tokenizer.eos_token
        if not eos:
            raise ValueError("strings need an EOS token, which this tokenizer has not")
        if tokenizer.chat_template:
            counts["strings, without the chat template; see demo/prepare_chat.py"] += 1
        return [(columns, [prompt, *(prompt + answer.removesuffix(eos) + eos for answer in answers)])]

    apply_template = template_of(columns, tokenizer, args)
    texts = [apply_template(prompt, add_generation_prompt=True)]
    texts += [apply_template(prompt + answer) for answer in answers]

    # A template may write other messages where an answer follows. Then some of them would get a loss.
    if not all(text.startswith(texts[0]) for text in texts):
        messages = apply_template(prompt)  # without the beginning of an answer
        if not all(text.startswith(messages) for text in texts):
            counts["dropped: the template writes another prompt where an answer follows"] += 1
            return []

    # A template may drop the thoughts of earlier answers, but no other text.
    kept = [message for message in prompt[:-1] if message["role"] != "assistant"]
    if any(map(drops_text, texts, (kept + prompt[-1:], *answers))):
        counts["with text that the template drops"] += 1
    return [(columns, texts)]


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


def split_prompt(columns: dict) -> tuple:
    """The prompt and its answers: strings, or lists of messages. The answers do not repeat the prompt."""
    names = ["chosen", "rejected"] if "chosen" in columns else ["completion"]
    answers = [read_text(columns, name) for name in names]
    is_chat = any(isinstance(answer, list) for answer in answers)
    if "prompt" not in columns and not (is_chat and len(answers) == 2):
        raise ValueError("has no column 'prompt': demo/prepare_chat.py --strings adds it")
    prompt = read_text(columns, "prompt") if columns.get("prompt") else ""
    if len(answers) == 1 and str(columns.get("label")).lower() not in LABELS:
        raise ValueError(f"label is {columns.get('label')!r}: expected true, false, 1 or 0")

    if is_chat:
        answers = [answer or [] for answer in answers]  # null beside messages
        shared = list(answers[0][:common_length(*answers)]) if len(answers) == 2 else []
        question = {"role": "user", "content": prompt}
        if not prompt or question in shared:  # the prompt is what both conversations begin with
            prompt = shared
        elif isinstance(prompt, str):
            prompt = [question]

        n = len(prompt)
        if all(answer[:n] == prompt for answer in answers):
            answers = [answer[n:] for answer in answers]
    if any(type(answer) is not type(prompt) for answer in answers):
        raise ValueError("strings and messages are mixed: expected one kind in the prompt and its answers")
    if is_chat and any(message["role"] in ("user", "system") for message in chain(*answers)):
        raise ValueError("an answer contains a user or system message")
    return prompt, *answers


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


def common_length(*sequences) -> int:
    """The number of items with which all of these sequences begin."""
    length = 0
    for items in zip(*sequences):
        if items.count(items[0]) < len(items):
            break
        length += 1
    return length


def as_tuple(ids: list[int]) -> tuple[int, ...]:
    """Equal ids become one object: the data then takes 8 bytes per token instead of 36."""
    return tuple([TOKENS.setdefault(token, token) for token in ids])


def draw_others(rows: list[Row], sources: list[Row], args: Args) -> list[Row]:
    """Gives each row a y', which is an answer of `sources` to another prompt. It is drawn once."""
    order = np.random.default_rng([args.seed, 0, *b"others"]).permutation(len(sources)).tolist()
    drawn = []
    n_cut = 0
    for i, row in enumerate(rows):
        candidates = (sources[order[(i + n) % len(order)]] for n in range(len(order)))
        fitting = (source.completion for source in candidates if source.whole_prompt != row.whole_prompt)
        other = next(fitting, ())
        if not other:
            raise BadInput("all rows have one prompt: use --loss apo_zero_unpaired")
        drawn.append(row._replace(other=other[:args.max_length - len(row.prompt)]))
        n_cut += drawn[-1].other != other
    print(f"{n_cut} of {len(rows)} other answers, for z, are cut to --max_length")
    return drawn


def print_balance(rows: list[Row], args: Args):
    """Prints how many rows are desirable, and a better λ_U unless λ_D n_D / (λ_U n_U) is in [1, 4/3] (8)."""
    n_desirable = sum(row.is_desirable for row in rows)
    if n_desirable in (0, len(rows)):
        raise BadInput(f"{args.data}: all rows have the same label")
    print(f"{n_desirable} of {len(rows)} rows are desirable")
    balanced = args.desirable_weight * n_desirable / (len(rows) - n_desirable)  # the λ_U that makes it 1
    if not 0.75 * balanced <= args.undesirable_weight <= balanced:  # the ratio is not between 1 and 4/3
        print(f"--undesirable_weight {balanced / 1.17:.2g} would balance them")  # 1.17: the middle


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
    run |= {"model's weights": digest_of(args.model), "ref_model's weights": digest_of(args.ref_model)}
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
        print("kto.py:", error, file=sys.stderr)
        sys.exit(2)
    except torch.OutOfMemoryError as error:
        error.add_note("lower --tokens_per_forward, add --gradient_checkpointing, or give --samples 0")
        raise
