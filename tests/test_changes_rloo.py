"""Patches of rloo.py: loss and gradient equal those of a plain loop over samples."""
import sys
from functools import partial
from importlib.util import find_spec
from math import nan
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from models import parametrize
from runs import ROOT, TOKENIZER, adapt, load, needs_peft, tiny
from slow_losses import model_with_many_ends
from slow_samples import BETA, LOSSES, add_logps, batch_of
from test_changes import SLOW, changed, run, watch
from torch import tensor
from transformers import AutoConfig, AutoModelForCausalLM

import rloo

SCORES = tensor([[1.0, 0.0, 0.4], [2.0, nan, 1.0], [nan, 1.0, nan], [0.1, 0.1, 0.1]])


def watch_samples(monkeypatch, name, slow_loss):
    """watch() of the samples of a run, which get SCORES."""
    module, reference, batch = changed(name), load(model_with_many_ends()), []

    def rollout(policy, *inputs, step, original=module.rollout, **options):
        samples = original(policy, *inputs, step=step, **options)
        if step > 1:  # as if another program had drawn them
            noise = torch.cos(torch.arange(samples.logps.numel())).view(samples.logps.shape)
            samples = samples._replace(logps=(samples.logps + noise) * samples.mask)
        batch[:] = batch_of(samples, SCORES.where(samples.ended, nan), policy, reference)  # --mask_truncated
        return samples

    def loss_now(policy, *_):
        add_logps(policy, batch)
        return slow_loss(batch)

    monkeypatch.setattr(module, "rollout", rollout)
    monkeypatch.setattr(module, "compute_rewards", lambda *_: (SCORES, {}))
    return watch(monkeypatch, name, loss_now, "run_pairs" if "online_dpo" in name else "run_batch")


SIZES = dict(k=3, batch_size=4, max_new_tokens=6, mask_truncated=True, updates_per_rollout=2, eval_data=None,
             eval_size=0, beta=BETA, steps=2)


@parametrize("name, slow_loss, flags", LOSSES)
def test_loss_of_samples(monkeypatch, name, slow_loss, flags):
    losses = watch_samples(monkeypatch, name, partial(slow_loss, **flags))
    history, _ = run(name, model=model_with_many_ends(), tokens_per_forward=40, **SIZES | flags)
    assert len(losses) == 4 and max(norm for _, norm in losses) > 1e-3
    if "online_dpo" not in name and flags.get("loss_type") != "gspo":
        assert max(values["clip_ratio"] for values in history[1:]) > 0


@parametrize("loss_type", ["grpo", "dr_grpo"])
def test_equal_rewards_have_no_advantage(loss_type):
    """Adam would make a whole step of a rounding error."""
    args = SimpleNamespace(loss_type=loss_type)
    advantages = changed("grpo").group_advantages(tensor([[0.9, 0.9, 0.9], [0.7, nan, nan]]), args)
    assert advantages.tolist() == [[0.0] * 3] * 2


# --- vLLM

@pytest.fixture
def engines(monkeypatch):
    """The engines of a module that stands for vLLM. They sample from the weights that they were sent."""
    engines = []

    def start(model, load_format, logprobs_mode, max_model_len, **_):
        assert (load_format, logprobs_mode, max_model_len) == ("dummy", "processed_logprobs", -1)
        policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval()

        def load_weights(name, kwargs):
            assert name == "reload_weights"
            policy.load_state_dict(dict(kwargs["weights_iterator"]))

        engine = MagicMock()
        engine.collective_rpc.side_effect = load_weights
        engine.generate.side_effect = partial(generate, policy)
        engines.append(engine)
        return engine

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=start, SamplingParams=SimpleNamespace))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    changed("vllm_rollouts").load_engine.cache_clear()
    return engines


def generate(policy, requests, options, use_tqdm):
    outputs = []
    for request, option in zip(requests, options, strict=True):
        assert option.ignore_eos and option.flat_logprobs and option.logprobs == 0
        policy.generation_config.eos_token_id = option.stop_token_ids
        args = rloo.Args(seed=option.seed, temperature=option.temperature, max_new_tokens=option.max_tokens)
        drawn = rloo.rollout(policy, TOKENIZER, [tuple(request["prompt_token_ids"])], option.n, 0, args)
        samples = [
            SimpleNamespace(token_ids=y, logprobs=SimpleNamespace(logprobs=logps[:len(y)].tolist()))
            for y, logps in zip(drawn.groups[0][1], drawn.logps[0])]
        outputs.append(SimpleNamespace(outputs=samples))
    return outputs


def gap(history):
    return max(line["sampling/sampling_logp_difference/max"] for line in history[1:])


def with_adapter():
    return adapt("a whole head", modules_to_save=["lm_head"])


@parametrize("name, model", [
    ("vllm_rollouts", model_with_many_ends), ("grpo+vllm_rollouts", tiny),
    pytest.param("vllm_rollouts", with_adapter, marks=needs_peft)])
def test_vllm_samples_from_the_new_weights(engines, name, model):
    """The learning rate is high: samples of older weights would have other log-probs."""
    history, _ = run(name, model=model(), lr=3e-2, temperature=0.7)
    assert gap(history) < 1e-4 and history[1]["kl"] != history[3]["kl"]
    engine, = engines
    *calls, last = [name for name, *_ in engine.mock_calls]
    rollouts = 5  # an evaluation, three steps, an evaluation
    assert calls == rollouts * ["collective_rpc", "reset_prefix_cache", "generate"]
    assert last == "llm_engine.engine_core.shutdown"


def test_vllm_samples_are_a_function_of_seed_step_and_place(engines):
    def sample(seed, step):
        module = changed("vllm_rollouts")
        args = module.Args(model=tiny(), dtype="float32", seed=seed, max_new_tokens=6)
        (_, one), (_, two) = module.rollout(load(), TOKENIZER, [(5, 6)] * 2, 3, step, args).groups
        return one + two

    first = sample(0, 1)
    assert first == sample(0, 1) and len({*first, *sample(0, 2), *sample(1, 1)}) == 18


@SLOW
@pytest.mark.skipif(not find_spec("vllm"), reason="needs vllm 0.32: docs/change_it.md")
def test_real_vllm(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    for _ in range(2):  # a second run loads it again
        history, _ = run("vllm_rollouts", model=f"{ROOT}/demo/model", lr=1e-3, steps=3, max_new_tokens=32)
        assert gap(history) < 1e-4 and history[3]["kl"] > 1e-3
        assert history[3]["completions/clipped_ratio"] < 1
