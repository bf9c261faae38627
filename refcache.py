"""What does a model think of these completions? Log-probs, and the frozen reference policy as a dictionary of them.

    completion_logprobs(model, groups)   log π(token | all before it), for every token of every completion
    ReferenceCache                       the same numbers of a frozen model, computed once, kept, saved and shared

A group is `(prompt_ids, [completion_ids, ...])`: tuples of token ids; a completion includes its EOS. DPO asks with groups
of two, KTO of one, RLOO of k. Policy and reference go through the same function, so that before the first update they
agree: margin 0, loss ln 2, KL 0.

Shapes: T tokens in a forward, N completion tokens among them, H hidden size, V vocabulary; B rows of a padded batch.
"""
import csv
import gc
import hashlib
import io
import json
import math
import operator
import os
import pickle
import resource
import runpy
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock  # comes with torch
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import cached_file

Group = tuple[tuple[int, ...], list[tuple[int, ...]]]

HEAD_ROWS = 256  # completion tokens a trip through the output head: 256 x 151,936 float32 logits are 148 MiB


class BadInput(ValueError):
    """Something that a person must mend. The message is one sentence: where, what is wrong, what to do."""


class Diverged(RuntimeError):
    """Training that must not go on. The message says at which step, and why."""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


# ---------------------------------------------------------------------------------------------------------------------
# Shared prompts: one flat row [p1 | y11 | y12 | p2 | y21 ..] a forward. No padding, and every prompt is encoded once.

SHARED = "sdpa_shared_prompt"  # "sdpa" in the name: transformers refuses it to models that sdpa cannot serve


class CannotShare(ValueError):
    """This model's attention looks at more than a causal row, so its completions cannot share a prompt."""


def shared_prompt_attention(module, query, key, value, attention_mask, spans=None, sliding_window=None, **kwargs):
    """Attention of a flat row. `spans` holds, for every completion, the slices of its prompt and of its own tokens."""
    if spans is None:  # an ordinary batch, as in generate()
        return sdpa_attention_forward(module, query, key, value, attention_mask, sliding_window=sliding_window, **kwargs)
    if attention_mask is not None and not sliding_window:
        raise CannotShare(f"{type(module).__name__} masks more than the future")
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise CannotShare(f"{type(module).__name__} has softcapped scores or attention sinks")
    outputs = []
    for prompt, own in spans:  # `own` looks at all of `prompt` and, causally, at itself
        if sliding_window:  # only the end of the prompt is still in reach of the completion's first token
            prompt = slice(max(prompt.start, prompt.stop - sliding_window + 1), prompt.stop)
        q, mask = query[:, :, own], None  # no mask is plain causal: the fast kernel
        k, v = (torch.cat([x[:, :, prompt], x[:, :, own]], dim=2) for x in (key, value))
        if q.shape[2] < k.shape[2] or (sliding_window and sliding_window < q.shape[2]):
            place = torch.arange(k.shape[2], device=k.device)
            back = place[-q.shape[2]:, None] - place  # (queries, keys): how far each key lies behind each query
            mask = ((back >= 0) & (back < (sliding_window or len(place))))[None, None]
        outputs.append(sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(SHARED, shared_prompt_attention)
AttentionMaskInterface.register(SHARED, sdpa_mask)


def lay_out_shared(groups: list[Group], device):
    """Groups -> the model's inputs, one flat row; and for every completion token its place's predecessor and its id."""
    ids, positions, spans, sources, targets = [], [], [], [], []
    for prompt, completions in groups:
        start, end = len(ids), len(ids) + len(prompt)
        ids += prompt
        positions += range(len(prompt))
        for y in completions:
            own = slice(len(ids), len(ids) + len(y))
            # the first completion simply continues its prompt: one causal span for both
            spans.append((slice(start, end), own) if own.start > end else (slice(start, start), slice(start, own.stop)))
            ids += y
            positions += range(len(prompt), len(prompt) + len(y))
            sources += [end - 1, *range(own.start, own.stop - 1)]  # the shift by one: who predicts this token
            targets += y
    ids, positions, sources, targets = (torch.tensor(x, device=device) for x in (ids, positions, sources, targets))
    # without the mask of ones transformers takes the restarting positions for packed sequences and masks the prompts
    inputs = dict(input_ids=ids[None], position_ids=positions[None], attention_mask=torch.ones_like(ids)[None], spans=spans)
    return inputs, sources, targets


def lay_out_padded(groups: list[Group], device):
    """The same as an ordinary batch, one right-padded row a completion: exact for every causal model."""
    rows = [(prompt, y) for prompt, completions in groups for y in completions]
    longest = max(len(prompt) + len(y) for prompt, y in rows)
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)  # (B, T) each
    sources, targets = [], []
    for i, (prompt, y) in enumerate(rows):
        n = len(prompt) + len(y)
        ids[i, :n], mask[i, :n] = torch.tensor(prompt + y), 1
        sources += range(i * longest + len(prompt) - 1, i * longest + n - 1)  # the shift by one
        targets += y
    inputs = dict(input_ids=ids.to(device), attention_mask=mask.to(device))
    return inputs, torch.tensor(sources, device=device), torch.tensor(targets, device=device)


