"""completion_logprobs: against one forward per sequence, for many architectures and sizes of forwards."""
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from models import (
    GROUPS, MODELS, ON_CUDA, PADDED, SAMPLES, SMALL, bad_input, build, make, cases, ready, slow,
    values_and_gradients)
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import logprobs
from logprobs import (
    SHARED, completion_logprobs, context_length, divide_batches, enable_shared_prompts, has_shared_prompts)


def assert_close(one, two):
    for a, b in zip(one, two, strict=True):  # values, then gradients
        assert a.dtype == b.dtype == torch.float32
        assert (a - b).abs().max() < 1e-5 * b.abs().max().clamp(min=1)


def assert_exact(model, **options):
    enable_shared_prompts(model)  # which chooses the attention of Gemma-2
    truth = values_and_gradients(slow, model, GROUPS, **options)
    assert_close(values_and_gradients(completion_logprobs, model, GROUPS, **options), truth)


@cases("name", MODELS)
def test_shared_rows_equal_one_forward_per_sequence(name):
    model = ready(name)
    truth = values_and_gradients(slow, make(name, attention="eager"), GROUPS)
    assert_close(values_and_gradients(completion_logprobs, model, GROUPS), truth)
    assert has_shared_prompts(model) == (name not in PADDED)


@cases("name", ["phi-head-bias", "gemma3-softcap", "bert-layers-before-the-head"])
def test_size_of_the_head_chunks_changes_memory_only(name, monkeypatch):
    monkeypatch.setattr(logprobs, "HEAD_BYTES", 5 * 97 * 4)  # five completion tokens
    assert_exact(make(name), temperature=0.6)  # which divides the logits


@cases("name, place", [("gemma2-softcaps", "target_modules"), ("llama", "modules_to_save")])
def test_adapters_of_the_head_are_exact(name, place):
    peft = pytest.importorskip("peft")
    config = dict(task_type="CAUSAL_LM", r=4, target_modules=["v_proj"]) | {place: ["lm_head"]}
    model = peft.get_peft_model(make(name), peft.LoraConfig(**config, init_lora_weights=False))
    assert_exact(model)
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.requires_grad)


