"""preference_loss: every loss against its formula in plain Python, and what must hold for all of them."""
from math import exp, log
from typing import get_args

import pytest
import torch
from torch import tensor

from dpo import Args, Batch, Loss, metrics, objective, preference_loss

# two pairs, invented: log π of w and l, log-ratios to the reference, lengths, rewards in the data
PAIRS = Batch(tensor([-20.0, -35.0]), tensor([-24.0, -31.0]), tensor([2.0, -1.5]), tensor([-1.0, 0.5]),
              tensor([8.0, 10.0]), tensor([6.0, 14.0]), tensor([1.5, 0.2]), tensor([0.5, 0.4]))
BETA, EPS, GAMMA, ETA = 0.2, 0.1, 0.6, 2.0


def sg(x): return 1 / (1 + exp(-x))
def kl(p, q): return p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))


BY_HAND = {  # of one pair: c, r log-ratios; w, l log π; n, m lengths; a, b rewards in the data
    "sigmoid": lambda c, r, w, l, n, m, a, b: -(1 - EPS) * log(sg(BETA * (c - r))) - EPS * log(sg(-BETA * (c - r))),
    "hinge": lambda c, r, w, l, n, m, a, b: max(0, 1 - BETA * (c - r)),
    "ipo": lambda c, r, w, l, n, m, a, b: (c / n - r / m - 1 / (2 * BETA)) ** 2,
    "sigmoid_norm": lambda c, r, w, l, n, m, a, b: -log(sg(BETA * (c / n - r / m))),
    "robust": lambda c, r, w, l, n, m, a, b: (-(1 - EPS) * log(sg(BETA * (c - r))) + EPS * log(sg(BETA * (r - c)))) / (1 - 2 * EPS),
    "exo_pair": lambda c, r, w, l, n, m, a, b: kl(sg(BETA * (c - r)), 1 - EPS),
    "nca_pair": lambda c, r, w, l, n, m, a, b: -log(sg(BETA * c)) - log(sg(-BETA * c)) / 2 - log(sg(-BETA * r)) / 2,
    "bco_pair": lambda c, r, w, l, n, m, a, b: -log(sg(BETA * c)) - log(sg(-BETA * r)),
    "sppo_hard": lambda c, r, w, l, n, m, a, b: (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda c, r, w, l, n, m, a, b: 1 - sg(BETA * c) + sg(BETA * r),
    "apo_down": lambda c, r, w, l, n, m, a, b: sg(BETA * c) + 1 - sg(BETA * (c - r)),
    "discopop": lambda c, r, w, l, n, m, a, b: -(1 - sg(BETA * (c - r) / 0.05)) * log(sg(BETA * (c - r))) + sg(BETA * (c - r) / 0.05) * exp(
        -BETA * (c - r)),
    "rpo_sq": lambda c, r, w, l, n, m, a, b: (BETA * (c - r) - ETA * (a - b)) ** 2,
    "rpo_bwd_kl": lambda c, r, w, l, n, m, a, b: kl(sg(ETA * (a - b)), sg(BETA * (c - r))),
    "rpo_fwd_kl": lambda c, r, w, l, n, m, a, b: kl(sg(BETA * (c - r)), sg(ETA * (a - b))),
    "simpo": lambda c, r, w, l, n, m, a, b: -log(sg(BETA * (w / n - l / m - GAMMA / BETA))),
}


def loss(name, pairs=PAIRS, eps=EPS):
    return preference_loss(name, pairs, BETA, eps, GAMMA, ETA)


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    logp_w, logp_l, c, r, n, m, a, b = (x.tolist() for x in PAIRS[:8])
    truth = [BY_HAND[name](*row) for row in zip(c, r, logp_w, logp_l, n, m, a, b)]
    assert loss(name).tolist() == pytest.approx(truth, rel=1e-5)


def test_aot_compares_sorted_batches():
    # policy log-ratios w − l: 4, −4; the reference's: 4 − 3 = 1, −4 + 2 = −2. Sorted: (−4, 4) − (−2, 1) = (−2, 3)
    cdpo = lambda d: -(1 - EPS) * log(sg(BETA * d)) - EPS * log(sg(-BETA * d))  # noqa: E731
    assert loss("aot").tolist() == pytest.approx([cdpo(-2), cdpo(3)], rel=1e-5)
    # c: 2, −1.5 and r: −1, 0.5. Sorted: (−1.5, 2) − (−1, 0.5) = (−0.5, 1.5)
    assert loss("aot_unpaired").tolist() == pytest.approx([cdpo(-0.5), cdpo(1.5)], rel=1e-5)


def test_the_table_has_every_loss_of_the_command_line():
    assert set(BY_HAND) | {"aot", "aot_unpaired"} == set(get_args(Loss))
    with pytest.raises(ValueError, match="no loss"):
        loss("dpo2")


def test_at_the_reference_dpo_is_ln_2():
    start = PAIRS._replace(rho_w=torch.zeros(2), rho_l=torch.zeros(2))
    assert loss("sigmoid", start, eps=0.0).tolist() == pytest.approx([log(2)] * 2) == loss("sigmoid", start).tolist()


@pytest.mark.parametrize("name", get_args(Loss))
def test_gradient_raises_the_chosen_and_lowers_the_rejected(name):
    """From the reference on. But apo_down lowers both, the rejected more, and discopop has a hill there (its paper, figure 2)."""
    logp_w, logp_l = torch.tensor([-20.0, -20.1], requires_grad=True), torch.tensor([-20.0, -20.1], requires_grad=True)
    pairs = PAIRS._replace(logp_w=logp_w, logp_l=logp_l, rho_w=logp_w + tensor([20.0, 20.1]), rho_l=logp_l + tensor([20.0, 20.1]))
    loss(name, pairs._replace(score_w=tensor([1.0, 2.0]), score_l=tensor([0.0, 0.0])), eps=1e-3 if name == "exo_pair" else 0.0).sum().backward()
    if name == "apo_down":
        assert (logp_l.grad > logp_w.grad).all() and (logp_l.grad > 0).all()
    elif name != "discopop":
        assert (logp_w.grad < 0).all() and (logp_l.grad > 0).all()


@pytest.mark.parametrize("name", get_args(Loss))
def test_extreme_margins_stay_finite(name):
    extreme = PAIRS._replace(rho_w=tensor([400.0, -400.0]), rho_l=tensor([-400.0, 400.0]), logp_w=tensor([-1.0, -900.0]), logp_l=tensor([-900.0, -1.0]))
    assert loss(name, extreme).isfinite().all()


def test_sft_weight_adds_the_chosen_nll_a_token():
    plain, with_sft = (objective(PAIRS, Args(beta=BETA, sft_weight=w)) for w in (0.0, 0.3))
    assert (with_sft - plain).tolist() == pytest.approx([0.3 * 20 / 8, 0.3 * 35 / 10])


def test_metrics_by_hand():
    pairs = PAIRS._replace(rho_w=tensor([2.0, 0.0]), rho_l=tensor([-1.0, 0.0]))
    values = metrics(pairs, Args(beta=BETA))
    assert values["rewards/chosen"] == pytest.approx(0.2) and values["rewards/rejected"] == pytest.approx(-0.1)
    assert values["rewards/margins"] == pytest.approx(0.3) and values["logps/chosen"] == -27.5 and values["logps/rejected"] == -27.5
    assert values["rewards/accuracies"] == 0.75  # the tie counts one half
    assert values["loss"] == pytest.approx((-log(sg(0.6)) + log(2)) / 2)
