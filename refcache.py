"""Log-probs of completions, and the frozen reference policy as a dictionary of them.

    completion_logprobs(model, groups)   log π(token | everything before it), for each token of each completion
    ReferenceCache                       the same numbers of a frozen model: computed once, saved, shared by later runs
    Swap                                 a reference whose weights wait on the CPU: for new completions, or to move

A group is `(prompt_ids, [completion_ids, ...])`, tuples of token ids; a completion includes its EOS. Policy and
reference go through one function, so they agree before the first update: margin 0, loss ln 2, KL 0.
Shapes: T tokens in a forward, T_k keys of all spans, N completion tokens, D head size, H hidden size, V vocabulary.
"""
import gc
import hashlib
import io
import json
import math
import os
import pickle
import pickletools
import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout  # comes with torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

Group = tuple[tuple[int, ...], list[tuple[int, ...]]]
Ragged = list[list[torch.Tensor]]  # for each group, for each completion: (len(completion),)
HEAD_BYTES = 2**27  # float32 logits that exist at a time: of 220 completion tokens at V = 151,936


class BadInput(ValueError):
    """Wrong usage, data or files. The message is one sentence: where, what is wrong, what to do."""


class CannotShare(ValueError):
    """The completions of this model cannot share a prompt: its attention is not plain causal attention over one row."""


# ---- Shared prompts: one flat row [p1 | y11 | y12 | p2 | y21 ..] per forward, without padding -----------------------

SHARED = "sdpa_shared_prompt"  # "sdpa" in the name: transformers refuses it to models that sdpa cannot serve


