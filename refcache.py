"""Log-probs of completions, and the frozen reference model: cached, or waiting on the CPU.

    ReferenceCache                       its log-probs: computed once, saved, shared by later runs
    Swap                                 its weights on the CPU, for new completions
    completion_logprobs(model, groups)   log π(token | everything before it), for each completion token

A group is `(prompt_ids, [completion_ids, ...])`; a completion includes its EOS. Policy and reference go
through one function, so they agree before the first update: margin 0, loss ln 2, KL 0.

Shapes: T tokens in a forward, N completion tokens, D head size, H hidden size, V vocabulary.
"""
import gc
import hashlib
import io
import json
import math
import os
import pickle
import re
import sys
import time
import warnings
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock, Timeout  # comes with torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

Groups = list[tuple[tuple[int, ...], list[tuple[int, ...]]]]
Ragged = list[list[torch.Tensor]]  # for each group, for each completion: (len(completion),)


class BadInput(ValueError):
    """Wrong usage, data or files. One sentence: where, what is wrong, what to do."""


# ---- The cache of the reference's log-probs --------------------------

class ReferenceCache(Mapping):
    """cache[prompt_ids, completion_ids]: float32 log-probs of a completion's tokens under a frozen reference.
    `header` says what they belong to: reference=checkpoint_digest(folder), dtype="float32". A file with
    another header is refused; only `name` may differ."""

    def __init__(self, **header: str):
        self.header = {"format": "5", **header}
        self.table = {}  # (prompt, completion) -> log-probs, all as bytes: of uint32, uint32 and float32

    def __len__(self):
        return len(self.table)

    def __iter__(self):
        for prompt, completion in self.table:
            yield tuple(array("I", prompt)), tuple(array("I", completion))

    def __getitem__(self, key):
        prompt, completion = key
        return np.frombuffer(self.table[bytes_of(prompt), bytes_of(completion)], np.float32)

    def fill(self, load_model, groups: Groups, tokens_per_forward=16384, path=None):
        """Computes what is neither here nor in the file at `path`, and saves it there. `load_model()` is
        called only if something is missing, and its model is freed."""
        if path and Path(path).exists():
            self.load(path)
        missing = self.missing(groups)
        n_missing = sum(len(completions) for _, completions in missing)
        print(f"reference log-probs: {len(self)} answers are in the cache, {n_missing} are computed now")

        if len(set(all_gather(count_tokens(missing)))) > 1:  # the processes divide what is missing
            raise BadInput(f"the processes have different caches: start again, with one {path} for all")
        if missing:
            model = load_model()
            self.compute(model, missing, tokens_per_forward, path)
            del model  # the caller keeps none either, so its memory is free before the policy is loaded
            gc.collect()
            torch.cuda.empty_cache()

    def missing(self, groups: Groups) -> Groups:
        """What is not in the table, all completions of a prompt together and each once."""
        missing = {}  # prompt -> {completion: None}
        for prompt, completions in groups:
            for completion in completions:
                if (bytes_of(prompt), bytes_of(completion)) not in self.table:
                    missing.setdefault(tuple(prompt), {})[tuple(completion)] = None
        return [(prompt, list(completions)) for prompt, completions in missing.items()]

    @torch.no_grad()
    def compute(self, model, groups: Groups, tokens_per_forward=16384, path=None):
        """Adds the log-probs of these groups, which the processes divide. Saves to `path` now and then."""
        model.eval()  # dropout would add noise

        # A group that is too long for a forward is divided. Without shared prompts each completion is a row.
        is_shared = enable_shared_prompts(model)
        parts = []
        for prompt, completions in groups:
            budget = tokens_per_forward - len(prompt) if is_shared else 0
            for indices in pack(list(map(len, completions)), budget):
                parts.append((prompt, [completions[i] for i in sorted(indices)]))

        # The longest come first, so that a pass that needs too much memory fails at once.
        parts.sort(key=lambda part: -count_tokens([part]))
        n_tokens = count_tokens(parts)
        batches = micro_batches(model, parts, tokens_per_forward)
        next_save = 0.0  # on the clock of the first process, which alone saves
        with progress_bar(desc="reference", total=n_tokens, unit="tok", unit_scale=True, delay=1) as progress:
            for n, (indices, n_used) in enumerate(batches, start=1):
                batch = [parts[i] for i in indices]
                for entries in all_gather(score(model, batch, n_used)):
                    self.table |= entries
                progress.update(count_tokens(batch) * process_count())

                # A save writes the whole table. So 20 times the time that one took comes before the next.
                begin = time.monotonic()
                if path and is_first_process() and (begin > next_save or n == len(batches)):
                    self.save(path)
                    next_save = time.monotonic() + 20 * (time.monotonic() - begin)

    def save(self, path):
        """Writes the header (a line of JSON) and the table (a pickle). Keeps what another job saved."""
        with lock(path):
            if Path(path).exists():
                self.load(path)
            table = pickle.dumps(self.table, protocol=4)
            header = json.dumps(self.header | {"sha256": hashlib.sha256(table).hexdigest()})
            write_whole(path, [header.encode(), b"\n", table])

    def load(self, path):
        """Adds a file's entries. Executes no code. Raises BadInput if it is damaged or has another header."""
        if set(self.header) == {"format"}:
            raise BadInput(f"{path} may be of any model: name yours, ReferenceCache(reference=..)")
        first_line, _, pickled = Path(path).read_bytes().partition(b"\n")
        if b'"sha256"' not in first_line:
            raise BadInput(f"{path} is no cache file: name another")
        try:
            header = json.loads(first_line)
            is_other = header.get("reference") != self.header.get("reference")
            for field, mine in self.header.items():  # the name first, if there is one
                if header.get(field) != mine and (field != "name" or is_other):
                    raise BadInput(f"it was made with {field} {header.get(field)!r}, not {mine!r}")

            if hashlib.sha256(pickled).hexdigest() != header["sha256"]:
                raise BadInput("its checksum does not match")
            table = PlainUnpickler(io.BytesIO(pickled)).load()
        except Exception as error:  # any error of a damaged or hostile file
            raise BadInput(f"{path} cannot be used, {error}: name another, or delete it") from None
        self.table |= table  # the job that saved first decides, so a resume finds the same numbers


