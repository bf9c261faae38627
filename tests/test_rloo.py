"""rloo.py: advantages and gradients by hand, rewards, training against a slow loop, samples and scores."""
import math
import re
import runpy
import sys
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import bad_input, parametrize
from rewards import letter_sum
from runs import REWARDS, ROOT, TOKENIZER, arguments, data, distance, read, run, tiny
from slow_losses import model_with_many_ends
from slow_samples import BETA, add_logps, batch_of
from torch import tensor
from transformers import AutoModelForCausalLM

import rloo
import slow_samples
from rloo import Args, Row, Samples, compute_rewards, leave_one_out, learning_rate, main, policy_loss, rollout

MODEL = model_with_many_ends()
NAN = math.nan
DEMO = dict(model=f"{ROOT}/demo/model", max_new_tokens=12, updates_per_rollout=2, temperature=0.8, mask_truncated=True,
            beta=BETA)
FLAGS = dict(model=MODEL, steps=2, batch_size=4, lr=1e-3, warmup=0.1)


def rolled(**changes):
    """A run, the samples of its steps and evaluations, and its policy. Equal runs are made only once."""
    found = SimpleNamespace(steps=[], evaluations=[])

    def spy(policy, *inputs, step, **options):
        samples = rollout(policy, *inputs, step=step, **options)
        (found.steps if step else found.evaluations).append(samples)
        found.policy = policy
        return samples

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rloo, "rollout", spy)
        one = run("rloo", **FLAGS | changes)
    vars(one).update(vars(found) | vars(one))  # keeps what the first call has found
    return one


def scores_of(samples):
    return tensor([list(map(letter_sum, texts)) for texts in samples.texts])


def lines_of(samples, rows, **common):
    """Lines of samples.jsonl."""
    return [
        common | dict(prompt=row["prompt"], completion=text, reward=pytest.approx(letter_sum(text)))
        for row, texts in zip(rows, samples.texts) for text in texts]


# --- Advantages and loss, by hand

def test_advantages_by_hand():
    """They are exactly 0 if rewards are equal: Adam would make a whole step of 1e-8."""
    rewards = tensor([[10.0, 20.0, 60.0, NAN], [0.1, NAN, 0.1, 0.1], [NAN, 5.0, NAN, NAN], [NAN] * 4, [NAN, 1, 4, NAN]])
    expected = [[-30, -15, 45, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, -3, 3, 0]]
    assert leave_one_out(rewards).tolist() == expected
    assert rloo.all_rewards_equal(rewards).tolist() == [False, True, True, True, False]
    assert not leave_one_out(torch.rand(100, 1).repeat(1, 7)).any()


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


def score_file(folder, source):
    """The rewards of f in a file of a user."""
    (folder / "own.py").write_text(source)
    (_, function, weight), = rloo.load_rewards(Args(reward=(f"{folder}/own.py:f",)))
    return score((function, weight))


def test_rewards_are_weighted_and_none_is_left_out():
    """Also those of a generator and of a tensor."""
    functions = (lambda **_: (value for value in (1, None, None, 4)), 2.0), (lambda **_: tensor([1, 2, 3, 4]), 0.5)
    totals = [score(*functions[:n])[0].nan_to_num(-1).tolist() for n in (1, 2)]
    assert totals == [[[2, -1], [-1, 8]], [[2.5, 1], [1.5, 10]]]
    found = score(*functions)[1]
    assert found["f0"].nan_to_num(-1).tolist() == [[1, -1], [-1, 4]] and found["f1"].tolist() == [[1, 2], [3, 4]]


