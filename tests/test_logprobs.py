"""completion_logprobs: against one forward per sequence, for many architectures and memory settings."""
import inspect
from copy import deepcopy
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from models import GPT2, MODELS, SMALL, build, make
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import refcache
from refcache import (
    SHARED, BadInput, base_model, completion_logprobs, context_length, eval_mode, micro_batches, one_kernel_serves,
    pack, share_prompts, shares_prompts)

P, Q, R = (5, 17, 90, 3, 41, 8, 66), (9, 9, 31), (77,)
GROUPS = [(P, [(12, 4, 55, 2), (60, 2), (12, 33, 71, 80, 6, 19, 2)]), (Q, [(44, 2)]), (R, [(1,), (96, 95, 94, 2)]),
          (P + Q + P, [(13, 14, 15, 16, 2), (13, 14, 2)])]
EIGHT = [(12, 4, 55), (60,), (12, 33, 71, 80, 6, 19), (44, 2), (12, 4), (7, 7, 7, 7), (1, 2), (90,)]
SAMPLES = {k: [(P, EIGHT[:k]), (P + Q + P, EIGHT[-k:]), (R, EIGHT[:k])] for k in (1, 2, 8)}  # k completions per prompt
ON_CUDA = ["llama", "qwen3", "gpt2", "mistral-window-5", "mistral-window-200", "gemma3-window-6",
           "granite-logits-scaling"]  # Granite scales its scores in its own way


def slow(model, groups, temperature=1.0):
    """The definition: one forward per sequence, and the log-softmax of all its logits."""
    out = []
    for prompt, completions in groups:
        logits = [model(input_ids=torch.tensor([prompt + y])).logits[0, len(prompt) - 1:-1] for y in completions]
        logps = [F.log_softmax(x.float() / temperature, -1) for x in logits]
        out.append([x[torch.arange(len(y)), torch.tensor(y)] for x, y in zip(logps, completions)])
    return out


def flat(ragged):
    return torch.cat([logps for group in ragged for logps in group])


def values_and_gradients(function, model, groups, **knobs):
    model.zero_grad()
    logps = flat(function(model, groups, **knobs))
    (logps * torch.linspace(-1, 1, len(logps), device=logps.device)).sum().backward()  # every token has another weight
    return logps.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_close(one, two):
    for a, b in zip(one, two, strict=True):  # values, then gradients
        assert a.dtype == b.dtype == torch.float32 and (a - b).abs().max() < 1e-5 * b.abs().max().clamp(min=1)


def assert_exact(model, groups=GROUPS, **knobs):
    share_prompts(model)  # first: it also returns Gemma-2 to the softcap that sdpa drops in transformers 5.17
    temperature = {name: value for name, value in knobs.items() if name == "temperature"}
    truth = values_and_gradients(slow, model, groups, **temperature)
    assert_close(values_and_gradients(completion_logprobs, model, groups, **knobs), truth)


def forward_sizes(model):
    """A list that grows by the number of tokens of each forward from now on."""
    share_prompts(model)
    sizes = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, out: sizes.append(args[0].numel()))
    return sizes


# --- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_equal_one_forward_per_sequence(name):
    model = make(name)
    assert_exact(model)
    assert shares_prompts(model) == MODELS[name][2], "which models may share is known"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3-window-6"])
def test_exact_also_when_loaded_with_eager_attention(name):
    truth = values_and_gradients(slow, make(name, attention="eager"), GROUPS)
    assert_close(values_and_gradients(completion_logprobs, make(name, attention="eager"), GROUPS), truth)