# ---------------------------------------------------------------------------------------------------------------------
# Log-probs


def completion_logprobs(model, groups: list[Group], tokens_per_forward: int = 16384) -> list[list[torch.Tensor]]:
    """log π(token | prompt and the tokens before it), for every token of every completion; differentiable.

    Returns, for each group, for each of its completions, a float32 tensor of shape (len(completion),), in nats.
    tokens_per_forward bounds the tokens of one forward (a longer group goes alone): memory and speed, never the result.
    Raises BadInput for an empty prompt or completion, and for a model whose own logits it cannot reproduce.
    """
    core = base_model(model)
    vocabulary, context = core.get_input_embeddings().weight.shape[0], context_length(core.config)
    for prompt, completions in groups:
        if not prompt or not completions or not all(completions):
            raise BadInput("a prompt or a completion without tokens has no log-prob: leave it out")
        if len(prompt) + max(map(len, completions)) > context or max(map(max, (prompt, *completions))) >= vocabulary:
            raise BadInput(f"a row is longer than the model's {context} positions, or has an id beyond its {vocabulary} embeddings: "
                           "shorten it, or use the model's own tokenizer")
    try:
        results = [None] * len(groups)
        for batch in micro_batches(model, groups, tokens_per_forward):
            for i, logps in zip(batch, _forward(model, [groups[i] for i in batch])):
                results[i] = logps
        return results
    except CannotShare as refusal:  # seen only in rows longer than the probe's: from now on this model takes padded rows
        core.why_not_shared = str(refusal)
        tqdm.write(f"prompts are no longer shared: {refusal}")
        return completion_logprobs(model, groups, tokens_per_forward)


def micro_batches(model, groups: list[Group], tokens_per_forward: int) -> list[list[int]]:
    """Packs groups into forwards of at most tokens_per_forward tokens, padding included: lists of indices, longest first."""
    shared = not share_prompts(model)
    batches, load = [], 0
    size = [len(prompt) + (sum if shared else max)(map(len, completions)) for prompt, completions in groups]
    for i in sorted(range(len(groups)), key=lambda i: -size[i]):
        rows = 1 if shared else len(groups[i][1])
        cost = rows * (size[i] if shared or not batches else size[batches[-1][0]])  # padded to the batch's first
        if not batches or load + cost > tokens_per_forward:
            batches.append([])
            load, cost = 0, rows * size[i]
        batches[-1].append(i)
        load += cost
    return batches


