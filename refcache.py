"""What does a model think of these completions? Log-probs, and the frozen reference policy as a dictionary of them.

    completion_logprobs(model, groups)   log π(token | all before it), for every token of every completion
    sample(model, tokenizer, prompts, k) k completions of each prompt, which is encoded once
    ReferenceCache                       the same numbers of a frozen model, computed once, kept, saved and shared
    Swap, Live                           a reference whose weights are at hand, for new completions or one that moves
    encode                               from the rows of a file to token ids: where a prompt ends is decided once
    Run                                  a run's files, its checkpoints, and how it goes on after a kill

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
import os
import pickle
import random
import resource
import runpy
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock  # comes with torch
from safetensors.torch import load_file, save_file  # comes with transformers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig, set_seed
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import cached_file

Group = tuple[tuple[int, ...], list[tuple[int, ...]]]

HEAD_ROWS = 256  # completion tokens a trip through the output head: 256 x 151,936 float32 logits are 148 MiB


class BadInput(ValueError):
    """Something that a person must mend. The message is one sentence: where, what is wrong, what to do."""

    exit_code = 2


class Diverged(RuntimeError):
    """Training that must not go on. The message says at which step, and why."""

    exit_code = 1


class Stopped(RuntimeError):
    """A run that ended early and can go on: asked to, or without room on the disk. The message says what is saved."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


def one_line(error: BaseException) -> str:
    kind = "" if isinstance(error, CannotShare) else type(error).__name__ + " "
    return kind + " ".join(str(error).split())[:200]


@contextmanager
def refusing(what: str, advice: str = "", code: str = ""):
    """Whatever a file, a library or a user's function raises in this block becomes a BadInput: `what`, the line if the file `code`
    raised it, the error, `advice`. BadInput itself and memory that runs out pass."""
    try:
        yield
    except (BadInput, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == code]
        raise BadInput(what + (f" in line {lines[-1]}" if lines else "") + f": {one_line(error)}{advice}") from error


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
    ids, mask = pad([prompt + y for prompt, y in rows], "right", device)
    sources = [i * ids.shape[1] + t for i, (prompt, y) in enumerate(rows) for t in range(len(prompt) - 1, len(prompt) + len(y) - 1)]  # the shift by one
    targets = [token for _, y in rows for token in y]
    return dict(input_ids=ids, attention_mask=mask), torch.tensor(sources, device=device), torch.tensor(targets, device=device)


def pad(rows: list[tuple], side: str, device, value: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask of an ordinary batch, (B, longest) each; `side`, left or right, is where `value` fills, with a mask of 0."""
    ids = [torch.tensor(row) for row in rows]
    mask = [torch.ones_like(row) for row in ids]
    return tuple(pad_sequence(x, True, v, side).to(device) for x, v in ((ids, value), (mask, 0)))


# ---------------------------------------------------------------------------------------------------------------------
# Log-probs


def completion_logprobs(model, groups: list[Group], tokens_per_forward: int = 16384, temperature: float = 1.0) -> list[list[torch.Tensor]]:
    """log π(token | prompt and the tokens before it), for every token of every completion; differentiable.

    Returns, for each group, for each of its completions, a float32 tensor of shape (len(completion),), in nats.
    tokens_per_forward bounds the tokens of one forward (a longer group goes alone): memory and speed, never the result.
    temperature divides the logits: for samples that were drawn so.
    Raises BadInput for an empty prompt or completion, and for a model whose own logits it cannot reproduce.
    """
    for prompt, completions in groups:
        if not prompt or not completions or not all(completions):
            raise BadInput("a prompt or a completion without tokens has no log-prob: leave it out")
    check_rows(base_model(model), ((len(p) + max(map(len, ys)), max(map(max, (p, *ys)))) for p, ys in groups))
    try:
        results = [None] * len(groups)
        for batch in micro_batches(model, groups, tokens_per_forward):
            for i, logps in zip(batch, _forward(model, [groups[i] for i in batch], None, temperature)):
                results[i] = logps
        return results
    except CannotShare as refusal:  # seen only in rows longer than the probe's: from now on this model takes padded rows
        base_model(model).why_not_shared = str(refusal)
        tqdm.write(f"prompts are no longer shared: {refusal}")
        return completion_logprobs(model, groups, tokens_per_forward, temperature)


def check_rows(core, rows: Iterable[tuple[int, int]], name="the model"):
    """Raises BadInput for a row that lies outside of the model. Of each comes its number of tokens, and the highest id in it."""
    vocabulary, context = core.get_input_embeddings().weight.shape[0], context_length(core.config)
    for length, highest in rows:
        if length > context:
            raise BadInput(f"a row of {length} tokens is longer than {name}'s {context} positions: shorten it")
        if highest >= vocabulary:
            raise BadInput(f"a row has the id {highest}, beyond {name}'s {vocabulary} embeddings: use the model's own tokenizer")


def log_ratios(model, groups: list[Group], known: Mapping | None, args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What all three algorithms are made of. Of every completion in turn, (n,) each, differentiable, summed over its tokens:
    log π(y|x); log π(y|x) − log π_ref(y|x); and without gradient the number of tokens that humanline leaves alone (without it, all).

    `known[prompt, completion]` holds the reference's log-probs (reference_logprobs gives it); None: log π_ref = 0.
    args: dtype, tokens_per_forward; temperature of the samples; humanline with log_eps_p, log_eps_r clamps every token's ratio, arXiv:2509.24207.
    """
    with autocast(model, args.dtype):
        logps = list(chain.from_iterable(completion_logprobs(model, groups, args.tokens_per_forward, getattr(args, "temperature", 1.0))))
    keys = [(prompt, y) for prompt, completions in groups for y in completions]
    ratios, sizes = torch.cat(logps), [len(y) for _, y in keys]  # (N,)
    if known is not None:
        ratios = ratios - torch.tensor(np.concatenate([known[key] for key in keys]), device=ratios.device)
    unclamped = torch.ones_like(ratios, dtype=torch.bool)
    if getattr(args, "humanline", False):
        unclamped = (ratios >= args.log_eps_p) & (ratios <= args.log_eps_r)
        ratios = ratios.clamp(args.log_eps_p, args.log_eps_r)  # outside no gradient passes
    return tuple(torch.stack([x.sum() for x in parts]) for parts in (logps, ratios.split(sizes), unclamped.split(sizes)))


def autocast(model, dtype: str):
    """Forwards in bfloat16, if asked; weights and losses stay in float32."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def micro_batches(model, groups: list[Group], tokens_per_forward: int) -> list[list[int]]:
    """Packs groups into forwards of at most tokens_per_forward tokens, padding included: lists of indices, longest first."""
    if why_not_shared(model):  # why not: then rows are padded
        return pack([max(len(p) + len(y) for y in ys) for p, ys in groups], tokens_per_forward, [len(ys) for _, ys in groups])
    return pack([len(p) + sum(map(len, ys)) for p, ys in groups], tokens_per_forward)


def pack(sizes: list[int], most: int, rows: list[int] | None = None) -> list[list[int]]:
    """Indices of items with so many tokens, in batches of at most `most`, largest first; a larger item goes alone. With `rows`
    item i is that many rows, padded to the first of its batch."""
    batches, load = [], 0
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        cost = rows[i] * sizes[batches[-1][0] if batches else i] if rows else sizes[i]
        if not batches or load + cost > most:
            batches.append([])
            load, cost = 0, rows[i] * sizes[i] if rows else sizes[i]
        batches[-1].append(i)
        load += cost
    return batches


def base_model(model):
    """The Hugging Face model itself, also under a peft wrapper (whose adapters live inside its layers)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _forward(model, groups: list[Group], lay_out=None, temperature=1.0) -> list[list[torch.Tensor]]:
    core = base_model(model)
    lay_out = lay_out or (lay_out_padded if why_not_shared(model) else lay_out_shared)
    inputs, sources, targets = lay_out(groups, core.get_input_embeddings().weight.device)
    hidden = core.get_decoder()(**inputs, use_cache=False)[0].flatten(0, 1)  # (T, H)
    hidden = hidden.index_select(0, sources)  # (N, H): only what predicts a completion token meets the head
    logps = []
    for h, y in zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS)):
        # checkpointed: the backward computes these logits again, so that (N, V) never exists
        logps.append(checkpoint(_token_logps, core, h, y, temperature, use_reentrant=False))
    logps = iter(torch.cat(logps).split([len(y) for _, completions in groups for y in completions]))
    return [[next(logps) for _ in completions] for _, completions in groups]


