"""Log-probs of completions, and a cache of those of the frozen reference model.

    completion_logprobs(model, groups)   log π(token | everything before it), for each token of each completion
    ReferenceCache                       the same numbers of a frozen model: computed once, saved, shared by later runs
    Swap                                 reference weights kept on the CPU: for new completions or a moving reference

A group is `(prompt_ids, [completion_ids, ...])`, tuples of token ids; a completion includes its EOS. Policy and
reference go through one function, so they agree before the first update: margin 0, loss ln 2, KL 0.
Shapes: T tokens in a forward, T_k keys of all spans, N completion tokens, D head size, H hidden size, V vocabulary.
"""
import gc
import hashlib
import json
import os
import pickle
import pickletools
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock, Timeout  # comes with torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface

Groups = list[tuple[tuple[int, ...], list[tuple[int, ...]]]]
Ragged = list[list[torch.Tensor]]  # for each group, for each completion: (len(completion),)
HEAD_BYTES = 2**27  # of float32 logits in memory at a time: 220 completion tokens at V = 151,936
HEADS: WeakKeyDictionary = WeakKeyDictionary()  # model -> (factor, softcap) between its output head and its logits
SHARED = "sdpa_shared_prompt"  # with "sdpa" in its name, transformers rejects it for models without sdpa
sdpa, sdpa_mask = AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"]


class BadInput(ValueError):
    """Wrong usage, data or files. The message is one sentence: where, what is wrong, what to do."""


class CannotShare(ValueError):
    """The completions of this model cannot share a prompt: its attention is not plain causal attention over one row."""


# ---- Shared prompts: one flat row [p1 | y11 | y12 | p2 | y21 ..] per forward, without padding -----------------------