def score(model, groups: Groups, n_used: int) -> dict:
    """The log-probs of the first n_used groups, as entries of a cache's table. One forward computes all."""
    logprobs = torch.cat(list(chain(*completion_logprobs(model, groups)))).cpu()  # one transfer
    if not logprobs.isfinite().all():
        raise BadInput("the reference gives a log-prob that is not finite: its checkpoint is damaged")

    entries = {}
    for (prompt, completions), group in zip(groups[:n_used], ragged(logprobs, groups)):
        prompt = bytes_of(prompt)  # one object for all completions, which pickle writes only once
        for completion, values in zip(completions, group):
            entries[prompt, bytes_of(completion)] = values.numpy().tobytes()
    return entries


class PlainUnpickler(pickle.Unpickler):
    """Unpickles dicts and bytes. A pickle executes code only through names, and this finds no name."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def bytes_of(ids) -> bytes:
    return array("I", ids).tobytes()  # 4 bytes per token, where a tuple of ints takes 36


def lock(path, seconds=10):
    """Holds the lock of a file for a `with` block. Says so if it has to wait longer than these seconds."""
    file_lock = FileLock(f"{os.path.realpath(path)}.lock")
    try:
        return file_lock.acquire(timeout=seconds)
    except Timeout:
        tqdm.write(f"{path}: waiting for another process, which holds {file_lock.lock_file}")
        return file_lock.acquire()


def write_whole(path, parts):
    """Writes a file of these parts, each of them bytes, atomically, even across a power cut."""
    path = Path(os.path.realpath(path))  # a symlink stays, its target is replaced
    partial_file = path.with_name(f".{path.name}.partial")
    with open(partial_file, "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial_file, path)


def reference_logprobs(reference, groups: Groups, tokens_per_forward=16384):
    """log π_ref of these completions, as a mapping. A ReferenceCache or None is returned as it is; any other
    `reference` is a context manager that yields a model, such as a Swap."""
    if isinstance(reference, ReferenceCache | None):
        return reference
    cache = ReferenceCache()
    with reference as model:
        cache.compute(model, cache.missing(groups), tokens_per_forward)
    return cache


def checkpoint_digest(name: str) -> str:
    """A SHA-256 of the config and the safetensors of a folder or hub name, and of an adapter's base."""
    folder = Path(name)
    if not folder.is_dir():  # a name of the hub
        folder = Path(snapshot_download(
            name, allow_patterns=["*.json", "model*.safetensors", "adapter_model*.safetensors"]))

    kind = "adapter_" if (folder / "adapter_config.json").exists() else ""
    config = json.loads((folder / f"{kind}config.json").read_text())
    config |= {"transformers_version": None, "_name_or_path": None}  # no effect on log-probs
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())

    files = [folder / f"{kind}model.safetensors"]
    index = folder / f"{kind}model.safetensors.index.json"
    if index.exists() and not files[0].exists():
        shards = json.loads(index.read_text())["weight_map"].values()
        files = [folder / shard for shard in sorted(set(shards))]
    for file in files:
        try:
            safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:  # also a pointer of git-lfs, or half of a download
            raise BadInput(f"{file} is not a whole safetensors file: download it again ({error})") from None
        digest.update(np.memmap(file, np.uint8, "r"))

    if kind:
        digest.update(checkpoint_digest(config["base_model_name_or_path"]).encode())
    return digest.hexdigest()[:32]