def test_reward_files_of_one_name_are_two_modules(tmp_path):
    """A process pool finds a function by the name of its module. A loaded module of this name stays."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "beside.py").touch()  # a file may import what lies beside it
        (tmp_path / folder / "json.py").write_text(f"import beside\ndef f(): return '{folder}'\ng = f")
    specs = tuple(f"{tmp_path}/{name}" for name in ("one/json.py:f", "one/json.py:g", "two/json.py:f"))
    rewards = rloo.load_rewards(Args(reward=specs, reward_weights=(3.0, 1.0, 2.0)))
    for (name, function, weight), expected in zip(rewards, [("f", 3, "one"), ("g", 1, "one"), (specs[2], 2, "two")]):
        assert (name, weight, function()) == expected  # each name has a metric
        assert sys.modules[function.__module__].f is function
    assert sys.modules["json"].dumps


def test_each_sample_has_columns_of_its_own():
    """If a reward changes them, neither the other samples of a prompt see that, nor the next step."""
    def reward(**columns):
        seen.append(deepcopy(columns))
        for prompt in columns["prompts"]:
            prompt.append("more")
        return list(map(len, columns["prompts"]))

    seen = []
    x, z = [dict(role="user", content="a")], [dict(role="user", content="b")]
    for _ in range(2):
        rewards, _ = score((reward, 1.0), rows=[dict(prompt=x, thing=[1]), dict(prompt=z, thing=None)])
        assert rewards.tolist() == [[2, 2], [2, 2]]
    texts = [" soup", " tea", " bread", " cake"]
    assert seen == 2 * [dict(
        prompts=[x, x, z, z], completions=[[dict(role="assistant", content=text)] for text in texts],
        completion_ids=TOKENIZER(texts).input_ids, ended=[True, False, True, True], thing=[[1], [1], None, None])]


CALLED = "it is called with prompts, completions, completion_ids, ended; take **columns"


@parametrize("source, words", [
    ("def g(): pass", "own.py has no function 'f': it has g"),
    ("f = 3\ndef g(): pass\ndef h(): pass", "own.py has no function 'f': it has g, h"),
    ("def f(completions): pass", f"f0: got an unexpected keyword argument 'prompts': {CALLED}"),
    ("def f(answer, **columns): pass", f"f0: missing a required argument: 'answer': {CALLED}"),
    *[(f"f = lambda **_: {value}", f"f0 returned {value}: expected 4 numbers or None") for value in (
        None, 1.5, [1.0], ["good"] * 4, "'1234'", dict.fromkeys(range(4)), {1, 2, 3, 4})],
    *[(f"from math import *\nf = lambda **_: [1, {value}, None, 2]",
       f"f0 returned [1, {value}, None, 2]: a reward is finite, or None") for value in ("-inf", "nan")]])
def test_bad_reward_ends_a_run_with_one_sentence(source, words, tmp_path):
    with pytest.raises(ValueError, match=re.escape(words) + "$"):
        score_file(tmp_path, source)


def test_reward_that_ends_the_process_is_no_success(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("import sys\ndef f(**columns): sys.exit(0)")
    words = ["rloo.py", "--reward", f"{tmp_path}/own.py:f", "--out", f"{tmp_path}/out"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(RuntimeError, match="a reward has ended the process"):
        runpy.run_path(rloo.__file__, run_name="__main__")


@parametrize("line, has_note", [
    ("completions[0][0]['content']", True), ("(None + 1 for _ in completions)", True), ("1 / 0", False)])
def test_error_in_a_reward_shows_the_line_of_the_user(line, has_note, tmp_path):
    with pytest.raises((TypeError, ZeroDivisionError)) as error:
        score_file(tmp_path, f"def f(completions, **columns): return {line}")
    assert error.traceback[-1].path == tmp_path / "own.py"
    note = "A completion is a string if the row's prompt is one, else a list of messages."
    assert getattr(error.value, "__notes__", []) == [note] * has_note


def test_texts_have_no_special_tokens():
    """As in TRL. They are in completion_ids."""
    samples = rolled(**DEMO).steps[0]
    ys = samples.groups[0][1]
    assert any(y[-1] == TOKENIZER.eos_token_id for y in ys)
    assert samples.texts[0] == [TOKENIZER.decode([token for token in y if token > 3]) for y in ys]


def test_step_without_any_reward_trains_nothing():
    """Neither does Adam's momentum."""
    one, two = (rolled(reward=(f"{REWARDS}:silent_at_step_2",), steps=steps, schedule="constant") for steps in (1, 2))
    assert [values["frac_reward_none"] for values in two.history[1:]] == [0, 1]
    assert two.history[2]["reward"] is None and distance(one, two) == 0 < one.history[1]["grad_norm"]
    for file in ("metrics", "samples"):
        text = (two.out / f"{file}.jsonl").read_text()
        assert "null" in text and "NaN" not in text  # strict JSON


@parametrize("spec, words", [
    ("nothing.py:f", "expected FILE.py:FUNCTION"),
    (f"{REWARDS}:letter_sum", "letter_sum: missing a required argument")])
def test_reward_is_tried_before_the_policy_is_loaded(spec, words, monkeypatch):
    monkeypatch.setattr(rloo, "load_model", None)
    with bad_input(words):
        main(arguments("rloo", reward=(spec,)))


# --- Training

@parametrize("changes", [DEMO, dict(
    ref="live", ref_model=tiny(1), tokens_per_forward=60, rollout_tokens=60, gradient_checkpointing=True, beta=BETA)])
def test_training_equals_a_slow_loop(changes):
    one = rolled(**changes)
    args = replace(Args(lr=1e-3), **changes)
    begin = (FLAGS | changes)["model"]
    policy, reference = map(AutoModelForCausalLM.from_pretrained, (begin, changes.get("ref_model", begin)))
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for step, samples in enumerate(one.steps, 1):
        rewards = scores_of(samples)
        assert one.history[step]["reward"] == pytest.approx(rewards.mean().item())  # of all samples
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
    assert gaps.topk(20).values[-1] < 1e-4  # where a gradient is 1e-8, Adam makes a whole step of its rounding


# --- Samples and files

