"""Swap, reference_logprobs, log_ratios and check_agreement: the reference's weights, and what its log-probs are for."""
from contextlib import contextmanager, nullcontext
from copy import deepcopy

import numpy as np
import pytest
import torch
from models import make
from test_logprobs import GROUPS, flat, slow
from torch import tensor

from refcache import (
    BadInput, ReferenceCache, Swap, check_agreement, completion_logprobs, log_ratios, reference_logprobs, structure)

IDS = tensor([[5, 9, 33, 60, 12, 7, 90, 41]])
ROPE = dict(rope_type="default", rope_theta=100.0)


def adapted(**config):
    """Llama under a new adapter, whose B is 0: as yet it computes what the bare model does."""
    peft = pytest.importorskip("peft")
    config = dict(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "lm_head"]) | config
    return peft.get_peft_model(make("llama"), peft.LoraConfig(**config)).eval()


@torch.no_grad()
def move(model, seed=0):
    """Stands for training: changes everything that trains, and the buffers."""
    torch.manual_seed(seed)
    buffers = [t for name, t in model.state_dict(keep_vars=True).items() if not isinstance(t, torch.nn.Parameter)]
    for x in [p for p in model.parameters() if p.requires_grad] + buffers:
        x.add_(torch.randn_like(x) * 0.1)
    return model


def copy_of(model):
    return deepcopy(model.state_dict())


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# --- Swap ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "glm4-moe-buffer"])
@pytest.mark.parametrize("raises", [False, True])
def test_swap_is_bitwise_equal_in_and_out(name, raises):
    policy, reference = make(name, 1), move(make(name, 2))
    before, swap = copy_of(policy), Swap(policy, reference)
    with pytest.raises(KeyError) if raises else nullcontext(), swap as model:
        assert model is policy and equal(model.state_dict(), reference.state_dict())
        if raises:
            raise KeyError
    assert equal(policy.state_dict(), before)


def test_policy_comes_back_when_the_weights_come_in_halfway_only():
    """Ctrl-C or a device error can end the copy; then no `with` block has begun that could end."""
    policy = make("llama", 1)
    swap, before = Swap(policy, make("llama", 2)), copy_of(policy)
    swap.theirs["lm_head.weight"] = torch.zeros(3)  # the last to be copied: it raises
    with pytest.raises(RuntimeError), swap:
        pass
    assert equal(policy.state_dict(), before)


def test_swap_restores_the_policy_as_it_was_at_each_entry():
    policy, reference = make("llama", 1), make("llama", 2)
    swap = Swap(policy, reference)
    for seed in range(2):
        before = copy_of(move(policy, seed))
        with swap:
            assert equal(policy.state_dict(), reference.state_dict())
        assert equal(policy.state_dict(), before)


def test_tied_weights_stay_tied_and_are_held_once():
    policy = make("llama-tied", 1)
    swap = Swap(policy, make("llama-tied", 2))
    with swap:
        assert policy.lm_head.weight is policy.model.embed_tokens.weight
    assert policy.lm_head.weight is policy.model.embed_tokens.weight
    assert sum(t.numel() for t in swap.state_dict().values()) == sum(p.numel() for p in policy.parameters())


def test_persistent_buffers_are_swapped_too():
    policy, reference = make("glm4-moe-buffer"), make("glm4-moe-buffer")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert name not in dict(policy.named_parameters()) and not policy.state_dict()[name].any()
    reference.state_dict()[name].copy_(tensor([0.0, 5.0, 5.0, 0.0]))  # other experts are chosen
    truth = reference(IDS).logits
    assert not torch.equal(policy(IDS).logits, truth)
    with Swap(policy, reference) as model:
        assert torch.equal(model(IDS).logits, truth)
    assert not policy.state_dict()[name].any()


def test_buffer_of_integers_can_be_swapped_and_synced():
    policy, reference = make("llama"), make("llama")
    for model, count in ((policy, 7), (reference, 3)):
        model.register_buffer("steps_seen", tensor([count]))
    swap = Swap(policy, reference)
    with swap:
        assert policy.steps_seen.item() == 3
    swap.sync()
    with swap:
        assert policy.steps_seen.item() == 7


def test_swap_between_two_steps_does_not_disturb_the_optimizer():
    ends = []
    for swaps in (False, True):
        policy = make("llama-tied", 1)
        optimizer, swap = torch.optim.AdamW(policy.parameters(), 1e-3), Swap(policy, make("llama-tied", 2))
        for _ in range(3):
            optimizer.zero_grad()
            policy(IDS, labels=IDS).loss.backward()
            with swap if swaps else nullcontext():
                pass
            optimizer.step()
        ends.append([*policy.parameters(), *(x for state in optimizer.state.values() for x in state.values())])
    assert all(map(torch.equal, *ends))


