"""Log-probs of completions, and a cache of those of the frozen reference model.

    ReferenceCache                       log-probs of a frozen model: computed once, saved, shared by later runs
    completion_logprobs(model, groups)   log π(token | everything before it), for each token of each completion
    Swap                                 reference weights kept on the CPU, for new completions

A group is `(prompt_ids, [completion_ids, ...])`, tuples of token ids; a completion includes its EOS. Policy and
reference go through one function, so they agree before the first update: margin 0, loss ln 2, KL 0.

Shapes: T tokens in a forward, T_k keys of all spans, N completion tokens, D head size, H hidden size, V vocabulary.
"""
import gc
import hashlib
import inspect
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
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock  # comes with torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface

Groups = list[tuple[tuple[int, ...], list[tuple[int, ...]]]]
Ragged = list[list[torch.Tensor]]  # for each group, for each completion: (len(completion),)


class BadInput(ValueError):
    """Wrong usage, data or files. One sentence: where, what is wrong, what to do."""


def one_line(error):
    """An error message for use within another."""
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, BadInput) else f"{type(error).__name__} {text}"


# ---- The cache of the reference's log-probs --------------------------

class ReferenceCache(Mapping):
    """Token log-probs under a frozen reference: cache[prompt_ids, completion_ids] is float32, (len(completion_ids),).
    `header` holds strings that say what the log-probs belong to, such as reference=checkpoint_digest(folder),
    dtype="float32". A file with another header is refused; only `name` may differ."""

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
        logprobs = self.table[bytes_of(prompt), bytes_of(completion)]  # KeyError: not computed, call fill first
        return np.frombuffer(logprobs, np.float32)

    def fill(self, load_model, groups: Groups, tokens_per_forward=16384, path=None) -> int:
        """Computes what is neither in this cache nor in the file at `path`, and saves it there. Returns the number of
        completions computed. `load_model()` is called only if something is missing, and its model is freed."""
        if path and Path(path).exists():
            self.load(path)
        missing = self.missing(groups)
        n_missing = count_completions(missing)
        n_known = count_completions(ReferenceCache().missing(groups)) - n_missing
        print(f"reference log-probs: {n_known} answers are in {path}, {n_missing} are computed now")

        # The processes divide what is missing, so it must be the same for all of them.
        digest = hash(tuple((prompt, *completions) for prompt, completions in missing))
        if len(set(all_gather(digest))) > 1:
            raise BadInput(f"the processes have different caches: start again, or give all of them the same {path}")
        if not missing:
            return 0

        if path:
            self.save(path)  # if it cannot be written, the error comes now, not after the forwards
        model = load_model()
        try:
            self.compute(model, missing, tokens_per_forward, path)
        finally:
            del model  # the caller keeps none either, so its memory is free before the policy is loaded
            gc.collect()
            torch.cuda.empty_cache()
        return n_missing

    def missing(self, groups: Groups) -> Groups:
        """What is not in the table, all completions of a prompt together and each once."""
        missing = {}  # prompt -> {completion: None}
        for prompt, completions in groups:
            for completion in completions:
                if (bytes_of(prompt), bytes_of(completion)) not in self.table:
                    missing.setdefault(prompt, {})[completion] = None
        return [(prompt, list(completions)) for prompt, completions in missing.items()]

    @torch.no_grad()
    def compute(self, model, groups: Groups, tokens_per_forward=16384, path=None):
        """Adds the log-probs of all these groups. Saves to `path` now and then, at the end, and on an exception."""
        model.eval()  # dropout would add noise

        # A group longer than the budget is divided. Budget 0: without shared prompts each completion is a row.
        budget = tokens_per_forward if enable_shared_prompts(model) else 0
        parts = []
        for prompt, completions in groups:
            for indices in pack(list(map(len, completions)), budget - len(prompt)):
                parts.append((prompt, [completions[i] for i in sorted(indices)]))

        n_tokens = count_tokens(parts) // process_count()  # each process has about as many
        progress = progress_bar(desc="reference", total=n_tokens, unit="tok", unit_scale=True, delay=1)

        mine = {}  # the entries of this process
        save_at = time.monotonic() + 60
        try:
            # The longest batches come first, so that a pass that needs too much memory fails at once.
            for indices, _ in micro_batches(model, parts, tokens_per_forward):
                batch = [parts[i] for i in indices]
                entries = entries_of(batch, completion_logprobs(model, batch))
                self.table |= entries
                mine |= entries
                progress.update(count_tokens(batch))

                if path and time.monotonic() > save_at:
                    began = time.monotonic()
                    self.save(path)  # the whole file: a large one less often than every minute
                    save_at = time.monotonic() + max(60, 10 * (time.monotonic() - began))

            for entries in all_gather(mine):
                self.table |= entries
        finally:
            progress.close()
            if path:  # the last thing that changes the table: a resumed run will find the same numbers in the file
                self.save(path)

    def save(self, path):
        """Writes the header (a JSON line) and the table (a pickle) atomically. Keeps what another job saved."""
        with FileLock(f"{os.path.realpath(path)}.lock"):
            if Path(path).exists():  # another job may have written it
                self.load(path)

            table = pickle.dumps(self.table, protocol=4)
            header = json.dumps(self.header | {"sha256": hashlib.sha256(table).hexdigest()}) + "\n"
            write_whole(path, [header.encode(), table])

    def load(self, path):
        """Adds the entries of a file. Executes no code. Raises BadInput if it is damaged or has another header."""
        try:
            first_line, _, pickled = Path(path).read_bytes().partition(b"\n")
            header = json.loads(first_line)
            for name, mine in self.header.items():
                theirs = header.get(name)
                if theirs != mine and name != "name":
                    raise BadInput(f"it was made with {name} {theirs!r}, not {mine!r}")

            if hashlib.sha256(pickled).hexdigest() != header["sha256"]:
                raise BadInput("its checksum does not match")
            table = PlainUnpickler(io.BytesIO(pickled)).load()
        except Exception as error:  # any error of a damaged or hostile file
            raise BadInput(f"{path} cannot be used, {one_line(error)}: name another, or delete it") from None
        self.table |= table  # the job that saved first decides, so a resume finds the same numbers


