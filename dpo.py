"""DPO and its relatives: learn from pairs of a better and a worse answer.

Rafailov et al. 2023, Direct Preference Optimization, arXiv:2305.18290, equation 7:

    L(θ) = −E log σ( β log π(y_w|x)/π_ref(y_w|x) − β log π(y_l|x)/π_ref(y_l|x) )

    python dpo.py                                                               # the demo: offline, under a minute
    python dpo.py --model Qwen/Qwen3-0.6B --data pairs.jsonl --out out/qwen     # your model, your data
    torchrun --nproc_per_node=8 dpo.py --model ...                              # on 8 GPUs

The reference π_ref is frozen, so its log-probs are computed once, before the policy is loaded, and kept in a file that
later runs share: there are never two models in memory. --ref names other ways to hold it. The same command resumes a
run that was stopped or killed.

Data      rows `prompt, chosen, rejected`, or `chosen, rejected` with a common prefix; strings or chat messages
          ([{"role": ..., "content": ...}, ...]). Strings get the tokenizer's EOS; chats end as their template says.
          The rpo losses also need the columns `chosen_reward, rejected_reward`.
Not here  quantized weights, tools, images.
Shapes    B pairs in an optimizer batch; losses take (B,). w: y_w, the chosen answer; l: y_l, the rejected one.
Metrics   loss | rewards/chosen, rewards/rejected: β (log π − log π_ref), summed over tokens (simpo: averaged) |
          rewards/margins: their difference | rewards/accuracies: fraction of pairs where it is > 0, ties count 1/2 |
          logps/chosen, logps/rejected: log π(y|x) | humanline/unclamped: share of tokens whose log-ratio is within its
          bounds | grad_norm before clipping | lr | num_tokens so far, a prompt counted once. eval_*: on held-out pairs;
          eval_score: mean of --score.
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

DEMO = {"model": "demo/model", "data": "demo/pairs.jsonl", "eval_data": "demo/pairs_test.jsonl",
        "score": "demo/score.py:success"}
TODAY = datetime(2026, 1, 1)  # "today" in chat templates, which call strftime_now(): the same rows every day
PINNED = """{% macro strftime_now(format) %}{% for part in format.split("%") %}{% set n = 2 if part[:1] == "-" else 1 %}
{{ part if loop.first else TABLE.get(part[:n], "%" ~ part[:n]) ~ part[n:] }}{% endfor %}{% endmacro %}
""".replace("TABLE", str({code: TODAY.strftime(f"%{code}") for x in ascii_letters for code in (x, f"-{x}")}))
METRICS, SAMPLES, CHECKPOINT = "metrics.jsonl", "samples.jsonl", "checkpoint.safetensors"
SMALL = 2**28  # bytes that any data file may unpack to
Loss = Literal["sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
               "apo_zero", "apo_down", "discopop", "aot", "aot_unpaired", "rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl", "simpo",
               "sft"]
WHOLE_BATCH = {"aot", "aot_unpaired"}  # losses that see more than one pair at a time


@dataclass
class Args:
    model: str | None = None  # policy: checkpoint folder or hub name; None: the demo's model and data
    data: str | None = None  # pairs: .jsonl .json .csv .parquet, or hub NAME[[:CONFIG]:SPLIT]
    eval_data: str | None = None  # held-out pairs, same formats; None: eval_size prompts split off data
    eval_size: int = 128  # prompts held out of data if there is no eval_data; at most a tenth of them
    chat_template_kwargs: str = "{}"  # JSON for the template: {"enable_thinking": false}; a column of this name wins
    out: str = "out/dpo"  # folder for the model, the cache, checkpoint.safetensors, metrics.jsonl, samples.jsonl

    ref: Literal["cache", "swap", "live", "none"] = "cache"  # cached log-probs, weights on the CPU, a 2nd model, or 0
    ref_model: str | None = None  # reference: checkpoint folder or hub name; None: same as --model
    ref_cache: str | None = None  # file of reference log-probs, shared by runs; None: in the folder --out
    sync_reference: int | None = None  # update the reference every so many steps (TR-DPO); needs --ref swap
    sync_mix: float = 1.0  # weight of the policy in each sync; 1 copies it
    humanline: tuple[float, float] | None = None  # clamp token log-ratios (e.g. -1 1.5), sync every step

    lora_r: int | None = None  # train a LoRA adapter of this rank instead of all weights
    lora_alpha: float | None = None  # LoRA's scale is alpha / r; None: 2 r
    lora_dropout: float = 0.0  # in the adapter while training; its masks change with --tokens_per_forward
    lora_target: str = "all-linear"  # layer names, comma-separated
    merge: bool = False  # save the whole model, with the adapter merged

    loss: tuple[Loss, ...] = ("sigmoid",)  # sigmoid is DPO; all are in preference_loss; several are summed
    loss_weights: tuple[float, ...] = ()  # one per loss; empty: all 1
    beta: float = 0.1  # strength of the KL penalty; length-normalized losses need more: sigmoid_norm 5, simpo 2
    label_smoothing: float = 0.0  # assumed fraction of flipped labels, for sigmoid (cDPO), robust, exo_pair and aot
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"  # f-DPO's, in losses of the margin
    alpha: float = 0.5  # of divergence alpha
    ld_alpha: float = 1.0  # LD-DPO: weight of tokens beyond the length of the pair's shorter answer
    simpo_gamma: float = 0.5  # simpo's target margin
    rpo_eta: float = 1.0  # rpo: scales the data's reward differences

    steps: int | None = None  # optimizer steps; None: from epochs; 0: only fill the cache and evaluate
    epochs: float = 1.0  # passes over the data
    batch_size: int = 32  # pairs per optimizer step
    lr: float | None = None  # peak learning rate; None: 1e-6, in the demo 2e-4
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # after the warmup
    warmup: float = 0.1  # fraction of steps in which lr rises
    weight_decay: float = 0.0  # AdamW's
    max_grad_norm: float = 1.0  # clip the gradient norm to this
    max_length: int = 1024  # tokens of prompt + answer; longer rows are dropped and counted
    truncate: bool = False  # instead cut string prompts at their beginning

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of forwards (auto: bfloat16 on CUDA); weights are float32
    save_dtype: Literal["float32", "bfloat16"] = "float32"  # of the saved model; the last eval_* measure it
    parallel: Literal["fsdp", "ddp"] = "fsdp"  # under torchrun: weights split over the processes, or a copy in each
    tokens_per_forward: int = 16384  # memory and speed only, never the result
    gradient_checkpointing: bool = False  # memory and speed only, never the result
    seed: int = 0  # of data order, held-out split and samples

    save_every: int = 100  # steps between checkpoints, from which a run resumes
    eval_every: int | None = None  # steps between evaluations; None: before and after only
    samples: int = 64  # held-out prompts to sample before and after training
    max_new_tokens: int = 128  # per such answer
    score: str | None = None  # FILE.py:FUNCTION(prompts, completions, **columns) -> floats, of these answers
    show_data: bool = False  # print one example, trained tokens in [], and exit
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, logging, set_seed  # noqa
from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: E402
from typeguard import CollectionCheckStrategy, check_type  # noqa: E402  comes with tyro
from refcache import (  # noqa: E402
    BadInput, ReferenceCache, Swap, all_gather, all_reduce, autocast, base_model, check_agreement, checkpoint_digest,
    completion_logprobs, context_length, eval_mode, full_tensor, log_ratios, micro_batches, one_line, out_of_memory,
    part_of, processes, reference_logprobs, shard, share_prompts, shares_prompts, to_device, tokenizer_digest)

# ---- The loss -------------------------------------------------------------------------------------------------------

class Batch(NamedTuple):
    """Log-probs (summed over tokens) and lengths of B pairs, (B,) each."""
    logp_w: torch.Tensor  # log π(y_w|x)
    logp_l: torch.Tensor
    ratio_w: torch.Tensor  # log π(y_w|x) − log π_ref(y_w|x)
    ratio_l: torch.Tensor
    len_w: torch.Tensor  # |y_w| in tokens
    len_l: torch.Tensor
    score_w: torch.Tensor  # the data's chosen_reward, else 0
    score_l: torch.Tensor
    unclamped: torch.Tensor  # share of the tokens that are not clamped


def preference_loss(loss: str, batch: Batch, args: Args) -> torch.Tensor:
    """The loss of every pair, (B,), float32."""
    logp_w, logp_l, ratio_w, ratio_l, len_w, len_l, score_w, score_l, *_ = batch
    beta, eps, gamma = args.beta, args.label_smoothing, args.simpo_gamma
    log_sigma, sigma = torch.nn.functional.logsigmoid, torch.sigmoid
    f_prime = {  # f-DPO, arXiv:2309.16240, table 1: f'(u) at u = π/π_ref, up to a constant
        "reverse_kl": lambda ratio: ratio, "js": log_sigma,
        "forward_kl": lambda ratio: -torch.exp((-ratio).clamp(max=88)),
        "alpha": lambda ratio: -torch.exp((-args.alpha * ratio).clamp(max=88)) / args.alpha,
    }[args.divergence]
    margin = beta * (f_prime(ratio_w) - f_prime(ratio_l))  # the argument of σ in equation 7 (f_prime is the identity)
    delta = args.rpo_eta * (score_w - score_l)  # of the data's rewards

    def cdpo(x): return -(1 - eps) * log_sigma(x) - eps * log_sigma(-x)
    def kl(x, log_q, log_not_q): return sigma(x) * (log_sigma(x) - log_q) + sigma(-x) * (log_sigma(-x) - log_not_q)
    def sort(x): return x.sort().values

    match loss:
        case "sigmoid": return cdpo(margin)  # DPO, equation 7: −log σ(margin); label smoothing makes it cDPO
        case "hinge": return torch.relu(1 - margin)  # SLiC, arXiv:2305.10425; RSO, arXiv:2309.06657
        case "ipo": return (ratio_w / len_w - ratio_l / len_l - 1 / (2 * beta)) ** 2  # arXiv:2310.12036 (17), per token
        case "sigmoid_norm": return -log_sigma(beta * (ratio_w / len_w - ratio_l / len_l))  # arXiv:2411.15124 (6)
        case "robust":  # arXiv:2403.00409
            return (-(1 - eps) * log_sigma(margin) + eps * log_sigma(-margin)) / (1 - 2 * eps)
        case "exo_pair": return kl(margin, math.log(1 - eps), math.log(eps))  # arXiv:2402.00856 (16)
        case "nca_pair":  # arXiv:2402.05369
            return -log_sigma(beta * ratio_w) - 0.5 * log_sigma(-beta * ratio_w) - 0.5 * log_sigma(-beta * ratio_l)
        case "bco_pair": return -log_sigma(beta * ratio_w) - log_sigma(-beta * ratio_l)  # arXiv:2404.04656, not shifted
        case "sppo_hard": return (ratio_w - 0.5 / beta) ** 2 + (ratio_l + 0.5 / beta) ** 2  # arXiv:2405.00675
        case "apo_zero": return 1 - sigma(beta * ratio_w) + sigma(beta * ratio_l)  # arXiv:2408.06266
        case "apo_down": return sigma(beta * ratio_w) + 1 - sigma(margin)  # same paper
        case "discopop":  # arXiv:2406.08414; the product with exp(−margin) is taken in logarithms: 0 · inf is NaN
            return -sigma(-margin / 0.05) * log_sigma(margin) + torch.exp(log_sigma(margin / 0.05) - margin)
        case "aot": return cdpo(beta * (sort(logp_w - logp_l) - sort((logp_w - ratio_w) - (logp_l - ratio_l))))
        case "aot_unpaired": return cdpo(beta * (sort(ratio_w) - sort(ratio_l)))  # both arXiv:2406.05882: quantiles
        case "rpo_sq": return (margin - delta) ** 2  # RPO as NeMo-Aligner has it, after Nemotron-4, arXiv:2406.11704
        case "rpo_bwd_kl": return kl(delta, log_sigma(margin), log_sigma(-margin))
        case "rpo_fwd_kl": return kl(margin, log_sigma(delta), log_sigma(-delta))
        case "simpo": return -log_sigma(beta * (logp_w / len_w - logp_l / len_l) - gamma)  # arXiv:2405.14734 (6)
        case "sft": return -logp_w / len_w  # a term to add to others
    raise BadInput(f"there is no loss {loss!r}")


def objective(batch: Batch, args: Args) -> torch.Tensor:  # (B,)
    weights = args.loss_weights or [1.0] * len(args.loss)
    return sum(weight * preference_loss(loss, batch, args) for loss, weight in zip(args.loss, weights))


def metrics(batch: Batch, args: Args) -> dict[str, float]:
    len_w, len_l = (batch.len_w, batch.len_l) if "simpo" in args.loss else (1, 1)  # its paper's reward is per token
    ratio_w, ratio_l = batch.ratio_w / len_w, batch.ratio_l / len_l
    difference = ratio_w - ratio_l
    accuracy = torch.where(difference.abs() < 1e-4, 0.5, (difference > 0).float())  # ties, up to rounding: 1/2
    values = {"loss": objective(batch, args), "rewards/chosen": args.beta * ratio_w,
              "rewards/rejected": args.beta * ratio_l, "rewards/margins": args.beta * difference,
              "rewards/accuracies": accuracy, "logps/chosen": batch.logp_w, "logps/rejected": batch.logp_l}
    values |= {"humanline/unclamped": batch.unclamped} if args.humanline else {}
    return {name: value.mean().item() for name, value in values.items()}


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


# ---- Pairs: the same in dpo.py and kto.py ---------------------------------------------------------------------------

def parse_row(row: dict, where: str, names=("chosen", "rejected")):
    """A row of the file -> its prompt and the answers in these columns, as strings or as lists of messages."""
    answers = [text_of(row, name, where) for name in names]
    refuse(answers[1:] == answers[:1], "chosen equals rejected", Skip)
    if "prompt" in row or len(names) == 1:
        prompt = text_of(row, "prompt", where)
        if isinstance(prompt, str) and isinstance(answers[0], list):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list) and all(y[:len(prompt)] == prompt for y in answers):  # whole conversations
            answers = [y[len(prompt):] for y in answers]
        return prompt, answers
    end = common_prefix(answers)
    end -= isinstance(answers[0], str) and answers[0][:end].endswith(" ")  # the space belongs to the answers' tokens
    refuse(not 0 < end < min(map(len, answers)),
           "no column prompt, and chosen and rejected have no common prefix, or nothing after it", Skip)
    return answers[0][:end], [y[end:] for y in answers]


# ---- Rows -----------------------------------------------------------------------------------------------------------

class Row(NamedTuple):
    prompt: tuple[int, ...]  # token ids; (prompt, completion) is a cache key
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    score_w: float
    score_l: float
    row: dict  # as read from the file


def load_rows(source: str, tokenizer, max_length: int, args: Args) -> list[Row]:
    rows, scored = [], any(loss.startswith("rpo") for loss in args.loss)
    for prompt, (chosen, rejected), row in encode(tokenizer, source, parse_row, max_length, args):
        with refusing(f"{source}: --loss rpo_* needs numbers in the columns chosen_reward and rejected_reward"):
            scores = [float(row[name]) if scored else 0.0 for name in ("chosen_reward", "rejected_reward")]
            refuse(not all(map(math.isfinite, scores)), "one is not finite", ValueError)
        rows.append(Row(prompt, chosen, rejected, *scores, row))
    return rows


def groups(rows: list[Row]) -> list:
    return [(row.prompt, [row.chosen, row.rejected]) for row in rows]


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


# ---- Answers: the same in dpo.py and kto.py -------------------------------------------------------------------------

@torch.no_grad()
def answer(policy, tokenizer, held: list, score: Callable | None, step: int, args) -> tuple[list[dict], dict]:
    """Samples at temperature 1, as lines of samples.jsonl, and {"eval_score": their mean --score}."""
    longest, samples = context_length(policy.config) - args.max_new_tokens, []
    prompts = [*{row.prompt: row for row in held}.values()]
    rows = [row for row in prompts if len(row.prompt) <= longest][:args.samples]
    if step == 0 and len(rows) < min(args.samples, len(prompts)):
        print(f"{len(rows)} prompts are answered: the others leave no room for --max_new_tokens")
    core = base_model(policy)
    own, core.generation_config = core.generation_config, GenerationConfig()  # generate() would merge them
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    ends = sorted({end for end in (tokenizer.eos_token_id, *ends) if isinstance(end, int)})
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=args.max_new_tokens, pad_token_id=0,
                              eos_token_id=ends or None)
    batches = [rows] if rows and shares_prompts(policy) else [[row] for row in rows]  # others may attend to padding
    with (gathered(policy) as in_step, eval_mode(policy), autocast(policy, args.dtype),
          refusing(f"cannot sample from {args.model}")):
        for batch in batches:  # all processes draw the same
            ids = pad_sequence([torch.tensor(row.prompt) for row in batch], True, -1, "left").to(policy.device)
            new = core.generate(ids.clamp(min=0), attention_mask=(ids >= 0).long(), generation_config=config,
                                synced_gpus=in_step)
            for row, y in zip(batch, new[:, ids.shape[1]:].tolist()):
                y = y[:next((t for t, token in enumerate(y) if token in ends), len(y))]
                text = tokenizer.decode(y, skip_special_tokens=True)
                samples.append({"step": step, "held_out": True, "prompt": row.row["prompt"], "completion": text})
    core.generation_config = own
    if not score or not rows:
        return samples, {}
    names = dict.fromkeys(name for row in rows for name in row.row)
    columns = {name: [row.row.get(name) for row in rows] for name in names}
    columns["prompts"] = columns.pop("prompt")
    columns["completions"] = [y["completion"] if isinstance(y["prompt"], str) else
                              [{"role": "assistant", "content": y["completion"]}] for y in samples]
    with refusing(f"--score {args.score} failed"):
        scores = score(**deepcopy(columns))  # a function may change its arguments in place
        refuse(isinstance(scores, (dict, set, str, bytes)), "it must return a list of numbers", TypeError)
        scores = [None if value is None else float(value) for value in scores]
        refuse(not all(value is None or math.isfinite(value) for value in scores), "a score is not finite", ValueError)
        samples = [sample | {"score": value} for sample, value in zip(samples, scores, strict=True)]
    numbers = [value for value in scores if value is not None]
    return samples, {"eval_score": sum(numbers) / len(numbers)} if numbers else {}


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


# ---- Batches over micro-batches and processes: the same in dpo.py and kto.py ----------------------------------------

def all_rows(parts: list[tuple], n: int) -> Batch:
    """[(places, what measure() gave for these rows), ..] of every process -> the values of all n rows, detached."""
    values = torch.zeros(len(Batch._fields), n, device=parts[0][1][0].device)
    for places, batch in parts:
        values[:, places] = torch.stack([x[:len(places)].float() for x in batch])
    return Batch(*(x.to(like.dtype) for x, like in zip(all_reduce(values), parts[0][1])))


@torch.no_grad()
def measure_all(policy, rows: list[Row], known, args: Args) -> Batch:
    """measure() of any number of rows, in micro-batches, shared out over the processes. No gradient."""
    micros = micro_batches(policy, groups(rows), args.tokens_per_forward, *processes())
    parts = [(micro, measure(policy, [rows[i] for i in micro or [0]], known, args)) for micro in micros]
    return all_rows(parts, len(rows))


# ---- Training -------------------------------------------------------------------------------------------------------

def measure(policy, rows: list[Row], known, args: Args) -> Batch:
    """Computes the Batch of some rows. `known` maps (prompt, answer) to the reference's log-probs; None is 0."""
    pairs = groups(rows)
    logps = completion_logprobs(policy, pairs, args.tokens_per_forward, args.dtype)  # per pair [(|y_w|,), (|y_l|,)]
    ratios = log_ratios(logps, pairs, known, args.humanline)
    logps, ratios = (pad_sequence([y for pair in x for y in pair], True) for x in (logps, ratios))  # (2B, T)
    sizes = to_device(torch.tensor([[len(row.chosen), len(row.rejected)] for row in rows]), logps.device)  # (B, 2)
    scores = to_device(torch.tensor([[row.score_w, row.score_l] for row in rows]), logps.device)
    low, high = args.humanline or (-math.inf, math.inf)
    clamped = ((ratios <= low) | (ratios >= high)).sum(1).view(-1, 2).sum(1)  # (B,)
    shorter = sizes.min(dim=1, keepdim=True).values.repeat_interleave(2, 0)  # (2B, 1); LD-DPO, arXiv:2409.06411
    weights = torch.where(torch.arange(logps.shape[1], device=logps.device) < shorter, 1.0, args.ld_alpha)  # (2B, T)
    logps, ratios = ((weights * x).sum(1).view(-1, 2) for x in (logps, ratios))  # (B, 2)
    columns = torch.cat([logps, ratios, sizes, scores], dim=1).unbind(1)
    return Batch(*columns, unclamped=1 - clamped / sizes.sum(1))


