"""Samples against transformers' generate(), the model's distribution, and each other: nothing but the flags changes them."""
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import tensor
from transformers import DynamicCache, GenerationConfig

import refcache
from models import make
from refcache import BadInput, completion_logprobs, draw, generator, why_not_expanded
from rloo import Args, rollout

PROMPTS = [(5, 6, 7, 8, 9, 10, 11, 12, 13), (20, 21), (30, 31, 32, 33, 34)]  # of the tiny models
SPECIAL = SimpleNamespace(eos_token_id=2, pad_token_id=0)  # all that a rollout asks of their tokenizer


def tiny(**changes):
    return replace(Args(dtype="float32", max_new_tokens=10), **changes)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "mistral-window-5", "gemma3-window-6", "gemma2-softcaps", "bloom-alibi", "falcon", "mamba"])
def test_greedy_samples_are_those_of_generate(name):
    model = make(name)
    for k, places in ((1, 10**6), (3, 10**6), (3, 1)):
        for prompt, ys in rollout(model, SPECIAL, PROMPTS, k, 1, tiny(temperature=0.0, rollout_tokens=places)).groups:
            ids = torch.tensor([prompt])
            truth = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10, eos_token_id=2, pad_token_id=0)
            assert ys == [tuple(truth[0, len(prompt):].tolist())] * k
    assert bool(model.why_not_expanded) == (name == "mamba")


@pytest.mark.parametrize("name", ["llama", "mamba"])  # mamba: in transformers' generate()
def test_samples_are_a_function_of_seed_and_step_and_not_of_the_batch(name):
    model, args = make(name), tiny(temperature=3.0)
    ask = lambda prompts=PROMPTS, step=1, **changes: rollout(model, SPECIAL, prompts, 4, step, replace(args, **changes)).groups
    first = ask()
    assert first == ask() == ask(rollout_tokens=1) == ask(rollout_tokens=130) and first[:1] == ask(PROMPTS[:1])
    assert ask([PROMPTS[0], (40,) * 60, PROMPTS[2]])[::2] == first[::2]
    assert first != ask(seed=1) != ask(step=2) != first
    assert all(len(set(ys)) == 4 for _, ys in first)


def test_finished_rows_leave_and_the_others_go_on_as_they_were():
    """Rows leave at every length; without stop tokens the same random numbers give longer rows. Entropy: of the living, at every token."""
    model, args, ends, entropies = make("gpt2"), tiny(temperature=3.0), set(range(2, 12)), []
    model.generation_config.eos_token_id = None
    whole = rollout(model, SimpleNamespace(eos_token_id=None, pad_token_id=0), PROMPTS, 8, 1, args)
    assert not whole.ended.any() and all(len(y) == 10 for _, ys in whole.groups for y in ys)
    model.generation_config.eos_token_id = sorted(ends - {2})  # both count: the model's list, and the tokenizer's own
    short = rollout(model, SPECIAL, PROMPTS, 8, 1, args)
    for (prompt, long), (_, ys), ended in zip(whole.groups, short.groups, short.ended.tolist()):
        stops = [next((t + 1 for t, x in enumerate(y) if x in ends), 10) for y in long]
        assert ys == [y[:n] for y, n in zip(long, stops)] and ended == [y[-1] in ends for y in ys]
        for y in ys:
            probs = (model(torch.tensor([prompt + y])).logits[0, len(prompt) - 1:-1] / 3).softmax(-1)
            entropies += (-torch.special.xlogy(probs, probs).sum(-1)).tolist()
    assert short.entropy == pytest.approx(np.mean(entropies), abs=1e-4)
    assert len({len(y) for _, ys in short.groups for y in ys}) > 4 and short.ended.any() and not short.ended.all()


@pytest.mark.parametrize("temperature", [4.0, 2.0])
def test_first_tokens_have_the_model_s_distribution(temperature):
    model = make("llama")
    for prompt, ys in rollout(model, SPECIAL, PROMPTS, 4000, 1, tiny(temperature=temperature, max_new_tokens=1)).groups:
        truth = (model(torch.tensor([prompt])).logits[0, -1].double() / temperature).softmax(-1)
        seen = torch.bincount(torch.tensor(ys)[:, 0], minlength=97) / 4000
        assert (truth - seen).abs().sum() / 2 < 0.1 and truth.max() < 0.9


