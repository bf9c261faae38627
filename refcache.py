"""Log-probs of completions, and a cache of those of the frozen reference model.

    completion_logprobs(model, groups)   log π(token | everything before it), for each token of each completion
    ReferenceCache                       the same numbers of a frozen model: computed once, saved, shared by later runs
    Swap                                 reference weights kept on the CPU: for new completions or a moving reference

A group is `(prompt_ids, [completion_ids, ...])`, tuples of token ids; a completion includes its EOS. Policy and
reference go through one function, so they agree before the first update: margin 0, loss ln 2, KL 0.

A cache is a dictionary whose token ids and log-probs are kept as bytes: 4 bytes per token, where a tuple of Python
integers takes 36. Weights are held by FSDP2 where several processes divide them. A single process uses it, too, when it
trains in bfloat16: each layer then computes in bfloat16, while the optimizer's weights stay float32.

Shapes: T tokens in a forward, T_k keys of all spans, N completion tokens, D head size, H hidden size, V vocabulary.
"""
import gc
import hashlib
import json
import math
import os
import pickle
import pickletools
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
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock, Timeout  # comes with torch
from huggingface_hub import snapshot_download
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface

Groups = list[tuple[tuple[int, ...], list[tuple[int, ...]]]]
Ragged = list[list[torch.Tensor]]  # for each group, for each completion: (len(completion),)
HEAD_BYTES = 2**26  # of the float32 logits of one chunk: 110 completion tokens at V = 151,936; more on CUDA
SHARED = "sdpa_shared_prompt"  # with "sdpa" in its name, transformers rejects it for models without sdpa
PROBED = WeakSet()  # models whose attention enable_shared_prompts has chosen
sdpa, sdpa_mask = AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"]


class BadInput(ValueError):
    """Wrong usage, data or files. One sentence: where, what is wrong, what to do."""


class CannotShare(BadInput):
    """The completions of this model cannot share a prompt: its attention is not plain causal attention over one row."""


# ---- The frozen reference: a dictionary, or weights to swap in -------

