"""DPO and its relatives: learn from pairs of a better and a worse answer.

Rafailov et al. 2023, Direct Preference Optimization, arXiv:2305.18290, equation 7:

    L(θ) = −E log σ( β log π(y_w|x)/π_ref(y_w|x) − β log π(y_l|x)/π_ref(y_l|x) )

    python dpo.py  # the demo: offline, 10 s
    python dpo.py --model Qwen/Qwen3-0.6B --data pairs.jsonl --out out/qwen  # your model, your data

The reference π_ref is frozen: its log-probs are computed once, before the policy is loaded, and kept in a file.
A killed run resumes if the same command is given again. docs/recipes.md has starting values for lr and β.

Data: rows `prompt, chosen, rejected`, or `chosen, rejected` with a common beginning; strings or chat messages:

    {"prompt": [{"role": "user", "content": "2 + 2?"}], "chosen": [{"role": "assistant", "content": "4"}], ..}

Shapes: B pairs in a batch; (B,) is one value per pair. w is the chosen answer y_w, l the rejected one, y_l.

Metrics: loss | rewards/chosen, rewards/rejected: β (log π − log π_ref) of an answer (simpo alone: per token) |
rewards/margins: their difference | rewards/accuracies: fraction of pairs where it is > 0, ties count 1/2 | logps/*:
log π(y|x) | logratio: |log π(y_w|x) − log π_ref(y_w|x)| / |y_w| | nll/chosen: −log π of y_w per token | grad_norm:
before clipping | learning_rate | seconds | tokens_per_second | memory_gb: GPU peak | eval_*: of held-out pairs |
eval_score: mean of --score | samples/distinct: how many of the sampled answers differ.

Not here: tensor or pipeline parallelism, images, rows that are truncated instead of dropped.
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
from itertools import takewhile
from pathlib import Path
from typing import Callable, Literal, NamedTuple, get_args, get_origin

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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from refcache import (
    BadInput, ReferenceCache, Swap, all_gather, all_reduce, barrier, check_agreement, checkpoint_digest,
    checkpoint_folder, completion_logprobs, context_length, count_tokens, enable_shared_prompts, full_tensor,
    is_first_process, log_ratios, micro_batches, process_count, process_group, progress_bar, reference_logprobs, shard,
    step_memory, sum_tokens, to_device, unsharded, unwrap_model, write_whole)

HERE = Path(__file__).parent
DEMO = dict(
    model=f"{HERE}/demo/model",
    data=f"{HERE}/demo/pairs.jsonl",
    eval_data=f"{HERE}/demo/pairs_test.jsonl",
    score=f"{HERE}/demo/score.py:success",
    lr=2e-4,
)
Loss = Literal["sigmoid", "hinge", "ipo", "sigmoid_norm", "apo_zero", "simpo", "sft"]
NO_REFERENCE = {"simpo", "sft"}  # losses that need no reference
LOGS = ("metrics.jsonl", "samples.jsonl")
# What may differ when a run is resumed. Of models and data the content is compared, not the path.
MAY_CHANGE = ("model ref_model data eval_data out ref_cache tokens_per_forward gradient_checkpointing save_every "
              "save_dtype eval_every samples wandb code").split()
SMALLEST = dict(steps=-1, beta=1e-6, epochs=1e-6, batch_size=1, lora_r=1, lora_alpha=1e-6,
                max_new_tokens=1)  # values; 0 for all other flags


@dataclass
class Args:
    model: str | None = None  # checkpoint folder or hub name; None: the demo
    data: str | None = None  # pairs: .jsonl[.gz] .json .csv .parquet, or hub data NAME[:CONFIG][:SPLIT]
    eval_data: str | None = None  # held-out pairs; None: they are split off --data
    eval_size: int = 128  # number of prompts that are split off --data, at most a tenth of them
    chat_template_kwargs: dict[str, bool | int | str] = field(default_factory=dict)  # such as enable_thinking False
    max_length: int = 1024  # tokens of prompt + answer; longer rows are dropped and counted
    out: str | None = None  # folder of the run; None: out/dpo, or out/dpo-2 if that is finished

    ref: Literal["cache", "swap", "live", "none"] = "cache"  # the reference: cached, swapped in, on the GPU, or none
    ref_model: str | None = None  # the reference; None: the policy before training
    ref_cache: str | None = None  # file of reference log-probs, which runs can share; None: a file in --out
    sync_reference: int | None = None  # number of steps between copies of the policy into the reference
    sync_mix: float = 1.0  # weight of the policy in each such copy

    lora_r: int | None = None  # train a LoRA adapter of this rank instead of all weights
    lora_alpha: float | None = None  # LoRA's scale is alpha / r; None: alpha = 2 r
    lora_target: tuple[str, ...] = ()  # names of the layers with an adapter: q_proj v_proj; empty: all linear layers

    loss: tuple[Loss, ...] = ("sigmoid",)  # sigmoid is DPO; several losses are summed
    loss_weights: tuple[float, ...] = ()  # one weight per loss; empty: all are 1
    beta: float = 0.1  # strength of the KL penalty; sigmoid_norm needs about 5, simpo 2
    label_smoothing: float = 0.0  # assumed fraction of flipped labels, for sigmoid (cDPO)
    simpo_gamma: float = 0.5  # simpo's target margin

    epochs: float = 1.0  # passes over the data
    steps: int = -1  # optimizer steps; -1: as many as --epochs needs; 0: only fill the cache
    batch_size: int = 32  # pairs per optimizer step
    lr: float | None = None  # peak learning rate; None: 1e-6, with LoRA 1e-5, in the demo 2e-4; see docs/recipes.md
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # of the learning rate after the warmup
    warmup: float = 0.1  # steps in which the learning rate rises; below 1: their fraction of all steps
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # gradients are clipped to this norm; 0: no clipping
    seed: int = 0

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of forward passes; auto: bfloat16 on a GPU
    tokens_per_forward: int = 16384  # limits memory; never changes the result
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"  # saves memory, costs time; auto: if the GPU is small

    save_every: int = 50  # steps between checkpoints, from which a killed run resumes; 0: none
    save_dtype: Literal["auto", "float32"] = "auto"  # of the saved model; auto: as in forward passes
    eval_every: int | None = None  # steps between evaluations; None: only before and after training
    samples: int = 64  # held-out prompts to answer in each evaluation
    max_new_tokens: int = 128  # tokens per such answer
    score: str | None = None  # FILE.py:FUNCTION(prompts, completions, **columns) -> a number for each such answer
    wandb: bool = False  # log to Weights & Biases, in the project of $WANDB_PROJECT


# ---- The loss --------------------------------------------------------

class Row(NamedTuple):
    prompt: tuple[int, ...]  # token ids
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    whole_prompt: tuple[int, ...]  # the prompt tokenized alone; longer than `prompt` if a token spans its end
    columns: dict  # the row of the file, for --score; else empty


class Batch(NamedTuple):
    """B pairs, (B,) each. Log-probs and log-ratios are sums over the tokens of an answer."""
    logp_w: torch.Tensor  # log π(y_w|x)
    logp_l: torch.Tensor
    ratio_w: torch.Tensor  # log π(y_w|x) − log π_ref(y_w|x)
    ratio_l: torch.Tensor
    len_w: torch.Tensor  # |y_w| in tokens
    len_l: torch.Tensor


def preference_loss(name: str, logp_w, logp_l, ratio_w, ratio_l, len_w, len_l, *, beta=0.1, label_smoothing=0.0,
                    simpo_gamma=0.5) -> torch.Tensor:
    """The loss of every pair, (B,), in float32. The tensors are the fields of a Batch, in their order:
    preference_loss("ipo", logp_w, logp_l, ratio_w, ratio_l, len_w, len_l, beta=0.1).mean()"""
    eps = label_smoothing
    log_sigma = F.logsigmoid
    margin = beta * (ratio_w - ratio_l)  # the argument of σ in equation 7

    match name:
        case "sigmoid":  # DPO, equation 7 if eps = 0
            return -(1 - eps) * log_sigma(margin) - eps * log_sigma(-margin)
        case "hinge":  # SLiC, arXiv:2305.10425; RSO, arXiv:2309.06657
            return torch.relu(1 - margin)
        case "ipo":  # arXiv:2310.12036, equation 17, per token
            return (ratio_w / len_w - ratio_l / len_l - 1 / (2 * beta)) ** 2
        case "sigmoid_norm":  # arXiv:2411.15124, equation 6
            return -log_sigma(beta * (ratio_w / len_w - ratio_l / len_l))
        case "apo_zero":  # arXiv:2408.06266
            return 1 - torch.sigmoid(beta * ratio_w) + torch.sigmoid(beta * ratio_l)
        case "simpo":  # arXiv:2405.14734, equation 6
            return -log_sigma(beta * (logp_w / len_w - logp_l / len_l) - simpo_gamma)
        case "sft":  # a term to add to others: mean over pairs of means over tokens. TRL: over all tokens
            return -logp_w / len_w


def weighted_loss(batch: Batch, args: Args) -> torch.Tensor:
    """The sum of the losses of --loss for every pair, (B,)."""
    flags = dict(beta=args.beta, label_smoothing=args.label_smoothing, simpo_gamma=args.simpo_gamma)
    weights = args.loss_weights or [1.0] * len(args.loss)
    return sum(weight * preference_loss(name, *batch, **flags) for name, weight in zip(args.loss, weights))


def metrics(batch: Batch, args: Args) -> dict[str, torch.Tensor]:
    """What is logged beside the loss, for every pair, (B,) each."""
    ratio_w, ratio_l = batch.ratio_w, batch.ratio_l
    if args.loss == ("simpo",):  # its reward is per token
        ratio_w, ratio_l = ratio_w / batch.len_w, ratio_l / batch.len_l
    difference = ratio_w - ratio_l
    is_tie = difference.abs() < 1e-4  # up to rounding

    return {
        "rewards/chosen": args.beta * ratio_w,
        "rewards/rejected": args.beta * ratio_l,
        "rewards/margins": args.beta * difference,
        "rewards/accuracies": torch.where(is_tie, 0.5, (difference > 0).float()),
        "logps/chosen": batch.logp_w,
        "logps/rejected": batch.logp_l,
        "logratio": (batch.ratio_w / batch.len_w).abs(),
        "nll/chosen": -batch.logp_w / batch.len_w,
    }


# ---- A batch ---------------------------------------------------------

def groups(rows: list[Row]) -> list:
    """The rows as refcache takes them: [(prompt, [completion, completion]), ..]"""
    return [(row.prompt, [row.chosen, row.rejected]) for row in rows]


def measure(policy, rows: list[Row], ref_logps, args: Args) -> Batch:
    """The Batch of these rows. ref_logps[prompt, answer]: the reference's token log-probs; None: all are 0."""
    logps = completion_logprobs(policy, groups(rows))
    ratios = log_ratios(logps, groups(rows), ref_logps)  # both: per pair [(|y_w|,), (|y_l|,)]

    logp_w, logp_l = sum_tokens(logps).unbind(dim=1)  # (B, 2) -> (B,), (B,)
    ratio_w, ratio_l = sum_tokens(ratios).unbind(dim=1)
    lengths = [(len(row.chosen), len(row.rejected)) for row in rows]
    len_w, len_l = to_device(lengths, logp_w.device).unbind(dim=1)
    return Batch(logp_w, logp_l, ratio_w, ratio_l, len_w, len_l)