def test_without_a_reference_it_is_the_policy_as_it_was():
    policy = make("llama")
    swap, before = Swap(policy), copy_of(policy)
    move(policy)
    with swap:
        assert equal(policy.state_dict(), before)


def test_reference_is_held_apart_from_the_model_that_it_came_from():
    policy, reference = make("llama", 1), make("llama", 2)
    swap, before = Swap(policy, reference), copy_of(reference)
    move(reference)
    with swap:
        assert equal(policy.state_dict(), before)


def test_swap_of_a_lora_policy_moves_the_adapter_only():
    policy = adapted()
    names = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert Swap(policy).state_dict().keys() == names and all("lora_" in name for name in names)


@pytest.mark.parametrize("config", [
    {}, dict(lora_dropout=0.5), dict(modules_to_save=["lm_head"], target_modules=["q_proj"])])
def test_reference_of_a_new_adapter_is_bitwise_the_bare_model(config):
    policy = adapted(**config).train()
    swap = Swap(policy)
    move(policy)
    references = nullcontext(make("llama")), swap, nullcontext(policy)
    bare, known, other = (reference_logprobs(reference, GROUPS) for reference in references)
    assert all(np.array_equal(known[key], bare[key]) for key in bare)
    assert not any(np.array_equal(other[key], bare[key]) for key in bare)


def test_reference_of_a_trained_adapter_is_that_adapter():
    policy = move(adapted())
    swap, truth = Swap(policy), policy(IDS).logits
    move(policy, 1)
    assert not torch.equal(policy(IDS).logits, truth)
    with swap as model:
        assert torch.equal(model(IDS).logits, truth)


@pytest.mark.parametrize("one, two, changes", [
    ("llama", "llama-tied", {}), ("llama", "mistral", {}), ("llama", "llama", dict(rope_parameters=ROPE)),
    ("llama", "llama", dict(vocab_size=98)), ("llama", "llama", dict(num_hidden_layers=3)),
    ("llama", "llama", dict(rms_norm_eps=1e-3))])
def test_reference_that_is_built_differently_is_refused(one, two, changes):
    policy, reference = make(one), make(two, **changes)
    for models in ((policy, reference), (reference, policy)):
        with pytest.raises(BadInput, match="not built like the policy") as error:
            Swap(*models)
        assert "\n" not in str(error.value)


def test_reference_with_another_weight_shape_is_refused():
    """Its config says the same: the weights have to be looked at."""
    policy, reference = make("llama"), make("llama")
    reference.lm_head = torch.nn.Linear(32, 1, bias=False)  # (1, 32) would broadcast into (97, 32)
    with pytest.raises(BadInput, match="lm_head.weight"):
        Swap(policy, reference)


def test_differences_that_change_no_log_prob_are_accepted():
    changes = dict(attention_dropout=0.1, bos_token_id=5, initializer_range=0.5, use_cache=False)
    reference = make("llama", 2, **changes)
    reference.config._name_or_path = "elsewhere"
    with Swap(make("llama", 1), reference) as model:
        assert torch.equal(model(IDS).logits, reference(IDS).logits)


@pytest.mark.parametrize("name", ["llama", "gemma2-softcaps", "mamba"])
def test_sharing_prompts_does_not_make_models_differ(name):
    policy, reference = make(name, 1), make(name, 2)
    completion_logprobs(policy, GROUPS[:1])
    assert structure(policy) == structure(reference)


def test_frozen_weights_of_another_reference_are_swapped_or_refused():
    """Else the reference would be a mixture of the two models."""
    policy, reference = make("llama", 1), make("llama", 2)
    policy.model.embed_tokens.requires_grad_(False)
    try:
        swap = Swap(policy, reference)
    except BadInput:
        return
    with swap as model:
        assert torch.equal(model(IDS).logits, reference(IDS).logits)


@pytest.mark.parametrize("mix", [0.25, 1.0])
def test_sync_by_hand(mix):
    policy, reference = make("llama-tied", 1), make("llama-tied", 2)
    swap, theirs = Swap(policy, reference), copy_of(reference)
    for seed in range(2):
        ours = copy_of(move(policy, seed))
        swap.sync(mix)
        theirs = {name: mix * ours[name] + (1 - mix) * theirs[name] for name in ours}
    with swap:
        assert all((p - theirs[name]).abs().max() < 1e-6 for name, p in policy.state_dict().items())
    assert equal(policy.state_dict(), ours), "the policy does not move"


def test_state_dict_brings_the_reference_back(tmp_path):
    swap = Swap(make("llama-tied", 1), make("llama-tied", 2))
    swap.sync(0.3)
    torch.save(swap.state_dict(), tmp_path / "reference.pt")
    again = Swap(make("llama-tied", 3))
    again.load_state_dict(torch.load(tmp_path / "reference.pt"))
    assert equal(again.state_dict(), swap.state_dict())
    with swap as one, again as two:
        assert equal(one.state_dict(), two.state_dict())