class PlainUnpickler(pickle.Unpickler):
    """Unpickles plain data, such as dicts and bytes. A pickle executes code only through functions and classes, which
    it finds by name. This finds none."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def count_completions(groups) -> int:
    return sum(len(completions) for _, completions in groups)


def bytes_of(ids) -> bytes:
    return array("I", ids).tobytes()  # 4 bytes per token, where a tuple of ints takes 36


def entries_of(groups, logprobs):
    """The log-probs of these groups, as ReferenceCache.table holds them."""
    on_cpu = torch.cat(list(chain(*logprobs))).cpu()  # one transfer
    if not on_cpu.isfinite().all():
        raise BadInput("the reference gives a log-prob that is not finite: its checkpoint is damaged")

    entries = {}
    for (prompt, completions), group in zip(groups, ragged(on_cpu, groups)):
        prompt = bytes_of(prompt)  # one object for all completions, which pickle writes only once
        for completion, values in zip(completions, group):
            entries[prompt, bytes_of(completion)] = values.numpy().tobytes()
    return entries


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
    """log π_ref of these completions, as a mapping. A `reference` that is a ReferenceCache or None is returned as it
    is; any other is a context manager that yields a model, such as a Swap."""
    if isinstance(reference, ReferenceCache | None):
        return reference
    cache = ReferenceCache()
    with reference as model:
        cache.compute(model, cache.missing(groups), tokens_per_forward)
    return cache


def checkpoint_digest(name: str) -> str:
    """Identifies the weights of a folder or hub name: SHA-256 of config and safetensors, and an adapter's base."""
    folder = Path(name)
    if not folder.is_dir():  # a name of the hub
        patterns = ["*.json", "model*.safetensors", "adapter_model*.safetensors"]
        folder = Path(snapshot_download(name, allow_patterns=patterns))

    kind = "adapter_" if (folder / "adapter_config.json").exists() else ""
    config = json.loads((folder / f"{kind}config.json").read_text())
    config |= {"transformers_version": None, "_name_or_path": None}  # no effect on log-probs
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())

    files = sorted(folder.glob(f"{kind}model*.safetensors"))
    if not files:
        raise BadInput(f"{folder} holds no {kind}model*.safetensors")
    for file in files:
        try:
            safe_open(file, framework="pt")
        except SafetensorError as error:  # a pointer of git-lfs, or half of a download
            raise BadInput(f"{file} is not a whole safetensors file: download it again ({error})") from None
        digest.update(np.memmap(file, np.uint8, "r"))

    if kind:
        digest.update(checkpoint_digest(config["base_model_name_or_path"]).encode())
    return digest.hexdigest()[:32]


