"""dpo.py from end to end, and what the other scripts have in common with it: files, reference, order, rates."""
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from models import bad_input, cases
from runs import BOTH, EACH, SCRIPTS, TOKENIZER, arguments, read, run, same, tiny
from transformers import AutoTokenizer

import dpo
from dpo import Args, learning_rate, rows_in_order
from refcache import ReferenceCache, bytes_of, checkpoint_digest

FIRST = dict(eval_every=2, save_every=50, steps=-1, epochs=0.7)  # 8.4 of 12 rows: 3 steps


def cache_of(out, seed=0, dtype="float32"):
    cache = ReferenceCache(reference=checkpoint_digest(tiny(seed)), dtype=dtype)
    cache.load(Path(out) / "reference_logprobs.pkl")
    return cache


# --- A run, and what it leaves

def test_files_of_a_finished_run():
    first = run(**FIRST)
    names = {file.name for file in first.out.iterdir() if "lock" not in file.name}
    assert names == {"model", "metrics.jsonl", "args.json", "reference_logprobs.pkl"}  # no checkpoint
    assert [step for step, line in enumerate(first.history) if "eval_loss" in line] == [0, 2, 3]
    assert AutoTokenizer.from_pretrained(first.model).chat_template == TOKENIZER.chat_template


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


@BOTH
def test_run_that_is_not_finite_stops_and_saves_nothing(script):
    args = arguments(script, lr=1e17, max_grad_norm=0, save_every=1)  # 0: not clipped
    with bad_input("loss or gradient is not finite") as error:
        SCRIPTS[script].main(args)
    stopped_at, out = int(str(error.value)[5]), Path(args.out)
    assert len(read(out / "metrics.jsonl")) == stopped_at and max(dpo.checkpoints(out)) < stopped_at
    assert not list(out.glob("*model"))


@EACH
def test_finished_folder_is_refused(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert SCRIPTS[script].resolve(SCRIPTS[script].Args(lr=7.0)).lr == 7, "the demo"
    for name in (script, f"{script}-2"):
        for _ in range(2):  # also if it is there, for a run to go on
            out = Path(SCRIPTS[script].resolve(arguments(script, out=None)).out)
            assert out == Path("out", name)
            out.mkdir(parents=True, exist_ok=True)
        (out / "model").mkdir()
    with bad_input("holds a finished run"):
        SCRIPTS[script].main(arguments(script, out=f"out/{script}"))


# --- The reference

@cases("flags, trains", [
    ({}, [False, True]), (dict(ref="none"), [True]), (dict(loss=("simpo", "sft"), ref="live"), [True]),
    (dict(ref="live", loss=("sigmoid", "sft")), [True, False])])
def test_a_reference_is_loaded_only_if_it_is_needed(monkeypatch, flags, trains):
    """A cached one is freed before the policy is loaded."""
    loaded, alive, load_model = [], weakref.WeakSet(), dpo.load_model

    def spy(*rest, trains=False):
        assert not (trains and alive)
        model = load_model(*rest, trains=trains)
        alive.add(model)
        loaded.append(trains)
        return model

    monkeypatch.setattr(dpo, "load_model", spy)
    dpo.main(arguments(steps=1, **flags))
    assert loaded == trains


@BOTH
def test_steps_0_only_fills_the_cache_with_all_rows(script, monkeypatch):
    args = arguments(script, steps=0, ref_model=tiny(1), dtype="bfloat16")
    assert SCRIPTS[script].main(args) == [] and len(cache_of(args.out, 1, args.dtype).table) == 2 * 15
    assert {file.suffix for file in Path(args.out).iterdir()} - {""} == {".json", ".pkl", ".lock"}  # no log, no model
    monkeypatch.setattr(ReferenceCache, "compute", None)
    assert len(SCRIPTS[script].main(replace(args, steps=-1, epochs=1.5, batch_size=99))) == 3, "2 steps of all rows"


@EACH
def test_log_probs_of_another_model_stop_the_run(script, monkeypatch):
    module, load_model = SCRIPTS[script], SCRIPTS[script].load_model
    monkeypatch.setattr(module, "load_model", lambda name, *rest, trains=False: load_model(
        name if trains else tiny(1), *rest, trains=trains))
    with bad_input("differ by"):
        module.main(arguments(script, ref="live"))


@cases("answer", ["chosen", "rejected"])
def test_cache_that_is_wrong_stops_the_run(answer, tmp_path):
    args = arguments(steps=1, ref_cache=f"{tmp_path}/cache.pkl")
    cache = cache_of(run(steps=0).out)
    for row in dpo.load_rows(args.data, TOKENIZER, args):
        ids = getattr(row, answer)
        cache.table[bytes_of(row.prompt), bytes_of(ids)] = (cache[row.prompt, ids] - 1e-3).tobytes()
    cache.save(args.ref_cache)
    with bad_input("step 1: policy and reference differ by 5.0e-04"):
        dpo.main(args)


# --- Steps, order and learning rate

def test_batches_are_permutations():
    rows = list(range(10))
    order = rows_in_order(rows, 20, seed=0)
    assert order == rows_in_order(rows, 20, seed=0) != rows_in_order(rows, 20, seed=1)
    assert sorted(order[:10]) == sorted(order[10:]) == rows and order[:10] != order[10:]


@cases("schedule, warmup, steps, rates", [
    ("linear", 0.1, 4, [2.0, 1.5, 1.0, 0.5]),  # a warmup of 0.4 steps is none
    ("cosine", 0.0, 4, [2.0, 1.707, 1.0, 0.293]),
    ("constant", 0.1, 16, [1.0, 2.0, 2.0, 2.0]),  # 1.6 steps are 2
    ("linear", 2.5, 3, [1.0, 2.0, 2.0])])  # from 1 on the warmup is a number of steps
def test_learning_rate_by_hand(schedule, warmup, steps, rates):
    args = Args(lr=2.0, warmup=warmup, schedule=schedule)
    found = [learning_rate(step, steps, args) for step in range(1, len(rates) + 1)]
    assert found == pytest.approx(rates, abs=1e-3)
