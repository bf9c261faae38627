"""rloo.py: advantages and gradients by hand, rewards, training against a slow loop, samples."""
import asyncio
import math
import sys
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import bad_input, parametrize
from rewards import letter_sum
from runs import REWARDS, ROOT, TOKENIZER, arguments, data, distance, read, run, tiny, weights_of, without_speed
from slow_losses import model_with_many_ends
from slow_samples import BETA, add_logps, batch_of
from torch import tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import rloo
import slow_samples
from rloo import (
    Args, Row, Samples, compute_rewards, leave_one_out, learning_rate, load_reward_model, main, policy_loss, rollout,
    rows_in_order)

MODEL = model_with_many_ends()
NAN = math.nan
FLAGS = dict(model=MODEL, steps=2, batch_size=4, lr=1e-3, warmup=0.1)


def texts_of(samples):
    """k texts per prompt."""
    return [[TOKENIZER.decode(y, skip_special_tokens=True) for y in ys] for _, ys in samples.groups]


def chat(text, role="user"):
    return [{"role": role, "content": text}]


def rolled(**changes):
    """A run and the samples of its steps. Equal runs are made only once."""
    steps = []

    def spy(*inputs, k, **options):
        samples = rollout(*inputs, k=k, **options)
        if k > 1:  # no evaluation
            steps.append(samples)
        return samples

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rloo, "rollout", spy)
        one = run("rloo", **FLAGS | changes)
    vars(one).setdefault("steps", steps)
    return one


# --- Advantages and loss, by hand

def test_advantages_by_hand():
    rewards = tensor([[10.0, 20.0, 60.0, NAN], [3.0, 3.0, 3.0, 3.0], [NAN, 5.0, NAN, NAN], [NAN] * 4, [NAN, 1, 4, NAN]])
    expected = [[-30, -15, 45, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, -3, 3, 0]]
    assert leave_one_out(rewards).tolist() == expected


def test_equal_rewards_have_advantages_of_exactly_0():
    rewards = torch.rand(100, 1).repeat(1, 7)
    assert not leave_one_out(rewards).any()
    rewards = tensor([[0.1, 0.1, NAN], [NAN, NAN, NAN], [0.1, 0.2, 0.1]])
    assert rloo.all_rewards_equal(rewards).tolist() == [True, True, False]


def test_policy_loss_and_gradient_by_hand():
    ratios = tensor([1, 1.5, 1.5, 0.5, 0.5, math.exp(100), math.exp(100)], dtype=torch.float64)
    advantages = tensor([-2.0, 2.0, -2.0, 2.0, -2.0, 1.0, 0.0])
    logps = ratios.log().float().requires_grad_()
    losses, is_clipped = policy_loss(logps, torch.zeros(7), advantages, 0.2)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([2, -2.4, 3, -1, 1.6, -1.2, 0], abs=1e-4)
    assert logps.grad.tolist() == pytest.approx([2, 0, 3, -1, 0, 0, 0], abs=1e-4)
    assert is_clipped.nonzero().flatten().tolist() == [1, 4, 5]  # where no gradient passes, but for advantage 0


# --- Rewards

def score(*functions, rows=({"prompt": "a"}, {"prompt": "b"})):
    """Rewards of the samples soup and tea of one prompt, bread and cake of another."""
    texts = [[" soup", " tea"], [" bread", " cake"]]
    groups = [((1,), [tuple(TOKENIZER(text).input_ids) for text in row]) for row in texts]
    samples = Samples(groups, texts, torch.ones(2, 2, 1), tensor([[True, False], [True, True]]), None, None)
    named = [(f"f{i}", function, weight) for i, (function, weight) in enumerate(functions)]
    return compute_rewards(samples, [Row((1,), dict(row)) for row in rows], named)


def test_rewards_are_weighted():
    """Also those of a coroutine, and a generator."""
    async def later(**columns):
        return (reward for reward in (10, 20.0, None, None))

    total, means = score((lambda **columns: tensor([1, NAN, NAN, 4]), 2.0), (later, 0.5))
    assert total.nan_to_num(-1).tolist() == [[7, 10], [-1, 8]]
    assert means == {"rewards/f0": 2.5, "rewards/f1": 15}


