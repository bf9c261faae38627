"""rloo.py: advantages and gradients by hand, rewards, training against a slow loop, samples and scores."""
import math
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import bad_input, cases
from rewards import letter_sum
from runs import REWARDS, ROOT, TOKENIZER, data, distance, read, run, said, tiny
from slow_samples import BETA, add_logps, batch_of, many_ends
from torch import tensor
from transformers import AutoModelForCausalLM

import rloo
import slow_samples
from rloo import Args, Row, Samples, compute_rewards, leave_one_out, learning_rate, policy_loss, rollout

MODEL = many_ends()
NAN = math.nan
IF_ENDED = (f"{REWARDS}:letters_if_ended",)
DEMO = dict(model=f"{ROOT}/demo/model", max_new_tokens=12, updates_per_rollout=2, temperature=0.8, beta=BETA)
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


def scores_of(samples, args):
    scores = tensor([list(map(letter_sum, texts)) for texts in samples.texts])
    return scores.where(samples.ended, NAN) if args.reward[:1] == IF_ENDED else scores


# --- Advantages and loss, by hand

def test_advantages_by_hand():
    """They are exactly 0 if rewards are equal."""
    rewards = tensor([[10.0, 20.0, 60.0, NAN], [0.1, NAN, 0.1, 0.1], [NAN, 5.0, NAN, NAN], [NAN] * 4])
    assert leave_one_out(rewards).tolist() == [[-30, -15, 45, 0], *[[0] * 4] * 3]
    assert not leave_one_out(torch.rand(100, 1).repeat(1, 7)).any()
    assert leave_one_out(tensor([[0, 1, -math.inf]])).isinf().any()


def test_policy_loss_and_gradient_by_hand():
    """A ratio of e^100 gives no NaN."""
    ratios = tensor([1.5, 1.5, 0.5, 0.5, math.exp(100), math.exp(100)], dtype=torch.float64)
    advantages = tensor([2.0, -2.0, 2.0, -2.0, 1.0, 0.0])
    logps = ratios.log().float().requires_grad_()
    losses, is_clipped = policy_loss(logps, torch.zeros(6), advantages, 0.2)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-2.4, 3, -1, 1.6, -1.2, 0], abs=1e-4)
    assert logps.grad.tolist() == pytest.approx([0, 3, -1, 0, 0, 0], abs=1e-4)
    assert is_clipped.tolist() == [True, False, False, True, True, False]


# --- Rewards

TEXTS = [" soup", " tea"], [" bread", " cake"]


def score(*functions, rows=({"prompt": "a"}, {"prompt": "b"})):
    groups = [((1,), [tuple(TOKENIZER(text).input_ids) for text in texts]) for texts in TEXTS]
    samples = Samples(groups, TEXTS, torch.ones(2, 2, 1), tensor([[True, False], [True, True]]), None, None)
    named = {f"f{i}": function for i, function in enumerate(functions)}
    return compute_rewards(samples, [Row((1,), dict(row)) for row in rows], named)


def test_rewards_are_summed_and_none_is_left_out():
    functions = (lambda **_: (value for value in (1, None, None, 4))), (lambda **_: tensor([1, 2, 3, 4]))
    assert score(functions[0])[0].nan_to_num(-1).tolist() == [[1, -1], [-1, 4]]
    total, found = score(*functions)
    assert total.tolist() == [[2, 2], [3, 8]] and found["f1"].tolist() == [[1, 2], [3, 4]]


def test_rewards_of_one_name_have_metrics_of_their_own():
    second = f"{REWARDS.parent}/../tests/rewards.py:letters"
    one = run("rloo", reward=(f"{REWARDS}:letters", second), steps=1)
    assert {"rewards/letters", f"rewards/{second}"} <= one.history[1].keys()
    assert one.history[1]["reward"] == pytest.approx(2 * one.history[1]["rewards/letters"])


def test_each_sample_has_columns_of_its_own():
    def reward(**columns):
        seen.append(deepcopy(columns))
        return [prompt.append("more") or len(prompt) for prompt in columns["prompts"]]

    seen = []
    a, b, texts = said("a", "user"), said("b", "user"), [*TEXTS[0], *TEXTS[1]]
    for _ in range(2):
        assert (score(reward, reward, rows=[dict(prompt=a, x=[1]), dict(prompt=b, x=None)])[0] == 4).all()
    assert seen == 4 * [dict(
        prompts=[a, a, b, b], completions=list(map(said, texts)), completion_ids=TOKENIZER(texts).input_ids,
        ended=[True, False, True, True], x=[[1], [1], None, None])]


def test_step_without_any_reward_trains_nothing():
    runs = []
    for steps in (1, 2):
        rloo.load_module.cache_clear()  # the function counts its calls
        runs.append(rolled(reward=(f"{REWARDS}:silent_at_step_2",), steps=steps, schedule="constant"))
    one, two = runs
    assert [values["frac_reward_none"] + values["frac_reward_zero_std"] for values in two.history[1:]] == [0, 2]
    assert two.history[2]["reward"] is None and distance(one, two) == 0 < one.history[1]["grad_norm"]
    assert "NaN" not in "".join((two.out / f"{log}.jsonl").read_text() for log in ("metrics", "samples"))


# --- Training