# ---- A reference whose weights wait on the CPU -----------------------

class Swap:
    """The policy as it is now, in CPU memory, as the reference. `with swap as model:` exchanges it with the
    policy until its end. Only weights that train are held: in a LoRA run, those of the adapter."""

    def __init__(self, policy):
        self.policy = policy
        self.weights = []  # pairs: the policy's tensor, on its device, and the reference's values, on the CPU
        for weight in policy.parameters():
            if weight.requires_grad:
                mine = weight.detach()
                mine = mine.to_local() if isinstance(mine, DTensor) else mine  # this process's shard
                theirs = torch.empty_like(mine, device="cpu", pin_memory=mine.is_cuda)
                self.weights.append((mine, theirs.copy_(mine)))

    def __enter__(self):
        self.exchange()
        return self.policy

    def __exit__(self, *_):
        self.exchange()

    def exchange(self):
        """Goes weight by weight, so that no third copy of the model is needed."""
        for mine, theirs in self.weights:
            before = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(before)


# ---- Log-probs of completions ----------------------------------------

HEAD_BYTES = 2**26  # of the float32 logits of one chunk on a CPU: 110 completion tokens at V = 151,936


def completion_logprobs(model, groups: Groups, temperature=1.0) -> Ragged:
    """log π(token | prompt and the tokens before it) in nats: for each group, for each completion, float32
    (len(completion),). It is differentiable. All groups are computed in one forward: micro_batches divides a
    larger batch. `temperature` divides the logits, as in sampling. Raises BadInput for an empty prompt or
    completion, a row that is longer than the context, and a model whose log-probs would not be exact."""
    core = unwrap_model(model)
    context = context_length(core.config)
    for prompt, completions in groups:
        if not prompt or not completions or not all(completions):
            raise BadInput("a prompt or completion without tokens: leave it out")
        length = len(prompt) + max(map(len, completions))
        if length > context:
            raise BadInput(f"a row of {length} tokens: the model has {context} positions")

    lay_out = lay_out_shared if enable_shared_prompts(model) else lay_out_padded
    return forward(core, groups, lay_out, temperature)