@cases("at_once, rows", [(28, [28]), (27, [27, 1])])
def test_logits_of_chunks_are_computed_again(at_once, rows, monkeypatch):
    model, seen, saved = ready("llama"), [], set()
    model.lm_head.register_forward_hook(lambda _, args, out: seen.append(args[0].numel() // 32))
    monkeypatch.setattr(logprobs, "HEAD_BYTES", at_once * 97 * 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.add(x.shape[-1:]) or x, lambda x: x):
        completion_logprobs(model, GROUPS)
    assert seen == rows and ((97,) in saved) == (rows == [28])


@cases("lengths, budget, is_padded, shares", [
    ([3, 9, 4, 7, 2], 10, False, [[[1], [3], [2, 0, 4]]]), ([20, 9], 10, False, [[[0]], [[1]], [[]]]),
    ([8, 8, 2, 2], 32, False, [[[0]], [[1, 2, 3]]]), ([8, 8, 2, 2], 32, True, [[[0, 1]], [[2, 3]]])])
def test_division_by_hand(lengths, budget, is_padded, shares, monkeypatch):
    monkeypatch.setattr(logprobs, "process_count", lambda: len(shares))
    for rank, share in enumerate(shares):
        monkeypatch.setattr(logprobs, "process_rank", lambda rank=rank: rank)
        assert divide_batches(lengths, budget, is_padded) == share


class Kernel:
    """varlen_attn in plain torch. `extra` widens its window, which is wrong."""

    def __init__(self, monkeypatch, dtype=torch.float32, extra=0):
        self.dtype, self.extra, self.calls = dtype, extra, 0
        monkeypatch.setattr(logprobs, "varlen_attn", self)
        monkeypatch.setattr(logprobs, "one_kernel_serves", lambda query, value: query.dtype == dtype)

    def __call__(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size, scale, enable_gqa):
        self.calls += 1
        assert query.dtype == key.dtype == value.dtype == self.dtype  # as the CUDA kernel demands
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q[0] == cu_seq_k[0] == 0
        sizes_q, sizes_k = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
        assert (max_q, max_k) == (max(sizes_q), max(sizes_k))
        left, right = window_size
        left = left + self.extra if left >= 0 else len(key)

        outputs = []
        for q, k, v in zip(query.split(sizes_q), key.split(sizes_k), value.split(sizes_k)):
            places = torch.arange(len(k))
            behind = places[len(k) - len(q):, None] - places  # aligned to the lower right, as in flash attention
            q, k, v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
            mask = (behind <= left) & (-behind <= right)
            output = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs).to(query.dtype)


@cases("name, k", [*product(ON_CUDA, [2]), ("mistral-window-5", 1), ("llama", 8)])
def test_kernel_path_equals_one_forward_per_sequence(name, k, monkeypatch):
    kernel = Kernel(monkeypatch)
    model = ready(name)
    kernel.calls = 0
    found = values_and_gradients(completion_logprobs, model, SAMPLES[k])
    assert_close(found, values_and_gradients(slow, make(name), SAMPLES[k]))
    assert kernel.calls == model.config.num_hidden_layers


@cases("dtype, extra", [(torch.float32, -1), (torch.float32, 1), (torch.bfloat16, 3)])
def test_kernel_with_a_wrong_window_is_not_trusted(dtype, extra, monkeypatch):
    Kernel(monkeypatch, dtype, extra)
    model = make("mistral-window-5").to(dtype)
    enable_shared_prompts(model)
    assert not has_shared_prompts(model)


# --- Attention that is not the model's own

def slightly_off(shared, *args, spans=None, **kwargs):
    return shared(*args, spans=spans, **kwargs)[0] * (1 if spans is None else 1.005), None


def without_spans_in_a_layer(shared, module, *args, spans=None, **kwargs):
    return shared(module, *args, spans=spans if module.layer_idx else None, **kwargs)


def without_window(shared, *args, sliding_window=None, **kwargs):
    return shared(*args, **kwargs)


@cases("attention", [slightly_off, without_spans_in_a_layer, without_window])
def test_wrong_attention_gets_padded_rows(attention, monkeypatch):
    """The window is longer than the rows of the test."""
    attention_with_fault = partial(attention, ALL_ATTENTION_FUNCTIONS[SHARED])
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, SHARED, attention_with_fault)
    window = 80 if attention is without_window else None
    model = build("mistral", dict(SMALL, sliding_window=window))
    enable_shared_prompts(model)
    assert not has_shared_prompts(model)


def test_models_that_are_never_exact_are_refused():
    with bad_input("causal"):
        enable_shared_prompts(build("bert", dict(SMALL, is_decoder=False)))
    model = make("llama")
    model.lm_head.weight.data.fill_(float("nan"))
    with bad_input("NaN"):
        completion_logprobs(model, GROUPS)


DYNAMIC = dict(rope_type="dynamic", factor=4.0, rope_theta=1e4, original_max_position_embeddings=64)
LINEAR = DYNAMIC | dict(rope_type="linear")
LONGROPE = DYNAMIC | dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4)


@cases("model_type, config, length", [
    ("llama", dict(SMALL, rope_parameters=DYNAMIC), 64), ("llama", dict(SMALL, rope_parameters=LINEAR), 256),
    ("gemma3_text", dict(SMALL, rope_parameters=dict(full_attention=LONGROPE, sliding_attention=LINEAR)), 64),
    ("deepseek_v32", dict(index_topk=70), 70), ("mamba", {}, float("inf"))])
def test_context_length_by_hand(model_type, config, length):
    assert context_length(AutoConfig.for_model(model_type, **config)) == length
