"""kto.py: the loss and z by hand, KL rows known before training, and what it refuses.

What it has in common with dpo.py is the same text (test_scripts.py), and is tested in test_dpo.py and test_data.py.
"""
import gc
import json
import math
import re
from dataclasses import replace
from math import exp
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import kto
from kto import Args, Batch, batch_rows, derange, draw_others, feedback_loss, lr_factor, metrics
from refcache import BadInput, ReferenceCache

ROOT = Path(kto.__file__).parent
MODEL = str(ROOT / "demo/model")
ROWS = [json.loads(line) for line in (ROOT / "demo/feedback.jsonl").open().readlines()[:24]]
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data files, and a cache of the reference that all runs share."""
    gc.freeze()  # what is imported: every pass over a reference collects garbage, and would look at all of it
    folder = tmp_path_factory.mktemp("kto")
    write(folder / "train.jsonl", ROWS[:20])
    write(folder / "eval.jsonl", ROWS[20:])
    return folder


@pytest.fixture(scope="module")
def arguments(folder):
    """The arguments of a run of three steps, with its own output folder."""
    def arguments(**changes):
        arguments.runs += 1
        flags = dict(model=MODEL, data=str(folder / "train.jsonl"), eval_data=str(folder / "eval.jsonl"), steps=3,
                     batch_size=4, lr=1e-3, samples=0, out=str(folder / f"out{arguments.runs}"),
                     ref_cache=str(folder / "shared.pkl"))
        return Args(**flags | changes)
    arguments.runs = 0
    return arguments


@pytest.fixture(scope="module")
def run(arguments):
    """A run. Returns its arguments, its history and the models that it loaded."""
    def run(**changes):
        args, loaded, load = arguments(**changes), [], kto.load_model
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kto, "load_model", lambda folder, *rest, **more: loaded.append(folder) or
                          load(folder, *rest, **more))
            history = kto.main(args)
        return SimpleNamespace(args=args, out=Path(args.out), history=history, loaded=loaded)
    return run


@pytest.fixture(scope="module")
def first(run):
    return run(eval_every=2)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A reference that is surer than the policy, so that z is above 0 from the start."""
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.25)
    model.save_pretrained(folder := tmp_path_factory.mktemp("surer"))
    TOKENIZER.save_pretrained(folder)
    return SimpleNamespace(folder=str(folder), model=model)


def weights(done):
    return load_file(done.out / "model/model.safetensors")


def largest_difference(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


def rows_of(args):
    return [kto.load_rows(source, TOKENIZER, 256, args) for source in (args.data, args.eval_data)]


def logp(model, prompt, y):
    logits = model(torch.tensor([prompt + y])).logits[0, len(prompt) - 1:-1]
    return logits.log_softmax(-1).gather(1, tensor(y)[:, None]).sum()


def sg(x): return 1 / (1 + exp(-x))


# ---- The loss -------------------------------------------------------------------------------------------------------

BATCH = Batch(logp=tensor([-9.0, -8.0]), ratio=tensor([1.5, -0.5]), label=tensor([True, False]),
              size=tensor([5.0, 4.0]), unclamped=tensor([1.0, 1.0]))


def test_kto_loss_and_gradient_by_hand():
    ratio, args = BATCH.ratio.clone().requires_grad_(), Args(beta=0.2, desirable_weight=1.2, undesirable_weight=0.9)
    z = tensor(0.4, requires_grad=True)
    loss = feedback_loss("kto", BATCH._replace(ratio=ratio), z.detach(), args)
    assert loss.tolist() == pytest.approx([1.2 * (1 - sg(0.2 * (1.5 - 0.4))), 0.9 * (1 - sg(0.2 * (0.4 + 0.5)))])
    assert loss.tolist() == pytest.approx([0.5342649, 0.4096090], abs=1e-6)
    loss.sum().backward()
    slopes = [-1.2 * 0.2 * sg(0.22) * sg(-0.22), 0.9 * 0.2 * sg(0.18) * sg(-0.18)]
    assert ratio.grad.tolist() == pytest.approx(slopes)


def test_apo_zero_unpaired_has_no_z_and_weighs_its_kinds():
    ratio, args = BATCH.ratio.clone().requires_grad_(), Args(beta=0.2, desirable_weight=1.2, undesirable_weight=0.9)
    loss = feedback_loss("apo_zero_unpaired", BATCH._replace(ratio=ratio), tensor(7.0), args)
    assert loss.tolist() == pytest.approx([1.2 * (1 - sg(0.3)), 0.9 * sg(-0.1)])
    loss.sum().backward()
    assert ratio.grad.tolist() == pytest.approx([-1.2 * 0.2 * sg(0.3) * sg(-0.3), 0.9 * 0.2 * sg(0.1) * sg(-0.1)])


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="no loss"):
        feedback_loss("kto2", BATCH, tensor(0.0), Args())


