"""rloo.py: advantages and gradients by hand, rewards, training against a slow loop of two models, samples."""
import json
import math
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import SMALL, bad_input, logps, parametrize
from runs import FOLDER, ROOT, TOKENIZER, arguments, data, distance, read, tiny, weights_of, without_speed
from slow_losses import model_with_many_ends
from torch import tensor
from transformers import (
    AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForSequenceClassification)

import rloo
from rloo import (
    Args, RewardModel, Row, Samples, batch_rows, compute_rewards, leave_one_out, learning_rate, main, policy_loss,
    rollout)

DEMO = dict(model=str(ROOT / "demo/model"), max_new_tokens=12)
MODEL = model_with_many_ends()
NAN = math.nan
REWARDS = """
def vowels(completions, **columns):
    return [sum(x in "aeiou" for x in (y if isinstance(y, str) else y[-1]["content"])) / 10 for y in completions]

def constant(completions, **columns):
    return [0.7] * len(completions)

def silent(completions, **columns):
    return [None] * len(completions)

def infinite(completions, **columns):
    return [1.0, float("-inf")] + [0.0] * (len(completions) - 2)
"""


def vowels(text):
    return sum(x in "aeiou" for x in text) / 10


FILE = Path(FOLDER.name) / "rewards_of_test_rloo.py"
FILE.write_text(REWARDS)
FLAGS = dict(model=MODEL, reward=(f"{FILE}:vowels",), steps=2, batch_size=4, lr=1e-3, warmup=0.1, max_new_tokens=6)


def chat(text, role="user"):
    return [{"role": role, "content": text}]


@pytest.fixture(scope="module")
def rolled():
    """rolled(**changes) -> metrics, weights and samples of a run. Tests share runs with the same changes."""
    @cache
    def run(changes):
        args = arguments("rloo", **FLAGS | dict(changes))
        drawn = []

        def spy(*inputs):
            drawn.append(rollout(*inputs))
            return drawn[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rloo, "check_sampler", lambda *inputs: None)
            patch.setattr(rloo, "rollout", spy)
            history = without_speed(main(args))
        steps = [samples for samples in drawn if len(samples.groups[0][1]) > 1]
        out = Path(args.out)
        return SimpleNamespace(history=history, weights=weights_of(out / "model"), drawn=drawn, steps=steps, out=out)
    return lambda **changes: run(tuple(sorted(changes.items())))


# --- Advantages and loss, by hand

def test_advantages_by_hand():
    rewards = tensor([[10.0, 20.0, 60.0, NAN], [3.0, 3.0, 3.0, 3.0], [NAN, 5.0, NAN, NAN], [NAN] * 4, [NAN, 1, 4, NAN]])
    expected = [[-30, -15, 45, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, -3, 3, 0]]
    assert leave_one_out(rewards).tolist() == expected


def test_policy_loss_and_gradient_by_hand():
    ratios = tensor([1.0, 1.0, 1.0, 1.5, 1.5, 0.5, 0.5, 1.1, math.exp(100), math.exp(100)], dtype=torch.float64)
    advantages = tensor([1.5, -2.0, 0.0, 2.0, -2.0, 2.0, -2.0, 2.0, 1.0, 0.0])
    logps = ratios.log().float().requires_grad_()
    losses, is_clipped = policy_loss(logps, torch.zeros(10), advantages, 0.2)
    assert losses.tolist() == pytest.approx([-1.5, 2, 0, -2.4, 3, -1, 1.6, -2.2, -1.2, 0], abs=1e-4)
    losses.sum().backward()
    assert logps.grad.tolist() == pytest.approx([-1.5, 2, 0, 0, 3, -1, 0, -2.2, 0, 0], abs=1e-4)
    assert is_clipped.nonzero().flatten().tolist() == [3, 6, 8]  # where no gradient passes, but for advantage 0


# --- Rewards