@cases("changes", [DEMO | dict(reward=IF_ENDED), dict(
    ref="live", ref_model=tiny(1), tokens_per_forward=60, rollout_tokens=60, gradient_checkpointing=True, beta=BETA)])
def test_training_equals_a_slow_loop(changes):
    """The texts that a reward gets have no special tokens."""
    one = rolled(**changes)
    args = one.args
    assert {samples.mask.shape[1] for samples in one.evaluations} == {1}
    policy, reference = map(AutoModelForCausalLM.from_pretrained, (args.model, args.ref_model or args.model))
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for step, (samples, values) in enumerate(zip(one.steps, one.history[1:], strict=True), start=1):
        assert samples.texts[0] == [TOKENIZER.decode([token for token in y if token > 3]) for y in samples.groups[0][1]]
        batch = batch_of(samples, scores_of(samples, args), policy, reference, args.temperature)
        optimizer.param_groups[0]["lr"] = learning_rate(step, 2, args)
        for _ in range(args.updates_per_rollout):
            add_logps(policy, batch, args.temperature)
            loss = slow_samples.rloo(batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        kl = torch.cat([y.old - y.ref for prompt in batch for y in prompt]).mean().item()
        assert [values["loss"], values["kl"]] == pytest.approx([loss.item(), kl], abs=1e-3)
        assert values["sampling/sampling_logp_difference/max"] < 1e-4, "it is of the policy that sampled"
    assert any(0 < values["completions/clipped_ratio"] < 1 for values in one.history[1:])
    assert (max(values["clip_ratio"] for values in one.history[1:]) > 0) == (args.updates_per_rollout > 1)
    gaps = torch.cat([(p - one.weights[name]).abs().flatten() for name, p in policy.named_parameters()])
    assert gaps.topk(20).values[-1] < 1e-4  # where a gradient is 1e-8, Adam makes a whole step of its rounding


# --- Metrics

def test_metrics_by_hand():
    """Equal texts count once. Only prompts are independent: 1 and 4 are the means of two."""
    mask = tensor([[[1, 1, 1], [1, 0, 0]]] * 2)
    samples = Samples(None, [["a", "b"], ["b", ""]], mask, tensor([[True, False], [True, True]]), None,
                      entropy=torch.full((2, 2), 3.0))
    rewards, logps = tensor([[1.0, NAN], [2.0, 6.0]]), -0.25 * mask
    of_functions = {"f": tensor([[NAN, NAN], [2.0, 4.0]])}
    expected = {
        "reward": 2.5, "reward_std": np.std([1, 2, 6], ddof=1), "frac_reward_none": 0.25, "samples/distinct": 3,
        "completions/mean_length": 2, "completions/clipped_ratio": 0.25, "entropy": 1.5, "rewards/f": 3}
    for beta, kls in ((0.1, {"kl": 0.25, "kl_per_answer": 0.5}), (0.0, {})):
        found = rloo.metrics(samples, rewards, of_functions, logps, 2 * logps, Args(beta=beta))
        assert found == pytest.approx(expected | kls)
    assert rloo.metrics(samples, tensor([[2.0]]), {}, logps, logps, Args())["reward_std"] == 0
    means = rloo.prompt_means(tensor([[1.0, 1.0], [NAN, 4.0], [NAN, NAN]]))
    assert means.tolist() == [1, 4] and rloo.standard_error(means) == pytest.approx(1.5)
    assert math.isnan(rloo.standard_error(means[:1]))


def test_steps_0_samples_and_scores_a_frozen_model():
    one = rolled(steps=0, k=3, ref_model=tiny(1), reward=(*IF_ENDED, f"{REWARDS}:silent"), temperature=0.8)
    samples, = one.evaluations
    values, = one.history
    assert not any(p.requires_grad for p in one.policy.parameters()) and not (one.out / "model").exists()
    lines = read(one.out / "samples.jsonl")
    assert [line["completion"] for line in lines] == sum(samples.texts, [])
    assert [line["ended"] for line in lines] == samples.ended.flatten().tolist()
    assert [line["prompt"] for line in lines[::3]] == [row["prompt"] for row in read(data("rloo")[1])]

    rewards = scores_of(samples, one.args)
    assert [line["reward"] for line in lines] == [None if x != x else x for x in rewards.flatten().tolist()]
    batch = batch_of(samples, rewards, *map(AutoModelForCausalLM.from_pretrained, (MODEL, tiny(1))), 0.8)
    kls = [sum(y.old - y.ref).item() for prompt in batch for y in prompt]
    assert values["eval_kl_per_answer"] == pytest.approx(np.mean(kls), abs=1e-4)
    known = [row[~row.isnan()].tolist() for row in rewards]
    assert len(set(map(len, known))) > 1
    means = [np.mean(row) for row in known if row]
    expected = [np.mean(means), np.std(means, ddof=1) / len(means)**0.5]
    assert [values["eval_reward"], values["eval_reward_stderr"]] == pytest.approx(expected)
    assert values["eval_rewards/silent"] is values["eval_rewards/silent_stderr"] is None


def test_steps_0_needs_no_reward_and_no_held_out_file():
    none = rolled(steps=0, k=1, reward=(), eval_data=None)
    assert [line["prompt"] for line in read(none.out / "samples.jsonl")] == [x["prompt"] for x in read(data("rloo")[0])]
    assert none.history[0]["eval_reward"] is None
    with bad_input("a finished run"):
        rloo.main(none.args)