def test_coroutines_share_an_event_loop():
    """Also in a notebook, which runs a loop of its own."""
    loops = set()

    async def judge(**columns):
        loops.add(asyncio.get_running_loop())
        return [1.0] * 4

    async def notebook():
        score((judge, 1.0), (judge, 1.0))

    asyncio.run(notebook())
    assert len(loops) == 1


def test_reward_files_of_one_name_are_two_modules(tmp_path):
    """Also beside a module that is loaded. A process pool finds a function by the name of its module."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "json.py").write_text(f"def f():\n    return '{folder}'\n\ndef g():\n    pass")
    specs = tuple(f"{tmp_path}/{name}" for name in ("one/json.py:f", "one/json.py:g", "two/json.py:f"))
    args = Args(reward=specs, reward_weights=(3.0, 1.0, 2.0))

    names, functions, weights = zip(*rloo.load_rewards("cpu", args))
    assert len(set(names)) == 3  # each has a metric
    assert weights == args.reward_weights
    assert functions[0]() == "one" and functions[2]() == "two"
    for function in functions:
        assert vars(sys.modules[function.__module__])[function.__name__] is function
    assert sys.modules["json"].dumps


def test_reward_file_is_read_anew_and_may_import_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # a cache of bytecode would be old
    (tmp_path / "beside.py").write_text("SCALE = 100")
    for value in (1, 2):
        (tmp_path / "rule.py").write_text(f"from beside import SCALE\n\ndef f():\n    return {value} * SCALE")
        assert rloo.load_module(f"{tmp_path}/rule.py").f() == value * 100


def test_each_sample_has_columns_of_its_own():
    """If a reward changes them, neither the other samples of a prompt see that, nor the next step."""
    def reward(**columns):
        seen.append(deepcopy(columns))
        for prompt in columns["prompts"]:
            prompt.append("more")
        return list(map(len, columns["prompts"]))

    seen = []
    x, z = chat("a"), chat("b")
    rows = [dict(prompt=x, thing=[1]), dict(prompt=z, thing=None)]
    texts = [" soup", " tea", " bread", " cake"]
    for _ in range(2):
        assert score((reward, 1.0), rows=rows)[0].tolist() == [[2, 2], [2, 2]]
        assert seen.pop() == dict(
            prompts=[x, x, z, z], completions=[chat(text, "assistant") for text in texts], thing=[[1], [1], None, None],
            completion_ids=TOKENIZER(texts).input_ids, ended=[True, False, True, True])


@parametrize("value", [dict.fromkeys(range(4), 1.0), {1, 2, 3, 4}, "1234", [1.0], [0.0] * 8], ids=str)
def test_what_is_no_list_of_numbers_is_refused(value):
    with bad_input("f1 returned .*: expected 4 numbers or None"):
        score((lambda **columns: [0.0] * 4, 1.0), (lambda **columns: value, 1.0))


def test_step_without_any_reward_trains_nothing():
    """Neither does Adam's momentum."""
    one, two = (rolled(reward=(f"{REWARDS}:silent_at_step_2",), steps=steps, schedule="constant") for steps in (1, 2))
    assert [values["frac_reward_none"] for values in two.history[1:]] == [0, 1]
    assert math.isnan(two.history[2]["reward"]) and distance(one, two) == 0 < one.history[1]["grad_norm"]


@parametrize("changes, words", [
    (dict(reward=()), "--reward"), (dict(reward_weights=(1.0, 1.0)), "--reward_weights"),
    (dict(max_new_tokens=256), "the model has 256 positions"),
    (dict(reward=("nothing.py:f",)), "expected FILE.py:FUNCTION"),
    (dict(reward=(f"{REWARDS}:infinite",)), "infinite returned an infinite reward")])
def test_misuse_is_refused_before_the_policy_is_loaded(changes, words, monkeypatch):
    monkeypatch.setattr(rloo, "load_model", None)
    with bad_input(words):
        main(arguments("rloo", **FLAGS | changes))