def checkpointed(model, reentrant):
    """The model in training mode with gradient checkpointing, and a list that grows with each run of a layer."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=reentrant))
    model.enable_input_require_grads()
    runs = []
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(module, GradientCheckpointingLayer):
            next(module.children()).register_forward_hook(lambda *_: runs.append(1))
    return model, runs


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2-softcaps"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_memory_only(name, reentrant):
    truth = values_and_gradients(completion_logprobs, make(name), GROUPS)
    model, runs = checkpointed(make(name), reentrant)
    share_prompts(model)
    runs.clear()
    assert_close(values_and_gradients(completion_logprobs, model, GROUPS), truth)
    assert len(runs) == 2 * model.config.num_hidden_layers, "the backward did not run the layers again"


@pytest.mark.parametrize("name", ["llama", "gemma2-softcaps", "mamba"])
@pytest.mark.parametrize("tokens_per_forward", [1, 45])
def test_tokens_per_forward_changes_memory_only(name, tokens_per_forward):
    assert_exact(make(name), tokens_per_forward=tokens_per_forward)


@pytest.mark.parametrize("name", ["llama", "gemma3-softcap", "bloom-alibi"])
def test_temperature_divides_the_logits(name):
    assert_exact(make(name), temperature=0.6)


@pytest.mark.parametrize("name", ["llama", "phi-head-bias", "gemma3-softcap"])
def test_size_of_the_head_chunks_changes_memory_only(name, monkeypatch):
    model = make(name)
    share_prompts(model)
    truth = values_and_gradients(completion_logprobs, model, GROUPS)
    monkeypatch.setattr(refcache, "HEAD_BYTES", 2 * 5 * 97 * 4)  # 5 completion tokens at a time, half of it
    assert_close(values_and_gradients(completion_logprobs, model, GROUPS), truth)


def test_order_of_groups_and_completions_is_kept():
    model, groups = make("qwen2"), GROUPS[::-1] + GROUPS[1:3]
    for (prompt, completions), logps in zip(groups, completion_logprobs(model, groups, 30), strict=True):
        for y, found in zip(completions, logps, strict=True):
            assert torch.allclose(found, completion_logprobs(model, [(prompt, [y])])[0][0], atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window-5"])
def test_single_completion_is_bitwise_equal_to_the_plain_row(name):
    model, group = make(name), [(P, [(12, 4, 55, 2)])]
    assert torch.equal(completion_logprobs(model, group)[0][0], slow(make(name, attention="sdpa"), group)[0][0])


def test_completions_of_a_prompt_do_not_see_each_other():
    model = make("llama")
    one = completion_logprobs(model, [(P, [(12, 4, 55, 2), (60, 2)])])[0]
    two = completion_logprobs(model, [(P, [(12, 4, 55, 2), (61, 7)])])[0]
    assert torch.equal(one[0], two[0]) and not torch.equal(one[1], two[1])


@pytest.mark.parametrize("name", ["llama", "gemma2-softcaps"])
def test_bfloat16_is_close_and_gives_float32(name):
    truth = flat(slow(make(name), GROUPS))
    weights = flat(completion_logprobs(make(name).bfloat16(), GROUPS))
    autocast = flat(completion_logprobs(make(name), GROUPS, dtype="bfloat16"))
    for logps in (weights, autocast):
        assert logps.dtype == torch.float32 and 0 < (logps - truth).abs().mean() < 0.1


def test_dtype_float32_is_exact_inside_another_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        logps = flat(completion_logprobs(make("llama"), GROUPS, dtype="float32"))
    assert (logps - flat(slow(make("llama"), GROUPS))).abs().max() < 1e-5


@pytest.mark.parametrize("name, config", [
    ("llama", dict(target_modules=["q_proj", "up_proj"])), ("llama", dict(target_modules=["q_proj", "lm_head"])),
    ("gemma2-softcaps", dict(target_modules=["q_proj", "lm_head"])),
    ("llama", dict(target_modules=["v_proj"], modules_to_save=["lm_head"]))])
def test_adapters_also_of_the_head_are_exact(name, config):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make(name), peft.LoraConfig(task_type="CAUSAL_LM", r=4, **config))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.1)
    assert_exact(model)
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.requires_grad)
    assert base_model(model) is model.get_base_model() and shares_prompts(model) == MODELS[name][2]


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2-softcaps"])
def test_no_forward_is_larger_than_tokens_per_forward(name):
    model = make(name)
    sizes = forward_sizes(model)
    completion_logprobs(model, GROUPS * 5, tokens_per_forward=64)
    assert max(sizes) <= 64 and sum(sizes) / len(sizes) > 32, "forwards should be as full as they can be"


def test_prompt_is_encoded_once_and_nothing_is_padded():
    model = make("llama")
    sizes = forward_sizes(model)
    completion_logprobs(model, GROUPS)
    assert sizes == [sum(len(prompt) + sum(map(len, completions)) for prompt, completions in GROUPS)]


@pytest.mark.parametrize("name", ["llama", "gemma2-softcaps"])
def test_head_sees_completion_tokens_only_and_no_more_than_head_bytes(name, monkeypatch):
    model, rows = make(name), []
    share_prompts(model)
    model.lm_head.register_forward_hook(lambda _, args, out: rows.append(args[0].shape[0]))
    monkeypatch.setattr(refcache, "HEAD_BYTES", 2 * 7 * 97 * 4)
    with torch.no_grad():
        completion_logprobs(model, GROUPS)
    assert rows == [7] * 4 and sum(rows) == sum(len(y) for _, completions in GROUPS for y in completions)


@pytest.mark.parametrize("fit", [False, True])
def test_logits_beyond_head_bytes_are_not_kept_for_the_backward(fit, monkeypatch):
    model, shapes = make("llama"), []
    share_prompts(model)
    monkeypatch.setattr(refcache, "HEAD_BYTES", (sum(len(y) for _, ys in GROUPS for y in ys) - (not fit)) * 97 * 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(x.shape) or x, lambda x: x):
        logps = completion_logprobs(model, GROUPS)
    assert shapes and bool([shape for shape in shapes if shape[-1:] == (97,)]) == fit
    flat(logps).sum().backward()


@pytest.mark.parametrize("name", ["llama", "gemma2-softcaps"])
def test_micro_batches_hold_every_group_once(name):
    model = make(name)
    share_prompts(model)
    for budget in (1, 30, 64, 1000):
        batches = micro_batches(model, GROUPS * 3, budget)
        assert sorted(i for batch in batches for i in batch) == list(range(len(GROUPS) * 3))


def test_pack_by_hand():
    assert pack([3, 9, 4, 6, 2], budget=10) == [[1], [3, 2], [0, 4]]
    assert pack([3, 9, 4], budget=18, rows=[1, 1, 1]) == [[1, 2], [0]], "a row of 4 tokens is padded to 9"
    assert pack([3, 9], budget=18, rows=[2, 1]) == [[1], [0]], "2 rows are padded to 9, but 9 tokens are left"


# --- one kernel for all spans: the CUDA path -------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts how often Python reads a number from a tensor: each time a CPU would wait for the GPU."""
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ON_CUDA)
def test_no_micro_batch_reads_a_number_from_a_tensor(name):
    model = make(name)
    assert share_prompts(model)
    with Reads() as reads:
        values_and_gradients(completion_logprobs, model, GROUPS, tokens_per_forward=20)
    assert reads.count == 0
    with Reads() as reads:
        model(torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 3)).logits.sum().item()
    assert reads.count > 1  # an ordinary mask is looked at


