"""dpo.py from end to end, and what the other scripts have in common with it: files, reference, order, rates."""
import gc
import json
import math
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import bad_input, parametrize
from runs import (
    BOTH, EACH, SCRIPTS, TOKENIZER, arguments, distance, read, run, same, same_metrics, tiny, without_speed)
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import dpo
import rloo
from dpo import Args, learning_rate, rows_in_order
from refcache import ReferenceCache, checkpoint_digest

FIRST = dict(eval_every=2, save_every=50)


def cache_of(out):
    cache = ReferenceCache(reference=checkpoint_digest(tiny()))
    cache.load(Path(out) / "reference_logprobs.pkl")
    return cache


# --- A run, and what it leaves

def test_losses_of_step_0_are_weighted_and_accuracies_are_a_half():
    """At the reference ipo is 1 / (2 β)², and sigmoid ln 2."""
    before, first = run(steps=1, loss=("ipo", "sigmoid"), loss_weights=(0.5, 1.0)).history
    assert [before["eval_loss"], first["loss"]] == pytest.approx([0.5 * 25 + math.log(2)] * 2, abs=1e-3)
    assert before["eval_rewards/accuracies"] == first["rewards/accuracies"] == 0.5


def test_files_of_a_finished_run():
    first = run(**FIRST)
    names = {file.name for file in first.out.iterdir() if "lock" not in file.name}
    assert names == {"model", "metrics.jsonl", "args.json", "reference_logprobs.pkl"}  # no checkpoint
    assert without_speed(read(first.out / "metrics.jsonl")) == first.history
    assert [step for step, line in enumerate(first.history) if "eval_loss" in line] == [0, 2, 3]
    assert AutoModelForCausalLM.from_pretrained(first.model).config._attn_implementation == "sdpa"
    assert AutoTokenizer.from_pretrained(first.model).chat_template == TOKENIZER.chat_template


@EACH
def test_bars_of_transformers_are_off(script):
    logging.enable_progress_bar()
    with bad_input("--batch_size"):
        SCRIPTS[script].main(arguments(script, batch_size=0))
    assert not logging.is_progress_bar_enabled()


def test_metrics_are_strict_json(tmp_path):
    """It has no word for NaN. Only rloo.py has means of nothing."""
    with pytest.raises(ValueError):
        dpo.append(tmp_path / "log", dict(step=0, a=math.nan), False)
    rloo.append(tmp_path / "log", [dict(step=0, a=math.nan, b=1.5)])
    assert read(tmp_path / "log") == [dict(step=0, a=None, b=1.5)]


@EACH
def test_every_metric_is_explained(script):
    history = run(script, **FIRST).history
    names = {name for line in history for name in line} - {"step"}
    assert {"learning_rate", "grad_norm", "eval_reward" if script == "rloo" else "eval_loss"} <= names
    text = SCRIPTS[script].__doc__.replace("NAME", "letters")
    assert not [name for name in names if name.removeprefix("eval_").removesuffix("_stderr") not in text]


@BOTH
def test_memory_flags_change_memory_only(script):
    flags = dict(tokens_per_forward=90 if script == "dpo" else 40, gradient_checkpointing=True)  # divides all batches
    assert same(run(script, **FIRST), run(script, **FIRST, **flags), 1e-4)


@EACH
def test_a_forward_that_only_fsdp_needs_counts_nothing(script, monkeypatch):
    expected, module = run(script).history, SCRIPTS[script]
    monkeypatch.setattr(module, "micro_batches", lambda *inputs, original=module.micro_batches: (
        [*original(*inputs), ([0], 0)]))
    assert same_metrics(without_speed(module.main(arguments(script))), expected)


def test_report_shows_held_out_metrics_before_and_now(tmp_path, capsys):
    history = [dict(step=0, eval_a=1.5, eval_b=1, a=2), dict(step=1, a=0), dict(step=2, a=3, eval_a=-0.25)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, history)))
    assert dpo.report(tmp_path) == history
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["held", "out", "before", "now"], ["eval_a", "1.500", "-0.250"], ["see", str(tmp_path)]]


@EACH
def test_every_step_has_a_random_state_of_its_own(script, monkeypatch):
    found = []
    monkeypatch.setattr(SCRIPTS[script], "learning_rate", lambda *_: found.append(torch.initial_seed()) or 0.0)
    SCRIPTS[script].main(arguments(script, steps=2, seed=70))
    assert found == [71, 72]


