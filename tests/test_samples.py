"""Samples: against transformers' generate(), against the model's own distribution, and however they are batched."""
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import tensor
from transformers import DynamicCache, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import rloo
from models import GPT2, MODELS, SMALL, make
from refcache import BadInput, completion_logprobs, share_prompts
from rloo import Args, Samples, check_start, draw, generator, rollout

RANDOM = torch.Generator().manual_seed(0)
PROMPTS = [tuple(torch.randint(3, 97, (n,), generator=RANDOM).tolist()) for n in (3, 17, 9, 25)]
TOKENIZER = SimpleNamespace(eos_token_id=2)  # all that a rollout asks of the tokenizer
MOE = dict(num_local_experts=4, num_experts_per_tok=2)
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8)
RWKV = dict(vocab_size=97, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, context_length=256,
            eos_token_id=2)
MORE = {  # models whose caches are special; none of them shares prompts but for DeepSeek-V3 and Cohere 2
    "minimax": ("minimax", dict(SMALL, head_dim=8, block_size=4, num_hidden_layers=3, **MOE,
                                layer_types=["linear_attention", "full_attention", "linear_attention"])),
    "deepseek-v3": ("deepseek_v3", dict(
        SMALL, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16,
        first_k_dense_replace=1)),
    "deepseek-v4": ("deepseek_v4", SMALL),
    "rwkv": ("rwkv", RWKV),
    "recurrent-gemma": ("recurrent_gemma", dict(SMALL, num_hidden_layers=3, lru_width=32, attention_window_size=8)),
    "jamba": ("jamba", dict(SMALL, num_hidden_layers=3, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
                            expert_layer_offset=1, num_experts=2, num_experts_per_tok=1, mamba_d_state=8)),
    "granite-hybrid": ("granitemoehybrid", dict(SMALL, layer_types=["mamba", "attention"], shared_intermediate_size=32,
                                                **MOE, **MAMBA2)),
    "bamba": ("bamba", dict(SMALL, attn_layer_indices=[1], **MAMBA2)),
    "falcon-h1": ("falcon_h1", dict(SMALL, mamba_d_ssm=64, **MAMBA2)),
    "mamba2": ("mamba2", dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8,
                              n_groups=2, chunk_size=8, eos_token_id=2)),
    "qwen3-next": ("qwen3_next", dict(
        SMALL, head_dim=8, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=8,
        linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16)),
    "lfm2": ("lfm2", dict(SMALL, layer_types=["conv", "full_attention"])),
    "cohere2": ("cohere2", dict(SMALL, sliding_window=6, layer_types=["sliding_attention", "full_attention"])),
    "gpt-oss-sinks": ("gpt_oss", dict(SMALL, head_dim=8, sliding_window=6, **MOE)),
    "opt": ("opt", dict(SMALL, ffn_dim=64, word_embed_proj_dim=32)),
    "gptj": ("gptj", dict(GPT2, rotary_dim=4)),
    "longrope": ("phi3", dict(SMALL, original_max_position_embeddings=20, rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 4, long_factor=[2.0] * 4,
        original_max_position_embeddings=20))),
}
REFUSED = {"rwkv", "recurrent-gemma", "longrope"}  # in transformers 5.23 their caches are wrong, or rows see each other
ALL = [*MODELS, *MORE]
EXACT = [name for name in ALL if name not in REFUSED]


def slow_but(*quick, names=ALL):
    """All models; those that are not named are slow."""
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


@pytest.fixture
def model_of(monkeypatch):
    for name, (kind, config) in MORE.items():
        monkeypatch.setitem(MODELS, name, (kind, config, None))

    def model_of(name, dtype="float32"):
        if MODELS[name][0] not in CONFIG_MAPPING:
            pytest.skip(f"this transformers has no {MODELS[name][0]}")
        model = make(name)
        share_prompts(model, dtype)
        return model
    return model_of


def flags(**changes):
    return replace(Args(dtype="float32", max_new_tokens=10, temperature=3.0), **changes)


