"""Patches of rloo.py: loss and gradient are those of a plain loop over samples. Other samplers draw from the policy."""
import sys
from importlib.util import find_spec
from inspect import getclosurevars
from math import isnan, nan
from types import ModuleType, SimpleNamespace

import pytest
import torch
from models import logps, parametrize, ready
from runs import ROOT, TOKENIZER, adapt, load, needs_peft, tiny
from slow_losses import model_with_many_ends
from slow_samples import FORMULAS, ppo, tokens_of
from test_changes import SLOW, changed, run, watch
from test_rollout import PROMPTS, TOKENIZER as WITHOUT_TEXTS
from torch import tensor
from transformers import AutoConfig, AutoModelForCausalLM

import rloo
from refcache import has_shared_prompts

SCORES = tensor([[1.0, 0.0, 0.4], [2.0, nan, 1.0], [nan, 1.0, nan], [0.0, 0.0, 0.0]])  # one scored sample; a tie


def watch_samples(monkeypatch, name, formula):
    """watch() of the samples of a run, which get SCORES. Returns them: {prompt: [sample, ..]}."""
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
        for (prompt, y), sampler, old, ref, reward in zip(rows, samples.logps.flatten(0, 1), olds, refs, rewards):
            known[prompt].append(SimpleNamespace(tokens=y, sampler=sampler[:len(y)], old=old, ref=ref, reward=reward))
        return samples

    def slow_loss(policy, samples, *_):
        batch = [known[prompt] for prompt, _ in samples.groups]
        rows = [(prompt, y.tokens) for prompt, _ in samples.groups for y in known[prompt]]
        for y, logp in zip(sum(batch, []), logps(policy, rows)):
            y.logp = logp
        return formula(batch)

    monkeypatch.setattr(module, "rollout", watched_rollout)
    monkeypatch.setattr(module, "compute_rewards", lambda *_: (SCORES, {}))
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
    """V begins at 0. Matrices alone decay."""
    losses, known = watch_samples(monkeypatch, "value_baseline", ppo)
    seen, groups, step = [], [], torch.optim.AdamW.step

    def slow_critic(critic, samples, returns, args):
        total = 0
        for prompt, _ in samples.groups:
            for y in known[prompt]:
                values = critic(tensor([prompt + y.tokens])).logits[0, len(prompt) - 1:-1, 0]
                if returns is None:
                    y.values = values.tolist()
                    seen.extend(y.values)
                elif not isnan(y.reward):
                    total = total + ((values - tensor(y.returns)) ** 2).sum() / 2
        return None if returns is None else total / tokens_of(known[prompt] for prompt, _ in samples.groups)

    def watched_step(optimizer, closure=None):
        groups[:] = [(group["lr"], group["weight_decay"], {weight.dim() > 1 for weight in group["params"]})
                     for group in optimizer.param_groups]
        step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched_step)
    critic_losses = watch(monkeypatch, "value_baseline", slow_critic, "run_critic")
    run("value_baseline", model=model_with_many_ends(), weight_decay=0.5, critic_lr=4.0, schedule="constant", **SIZES)
    assert len(losses) == len(critic_losses) == 4 and critic_losses[1] < critic_losses[0]
    assert groups == [(lr, decay, {decay > 0}) for lr in (3e-3, 4 * 3e-3) for decay in (0.5, 0.0)]
    assert not any(seen[:12]) and any(seen)


# --- CUDA graphs

REPETITIONS = []  # of each recorded step


def record_with_fixed_addresses(core, step):
    """record() on a CPU: repeats the step. A graph would use the old addresses of tensors."""
    def addresses():
        cells = getclosurevars(step).nonlocals
        cells |= getclosurevars(cells["sample"]).nonlocals | cells["inputs"]
        for i, layer in enumerate(cells["kv_cache"].layers):
            cells |= {f"keys {i}": layer.keys, f"values {i}": layer.values}
        return {name: (x.data_ptr(), x.shape) for name, x in cells.items() if isinstance(x, torch.Tensor)}

    def repeat():
        step()
        REPETITIONS[-1] += 1
        assert addresses() == before

    before = addresses()
    assert {"rows", "scores", "place", "input_ids", "keys 0"} <= before.keys()
    REPETITIONS.append(0)
    repeat()
    return repeat


@parametrize("name", ["llama", "gpt2", "mistral-window-5", "gemma3-window-6"])
def test_recorded_steps_stay_at_their_addresses(name, monkeypatch):
    """The tokens are those of rloo.py. A wrong graph is not used."""
    module, model = changed("cuda_graph"), ready(name)
    model.generation_config.eos_token_id = [2, 3, 4, 5, 6]  # half of the rows end soon
    inputs = model, WITHOUT_TEXTS, PROMPTS, 6, 1, module.Args(dtype="float32", max_new_tokens=50)
    plain = rloo.rollout(*inputs)

    REPETITIONS.clear()
    monkeypatch.setattr(module, "EAGER", set())
    monkeypatch.setattr(module, "can_record", lambda core: has_shared_prompts(core) and not module.EAGER)
    monkeypatch.setattr(module, "record", record_with_fixed_addresses)
    recorded = module.rollout(*inputs)
    assert recorded.groups == plain.groups and (recorded.logps - plain.logps).abs().max() < 1e-3
    assert len(REPETITIONS) > 1 and max(REPETITIONS) > 10

    module.check_graph(model, WITHOUT_TEXTS, inputs[-1])
    assert not module.EAGER
    monkeypatch.setattr(module.FixedLayer, "update", lambda layer, *_, **__: (layer.keys, layer.values))
    module.check_graph(model, WITHOUT_TEXTS, inputs[-1])
    assert module.EAGER == {type(model)} and module.rollout(*inputs).groups == plain.groups


# --- vLLM: a module that stands for it, which draws from the weights it was sent

class LLM:
    engines = []

    def __init__(self, model, load_format, logprobs_mode, max_model_len, **_):
        assert (load_format, logprobs_mode, max_model_len) == ("dummy", "processed_logprobs", -1)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval()
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: self.calls.append("shutdown")))
        self.calls = []
        self.reset_prefix_cache = lambda: self.calls.append("reset_prefix_cache")
        LLM.engines.append(self)

    def collective_rpc(self, name, kwargs):
        self.calls.append(name)
        self.model.load_state_dict({name: weight.clone() for name, weight in kwargs["weights_iterator"]}, strict=True)

    def generate(self, requests, options, use_tqdm):
        self.calls.append("generate")
        outputs = []
        for request, option in zip(requests, options, strict=True):
            assert option.ignore_eos and option.flat_logprobs and option.logprobs == 0 and not option.detokenize
            self.model.generation_config.eos_token_id = option.stop_token_ids
            args = rloo.Args(seed=option.seed, temperature=option.temperature, max_new_tokens=option.max_tokens)
            drawn = rloo.rollout(self.model, TOKENIZER, [tuple(request["prompt_token_ids"])], option.n, 0, args)
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


@parametrize("name, model", [
    ("vllm_rollouts", model_with_many_ends), ("grpo+vllm_rollouts", tiny),
    pytest.param("vllm_rollouts", lambda: adapt("a whole head", modules_to_save=["lm_head"]), marks=needs_peft),
    *(pytest.param(f"{name}+vllm_rollouts", tiny, marks=SLOW) for name in ("tis", "mini_batches", "value_baseline"))])
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