@pytest.mark.parametrize("mask", [[[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], [[1]]], ids=["padding", "stride 0"])
@pytest.mark.parametrize("name", ["llama", "mistral-window-5"])
def test_an_ordinary_batch_is_masked_as_before(name, mask):
    model, ids = make(name), torch.tensor([[5, 17, 90, 3, 41, 8, 66], [9, 9, 31, 44, 2, 6, 7]])
    mask = torch.tensor(mask).expand(2, 7)
    before = model(ids, attention_mask=mask).logits
    assert share_prompts(model)
    assert torch.equal(model(ids, attention_mask=mask).logits[mask > 0], before[mask > 0])


class Kernel:
    """varlen_attn in plain torch, for a CPU. Asserts what the CUDA kernel demands of its arguments, except that `dtype`
    is float32 where a test compares closely. `extra` widens the window: an error that must be noticed."""

    def __init__(self, monkeypatch, dtype=torch.float32, extra=0):
        self.dtype, self.extra, self.calls = dtype, extra, 0
        monkeypatch.setattr(refcache, "varlen_attn", self)
        monkeypatch.setattr(refcache, "one_kernel_serves", lambda query, value: query.dtype == dtype)

    def __call__(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
        inspect.signature(varlen_attn).bind(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)
        self.calls += 1
        heads, key_heads, size = query.shape[1], key.shape[1], query.shape[2]
        assert query.dtype == key.dtype == value.dtype == self.dtype
        assert query.dim() == key.dim() == 3 and key.shape == value.shape and key.shape[2] == size
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1 and size % 8 == 0 and size <= 256
        assert heads == key_heads or options["enable_gqa"] and heads % key_heads == 0
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q.shape == cu_seq_k.shape
        assert cu_seq_q.is_contiguous() and cu_seq_k.is_contiguous() and type(max_q) is type(max_k) is int
        queries, keys = cu_seq_q.tolist(), cu_seq_k.tolist()
        assert queries[0] == keys[0] == 0 and queries[-1] == len(query) and keys[-1] == len(key)
        assert max_q == max(b - a for a, b in zip(queries, queries[1:]))
        assert max_k == max(b - a for a, b in zip(keys, keys[1:]))
        left, right = options.get("window_size", (-1, -1))
        left = left + self.extra if left >= 0 else len(key)
        right = right if right >= 0 else len(key)
        outputs = []
        for a, b, c, d in zip(queries, queries[1:], keys, keys[1:]):
            places = torch.arange(d - c)
            behind = places[d - c - (b - a):, None] - places  # aligned to the lower right, as in flash attention
            q, k, v = (x.float().transpose(0, 1)[None] for x in (query[a:b], key[c:d], value[c:d]))
            output = F.scaled_dot_product_attention(q, k, v, (behind <= left) & (-behind <= right),
                                                    scale=options.get("scale"), enable_gqa=True)
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs).to(query.dtype)


@pytest.mark.parametrize("name, k", [*((name, 2) for name in ON_CUDA), *product(["llama", "mistral-window-5"], [1, 8])])
def test_kernel_path_equals_one_forward_per_sequence(name, k, monkeypatch):
    kernel, model = Kernel(monkeypatch), make(name)
    assert share_prompts(model)
    kernel.calls = 0
    logps = values_and_gradients(completion_logprobs, model, SAMPLES[k])
    assert_close(logps, values_and_gradients(slow, make(name), SAMPLES[k]))
    assert kernel.calls == model.config.num_hidden_layers, "one kernel per layer, whatever the number of completions"


@pytest.mark.parametrize("name", ["llama", "gemma3-window-6"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_kernel_path_with_gradient_checkpointing_changes_memory_only(name, reentrant, monkeypatch):
    truth = values_and_gradients(slow, make(name), SAMPLES[2])
    kernel, (model, runs) = Kernel(monkeypatch), checkpointed(make(name), reentrant)
    assert share_prompts(model)
    runs.clear()
    kernel.calls = 0
    assert_close(values_and_gradients(completion_logprobs, model, SAMPLES[2]), truth)
    assert kernel.calls == len(runs) == 2 * model.config.num_hidden_layers


@pytest.mark.parametrize("name", ["llama", "gemma3-window-6"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_kernel_path_in_bfloat16_is_close(name, stored, monkeypatch):
    kernel, model = Kernel(monkeypatch, torch.bfloat16), make(name).to(stored)
    assert share_prompts(model, "bfloat16") and kernel.calls
    logps = flat(completion_logprobs(model, GROUPS, dtype="bfloat16"))
    assert (logps - flat(slow(make(name), GROUPS))).abs().mean() < 0.1


@pytest.mark.parametrize("name", ["mistral-window-5", "gemma3-window-6"])
@pytest.mark.parametrize("extra", [-1, 1])
def test_kernel_with_a_window_off_by_one_is_not_trusted(name, extra, monkeypatch):
    Kernel(monkeypatch, extra=extra)
    model = make(name)
    assert not share_prompts(model)
    assert_close([flat(completion_logprobs(model, GROUPS))], [flat(slow(make(name), GROUPS))])


@pytest.mark.parametrize("kernel, dtype, shares", [
    (torch.bfloat16, "float32", True), (torch.bfloat16, "bfloat16", False), (torch.float32, "bfloat16", False)])
def test_sharing_is_tried_in_float32_and_in_the_dtype_of_the_forwards(monkeypatch, kernel, dtype, shares):
    Kernel(monkeypatch, kernel, extra=3)
    assert share_prompts(make("mistral-window-5"), dtype) == shares


def test_second_share_prompts_can_end_sharing(monkeypatch):
    model = make("mistral-window-5")
    assert share_prompts(model, "float32")
    Kernel(monkeypatch, torch.bfloat16, extra=3)
    assert not share_prompts(model, "bfloat16") and not shares_prompts(model)


def test_attention_dropout_takes_the_loop_instead_of_the_kernel(monkeypatch):
    kernel, model = Kernel(monkeypatch), make("llama", attention_dropout=0.5).train()
    assert share_prompts(model) and kernel.calls
    kernel.calls = 0
    one, two = (flat(completion_logprobs(model, GROUPS)) for _ in range(2))
    assert not kernel.calls and not torch.equal(one, two)


@pytest.mark.parametrize("serves, changes", [
    (True, {}), (True, dict(dtype=torch.float16)), (True, dict(size=256)), (True, dict(capability=(9, 0))),
    (False, dict(is_cuda=False)), (False, dict(dtype=torch.float32)), (False, dict(size=264)), (False, dict(size=20)),
    (False, dict(value_size=128)), (False, dict(capability=(7, 5)))])
def test_kernel_serves_what_flash_attention_can(serves, changes, monkeypatch):
    case = dict(is_cuda=True, dtype=torch.bfloat16, size=64, capability=(8, 0)) | changes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: case["capability"])
    query, value = (SimpleNamespace(is_cuda=case["is_cuda"], dtype=case["dtype"], shape=(1, 4, 9, size), device="cuda")
                    for size in (case["size"], case.get("value_size", case["size"])))
    assert one_kernel_serves(query, value) == serves


# --- what a model can do ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2-softcaps", "falcon"])
def test_share_prompts_called_twice_gives_the_same(name):
    model = make(name)
    verdict = share_prompts(model)
    truth = flat(completion_logprobs(model, GROUPS))
    assert share_prompts(model) == verdict and torch.equal(flat(completion_logprobs(model, GROUPS)), truth)


@pytest.mark.parametrize("name", ["llama", "gemma2-softcaps", "granite-logits-scaling"])
def test_copy_of_a_model_works_like_the_model(name):
    model = make(name)
    share_prompts(model)
    copy = deepcopy(model)
    with torch.no_grad():
        copy.get_output_embeddings().weight.mul_(1.5)  # the copy must not answer with the original's weights
    assert_exact(copy)
    assert_exact(model)


def test_generate_gives_the_same_tokens_with_sharing_on():
    model, ids = make("llama"), torch.tensor([P, (0,) * 4 + Q])
    options = dict(attention_mask=(ids > 0).long(), max_new_tokens=8, do_sample=False, pad_token_id=0)
    before = model.generate(ids, **options)
    assert share_prompts(model) and torch.equal(model.generate(ids, **options), before)


def test_share_prompts_says_what_it_decided(capsys):
    share_prompts(make("llama"))
    share_prompts(make("mamba"))
    one, two = capsys.readouterr().out.splitlines()
    assert one == "LlamaForCausalLM: completions share their prompt"
    assert two.startswith("MambaForCausalLM: padded rows") and "recurrent" in two


def test_share_prompts_leaves_training_mode_as_it_was():
    model = make("llama").train()
    model.model.layers[0].eval()
    share_prompts(model)
    assert model.training and model.lm_head.training and not model.model.layers[0].mlp.training


def test_eval_mode_ends_also_when_the_block_raises():
    model = make("llama").train()
    model.lm_head.eval()
    with pytest.raises(KeyError), eval_mode(model):
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert [name for name, module in model.named_modules() if not module.training] == ["lm_head"]


def test_dropout_does_not_disturb_the_decision():
    model = build("gpt2", dict(GPT2, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)).train()
    assert share_prompts(model)


def test_attention_that_ignores_spans_gets_padded_rows(monkeypatch, capsys):
    shared = ALL_ATTENTION_FUNCTIONS[SHARED]
    def ignores_spans(module, query, key, value, mask, spans=None, **kwargs):
        return shared(module, query, key, value, mask, **kwargs)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, SHARED, ignores_spans)
    model = make("llama")
    assert not share_prompts(model) and "padded rows: a shared prompt change" in capsys.readouterr().out
    assert_exact(model)


def test_attention_that_is_slightly_off_gets_padded_rows(monkeypatch):
    shared = ALL_ATTENTION_FUNCTIONS[SHARED]
    def slightly_off(*args, spans=None, **kwargs):
        return shared(*args, spans=spans, **kwargs)[0] * (1 if spans is None else 1.005), None
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, SHARED, slightly_off)
    assert not share_prompts(make("llama"))


def test_model_whose_log_probs_do_not_show_the_spans_gets_padded_rows():
    model = make("llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()  # nothing that attention does can be seen: no evidence
    assert not share_prompts(model)


def test_decoder_that_takes_no_other_keywords_gets_padded_rows():
    model = make("llama")
    forward = model.model.forward
    def strict(input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
               use_cache=None):
        return forward(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache=use_cache)
    model.model.forward = strict
    assert_exact(model)
    assert not shares_prompts(model)


@pytest.mark.parametrize("keyword", ["softcap", "s_aux", "position_bias"])
def test_attention_with_more_than_masked_scores_gets_padded_rows(monkeypatch, capsys, keyword):
    shared = ALL_ATTENTION_FUNCTIONS[SHARED]
    def more(*args, **kwargs):
        return shared(*args, **kwargs, **{keyword: torch.ones(1)})
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, SHARED, more)
    assert not share_prompts(make("llama")) and "softcapped scores" in capsys.readouterr().out


def test_mask_that_only_longer_rows_have_ends_sharing_and_says_so(monkeypatch, capsys):
    shared = ALL_ATTENTION_FUNCTIONS[SHARED]
    def hides_window(module, query, key, value, mask, sliding_window=None, **kwargs):
        return shared(module, query, key, value, mask, **kwargs)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, SHARED, hides_window)
    config, groups = dict(SMALL, sliding_window=30), [(P * 6, GROUPS[0][1]), *GROUPS]
    model, plain = build("mistral", config), build("mistral", config, attention="sdpa")
    assert share_prompts(model), "the window is longer than the rows of the probe"
    assert_close(values_and_gradients(completion_logprobs, model, groups), values_and_gradients(slow, plain, groups))
    assert not shares_prompts(model)
    assert "MistralAttention masks more than the future" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["llama", "stablelm"])
