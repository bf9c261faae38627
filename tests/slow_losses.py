"""The formulas of the patches of dpo.py as plain loops. A pair is w, l, ref_w, ref_l: log-probs of tokens, of
the policy and of the reference; and its row. β is 0.3, label smoothing 0.1."""
import torch
from models import logps
from torch import log1p, sigmoid


def dpo_loss(margin):
    return log1p(torch.exp(-margin))


def ratio(y, ref):
    return (y - ref).sum()


def orpo(w, l, *_):
    odds_w, odds_l = (torch.exp(y.mean()) / (1 - torch.exp(y.mean())) for y in (w, l))
    return -w.mean() + 0.3 * log1p(odds_l / odds_w)


LOSSES = {  # of the rewards β ρ of w and l
    "hinge": lambda w, l: max(0.0 * w, 1 - (w - l)),
    "robust": lambda w, l: (0.9 * dpo_loss(w - l) - 0.1 * dpo_loss(l - w)) / 0.8,
    "exo_pair": lambda w, l: (sigmoid(w - l) * torch.log(sigmoid(w - l) / 0.9)
                              + sigmoid(l - w) * torch.log(sigmoid(l - w) / 0.1)),
    "nca_pair": lambda w, l: dpo_loss(w) + (dpo_loss(-w) + dpo_loss(-l)) / 2,
    "bco_pair": lambda w, l: dpo_loss(w) + dpo_loss(-l),
    "sppo_hard": lambda w, l: ((w - 0.5) / 0.3) ** 2 + ((l + 0.5) / 0.3) ** 2,
    "apo_down": lambda w, l: sigmoid(w) + 1 - sigmoid(w - l),
    "discopop": lambda w, l: (sigmoid(-20 * (w - l)) * dpo_loss(w - l)
                              + sigmoid(20 * (w - l)) * torch.exp(l - w)),
}


def all_losses(w, l, ref_w, ref_l, *_):
    reward_w, reward_l = 0.3 * ratio(w, ref_w), 0.3 * ratio(l, ref_l)
    return sum((n + 1) * loss(reward_w, reward_l) for n, loss in enumerate(LOSSES.values()))


def masked(w, l, ref_w, ref_l, row):
    """sigmoid_norm, whose means are over trained tokens alone."""
    mask_w, mask_l = map(torch.tensor, row.trained)
    return dpo_loss(0.3 * ((w - ref_w)[mask_w].mean() - (l - ref_l)[mask_l].mean()))


def of_pairs(formula, reference):
    def slow_loss(policy, rows, *_):
        total = 0
        for row in rows:
            answers = [(row.prompt, row.chosen), (row.prompt, row.rejected)]
            total += formula(*logps(policy, answers), *logps(reference, answers), row)
        return total / len(rows)
    return slow_loss
