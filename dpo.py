"""DPO and its relatives: learn from pairs of a better and a worse answer.

Rafailov et al. 2023, Direct Preference Optimization, arXiv:2305.18290, equation 7:

    L(θ) = −E log σ( β log π(y_w|x)/π_ref(y_w|x) − β log π(y_l|x)/π_ref(y_l|x) )

    python dpo.py  # the demo: offline, 10 s
    python dpo.py --model Qwen/Qwen3-0.6B --data pairs.jsonl --out out/qwen  # your model, your data

The reference π_ref is frozen: its log-probs are computed once, before the policy is loaded, and kept in a file.
A killed run resumes if the same command is given again.

Data      rows `prompt, chosen, rejected`, or `chosen, rejected` with a common beginning; strings or chat messages:
          {"prompt": [{"role": "user", "content": "2 + 2?"}], "chosen": [{"role": "assistant", "content": "4"}], ..}
Shapes    B pairs in a batch; (B,) per pair. w: the chosen answer y_w; l: the rejected one, y_l.
Metrics   loss | rewards/chosen, rewards/rejected: β (log π − log π_ref) of an answer (simpo alone: per token) |
          rewards/margins: their difference | rewards/accuracies: fraction of pairs where it is > 0, ties count 1/2 |
          logps/*: log π(y|x) | logratio: |log π − log π_ref| of y_w per token | nll/chosen: −log π of y_w per token |
          grad_norm: before clipping | learning_rate | seconds | tokens_per_second | memory_gb: GPU peak |
          eval_*: of held-out pairs | eval_score: mean of --score
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
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import takewhile
from operator import itemgetter
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from refcache import (
    BadInput, ReferenceCache, Swap, all_reduce, barrier, check_agreement, checkpoint_digest, completion_logprobs,
    context_length, count_tokens, enable_shared_prompts, full_tensor, log_ratios, memory_share, micro_batches,
    process_group, processes, progress_bar, reference_logprobs, shard, sum_tokens, to_device, unsharded, unwrap_model,
    write_whole)

HERE = Path(__file__).parent
DEMO = dict(
    model=f"{HERE}/demo/model",
    data=f"{HERE}/demo/pairs.jsonl",
    eval_data=f"{HERE}/demo/pairs_test.jsonl",
    score=f"{HERE}/demo/score.py:success",
    lr=2e-4,
)
LOGS = ("metrics.jsonl", "samples.jsonl")
MAY_CHANGE = ("out ref_cache save_every eval_every samples tokens_per_forward rollout_tokens "
              "gradient_checkpointing").split()  # when a run is resumed
NO_REFERENCE = {"simpo", "sft"}
Loss = Literal["sigmoid", "hinge", "ipo", "sigmoid_norm", "apo_zero", "simpo", "sft"]


@dataclass
class Args:
    model: str | None = None  # checkpoint folder or hub name; None: the demo
    data: str | None = None  # pairs: .jsonl .json .csv .parquet, or hub NAME[:SPLIT]
    eval_data: str | None = None  # held-out pairs; None: split off data
    eval_size: int = 128  # prompts split off data, at most a tenth
    as_chat: bool = False  # strings become messages of a user and an assistant
    chat_template_kwargs: str = "{}"  # JSON for the template, such as {"enable_thinking": false}
    max_length: int = 1024  # tokens of prompt + answer; longer rows are dropped and counted
    out: str = f"out/{Path(__file__).stem}"  # folder of the run

    ref: Literal["cache", "swap", "live", "none"] = "cache"  # see README; none: π_ref = 1
    ref_model: str | None = None  # None: the policy before training
    ref_cache: str | None = None  # file of reference log-probs, shared by runs; None: in --out
    sync_reference: int | None = None  # steps between copies of the policy into the reference
    sync_mix: float = 1.0  # weight of the policy in each copy
    humanline: tuple[float, float] | None = None  # clamps token log-ratios (-1 1.5), syncs every step

    lora_r: int | None = None  # train a LoRA adapter of this rank instead of all weights
    lora_alpha: float | None = None  # LoRA's scale is alpha / r; None: 2 r
    lora_target: str = "all-linear"  # or names of layers: q_proj,v_proj

    loss: tuple[Loss, ...] = ("sigmoid",)  # sigmoid is DPO; several are summed
    loss_weights: tuple[float, ...] = ()  # one per loss; empty: all 1
    beta: float = 0.1  # strength of the KL penalty; sigmoid_norm needs about 5, simpo 2
    label_smoothing: float = 0.0  # assumed fraction of flipped labels, for sigmoid (cDPO)
    simpo_gamma: float = 0.5  # simpo's target margin

    epochs: float = 1.0  # passes over the data
    steps: int | None = None  # optimizer steps; None, -1: from epochs; 0: only fill the cache
    batch_size: int = 32  # pairs per optimizer step
    lr: float | None = None  # peak learning rate; None: 1e-6, in the demo 2e-4
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # after the warmup
    warmup: float = 0.1  # steps in which lr rises, or their fraction if below 1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0: no clipping
    seed: int = 0

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of forwards; auto: bfloat16 on CUDA
    tokens_per_forward: int = 16384  # memory and speed only, never the result
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"  # likewise; auto: on if the GPU is too small

    save_every: int = 50  # steps between checkpoints; 0: none
    eval_every: int | None = None  # steps between evaluations; None: before and after only
    samples: int = 64  # held-out prompts to answer in each evaluation
    max_new_tokens: int = 128  # per such answer
    score: str | None = None  # FILE.py:FUNCTION(prompts, completions, **columns) -> floats, of these answers


# ---- The loss --------------------------------------------------------

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
    """The loss of every pair, (B,), float32, of the tensors of a Batch:
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