class ReferenceCache(Mapping):
    """Token log-probs under a frozen reference: cache[prompt_ids, completion_ids] is float32, (len(completion_ids),).
    `header` holds strings that say what the log-probs belong to, such as reference=checkpoint_digest(folder),
    dtype="float32". A file with another header is refused; only `name` may differ."""

    def __init__(self, **header: str):
        self.header = {"format": "4", **header}
        self.table = {}  # prompt -> {completion: log-probs}, all as bytes of uint32, uint32 and float32

    def __len__(self):
        return sum(map(len, self.table.values()))

    def __iter__(self):
        for prompt, scored in self.table.items():
            for completion in scored:
                yield tuple(array("I", prompt)), tuple(array("I", completion))

    def __getitem__(self, key):
        prompt, completion = key
        logprobs = self.table[bytes_of(prompt)][bytes_of(completion)]  # KeyError: not scored, call fill first
        return np.frombuffer(logprobs, np.float32)

    def fill(self, load_model, groups: Groups, tokens_per_forward=16384, path=None) -> int:
        """Scores what is neither in this cache nor in the file at `path`, and saves it there. Returns the number of
        completions scored. `load_model()` is called only if something is missing, and its model is freed."""
        if path and Path(path).exists():
            self.load(path)
        missing = self.missing(groups)

        # The processes divide what is missing, so it must be the same for all of them.
        digest = hash(tuple((prompt, *completions) for prompt, completions in missing))
        if len(set(all_gather(digest))) > 1:
            raise BadInput(f"the processes have different caches: do all of them read the same {path}?")
        if not missing:
            return 0

        if path:
            with lock(path):  # an error comes now, not after the forwards
                pass
        model = load_model()
        try:
            self.score(model, missing, tokens_per_forward, path=path)
        finally:
            del model  # the caller keeps none either, so its memory is free before the policy is loaded
            gc.collect()
            torch.cuda.empty_cache()
        return sum(len(completions) for _, completions in missing)

    def missing(self, groups: Groups) -> Groups:
        """What is not scored yet, all completions of a prompt together and each once."""
        missing = {}  # prompt -> {completion: None}
        for prompt, completions in groups:
            scored = self.table.get(bytes_of(prompt), ())
            unknown = [completion for completion in completions if bytes_of(completion) not in scored]
            missing.setdefault(prompt, {}).update(dict.fromkeys(unknown))
        return [(prompt, list(unknown)) for prompt, unknown in missing.items() if unknown]

    @torch.no_grad()
    def score(self, model, groups: Groups, tokens_per_forward=16384, path=None):
        """Scores all of these groups. Saves to `path` now and then, at the end, and on an exception."""
        # A group longer than the budget is divided. Budget 0: without shared prompts each completion is a row.
        budget = tokens_per_forward if enable_shared_prompts(model) else 0
        parts = []
        for prompt, completions in groups:
            for indices in pack(list(map(len, completions)), budget - len(prompt)):
                parts.append((prompt, [completions[i] for i in indices]))

        # The longest batches come first, so that a pass that needs too much memory fails at once.
        batches = []
        for indices, _ in micro_batches(model, parts, tokens_per_forward):
            batches.append([parts[i] for i in indices])
        total = sum(map(count_tokens, batches))

        new = []  # entries of this process
        waiting = None  # the batch before: it is stored while the GPU computes the next one
        save_at = time.monotonic() + 60
        try:
            with eval_mode(model), progress_bar(desc="reference", total=total, unit="tok", unit_scale=True) as progress:
                for batch in [*batches, None]:
                    started = (batch, *to_cpu(completion_logprobs(model, batch))) if batch else None
                    if waiting:
                        entries = entries_of(*waiting)
                        self.add(entries)
                        new += entries
                        progress.update(count_tokens(waiting[0]))
                    waiting = started

                    if path and time.monotonic() > save_at:
                        began = time.monotonic()
                        self.save(path)  # the whole file: a large one less often than every minute
                        save_at = time.monotonic() + max(60, 10 * (time.monotonic() - began))
            for theirs in all_gather(new):
                self.add(theirs)
        finally:
            if path:  # the last thing that changes the table: a resumed run will find the same numbers in the file
                self.save(path)

    def add(self, entries):
        for prompt, scored in entries:
            self.table.setdefault(prompt, {}).update(scored)

    def save(self, path):
        """Writes the header (a JSON line) and the table (a pickle) atomically. Keeps what another job saved."""
        with lock(path):
            if Path(path).exists():  # another job may have written it
                self.load(path)

            table = pickle.dumps(self.table, protocol=4)
            header = json.dumps(self.header | {"sha256": hashlib.sha256(table).hexdigest()}) + "\n"
            write_whole(path, [header.encode(), table])

    def load(self, path):
        """Adds the entries of a file, and executes no code in it. Raises BadInput if it is damaged or has another
        header."""
        try:
            first_line, _, pickled = Path(path).read_bytes().partition(b"\n")
            header = json.loads(first_line)
            for name, mine in self.header.items():
                theirs = header.get(name)
                if theirs != mine and name != "name":
                    raise BadInput(f"it was made with {name} {theirs!r}, but this run has {name} {mine!r}")
            if hashlib.sha256(pickled).hexdigest() != header["sha256"]:
                raise BadInput("its checksum does not match")

            table = load_builtins(pickled)
            for prompt, scored in table.items():
                if len(prompt) % 4 or any(len(y) % 4 or len(y) != len(logprobs) for y, logprobs in scored.items()):
                    raise BadInput("its lengths do not match")
                if not np.isfinite(np.frombuffer(b"".join(scored.values()), np.float32)).all():
                    raise BadInput("it holds a log-prob that is not finite")
        except Exception as error:  # any error of a damaged or hostile file
            advice = "name another, or delete it if it is old"
            raise BadInput(f"{path} cannot be used, {one_line(error)}: {advice}") from None
        self.add(table.items())  # the job that saved first decides, so a resume finds the same numbers


def load_builtins(data):
    """Unpickles dicts and bytes. A pickle with anything else is refused before unpickling."""
    allowed = "PROTO FRAME MARK MEMOIZE STOP EMPTY_DICT SETITEM SETITEMS SHORT_BINBYTES BINBYTES".split()
    others = {opcode.name for opcode, *_ in pickletools.genops(data)} - set(allowed)  # genops also checks sizes
    if others:
        raise BadInput(f"pickle opcode {min(others)}")
    return pickle.loads(data)


def lock(path):
    """`with lock(path):` holds PATH.lock, so that two jobs do not overwrite each other's entries."""
    file = f"{os.path.realpath(path)}.lock"
    try:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        open(file, "a").close()  # FileLock would wait for ever where no file can be
    except OSError as error:
        raise BadInput(f"{path} cannot be written, {one_line(error)}: name another") from error

    held = FileLock(file)
    try:
        return held.acquire(timeout=10)
    except Timeout:
        tqdm.write(f"waiting for {file}")
        return held.acquire()


