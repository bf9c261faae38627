"""The losses of dpo.py: values and gradients against plain Python, properties that all of them share, their metrics."""
from math import exp, log
from typing import get_args, get_type_hints

import pytest
import torch
from torch import tensor

import dpo
from dpo import Args, Batch, Loss, metrics, objective, preference_loss

DIVERGENCES = get_args(get_type_hints(Args)["divergence"])
BETA, EPS, GAMMA, ETA = 0.2, 0.1, 0.6, 2.0
ARGS = dict(beta=BETA, label_smoothing=EPS, simpo_gamma=GAMMA, rpo_eta=ETA)

# two pairs: log π of w and l, log-ratios to the reference, lengths, rewards in the data, share of unclamped tokens
PAIRS = Batch(logp_w=tensor([-20.0, -35.0]), logp_l=tensor([-24.0, -31.0]), ratio_w=tensor([2.0, -1.5]),
              ratio_l=tensor([-1.0, 0.5]), len_w=tensor([8.0, 10.0]), len_l=tensor([6.0, 14.0]),
              score_w=tensor([1.5, 0.3]), score_l=tensor([0.5, 0.9]), unclamped=tensor([1.0, 1.0]))


def sg(x): return 1 / (1 + exp(-x))
def kl(p, q): return p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))
def cdpo(z): return -(1 - EPS) * log(sg(z)) - EPS * log(sg(-z))