def test_metrics_by_hand():
    batch = Batch(logp=tensor([-9.0, -8.0, -7.0]), ratio=tensor([2.0, 1.0, 0.0]), label=tensor([True, False, False]),
                  size=torch.full((3,), 3.0), unclamped=torch.ones(3))
    values = metrics(batch, tensor(0.3), Args(beta=0.1))
    assert values["rewards/chosen"] == pytest.approx(0.2) and values["rewards/rejected"] == pytest.approx(0.05)
    assert values["rewards/margins"] == pytest.approx(0.15) and values["rewards/accuracies"] == pytest.approx(1.5 / 3)
    assert (values["count/chosen"], values["count/rejected"], values["logps/rejected"]) == (1, 2, -7.5)
    assert values["kl"] == pytest.approx(0.3)


def test_a_batch_of_one_kind_has_no_mean_of_the_other():
    for label, other in ((True, "rejected"), (False, "chosen")):
        values = metrics(Batch(*(x[:1] for x in BATCH))._replace(label=tensor([label])), tensor(0.3), Args())
        assert not {f"rewards/{other}", "rewards/margins", f"logps/{other}"} & set(values)
        assert values[f"count/{other}"] == 0 and all(map(math.isfinite, values.values()))


@pytest.mark.parametrize("ratio, accuracy", [(0.05, 1.0), (-0.05, 0.0), (1e-6, 0.5), (-1e-6, 0.5), (0.0, 0.5)])
def test_ties_are_judged_on_log_ratios_whatever_beta_is(ratio, accuracy):
    batch = BATCH._replace(ratio=tensor([ratio, -ratio]))
    for beta in (1e-3, 0.1, 10.0):
        assert metrics(batch, tensor(0.0), Args(beta=beta))["rewards/accuracies"] == accuracy


# ---- z --------------------------------------------------------------------------------------------------------------