def _token_logps(core, hidden, targets, temperature):  # (n, H), (n,) -> (n,)
    scale, cap = core.logit_scale_and_cap
    # the head is called as a module: `head.weight` would miss a LoRA adapter and a bias
    logits = core.get_output_embeddings()(hidden).float() * scale  # (n, V), the expensive thing
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return -F.cross_entropy(logits / temperature, targets, reduction="none")


def why_not_shared(model) -> str:
    """Turns prompt sharing on if that leaves this model's log-probs unchanged. Returns "" if so, else why not.

    Decided by evidence, once for a loaded model: what its config says of its layers, then a probe that compares flat
    rows with one forward a sequence, and with a flat row whose attention was told nothing, which must be clearly worse.
    The attention then stays on: gradient checkpointing runs it again in the backward pass.
    Raises BadInput if decoder and head do not reproduce the model's own logits.
    """
    core = base_model(model)
    if not hasattr(core, "why_not_shared"):
        with torch.no_grad(), torch.autocast(core.device.type, enabled=False), eval_mode(core), read_frozen(core):
            core.logit_scale_and_cap, core.why_not_shared = _probe(core)
    return core.why_not_shared


@contextmanager
def eval_mode(model):
    """No dropout and no checkpointed layers, which would ignore a cache: for whatever is not a training step."""
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
    truth = [-F.cross_entropy(core(input_ids=torch.tensor([prompt + y], device=device), use_cache=False).logits[0, len(prompt) - 1:-1].float(),
                              torch.tensor(y, device=device), reduction="none") for y in (first, second)]  # its own word, one forward a sequence

    def error(lay_out):
        return max((a - b).abs().max().item() for a, b in zip(truth, _forward(core, groups, lay_out)[0]))

    def lay_out_blind(groups, device):  # the same row, but its attention is told nothing
        inputs, *places = lay_out_shared(groups, device)
        return inputs | {"spans": None}, *places

    # what stands between head and logits: the config's softcap and one of its factors, whichever the logits confirm; _token_logps reads it
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
    except torch.OutOfMemoryError:
        raise
    except (CannotShare, TypeError, ValueError, RuntimeError) as refusal:  # no such keyword, no sdpa, another mask
        core.set_attn_implementation(before)
        return best, one_line(refusal)


# ---------------------------------------------------------------------------------------------------------------------
# Samples: a prompt is encoded once, however many completions it gets


@torch.no_grad()
def sample(model, tokenizer, prompts: list[tuple], k: int, rng: np.random.Generator, args,
           temperature=1.0, top_p=1.0, top_k=0, rollout_tokens=65536) -> tuple[list[list[tuple]], float]:
    """k completions of each prompt (token ids), with the stop token; and the mean entropy of what their tokens were drawn from, in nats.

    From the model's own distribution, nothing cut off, whatever its generation config says; temperature 0 is greedy. Every prompt
    goes through the model once, then its cache is expanded to k rows. Sample i of prompt b draws its t-th token with the uniform
    number u[b, i, t] of `rng` (generator() makes one): how prompts are batched (rollout_tokens places in a cache) or padded changes
    no sample, but for rounding at the edge of two tokens. args: max_new_tokens, and dtype of the forwards. A model whose cache
    cannot be expanded encodes every prompt k times, in transformers' generate(), and says so.
    """
    if not all(prompts):
        raise BadInput("a prompt without tokens has no continuation: leave it out")
    u = torch.from_numpy(rng.random((len(prompts), k, args.max_new_tokens))).to(model.device)
    core, ends = base_model(model), torch.tensor(sorted(stop_tokens(model, tokenizer)), dtype=torch.long, device=model.device)
    check_rows(core, ((len(prompt) + args.max_new_tokens, max(prompt)) for prompt in prompts))
    chunks = pack([len(prompt) + args.max_new_tokens for prompt in prompts], rollout_tokens, [k] * len(prompts))
    completions, entropies = [None] * len(prompts), []
    with eval_mode(model), autocast(model, args.dtype):
        decode = _generate if why_not_expanded(core) else _decode
        for chunk in tqdm(chunks, desc="sample", leave=False, disable=len(chunks) < 2):
            rows, entropy = decode(core, [prompts[b] for b in chunk], u[chunk], ends, partial(draw, temperature=temperature, top_p=top_p, top_k=top_k))
            entropies += entropy
            for n, b in enumerate(chunk):
                completions[b] = rows[n * k:n * k + k]
    return completions, torch.cat(entropies).mean().item() if entropies else 0.0


def stop_tokens(model, tokenizer) -> set[int]:
    """The ids that end a completion: the tokenizer's EOS, and whatever else the model's generation config names."""
    ends = base_model(model).generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}


def _decode(core, prompts: list[tuple], u: torch.Tensor, ends: torch.Tensor, draw: Callable) -> tuple[list[tuple], list[torch.Tensor]]:
    """The sampling loop. u (B, k, T) uniform numbers -> B·k completions, and what else `draw` says of each token: its entropy."""
    B, k, T = u.shape
    ids, mask = pad(prompts, "left", core.device)  # (B, longest)
    cache = DynamicCache(config=core.config.get_text_config())
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # left padding shifts nobody
    logits = core(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    cache.batch_repeat_interleave(k)  # the prompts' keys and values, computed once, for k rows
    logits, mask, position, u = *(x.repeat_interleave(k, 0) for x in (logits[:, -1], mask, positions[:, -1:])), u.flatten(0, 1)
    # rows[j]: which of the B·k samples the j-th row still in the cache is; finished ones stay there until a quarter is finished
    rows, alive = torch.arange(B * k, device=core.device), torch.ones(B * k, dtype=torch.bool, device=core.device)
    tokens, entropies = torch.zeros(B * k, T, dtype=torch.long, device=core.device), torch.zeros(B * k, T, device=core.device)
    lengths = torch.full((B * k,), T, device=core.device)
    for t in range(T):
        token, entropy = draw(logits, u[rows, t])
        tokens[rows, t], entropies[rows, t] = token, entropy
        ended = alive & torch.isin(token, ends)
        lengths[rows[ended]] = t + 1
        alive &= ~ended
        if t == T - 1 or not alive.any():
            break
        if alive.sum() <= 0.75 * len(alive):  # they leave together: each departure copies the cache
            stay = alive.nonzero()[:, 0]
            cache.batch_select_indices(stay)
            rows, token, mask, position, alive = rows[stay], token[stay], mask[stay], position[stay], alive[stay]
        mask, position = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1), position + 1
        logits = core(input_ids=token[:, None], attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True).logits[:, -1]
    lengths = lengths.tolist()
    return [tuple(row[:n]) for row, n in zip(tokens.tolist(), lengths)], [row[:n] for row, n in zip(entropies, lengths)]


def draw(logits: torch.Tensor, u: torch.Tensor, temperature=1.0, top_p=1.0, top_k=0) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row, (n, V) logits and (n,) uniform numbers -> (n,), and the entropy of what it was drawn from."""
    if not temperature:  # greedy
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    probs = torch.softmax(logits.float() / temperature, dim=-1)
    if top_k or top_p < 1:
        ranked, ids = probs.sort(dim=-1, descending=True, stable=True)
        ranked[:, top_k or len(ranked[0]):] = 0
        share = ranked / ranked.sum(-1, keepdim=True)
        share[share.cumsum(-1) - share >= top_p] = 0  # the smallest set that reaches top_p stays
        probs = torch.zeros_like(probs).scatter(-1, ids, share / share.sum(-1, keepdim=True))
    cdf = probs.double().cumsum(-1)  # in float32 the tail of 150,000 tokens would be lost
    token = torch.searchsorted(cdf, u[:, None].to(cdf.dtype) * cdf[:, -1:], right=True)[:, 0]  # right: never a token of probability 0
    return token.clamp(max=probs.shape[-1] - 1), -torch.special.xlogy(probs, probs).sum(-1)


def _generate(core, prompts: list[tuple], u: torch.Tensor, ends: torch.Tensor, draw: Callable) -> tuple[list[tuple], list[torch.Tensor]]:
    """The same by transformers' generate(), k rows a prompt, for caches that cannot be expanded."""
    ids, mask = pad([prompt for prompt in prompts for _ in range(u.shape[1])], "left", core.device)
    u, stop, entropies = u.flatten(0, 1), set(ends.tolist()), []

    def ours(_, logits):  # all but the token that we draw becomes impossible, so that generate()'s greedy choice is ours
        token, entropy = draw(logits, u[:, len(entropies)])
        entropies.append(entropy)
        return torch.full_like(logits, -math.inf).scatter(1, token[:, None], 0.0)
    config = GenerationConfig(do_sample=False, max_new_tokens=u.shape[1], eos_token_id=ends.tolist() or None, pad_token_id=0)
    own, core.generation_config = core.generation_config, GenerationConfig()  # or generate() would take from it what `config` leaves open
    try:
        new = core.generate(input_ids=ids, attention_mask=mask, generation_config=config, logits_processor=[ours])[:, ids.shape[1]:].tolist()
    finally:
        core.generation_config = own
    rows = [tuple(y[:next((t + 1 for t, token in enumerate(y) if token in stop), len(y))]) for y in new]
    return rows, [entropy[:len(y)] for entropy, y in zip(torch.stack(entropies, dim=1), rows)]