def backward(policy, rows: list[Row], known, args: Args) -> Batch:
    """Adds the gradient of the batch's mean loss, one micro-batch after the other. Returns the batch, detached."""
    micros, parts, others = micro_batches(policy, groups(rows), args.tokens_per_forward, *processes()), [], None
    if len(micros) * processes()[1] > 1 and WHOLE_BATCH.intersection(args.loss):
        others = measure_all(policy, rows, known, args)  # the other micro-batches enter the loss as constants
    for micro in micros:
        places = micro or [0]  # an empty micro-batch: FSDP needs equally many forwards in all processes
        batch = measure(policy, [rows[i] for i in places], known, args)
        index = to_device(torch.tensor(places), policy.device)
        seen = Batch(*(x.index_copy(0, index, y) for x, y in zip(others, batch))) if others else batch
        loss = objective(seen, args).sum() / len(rows)
        (loss * bool(micro)).backward()
        parts.append((micro, Batch(*(x.detach() for x in batch))))
    return all_rows(parts, len(rows))


@torch.no_grad()
def evaluate(policy, rows: list[Row], reference, args: Args) -> dict[str, float]:
    known = reference_logprobs(reference, groups(rows), args.tokens_per_forward, args.dtype)
    with eval_mode(policy):
        return {f"eval_{name}": value for name, value in metrics(measure_all(policy, rows, known, args), args).items()}


