"""kto.py: the loss and z by hand, and its rows. What it shares with dpo.py is the same text, tested there."""
from itertools import product

import numpy as np
import pytest
import torch
from models import bad_input, logps, make, parametrize
from torch import sigmoid, tensor

import kto
from kto import Args, Batch, Row, draw_others, feedback_loss, metrics, print_balance


def make_row(prompt, completion, is_desirable=True, other=()):
    return Row(prompt, completion, is_desirable, other, whole_prompt=prompt)


# --- The loss and z

@parametrize("name, formula", [
    ("kto", lambda w, l: [1.2 * (1 - sigmoid(0.2 * (w - 0.4))), 0.9 * (1 - sigmoid(0.2 * (0.4 - l)))]),
    ("apo_zero_unpaired", lambda w, l: [1.2 * (1 - sigmoid(0.2 * w)), 0.9 * sigmoid(0.2 * l)])])
def test_loss_and_gradient_by_hand(name, formula):
    """Log-ratios of a desirable and of an undesirable answer; β = 0.2, z = 0.4."""
    ratio = tensor([1.5, -0.5], requires_grad=True)
    batch = Batch(logp=ratio, rho=ratio, is_desirable=tensor([True, False]), length=ratio)
    args = Args(loss=name, beta=0.2, desirable_weight=1.2, undesirable_weight=0.9)
    losses = feedback_loss(batch, tensor(0.4), args), torch.stack(formula(*ratio))
    assert torch.allclose(*losses)
    assert torch.allclose(*[torch.autograd.grad(loss.sum(), ratio)[0] for loss in losses])


def test_metrics_by_hand():
    batch = Batch(logp=tensor([-9.0, -8.0, -7.0]), rho=tensor([-2.0, 1.0, 0.0]), length=tensor([4.0, 4.0, 4.0]),
                  is_desirable=tensor([True, False, False]))
    values = metrics(batch, Args(beta=0.1))
    assert {name: value[mask].tolist() for name, (value, mask) in values.items()} == {
        "rewards/accuracies": [0.0, 0.0, 0.5], "abs_logratio": [0.5, 0.25, 0.0], "nll/chosen": [2.25],
        "rewards/chosen": pytest.approx([-0.2]), "rewards/rejected": pytest.approx([0.1, 0.0]),
        "logps/chosen": [-9.0], "logps/rejected": [-8.0, -7.0]}


def test_z_is_the_mean_over_the_whole_batch():
    """The log-ratios are -5 .. 6: the clamp must come after the mean."""
    policy = make("llama")
    draw = np.random.default_rng(0).integers
    rows = [make_row(tuple(draw(3, 97, 3 + i % 4)), (5, 2), other=tuple(draw(3, 97, 2 + i % 5))) for i in range(12)]
    ratios = range(-5, 7)
    ref_logps = {}
    for row, ratio in zip(rows, ratios):
        mine = logps(policy, [(row.prompt, row.other)])[0].detach().numpy()
        ref_logps[row.prompt, row.other] = mine - ratio / len(mine)

    for some, budget in product((slice(12), slice(3), slice(8, 9)), (1, 100_000)):
        z = kto.estimate_kl(policy, rows[some], ref_logps, Args(tokens_per_forward=budget))
        assert z.item() == pytest.approx(max(0.0, np.mean(ratios[some])), abs=1e-3)
        assert not z.requires_grad


# --- The rows

@parametrize("n_prompts", [2, 3, 40])
def test_others_answer_other_prompts(n_prompts):
    rows = [make_row((i,), (i, 99))._replace(whole_prompt=(i % n_prompts,)) for i in range(40)]
    drawn = draw_others(rows, rows, Args())
    assert drawn == draw_others(rows, rows, Args()) != draw_others(rows, rows, Args(seed=1))
    assert len({row.other for row in drawn}) > 15
    held_out = draw_others(rows[:3], rows[1:], Args())
    assert all(row.other[0] > 0 for row in held_out)
    assert all(rows[row.other[0]].whole_prompt != row.whole_prompt for row in drawn + held_out)


def test_answers_to_other_prompts_are_cut():
    rows = [make_row((9,) * (1 + i), tuple(range(100 * i, 100 * i + 10 - i))) for i in range(8)]
    for row in draw_others(rows, rows, Args(max_length=11)):
        assert row.other == rows[row.other[0] // 100].completion[:11 - len(row.prompt)]


def test_one_prompt_or_one_label_alone_is_refused():
    for label in (True, False):
        rows = [make_row((9,), (5,), label)] * 2
        with bad_input("same label"):
            print_balance(rows, Args())
        with bad_input("all rows have one prompt"):
            draw_others(rows, rows, Args())