def base_model(model):
    """The Hugging Face model itself, also under a peft wrapper (whose adapters live inside its layers)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _forward(model, groups: list[Group], lay_out=None) -> list[list[torch.Tensor]]:
    core = base_model(model)
    lay_out = lay_out or (lay_out_padded if share_prompts(model) else lay_out_shared)
    inputs, sources, targets = lay_out(groups, core.get_input_embeddings().weight.device)
    hidden = core.get_decoder()(**inputs, use_cache=False)[0].flatten(0, 1)  # (T, H)
    hidden = hidden.index_select(0, sources)  # (N, H): only what predicts a completion token meets the head
    logps = []
    for h, y in zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS)):
        # checkpointed: the backward computes these logits again, so that (N, V) never exists
        logps.append(checkpoint(_token_logps, core, h, y, use_reentrant=False) if h.requires_grad else _token_logps(core, h, y))
    logps = iter(torch.cat(logps).split([len(y) for _, completions in groups for y in completions]))
    return [[next(logps) for _ in completions] for _, completions in groups]


def _token_logps(core, hidden, targets):  # (n, H), (n,) -> (n,)
    scale, cap = core.logit_scale_and_cap
    # the head is called as a module: `head.weight` would miss a LoRA adapter, a bias, and the other shards
    logits = core.get_output_embeddings()(hidden).float() * scale  # (n, V), the expensive thing
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return -F.cross_entropy(logits, targets, reduction="none")


def share_prompts(model) -> str:
    """Turns prompt sharing on if that leaves this model's log-probs unchanged. Returns "" if so, else why not.

    Decided by evidence, once for a loaded model: what its config says of its layers, then a probe that compares flat
    rows with one forward a sequence, and with a flat row whose attention was told nothing, which must be clearly worse.
    The attention then stays on: gradient checkpointing runs it again in the backward pass.
    Raises BadInput if decoder and head do not reproduce the model's own logits.
    """
    core = base_model(model)
    if not hasattr(core, "why_not_shared"):
        with torch.no_grad(), torch.autocast(core.device.type, enabled=False), eval_mode(core):
            core.logit_scale_and_cap, core.why_not_shared = _probe(core)
    return core.why_not_shared


@contextmanager
def eval_mode(model):
    """For a probe, which dropout would fail, and for generate(), whose cache checkpointed layers would ignore."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _probe(core) -> tuple[tuple[float, float | None], str]:
    config = core.config.get_text_config()
    device = core.get_input_embeddings().weight.device
    exact = core.dtype == torch.float32
    if getattr(config, "attn_logit_softcapping", None) and "sdpa" in (core.config._attn_implementation or ""):
        core.set_attn_implementation("eager")  # transformers 5.17 lets sdpa drop the softcap in silence

    ids = torch.linspace(1, config.vocab_size - 1, 24).long().tolist()
    prompt, first, second = tuple(ids[::3]), tuple(ids[1::3]), tuple(ids[2::3][:5])
    groups = [(prompt, [first, second])]
    logits = [core(input_ids=torch.tensor([prompt + y], device=device), use_cache=False).logits[0, len(prompt) - 1:-1]
              for y in (first, second)]  # the model's own word, one forward a sequence: (len(y), V) each
    truth = [F.log_softmax(x.float(), -1).gather(1, torch.tensor(y, device=device)[:, None])[:, 0]
             for x, y in zip(logits, (first, second))]

    def error(lay_out):
        return max((a - b).abs().max().item() for a, b in zip(truth, _forward(core, groups, lay_out)[0]))

    def lay_out_blind(*groups_and_device):  # the same row, but its attention is told nothing
        inputs, sources, targets = lay_out_shared(*groups_and_device)
        del inputs["spans"]
        return inputs, sources, targets

    # what stands between head and logits: the config's softcap and one of its factors, whichever the logits confirm
    cap = getattr(config, "final_logit_softcapping", None)
    factors = [getattr(config, name, None) for name in ("logit_scale", "logits_scaling", "lm_head_multiplier")]
    factors = [f for f in factors if isinstance(f, (int, float)) and f]
    errors = {}
    for core.logit_scale_and_cap in [(1.0, cap), *((f, cap) for f in factors), *((1 / f, cap) for f in factors)]:
        errors[core.logit_scale_and_cap] = error(lay_out_padded)
    best = core.logit_scale_and_cap = min(errors, key=errors.get)
    if not errors[best] < (1e-3 if exact else 0.25):  # `not <` also catches NaN
        raise BadInput(f"{type(core).__name__}'s decoder and head differ from its own logits by {errors[best]:.2g} nats: "
                       "the checkpoint holds NaN, or this architecture is not supported")

    layers = set(getattr(config, "layer_types", None) or ())
    if core._is_stateful or not layers <= {"full_attention", "sliding_attention"}:
        return best, "recurrent, convolutional or chunked layers read the row as it lies"
    before = core.config._attn_implementation
    try:
        core.set_attn_implementation(SHARED)
        if core.config._attn_implementation != SHARED:
            raise CannotShare("its attention cannot be replaced")
        shared = error(lay_out_shared)
        blind = error(lay_out_blind)
        if not (shared < (1e-4 if exact else 0.25) and shared < blind / (20 if exact else 3)):
            raise CannotShare(f"a shared prompt changed a log-prob by {shared:.2g} nats (unannounced: {blind:.2g})")
        return best, ""
    except (CannotShare, TypeError, ValueError, RuntimeError) as refusal:  # no such keyword, no sdpa, another mask
        core.set_attn_implementation(before)
        return best, one_line(refusal)