def unwrap_model(model):
    """The Hugging Face model itself, also under a peft wrapper: adapters lie inside the model's layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def context_length(config) -> float:
    """Tokens of the longest row whose log-probs do not depend on what else is in the batch."""
    config = config.get_text_config()
    names = ("max_position_embeddings", "index_topk", "keep_window_size")  # longer rows are sparse
    bounds = [getattr(config, name, None) for name in names]

    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # of the model, or of each type of layer
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
            bounds.append(rope.get("original_max_position_embeddings"))  # a longer row changes all angles
    return min(filter(None, bounds), default=math.inf)


def forward(core, groups, lay_out, temperature=1.0, **keywords) -> Ragged:
    """One forward of these groups, as lay_out_shared or lay_out_padded arranges them."""
    inputs, sources, targets = lay_out(groups, core.device)
    run = core.flat_logprobs if isinstance(core, FSDPModule) else partial(flat_logprobs, core)
    return ragged(run(inputs | keywords, sources, targets, temperature), groups)


def flat_logprobs(core, inputs, sources, targets, temperature):
    """sources, targets (N,): where each completion token is predicted, and its id -> its log-prob, (N,)."""
    decoder = core.get_decoder()
    if decoder is core or isinstance(decoder, torch.nn.Linear):  # Llama 4, ModernBERT: another is meant
        decoder = core.model
    outputs = decoder(**inputs, use_cache=False)
    hidden = outputs[0].flatten(0, 1).index_select(0, sources)  # (N, H): only positions that predict
    outputs = replace(outputs, last_hidden_state=None)  # frees the others

    def token_logprobs(hidden, targets):
        """(n, H), (n,) -> (n,)"""
        # What follows the decoder (head, bias, adapter, scale, softcap) is the model's own code. So that all
        # of it runs, and only it, the model is called with a decoder that returns these hidden states.
        decoder.forward = lambda *args, **kwargs: replace(outputs, last_hidden_state=hidden[None])
        try:
            logits = core.forward(inputs["input_ids"], use_cache=False).logits.flatten(0, 1)  # (n, V)
        finally:
            del decoder.forward  # the class's own is back
        return log_softmax_at(logits, targets, temperature)

    # All logits may be most of the memory of a step. So they are computed in chunks, and again in the
    # backward pass. On a GPU they are few, because each adds to the head's gradient, which may be bfloat16.
    budget = HEAD_BYTES * 8 if hidden.is_cuda else HEAD_BYTES
    size = max(1, budget // (4 * len(core.get_input_embeddings().weight)))
    if len(hidden) <= size:
        return token_logprobs(hidden, targets)

    logprobs = []
    for chunk in zip(hidden.split(size), targets.split(size)):
        logprobs.append(checkpoint(token_logprobs, *chunk, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(logprobs)


def log_softmax_at(logits, targets, temperature):
    """The log-probs of the targets, in float32: (n, V), (n,) -> (n,)"""
    logits = logits.float()
    if temperature != 1:  # each pass over (n, V) takes time
        logits = logits / temperature
    return -F.cross_entropy(logits, targets, reduction="none")


def count_tokens(groups) -> int:
    return sum(len(prompt) + sum(map(len, completions)) for prompt, completions in groups)


def ragged(flat, groups) -> Ragged:
    """Splits (N,) into one tensor per completion."""
    lengths = []
    for _, completions in groups:
        lengths += map(len, completions)
    parts = iter(flat.split(lengths))
    return [[next(parts) for _ in completions] for _, completions in groups]


def sum_tokens(values: Ragged):
    """Sums over the tokens of each completion: (B, k) for B groups, each of k completions."""
    sums = []
    for group in values:
        sums.append(torch.stack([tokens.sum() for tokens in group]))  # (k,)
    return torch.stack(sums)


def log_ratios(logps: Ragged, groups: Groups, ref_logps: Mapping | None) -> Ragged:
    """log π − log π_ref of each token. ref_logps[prompt, completion]: the reference's; None: all are 0."""
    if ref_logps is None:
        return logps
    theirs = []
    for prompt, completions in groups:
        theirs += [ref_logps[prompt, completion] for completion in completions]
    flat = torch.cat(list(chain(*logps)))  # (N,)
    return ragged(flat - to_device(np.concatenate(theirs), flat.device), groups)


def check_agreement(difference: float, dtype: str):
    """Checks that policy and reference agree before the first update, up to rounding. `difference` is the
    mean over answers of |log π(y|x) − log π_ref(y|x)| / |y|."""
    limit = 3e-2 if dtype == "bfloat16" else 1e-4  # in bfloat16 other batches round differently
    found = f"step 1: policy and reference differ by {difference:.1e} nats per token"
    if not difference < limit:
        raise BadInput(f"{found}, more than {limit:g}: delete the cache, if any, or try --dtype float32")
    tqdm.write(f"{found}; up to {limit:g} is rounding in {dtype}")


# ---- Micro-batches: which groups share a forward ---------------------

def micro_batches(model, groups: Groups, tokens_per_forward: int) -> list[tuple[list[int], int]]:
    """This process's forwards of at most tokens_per_forward tokens, longest first; a longer group goes alone.
    Each is a list of indices of groups, and of how many of them the results are used: all, or none where this
    process computes group 0 again only because FSDP needs equally many forwards in all processes."""
    lengths = [count_tokens([group]) for group in groups]
    is_padded = not has_shared_prompts(model)
    if is_padded:  # each completion is a row
        lengths = [len(answers) * (len(prompt) + max(map(len, answers))) for prompt, answers in groups]
    batches = divide_batches(lengths, tokens_per_forward, is_padded)
    return [(batch or [0], len(batch)) for batch in batches]


