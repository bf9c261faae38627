"""kto.py: the loss and z by hand, KL rows known before training, and what it refuses. What it shares with dpo.py is tested there."""
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from math import exp
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import tensor
from transformers import AutoModelForCausalLM

import kto
import refcache
from kto import Args, Batch, batch_rows, derange, draw_others, feedback_loss, lr_factor, metrics
from refcache import BadInput, load_tokenizer

ROOT = Path(kto.__file__).parent
MODEL = str(ROOT / "demo/model")
ROWS = [json.loads(line) for line in open(ROOT / "demo/feedback.jsonl")][:48]
PAIRS = [json.loads(line) for line in open(ROOT / "demo/pairs.jsonl")][:24]
TOKENIZER, CONTEXT = load_tokenizer(MODEL)


def main(args):
    """Again and again into one folder, which a finished run would otherwise keep for itself."""
    (Path(args.out) / "finished.json").unlink(missing_ok=True)
    return kto.main(args)


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def args(tmp_path):
    """A run of three steps."""
    return Args(model=MODEL, data=write(tmp_path / "train.jsonl", ROWS), eval_data=write(tmp_path / "eval.jsonl", ROWS[:8]),
                out=str(tmp_path / "out"), steps=3, batch_size=8, lr=1e-3, samples=2, max_new_tokens=4)


def weights(args):
    return load_file(Path(args.out) / "model.safetensors")