def shared_prompt_attention(module, query, key, value, attention_mask, spans=None, sliding_window=None, **kwargs):
    """Attention over a flat row: query (1, heads, T, D), key and value (1, key heads, T, D) -> (1, T, heads, D).
    A span is the queries of one completion (a group's first: of prompt + completion). Its keys: [prompt ; own]."""
    if spans is None:  # an ordinary batch, as in generate()
        return sdpa(module, query, key, value, attention_mask, sliding_window=sliding_window, **kwargs)
    if attention_mask is not None and not sliding_window:
        raise CannotShare(f"{type(module).__name__} masks more than the future")
    if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise CannotShare(f"{type(module).__name__} has softcapped scores, attention sinks or a position bias")
    keys, cu_seq_q, cu_seq_k, sizes_q, sizes_k = spans
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast rotary embeddings return float32
    if keys is not None:
        key, value = (x.index_select(2, keys) for x in (key, value))  # (1, key heads, T_k, D)
    if one_kernel_serves(query, value) and not kwargs.get("dropout"):
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        window = (sliding_window - 1 if sliding_window else -1, 0)  # how far a query sees back, and ahead
        return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max(sizes_q), max(sizes_k), window_size=window,
                           scale=kwargs.get("scaling"), enable_gqa=True)[None], None
    outputs = []
    for q, k, v in zip(query.split(sizes_q, 2), key.split(sizes_k, 2), value.split(sizes_k, 2)):
        n_q, reach = q.shape[2], sliding_window or k.shape[2]
        k, v = (x[:, :, 1 - n_q - reach:] for x in (k, v))  # without keys that no query reaches
        n, mask = k.shape[2] - n_q, None  # n keys are before the first query; None: plain causal
        if n_q > 1 and (n > 0 or n_q > reach):
            mask = q.new_ones(1, 1, n_q, n + n_q, dtype=torch.bool).tril(n).triu(n - reach + 1)
        outputs.append(sdpa(module, q, k, v, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


def shared_prompt_mask(*args, attention_mask=None, **kwargs):
    """transformers' mask. It need not look for zeros in the ones of lay_out_shared, known by their stride of 0: a CPU
    would wait for the GPU in every forward."""
    ones = attention_mask is not None and attention_mask.stride(-1) == 0
    return sdpa_mask(*args, attention_mask=None if ones else attention_mask, **kwargs)


def one_kernel_serves(query, value) -> bool:
    """Whether one varlen_attn call can serve all spans. On CUDA a loop over spans is bound by kernel launches."""
    size, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    return (query.is_cuda and half and size == value.shape[-1] and size <= 256 and size % 8 == 0
            and torch.cuda.get_device_capability(query.device) >= (8, 0))  # Ampere or newer


AttentionInterface.register(SHARED, shared_prompt_attention)
AttentionMaskInterface.register(SHARED, shared_prompt_mask)


def to_device(tensor: torch.Tensor, device) -> torch.Tensor:
    """Copies a CPU tensor. To a GPU without waiting: otherwise the kernels launched so far would have to end first."""
    on_gpu = torch.device(device).type == "cuda"
    return tensor.pin_memory().to(device, non_blocking=True) if on_gpu else tensor.to(device)


def lay_out_shared(groups: Groups, device, blind=False) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Groups -> the inputs of one flat row, and per completion token (N,) its id and the row index predicting it.
    `blind` leaves the spans out, so attention treats the row as one sequence. Only the probe uses it."""
    row, scored, keys, ends = [], [], [], [(0, 0)]
    for prompt, completions in groups:
        before = range(len(row), len(row) + len(prompt))
        row += enumerate(prompt)  # (position, id)
        for y in completions:
            own = range(len(row), len(row) + len(y))
            row += enumerate(y, len(prompt))
            scored += zip([before[-1], *own], y)  # the shift by one: the index before a token predicts it
            keys += [*before, *own]
            ends.append((len(row), len(keys)))  # of the span; the first completion simply continues its prompt
    sizes_q, sizes_k = np.diff(ends, axis=0).T.tolist()  # (spans,): on the CPU: no GPU sync
    cu_seq_q, cu_seq_k = to_device(torch.tensor(list(zip(*ends)), dtype=torch.int32), device)  # (spans + 1,)
    keys = to_device(torch.tensor(keys), device) if len(keys) > len(row) else None  # (T_k,); None: the keys are the row
    positions, ids = to_device(torch.from_numpy(np.array(row).T.copy()), device)  # (T,); a list of pairs is slow
    sources, targets = to_device(torch.from_numpy(np.array(scored).T.copy()), device)  # (N,)
    # without an all-ones mask, transformers treats restarting positions as packed sequences and masks the prompts
    ones = torch.ones(1, 1, dtype=torch.bool, device=device).expand(1, len(row))
    inputs = dict(input_ids=ids[None], position_ids=positions[None], attention_mask=ones)
    return inputs | dict(spans=None if blind else (keys, cu_seq_q, cu_seq_k, sizes_q, sizes_k)), sources, targets


def lay_out_padded(groups: Groups, device) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """The same as an ordinary batch, one right-padded row per completion: exact for every causal model."""
    rows = [(prompt, y) for prompt, completions in groups for y in completions]
    ids = [torch.tensor(prompt + y) for prompt, y in rows]
    ids = to_device(pad_sequence(ids, batch_first=True, padding_value=-1), device)
    scored = [(i * ids.shape[1] + place, token) for i, (prompt, y) in enumerate(rows)
              for place, token in enumerate(y, len(prompt) - 1)]  # the shift by one
    sources, targets = to_device(torch.from_numpy(np.array(scored).T.copy()), device)
    return dict(input_ids=ids.clamp(min=0), attention_mask=(ids >= 0).long()), sources, targets


# ---- What a model can do: found out once, when it is loaded ---------------------------------------------------------

def share_prompts(model, dtype: str = "float32") -> bool:
    """Switches this model's attention so that completions share their prompt, if that is exact. Prints the result.
    Exact: a flat row gives the log-probs of one forward per sequence, and without spans clearly not. Called once
    per model, by completion_logprobs if not by you. `dtype`: of later forwards. Raises BadInput like find_head."""
    core, head, reason = base_model(model), None, ""
    config, before = core.config.get_text_config(), core.config._attn_implementation or "eager"
    before = before.replace(SHARED, "sdpa")
    if getattr(config, "attn_logit_softcapping", None):
        before = before.replace("sdpa", "eager")  # transformers 5.17 lets sdpa drop the softcap silently
    core.set_attn_implementation(before)
    with torch.no_grad(), eval_mode(core):
        try:
            precisions = {dtype} if isinstance(core, FSDPModule) else {"float32", dtype}
            head = find_head(core, "float32" if "float32" in precisions else dtype)
            layers = set(getattr(config, "layer_types", None) or ())
            if core._is_stateful or not layers <= {"full_attention", "sliding_attention"}:
                raise CannotShare("recurrent, convolutional or chunked layers would mix completions")
            core.set_attn_implementation(SHARED)  # stays on: gradient checkpointing reruns it in the backward pass
            for precision in precisions:  # the CUDA kernel serves half precision only
                shared = probe(core, lay_out_shared, head, precision)
                blind = probe(core, partial(lay_out_shared, blind=True), head, precision)
                limit, ratio = (1e-4, 20) if core.dtype == torch.float32 and precision == "float32" else (0.25, 3)
                if not (shared < limit and shared < blind / ratio):  # `not` also catches NaN
                    raise CannotShare(f"a shared prompt changes log-probs by {shared:.2g} nats (blind: {blind:.2g})")
        except (TypeError, ValueError, RuntimeError) as error:  # no such keyword, no sdpa, another mask
            if isinstance(core, FSDPModule):
                core.reset_iter_state()  # the error interrupted a forward
            core.set_attn_implementation(before)
            if out_of_memory(error):
                raise
            reason = one_line(error)
            if head is None:
                raise BadInput(f"{type(core).__name__} is not supported: {reason}") from error
    HEADS[core] = head
    name = type(core).__name__.removeprefix("FSDP")
    print(f"{name}: " + (f"padded rows: {reason}" if reason else "completions share their prompt"))
    return not reason


def shares_prompts(model) -> bool:
    return base_model(model).config._attn_implementation == SHARED


def find_head(core, dtype: str) -> tuple[float, float | None]:
    """Factor and softcap between head and logits. Raises BadInput if no factor reproduces the model's logits."""
    config = core.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    factors = {getattr(config, name, None) or 1.0 for name in ("logit_scale", "logits_scaling", "lm_head_multiplier")}
    factors |= {1 / factor for factor in factors}  # Granite's divides
    error, factor = min((probe(core, lay_out_padded, (factor, cap), dtype), factor) for factor in factors)
    if not error < (1e-3 if core.dtype == torch.float32 and dtype == "float32" else 0.25):  # `not <` also catches NaN
        raise BadInput(f"decoder + head differ from its logits by {error:.2g} nats, or its weights hold NaN")
    return factor, cap


def probe(core, lay_out: Callable, head: tuple, dtype: str) -> float:
    """Largest difference, in nats, between log-probs in this layout and those of one forward per sequence."""
    ids = torch.linspace(1, core.config.get_text_config().vocab_size - 1, 24).long().tolist()
    prompt, completions, errors = tuple(ids[::3]), [tuple(ids[1::3]), tuple(ids[2::3][:5])], []
    with autocast(core, dtype):
        for y, logps in zip(completions, forward(core, [(prompt, completions)], lay_out, head)[0]):
            logits = core(input_ids=torch.tensor([prompt + y], device=core.device), use_cache=False).logits.float()
            truth = logits[0, len(prompt) - 1:-1].log_softmax(-1)[torch.arange(len(y)), list(y)]
            errors.append((logps - truth).abs().max())
    return torch.stack(errors).max().item()


# ---- Log-probs ------------------------------------------------------------------------------------------------------

def completion_logprobs(model, groups: Groups, tokens_per_forward=16384, dtype="float32", temperature=1.0) -> Ragged:
    """log π(token | prompt and the tokens before it) in nats: per group, per completion, float32 (len(completion),).
    Differentiable. tokens_per_forward bounds a forward (a longer group goes alone): memory and speed, never the result.
    dtype "bfloat16" runs the forwards under autocast. temperature divides the logits, as in sampling.
    Raises BadInput for an empty prompt or completion, a row outside the model, or a model it cannot serve exactly."""
    core, results = base_model(model), {}
    context, vocabulary = context_length(core.config), core.get_input_embeddings().weight.shape[0]
    for prompt, completions in groups:
        if not prompt or not completions or not all(completions):
            raise BadInput("a prompt or completion without tokens has no log-prob: leave it out")
        length, highest = len(prompt) + max(map(len, completions)), max(map(max, (prompt, *completions)))
        if length > context or highest >= vocabulary:
            raise BadInput(f"a row of {length} tokens with ids up to {highest} is outside the model: it has {context} "
                           f"positions and {vocabulary} embeddings")
    if core not in HEADS:
        share_prompts(model, dtype)
    try:
        for batch in micro_batches(model, groups, tokens_per_forward):
            with autocast(model, dtype):
                results.update(zip(batch, forward(core, [groups[i] for i in batch], temperature=temperature)))
        return [results[i] for i in range(len(groups))]
    except CannotShare as error:  # seen only in rows longer than the probe's
        if isinstance(core, FSDPModule):  # the other processes would wait for the forward that failed here
            raise BadInput(f"{one_line(error)}: this model cannot be split over processes") from error
        core.set_attn_implementation("sdpa")
        tqdm.write(f"{type(core).__name__}: padded rows from now on, because {error}")
        return completion_logprobs(model, groups, tokens_per_forward, dtype, temperature)


def forward(core, groups: Groups, lay_out=None, head=None, temperature=1.0) -> Ragged:
    lay_out = lay_out or (lay_out_shared if shares_prompts(core) else lay_out_padded)
    layout = lay_out(groups, core.get_input_embeddings().weight.device)
    flat_logprobs = core.flat_logprobs if isinstance(core, FSDPModule) else partial(_flat_logprobs, core)
    return ragged(flat_logprobs(*layout, head or HEADS[core], temperature), groups)


def _flat_logprobs(core, inputs: dict, sources, targets, head: tuple, temperature: float) -> torch.Tensor:  # (N,)
    factor, cap = head
    def token_logps(hidden, targets):  # (n, H), (n,) -> (n,)
        # the head is called as a module: `head.weight` would miss a LoRA adapter and a bias
        logits = core.get_output_embeddings()(hidden).float()  # (n, V), the expensive thing
        logits = logits * factor if factor != 1 else logits  # each pass over (n, V) counts
        logits = cap * torch.tanh(logits / cap) if cap else logits
        logits = logits / temperature if temperature != 1 else logits
        return -F.cross_entropy(logits, targets, reduction="none")

    hidden = core.get_decoder()(**inputs, use_cache=False)[0].flatten(0, 1)  # (T, H)
    hidden = hidden.index_select(0, sources)  # (N, H): only positions that predict a completion token
    size = 4 * len(core.get_input_embeddings().weight)  # bytes of the logits of a token
    rows = max(1, HEAD_BYTES // size // (1 if hidden.is_cuda else 2))  # 64 MiB is best on a CPU
    if len(hidden) * size > HEAD_BYTES:  # the backward recomputes each chunk's logits, so (N, V) is never in memory
        token_logps = partial(checkpoint, token_logps, use_reentrant=False)
    return torch.cat([token_logps(*chunk) for chunk in zip(hidden.split(rows), targets.split(rows))])


def ragged(flat: torch.Tensor, groups: Groups) -> Ragged:  # (N,)
    parts = iter(flat.split([len(y) for _, completions in groups for y in completions]))
    return [[next(parts) for _ in completions] for _, completions in groups]


def log_ratios(logps: Ragged, groups: Groups, known: Mapping | None, clamp: tuple | None = None) -> Ragged:
    """log π − log π_ref of each token. logps: from completion_logprobs for these groups; known[prompt, y]: the
    reference's (None: all 0). clamp: (low, high) in nats, beyond which no gradient passes (arXiv:2509.24207)."""
    ratios = torch.cat([y for completions in logps for y in completions])  # (N,)
    if known is not None:
        reference = np.concatenate([known[prompt, y] for prompt, completions in groups for y in completions])
        ratios = ratios - to_device(torch.from_numpy(reference), ratios.device)
    return ragged(ratios.clamp(*clamp) if clamp else ratios, groups)


def check_agreement(ratios: torch.Tensor, dtype: str):
    """Before the first update log π − log π_ref, per token, is 0 to rounding. Says so, or raises BadInput."""
    print(f"step 0: policy and reference differ by at most {ratios.abs().max():.1e} nats per token")
    if not ratios.abs().mean() < (3e-2 if dtype == "bfloat16" else 1e-4):
        raise BadInput(f"step 0: policy and reference are one model but differ by {ratios.abs().mean():.2g} nats "
                       "per token: the cache is of another model (delete it), or the forward is not deterministic")


def micro_batches(model, groups: Groups, tokens_per_forward: int, rank=0, ranks=1) -> list[list[int]]:
    """Indices of groups in forwards of at most tokens_per_forward tokens, longest first. A longer group goes alone.
    Returns this process's share. All get the same number of forwards; one without work is an empty list."""
    total, rows = (sum, None) if shares_prompts(model) else (max, [len(ys) for _, ys in groups])
    lengths = [len(prompt) + total(map(len, ys)) for prompt, ys in groups]
    return share_out(partial(pack, lengths, rows=rows), tokens_per_forward, rank, ranks)


def share_out(pack_into: Callable, budget: int, rank: int, ranks: int) -> list[list[int]]:
    """This process's part of pack_into(budget). The number of batches is rounded up to a multiple of `ranks`; the
    smallest budget with no more batches makes them equally full. Needs no communication."""
    n = -(-len(pack_into(budget)) // ranks) * ranks
    if ranks > 1:
        budget = bisect_left(range(budget), True, key=lambda smaller: len(pack_into(smaller)) <= n)
    batches = pack_into(budget)
    return (batches + [[]] * (n - len(batches)))[rank::ranks]


def pack(lengths: list[int], budget: int, rows: list[int] | None = None) -> list[list[int]]:
    """Indices of items in batches of at most `budget` tokens, longest first. An item is a segment of a flat row or,
    with `rows`, that many rows, padded to the longest row of their batch."""
    batches, load, longest = [], torch.inf, 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if load + (rows[i] * longest if rows else lengths[i]) > budget:
            batches.append([])
            load, longest = 0, lengths[i]  # the first of a batch is its longest
        batches[-1].append(i)
        load += rows[i] * longest if rows else lengths[i]
    return batches


def base_model(model):
    """The Hugging Face model itself, also under a peft wrapper, whose adapters lie inside the model's layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def autocast(model, dtype: str):
    return torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == "bfloat16")  # weights stay as they are


@contextmanager
def eval_mode(model):
    """Outside training steps: no dropout, and no gradient checkpointing, which would ignore a key-value cache."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        yield


def context_length(config) -> float:
    """Tokens of the longest row whose log-probs do not depend on what else is in the batch."""
    config = config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    bounds = [getattr(config, "max_position_embeddings", None)]
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):  # others rotate all rows alike
            bounds.append(rope.get("original_max_position_embeddings"))
    return min(filter(None, bounds), default=torch.inf)


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)  # on a CPU


def one_line(error: BaseException) -> str:
    name = "" if isinstance(error, (BadInput, CannotShare)) else type(error).__name__ + " "
    return name + "".join(c if c.isprintable() else "?" for c in " ".join(str(error).split())[:200])


# ---- Several processes (torchrun): weights are split with FSDP2, and every process scores its share -----------------

def processes() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def shard(model, mesh, dtype="float32"):
    """Splits the weights over a mesh (n,), or replicates them over a mesh (n, 1), layer by layer (fully_shard). Sums
    the gradients, no mean: divide a loss by the global batch size. dtype: of later forwards. With bfloat16, layers are
    gathered in bfloat16, because autocast would keep a copy of every layer; their inputs stay float32."""
    core = base_model(model)
    layers = [m for m in core.modules() if m is core or type(m).__name__ in core._no_split_modules]
    half = torch.bfloat16 if dtype == "bfloat16" else None
    for module in reversed(layers):  # the model last
        policy = MixedPrecisionPolicy(half if module is not core else None, torch.float32, cast_forward_inputs=False)
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # parameters() are always shards
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    core.flat_logprobs = MethodType(_flat_logprobs, core)  # called directly, decoder and head see only shards
    register_fsdp_forward_method(core, "flat_logprobs")


def all_gather(mine) -> list:
    """All-gather of a Python object: the list of all processes' `mine`, by rank."""
    everyone = [mine] * processes()[1]
    if dist.is_initialized():
        dist.all_gather_object(everyone, mine)
    return everyone


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of this tensor over the processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one. All processes must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A full tensor, sharded as `like` is. Every process has the full one, so nothing is sent."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- The frozen reference: as a dictionary, or as weights that are swapped in ---------------------------------------

class ReferenceCache(Mapping):
    """(prompt_ids, completion_ids) -> float32 array (len(completion),): token log-probs under a frozen reference.
    `header`: strings that say what they belong to, such as reference=checkpoint_digest(folder), dtype="float32". A file
    with another header is refused. 8 bytes per completion token and 4 per prompt token, in memory and on disk."""

    def __init__(self, **header: str):
        self.header = {"format": "3", **header}
        self.table: dict[bytes, dict[bytes, bytes]] = {}  # prompt -> completion -> log-probs: uint32, uint32, float32

    def __len__(self):
        return sum(map(len, self.table.values()))

    def __iter__(self):
        return ((tuple(array("I", x)), tuple(array("I", y))) for x, scored in self.table.items() for y in scored)

    def __getitem__(self, key):
        prompt, y = map(bytes_of, key)
        return np.frombuffer(self.table[prompt][y], np.float32)  # KeyError: not scored, call fill first

    def fill(self, load_model: Callable, groups: Groups, tokens_per_forward=16384, dtype="float32", path=None):
        """Scores what is neither in this cache nor in the file at `path`, and saves it there. Returns the number of
        completions scored. The model is deleted afterwards, so `load_model()` must keep no reference to it; it is
        not called if nothing is missing."""
        if path and Path(path).exists():
            self.load(path)
        parts = self.missing(groups, tokens_per_forward)
        missing = sum(len(ys) for _, ys in parts)
        mine = hash(tuple((prompt, *ys) for prompt, ys in parts))  # of ints: the same number in every process
        if len(set(all_gather(mine))) > 1:
            raise BadInput(f"the processes have different caches: do all of them read the same {path}?")
        if missing:
            try:
                if path:
                    self.save(path)  # a path that cannot be written fails now
            except OSError as error:
                raise BadInput(f"{path} cannot be written, {one_line(error)}: name another") from error
            model = load_model()
            try:
                self.score(model, groups, tokens_per_forward, dtype, path=path)  # the expensive thing
            finally:
                del model
                gc.collect()
                torch.cuda.empty_cache()
        return missing

    @torch.no_grad()
    def score(self, model, groups: Groups, tokens_per_forward=16384, dtype="float32", temperature=1.0, path=None):
        """Scores what is missing with `model`. Saves to `path` about every minute, at the end, and on an exception."""
        if base_model(model) not in HEADS:
            share_prompts(model, dtype)  # before the groups are packed
        todo = self.missing(groups, tokens_per_forward if shares_prompts(model) else 0)  # 0: one row per completion
        batches = micro_batches(model, todo, tokens_per_forward, *processes()) if todo else []
        tokens, new, due = [len(prompt) + sum(map(len, ys)) for prompt, ys in todo], [], time.monotonic() + 60
        total = sum(tokens[i] for batch in batches for i in batch)
        try:
            with eval_mode(model), tqdm(desc="reference", total=total, unit="tok", unit_scale=True) as bar:
                for batch in batches:  # longest first: out of memory comes early
                    some = [todo[i] for i in batch or [0]]  # []: no work, but FSDP needs equally many forwards
                    logps = completion_logprobs(model, some, tokens_per_forward, dtype, temperature)
                    flat = torch.cat([y for completions in logps for y in completions]).cpu()  # one transfer
                    if not flat.isfinite().all():
                        raise BadInput("the reference gives a log-prob that is not finite: its checkpoint is damaged")
                    for (prompt, completions), rows in zip(some, ragged(flat, some)):
                        scored = {bytes_of(y): row.numpy().tobytes() for y, row in zip(completions, rows)}
                        new.append((bytes_of(prompt), scored))
                        self.table.setdefault(bytes_of(prompt), {}).update(scored)
                    bar.update(sum(tokens[i] for i in batch))
                    if path and time.monotonic() > due:
                        began = time.monotonic()
                        self.save(path)
                        due = time.monotonic() + max(60, 20 * (time.monotonic() - began))
        except BaseException:
            if path:
                self.save(path)
            raise
        for theirs in all_gather(new):
            for prompt, scored in theirs:
                self.table.setdefault(prompt, {}).update(scored)
        if path and processes()[0] == 0:
            self.save(path)

    def keep_share(self, model, batches: Iterable[Groups], tokens_per_forward: int):
        """Removes what this process will not look up for its share of the micro-batches of these batches."""
        whole, self.table = self.table, {}
        for groups in batches:
            for micro in micro_batches(model, groups, tokens_per_forward, *processes()):
                for prompt, completions in (groups[i] for i in micro or [0]):
                    x = bytes_of(prompt)
                    self.table.setdefault(x, {}).update({y: whole[x][y] for y in map(bytes_of, completions)})

    def missing(self, groups: Groups, tokens_per_forward: int) -> Groups:
        """What is not scored yet: the completions of a prompt together, in parts of at most tokens_per_forward tokens.
        The parts do not depend on what is cached, so a killed pass resumes with the remaining forwards."""
        merged, parts = {}, []
        for prompt, completions in groups:
            merged.setdefault(prompt, []).extend(completions)
        for prompt, completions in merged.items():
            completions = list(dict.fromkeys(completions))
            for part in pack(list(map(len, completions)), tokens_per_forward - len(prompt)):
                parts.append((prompt, [completions[i] for i in part if (prompt, completions[i]) not in self]))
        return [part for part in parts if part[1]]

    def save(self, path):
        """Writes the header (a JSON line) and the table (a pickle) atomically. Keeps what another job saved."""
        lock = FileLock(f"{os.path.realpath(path)}.lock")
        try:
            held = lock.acquire(timeout=2)
        except Timeout:
            tqdm.write(f"waiting for another job that writes {path}")
            held = lock.acquire()
        with held:
            if Path(path).exists():
                self.load(path)
            table = pickle.dumps(self.table, protocol=4)
            header = json.dumps(self.header | {"sha256": hashlib.sha256(table).hexdigest()}) + "\n"
            write_whole(path, lambda file: file.writelines([header.encode(), table]))

    def load(self, path):
        """Adds a file's entries, executing nothing in it. Raises BadInput if it is damaged, or has another header."""
        try:
            if not Path(path).is_file():
                raise BadInput("it is no regular file")
            first_line, _, pickled = Path(path).read_bytes().partition(b"\n")
            header = json.loads(first_line)
            for name, mine in self.header.items():
                if header.get(name) != mine:
                    theirs = str(header.get(name))[:80]
                    raise BadInput(f"it was made with {name} {theirs!r}, but this run has {name} {mine[:80]!r}")
            if hashlib.sha256(pickled).hexdigest() != header["sha256"]:
                raise BadInput("its checksum does not match")
            table = load_builtins(pickled)
            for prompt, scored in table.items():
                if len(prompt) % 4 or any(len(y) % 4 or len(y) != len(z) for y, z in scored.items()):
                    raise BadInput("its lengths do not match")
                if not all(np.isfinite(np.frombuffer(z, np.float32)).all() for z in scored.values()):
                    raise BadInput("it holds a log-prob that is not finite")
        except Exception as error:  # any error of a damaged or hostile file
            advice = "name another, or delete it if it is an old cache"
            raise BadInput(f"{path} cannot be used, {one_line(error)}: {advice}") from None
        for prompt, scored in table.items():
            self.table[prompt] = scored | self.table.get(prompt, {})


def load_builtins(data: bytes) -> dict:
    """A pickle of dicts and bytes. All else is refused before unpickling: code, and sizes beyond the file's."""
    allowed = "PROTO FRAME MARK MEMOIZE STOP EMPTY_DICT SETITEM SETITEMS SHORT_BINBYTES BINBYTES".split()
    others = {opcode.name for opcode, _, _ in pickletools.genops(data)} - set(allowed)  # genops also checks sizes
    if others:
        raise BadInput(f"pickle opcode {min(others)}")
    return pickle.loads(data)


def bytes_of(ids: tuple[int, ...]) -> bytes:
    return array("I", ids).tobytes()  # 4 bytes per token, where a tuple of ints takes 36


class Swap:
    """The reference's weights in CPU memory. `with swap as model:` copies them into the policy, in place, and then the
    policy's back, even if the block raises. Optimizer state and tied weights are unaffected. Without `reference` it is
    the policy as it is now. Only weights that can differ are copied: of a LoRA run the adapter, whose initial state
    (no adapter, or the SFT adapter) is the reference. Raises BadInput if the models have different structures."""

    def __init__(self, policy, reference=None):
        mine, other = structure(policy), structure(reference or policy)
        if differing := [name for name in mine | other if mine.get(name) != other.get(name)]:
            raise BadInput(f"the reference is not built like the policy: {differing[0]} differs")
        theirs, self.policy, self.ours = (reference or policy).state_dict(), policy, {}
        tensors = {id(t): (name, t) for name, t in policy.state_dict(keep_vars=True).items()}  # tied ones once
        for name, t in tensors.values():  # what trains, the buffers, and what differs although it does not train
            frozen = isinstance(t, torch.nn.Parameter) and not t.requires_grad
            if any(all_gather(not frozen or not torch.equal(local(t), local(theirs[name]).to(local(t))))):
                self.ours[name] = t.detach()
        self.theirs = {n: torch.empty_like(local(t), device="cpu", pin_memory=t.is_cuda) for n, t in self.ours.items()}
        self.saved = {n: torch.empty_like(t, pin_memory=t.is_pinned()) for n, t in self.theirs.items()}
        copy(theirs, self.theirs)

    def __enter__(self):
        copy(self.ours, self.saved)
        try:
            copy(self.theirs, self.ours)
        except BaseException:  # __exit__ will not be called
            copy(self.saved, self.ours)
            raise
        return self.policy

    def __exit__(self, *_):
        copy(self.saved, self.ours)

    def sync(self, mix: float = 1.0):
        """π_ref <- mix · π + (1 − mix) · π_ref, weight by weight."""
        for name, tensor in self.theirs.items():
            new = local(self.ours[name]).to(tensor.device)
            tensor.copy_(tensor.lerp(new, mix) if tensor.is_floating_point() else new)

    def state_dict(self):
        with self:
            return {name: full_tensor(tensor).to("cpu", copy=True) for name, tensor in self.ours.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]):
        copy({name: part_of(state[name], tensor) for name, tensor in self.ours.items()}, self.theirs)


@torch.no_grad()
def copy(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]):
    for name, tensor in target.items():
        tensor = local(tensor)  # without view_as, copy_ would broadcast
        tensor.copy_(local(source[name]).view_as(tensor), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def structure(model) -> dict:
    """What two models must have in common to swap weights: shapes, and config fields that change log-probs."""
    cosmetic = ("_name_or_path", "architectures", "dtype", "initializer_range", "transformers_version", "use_cache")
    config = {name: value for name, value in base_model(model).config.to_dict().items() if name not in cosmetic}
    config = {name: value for name, value in config.items() if "dropout" not in name and not name.endswith("token_id")}
    scales = {name: str(module.scaling) for name, module in model.named_modules() if hasattr(module, "scaling")}  # LoRA
    return config | scales | {name: tensor.shape for name, tensor in model.state_dict().items()}


def reference_logprobs(reference, groups: Groups, tokens_per_forward=16384, dtype="float32", temperature=1.0):
    """log π_ref of these completions: a cache is returned as it is; a Swap or nullcontext(model) is entered once."""
    if reference is None or isinstance(reference, ReferenceCache):
        return reference
    known = ReferenceCache()
    with reference as model:  # the expensive thing: weights are copied in and out
        known.score(model, groups, tokens_per_forward, dtype, temperature)
    return known


def checkpoint_digest(folder: str, base: str = "") -> str:
    """Identifies a folder's weights: SHA-256 of config and safetensors files, and for an adapter the base's digest."""
    kind = "adapter_" if base else ""
    config = json.loads((Path(folder) / f"{kind}config.json").read_text())
    config |= dict(transformers_version=None, _name_or_path=None)  # no effect on log-probs
    digest = hashlib.sha256((json.dumps(config, sort_keys=True) + base).encode())
    files = sorted(Path(folder).glob(f"{kind}model*.safetensors"))
    for file in files or [Path(folder) / f"{kind}model.safetensors"]:  # without any: FileNotFoundError
        if not file.is_file() and file.exists():
            raise BadInput(f"{file} is no regular file")
        digest.update(np.memmap(file, np.uint8, "r"))
    return digest.hexdigest()[:32]


def tokenizer_digest(tokenizer) -> str:
    """What the token ids mean: SHA-256 of the vocabulary."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:32]


def write_whole(path, write: Callable):
    """Writes a file atomically, even across a power cut: `write` fills a temporary file, which is renamed to `path`."""
    path = Path(os.path.realpath(path))  # a symlink stays, its target is replaced
    partial_file = path.with_name(f".{path.name}.partial")
    partial_file.unlink(missing_ok=True)  # of a killed run
    try:
        with open(partial_file, "xb") as file:  # x: no symlink
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial_file, path)
    finally:
        partial_file.unlink(missing_ok=True)