def run_batch(policy, rows: list[Row], ref_logps, args: Args, train: bool) -> dict[str, float]:
    """Mean metrics of a batch, whose micro-batches the processes divide. With `train`, adds the loss's gradient."""
    totals = Counter()
    for indices, is_real in micro_batches(policy, groups(rows), args.tokens_per_forward):
        micro = [rows[i] for i in indices]
        scale = is_real / len(rows)  # an empty micro-batch counts 0 times, see micro_batches
        with torch.set_grad_enabled(train):
            batch = measure(policy, micro, ref_logps, args)
            losses = weighted_loss(batch, args)
            loss = losses.sum() * scale  # the parts of all micro-batches add up to the mean over the batch
        if train:
            loss.backward()

        values = {"loss": losses} | metrics(batch, args)
        for name, value in values.items():
            totals[name] += value.detach().sum() * scale

    means = all_reduce(torch.stack(list(totals.values())))
    return dict(zip(totals, means.tolist()))


def evaluate(policy, rows: list[Row], reference, args: Args) -> dict[str, float]:
    """Mean metrics of held-out rows."""
    if not rows:
        return {}
    ref_logps = reference_logprobs(reference, groups(rows), args.tokens_per_forward)
    means = run_batch(policy, rows, ref_logps, args, train=False)
    return {f"eval_{name}": value for name, value in means.items()}