def write_whole(path, parts):
    """Writes a file of these parts, each of them bytes, atomically, even across a power cut."""
    path = Path(os.path.realpath(path))  # a symlink stays, its target is replaced
    partial_file = path.with_name(f".{path.name}.partial")
    with open(partial_file, "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial_file, path)


def bytes_of(ids) -> bytes:
    return array("I", ids).tobytes()  # 4 bytes per token, where a tuple of ints takes 36


def to_cpu(logprobs):
    """Copies all log-probs, (N,), to the CPU. Also returns a CUDA event that marks the end of the copy (None on a CPU).
    Waiting for this event does not wait for kernels that were launched later."""
    flat = torch.cat(list(chain(*logprobs)))
    on_cpu = flat.to("cpu", non_blocking=True)  # one transfer, to pinned memory
    return on_cpu, torch.cuda.current_stream().record_event() if flat.is_cuda else None


def entries_of(groups, logprobs, copied):
    """Items of ReferenceCache.table, from what to_cpu returned."""
    if copied:
        copied.synchronize()
    if not logprobs.isfinite().all():
        raise BadInput("the reference gives a log-prob that is not finite: its checkpoint is damaged")

    entries = []
    for (prompt, completions), group in zip(groups, ragged(logprobs, groups)):
        scored = {bytes_of(completion): values.numpy().tobytes() for completion, values in zip(completions, group)}
        entries.append((bytes_of(prompt), scored))
    return entries


class Swap:
    """The reference's weights in CPU memory. `with swap as model:` exchanges them with the policy's, in place, until
    its end. Without `reference` the policy as it is now becomes the reference. Only weights that can differ are held:
    a LoRA run holds the adapter alone, whose initial state is the reference. Raises BadInput if the models have
    different structures."""

    def __init__(self, policy, reference=None):
        reference = reference or policy
        mine, theirs = structure(policy), structure(reference)
        differing = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
        if differing:
            raise BadInput(f"the reference differs from the policy in {differing[0]}: choose live, or merge an adapter")

        self.policy = policy
        self.weights = {}  # name -> (the policy's tensor, on its device; the reference's values, on the CPU)
        reference_weights = reference.state_dict()
        weights = policy.state_dict(keep_vars=True)
        unique = {id(tensor): (name, tensor) for name, tensor in weights.items()}  # tied weights once

        for name, tensor in unique.values():
            values = local(tensor)
            is_frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
            can_differ = not is_frozen or not torch.equal(values, local(reference_weights[name]).to(values))
            if any(all_gather(can_differ)):
                on_cpu = torch.empty_like(values, device="cpu", pin_memory=tensor.is_cuda)
                self.weights[name] = tensor.detach(), on_cpu
        self.load_state_dict(reference_weights)

    def __enter__(self):
        self.exchange()
        return self.policy

    def __exit__(self, *_):
        self.exchange()

    @torch.no_grad()
    def exchange(self):
        """Goes weight by weight, so that no third copy of the model is needed."""
        for ours, theirs in self.weights.values():
            mine = local(ours)
            before = mine.clone()
            mine.copy_(theirs, non_blocking=True)
            theirs.copy_(before, non_blocking=True)  # the GPU copies in this order
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the CPU reads them next

    def sync(self, mix=1.0):
        """π_ref <- mix · π + (1 − mix) · π_ref, weight by weight."""
        for ours, theirs in self.weights.values():
            mine = torch.empty_like(theirs, pin_memory=theirs.is_pinned()).copy_(local(ours))
            theirs.copy_(theirs.lerp(mine, mix) if theirs.is_floating_point() else mine)

    def state_dict(self):
        """The reference's weights for a checkpoint, split as the policy's are."""
        state = {}
        for name, (ours, theirs) in self.weights.items():
            if isinstance(ours, DTensor):
                theirs = DTensor.from_local(theirs.to(ours.device), ours.device_mesh, ours.placements, run_check=False,
                                            shape=ours.shape, stride=ours.stride())
            state[name] = theirs
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict):
        """Copies the weights that are held. `state` may have more."""
        for name, (_, theirs) in self.weights.items():
            theirs.copy_(local(state[name]).view_as(theirs))  # copy_ alone would broadcast


def structure(model):
    """What two models must have in common to swap weights: shapes, and config fields that change log-probs."""
    cosmetic = "_name_or_path architectures dtype initializer_range transformers_version use_cache".split()
    found = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if hasattr(module, "scaling"):  # LoRA and attention have one
            found[f"{name}.scaling"] = str(module.scaling)
    for name, value in unwrap_model(model).config.to_dict().items():
        if name not in cosmetic and "dropout" not in name and not name.endswith("token_id"):
            found[name] = value
    return found


def reference_logprobs(reference, groups: Groups, tokens_per_forward=16384):
    """log π_ref of these completions, as a mapping. A `reference` that is a ReferenceCache or None is returned as it
    is; any other is a context manager that yields a model, such as a Swap."""
    if reference is None or isinstance(reference, ReferenceCache):
        return reference
    scored = ReferenceCache()
    with reference as model:
        scored.score(model, scored.missing(groups), tokens_per_forward)
    return scored


def checkpoint_folder(name: str) -> Path:
    """The folder of a checkpoint: the name itself, or where the hub's checkpoint of this name was downloaded to."""
    patterns = ["*.json", "*.jinja", "*model*.safetensors"]
    return Path(name if Path(name).is_dir() else snapshot_download(name, allow_patterns=patterns))