BY_HAND = {  # z = β (c − r); c, r: log-ratios; w, l: log π; n, m: lengths; a, b: rewards in the data
    "sigmoid": lambda z, c, r, w, l, n, m, a, b: cdpo(z),
    "hinge": lambda z, c, r, w, l, n, m, a, b: max(0, 1 - z),
    "ipo": lambda z, c, r, w, l, n, m, a, b: (c / n - r / m - 1 / (2 * BETA)) ** 2,
    "sigmoid_norm": lambda z, c, r, w, l, n, m, a, b: -log(sg(BETA * (c / n - r / m))),
    "robust": lambda z, c, r, w, l, n, m, a, b: (-(1 - EPS) * log(sg(z)) + EPS * log(sg(-z))) / (1 - 2 * EPS),
    "exo_pair": lambda z, c, r, w, l, n, m, a, b: kl(sg(z), 1 - EPS),
    "nca_pair": lambda z, c, r, w, l, n, m, a, b:
        -log(sg(BETA * c)) - log(sg(-BETA * c)) / 2 - log(sg(-BETA * r)) / 2,
    "bco_pair": lambda z, c, r, w, l, n, m, a, b: -log(sg(BETA * c)) - log(sg(-BETA * r)),
    "sppo_hard": lambda z, c, r, w, l, n, m, a, b: (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda z, c, r, w, l, n, m, a, b: 1 - sg(BETA * c) + sg(BETA * r),
    "apo_down": lambda z, c, r, w, l, n, m, a, b: sg(BETA * c) + 1 - sg(z),
    "discopop": lambda z, c, r, w, l, n, m, a, b: -(1 - sg(z / 0.05)) * log(sg(z)) + sg(z / 0.05) * exp(-z),
    "rpo_sq": lambda z, c, r, w, l, n, m, a, b: (z - ETA * (a - b)) ** 2,
    "rpo_bwd_kl": lambda z, c, r, w, l, n, m, a, b: kl(sg(ETA * (a - b)), sg(z)),
    "rpo_fwd_kl": lambda z, c, r, w, l, n, m, a, b: kl(sg(z), sg(ETA * (a - b))),
    "simpo": lambda z, c, r, w, l, n, m, a, b: -log(sg(BETA * (w / n - l / m - GAMMA / BETA))),
    "sft": lambda z, c, r, w, l, n, m, a, b: -w / n,
}
OF_THE_MARGIN = ["sigmoid", "hinge", "robust", "exo_pair", "discopop", "rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl"]
F_PRIME = {  # f'(u), arXiv:2309.16240, table 1
    "reverse_kl": lambda u: log(u) + 1, "forward_kl": lambda u: -1 / u,
    "js": lambda u: log(2 * u / (1 + u)), "alpha": lambda u: (1 - u ** -0.3) / 0.3}


def by_hand(name, c, r, w, l, n, m, a, b, divergence="reverse_kl"):
    f = F_PRIME[divergence]
    return BY_HAND[name](BETA * (f(exp(c)) - f(exp(r))), c, r, w, l, n, m, a, b)


def rows_of(batch):
    return list(zip(*(x.tolist() for x in (batch.ratio_w, batch.ratio_l, batch.logp_w, batch.logp_l, batch.len_w,
                                           batch.len_l, batch.score_w, batch.score_l))))


def loss_and_gradients(name, **changes):
    """The losses of PAIRS, and their gradients of c, r, w and l: (4, 2)."""
    leaves = [x.double().requires_grad_() for x in (PAIRS.ratio_w, PAIRS.ratio_l, PAIRS.logp_w, PAIRS.logp_l)]
    names = ("ratio_w", "ratio_l", "logp_w", "logp_l")
    batch = Batch(*(x.double() for x in PAIRS))._replace(**dict(zip(names, leaves)))
    losses = preference_loss(name, batch, Args(**ARGS | changes))
    gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    return losses.tolist(), [[0.0, 0.0] if g is None else g.tolist() for g in gradients]


CASES = [(name, "reverse_kl") for name in BY_HAND] + [(n, d) for n in OF_THE_MARGIN for d in DIVERGENCES[1:]]


@pytest.mark.parametrize("name, divergence", CASES)
def test_value_and_gradient_equal_the_formula_in_plain_python(name, divergence):
    losses, gradients = loss_and_gradients(name, divergence=divergence, alpha=0.3)
    for i, row in enumerate(rows_of(PAIRS)):
        assert losses[i] == pytest.approx(by_hand(name, *row, divergence), rel=1e-5)
        for j in range(4):  # central differences of the formula
            up, down = ([x + step * (k == j) for k, x in enumerate(row)] for step in (1e-5, -1e-5))
            slope = (by_hand(name, *up, divergence) - by_hand(name, *down, divergence)) / 2e-5
            assert gradients[j][i] == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_literal_values():
    """β = 0.2, margins 0.6 and −0.4, no label smoothing."""
    plain = Args(beta=0.2)
    assert preference_loss("sigmoid", PAIRS, plain).tolist() == pytest.approx([0.4374879, 0.9130153], abs=1e-6)
    assert preference_loss("hinge", PAIRS, plain).tolist() == pytest.approx([0.4, 1.4])
    assert preference_loss("ipo", PAIRS, plain).tolist() == pytest.approx([4.3402778, 7.2130612], abs=1e-5)
    assert preference_loss("sppo_hard", PAIRS, plain).tolist() == pytest.approx([2.5, 25.0])
    assert preference_loss("sft", PAIRS, plain).tolist() == pytest.approx([2.5, 3.5])


def test_alpha_divergence_reaches_the_kl_divergences_at_its_ends():
    """α = 1 is the forward KL divergence, and α near 0 the reverse one."""
    for name in OF_THE_MARGIN:
        for alpha, divergence in ((1.0, "forward_kl"), (1e-4, "reverse_kl")):
            alike = [preference_loss(name, PAIRS, Args(**ARGS, **flags)).tolist()
                     for flags in (dict(divergence="alpha", alpha=alpha), dict(divergence=divergence))]
            assert alike[0] == pytest.approx(alike[1], rel=5e-3, abs=2e-3)


def test_aot_compares_sorted_log_ratios_of_the_batch():
    # policy log-ratios w − l: 4, −4; the reference's: 4 − 3 = 1, −4 + 2 = −2. Sorted: (−4, 4) − (−2, 1) = (−2, 3)
    losses, _ = loss_and_gradients("aot")
    assert losses == pytest.approx([cdpo(BETA * -2), cdpo(BETA * 3)], rel=1e-5)


def test_aot_unpaired_compares_sorted_chosen_with_sorted_rejected_ratios():
    # c: 2, −1.5 and r: −1, 0.5. Sorted: (−1.5, 2) − (−1, 0.5) = (−0.5, 1.5)
    losses, gradients = loss_and_gradients("aot_unpaired")
    assert losses == pytest.approx([cdpo(BETA * -0.5), cdpo(BETA * 1.5)], rel=1e-5)
    slope = {x: BETA * ((1 - EPS) * (sg(BETA * x) - 1) + EPS * sg(BETA * x)) for x in (-0.5, 1.5)}
    assert gradients[0] == pytest.approx([slope[1.5], slope[-0.5]], rel=1e-5)
    assert gradients[1] == pytest.approx([-slope[-0.5], -slope[1.5]], rel=1e-5)


def test_the_formulas_above_cover_every_loss_of_the_command_line():
    assert set(BY_HAND) | {"aot", "aot_unpaired"} == set(get_args(Loss)) and set(F_PRIME) == set(DIVERGENCES)
    with pytest.raises(ValueError, match="no loss"):
        preference_loss("dpo2", PAIRS, Args())


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_at_the_reference_dpo_is_ln_2_under_every_divergence(divergence):
    start = PAIRS._replace(ratio_w=torch.zeros(2), ratio_l=torch.zeros(2))
    for eps in (0.0, EPS):
        loss = preference_loss("sigmoid", start, Args(divergence=divergence, label_smoothing=eps))
        assert loss.tolist() == pytest.approx([log(2)] * 2)


@pytest.mark.parametrize("name", sorted(set(get_args(Loss)) - {"apo_down", "discopop", "sft"}))
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_at_the_reference_every_gradient_raises_the_chosen_and_lowers_the_rejected(name, divergence):
    """Not apo_down, which lowers both, and not discopop, which has a local maximum there (its paper, figure 2)."""
    logp_w, logp_l = (tensor([-20.0, -20.1], requires_grad=True) for _ in range(2))
    ratios = dict(ratio_w=logp_w - logp_w.detach(), ratio_l=logp_l - logp_l.detach())
    batch = PAIRS._replace(logp_w=logp_w, logp_l=logp_l, **ratios, score_w=tensor([1.0, 2.0]), score_l=torch.zeros(2))
    args = Args(divergence=divergence, label_smoothing=1e-3 if name == "exo_pair" else 0.0)
    preference_loss(name, batch, args).sum().backward()
    assert (logp_w.grad < 0).all() and (logp_l.grad > 0).all()


def test_apo_down_lowers_the_rejected_more_than_the_chosen():
    ratio_w, ratio_l = (torch.zeros(2, requires_grad=True) for _ in range(2))
    preference_loss("apo_down", PAIRS._replace(ratio_w=ratio_w, ratio_l=ratio_l), Args()).sum().backward()
    assert (ratio_w.grad >= 0).all() and (ratio_l.grad > ratio_w.grad).all()


def check_extremes(name, x, **flags):
    """Value and gradient of pairs that the policy has moved x nats from its reference, in all directions."""
    leaves = [tensor(values, requires_grad=True) for values in ([x, -x, -x, x], [-x, x, -x, x], [-1.0, -900.0] * 2)]
    more = {field: getattr(PAIRS, field).repeat(2) for field in Batch._fields}
    batch = Batch(**more | dict(zip(("ratio_w", "ratio_l", "logp_w"), leaves)))
    loss = preference_loss(name, batch, Args(label_smoothing=0.1, **flags))
    gradients = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    assert loss.isfinite().all() and all(g is None or g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("name", [*OF_THE_MARGIN, "apo_down"])
def test_log_ratios_of_40_nats_stay_finite_under_every_divergence(name, divergence):
    check_extremes(name, 40.0, divergence=divergence)


@pytest.mark.parametrize("name", get_args(Loss))
def test_log_ratios_of_hundreds_of_nats_stay_finite(name):
    check_extremes(name, 400.0)


@pytest.mark.parametrize("weights", [(), (0.8, 0.3, 1.0)])
def test_several_losses_are_added_with_their_weights(weights):
    """MPO adds a preference, a quality and a generation loss, arXiv:2411.10442."""
    names = ("sigmoid", "bco_pair", "sft")
    losses = objective(PAIRS, Args(**ARGS, loss=names, loss_weights=weights))
    expected = sum(w * preference_loss(name, PAIRS, Args(**ARGS)) for w, name in zip(weights or (1, 1, 1), names))
    assert losses.tolist() == pytest.approx(expected.tolist()) and losses.shape == (2,)


def test_metrics_by_hand():
    values = metrics(PAIRS._replace(ratio_w=tensor([2.0, 0.0]), ratio_l=tensor([-1.0, 0.0])), Args(beta=BETA))
    assert values["rewards/chosen"] == pytest.approx(0.2) and values["rewards/rejected"] == pytest.approx(-0.1)
    assert values["rewards/margins"] == pytest.approx(0.3) and values["rewards/accuracies"] == 0.75
    assert values["logps/chosen"] == -27.5 and values["logps/rejected"] == -27.5
    assert values["loss"] == pytest.approx((-log(sg(0.6)) + log(2)) / 2)


@pytest.mark.parametrize("difference, accuracy", [(0.05, 1.0), (-0.05, 0.0), (1e-6, 0.5), (-1e-6, 0.5), (0.0, 0.5)])
def test_ties_are_judged_on_log_ratios_whatever_beta_is(difference, accuracy):
    pairs = PAIRS._replace(ratio_w=torch.full((2,), difference), ratio_l=torch.zeros(2))
    for beta in (1e-3, 0.1, 10.0):
        assert metrics(pairs, Args(beta=beta))["rewards/accuracies"] == accuracy


def test_rewards_of_simpo_are_averaged_over_tokens():
    pairs = PAIRS._replace(ratio_w=PAIRS.logp_w, ratio_l=PAIRS.logp_l)  # it has no reference
    values = metrics(pairs, Args(beta=2.0, loss=("simpo",)))
    assert values["rewards/chosen"] == pytest.approx(2 * (-20 / 8 - 35 / 10) / 2)
    assert values["rewards/margins"] == pytest.approx(2 * ((-20 / 8 + 24 / 6) + (-35 / 10 + 31 / 14)) / 2)


# ---- From tokens to the batch: dpo.measure and dpo.backward ---------------------------------------------------------

ROWS = [dpo.Row((5, 9, 33), (60, 12, 7, 2), (90, 2), 1.0, 0.5, {}),
        dpo.Row((8, 3), (77, 2), (21, 4, 96, 5, 2), 0.3, 0.1, {}),
        dpo.Row((8, 3, 14, 20), (17, 30, 2), (41, 6, 2), 0.9, 0.0, {}),
        dpo.Row((50,), (51, 52, 53, 54, 2), (55, 2), 0.0, 0.0, {})]


@pytest.fixture(scope="module")
def policy_and_known():
    """A small model, and the log-probs of another one."""
    from models import make
    from refcache import ReferenceCache, share_prompts
    policy, known = make("llama", 1), ReferenceCache()
    share_prompts(policy)
    known.score(make("llama", 2), dpo.groups(ROWS))
    return policy, known


def token_logps(model, prompt, y):
    logits = model(torch.tensor([prompt + y])).logits[0, len(prompt) - 1:-1]
    return logits.log_softmax(-1).gather(1, tensor(y)[:, None])[:, 0]


@pytest.mark.parametrize("ld_alpha", [1.0, 0.4, 0.0])
def test_ld_alpha_weighs_the_tokens_beyond_the_shorter_answer(policy_and_known, ld_alpha):
    """LD-DPO, arXiv:2409.06411: the tokens beyond the length of the pair's shorter answer."""
    policy, known = policy_and_known
    with torch.no_grad():
        batch = dpo.measure(policy, ROWS, known, Args(dtype="float32", ld_alpha=ld_alpha))
    for i, row in enumerate(ROWS):
        shorter = min(len(row.chosen), len(row.rejected))
        for y, ratio, size in ((row.chosen, batch.ratio_w, batch.len_w), (row.rejected, batch.ratio_l, batch.len_l)):
            ratios = token_logps(policy, row.prompt, y) - tensor(known[row.prompt, y])
            expected = ratios[:shorter].sum() + ld_alpha * ratios[shorter:].sum()
            assert ratio[i].item() == pytest.approx(expected.item(), abs=1e-4) and size[i] == len(y)


MICRO = [dict(loss=("sigmoid",), ld_alpha=0.5), dict(loss=("ipo",)), dict(loss=("aot",)), dict(loss=("aot_unpaired",)),
         dict(loss=("aot", "sft"), loss_weights=(1.0, 0.5)), dict(loss=("rpo_fwd_kl",), divergence="js"),
         dict(loss=("aot_unpaired",), humanline=(-0.5, 0.5), ref="swap")]


@pytest.mark.parametrize("flags", MICRO, ids=lambda flags: "-".join(map(str, flags.values())))
def test_loss_and_gradient_are_the_same_under_any_micro_batching(policy_and_known, flags):
    """Also where a loss sees the whole batch."""
    policy, known = policy_and_known
    seen = []
    for budget in (100_000, 25, 1):
        args = Args(**dict(dtype="float32", label_smoothing=0.1, rpo_eta=2.0, tokens_per_forward=budget) | flags)
        policy.zero_grad()
        batch = dpo.backward(policy, ROWS, known, args)
        assert not batch.ratio_w.requires_grad
        seen.append((metrics(batch, args), torch.cat([p.grad.flatten() for p in policy.parameters()])))
    with torch.no_grad():
        whole = objective(dpo.measure(policy, ROWS, known, args), args).mean().item()
    for values, gradient in seen:
        assert values == pytest.approx(seen[0][0], rel=1e-4, abs=1e-4)
        assert values["loss"] == pytest.approx(whole, rel=1e-4)
        torch.testing.assert_close(gradient, seen[0][1], rtol=1e-3, atol=1e-4 * seen[0][1].abs().max().item())
    assert seen[0][1].abs().max() > 1e-4


def test_gradient_of_a_batch_is_that_of_its_mean_loss(policy_and_known):
    """By hand: one forward per sequence, the DPO loss as in the paper."""
    policy, known = policy_and_known
    policy.zero_grad()
    dpo.backward(policy, ROWS, known, Args(dtype="float32", beta=0.3, tokens_per_forward=25))
    gradient = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    loss = 0.0
    for row in ROWS:
        c, r = ((token_logps(policy, row.prompt, y) - tensor(known[row.prompt, y])).sum()
                for y in (row.chosen, row.rejected))
        loss = loss - torch.nn.functional.logsigmoid(0.3 * (c - r)) / len(ROWS)
    loss.backward()
    for p, g in zip(policy.parameters(), gradient):
        torch.testing.assert_close(g, p.grad, rtol=1e-3, atol=1e-5)


def test_humanline_clamps_every_token_and_counts_the_clamped(policy_and_known):
    policy, known = policy_and_known
    with torch.no_grad():
        batch = dpo.measure(policy, ROWS, known, Args(dtype="float32", humanline=(-1.0, 1.5), ref="swap"))
    for i, row in enumerate(ROWS):
        ratios = [token_logps(policy, row.prompt, y) - tensor(known[row.prompt, y]) for y in (row.chosen, row.rejected)]
        assert batch.ratio_w[i].item() == pytest.approx(ratios[0].clamp(-1.0, 1.5).sum().item(), abs=1e-4)
        assert batch.ratio_l[i].item() == pytest.approx(ratios[1].clamp(-1.0, 1.5).sum().item(), abs=1e-4)
        free = ((torch.cat(ratios) > -1.0) & (torch.cat(ratios) < 1.5)).float().mean().item()
        assert batch.unclamped[i].item() == pytest.approx(free)
    assert 0 < batch.unclamped.mean() < 1


def test_without_a_reference_log_ratios_are_log_probs(policy_and_known):
    policy, _ = policy_and_known
    with torch.no_grad():
        batch = dpo.measure(policy, ROWS, None, Args(dtype="float32", ref="none"))
    assert batch.ratio_w.equal(batch.logp_w) and batch.ratio_l.equal(batch.logp_l)