# ---------------------------------------------------------------------------------------------------------------------
# The frozen reference


class ReferenceCache(Mapping):
    """(prompt_ids, completion_ids) -> float32 array of the completion's token log-probs under the frozen reference.

    Exact, because the boundary is part of the key. `header` says what the numbers belong to (builtin types only, such as
    reference=checkpoint_digest(path), tokenizer=tokenizer_digest(tokenizer), dtype="float32"): a file with another header
    is refused. In memory 8 bytes a token for the key (its ints are shared) and 4 for the value; on disk 4 and 4.
    """

    FORMAT = 1

    def __init__(self, **header):
        self.header = dict(format=self.FORMAT, **header)
        self._logps: dict[tuple[tuple, tuple], bytes] = {}
        self._file_seen = None  # what the file on disk was when we last read or wrote it

    def __len__(self):
        return len(self._logps)

    def __iter__(self):
        return iter(self._logps)

    def __getitem__(self, key):
        return np.frombuffer(self._logps[key], np.float32)  # KeyError: not scored, call fill first

    def fill(self, load_model: Callable, groups: Iterable[Group], tokens_per_forward=16384, path=None, save_every=60) -> int:
        """Scores the completions that are missing and returns how many they were. `load_model()` is called only if any is;
        afterwards the model is deleted and the device's memory given back. With `path` the cache is saved every
        `save_every` seconds, when done, and when interrupted. Out of memory halves tokens_per_forward and goes on."""
        todo = {(p, y): None for p, completions in groups for y in completions if (p, y) not in self._logps}
        if not todo:
            return 0
        missing = len(todo)
        model = load_model()  # the expensive thing
        saved = time.monotonic()
        bar = tqdm(total=sum(map(_tokens, _gather(todo, tokens_per_forward))), desc="reference", unit="tok", unit_scale=True)
        try:
            while todo:
                work = _gather(todo, tokens_per_forward)
                for batch in micro_batches(model, work, tokens_per_forward):
                    batch = [work[i] for i in batch]
                    if not self._score(model, batch, tokens_per_forward):
                        tokens_per_forward = min(tokens_per_forward, sum(map(_tokens, batch))) // 2
                        tqdm.write(f"out of memory in the reference pass: going on with {tokens_per_forward} tokens a forward")
                        break
                    for prompt, completions in batch:
                        for y in completions:
                            del todo[prompt, y]
                    bar.update(sum(map(_tokens, batch)))
                    if path and time.monotonic() - saved > save_every:
                        self.save(path)
                        saved = time.monotonic()
        finally:
            bar.close()
            if path:
                self.save(path)
            del model  # the last reference, unless the caller kept one
            gc.collect()
            torch.cuda.empty_cache()
        return missing

    @torch.no_grad()
    def _score(self, model, groups: list[Group], tokens_per_forward) -> bool:
        try:
            scored = completion_logprobs(model, groups, tokens_per_forward)
        except torch.OutOfMemoryError:
            if len(groups) == len(groups[0][1]) == 1:
                raise  # one completion alone does not fit: nothing left to halve
            return False  # out of here first: the exception's traceback still holds the forward's tensors
        for (prompt, completions), logps in zip(groups, scored):
            prompt = shared_ints(prompt)
            for y, logp in zip(completions, logps):
                self._logps[prompt, shared_ints(y)] = logp.cpu().numpy().tobytes()
        return True

    def save(self, path):
        """Writes a pickle of builtin types, whole or not at all; what another job has saved there meanwhile is kept."""
        path = Path(path)
        with FileLock(f"{path}.lock"):
            if _identity(path) not in (None, self._file_seen):
                self.load(path)
            groups = _gather(self._logps, np.inf)
            completions = [y for _, ys in groups for y in ys]
            body = dict(
                header=json.dumps(self.header, sort_keys=True).encode(),
                prompts=_pack(np.uint32, (len(p) for p, _ in groups)), counts=_pack(np.uint32, (len(ys) for _, ys in groups)),
                completions=_pack(np.uint32, map(len, completions)),
                tokens=_pack(np.uint32, chain.from_iterable(chain(p, *ys) for p, ys in groups)),
                logps=b"".join(self._logps[p, y] for p, ys in groups for y in ys))
            write_whole(path, pickle.dumps(dict(body, checksum=_checksum(body)), protocol=4))
            self._file_seen = _identity(path)

    def load(self, path):
        """Adds the entries of a file. Runs nothing that the file holds. Raises BadInput if it is damaged or another's."""
        identity, data = _identity(path), Path(path).read_bytes()
        try:
            body = _Builtins(io.BytesIO(data)).load()
            if body.pop("checksum") != _checksum(body):
                raise ValueError("its checksum does not match")
            header = json.loads(body["header"])
            prompts, counts, lengths, tokens = (np.frombuffer(body[k], np.uint32) for k in ("prompts", "counts", "completions", "tokens"))
            if tokens.size and tokens.max() >= 2**24 or header["format"] != self.FORMAT:
                raise ValueError("it has another format")
            if [len(tokens), len(body["logps"]), len(prompts), len(lengths)] != \
                    [prompts.sum() + lengths.sum(), 4 * lengths.sum(), len(counts), counts.sum()]:
                raise ValueError("its lengths do not add up")
        except Exception as error:  # whatever a damaged or hostile file provokes
            raise BadInput(f"{path} is not a reference cache, or is damaged ({error}): delete it or name another") from None
        for name, mine in self.header.items():
            if header.get(name) != mine:
                raise BadInput(f"{path} was made with {name} {header.get(name)}, but this run has {name} {mine}: "
                               "delete the file or name another with --ref_cache")
        collecting = gc.isenabled()
        gc.disable()  # it would walk over the growing millions again and again
        try:
            known = np.flatnonzero(np.bincount(tokens))
            table = np.empty(2**24, object)  # id -> the int object that all keys share
            table[known] = shared_ints(known.tolist())
            flat = tuple(table[tokens].tolist())
            lengths, at, value = iter(lengths.tolist()), 0, 0
            for prompt_length, count in zip(prompts.tolist(), counts.tolist()):
                prompt = flat[at:at + prompt_length]
                at += prompt_length
                for _ in range(count):
                    n = next(lengths)
                    self._logps.setdefault((prompt, flat[at:at + n]), body["logps"][4 * value:4 * (value + n)])
                    at, value = at + n, value + n
        finally:
            if collecting:
                gc.enable()
        self._file_seen = identity


