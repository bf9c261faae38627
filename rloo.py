"""RLOO: learn from a reward. The other samples of a prompt are the baseline.

Ahmadian et al. 2024, Back to Basics: Revisiting REINFORCE Style Optimization, arXiv:2402.14740, leave-one-out:

    (1)   ∇J(θ) = E 1/k Σ_i [ R(y_i, x) − 1/(k−1) Σ_{j≠i} R(y_j, x) ] ∇ log π(y_i|x), y_i ~ π(·|x)
    (2)   R(y, x) = reward(y, x) − β log π(y|x)/π_ref(y|x)

    python rloo.py                                                          # the demo: offline, under a minute
    python rloo.py --model Qwen/Qwen3-0.6B --data prompts.jsonl --reward rewards.py:helpful --out out/qwen
    torchrun --nproc_per_node=8 rloo.py --model ...                         # on 8 GPUs

A prompt is encoded once for its k samples: in the rollout (its keys and values are then copied to k rows), in the
reference pass and in training. The reference scores all samples of a step together, so its weights are swapped in once
per step. To resume a run that was stopped or killed, run the same command again.

Data      rows `prompt`, a string or chat messages, and any columns for the reward. rewards.py:f is a function
          f(prompts, completions, completion_ids, **columns) -> one float per completion, or None for no reward, which
          adds 0. A sample that gets None from all functions is left out, also from the baseline of the others.
Not here  quantized weights, tools, several turns, vLLM, KL in the loss instead of in the reward.
Shapes    B prompts per step, k samples each: rewards, log-probs and advantages are (B, k).
Metrics   reward, reward_std: over all samples, before clipping and KL | rewards/NAME: of one function |
          frac_reward_zero_std: share of prompts with equal rewards | kl: log π − log π_ref per token |
          entropy: of the sampling distribution, in nats per token | completions/mean_length |
          completions/clipped_ratio: share of samples cut off by max_new_tokens | clip_ratio: share of samples
          whose ratio is clipped | loss | grad_norm before clipping (these three: of the last update of a step) | lr |
          num_tokens so far, a prompt counted once. eval_*: held out; eval_score: mean of --score.
"""
import csv
import gzip
import hashlib
import importlib
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import warnings
from contextlib import ExitStack, chdir, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from string import ascii_letters
from typing import Callable, Literal, NamedTuple, get_type_hints

import tyro

DEMO = {"model": "demo/model", "data": "demo/prompts.jsonl", "eval_data": "demo/prompts_test.jsonl",
        "score": "demo/score.py:success", "reward": "demo/score.py:sentiment"}
TODAY = datetime(2026, 1, 1)  # "today" in chat templates, which call strftime_now(): the same rows every day
PINNED = """{% macro strftime_now(format) %}{% for part in format.split("%") %}{% set n = 2 if part[:1] == "-" else 1 %}
{{ part if loop.first else TABLE.get(part[:n], "%" ~ part[:n]) ~ part[n:] }}{% endfor %}{% endmacro %}
""".replace("TABLE", str({code: TODAY.strftime(f"%{code}") for x in ascii_letters for code in (x, f"-{x}")}))
METRICS, SAMPLES, CHECKPOINT = "metrics.jsonl", "samples.jsonl", "checkpoint.safetensors"
SMALL = 2**28  # bytes that any data file may unpack to


@dataclass
class Args:
    model: str | None = None  # policy: checkpoint folder or hub name; None: the demo's model and data
    data: str | None = None  # prompts: .jsonl .json .csv .parquet, or hub NAME[[:CONFIG]:SPLIT]
    eval_data: str | None = None  # held-out prompts, same formats; None: eval_size prompts split off data
    eval_size: int = 128  # prompts held out of data if there is no eval_data; at most a tenth of them
    chat_template_kwargs: str = "{}"  # JSON for the template: {"enable_thinking": false}; a column of this name wins
    out: str = "out/rloo"  # folder for the model, metrics.jsonl, samples.jsonl, checkpoint.safetensors

    reward: tuple[str, ...] = ()  # FILE.py:FUNCTION(prompts, completions, **columns) -> floats or None; summed
    reward_model: str | None = None  # sequence classifier with one output, added to the rewards: folder or hub name
    reward_weights: tuple[float, ...] = ()  # of the functions, then the model; empty: 1 each
    reward_clip: tuple[float, float] | None = None  # the total reward is clamped to this range, before KL

    ref: Literal["swap", "live"] = "swap"  # the reference: its weights on the CPU, or a second model
    ref_model: str | None = None  # reference: checkpoint folder or hub name; None: same as --model
    sync_reference: int | None = None  # update the reference every so many steps; needs --ref swap
    sync_mix: float = 1.0  # weight of the policy in each sync; 1 copies it

    lora_r: int | None = None  # train a LoRA adapter of this rank instead of all weights
    lora_alpha: float | None = None  # LoRA's scale is alpha / r; None: 2 r
    lora_dropout: float = 0.0  # in the adapter while training; its masks change with --tokens_per_forward
    lora_target: str = "all-linear"  # layer names, comma-separated
    merge: bool = False  # save the whole model, with the adapter merged

    k: int = 4  # samples per prompt; TRL's num_generations
    beta: float = 0.05  # KL penalty per nat, part of the reward; 0: none
    updates_per_rollout: int = 1  # optimizer steps per rollout; clipping can act from the second on
    clip_eps: float = 0.2  # the ratio is clipped to [1 − clip_eps, 1 + clip_eps]
    mask_truncated: bool = False  # leave out samples without EOS, also from the baseline

    temperature: float = 1.0  # of sampling, and of all log-probs
    top_p: float = 1.0  # nucleus sampling; log-probs and gradients use the full distribution
    top_k: int = 0  # top-k sampling, likewise; 0: off
    max_new_tokens: int = 128  # per sample
    rollout_tokens: int = 65536  # KV-cache positions per rollout batch; memory and speed only, never the result

    steps: int | None = None  # rollouts; None: from epochs; 0: only evaluate
    epochs: float = 1.0  # passes over the data
    batch_size: int = 8  # prompts per step
    lr: float | None = None  # peak learning rate; None: 1e-6, in the demo 2e-4
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # after the warmup
    warmup: float = 0.1  # fraction of steps in which lr rises
    weight_decay: float = 0.0  # AdamW's
    max_grad_norm: float = 1.0  # clip the gradient norm to this
    max_length: int = 1024  # tokens of prompt + sample; longer prompts are dropped and counted
    truncate: bool = False  # instead cut string prompts at their beginning

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of forwards (auto: bfloat16 on CUDA); weights are float32
    save_dtype: Literal["float32", "bfloat16"] = "float32"  # of the saved model; the last eval_* measure it
    parallel: Literal["fsdp", "ddp"] = "fsdp"  # under torchrun: weights split over the processes, or a copy in each
    tokens_per_forward: int = 16384  # memory and speed only, never the result
    gradient_checkpointing: bool = False  # memory and speed only, never the result
    seed: int = 0  # of data order, held-out split and samples

    save_every: int = 100  # steps between checkpoints, from which a run resumes
    eval_every: int | None = None  # steps between evaluations; None: before and after only
    samples: int = 64  # held-out prompts answered at every evaluation
    score: str | None = None  # FILE.py:FUNCTION(prompts, completions, **columns) -> floats, of held-out answers only
    show_data: bool = False  # print one prompt as the model sees it, and exit
    tensorboard: bool = False  # also write TensorBoard events


if __name__ == "__main__":
    if int(os.environ.get("RANK", 0)):  # under torchrun only rank 0 prints
        sys.stdout = sys.stderr = open(os.devnull, "w")
    given = [word[2:].split("=")[0].replace("-", "_") for word in sys.argv if word.startswith("--")]
    given = ["--" + flag.removeprefix("no_") for flag in given]
    for flag in {flag for flag in given if given.count(flag) > 1}:
        print(f"{Path(__file__).name}: {flag} is given twice: put all values after one {flag}", file=sys.stderr)
        sys.exit(2)
    ARGS = tyro.cli(Args, description=__doc__.split("\n")[0], use_underscores=True)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from filelock import FileLock  # noqa: E402  comes with torch
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402
from safetensors import SafetensorError, safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tqdm import tqdm  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification  # noqa: E402
from transformers import AutoTokenizer, logging, set_seed  # noqa: E402
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper  # noqa: E402
from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: E402
from typeguard import CollectionCheckStrategy, check_type  # noqa: E402  comes with tyro
from refcache import (  # noqa: E402
    BadInput, Swap, all_gather, all_reduce, autocast, base_model, check_agreement, checkpoint_digest,
    completion_logprobs, context_length, eval_mode, full_tensor, log_ratios, micro_batches, one_line, out_of_memory,
    pack, part_of, processes, reference_logprobs, shard, share_out, share_prompts, shares_prompts, to_device,
    tokenizer_digest)

# ---- The loss -------------------------------------------------------------------------------------------------------

def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """(B, k) -> (B, k): each reward minus the mean reward of the prompt's other samples. NaN marks a sample that is
    left out: its advantage is 0, and no baseline contains it. A single sample has advantage 0. Not divided by the
    standard deviation, which would bias the gradient."""
    counts = (~rewards.isnan()).sum(dim=1, keepdim=True)  # (B, 1)
    baseline = (rewards.nansum(dim=1, keepdim=True) - rewards) / (counts - 1)  # of (1)
    return torch.where(counts > 1, rewards - baseline, 0.0).nan_to_num(0.0)