def largest_difference(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


def sg(x): return 1 / (1 + exp(-x))


def test_loss_by_hand():
    batch, z = Batch(tensor([-9.0, -8.0]), tensor([1.5, -0.5]), tensor([True, False])), tensor(0.4)
    assert feedback_loss("kto", batch, z, 0.2, 1.2, 0.9).tolist() == pytest.approx([1.2 * (1 - sg(0.2 * 1.1)), 0.9 * (1 - sg(0.2 * 0.9))])
    assert feedback_loss("apo_zero_unpaired", batch, z, 0.2).tolist() == pytest.approx([1 - sg(0.3), sg(-0.1)])
    with pytest.raises(ValueError, match="no loss"):
        feedback_loss("kto2", batch, z, 0.2)


def test_gradient_raises_the_desirable_and_lowers_the_other():
    rho = torch.zeros(2, requires_grad=True)
    for loss in ("kto", "apo_zero_unpaired"):
        grad, = torch.autograd.grad(feedback_loss(loss, Batch(rho, rho, tensor([True, False])), tensor(0.0), 0.1).sum(), rho)
        assert grad[0] < 0 < grad[1]


def test_metrics_by_hand_and_no_mean_of_a_kind_that_is_not_there():
    both = metrics(Batch(tensor([-9.0, -8.0, -7.0]), tensor([2.0, 1.0, 0.0]), tensor([True, False, False])), tensor(0.3), Args(beta=0.1))
    assert both["rewards/chosen"] == pytest.approx(0.2) and both["rewards/rejected"] == pytest.approx(0.05)
    assert both["rewards/margins"] == pytest.approx(0.15) and both["rewards/accuracies"] == pytest.approx(1.5 / 3)
    assert (both["count/chosen"], both["count/rejected"], both["logps/rejected"]) == (1, 2, -7.5) and both["kl"] == pytest.approx(0.3)
    one = metrics(Batch(tensor([-9.0]), tensor([2.0]), tensor([True])), tensor(0.3), Args())
    assert not {"rewards/rejected", "rewards/margins", "logps/rejected"} & set(one) and one["count/rejected"] == 0


# --- z --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(2, 51))
def test_derangement(n):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        for prompts in (list(range(n)), [0] * (n // 2) + list(range(1, n - n // 2 + 1)), rng.integers(0, max(4, n // 3), n).tolist()):
            most = max(prompts.count(p) for p in prompts)
            if 2 * most > n:
                with pytest.raises(BadInput, match=f"one prompt has {most} of the {n} rows"):
                    derange(prompts, seed)
                continue
            partners = derange(prompts, seed)
            assert sorted(partners) == list(range(n)) and all(prompts[i] != prompts[j] for i, j in enumerate(partners))
            assert partners == derange(prompts, seed)


def test_derangements_differ_by_seed_and_have_no_order():
    prompts = list(range(40))
    assert derange(prompts, 0) != derange(prompts, 1)
    assert abs(np.corrcoef(prompts, derange(prompts, 0))[0, 1]) < 0.5


@pytest.mark.parametrize("prompts", [["a"], ["a", "a"], ["a", "a", "b"]])
def test_where_there_is_no_derangement_it_says_so(prompts):
    with pytest.raises(BadInput, match="one prompt has"):
        derange(prompts, 0)


def test_others_fit_and_belong_to_other_prompts(tmp_path, capsys):
    rows = kto.load_rows(write(tmp_path / "rows.jsonl", ROWS), TOKENIZER, 1024, Args())
    limit = sorted(len(row.prompt) + len(row.completion) for row in rows)[30]
    rows = [row for row in rows if len(row.prompt) + len(row.completion) <= limit]
    train, held = draw_others(rows[:24], rows[24:], limit, seed=0)
    cut = 0
    for row in train + held:
        assert 0 < len(row.other) <= limit - len(row.prompt)
        whole = [other for other in rows[:24] if other.completion[:len(row.other)] == row.other]
        assert any(other.prompt != row.prompt for other in whole)
        cut += all(other.completion != row.other for other in whole)
    assert cut and f"{cut} of {len(rows)} cut to fit" in capsys.readouterr().out


def test_held_out_rows_never_get_an_answer_to_their_own_prompt():
    train = [kto.Row((i % 2,), (10 + i % 2,), True, (), {}) for i in range(10)]
    _, held = draw_others(train, train[1:] + train[:1], 99, seed=0)
    assert all(row.other == (11 - row.prompt[0],) for row in held)


def test_z_is_the_clamped_mean_over_the_whole_batch(args):
    """By hand, with another policy than the reference, from one forward a sequence; and whatever the memory knob."""
    rows = kto.load_rows(args.data, TOKENIZER, 1024, args)
    rows, _ = draw_others(rows, [], 1024, seed=0)
    policy, base = refcache.load_model(MODEL, "cpu"), refcache.load_model(MODEL, "cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1 + 0.1 * torch.randn_like(p))
    reference = refcache.ReferenceCache()
    reference.fill(lambda: base, kto.groups(rows, others=True))
    def logp(model, row):
        ids = torch.tensor([row.prompt + row.other])
        return model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[len(row.prompt) - 1:].sum().item()
    ratios = [logp(policy, row) - logp(base, row) for row in rows]
    for some in ([0, 1, 2, 3], [4, 5, 6, 7], range(20)):
        truth = max(0.0, sum(ratios[i] for i in some) / len(some))
        for budget in (1, 100, 100_000):
            z = kto.estimate_kl(policy, [rows[i] for i in some], reference, replace(args, dtype="float32", tokens_per_forward=budget))
            assert z.item() == pytest.approx(truth, abs=1e-3) and not z.requires_grad
    assert min(ratios) < 0 < max(ratios), "the clamp must be after the mean for this test to see it"


def test_training_equals_a_slow_loop(args, tmp_path):
    """Two models in memory, one forward a sequence, z and loss as in the paper; z detached. The reference is surer than
    the policy, so that z is above zero from the start."""
    policy, base = (AutoModelForCausalLM.from_pretrained(MODEL) for _ in range(2))
    with torch.no_grad():
        base.lm_head.weight.mul_(1.25)
    base.save_pretrained(tmp_path / "base")
    args = replace(args, ref_model=str(tmp_path / "base"), lr=1e-4)
    history = main(args)
    rows, _ = draw_others(kto.load_rows(args.data, TOKENIZER, CONTEXT, args), [], 1024, args.seed)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    def log_ratio(row, y):
        def logp(model):
            ids = torch.tensor([row.prompt + y])
            return model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[len(row.prompt) - 1:].sum()
        with torch.no_grad(): ref = logp(base)
        return logp(policy) - ref
    for step in (1, 2, 3):
        optimizer.param_groups[0]["lr"] = args.lr * lr_factor(step, 3, args.warmup, args.schedule)
        batch = [rows[i] for i in batch_rows(step, len(rows), 8, 0)]
        with torch.no_grad(): z = (sum(log_ratio(row, row.other) for row in batch) / 8).clamp(min=0)
        loss = sum(1 - torch.sigmoid(0.1 * (log_ratio(row, row.completion) - z) * (1 if row.label else -1)) for row in batch) / 8
        assert loss.item() == pytest.approx(history[step]["loss"], abs=1e-5) and z.item() == pytest.approx(history[step]["kl"], abs=1e-4)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    assert min(values["kl"] for values in history[1:]) > 0.1, "z must not be zero for this test to see it"
    assert largest_difference(dict(policy.named_parameters()), weights(args)) < 1e-4


def test_the_cache_answers_every_question_of_three_epochs(args, monkeypatch):
    """Training, KL and evaluation rows, shuffled, at two batch sizes; the reference is loaded once."""
    loaded = []
    monkeypatch.setattr(refcache, "load_model", lambda *a, real=refcache.load_model, **k: loaded.append(a) or real(*a, **k))
    main(replace(args, steps=None, epochs=3.0, eval_every=2))
    assert len(loaded) == 2
    main(replace(args, steps=None, epochs=3.0, batch_size=5, beta=0.2))  # a miss would be a KeyError
    assert len(loaded) == 3


def test_a_step_costs_one_forward_over_the_others_and_one_over_the_rows(args, monkeypatch):
    asked = []
    monkeypatch.setattr(kto, "log_ratios", lambda policy, groups, *rest: asked.append((torch.is_grad_enabled(), len(groups))) or
                        refcache.log_ratios(policy, groups, *rest))
    main(replace(args, eval_data=None, eval_size=0))
    assert asked == [(False, 8), (True, 8)] * 3


# --- training -------------------------------------------------------------------------------------------------------


def test_learns_the_demo(tmp_path, capsys):
    history = main(Args(out=str(tmp_path), epochs=1.0))
    assert history[0]["eval_rewards/accuracies"] == 0.5 and history[-1]["eval_rewards/margins"] > 0.5
    scores = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("eval_score")).split()
    assert float(scores[-2]) < 0.45 and float(scores[-1]) > 0.9


def test_step_0_has_no_kl_and_half_the_weight_as_loss(args, capsys):
    history = main(replace(args, desirable_weight=1.5, undesirable_weight=0.5))
    share = history[1]["count/chosen"] / 8
    assert abs(history[1]["kl"]) < 1e-5 and history[1]["loss"] == pytest.approx(0.5 * (1.5 * share + 0.5 * (1 - share)), abs=1e-5)
    assert "step 0: policy and reference differ by at most" in capsys.readouterr().out


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_tokens_per_forward_changes_memory_only(args, loss):
    one = main(replace(args, loss=loss, tokens_per_forward=100_000))
    first = weights(args)
    many = main(replace(args, loss=loss, tokens_per_forward=90))
    assert largest_difference(first, weights(args)) < 2e-5
    assert all(a[name] == pytest.approx(b[name], abs=1e-4, rel=1e-4) for a, b in zip(one, many) for name in a)


def test_a_batch_of_one_works_and_lr_zero_changes_nothing(args):
    history = main(replace(args, batch_size=1))
    assert len(history) == 4 and history[1]["count/chosen"] + history[1]["count/rejected"] == 1
    main(replace(args, lr=0.0))
    assert largest_difference(weights(args), load_file(Path(MODEL) / "model.safetensors")) == 0


def test_every_metric_is_explained_at_the_head_of_the_script(args):
    names = {name.removeprefix("eval_") for values in main(args) for name in values} - {"step"}
    assert not [name for name in names if name not in kto.__doc__]


def test_a_sorted_file_is_mixed(args, tmp_path):
    rows = sorted(ROWS, key=lambda row: row["label"])
    history = main(replace(args, data=write(tmp_path / "sorted.jsonl", rows), batch_size=16, steps=3))
    assert all(values["count/chosen"] and values["count/rejected"] for values in history[1:])


# --- data -----------------------------------------------------------------------------------------------------------


def rows_of(tmp_path, rows):
    return kto.load_rows(write(tmp_path / "rows.jsonl", rows), TOKENIZER, 1024, Args())


def test_pairs_give_one_row_of_each_kind(tmp_path):
    rows = rows_of(tmp_path, PAIRS)
    assert [row.label for row in rows] == [True, False] * len(PAIRS)
    for pair, good, bad in zip(PAIRS, rows[::2], rows[1::2]):
        assert good.prompt == bad.prompt
        assert TOKENIZER.decode(good.completion) == pair["chosen"][0]["content"] + "<|end|>"
        assert TOKENIZER.decode(bad.completion) == pair["rejected"][0]["content"] + "<|end|>"


def test_labels_and_columns_in_every_spelling(tmp_path):
    spelled = [dict(prompt="The tea", completion=" was warm.", label=label) for label in (True, 1, "1", "true", "True", False, 0, "0", "false", "False")]
    assert [row.label for row in rows_of(tmp_path, spelled)] == [True] * 5 + [False] * 5
    halos = [dict(prompt=ROWS[0]["prompt"], output=ROWS[0]["completion"], label=1, type="binary_feedback")]
    assert rows_of(tmp_path, halos)[0][:2] == rows_of(tmp_path, [ROWS[0]])[0][:2]


def test_weights_are_reported_and_balanced(args, tmp_path, capsys):
    rows = [dict(row, label=i % 4 == 0) for i, row in enumerate(ROWS)]
    args = replace(args, data=write(tmp_path / "quarter.jsonl", rows))
    main(args)
    assert "12 desirable rows of weight 1, 36 others of weight 1: ratio 0.33, outside of [1, 4/3]" in capsys.readouterr().out
    history = main(replace(args, balance=True))
    assert "12 desirable rows of weight 3, 36 others of weight 1: ratio 1.00\n" in capsys.readouterr().out
    share = history[1]["count/chosen"] / 8
    assert history[1]["loss"] == pytest.approx(0.5 * (3 * share + (1 - share)), abs=1e-5)


@pytest.mark.parametrize("rows, words", [
    ([dict(prompt="a", completion=" b")], "line 1: label must be true or false.*None.*columns: prompt, completion"),
    ([dict(prompt="a", completion=" b", label=0.5)], "line 1: label must be true or false, 1 or 0, not 0.5"),
    ([dict(prompt="a", completion=" b", label="good")], "line 1: label"),
    ([dict(prompt="a", completion=" b", label=[1])], "line 1: label"),
    ([dict(prompt="a", label=True)], "line 1: completion must be"),
    ([dict(completion=" b", label=True)], "line 1: prompt must be"),
    ([dict(prompt="a", chosen=" b", rejected=" b")], "line 1: chosen equals rejected")])
def test_bad_rows_are_refused_in_one_sentence_that_names_the_line(tmp_path, rows, words):
    with pytest.raises(BadInput, match=words) as error:
        rows_of(tmp_path, rows)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rows, words", [
    ([row for row in ROWS if row["label"]], "have the same label"), (ROWS[:1], "have the same label"),
    ([dict(ROWS[0], label=True), dict(ROWS[0], label=False)], "one prompt has 2 of the 2 rows")])
def test_data_that_kto_cannot_use_is_refused(args, tmp_path, rows, words):
    with pytest.raises(BadInput, match=words):
        main(replace(args, data=write(tmp_path / "few.jsonl", rows)))


@pytest.mark.parametrize("changes, words", [
    (dict(loss="apo_zero_unpaired", balance=True), "has no weights"), (dict(balance=True, desirable_weight=2.0), "--balance sets"),
    (dict(undesirable_weight=0.0), "--undesirable_weight"), (dict(model=None), "--model and --data"), (dict(beta=0.0), "--beta")])
def test_bad_arguments_are_refused_in_one_sentence(args, changes, words):
    with pytest.raises(BadInput, match=words):
        main(replace(args, **changes))


def test_runs_copied_alone_with_refcache_and_exits_with_2_on_bad_input(tmp_path):
    for name in ("kto.py", "refcache.py"):
        shutil.copy(ROOT / name, tmp_path)
    flags = ["--model", MODEL, "--steps", "1", "--samples", "2", "--data"]
    done = subprocess.run([sys.executable, "kto.py", *flags, write(tmp_path / "rows.jsonl", ROWS)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "out/kto/model.safetensors").exists(), done.stderr
    done = subprocess.run([sys.executable, "kto.py", *flags, "nothing.jsonl"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "kto.py: cannot read nothing.jsonl" in done.stderr
