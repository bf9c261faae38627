"""The formulas of rloo.py's patches as plain loops. A sample y has y.logp, y.old, y.ref, y.sampler: log-probs
of its tokens, and y.reward: NaN if it is left out. A batch is a list of prompts, which are lists of samples.
β is 0.3."""
from math import isnan
from statistics import mean, stdev

import torch
from slow_losses import dpo_loss, ratio


def advantages_of(prompt, has_std=True):
    """Reward minus mean, over the standard deviation. 0 without a reward, and where no other has one."""
    known = [y.reward for y in prompt if not isnan(y.reward)]
    if len(known) < 2:
        return [0.0] * len(prompt)
    scale = stdev(known) + 1e-4 if has_std else 1.0
    return [0.0 if isnan(y.reward) else (y.reward - mean(known)) / scale for y in prompt]


def clipped(r, advantage, high=0.2):
    return torch.min(r * advantage, r.clamp(0.8, 1 + high) * advantage)


def gain(loss_type, y, advantage):
    """What each token of a sample adds to the objective, without the KL term."""
    r = torch.exp(y.logp - y.old)
    if loss_type == "gspo":
        r = torch.exp((y.logp - y.old).mean()).expand(len(y.tokens))
    if loss_type == "cispo":
        return r.clamp(max=1.28).detach() * advantage * y.logp
    return clipped(r, advantage, 0.28 if loss_type == "dapo" else 0.2)


def group_loss(loss_type, weight_of=lambda y: 1.0):
    def loss(batch):
        samples = sum(batch, [])
        n_tokens = sum(len(y.tokens) for y in samples if not isnan(y.reward))
        total = 0
        for prompt in batch:
            for y, advantage in zip(prompt, advantages_of(prompt, loss_type != "dr_grpo")):
                k3 = torch.exp(y.ref - y.logp) - (y.ref - y.logp) - 1
                gains = gain(loss_type, y, advantage) - 0.3 * k3
                n = len(samples) * len(y.tokens)
                if loss_type == "dr_grpo":
                    n = len(samples) * 6  # max_new_tokens
                if loss_type in ("dapo", "cispo"):
                    n = n_tokens
                if not isnan(y.reward):
                    total = total - gains.sum() / n * weight_of(y)
        return total
    return loss


def leave_one_out(prompt):
    """RLOO's advantages."""
    rewards = [y.reward - 0.3 * sum(y.old - y.ref).item() for y in prompt]
    known = [reward for reward in rewards if not isnan(reward)]
    if len(known) < 2:
        return [0.0] * len(prompt)
    scale = len(known) / (len(known) - 1)
    return [0.0 if isnan(reward) else (reward - mean(known)) * scale for reward in rewards]


def tis_weight(y):
    return min(2.0, torch.exp(sum(y.old - y.sampler)))


def weighted_rloo(batch):
    total = 0
    for prompt in batch:
        for y, advantage in zip(prompt, leave_one_out(prompt)):
            total = total - clipped(torch.exp(sum(y.logp - y.old)), advantage) * tis_weight(y)
    return total / sum(map(len, batch))


def online_dpo(batch):
    losses = []
    for prompt in batch:
        known = [y for y in prompt if not isnan(y.reward)] or prompt[:1]
        best, worst = max(known, key=lambda y: y.reward), min(known, key=lambda y: y.reward)
        losses.append(dpo_loss(0.3 * (ratio(best.logp, best.ref) - ratio(worst.logp, worst.ref))))
    return sum(losses) / len(batch)


NO_VLLM, CAP, HIGH = dict(vllm_memory=0.0), dict(vllm_memory=0.0, tis_cap=2.0), dict(clip_eps_high=0.28)
FORMULAS = [  # names of patches, flags, the loss of a batch
    ("grpo", dict(), group_loss("grpo")),
    ("grpo", dict(loss_type="dr_grpo"), group_loss("dr_grpo")),
    ("grpo", HIGH | dict(loss_type="dapo"), group_loss("dapo")),
    ("grpo", dict(loss_type="gspo"), group_loss("gspo")),
    ("grpo", HIGH | dict(loss_type="cispo"), group_loss("cispo")),
    ("grpo+vllm_rollouts", CAP, group_loss("grpo", tis_weight)),
    ("vllm_rollouts", CAP, weighted_rloo),
    ("online_dpo+vllm_rollouts", NO_VLLM, online_dpo),
]