def policy_loss(logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, clip_eps: float) -> torch.Tensor:
    """The loss per sample, (b, k). Where old_logp = logp its gradient is −advantage · ∇ log π(y|x), as in (1)."""
    ratio = torch.exp((logp - old_logp).clamp(max=88))  # of whole sequences; e^89 is inf, and inf · 0 is NaN
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages)


# ---- Data: the same in dpo.py, kto.py and rloo.py -------------------------------------------------------------------

class Skip(ValueError):
    """A row that is left out and counted. The message says why."""


def refuse(wrong, sentence: str, error=BadInput):
    if wrong:
        raise error(sentence)


@contextmanager
def refusing(what: str):
    """Turns any exception raised in this block into a BadInput error, except BadInput, Skip and out of memory."""
    try:
        yield
    except BaseException as error:  # a Rust panic is not an Exception
        if isinstance(error, (BadInput, Skip, KeyboardInterrupt, GeneratorExit)) or out_of_memory(error):
            raise
        missing = isinstance(error, ModuleNotFoundError)
        raise BadInput(f"{what}: " + (f"needs `pip install {error.name}`" if missing else one_line(error))) from error


def read_rows(source: str) -> list[tuple[str, dict]]:
    """The rows of a file or a hub dataset NAME[[:CONFIG]:SPLIT], each with its place: [("x.jsonl line 3", {..})]."""
    kind, is_file, rows = Path(source.lower().removesuffix(".gz")).suffix[1:], Path(source).is_file(), []
    known = kind in ("jsonl", "json", "csv", "parquet")
    refuse(known and not is_file, f"{source}: there is no such file")
    refuse(is_file and not known, f"{source}: its name must end with .jsonl, .json, .csv or .parquet (or + .gz)")
    most = SMALL + 300 * os.path.getsize(source) if is_file else 0  # bytes; more is a decompression bomb
    with refusing(f"cannot read {source}"):
        if not is_file:
            import datasets
            import huggingface_hub
            name, *rest = source.split(":")
            split = rest.pop() if rest else "train"
            if not huggingface_hub.constants.HF_HUB_OFFLINE:
                huggingface_hub.HfApi().dataset_info(name, timeout=5)  # datasets would retry for 30 s when offline
            rows = datasets.load_dataset(name, *rest, split=split)
        elif kind == "parquet":
            import pyarrow.parquet  # not datasets, whose cache may be stale and which changes values
            file = pyarrow.parquet.ParquetFile(source)
            names = file.schema_arrow.names
            refuse(len({*names}) < len(names), "two columns have one name", ValueError)
            parts = [file.metadata.row_group(n) for n in range(file.num_row_groups)]
            values = sum(part.column(n).num_values for part in parts for n in range(part.num_columns))
            unpacked = sum(part.total_byte_size for part in parts) + 100 * values
            refuse(unpacked > most, "it unpacks to much more than its size", ValueError)
            for batch in file.iter_batches(64):
                most -= batch.nbytes + 100 * batch.num_rows
                refuse(most < 0, "it unpacks to much more than its size", ValueError)
                rows += batch.to_pylist()
        else:
            with (gzip.open if source.lower().endswith(".gz") else open)(source, "rb") as file:
                text = b"".join(iter(lambda: file.read(min(2**20, most + 1 - file.tell())), b""))
                objects = sum(map(text.count, (b"{", b"[", b",", b"\n")))
                refuse(len(text) + 100 * objects > most, "it unpacks to much more than its size", ValueError)
            if kind == "csv":
                csv.field_size_limit(2**31 - 1)
                reader = csv.DictReader(io.StringIO(text.decode("utf-8-sig"), newline=""), strict=True)
                names = [name for name in reader.fieldnames or [] if name]
                refuse(len({*names}) < len(names), "two columns have one name", ValueError)
                for row in reader:
                    wrong = None in row or None in row.values()  # what DictReader fills in
                    refuse(wrong, f"line {reader.line_num} has more or fewer cells than the header", ValueError)
                    rows.append(row)
            elif kind == "json" and text[:100].lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"["):
                rows = json.loads(text, object_pairs_hook=unique)
            else:
                for n, line in enumerate(io.BytesIO(text), 1):
                    with refusing(f"cannot read {source} line {n}"):
                        if line.strip():
                            rows.append((f"{source} line {n}", {} | json.loads(line, object_pairs_hook=unique)))
                return rows
        return [(f"{source} row {n}", {} | row) for n, row in enumerate(rows, 1)]  # {} | row: only an object


def unique(pairs: list) -> dict:
    """A JSON object. Python's would keep the last of two values with one name."""
    refuse(len(dict(pairs)) < len(pairs), "an object has one name twice", ValueError)
    return dict(pairs)


def text_of(row: dict, name: str, where: str) -> str | list[dict]:
    """A column that holds a string or chat messages."""
    text = row.get(name)
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    columns = str([*row])[:200]
    with refusing(f"{where}: {name} must be a string or a list of messages with role and content (columns: {columns})"):
        if not all(isinstance(message[key], str) for message in messages for key in ("role", "content")):
            raise TypeError("role and content must be strings")
        keys = {*re.findall(r"\b(role|content|from|value)[\\\"']*\s*[:=]", text)} if isinstance(text, str) else set()
        if {"role", "content"} <= keys and re.match(r"[\s\ufeff\"]*\w*[\[({]", text) or (
                {"from", "value"} <= keys and re.match(r"[\s\ufeff\"]*\[", text)):
            raise TypeError("these are messages written as a string")
    refuse(not messages or not messages[-1]["content"].strip(), f"{name} is empty", Skip)
    return text


def tokenize(tokenizer, prompt, answers: list, row: dict, args, where: str) -> tuple[list[int], list[list[int]]]:
    """Returns the ids that the tokenizer puts before a text (BOS), and [ids of the prompt, of prompt + each answer].
    Strings end with the tokenizer's EOS; chats as their template says."""
    front = []
    with refusing(f"{where} cannot be rendered"):  # no template, no EOS token, a template that refuses a system message
        if isinstance(prompt, str):
            end = tokenizer.eos_token
            texts = [prompt, *(prompt + answer.removesuffix(end) + end for answer in answers)]
            for text in ((prompt.split() or [prompt])[0][:9], prompt):  # some tokenizers leave characters out
                a, full = (tokenizer(text, add_special_tokens=special).input_ids for special in (False, True))
                if a:
                    break
            front = full[:next((i for i in range(len(full)) if full[i:i + len(a)] == a), 0)]  # BOS, a language code
        else:
            given = json.loads(args.chat_template_kwargs) | (row.get("chat_template_kwargs") or {})  # as in TRL
            template = tokenizer.get_chat_template(given.get("chat_template"))
            unknown = template == given.get("chat_template") and "{" not in template
            refuse(unknown, f"the tokenizer has no chat template named {template[:80]!r}")
            given |= {"chat_template": PINNED * ("strftime_now" in template) + template, "tokenize": False}
            last = {("continue_final_message" if prompt[-1]["role"] == "assistant" else "add_generation_prompt"): True}
            texts = [tokenizer.apply_chat_template(prompt, **last, **given),
                     *(tokenizer.apply_chat_template(prompt + answer, **given) for answer in answers)]
        "".join(texts).encode()  # half of a surrogate pair would crash the tokenizer
        ids = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        return [] if front == ids[0][:len(front)] else front, ids  # a text may begin with BOS already


def common_prefix(sequences: list) -> int:
    """Length of the longest common prefix of the sequences."""
    differ = (n for n, items in enumerate(zip(*sequences)) if any(item != items[0] for item in items))
    return next(differ, min(map(len, sequences)))


def encode(tokenizer, source: str, parse: Callable, max_length: int, args) -> list[tuple[tuple, list[tuple], dict]]:
    """[(prompt ids, [answer ids, ..], row), ..] of the rows that fit; parse(row, where) gives a prompt and its answers.
    Says what it left out and why. The prompt/answer boundary is part of the cache's key: it is set only here."""
    rows, kept, notes, ints = read_rows(source), [], {}, {}
    longest = 4 * max_length * max(map(len, tokenizer.get_vocab()))  # in characters; 4: texts may be normalized
    if "strftime_now" in f"{tokenizer.chat_template}{args.chat_template_kwargs}":
        print(f"the chat template names today's date: here it is always {TODAY:%d %B %Y}")
    lacking = [where for where, row in rows if "prompt" not in row]
    refuse(0 < len(lacking) < len(rows), f"{''.join(lacking[:1])}: it has no prompt, but other rows have one")
    for where, row in tqdm(rows, desc=f"tokenize {source}", unit="row", delay=2):
        try:
            prompt, answers = parse(row, where)
            other = [name for name in ("tools", "image", "images") if row.get(name)]
            refuse(other, f"{where}: it has {other}, which this script would not use: leave out the row or the column")
            asks = {"system", "user"} & {y[0]["role"] for y in answers if y and isinstance(y, list)}
            mixed = len({isinstance(text, str) for text in (prompt, *answers)}) > 1
            refuse(mixed, f"{where}: prompt and answers must all be strings, or all be lists of messages")
            refuse(asks, f"{where}: an answer begins with a message of role {' '.join(asks)}")
            asked = (prompt if isinstance(prompt, str) else prompt[-1]["content"]).strip()
            told = [y if isinstance(y, str) else y[0]["content"] for y in answers if y and asked]
            repeats = [y.strip().startswith(asked) for y in told]
            refuse(repeats and all(repeats) and len(asked) > 20, "the answers begin with the prompt", Skip)
            if any(repeats):
                notes.setdefault("with an answer that begins with the prompt", []).append(where)
            texts = [[{"content": text}] if isinstance(text, str) else text for text in (prompt, *answers)]
            if sum(len(message["content"]) for text in texts for message in text) > longest:  # too long to tokenize
                raise Skip(f"longer than {max_length} tokens")
            if "prompt" not in row:
                notes.setdefault("without a column prompt: it is what the answers have in common", []).append(where)
            front, ids = tokenize(tokenizer, prompt, answers, row, args, where)
            over = len(front) + max(map(len, ids)) - max_length
            if over > 0:
                if not (args.truncate and isinstance(prompt, str) and over < len(ids[0])):  # a chat would lose roles
                    raise Skip(f"longer than {max_length} tokens")
                ids = [x[over:] for x in ids]
                notes.setdefault(f"truncated to {max_length} tokens", []).append(where)
            end = common_prefix(ids)  # a token may cross the boundary, or a template end a lone prompt differently
            if end < len(ids[0]):
                notes.setdefault("with a prompt cut to the tokens that prompt + answer begin with", []).append(where)
            parts = [front + ids[0][:end], *(x[end:] for x in ids[1:])]
            refuse(not all(parts) or any(y == parts[1] for y in parts[2:]), "no tokens, or both answers the same", Skip)
            x, *ys = (tuple(ints.setdefault(i, i) for i in part) for part in parts)  # rows share their ints
            kept.append((x, ys, row | {"prompt": prompt}))
        except Skip as reason:
            notes.setdefault(f"dropped: {reason}", []).append(where)
    counted = (f"{len(places)} {note} (first: {places[0]})" for note, places in notes.items())
    print(f"{source}: {len(kept)} of {len(rows)} rows", *counted, sep="; ")
    bad = sum(len(at) for note, at in notes.items() if "dropped" in note and "longer" not in note)
    refuse(not kept or 2 * bad > len(rows), f"{source}: " + ("too few rows are left" if rows else "it holds no rows"))
    return kept


