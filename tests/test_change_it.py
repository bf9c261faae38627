"""docs/change_it.md: each diff is applied to its script, run, and compared with its formula."""
import re
import sys
from dataclasses import asdict
from functools import cache
from math import log, nan
from types import ModuleType

import numpy as np
import pytest
import torch
from models import make
from runs import ROOT, TOKENIZER, arguments, load, tiny, weights_of
from torch import tensor

import dpo
from refcache import ReferenceCache, completion_logprobs

DIFF = r"```diff\n--- (\w+)\.py\n(.*?)```"
PAGE = (ROOT / "docs/change_it.md").read_text()
DIFFS = {section.partition("\n")[0]: re.search(DIFF, section, re.S).groups() for section in PAGE.split("\n## ")[1:]}
ARGS = dict(dtype="float32", beta=0.3, max_new_tokens=6)


@cache
def changed(title):
    """The script with every run of `-` lines replaced by the `+` lines that follow it."""
    script, diff = DIFFS[title]
    text = (ROOT / f"{script}.py").read_text()
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", diff, re.M):
        old = re.sub("^-", "", old, flags=re.M)
        assert text.count(old) == 1, old
        text = text.replace(old, re.sub(r"^\+", "", new, flags=re.M))
    module = sys.modules[title] = ModuleType(title)
    module.__file__ = str(ROOT / f"{script}.py")
    exec(compile(text, title, "exec"), vars(module))
    return module


def start(title, **flags):
    """The history and the saved weights of a short run of the changed script."""
    args = changed(title).Args(**asdict(arguments(DIFFS[title][0])) | flags)
    return changed(title).main(args), weights_of(f"{args.out}/model")


def gradient(policy):
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def test_readme_shows_the_first_diff_and_diffs_are_short():
    assert re.findall(DIFF, (ROOT / "README.md").read_text(), re.S) == [DIFFS["A new loss"]]
    for title, lines in {"A new loss": 4, "ORPO": 8, "Token weights": 17, "GRPO": 15}.items():
        assert DIFFS[title][1].count("\n+") <= lines, title


@pytest.mark.parametrize("title", [title for title in DIFFS if title not in ("Token weights", "Iterative DPO")])
def test_changed_script_trains(title):
    losses = {"A new loss": "dpop", "ORPO": "orpo", "A loss that sees the whole batch": "aot"}
    history, _ = start(title, **{"loss": (losses[title],)} if title in losses else {})
    assert [values["step"] for values in history] == [0, 1, 2, 3]


# ---- Losses of pairs -------------------------------------------------

BATCH = "A loss that sees the whole batch"


@pytest.mark.parametrize("title, flags, expected", [  # with TRL's formulas, dpop's with the paper's
    ("A new loss", dict(loss="dpop"), [2.48684, 0.49325]), ("ORPO", dict(loss="orpo"), [2.55685, 3.9791]),
    ("Other divergences", dict(divergence="forward_kl"), [0.99224, 0.62496]),
    ("Other divergences", dict(divergence="js"), [0.75306, 0.64243]),
    ("Other divergences", dict(divergence="alpha", alpha=0.2), [0.79412, 0.53265]),  # f_alpha_divergence_coef 0.8
    (BATCH, dict(loss="aot"), [0.49325, 0.77096]), (BATCH, dict(loss="aot_unpaired"), [0.77096, 0.49325])])
def test_losses_of_two_pairs(title, flags, expected):
    """log π(y_w|x), log π(y_l|x), log-ratios of both, lengths of both."""
    numbers = [[-20.0, -35.0], [-24.0, -31.0], [-1.5, 2.0], [-1.0, 0.5], [8.0, 10.0], [6.0, 14.0], [0.0] * 2, [0.0] * 2]
    args = changed(title).Args(**ARGS | flags)
    losses = changed(title).preference_loss(flags.get("loss", "sigmoid"), dpo.Batch(*map(tensor, numbers)), args)
    assert losses.tolist() == pytest.approx(expected, abs=1e-5)


ROWS = [dpo.Row((5, 9), (60, 7, 2), (90, 2), 0, 0, dict(chosen_weights=[1, 2, 3], rejected_weights=[3, 1])),
        dpo.Row((8, 3), (77, 2), (21, 4, 2), 0, 0, dict(chosen_weights=[0, 1], rejected_weights=[1, 0, 2]))]
POLICY = make("llama", 1)
KNOWN = ReferenceCache()
KNOWN.score(make("llama", 2), dpo.groups(ROWS))