# ---- A reference whose weights wait on the CPU -----------------------

class Swap:
    """The reference's weights in CPU memory. `with swap as model:` exchanges them with the policy's, in place, until
    its end. Without `reference` the policy as it is now becomes the reference, and only weights that train are held:
    those of the adapter in a LoRA run. Raises BadInput if the models have different structures."""

    def __init__(self, policy, reference=None):
        if reference:
            mine, theirs = shapes_and_settings(policy), shapes_and_settings(reference)
            for name in mine | theirs:
                if mine.get(name) != theirs.get(name):
                    raise BadInput(f"the reference differs from the policy in {name}: choose live, or merge an adapter")

        self.policy = policy
        self.weights = []  # pairs: the policy's tensor, on its device, and the reference's values, on the CPU
        values = (reference or policy).state_dict()
        names = {tensor: name for name, tensor in policy.state_dict(keep_vars=True).items()}  # tied weights once
        for tensor, name in names.items():
            if reference or tensor.requires_grad:
                on_cpu = torch.empty_like(local_shard(tensor), device="cpu", pin_memory=tensor.is_cuda)
                on_cpu.copy_(local_shard(values[name]))
                self.weights.append((tensor.detach(), on_cpu))

    def __enter__(self):
        self.exchange()
        return self.policy

    def __exit__(self, *_):
        self.exchange()

    def exchange(self):
        """Goes weight by weight, so that no third copy of the model is needed."""
        for tensor, on_cpu in self.weights:
            mine = local_shard(tensor)
            before = mine.clone()
            mine.copy_(on_cpu)
            on_cpu.copy_(before)


def shapes_and_settings(model) -> dict:
    """What two models must have in common to swap weights: shapes, and settings that change log-probs."""
    no_effect = "_name_or_path|architectures|dtype|initializer_range|transformers_version|use_cache|dropout|token_id$"
    found = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        found[f"{name}.scaling"] = str(getattr(module, "scaling", None))  # of LoRA and attention
    for name, value in unwrap_model(model).config.to_dict().items():
        if not re.search(no_effect, name):
            found[name] = value
    return found


# ---- Log-probs of completions ----------------------------------------

HEAD_BYTES = 2**26  # of the float32 logits of one chunk: 110 completion tokens at V = 151,936; more on CUDA