# ---- Rows -----------------------------------------------------------------------------------------------------------

class Row(NamedTuple):
    prompt: tuple[int, ...]  # token ids
    row: dict  # as read from the file: the prompt, and columns for the reward


def load_rows(source: str, tokenizer, max_length: int, args: Args) -> list[Row]:
    def parse_prompt(row, where): return text_of(row, "prompt", where), []
    return [Row(prompt, row) for prompt, _, row in encode(tokenizer, source, parse_prompt, max_length, args)]


# ---- Several processes: the same in dpo.py, kto.py and rloo.py ------------------------------------------------------

def init_processes() -> str:
    """Joins the process group under torchrun. Returns this process's device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" in os.environ and not dist.is_initialized():
        with refusing("RANK is set, as by torchrun, but the processes cannot be joined"):
            if device == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group()  # NCCL for GPU tensors, gloo for CPU tensors
    return device


@contextmanager
def gathered(model):
    """Unshards the model in this block if all processes have the memory. Otherwise each forward gathers layer by layer,
    and all processes must run the same number of forwards. Yields whether they must."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    size, device = sum(p.numel() * p.element_size() for p in model.parameters()), model.device.type
    in_step = any(all_gather(device == "cuda" and size > 0.5 * torch.cuda.mem_get_info()[0]))
    for module in [] if in_step else parts:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield in_step and bool(parts)
    finally:
        for module in parts:
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


