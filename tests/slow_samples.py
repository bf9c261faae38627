"""The formulas of rloo.py's patches as plain loops. A sample y has y.logp, y.old, y.ref, y.sampler: log-probs of its
tokens, and y.reward: NaN if it is left out. A batch is a list of prompts, which are lists of samples. β = 0.3."""
from math import isnan
from statistics import mean, pstdev, stdev

import torch
from slow_losses import dpo_loss, ratio
from torch import tensor


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


def penalties(prompt):
    return [0.3 * sum(y.old - y.ref).item() for y in prompt]


def penalized(prompt):
    """R of rloo.py's equation (2)."""
    return [y.reward - penalty for y, penalty in zip(prompt, penalties(prompt))]


def leave_one_out(rewards):
    n = sum(not isnan(reward) for reward in rewards)
    return [advantage * n / max(1, n - 1) for advantage in centered(rewards)]


def grpo(batch):
    loss = 0
    for prompt in batch:
        for y, advantage in zip(prompt, with_std([y.reward for y in prompt])):
            k3 = torch.exp(y.ref - y.logp) - (y.ref - y.logp) - 1
            penalty = 0 if isnan(y.reward) else 0.3 * k3
            loss = loss - (clipped(torch.exp(y.logp - y.old), advantage) - penalty).mean()
    return loss / sum(map(len, batch))


def tis_weight(y):
    return min(2.0, torch.exp(sum(y.old - y.sampler)))


def over_tokens(gain, weight_of=lambda y: 1.0):
    """The mean over the tokens of a batch's samples with a reward, with GRPO's advantages."""
    def loss(batch):
        total = 0
        for prompt in batch:
            for y, advantage in zip(prompt, with_std([y.reward for y in prompt])):
                total = total - gain(y.logp, torch.exp(y.logp - y.old), advantage).sum() * weight_of(y)
        return total / tokens_of(batch)
    return loss


def over_samples(advantages_of, ratio_of=lambda y: torch.exp(sum(y.logp - y.old)), weight_of=lambda y: 1.0):
    """The mean over samples of a clipped loss per sample, or of the sum over its tokens."""
    def loss(batch):
        total = 0
        for prompt in batch:
            for y, advantage in zip(prompt, advantages_of(prompt)):
                total = total - clipped(ratio_of(y), advantage).sum() * weight_of(y)
        return total / sum(map(len, batch))
    return loss


def max_rl_advantages(prompt):
    """Reward over mean, minus 1; 0 if all rewards are 0."""
    known = [y.reward for y in scored([prompt])]
    total = sum(known) or 1.0
    over_mean = centered([y.reward * len(known) / total for y in prompt])
    centered_penalties = leave_one_out([y.reward * 0 - penalty for y, penalty in zip(prompt, penalties(prompt))])
    return [advantage + penalty for advantage, penalty in zip(over_mean, centered_penalties)]


def rloo_advantages(prompt):
    return leave_one_out(penalized(prompt))


def reinforce_pp(batch):
    whitened = iter(with_std([reward for prompt in batch for reward in penalized(prompt)]))
    return over_samples(lambda prompt: [next(whitened) for _ in prompt])(batch)


def scored(batch):
    return [y for prompt in batch for y in prompt if not isnan(y.reward)]


def tokens_of(batch):
    """Tokens of samples with a reward."""
    return sum(len(y.tokens) for y in scored(batch))


def ppo(batch):
    """y.values: V before each token, as it was before the update. Leaves y.returns for the critic."""
    for y in scored(batch):
        rewards = [-0.3 * difference for difference in (y.old - y.ref).tolist()]
        rewards[-1] += y.reward
        deltas = [reward + after - before for reward, before, after in zip(rewards, y.values, y.values[1:] + [0.0])]
        y.advantages = [sum(0.95 ** n * delta for n, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
        y.returns = [advantage + value for advantage, value in zip(y.advantages, y.values)]
    known = [advantage for y in scored(batch) for advantage in y.advantages]
    loss = 0
    for y in scored(batch):
        whitened = (tensor(y.advantages) - mean(known)) / stdev(known)
        loss = loss - clipped(torch.exp(y.logp - y.old), whitened).sum()
    return loss / tokens_of(batch)


def online_dpo(batch):
    losses = []
    for prompt in batch:
        known = [y for y in prompt if not isnan(y.reward)] or prompt[:1]
        best, worst = max(known, key=lambda y: y.reward), min(known, key=lambda y: y.reward)
        losses.append(dpo_loss(0.3 * (ratio(best.logp, best.ref) - ratio(worst.logp, worst.ref))))
    return sum(losses) / len(batch)


def dapo_gain(logp, r, advantage):
    return clipped(r, advantage, 0.2, 0.28)


FORMULAS = {
    "grpo": grpo, "online_dpo": online_dpo, "reinforce_pp": reinforce_pp,
    "dapo": over_tokens(dapo_gain), "dapo+tis": over_tokens(dapo_gain, tis_weight),
    "cispo": over_tokens(lambda a, r, advantage: r.clamp(max=1.2).detach() * advantage * a),
    "dr_grpo": over_samples(lambda prompt: centered(penalized(prompt)), lambda y: torch.exp(y.logp - y.old),
                            lambda y: 1 / 6),
    "gspo": over_samples(lambda prompt: centered(penalized(prompt), lambda known: pstdev(known) + 1e-4),
                         lambda y: torch.exp((y.logp - y.old).mean())),
    "max_rl": over_samples(max_rl_advantages),
    "tis": over_samples(rloo_advantages, weight_of=tis_weight),
    "mini_batches": over_samples(rloo_advantages),
}