def why_not_expanded(core) -> str:
    """Why this model's cache cannot be expanded to k rows; "" if it can. Decided once a model, by a small trial of the sampling loop, with
    padding, rows that leave, and tokens that are given: their log-probs must be those of completion_logprobs."""
    def given(logits, token):
        return token, -F.cross_entropy(logits.float(), token, reduction="none")
    if not hasattr(core, "why_not_expanded"):
        ids = torch.linspace(1, core.config.get_text_config().vocab_size - 1, 36, device=core.device).long()
        prompts, tokens = [tuple(ids[:7].tolist()), tuple(ids[7:12].tolist())], ids[12:].view(2, 3, 4)
        try:
            if core._is_stateful:
                raise CannotShare("its layers keep a state that is not a cache of keys and values")
            with torch.autocast(core.device.type, enabled=False), read_frozen(core):
                rows, ours = _decode(core, prompts, tokens, torch.stack([tokens[0, 0, 0], tokens[1, 1, 0], tokens[0, 1, 1]]), given)
                truth = completion_logprobs(core, list(zip(prompts, (rows[:3], rows[3:]))))
            ours, truth = torch.cat(ours), torch.cat(list(chain.from_iterable(truth)))
            gap = ((ours - truth).abs() / (1 + truth.abs())).max().item()
            if not gap < (1e-4 if core.dtype == torch.float32 else 0.05):
                raise CannotShare(f"it changed a log-prob by {gap:.1g} of itself")
            core.why_not_expanded = ""
        except torch.OutOfMemoryError:
            raise
        except Exception as refusal:  # caches of many kinds, which fail in many ways
            core.why_not_expanded = one_line(refusal)
            tqdm.write(f"samples: each encodes its prompt, because the cache cannot be expanded: {core.why_not_expanded}")
    return core.why_not_expanded


# ---------------------------------------------------------------------------------------------------------------------
# The frozen reference


class ReferenceCache(Mapping):
    """(prompt_ids, completion_ids) -> float32 array of the completion's token log-probs under the frozen reference.

    Exact, because the boundary is part of the key. `header` says what the numbers belong to (builtin types only, such as
    reference=checkpoint_digest(path), tokenizer=tokenizer_digest(tokenizer), dtype="float32"): a file with another header
    is refused. In memory 8 bytes a token for the key (its ints are shared, and its prompt by its completions) and 4
    for the value; on disk 4 and 4.
    """

    def __init__(self, **header):
        self.header = dict(format=1, **header)
        self._logps: dict[tuple[tuple, tuple], bytes] = {}
        self._seen = None  # the version of the file that we last read or wrote

    def __len__(self):
        return len(self._logps)

    def __iter__(self):
        return iter(self._logps)

    def __getitem__(self, key):
        return np.frombuffer(self._logps[key], np.float32)  # KeyError: not scored, call fill first

    def fill(self, load_model: Callable, groups: list[Group], tokens_per_forward=16384, path=None, save_every=60, dtype="float32") -> int:
        """Scores what is missing, with a model that exists for just that long, and returns how many completions that were.
        `load_model()` makes it and keeps no reference to it; it is not called if nothing is missing. Afterwards the model is
        deleted and the device's memory given back."""
        missing = len({(p, y) for p, completions in groups for y in completions} - self._logps.keys())
        try:
            if missing:
                self.score(load_model(), groups, tokens_per_forward, path, save_every, dtype)  # the expensive thing
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        return missing

    def score(self, model, groups: list[Group], tokens_per_forward=16384, path=None, save_every=60, dtype="float32", temperature=1.0):
        """Scores the completions that are missing with `model`. With `path` the cache is saved every `save_every` seconds, when
        done, and when an exception or Ctrl-C ends it. Out of memory halves tokens_per_forward and goes on."""
        keys = dict.fromkeys((p, y) for p, completions in groups for y in completions)
        plan, saved = self._plan(model, keys, tokens_per_forward), time.monotonic()
        bar = tqdm(total=sum(map(_tokens, plan)), desc="reference", unit="tok", unit_scale=True, leave=bool(path),
                   delay=0 if path else 2)  # between training steps only a long pass is worth a bar
        try:
            for batch in plan:
                if not self._score(model, batch, dtype, tokens_per_forward, temperature):
                    half = min(tokens_per_forward, _tokens(batch)) // 2
                    tqdm.write(f"out of memory in the reference pass: going on with {half} tokens a forward")
                    return self.score(model, groups, half, path, save_every, dtype, temperature)
                bar.update(_tokens(batch))
                if path and time.monotonic() - saved > save_every:
                    self.save(path)
                    saved = time.monotonic()
        finally:
            bar.close()
            if path:
                self.save(path)

    def _plan(self, model, keys, tokens_per_forward) -> list[list[Group]]:
        """The forwards of a pass. Groups are laid out over all keys, known or not, and forwards are filled one after the other:
        a pass that was killed goes on with the forwards that it lacks, and ends with the same bits."""
        groups = [(p, [y for y in ys if (p, y) not in self._logps]) for p, ys in _by_prompt(keys, tokens_per_forward)]
        groups = [group for group in groups if group[1]]  # only now: what is known must not change how the rest is grouped
        return [[groups[i] for i in batch] for batch in micro_batches(model, groups, tokens_per_forward)]

    @torch.no_grad()
    def _score(self, model, groups: list[Group], dtype, tokens_per_forward, temperature) -> bool:
        try:
            with eval_mode(model), autocast(model, dtype):  # LoRA's dropout is no part of the reference
                scored = completion_logprobs(model, groups, tokens_per_forward, temperature)
        except torch.OutOfMemoryError:
            if len(groups) == len(groups[0][1]) == 1:
                raise  # one completion alone does not fit: nothing left to halve
            return False  # out of here first: the exception's traceback still holds the forward's tensors
        flat = torch.cat([logp for logps in scored for logp in logps]).cpu().numpy().tobytes()  # one transfer
        at = 0
        for prompt, completions in groups:
            prompt = shared_ints(prompt)
            for y in map(shared_ints, completions):
                self._logps[prompt, y] = flat[at:at + 4 * len(y)]
                at += 4 * len(y)
        return True

    def save(self, path):
        """Writes a pickle of builtin types, whole or not at all; what another job has saved there meanwhile is kept."""
        path = Path(path)
        with FileLock(f"{path}.lock"):
            if path.exists() and _version(path) != self._seen:
                self.load(path)
            groups = _by_prompt(self._logps, np.inf)
            completions = [y for _, ys in groups for y in ys]
            body = dict(
                header=json.dumps(self.header, sort_keys=True).encode(),
                prompts=_pack(np.uint32, (len(p) for p, _ in groups)), counts=_pack(np.uint32, (len(ys) for _, ys in groups)),
                completions=_pack(np.uint32, map(len, completions)),
                tokens=_pack(np.uint32, chain.from_iterable(chain(p, *ys) for p, ys in groups)),
                logps=b"".join(self._logps[p, y] for p, ys in groups for y in ys))
            write_whole(path, pickle.dumps(dict(body, checksum=_checksum(body)), protocol=4))
            self._seen = _version(path)

    def load(self, path):
        """Adds the entries of a file. Runs nothing that the file holds. Raises BadInput if it is damaged or another's."""
        version, data = _version(path), Path(path).read_bytes()
        try:
            body = _Builtins(io.BytesIO(data)).load()
            if body.pop("checksum") != _checksum(body):
                raise ValueError("its checksum does not match")
            header = json.loads(body["header"])
            prompts, counts, lengths, tokens = (np.frombuffer(body[k], np.uint32) for k in ("prompts", "counts", "completions", "tokens"))
            if tokens.size and tokens.max() >= 2**24:
                raise ValueError("it has impossible tokens")
            if [len(tokens), len(body["logps"]), len(prompts), len(lengths)] != \
                    [prompts.sum() + lengths.sum(), 4 * lengths.sum(), len(counts), counts.sum()]:
                raise ValueError("its lengths do not add up")
        except Exception as error:  # whatever a damaged or hostile file provokes
            raise BadInput(f"{path} is not a reference cache, or is damaged ({error}): delete it or name another") from None
        for name, mine in self.header.items():
            if header.get(name) != mine:
                raise BadInput(f"{path} was made with {name} {header.get(name)}, but this run has {name} {mine}: "
                               "delete the file or name another with --ref_cache")
        known = np.flatnonzero(used := np.bincount(tokens))
        table = np.empty(len(used), object)
        table[known] = shared_ints(known.tolist())  # the int objects that all keys share
        ids = iter(table[tokens].tolist())
        lengths, values = iter(lengths.tolist()), io.BytesIO(body["logps"])
        for prompt_length, count in zip(prompts.tolist(), counts.tolist()):
            prompt = tuple(islice(ids, prompt_length))
            for n in islice(lengths, count):
                self._logps.setdefault((prompt, tuple(islice(ids, n))), values.read(4 * n))
        self._seen = version