@pytest.mark.parametrize("change", [lambda t: t[:1].clone(), lambda t: t[:-1].clone(), None])
def test_state_that_does_not_fit_is_refused(change):
    swap = Swap(make("llama"))
    state = dict(swap.state_dict())
    weight = state.pop("lm_head.weight")
    with pytest.raises((KeyError, RuntimeError)):
        swap.load_state_dict(state | ({"lm_head.weight": change(weight)} if change else {}))


# --- reference_logprobs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_reference_logprobs_are_those_of_the_reference(temperature):
    policy, reference = make("llama", 1), make("llama", 2)
    truth = slow(reference, GROUPS, temperature)
    for held in (Swap(policy, reference), nullcontext(reference)):
        known = reference_logprobs(held, GROUPS, temperature=temperature)
        for (prompt, completions), logps in zip(GROUPS, truth):
            assert all(np.abs(known[prompt, y] - x.detach().numpy()).max() < 1e-5 for y, x in zip(completions, logps))


def test_reference_logprobs_in_bfloat16_are_those_of_autocast():
    known = reference_logprobs(nullcontext(make("llama")), GROUPS, dtype="bfloat16")
    for (prompt, completions), logps in zip(GROUPS, completion_logprobs(make("llama"), GROUPS, dtype="bfloat16")):
        assert all(np.array_equal(known[prompt, y], x.detach().numpy()) for y, x in zip(completions, logps))


def test_reference_is_entered_once_whatever_the_number_of_forwards():
    model, entries = make("llama"), []
    @contextmanager
    def reference():
        entries.append(1)
        yield model
    reference_logprobs(reference(), GROUPS * 3, tokens_per_forward=20)
    assert entries == [1]


def test_reference_logprobs_of_a_cache_or_of_none_are_itself():
    cache = ReferenceCache()
    assert reference_logprobs(cache, GROUPS) is cache and reference_logprobs(None, GROUPS) is None


# --- log_ratios and check_agreement ----------------------------------------------------------------------------------


KEY, PROMPT, LOGP = ((5, 9), (60, 12, 7, 90, 41)), (5, 9), [-1.0, -2.0, -3.0, -4.0, -5.0]
KNOWN = {KEY: np.float32([-1.5, -4.0, 0.0, -3.8, -6.0]), ((5, 9), (8,)): np.float32([-0.5])}
PAIR = [(PROMPT, [KEY[1], (8,)])]


@pytest.mark.parametrize("clamp, ratios, gradient", [
    (None, [0.5, 2.0, -3.0, -0.2, 1.0], [1, 1, 1, 1, 1]),
    ((-1.0, 1.5), [0.5, 1.5, -1.0, -0.2, 1.0], [1, 0, 0, 1, 1])])
def test_log_ratios_by_hand(clamp, ratios, gradient):
    logps = tensor(LOGP, requires_grad=True)
    (found, other), = log_ratios([[logps, tensor([-0.75])]], PAIR, KNOWN, clamp)
    found.sum().backward()
    assert found.tolist() == pytest.approx(ratios, abs=1e-6) and other.tolist() == pytest.approx([-0.25])
    assert logps.grad.tolist() == gradient and found.dtype == torch.float32


def test_log_ratios_without_a_reference_are_the_log_probs():
    (found, _), = log_ratios([[tensor(LOGP), tensor([-0.75])]], PAIR, None)
    assert found.tolist() == LOGP


def test_log_ratios_keep_groups_and_completions_apart():
    model = make("llama")
    known = reference_logprobs(nullcontext(model), GROUPS[::-1])  # in another order
    ratios = log_ratios(completion_logprobs(model, GROUPS), GROUPS, known)
    assert [[len(x) for x in group] for group in ratios] == [[len(y) for y in ys] for _, ys in GROUPS]
    assert flat(ratios).abs().max() < 1e-5


def test_log_ratio_of_an_unknown_completion_is_an_error():
    for known in (KNOWN, ReferenceCache()):
        with pytest.raises(KeyError):
            log_ratios([[tensor([-0.75])]], [(PROMPT, [(9,)])], known)


@pytest.mark.parametrize("dtype, size, agrees", [
    ("float32", 0.0, True), ("float32", 5e-5, True), ("float32", 2e-4, False), ("float32", float("nan"), False),
    ("bfloat16", 1e-2, True), ("bfloat16", 0.1, False)])
def test_check_agreement_refuses_a_reference_that_is_not_the_policy(dtype, size, agrees, capsys):
    ratios = tensor([size, -size, size])
    with nullcontext() if agrees else pytest.raises(BadInput, match="differ by .* nats per token") as error:
        check_agreement(ratios, dtype)
    assert "step 0: policy and reference differ by at most" in capsys.readouterr().out
    assert agrees or "\n" not in str(error.value)
