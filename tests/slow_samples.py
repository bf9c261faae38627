"""The losses of rloo.py and its patches as plain loops. A batch is a list of prompts, which are lists of samples."""
from functools import cache
from math import isnan
from statistics import mean, stdev
from types import SimpleNamespace

import torch
from models import build, logps
from runs import TINY, TOKENIZER, save
from slow_losses import dpo_loss, ratio

BETA = 0.3


@cache
def many_ends():
    model = build("llama", TINY)
    model.generation_config.eos_token_id = list(range(0, len(TOKENIZER), 5))
    return save(model, "many ends")


@torch.no_grad()
def batch_of(samples, rewards, policy, reference, temperature=1.0):
    """The batch of a rollout. NaN as a reward: the sample is left out."""
    batch = []
    for (prompt, ys), samplers, values in zip(samples.groups, samples.logps, rewards.tolist()):
        olds, refs = (logps(model, [(prompt, y) for y in ys], temperature) for model in (policy, reference))
        batch.append([
            SimpleNamespace(prompt=prompt, tokens=y, old=old, ref=ref, sampler=sampler[:len(y)], reward=reward)
            for y, old, ref, sampler, reward in zip(ys, olds, refs, samplers, values)])
    return batch


def add_logps(policy, batch, temperature=1.0):
    """Gives each sample y.logp, the log-probs of its tokens now."""
    samples = sum(batch, [])
    for y, logp in zip(samples, logps(policy, [(y.prompt, y.tokens) for y in samples], temperature)):
        y.logp = logp


def centered(rewards, scale_of):
    """Reward minus mean, times a scale. 0 without a reward, and where no other has one."""
    known = [reward for reward in rewards if not isnan(reward)]
    if len(known) < 2:
        return [0.0] * len(rewards)
    return [0.0 if isnan(reward) else (reward - mean(known)) * scale_of(known) for reward in rewards]


def clipped(r, advantage, clip_eps_high=0.2):
    return torch.min(r * advantage, r.clamp(0.8, 1 + clip_eps_high) * advantage)


def tis_weight(y, tis_cap):
    return 1.0 if tis_cap is None else min(tis_cap, torch.exp(sum(y.old - y.sampler)))


def rloo(batch, tis_cap=None, **_):
    total = 0
    for prompt in batch:
        rewards = [y.reward - BETA * sum(y.old - y.ref).item() for y in prompt]
        advantages = centered(rewards, lambda known: len(known) / (len(known) - 1))
        for y, advantage in zip(prompt, advantages):
            total = total - clipped(torch.exp(sum(y.logp - y.old)), advantage) * tis_weight(y, tis_cap)
    return total / sum(map(len, batch))


def grpo(batch, loss_type="grpo", clip_eps_high=0.2, tis_cap=None, **_):
    def scale_of(known):
        return 1.0 if loss_type == "dr_grpo" else 1 / (stdev(known) + 1e-4)

    samples = sum(batch, [])
    n_tokens = sum(len(y.tokens) for y in samples if not isnan(y.reward))
    advantages = sum((centered([y.reward for y in prompt], scale_of) for prompt in batch), [])
    total = 0
    for y, advantage in zip(samples, advantages):
        r = torch.exp(y.logp - y.old)
        if loss_type == "gspo":
            r = torch.exp((y.logp - y.old).mean()).expand(len(y.tokens))
        gains = clipped(r, advantage, clip_eps_high)
        if loss_type == "cispo":
            gains = r.clamp(max=1 + clip_eps_high).detach() * advantage * y.logp
        k3 = torch.exp(y.ref - y.logp) - (y.ref - y.logp) - 1

        sizes = {"dr_grpo": len(samples) * 6, "dapo": n_tokens, "cispo": n_tokens}  # 6: max_new_tokens
        n = sizes.get(loss_type, len(samples) * len(y.tokens))
        if not isnan(y.reward):
            total = total - (gains - BETA * k3).sum() / n * tis_weight(y, tis_cap)
    return total


def online_dpo(batch, **_):
    losses = []
    for prompt in batch:
        known = [y for y in prompt if not isnan(y.reward)] or prompt[:1]
        best, worst = max(known, key=lambda y: y.reward), min(known, key=lambda y: y.reward)
        losses.append(dpo_loss(BETA * (ratio(best.logp, best.ref) - ratio(worst.logp, worst.ref))))
    return sum(losses) / len(batch)


CAP, HIGH = dict(vllm_memory=0.0, tis_cap=2.0), dict(clip_eps_high=0.28)
LOSSES = [  # names of patches, the loss of a batch, flags of both
    ("grpo", grpo, dict()),
    ("grpo", grpo, dict(loss_type="dr_grpo")),
    ("grpo", grpo, HIGH | dict(loss_type="dapo")),
    ("grpo", grpo, dict(loss_type="gspo")),
    ("grpo", grpo, HIGH | dict(loss_type="cispo")),
    ("grpo+vllm_rollouts", grpo, CAP),
    ("vllm_rollouts", rloo, CAP),
    ("online_dpo+vllm_rollouts", online_dpo, dict(vllm_memory=0.0)),
]