def checkpoint_digest(name: str) -> str:
    """Identifies the weights of a folder or hub name: SHA-256 of config and safetensors, and an adapter's base."""
    folder = checkpoint_folder(name)
    kind = "adapter_" if (folder / "adapter_config.json").exists() else ""
    config = json.loads((folder / f"{kind}config.json").read_text())
    config |= {"transformers_version": None, "_name_or_path": None}  # no effect on log-probs
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())

    files = sorted(folder.glob(f"{kind}model*.safetensors"))
    if not files:
        raise BadInput(f"{folder} holds no {kind}model*.safetensors")
    for file in files:
        digest.update(np.memmap(file, np.uint8, "r"))

    if kind:
        digest.update(checkpoint_digest(config["base_model_name_or_path"]).encode())
    return digest.hexdigest()[:32]


# ---- Log-probs -------------------------------------------------------

def completion_logprobs(model, groups: Groups, temperature=1.0) -> Ragged:
    """log π(token | prompt and the tokens before it) in nats: per group, per completion, float32 (len(completion),).

    It is differentiable. All groups are computed in one forward: micro_batches divides a larger batch. temperature
    divides the logits, as in sampling. Raises BadInput for an empty prompt or completion, for a row that is longer than
    the context or has an id outside the vocabulary, and for a model whose log-probs would not be exact."""
    core = unwrap_model(model)
    check_groups(core, groups)
    lay_out = lay_out_shared if enable_shared_prompts(model) else lay_out_padded

    try:
        return forward(core, groups, lay_out, temperature)
    except CannotShare as error:  # seen only in rows longer than the probe's
        if process_count() > 1:  # the others would wait for the forward that failed here
            raise BadInput(f"{one_line(error)}: this model cannot be split over processes") from error
        if hasattr(core, "reset_iter_state"):  # FSDP's, from torch 2.13 on: the error interrupted a forward
            core.reset_iter_state()
        core.set_attn_implementation("sdpa")
        tqdm.write(f"{type(core).__name__}: padded rows from now on, because {error}")
        return completion_logprobs(model, groups, temperature)


def check_groups(core, groups):
    """Refuses what the model cannot score."""
    context = context_length(core.config)
    vocabulary = len(core.get_input_embeddings().weight)
    for prompt, completions in groups:
        if not prompt or not completions or not all(completions):
            raise BadInput("a prompt or completion without tokens: leave it out")
        length = len(prompt) + max(map(len, completions))
        if length > context or max(map(max, (prompt, *completions))) >= vocabulary:
            raise BadInput(f"a row of {length} tokens: the model has {context} positions, {vocabulary} embeddings")


def forward(core, groups, lay_out, temperature=1.0) -> Ragged:
    """One forward of these groups, as lay_out_shared or lay_out_padded arranges them."""
    inputs, sources, targets = lay_out(groups, core.device)
    flat_logprobs = getattr(core, "flat_logprobs", partial(_flat_logprobs, core))  # shard gives a model its own
    return ragged(flat_logprobs(inputs, sources, targets, temperature), groups)


def _flat_logprobs(core, inputs, sources, targets, temperature):
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

    # The logits of all N tokens may be most of the memory of a step, so they are computed in chunks.
    weights = set()  # that train, outside of the decoder: the head's, above all; two modules may have the same bias
    for module in set(core.modules()) - set(decoder.modules()):
        weights |= {weight for weight in module.parameters(recurse=False) if weight.requires_grad}

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
        grad_hidden = torch.empty_like(hidden)
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in ctx.weights]
        for start in range(0, len(hidden), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)

            with torch.enable_grad():
                chunk = hidden[rows].detach().requires_grad_()
                logprobs = ctx.token_logprobs(chunk, targets[rows])
            inputs = (chunk, *ctx.weights)
            grad_hidden[rows], *grads = torch.autograd.grad(logprobs, inputs, grad[rows], materialize_grads=True)
            for total, part in zip(sums, grads):
                total += part

        return None, None, grad_hidden, None, *(total.to(weight.dtype) for total, weight in zip(sums, ctx.weights))


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
    return torch.stack([torch.stack([tokens.sum() for tokens in completions]) for completions in values])


def log_ratios(logps: Ragged, groups: Groups, ref_logps: Mapping | None, clamp=None) -> Ragged:
    """log π − log π_ref of each token. logps: the policy's, for these groups; ref_logps[prompt, completion]: the
    reference's (None: all 0). clamp: (low, high) in nats, beyond which no gradient passes (arXiv:2509.24207)."""
    ratios = torch.cat(list(chain(*logps)))  # (N,)
    if ref_logps is not None:
        theirs = []
        for prompt, completions in groups:
            theirs += [ref_logps[prompt, completion] for completion in completions]
        ratios = ratios - to_device(np.concatenate(theirs), ratios.device)
    if clamp:
        ratios = ratios.clamp(*clamp)
    return ragged(ratios, groups)