def divide_batches(lengths, budget: int, is_padded=False) -> list[list[int]]:
    """This process's part of pack(lengths, budget, is_padded). All processes get equally many batches, of
    which some may be empty. They need no communication for it."""
    ranks = process_count()
    n = math.ceil(len(pack(lengths, budget, is_padded)) / ranks) * ranks
    if ranks > 1:
        # The smallest budget that needs no more batches makes them equally full, so the processes wait less.
        budget = bisect_left(range(budget), True, key=lambda size: len(pack(lengths, size, is_padded)) <= n)

    batches = pack(lengths, budget, is_padded)
    batches += [[] for _ in range(n - len(batches))]
    return batches[process_rank()::ranks]


def pack(lengths, budget: int, is_padded=False) -> list[list[int]]:
    """Indices of items in batches of at most `budget` tokens, longest first. A longer item goes alone. With
    `is_padded` each item takes as many tokens as the longest of its batch."""
    batches = []
    room = -1  # how many tokens the last batch can still take
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = lengths[batches[-1][0]] if batches and is_padded else lengths[i]
        if size > room:
            batches.append([])
            room = budget
            size = lengths[i]
        batches[-1].append(i)
        room -= size
    return batches


# ---- Shared prompts: one flat row per forward, without padding -------

SHARED = "sdpa_shared_prompt"  # with "sdpa" in its name, transformers rejects it for models without sdpa
sdpa = AttentionInterface()["sdpa"]

# From torch 2.12 on, keys that heads share must be announced. The kernel of 2.11 takes them as they are.
GROUPED = {} if torch.__version__.startswith("2.11.") else {"enable_gqa": True}


class Spans(NamedTuple):
    """A span has the queries of one completion, the first also those of the prompt, and the keys they see."""
    keys: torch.Tensor | None  # (T_k,): the places of the keys in the row; None: the row itself
    ends: torch.Tensor  # (2, spans + 1): where queries and keys of each span begin, and the last ones end
    sizes_q: list[int]  # queries of each span, for which no one has to wait for a GPU
    sizes_k: list[int]


def to_device(values, device):
    """Copies a list, an array or a CPU tensor to a device, without waiting for the kernels of a GPU."""
    tensor = torch.as_tensor(np.asarray(values))  # of a list, NumPy is quicker
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def lay_out_shared(groups, device):
    """Groups -> the inputs of one flat row; and for each completion token, (N,) each, the place in the row
    that predicts it, and its id. For the group (p, [a, b]):

        row        p0 p1 p2 a0 a1 b0 b1
        positions   0  1  2  3  4  3  4       b continues the prompt, not a
        queries    |p0 p1 p2 a0 a1|b0 b1|     two spans
        keys       |p0 p1 p2 a0 a1|p0 p1 p2 b0 b1|
    """
    ids, positions = [], []  # (T,)
    sources, targets = [], []  # (N,)
    keys = []  # (T_k,)
    query_ends, key_ends = [0], [0]
    for prompt, completions in groups:
        before = range(len(ids), len(ids) + len(prompt))  # places of the prompt
        ids += prompt
        positions += range(len(prompt))

        for completion in completions:
            own = range(len(ids), len(ids) + len(completion))
            ids += completion
            positions += range(len(prompt), len(prompt) + len(completion))
            sources += [before[-1], *own[:-1]]  # the shift by one: the token before predicts it
            targets += completion

            keys += [*before, *own]
            query_ends.append(len(ids))
            key_ends.append(len(keys))

    ends = np.array([query_ends, key_ends], np.int32)  # (2, spans + 1)
    sizes_q, sizes_k = np.diff(ends).tolist()
    keys = to_device(keys, device) if len(ids) < len(keys) else None
    spans = Spans(keys, to_device(ends, device), sizes_q, sizes_k)
    ids, positions = to_device([ids, positions], device)
    sources, targets = to_device([sources, targets], device)

    # A mask with four dimensions reaches the layers as it is. Without a mask, transformers would take
    # restarting positions for packed sequences, and hide the prompts.
    mask = torch.ones(1, 1, 1, len(ids), dtype=torch.bool, device=device)
    inputs = dict(input_ids=ids[None], position_ids=positions[None], attention_mask=mask, spans=spans)
    return inputs, sources, targets


