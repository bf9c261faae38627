"""Patches of rloo.py: loss and gradient equal those of a plain loop over samples."""
import sys
from importlib.util import find_spec
from math import nan
from types import ModuleType, SimpleNamespace

import pytest
import torch
from models import logps, parametrize
from runs import ROOT, TOKENIZER, adapt, load, needs_peft, tiny
from slow_losses import model_with_many_ends
from slow_samples import FORMULAS
from test_changes import SLOW, changed, run, watch
from torch import tensor
from transformers import AutoConfig, AutoModelForCausalLM

import rloo

SCORES = tensor([[1.0, 0.0, 0.4], [2.0, nan, 1.0], [nan, 1.0, nan], [0.1, 0.1, 0.1]])


def watch_samples(monkeypatch, name, formula):
    """watch() of the samples of a run, which get SCORES."""
    module, reference, known = changed(name), load(model_with_many_ends()), {}
    rollout = module.rollout

    def watched_rollout(policy, tokenizer, prompts, k, step, args):
        samples = rollout(policy, tokenizer, prompts, k, step, args)
        if step > 1:
            noise = torch.cos(torch.arange(samples.logps.numel())).view(samples.logps.shape)
            samples = samples._replace(logps=(samples.logps + noise) * samples.mask)
        rewards = torch.where(samples.ended, SCORES, nan).flatten().tolist()  # --mask_truncated
        rows = [(prompt, y) for prompt, ys in samples.groups for y in ys]
        with torch.no_grad():
            olds, refs = logps(policy, rows), logps(reference, rows)
        known.update({prompt: [] for prompt, _ in samples.groups})
        samplers = samples.logps.flatten(0, 1)
        for (prompt, y), sampler, old, ref, reward in zip(rows, samplers, olds, refs, rewards):
            sample = SimpleNamespace(tokens=y, sampler=sampler[:len(y)], old=old, ref=ref, reward=reward)
            known[prompt].append(sample)
        return samples

    def slow_loss(policy, samples, *_):
        batch = [known[prompt] for prompt, _ in samples.groups]
        rows = [(prompt, y.tokens) for prompt, _ in samples.groups for y in known[prompt]]
        for y, logp in zip(sum(batch, []), logps(policy, rows)):
            y.logp = logp
        return formula(batch)

    monkeypatch.setattr(module, "rollout", watched_rollout)
    monkeypatch.setattr(module, "compute_rewards", lambda *_: (SCORES, {}))
    return watch(monkeypatch, name, slow_loss, "run_pairs" if "online_dpo" in name else "run_batch")


SIZES = dict(k=3, batch_size=4, max_new_tokens=6, mask_truncated=True, updates_per_rollout=2, eval_data=None,
             eval_size=0, beta=0.3, steps=2)


@parametrize("name, flags, formula", FORMULAS)
def test_loss_of_samples(monkeypatch, name, flags, formula):
    losses = watch_samples(monkeypatch, name, formula)
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


# --- vLLM: a module that stands for it, which draws from the weights it was sent

class LLM:
    engines = []

    def __init__(self, model, load_format, logprobs_mode, max_model_len, **_):
        assert (load_format, logprobs_mode, max_model_len) == ("dummy", "processed_logprobs", -1)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval()
        core = SimpleNamespace(shutdown=lambda: self.calls.append("shutdown"))
        self.llm_engine = SimpleNamespace(engine_core=core)
        self.calls = []
        self.reset_prefix_cache = lambda: self.calls.append("reset_prefix_cache")
        LLM.engines.append(self)

    def collective_rpc(self, name, kwargs):
        self.calls.append(name)
        weights = {name: weight.clone() for name, weight in kwargs["weights_iterator"]}
        self.model.load_state_dict(weights, strict=True)

    def generate(self, requests, options, use_tqdm):
        self.calls.append("generate")
        outputs = []
        for request, option in zip(requests, options, strict=True):
            assert option.ignore_eos and option.flat_logprobs and option.logprobs == 0
            self.model.generation_config.eos_token_id = option.stop_token_ids
            args = rloo.Args(
                seed=option.seed, temperature=option.temperature, max_new_tokens=option.max_tokens)
            prompts = [tuple(request["prompt_token_ids"])]
            drawn = rloo.rollout(self.model, TOKENIZER, prompts, option.n, 0, args)
            samples = []
            for y, scores in zip(drawn.groups[0][1], drawn.logps[0]):
                logprobs = SimpleNamespace(logprobs=scores[:len(y)].tolist())
                samples.append(SimpleNamespace(token_ids=list(y), logprobs=logprobs))
            outputs.append(SimpleNamespace(outputs=samples))
        return outputs


@pytest.fixture
def fake_vllm(monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    changed("vllm_rollouts").load_engine.cache_clear()
    LLM.engines.clear()


def gap(history):
    return max(line["sampling/sampling_logp_difference/max"] for line in history[1:])


def with_adapter():
    return adapt("a whole head", modules_to_save=["lm_head"])


@parametrize("name, model", [
    ("vllm_rollouts", model_with_many_ends), ("grpo+vllm_rollouts", tiny),
    pytest.param("vllm_rollouts", with_adapter, marks=needs_peft)])
def test_vllm_samples_from_the_new_weights(fake_vllm, name, model):
    """The learning rate is high: samples of older weights would have other log-probs."""
    history, _ = run(name, model=model(), lr=3e-2, temperature=0.7)
    assert gap(history) < 1e-4 and history[1]["kl"] != history[3]["kl"]
    steps = 5  # an evaluation, three steps, an evaluation
    calls, = [engine.calls for engine in LLM.engines]
    assert calls == steps * ["reload_weights", "reset_prefix_cache", "generate"] + ["shutdown"]


def test_vllm_samples_are_a_function_of_seed_step_and_place(fake_vllm):
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