def check_agreement(difference: float, dtype: str):
    """Checks that policy and reference agree before the first update, up to rounding. `difference` is the mean over
    answers of |log π(y|x) − log π_ref(y|x)| / |y|."""
    found = f"step 1: policy and reference differ by {difference:.1e} nats per token"
    limit, advice = 1e-4, "delete the cache, if any"
    if dtype == "bfloat16":  # in several processes other batches round differently
        limit, advice = 1e-2 if process_count() == 1 else 3e-2, "they round differently in bfloat16, float32 is exact"
    if not difference < limit:
        raise BadInput(f"{found}: {advice}")
    tqdm.write(found if difference < 1e-4 else f"{found}: {advice}")


def micro_batches(model, groups: Groups, tokens_per_forward: int) -> list[tuple[list[int], bool]]:
    """This process's forwards of at most tokens_per_forward tokens, longest first; a longer group goes alone. Each is a
    list of indices of groups, and whether it is real: FSDP needs equally many forwards in all processes, so a process
    with too few runs group 0 again, which is not real and must count 0 times."""
    lengths = [count_tokens([group]) for group in groups]
    rows = None
    if not has_shared_prompts(model):  # each completion is a padded row
        lengths = [len(prompt) + max(map(len, completions)) for prompt, completions in groups]
        rows = [len(completions) for _, completions in groups]

    batches = divide_batches(partial(pack, lengths, rows=rows), tokens_per_forward)
    return [(batch, True) if batch else ([0], False) for batch in batches]


def divide_batches(pack_into, budget: int) -> list:
    """This process's part of pack_into(budget). The number of batches is rounded up to a multiple of the processes,
    some may be empty. It is a function of its arguments, so the processes need no communication."""
    ranks = process_count()
    n = math.ceil(len(pack_into(budget)) / ranks) * ranks

    # The smallest budget that needs no more batches makes them equally full. It lies between `low` and `budget`.
    low = 0
    while ranks > 1 and low < budget:
        middle = (low + budget) // 2
        if len(pack_into(middle)) <= n:
            budget = middle
        else:
            low = middle + 1

    batches = pack_into(budget)
    batches += [[] for _ in range(n - len(batches))]
    return batches[process_rank()::ranks]


def pack(lengths, budget: int, rows=None) -> list[list[int]]:
    """Indices of items in batches of at most `budget` tokens, longest first. An item is a segment of a flat row. With
    `rows`, item i is rows[i] rows, which are padded to the longest row of their batch."""
    sizes = rows or lengths
    batches = []
    load = 0  # rows or tokens in the last batch
    width = 1  # tokens of each
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (load + sizes[i]) * width > budget:
            batches.append([])
            load = 0
            width = lengths[i] if rows else 1  # the first item of a batch is its longest
        batches[-1].append(i)
        load += sizes[i]
    return batches


def unwrap_model(model):
    """The Hugging Face model itself, also under a peft wrapper, whose adapters lie inside the model's layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def eval_mode(model):
    """Turns off dropout, and gradient checkpointing, which would ignore a key-value cache."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def context_length(config) -> float:
    """Tokens of the longest row whose log-probs do not depend on what else is in the batch."""
    config = config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    names = ("max_position_embeddings", "index_topk", "keep_window_size")  # the last two: longer rows are sparse
    bounds = [getattr(config, name, None) for name in names]
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):  # others treat all rows alike
            bounds.append(rope.get("original_max_position_embeddings"))
    return min(filter(None, bounds), default=math.inf)


def progress_bar(*items, **options):
    """tqdm in the first process. An inner bar leaves no line. Without a terminal there are no inner bars, and others
    move every 30 s."""
    is_log = not sys.stderr.isatty()
    is_hidden = not is_first_process() or is_log and bool(tqdm._instances)  # the bars that are not closed
    return tqdm(*items, leave=None, mininterval=30 if is_log else 0.1, maxinterval=30, disable=is_hidden, **options)


def one_line(error):
    """An error message for use within another."""
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, BadInput) else f"{type(error).__name__} {text}"


# ---- Several processes (torchrun): FSDP2 splits the weights ----------

@contextmanager
def process_group():
    """Joins the processes of torchrun, and leaves them at the end."""
    warnings.filterwarnings("ignore", "torch.distributed is")
    was_there = dist.is_initialized()
    if "RANK" in os.environ and "LOCAL_RANK" not in os.environ:
        raise BadInput("RANK without LOCAL_RANK: use torchrun")

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


