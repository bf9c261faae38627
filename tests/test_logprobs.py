"""completion_logprobs: against one forward a sequence, whatever the architecture and the memory knobs."""
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from models import GPT2, MODELS, SMALL, make
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from refcache import (
    HEAD_ROWS, SHARED, BadInput, checkpoint_layers, completion_logprobs, context_length, load_model, micro_batches, why_not_shared,
    shared_prompt_attention)

P, Q, R = (5, 17, 90, 3, 41, 8, 66), (9, 9, 31), (77,)
GROUPS = [(P, [(12, 4, 55, 2), (60, 2), (12, 33, 71, 80, 6, 19, 2)]), (Q, [(44, 2)]), (R, [(1,), (96, 95, 94, 2)]),
          (P + Q + P, [(13, 14, 15, 16, 2), (13, 14, 2)])]


def slow(model, groups):
    """The definition, in four lines: one forward a sequence, all its logits."""
    out = []
    for prompt, completions in groups:
        logits = [model(input_ids=torch.tensor([prompt + y])).logits[0, len(prompt) - 1:-1].float() for y in completions]
        out.append([F.log_softmax(x, -1)[torch.arange(len(y)), torch.tensor(y)] for x, y in zip(logits, completions)])
    return out


def values_and_gradients(model, function, groups):
    model.zero_grad()
    logps = torch.cat([logp for group in function(model, groups) for logp in group])
    (logps * torch.linspace(-1, 1, len(logps))).sum().backward()  # every token weighs differently
    return logps.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_exact(model, groups, **knobs):
    why_not_shared(model)  # first: it also gives Gemma-2 back the softcap that sdpa drops in transformers 5.17
    truth, truth_grad = values_and_gradients(model, slow, groups)
    logps, grad = values_and_gradients(model, lambda m, g: completion_logprobs(m, g, **knobs), groups)
    assert logps.dtype == torch.float32
    assert (logps - truth).abs().max() < 1e-5
    assert (grad - truth_grad).abs().max() < 1e-5 * truth_grad.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_equal_one_forward_a_sequence(name):
    model = make(name)
    why_not = why_not_shared(model)
    assert bool(why_not) != MODELS[name][2], why_not
    assert_exact(model, GROUPS)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma3-window-6", "mistral-window-5", "phi-head-bias"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_exact_whichever_attention_it_was_loaded_with(name, attention):
    model = make(name, attention=attention)
    truth, truth_grad = values_and_gradients(make(name, attention=attention), slow, GROUPS)
    logps, grad = values_and_gradients(model, completion_logprobs, GROUPS)
    assert (logps - truth).abs().max() < 1e-5 and (grad - truth_grad).abs().max() < 1e-5 * truth_grad.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2-softcaps", "gemma3-window-6"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_memory_only(name, reentrant):
    model = make(name)
    truth, truth_grad = values_and_gradients(model, completion_logprobs, GROUPS)
    checkpoint_layers(model, use_reentrant=reentrant)
    norms = []  # of every pass through a layer: twice as many when the backward runs them again
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            next(module.children()).register_forward_hook(lambda *_: norms.append(1))
    logps, grad = values_and_gradients(model, completion_logprobs, GROUPS)
    assert len(norms) == 2 * model.config.num_hidden_layers, "it did not checkpoint"
    assert torch.equal(logps, truth) and (grad - truth_grad).abs().max() <= 1e-6 * truth_grad.abs().max()


@pytest.mark.parametrize("model_type, config", [
    ("gpt2", dict(GPT2, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)),
    ("opt", dict(vocab_size=97, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256, dropout=0.5,
                 word_embed_proj_dim=32, attention_dropout=0.5))])  # OPT's layers drop out themselves
def test_checkpointed_model_has_no_dropout(model_type, config):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config)).eval()
    truth = completion_logprobs(model, GROUPS)[0][0]
    checkpoint_layers(model)
    assert torch.equal(completion_logprobs(model, GROUPS)[0][0], truth)