def sample_and_check(model, args, k=4, prompts=PROMPTS):
    """The first step of a run: samples, the log-probs that training gives them, and the comparison of the two."""
    drawn = rollout(model, TOKENIZER, prompts, k, 1, args)
    with torch.no_grad():
        logps = completion_logprobs(model, drawn.groups, 16384, args.dtype, args.temperature)
    logps = torch.stack([torch.stack([y.sum() for y in ys]) for ys in logps])
    zeros = torch.zeros_like(logps)
    check_start(drawn, Samples(zeros, logps, zeros, zeros), 1, args)
    return drawn, logps


@torch.no_grad()
def true_probs(model, prompt, y, temperature):
    """The slow way: one forward per sequence, without a cache. (len(y), V), float64."""
    logits = model(torch.tensor([prompt + y]), use_cache=False).logits[0, len(prompt) - 1:-1]
    return (logits.double() / temperature).softmax(-1)


# ---- The right distribution, on many models -------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_but("gpt2", "gemma3-window-6", "mamba", names=EXACT))
def test_greedy_samples_equal_generate(name, model_of):
    model = model_of(name)
    truth = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        row = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10,
                             eos_token_id=2, pad_token_id=0)
        truth.append(tuple(row[0, len(prompt):].tolist()))
    for k, places in ((1, 10**6), (3, 10**6), (3, 1)):
        groups = rollout(model, TOKENIZER, PROMPTS, k, 1, flags(top_k=1, rollout_tokens=places)).groups
        assert groups == [(prompt, [y] * k) for prompt, y in zip(PROMPTS, truth)]


def test_token_0_in_a_prompt_is_no_padding(model_of):
    zeros = [(5, 0, 7), (0, 0, 9, 8, 4, 3, 0)]
    drawn, logps = sample_and_check(model_of("llama"), flags(), prompts=zeros)
    assert (drawn.logps - logps).abs().max() < 1e-4


@pytest.mark.parametrize("name", slow_but("llama", "mistral-window-5", "mamba", "rwkv"))
def test_each_token_is_what_its_uniform_number_picks_from_the_model_or_the_model_is_refused(name, model_of):
    model, args = model_of(name), flags()
    if name in REFUSED:
        with pytest.raises(BadInput) as refusal:
            sample_and_check(model, args)
        assert "\n" not in str(refusal.value)
        return
    drawn, logps = sample_and_check(model, args)
    uniform = generator(args.seed, "rollout", 1).random((4, 4, 10))
    for b, (prompt, ys) in enumerate(drawn.groups):
        for i, y in enumerate(ys):
            cdf = true_probs(model, prompt, y, 3.0).cumsum(-1)  # (len(y), 97)
            below = torch.cat([torch.zeros(len(y), 1), cdf], dim=1).gather(1, tensor(y)[:, None])[:, 0]
            above = cdf.gather(1, tensor(y)[:, None])[:, 0]
            u = torch.from_numpy(uniform[b, i, :len(y)])
            assert (below - 1e-4 < u).all() and (u < above + 1e-4).all()
            assert (above - below).log().sum() == pytest.approx(drawn.logps[b, i].item(), abs=3e-2)
    assert torch.allclose(drawn.logps, logps, atol=3e-2)


def test_draw_of_a_grid_of_uniform_numbers_gives_the_probabilities_after_temperature_top_k_and_top_p():
    logits = tensor([0.05, 0.4, 0.0, 0.25, 0.3, 0.0]).log()
    grid = torch.tensor([0.0, *((np.arange(1000) + 0.5) / 1000), 1 - 2.0**-53], dtype=torch.float64)

    def shares(**changes):
        tokens, logps, entropy = draw(logits.expand(len(grid), -1), grid, **changes)
        p = torch.bincount(tokens, minlength=6) / len(grid)
        assert entropy[0].item() == pytest.approx(-torch.special.xlogy(p, p).sum().item(), abs=0.01)
        whole = torch.log_softmax(logits / changes.get("temperature", 1.0), -1)
        assert torch.allclose(logps, whole[tokens], atol=1e-6)  # of the whole distribution, whatever top_k and top_p
        return p.tolist()

    assert shares() == pytest.approx([0.05, 0.4, 0, 0.25, 0.3, 0], abs=2e-3) and shares()[2] == shares()[5] == 0
    for changes in (dict(top_k=2), dict(top_p=0.6), dict(top_p=0.69), dict(top_k=2, top_p=0.9)):
        assert shares(**changes) == pytest.approx([0, 4 / 7, 0, 0, 3 / 7, 0], abs=2e-3) and shares(**changes)[0] == 0
    assert shares(top_p=0.71) == pytest.approx([0, 0.4 / 0.95, 0, 0.25 / 0.95, 0.3 / 0.95, 0], abs=2e-3)
    assert shares(top_p=0.01) == shares(top_k=1) == shares(temperature=1e-4) == [0, 1, 0, 0, 0, 0]
    assert shares(top_k=2, top_p=0.5) == [0, 1, 0, 0, 0, 0]  # top_p counts what top_k left: 0.4 / 0.7 is more than half
    squares = [p * p / 0.315 for p in (0.05, 0.4, 0, 0.25, 0.3, 0)]
    assert shares(temperature=0.5) == pytest.approx(squares, abs=2e-3)