def shard(model, device: str, dtype="float32"):
    """Splits the weights over the processes (FSDP2). A single process uses it, too, for mixed precision: with dtype
    "bfloat16" each layer computes in a bfloat16 copy, while the optimizer's weights and the sums of gradients stay
    float32. Gradients are sums over the processes: divide a loss by the global batch size."""
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh(device, (process_count(),))
    core = unwrap_model(model)

    # The inputs of a layer are not cast. Some are float32 by intent (cos and sin of OLMo, ALiBi of MPT, the residual
    # of Mamba), and the reference, a plain bfloat16 model, leaves them so: the policy would round differently.
    mixed = MixedPrecisionPolicy(torch.bfloat16 if dtype == "bfloat16" else None, torch.float32,
                                 cast_forward_inputs=False)

    # In one process the frozen base of an adapter stays outside: FSDP2 would only copy it, layer by layer.
    is_outside = mesh.size() == 1 and model is not core
    frozen = {weight for weight in model.parameters() if is_outside and not weight.requires_grad}

    # transformers keeps some modules in float32 when it loads a model in bfloat16, such as routers. So does this.
    kept = re.compile("|".join(core._keep_in_fp32_modules_strict) or "$^")  # "$^" matches no name
    for name, module in reversed(list(core.named_modules())):  # the model last
        weights = [f"{name}.{weight}" for weight, _ in module.named_parameters()]
        is_exact = weights and all(map(kept.search, weights))
        if is_exact or module is core or type(module).__name__ in core._no_split_modules:
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy() if is_exact else mixed,
                        ignored_params=frozen, reshard_after_forward=True)  # parameters() are always shards
            if mesh.size() > 1:
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    core.flat_logprobs = partial(_flat_logprobs, core)  # called directly, decoder and head see only shards
    register_fsdp_forward_method(core, "flat_logprobs")


@contextmanager
def unsharded(model):
    """Keeps whole weights on every GPU: else each generated token would gather them again."""
    parts = []  # modules, and FSDP's hooks, which have nothing to do here and take long
    for module in model.modules():
        if isinstance(module, FSDPModule):
            parts.append((module, module._forward_pre_hooks, module._forward_hooks))
            module._forward_pre_hooks, module._forward_hooks = {}, {}
            module.set_reshard_after_forward(False)
            module.unshard()

    try:
        yield
    finally:
        for module, before, after in parts:
            module._forward_pre_hooks, module._forward_hooks = before, after
            module.set_reshard_after_forward(True)
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
    """The whole tensor, if it is sharded; then all processes must call this together. Others are returned as they
    are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor):
    """This process's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- What a model can do: found out once, when it is loaded ----------

def enable_shared_prompts(model) -> bool:
    """Switches this model's attention so that completions share their prompt, if that is exact. Prints the result once
    and returns it. completion_logprobs calls it. Raises BadInput if it cannot compute this model's log-probs."""
    core = unwrap_model(model)
    if core in PROBED:
        return has_shared_prompts(core)

    own_attention = (core.config._attn_implementation or "eager").replace(SHARED, "sdpa")
    if getattr(core.config.get_text_config(), "attn_logit_softcapping", None):
        own_attention = own_attention.replace("sdpa", "eager")  # transformers 5.17 lets sdpa drop the softcap silently
    core.set_attn_implementation(own_attention)

    name = type(core).__name__.removeprefix("FSDP")
    is_supported = False
    problem = ""  # why completions cannot share their prompt

    try:
        with torch.no_grad(), eval_mode(core):
            check_padded(core)
            is_supported = True
            switch_attention(core)
    except Exception as error:  # no such keyword, no sdpa, another mask
        if hasattr(core, "reset_iter_state"):  # FSDP's, from torch 2.13 on: the error interrupted a forward
            core.reset_iter_state()
        core.set_attn_implementation(own_attention)
        if isinstance(error, torch.OutOfMemoryError):
            raise

        problem = one_line(error)
        if not is_supported:
            raise BadInput(f"{name} is not supported: {problem}; in bfloat16, try float32") from error

    print(f"{name}: " + (f"padded rows: {problem}" if problem else "completions share their prompt"))
    PROBED.add(core)
    return not problem


def check_padded(core):
    """Padded rows must give the log-probs of one forward per sequence, also if that ends earlier. Later tokens must
    change a log-prob far less than the prompt does, or no more than rounding: random weights change little."""
    error, dtype = probe(core, lay_out_padded, cut=True)
    blind, _ = probe(core, partial(lay_out_padded, blind=True))
    rounding, limit, ratio = (1e-5, 1e-3, 1e4) if dtype == torch.float32 else (0.02, 0.25, 20)
    if not error < max(rounding, min(limit, blind / ratio)):  # `not <` also catches NaN
        raise BadInput(f"later tokens change log-probs by {error:.2g} nats: no causal language model, or NaN weights")