def completion_logprobs(model, groups: Groups, temperature=1.0) -> Ragged:
    """log π(token | prompt and the tokens before it) in nats: per group, per completion, float32 (len(completion),).

    It is differentiable. All groups are computed in one forward: micro_batches divides a larger batch. temperature
    divides the logits, as in sampling. Raises BadInput for an empty prompt or completion, for a row that is longer than
    the context, and for a model whose log-probs would not be exact."""
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
    """The Hugging Face model itself, also under a peft wrapper, whose adapters lie inside the model's layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def context_length(config) -> float:
    """Tokens of the longest row whose log-probs do not depend on what else is in the batch."""
    config = config.get_text_config()
    names = ("max_position_embeddings", "index_topk", "keep_window_size")  # the last two: longer rows are sparse
    bounds = [getattr(config, name, None) for name in names]

    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # of the model, or of each type of layer
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
            bounds.append(rope.get("original_max_position_embeddings"))  # a longer row changes the angles of all rows
    return min(filter(None, bounds), default=math.inf)


def forward(core, groups, lay_out, temperature=1.0) -> Ragged:
    """One forward of these groups, as lay_out_shared or lay_out_padded arranges them."""
    inputs, sources, targets = lay_out(groups, core.device)
    logprobs_of_targets = getattr(core, "flat_logprobs", partial(flat_logprobs, core))  # apply_fsdp adds a method
    return ragged(logprobs_of_targets(inputs, sources, targets, temperature), groups)


def flat_logprobs(core, inputs, sources, targets, temperature):
    """sources, targets (N,): where each completion token is predicted, and its id -> its log-prob, (N,)."""
    decoder = core.get_decoder()
    outputs = decoder(**inputs, use_cache=False)
    hidden = outputs[0].flatten(0, 1).index_select(0, sources)  # (N, H): only positions that predict
    outputs = replace(outputs, last_hidden_state=None)  # frees the others

    def token_logprobs(hidden, targets):
        """(n, H), (n,) -> (n,)"""
        # What follows the decoder (layers before the head, head, scale, softcap) is the model's own code. So that all
        # of it runs, and nothing else, the model is called with a decoder that returns these hidden states. A head
        # called by itself would miss what a model does around it; its `weight` would miss a bias and an adapter.
        decoder.forward = lambda *_, **__: replace(outputs, last_hidden_state=hidden[None])
        try:
            logits = core.forward(inputs["input_ids"], use_cache=False).logits.flatten(0, 1)  # (n, V)
        finally:
            del decoder.forward  # the class's own is back
        return log_softmax_at(logits, targets, temperature)

    weights = set()  # that train, outside of the decoder: the head's, above all; two modules may have the same bias
    for module in set(core.modules()) - set(decoder.modules()):
        weights |= {weight for weight in module.parameters(recurse=False) if weight.requires_grad}

    # The logits of all N tokens may be most of the memory of a step, so they are computed in chunks.
    budget = HEAD_BYTES  # 64 MiB is best on a CPU
    if hidden.is_cuda:
        budget *= 8 if weights else 4  # each chunk adds to the float32 gradient of a head that trains
    chunk_size = max(1, budget // (4 * len(core.get_input_embeddings().weight)))
    if len(hidden) <= chunk_size:
        return token_logprobs(hidden, targets)
    return InChunks.apply(token_logprobs, chunk_size, hidden, targets, *weights)


def log_softmax_at(logits, targets, temperature):
    """The log-probs of the targets, in float32: (n, V), (n,) -> (n,)"""
    logits = logits.float()
    if temperature != 1:  # each pass over (n, V) takes time
        logits = logits / temperature
    return -F.cross_entropy(logits, targets, reduction="none")


class InChunks(torch.autograd.Function):
    """token_logprobs of a few rows at a time: the backward computes the logits of each chunk again. It sums the
    gradients of the weights in float32, because in bfloat16 200 chunks have five times the rounding error of one."""

    @staticmethod
    def forward(ctx, token_logprobs, chunk_size, hidden, targets, *weights):
        ctx.token_logprobs, ctx.chunk_size, ctx.weights = token_logprobs, chunk_size, weights
        ctx.save_for_backward(hidden, targets)
        chunks = zip(hidden.split(chunk_size), targets.split(chunk_size))
        return torch.cat([token_logprobs(*chunk) for chunk in chunks])

    @staticmethod
    def backward(ctx, grad):
        hidden, targets = ctx.saved_tensors
        grads_of_hidden = []
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in ctx.weights]

        n = ctx.chunk_size
        for chunk, ids, grad_of_logprobs in zip(hidden.split(n), targets.split(n), grad.split(n)):
            with torch.enable_grad():
                chunk = chunk.detach().requires_grad_()
                logprobs = ctx.token_logprobs(chunk, ids)
            inputs = (chunk, *ctx.weights)
            first, *others = torch.autograd.grad(logprobs, inputs, grad_of_logprobs, materialize_grads=True)
            grads_of_hidden.append(first)
            for total, part in zip(sums, others):
                total += part

        sums = [total.to(weight.dtype) for total, weight in zip(sums, ctx.weights)]
        return None, None, torch.cat(grads_of_hidden), None, *sums


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
    """Sums over the tokens of each completion: (B, k) for B groups of k completions."""
    sums = torch.stack([tokens.sum() for tokens in chain(*values)])
    return sums.view(len(values), -1)


def log_ratios(logps: Ragged, groups: Groups, ref_logps: Mapping | None) -> Ragged:
    """log π − log π_ref of each token. logps: the policy's, for these groups; ref_logps[prompt, completion]: the
    reference's (None: all 0)."""
    if ref_logps is None:
        return logps
    theirs = []
    for prompt, completions in groups:
        theirs += [ref_logps[prompt, completion] for completion in completions]
    flat = torch.cat(list(chain(*logps)))  # (N,)
    return ragged(flat - to_device(np.concatenate(theirs), flat.device), groups)