class _Builtins(pickle._Unpickler):  # the one in Python: the C one allocates what a hostile file claims to hold
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


_INTS: dict[int, int] = {}


def shared_ints(ids: Iterable[int]) -> tuple[int, ...]:
    """A tuple of token ids that are the same objects everywhere: 8 bytes a token where fresh ints take 36."""
    return tuple(_INTS.setdefault(i, i) for i in ids)


def _tokens(batch: list[Group]) -> int:
    return sum(len(prompt) + sum(map(len, completions)) for prompt, completions in batch)


def _by_prompt(keys: Iterable[tuple[tuple, tuple]], most: float) -> list[Group]:
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


def _version(path) -> tuple:
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _checksum(body: dict) -> str:
    return hashlib.sha256(b"".join(body[name] for name in sorted(body))).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# A reference that is held: for completions that nobody could have scored before, and for one that moves


class Swap:
    """The reference's weights in host memory. `with swap as model:` brings them into the one model in place, and brings
    the policy's back even when the block raises; the optimizer's state and tied weights never notice.

    Only what trains is kept and moved: every weight, or a LoRA adapter alone, whose beginning is then the reference: for
    a new one (B = 0) the model with its adapters off, for one trained before (an SFT adapter) that adapter. Without
    `reference` it is the policy as it is now. Raises BadInput if nothing trains, or the two are not shaped alike.
    """

    def __init__(self, policy, reference=None):
        self.policy, self.ours = policy, [p for p in policy.parameters() if p.requires_grad]  # tied ones come once
        if not self.ours:
            raise BadInput("nothing in the policy trains, so it has nothing to swap: load it as trainable")
        self.theirs = [torch.empty_like(r, device="cpu", pin_memory=p.is_cuda).copy_(r.detach())  # pinned if the policy is on a GPU
                       for r, p in zip(matching_weights(policy, reference or policy), self.ours)]
        self.saved = [torch.empty_like(r, pin_memory=r.is_pinned()) for r in self.theirs]

    @torch.no_grad()
    def _put(self, source, keep=()):
        for weight, saved in zip(self.ours, keep):
            saved.copy_(weight, non_blocking=True)
        for weight, new in zip(self.ours, source):
            weight.copy_(new, non_blocking=True)  # in stream order: after its old value left
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def __enter__(self):
        self._put(self.theirs, keep=self.saved)
        return self.policy

    def __exit__(self, *_):
        self._put(self.saved)

    @torch.no_grad()
    def sync(self, mix: float = 1.0):
        """π_ref <- mix · π + (1 − mix) · π_ref, weight by weight."""
        for r, p in zip(self.theirs, self.ours):
            r.lerp_(p.to(r), mix)


class Live(Swap):
    """The reference as a second model on the device, for comparison or a small one. Only one that moves (sync) must be shaped as the policy is."""

    def __init__(self, policy, reference, moves: bool):
        self.model, self.ours = reference, [p for p in policy.parameters() if p.requires_grad]
        self.theirs = [p.detach() for p in matching_weights(policy, reference)] if moves else []

    def __enter__(self):
        return self.model

    def __exit__(self, *_):
        pass


MEANINGLESS = "_name_or_path architectures dtype initializer_range max_position_embeddings max_window_layers transformers_version use_cache".split()


def matching_weights(policy, reference) -> list:
    """The reference's weights under the names of those that train in the policy. Raises BadInput if names, shapes or what the
    config makes of them differ: an untied head would stay behind, and another rope_theta makes another model of the same weights."""
    ours, theirs = (dict(model.named_parameters()) for model in (policy, reference))
    configs = [{k: v for k, v in base_model(model).config.to_dict().items() if k not in MEANINGLESS and "dropout" not in k and not k.endswith("token_id")}
               for model in (policy, reference)]
    differ = [name for name in ours | theirs if name not in theirs or name not in ours or ours[name].shape != theirs[name].shape]
    if differ := differ or [name for name in configs[0] | configs[1] if configs[0].get(name) != configs[1].get(name)]:
        raise BadInput(f"the reference's weights are not shaped like the policy's ({differ[0]}): name another --ref_model, or hold it in another way (--ref)")
    return [theirs[name] for name, p in ours.items() if p.requires_grad]


def reference_window(step: int, steps: int, args) -> range:
    """The steps, this one (from 1) among them, that one swap scores: --ref_ahead of them, but not past a move of the reference.
    A function of the step alone, so that a resumed run scores the same steps together again."""
    period = args.sync_reference or steps
    moved = (step - 1) // period * period  # steps before the reference's last move
    first = step - (step - 1 - moved) % args.ref_ahead
    return range(first, min(first + args.ref_ahead, moved + period + 1, steps + 1))


def reference_logprobs(reference, groups: list[Group], args) -> Mapping | None:
    """log π_ref of all these groups, from wherever it is: a complete cache, or a Swap or Live, entered once. None stays None."""
    if reference is None or isinstance(reference, ReferenceCache):
        return reference
    known = ReferenceCache()
    with reference as model:  # the expensive thing: the weights go in, and out again
        known.score(model, groups, args.tokens_per_forward, dtype=args.dtype, temperature=getattr(args, "temperature", 1.0))
    return known


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


def find(name: str, file: str) -> str | None:
    """The path of a checkpoint's file, in a folder or from the hub (fetched if it is not there yet); None if it has no such file."""
    with refusing(f"cannot read the model {name}"):  # no such folder, no such name
        return cached_file(name, file, _raise_exceptions_for_missing_entries=False)


def adapter_base(name: str) -> str | None:
    """The model that a LoRA adapter in peft's format belongs to; None for a checkpoint that is whole."""
    if not (file := find(name, "adapter_config.json")):
        return None
    with refusing(f"cannot read {file}"):
        base = json.loads(Path(file).read_text())["base_model_name_or_path"]
        if find(base, "adapter_config.json"):  # or itself, without end
            raise BadInput(f"the base of {file}, {base}, is an adapter too: merge that one first, and name the merged model there")
        return base


def checkpoint_digest(name: str) -> str:
    """What a checkpoint is, without loading it: SHA-256 of its config and its safetensors files. `name` is a folder or a
    hub name (fetched if it is not there yet). Raises BadInput if there is no such checkpoint."""
    with refusing(f"cannot read the model {name}"):  # a missing shard, an empty file
        base = adapter_base(name)
        config, single = (find(name, f"adapter_{file}" if base else file) for file in ("config.json", "model.safetensors"))
        index = None if base else find(name, "model.safetensors.index.json")
        if not config or not (index or single):
            raise BadInput(f"cannot read the model {name}: it has no {'model.safetensors' if config else 'config.json'}, as save_pretrained writes it")
        files = [single] if single else [find(name, file) for file in sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))]
        config = {k: v for k, v in json.loads(Path(config).read_text()).items() if k not in ("transformers_version", "_name_or_path")}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode() + (checkpoint_digest(base).encode() if base else b""))
        for file in files:
            digest.update(np.memmap(file, np.uint8, "r"))
        return digest.hexdigest()[:32]