# ---- Training --------------------------------------------------------

def main(args: Args) -> list[dict]:
    """Trains. Returns the lines of metrics.jsonl, one dict per step."""
    with process_group():
        args = resolve(args)
        out = Path(args.out)
        with lock_folder(out):
            return train(args, out)


def train(args: Args, out: Path) -> list[dict]:
    """The run: rows, the reference's log-probs, the policy, the loop."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(args.model, args.ref_model)
    train_rows, eval_rows = load_data(tokenizer, args)
    print("The first row, | before each trained token:")
    print(tokenizer.decode(train_rows[0].prompt), *map(tokenizer.decode, train_rows[0].chosen), sep="|")

    batch_size = min(args.batch_size, len(train_rows))
    steps = args.steps
    if steps == -1:
        steps = math.ceil(args.epochs * len(train_rows) / batch_size)
    run = describe_run(train_rows, eval_rows, args)

    score = load_function(args.score) if args.score else None
    if score and eval_rows:  # it is tried on two rows, so that it does not fail after the reference's pass
        texts = tokenizer.batch_decode([row.chosen for row in eval_rows[:2]], skip_special_tokens=True)
        call_function(args.score, score, eval_rows, texts)

    # The reference comes first, so that memory never holds both models.
    reference = None
    if args.ref == "cache":
        reference = ReferenceCache(name=args.ref_model, reference=run["ref_model's weights"], dtype=args.dtype)
        path = args.ref_cache or out / "reference_logprobs.pkl"
        n_used = min(steps * batch_size or math.inf, len(train_rows))  # --steps 0 scores all of them
        used = batch_rows(1, train_rows, n_used, args.seed) + eval_rows
        # It loads the reference model, scores, saves to `path`, and frees the model.
        reference.fill(lambda: load_model(args.ref_model, device, args), groups(used),
                       args.tokens_per_forward, path)
    if steps < 1:
        return []

    torch.manual_seed(args.seed)  # for a new adapter, and for the samples of step 0
    policy = load_model(args.model, device, args, trains=True)
    if args.ref in ("swap", "live"):
        reference = load_reference(policy, device, args)

    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    matrices = {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": args.weight_decay}
    vectors = {"params": [weight for weight in weights if weight.dim() <= 1]}  # norms and biases do not decay
    optimizer = torch.optim.AdamW([matrices, vectors], lr=0.0, weight_decay=0.0, fused=True)  # the loop sets lr

    state = {"training": init_training_state(policy, optimizer)}  # what a checkpoint holds
    if args.sync_reference:
        state["reference"] = reference
    last_step = restore_checkpoint(out, run, state)
    if last_step == 0:
        values = {"step": 0} | write_samples(policy, tokenizer, eval_rows, score, 0, out, args)
        values |= evaluate(policy, eval_rows, reference, args)
        log_metrics(out, values, args)

    progress = progress_bar(range(last_step + 1, steps + 1), desc="train", initial=last_step, total=steps)
    for step in progress:
        began = time.monotonic()
        torch.manual_seed(args.seed + step)  # a resumed run needs no saved random state
        rows = batch_rows(step, train_rows, batch_size, args.seed)
        ref_logps = reference_logprobs(reference, groups(rows), args.tokens_per_forward)
        values = {"step": step} | run_batch(policy, rows, ref_logps, args, train=True)  # loss.backward() is in it
        if step == 1 and reference and args.ref_model == args.model:
            check_agreement(values["logratio"], args.dtype)

        grad_norm = torch.nn.utils.clip_grad_norm_(weights, args.max_grad_norm or math.inf)
        values["grad_norm"] = full_tensor(grad_norm).item()
        values["learning_rate"] = learning_rate(step, steps, args)
        if not math.isfinite(values["loss"] + values["grad_norm"]):
            raise BadInput(f"step {step}: loss or gradient is not finite: lower --lr")

        for group in optimizer.param_groups:
            group["lr"] = values["learning_rate"]
        optimizer.step()
        optimizer.zero_grad()
        if args.sync_reference and step % args.sync_reference == 0:
            reference.sync(args.sync_mix)  # after the update, as in TR-DPO, arXiv:2404.09656

        values["seconds"] = time.monotonic() - began
        values["tokens_per_second"] = count_tokens(groups(rows)) / values["seconds"]
        if device == "cuda":
            values["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9  # peak

        if step == steps or (args.eval_every and step % args.eval_every == 0):
            values |= write_samples(policy, tokenizer, eval_rows, score, step, out, args)
            values |= evaluate(policy, eval_rows, reference, args)
        log_metrics(out, values, args)

        if args.save_every and (step == steps or step % args.save_every == 0):
            save_checkpoint(out, step, run, state)
        progress.set_postfix(loss=values["loss"], tokens_per_second=values["tokens_per_second"], refresh=False)

    save_model(policy, tokenizer, out / "model", args)
    remove_checkpoints(out)  # the run is finished
    print(f"see {out}")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


# ---- Flags -----------------------------------------------------------

def resolve(args: Args) -> Args:
    """Checks the flags, and fills in those that depend on others."""
    args = complete_flags(args)
    if not set() < set(args.loss) <= set(get_args(Loss)) or len(args.loss_weights) not in (0, len(args.loss)):
        raise BadInput(f"--loss: choose from {', '.join(get_args(Loss))}; one of --loss_weights for each")
    if args.label_smoothing and not (args.label_smoothing < 0.5 and "sigmoid" in args.loss):
        raise BadInput("--label_smoothing must be below 0.5, for sigmoid")
    if set(args.loss) <= NO_REFERENCE:
        args.ref, args.sync_reference = "none", None
    return args


# ---- Answers and results: the same in dpo.py and kto.py --------------

def write_samples(policy, tokenizer, rows: list, score, step: int, out: Path, args) -> dict[str, float]:
    """Writes answers to held-out prompts to samples.jsonl, and prints three of them beside those before training.
    Returns the mean of --score, and how many answers differ."""
    longest = context_length(policy.config) - args.max_new_tokens
    one_per_prompt = {row.whole_prompt: row for row in rows if len(row.prompt) <= longest}
    rows = list(one_per_prompt.values())[:args.samples]
    if not rows:
        return {}

    answers = generate(policy, tokenizer, [row.prompt for row in rows], args)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    values = {"samples/distinct": len(set(texts))}
    lines = [dict(step=step, prompt=tokenizer.decode(row.prompt), completion=text) for row, text in zip(rows, texts)]

    if score:
        scores = call_function(args.score, score, rows, texts)
        values["eval_score"] = float(np.nanmean(scores))
        for line, value in zip(lines, scores):
            line["score"] = None if math.isnan(value) else value
    append(out / "samples.jsonl", lines)

    if step and is_first_process():
        tqdm.write("Held-out prompts, each with its answer before and now:")
        with open(out / "samples.jsonl") as file:
            for now, before in zip(lines[:3], map(json.loads, file)):
                for text in (now["prompt"], before["completion"], now["completion"]):
                    tqdm.write(repr(text)[:shutil.get_terminal_size().columns])
    return values


@torch.no_grad()
def generate(policy, tokenizer, prompts: list[tuple], args) -> list[tuple]:
    """Token ids of one sample for each prompt, at temperature 1, without its end token."""
    core = unwrap_model(policy)
    stops = stop_tokens(core, tokenizer)
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left").to(policy.device)

    own_config = core.generation_config
    core.generation_config = GenerationConfig()  # else generate() would apply a repetition_penalty, min_p, ..
    with unsharded(policy):
        sampled = core.generate(ids.clamp(min=0), attention_mask=(ids >= 0).long(), do_sample=True, top_k=0,
                                max_new_tokens=args.max_new_tokens, eos_token_id=stops, pad_token_id=0)
    core.generation_config = own_config
    return [tuple(takewhile(lambda token: token not in stops, row)) for row in sampled[:, ids.shape[1]:].tolist()]


def describe_run(train_rows: list, eval_rows: list, args) -> dict:
    """The flags, data, models and code of a run. A resumed run must have the same, except for MAY_CHANGE."""
    run = vars(args) | {"rows": digest_of(train_rows), "held-out rows": digest_of(eval_rows)}
    run |= describe_files({"model": args.model, "ref_model": args.ref_model}, [args.score] if args.score else [])
    return json.loads(json.dumps(run))  # tuples become lists


# ---- Rows of the data ------------------------------------------------

COLUMNS = 'prompt, chosen, rejected, as strings or lists of {"role", "content"}'


def load_rows(source: str, tokenizer, args: Args) -> list[Row]:
    rows = []
    for prompt, (chosen, rejected), begins, columns in encode(
            tokenizer, source, lambda row: (row["chosen"], row["rejected"]), args):
        begin = min(begins)  # one prompt for both
        rows.append(Row(prompt[:begin], chosen[begin:], rejected[begin:], prompt, columns if args.score else {}))
    return rows


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