class _Builtins(pickle._Unpickler):  # the one in Python: the C one allocates what a hostile file claims to hold
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


_INTS: dict[int, int] = {}


def shared_ints(ids: Iterable[int]) -> tuple[int, ...]:
    """A tuple of token ids that are the same objects everywhere: 8 bytes a token where fresh ints take 36."""
    shared = tuple(_INTS.setdefault(i, i) for i in ids)
    return ids if isinstance(ids, tuple) and all(map(operator.is_, ids, shared)) else shared


def _tokens(group: Group) -> int:
    return len(group[0]) + sum(map(len, group[1]))


def _gather(keys: Iterable[tuple[tuple, tuple]], most: float) -> list[Group]:
    """Completions of one prompt become one group, or several if they have more than `most` tokens."""
    open_groups, groups = {}, []
    for prompt, y in keys:
        group = open_groups.get(prompt)
        if group is None or group[1] + len(y) > most:
            group = open_groups[prompt] = [(prompt, []), len(prompt)]
            groups.append(group[0])
        group[0][1].append(y)
        group[1] += len(y)
    return groups


def _pack(dtype, numbers: Iterable) -> bytes:
    return np.fromiter(numbers, dtype).tobytes()


def _checksum(body: dict) -> str:
    digest = hashlib.sha256()
    for name in sorted(body):
        digest.update(f"{name} {len(body[name])} ".encode())
        digest.update(body[name])
    return digest.hexdigest()


def _identity(path):
    with suppress(FileNotFoundError):
        stat = os.stat(path)
        return stat.st_ino, stat.st_size, stat.st_mtime_ns