def tokenizer_digest(tokenizer) -> str:
    """What the token ids mean: SHA-256 of the vocabulary."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:32]


def load_model(name: str, device: str, dtype: str = "float32", trainable: bool = False):
    """A checkpoint (folder or hub name) in float32 and in eval mode: dropout would add noise to every log-ratio. An adapter comes on
    its base. Frozen, unless `trainable`; `dtype` is that of the forwards to come, in which what is frozen may be stored."""
    if base := adapter_base(name):
        with refusing("LoRA adapters need `pip install peft`"):
            import peft
        model = load_model(base, "cpu")
        if not find(name, "adapter_model.safetensors"):
            raise BadInput(f"cannot load the adapter {name}: it has no adapter_model.safetensors")
        with refusing(f"cannot load the adapter {name}"):
            model = peft.PeftModel.from_pretrained(model, name, is_trainable=trainable, autocast_adapter_dtype=False)
        if model.active_peft_config.is_prompt_learning:
            raise BadInput(f"cannot load the adapter {name}: it is no LoRA adapter but a learned prompt, which lies outside of the model's layers")
    else:
        model = from_checkpoint(AutoModelForCausalLM, name, "a language model").requires_grad_(trainable)
        model.saved_dtype = model.dtype  # in which save_model writes it
    return store_frozen(model.float().eval(), dtype).to(device)


def store_frozen(model, dtype: str):
    """Frozen linear weights that were saved in bfloat16 go back to it, if that is the dtype of the forwards: autocast would make the
    same numbers of their float32 copies in every forward. No result changes; the base of a LoRA run takes about half of the memory."""
    if dtype == "bfloat16" and getattr(model, "saved_dtype", None) == torch.bfloat16 and not base_model(model)._is_stateful:  # recurrent layers read weights themselves
        for module in model.modules():
            if type(module) is torch.nn.Linear and not module.weight.requires_grad and module.weight is not model.get_input_embeddings().weight:
                module.weight.data = module.weight.data.bfloat16()
    return model


@contextmanager
def read_frozen(model):
    """For forwards outside of autocast: what store_frozen stored in bfloat16 is read as float32, a layer at a time."""
    stored = [m for m in model.modules() if type(m) is torch.nn.Linear and m.weight.dtype == torch.bfloat16 and model.dtype == torch.float32]
    for module in stored:
        module.forward = lambda x, m=module: F.linear(x, m.weight.float(), m.bias)
    try:
        yield
    finally:
        for module in stored:
            del module.forward


def from_checkpoint(kind, name: str, what: str):
    """`kind` is one of transformers' Auto classes. Raises BadInput for weights that would be noise."""
    with refusing(f"cannot load the model {name}"):  # transformers raises many kinds of errors for what it cannot read
        model, info = kind.from_pretrained(name, dtype="auto", use_safetensors=True, trust_remote_code=False, output_loading_info=True)
    if missing := [*info["missing_keys"], *info["mismatched_keys"]]:
        raise BadInput(f"{name} lacks weights of {what} ({missing[0]}, ..), which would be noise: name another")
    return model


def load_policy(args, device: str):
    """The model that trains: all of --model; with --lora_r a new adapter over it (LoRA, arXiv:2106.09685); or the adapter it is."""
    policy = load_model(args.model, "cpu" if args.lora_r else device, args.dtype, trainable=True)
    if args.lora_r:
        with refusing("LoRA adapters need `pip install peft`"):
            import peft
        target = args.lora_target if args.lora_target == "all-linear" else args.lora_target.split(",")
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=args.lora_r, lora_alpha=args.lora_alpha or 2 * args.lora_r,
                                 lora_dropout=args.lora_dropout, target_modules=target)
        with refusing(f"--lora_target {args.lora_target}"):  # no such layers
            policy = store_frozen(peft.get_peft_model(policy, config).eval(), args.dtype).to(device)
    for name, module in policy.named_modules():
        if ".lora_dropout" in name:
            module.train()  # the one dropout there is; eval_mode turns it off for whatever is not a training step
    if args.gradient_checkpointing:
        checkpoint_layers(base_model(policy))
    why_not, trains = why_not_shared(policy), sum(p.numel() for p in policy.parameters() if p.requires_grad)
    print(f"policy: {sum(p.numel() for p in policy.parameters()):,} parameters, {trains:,} of them in training, on {device}, {args.dtype} "
          "forwards, " + (f"padded rows because {why_not}" if why_not else "every prompt encoded once, no padding"))
    return policy


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
    base = adapter_base(name) or name
    with refusing(f"cannot load the tokenizer of {name}"):
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
        own = find(name, "tokenizer_config.json")
        return AutoTokenizer.from_pretrained(name if own else base, trust_remote_code=False), context_length(config)


def context_length(config) -> float:
    """Tokens of the longest row whose log-probs do not depend on what else is in the batch."""
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
        if rope.get("rope_type") in ("dynamic", "longrope"):  # past this length all rows of a forward rotate differently
            longest = min(longest, rope.get("original_max_position_embeddings") or longest)
    return longest


def save_model(model, tokenizer, out: Path, merge: bool = False):
    """save_pretrained in the dtype it was loaded in; of an adapter its own files, or with `merge` the whole model.
    The config goes first and comes last: half a model does not load."""
    saving, configs = out / ".saving", ("config.json", "adapter_config.json")
    shutil.rmtree(saving, ignore_errors=True)
    if merge:
        model.cpu().float().merge_and_unload().to(model.saved_dtype).save_pretrained(saving)
    else:
        (model if hasattr(model, "peft_config") else model.to(model.saved_dtype)).save_pretrained(saving)
        (saving / "README.md").unlink(missing_ok=True)  # peft's empty model card
    tokenizer.save_pretrained(saving)
    for config in configs:
        (out / config).unlink(missing_ok=True)
    for stale in (file for pattern in ("*.safetensors*", "*chat_template*", "tokenizer*") for file in out.glob(pattern)):
        shutil.rmtree(stale) if stale.is_dir() else stale.unlink()  # of an earlier run with another model
    for file in sorted(saving.iterdir(), key=lambda file: file.name in configs):
        move_whole(file, out / file.name)
    saving.rmdir()


def load_function(spec: str):
    """FILE.py:FUNCTION -> the function. The one thing that runs a user's code, because the user asks for it."""
    with refusing(f"cannot load {spec} as FILE.py:FUNCTION"):
        file, name = spec.rsplit(":", 1)
        sys.path.insert(0, str(Path(file).resolve().parent))  # it may import its neighbours
        function = runpy.run_path(file)[name]
        if not callable(function):
            raise TypeError(f"{name} is not a function")
        return function


def call_scorer(function, name: str, samples: list[dict], rows: list[dict]) -> list[float | None]:
    """Scores of samples {prompt, completion} by a reward function in TRL's signature, f(prompts, completions, **columns),
    with the columns of their rows; None where it has nothing to say. Completions are strings, or messages if prompts are."""
    completions = [s["completion"] if isinstance(s["prompt"], str) else [{"role": "assistant", "content": s["completion"]}] for s in samples]
    columns = {column: [row.get(column) for row in rows] for column in dict.fromkeys(chain.from_iterable(rows)) if column not in ("prompt", "prompts", "completions")}
    code = getattr(getattr(function, "__code__", None), "co_filename", "")
    with refusing(f"{name} failed", code=code), torch.no_grad():  # also gives the gradients back to a training step, should the function turn them off
        # copies: what a function changes in place must not reach the next one, samples.jsonl or the rows
        scores = function(prompts=deepcopy([sample["prompt"] for sample in samples]), completions=completions, **deepcopy(columns))
        if isinstance(scores, (Mapping, Set)):
            raise TypeError(f"it returned a {type(scores).__name__}, which has no order: return a list")
        scores = list(scores)
        if len(scores) != len(samples):
            raise ValueError(f"it returned {len(scores)} scores for {len(samples)} completions")
        for score, sample in zip(scores, samples):
            if score is not None and not abs(score) < 1e30:  # float32 would make it inf
                raise ValueError(f"it returned {score} for the completion {sample['completion'][:60]!r}")
        return [score if score is None else float(score) for score in scores]


# ---------------------------------------------------------------------------------------------------------------------
# A run: what the three scripts do in the same way


def with_defaults(args, demo: dict):
    """Fills in what depends on other flags; without --model and --data the demo's."""
    def here(value):  # the demo lies beside the scripts, wherever they are started
        return tuple(map(here, value)) if isinstance(value, tuple) else os.path.relpath(Path(__file__).parent / value) if isinstance(value, str) else value
    if args.model is None and args.data is None:
        args = replace(args, **{name: here(value) for name, value in demo.items() if getattr(args, name) in (None, ())})
    same = args.ref != "none" and args.model and Path(args.ref_model or args.model) == Path(args.model)  # however it is spelled
    values = dict(dtype=args.dtype if args.dtype != "auto" else "bfloat16" if torch.cuda.is_available() else "float32",
                  lr=1e-6 if args.lr is None else args.lr, ref_model=args.model if same else args.ref_model)
    if args.ref == "cache":
        values["ref_cache"] = args.ref_cache or f"{args.out}/reference_logprobs.pkl"
    if getattr(args, "humanline", False) and args.sync_reference is None:
        values["sync_reference"] = 1
    return replace(args, **values)


