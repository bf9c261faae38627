"""Patches of rloo.py: losses are those of a plain loop, samples those of the sampler."""
import sys
from functools import partial
from itertools import count
from math import nan
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from models import cases, ready
from runs import TOKENIZER, adapt, load, needs_peft
from slow_samples import BETA, LOSSES, add_logps, batch_of, many_ends
from test_changes import changed, run, watch
from test_rollout import PROMPTS
from torch import tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AutoConfig, AutoModelForCausalLM

import rloo

SCORES = tensor([[1.0, 0.0, 0.4], [2.0, nan, 1.0], [nan, 1.0, nan], [0.1, 0.1, 0.1]])


@cases("name, slow_loss, flags", LOSSES)
def test_loss_of_samples(monkeypatch, name, slow_loss, flags):
    module, reference, batch = changed(name), load(many_ends()), []

    def rollout(policy, *inputs, step, original=module.rollout, **options):
        samples = original(policy, *inputs, step=step, **options)
        if step > 1:  # as if another program had drawn them
            noise = torch.cos(torch.arange(samples.logps.numel())).view_as(samples.logps)
            samples = samples._replace(logps=(samples.logps + noise) * samples.mask)
        batch[:] = batch_of(samples, SCORES, policy, reference)
        return samples

    def loss_now(policy, *_):
        add_logps(policy, batch)
        return slow_loss(batch, **flags)

    monkeypatch.setattr(module, "rollout", rollout)
    monkeypatch.setattr(module, "compute_rewards", lambda *_: (SCORES, {}))
    norms = watch(monkeypatch, name, loss_now, "run_pairs" if "online_dpo" in name else "run_batch")
    history, _ = run(
        name, model=many_ends(), k=3, batch_size=4, max_new_tokens=6, updates_per_rollout=2,
        eval_data=None, beta=BETA, steps=2, tokens_per_forward=40, **flags)
    assert len(norms) == 4 and max(norms) > 1e-3
    if "online_dpo" not in name and flags.get("loss_type") != "gspo":
        assert max(values["clip_ratio"] for values in history[1:]) > 0


# --- vLLM

@pytest.fixture
def engines(monkeypatch):
    """Engines of a module that stands for vLLM: they sample from the weights that were sent."""
    engines = []

    def start(model, **_):
        policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval()
        engine = MagicMock()
        engine.collective_rpc = lambda _, kwargs: policy.load_state_dict(dict(kwargs["weights_iterator"]))
        engine.generate.side_effect = partial(generate, policy)
        engines.append(engine)
        return engine

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=start, SamplingParams=SimpleNamespace))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    return engines


def generate(policy, requests, options, use_tqdm):
    for request, option in zip(requests, options, strict=True):
        policy.generation_config.eos_token_id = option.stop_token_ids
        args = rloo.Args(seed=option.seed, temperature=option.temperature, max_new_tokens=option.max_tokens)
        drawn = rloo.rollout(policy, TOKENIZER, [tuple(request["prompt_token_ids"])], option.n, 0, args)
        outputs = []
        for y, logps in zip(drawn.groups[0][1], drawn.logps[0].tolist()):
            outputs.append(SimpleNamespace(token_ids=y, logprobs=SimpleNamespace(logprobs=logps[:len(y)])))
        yield SimpleNamespace(outputs=outputs)


def gap(history):
    return max(line["sampling/sampling_logp_difference/max"] for line in history[1:])


@cases("model", [
    many_ends,
    pytest.param(partial(adapt, "a whole head", modules_to_save=["lm_head"]), marks=needs_peft)])
def test_vllm_samples_from_the_new_weights(engines, model):
    """The learning rate is high: samples of older weights would have other log-probs."""
    history, _ = run("vllm_rollouts", model=model(), lr=3e-2, temperature=0.7)
    assert gap(history) < 1e-4 and history[1]["kl"] != history[3]["kl"]
    engine, = engines
    before, *steps, after = ([option.seed for option in call.args[1]] for call in engine.generate.mock_calls)
    assert before == after and len(set(sum(steps, before))) == 12  # each prompt has a seed of its own
    assert engine.reset_prefix_cache.call_count == 5
    engine.llm_engine.engine_core.shutdown.assert_called_once()


# --- CUDA graphs

def record(step):
    """A CUDA graph on a CPU. The step also runs while it is recorded, so the first replay is empty."""
    graph, replays = make_fx(step)(), count()
    return lambda: graph() if next(replays) else None


@cases("name, k, is_copied, stride", [
    ("llama", 4, False, 1), ("llama", 4, False, 12), ("llama", 8, True, 12), ("llama", 8, False, 5),
    ("gpt2", 8, True, 12), ("glm4-moe-buffer", 8, False, 12), ("mamba", 4, False, 1)])  # it has no mask
def test_graphs_draw_the_same_samples(monkeypatch, name, k, is_copied, stride):
    module, recorder = changed("cuda_graph"), MagicMock(side_effect=record)
    monkeypatch.setattr(module, "record", recorder)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    if stride > 1:
        monkeypatch.setattr(module, "tokens_per_graph", lambda _: stride)
    model = ready(name)
    model.generation_config.eos_token_id = [30, 31, 32]  # many ends

    args = rloo.Args(max_new_tokens=stride + 12, temperature=3.0)
    prompts = PROMPTS[::2] if is_copied else [*PROMPTS, (9,) * 99]  # shorter or longer than the samples
    one, other = (script.rollout(model, TOKENIZER, prompts, k, 1, args) for script in (rloo, module))
    assert one.groups == other.groups
    assert (one.logps - other.logps).abs().max() <= (1e-4 if stride > 1 else 0)
    assert recorder.called == (stride > 8)