# --- Reward models

def classifier(path, **changes):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny(), **dict(num_labels=1) | changes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    (path / "chat_template.jinja").write_text("{{ tools[0].name if tools }}" + TOKENIZER.chat_template)
    return str(path)


@parametrize("pad_token_id", [0, None])
def test_reward_model_equals_one_forward_per_text(tmp_path, pad_token_id):
    """A text ends with EOS if the sample has ended. A sample that is too long gets no reward."""
    path = classifier(tmp_path, pad_token_id=pad_token_id)
    question, answer, rest = chat("Soup?"), chat("Good.", "assistant"), chat(" tea.", "assistant")
    begun = question + chat("The", "assistant")
    cases = [  # prompt, completion, ended, tools, text
        ("Soup?", " Good.", True, None, "Soup? Good.<|end|>"),
        ("Soup?", " Good.", False, None, "Soup? Good."),
        (question, chat("Good. " * 100, "assistant"), True, None, None),
        (question, answer, True, [dict(name="look")], "look<|user|>Soup?<|end|><|assistant|>Good.<|end|>"),
        (question, answer, False, None, "<|user|>Soup?<|end|><|assistant|>Good."),
        (begun, rest, True, None, "<|user|>Soup?<|end|><|assistant|>The tea.<|end|>"),
        (begun, rest, False, None, "<|user|>Soup?<|end|><|assistant|>The tea."),
    ]
    *columns, tools, texts = zip(*cases)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    truth = [model(tensor([TOKENIZER(text).input_ids])).logits.item() if text else NAN for text in texts]
    for budget in (1, 40, 10**6):
        judge = load_reward_model(path, "cpu", Args(tokens_per_forward=budget))
        assert judge(*columns, tools=tools) == pytest.approx(truth, abs=1e-5, nan_ok=True)


def test_bad_reward_models_are_refused(tmp_path):
    for name in (tiny(), classifier(tmp_path / "two", num_labels=2)):
        with bad_input(f"{name} is no classifier with one output, or lacks weights"):
            load_reward_model(name, "cpu", Args())


# --- Training

@parametrize("changes", [
    dict(model=f"{ROOT}/demo/model", max_new_tokens=12, updates_per_rollout=2, temperature=0.8, mask_truncated=True),
    dict(ref="live", ref_model=tiny(1), tokens_per_forward=60, rollout_tokens=60, gradient_checkpointing=True)])