def switch_attention(core):
    """A flat row must give the log-probs of one forward per sequence, and a row without spans must clearly differ."""
    layers = set(getattr(core.config.get_text_config(), "layer_types", None) or ())
    if core._is_stateful or not layers <= {"full_attention", "sliding_attention"}:
        raise CannotShare("recurrent, convolutional or chunked layers would mix completions")

    core.set_attn_implementation(SHARED)  # stays on: gradient checkpointing reruns it in the backward pass
    shared, dtype = probe(core, lay_out_shared)
    blind, _ = probe(core, partial(lay_out_shared, blind=True))
    limit, ratio = (1e-4, 20) if dtype == torch.float32 else (0.25, 3)
    if not (shared < limit and shared < blind / ratio):  # `not` also catches NaN
        raise CannotShare(f"a shared prompt changes log-probs by {shared:.2g} nats (blind: {blind:.2g})")


def has_shared_prompts(model):
    return unwrap_model(model).config._attn_implementation == SHARED


class StepMemory(NamedTuple):
    """What a training step needs of the GPU's memory, in bytes."""
    weights: float
    optimizer: float  # the gradient and Adam's two moments of each weight that trains
    activations: float  # what a forward keeps for its backward
    checkpointed: float  # the same, with gradient checkpointing
    gpu: float  # the whole GPU

    @property
    def used(self) -> float:
        return sum(self[:3]) / self.gpu  # without checkpointing

    def __str__(self):
        line = ("weights {:.1f} + gradients, Adam {:.1f} + activations {:.1f} GB ({:.1f} checkpointed) "
                "of {:.1f} GB")
        return line.format(*(size / 1e9 for size in self))


def step_memory(model, tokens_per_forward) -> StepMemory:
    """Measures one forward of 64 tokens on the GPU, from which the memory of a step follows."""
    weights = torch.cuda.memory_allocated()
    logprobs = completion_logprobs(model, [((1,) * 64, [(1,)])])  # noqa: F841  keeps what a backward pass needs
    activations = (torch.cuda.memory_allocated() - weights) / 64 * tokens_per_forward
    trained = sum(local(weight).nbytes for weight in model.parameters() if weight.requires_grad)

    # Checkpointing keeps the inputs of all layers, in bfloat16, and what one layer at a time keeps.
    config = unwrap_model(model).config.get_text_config()
    layers = config.num_hidden_layers
    checkpointed = activations / layers + 2 * layers * config.hidden_size * tokens_per_forward
    mine = weights, 3 * trained, activations, checkpointed, torch.cuda.mem_get_info()[1]
    return StepMemory(*np.max(all_gather(mine), axis=0))  # of all processes, so that they decide alike