def test_top_k_and_top_p_cut_exactly_and_nothing_of_probability_0_is_drawn():
    logits = tensor([0.05, 0.4, 0.0, 0.25, 0.3, 0.0]).log()
    grid = torch.tensor([0.0, *((np.arange(1000) + 0.5) / 1000), 1 - 2.0**-53], dtype=torch.float64)
    def shares(**changes):
        tokens, entropy = draw(logits.expand(len(grid), -1), grid, **changes)
        p = torch.bincount(tokens, minlength=6) / len(grid)
        assert entropy[0].item() == pytest.approx(-torch.special.xlogy(p, p).sum().item(), abs=0.01)
        return p.tolist()
    assert shares() == pytest.approx([0.05, 0.4, 0, 0.25, 0.3, 0], abs=2e-3) and shares()[2] == shares()[5] == 0
    for changes in (dict(top_k=2), dict(top_p=0.6), dict(top_p=0.69), dict(top_k=2, top_p=0.9)):
        assert shares(**changes) == pytest.approx([0, 4 / 7, 0, 0, 3 / 7, 0], abs=2e-3) and shares(**changes)[0] == 0
    assert shares(top_p=0.71) == pytest.approx([0, 0.4 / 0.95, 0, 0.25 / 0.95, 0.3 / 0.95, 0], abs=2e-3)
    assert shares(top_p=0.01) == shares(top_k=1) == [0, 1, 0, 0, 0, 0]
    squares = [p * p / 0.315 for p in (0.05, 0.4, 0, 0.25, 0.3, 0)]
    assert shares(temperature=0.5) == pytest.approx(squares, abs=2e-3)


def test_a_generation_config_and_checkpointed_layers_change_no_sample():
    model, args = make("qwen2"), tiny(temperature=3.0)
    first = rollout(model, SPECIAL, PROMPTS, 3, 1, args)
    own = model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.1, top_k=1, top_p=0.1, repetition_penalty=9.0, eos_token_id=2, min_new_tokens=9)
    refcache.checkpoint_layers(model)
    assert rollout(model, SPECIAL, PROMPTS, 3, 1, args).groups == first.groups and model.generation_config is own
    assert any(module.training for module in model.modules()) and not model.training


def wrong(self, repeats, real=DynamicCache.batch_repeat_interleave):
    real(self, repeats)
    for layer in self.layers: layer.values = layer.values + 1


@pytest.mark.parametrize("expand, words", [(lambda self, repeats: 1 / 0, "division by zero"), (wrong, "changed a log-prob")])
def test_a_cache_that_cannot_be_expanded_is_not_and_says_so_once(expand, words, monkeypatch, capsys):
    model, ask = make("llama"), lambda model, heat, step=1: rollout(model, SPECIAL, PROMPTS, 3, step, tiny(temperature=heat)).groups
    truth = ask(make("llama"), 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(DynamicCache, "batch_repeat_interleave", expand)
        assert ask(model, 0.0) == ask(model, 0.0, step=2) == truth
    said = capsys.readouterr().out
    assert said.count("samples: each encodes its prompt") == 1 and words in said
    assert ask(model, 3.0) == ask(model, 3.0) != ask(model, 3.0, step=2) and all(len(set(ys)) == 3 for _, ys in ask(model, 3.0))


def test_a_row_of_exactly_the_context_fits_and_one_more_does_not():
    model = make("gpt2")  # 256 positions
    assert len(completion_logprobs(model, [((5,) * 246, [(6,) * 10])])[0][0]) == 10
    assert len(rollout(model, SPECIAL, [(5,) * 246], 2, 1, tiny()).groups) == 1
    for call in (lambda: completion_logprobs(model, [((5,) * 247, [(6,) * 10])]), lambda: rollout(model, SPECIAL, [(5,) * 247], 2, 1, tiny())):
        with pytest.raises(BadInput, match="longer than the model's 256"):
            call()


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(BadInput, match="a prompt without tokens"):
        rollout(make("llama"), SPECIAL, [(5,), ()], 2, 1, tiny())


def test_no_rollout_batch_has_more_places_than_rollout_tokens(monkeypatch):
    model, seen = make("llama"), []
    why_not_expanded(model)
    monkeypatch.setattr(refcache, "_decode", lambda core, prompts, u, *rest, real=refcache._decode:
                        seen.append(u.shape[1] * len(prompts) * (max(map(len, prompts)) + u.shape[2])) or real(core, prompts, u, *rest))
    rollout(model, SPECIAL, PROMPTS * 4, 4, 1, tiny(rollout_tokens=300))
    assert max(seen) <= 300 and len(seen) <= 4


def test_samples_come_from_forwards_in_dtype(monkeypatch):
    model, seen = make("llama"), set()
    monkeypatch.setattr(refcache, "draw", lambda logits, *rest, real=draw, **choice: seen.add(logits.dtype) or real(logits, *rest, **choice))
    rollout(model, SPECIAL, PROMPTS, 2, 1, tiny(dtype="bfloat16"))
    assert seen == {torch.bfloat16}


def test_top_p_that_is_just_reached_and_top_p_after_top_k():
    half = draw(tensor([[0.0, 0.0, -math.inf]]).expand(9, -1), torch.linspace(0, 0.99, 9), top_p=0.5)[0]
    assert len(set(half.tolist())) == 1
    both = draw(tensor([0.05, 0.4, 0.25, 0.3]).log().expand(9, -1), torch.linspace(0, 0.99, 9), top_k=2, top_p=0.5)[0]
    assert set(both.tolist()) == {1}  # 0.4 / 0.7 is already more than half


def test_the_last_uniform_number_draws_nothing_of_probability_0():
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0))
    logits[:, -1] = -math.inf
    assert draw(logits, torch.full((64,), 1 - 2.0**-53, dtype=torch.float64))[0].max() < 4999


