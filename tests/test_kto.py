"""kto.py: the loss and z by hand, and runs. What it shares with dpo.py is the same text, tested in test_dpo.py."""
import json
from dataclasses import replace
from math import exp

import numpy as np
import pytest
import torch
from models import make
from runs import ROOT, TOKENIZER, arguments, load, run, same, tiny, weights_of
from torch import tensor
from transformers import AutoModelForCausalLM

import kto
from kto import Args, Batch, Row, batch_rows, derange, draw_others, feedback_loss, load_rows, metrics
from refcache import BadInput, ReferenceCache

FIRST = dict(eval_every=2)


def sg(x):
    return 1 / (1 + exp(-x))


def logp(model, prompt, y):
    logits = model(tensor([prompt + y])).logits[0, len(prompt) - 1:-1]
    return logits.log_softmax(-1).gather(1, tensor(y)[:, None]).sum()


def rows_of(args):
    """Rows to train on and held-out rows, with an answer to another prompt each."""
    rows = load_rows(args.data, TOKENIZER, args), load_rows(args.eval_data, TOKENIZER, args)
    return draw_others(*rows, args)


# ---- The loss --------------------------------------------------------

BATCH = Batch(logp=tensor([-9.0, -8.0]), ratio=tensor([1.5, -0.5]), is_desirable=tensor([True, False]),
              length=tensor([5.0, 4.0]))
WEIGHTED = Args(beta=0.2, desirable_weight=1.2, undesirable_weight=0.9)


@pytest.mark.parametrize("name, losses, slopes", [
    ("kto", [1.2 * (1 - sg(0.22)), 0.9 * (1 - sg(0.18))], [-0.24 * sg(0.22) * sg(-0.22), 0.18 * sg(0.18) * sg(-0.18)]),
    ("apo_zero_unpaired", [1.2 * (1 - sg(0.3)), 0.9 * sg(-0.1)],
     [-0.24 * sg(0.3) * sg(-0.3), 0.18 * sg(0.1) * sg(-0.1)])])
def test_loss_and_gradient_by_hand(name, losses, slopes):
    """β = 0.2, z = 0.4, log-ratios 1.5 and −0.5: 0.2 · (1.5 − 0.4) = 0.22, 0.2 · (0.4 + 0.5) = 0.18."""
    ratio = BATCH.ratio.clone().requires_grad_()
    found = feedback_loss(name, BATCH._replace(ratio=ratio), tensor(0.4), WEIGHTED)
    assert found.tolist() == pytest.approx(losses)
    found.sum().backward()
    assert ratio.grad.tolist() == pytest.approx(slopes)


def test_metrics_by_hand():
    batch = Batch(logp=tensor([-9.0, -8.0, -7.0]), ratio=tensor([2.0, 1.0, 0.0]), length=torch.full((3,), 4.0),
                  is_desirable=tensor([True, False, False]))
    values = metrics(batch, tensor(0.3), Args(beta=0.1))
    means = {name: value[mask].tolist() for name, (value, mask) in values.items()}
    expected = {"loss": [1 - sg(0.17), sg(0.07), sg(-0.03)], "rewards/accuracies": [1.0, 0.0, 0.5],
                "rewards/chosen": [0.2], "rewards/rejected": [0.1, 0.0], "logps/chosen": [-9.0],
                "logps/rejected": [-8.0, -7.0], "logratio": [0.5, 0.25, 0.0]}
    assert means.keys() == expected.keys()
    for name, found in means.items():
        assert found == pytest.approx(expected[name]), name


@pytest.mark.parametrize("ratio, accuracy", [(0.05, 1.0), (-0.05, 0.0), (1e-6, 0.5), (-1e-6, 0.5), (0.0, 0.5)])
def test_ties_are_judged_on_log_ratios_whatever_beta_is(ratio, accuracy):
    batch = BATCH._replace(ratio=tensor([ratio, -ratio]))
    for beta in (1e-3, 0.1, 10.0):
        values, _ = metrics(batch, tensor(0.0), Args(beta=beta))["rewards/accuracies"]
        assert values.tolist() == [accuracy] * 2


# ---- Answers to other prompts, and z ---------------------------------