def test_every_row_gets_a_row_of_another_prompt_and_each_is_used_once():
    for n in range(2, 51):
        for seed in range(3):
            rng = np.random.default_rng(seed)
            half, few = [0] * (n // 2) + list(range(1, n - n // 2 + 1)), rng.integers(0, max(4, n // 3), n).tolist()
            for prompts in (list(range(n)), half, few):
                most = max(prompts.count(p) for p in prompts)
                if 2 * most > n:
                    with pytest.raises(BadInput, match=f"one prompt has {most} of the {n} rows"):
                        derange(prompts, seed)
                    continue
                partners = derange(prompts, seed)
                assert sorted(partners) == list(range(n)) and partners == derange(prompts, seed)
                assert all(prompts[i] != prompts[j] for i, j in enumerate(partners))


def test_partners_differ_by_seed_and_have_no_order():
    prompts = list(range(40))
    assert derange(prompts, 0) != derange(prompts, 1)
    assert abs(np.corrcoef(prompts, derange(prompts, 0))[0, 1]) < 0.5


@pytest.mark.parametrize("prompts", [["a"], ["a", "a"], ["a", "a", "b"]])
def test_rows_that_cannot_be_paired_are_refused(prompts):
    with pytest.raises(BadInput, match="one prompt has"):
        derange(prompts, 0)


def test_answers_to_other_prompts_are_cut_to_fit_and_counted(arguments, capsys):
    rows = sum(rows_of(arguments()), [])
    limit = sorted(len(row.prompt) + len(row.completion) for row in rows)[15]
    rows = [row for row in rows if len(row.prompt) + len(row.completion) <= limit]
    train, held = draw_others(rows[:12], rows[12:], limit, seed=0)
    cut = 0
    for row in train + held:
        assert 0 < len(row.other) <= limit - len(row.prompt)
        sources = [other for other in rows[:12] if other.completion[:len(row.other)] == row.other]
        assert any(other.prompt != row.prompt for other in sources)
        cut += all(other.completion != row.other for other in sources)
    assert cut and re.search(rf"z: .*\b{cut} of {len(rows)}\b.*\b{limit} tokens", capsys.readouterr().out)


def test_held_out_rows_never_get_an_answer_to_their_own_prompt():
    train = [kto.Row((i % 2,), (10 + i % 2,), True, (), {}) for i in range(10)]
    _, held = draw_others(train, train[1:] + train[:1], 99, seed=0)
    assert all(row.other == (11 - row.prompt[0],) for row in held)


def test_z_is_the_mean_over_the_whole_batch_clamped_once_under_any_memory_knob(arguments):
    """By hand, from one forward per sequence, with a policy that differs from its reference."""
    rows, _ = draw_others(rows_of(arguments())[0], [], 256, seed=0)
    policy, base, known = *(AutoModelForCausalLM.from_pretrained(MODEL) for _ in range(2)), ReferenceCache()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1 + 0.1 * torch.randn_like(p))
        known.score(base, [(row.prompt, [row.other]) for row in rows])
        ratios = [(logp(policy, row.prompt, row.other) - logp(base, row.prompt, row.other)).item() for row in rows]
    order = sorted(range(20), key=lambda i: ratios[i])
    for some in (range(20), order[:3], [order[0], order[-1]], [order[-1]]):
        expected = max(0.0, sum(ratios[i] for i in some) / len(some))
        for budget in (1, 100, 100_000):
            args = Args(dtype="float32", tokens_per_forward=budget)
            z = kto.estimate_kl(policy, [rows[i] for i in some], known, args)
            assert z.item() == pytest.approx(expected, abs=1e-3) and not z.requires_grad
    assert min(ratios) < 0 < max(ratios), "or the test would not see whether the clamp comes after the mean"


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_training_equals_a_slow_loop_with_two_models(run, reference, loss):
    """One forward per sequence, z and the loss as in the paper; no gradient flows through z."""
    done = run(loss=loss, ref_model=reference.folder, ref_cache=f"{reference.folder}.pkl", lr=1e-4, steps=2, warmup=0.0,
               desirable_weight=1.3, undesirable_weight=0.7)
    policy, base = AutoModelForCausalLM.from_pretrained(MODEL), reference.model
    rows, _ = draw_others(rows_of(done.args)[0], [], 256, 0)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)

    def log_ratio(prompt, y):
        with torch.no_grad():
            ref = logp(base, prompt, y)
        return logp(policy, prompt, y) - ref

    for step in (1, 2):
        optimizer.param_groups[0]["lr"] = 1e-4 * lr_factor(step, 2, 0.0, "linear")
        batch, z = batch_rows(step, rows, 4, 0), 0.0
        if loss == "kto":
            with torch.no_grad():
                z = (sum(log_ratio(row.prompt, row.other) for row in batch) / 4).clamp(min=0)
            assert z.item() == pytest.approx(done.history[step]["kl"], abs=1e-4) and z > 0.1
        total = 0.0
        for row in batch:
            x = 0.1 * (log_ratio(row.prompt, row.completion) - z)
            total = total + (1.3 * (1 - torch.sigmoid(x)) if row.label else 0.7 * (1 - torch.sigmoid(-x))) / 4
        assert total.item() == pytest.approx(done.history[step]["loss"], abs=1e-5)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    assert largest_difference(dict(policy.named_parameters()), weights(done)) < 1e-4
    assert ("kl" in done.history[1]) == (loss == "kto")