def check_agreement(difference: float, dtype: str):
    """Checks that policy and reference agree before the first update, up to rounding. `difference` is the mean over
    answers of |log π(y|x) − log π_ref(y|x)| / |y|."""
    limit = 3e-2 if dtype == "bfloat16" else 1e-4  # in bfloat16 other batches round differently
    found = f"step 1: policy and reference differ by {difference:.1e} nats per token"
    if not difference < limit:
        raise BadInput(f"{found}, more than {limit:g}: delete the cache, if any, or try --dtype float32")
    tqdm.write(found)


# ---- Micro-batches: which groups share a forward ---------------------

def micro_batches(model, groups: Groups, tokens_per_forward: int) -> list[tuple[list[int], float]]:
    """This process's forwards of at most tokens_per_forward tokens, longest first; a longer group goes alone. Each is a
    list of indices of groups, and their weight in a sum: 1, or 0 if this process computes group 0 again only because
    FSDP needs equally many forwards in all processes."""
    lengths = [count_tokens([group]) for group in groups]
    rows = None
    if not has_shared_prompts(model):  # each completion is a padded row
        lengths = [len(prompt) + max(map(len, completions)) for prompt, completions in groups]
        rows = [len(completions) for _, completions in groups]

    batches = divide_batches(lengths, tokens_per_forward, rows)
    return [(batch, 1.0) if batch else ([0], 0.0) for batch in batches]


def divide_batches(lengths, budget: int, rows=None) -> list[list[int]]:
    """This process's part of pack(lengths, budget, rows). All processes get equally many batches, of which some may be
    empty. It is a function of its arguments, so the processes need no communication."""
    ranks = process_count()
    n = math.ceil(len(pack(lengths, budget, rows)) / ranks) * ranks

    # A smaller budget that needs no more batches makes them more equally full, so the processes wait less.
    while ranks > 1 and n < len(lengths) and len(pack(lengths, int(0.98 * budget), rows)) <= n:
        budget = int(0.98 * budget)

    batches = pack(lengths, budget, rows)
    batches += [[] for _ in range(n - len(batches))]
    return batches[process_rank()::ranks]


def pack(lengths, budget: int, rows=None) -> list[list[int]]:
    """Indices of items in batches of at most `budget` tokens, longest first. An item is a segment of a flat row. With
    `rows`, item i is rows[i] rows, which are padded to the longest row of their batch."""
    sizes = rows or lengths
    batches = []
    load = 0  # rows or tokens in the last batch
    width = 1  # tokens of each

    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for i in longest_first:
        if not batches or (load + sizes[i]) * width > budget:
            batches.append([])
            load = 0
            width = lengths[i] if rows else 1  # the first item of a batch is its longest
        batches[-1].append(i)
        load += sizes[i]
    return batches


# ---- Shared prompts: one flat row per forward, without padding -------