def test_out_of_memory_in_the_probe_is_no_verdict(name):
    model = make(name)
    def out_of_memory(module, args, kwargs):
        if kwargs.get("spans") is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
    hook = model.get_decoder().register_forward_pre_hook(out_of_memory, with_kwargs=True)
    with pytest.raises(torch.OutOfMemoryError):
        completion_logprobs(model, GROUPS)
    hook.remove()
    truth = flat(slow(make(name), GROUPS))
    assert (flat(completion_logprobs(model, GROUPS)) - truth).abs().max() < 1e-5
    assert shares_prompts(model) == MODELS[name][2]


@pytest.mark.parametrize("change", [torch.sin, lambda logits: logits * 1.1, lambda logits: logits * float("nan")])
def test_model_whose_head_does_not_give_its_logits_is_refused(change):
    model = make("llama")
    forward = model.forward
    model.forward = lambda *args, **kwargs: SimpleNamespace(logits=change(forward(*args, **kwargs).logits))
    with pytest.raises(BadInput, match="differ from its .*logits"):
        completion_logprobs(model, GROUPS)


def test_weights_with_nan_are_refused():
    model = make("llama")
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(BadInput, match="NaN"):
        completion_logprobs(model, GROUPS)


@pytest.mark.parametrize("model_type, config", [
    ("llama4_text", dict(SMALL, head_dim=8, num_local_experts=2, intermediate_size_mlp=64)),  # its decoder gives logits
    ("modernbert-decoder", dict(SMALL, cls_token_id=1, sep_token_id=2)),  # its decoder is the head
    ("bert", dict(SMALL, is_decoder=True))])  # layers between the decoder and the head