def test_every_row_gets_a_row_of_another_prompt_and_each_is_used_once():
    for n in range(2, 60):
        few = np.random.default_rng(n).integers(0, max(4, n // 3), n).tolist()
        half = [0] * (n // 2) + list(range(1, n - n // 2 + 1))
        for prompts in (list(range(n)), half, few):
            most = max(prompts.count(prompt) for prompt in prompts)
            if 2 * most > n:
                with pytest.raises(BadInput, match=f"one prompt has {most} of the {n} rows"):
                    derange(prompts, n)
                continue
            partners = derange(prompts, n)
            assert sorted(partners) == list(range(n)) and partners == derange(prompts, n)
            assert all(prompts[i] != prompts[j] for i, j in enumerate(partners))


def test_partners_differ_by_seed_and_have_no_order():
    prompts = list(range(40))
    assert derange(prompts, 0) != derange(prompts, 1)
    assert abs(np.corrcoef(prompts, derange(prompts, 0))[0, 1]) < 0.5


def test_answers_to_other_prompts_are_cut_to_max_length_and_counted(capsys):
    rows = [Row((9,) * (1 + i), tuple(range(100 * i, 100 * i + 10 - i)), True, (), {}) for i in range(8)]
    train_rows, _ = draw_others(rows, [], Args(max_length=11))
    for row in train_rows:
        source = rows[row.other[0] // 100]
        assert source.prompt != row.prompt
        assert row.other == source.completion[:11 - len(row.prompt)]
    n_cut = sum(len(row.other) < len(rows[row.other[0] // 100].completion) for row in train_rows)
    assert n_cut and f"{n_cut} of 8 answers" in capsys.readouterr().out


def test_held_out_rows_never_get_an_answer_to_their_own_prompt():
    rows = [Row((i % 2,), (10 + i % 2,), True, (), {}) for i in range(10)]
    _, held_out = draw_others(rows, rows[1:] + rows[:1], Args())
    assert all(row.other == (11 - row.prompt[0],) for row in held_out)


def test_z_is_the_mean_over_the_whole_batch_clamped_once_under_any_micro_batching():
    """One forward per sequence."""
    policy, reference = make("llama", 1), make("llama", 2)
    draw = np.random.default_rng(0).integers
    rows = [Row(tuple(draw(3, 97, 3 + i % 4)), (5, 2), True, tuple(draw(3, 97, 2 + i % 5)), {}) for i in range(12)]
    known = ReferenceCache()
    known.score(reference, kto.other_groups(rows))
    with torch.no_grad():
        ratios = [(logp(policy, r.prompt, r.other) - logp(reference, r.prompt, r.other)).item() for r in rows]
    order = np.argsort(ratios)
    assert min(ratios) < 0 < max(ratios), "or the test would not see whether the clamp comes after the mean"
    for some in (range(12), order[:3], order[[0, -1]], order[-1:]):
        expected = max(0.0, np.mean([ratios[i] for i in some]))
        for budget in (1, 20, 100_000):
            args = Args(dtype="float32", tokens_per_forward=budget)
            z = kto.estimate_kl(policy, [rows[i] for i in some], known, args)
            assert z.item() == pytest.approx(expected, abs=1e-3) and not z.requires_grad


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_a_run_equals_a_slow_loop_with_two_models(loss):
    """One forward per sequence, z and the loss as in the paper; no gradient flows through z."""
    args = arguments("kto", loss=loss, ref_model=tiny(1), lr=1e-3, steps=2, desirable_weight=1.3,
                     undesirable_weight=0.7, seed=4)
    history = kto.main(args)
    rows, _ = rows_of(args)
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny(), tiny(1)))
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)

    def log_ratio(prompt, y):
        return logp(policy, prompt, y) - logp(reference, prompt, y).detach()

    for step, lr in ((1, 1e-3), (2, 0.5e-3)):
        batch = batch_rows(step, rows, 3, seed=4)
        z = 0.0
        if loss == "kto":
            z = max(0.0, sum(log_ratio(row.prompt, row.other).item() for row in batch) / 3)
            assert history[step]["kl"] == pytest.approx(z, rel=1e-4, abs=1e-4) and z > 0.1
        total = 0.0
        for row in batch:
            x = 0.1 * (log_ratio(row.prompt, row.completion) - z)
            value = 1.3 * (1 - torch.sigmoid(x)) if row.is_desirable else 0.7 * (1 - torch.sigmoid(-x))
            total = total + value / 3
        assert total.item() == pytest.approx(history[step]["loss"], abs=1e-5)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    saved = weights_of(f"{args.out}/model")
    for name, p in policy.named_parameters():
        torch.testing.assert_close(p, saved[name], atol=1e-4, rtol=1e-3)


# ---- Training --------------------------------------------------------

def test_learns_from_a_part_of_the_demo(tmp_path):
    for name, lines in (("feedback", slice(24, 152)), ("feedback_test", slice(24))):
        rows = (ROOT / f"demo/{name}.jsonl").read_text().splitlines(True)[lines]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    history = kto.main(Args(model=f"{ROOT}/demo/model", data=f"{tmp_path}/feedback.jsonl", out=f"{tmp_path}/out",
                            eval_data=f"{tmp_path}/feedback_test.jsonl", lr=4e-4, steps=14, batch_size=16,
                            max_new_tokens=20, score=f"{ROOT}/demo/score.py:success"))
    assert history[0]["eval_rewards/accuracies"] == 0.5 and history[-1]["eval_rewards/margins"] > 0.1
    assert history[0]["eval_score"] + 0.3 < history[-1]["eval_score"]


def test_step_0_has_no_kl_and_half_the_weight_as_loss():
    args = arguments("kto", desirable_weight=1.5, undesirable_weight=0.5, steps=1, batch_size=5)
    values = kto.main(args)[1]
    labels = [row.is_desirable for row in batch_rows(1, rows_of(args)[0], 5, 0)]
    assert abs(values["kl"]) < 1e-5 and values["rewards/accuracies"] == 0.5
    expected = 0.5 * np.mean([1.5 if label else 0.5 for label in labels])
    assert values["loss"] == pytest.approx(expected, abs=1e-5)


def test_a_batch_of_one_kind_has_no_mean_of_the_other_kind(run):
    values = run("kto", batch_size=1).history[1]
    assert ("rewards/chosen" in values) != ("rewards/rejected" in values) and "rewards/margins" not in values


def test_tokens_per_forward_changes_memory_only(run):
    assert same(run("kto", **FIRST), run("kto", **FIRST, tokens_per_forward=90), 1e-4)


def test_the_cache_has_every_row_of_several_epochs(tmp_path, monkeypatch):
    loaded = []
    original = kto.load_model
    monkeypatch.setattr(kto, "load_model", lambda *rest, **more: loaded.append(more) or original(*rest, **more))
    flags = dict(steps=None, epochs=1.5, eval_every=2, ref_cache=f"{tmp_path}/cache.pkl")
    kto.main(arguments("kto", **flags, batch_size=5))
    kto.main(arguments("kto", **flags, batch_size=4, beta=0.2))
    assert loaded == [{}, dict(trains=True), dict(trains=True)]


def test_reported_numbers_are_those_of_the_saved_model(run):
    first = run("kto", **FIRST)
    args = replace(first.args, dtype="float32")
    _, held_out = rows_of(args)
    known = ReferenceCache()
    known.score(AutoModelForCausalLM.from_pretrained(tiny()), kto.groups(held_out) + kto.other_groups(held_out))
    values = kto.evaluate(load(first.model, kto), held_out, known, args)
    assert values == pytest.approx({name: first.history[-1][name] for name in values}, abs=2e-5, rel=1e-5)
    assert any(abs(value) > 1e-3 for name, value in values.items() if "rewards" in name)


def test_every_metric_is_explained_in_the_docstring(run):
    names = {name.removeprefix("eval_") for values in run("kto", **FIRST).history for name in values} - {"step"}
    text = kto.__doc__.replace("logps/*", "logps/chosen, logps/rejected")
    assert {"learning_rate", "kl"} <= names and not [name for name in names if name not in text]


def labelled(tmp_path, labels):
    """A file of rows with these labels."""
    lines = (ROOT / "demo/feedback.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"label": label} for line, label in zip(lines, labels)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f"{tmp_path}/rows.jsonl"


def test_a_file_sorted_by_label_is_shuffled(tmp_path):
    data = labelled(tmp_path, [True] * 10 + [False] * 10)
    history = kto.main(arguments("kto", data=data, batch_size=7, lr=0.0))
    assert all("rewards/margins" in values for values in history[1:])


def test_the_ratio_of_the_weights_is_printed(tmp_path, capsys):
    data = labelled(tmp_path, [True] * 5 + [False] * 15)
    kto.main(arguments("kto", data=data, desirable_weight=3.0, undesirable_weight=2.0, steps=0))
    printed = capsys.readouterr().out
    assert "5 desirable rows, 15 others" in printed and "is 0.50" in printed


# ---- What is refused -------------------------------------------------

@pytest.mark.parametrize("labels, words", [
    ([True] * 9, "same label"), ([False] * 9, "same label"), ([True, False, "maybe"], "maybe"), ([True, None], "None"),
    ([True, False, 2], "label")])
def test_labels_that_kto_cannot_use_are_refused(tmp_path, labels, words):
    with pytest.raises(BadInput, match=words):
        kto.main(arguments("kto", data=labelled(tmp_path, labels)))


@pytest.mark.parametrize("changes, words", [(dict(ref="none"), "none"), (dict(humanline=(-1.0, 1.5)), "--ref swap")])
def test_bad_arguments_are_refused(changes, words):
    with pytest.raises(BadInput, match=words):
        kto.main(arguments("kto", **changes))


def test_a_loss_that_is_not_finite_stops_the_run():
    with pytest.raises(BadInput, match="step 2"):
        kto.main(arguments("kto", lr=1e17, max_grad_norm=1e17))
