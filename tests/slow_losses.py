"""The formulas of changes/ as plain loops. A pair is w, l, ref_w, ref_l: log-probs of tokens, of the policy and of the
reference."""
from functools import cache

import torch
from models import build, logps
from runs import TINY, TOKENIZER, save
from torch import log1p, tensor


@cache
def model_with_many_ends():
    """Its samples have different lengths."""
    model = build("llama", TINY)
    model.generation_config.eos_token_id = list(range(0, len(TOKENIZER), 5))
    return save(model, "many ends")


# --- Pairs

def dpo_loss(margin):
    return log1p(torch.exp(-margin))


def ratio(y, ref):
    return (y - ref).sum()


def orpo(w, l, *_):
    odds_w, odds_l = (torch.exp(y.mean()) / (1 - torch.exp(y.mean())) for y in (w, l))
    return -w.mean() + 0.3 * log1p(odds_l / odds_w)


def margin(w, l, ref_w, ref_l):
    return 0.3 * (ratio(w, ref_w) - ratio(l, ref_l))


def dpop(w, l, ref_w, ref_l, *_):
    return dpo_loss(margin(w, l, ref_w, ref_l) - 1.5 * max(tensor(0.0), -ratio(w, ref_w)))


def weighted(weight_of):
    """The tokens' log-ratios are multiplied by weight_of(token's number, length of the shorter answer)."""
    def loss(w, l, ref_w, ref_l, *_):
        shorter = min(len(w), len(l))
        a, b = (tensor([float(weight_of(t, shorter)) for t in range(len(y))]) for y in (w, l))
        return dpo_loss(margin(a * w, b * l, a * ref_w, b * ref_l))
    return loss


def coins(x, y):
    """KL between two coins, heads with σ(x) and with σ(y)."""
    p, q = (1 / (1 + torch.exp(-z)) for z in (x, y))
    return p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))


def rpo(distance):
    def loss(w, l, ref_w, ref_l, row, policy):
        delta = row.columns["chosen_reward"] - float(row.columns["rejected_reward"])
        return distance(margin(w, l, ref_w, ref_l), tensor(delta))
    return loss


def f_divergence(f_prime, loss):
    """loss(f'(r_w), f'(r_l), length of w, length of l)"""
    def slow_loss(w, l, ref_w, ref_l, *_):
        return loss(*(f_prime(torch.exp(ratio(*y))) for y in ((w, ref_w), (l, ref_l))), len(w), len(l))
    return slow_loss


def alpha_po(w, l, *_):
    rewards = [(1 - torch.exp(y.mean()) ** -0.25) / 0.25 for y in (w, l)]
    return dpo_loss(0.3 * (rewards[0] - rewards[1]) - 0.5)


def wpo(w, l, ref_w, ref_l, row, policy):
    weight = 1
    for y, tokens in ((w, row.chosen), (l, row.rejected)):
        logits = policy(tensor([row.prompt + tokens])).logits[0, len(row.prompt) - 1:-1]
        squares = (logits.softmax(-1) ** 2).sum(-1)
        weight = weight * torch.exp((y - squares.log()).mean()).detach()
    return weight * plain(w, l, ref_w, ref_l)


def plain(w, l, ref_w, ref_l, *_):
    return dpo_loss(margin(w, l, ref_w, ref_l))


def logps_of(model, rows, trains=True):
    """(w, l) of every pair."""
    with torch.set_grad_enabled(trains):
        both = iter(logps(model, [(row.prompt, y) for row in rows for y in (row.chosen, row.rejected)]))
    return list(zip(both, both))


def of_pairs(formula, reference):
    """The mean over pairs."""
    def slow_loss(policy, rows, *_):
        pairs = zip(logps_of(policy, rows), logps_of(reference, rows, False), rows)
        return sum(formula(*mine, *theirs, row, policy) for mine, theirs, row in pairs) / len(rows)
    return slow_loss


def aot(loss, reference):
    def slow_loss(policy, rows, *_):
        sums, refs = ([[y.sum() for y in pair] for pair in logps_of(model, rows, model is policy)]
                      for model in (policy, reference))
        if loss == "aot":
            better, worse = [w - l for w, l in sums], [w - l for w, l in refs]
        else:
            better, worse = ([pair[i] - ref[i] for pair, ref in zip(sums, refs)] for i in (0, 1))
        return sum(dpo_loss(0.3 * (u - v)) for u, v in zip(sorted(better), sorted(worse))) / len(rows)
    return slow_loss