def test_unusual_architecture_is_exact_or_refused_in_one_sentence(model_type, config):
    model = build(model_type, config)
    try:
        logps = flat(completion_logprobs(model, GROUPS))
    except BadInput as error:
        assert "\n" not in str(error) and "not supported" in str(error)
    else:
        assert (logps - flat(slow(model, GROUPS))).abs().max() < 1e-5


@pytest.mark.parametrize("groups, words", [
    ([((), [(5,)])], "without tokens"), ([(P, [()])], "without tokens"), ([(P, [])], "without tokens"),
    ([((5, 97), [(5,)])], "ids up to 97 .*97 embeddings"), ([(P, [(5,), (97,)])], "ids up to 97"),
    ([(P * 36, [(5,) * 4, (5,) * 5])], "257 tokens .*256 positions")])
def test_group_outside_the_model_is_refused(groups, words):
    with pytest.raises(BadInput, match=words):
        completion_logprobs(make("llama"), groups)


def test_row_as_long_as_the_context_and_the_highest_id_are_accepted():
    assert len(completion_logprobs(make("llama"), [(P * 36, [(5, 2, 1, 96)])])[0][0]) == 4


def test_context_length_is_where_rows_begin_to_depend_on_their_batch():
    rope = dict(rope_type="dynamic", factor=4.0, rope_theta=1e4, original_max_position_embeddings=64)
    nested = dict(full_attention=rope, sliding_attention=dict(rope_type="default", rope_theta=1e4))
    assert context_length(AutoConfig.for_model("llama", **SMALL)) == 256
    assert context_length(AutoConfig.for_model("llama", **SMALL, rope_parameters=rope)) == 64
    assert context_length(AutoConfig.for_model("gemma3_text", **SMALL, rope_parameters=nested)) == 64
    assert context_length(AutoConfig.for_model("llama", **SMALL, rope_parameters=dict(rope, rope_type="yarn"))) == 256
    assert context_length(AutoConfig.for_model("mamba", vocab_size=97)) == float("inf")