def score(*functions, rows=({"prompt": "a"}, {"prompt": "b"})):
    """Rewards of the samples soup and tea of one prompt, bread and cake of another."""
    texts = [[" soup", " tea"], [" bread", " cake"]]
    groups = [((1,), [tuple(TOKENIZER(text).input_ids) for text in row]) for row in texts]
    samples = Samples(groups, texts, torch.ones(2, 2, 1), tensor([[True, False], [True, True]]), None, None)
    named = [(f"f{i}", function, weight) for i, (function, weight) in enumerate(functions)]
    return compute_rewards(samples, [Row((1,), dict(row)) for row in rows], named)


def test_rewards_are_weighted():
    total, means = score((lambda **c: [1.0, None, None, 4], 2.0), (lambda **c: [10, 20.0, None, None], 0.5))
    assert total.nan_to_num(-1).tolist() == [[7, 10], [-1, 8]]
    assert means == {"rewards/f0": 2.5, "rewards/f1": 15}


def test_columns_come_once_per_sample_and_functions_may_change_them():
    seen = []

    def wild(**columns):
        seen.append(deepcopy(columns))
        columns["prompts"][0][0]["content"] = "changed"
        columns["thing"][0].append("changed")
        assert columns["prompts"][1] == x and columns["thing"][1] == [1], "samples of a prompt share nothing"
        return [0.0] * 4

    x, z = chat("a"), chat("b")
    score((wild, 1.0), (wild, 1.0), rows=[dict(prompt=x, thing=[1]), dict(prompt=z, other=None)])
    texts = [" soup", " tea", " bread", " cake"]
    answers = [chat(text, "assistant") for text in texts]
    assert seen[0] == seen[1] == dict(
        prompts=[x, x, z, z], completions=answers, completion_ids=TOKENIZER(texts).input_ids,
        ended=[True, False, True, True], thing=[[1], [1], None, None], other=[None] * 4)


def test_constant_rewards_change_nothing(rolled):
    """Policy and reference sum the same numbers in the same order: Adam would make a whole step of their rounding."""
    still = rolled(reward=(f"{FILE}:constant",), beta=0.05, tokens_per_forward=200)
    assert [values["grad_norm"] for values in still.history[1:]] == [0, 0]
    assert [values["kl"] for values in still.history[1:]] == [0, 0]
    assert distance(still, SimpleNamespace(weights=weights_of(MODEL))) == 0


@parametrize("changes, words", [
    (dict(reward=()), "--reward"), (dict(reward_weights=(1.0, 1.0)), "--reward_weights"),
    (dict(max_new_tokens=256), "longer than 0 tokens"),
    (dict(reward=(f"{FILE}:infinite",)), "rewards are infinite, or all None"),
    (dict(reward=(f"{FILE}:silent",)), "rewards are infinite, or all None"),
    (dict(reward=(f"{FILE}:vowel",)), "FILE.py:FUNCTION")])
def test_misuse_and_bad_rewards_are_refused(changes, words):
    with bad_input(words):
        main(arguments("rloo", **FLAGS | changes))


# --- Reward models

IMAGES = AutoConfig.for_model(  # the configuration of the text lies inside another
    "gemma3", text_config=dict(SMALL, vocab_size=len(TOKENIZER), head_dim=8, pad_token_id=7), num_labels=1,
    vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=14))


