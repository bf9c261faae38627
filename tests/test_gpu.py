"""On a GPU: the numbers of a CPU, the kernel of half precision, pinned memory, and every script in bfloat16."""
import pytest
import torch
from models import GROUPS, ON_CUDA, SAMPLES, build, make, cases, slow, values_and_gradients
from runs import SCRIPTS, TIED, needs_peft, run, save
from test_references import assert_swap_is_exact

import logprobs
from logprobs import completion_logprobs, enable_shared_prompts, has_shared_prompts
from refcache import Swap

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def errors(name, groups, truth):
    """Errors in bfloat16: of the log-probs in nats, and of the gradient as a share of its norm."""
    model = make(name).cuda().bfloat16()
    enable_shared_prompts(model)
    assert has_shared_prompts(model)
    logps, grad = (x.cpu() for x in values_and_gradients(completion_logprobs, model, groups))
    return (logps - truth[0]).abs().mean(), (grad - truth[1]).norm() / truth[1].norm()


@cases("name", [*ON_CUDA, "gemma2-softcaps", "glm4-moe-buffer", "mamba"])
def test_float32_equals_the_cpu(name):
    truth = values_and_gradients(slow, make(name), GROUPS)
    for x, y in zip(values_and_gradients(completion_logprobs, make(name).cuda(), GROUPS), truth):
        assert (x.cpu() - y).abs().max() < 1e-4 * y.abs().max().clamp(min=1)


@cases("k", SAMPLES)
@cases("name", ON_CUDA)
def test_bfloat16_kernel_is_as_close_as_the_loop(name, k, monkeypatch):
    kernel = logprobs.varlen_attn
    calls = []
    monkeypatch.setattr(logprobs, "varlen_attn", lambda *args, **options: calls.append(1) or kernel(*args, **options))
    truth = values_and_gradients(slow, make(name), SAMPLES[k])  # float32 on the CPU
    one_kernel = errors(name, SAMPLES[k], truth)
    assert calls
    calls.clear()
    monkeypatch.setattr(logprobs, "one_kernel_serves", lambda query, value: False)
    loop = errors(name, SAMPLES[k], truth)
    assert not calls
    for ours, theirs, bound in zip(one_kernel, loop, (0.02, 0.06)):
        assert ours < bound and ours < 1.5 * theirs + 1e-3


def test_swap_through_pinned_memory_restores_every_bit():
    policy = make("llama-tied").cuda()
    assert_swap_is_exact(policy)
    assert all(on_cpu.is_pinned() for _, on_cpu in Swap(policy).weights)


@cases("lora", [{}, pytest.param(dict(lora_r=4), marks=needs_peft)])
@cases("script", SCRIPTS)
def test_tied_bfloat16_model_agrees_with_its_reference(script, lora):
    model = save(build("llama", TIED).bfloat16(), "tied-bfloat16")
    history = run(script, model=model, dtype="bfloat16", **lora).history
    assert history[1]["kl" if script == "rloo" else "abs_logratio"] == 0