def test_files_hold_the_samples_and_metrics_of_the_run():
    one = rolled(steps=3, eval_every=2)
    train, held_out = map(read, data("rloo"))
    rows = rloo.rows_in_order(train, 12, 0)
    evaluations = dict(zip((0, 2, 3), one.evaluations, strict=True))
    expected = []
    for step, values in enumerate(one.history):
        if step:
            expected += lines_of(one.steps[step - 1], rows[4 * step - 4:], step=step, held_out=False)
        assert ("eval_reward" in values) == (step in evaluations)
        if step in evaluations:
            expected += lines_of(evaluations[step], held_out, step=step, held_out=True)
            assert values["eval_reward"] == pytest.approx(scores_of(evaluations[step]).mean().item())
    assert read(one.out / "samples.jsonl") == expected and len(expected) == 3 * 16 + 3 * 3  # k is 1 in evaluations


def test_metrics_by_hand():
    """Equal texts count once. Only prompts are independent: 1 and 4 are the means of two."""
    mask = tensor([[[1, 1, 1], [1, 0, 0]]] * 2)
    ended = tensor([[True, False], [True, True]])
    samples = Samples(None, [["a", "b"], ["b", ""]], mask, ended, None, entropy=torch.full((2, 2), 3.0))
    rewards, logps = tensor([[1.0, NAN], [2.0, 6.0]]), -0.25 * mask
    of_functions = {"f": tensor([[NAN, NAN], [2.0, 4.0]])}
    assert rloo.metrics(samples, rewards, of_functions, logps, 2 * logps, Args()) == pytest.approx({
        "reward": 3, "reward_std": np.std([1, 2, 6], ddof=1), "frac_reward_none": 0.25, "samples/distinct": 3,
        "completions/mean_length": 2, "completions/clipped_ratio": 0.25, "entropy": 1.5, "kl": 0.25,
        "kl_per_answer": 0.5, "rewards/f": 3})
    assert rloo.metrics(samples, tensor([[2.0]]), {}, logps, logps, Args())["reward_std"] == 0
    rewards = tensor([[1.0, 1.0], [NAN, 4.0], [NAN, NAN]])
    assert rloo.standard_error(rewards) == pytest.approx(1.5) and math.isnan(rloo.standard_error(rewards[:1]))


def test_sampling_logp_difference_is_of_tokens(monkeypatch):
    def another_sampler(*inputs, **options):
        samples = rollout(*inputs, **options)
        samples.logps[0, 0, 0] += 0.02
        return samples

    monkeypatch.setattr(rloo, "rollout", another_sampler)
    values = main(arguments("rloo", **FLAGS | dict(steps=1, updates_per_rollout=2)))[1]
    found = [values[f"sampling/sampling_logp_difference/{name}"] for name in ("max", "mean")]
    assert found == pytest.approx([0.02, 0.02 / 16 / values["completions/mean_length"]], abs=1e-4, rel=0.01)


def test_steps_0_samples_and_scores_a_frozen_model(capsys):
    """k samples of each held-out prompt. The KL is to --ref_model."""
    one = rolled(steps=0, k=3, ref_model=tiny(1), reward=(f"{REWARDS}:letters", f"{REWARDS}:silent"), temperature=0.8)
    samples, = one.evaluations
    expected = lines_of(samples, read(data("rloo")[1]), step=0, held_out=True)
    assert read(one.out / "samples.jsonl") == expected and len(expected) == 9
    assert not any(p.requires_grad for p in one.policy.parameters()) and not (one.out / "model").exists()

    values, = one.history
    rewards = scores_of(samples)
    batch = batch_of(samples, rewards, *map(AutoModelForCausalLM.from_pretrained, (MODEL, tiny(1))), 0.8)
    kls = [sum(y.old - y.ref).item() for prompt in batch for y in prompt]
    assert values["eval_kl_per_answer"] == pytest.approx(np.mean(kls), abs=1e-4)
    mean, error = rewards.mean(), rewards.mean(dim=1).std() / 3**0.5
    assert re.search(rf"\neval_reward +{mean:.3f} ± {error:.3f} [^~]*/silent +- ", capsys.readouterr().out)
    assert values["eval_rewards/silent"] is values["eval_rewards/silent_stderr"] is None


def test_steps_0_needs_no_reward_and_no_held_out_file():
    none = rolled(steps=0, k=1, reward=(), eval_data=None)
    lines, rows = read(none.out / "samples.jsonl"), read(data("rloo")[0])
    assert [line["prompt"] for line in lines] == [row["prompt"] for row in rows]
    assert none.history[0]["eval_reward"] is None and "eval_kl" not in none.history[0]
    assert "kl" not in rolled(beta=0.0).history[2]


@parametrize("sentence, changes", [
    ("The rewards of each prompt are equal: nothing is learned", dict(reward=(f"{REWARDS}:constant",))),
    ("No sample has a reward: nothing is learned", dict(reward=(f"{REWARDS}:silent",))),
    ("No sample ends: raise --max_new_tokens or fix the template", dict(max_new_tokens=3, model=tiny()))])
def test_what_teaches_nothing_is_said_at_step_1(sentence, changes, capsys):
    values = main(arguments("rloo", **FLAGS | dict(steps=1) | changes))[1]
    assert values["frac_reward_zero_std"] == ("learned" in sentence)
    assert re.findall("^(?:The rewards|No sample) .*", capsys.readouterr().out, re.M) == [sentence]
