"""KTO: learn from single answers that are labelled good or bad.

Ethayarajh et al. 2024, KTO: Model Alignment as Prospect Theoretic Optimization, arXiv:2402.01306, equation 7:

    ρ = log π(y|x) − log π_ref(y|x)       z = max(0, mean over the batch of log π(y'|x) − log π_ref(y'|x))
    L(θ) = E  λ_D (1 − σ(β (ρ − z)))  if y is desirable,     λ_U (1 − σ(β (z − ρ)))  if not

    python kto.py  # the demo: offline, 10 s
    python kto.py --model Qwen/Qwen3-0.6B --data rated/train.jsonl --eval_data rated/test.jsonl

z estimates KL(π || π_ref), without gradient. y' answers another prompt. The paper draws it in each batch.
Here each row keeps one, so that its reference log-probs are cached. docs/recipes.md has values for lr and β.

Data: JSON Lines with `prompt, completion, label`, all strings or all chat messages, and true or false.
tools/prepare.py writes such files from other data, --rows rated also from pairs:

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
    eval_*                             the same of --eval_data

Not here: other formats (tools/prepare.py), samples (rloo.py --steps 0), images, truncated rows.
"""
import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import transformers
import tyro
from filelock import FileLock, Timeout
from huggingface_hub import snapshot_download
from jinja2 import TemplateError  # comes with torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

from refcache import (
    BadInput, ReferenceCache, Swap, all_gather, all_reduce, apply_fsdp, check_agreement, checkpoint_digest,
    completion_logprobs, context_length, count_tokens, enable_shared_prompts, full_tensor, is_first_process,
    log_ratios, micro_batches, names_in_float32, process_count, process_group, process_rank, progress_bar,
    reference_logprobs, sum_tokens, to_device, unwrap_model, write_whole)

HERE = Path(__file__).parent
DEMO = dict(
    model=f"{HERE}/demo/model", data=f"{HERE}/demo/feedback.jsonl",
    eval_data=f"{HERE}/demo/feedback_test.jsonl", lr=2e-4, beta=1.0)  # with beta 0.1 all answers become alike
TOKENS = {}  # id -> id, see as_tuple
MAY_CHANGE = {  # flags that may differ when a run is resumed
    "out", "ref_cache", "wandb", "tokens_per_forward", "gradient_checkpointing", "save_every", "eval_every",
    "chat_template_kwargs"}
ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}  # of messages


@dataclass
class Args:
    model: str | None = None  # checkpoint folder or hub name; None: the demo
    data: str | None = None  # rated answers, a .jsonl file of plain rows: see tools/prepare.py
    eval_data: str | None = None  # held-out rows, such a file; None: no evaluation
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
    wandb: bool = False  # log to Weights & Biases, in the project of $WANDB_PROJECT


# ---- The loss --------------------------------------------------------

class Row(NamedTuple):
    prompt: tuple[int, ...]  # token ids, which get no loss
    completion: tuple[int, ...]
    is_desirable: bool
    other: tuple[int, ...]  # y'; () if the loss needs none
    whole_prompt: tuple[int, ...]  # tokenized alone; longer than `prompt` if a token spans its end


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
    """The rows that have a y', with y' instead of y."""
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
    for indices, n_used in micro_batches(policy, groups_of(others), args.tokens_per_forward):
        batch = compute_batch(policy, [others[i] for i in indices], ref_logps)
        total += batch.ratio[:n_used].sum()
    mean = all_reduce(total) / max(1, len(others))
    return mean.clamp(min=0)


def run_batch(policy, rows: list[Row], ref_logps, args: Args, train: bool) -> dict[str, float]:
    """Mean metrics of a batch. The processes divide its micro-batches. With `train`, adds the gradient."""
    z = estimate_kl(policy, rows, ref_logps, args)
    totals = {}  # (2,) for each metric: the sum over the rows that count, and their number
    batches = micro_batches(policy, groups_of(rows), args.tokens_per_forward)
    if not train:
        batches = progress_bar(batches, desc="held out", unit="forward", delay=1)
    for indices, n_used in batches:
        with torch.set_grad_enabled(train):
            batch = compute_batch(policy, [rows[i] for i in indices], ref_logps)
            batch = Batch(*(values[:n_used] for values in batch))  # empty if only FSDP needs this forward
            losses = feedback_loss(batch, z, args)
            loss = losses.sum() / len(rows)  # all micro-batches add up to the mean over the batch
        if train:
            loss.backward()

        values = {"loss": (losses, torch.ones_like(batch.is_desirable))} | metrics(batch, args)
        for name, (value, counts) in values.items():
            total = torch.stack([(value.detach() * counts).sum(), counts.sum()])
            totals[name] = totals.get(name, 0) + total

    means = {"kl": z.item()}
    for name, (total, number) in zip(totals, all_reduce(torch.stack(list(totals.values()))).tolist()):
        if number:
            means[name] = total / number
    if "rewards/chosen" in means and "rewards/rejected" in means:
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return means