def check_args(args, positive: str, *rules: tuple[bool, str]):
    """Refuses what cannot be meant, in one sentence: rules of the script, then what holds for all of them."""
    def value(name):
        return getattr(args, name, None)
    lora = args.lora_r or args.model and adapter_base(args.model)
    for wrong, sentence in (
        (not (args.model and args.data), "--model and --data go together: give both, or neither for the demo"),
        (Path(args.out).resolve() in (Path(args.model or "").resolve(), Path(args.ref_model or "").resolve()),
         "--out is the folder of --model or --ref_model: name another"),
        *rules,
        (args.ref == "none" and (args.ref_model or value("ref_cache")), "there is no reference here: leave out --ref_model and --ref_cache"),
        (args.ref != "cache" and value("ref_cache"), f"--ref {args.ref} keeps no file: leave out --ref_cache"),
        (args.ref == "adapter" and not lora, "--ref adapter is the model without its LoRA adapter: add --lora_r, or use --ref swap"),
        (args.ref == "adapter" and args.ref_model != args.model, f"--ref adapter is --model itself: leave out --ref_model, or use --ref {'cache' if hasattr(args, 'ref_cache') else 'live'}"),
        (args.ref == "swap" and lora, "a LoRA run has its reference at hand: use --ref adapter instead of --ref swap"),
        (args.ref_dtype != "float32" and args.ref != "live", f"--ref {args.ref} has no weights of its own on the device: leave out --ref_dtype"),
        (args.lora_r and adapter_base(args.model), f"{args.model} is an adapter already, which goes on training: leave out --lora_r"),
        (args.merge and not lora, "there is no adapter to --merge: add --lora_r"),
        (not args.lora_r and (args.lora_alpha or args.lora_dropout or args.lora_target != "all-linear"), "--lora_* needs --lora_r"),
        (value("humanline") and (args.sync_reference or 1) != 1, "--humanline syncs the reference at every step: leave out --sync_reference"),
        (args.sync_reference and args.ref not in ("swap", "live", "adapter"),
         f"--ref {args.ref} never moves, and --sync_reference and --humanline need a reference that does: use --ref {'adapter' if lora else 'swap'}"),
        (args.sync_reference and args.ref == "live" and lora, "the moving reference of a LoRA run is an adapter: use --ref adapter"),
        (args.sync_mix != 1 and not args.sync_reference, "--sync_mix needs --sync_reference"),
        (args.sync_mix != 1 and args.ref_dtype != "float32", "--ref_dtype bfloat16 would round the small moves of --sync_mix away: leave one out"),
        (not 0 < args.sync_mix <= 1, "--sync_mix must be above 0 and at most 1"),
        (not 0 <= args.lora_dropout < 1, "--lora_dropout must be at least 0 and less than 1"),
        (not value("humanline") and any(value(name) != getattr(type(args), name, None) for name in ("log_eps_p", "log_eps_r")), "--log_eps_* needs --humanline"),
        (value("log_eps_p") is not None and not value("log_eps_p") <= 0 <= value("log_eps_r"), "--log_eps_p must not be above 0, nor --log_eps_r below"),
        (not 0 <= (args.lr or 0) <= 1e30 or not 0 <= args.weight_decay < math.inf or min(args.samples, args.eval_size) < 0,
         "--lr, --weight_decay, --samples and --eval_size must be numbers, not negative, and --lr at most 1e30"),
        (not 0 <= args.warmup <= 1, "--warmup is a share of the steps: between 0 and 1"),
        (not 0 <= args.seed < 2**63, "--seed must be between 0 and 2^63"),
        *((value(name) is not None and not 0 < value(name) < math.inf, f"--{name} must be above 0")
          for name in (positive + " lora_r lora_alpha sync_reference ref_ahead batch_size tokens_per_forward max_length max_new_tokens steps epochs "
                       "eval_every max_grad_norm save_every keep").split()),
    ):
        if wrong:
            raise BadInput(sentence)


def load_references(run: "Run", tokenizer, asked: list[Group], device: str):
    """Policy and reference. With a cache there are never two models in memory: it is filled first, and its model gone when the policy comes."""
    args, reference = run.args, None
    other = args.ref_model if args.ref_model != args.model else None
    if other and find(other, "tokenizer_config.json") and tokenizer_digest(load_tokenizer(other)[0]) != tokenizer_digest(tokenizer):
        raise BadInput(f"the tokenizer of {other} is not the policy's, so their token ids mean different things: name another --ref_model")
    if args.ref == "cache":
        reference = fill_cache(args, run.identity["weights"][args.ref_model], tokenizer, asked, device)
    policy = load_policy(args, device)
    if args.ref in ("swap", "adapter"):
        reference = Swap(policy, load_model(other, "cpu") if other else None)
    elif args.ref == "live":
        model = load_model(args.ref_model, device, "float32" if args.sync_reference else args.dtype)
        reference = Live(policy, model.to(getattr(torch, args.ref_dtype)) if args.ref_dtype != "float32" else model, moves=bool(args.sync_reference))
    return policy, reference


def fill_cache(args, digest: str, tokenizer, asked: list[Group], device: str) -> ReferenceCache:
    """The reference's log-probs of all groups: from the file, and for the rest from the model, which is gone afterwards."""
    reference = ReferenceCache(reference=digest, tokenizer=tokenizer_digest(tokenizer), dtype=args.dtype)
    try:
        Path(args.ref_cache).parent.mkdir(parents=True, exist_ok=True)
        if Path(args.ref_cache).exists():
            reference.load(args.ref_cache)
        else:
            reference.save(args.ref_cache)  # at the door, not after the pass: can it be written?
    except OSError as error:
        raise BadInput(f"cannot read and write --ref_cache {args.ref_cache}: {error}") from None
    try:
        scored = reference.fill(lambda: load_model(args.ref_model, device, args.dtype), asked, args.tokens_per_forward, args.ref_cache, dtype=args.dtype)
    except OSError as error:
        raise Stopped(f"cannot save {args.ref_cache}: {error}; the file holds what was saved before, and the same command goes on there") from None
    known = len({(prompt, y) for prompt, ys in asked for y in ys}) - scored
    print(f"reference: {scored} answers scored, the other {known} known from {args.ref_cache}")
    return reference


@torch.no_grad()
def check_start(policy, groups: list[Group], known: Mapping | None, values: str, args):
    """Before its first update the policy is the reference: token for token they must agree, to rounding."""
    if known is None or args.ref_model != args.model:
        return
    with eval_mode(policy), autocast(policy, args.dtype):
        logps = completion_logprobs(policy, groups, args.tokens_per_forward, getattr(args, "temperature", 1.0))
    gaps = np.concatenate([abs(logp.cpu().numpy() - known[prompt, y]) for (prompt, ys), row in zip(groups, logps) for y, logp in zip(ys, row)])
    print(f"step 0: policy and reference differ by at most {gaps.max():.1e} nats a token; {values}")
    if not gaps.mean() < (3e-2 if "bfloat16" in (args.dtype, args.ref_dtype) else 1e-4):
        raise Diverged(f"step 0: policy and reference are the same model, but differ by {gaps.mean():.2g} nats a token on average: the "
                       "reference's file does not hold what it says (delete it), or this model's forward is not deterministic")


def generator(seed: int, purpose: str, n: int = 0) -> np.random.Generator:
    """Random numbers that are a function of seed, purpose and step or epoch: whoever resumes needs no state of them, and no two purposes share any."""
    return np.random.default_rng([seed, n, *purpose.encode()])