@pytest.mark.parametrize("title", ["LD-DPO", "Token weights"])
def test_every_token_has_its_weight(title):
    """LD-DPO's is ld_alpha beyond the length of the shorter answer, here 2."""
    batch = changed(title).measure(POLICY, ROWS, KNOWN, changed(title).Args(**ARGS))
    for i, row in enumerate(ROWS):
        for y, weights, found in zip(row[1:3], row.columns.values(), (batch.ratio_w, batch.ratio_l)):
            weights = [1, 1, 0.5] if title == "LD-DPO" else weights
            logps = completion_logprobs(POLICY, [(row.prompt, [y])])[0][0].tolist()
            expected = sum(a * (logp - ref) for a, logp, ref in zip(weights, logps, KNOWN[row.prompt, y]))
            assert found[i].item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_a_loss_of_the_whole_batch_is_the_same_under_any_micro_batching(name):
    found = []
    for budget in (1, 10_000):
        POLICY.zero_grad()
        args = changed(BATCH).Args(**ARGS, loss=(name,), tokens_per_forward=budget)
        values = changed(BATCH).run_batch(POLICY, ROWS, KNOWN, args, train=True)
        found.append(torch.cat([gradient(POLICY), tensor(list(values.values()))]))
    assert torch.allclose(*found, atol=1e-4) and gradient(POLICY).abs().max() > 1e-2


# ---- Training --------------------------------------------------------

def test_moving_average_is_what_is_saved():
    args = arguments(steps=1)
    dpo.main(args)
    after = weights_of(f"{args.out}/model")
    _, average = start("A moving average of the weights", steps=1)
    for name, before in weights_of(tiny()).items():
        assert torch.allclose(average[name], before.lerp(after[name], 0.01), atol=1e-6)
        assert not torch.equal(average[name], before)


def test_iterative_dpo_draws_pairs_and_a_reference_for_each_round(monkeypatch):
    def rate(completions, **columns):
        return [sum(map(ord, y)) % 101 for y in completions]

    module = changed("Iterative DPO")
    monkeypatch.setattr(module, "load_function", lambda spec: rate)
    history, _ = start("Iterative DPO", max_new_tokens=6, round_steps=2, steps=4)
    assert [abs(values["loss"] - log(2)) < 1e-5 for values in history[1:]] == [True, False, True, False]
    (row,) = module.draw_pairs(load(), TOKENIZER, [ROWS[0]._replace(columns={"prompt": ""})], module.Args(**ARGS))
    best, worst = rate(TOKENIZER.batch_decode([row.chosen, row.rejected], skip_special_tokens=True))
    assert best > worst and all(y[-1] == 3 or len(y) == 6 for y in (row.chosen, row.rejected))


def grpo(logps, old, refs, rewards):
    """The sum over the samples of a prompt. A reward that is NaN is left out."""
    total = 0
    for logp, before, ref, reward in zip(logps, old, refs, rewards):
        advantage = np.nan_to_num((reward - np.nanmean(rewards)) / (np.nanstd(rewards) + 1e-4))
        for a, b, c in zip(logp, before, ref):
            ratio = torch.exp(a - b)
            gain = min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total - (gain - 0.3 * (torch.exp(c - a) - (c - a) - 1)) / len(logp)
    return total


def online_dpo(logps, old, refs, rewards):
    ratios = [sum(logp) - sum(ref) for logp, ref in zip(logps, refs)]
    return 3 * torch.log(1 + torch.exp(0.3 * (ratios[np.nanargmin(rewards)] - ratios[np.nanargmax(rewards)])))


@pytest.mark.parametrize("title, formula", [("GRPO", grpo), ("Online DPO", online_dpo)])
def test_loss_and_gradient_of_samples_equal_a_slow_loop(title, formula):
    policy, args = load(trains=True), changed(title).Args(**ARGS, tokens_per_forward=1)
    policy.generation_config.eos_token_id = list(range(400))  # so that lengths differ
    samples = changed(title).rollout(policy, TOKENIZER, [(5, 9), (7, 8, 9)], 3, 1, args)
    rewards = [[1.0, 0.0, 0.4], [2.0, nan, 1.0]]
    logps = changed(title).token_logprobs(policy, samples.groups, samples.mask.shape[2], args).detach()
    old, refs = ((logps + 0.3 * torch.randn_like(logps)) * samples.mask for _ in range(2))
    _, values = changed(title).run_batch(policy, samples, tensor(rewards), refs, old, args)
    found = gradient(policy)
    policy.zero_grad()
    logps = completion_logprobs(policy, samples.groups)
    loss = sum(formula(*group) for group in zip(logps, old, refs, rewards)) / 6
    loss.backward()
    assert values["loss"] == pytest.approx(loss.item(), abs=1e-5)
    torch.testing.assert_close(found, gradient(policy), atol=1e-5, rtol=1e-3)