SHARED = "sdpa_shared_prompt"  # with "sdpa" in its name, transformers rejects it for models without sdpa
sdpa = AttentionInterface()["sdpa"]
sdpa_mask = AttentionMaskInterface()["sdpa"]


def to_device(values, device):
    """Copies a list, an array or a CPU tensor to a device, without waiting for the kernels of a GPU."""
    tensor = torch.as_tensor(np.asarray(values))  # of a list, NumPy is quicker
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def lay_out_shared(groups, device, with_spans=True):
    """Groups -> the inputs of one flat row; and for each completion token, (N,) each, the place in the row that
    predicts it, and its id."""
    ids, positions = [], []  # (T,)
    sources, targets = [], []  # (N,)
    keys = []  # (T_k,): the places in the row that the queries of each span may see
    query_ends, key_ends = [0], [0]
    for prompt, completions in groups:
        before = range(len(ids), len(ids) + len(prompt))  # places of the prompt
        ids += prompt
        positions += range(len(prompt))

        for completion in completions:
            own = range(len(ids), len(ids) + len(completion))
            ids += completion
            positions += range(len(prompt), len(prompt) + len(completion))  # each completion follows its prompt
            sources += [before[-1], *own[:-1]]  # the shift by one: the token before predicts it
            targets += completion

            keys += [*before, *own]
            query_ends.append(len(ids))  # the first completion simply continues its prompt
            key_ends.append(len(keys))

    # Sizes are computed before the copy to a GPU, because reading them there would wait for it.
    ends = np.array([query_ends, key_ends], np.int32)  # (2, spans + 1)
    sizes_q, sizes_k = np.diff(ends).tolist()
    cu_seq_q, cu_seq_k = to_device(ends, device)
    keys = to_device(keys, device) if len(ids) < len(keys) else None  # None: the row itself
    ids, positions = to_device([ids, positions], device)
    sources, targets = to_device([sources, targets], device)

    # Without a mask of ones, transformers treats restarting positions as packed sequences and masks the prompts.
    ones = torch.ones(1, 1, dtype=torch.bool, device=device).expand(1, len(ids))
    spans = (keys, cu_seq_q, cu_seq_k, sizes_q, sizes_k) if with_spans else None
    inputs = dict(input_ids=ids[None], position_ids=positions[None], attention_mask=ones, spans=spans)
    return inputs, sources, targets


def lay_out_padded(groups, device):
    """The same as a right-padded batch with a row for each completion, which is exact for every causal model."""
    width = max(len(prompt) + max(map(len, completions)) for prompt, completions in groups)
    rows, sources, targets = [], [], []
    for prompt, completions in groups:
        for completion in completions:
            first = len(rows) * width + len(prompt) - 1  # the shift by one: the token before predicts it
            sources += range(first, first + len(completion))
            targets += completion
            rows.append(torch.tensor(prompt + completion))

    ids = to_device(pad_sequence(rows, batch_first=True, padding_value=-1), device)
    sources, targets = to_device([sources, targets], device)
    inputs = dict(input_ids=ids.clamp(min=0), attention_mask=(ids >= 0).long())
    return inputs, sources, targets