def evaluate(policy, rows: list[Row], reference, args: Args) -> dict[str, float]:
    """Mean metrics of held-out rows."""
    if not rows:
        return {}
    ref_logps = reference_logprobs(reference, groups_of(rows + with_others(rows)), args.tokens_per_forward)
    means = run_batch(policy, rows, ref_logps, args, train=False)
    return {f"eval_{name}": value for name, value in means.items()}


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
    """The run: rows, the reference's log-probs, the policy, the loop."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(args.model, args.ref_model)
    train_rows = load_rows(args.data, tokenizer, args)
    eval_rows = load_rows(args.eval_data, tokenizer, args) if args.eval_data else []
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
    last_step = open_folder(out, run)  # before anything that takes long

    # A cached reference is computed first and freed, so that memory never holds both models.
    if args.ref == "cache":
        digest = run["ref_model's weights"]
        reference = ReferenceCache(name=args.ref_model, reference=digest, dtype=args.dtype)
        path = args.ref_cache or out / "reference_logprobs.pkl"
        scored = (ordered_rows or train_rows) + eval_rows  # --steps 0 fills the cache with all rows
        load = partial(load_model, args.ref_model, device, args)
        groups = groups_of(scored + with_others(scored))
        reference.fill(load, groups, args.tokens_per_forward, path)  # frees what it has loaded
    if steps == 0:
        print(f"{path} has the log-probs of {len(reference)} answers")
        return []

    torch.manual_seed(args.seed)  # for a new adapter
    policy = load_model(args.model, device, args, trains=True)
    add_stop_token(policy, tokenizer, train_rows[0].completion)
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

    if last_step:
        restore_checkpoint(out, last_step, run, policy, optimizer)
    else:
        values = {"step": 0} | evaluate(policy, eval_rows, reference, args)
        append(out / "metrics.jsonl", values, args.wandb)

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
        if not math.isfinite(values["loss"] + values["grad_norm"]):
            raise BadInput(f"step {step}: loss or gradient is not finite: lower --lr")

        values["learning_rate"] = learning_rate(step, steps, args)
        for group in optimizer.param_groups:
            group["lr"] = values["learning_rate"]
        optimizer.step()
        optimizer.zero_grad()

        values["seconds"] = time.monotonic() - began
        values["tokens_per_second"] = count_tokens(groups_of(rows)) / values["seconds"]
        values["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9  # peak, 0 on a CPU

        if step == steps or (args.eval_every and step % args.eval_every == 0):
            values |= evaluate(policy, eval_rows, reference, args)
        append(out / "metrics.jsonl", values, args.wandb)

        if args.save_every and (step == steps or step % args.save_every == 0):
            save_checkpoint(out, step, run, policy, optimizer)
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


def report(out: Path) -> list[dict]:
    """Prints the metrics of held-out rows, before training and now. Returns all metrics."""
    history = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    before, now = history[0], history[-1]
    names = [name for name in before if name.startswith("eval_") and name in now]
    if names:
        print(f"{'held out':30}   before      now")
    for name in names:
        print(f"{name:30} {before[name]:8.3f} {now[name]:8.3f}")
    print(f"see {out}")
    return history


# ---- Flags -----------------------------------------------------------

def resolve(args: Args) -> Args:
    """A copy of the flags in which nothing is left to be chosen. Refuses flags that no run can have."""
    args = replace(args)
    if not (args.model or args.data) and (HERE / "demo").exists():
        torch.set_num_threads(1)  # the demo's tiny model gains nothing from more
        unset = {flag: value for flag, value in DEMO.items() if vars(args)[flag] is None}
        args = replace(args, **unset)
    if not (args.model and args.data):
        raise BadInput("give both --model and --data, or neither for the demo")

    args.ref_model = args.ref_model or args.model
    check_model(args.model)
    check_model(args.ref_model)
    for file in (args.data, args.eval_data):
        if file and not Path(file).is_file():
            raise BadInput(f"{file} is no file: give a .jsonl file, such as tools/prepare.py writes")

    # A finished run is never changed. A kill at its end may have left a checkpoint.
    out, n = args.out or "out/kto", 1
    while Path(out, "model").exists():
        remove_checkpoints(Path(out))
        if args.out:
            raise BadInput(f"{out} holds a finished run: name another --out")
        n += 1
        out = f"out/kto-{n}"
    args.out = out
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
    if args.beta is None:
        args.beta = 0.1
    args.max_length = min(args.max_length, context_length(AutoConfig.from_pretrained(base_of(args.model))))

    if args.ref == "swap" and args.ref_model != args.model:
        raise BadInput("--ref swap holds the policy's own start: with --ref_model choose cache or live")
    if args.steps == 0 and args.ref != "cache":
        raise BadInput("--steps 0 only fills the cache: it needs --ref cache")

    # Values that would turn learning off, or around.
    for flag in ("lr", "beta", "epochs", "batch_size", "desirable_weight", "undesirable_weight"):
        if not vars(args)[flag] > 0:  # also NaN
            raise BadInput(f"--{flag} must be above 0")
    for flag in ("warmup", "max_grad_norm", "save_every"):
        if not vars(args)[flag] >= 0:
            raise BadInput(f"--{flag} must be 0 or more")
    if args.steps < -1 or args.lora_r == 0:
        raise BadInput("--steps must be -1 or more, --lora_r 1 or more")
    return args


def check_model(name: str):
    """Refuses a folder that is no checkpoint, before the hub is asked for it."""
    if Path(name, "args.json").exists():
        raise BadInput(f"{name} is the folder of a run: did you mean {name}/model?")
    # gpt2 and org/gpt2 are names of the hub. out/gpt2 is a path if the folder out exists.
    parent = Path(name).parent
    if not Path(name).exists() and parent.is_dir() and parent != Path("."):
        raise BadInput(f"{name} does not exist")


# ---- Data ------------------------------------------------------------

def load_rows(file: str, tokenizer, args: Args) -> list[Row]:
    """The rows of a file as token ids. Those that cannot be trained on are dropped and counted."""
    config = AutoConfig.from_pretrained(base_of(args.model))
    limit = "the model's context" if args.max_length == context_length(config) else "--max_length"

    rows = []
    counts = Counter(rows=0)
    tokenized = tokenize_rows(file, ("completion",), tokenizer, args, counts)
    for columns, (prompt, with_answer) in tokenized:
        if columns.get("label") not in (True, False):
            raise BadInput(f"{file}: a label is {columns.get('label')!r}: expected true or false")

        # The prompt gets no loss. It ends where the two sequences begin to differ.
        end = common_length(prompt, with_answer)
        label = bool(columns["label"])
        row = Row(prompt[:end], with_answer[end:], label, other=(), whole_prompt=prompt)
        if not (row.prompt and has_text(row.completion, tokenizer)):
            counts["dropped: an answer without text"] += 1
        elif len(with_answer) > args.max_length:
            counts[f"dropped: longer than {args.max_length} tokens, {limit}"] += 1
        elif max(with_answer) >= config.get_text_config().vocab_size:
            raise BadInput(f"{args.model} has no embedding for some tokens of its tokenizer")
        else:
            rows.append(row)

    counted = "; ".join(f"{count} {note}" for note, count in counts.items())
    print(f"{file}: {len(rows)} of {counted}")
    if len(rows) < max(1, counts["rows"] / 2):
        raise BadInput(f"{file}: fewer than half of the rows are left: {len(rows)} of {counted}")
    return rows


def tokenize_rows(file: str, names: tuple[str, ...], tokenizer, args: Args, counts: Counter):
    """Yields (row, sequences): the token ids of the prompt, and of the prompt with each answer. `names` are
    the columns of the answers."""
    plain = tokenizer("a", add_special_tokens=False).input_ids
    full = tokenizer("a").input_ids
    bos = as_tuple(full[:full.index(plain[0])] if plain else [])  # what the tokenizer puts before a text

    rows = iter(progress_bar(read_rows(file, ("prompt", *names)), desc="tokenize"))
    while batch := list(islice(rows, 350)):
        counts["rows"] += len(batch)
        texts = [render(row, names, tokenizer, args, counts) for row in batch]

        # One call for about 1,000 texts, which the tokenizer divides over the cores.
        options = dict(add_special_tokens=False, return_attention_mask=False, verbose=False)
        all_ids = iter(tokenizer([*chain(*texts), ""], **options).input_ids)
        for row, texts_of_row in zip(batch, texts):
            sequences = [as_tuple(next(all_ids)) for _ in texts_of_row]
            if isinstance(row["prompt"], str):  # a chat template writes BOS
                sequences = [ids if ids[:len(bos)] == bos else bos + ids for ids in sequences]
            if sequences:
                yield row, sequences


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


def render(row: dict, names: tuple[str, ...], tokenizer, args: Args, counts: Counter) -> list[str]:
    """The prompt, and the prompt with each answer, as the model reads them. [] if the row is dropped."""
    prompt, answers = row["prompt"], [row[name] for name in names]
    if isinstance(prompt, str):
        if tokenizer.chat_template:
            counts["strings, to which the chat template is not applied"] += 1
        specials = tuple(special_tokens(tokenizer))
        ends = ["" if answer.rstrip().endswith(specials) else tokenizer.eos_token for answer in answers]
        if any(ends):
            counts[f"with {tokenizer.eos_token} added"] += 1
        return [prompt, *(prompt + answer + end for answer, end in zip(answers, ends))]

    tools = row.get("tools") or []
    options = args.chat_template_kwargs | (row.get("chat_template_kwargs") or {})
    apply_template = partial(tokenizer.apply_chat_template, tokenize=False, tools=tools or None, **options)
    try:
        texts = [apply_template(prompt, add_generation_prompt=True)]
        texts += [apply_template(prompt + answer) for answer in answers]
    except TemplateError as error:
        counts[f"dropped: the template says {error}"] += 1
        return []

    # A template may write the prompt's messages otherwise where an answer follows: they would get a loss.
    beginning = os.path.commonprefix(texts)
    if beginning != texts[0] and not beginning.startswith(apply_template(prompt)):
        counts["dropped: the template writes another prompt where an answer follows"] += 1
        return []

    # Earlier answers are not looked up: a template may drop their thoughts.
    kept = [message for message in prompt[:-1] if message["role"] != "assistant"]
    parts = [kept + prompt[-1:], *answers]
    if any(leaves_out(text, part, tools) for text, part in zip(texts, parts)):
        counts["of which the template leaves out text or tools, see tools/prepare.py --model"] += 1
    return texts


def leaves_out(rendered: str, messages: list[dict], tools: list[dict]) -> bool:
    """Whether a text of these messages, or the name of a tool, is not in what the template has written."""
    words = [message.get("content") or "" for message in messages]
    calls = chain(*(message.get("tool_calls") or [] for message in messages))
    words += [call.get("function", call)["name"] for call in [*calls, *tools]]
    return any(word.strip() not in rendered for word in words)


@cache
def special_tokens(tokenizer) -> dict[str, int]:
    """The text and the id of each special token."""
    tokens = tokenizer.added_tokens_decoder.items()
    return {token.content: i for i, token in tokens if token.special}


def has_text(answer: tuple[int, ...], tokenizer) -> bool:
    """Whether there is more in an answer than special tokens."""
    return len(answer) > 8 or tokenizer.decode(answer, skip_special_tokens=True).strip() != ""


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
    if n_cut:
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
    model = peft.PeftModel.from_pretrained(
        model, name, is_trainable=trains, autocast_adapter_dtype=trains)  # float32 weights train
    missing = set(peft.get_peft_model_state_dict(model)) - set(peft.utils.load_peft_weights(name, "cpu"))
    if missing:  # they would be those of a new adapter
        raise BadInput(f"{name} has no weights for {min(missing)}")
    return model


def add_stop_token(model, tokenizer, answer: tuple[int, ...]):
    """Lets the saved model stop at the last special token of an answer, if it does not already."""
    specials = [token for token in answer if token in special_tokens(tokenizer).values()]
    config = unwrap_model(model).generation_config
    stops = [stop for stop in np.atleast_1d(config.eos_token_id).tolist() if stop is not None]
    if specials and specials[-1] not in stops:
        end = tokenizer.decode(specials[-1:])
        print(f"Answers end with {end}, where the model would not stop. out/model will, but no adapter.")
        config.eos_token_id = [*stops, specials[-1]]


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
    file, log = out / "args.json", out / "metrics.jsonl"
    last_step = max(checkpoints(out), default=0)
    if log.exists() and log.stat().st_size:  # else there is nothing to lose
        saved = json.loads(file.read_text()) if file.exists() else {}
        script = saved.get("script", "another program")
        if script != run["script"]:
            raise BadInput(f"{out} holds a run of {script}: name another --out")
        differing = [name for name in run if saved.get(name) != run[name] and name not in MAY_CHANGE]
        if differing:
            raise BadInput(f"{out} holds a run with other {', '.join(differing)}: name another --out")

    if is_first_process():
        write_whole(file, [json.dumps(run, indent=1).encode()])
        lines = log.read_bytes().splitlines(keepends=True) if last_step and log.exists() else []
        kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= last_step]
        write_whole(log, kept)  # the lines of later steps will be written again
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


def append(log: Path, values: dict, to_wandb: bool):
    """Adds a line to the log, on the disk before a checkpoint of its step is, and to Weights & Biases."""
    if not is_first_process():
        return
    with open(log, "a") as file:
        file.write(json.dumps(values, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if to_wandb:
        import wandb
        wandb.log(values, step=values["step"])


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
    try:
        main(tyro.cli(Args, description=__doc__, use_underscores=True))
    except (BadInput, KeyboardInterrupt) as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except torch.OutOfMemoryError as error:
        error.add_note("lower --tokens_per_forward or add --gradient_checkpointing")
        raise