# ---------------------------------------------------------------------------------------------------------------------
# Files and what they are


def write_whole(path: Path, data: bytes):
    """A file that is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.partial")  # one name: what a kill leaves, the next save takes away
    try:
        temporary.write_bytes(data)
        move_whole(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def move_whole(source: Path, path: Path):
    """Gives a finished file its name, when its content is on the disk."""
    _fsync(source)
    os.replace(source, path)
    _fsync(path.parent)


def _fsync(path: Path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checkpoint_digest(name: str) -> str:
    """What a checkpoint is, without loading it: SHA-256 of its config and its safetensors files. `name` is a folder or a
    hub name (fetched if it is not there yet). Raises BadInput if there is no such checkpoint."""
    def fetch(file):
        return cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    try:
        config, index, single = (fetch(file) for file in ("config.json", "model.safetensors.index.json", "model.safetensors"))
        if not config or not (index or single):
            raise ValueError(f"it has no {'model.safetensors' if config else 'config.json'}, as save_pretrained writes it")
        files = [single] if single else [fetch(file) for file in sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))]
        config = {k: v for k, v in json.loads(Path(config).read_text()).items() if k not in ("transformers_version", "_name_or_path")}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
        for file in files:
            digest.update(np.memmap(file, np.uint8, "r"))
        return digest.hexdigest()[:32]
    except Exception as error:  # no such folder, no such hub name, a missing shard, an empty file
        raise BadInput(f"cannot read the model {name}: {type(error).__name__} {one_line(error)}") from None


def tokenizer_digest(tokenizer) -> str:
    """What the token ids mean: SHA-256 of the vocabulary."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:32]


def check_vocabulary(tokenizer, name: str):
    """Refuses a reference whose own tokenizer, if it has one, means something else by the same ids."""
    if cached_file(name, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False):
        if tokenizer_digest(load_tokenizer(name)[0]) != tokenizer_digest(tokenizer):
            raise BadInput(f"the tokenizer of {name} is not the policy's, so their token ids mean different things: name another --ref_model")


def load_model(name: str, device: str, gradient_checkpointing: bool = False):
    """A checkpoint in float32 and in eval mode, for good: dropout would add noise to every log-ratio."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            name, dtype="auto", use_safetensors=True, trust_remote_code=False, output_loading_info=True)
    except Exception as error:  # transformers raises many kinds for checkpoints that it cannot read
        raise BadInput(f"cannot load the model {name}: {one_line(error)}") from None
    if missing := [*info["missing_keys"], *info["mismatched_keys"]]:
        raise BadInput(f"{name} lacks weights of a language model ({missing[0]}, ..), which would be trained from noise: name another")
    model.saved_dtype = model.dtype  # in which save_model writes it
    model = model.float().to(device).eval()
    if gradient_checkpointing:
        checkpoint_layers(model)
    return model


def checkpoint_layers(model, use_reentrant: bool = False):
    """Gradient checkpointing without dropout: a layer checkpoints only in training mode, what lies inside it stays in eval."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # its name in later 5.x
    enable({"use_reentrant": use_reentrant})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
            for name, value in vars(module).items():
                if "dropout" in name and isinstance(value, float):
                    setattr(module, name, 0.0)  # OPT's layers apply theirs themselves


def load_tokenizer(name: str):
    """The tokenizer of a checkpoint, and the model's longest row."""
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False), context_length(config)
    except Exception as error:
        raise BadInput(f"cannot load the tokenizer of {name}: {one_line(error)}") from None


def context_length(config) -> float:
    """Tokens of the longest row whose log-probs do not depend on what else is in the batch."""
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
        if rope.get("rope_type") in ("dynamic", "longrope"):  # past this length all rows of a forward rotate differently
            longest = min(longest, rope.get("original_max_position_embeddings") or longest)
    return longest


def save_model(model, tokenizer, out: Path):
    """save_pretrained in the dtype it was loaded in. config.json goes first and comes last: half a model does not load."""
    saving = out / ".saving"
    shutil.rmtree(saving, ignore_errors=True)
    model.to(model.saved_dtype).save_pretrained(saving)
    tokenizer.save_pretrained(saving)
    (out / "config.json").unlink(missing_ok=True)
    for stale in (file for pattern in ("*.safetensors*", "*chat_template*", "tokenizer*") for file in out.glob(pattern)):
        shutil.rmtree(stale) if stale.is_dir() else stale.unlink()  # of an earlier run with another model
    for file in sorted(saving.iterdir(), key=lambda file: file.name == "config.json"):
        move_whole(file, out / file.name)
    saving.rmdir()