def classifier(path, config=None, **changes):
    torch.manual_seed(0)
    config = config or AutoConfig.from_pretrained(tiny(), **dict(num_labels=1) | changes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return str(path)


@parametrize("changes", [dict(pad_token_id=0), dict(pad_token_id=None), dict(config=IMAGES)])
def test_reward_model_equals_one_forward_per_text(tmp_path, changes):
    path = classifier(tmp_path, **changes)
    prompts = [chat(f"How was the soup? {n}") for n in range(6)]
    answers = [chat("The soup was nice. " * (n + 1), "assistant") for n in range(6)]
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    rows = [TOKENIZER.apply_chat_template(x + y, return_dict=False) for x, y in zip(prompts, answers)]
    truth = [model(tensor([ids])).logits.item() for ids in rows]
    for budget in (1, 120, 10**6):
        judge = RewardModel(path, "cpu", Args(tokens_per_forward=budget))
        assert judge(prompts, answers, [True] * 6) == pytest.approx(truth, abs=1e-5)


def test_reward_model_sees_no_end_that_was_cut_off(rolled, tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    file.write_text((json.dumps(dict(prompt=chat("How was the soup at the harbour?"))) + "\n") * 4)
    seen = []
    original = LlamaForSequenceClassification.forward

    def forward(self, input_ids, attention_mask):
        seen.extend(TOKENIZER.decode(ids[mask.bool()]) for ids, mask in zip(input_ids, attention_mask))
        return original(self, input_ids, attention_mask)

    monkeypatch.setattr(LlamaForSequenceClassification, "forward", forward)
    flags = dict(data=str(file), eval_data=str(file), reward=(), reward_model=classifier(tmp_path / "judge"), steps=1)
    one = rolled(**flags, **DEMO)
    assert 0 < torch.cat([samples.ended.flatten() for samples in one.drawn]).float().mean() < 1
    sampled = [TOKENIZER.decode(x + y) for samples in one.drawn for x, ys in samples.groups for y in ys]
    assert sorted(seen) == sorted(sampled)


def test_bad_reward_models_are_refused(tmp_path):
    with bad_input("no weights for score"):
        RewardModel(tiny(), "cpu", Args())
    with bad_input("2 outputs"):
        RewardModel(classifier(tmp_path / "two", num_labels=2), "cpu", Args())


def test_out_of_memory_in_a_rollout_names_its_flag(monkeypatch):
    def decode(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rloo, "decode", decode)
    with bad_input("--rollout_tokens"):
        main(arguments("rloo", **FLAGS))


# --- Training

def sums(model, groups, temperature):
    """log π of every sample, (B, k)."""
    rows = logps(model, [(prompt, y) for prompt, ys in groups for y in ys], temperature)
    return torch.stack([y.sum() for y in rows]).view(len(groups), -1)


@parametrize("changes", [
    dict(updates_per_rollout=2, temperature=0.8, mask_truncated=True) | DEMO, dict()], ids=str)
def test_training_equals_a_slow_loop(rolled, changes):
    one = rolled(**changes)
    args = replace(Args(lr=1e-3), **changes)
    policy, reference = (AutoModelForCausalLM.from_pretrained((FLAGS | changes)["model"]) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for step, samples in enumerate(one.steps, 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step, 2, args)
        with torch.no_grad():
            old, ref = (sums(model, samples.groups, args.temperature) for model in (policy, reference))
        for _ in range(args.updates_per_rollout):
            loss = 0
            new = sums(policy, samples.groups, args.temperature)
            for b, (_, ys) in enumerate(samples.groups):
                total = {}
                for i, y in enumerate(ys):
                    if samples.ended[b, i] or not args.mask_truncated:
                        reward = vowels(TOKENIZER.decode(y, skip_special_tokens=True))
                        total[i] = reward - args.beta * (old[b][i] - ref[b][i])
                for i in total if len(total) > 1 else ():
                    ratio = (new[b][i] - old[b][i]).exp()
                    advantage = total[i] - sum(total[j] for j in total if j != i) / (len(total) - 1)
                    loss = loss - torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / 16
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        kl = (old - ref).sum()
        assert loss.item() == pytest.approx(one.history[step]["loss"], abs=1e-3)
        assert kl / samples.mask.sum() == pytest.approx(one.history[step]["kl"], abs=1e-3)
    assert any(0 < values["completions/clipped_ratio"] < 1 for values in one.history[1:])
    assert (max(values["clip_ratio"] for values in one.history[1:]) > 0) == (args.updates_per_rollout > 1)
    gaps = torch.cat([(p - one.weights[name]).abs().flatten() for name, p in policy.named_parameters()])
    # but for a few: where a gradient is 1e-8, Adam makes a whole step of its rounding
    assert gaps.topk(20).values[-1] < 1e-4


def test_memory_flags_change_no_sample_and_no_result(rolled):
    one = rolled()
    other = rolled(tokens_per_forward=60, gradient_checkpointing="on", rollout_tokens=1)
    assert [samples.groups for samples in one.steps] == [samples.groups for samples in other.steps]
    for values, others in zip(one.history, other.history):
        assert values == pytest.approx(others, abs=1e-4)
    assert distance(one, other) < 2e-5


# --- Samples and files

def test_metrics_by_hand_and_what_the_files_hold(rolled):
    one = rolled(steps=3, eval_every=2)
    written = read(one.out / "samples.jsonl")
    assert without_speed(read(one.out / "metrics.jsonl")) == one.history
    assert ["eval_reward" in values for values in one.history] == [True, False, True, True]
    assert sum(line["held_out"] for line in written) == 3 * 3
    rows = read(data("rloo")[0])
    for step, drawn in enumerate(one.steps, 1):
        ys = [y for _, group in drawn.groups for y in group]
        texts = TOKENIZER.batch_decode(ys, skip_special_tokens=True)
        scores = list(map(vowels, texts))
        prompts = [row["prompt"] for row in batch_rows(step, rows, 4, 0) for _ in range(4)]
        lines = [line for line in written if line["step"] == step and not line["held_out"]]
        assert [(line["prompt"], line["completion"]) for line in lines] == list(zip(prompts, texts))
        assert [line["reward"] for line in lines] == pytest.approx(scores)
        lengths = list(map(len, ys))
        expected = {
            "reward": np.mean(scores), "reward_std": np.std(scores, ddof=1), "rewards/vowels": np.mean(scores),
            "completions/mean_length": np.mean(lengths),
            "completions/clipped_ratio": 1 - drawn.ended.float().mean().item(),
            "entropy": drawn.entropy.sum().item() / sum(lengths),
            "frac_reward_zero_std": np.mean([len(set(scores[b * 4:b * 4 + 4])) == 1 for b in range(4)])}
        assert {name: one.history[step][name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_standard_deviations_need_two_scored_samples_and_equal_texts_count_once():
    texts = [["a", "b"], ["b", "c"], ["a", "a"], ["", "a"]]
    samples = Samples(None, texts, torch.ones(4, 2, 3), torch.ones(4, 2), None, entropy=torch.ones(4, 2))
    values = rloo.metrics(samples, tensor([[1.0, NAN], [2.0, 2.0], [NAN, NAN], [1.0, 3.0]]))
    assert values["frac_reward_zero_std"] == 0.25
    assert values["reward_std"] == pytest.approx(np.std([1, 2, 2, 1, 3], ddof=1))
    assert values["samples/distinct"] == 4
    assert rloo.metrics(samples, tensor([[2.0]]))["reward_std"] == 0


def test_sampling_logp_difference(monkeypatch):
    def another_sampler(*inputs):
        samples = rollout(*inputs)
        samples.logps[0, 0, 0] += 0.5
        return samples

    monkeypatch.setattr(rloo, "check_sampler", lambda *inputs: None)
    monkeypatch.setattr(rloo, "rollout", another_sampler)
    values = main(arguments("rloo", **FLAGS | dict(steps=1, updates_per_rollout=2)))[1]
    mean, largest = (values[f"sampling/sampling_logp_difference/{name}"] for name in ("mean", "max"))
    assert largest == pytest.approx(0.5, abs=1e-4)
    assert mean * values["completions/mean_length"] * 16 == pytest.approx(0.5, abs=1e-3)


def test_steps_0_only_evaluates(rolled):
    none = rolled(steps=0)
    assert [values["step"] for values in none.history] == [0]
    assert none.history[0].keys() >= {"eval_reward", "eval_kl"}
    assert not (none.out / "model").exists()
    assert "kl" not in rolled(beta=0.0, sync_reference=1).history[2]