@pytest.mark.parametrize("name", ["llama", "gemma2-softcaps", "mamba"])
@pytest.mark.parametrize("tokens_per_forward", [1, 20, 45, 10_000])
def test_tokens_per_forward_changes_memory_only(name, tokens_per_forward):
    assert_exact(make(name), GROUPS, tokens_per_forward=tokens_per_forward)


@pytest.mark.parametrize("name", ["llama", "gemma2-softcaps"])
def test_no_forward_is_larger_than_tokens_per_forward(name):
    model, sizes = make(name), []
    why_not_shared(model)
    model.get_input_embeddings().register_forward_hook(lambda _, args, out: sizes.append(args[0].numel()))
    completion_logprobs(model, GROUPS * 5, tokens_per_forward=64)
    assert max(sizes) <= 64 and sum(sizes) / len(sizes) > 32


def test_prompt_is_encoded_once_and_nothing_is_padded():
    model, sizes = make("llama"), []
    why_not_shared(model)
    model.get_input_embeddings().register_forward_hook(lambda _, args, out: sizes.append(args[0].numel()))
    completion_logprobs(model, GROUPS)
    assert sizes == [sum(len(p) + sum(map(len, ys)) for p, ys in GROUPS)]


def test_the_head_never_sees_more_than_a_chunk_nor_a_prompt():
    model, rows = make("llama"), []
    why_not_shared(model)
    model.lm_head.register_forward_hook(lambda _, args, out: rows.append(args[0].shape[0]))
    groups = [(P, [tuple(range(90))] * 5)]
    with torch.no_grad():
        completion_logprobs(model, groups)
    assert sum(rows) == 450 and max(rows) <= HEAD_ROWS


def test_order_of_groups_and_of_completions_is_kept():
    model = make("qwen2")
    for group, logps in zip(GROUPS[::-1], completion_logprobs(model, GROUPS[::-1])):
        alone = [completion_logprobs(model, [(group[0], [y])])[0][0] for y in group[1]]
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(alone, logps)) and len(alone) == len(logps)


def test_one_completion_is_bitwise_the_plain_row():
    model = make("llama")
    assert torch.equal(completion_logprobs(model, [(P, [(12, 4, 55, 2)])])[0][0], slow(model, [(P, [(12, 4, 55, 2)])])[0][0])


def test_completions_of_one_prompt_do_not_see_each_other():
    model = make("llama")
    first = completion_logprobs(model, [(P, [(12, 4, 55, 2), (60, 2)])])[0]
    second = completion_logprobs(model, [(P, [(12, 4, 55, 2), (61, 7)])])[0]
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])


@pytest.mark.parametrize("name", ["llama", "gemma2-softcaps"])
def test_bfloat16_is_near_and_float32_comes_out(name):
    truth = torch.cat(sum(slow(make(name), GROUPS), []))
    logps = torch.cat(sum(completion_logprobs(make(name).bfloat16(), GROUPS), []))
    with torch.autocast("cpu", torch.bfloat16):
        auto = torch.cat(sum(completion_logprobs(make(name), GROUPS), []))
    assert logps.dtype == auto.dtype == torch.float32
    assert (logps - truth).abs().mean() < 0.1 and 0 < (auto - truth).abs().mean() < 0.1


def test_sharing_is_left_on_and_generate_still_works():
    model = make("llama")
    ids = torch.tensor([P])
    before = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert why_not_shared(model) == "" and model.config._attn_implementation == SHARED
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0), before)


def test_a_mask_that_nobody_announced_ends_sharing_for_good(monkeypatch, capsys):
    model = make("mistral-window-5")
    assert why_not_shared(model) == ""
    def silent(module, query, key, value, mask, sliding_window=None, **kwargs):  # its window never reaches the attention function
        return shared_prompt_attention(module, query, key, value, mask, **kwargs)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, SHARED, silent)
    logps = torch.cat(sum(completion_logprobs(model, GROUPS), []))
    assert "masks more than the future" in why_not_shared(model) and "no longer shared" in "".join(capsys.readouterr())
    assert (logps - torch.cat(sum(slow(make("mistral-window-5"), GROUPS), []))).abs().max() < 1e-5