def load_function(spec: str):
    """FILE.py:FUNCTION -> the function. The one thing that runs a user's code, because the user asks for it."""
    try:
        file, name = spec.rsplit(":", 1)
        function = runpy.run_path(file)[name]
        if not callable(function):
            raise TypeError(f"{name} is not a function")
        return function
    except (Exception, SystemExit) as error:
        raise BadInput(f"cannot load {spec} as FILE.py:FUNCTION: {type(error).__name__} {error}") from None


def call_scorer(function, name: str, prompts: list, completions: list, columns: dict) -> list[float | None]:
    """Scores by a reward function in TRL's signature; None where it has nothing to say."""
    try:
        scores = list(function(prompts=prompts, completions=completions, **columns))
        for score in scores:
            if score is not None and not math.isfinite(score):
                raise ValueError(f"it returned {score}")
        if len(scores) != len(completions):
            raise ValueError(f"it returned {len(scores)} scores for {len(completions)} completions")
        return scores
    except (Exception, SystemExit) as error:
        raise BadInput(f"{name} failed: {type(error).__name__} {one_line(error)}") from error


def peak_memory() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"  # KiB on Linux


# ---------------------------------------------------------------------------------------------------------------------
# From files to groups. The boundary between prompt and answer is the cache's key: it is drawn here, once for all scripts.


def read_rows(source: str) -> list[tuple[str, dict]]:
    """The rows of a local file or a hub dataset, each with its place for messages: [("pairs.jsonl line 3", {...}), ..]."""
    path, place, rows = Path(source), source, []
    try:
        text = path.read_bytes().decode("utf-8-sig") if path.suffix in (".jsonl", ".json", ".csv") else ""
        if path.suffix == ".jsonl":
            for n, line in enumerate(text.split("\n"), 1):  # splitlines() would also break inside strings, at U+2028
                place = f"{source} line {n}"
                if line.strip():
                    rows.append((place, json.loads(line)))
        elif path.suffix == ".json":
            rows = [(f"{source} row {n}", row) for n, row in enumerate(json.loads(text), 1)]
        elif path.suffix == ".csv":
            reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
            place = f"{source} line 1"
            for row in reader:
                rows.append((f"{source} line {reader.line_num}", row))
                place = f"{source} line {reader.line_num + 1}"  # where the next row begins, should it be broken
        else:
            import datasets  # optional: parquet files and the hub
            name, split = ("parquet", "train") if path.suffix == ".parquet" else (source.split(":") + ["train"])[:2]
            table = datasets.load_dataset(name, data_files=source if name == "parquet" else None, split=split)
            rows = [(f"{source} row {n}", row) for n, row in enumerate(table, 1)]
    except ImportError:
        raise BadInput(f"{source}: parquet files and hub datasets need `pip install datasets`") from None
    except Exception as error:  # no such file, not JSON, not UTF-8, no such dataset: each says so in its own way
        raise BadInput(f"cannot read {place}: {one_line(error)}") from None
    for place, row in rows:
        if not isinstance(row, dict) or None in row:  # None: csv's name for cells beyond the header
            raise BadInput(f"{place}: a row must be an object with named columns, and no cells beyond them, not {str(row)[:40]!r}")
    return rows


def columns(row: dict) -> str:
    """The names of its columns for a message: on one line and not endless, whatever they hold."""
    return repr(", ".join(map(str, row)))[1:-1][:200]


def text_of(row: dict, name: str, where: str) -> str | list[dict]:
    """A column that holds a string or chat messages, not empty."""
    value = row.get(name)
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages):
        raise BadInput(f"{where}: {name} must be a string or a list of messages with role and content, not {str(value)[:50]!r} "
                       f"(its columns: {columns(row)})")
    if not messages[-1]["content"]:
        raise BadInput(f"{where}: {name} is empty: remove the row")
    return value