def check(args: Args):
    losses, smooth = set(args.loss), {"sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"}
    rpo = {"rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl"}
    of_margin = rpo | {"sigmoid", "hinge", "robust", "exo_pair", "apo_down", "discopop"}
    refuse_unused(args, {
        "ref_cache": ("--ref cache", args.ref == "cache"), "humanline": ("--ref swap", args.ref == "swap"),
        "label_smoothing": (f"--loss {', '.join(sorted(smooth))}", losses & smooth),
        "divergence": (f"--loss {', '.join(sorted(of_margin))}", losses & of_margin),
        "alpha": ("--divergence alpha", args.divergence == "alpha"), "rpo_eta": ("--loss rpo_*", losses & rpo),
        "simpo_gamma": ("--loss simpo", "simpo" in losses)})
    wrong = len(args.loss_weights) not in (0, len(args.loss)) or args.loss_weights and not any(args.loss_weights)
    refuse(not losses or wrong, "--loss_weights: one number per --loss, not all of them 0")
    refuse(not args.beta, "--beta must be above 0")
    asked = args.ref in ("swap", "live") or args.ref_cache or args.ref_model != args.model
    refuse(asked and losses <= {"simpo", "sft"}, "this --loss has no reference: leave out --ref, --ref_*")
    own, cache = (Path(os.path.realpath(path)) for path in (args.out, args.ref_cache or "reference_logprobs.pkl"))
    other = cache.name in (METRICS, SAMPLES, CHECKPOINT, "args.json", ".run", ".run.lock")
    other = other or {own / "model", own / ".model", own / ".checkpoint"} & {cache, *cache.parents}
    refuse(other, f"--ref_cache {args.ref_cache} is the name of another output: choose another")
    refuse(args.humanline and "aot" in losses, "--humanline clamps log-ratios, --loss aot has none: use aot_unpaired")
    low, high = args.humanline or (-1, 1)
    wrong = not low < 0 < high or any(1e30 < abs(x) < math.inf for x in (low, high))  # float32 cannot hold them
    refuse(wrong, "--humanline: first below 0, second above")
    refuse(not args.label_smoothing < 0.5, "--label_smoothing must be below 0.5")
    refuse("exo_pair" in losses and not args.label_smoothing, "--loss exo_pair needs --label_smoothing, say 0.001")


