"""Rollouts: against transformers' generate(), against the model's own distribution, and however they are batched."""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from runs import arguments
from torch import tensor

import refcache
import rloo
from models import MODELS, SMALL, bad_input, build, parametrize, ready, slow_but
from refcache import enable_shared_prompts, has_shared_prompts
from rloo import draw, generator, rollout

RANDOM = torch.Generator().manual_seed(0)
PROMPTS = [tuple(torch.randint(3, 97, (n,), generator=RANDOM).tolist()) for n in (3, 17, 25)]
PROMPTS.insert(2, (0, 0, 9, 8, 4, 3, 0))  # token 0 is no padding
TOKENIZER = SimpleNamespace(eos_token_id=2, batch_decode=lambda ids, **_: ids)  # all that a rollout asks of it
CACHES = {  # model types whose caches are special
    "minimax": dict(
        SMALL, head_dim=8, block_size=4, num_hidden_layers=3, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"]),
    "bamba": dict(SMALL, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8),
}
QUICK = {"llama", "gpt2", "mistral-window-5", "gemma3-window-6", "mamba", "minimax", "bamba"}


def model_of(name):
    """A model as load_model leaves it."""
    model = ready(name) if name in MODELS else build(name, CACHES[name])
    enable_shared_prompts(model)
    return model


def flags(**changes):
    return rloo.Args(**dict(dtype="float32", max_new_tokens=10, temperature=3.0) | changes)


def roll(model, args, prompts=PROMPTS, k=4, step=1):
    return rollout(model, TOKENIZER, prompts, k, step, args)


@torch.no_grad()
def check_tokens(model, samples, args):
    """Against the slow way: one forward per sequence, without a cache."""
    shape = len(samples.groups), len(samples.groups[0][1]), args.max_new_tokens
    uniform = torch.from_numpy(generator(args.seed, "rollout", 1).random(shape))
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


@parametrize("name", slow_but(QUICK, [*MODELS, *CACHES]))
def test_uniform_numbers_pick_tokens_of_the_model(name):
    model = model_of(name)
    args = flags()
    check_tokens(model, roll(model, args), args)
    rloo.check_sampler(model, TOKENIZER, args)


@parametrize("name", ["llama", "gemma3-window-6"])
def test_long_samples_are_exact(name, monkeypatch):
    model = model_of(name)
    model.generation_config.eos_token_id = None
    monkeypatch.setattr(TOKENIZER, "eos_token_id", None)
    args = flags(max_new_tokens=140)
    samples = roll(model, args, PROMPTS[:2], k=1)
    assert samples.mask.all() and samples.mask.shape[2] == 140
    check_tokens(model, samples, args)


def test_tokens_of_probability_0_are_never_drawn():
    probs = tensor([0.0, 0.4, 0.6, 0.0])
    tokens, _, entropy = draw(probs.log().expand(2, -1), tensor([0, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 2]
    assert torch.allclose(entropy, torch.special.entr(probs).sum())


@parametrize("name", ["llama", "mamba"])
def test_samples_do_not_depend_on_the_batch(name):
    model = model_of(name)
    args = flags(max_new_tokens=6)
    first = roll(model, args).groups
    for tokens in (1, 130):
        assert roll(model, replace(args, rollout_tokens=tokens)).groups == first
    assert roll(model, args, [PROMPTS[0], (40,) * 60, PROMPTS[2]]).groups[::2] == first[:3:2]
    assert roll(model, replace(args, seed=1)).groups != first != roll(model, args, step=2).groups
    assert all(len(set(ys)) == 4 for _, ys in first)


@parametrize("name", ["gpt2", "mistral-window-5", "mamba"])
def test_rows_that_leave_early_change_no_other_row(name, monkeypatch):
    """With 11 stop tokens the rows leave at every length."""
    model = model_of(name)
    args = flags()
    model.generation_config.eos_token_id = None
    monkeypatch.setattr(TOKENIZER, "eos_token_id", None)
    whole = roll(model, args, k=8)
    assert not whole.ended.any() and whole.mask.all()
    ends = range(2, 13)
    model.generation_config.eos_token_id = [*ends[1:]]
    TOKENIZER.eos_token_id = 2  # both count
    short = roll(model, args, k=8)
    for (_, long), (_, ys), ended in zip(whole.groups, short.groups, short.ended.tolist()):
        stops = [next((t + 1 for t, x in enumerate(y) if x in ends), 10) for y in long]
        assert ys == [y[:n] for y, n in zip(long, stops)]
        assert ended == [y[-1] in ends for y in ys]
    check_tokens(model, short, args)
    assert len({len(y) for _, ys in short.groups for y in ys}) > 4


def test_rollout_tokens_bounds_every_batch(monkeypatch):
    places = []

    def spy(core, prompts, u, *rest, real=rloo.decode):
        places.append(u.shape[1] * len(prompts) * (max(map(len, prompts)) + u.shape[2]))
        return real(core, prompts, u, *rest)
    monkeypatch.setattr(rloo, "decode", spy)
    roll(model_of("llama"), flags(rollout_tokens=300), PROMPTS * 4)
    assert max(places) <= 300 and len(places) < 16


@parametrize("flags", [dict(steps=0), dict(steps=2), dict(steps=2, dtype="bfloat16")], ids=str)
def test_wrong_sampler_ends_a_run(monkeypatch, flags):
    factor = 1.5 if "dtype" in flags else 1.02
    monkeypatch.setattr(rloo, "draw", lambda logits, *rest: draw(logits * factor, *rest))
    args = arguments("rloo", **flags)
    with bad_input("log-prob"):
        rloo.main(args)
    assert not list(rloo.Path(args.out).glob("*.jsonl"))


RECORDED = []  # for each recorded step its repetitions


def record_with_fixed_addresses(core, step):
    """rloo.record on a CPU: repeats the step, and compares the addresses of all that it uses."""
    def addresses():
        cells = dict(zip(step.__code__.co_freevars, (cell.cell_contents for cell in step.__closure__)))
        sample = cells["sample"]
        cells |= zip(sample.__code__.co_freevars, (cell.cell_contents for cell in sample.__closure__))
        layers = cells["cache"]["past_key_values"].layers
        tensors = {name: cell for name, cell in cells.items() if isinstance(cell, torch.Tensor)} | cells["inputs"]
        tensors |= {f"keys {i}": layer.keys for i, layer in enumerate(layers)}
        tensors |= {f"values {i}": layer.values for i, layer in enumerate(layers)}
        return {name: (tensor.data_ptr(), tensor.shape) for name, tensor in tensors.items()}

    before = addresses()
    assert {"rows", "alive", "tokens", "scores", "t", "u", "place", "input_ids", "keys 0"} <= before.keys()
    repeats = []

    def repeat():
        step()
        repeats.append(addresses())
        assert repeats[-1] == before

    RECORDED.append(repeats)
    repeat()
    return repeat


@parametrize("name", ["llama", "gpt2", "mistral-window-5", "gemma3-window-6"])
def test_recorded_steps_stay_at_their_addresses(name, monkeypatch):
    """A CUDA graph would read and write the old ones. The tokens are those of the way of a CPU."""
    model = ready(name)
    args = rloo.Args(dtype="float32", max_new_tokens=50)
    monkeypatch.setattr(rloo, "stop_tokens", lambda *_: [2, 3, 4, 5, 6])  # 5 of 97: half of the rows end soon
    on_cpu = rollout(model, TOKENIZER, PROMPTS, 6, 1, args)

    monkeypatch.setattr(rloo, "can_record", has_shared_prompts)
    monkeypatch.setattr(rloo, "record", record_with_fixed_addresses)
    monkeypatch.setattr(rloo.FixedLayer, "n_read", property(lambda layer: layer.keys.shape[2]))
    RECORDED.clear()
    recorded = rollout(model, TOKENIZER, PROMPTS, 6, 1, args)
    assert recorded.groups == on_cpu.groups
    assert (recorded.logps - on_cpu.logps).abs().max() < 1e-3
    assert len(RECORDED) > 1 and max(map(len, RECORDED)) > 10  # also after rows have ended


def test_attention_of_one_token_has_ordinary_strides():
    """With others, a frozen linear layer would read its weight once per row."""
    attention = ready("llama").model.layers[0].self_attn
    query, key = torch.randn(3, 4, 1, 8), torch.randn(3, 2, 7, 8)
    output, _ = refcache.shared_prompt_attention(attention, query, key, key, None)
    assert output.stride() == torch.empty(3, 1, 4, 8).stride()
