"""Patches of rloo.py: loss and gradient of each batch are those of a plain loop over samples."""
from math import isnan, nan
from types import SimpleNamespace

import pytest
import torch
from models import gradient, logps
from runs import arguments, load
from slow_losses import model_with_many_ends
from slow_samples import FORMULAS, ppo, tokens_of
from test_changes import SLOW, changed, run, watch
from torch import tensor


SCORES = tensor([[1.0, 0.0, 0.4], [2.0, nan, 1.0], [nan, 1.0, nan], [0.0, 0.0, 0.0]])  # one scored sample; a tie


def watch_samples(monkeypatch, name, formula, beta):
    """watch() of the samples of a run, which get SCORES. Returns the samples, too: {prompt: [sample, ..]}."""
    module, reference, known = changed(name), load(model_with_many_ends()), {}
    rollout = module.rollout

    def watched_rollout(policy, tokenizer, prompts, k, *rest):
        samples = rollout(policy, tokenizer, prompts, k, *rest)
        noise = torch.sin(torch.arange(samples.logps.numel())).view(samples.logps.shape)
        samples = samples._replace(logps=(samples.logps + noise) * samples.mask)  # of another sampler
        rows = [(prompt, y) for prompt, ys in samples.groups for y in ys]
        with torch.no_grad():
            olds, refs = (logps(model, rows) for model in (policy, reference if beta else policy))
        known.update({prompt: [] for prompt, _ in samples.groups})
        for (prompt, y), sampler, old, ref in zip(rows, samples.logps.flatten(0, 1), olds, refs):
            known[prompt].append(SimpleNamespace(tokens=y, sampler=sampler[:len(y)], old=old, ref=ref))
        return samples

    def crafted_rewards(samples, *rest):
        for (prompt, _), rewards, ended in zip(samples.groups, SCORES.tolist(), samples.ended):
            for y, reward, has_ended in zip(known[prompt], rewards, ended):
                y.reward = reward if has_ended else nan  # --mask_truncated
        return SCORES, {}

    def slow_loss(policy, samples, *_):
        rows = [(prompt, y) for prompt, _ in samples.groups for y in known[prompt]]
        for (_, y), logp in zip(rows, logps(policy, [(prompt, y.tokens) for prompt, y in rows])):
            y.logp = logp
        return formula([known[prompt] for prompt, _ in samples.groups], beta)

    monkeypatch.setattr(module, "rollout", watched_rollout)
    monkeypatch.setattr(module, "compute_rewards", crafted_rewards)
    monkeypatch.setattr(module, "check_sampler", lambda *_: None)
    return watch(monkeypatch, name, slow_loss), known


SIZES = dict(k=3, batch_size=4, max_new_tokens=6, mask_truncated=True, updates_per_rollout=2, eval_data=None,
             eval_size=0)


@pytest.mark.parametrize("beta", [0.3, pytest.param(0.0, marks=SLOW)])
@pytest.mark.parametrize("name", FORMULAS)
def test_loss_of_samples(monkeypatch, name, beta):
    losses, _ = watch_samples(monkeypatch, name, FORMULAS[name], beta)
    steps = 2 if beta else 1
    history, _ = run(name, model=model_with_many_ends(), steps=steps, beta=beta, **SIZES)
    assert len(losses) == steps * (8 if name == "mini_batches" else 2)
    assert max(norm for _, norm in losses) > 1e-3 or (name, beta) == ("online_dpo", 0.0)
    if beta and name not in ("online_dpo", "gspo"):
        assert max(values["clip_ratio"] for values in history[1:]) > 0


def test_value_baseline(monkeypatch):
    losses, known = watch_samples(monkeypatch, "value_baseline", ppo, 0.3)

    def slow_critic(critic, samples, returns, args):
        total = 0
        for prompt, _ in samples.groups:
            for y in known[prompt]:
                values = critic(tensor([prompt + y.tokens])).logits[0, len(prompt) - 1:-1, 0]
                if returns is None:
                    y.values = values.tolist()
                elif not isnan(y.reward):
                    total = total + ((values - tensor(y.returns)) ** 2).sum() / 2
        return None if returns is None else total / tokens_of(known[prompt] for prompt, _ in samples.groups)

    critic_losses = watch(monkeypatch, "value_baseline", slow_critic, "run_critic")
    run("value_baseline", model=model_with_many_ends(), beta=0.3, steps=2, **SIZES)
    assert len(losses) == len(critic_losses) == 4 and critic_losses[-1] < critic_losses[0]


def test_value_baseline_needs_one_sample_per_prompt():
    history, _ = run("value_baseline", k=1, steps=1)
    assert history[1]["loss/critic"] > 0


def test_critic_decays_matrices_only_and_has_its_own_rate(monkeypatch):
    """The gradients are 0, so that weight decay alone moves the weights."""
    module, critics = changed("value_baseline"), []
    load_critic, backward = module.load_critic, torch.Tensor.backward
    monkeypatch.setattr(module, "load_critic", lambda *inputs: critics.append(load_critic(*inputs)) or critics[0])
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: backward(0 * loss))
    run("value_baseline", steps=1, lr=1e-3, weight_decay=0.5, critic_lr=4.0, schedule="constant")

    torch.manual_seed(0)
    before = dict(load_critic("cpu", arguments("rloo", dtype="float32")).named_parameters())
    for name, weight in critics[0].named_parameters():
        if not name.startswith("score"):  # a new head
            factor = 1 - 4 * 1e-3 * 0.5 if weight.dim() > 1 else 1.0
            assert torch.allclose(weight, before[name] * factor, atol=1e-7)


@pytest.mark.parametrize("name", ["dapo", "cispo"])
def test_sample_without_a_reward_changes_nothing(name):
    """One that was cut off is left out of the mean over tokens, too."""
    module, args = changed(name), arguments("rloo", dtype="float32")
    lengths, results = (2, 3, 7), []
    for k in (2, 3):
        policy = load(trains=True)
        mask = torch.arange(7) < tensor(lengths[:k])[:, None]
        groups = [((5, 6), [tuple(range(8, 8 + n)) for n in lengths[:k]])]
        samples = module.Samples(groups, None, mask[None], None, None, None)
        _, values = module.run_batch(policy, samples, tensor([[1.0, 0.5, nan][:k]]), torch.zeros(1, k, 7), None, args)
        results.append((values["loss"], gradient(policy)))
    (loss, grad), (other_loss, other_grad) = results
    assert loss == pytest.approx(other_loss, abs=1e-6) and grad.norm() > 1e-3
    assert (grad - other_grad).norm() < 1e-5 * grad.norm()