def test_generate_obeys_the_flags_and_leaves_no_trace():
    model = make("mamba")
    own = model.generation_config = GenerationConfig(do_sample=True, repetition_penalty=9.0, min_new_tokens=9, eos_token_id=2)
    ask = lambda k=2, **changes: [ys for _, ys in rollout(model, SPECIAL, PROMPTS, k, 1, tiny(**changes)).groups]
    state, greedy = torch.get_rng_state(), None
    greedy = ask(temperature=0.0)
    plain = make("mamba"); ids = torch.tensor([PROMPTS[0]])
    truth = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10, eos_token_id=2, pad_token_id=0)
    assert greedy[0][0] == tuple(truth[0, len(PROMPTS[0]):].tolist())
    assert ask(temperature=1e-4) == ask(temperature=9.0, top_k=1) == ask(temperature=9.0, top_p=1e-6) == greedy
    assert len({y for ys in ask(300, temperature=50.0, max_new_tokens=1) for y in ys}) > 60  # of 97: no top_k of 50
    assert torch.equal(state, torch.get_rng_state()) and model.generation_config is own


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_samples_by_generate_are_those_of_the_loop(name, monkeypatch):
    """The same uniform numbers, so the same tokens, ends and entropy, whether a cache can be expanded or not."""
    loop, theirs = make(name), make(name)
    loop.generation_config.eos_token_id = theirs.generation_config.eos_token_id = list(range(2, 12))
    args = tiny(temperature=3.0, top_p=0.9)
    monkeypatch.setattr(theirs, "why_not_expanded", "a test", raising=False)
    one, two = (rollout(model, SPECIAL, PROMPTS, 6, 1, args) for model in (loop, theirs))
    assert one.groups == two.groups and torch.equal(one.ended, two.ended) and one.ended.any() and not one.ended.all()
    assert one.entropy == pytest.approx(two.entropy, abs=1e-5)


@pytest.mark.parametrize("scale", [1, 60])  # 60: surer than any trained model, with entropies of 0
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name, fault", [("batch_select_indices", lambda real: lambda self, i: real(self, i.flip(0))),
                                         ("batch_repeat_interleave", lambda real: lambda self, k: [real(self, k), [setattr(x, "values", x.values.flip(0)) for x in self.layers]])])
def test_a_cache_that_confuses_its_rows_is_found_however_sure_the_model_is(monkeypatch, capsys, scale, dtype, name, fault):
    right, broken = make("llama"), make("llama")
    for model in (right, broken): model.lm_head.weight.data.mul_(scale)
    rollout(right, SPECIAL, PROMPTS, 3, 1, tiny(dtype=dtype))
    assert right.why_not_expanded == ""
    monkeypatch.setattr(DynamicCache, name, fault(getattr(DynamicCache, name)))
    rollout(broken, SPECIAL, PROMPTS, 3, 1, tiny(dtype=dtype))
    assert "changed a log-prob" in broken.why_not_expanded and "each encodes its prompt" in capsys.readouterr().out


def test_random_numbers_differ_by_seed_purpose_and_n():
    streams = [generator(*what).random() for what in ((0, "order"), (1, "order"), (0, "rollout"), (0, "order", 1))]
    assert len(set(streams)) == 4


@pytest.mark.parametrize("ask, broken", [(refcache.why_not_expanded, "_decode"), (refcache.why_not_shared, "lay_out_shared")])
def test_memory_that_runs_out_in_a_trial_is_no_verdict_on_the_model(monkeypatch, ask, broken):
    def full(*_): raise torch.OutOfMemoryError("CUDA out of memory")
    model = make("llama")
    refcache.why_not_shared(model) if broken == "_decode" else None
    with monkeypatch.context() as patch, torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        patch.setattr(refcache, broken, full)
        ask(model)
    with torch.no_grad(): assert ask(model) == ""