def main(args: Args) -> list[dict]:
    """Trains. Returns the lines of metrics.jsonl, one dict per step."""
    args = resolve_args(args)
    check(args)
    args = replace(args, ref="none") if set(args.loss) <= {"simpo", "sft"} else args  # they have no reference
    began, device, out = time.monotonic(), init_processes(), Path(args.out).absolute()  # a score may call chdir
    folders = {name: find_folder(vars(args)[name]) for name in ("model", "ref_model")}
    score = load_function(args.score) if args.score else None
    tokenizer, longest = load_tokenizer(folders["model"])
    compare_tokenizers(tokenizer, folders)
    max_length = min(args.max_length, longest)
    train, held = (load_rows(file, tokenizer, max_length, args) if file else [] for file in (args.data, args.eval_data))
    if not args.eval_data:
        train, held = hold_out(train, args.eval_size, args.seed)
    print(f"{len(train)} rows to train on, {len(held)} held out")
    if args.show_data:
        for y in (train[0].chosen, train[0].rejected):
            print(tokenizer.decode(train[0].prompt), *(f"[{tokenizer.decode([token])}]" for token in y), sep="")
        return []
    batch_size = min(args.batch_size, len(train))
    steps = math.ceil(args.epochs * len(train) / batch_size) if args.steps is None else args.steps
    with lock_folder(out, [*folders.values(), args.data, args.eval_data]), interrupt() as signals:
        identity = identify(args, [*train, None, *held], folders) | {"steps of --warmup": round(args.warmup * steps)}
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

        # the reference first: its model is freed before the policy is loaded, so memory never holds both
        reference = None
        if args.ref == "cache":
            reference = ReferenceCache(reference=identity["weights of --ref_model"],
                                       tokenizer=tokenizer_digest(tokenizer), dtype=args.dtype)
            path = args.ref_cache or f"{args.out}/reference_logprobs.pkl"
            scored = reference.fill(lambda: load_model(folders["ref_model"], device, args), groups(train + held),
                                    args.tokens_per_forward, args.dtype, path)
            print(f"reference: {scored} completions scored, the others known from {path}")
        set_seed(step_seed(args.seed, 0))  # for a new adapter
        policy = load_model(folders["model"], device, args, trains=True)
        if args.ref == "live":
            reference = nullcontext(load_model(folders["ref_model"], device, args))
        if args.ref == "swap":  # in a LoRA run it is the adapter alone: the base comes with the policy
            other = folders["ref_model"] != folders["model"]
            reference = Swap(policy, load_model(folders["ref_model"], "cpu", args) if other else None)
        trained = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=args.weight_decay, fused=True)
        changing = dict(policy=policy, optimizer=optimizer)  # what a checkpoint holds
        changing |= {"reference": reference} if args.sync_reference or args.humanline else {}
        restore(out, state, **changing)
        done, saved, pending = state["step"], state["step"], state["pending"]
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: lr_factor(state["step"] + n + 1, steps, args.warmup, args.schedule))
        # to save memory, keep only the log-probs that this process needs; beyond 4 epochs these are nearly all
        if args.ref == "cache" and processes()[1] > 1 and steps * batch_size < 4 * len(train):
            batches = [held, *(batch_rows(step, train, batch_size, args.seed) for step in range(done + 1, steps + 1))]
            reference.keep_share(policy, map(groups, batches), args.tokens_per_forward)
        log = Log(out, args.tensorboard)

        def finish_step(values: dict, answers: list[dict]):
            """Evaluates the policy if that is due, and writes the log line of a step whose update is done."""
            step, last = values["step"], values["step"] == steps
            set_seed(step_seed(args.seed, step))
            if last and args.save_dtype == "bfloat16":
                if held:
                    tqdm.write(f"before rounding to bfloat16: {evaluate(policy, held, reference, args)}")
                for p in trained:  # what is evaluated is what is saved
                    p.data.copy_(p.data.bfloat16())
            if last or step == 0:
                answers, scored = answer(policy, tokenizer, held, score, step, args)
                values |= scored
            if held and (last or step % (args.eval_every or steps) == 0):
                values |= evaluate(policy, held, reference, args)
                held_out = [f"{name} {value:.3f}" for name, value in values.items() if name.startswith("eval_")]
                tqdm.write(f"step {step}: {', '.join(held_out)}")
            log.write(values, answers)

        if pending:  # the first evaluation, or one that failed after its step's update was saved
            finish_step(*pending)
        if steps == 0:
            print("--steps 0: nothing is trained; a filled cache can serve other runs")
            return log.history
        tokens, known = log.history[-1].get("num_tokens", 0), None
        window = 1 if args.humanline or args.ref in ("cache", "none") else args.sync_reference or 16  # steps per swap
        bar = tqdm(range(done + 1, steps + 1), desc="train", initial=done, total=steps)
        try:
            for step in bar:
                tick = time.monotonic()
                set_seed(step_seed(args.seed, step))  # a resumed run needs no saved random state
                rows = batch_rows(step, train, batch_size, args.seed)
                first = step - (step - 1) % window
                if known is None or step == first:
                    window_steps = range(first, min(first + window, steps + 1))
                    ahead = train  # all rows, or those of fewer steps than an epoch has
                    if len(window_steps) * batch_size < len(train):
                        ahead = [row for n in window_steps for row in batch_rows(n, train, batch_size, args.seed)]
                    known = reference_logprobs(reference, groups(ahead), args.tokens_per_forward, args.dtype)
                batch = backward(policy, rows, known, args)
                grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                tokens += sum(len(row.prompt) + len(row.chosen) + len(row.rejected) for row in rows)
                values = {"step": step, **metrics(batch, args), "grad_norm": full_tensor(grad_norm).item(),
                          "lr": scheduler.get_last_lr()[0], "num_tokens": tokens}
                stop_if_not_finite(values)
                if step == 1 and reference is not None and not args.lora_dropout and args.ref_model == args.model:
                    check_agreement(torch.cat([batch.ratio_w / batch.len_w, batch.ratio_l / batch.len_l]), args.dtype)
                done = None  # no checkpoint between the update and its log line
                if args.humanline:
                    reference.sync()  # before the update, as HALOs does
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if args.sync_reference and step % args.sync_reference == 0:
                    reference.sync(args.sync_mix)  # after it, as in TR-DPO, arXiv:2404.09656
                done, pending = step, (values, [])
                finish_step(*pending)
                pending = ()
                speed = (tokens - log.history[-2].get("num_tokens", 0)) / (time.monotonic() - tick)
                bar.set_postfix({"loss": values["loss"], "accuracy": values["rewards/accuracies"], "tok/s": int(speed)})
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
    report(log)
    print(f"\n{steps} steps of {batch_size} pairs in {time.monotonic() - began:.0f} s; the model is in {out / 'model'}")
    return log.history


if __name__ == "__main__":
    command_line(ARGS)