def test_top_p_that_is_just_reached_needs_no_further_token():
    tokens = draw(tensor([[0.0, 0.0, -math.inf]]).expand(9, -1), torch.linspace(0, 0.99, 9), top_p=0.5)[0]
    assert len(set(tokens.tolist())) == 1


def test_no_uniform_number_draws_a_token_of_probability_0():
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0))
    logits[:, 0] = logits[:, -1] = -math.inf
    for u in (0.0, 1 - 2.0**-53):
        assert set(draw(logits, torch.full((64,), u, dtype=torch.float64))[0].tolist()).isdisjoint((0, 4999))


# ---- What does not change a sample ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_but("llama", names=["llama", "mamba"]))
def test_samples_are_a_function_of_seed_step_prompt_and_place_and_not_of_the_batch(name, model_of):
    model, args = model_of(name), flags()
    def ask(prompts=PROMPTS, step=1, **changes):
        return rollout(model, TOKENIZER, prompts, 4, step, replace(args, **changes)).groups
    first, state = ask(), torch.get_rng_state()
    assert first == ask() == ask(rollout_tokens=1) == ask(rollout_tokens=130)
    assert ask(PROMPTS[:1]) == first[:1] and ask([PROMPTS[0], (40,) * 60, PROMPTS[2]])[::2] == first[:3:2]
    assert first != ask(seed=1) != ask(step=2) != first
    assert all(len(set(ys)) == 4 for _, ys in first) and torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", slow_but("mistral-window-5", names=["gpt2", "mistral-window-5", "mamba", "bamba"]))
def test_rows_that_leave_early_change_no_other_row(name, model_of):
    """With 11 stop tokens the rows leave at every length; without them the same numbers give longer rows."""
    model, args, ends, entropies = model_of(name), flags(), set(range(2, 12)), []
    model.generation_config.eos_token_id = None
    whole = rollout(model, SimpleNamespace(eos_token_id=None), PROMPTS, 8, 1, args)
    assert not whole.ended.any() and all(len(y) == 10 for _, ys in whole.groups for y in ys)
    model.generation_config.eos_token_id = sorted(ends - {2})  # both count: the model's list, and the tokenizer's own
    short, _ = sample_and_check(model, args, 8)
    for (prompt, long), (_, ys), ended in zip(whole.groups, short.groups, short.ended.tolist()):
        stops = [next((t + 1 for t, x in enumerate(y) if x in ends), 10) for y in long]
        assert ys == [y[:n] for y, n in zip(long, stops)] and ended == [y[-1] in ends for y in ys]
        for y in ys:
            probs = true_probs(model, prompt, y, 3.0)
            entropies += (-torch.special.xlogy(probs, probs).sum(-1)).tolist()
    assert short.entropy == pytest.approx(np.mean(entropies), abs=1e-4)
    assert len({len(y) for _, ys in short.groups for y in ys}) > 4 and short.ended.any() and not short.ended.all()


