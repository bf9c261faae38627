"""The losses of dpo.py: values, gradients, properties that all of them share, metrics."""
from typing import get_args

import pytest
import torch
from models import cases
from runs import load
from torch import exp, log, tensor

import dpo
from dpo import Args, Batch, metrics, preference_loss

BETA, EPS, GAMMA, ETA = 0.2, 0.1, 0.6, 0.7
ARGS = Args(beta=BETA, label_smoothing=EPS, simpo_gamma=GAMMA, rpo_eta=ETA)
PAIRS = Batch(*tensor([
    [-20.0, -35.0], [-24.0, -31.0],  # log-probs of w, and of l
    [2.0, -1.5], [-1.0, 0.5],  # log-ratios
    [8.0, 10.0], [6.0, 14.0],  # lengths
    [3.0, 0.5], [1.0, 2.0]]))  # scores


def sg(x):
    return 1 / (1 + exp(-x))


def kl(p, q):
    return p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))


def formulas(w, l, c, r, n, m, reward_w, reward_l):
    """Each loss of pairs. w, l: log π; c, r: log-ratios; n, m: lengths."""
    z = BETA * (c - r)
    target = ETA * (reward_w - reward_l)
    return {
        "sigmoid": -(1 - EPS) * log(sg(z)) - EPS * log(sg(-z)),
        "ipo": (c / n - r / m - 1 / (2 * BETA)) ** 2,
        "rpo_sq": (z - target) ** 2,
        "rpo_fwd_kl": kl(sg(z), sg(target)),
        "rpo_bwd_kl": kl(sg(target), sg(z)),
        "sigmoid_norm": -log(sg(BETA * (c / n - r / m))),
        "apo_zero": 1 - sg(BETA * c) + sg(BETA * r),
        "simpo": -log(sg(BETA * (w / n - l / m - GAMMA / BETA))),
        "sft": -w / n,
    }


LOSSES = list(formulas(*PAIRS))


def test_every_loss_of_the_command_line_has_a_formula():
    assert set(get_args(dpo.Loss)) == set(LOSSES)


@cases("name", LOSSES)
def test_losses_and_gradients_equal_their_formulas(name):
    leaves = [values.double().requires_grad_() for values in PAIRS]
    losses = preference_loss(name, Batch(*leaves), ARGS), formulas(*leaves)[name]
    assert losses[0].tolist() == pytest.approx(losses[1].tolist())
    gradients = [torch.autograd.grad(loss.sum(), leaves, materialize_grads=True) for loss in losses]
    assert torch.allclose(*map(torch.stack, gradients))


def test_a_batch_has_lengths_and_scores_of_its_answers():
    batch = dpo.compute_batch(load(), [dpo.Row((5,), (6, 7), (8,), (2.0, -0.5))], None)
    assert [values.item() for values in batch[4:]] == [2, 1, 2, -0.5]


def test_metrics_by_hand():
    """A tie is judged on log-ratios, not on rewards: β may be large."""
    pairs = Batch(*tensor([
        [-20.0, -35.0, -3.0], [-24.0, -31.0, -4.0],
        [2.0, 1e-5, -0.06], [-1.0, 0.0, 0.0],
        [8.0, 10.0, 2.0], [1.0] * 3, [0.0] * 3, [0.0] * 3]))
    expected = {
        "rewards/chosen": [40, 2e-4, -1.2], "rewards/rejected": [-20, 0, 0], "rewards/margins": [60, 2e-4, -1.2],
        "rewards/accuracies": [1, 0.5, 0], "logps/chosen": [-20, -35, -3], "logps/rejected": [-24, -31, -4],
        "abs_logratio": [0.625, 5e-7, 0.015], "nll/chosen": [2.5, 3.5, 1.5]}
    values = metrics(pairs, Args(beta=20.0, loss=("simpo", "sigmoid")))
    assert {name: value.tolist() for name, value in values.items()} == {
        name: pytest.approx(value) for name, value in expected.items()}
    simpo = metrics(pairs, Args(beta=20.0, loss=("simpo",)))
    assert simpo["rewards/margins"].tolist() == pytest.approx([25, 2e-5, -0.6])