def metrics(batch: Batch, args: Args) -> dict[str, torch.Tensor]:
    """The loss and other values of every pair, (B,) each."""
    flags = {flag: vars(args)[flag] for flag in ("beta", "label_smoothing", "simpo_gamma")}
    weighted_losses = zip(args.loss, args.loss_weights or [1.0] * len(args.loss), strict=True)
    loss = sum(weight * preference_loss(name, *batch, **flags) for name, weight in weighted_losses)
    ratio_w, ratio_l = batch.ratio_w, batch.ratio_l
    if args.loss == ("simpo",):  # its reward is per token
        ratio_w, ratio_l = ratio_w / batch.len_w, ratio_l / batch.len_l
    difference = ratio_w - ratio_l
    is_tie = difference.abs() < 1e-4  # up to rounding
    return {
        "loss": loss,
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

class Row(NamedTuple):
    prompt: tuple[int, ...]  # token ids
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    columns: dict  # of the file, for --score


def groups(rows: list[Row]) -> list:
    """The rows as refcache takes them: [(prompt, [completion, completion]), ..]"""
    return [(row.prompt, [row.chosen, row.rejected]) for row in rows]


def measure(policy, rows: list[Row], ref_logps, args: Args) -> Batch:
    """The Batch of these rows. ref_logps[prompt, answer]: the reference's token log-probs; None: all 0."""
    logps = completion_logprobs(policy, groups(rows))
    ratios = log_ratios(logps, groups(rows), ref_logps, args.humanline)  # both: per pair [(|y_w|,), (|y_l|,)]
    logp_w, logp_l = sum_tokens(logps).unbind(dim=1)  # (B, 2) -> (B,), (B,)
    ratio_w, ratio_l = sum_tokens(ratios).unbind(dim=1)
    lengths = [(len(row.chosen), len(row.rejected)) for row in rows]
    len_w, len_l = to_device(lengths, logp_w.device).unbind(dim=1)
    return Batch(logp_w, logp_l, ratio_w, ratio_l, len_w, len_l)


def run_batch(policy, rows: list[Row], ref_logps, args: Args, train: bool) -> dict[str, float]:
    """Mean metrics of a batch, in micro-batches that the processes divide. With `train`, adds the loss's gradient."""
    totals = Counter()
    for indices, counts in micro_batches(policy, groups(rows), args.tokens_per_forward):
        micro = [rows[i] for i in indices]
        scale = counts / len(rows)
        with torch.set_grad_enabled(train):
            values = metrics(measure(policy, micro, ref_logps, args), args)
            loss = values["loss"].sum() * scale
        if train:
            loss.backward()
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

@process_group()
def main(args: Args) -> list[dict]:
    """Trains. Returns the lines of metrics.jsonl, one dict per step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if set(args.loss) <= NO_REFERENCE:
        args = replace(args, ref="none")
    args = resolve(args)
    out = Path(args.out)
    lock = lock_folder(out)

    tokenizer = load_tokenizer(args.model, args.ref_model)
    train_rows, eval_rows = load_data(tokenizer, args)
    print(f"{len(train_rows)} rows to train on, {len(eval_rows)} held out. The first, | before each trained token:")
    print(tokenizer.decode(train_rows[0].prompt), *map(tokenizer.decode, train_rows[0].chosen), sep="|")
    batch_size = min(args.batch_size, len(train_rows))
    steps = math.ceil(args.epochs * len(train_rows) / batch_size) if args.steps in (None, -1) else args.steps
    if args.score:
        load_function(args.score)  # fails early
    run = describe_run(train_rows, eval_rows, [args.score], args)

    # The reference comes first, so that memory never holds both models.
    reference = None
    if args.ref == "cache":
        reference = ReferenceCache(name=args.ref_model, reference=run["weights"][args.ref_model], dtype=args.dtype)
        path = args.ref_cache or out / "reference_logprobs.pkl"
        rows = train_rows
        if 0 < steps * batch_size < len(train_rows):  # the run needs fewer
            rows = batch_rows(1, train_rows, batch_size, args.seed, n_steps=steps)
        scored = reference.fill(lambda: load_model(args.ref_model, device, args), groups(rows + eval_rows),
                                args.tokens_per_forward, path)  # frees the reference model
        print(f"reference: {scored} completions scored, all are in {path}")
    if steps < 1:
        return []
    torch.manual_seed(args.seed)  # for a new adapter
    policy = load_model(args.model, device, args, trains=True)
    if args.ref in ("swap", "live"):
        reference = load_reference(policy, device, args)
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    decaying = {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": args.weight_decay}
    others = {"params": [weight for weight in weights if weight.dim() <= 1], "weight_decay": 0.0}  # norms and biases
    optimizer = torch.optim.AdamW([decaying, others], lr=0.0, fused=True)  # lr is set in the loop
    state = {"training": init_training_state(policy, optimizer)}  # what a checkpoint holds
    if args.sync_reference or args.humanline:
        state["reference"] = reference
    last_step = restore_checkpoint(out, run, state)
    if last_step == 0:
        values = {"step": 0}
        values |= write_samples(policy, tokenizer, eval_rows, 0, out, args)
        values |= evaluate(policy, eval_rows, reference, args)
        append(out / "metrics.jsonl", [values])

    window = 1 if args.humanline else args.sync_reference or 16  # steps per swap of the reference
    ref_logps = reference  # a cache has the log-probs of all steps
    progress = progress_bar(range(last_step + 1, steps + 1), desc="train", initial=last_step, total=steps)
    for step in progress:
        began = time.monotonic()
        torch.manual_seed(args.seed + step)  # the same in a resumed run
        rows = batch_rows(step, train_rows, batch_size, args.seed)
        first = step - (step - 1) % window
        if args.ref in ("swap", "live") and step in (first, last_step + 1):  # a resumed run scores its whole window
            n_steps = min(window, steps + 1 - first)
            rows_ahead = batch_rows(first, train_rows, batch_size, args.seed, n_steps)
            ref_logps = reference_logprobs(reference, groups(rows_ahead), args.tokens_per_forward)
        values = {"step": step}
        values |= run_batch(policy, rows, ref_logps, args, train=True)  # loss.backward() is in it
        if step == 1 and reference is not None and args.ref_model == args.model:
            check_agreement(values["logratio"], args.dtype)

        if args.humanline:
            reference.sync()  # before the update, as HALOs does
        grad_norm = torch.nn.utils.clip_grad_norm_(weights, args.max_grad_norm or math.inf)
        values["grad_norm"] = full_tensor(grad_norm).item()
        values["learning_rate"] = learning_rate(step, steps, args)
        if not math.isfinite(values["loss"] + values["grad_norm"]):
            raise BadInput(f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}: lower --lr")
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
            values |= write_samples(policy, tokenizer, eval_rows, step, out, args)
            values |= evaluate(policy, eval_rows, reference, args)
        append(out / "metrics.jsonl", [values])
        if args.save_every and (step == steps or step % args.save_every == 0):
            save_checkpoint(out, step, run, state)
        progress.set_postfix(loss=values["loss"], tokens_per_second=values["tokens_per_second"], refresh=False)

    save_model(policy, tokenizer, out / "model")
    lock.release()
    history = report(out)
    before, after = (history[i].get("eval_nll/chosen", 0.0) for i in (0, -1))
    if after > before + 1:
        print(f"Chosen answers are less likely, {before:.1f} → {after:.1f} nats per token: lower --lr, raise --beta")
    print(f"see {out}/model and {out}/samples.jsonl; for curves: python benchmarks/plot.py {out}")
    return history


# ---- Answers to held-out prompts: the same in dpo.py and kto.py ------

def write_samples(policy, tokenizer, rows: list, step: int, out: Path, args) -> dict[str, float]:
    """Answers held-out prompts into samples.jsonl. Returns the mean of --score."""
    longest = context_length(policy.config) - args.max_new_tokens
    rows = list({row.prompt: row for row in rows if len(row.prompt) <= longest}.values())[:args.samples]  # one each
    if not rows:
        return {}
    answers = generate(policy, tokenizer, [row.prompt for row in rows], args)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    lines = [dict(step=step, prompt=tokenizer.decode(row.prompt), completion=text) for row, text in zip(rows, texts)]
    means = {}
    if args.score:
        columns = {name: [row.columns.get(name) for row in rows] for row in rows for name in row.columns}
        prompts = columns.pop("prompt")
        if isinstance(prompts[0], list):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        scores = load_function(args.score)(prompts=prompts, completions=texts, **columns)
        if len(scores) != len(rows):
            raise BadInput(f"{args.score} gave {len(scores)} scores, not {len(rows)}")
        lines = [line | {"score": score} for line, score in zip(lines, scores)]
        means["eval_score"] = float(np.nanmean(np.array(scores, float)))  # without None
    append(out / "samples.jsonl", lines)
    return means


@torch.no_grad()
def generate(policy, tokenizer, prompts: list[tuple], args) -> list[tuple]:
    """Token ids of one sample for each prompt, at temperature 1, without EOS."""
    core = unwrap_model(policy)
    stops = stop_tokens(core, tokenizer)
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], True, -1, "left").to(policy.device)
    own_config = core.generation_config
    core.generation_config = GenerationConfig()  # generate() would take its repetition_penalty, min_p, ..
    try:
        with unsharded(policy):
            rows = core.generate(ids.clamp(min=0), attention_mask=(ids >= 0).long(), do_sample=True, top_k=0,
                                 max_new_tokens=args.max_new_tokens, eos_token_id=stops, pad_token_id=0)
    finally:
        core.generation_config = own_config
    return [tuple(takewhile(lambda token: token not in stops, row)) for row in rows[:, ids.shape[1]:].tolist()]


# ---- Rows of the data ------------------------------------------------

COLUMNS = 'prompt, chosen, rejected, as strings or lists of {"role", "content"}, not {"from", "value"}'


def load_rows(source: str, tokenizer, args: Args) -> list[Row]:
    rows = []
    answers_of = itemgetter("chosen", "rejected")
    for _, (chosen, rejected), begins, columns in encode(tokenizer, source, answers_of, args):
        begin = min(begins)  # one prompt for both
        rows.append(Row(chosen[:begin], chosen[begin:], rejected[begin:], columns if args.score else {}))
    return rows


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