@pytest.mark.parametrize("name", slow_but("qwen2", names=["qwen2", "mamba"]))
def test_a_generation_config_and_checkpointed_layers_change_no_sample(name, model_of):
    model, args = model_of(name), flags()
    first = rollout(model, TOKENIZER, PROMPTS, 3, 1, args)
    own = model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.1, top_k=1, top_p=0.1, repetition_penalty=9.0, eos_token_id=2, min_new_tokens=9)
    rloo.checkpoint_layers(model)
    assert rollout(model, TOKENIZER, PROMPTS, 3, 1, args).groups == first.groups and model.generation_config is own
    assert any(module.training for module in model.modules()) and not model.training


def test_rollout_tokens_bounds_the_places_of_every_batch(model_of, monkeypatch):
    model, places = model_of("llama"), []
    def spy(core, prompts, u, *rest, real=rloo.decode):
        places.append(u.shape[1] * len(prompts) * (max(map(len, prompts)) + u.shape[2]))
        return real(core, prompts, u, *rest)
    monkeypatch.setattr(rloo, "decode", spy)
    rollout(model, TOKENIZER, PROMPTS * 4, 4, 1, flags(rollout_tokens=300))
    assert max(places) <= 300 and len(places) < 16


# ---- The comparison of sampler and training at the first step -------------------------------------------------------


def reverse_selected_rows(self, indices, real=DynamicCache.batch_select_indices):
    real(self, indices.flip(0))


def reverse_repeated_rows(self, repeats, real=DynamicCache.batch_repeat_interleave):
    real(self, repeats)
    for layer in self.layers:
        layer.values = layer.values.flip(0)


FAULTS = {"batch_select_indices": reverse_selected_rows, "batch_repeat_interleave": reverse_repeated_rows}


@pytest.mark.parametrize("dtype, scale", [  # of the head. 1: almost uniform, 5: 2.8 nats, 30: surer than trained models
    ("float32", 30), ("bfloat16", 5), *(pytest.param(*x, marks=pytest.mark.slow) for x in (
        ("float32", 1), ("float32", 5), ("bfloat16", 30)))])
def test_a_cache_that_mixes_up_its_rows_is_refused_and_a_right_one_is_not(monkeypatch, model_of, scale, dtype):
    model, args = model_of("llama"), flags(dtype=dtype, temperature=1.0)
    model.lm_head.weight.data.mul_(scale)
    assert share_prompts(model, dtype)
    model.generation_config.eos_token_id = list(range(2, 30))  # many rows leave early
    sample_and_check(model, args)
    for name, fault in FAULTS.items():
        with monkeypatch.context() as patch, pytest.raises(BadInput, match="cannot be trained on"):
            patch.setattr(DynamicCache, name, fault)
            sample_and_check(model, args)


@pytest.mark.parametrize("name", slow_but("batch_repeat_interleave", names=FAULTS))
def test_a_run_with_a_cache_that_mixes_up_its_rows_ends_before_its_first_update(tmp_path, monkeypatch, name):
    root, data = Path(rloo.__file__).parent, tmp_path / "prompts.jsonl"
    data.write_text("".join(open(root / "demo/prompts.jsonl").readlines()[:8]))
    args = Args(model=str(root / "demo/model"), data=str(data), eval_data=str(data), out=str(tmp_path / "out"),
                reward=(f"{root}/demo/score.py:sentiment",), batch_size=4, steps=2, samples=2)
    monkeypatch.setattr(DynamicCache, name, FAULTS[name])
    monkeypatch.setattr(torch.optim.AdamW, "step", None)
    with pytest.raises(BadInput, match="cannot be trained on"):
        rloo.main(args)
    assert not (tmp_path / "out/model").exists() and not (tmp_path / "out/checkpoint.safetensors").exists()


def test_samples_come_from_forwards_in_dtype(model_of, monkeypatch):
    model, seen = model_of("llama", "bfloat16"), set()
    def spy(logits, *rest, real=draw):
        seen.add(logits.dtype)
        return real(logits, *rest)
    monkeypatch.setattr(rloo, "draw", spy)
    sample_and_check(model, flags(dtype="bfloat16"))
    assert seen == {torch.bfloat16}


def test_random_numbers_differ_by_seed_purpose_and_step():
    streams = [generator(*what).random() for what in ((0, "order"), (1, "order"), (0, "rollout"), (0, "order", 1))]
    assert len(set(streams)) == 4