def probe(core, lay_out, cut=False):
    """The largest difference, in nats, from log-probs of one forward per sequence, and the dtype of the forwards. With
    `cut` that sequence ends earlier, which must change nothing."""
    ids = torch.linspace(1, core.config.get_text_config().vocab_size - 1, 96).long().tolist()
    prompt, first, second = tuple(ids[::3]), tuple(ids[1::3]), tuple(ids[2::3][:5])  # 32, 32 and 5 tokens
    (logprobs,) = forward(core, [(prompt, [first, second])], lay_out)

    errors = []
    for completion, found in zip((first, second), logprobs):
        if cut:
            completion = completion[:len(completion) // 2]
        n = len(completion)
        logits = core(input_ids=torch.tensor([prompt + completion], device=core.device), use_cache=False).logits
        all_logprobs = logits[0, len(prompt) - 1:-1].float().log_softmax(-1)  # (n, V)
        errors.append((found[:n] - all_logprobs[range(n), completion]).abs().max())
    return torch.stack(errors).max().item(), logits.dtype


# ---- Shared prompts: one flat row per forward, without padding -------

def shared_prompt_attention(module, query, key, value, attention_mask, spans=None, sliding_window=None, **kwargs):
    """Attention over a flat row: query (1, heads, T, D), key and value (1, key heads, T, D) -> (1, T, heads, D).
    A span is the queries of one completion (the first: of prompt + completion). Its keys: [prompt ; own]."""
    if spans is None:  # an ordinary batch, as in generate()
        output, _ = sdpa(module, query, key, value, attention_mask, sliding_window=sliding_window, **kwargs)
        # For one token it has odd strides, for which a frozen linear layer would read its weight again for each row.
        return output.flatten(0, 1).unflatten(0, (len(query), -1)), None
    if attention_mask is not None and not sliding_window:
        raise CannotShare(f"{type(module).__name__} masks more than the future")
    if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise CannotShare(f"{type(module).__name__} has softcapped scores, attention sinks or a position bias")

    # Each span gets the keys of its prompt and its own, side by side.
    keys, cu_seq_q, cu_seq_k, sizes_q, sizes_k = spans
    if keys is not None:
        key, value = key.index_select(2, keys), value.index_select(2, keys)  # (1, key heads, T_k, D)

    if one_kernel_serves(query, value) and not kwargs.get("dropout"):
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (tokens, heads, D)
        window = (sliding_window - 1 if sliding_window else -1, 0)  # how far a query sees back, and ahead
        return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max(sizes_q), max(sizes_k), window_size=window,
                           scale=kwargs.get("scaling"), enable_gqa=True)[None], None

    # On a CPU, and in float32, one ordinary attention for each span is as fast.
    outputs = []
    for q, k, v in zip(query.split(sizes_q, dim=2), key.split(sizes_k, dim=2), value.split(sizes_k, dim=2)):
        n_q, reach = q.shape[2], sliding_window or k.shape[2]
        k, v = (x[:, :, 1 - n_q - reach:] for x in (k, v))  # without keys that no query reaches
        n_before = k.shape[2] - n_q  # keys before the first query
        mask = None  # plain causal
        if n_q > 1 and (n_before > 0 or n_q > reach):
            mask = q.new_ones(1, 1, n_q, n_before + n_q, dtype=torch.bool).tril(n_before).triu(n_before - reach + 1)
        outputs.append(sdpa(module, q, k, v, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


def shared_prompt_mask(*args, attention_mask=None, local_size=None, **kwargs):
    """transformers' mask, with two exceptions: the ones of lay_out_shared (their stride is 0) are not searched for
    zeros, which would wait for the GPU, and windows make no (T, T) mask."""
    ones = attention_mask is not None and attention_mask.stride(-1) == 0
    if ones and local_size:
        return attention_mask[:, None, None]  # (1, 1, 1, T): a layer that is not told its window is refused
    return sdpa_mask(*args, attention_mask=None if ones else attention_mask, local_size=local_size, **kwargs)


def one_kernel_serves(query, value):
    """Whether one varlen_attn call can serve all spans. On CUDA a loop over them is bound by kernel launches."""
    size, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    return (query.is_cuda and half and size == value.shape[-1] and size <= 256 and size % 8 == 0
            and torch.cuda.get_device_capability(query.device) >= (8, 0))  # Ampere or newer


AttentionInterface.register(SHARED, shared_prompt_attention)
AttentionMaskInterface.register(SHARED, shared_prompt_mask)


def to_device(values, device):
    """Copies a list, an array or a CPU tensor to a device, without waiting for the kernels of a GPU."""
    tensor = torch.as_tensor(values)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def lay_out_shared(groups, device, blind=False):
    """Groups -> the inputs of one flat row; and for each completion token, (N,) each, the place in the row that
    predicts it, and its id."""
    ids, targets = [], []
    positions, sources, keys = [], [], []  # arrays, joined below
    query_ends, key_ends = [0], [0]
    for prompt, completions in groups:
        before = np.arange(len(ids), len(ids) + len(prompt))  # places of the prompt
        ids += prompt
        positions.append(np.arange(len(prompt)))

        for completion in completions:
            end = len(prompt) + len(completion)
            own = np.arange(len(ids), len(ids) + len(completion))
            ids += completion
            positions.append(np.arange(len(prompt), end))  # each completion follows its prompt
            sources += [before[-1:], own[:-1]]  # the shift by one: the token before predicts it
            targets += completion

            keys += [before, own]
            query_ends.append(len(ids))  # the first completion simply continues its prompt
            key_ends.append(key_ends[-1] + end)

    # Sizes are computed before the copy to a GPU, because reading them there would wait for it.
    ends = np.array([query_ends, key_ends], np.int32)  # (2, spans + 1)
    sizes_q, sizes_k = np.diff(ends).tolist()
    cu_seq_q, cu_seq_k = to_device(ends, device)
    keys = to_device(np.concatenate(keys), device) if len(ids) < key_ends[-1] else None  # (T_k,); None: the row itself
    ids, positions = to_device(np.stack([ids, np.concatenate(positions)]), device)  # (T,)
    sources, targets = to_device(np.stack([np.concatenate(sources), targets]), device)  # (N,)

    # Without a mask of ones, transformers treats restarting positions as packed sequences and masks the prompts.
    ones = torch.ones(1, 1, dtype=torch.bool, device=device).expand(1, len(ids))

    # A layer that ignores `spans` treats the row as one sequence. The probe must be able to see that, so it also
    # measures a row `blind`, without spans: if that makes no clear difference for this model, an exact result would
    # be no evidence that spans arrive.
    spans = None if blind else (keys, cu_seq_q, cu_seq_k, sizes_q, sizes_k)
    return dict(input_ids=ids[None], position_ids=positions[None], attention_mask=ones, spans=spans), sources, targets


def lay_out_padded(groups, device, blind=False):
    """The same as a right-padded batch with a row for each completion, which is exact for every causal model. For the
    probe `blind` leaves the prompts out, but for their last token."""
    if blind:
        groups = [(prompt[-1:], completions) for prompt, completions in groups]
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
    return dict(input_ids=ids.clamp(min=0), attention_mask=(ids >= 0).long()), sources, targets