def shared_prompt_attention(module, query, key, value, attention_mask, spans=None, sliding_window=None, **kwargs):
    """Attention over a flat row: query (1, heads, T, D), key and value (1, key heads, T, D) -> (1, T, heads, D).

    A span is one completion, the first of a group together with its prompt. Its queries lie side by side in the row;
    its keys are [its prompt ; its own tokens]. `spans` says where they are: see lay_out_shared.
    """
    if spans is None:  # an ordinary batch, as in generate()
        kwargs["sliding_window"] = sliding_window
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None and not sliding_window:
        raise CannotShare(f"{type(module).__name__} masks more than the future")
    if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise CannotShare(f"{type(module).__name__} has softcapped scores, attention sinks or a position bias")
    keys, cu_seq_q, cu_seq_k, slices = spans
    if torch.is_autocast_enabled(query.device.type):  # rotary embeddings return float32 queries and keys
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    if keys is not None:
        key, value = (x.index_select(2, keys) for x in (key, value))  # (1, key heads, T_k, D)
    if one_kernel_serves(query, value) and not kwargs.get("dropout"):
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        max_q, max_k = (max(x.stop - x.start for x in side) for side in zip(*slices))
        window = (sliding_window - 1 if sliding_window else -1, 0)  # how far a query sees back, and ahead
        return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=kwargs.get("scaling"),
                           window_size=window, enable_gqa=True)[None], None
    outputs = []
    for own, seen in slices:
        n_q, reach = own.stop - own.start, sliding_window or key.shape[2]
        seen = slice(max(seen.start, seen.stop - n_q - reach + 1), seen.stop)  # without keys that no query reaches
        n_k, mask = seen.stop - seen.start, None  # None: plain causal
        if n_q > 1 and (n_q < n_k or n_q > reach):
            places = torch.arange(n_k, device=query.device)
            behind = places[n_k - n_q:, None] - places  # (n_q, n_k): how far behind each query each key lies
            mask = ((behind >= 0) & (behind < reach))[None, None]
        q, k, v = query[:, :, own], key[:, :, seen], value[:, :, seen]
        outputs.append(sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


def one_kernel_serves(query, value) -> bool:
    """On CUDA one flash attention kernel does all spans of a layer, where a loop would be bound by kernel launches."""
    size, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    return (query.is_cuda and half and size == value.shape[-1] and size <= 256 and size % 8 == 0
            and torch.cuda.get_device_capability(query.device) >= (8, 0))  # Ampere or newer


AttentionInterface.register(SHARED, shared_prompt_attention)
AttentionMaskInterface.register(SHARED, sdpa_mask)


def lay_out_shared(groups: list[Group], device, blind=False) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Groups -> the inputs of one flat row, and per completion token (N,) the place that predicts it and its id.
    `blind` leaves the spans out, so that attention takes the row for one sequence: for the probe alone."""
    ids, positions, sources, targets, keys, queries = [], [], [], [], [], [0]
    for prompt, completions in groups:
        before = range(len(ids), len(ids) + len(prompt))
        ids += prompt
        positions += range(len(prompt))
        for y in completions:
            own = range(len(ids), len(ids) + len(y))
            ids += y
            positions += range(len(prompt), len(prompt) + len(y))
            sources += [before[-1], *own[:-1]]  # the shift by one: the place before a token predicts it
            targets += y
            keys.append([*before, *own])
            queries.append(own.stop)  # where the span ends; the first completion simply continues its prompt
    ends = queries, [0, *accumulate(map(len, keys))]
    slices = [(slice(*q), slice(*k)) for q, k in zip(*map(pairwise, ends))]  # on the host: no waiting for the GPU
    cu_seq_q, cu_seq_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ends)  # (spans + 1,): the same
    keys = torch.tensor(list(chain.from_iterable(keys)), device=device) if ends[1][-1] > len(ids) else None  # (T_k,)
    spans = None if blind else (keys, cu_seq_q, cu_seq_k, slices)  # keys None: nothing is shared, the keys are the row
    ids, positions, sources, targets = (torch.tensor(x, device=device) for x in (ids, positions, sources, targets))
    # without a mask of ones transformers takes the restarting positions for packed sequences and masks the prompts
    mask = torch.ones_like(ids)[None]
    inputs = dict(input_ids=ids[None], position_ids=positions[None], attention_mask=mask, spans=spans)
    return inputs, sources, targets


def lay_out_padded(groups: list[Group], device) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """The same as an ordinary batch, one right-padded row per completion: exact for every causal model."""
    rows = [(prompt, y) for prompt, completions in groups for y in completions]
    ids = pad_sequence([torch.tensor(prompt + y) for prompt, y in rows], batch_first=True)
    mask = pad_sequence([torch.ones(len(prompt + y), dtype=torch.long) for prompt, y in rows], batch_first=True)
    starts = [i * ids.shape[1] + len(prompt) - 1 for i, (prompt, _) in enumerate(rows)]  # the shift by one
    sources = [place for start, (_, y) in zip(starts, rows) for place in range(start, start + len(y))]
    targets = [token for _, y in rows for token in y]
    sources, targets = (torch.tensor(x, device=device) for x in (sources, targets))
    return dict(input_ids=ids.to(device), attention_mask=mask.to(device)), sources, targets


# ---- What a model can do: found out once, when it is loaded ---------------------------------------------------------

HEADS: WeakKeyDictionary = WeakKeyDictionary()  # model -> (factor, softcap) between its output head and its logits


def share_prompts(model, dtype: str = "float32") -> bool:
    """Switches this model's attention so that the completions of a prompt share it, if that is exact, and says so.

    Decided by evidence, once per loaded model (completion_logprobs does it if you did not): a flat row must give the
    log-probs of one forward per sequence, and clearly fail to without spans. Other models keep padded rows. `dtype` is
    that of the forwards to come. Raises BadInput if the model's decoder and head do not give its own logits.
    """
    core, reason = base_model(model), ""
    config, before = core.config.get_text_config(), core.config._attn_implementation or "eager"
    if getattr(config, "attn_logit_softcapping", None) and "sdpa" in before:
        before = "eager"  # transformers 5.17 lets sdpa drop the softcap silently
    core.set_attn_implementation("sdpa" if before == SHARED else before)
    with torch.no_grad(), eval_mode(core):
        HEADS[core] = find_head(core)
        try:
            layers = set(getattr(config, "layer_types", None) or ())
            if core._is_stateful or not layers <= {"full_attention", "sliding_attention"}:
                raise CannotShare("recurrent, convolutional or chunked layers read the row as it lies")
            core.set_attn_implementation(SHARED)  # for good: gradient checkpointing runs it again in the backward pass
            for precision in {"float32", dtype}:  # the CUDA kernel serves half precision only
                shared = probe(core, lay_out_shared, HEADS[core], precision)
                blind = probe(core, partial(lay_out_shared, blind=True), HEADS[core], precision)
                exact = core.dtype == torch.float32 and precision == "float32"
                if not (shared < (1e-4 if exact else 0.25) and shared < blind / (20 if exact else 3)):
                    raise CannotShare(f"a shared prompt changes log-probs by {shared:.2g} nats (blind: {blind:.2g})")
        except (CannotShare, TypeError, ValueError, RuntimeError) as error:  # no such keyword, no sdpa, another mask
            if out_of_memory(error):
                raise
            core.set_attn_implementation(before)
            reason = one_line(error)
    print(f"{type(core).__name__}: " + (f"padded rows: {reason}" if reason else "completions share their prompt"))
    return not reason


def shares_prompts(model) -> bool:
    return base_model(model).config._attn_implementation == SHARED


def find_head(core) -> tuple[float, float | None]:
    """What stands between head and logits: the config's softcap, and the factor that the model's own logits confirm."""
    config = core.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    factors = [getattr(config, name, None) or 1.0 for name in ("logit_scale", "logits_scaling", "lm_head_multiplier")]
    heads = [(factor, cap) for factor in (*factors, *(1 / factor for factor in factors))]  # Granite's divides
    errors = [probe(core, lay_out_padded, head) for head in heads]
    if not min(errors) < (1e-3 if core.dtype == torch.float32 else 0.25):  # `not <` also catches NaN
        raise BadInput(f"{type(core).__name__}'s decoder and head differ from its logits by {min(errors):.2g} nats: "
                       "the checkpoint holds NaN, or this architecture is not supported")
    return heads[errors.index(min(errors))]


def probe(core, lay_out: Callable, head: tuple, dtype: str = "float32") -> float:
    """Largest difference, in nats, between log-probs laid out so and the model's logits, one forward per sequence."""
    ids = torch.linspace(1, core.config.get_text_config().vocab_size - 1, 24).long().tolist()
    prompt, completions, errors = tuple(ids[::3]), [tuple(ids[1::3]), tuple(ids[2::3][:5])], []
    with autocast(core, dtype):
        for y, logps in zip(completions, _forward(core, [(prompt, completions)], lay_out, head)[0]):
            logits = core(input_ids=torch.tensor([prompt + y], device=core.device), use_cache=False).logits.float()
            targets = torch.tensor(y, device=core.device)
            truth = -F.cross_entropy(logits[0, len(prompt) - 1:-1], targets, reduction="none")
            errors.append((logps - truth).abs().max())
    return torch.stack(errors).max().item()


# ---- Log-probs ------------------------------------------------------------------------------------------------------

def completion_logprobs(model, groups: list[Group], tokens_per_forward=16384, dtype="float32",
                        temperature=1.0) -> Ragged:
    """log π(token | prompt and the tokens before it), for each token of each completion; differentiable.

    Returns, for each group, for each of its completions, a float32 tensor of shape (len(completion),), in nats.
    tokens_per_forward bounds the tokens of one forward (a longer group goes alone): memory and speed, never the result.
    dtype "bfloat16" runs the forwards under autocast. temperature divides the logits, for samples drawn that way.
    Raises BadInput for an empty prompt or completion, a row outside the model, or a model it cannot serve exactly.
    """
    core, results = base_model(model), [None] * len(groups)
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
                scored = _forward(core, [groups[i] for i in batch], temperature=temperature)
            for i, logps in zip(batch, scored):
                results[i] = logps
        return results
    except CannotShare as error:  # seen only in rows longer than the probe's
        core.set_attn_implementation("sdpa")
        tqdm.write(f"{type(core).__name__}: padded rows from now on, because {error}")
        return completion_logprobs(model, groups, tokens_per_forward, dtype, temperature)


def _forward(core, groups: list[Group], lay_out=None, head=None, temperature=1.0) -> Ragged:
    lay_out = lay_out or (lay_out_shared if shares_prompts(core) else lay_out_padded)
    embeddings = core.get_input_embeddings().weight  # (V, H)
    inputs, sources, targets = lay_out(groups, embeddings.device)
    hidden = core.get_decoder()(**inputs, use_cache=False)[0].flatten(0, 1)  # (T, H)
    hidden = hidden.index_select(0, sources)  # (N, H): only places that predict a completion token meet the head
    rows, logps = max(1, HEAD_BYTES // (4 * len(embeddings))), []
    for h, y in zip(hidden.split(rows), targets.split(rows)):
        # checkpointed: the backward computes these logits again, so that (N, V) never exists
        logps.append(checkpoint(_token_logps, core, h, y, head or HEADS[core], temperature, use_reentrant=False))
    return ragged(torch.cat(logps), groups)


def _token_logps(core, hidden, targets, head, temperature):  # (n, H), (n,) -> (n,)
    factor, cap = head
    # the head is called as a module: `head.weight` would miss a LoRA adapter and a bias
    logits = core.get_output_embeddings()(hidden).float() * factor  # (n, V), the expensive thing
    logits = cap * torch.tanh(logits / cap) if cap else logits
    return -F.cross_entropy(logits / temperature, targets, reduction="none")


def ragged(flat: torch.Tensor, groups: list[Group]) -> Ragged:  # (N,)
    parts = iter(flat.split([len(y) for _, completions in groups for y in completions]))
    return [[next(parts) for _ in completions] for _, completions in groups]


def log_ratios(logps: Ragged, groups: list[Group], known: Mapping | None, clamp: tuple | None = None) -> Ragged:
    """log π − log π_ref of each token. logps: what completion_logprobs gave for these groups; known[prompt, y]: the
    reference's, None is 0. clamp: (low, high) in nats, beyond which no gradient passes (arXiv:2509.24207)."""
    ratios = torch.cat(list(chain.from_iterable(logps)))  # (N,)
    if known is not None:
        reference = np.concatenate([known[prompt, y] for prompt, completions in groups for y in completions])
        ratios = ratios - torch.from_numpy(reference).to(ratios.device)
    return ragged(ratios.clamp(*clamp) if clamp else ratios, groups)


def check_agreement(ratios: torch.Tensor, dtype: str):
    """Before the first update the policy is the reference: log π − log π_ref, per token, is 0 to rounding. Says so.
    Raises BadInput if it is not: every number of the run would be wrong."""
    print(f"step 0: policy and reference differ by at most {ratios.abs().max():.1e} nats per token")
    if not ratios.abs().mean() < (3e-2 if dtype == "bfloat16" else 1e-4):
        raise BadInput(f"step 0: one model as policy and reference, but they differ by {ratios.abs().mean():.2g} nats "
                       "per token: the cache holds another's (delete it), or the forward is not deterministic")


def micro_batches(model, groups: list[Group], tokens_per_forward: int) -> list[list[int]]:
    """Indices of groups in forwards of at most tokens_per_forward tokens, longest first. A longer group goes alone."""
    if shares_prompts(model):
        return pack([len(p) + sum(map(len, ys)) for p, ys in groups], tokens_per_forward)
    return pack([len(p) + max(map(len, ys)) for p, ys in groups], tokens_per_forward, [len(ys) for _, ys in groups])


def pack(lengths: list[int], budget: int, rows: list[int] | None = None) -> list[list[int]]:
    """Indices of items in batches of at most `budget` tokens, longest first. An item is a stretch of a flat row, or
    with `rows` that many rows, all of them padded to the longest of their batch."""
    batches, load, longest = [], math.inf, 0
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
    """No dropout, and no checkpointed layers, which would ignore a key-value cache: for all but training steps."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def context_length(config) -> float:
    """Tokens of the longest row whose log-probs do not depend on what else is in the batch."""
    config = config.get_text_config()
    ropes, bounds = getattr(config, "rope_parameters", None) or {}, [getattr(config, "max_position_embeddings", None)]
    for rope in (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
        if rope.get("rope_type") in ("dynamic", "longrope"):  # beyond it all rows of a forward rotate differently
            bounds.append(rope.get("original_max_position_embeddings"))
    return min((bound for bound in bounds if bound), default=math.inf)


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)  # on a CPU


def one_line(error: BaseException) -> str:
    name = "" if isinstance(error, (BadInput, CannotShare)) else type(error).__name__ + " "
    return name + " ".join(str(error).split())[:200]


# ---- The frozen reference: as a dictionary, or as weights that are swapped in ---------------------------------------

class ReferenceCache(Mapping):
    """(prompt_ids, completion_ids) -> float32 array (len(completion),): token log-probs under a frozen reference.

    Exact, because the boundary is part of the key. `header` says what the numbers belong to, in strings, such as
    reference=checkpoint_digest(folder), tokenizer=tokenizer_digest(tokenizer), dtype="float32": a file with another one
    is refused. In memory and on disk 8 bytes per completion token, and 4 per prompt token, once per prompt.
    """

    def __init__(self, **header: str):
        self.header = {"format": "2", **header}
        self.table: dict[bytes, dict[bytes, bytes]] = {}  # prompt -> completion -> log-probs: uint32, uint32, float32

    def __len__(self):
        return sum(map(len, self.table.values()))

    def __iter__(self):
        return ((tuple(array("I", x)), tuple(array("I", y))) for x, scored in self.table.items() for y in scored)

    def __getitem__(self, key):
        prompt, y = map(bytes_of, key)
        return np.frombuffer(self.table[prompt][y], np.float32)  # KeyError: not scored, call fill first

    def fill(self, load_model: Callable, groups: list[Group], tokens_per_forward=16384, dtype="float32", path=None):
        """Scores what is missing, with a model that exists only meanwhile. Returns how many completions that were.
        `load_model()` must keep no reference to the model; it is not called if nothing is missing."""
        missing = sum(len(completions) for _, completions in self.missing(groups, tokens_per_forward))
        if missing:
            model = load_model()
            try:
                self.score(model, groups, tokens_per_forward, dtype, path=path)  # the expensive thing
            finally:
                del model
                gc.collect()
                torch.cuda.empty_cache()
        return missing

    @torch.no_grad()
    def score(self, model, groups: list[Group], tokens_per_forward=16384, dtype="float32", temperature=1.0, path=None):
        """Scores what is missing with `model`. Saves to `path` every minute, when done, and when an exception comes."""
        todo, saved = self.missing(groups, tokens_per_forward), time.monotonic()
        tokens = [len(prompt) + sum(map(len, completions)) for prompt, completions in todo]
        try:
            with eval_mode(model), tqdm(desc="reference", total=sum(tokens), unit="tok", unit_scale=True) as bar:
                for batch in micro_batches(model, todo, tokens_per_forward):  # longest first: out of memory comes early
                    groups = [todo[i] for i in batch]
                    logps = completion_logprobs(model, groups, tokens_per_forward, dtype, temperature)
                    flat = torch.cat(list(chain.from_iterable(logps))).cpu()  # one transfer
                    if not flat.isfinite().all():
                        raise BadInput("the reference gives a log-prob that is not finite: its checkpoint is damaged")
                    for (prompt, completions), rows in zip(groups, ragged(flat, groups)):
                        scored = self.table.setdefault(bytes_of(prompt), {})
                        scored.update((bytes_of(y), row.numpy().tobytes()) for y, row in zip(completions, rows))
                    bar.update(sum(tokens[i] for i in batch))
                    if path and time.monotonic() - saved > 60:
                        self.save(path)
                        saved = time.monotonic()
        finally:
            if path:
                self.save(path)

    def missing(self, groups: list[Group], tokens_per_forward: int) -> list[Group]:
        """What is not scored yet: the completions of a prompt together, in parts of at most tokens_per_forward tokens.
        The parts do not depend on what is known, so that a killed pass goes on with the forwards that it lacks."""
        merged, parts = {}, []
        for prompt, completions in groups:
            merged.setdefault(prompt, {}).update(dict.fromkeys(completions))
        for prompt, completions in merged.items():
            completions = list(completions)
            n = max(1, (tokens_per_forward - len(prompt)) // max(map(len, completions)))
            parts += [(prompt, completions[i:i + n]) for i in range(0, len(completions), n)]
        parts = [(prompt, [y for y in completions if (prompt, y) not in self]) for prompt, completions in parts]
        return [part for part in parts if part[1]]

    def save(self, path):
        """Two pickles, the header and the table: whole or not at all. What another job saved meanwhile is kept."""
        lock = FileLock(f"{Path(path).resolve()}.lock")
        try:
            lock.acquire(timeout=2)
        except Timeout:
            tqdm.write(f"waiting for another job that writes {path}")
            lock.acquire()
        try:
            if Path(path).exists():
                self.load(path)
            table = pickle.dumps(self.table, protocol=4)
            header = pickle.dumps(self.header | {"sha256": hashlib.sha256(table).hexdigest()}, protocol=4)
            write_whole(path, lambda file: file.write(header + table))
        finally:
            lock.release()

    def load(self, path):
        """Adds the entries of a file. Runs nothing in it. Raises BadInput if it is damaged, or made for another run."""
        try:
            if not Path(path).is_file():
                raise BadInput("it is no regular file")
            data = Path(path).read_bytes()
            header, end = load_builtins(data, 0)
            for name, mine in self.header.items():
                if (theirs := str(header.get(name))[:80]) != mine:
                    raise BadInput(f"it was made with {name} {theirs!r}, but this run has {name} {mine!r}")
            if hashlib.sha256(data[end:]).hexdigest() != header["sha256"]:
                raise BadInput("its checksum does not match")
            table, _ = load_builtins(data, end)
            if not all(len(y) == len(logps) for scored in table.values() for y, logps in scored.items()):
                raise BadInput("its lengths do not match")
        except Exception as error:  # whatever a damaged or hostile file provokes
            raise BadInput(f"{path} cannot be used, {one_line(error)}: delete it, or name another") from None
        for prompt, scored in table.items():
            self.table[prompt] = scored | self.table.get(prompt, {})


OPCODES = {"PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "EMPTY_DICT", "SETITEM", "SETITEMS", "SHORT_BINBYTES",
           "BINBYTES", "SHORT_BINUNICODE"}


def load_builtins(data: bytes, start: int) -> tuple[dict, int]:
    """The pickle of dicts, strings and bytes at `start`, and where it ends. Anything else is refused before it is read:
    code, sizes beyond the file's, tuples nested so deep that they never hash."""
    for opcode, _, _ in pickletools.genops(file := io.BytesIO(data[start:])):  # it also checks every size
        if opcode.name not in OPCODES:
            raise BadInput(f"it holds {opcode.name}")
    return pickle.loads(data[start:start + file.tell()]), start + file.tell()


def bytes_of(ids: tuple[int, ...]) -> bytes:
    return array("I", ids).tobytes()  # 4 bytes per token, where a tuple of ints takes 36


class Swap:
    """The reference's weights in CPU memory. `with swap as model:` brings them into the one model, in place, and the
    policy's back even when the block raises; the optimizer's state and tied weights never notice.

    Only what can differ moves: the parameters that train and the persistent buffers. So a LoRA run moves its adapter,
    and its reference is where that began: the model without it, or the SFT adapter that it was. Without `reference` it
    is the policy as it is now. Raises BadInput if the reference is not built like the policy.
    """

    def __init__(self, policy, reference=None):
        ours, theirs = (structure(model) for model in (policy, reference or policy))
        if differing := [name for name in ours | theirs if ours.get(name) != theirs.get(name)]:
            raise BadInput(f"the reference is not built like the policy: {differing[0]} differs")
        frozen = {id(p) for p in policy.parameters() if not p.requires_grad}
        tensors = {id(t): (name, t.detach()) for name, t in policy.state_dict(keep_vars=True).items()}  # tied ones once
        self.policy, self.ours = policy, dict(named for key, named in tensors.items() if key not in frozen)
        self.theirs, self.saved = ({name: torch.empty_like(t, device="cpu", pin_memory=t.is_cuda)
                                    for name, t in self.ours.items()} for _ in range(2))
        copy((reference or policy).state_dict(), self.theirs)

    def __enter__(self):
        copy(self.ours, self.saved)
        copy(self.theirs, self.ours)
        return self.policy

    def __exit__(self, *_):
        copy(self.saved, self.ours)

    def sync(self, mix: float = 1.0):
        """π_ref <- mix · π + (1 − mix) · π_ref, weight by weight."""
        for name, tensor in self.theirs.items():
            tensor.lerp_(self.ours[name].to(tensor), mix)

    def state_dict(self):
        return self.theirs

    def load_state_dict(self, state: dict[str, torch.Tensor]):
        copy(state, self.theirs)


@torch.no_grad()
def copy(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]):
    for name, tensor in target.items():
        tensor.copy_(source[name].view_as(tensor), non_blocking=True)  # in stream order; view_as: copy_ would broadcast
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def structure(model) -> dict:
    """What two models must have in common to swap weights: an untied head would stay behind, another rope_theta would
    make another function of the same weights."""
    cosmetic = ("_name_or_path", "architectures", "dtype", "initializer_range", "transformers_version", "use_cache")
    config = {name: value for name, value in base_model(model).config.to_dict().items() if name not in cosmetic}
    config = {name: value for name, value in config.items() if "dropout" not in name and not name.endswith("token_id")}
    return config | {name: tensor.shape for name, tensor in model.state_dict().items()}


def reference_logprobs(reference, groups: list[Group], tokens_per_forward=16384, dtype="float32", temperature=1.0):
    """log π_ref of these completions: a complete cache as it is; a Swap, or nullcontext(model), is entered once."""
    if reference is None or isinstance(reference, ReferenceCache):
        return reference
    known = ReferenceCache()
    with reference as model:  # the expensive thing: weights come in, and go out again
        known.score(model, groups, tokens_per_forward, dtype, temperature)
    return known


def checkpoint_digest(folder: str, base: str = "") -> str:
    """What a folder's weights are: SHA-256 of config and safetensors files; of an adapter with its base's digest."""
    kind = "adapter_" if base else ""
    config = json.loads((Path(folder) / f"{kind}config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("transformers_version", "_name_or_path")}
    digest = hashlib.sha256((json.dumps(config, sort_keys=True) + base).encode())
    for file in sorted(Path(folder).glob(f"{kind}model*.safetensors")):
        digest.update(np.memmap(file, np.uint8, "r"))
    return digest.hexdigest()[:32]


def tokenizer_digest(tokenizer) -> str:
    """What the token ids mean: SHA-256 of the vocabulary."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:32]


def write_whole(path, write: Callable):
    """A file that is there whole or not at all, even after a power cut: `write` fills another, which takes its name."""
    path = Path(path).resolve()  # a link stays, and its target is replaced
    partial_file = path.with_name(f".{path.name}.partial")
    partial_file.unlink(missing_ok=True)  # a kill left it
    try:
        with open(partial_file, "xb") as file:  # x: follows no link
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial_file, path)
    finally:
        partial_file.unlink(missing_ok=True)