def full_state_dict(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The full state dict on rank 0, gathered from all processes; None for sharded tensors on the others."""
    state = dict(state)
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            tensor = full_tensor(tensor)  # one tensor at a time is whole on a GPU
            state[name] = tensor.cpu() if processes()[0] == 0 else None
    return state


# ---- Models: the same in dpo.py, kto.py and rloo.py -----------------------------------------------------------------

def find_folder(name: str) -> str:
    """The folder of a checkpoint: `name` itself, or that of a hub model, fetched if it is not there yet."""
    if Path(name).is_dir():
        return name
    with refusing(f"there is no folder {name}, and no such model on the hub"):
        from huggingface_hub import snapshot_download  # comes with transformers
        return snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.model", "*.txt", "*model*.safetensors"])


def adapter_base(folder: str) -> str | None:
    """The folder of the model that a LoRA adapter belongs to; None for a whole checkpoint."""
    file = Path(folder) / "adapter_config.json"
    if not file.exists():
        return None
    with refusing(f"cannot read {file}"):
        refuse(not file.is_file(), "it is no regular file", ValueError)
        base = find_folder(json.loads(file.read_text())["base_model_name_or_path"])
        refuse((Path(base) / "adapter_config.json").exists(), f"{folder}'s base is an adapter too: merge that first")
        return base


def digest_of(folder: str) -> str:
    with refusing(f"cannot read the model {folder}"):
        base = adapter_base(folder)
        return checkpoint_digest(folder, checkpoint_digest(base) if base else "")


def load_tokenizer(folder: str):
    """The tokenizer of a checkpoint, and the model's context length."""
    base = adapter_base(folder) or folder
    with refusing(f"cannot load the tokenizer of {folder}"):
        longest = context_length(AutoConfig.from_pretrained(base, trust_remote_code=False))
        own = [*Path(folder).glob("tokenizer*.json")]
        return AutoTokenizer.from_pretrained(folder if own else base, trust_remote_code=False), longest


def compare_tokenizers(tokenizer, folders: dict[str, str]):
    """Refuses a reference, or the base of one, that comes with another tokenizer than the policy."""
    other = folders["ref_model"]
    places = {other, adapter_base(other) or other} - {folders["model"]}
    own = [file for place in places for file in Path(place).glob("tokenizer*.json")]
    refuse(own and tokenizer_digest(load_tokenizer(other)[0]) != tokenizer_digest(tokenizer),
           f"{other} has another tokenizer than the policy: name another --ref_model")


def from_checkpoint(kind, folder: str):
    """A model as it was saved, in eval mode and without dropout, which would add noise to every log-ratio."""
    with refusing(f"cannot load the model {folder}"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        for part in (config, config.get_text_config()):
            vars(part).update({name: 0.0 for name, p in vars(part).items() if "drop" in name and isinstance(p, float)})
        model, info = kind.from_pretrained(folder, config=config, dtype="auto", use_safetensors=True,
                                           trust_remote_code=False, output_loading_info=True)
    missing = [*info["missing_keys"], *info["mismatched_keys"]]
    refuse(missing, f"{folder} lacks weights ({missing[:1]}, ..), which would be random: name another model")
    return model


def load_model(folder: str, device: str, args, trains: bool = False):
    """The policy if it `trains`, with a new adapter if there is --lora_r (LoRA, arXiv:2106.09685), else a frozen
    reference. An adapter is loaded onto its base. Trained weights are float32."""
    base, lora = adapter_base(folder), args.lora_r if trains else None
    model = from_checkpoint(AutoModelForCausalLM, base or folder)
    stored = model.requires_grad_(trains and not base).dtype
    refuse(trains and (args.merge or args.lora_dropout) and not base and not lora,
           "--merge and --lora_dropout are for adapters: add --lora_r, or leave them out")
    if base or lora:
        with refusing(f"cannot load the adapter {folder}" if base else f"--lora_r, --lora_target {args.lora_target}"):
            import peft
            target, layers = args.lora_target.replace(" ", "").split(","), [name for name, _ in model.named_modules()]
            target = "all-linear" if target == ["all-linear"] else target
            unknown = [name for name in target if not any(f".{layer}".endswith(f".{name}") for layer in layers)]
            refuse(unknown and target != "all-linear", f"there is no layer {unknown}", ValueError)
            config = peft.PeftConfig.from_pretrained(folder) if base else peft.LoraConfig(
                task_type="CAUSAL_LM", r=lora, lora_alpha=args.lora_alpha or 2 * lora, target_modules=target)
            refuse(base and lora, f"{folder} is an adapter already: leave out --lora_r")
            refuse(config.is_prompt_learning, f"{folder} is no LoRA adapter")
            config.lora_dropout = args.lora_dropout
            for name, module in model.named_modules():
                if name.endswith(tuple(config.modules_to_save or ())):
                    module.float()  # peft copies it, and a copy in bfloat16 would round what the adapter has learnt
            if base:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message="Found missing adapter keys")  # which would be noise
                    model = peft.PeftModel.from_pretrained(model, folder, config=config, is_trainable=trains,
                                                           use_safetensors=True)
            else:
                model = peft.get_peft_model(model, config)
                for module in model.modules():  # init again in float32: peft used the model's dtype
                    if hasattr(module, "reset_lora_parameters"):
                        module.reset_lora_parameters("default", True)
            ends = base_model(model).get_input_embeddings(), base_model(model).get_output_embeddings()
            tied = ends[0].weight is ends[1].weight and any(hasattr(end, "lora_A") for end in ends)
            refuse(args.merge and tied, "--merge would add an adapter of the embeddings to the head, or the reverse, "
                   "because this model ties them: leave out --merge, or train other layers")
    if dist.is_initialized():  # before float(): until then the weights are memory-mapped
        n, whole = processes()[1], args.parallel == "ddp"
        shape, names = ((n, 1), ("copies", "parts")) if whole else ((n,), ("parts",))
        shard(model, dist.init_device_mesh(device, shape, mesh_dim_names=names), args.dtype)
    model = model.eval().to(device).float()  # in this order: a copy in float32 never fills the CPU
    for name, module in model.named_modules():
        if trains and ".lora_dropout" in name:
            module.train()  # the only dropout; eval_mode turns it off outside training steps
    if trains and args.gradient_checkpointing:
        checkpoint_layers(base_model(model))
    with refusing(f"{folder} cannot be used"):
        share_prompts(model, args.dtype)
    alone = not dist.is_initialized() and not base_model(model)._is_stateful
    if args.dtype == "bfloat16" and stored == torch.bfloat16 and alone:
        for module in model.modules():  # same bits as autocast of float32 weights, in half the memory
            if type(module) is torch.nn.Linear and not module.weight.requires_grad:
                module.weight.data = module.weight.data.bfloat16()
    return model


def checkpoint_layers(model):
    """Gradient checkpointing. A layer does it only in training mode; what lies inside the layer stays in eval mode."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # later 5.x
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def save_model(model, tokenizer, out: Path, args):
    """Writes out/.model with save_pretrained. Of a LoRA run it is the adapter, unless --merge."""
    model = model.float().merge_and_unload() if args.merge else model
    state = full_state_dict(model.to(getattr(torch, args.save_dtype)).state_dict())
    if processes()[0]:
        return
    shutil.rmtree(out / ".model", ignore_errors=True)  # left by this run, killed just before its end
    model.save_pretrained(out / ".model", state_dict=state)
    tokenizer.save_pretrained(out / ".model")
    for path in filter(Path.is_file, (out / ".model").rglob("*")):
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def move_model(out: Path):
    """out/.model -> out/model, once the last checkpoint says that the run is finished."""
    if processes()[0] == 0:
        shutil.rmtree(out / ".checkpoint", ignore_errors=True)  # a kill may have left it
        if (out / ".model").exists():
            os.replace(out / ".model", out / "model")  # an error if something else has put files there
        refuse(not (out / "model").exists(), f"{out} holds this run, finished, but its model is gone: delete it")


def load_function(spec: str) -> Callable:
    """FILE.py:FUNCTION -> the function. The one place that runs a user's code, because the user asks for it."""
    with refusing(f"cannot load {spec} as FILE.py:FUNCTION"):
        file, name = os.path.expanduser(spec).rsplit(":", 1)
        refuse(not Path(file).is_file(), f"there is no file {file}", FileNotFoundError)
        sys.path.insert(0, str(Path(file).resolve().parent))  # for its own imports, and for multiprocessing
        with chdir("."):  # it may call chdir, which would change what other paths mean
            module = importlib.import_module(Path(file).stem)
        refuse(not Path(module.__file__).samefile(file), f"{module.__file__} has its name: rename one", ImportError)
        return getattr(module, name)


# ---- Rollouts -------------------------------------------------------------------------------------------------------

class Rollout(NamedTuple):
    groups: list  # [(prompt, [y_1 .. y_k]), ..]: token ids, a sample with its stop token
    ended: torch.Tensor  # (B, k) bool: not cut off by max_new_tokens
    logps: torch.Tensor  # (B, k): log π(y|x) of the sampler
    entropy: float  # nats per token


def stop_tokens(model, tokenizer) -> list[int]:
    """The ids that end a completion: the tokenizer's EOS, and what the model's generation config names."""
    ends = base_model(model).generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return sorted({end for end in (tokenizer.eos_token_id, *ends) if isinstance(end, int)})


@torch.no_grad()
def rollout(policy, tokenizer, prompts: list[tuple], k: int, step: int, args: Args) -> Rollout:
    """y_1 .. y_k ~ π(·|x) of (1), for each prompt: the generation config's top_k, top_p and temperature are ignored.
    Token t of sample i of prompt b is drawn with the uniform number u[b, i, t], a function of (seed, step). So samples
    do not depend on batching or padding, except when rounding moves u to the next token."""
    u = torch.from_numpy(generator(args.seed, "rollout", step).random((len(prompts), k, args.max_new_tokens)))
    places = [len(prompt) + args.max_new_tokens for prompt in prompts]
    def batches(budget):
        packed = pack(places, budget, [k] * len(prompts))
        if shares_prompts(policy):
            return packed  # other models may see padding: one length per batch
        return [[i for i in batch if places[i] == n] for batch in packed for n in {places[i]: 0 for i in batch}]

    ends, samples = stop_tokens(policy, tokenizer), {}
    with (gathered(policy) as in_step, eval_mode(policy), autocast(policy, args.dtype),
          refusing(f"cannot sample from {args.model}")):
        for batch in tqdm(share_out(batches, args.rollout_tokens, *processes()), desc="sample", leave=False, delay=2):
            some = batch or [0]  # an empty batch: a forward as in the other processes
            some_u = u[some].to(policy.device)
            drawn = decode(base_model(policy), [prompts[i] for i in some], some_u, ends, in_step, args)
            for n, i in enumerate(batch):
                samples[i] = drawn[n * k:n * k + k]  # [(token ids, log-prob, entropy), ..]: sums over the tokens
    samples = {i: drawn for part in all_gather(samples) for i, drawn in part.items()}
    groups = [(prompt, [y for y, _, _ in samples[i]]) for i, prompt in enumerate(prompts)]
    logps = torch.tensor([[logp for _, logp, _ in samples[i]] for i in range(len(prompts))])
    entropy = sum(entropy for drawn in samples.values() for *_, entropy in drawn)
    entropy /= sum(len(y) for _, ys in groups for y in ys)
    return Rollout(groups, torch.tensor([[y[-1] in ends for y in ys] for _, ys in groups]), logps, entropy)


def decode(core, prompts: list[tuple], u: torch.Tensor, ends: list[int], in_step: bool, args: Args) -> list[tuple]:
    """The sampling loop. u (B, k, T) -> for each of B · k samples its token ids, log-prob and entropy (sums). in_step:
    all processes must run equally many forwards."""
    (B, k, T), device, expand = u.shape, core.device, shares_prompts(core)
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], True, -1, "left").to(device)  # (B, longest)
    ids, mask = ids.clamp(min=0), (ids >= 0).long()
    if expand:  # encode every prompt once, then copy its keys and values to k rows
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # padding is not counted
        out = core(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
        out.past_key_values.batch_repeat_interleave(k)
        logits, mask, positions = (x.repeat_interleave(k, 0) for x in (out.logits[:, -1], mask, positions[:, -1:]))
    else:
        out = core(input_ids=ids.repeat_interleave(k, 0), use_cache=True)
        logits = out.logits[:, -1]
    cache = {name: out[name] for name in ("past_key_values", "cache_params") if out.get(name) is not None}
    # rows[j]: the sample in row j of the cache; finished rows are removed once a quarter of the rows is finished
    rows, u = torch.arange(B * k, device=device), u.flatten(0, 1)
    alive = torch.ones(B * k, dtype=torch.bool, device=device)
    tokens, lengths = torch.zeros(B * k, T, dtype=torch.long, device=device), torch.full((B * k,), T, device=device)
    logps, entropies = torch.zeros(2, B * k, T, device=device)
    ends = torch.tensor(ends, dtype=torch.long, device=device)
    for t in range(T):
        token, logps[rows, t], entropies[rows, t] = draw(logits, u[rows, t], args.temperature, args.top_p, args.top_k)
        tokens[rows, t] = token
        ended = alive & torch.isin(token, ends)
        lengths[rows] = torch.where(ended, t + 1, lengths[rows])
        alive &= ~ended
        unfinished = alive.sum().item()  # here, and only here, this loop waits for the GPU
        if t == T - 1 or not (any(all_gather(unfinished)) if in_step else unfinished):
            break
        more = {}
        if expand:
            if 0 < unfinished <= 0.75 * len(alive):  # removed together: each removal copies the cache
                stay = alive.nonzero()[:, 0]
                cache["past_key_values"].batch_select_indices(stay)
                rows, token, mask, positions, alive = (x[stay] for x in (rows, token, mask, positions, alive))
            mask, positions = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1), positions + 1
            more = dict(attention_mask=mask, position_ids=positions)
        logits = core(input_ids=token[:, None], use_cache=True, **cache, **more).logits[:, -1]
    late = torch.arange(T, device=device) >= lengths[:, None]  # (B · k, T): tokens after the end
    logps, entropies = (x.masked_fill(late, 0.0).sum(1).tolist() for x in (logps, entropies))
    samples = zip(tokens.tolist(), lengths.tolist(), logps, entropies)
    return [(tuple(y[:n]), logp, entropy) for y, n, logp, entropy in samples]


def draw(logits: torch.Tensor, u: torch.Tensor, temperature=1.0, top_p=1.0, top_k=0) -> tuple[torch.Tensor, ...]:
    """(n, V) logits, (n,) uniform numbers -> a token per row, (n,); its log-prob before top_k and top_p; the entropy of
    the distribution after them."""
    logps = kept = torch.log_softmax(logits.float() / temperature, dim=-1)
    if top_k:
        kept = TopKLogitsWarper(top_k)(None, kept)
    if top_p < 1:
        kept = TopPLogitsWarper(top_p)(None, kept)
    probs = kept.exp() if kept is logps else kept.softmax(-1)
    cdf = probs.double().cumsum(-1)  # in float32 the tail of 150,000 tokens would be lost
    token = torch.searchsorted(cdf, u[:, None].to(cdf.dtype) * cdf[:, -1:], right=True)  # right: never probability 0
    token = token.clamp(max=probs.shape[-1] - 1)
    return token[:, 0], logps.gather(-1, token)[:, 0], -torch.special.xlogy(probs, probs).sum(-1)


# ---- Rewards --------------------------------------------------------------------------------------------------------