def shared_prompt_attention(module, query, key, value, attention_mask, spans=None, sliding_window=None, **kwargs):
    """Attention over a flat row: query (1, heads, T, D), key and value (1, key heads, T, D) -> (1, T, heads, D).
    A span is the queries of one completion (the first: of prompt + completion). Its keys: [prompt ; own]."""
    if spans is None:  # an ordinary batch, as in generate()
        output, _ = sdpa(module, query, key, value, attention_mask, sliding_window=sliding_window, **kwargs)
        # sdpa's output for one token has strides with which a frozen linear layer reads its weight again for each row.
        return output.flatten(0, 1).unflatten(0, (len(query), -1)), None
    if attention_mask is not None and not sliding_window:
        raise BadInput(f"{type(module).__name__} masks more than the future, so completions cannot share a prompt")
    if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise BadInput(f"{type(module).__name__} has softcapped scores, attention sinks or a position bias")

    # Each span gets the keys of its prompt and its own, side by side.
    keys, cu_seq_q, cu_seq_k, sizes_q, sizes_k = spans
    if keys is not None:
        key, value = key.index_select(2, keys), value.index_select(2, keys)  # (1, key heads, T_k, D)

    if one_kernel_serves(query, value) and not kwargs.get("dropout"):
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (tokens, heads, D)
        window = (sliding_window - 1 if sliding_window else -1, 0)  # how far a query sees back, and ahead
        output = varlen_attn(
            query, key, value, cu_seq_q, cu_seq_k, max(sizes_q), max(sizes_k),
            window_size=window, scale=kwargs.get("scaling"), **GROUPED)
        return output[None], None

    # On a CPU, and in float32, one ordinary attention for each span is as fast.
    outputs = []
    for q, k, v in zip(query.split(sizes_q, dim=2), key.split(sizes_k, dim=2), value.split(sizes_k, dim=2)):
        n_q, reach = q.shape[2], sliding_window or k.shape[2]
        k, v = (x[:, :, 1 - n_q - reach:] for x in (k, v))  # the first query sees reach - 1 keys before its own
        n_before = k.shape[2] - n_q  # keys before the first query
        mask = None  # plain causal
        if n_q > 1 and (n_before > 0 or n_q > reach):
            mask = q.new_ones(1, 1, n_q, n_before + n_q, dtype=torch.bool).tril(n_before).triu(n_before - reach + 1)
        outputs.append(sdpa(module, q, k, v, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


# From torch 2.12 on, keys that heads share must be announced. The kernel of 2.11 takes them as they are.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def one_kernel_serves(query, value):
    """Whether one varlen_attn call can serve all spans. On CUDA a loop over them is bound by kernel launches."""
    size = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    return (query.is_cuda and half
            and size == value.shape[-1] and size <= 256 and size % 8 == 0
            and torch.cuda.get_device_capability(query.device) >= (8, 0))  # Ampere or newer


def shared_prompt_mask(*args, attention_mask=None, local_size=None, **kwargs):
    """transformers' mask, with two exceptions: the ones of lay_out_shared (their stride is 0) are not searched for
    zeros, which would wait for the GPU, and windows make no (T, T) mask."""
    ones = attention_mask is not None and attention_mask.stride(-1) == 0
    if ones and local_size:
        return attention_mask[:, None, None]  # (1, 1, 1, T), not None: a layer that ignores its window is refused
    return sdpa_mask(*args, attention_mask=None if ones else attention_mask, local_size=local_size, **kwargs)


AttentionInterface.register(SHARED, shared_prompt_attention)
AttentionMaskInterface.register(SHARED, shared_prompt_mask)


# ---- Whether completions may share their prompt: tested once per model

# Limits are in nats. Rounding stays below them, in large models, too; a wrong mask or position is far above them.
TESTED = WeakSet()  # models whose attention enable_shared_prompts has chosen


def enable_shared_prompts(model) -> bool:
    """Lets the completions of this model share their prompt, if that is exact. Prints the result once and returns it.
    completion_logprobs calls it. Raises BadInput if not even padded rows are exact."""
    core = unwrap_model(model)
    if core in TESTED:
        return has_shared_prompts(core)

    name = type(core).__name__.removeprefix("FSDP")
    attention = (core.config._attn_implementation or "eager").replace(SHARED, "sdpa")  # a copied model may have SHARED
    if getattr(core.config.get_text_config(), "attn_logit_softcapping", None):
        attention = attention.replace("sdpa", "eager")  # transformers 5.17 lets sdpa drop the softcap silently
    core.set_attn_implementation(attention)

    with torch.no_grad():
        error, dtype = error_of(core, lay_out_padded)
        if not error < (1e-3 if dtype == torch.float32 else 0.25):  # `not <` also catches NaN
            raise BadInput(f"{name} is not supported, later tokens change log-probs by {error:.2g} nats: "
                           "no causal language model, dropout, or NaN weights; in bfloat16, try float32")

        try:
            check_shared_prompts(core)
            result = "completions share their prompt"
        except Exception as cause:  # no such keyword, no sdpa, another mask
            if hasattr(core, "reset_iter_state"):  # FSDP's, from torch 2.13 on: the error interrupted a forward
                core.reset_iter_state()
            core.set_attn_implementation(attention)
            result = f"padded rows: {one_line(cause)}"

    print(f"{name}: {result}")
    TESTED.add(core)
    return has_shared_prompts(core)


def has_shared_prompts(model):
    return unwrap_model(model).config._attn_implementation == SHARED


def check_shared_prompts(core):
    """A flat row must have the log-probs of one forward per sequence. The same row without spans must be clearly wrong:
    if spans make no difference in this model, an exact result is no evidence that its layers use them."""
    layers = set(getattr(core.config.get_text_config(), "layer_types", None) or ())
    if core._is_stateful or not layers <= {"full_attention", "sliding_attention"}:
        raise BadInput("recurrent, convolutional or chunked layers would mix completions")

    core.set_attn_implementation(SHARED)  # stays on: gradient checkpointing reruns it in the backward pass
    error, dtype = error_of(core, lay_out_shared)
    error_without, _ = error_of(core, partial(lay_out_shared, with_spans=False))
    limit, ratio = (1e-4, 20) if dtype == torch.float32 else (0.25, 3)
    if not (error < limit and error < error_without / ratio):  # `not` also catches NaN
        raise BadInput(f"a shared prompt changes log-probs by {error:.2g} nats (without spans: {error_without:.2g})")


def error_of(core, lay_out):
    """The largest difference, in nats, from log-probs of one forward per sequence, and the dtype of the forwards. That
    sequence ends in the middle of the completion, because later tokens must change nothing."""
    ids = torch.linspace(1, core.config.get_text_config().vocab_size - 1, 128).long().tolist()
    prompt, first, second = tuple(ids[::4]), tuple(ids[1::2]), tuple(ids[2::4][:10])  # 32, 64 and 10 tokens
    (logprobs,) = forward(core, [(prompt, [first, second])], lay_out)

    errors = []
    for completion, found in zip((first, second), logprobs):
        n = len(completion) // 2
        row = torch.tensor([prompt + completion[:n]], device=core.device)
        logits = core(input_ids=row, use_cache=False).logits
        all_logprobs = logits[0, len(prompt) - 1:-1].float().log_softmax(-1)  # (n, V)
        errors.append((found[:n] - all_logprobs[range(n), completion[:n]]).abs().max())
    return torch.stack(errors).max().item(), logits.dtype


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
    return tqdm(*items, leave=None, mininterval=seconds, maxinterval=30, disable=not is_first_process(), **options)


def apply_fsdp(model, device: str, dtype="float32"):
    """Splits the weights over the processes (FSDP2). A single process uses it, too, for mixed precision: with dtype
    "bfloat16" each layer computes in a bfloat16 copy, while the optimizer's weights and the sums of gradients stay
    float32. Gradients are sums over the processes: divide a loss by the global batch size."""
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh(device, (process_count(),))
    core = unwrap_model(model)

    # The inputs of a layer are not cast. Some are float32 by intent (cos and sin of OLMo, ALiBi of MPT, the residual
    # of Mamba), and the reference, a plain bfloat16 model, leaves them so: the policy would round differently.
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
                module, mesh=mesh, mp_policy=policy, ignored_params=frozen,
                reshard_after_forward=True)  # parameters() are always shards
            if mesh.size() > 1:
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    core.flat_logprobs = partial(flat_logprobs, core)  # called directly, decoder and head see only shards
    register_fsdp_forward_method(core, "flat_logprobs")


def names_in_float32(core) -> re.Pattern:
    """Matches names of weights, such as those of routers, that stay float32 when a model is loaded in bfloat16."""
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
    if dist.is_initialized():
        dist.barrier()


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


def local_shard(tensor):
    """This process's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