def lay_out_padded(groups, device):
    """The same with a row for each completion, padded on the right: exact for every causal model."""
    width = max(len(prompt) + max(map(len, completions)) for prompt, completions in groups)
    rows, sources, targets = [], [], []
    for prompt, completions in groups:
        for completion in completions:
            first = len(rows) * width + len(prompt) - 1  # the shift by one: the token before predicts it
            sources += range(first, first + len(completion))
            targets += completion
            rows.append(torch.tensor([*prompt, *completion]))

    ids = to_device(pad_sequence(rows, batch_first=True, padding_value=-1), device)
    sources, targets = to_device([sources, targets], device)
    inputs = dict(input_ids=ids.clamp(min=0), attention_mask=(ids >= 0).long())
    return inputs, sources, targets


def shared_prompt_attention(module, query, key, value, attention_mask, spans=None, windows=None,
                            sample_mask=None, sliding_window=None, **kwargs):
    """A flat row: query (1, heads, T, D), key and value (1, key heads, T, D) -> (1, T, heads, D)."""
    if spans is None:  # ordinary rows, as in generate(), or samples that continue them
        if sample_mask is not None:
            attention_mask = sample_mask(query.shape[1] // key.shape[1], query.dtype)
        if sample_mask is not None or (query.shape[2] == 1 and attention_mask is not None):
            output = attention_of_samples(query, key, value, attention_mask, **kwargs)
        else:
            output, _ = sdpa(module, query, key, value, attention_mask, **kwargs)
        # sdpa's strides for one token make a frozen linear layer read its weight again for each row.
        return output.flatten(0, 1).unflatten(0, (len(query), -1)), None

    if attention_mask is not None and attention_mask.shape[-2] > 1:  # that of lay_out_shared has one row
        raise BadInput(f"{type(module).__name__} masks more than the future, so no prompt can be shared")
    if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise BadInput(f"{type(module).__name__} has softcapped scores, attention sinks or a position bias")
    if windows is not None:  # check_exact asks for the window of each layer
        windows[module] = sliding_window

    # Each span gets the keys of its prompt and its own, side by side.
    if spans.keys is not None:
        key, value = (x.index_select(2, spans.keys) for x in (key, value))  # (1, key heads, T_k, D)

    if one_kernel_serves(query, value) and not kwargs.get("dropout"):
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (tokens, heads, D)
        window = (sliding_window - 1 if sliding_window else -1, 0)  # how far a query sees back, and ahead
        output = varlen_attn(
            query, key, value, *spans.ends, max(spans.sizes_q), max(spans.sizes_k), window_size=window,
            scale=kwargs.get("scaling"), **GROUPED)
        return output[None], None

    # On a CPU, and in float32, one ordinary attention for each span is as fast.
    queries = query.split(spans.sizes_q, dim=2)
    keys, values = (x.split(spans.sizes_k, dim=2) for x in (key, value))
    outputs = []
    for q, k, v in zip(queries, keys, values):
        n_q, n_k = q.shape[2], k.shape[2]
        window = sliding_window or n_k
        span_mask = None  # plain causal
        if 1 < n_q < n_k or window < n_k:
            span_mask = q.new_ones(1, 1, n_q, n_k, dtype=torch.bool)
            span_mask = span_mask.tril(n_k - n_q).triu(n_k - n_q - window + 1)
        outputs.append(sdpa(module, q, k, v, span_mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


def mask_of_samples(mask):
    """The keyword `sample_mask` of a forward in which S samples continue one row of a key-value cache: a mask
    (rows, 1, S, columns) bool, true where a sample sees a column. All layers use one float copy of it."""
    @cache
    def folded(heads_per_key: int, dtype):
        """As float, once for each query head of a key: (rows, 1, heads_per_key · S, columns)."""
        columns = mask.shape[-1]
        padded = F.pad(mask, (0, -columns % 8))  # sdpa on CUDA would copy rows of another stride
        floats = torch.where(padded, 0.0, -math.inf).to(dtype)
        return floats.repeat(1, 1, heads_per_key, 1)[..., :columns]
    return folded


def attention_of_samples(query, key, value, mask, scaling=None, **kwargs):
    """S samples continue one row of a key-value cache: query (B, heads, S, D) -> (B, S, heads, D). Query
    heads with the same keys become queries of one head, because sdpa would copy the keys to each head."""
    B, heads, S, D = query.shape
    query = query.reshape(B, key.shape[1], -1, D)  # (B, key heads, heads per key · S, D)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(B, heads, S, -1).transpose(1, 2)


def one_kernel_serves(query, value) -> bool:
    """Whether one varlen_attn call can serve all spans: on CUDA a loop is bound by kernel launches."""
    size = query.shape[-1]
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return (query.is_cuda and is_half and size == value.shape[-1] and size <= 256 and size % 8 == 0
            and torch.cuda.get_device_capability(query.device) >= (8, 0))  # Ampere or newer


AttentionInterface.register(SHARED, shared_prompt_attention)
AttentionMaskInterface.register(SHARED, AttentionMaskInterface()["sdpa"])


# ---- Whether completions may share their prompt: tested once per model

TESTED = WeakSet()  # models whose attention enable_shared_prompts has chosen
tell = cache(print)  # what is true of policy and reference is printed once


def enable_shared_prompts(model) -> bool:
    """Lets the completions of this model share their prompt, if that is exact. Prints the result once and
    returns it. completion_logprobs calls it. Raises BadInput if not even padded rows are exact."""
    core = unwrap_model(model)
    if core in TESTED:
        return has_shared_prompts(core)

    config = core.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    attention = (core.config._attn_implementation or "eager").replace(SHARED, "sdpa")  # SHARED: of a copy
    if getattr(config, "attn_logit_softcapping", None):
        attention = "eager"  # transformers 5.17 lets sdpa ignore the softcap

    has_begun = False
    try:
        if core._is_stateful or not layers <= {"full_attention", "sliding_attention"}:
            raise BadInput("recurrent, convolutional or chunked layers would mix completions")
        core.set_attn_implementation(SHARED)  # stays on, for the backward pass of gradient checkpointing, too
        has_begun = True
        check_exact(core, lay_out_shared)
        result = "completions share their prompt"
    except Exception as cause:  # no such keyword, no sdpa, another mask
        if has_begun and hasattr(core, "reset_iter_state"):  # of torch 2.13: after half a forward
            core.reset_iter_state()
        core.set_attn_implementation(attention)
        check_exact(core, lay_out_padded)
        result = f"padded rows: {str(cause)[:200]}"

    tell(f"{type(core).__name__.removeprefix('FSDP')}: {result}")
    TESTED.add(core)
    return has_shared_prompts(core)


def has_shared_prompts(model) -> bool:
    return unwrap_model(model).config._attn_implementation == SHARED


@torch.no_grad()
def check_exact(core, lay_out):
    """Raises BadInput if log-probs differ from those of one forward per sequence. The latter ends in the
    middle of the completion, because later tokens must change nothing."""
    config = core.config.get_text_config()
    ids = torch.linspace(1, config.vocab_size - 1, 128).long().tolist()
    prompt, completions = ids[::4], [ids[1::2], ids[2::4][:10]]  # 32, 64 and 10 tokens
    is_shared = lay_out is lay_out_shared
    windows = {}  # attention layer that shares prompts -> its window, or None
    keywords = {"windows": windows} if is_shared else {}
    (found,) = forward(core, [(prompt, completions)], lay_out, **keywords)

    if is_shared:
        # The rows here are too short to show a window, so each layer that has one must have named it.
        n_windows = len(windows) - list(windows.values()).count(None)
        n_expected = sum(DynamicCache(config=core.config).is_sliding)
        if len(windows) < config.num_hidden_layers or n_windows < n_expected:
            raise BadInput("not all layers use the attention that lets completions share a prompt")

    for completion, logprobs in zip(completions, found):
        n = len(completion) // 2
        row = torch.tensor([prompt + completion[:n]], device=core.device)
        logits = core(input_ids=row, use_cache=False).logits[0, len(prompt) - 1:-1]  # (n, V)
        expected = log_softmax_at(logits, row[0, len(prompt):], temperature=1)
        error = (logprobs[:n] - expected).abs().max().item()

        # Rounding stays below these limits; a wrong mask or position is far above.
        limit = 1e-4 if is_shared else 1e-3
        if logits.dtype != torch.float32:
            limit = 0.25
        if not error < limit:  # `not <` also catches NaN
            raise BadInput(
                f"{type(core).__name__} is not supported, other tokens change log-probs by {error:.2g} nats: "
                "no causal language model, dropout, or NaN weights; in bfloat16, try float32")


# ---- Several processes (torchrun): FSDP2 splits the weights ----------

@contextmanager
def process_group():
    """Joins the processes of torchrun, and leaves them at the end."""
    warnings.filterwarnings("ignore", "torch.distributed is")
    was_there = dist.is_initialized()
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not was_there:
        dist.init_process_group(device and "cpu:gloo,cuda:nccl", device_id=device)  # a Swap is on the CPU

    yield
    if dist.is_initialized() and not was_there:  # not after an error, when other processes may hang
        dist.destroy_process_group()


def process_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def process_count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first_process() -> bool:
    """Whether this is the process that prints and writes files."""
    return process_rank() == 0


def progress_bar(*items, **options):
    """tqdm in the first process. An inner bar leaves no line."""
    seconds = 0.1 if sys.stderr.isatty() else 30  # between two updates: in a log each of them is a line
    options |= dict(leave=None, mininterval=seconds, maxinterval=30, disable=not is_first_process())
    return tqdm(*items, **options)


def apply_fsdp(model, device: str, dtype="float32"):
    """Splits the weights over the processes (FSDP2). A single process uses it, too: with dtype "bfloat16" a
    layer computes in a bfloat16 copy, while the weights that train and the sums of gradients stay float32.
    Gradients are sums over the processes: divide a loss by the global batch size."""
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh(device, (process_count(),))
    core = unwrap_model(model)

    # The inputs of a layer are not cast. Some are float32 by intent (cos and sin of OLMo), and the reference,
    # a plain bfloat16 model, leaves them so: the policy must round alike.
    mixed = MixedPrecisionPolicy(getattr(torch, dtype), torch.float32, cast_forward_inputs=False)

    # In one process the frozen base of an adapter stays outside: FSDP2 would only copy it, layer by layer.
    is_outside = mesh.size() == 1 and model is not core
    frozen = {weight for weight in model.parameters() if is_outside and not weight.requires_grad}

    kept = names_in_float32(core)
    for name, module in reversed(list(core.named_modules())):  # the model last
        weights = [f"{name}.{weight}" for weight, _ in module.named_parameters()]
        is_exact = weights and all(map(kept.search, weights))
        if is_exact or module is core or type(module).__name__ in core._no_split_modules:
            policy = MixedPrecisionPolicy() if is_exact else mixed
            fully_shard(
                module, mesh=mesh, mp_policy=policy, ignored_params=frozen, reshard_after_forward=True)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    core.flat_logprobs = partial(flat_logprobs, core)  # called directly, decoder and head see only shards
    register_fsdp_forward_method(core, "flat_logprobs")


def names_in_float32(core) -> re.Pattern:
    """Matches names of weights, such as those of routers, that stay float32 in a bfloat16 model."""
    return re.compile("|".join(core._keep_in_fp32_modules_strict) or "$^")  # "$^" matches no name


@contextmanager
def unsharded(model):
    """Keeps whole weights on every GPU: else each generated token would gather them again."""
    parts = []  # modules, and FSDP's hooks, which would split the weights again
    for module in model.modules():
        if isinstance(module, FSDPModule):
            parts.append((module, module._forward_pre_hooks, module._forward_hooks))
            module._forward_pre_hooks, module._forward_hooks = {}, {}
            module.unshard()

    try:
        yield
    finally:
        for module, before, after in parts:
            module._forward_pre_hooks, module._forward_hooks = before, after
            module.reshard()


def barrier():
    """Waits for the other processes."""
    all_gather(None)


def all_gather(mine) -> list:
    """The list of all processes' `mine`, any Python object, by rank."""
    everyone = [mine] * process_count()
    if dist.is_initialized():
        dist.all_gather_object(everyone, mine)
    return everyone


def all_reduce(tensor):
    """The sum of this tensor over the processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def full_tensor(tensor):
    """The whole tensor, also if it is sharded; then all processes must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