class RewardModel:
    """A sequence classifier with one output, as a reward function. Between calls it is on the CPU."""

    def __init__(self, folder: str, device: str, args: Args):
        self.device, self.args, self.tokenizer = device, args, load_tokenizer(folder)[0]
        self.model = from_checkpoint(AutoModelForSequenceClassification, folder)
        outputs = self.model.config.num_labels
        refuse(outputs != 1, f"{folder} is no reward model: it has {outputs} outputs, not one")

    @torch.no_grad()
    def __call__(self, prompts, completions, **columns) -> list[float]:
        rows = []
        for prompt, y in zip(prompts, completions):
            front, (_, ids) = tokenize(self.tokenizer, prompt, [y], {}, self.args, "a sample for the reward model")
            rows.append(torch.tensor(front + ids))
        if (longest := max(map(len, rows))) > context_length(self.model.config):
            raise BadInput(f"a sample of {longest} tokens is too long for the reward model: lower --max_length")
        scores, end = torch.zeros(len(rows)), self.model.config.pad_token_id  # the model finds a row's end by it
        self.model.to(self.device)
        for batch in pack(list(map(len, rows)), 0 if end is None else self.args.tokens_per_forward, [1] * len(rows)):
            ids = pad_sequence([rows[i] for i in batch], True, end or 0).to(self.device)
            mask = pad_sequence([torch.ones_like(rows[i]) for i in batch], True).to(self.device)
            scores[batch] = self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float().cpu()
        self.model.to("cpu")
        torch.cuda.empty_cache()
        return scores.tolist()


def load_rewards(rewards: tuple, folders: dict, device: str, args: Args) -> list[tuple[str, Callable, float]]:
    """[(name, function, weight), ..]: what main() was given, then --reward, then --reward_model."""
    rewards = (rewards,) if callable(rewards) else rewards
    wrong = not isinstance(rewards, (tuple, list)) or not all(map(callable, rewards))
    refuse(wrong, "main(args, rewards) takes functions: names of files belong into args.reward")
    named = [(getattr(reward, "__name__", type(reward).__name__), reward) for reward in rewards]
    named += [(Path(spec).name.split(":")[-1], load_function(spec)) for spec in args.reward]
    if args.reward_model:
        named.append((Path(args.reward_model).name, RewardModel(folders["reward_model"], device, args)))
    names, weights = [name for name, _ in named], args.reward_weights or [1.0] * len(named)
    refuse(not names, "there is no reward: give --reward FILE.py:FUNCTION or --reward_model")
    refuse(len({*names}) < len(names), f"two rewards share a name ({', '.join(names)}): rename a function")
    wrong = len(weights) != len(names) or not any(weights) or not math.isfinite(sum(weights))
    refuse(wrong, f"--reward_weights must be {len(names)} numbers, not all of them 0")
    return [(name, function, weight) for (name, function), weight in zip(named, weights)]


def call_reward(function: Callable, name: str, texts: list[str], ids: list[tuple], rows: list[dict]) -> list[float]:
    """Calls f(prompts, completions, completion_ids, **columns), TRL's signature. None (no reward) becomes NaN."""
    if not rows:
        return []
    columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
    prompts = columns.pop("prompt")
    completions = [y if isinstance(x, str) else [{"role": "assistant", "content": y}] for x, y in zip(prompts, texts)]
    columns |= dict(prompts=prompts, completions=completions, completion_ids=list(map(list, ids)))
    with refusing(f"the reward {name} failed"), torch.no_grad():
        returned = function(**deepcopy(columns))  # a function may change its arguments in place
        scores = [] if isinstance(returned, (dict, set, bytes)) else list(returned)
        if len(scores) != len(rows):
            raise ValueError(f"it must return a list of {len(rows)} numbers, not {str(returned)[:60]}")
        for score, text in zip(scores, texts):
            if score is not None and not abs(score) < 1e30:  # NaN, or what float32 would make infinite
                raise ValueError(f"it returned {score} for the completion {text[:60]!r}")
        return [math.nan if score is None else float(score) for score in scores]


def judge(drawn: Rollout, rows: list[Row], tokenizer, functions: list[tuple]) -> tuple[torch.Tensor, list[dict], dict]:
    """Sums of weighted rewards (B, k), NaN without any; lines for samples.jsonl; the mean of each function."""
    ids = [y for _, ys in drawn.groups for y in ys]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    repeated = [row.row for row, (_, ys) in zip(rows, drawn.groups) for _ in ys]
    rank, ranks = processes()
    k, first, stop = len(ids) // len(rows), len(rows) * rank // ranks, len(rows) * (rank + 1) // ranks
    mine = slice(k * first, k * stop)  # each process scores the samples of its prompts
    parts = all_gather([call_reward(function, name, texts[mine], ids[mine], repeated[mine])
                      for name, function, _ in functions])
    scores = [[score for part in parts for score in part[i]] for i in range(len(functions))]
    scores, weights = torch.tensor(scores), torch.tensor([[weight] for *_, weight in functions])  # (functions, B·k)
    rewarded = (~scores.isnan() & (weights != 0)).any(dim=0)  # --score, with weight 0, is no reward
    total = torch.where(rewarded, (weights * scores.nan_to_num(0.0)).sum(dim=0), math.nan)
    means = {f"rewards/{name}": row.nanmean().item() for (name, *_), row in zip(functions, scores)}
    means = {name: mean for name, mean in means.items() if not math.isnan(mean)}
    samples = [{"prompt": row["prompt"], "completion": text, "reward": None if math.isnan(reward) else reward}
               for row, text, reward in zip(repeated, texts, total.tolist())]
    return total.view(len(rows), -1), samples, means


# ---- Flags, order, files of a run: the same in dpo.py, kto.py and rloo.py -------------------------------------------

