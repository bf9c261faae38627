"""On a GPU: the numbers of a CPU, the kernel of half precision, pinned memory, and every script in bfloat16."""
import pytest
import torch
from models import make
from runs import SCRIPTS, load, run, save, tiny, weights_of  # noqa: F401
from test_logprobs import GROUPS, ON_CUDA, SAMPLES, flat, slow, values_and_gradients
from transformers import AutoModelForCausalLM

import dpo
import refcache
import rloo
from refcache import ReferenceCache, Swap, completion_logprobs, share_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def exact(name, groups):
    """float32 on the CPU, one forward per sequence: log-probs, and the gradient of a weighted sum of them."""
    return values_and_gradients(slow, make(name), groups)


def errors(name, groups, truth):
    """Mean error of the log-probs in nats, and error of the gradient as a share of its norm, with bfloat16 forwards."""
    model = make(name).cuda()
    assert share_prompts(model, "bfloat16")
    logps, grad = (x.cpu() for x in values_and_gradients(completion_logprobs, model, groups, dtype="bfloat16"))
    return (logps - truth[0]).abs().mean(), (grad - truth[1]).norm() / truth[1].norm()


@pytest.mark.parametrize("name", [*ON_CUDA, "gemma2-softcaps", "glm4-moe-buffer", "mamba"])
def test_float32_values_and_gradients_are_those_of_the_cpu(name):
    truth = exact(name, GROUPS)
    for x, y in zip(values_and_gradients(completion_logprobs, make(name).cuda(), GROUPS), truth):
        assert (x.cpu() - y).abs().max() < 1e-4 * y.abs().max().clamp(min=1)


@pytest.mark.parametrize("k", SAMPLES)
@pytest.mark.parametrize("name", ON_CUDA)
def test_bfloat16_kernel_is_as_close_to_one_float32_forward_per_sequence_as_the_loop(name, k, monkeypatch):
    kernel, calls = refcache.varlen_attn, []
    monkeypatch.setattr(refcache, "varlen_attn", lambda *args, **options: calls.append(1) or kernel(*args, **options))
    truth = exact(name, SAMPLES[k])
    one_kernel = errors(name, SAMPLES[k], truth)
    assert calls
    calls.clear()
    monkeypatch.setattr(refcache, "one_kernel_serves", lambda query, value: False)
    loop = errors(name, SAMPLES[k], truth)
    assert not calls
    for ours, theirs, bound in zip(one_kernel, loop, (0.02, 0.06)):
        assert ours < bound and ours < 1.5 * theirs + 1e-3


@pytest.mark.parametrize("name", ["llama", "mistral-window-5"])
def test_no_micro_batch_waits_for_the_gpu(name):
    model, rows = make(name).cuda(), [dpo.Row(x, ys[0], ys[-1], 0.0, 0.0, {}) for x, ys in SAMPLES[2]] * 3
    known, args = ReferenceCache(), dpo.Args(dtype="bfloat16", tokens_per_forward=60)
    known.score(model, dpo.groups(rows), 60, "bfloat16")
    try:
        for mode in ("default", "error"):  # the first time compiles kernels
            torch.cuda.set_sync_debug_mode(mode)
            dpo.objective(dpo.measure(model, rows, known, args), args).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bfloat16_kernel_with_gradient_checkpointing_gives_the_same_gradient():
    grads = []
    for checkpointing in (False, True):
        model = load(trains=True, dtype="bfloat16", gradient_checkpointing=checkpointing).cuda()
        grads.append(values_and_gradients(completion_logprobs, model, SAMPLES[2], dtype="bfloat16")[1])
    assert (grads[0] - grads[1]).norm() < 1e-3 * grads[0].norm()


def test_swap_through_pinned_memory_restores_every_bit():
    policy, reference = make("llama-tied").cuda(), make("llama-tied", seed=1)
    swap, before = Swap(policy, reference), [p.clone() for p in policy.parameters()]
    assert all(tensor.is_pinned() for tensor in (*swap.saved.values(), *swap.theirs.values()))
    with pytest.raises(KeyError), swap as model:
        assert all(torch.equal(p.cpu(), q) for p, q in zip(model.parameters(), reference.parameters()))
        raise KeyError
    assert all(map(torch.equal, policy.parameters(), before))


def test_frozen_weights_stored_in_bfloat16_change_no_bit():
    halved = AutoModelForCausalLM.from_pretrained(tiny()).bfloat16()
    folders = save(halved, "halved"), save(halved.float(), "widened")
    models = [load(folder, dtype="bfloat16").cuda() for folder in folders]
    assert [torch.bfloat16 in {p.dtype for p in model.parameters()} for model in models] == [True, False]
    with torch.no_grad():
        one, two = (flat(completion_logprobs(model, GROUPS, dtype="bfloat16")) for model in models)
    assert torch.equal(one, two)


def test_greedy_rollouts_are_those_of_one_prompt_at_a_time():
    policy, prompts = make("llama").cuda(), [(5, 6, 7), (9, 8), (4, 3, 2, 11, 12)]
    class Tokenizer: eos_token_id = None
    args = rloo.Args(top_k=1, max_new_tokens=8, dtype="float32")
    share_prompts(policy)
    together = rloo.rollout(policy, Tokenizer, prompts, 3, 1, args).groups
    assert together == [rloo.rollout(policy, Tokenizer, [prompt], 3, 1, args).groups[0] for prompt in prompts]


def test_rollout_in_bfloat16_sees_the_log_probs_of_training(run):
    """check_start of rloo.py refuses a run whose sampler and training disagree; kl begins at 0."""
    assert abs(run("rloo", dtype="bfloat16").history[1]["kl"]) < 1e-2


@pytest.mark.parametrize("lora", [{}, dict(lora_r=4, lr=1e-2)])
@pytest.mark.parametrize("script", ["dpo", "kto"])
def test_float32_run_is_the_same_cached_swapped_and_live(run, script, lora):
    pytest.importorskip("peft") if lora else None
    cached, *others = (run(script, ref=ref, dtype="float32", **lora) for ref in ("cache", "swap", "live"))
    for other in others:
        for one, two in zip(cached.history, other.history):
            assert one["step"] == two["step"] and two.get("loss", 0) == pytest.approx(one.get("loss", 0), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("script, flags", [
    ("dpo", {}), ("kto", {}), ("rloo", {}), ("dpo", dict(ref="swap")), ("dpo", dict(ref="live"))])
def test_every_script_learns_the_demo_in_bfloat16(script, flags, tmp_path):
    history = SCRIPTS[script].main(SCRIPTS[script].Args(out=str(tmp_path), dtype="bfloat16", **flags))
    assert history[0]["eval_score"] < 0.5 and history[-1]["eval_score"] > 0.9
    assert weights_of(tmp_path / "model")