def hold_out(rows: list, size: int, seed: int) -> tuple[list, list]:
    """Splits off the rows of `size` prompts, at most a tenth of them; all rows of a prompt stay on one side."""
    prompts = sorted({row.prompt for row in rows})
    held = {prompts[i] for i in generator(seed, "hold_out").permutation(len(prompts))[:min(size, len(prompts) // 10)]}
    return [row for row in rows if row.prompt not in held], [row for row in rows if row.prompt in held]


def batch_rows(step: int, n: int, batch_size: int, seed: int) -> list[int]:
    """The rows of a step (from 1): epoch after epoch of permutations, each a function of (seed, epoch) alone."""
    places = range((step - 1) * batch_size, step * batch_size)
    orders = {epoch: generator(seed, "order", epoch).permutation(n) for epoch in {place // n for place in places}}
    return [int(orders[place // n][place % n]) for place in places]


def lr_factor(step: int, steps: int, warmup: float, schedule: str) -> float:
    """Share of the peak learning rate at a step (from 1): linear warmup, then constant, or falling so that step steps + 1 had 0."""
    if step <= (rise := round(warmup * steps)):
        return step / rise
    left = (steps - step + 1) / (steps - rise)  # 1 .. 1 / (steps − rise)
    return {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[schedule]


class Run:
    """The files of a run in --out, and its continuation: the same command goes on after the newest checkpoint.
    To make one only reads; files are cut back to what counts when the first line is written.

    metrics.jsonl    an object a step, nothing in it that would differ in a second run
    samples.jsonl    an object a sampled completion
    seconds.jsonl    an object a step: what its parts took
    checkpoints/N    what trains, optimizer and random states after step N: whole or not there, and safe to load
    finished.json    the arguments of a run that is through
    """

    MAY_DIFFER = {"out", "ref_cache", "ref_ahead", "tokens_per_forward", "rollout_tokens", "gradient_checkpointing", "save_every", "keep", "tensorboard"}
    DIGESTS = {"rows": "other rows in the same files", "weights": "other weights behind the same names"}
    FILES = ("metrics", "samples", "seconds")

    def __init__(self, args, rows: list):
        self.out, self.args, self.board, self.files, self.stopping = Path(args.out), args, None, {}, None
        digest = hashlib.sha256()
        for row in rows:
            digest.update(repr(row).encode("utf-8", "backslashreplace"))
        models = {name for name in (args.model, args.ref_model, getattr(args, "reward_model", None)) if name}
        code = {spec: _file_digest(spec.rsplit(":", 1)[0]) for spec in (*getattr(args, "reward", ()), args.score) if spec}
        self.identity = {"args": json.loads(json.dumps(asdict(args))), "rows": digest.hexdigest(), "code": code,
                         "weights": {name: checkpoint_digest(name) for name in sorted(models)}}
        set_seed(args.seed % 2**32)  # Python's and numpy's too: for reward functions
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            write_whole(self.out / ".writable", b"")
            (self.out / ".writable").unlink()
            if args.tensorboard:
                from torch.utils.tensorboard import SummaryWriter
                self.writer = SummaryWriter
        except OSError as error:
            raise BadInput(f"cannot write into --out {self.out}: {error}") from None
        except ImportError:
            raise BadInput("--tensorboard needs `pip install tensorboard`") from None
        self.finished = (self.out / "finished.json").exists()
        states = [self.out / "finished.json"] if self.finished else [folder / "state.json" for folder in self.checkpoints()]
        self.newest, self.done, self.laps = states[-1] if states else None, 0, {}
        if self.newest:
            self.done = self._continue()  # steps
        if self.finished:  # and finished.json was read: a damaged one takes no checkpoint with it
            shutil.rmtree(self.out / "checkpoints", ignore_errors=True)  # a kill came between
        self.history, self.answers = self._kept("metrics"), [row for row in self._kept("samples") if row["held_out"]]

    def checkpoints(self) -> list[Path]:  # the newest last
        return sorted((path for path in (self.out / "checkpoints").glob("[0-9]*") if path.name.isdecimal()), key=lambda path: int(path.name))

    def _continue(self) -> int:
        """The step after which the newest state was saved. Raises BadInput if that is another run's."""
        with refusing(f"{self.newest} is damaged", f": delete {self.newest.parent}, or name another --out"):
            self.state = json.loads(self.newest.read_text())
            ours, theirs = ({name: state[name] for name in self.DIGESTS} | state["args"] for state in (self.identity, self.state))
            step = self.state["step"]
        for name in sorted((ours.keys() | theirs.keys()) - self.MAY_DIFFER, key=lambda name: name in self.DIGESTS):
            if ours.get(name) != theirs.get(name):
                what = self.DIGESTS[name] if name in self.DIGESTS else f"{name} {theirs.get(name)!r}, and not {ours.get(name)!r}"
                raise BadInput(f"{self.out} holds {'a finished run' if self.finished else f'a run of {step} steps'} with {what}: name another --out, or delete it")
        if self.state.get("code") != self.identity["code"]:
            print(f"the file of a reward or score has changed since {self.newest} was written")
        print(f"{self.out} is finished, after {step} steps: nothing to do. Delete it, or name another --out, to train again" if self.finished
              else f"{self.out} goes on after step {step}")
        return step

    def _kept(self, name: str) -> list[dict]:
        """The lines up to the last step that counts; what a kill left behind it goes."""
        if not self.newest:
            return []
        rows, path = [], self.out / f"{name}.jsonl"
        for line in path.read_text().split("\n") if path.exists() else []:
            with suppress(ValueError):  # torn
                rows.append(json.loads(line))
        rows = [row for row in rows if row["step"] <= self.done]
        if name == "metrics" and [row["step"] for row in rows] != list(range(self.done + 1)):
            raise BadInput(f"{path} lacks steps that the checkpoint has seen: delete {self.out}, or name another --out")
        return rows

    def lap(self, part: str):
        """The seconds since the step began in steps(), or since its last lap, are those of this part of it."""
        now = time.monotonic()
        self.laps[part], self.lapped = round(now - self.lapped, 4), now

    def check(self, values: dict):
        """Raises Diverged if one of a step's numbers is NaN or infinite."""
        if wrong := [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]:
            raise Diverged(f"step {values['step']}: {', '.join(wrong)}; {self.out} keeps what it had: lower --lr, or look at this step's rows, in another --out")

    def write(self, values: dict, answers: list[dict] = [], samples: list[dict] = []):
        """A step's metrics; held-out answers and training samples; and its seconds, which are never the same twice, in a file of their own."""
        self.check(values)
        step = {"step": values["step"]}
        answers = [{**step, "held_out": True, **row} for row in answers]
        lines = dict(metrics=[values], samples=answers + [{**step, "held_out": False, **row} for row in samples], seconds=[step | self.laps] if self.laps else [])
        try:
            if not self.files:  # only now: a run that is refused before its first line leaves the last one's files alone
                if self.args.tensorboard:
                    self.board = self.writer(self.out, purge_step=self.done + 1 if self.done else None)
                write_whole(self.out / "args.json", json.dumps(asdict(self.args), indent=2).encode())
                for name in self.FILES:
                    write_whole(self.out / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in self._kept(name)).encode())
                    self.files[name] = open(self.out / f"{name}.jsonl", "a")
            for name, file in self.files.items():
                file.writelines(json.dumps(row) + "\n" for row in lines[name])
                file.flush()
        except OSError as error:
            raise Stopped(f"cannot write into {self.out}: {error}; {self._saved()}") from None
        self.history.append(values)
        self.answers += answers
        if self.board:
            for name, value in (values | self.laps).items():
                self.board.add_scalar(name, value, values["step"])

    def steps(self, steps: int, policy, optimizer, reference):
        """The steps that are left, with a bar, a checkpoint where one is due, and an ear for SIGTERM and SIGINT."""
        def ask(number, frame):
            if self.stopping:
                raise KeyboardInterrupt  # asked twice: at once
            self.stopping = signal.Signals(number)
            tqdm.write(f"{self.stopping.name}: stopping after this step")
        main_thread = threading.current_thread() is threading.main_thread()
        before = {s: signal.signal(s, ask) for s in (signal.SIGTERM, signal.SIGINT)} if main_thread else {}
        try:
            self.bar, self.began = tqdm(range(self.done + 1, steps + 1), desc="train", initial=self.done, total=steps), time.monotonic()
            for step in self.bar:
                self.laps, self.lapped = {}, time.monotonic()
                yield step
                if step < steps and (self.stopping or step % self.args.save_every == 0):
                    self._save(step, policy, optimizer, reference)
                if step < steps and self.stopping:
                    raise Stopped(f"{self.stopping.name} after step {step}; {self._saved()}", 128 + self.stopping)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def show(self, text: str):
        """Beside the bar: a step's metrics, the tokens a second since the start or the resume, and the most memory so far."""
        seen, before = (self.history[at].get("num_tokens", 0) for at in (-1, self.done))
        most = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
        self.bar.set_postfix_str(f"{text}, {(seen - before) / (time.monotonic() - self.began):,.0f} tokens/s, {most / 2**30:.1f} GiB")

    def _saved(self) -> str:
        kept = self.checkpoints()
        return f"step {kept[-1].name} is saved, and the same command goes on there" if kept else "no checkpoint is there yet: the same command starts anew"

    def _save(self, step: int, policy, optimizer, reference):
        """Into a temporary folder, every file on the disk, then the name; older checkpoints go only afterwards."""
        folder = self.out / "checkpoints"
        saving = folder / ".saving"
        try:
            shutil.rmtree(saving, ignore_errors=True)
            saving.mkdir(parents=True)
            save_file({name: p.detach().contiguous() for name, p in policy.named_parameters() if p.requires_grad}, saving / "weights.safetensors")
            if self.args.sync_reference:
                save_file({str(i): w.contiguous() for i, w in enumerate(reference.theirs)}, saving / "reference.safetensors")
            kind, keys, *rest = np.random.get_state()
            torch.save({"optimizer": optimizer.state_dict(), "torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all(),
                        "python": random.getstate(), "numpy": (kind, keys.tolist(), *rest)}, saving / "optimizer.pt")
            state = dict(self.identity, step=step, files={file.name: _file_digest(file) for file in sorted(saving.iterdir())})
            (saving / "state.json").write_text(json.dumps(state))
            for file in (*saving.iterdir(), saving, *(self.out / f"{name}.jsonl" for name in self.FILES)):
                _fsync(file)
            shutil.rmtree(folder / str(step), ignore_errors=True)
            os.replace(saving, folder / str(step))
            _fsync(folder)
        except Exception as error:  # a full disk is an OSError, a SafetensorError or a RuntimeError
            shutil.rmtree(saving, ignore_errors=True)
            raise Stopped(f"cannot save step {step} into {folder}: {error}; {self._saved()}") from None
        for old in self.checkpoints()[:-self.args.keep]:
            shutil.rmtree(old)

    def restore(self, policy, optimizer, reference):
        """Brings everything back to where the newest checkpoint left it. Runs nothing that it holds; refuses a damaged one."""
        if not self.done:
            return
        folder = self.newest.parent
        with refusing(f"the checkpoint {folder} is damaged", ": delete it to go on from an older one, or start anew"):
            for name, digest in self.state["files"].items():
                if _file_digest(folder / Path(name).name) != digest:
                    raise ValueError(f"{name} has changed")
            weights, rest = load_file(folder / "weights.safetensors"), torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
            with torch.no_grad():
                for name, p in policy.named_parameters():
                    if p.requires_grad:
                        p.copy_(weights[name])
                if self.args.sync_reference:
                    kept = load_file(folder / "reference.safetensors")
                    for i, w in enumerate(reference.theirs):
                        w.copy_(kept[str(i)])
            optimizer.load_state_dict(rest["optimizer"])
            torch.set_rng_state(rest["torch"])
            torch.cuda.set_rng_state_all(rest["cuda"])
            random.setstate(rest["python"])
            np.random.set_state(rest["numpy"])

    def finish(self):
        if self.board:
            self.board.close()
        write_whole(self.out / "finished.json", json.dumps(dict(self.identity, step=self.history[-1]["step"])).encode())
        shutil.rmtree(self.out / "checkpoints", ignore_errors=True)


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def command_line(main: Callable, args):
    """Runs a script; what a person can mend is one sentence on stderr and an exit code, not a traceback."""
    try:
        main(args)
    except (BadInput, Diverged, Stopped) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(f"{Path(sys.argv[0]).name}: interrupted; what was saved is whole, and the same command goes on there")
    except (torch.OutOfMemoryError, MemoryError) as error:
        print(f"{Path(sys.argv[0]).name}: out of memory: lower --tokens_per_forward, or add --gradient_checkpointing ({one_line(error)})", file=sys.stderr)
        sys.exit(1)


def answer(policy, tokenizer, held: list, score, args) -> tuple[list[dict], dict[str, float]]:
    """Samples of held-out prompts, as samples.jsonl keeps them, and their mean score."""
    room = context_length(policy.config) - args.max_new_tokens  # for a prompt
    prompts = list({row.prompt: row for row in held}.values())[:args.samples]
    asked = [row for row in prompts if len(row.prompt) <= room]
    if len(asked) < len(prompts):
        print(f"{len(prompts) - len(asked)} of {len(prompts)} held-out prompts get no answer: --max_new_tokens {args.max_new_tokens} leaves them no room")
    ids, _ = sample(policy, tokenizer, [row.prompt for row in asked], 1, generator(args.seed, "answers"), args)
    texts = tokenizer.batch_decode([y for ys in ids for y in ys], skip_special_tokens=True)
    samples = [{"prompt": row.row["prompt"], "completion": text} for row, text in zip(asked, texts)]
    if not score or not asked:
        return samples, {}
    for sampled, value in zip(samples, call_scorer(score, args.score, samples, [row.row for row in asked])):
        sampled["score"] = value
    scores = [sampled["score"] for sampled in samples if sampled["score"] is not None]
    return samples, {"eval_score": float(np.mean(scores))} if scores else {}


def report(run: Run):
    """What changed on held-out data, from the first line of the metrics to the last."""
    before, after = ([row for row in run.answers if row["step"] == values["step"]] for values in (run.history[0], run.history[-1]))
    for old, new in list(zip(before, after))[:3]:
        prompt = old["prompt"] if isinstance(old["prompt"], str) else old["prompt"][-1]["content"]
        print(f"\n{prompt}\n  before  {old['completion']}\n  after   {new['completion']}")
    first, last = run.history[0], run.history[-1]
    names = ("eval_loss", "eval_reward", "eval_kl", "eval_rewards/margins", "eval_rewards/accuracies", "eval_score")
    if names := [name for name in names if name in first and name in last]:  # a reward may have nothing to say of any answer
        print(f"\n{'held out':28}{'before':>8}{'after':>8}", *(f"{name:28}{first[name]:8.3f}{last[name]:8.3f}" for name in names), sep="\n")


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
            if not isinstance(table := json.loads(text), list):
                raise ValueError("it holds no list of rows")
            rows = [(f"{source} row {n}", row) for n, row in enumerate(table, 1)]
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
    if plain and answers and not end:
        raise BadInput(f"{where} holds plain strings, and the tokenizer has no EOS token to end the answers with: set its eos_token")
    with refusing(f"{where} cannot be rendered"):  # no template, or one that raises what it likes
        if plain:
            texts = [prompt, *(prompt + answer + ("" if answer.endswith(end) else end) for answer in answers)]
        else:
            texts = [tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False),
                     *(tokenizer.apply_chat_template(prompt + answer, tokenize=False) for answer in answers)]
        "".join(texts).encode()  # half a surrogate pair would crash the tokenizer
    if not all(text.startswith(texts[0]) for text in texts):
        raise BadInput(f"{where}: the chat template's prompt is not how prompt + answer begins: mend the template")
    return texts


def encode(tokenizer, source: str, parse, max_length: int, truncate: bool) -> list[tuple[tuple, list[tuple], dict, str]]:
    """Reads, renders and tokenizes a dataset: [(prompt ids, [answer ids, ..], row, where), ..], of which the first two make a group.
    parse(row, where) gives the prompt and its answers, as parse_pair does; `truncate` cuts long prompts at the front instead of
    dropping their rows. Says what it left out."""
    rows, kept, counts, first = read_rows(source), [], Counter(), {}
    # a chat template writes its own BOS; plain strings get one if the tokenizer gives it to any text
    bos = [tokenizer.bos_token_id] if tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id] else []
    for at in tqdm(range(0, len(rows), 1000), desc=f"tokenize {source}", unit="k rows", disable=len(rows) < 5000):
        chunk = [(where, row, *parse(row, where)) for where, row in rows[at:at + 1000]]
        texts = [text for where, _, prompt, answers in chunk for text in render(tokenizer, prompt, answers, where)]
        ids = iter(tokenizer(texts, add_special_tokens=False, verbose=False).input_ids)  # or it warns of rows that are dropped below
        for where, row, prompt, answers in chunk:
            start = bos if isinstance(prompt, str) else []  # a truncated prompt keeps it
            x, *wholes = (start + next(ids) for _ in range(1 + len(answers)))
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
                problem = f"{'truncated' if truncate and over < len(x) - len(start) else 'dropped'}: longer than {max_length} tokens"
            if problem:
                counts[problem] += 1
                first.setdefault(problem, where)
            if not problem or problem.startswith("truncated"):
                kept.append((shared_ints(start + x[len(start) + max(0, over):]), [shared_ints(y) for y in ys], row | {"prompt": prompt}, where))
    print(f"{source}: {len(kept)} of {len(rows)} rows" + "".join(f"; {n} {what}, first {first[what]}" for what, n in counts.items()))
    if not kept:
        raise BadInput(f"{source}: no row fits" if rows else f"{source} holds no rows")
    return kept