# ---- Training -------------------------------------------------------------------------------------------------------


def test_learns_from_a_part_of_the_demo(folder):
    lines = (ROOT / "demo/feedback.jsonl").open().readlines()
    (folder / "many.jsonl").write_text("".join(lines[24:152]))
    (folder / "many_eval.jsonl").write_text("".join((ROOT / "demo/feedback_test.jsonl").open().readlines()[:24]))
    history = kto.main(Args(model=MODEL, data=str(folder / "many.jsonl"), eval_data=str(folder / "many_eval.jsonl"),
                            steps=14, batch_size=16, lr=4e-4, out=str(folder / "learns"), max_new_tokens=20,
                            score=f"{ROOT}/demo/score.py:success"))
    assert history[0]["eval_rewards/accuracies"] == 0.5 and history[-1]["eval_rewards/margins"] > 0.1
    assert history[0]["eval_score"] + 0.3 < history[-1]["eval_score"]


@pytest.mark.slow
def test_learns_the_demo(tmp_path):
    history = kto.main(Args(out=str(tmp_path / "out")))
    assert history[0]["eval_rewards/accuracies"] == 0.5 and history[-1]["eval_rewards/margins"] > 0.5
    assert history[0]["eval_score"] < 0.5 < 0.9 < history[-1]["eval_score"]


def test_step_0_has_no_kl_and_half_the_weight_as_loss(run):
    done = run(desirable_weight=1.5, undesirable_weight=0.5, steps=1)
    share = done.history[1]["count/chosen"] / 4
    assert abs(done.history[1]["kl"]) < 1e-5 and done.history[1]["rewards/accuracies"] == 0.5
    assert done.history[1]["loss"] == pytest.approx(0.5 * (1.5 * share + 0.5 * (1 - share)), abs=1e-5)


def test_lr_zero_changes_nothing_and_a_batch_of_one_works(run):
    done = run(lr=0.0, batch_size=1)
    assert done.history[1]["count/chosen"] + done.history[1]["count/rejected"] == 1
    assert largest_difference(weights(done), load_file(Path(MODEL) / "model.safetensors")) == 0
    assert done.history[-1]["eval_loss"] == done.history[0]["eval_loss"]


def test_tokens_per_forward_changes_memory_only(first, run):
    done = run(eval_every=2, tokens_per_forward=90)
    assert largest_difference(weights(first), weights(done)) < 2e-5
    for one, other in zip(first.history, done.history):
        assert one == pytest.approx(other, abs=1e-4, rel=1e-4)


def test_the_cache_knows_every_row_of_several_epochs_before_the_policy_is_loaded(run, tmp_path):
    """Training, KL and evaluation rows, shuffled, at two batch sizes."""
    cache = str(tmp_path / "cache.pkl")
    assert run(steps=None, epochs=1.5, batch_size=8, eval_every=2, ref_cache=cache).loaded == [MODEL, MODEL]
    assert run(steps=None, epochs=1.5, batch_size=7, beta=0.2, ref_cache=cache).loaded == [MODEL]