def test_a_model_that_ignores_the_layout_is_found_by_the_probe(monkeypatch):
    def deaf(module, query, key, value, mask, spans=None, **kwargs):
        return shared_prompt_attention(module, query, key, value, mask, **kwargs)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, SHARED, deaf)
    model = make("llama")
    assert "changed a log-prob" in why_not_shared(model) and model.config._attn_implementation == "sdpa"
    assert_exact(model, GROUPS)


def test_the_probe_leaves_training_mode_and_autocast_as_they_were():
    model = make("llama").train()
    model.model.layers[0].eval()
    why_not_shared(model)
    assert model.training and model.lm_head.training and not model.model.layers[0].mlp.training


@pytest.mark.parametrize("groups, words", [
    ([((), [(5,)])], "without tokens"), ([(P, [()])], "without tokens"), ([(P, [])], "without tokens"),
    ([((5, 97), [(5,)])], "id 97, beyond the model's 97"), ([(P * 40, [(5,)])], "256 positions")])
def test_what_has_no_log_prob_is_refused(groups, words):
    with pytest.raises(BadInput, match=words):
        completion_logprobs(make("llama"), groups)


def test_weights_that_are_not_numbers_are_refused():
    model = make("llama")
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(BadInput, match="NaN"):
        completion_logprobs(model, GROUPS)


def test_logits_that_the_head_does_not_explain_are_refused(monkeypatch):
    model = make("llama")
    forward = model.forward
    model.forward = lambda *args, **kwargs: SimpleNamespace(logits=forward(*args, **kwargs).logits.sin())
    with pytest.raises(BadInput, match="differ from its own logits"):
        completion_logprobs(model, GROUPS)


def test_rope_that_depends_on_the_batch_bounds_the_rows():
    rope = dict(rope_type="dynamic", factor=4.0, rope_theta=1e4, original_max_position_embeddings=64)
    assert context_length(AutoConfig.for_model("llama", **SMALL, rope_parameters=rope)) == 64
    assert context_length(AutoConfig.for_model("llama", **SMALL)) == 256


@pytest.mark.parametrize("name", ["llama", "gemma2-softcaps"])
def test_micro_batches_hold_every_group_once(name):
    model = make(name)
    for budget in (1, 30, 64, 1000):
        batches = micro_batches(model, GROUPS * 3, budget)
        assert sorted(i for batch in batches for i in batch) == list(range(len(GROUPS) * 3))


@pytest.mark.parametrize("name", MODELS)
def test_frozen_weights_stored_in_bfloat16_change_no_bit_of_bfloat16_forwards(name, tmp_path):
    make(name).bfloat16().save_pretrained(tmp_path)
    whole, stored, trained = (load_model(str(tmp_path), "cpu", *how) for how in (("float32",), ("bfloat16",), ("bfloat16", True)))
    assert {p.dtype for p in whole.parameters()} == {p.dtype for p in trained.parameters()} == {torch.float32}
    linear = {p.dtype for p in stored.parameters()} == {torch.float32, torch.bfloat16}
    assert linear == (name not in ("gpt2", "falcon", "mamba")) and stored.get_input_embeddings().weight.dtype == torch.float32
    assert why_not_shared(whole) == why_not_shared(stored) and not any("forward" in vars(m) for m in stored.modules())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        one, two = (sum(completion_logprobs(model, GROUPS), []) for model in (whole, stored))
    assert all(map(torch.equal, one, two))


def test_a_model_saved_in_float32_stays_in_float32(tmp_path):
    """Else a merged adapter would lose what bfloat16 cannot hold."""
    make("llama").save_pretrained(tmp_path)
    assert {p.dtype for p in load_model(str(tmp_path), "cpu", "bfloat16").parameters()} == {torch.float32}