def resolve_args(args):
    """Fills in the flags that depend on others, and checks the arguments."""
    may_be_0 = {"lr", "weight_decay", "samples", "steps", "eval_size", "warmup", "seed", "lora_dropout",
                "label_smoothing", "ld_alpha", "simpo_gamma", "top_k", "beta"}
    logging.disable_progress_bar()  # of transformers, one per file
    args = replace(args, **{name: os.path.expanduser(value) for name, value in vars(args).items()
                            if isinstance(value, (str, Path))})
    for name, hint in get_type_hints(type(args)).items():
        value = vars(args)[name]
        with refusing(f"--{name} cannot be {value!r}"):  # main() may be called without a command line
            check_type(value, hint, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
            wrong = value == "" or "\0" in str(value) or isinstance(value, bool) and hint is not bool
            refuse(wrong, "leave it out", ValueError)
            most = 1e13 if isinstance(value, int) else 1e18
            wrong = isinstance(value, (int, float)) and not (0 <= value < most and (value or name in may_be_0))
            refuse(wrong and hint is not bool, f"it must be a number above 0 and below {most:g}", ValueError)
    refuse_unused(args, {
        "lora_alpha": ("--lora_r", args.lora_r), "lora_target": ("--lora_r", args.lora_r),
        "ref_model": ("a reference", args.ref != "none"), "sync_mix": ("--sync_reference", args.sync_reference),
        "sync_reference": ("--ref swap, the reference that can move", args.ref == "swap"),
        "eval_size": ("--data without --eval_data", not args.eval_data), "score": ("--samples", args.samples),
        "epochs": ("a run without --steps", args.steps is None)})
    if args.model is None and args.data is None:
        demo = {name: os.path.relpath(Path(__file__).parent / path) for name, path in DEMO.items()}
        refuse(not Path(demo["model"]).exists(), "there is no demo/ beside this script: give --model and --data")
        demo |= {"lr": 2e-4, "reward": (demo.get("reward"),)}
        args = replace(args, **{name: value for name, value in demo.items() if vars(args).get(name, 0) in (None, ())})
    refuse(not args.model or not args.data, "--model and --data go together: give both, or neither for the demo")
    refuse(args.merge and args.save_dtype != "float32", "--merge needs --save_dtype float32: rounding changes eval_*")
    refuse(max(args.warmup, args.lora_dropout, args.sync_mix) > 1, "--warmup, --lora_dropout, --sync_mix: at most 1")
    auto = "bfloat16" if torch.cuda.is_available() else "float32"
    return replace(args, lr=1e-6 if args.lr is None else args.lr, dtype=auto if args.dtype == "auto" else args.dtype,
                   ref_model=args.ref_model or args.model)


def refuse_unused(args, only_for: dict[str, tuple]):
    """{flag: (what it is for, whether that is used)}: BadInput for a flag without effect."""
    for name, (what, used) in only_for.items():
        changed = vars(args)[name] != vars(type(args))[name]  # from its default
        refuse(changed and not used, f"--{name} is for {what}: leave it out, or change that")


class Stopped(RuntimeError):
    """A run that ended early. The message says why, and what is saved."""


def generator(seed: int, purpose: str, n: int = 0) -> np.random.Generator:
    """Random numbers as a function of seed, purpose and step or epoch: a resumed run needs no saved state."""
    return np.random.default_rng([seed, n, *purpose.encode()])


def step_seed(seed: int, step: int) -> int:
    return int(generator(seed, "step", step).integers(2**32))


def hold_out(rows: list, size: int, seed: int) -> tuple[list, list]:
    """Splits off the rows of `size` prompts, at most a tenth of them; all rows of a prompt stay on one side."""
    prompts = sorted({row.prompt for row in rows})
    order = generator(seed, "hold_out").permutation(len(prompts))
    held = {prompts[i] for i in order[:min(size, len(prompts) // 10)]}
    return [row for row in rows if row.prompt not in held], [row for row in rows if row.prompt in held]


def batch_rows(step: int, rows: list, batch_size: int, seed: int) -> list:
    """The rows of a step (from 1): epoch after epoch of permutations, each a function of (seed, epoch) alone."""
    places, n = range((step - 1) * batch_size, step * batch_size), len(rows)
    orders = {epoch: generator(seed, "order", epoch).permutation(n) for epoch in {place // n for place in places}}
    return [rows[orders[place // n][place % n]] for place in places]


def lr_factor(step: int, steps: int, warmup: float, schedule: str) -> float:
    """Share of the peak learning rate at a step (from 1): linear warmup, then constant or falling to 0 at steps + 1."""
    rise = round(warmup * steps)
    if step <= rise:
        return step / rise
    left = (steps - step + 1) / max(1, steps - rise)  # 1 .. 1 / (steps − rise)
    return {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[schedule]


def lock_folder(out: Path, inputs: list):
    """Creates and locks the output folder. Refuses one that another run uses or that holds an input."""
    bases = [adapter_base(path) for path in inputs if path and Path(path).is_dir()]
    for path in filter(None, [*inputs, *bases]):
        one, two = (Path(os.path.realpath(place)) for place in (path, out))
        refuse(one.is_relative_to(two) or two.is_relative_to(one), f"--out {out} holds or lies in {path}, an input")
    with refusing(f"--out {out} cannot be written, or another run writes into it: name another"):
        str(out).encode()  # safetensors takes only UTF-8
        out.mkdir(parents=True, exist_ok=True)
        new = processes()[0] == 0 and not (out / ".run.lock").exists() and not (out / CHECKPOINT).exists()
        for name in (CHECKPOINT, METRICS, SAMPLES, "args.json", ".checkpoint", ".model"):
            path, is_ours = out / name, Path.is_dir if name in (".checkpoint", ".model") else Path.is_file
            wrong = path.is_symlink() or path.exists() and (new or not is_ours(path))
            refuse(wrong, f"{path} is there already, but not from a run: name another --out")
        return FileLock(out / ".run.lock").acquire(timeout=0) if processes()[0] == 0 else nullcontext()


def identify(args, rows: list, folders: dict[str, str]) -> dict:
    """What must be equal for a bitwise-equal resume: flags, rows, weights."""
    digested = {"model", "ref_model", "reward_model", "data", "eval_data"}  # compared by content, not by path
    speed = {"tokens_per_forward", "rollout_tokens", "gradient_checkpointing", "save_every", "tensorboard", "parallel"}
    speed -= {"tokens_per_forward", "parallel"} if args.lora_dropout else set()  # its masks depend on these
    longer = args.schedule == "constant" and args.save_dtype == "float32"  # else the last step rounds the weights
    may_differ = speed | ({"steps", "epochs"} if longer else set())
    mine = {name: value for name, value in asdict(args).items() if name not in digested | {"out", "ref_cache"}}
    weights = {folder: digest_of(folder) for folder in folders.values()}  # once, if model and ref_model are one folder
    for name, folder in folders.items():
        mine[f"weights of --{name}"] = weights[folder]
        places = map(Path, filter(None, (folder, adapter_base(folder))))
        files = [file for place in places for kind in ("*.json", "**/*.jinja") for file in sorted(place.glob(kind))]
        texts = [file.read_bytes() for file in files if file.is_file()]  # generation_config.json and templates, too
        mine[f"settings of --{name}"] = hashlib.sha256(b"".join(texts)).hexdigest()
    for name in {"score", "reward"} & mine.keys():
        specs = [mine[name]] if isinstance(mine[name], str) else mine[name] or ()
        with refusing(f"cannot read --{name}"):
            texts = [Path(os.path.expanduser(spec.rsplit(":", 1)[0])).read_bytes() for spec in specs]
        mine[name] = [Path(spec).name for spec in specs]
        mine[f"code of --{name}"] = hashlib.sha256(b"".join(texts)).hexdigest()
    digests = [hashlib.sha256(repr(row).encode("utf-8", "backslashreplace")).digest() for row in rows]
    mine["rows"] = hashlib.sha256(b"".join(digests)).hexdigest()
    differing = [name for theirs in all_gather(mine) for name in mine if theirs[name] != mine[name]]
    refuse(differing, f"the processes differ in {differing[:1]}: give all of them the same command and files")
    return {name: value for name, value in mine.items() if name not in may_differ}


def tensors_of(thing) -> dict[str, torch.Tensor]:
    """The tensors of an object that training changes, by name. Tied weights are in it once, frozen ones not."""
    state, others = thing.state_dict(), set()
    if isinstance(thing, torch.optim.Optimizer):
        return {f"{i}.{slot}": tensor for i, slots in state["state"].items() for slot, tensor in slots.items()}
    if isinstance(thing, torch.nn.Module):
        others = {name for name, _ in thing.named_parameters(remove_duplicate=False)}
        others -= {name for name, p in thing.named_parameters() if p.requires_grad}
    return {name: tensor for name, tensor in state.items() if name not in others}


def checksum(run: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(run.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def save_checkpoint(out: Path, step: int, identity: dict, pending=(), **objects):
    """Replaces out/checkpoint.safetensors atomically: tensors_of() every object, named `object.tensor`, and as JSON
    the step, the identity of the run and the arguments of finish_step()."""
    tensors = {f"{name}.{key}": tensor for name, thing in objects.items() for key, tensor in tensors_of(thing).items()}
    tensors = full_state_dict(tensors)
    if processes()[0]:
        return
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    owners = {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors.items()}
    for name, tensor in tensors.items():  # save_file refuses tensors that share memory
        tensors[name] = tensor if owners[tensor.untyped_storage().data_ptr()] == name else tensor.clone()
    sizes = {name: (out / name).stat().st_size for name in (METRICS, SAMPLES)}
    run = json.dumps(dict(step=step, identity=identity, sizes=sizes, pending=pending), default=str)
    metadata = {"run": run, "sha256": checksum(run, tensors)}
    folder = out / ".checkpoint"  # save_file itself makes a temporary file, which a kill leaves there
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_file(tensors, folder / CHECKPOINT, metadata)
    with open(folder / CHECKPOINT, "rb") as file:
        os.fsync(file.fileno())
    os.replace(folder / CHECKPOINT, out / CHECKPOINT)
    folder.rmdir()


def read_checkpoint(out: Path, identity: dict) -> dict:
    """Loads what save_checkpoint wrote. BadInput if it is damaged, or another run's."""
    path = out / CHECKPOINT
    if not path.exists():
        return {"step": 0, "sizes": {METRICS: 0, SAMPLES: 0}, "pending": [{"step": 0}, []], "tensors": {}}
    with refusing(f"{path} is damaged, or no run wrote it (name another --out)"):
        with safe_open(path, "pt") as file:  # maps the file: processes share its memory
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
        refuse(checksum(metadata["run"], tensors) != metadata["sha256"], "its checksum does not match", ValueError)
        state = json.loads(metadata["run"])
        step, sizes, (values, lines) = state["step"], state["sizes"], state["pending"] or ({"step": state["step"]}, [])
        counts = [step, values["step"], sizes[METRICS], sizes[SAMPLES]]
        wrong = not all(type(n) is int and n >= 0 for n in counts) or type(lines) is not list
        wrong = wrong or values["step"] != step or bool(sizes[METRICS]) != bool(step)
        wrong = wrong or any(type(x) not in (int, float) or 1e300 < abs(x) < math.inf for x in values.values())
        refuse(wrong, "its step, sizes or pending line are invalid", ValueError)
        for name, mine in json.loads(json.dumps(identity, default=str)).items():
            theirs = state["identity"].get(name)
            difference = f"{name} {repr(theirs)[:80]} and not {repr(mine)[:80]}"
            if name.startswith("code of") and theirs != mine:
                print(f"the {name} has changed since this run began")  # perhaps a mistake in it is mended
            else:
                refuse(theirs != mine, f"{out} holds a run with {difference}: name another --out")
    return state | {"tensors": tensors}


def restore(out: Path, state: dict, **objects):
    """Restores the objects, and truncates the log files, to the checkpoint's step."""
    for name in (METRICS, SAMPLES):
        with refusing(f"cannot resume {out / name}"), open(out / name, "ab") as file:
            refuse(file.tell() < state["sizes"][name], "it is shorter than it was: name another --out", ValueError)
            if file.tell() and not state["step"]:
                print(f"{out / name} is replaced: that run has no checkpoint")
            file.truncate(state["sizes"][name])  # all processes do this, and to the same size
    all_gather("truncated")  # a barrier: no process appends before all have truncated
    for name, thing in objects.items() if state["step"] else ():
        with refusing(f"{out / CHECKPOINT} does not fit this run"):
            start = f"{name}."
            saved = {key.removeprefix(start): x for key, x in state["tensors"].items() if key.startswith(start)}
            if isinstance(thing, torch.optim.Optimizer):  # AdamW, which makes this state in its first step
                params = [p for group in thing.param_groups for p in group["params"]]
                for i, p in enumerate(params):
                    if f"{i}.step" in saved:  # a parameter without gradients has none
                        thing.state[p] = {"step": torch.zeros((), device=p.device),
                                          "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            own = tensors_of(thing)
            kinds = [{key: (x.shape, x.dtype) for key, x in tensors.items()} for tensors in (own, saved)]
            refuse(not saved or kinds[0] != kinds[1], f"it holds other tensors of the {name}", ValueError)
            if isinstance(thing, Swap):
                thing.load_state_dict(saved)
            else:
                for key, x in saved.items():
                    own[key].copy_(part_of(x, own[key]))


def read_lines(path: Path) -> list[dict]:
    with refusing(f"{path} is damaged, name another --out"):
        return [json.loads(line) | {} for line in path.read_text().splitlines()]


def stop_if_not_finite(values: dict):
    wrong = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    refuse(wrong, f"step {values['step']}: {', '.join(wrong)}: lower --lr, or look at its rows", Stopped)


class Log:
    """Writes metrics.jsonl, a line per step; samples.jsonl, a line per completion; TensorBoard's events if asked."""

    def __init__(self, out: Path, tensorboard: bool):
        self.out, self.history, self.board = out, read_lines(out / METRICS), None
        values = [value for line in self.history for value in line.values()]
        numbers = all(isinstance(value, (int, float)) and abs(value) < 1e300 for value in values)
        refuse(not numbers, f"{out / METRICS} is damaged, name another --out")
        if tensorboard and processes()[0] == 0:
            with refusing("--tensorboard"):
                from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(out)

    def write(self, values: dict, samples: list[dict]):
        stop_if_not_finite(values)
        self.history.append(values)
        if processes()[0]:
            return
        sizes = {name: (self.out / name).stat().st_size for name in (METRICS, SAMPLES)}
        try:
            for name in values if self.board else ():
                self.board.add_scalar(name, values[name], values["step"])
            for name, lines in ((METRICS, [values]), (SAMPLES, samples)):
                with open(self.out / name, "a") as file:
                    file.writelines(json.dumps(line, default=str) + "\n" for line in lines)
        except BaseException:  # such as a full disk: a step is in both files or in none
            for name, size in sizes.items():
                os.truncate(self.out / name, size)
            raise


@contextmanager
def interrupt():
    """Yields a list to which SIGTERM or Ctrl-C appends: the loop can stop after a step. A second one stops at once."""
    asked = []

    def ask(number, frame):
        if asked:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)

    with ExitStack() as after:
        for number in (signal.SIGTERM, signal.SIGINT):
            old = signal.signal(number, ask)
            after.callback(signal.signal, number, old)  # restores the old handler
        yield asked


def report(log: Log):
    """Prints held-out samples and metrics, before and after training."""
    if processes()[0]:
        return
    first, last = log.history[0], log.history[-1]
    with refusing(f"the model is saved, but {log.out / SAMPLES} is damaged"):
        samples = [row for row in read_lines(log.out / SAMPLES) if row.get("held_out")]
        before, after = ([row for row in samples if row["step"] == values["step"]] for values in (first, last))
        for old, new in list(zip(before, after))[:3]:
            prompt = old["prompt"] if isinstance(old["prompt"], str) else old["prompt"][-1]["content"]
            print(f"\n{prompt}\n  before  {old['completion']}\n  after   {new['completion']}")
    names = ("eval_loss", "eval_reward", "eval_kl", "eval_rewards/margins", "eval_rewards/accuracies", "eval_score")
    print(f"\n{'held out':28}{'before':>8}{'after':>8}")
    for name in names:
        if name in first and name in last:
            print(f"{name:28}{first[name]:z8.3f}{last[name]:z8.3f}")  # z: 0.000 instead of -0.000


def command_line(args):
    """Runs main(). An error that the user can fix prints one sentence and exits, without a traceback."""
    try:
        main(args)
        if dist.is_initialized():
            dist.destroy_process_group()
    except (Exception, KeyboardInterrupt) as error:
        sentence = str(error) if isinstance(error, (BadInput, Stopped)) else one_line(error)
        if int(os.environ.get("RANK", 0)) and not isinstance(error, Stopped):  # all processes are Stopped together
            time.sleep(3)  # if rank 0 fails with the same error, torchrun ends this one meanwhile
            sys.stderr = sys.__stderr__
        if isinstance(error, MemoryError):  # Python's or numpy's: not the model's forwards
            sentence += ": this machine has too little memory"
        elif out_of_memory(error):
            sentence += ": lower --tokens_per_forward, or add --gradient_checkpointing"
        elif isinstance(error, dist.DistError) or "gloo/transport" in sentence:
            sentence = "another process has died: the same command resumes from the last checkpoint"
        elif not isinstance(error, (BadInput, Stopped, OSError, SafetensorError, KeyboardInterrupt)):  # a full disk
            raise
        print("; ".join([f"{Path(sys.argv[0]).name}: {sentence}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        sys.exit({BadInput: 2, KeyboardInterrupt: 130}.get(type(error), 1))


# ---- Training -------------------------------------------------------------------------------------------------------

class Samples(NamedTuple):
    """The samples of a step, (B, k) each. The first backward() fills in all but rewards."""
    rewards: torch.Tensor  # NaN: left out
    old_logp: torch.Tensor  # log π_old(y|x)
    ratio: torch.Tensor  # log π_old(y|x) − log π_ref(y|x)
    advantages: torch.Tensor


def backward(policy, groups: list, known, samples: Samples, first: bool, args: Args) -> dict[str, float]:
    """Accumulates the gradient of the mean loss over micro-batches of whole prompts."""
    losses, clipped = torch.zeros_like(samples.rewards), torch.zeros_like(samples.rewards)
    for micro in micro_batches(policy, groups, args.tokens_per_forward, *processes()):
        places = micro or [0]  # an empty micro-batch: FSDP needs equally many forwards in all processes
        batch = [groups[i] for i in places]
        logps = completion_logprobs(policy, batch, args.tokens_per_forward, args.dtype, args.temperature)
        logp = torch.stack([torch.stack([y.sum() for y in ys]) for ys in logps])  # (b, k)
        if not micro:
            (0 * logp.sum()).backward()
            continue
        rows = to_device(torch.tensor(micro), logp.device)
        if first:  # the policy has not changed since it sampled: this forward also gives old_logp and KL
            ratio = torch.stack([torch.stack([y.sum() for y in ys]) for ys in log_ratios(logps, batch, known)]).detach()
            reward = samples.rewards[rows].clamp(*(args.reward_clip or (-math.inf, math.inf)))
            samples.old_logp[rows], samples.ratio[rows] = logp.detach(), ratio
            samples.advantages[rows] = leave_one_out(reward - args.beta * ratio)  # R of (2), minus its baseline (1)
        old_logp, advantages = samples.old_logp[rows], samples.advantages[rows]
        loss = policy_loss(logp, old_logp, advantages, args.clip_eps)
        (loss.sum() / losses.numel()).backward()  # the mean of (1); samples left out have no gradient
        losses[rows] = loss.detach()
        far = (logp - old_logp).detach().exp() - 1
        clipped[rows] = ((far > args.clip_eps) & (advantages > 0) | (far < -args.clip_eps) & (advantages < 0)).float()
    for values in (samples.old_logp, samples.ratio, samples.advantages) if first else ():
        all_reduce(values)  # zeros where another process has the numbers
    return {"loss": all_reduce(losses).mean().item(), "clip_ratio": all_reduce(clipped).mean().item()}


def metrics(drawn: Rollout, rewards: torch.Tensor, ratio: torch.Tensor | None) -> dict[str, float]:
    judged, lengths = rewards[~rewards.isnan()], [len(y) for _, ys in drawn.groups for y in ys]
    same = [len(set(row[~row.isnan()].tolist())) < 2 for row in rewards]
    values = {"completions/mean_length": float(np.mean(lengths)), "entropy": drawn.entropy,
              "completions/clipped_ratio": 1 - drawn.ended.float().mean().item(),
              "frac_reward_zero_std": float(np.mean(same))}
    values |= {"reward": judged.mean().item(), "reward_std": judged.std(correction=0).item()} if len(judged) else {}
    return values | ({} if ratio is None else {"kl": ratio.sum().item() / sum(lengths)})


@torch.no_grad()
def evaluate(policy, tokenizer, rows: list[Row], reference, functions: list, args: Args) -> tuple[list[dict], dict]:
    """One sample of each held-out prompt, always with the same random numbers."""
    drawn = rollout(policy, tokenizer, [row.prompt for row in rows], 1, 0, args)
    rewards, samples, means = judge(drawn, rows, tokenizer, functions)
    forward, ratio = (args.tokens_per_forward, args.dtype, args.temperature), None
    known = reference_logprobs(reference, drawn.groups, *forward)
    if known is not None:
        ratio = torch.zeros(len(rows), device=policy.device)
        with eval_mode(policy):
            for micro in micro_batches(policy, drawn.groups, args.tokens_per_forward, *processes()):
                batch = [drawn.groups[i] for i in micro or [0]]
                ratios = log_ratios(completion_logprobs(policy, batch, *forward), batch, known)
                ratio[micro] = torch.stack([y.sum() for (y,) in ratios])[:len(micro)]
        all_reduce(ratio)
    values = metrics(drawn, rewards, ratio) | means
    del values["frac_reward_zero_std"]  # always 1 for single samples
    return samples, {f"eval_{name}".replace("rewards/--score", "score"): value for name, value in values.items()}


def check_start(drawn: Rollout, samples: Samples, step: int, args: Args):
    """Raises BadInput if log-probs of sampling and of training differ, for example because the key-value cache mixes up
    rows: the samples would silently be off-policy. Called at the first step of a process."""
    lengths = torch.tensor([[len(y) for y in ys] for _, ys in drawn.groups], device=samples.ratio.device)
    gaps = ((drawn.logps.to(lengths.device) - samples.old_logp) / lengths).abs()
    if not gaps.mean() < (5e-2 if args.dtype == "bfloat16" else 1e-3):
        raise BadInput("this model's samples cannot be trained on: with its key-value cache log-probs differ from "
                       f"those of training by {gaps.mean():.2g} nats per token")
    if step == 1 and args.beta and args.ref_model == args.model:
        check_agreement(samples.ratio / lengths, args.dtype)


def check(args: Args):
    refuse_unused(args, {
        "clip_eps": ("--updates_per_rollout above 1", args.updates_per_rollout > 1),
        "sync_reference": ("--beta above 0", args.beta)})
    refuse(args.k < 2, "--k must be at least 2: the other samples are the baseline")
    refuse(args.lora_dropout and args.updates_per_rollout > 1,
           "--lora_dropout changes the ratio: leave it out, or leave out --updates_per_rollout")
    refuse(not args.beta and args.ref_model != args.model, "--beta 0 has no reference: leave out --ref_model")
    low, high = args.reward_clip or (0, 1)
    wrong = not low < high or any(1e30 < abs(x) < math.inf for x in (low, high))  # float32 cannot hold them
    refuse(wrong, "--reward_clip: lowest, then highest")
    refuse(args.top_p > 1 or args.clip_eps >= 1, "--top_p: at most 1; --clip_eps: below 1")
    refuse(args.max_new_tokens >= args.max_length, "--max_new_tokens leaves no room for a prompt in --max_length")


def main(args: Args, rewards: tuple[Callable, ...] = ()) -> list[dict]:
    """Trains. Returns the lines of metrics.jsonl, one dict per step. `rewards`: functions, as from a notebook."""
    args = resolve_args(args)
    check(args)
    began, device, out = time.monotonic(), init_processes(), Path(args.out).absolute()  # a reward may call chdir
    models = {name: vars(args)[name] for name in ("model", "ref_model", "reward_model")}
    folders = {name: find_folder(model) for name, model in models.items() if model}
    functions = load_rewards(rewards, folders, device, args)
    judges = functions + ([("--score", load_function(args.score), 0.0)] if args.score else [])  # for held-out answers
    tokenizer, longest = load_tokenizer(folders["model"])
    compare_tokenizers(tokenizer, folders)
    max_length = min(args.max_length, longest) - args.max_new_tokens  # of a prompt
    train, held = (load_rows(file, tokenizer, max_length, args) if file else [] for file in (args.data, args.eval_data))
    if not args.eval_data:
        train, held = hold_out(train, min(args.eval_size, args.samples), args.seed)
    print(f"{len(train)} rows to train on, {len(held)} held out")
    if args.show_data:
        print(tokenizer.decode(train[0].prompt))
        return []
    held = held[:args.samples]
    batch_size = min(args.batch_size, len(train))
    steps = math.ceil(args.epochs * len(train) / batch_size) if args.steps is None else args.steps
    with lock_folder(out, [*folders.values(), args.data, args.eval_data]), interrupt() as signals:
        identity = identify(args, [*train, None, *held], folders) | {"steps of --warmup": round(args.warmup * steps)}
        identity |= {"rewards": [(name, weight) for name, _, weight in functions]}
        state = read_checkpoint(out, identity)
        finished = state["step"] > 0 and not state["tensors"]  # the last checkpoint holds no weights
        refuse(state["step"] > steps or finished and state["step"] < steps,
               f"{out} holds a run of {state['step']} steps, and this one has {steps}: name another --out")
        early = os.path.lexists(out / "model") and not finished  # it is not of this run
        refuse(early, f"{out / 'model'} is there already: name another --out")
        if finished:
            move_model(out)
            print(f"{out} holds this run, finished after {state['step']} steps: nothing to do")
            return read_lines(out / METRICS)
        if processes()[0] == 0:
            (out / "args.json").write_text(json.dumps(asdict(args), indent=2))

        set_seed(step_seed(args.seed, 0))  # for a new adapter
        policy = load_model(folders["model"], device, args, trains=True)
        reference = None
        if args.beta and args.ref == "live":
            reference = nullcontext(load_model(folders["ref_model"], device, args))
        elif args.beta:  # in a LoRA run it is the adapter alone: the base comes with the policy
            other = folders["ref_model"] != folders["model"]
            reference = Swap(policy, load_model(folders["ref_model"], "cpu", args) if other else None)
        highest, vocabulary = max(max(row.prompt) for row in train + held), len(policy.get_input_embeddings().weight)
        refuse(highest >= vocabulary, f"a prompt has the id {highest}, the model only {vocabulary} embeddings")
        refuse(args.mask_truncated and not stop_tokens(policy, tokenizer),
               "--mask_truncated would leave out every sample: neither model nor tokenizer has an EOS token")
        trained = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=args.weight_decay, fused=True)
        changing = dict(policy=policy, optimizer=optimizer)  # what a checkpoint holds
        changing |= {"reference": reference} if args.sync_reference else {}
        restore(out, state, **changing)
        done, saved, pending = state["step"], state["step"], state["pending"]
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: lr_factor(state["step"] + n + 1, steps, args.warmup, args.schedule))
        log = Log(out, args.tensorboard)

        def finish_step(values: dict, lines: list[dict]):
            """Evaluates the policy if that is due, and writes the log line of a step whose update is done."""
            step, last = values["step"], values["step"] == steps
            set_seed(step_seed(args.seed, step))
            if last and args.save_dtype == "bfloat16":
                if held:
                    _, scored = evaluate(policy, tokenizer, held, reference, judges, args)
                    tqdm.write(f"before rounding to bfloat16: {scored}")
                for p in trained:  # what is evaluated is what is saved
                    p.data.copy_(p.data.bfloat16())
            if held and (last or step % (args.eval_every or steps) == 0):
                answers, scored = evaluate(policy, tokenizer, held, reference, judges, args)
                values |= scored
                lines = [{"step": step, "held_out": True, **line} for line in answers] + lines
                held_out = [f"{name} {value:.3f}" for name, value in values.items() if name.startswith("eval_")]
                tqdm.write(f"step {step}: {', '.join(held_out)}")
            log.write(values, lines)

        if pending:  # the first evaluation, or one that failed after its step's update was saved
            finish_step(*pending)
        if steps == 0:
            return log.history
        tokens = log.history[-1].get("num_tokens", 0)
        bar = tqdm(range(done + 1, steps + 1), desc="train", initial=done, total=steps)
        try:
            for step in bar:
                tick = time.monotonic()
                set_seed(step_seed(args.seed, step))  # a resumed run needs no saved random state
                rows = batch_rows(step, train, batch_size, args.seed)
                drawn = rollout(policy, tokenizer, [row.prompt for row in rows], args.k, step, args)
                rewards, lines, means = judge(drawn, rows, tokenizer, functions)
                counted = torch.where(drawn.ended, rewards, math.nan) if args.mask_truncated else rewards
                forward = args.tokens_per_forward, args.dtype, args.temperature
                known = reference_logprobs(reference, drawn.groups, *forward)
                samples = Samples(counted.to(device), *(torch.zeros_like(counted, device=device) for _ in range(3)))
                tokens += sum(len(prompt) + sum(map(len, ys)) for prompt, ys in drawn.groups)
                for update in range(args.updates_per_rollout):
                    losses = backward(policy, drawn.groups, known, samples, update == 0, args)
                    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                    values = metrics(drawn, rewards, samples.ratio if args.beta else None)
                    values = {"step": step, **values, **means, **losses, "grad_norm": full_tensor(grad_norm).item(),
                              "lr": scheduler.get_last_lr()[0], "num_tokens": tokens}
                    stop_if_not_finite(values)
                    if update == 0 and step == state["step"] + 1 and not args.lora_dropout:
                        check_start(drawn, samples, step, args)
                    done = None  # no checkpoint between the update and its log line
                    optimizer.step()
                    optimizer.zero_grad()
                scheduler.step()
                if args.sync_reference and step % args.sync_reference == 0:
                    reference.sync(args.sync_mix)  # after the update, as in TR-DPO, arXiv:2404.09656
                lines = [{"step": step, "held_out": False, **line} for line in lines]
                done, pending = step, (values, lines)
                finish_step(*pending)
                pending = ()
                speed = (tokens - log.history[-2].get("num_tokens", 0)) / (time.monotonic() - tick)
                bar.set_postfix({"reward": values.get("reward"), "kl": values.get("kl"), "tok/s": int(speed)})
                stopping = any(all_gather(bool(signals)))
                if step % args.save_every == 0 or step == steps:
                    save_checkpoint(out, step, identity, **changing)
                    saved = step
                refuse(stopping and step < steps, (signals or ["a signal to another process"])[0], Stopped)
            save_model(policy, tokenizer, out, args)
            save_checkpoint(out, steps, identity)  # without weights: the run is finished
            move_model(out)
        except Exception as error:
            all_here = not dist.is_initialized() or isinstance(error, Stopped)  # saving needs all processes
            if done and done > saved and all_here:
                with suppress(Exception):  # such as a full disk, perhaps for the second time
                    save_checkpoint(out, done, identity, pending, **changing)
                    saved = done
            if saved:
                error.add_note(f"step {saved} is saved: run the same command to resume")
            raise
    if all(line.get("frac_reward_zero_std") == 1 or line.get("grad_norm") == 0 for line in log.history[1:]):
        print("all samples of a prompt had equal rewards, or were left out, in every step: there was nothing to learn")
    report(log)
    print(f"\n{steps} steps of {batch_size} prompts, {args.k} samples each, in {time.monotonic() - began:.0f} s")
    print(f"the model is in {out / 'model'}")
    return log.history


if __name__ == "__main__":
    command_line(ARGS)