def parse_pair(row: dict, where: str):
    """A row of the file -> its prompt and two answers, as strings or as lists of messages."""
    chosen, rejected = (text_of(row, name, where) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise BadInput(f"{where}: chosen equals rejected, which teaches nothing: remove the row")
    if "prompt" in row:
        return text_of(row, "prompt", where), [chosen, rejected]
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
    same -= isinstance(chosen, str) and chosen[:same].endswith(" ")  # the space belongs to the answers' first tokens
    if not 0 < same < min(len(chosen), len(rejected)):
        raise BadInput(f"{where}: no column prompt, and chosen and rejected do not begin alike and then differ: add the prompt")
    return chosen[:same], [chosen[same:], rejected[same:]]


def render(tokenizer, prompt, answers, where: str) -> list[str]:
    """The text that the model reads: of the prompt alone, then of the prompt with each answer."""
    plain, end = isinstance(prompt, str), tokenizer.eos_token
    if any(isinstance(answer, str) != plain for answer in answers):
        raise BadInput(f"{where}: prompt and answers must be all strings or all chat messages")
    if plain and not end:
        raise BadInput(f"{where} holds plain strings, and the tokenizer has no EOS token to end the answers with: set its eos_token")
    try:
        if plain:
            texts = [prompt, *(prompt + answer + ("" if answer.endswith(end) else end) for answer in answers)]
        else:
            texts = [tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False),
                     *(tokenizer.apply_chat_template(prompt + answer, tokenize=False) for answer in answers)]
        "".join(texts).encode()  # half a surrogate pair would crash the tokenizer
    except Exception as error:  # no template, or one that raises what it likes
        raise BadInput(f"{where} cannot be rendered: {one_line(error)}") from None
    if not all(text.startswith(texts[0]) for text in texts):
        raise BadInput(f"{where}: the chat template's prompt is not how prompt + answer begins: mend the template")
    return texts


def encode(tokenizer, source: str, parse, max_length: int, truncate: bool) -> list[tuple[tuple, list[tuple], dict, str]]:
    """Reads, renders and tokenizes a dataset: [(prompt ids, [answer ids, ..], row, where), ..]. Says what it left out."""
    rows, kept, counts, first = read_rows(source), [], Counter(), {}
    # a chat template writes its own BOS; plain strings get one if the tokenizer gives it to any text
    bos = [tokenizer.bos_token_id] if tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id] else []
    for at in tqdm(range(0, len(rows), 1000), desc=f"tokenize {source}", unit="k rows", disable=len(rows) < 5000):
        chunk = [(where, row, *parse(row, where)) for where, row in rows[at:at + 1000]]
        texts = [text for where, _, prompt, answers in chunk for text in render(tokenizer, prompt, answers, where)]
        ids = iter(tokenizer(texts, add_special_tokens=False, verbose=False).input_ids)  # or it warns of rows that are dropped below
        for where, row, prompt, answers in chunk:
            x, *wholes = ((bos if isinstance(prompt, str) else []) + next(ids) for _ in range(1 + len(answers)))
            ys, problem = [whole[len(x):] for whole in wholes], None
            over = len(x) + max(map(len, ys), default=0) - max_length
            if any(whole[:len(x)] != x for whole in wholes):
                advice = "move its last space to the answer" if isinstance(prompt, str) else "strip the answer's first space or line break"
                problem = f"dropped because a token spans the end of the prompt ({advice})"
            elif not x or not all(ys):
                raise BadInput(f"{where}: the prompt or an answer has no tokens: remove the row")
            elif len(set(map(tuple, ys))) < len(ys):  # a template may leave out what differs, and an EOS may be written or added
                raise BadInput(f"{where}: both answers are the same tokens, which teaches nothing: remove the row, or mend the template")
            elif over > 0:
                problem = f"{'truncated' if truncate and over < len(x) else 'dropped'}: longer than {max_length} tokens"
            if problem:
                counts[problem] += 1
                first.setdefault(problem, where)
            if not problem or problem.startswith("truncated"):
                kept.append((shared_ints(x[max(0, over):]), [shared_ints(y) for y in ys], row, where))
    print(f"{source}: {len(kept)} of {len(rows)} rows" + "".join(f"; {n} {what}, first {first[what]}" for what, n in counts.items()))
    if not kept:
        raise BadInput(f"{source}: no row fits" if rows else f"{source} holds no rows")
    return kept


