"""The formulas of changes/ as plain loops. A pair is w, l, ref_w, ref_l: log-probs of tokens, of the policy and of the
reference. A sample y has y.logp, y.old, y.ref, y.sampler: log-probs of tokens, and y.reward: NaN if it is left out. A
batch is a list of prompts, which are lists of samples."""
from functools import cache
from math import isnan
from statistics import mean, pstdev, stdev

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


def f_divergence(f_prime):
    return lambda w, l, ref_w, ref_l, *_: dpo_loss(
        0.3 * (f_prime(torch.exp(ratio(w, ref_w))) - f_prime(torch.exp(ratio(l, ref_l)))))


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


# --- Samples

def clipped(r, advantage, low=0.2, high=0.2):
    return torch.min(r * advantage, r.clamp(1 - low, 1 + high) * advantage)


def centered(rewards, divide=lambda known: 1.0):
    """Reward minus mean, over divide(the known rewards), and 0 if fewer than two are known."""
    known = [reward for reward in rewards if not isnan(reward)]
    if len(known) < 2:
        return [0.0] * len(rewards)
    return [0.0 if isnan(reward) else (reward - mean(known)) / divide(known) for reward in rewards]


def with_std(rewards):
    return centered(rewards, lambda known: stdev(known) + 1e-4)


def penalized(prompt, beta):
    """R of rloo.py's equation (2)."""
    return [y.reward - beta * sum(y.old - y.ref).item() for y in prompt]


def leave_one_out(rewards):
    n = sum(not isnan(reward) for reward in rewards)
    return [advantage * n / max(1, n - 1) for advantage in centered(rewards)]


def grpo(batch, beta):
    loss = 0
    for prompt in batch:
        for y, advantage in zip(prompt, with_std([y.reward for y in prompt])):
            for a, b, c in zip(y.logp, y.old, y.ref):
                k3 = 0 if isnan(y.reward) else torch.exp(c - a) - (c - a) - 1
                loss = loss - (clipped(torch.exp(a - b), advantage) - beta * k3) / len(y.logp)
    return loss / sum(map(len, batch))


def over_tokens(gain):
    """The mean over the tokens of a batch, with GRPO's advantages."""
    def loss(batch, beta):
        total = 0
        for prompt in batch:
            for y, advantage in zip(prompt, with_std([y.reward for y in prompt])):
                total = total - sum(gain(a, torch.exp(a - b), advantage) for a, b in zip(y.logp, y.old))
        return total / tokens_of(batch)
    return loss


def over_samples(advantages_of, ratio_of=lambda y: torch.exp(sum(y.logp - y.old)), weight_of=lambda y: 1.0):
    """The mean over samples of a clipped loss per sample, or of the sum over its tokens."""
    def loss(batch, beta):
        total = 0
        for prompt in batch:
            for y, advantage in zip(prompt, advantages_of(prompt, beta)):
                total = total - clipped(ratio_of(y), advantage).sum() * weight_of(y)
        return total / sum(map(len, batch))
    return loss


def dr_grpo_advantages(prompt, beta):
    return centered(penalized(prompt, beta))


def gspo_advantages(prompt, beta):
    return centered(penalized(prompt, beta), lambda known: pstdev(known) + 1e-4)


def max_rl_advantages(prompt, beta):
    penalties = leave_one_out([y.reward * 0 - beta * sum(y.old - y.ref).item() for y in prompt])
    rewards = [y.reward for y in prompt]
    if not sum(reward for reward in rewards if reward > 0):
        return penalties
    known = [reward for reward in rewards if not isnan(reward)]
    return [0 if isnan(reward) else reward / mean(known) - 1 + penalty for reward, penalty in zip(rewards, penalties)]


def rloo_advantages(prompt, beta):
    return leave_one_out(penalized(prompt, beta))


def reinforce_pp(batch, beta):
    rewards = [reward for prompt in batch for reward in penalized(prompt, beta)]
    whitened = iter(with_std(rewards))
    return over_samples(lambda prompt, beta: [next(whitened) for _ in prompt])(batch, beta)


def tokens_of(batch):
    return sum(len(y.logp) for prompt in batch for y in prompt)


def scored(batch):
    return [y for prompt in batch for y in prompt if not isnan(y.reward)]


def ppo(batch, beta):
    """y.values: V before each token, as it was before the update. Leaves y.returns for the critic."""
    for y in scored(batch):
        rewards = [-beta * difference for difference in (y.old - y.ref).tolist()]
        rewards[-1] += y.reward
        deltas = [reward + after - before for reward, before, after in zip(rewards, y.values, y.values[1:] + [0.0])]
        y.advantages = [sum(0.95 ** n * delta for n, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
        y.returns = [advantage + value for advantage, value in zip(y.advantages, y.values)]
    known = [advantage for y in scored(batch) for advantage in y.advantages]
    loss = 0
    for y in scored(batch):
        for a, b, advantage in zip(y.logp, y.old, y.advantages):
            loss = loss - clipped(torch.exp(a - b), (advantage - mean(known)) / stdev(known))
    return loss / tokens_of(batch)


def online_dpo(batch, beta):
    losses = []
    for prompt in batch:
        known = [y for y in prompt if not isnan(y.reward)] or prompt[:1]
        best, worst = max(known, key=lambda y: y.reward), min(known, key=lambda y: y.reward)
        losses.append(dpo_loss(beta * (ratio(best.logp, best.ref) - ratio(worst.logp, worst.ref))))
    return sum(losses) / len(batch)


FORMULAS = {
    "grpo": grpo, "online_dpo": online_dpo, "reinforce_pp": reinforce_pp,
    "dapo": over_tokens(lambda a, r, advantage: clipped(r, advantage, 0.2, 0.28)),
    "cispo": over_tokens(lambda a, r, advantage: r.clamp(max=1.2).detach() * advantage * a),
    "dr_grpo": over_samples(dr_grpo_advantages, lambda y: torch.exp(y.logp - y.old), lambda y: 1 / 6),
    "gspo": over_samples(gspo_advantages, lambda y: torch.exp((y.logp - y.old).mean())),
    "max_rl": over_samples(max_rl_advantages),
    "tis": over_samples(rloo_advantages, weight_of=lambda y: min(2.0, torch.exp(sum(y.old - y.sampler)))),
    "mini_batches": over_samples(rloo_advantages),
}