@parametrize("script", ["dpo", "rloo"])
def test_max_grad_norm_0_does_not_clip(script):
    one, two, clipped = (run(script, steps=1, max_grad_norm=bound) for bound in (0.0, 1e9, 1e-9))
    assert same(one, two) and distance(one, clipped) > 1e-3
    assert one.history[1]["grad_norm"] == clipped.history[1]["grad_norm"] > 0.01


@BOTH
def test_run_that_is_not_finite_stops_and_saves_nothing(script):
    args = arguments(script, dtype="float32", lr=1e17, max_grad_norm=1e17)
    with bad_input("step [12]: .*not finite") as error:
        SCRIPTS[script].main(args)
    assert len(read(f"{args.out}/metrics.jsonl")) == int(str(error.value)[5])
    assert not list(Path(args.out).glob("*model"))


# --- The reference

@parametrize("flags, models", [
    ({}, [1, 1]), (dict(ref="none"), [1]), (dict(loss=("simpo", "sft"), ref="swap"), [1]), (dict(ref="live"), [1, 2])])
def test_one_model_is_in_memory_and_a_reference_only_if_it_is_needed(monkeypatch, flags, models):
    loaded, alive = [], weakref.WeakSet()

    def load_model(*rest, original=dpo.load_model, **options):
        model = original(*rest, **options)
        alive.add(model)
        gc.collect()
        loaded.append(len(alive))
        return model

    monkeypatch.setattr(dpo, "load_model", load_model)
    args = arguments(steps=1, **flags)
    dpo.main(args)
    assert loaded == models
    assert any(Path(args.out).glob("*.pkl")) == (models == [1, 1])


@BOTH
def test_steps_0_only_fills_the_cache_and_tells_its_size(script, monkeypatch, capsys):
    args = arguments(script, steps=0)
    assert SCRIPTS[script].main(args) == []
    line, n_answers = capsys.readouterr().out.splitlines()[-1], len(cache_of(args.out))
    assert line == f"{args.out}/reference_logprobs.pkl has the log-probs of {n_answers} answers"
    assert n_answers == 2 * 15 and not Path(args.out, "model").exists() and not read(f"{args.out}/metrics.jsonl")
    monkeypatch.setattr(ReferenceCache, "compute", None)
    assert len(SCRIPTS[script].main(replace(args, steps=1))) == 2, "the same folder goes on"


@BOTH
def test_only_what_the_run_needs_is_scored(script):
    """Of 12 rows those of two steps, and 3 held-out ones; two answers each."""
    assert len(cache_of(run(script, steps=2, batch_size=2).out)) == 2 * (2 * 2 + 3)


@EACH
def test_steps_follow_from_epochs(script):
    assert len(run(script, steps=-1, epochs=0.6, batch_size=4).history) == 1 + 2


@EACH
def test_log_probs_of_another_model_stop_the_run(script, monkeypatch):
    def load_another(name, *rest, trains=False, load_model=SCRIPTS[script].load_model):
        return load_model(name if trains else tiny(1), *rest, trains=trains)

    monkeypatch.setattr(SCRIPTS[script], "load_model", load_another)
    with bad_input("differ by"):
        SCRIPTS[script].main(arguments(script, ref="live"))


# --- Order and learning rate

def test_batches_are_permutations():
    rows = list(range(10))
    order = rows_in_order(rows, 30, seed=0)
    assert order == rows_in_order(rows, 30, seed=0) != rows_in_order(rows, 30, seed=1)
    epochs = order[:10], order[10:20], order[20:]
    assert epochs[0] != epochs[1]
    assert [sorted(epoch) for epoch in epochs] == [rows] * 3


@parametrize("schedule, warmup, steps, rates", [
    ("linear", 0.0, 4, [2.0, 1.5, 1.0, 0.5]),
    ("cosine", 0.0, 4, [2.0, 1.707, 1.0, 0.293]),
    ("constant", 0.0, 4, [2.0, 2.0, 2.0, 2.0]),
    ("cosine", 0.5, 4, [1.0, 2.0, 2.0, 1.0]),
    ("linear", 2.5, 3, [1.0, 2.0, 2.0]),  # from 1 on the warmup is a number of steps
    ("linear", 0.1, 16, [1.0, 2.0, 2.0]),  # 1.6 steps are 2
    ("linear", 0.1, 4, [2.0, 1.5])])  # 0.4 steps are none
def test_learning_rate_by_hand(schedule, warmup, steps, rates):
    args = Args(lr=2.0, warmup=warmup, schedule=schedule)
    found = [learning_rate(step, steps, args) for step in range(1, len(rates) + 1)]
    assert found == pytest.approx(rates, abs=1e-3)