def test_training_equals_a_slow_loop(changes):
    one = rolled(beta=BETA, **changes)
    args = replace(Args(lr=1e-3), **changes)
    begin = (FLAGS | changes)["model"]
    policy, reference = map(AutoModelForCausalLM.from_pretrained, (begin, changes.get("ref_model", begin)))
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for step, samples in enumerate(one.steps, 1):
        rewards = tensor([list(map(letter_sum, texts)) for texts in texts_of(samples)])
        if args.mask_truncated:
            rewards = rewards.where(samples.ended, NAN)
        batch = batch_of(samples, rewards, policy, reference, args.temperature)
        optimizer.param_groups[0]["lr"] = learning_rate(step, 2, args)
        for _ in range(args.updates_per_rollout):
            add_logps(policy, batch, args.temperature)
            loss = slow_samples.rloo(batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        kl = torch.cat([y.old - y.ref for prompt in batch for y in prompt])
        assert loss.item() == pytest.approx(one.history[step]["loss"], abs=1e-3)
        assert kl.mean().item() == pytest.approx(one.history[step]["kl"], abs=1e-3)
    assert any(0 < values["completions/clipped_ratio"] < 1 for values in one.history[1:])
    assert (max(values["clip_ratio"] for values in one.history[1:]) > 0) == (args.updates_per_rollout > 1)
    gaps = torch.cat([(p - one.weights[name]).abs().flatten() for name, p in policy.named_parameters()])
    # but for a few: where a gradient is 1e-8, Adam makes a whole step of its rounding
    assert gaps.topk(20).values[-1] < 1e-4


# --- Samples and files

def test_files_hold_the_samples_and_metrics_of_the_run():
    one = rolled(steps=3, eval_every=2)
    assert without_speed(read(one.out / "metrics.jsonl")) == one.history
    assert ["eval_reward" in values for values in one.history] == [True, False, True, True]
    lines = read(one.out / "samples.jsonl")
    assert [line["step"] for line in lines if line["held_out"]] == [0] * 3 + [2] * 3 + [3] * 3

    expected = []
    rows = iter(rows_in_order(read(data("rloo")[0]), 12, 0))
    for step, samples in enumerate(one.steps, 1):
        for texts in texts_of(samples):
            of_prompt = dict(step=step, held_out=False, prompt=next(rows)["prompt"])
            expected += [of_prompt | dict(completion=text, reward=pytest.approx(letter_sum(text))) for text in texts]
        mean = np.mean([letter_sum(text) for texts in texts_of(samples) for text in texts])
        assert one.history[step]["reward"] == one.history[step]["rewards/letters"] == pytest.approx(mean)
    assert [line for line in lines if not line["held_out"]] == expected


def test_metrics_by_hand():
    """Equal texts count once."""
    mask = tensor([[[1, 1, 1], [1, 0, 0]]] * 2)
    ended = tensor([[True, False], [True, True]])
    samples = Samples(None, [["a", "b"], ["b", ""]], mask, ended, None, entropy=torch.full((2, 2), 3.0))
    rewards, logps = tensor([[1.0, NAN], [2.0, 6.0]]), -0.25 * mask
    assert rloo.metrics(samples, rewards, logps, 2 * logps, Args()) == pytest.approx({
        "reward": 3, "reward_std": np.std([1, 2, 6], ddof=1), "frac_reward_none": 0.25, "samples/distinct": 3,
        "completions/mean_length": 2, "completions/clipped_ratio": 0.25, "entropy": 1.5, "kl": 0.25})
    assert rloo.metrics(samples, tensor([[2.0]]), logps, logps, Args())["reward_std"] == 0


def test_sampling_logp_difference(monkeypatch):
    def another_sampler(*inputs, **options):
        samples = rollout(*inputs, **options)
        samples.logps[0, 0, 0] += 0.02
        return samples

    monkeypatch.setattr(rloo, "rollout", another_sampler)
    values = main(arguments("rloo", **FLAGS | dict(steps=1, updates_per_rollout=2)))[1]
    assert values["sampling/sampling_logp_difference/max"] == pytest.approx(0.02, abs=1e-4)
    n_tokens = 16 * values["completions/mean_length"]
    assert values["sampling/sampling_logp_difference/mean"] == pytest.approx(0.02 / n_tokens, abs=1e-5)


def test_lr_zero_changes_no_weight_and_no_held_out_sample():
    """Each evaluation uses the same random numbers."""
    one = rolled(lr=1e-30)
    assert distance(one, SimpleNamespace(weights=weights_of(MODEL))) == 0
    lines = [line["completion"] for line in read(one.out / "samples.jsonl") if line["held_out"]]
    assert lines[:3] == lines[3:] and len(set(lines)) > 1


def test_steps_0_only_evaluates():
    none = rolled(steps=0)
    assert [values["step"] for values in none.history] == [0]
    assert none.history[0].keys() >= {"eval_reward", "eval_kl"}
    assert not (none.out / "model").exists()
    assert "kl" not in rolled(beta=0.0).history[2]


@parametrize("flags, are_equal, none_ends", [
    (dict(reward=(f"{REWARDS}:constant",)), True, False), (dict(max_new_tokens=3, model=tiny()), False, True)])
def test_what_teaches_nothing_is_said_at_step_1(flags, are_equal, none_ends, capsys):
    values = main(arguments("rloo", **FLAGS | flags))[1]
    assert (values["frac_reward_zero_std"] == 1) == are_equal
    printed = capsys.readouterr().out
    assert printed.count("rewards of each prompt are equal") == are_equal
    assert printed.count("No sample ends") == none_ends
