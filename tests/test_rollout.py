"""Rollouts: against one forward per sequence without a cache, and however they are batched."""
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import arguments
from torch import tensor

import rloo
from models import MODELS, bad_input, cases, ready, slow_but
from rloo import draw, rollout

RANDOM = torch.Generator().manual_seed(0)
PROMPTS = [tuple(torch.randint(3, 97, (n,), generator=RANDOM).tolist()) for n in (3, 17, 25)]
PROMPTS.insert(2, (0, 0, 9, 8, 4, 3, 0))  # token 0 is no padding
TOKENIZER = SimpleNamespace(eos_token_id=2, batch_decode=lambda ids, **_: ids)  # all that a rollout asks of it
QUICK = {"llama", "gpt2", "granite-logits-scaling", "mistral-window-5", "gemma3-window-6", "mamba"}


def flags(**changes):
    return rloo.Args(**dict(dtype="float32", max_new_tokens=10, temperature=3.0) | changes)


def roll(model, args, prompts=PROMPTS, k=4, step=1):
    return rollout(model, TOKENIZER, prompts, k=k, step=step, args=args)


@torch.no_grad()
def check_tokens(model, samples, args):
    shape = len(samples.groups), len(samples.groups[0][1]), args.max_new_tokens
    uniform = torch.from_numpy(np.random.default_rng([args.seed, 1, *b"rollout"]).random(shape))
    for b, (prompt, ys) in enumerate(samples.groups):
        for i, y in enumerate(ys):
            logits = model(tensor([prompt + y]), use_cache=False).logits[0, len(prompt) - 1:-1]
            logps = (logits.double() / args.temperature).log_softmax(-1)  # (len(y), V)
            own = logps.gather(1, tensor(y)[:, None])[:, 0]  # (len(y),)
            above = logps.exp().cumsum(-1).gather(1, tensor(y)[:, None])[:, 0]
            u = uniform[b, i, :len(y)]
            assert (u < above + 1e-4).all() and (u > above - own.exp() - 1e-4).all()
            assert samples.logps[b, i, :len(y)].tolist() == pytest.approx(own.tolist(), abs=2e-3)
            entropy = -(logps.exp() * logps).sum().item()
            assert samples.entropy[b, i].item() == pytest.approx(entropy, abs=2e-3 * len(y))
    assert not samples.logps[~samples.mask].any()


@cases("name", slow_but(QUICK, MODELS))
def test_uniform_numbers_pick_tokens_of_the_model(name):
    """Also where each of a few samples has a copy of the prompt, because it is shorter than they are."""
    model, args = ready(name), flags()
    check_tokens(model, roll(model, args), args)
    check_tokens(model, roll(model, args, PROMPTS[::2], k=2), args)


def test_tokens_of_probability_0_are_never_drawn():
    probs = tensor([0.0, 0.4, 0.6, 1e-9, 0.0])
    tokens, _, entropy = draw(probs.log().expand(2, -1), tensor([0, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 3]
    assert torch.allclose(entropy, torch.special.entr(probs).sum())


@cases("name", ["llama", "mamba"])
def test_samples_do_not_depend_on_the_batch(name, monkeypatch):
    model = ready(name)
    model.generation_config.eos_token_id = None
    monkeypatch.setattr(TOKENIZER, "eos_token_id", None)  # then no sample ends
    args = flags(max_new_tokens=6)
    first = roll(model, args).groups
    for tokens in (1, 130):
        assert roll(model, replace(args, rollout_tokens=tokens)).groups == first
    assert roll(model, args, [PROMPTS[0], (40,) * 60, PROMPTS[2]]).groups[::2] == first[:3:2]
    assert roll(model, replace(args, seed=1)).groups != first != roll(model, args, step=2).groups
    assert all(len(set(ys)) == 4 for _, ys in first)


@cases("name", ["llama", "gpt2", "mistral-window-5", "mamba"])
def test_samples_leave_at_their_first_stop_token(name):
    """They leave at every length, and change no other sample."""
    model = ready(name)
    stops = range(2, 13)
    model.generation_config.eos_token_id = [*stops[1:]]  # 2 is the tokenizer's
    samples = roll(model, flags(), k=8)
    check_tokens(model, samples, flags())
    for y, has_ended in zip(chain(*(ys for _, ys in samples.groups)), samples.ended.flatten()):
        assert not set(y[:-1]) & set(stops)
        assert has_ended == (y[-1] in stops) and (has_ended or len(y) == 10)
    assert len({len(y) for _, ys in samples.groups for y in ys}) > 4


@cases("steps", [0, 1])
@cases("dtype, factor", [("float32", 1.02), ("bfloat16", 1.5)])
def test_model_that_draws_wrong_tokens_is_refused(dtype, factor, steps, monkeypatch):
    monkeypatch.setattr(rloo, "draw", lambda logits, *rest: draw(logits * factor, *rest))
    with bad_input("a key-value cache changes its log-probs"):
        rloo.main(arguments("rloo", dtype=dtype, steps=steps))
    with bad_input("above 0"):
        rloo.main(arguments("rloo", temperature=0))