@pytest.mark.parametrize("save_dtype", ["float32", "bfloat16"])
def test_reported_numbers_are_those_of_the_saved_model(first, run, save_dtype):
    done = first if save_dtype == "float32" else run(save_dtype=save_dtype)
    assert {p.dtype for p in weights(done).values()} == {getattr(torch, save_dtype)}
    args = replace(done.args, dtype="float32")
    policy, known = kto.load_model(str(done.out / "model"), "cpu", args), ReferenceCache()
    train, held = rows_of(done.args)
    _, held = draw_others(train, held, 256, 0)
    groups = [(row.prompt, [row.completion, row.other]) for row in held]
    known.score(AutoModelForCausalLM.from_pretrained(MODEL), groups)
    values = kto.evaluate(policy, held, known, args)
    assert values == pytest.approx({name: done.history[-1][name] for name in values}, abs=2e-5, rel=1e-5)
    assert abs(values["eval_rewards/margins"]) > 1e-3


def test_every_metric_is_explained_in_the_docstring(first, run):
    more = run(humanline=(-1.0, 1.5), ref="swap", steps=1, ref_cache=None)
    names = {name.removeprefix("eval_") for values in first.history + more.history for name in values} - {"step"}
    assert not [name for name in names if name not in kto.__doc__] and "humanline/unclamped" in names


def test_a_file_sorted_by_label_is_shuffled(run, folder):
    rows = [dict(row, label=i > 9) for i, row in enumerate(ROWS[:20])]
    done = run(data=write(folder / "sorted.jsonl", rows), batch_size=7, lr=0.0)
    assert all(values["count/chosen"] and values["count/rejected"] for values in done.history[1:])


def test_a_loss_that_is_not_finite_stops_and_keeps_the_steps_before(arguments, first):
    args = arguments(lr=1e17, warmup=0.0, max_grad_norm=1e17)
    with pytest.raises(kto.Stopped, match="step 2"):
        kto.main(args)
    assert [json.loads(line)["step"] for line in open(f"{args.out}/metrics.jsonl")] == [0, 1]


# ---- Weights of the two kinds, and what is refused ------------------------------------------------------------------


def test_weights_are_reported_and_balanced(run, folder, capsys):
    rows = [dict(row, label=i % 4 == 0) for i, row in enumerate(ROWS[:20])]
    data = write(folder / "quarter.jsonl", rows)
    run(data=data, steps=1)
    assert "5 desirable rows of weight 1, 15 others of weight 1: ratio 0.33" in capsys.readouterr().out
    done = run(data=data, steps=1, balance=True)
    assert "5 desirable rows of weight 3, 15 others of weight 1: ratio 1.00" in capsys.readouterr().out
    share = done.history[1]["count/chosen"] / 4
    assert done.history[1]["loss"] == pytest.approx(0.5 * (3 * share + (1 - share)), abs=1e-5)


@pytest.mark.parametrize("rows, words", [
    ([row for row in ROWS if row["label"]], "have the same label"), (ROWS[:1], "have the same label"),
    ([dict(ROWS[0], label=True), dict(ROWS[0], label=False)], "one prompt has 2 of the 2 rows")])
def test_data_that_kto_cannot_use_is_refused(arguments, tmp_path, rows, words):
    with pytest.raises(BadInput, match=words):
        kto.main(arguments(data=write(tmp_path / "few.jsonl", rows)))


@pytest.mark.parametrize("changes, words", [
    (dict(balance=True, desirable_weight=2.0), "--balance"), (dict(model=None), "--model and --data"),
    (dict(beta=0.0), "--beta"), (dict(loss=("kto",)), "--loss"), (dict(loss="bco"), "--loss"),
    (dict(ref="none"), "--ref"),
    (dict(desirable_weight=-1.0), "--desirable_weight"), (dict(humanline=(-1.0, 1.5)), "--ref swap"),
    (dict(humanline=(0.1, 1.5), ref="swap", ref_cache=None), "--humanline"), (dict(sync_reference=2), "--ref swap"),
    (dict(desirable_weight=0.0, undesirable_weight=0.0), "weight")])
def test_bad_arguments_are_refused_in_one_sentence(arguments, changes, words):
    with pytest.raises(BadInput, match=words) as error:
        kto.main(arguments(**changes))
    assert "\n" not in str(error.value)
