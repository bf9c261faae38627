"""What flags may say, what they are when they are not given, and what a user's own functions may return."""
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import bad_input, parametrize, slow_but
from runs import EACH, SCRIPTS, arguments, load, needs_peft, read
from safetensors.torch import load_file

import dpo
import rloo
from refcache import StepMemory

BAD = {  # of every script
    "lr": -1e-6, "warmup": -0.1, "epochs": 0.0, "steps": -2, "batch_size": 0, "lora_r": 0,
    "lora_alpha": 0.0, "beta": -0.1, "max_new_tokens": 0,
    "ref": "Cache", "gradient_checkpointing": "yes", "chat_template_kwargs": {"think": "false"}}


def resolve(script, **flags):
    return SCRIPTS[script].resolve(arguments(script, **flags))


# --- Values

@parametrize("script, flag, value", [
    *((script, *bad) for script in SCRIPTS for bad in BAD.items()),
    ("dpo", "beta", 0.0), ("dpo", "label_smoothing", 0.5), ("dpo", "label_smoothing", math.nan), ("dpo", "loss", "ipo"),
    ("dpo", "loss", ("dpo",)), ("dpo", "loss", ()), ("dpo", "loss_weights", (1.0, 2.0)),
    ("kto", "beta", 0.0), ("kto", "loss", "sigmoid"), ("kto", "undesirable_weight", -1.0),
    ("rloo", "k", 1), ("rloo", "temperature", 0.0), ("rloo", "updates_per_rollout", 0)])
def test_values_that_no_run_can_have_are_refused(script, flag, value):
    with bad_input(rf"--{flag}\b"):
        resolve(script, **{flag: value})


@EACH
def test_smallest_values_are_accepted(script):
    flags = dict(steps=-1, lr=0.0, warmup=0.0, batch_size=1, lora_r=1, max_grad_norm=0.0, eval_size=0)
    flags |= dict(k=2, beta=0.0, max_new_tokens=1) if script == "rloo" else {}
    assert vars(resolve(script, **flags)).items() >= flags.items()


def test_label_smoothing_is_for_sigmoid():
    assert resolve("dpo", label_smoothing=0.4, loss=("sft", "sigmoid")).label_smoothing == 0.4
    with bad_input("--label_smoothing"):
        resolve("dpo", label_smoothing=0.4, loss=("ipo",))


def test_model_and_data_are_given_both_or_neither():
    for flags in (dict(model="mine"), dict(data="mine")):
        with bad_input("^give both --model and --data, or neither for the demo$"):
            dpo.resolve(dpo.Args(**flags))


# --- Defaults

def test_learning_rate_of_an_adapter_is_ten_times_as_high():
    assert [resolve("dpo", lr=None, lora_r=r).lr for r in (None, 4)] == [1e-6, 1e-5]


@EACH
def test_folder_without_out_goes_on_or_is_the_next(script, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for folder in (f"out/{script}", f"out/{script}-2", f"out/{script}-3"):
        assert resolve(script, out=None).out == folder
        Path(folder).mkdir(parents=True)
        assert resolve(script, out=None).out == folder, "an unfinished run goes on"
        Path(folder, "model").mkdir()


@parametrize("gpu, flags, expected", [
    (100, {}, "live"), (72, {}, "live"), (69, {}, "swap"), (100, dict(sync_reference=2), "swap"),
    (100, dict(ref="swap"), "swap"), (9, dict(ref="live"), "live"), (None, {}, "swap"),
    pytest.param(100, dict(lora_r=2), "swap", marks=needs_peft)])
def test_reference_of_rloo_is_live_where_it_fits(monkeypatch, gpu, flags, expected):
    """A step needs 20 + 30 + 5 GB; a live reference in bfloat16 30 / 6 = 5 more: 60 are 85 % of 70.6 GB."""
    policy = load(script=rloo, trains=True, **flags)
    monkeypatch.setattr(rloo, "step_memory", lambda *_: StepMemory(20, 30, 5, 1, gpu))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    assert rloo.choose_reference(policy, rloo.Args(dtype="bfloat16", **flags)) == expected


# --- A user's own functions

def call(function, /, **columns):
    rows = [dpo.Row((1,), (2,), (3,), (1,), dict(prompt=prompt) | {name: values[i] for name, values in columns.items()})
            for i, prompt in enumerate("pq")]
    return dpo.call_function("mine.py:rate", function, rows, ["a", "b"])


async def rate_later(**columns):
    return [0.5, None]


def rate_one_by_one(**columns):
    yield from (0.5, None)


@parametrize("function", [rate_later, rate_one_by_one, lambda **columns: torch.tensor([0.5, math.nan])])
def test_numbers_may_come_from_a_coroutine_a_generator_or_a_tensor(function):
    assert call(function) == pytest.approx([0.5, math.nan], nan_ok=True)


@parametrize("value", [None, 0.5, ["good", "bad"], [1.0], [1.0, 2.0, 3.0], [[1.0], [2.0]]], ids=str)
def test_other_results_are_refused_in_one_sentence(value):
    with bad_input(r"mine.py:rate returned .*: expected a list of 2 numbers or None"):
        call(lambda **columns: value)


def test_missing_argument_is_named_and_errors_keep_their_traceback():
    with bad_input(r"mine.py:rate: .*'answer'.*: it gets .*, add \*\*columns"):
        call(lambda prompts, completions: [1.0, 2.0], answer=["42", "43"])

    def rate(**columns):
        raise TypeError("mine")
    with pytest.raises(TypeError, match="^mine$"):
        call(rate)

    async def judge(**columns):
        raise ConnectionError("mine")
    with pytest.raises(RuntimeError, match="mine.py:rate"):  # the scripts print an OSError without its traceback
        call(judge)


def test_two_runs_in_a_process_read_their_score_anew(tmp_path):
    """As a notebook does, where a function is edited between two runs."""
    file = tmp_path / "score.py"
    for value in (0.25, 0.75):
        file.write_text(f"def rate(completions, **columns):\n    return [{value}] * len(completions)\n")
        args = arguments(steps=1, samples=2, max_new_tokens=2, score=f"{file}:rate")
        assert [values["eval_score"] for values in dpo.main(args)] == [value] * 2


# --- Weights & Biases

@pytest.fixture
def wandb(monkeypatch):
    """A stand-in, which keeps what it is told."""
    stand_in = SimpleNamespace(begun=[], logged=[])
    stand_in.init = lambda **options: stand_in.begun.append(options) or SimpleNamespace(id=options["id"] or "first")
    stand_in.log = lambda values, step: stand_in.logged.append((step, values))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return stand_in


@parametrize("script", slow_but(["dpo"], SCRIPTS))
def test_every_line_of_metrics_is_logged_and_a_resumed_run_goes_on(script, wandb, monkeypatch):
    module = SCRIPTS[script]
    module.main(arguments(script, steps=1, max_new_tokens=2))
    assert not wandb.begun and not wandb.logged, "not without --wandb"

    args = arguments(script, wandb=True, save_every=1, max_new_tokens=2)
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(module, "save_model", None)
        module.main(args)
    lines = read(f"{args.out}/metrics.jsonl")
    assert wandb.logged == [(values["step"], values) for values in lines] and len(lines) == 4

    module.main(args)
    first, second = wandb.begun
    assert len(wandb.logged) == 4, "nothing was left to do"
    assert (first["id"], second["id"]) == (None, "first"), "the first run got its id from wandb"
    assert first["resume"] == second["resume"] == "allow"
    assert first["name"] == Path(args.out).name and first["config"]["lr"] == args.lr


# --- The saved model

def test_model_is_saved_in_the_dtype_of_its_forwards():
    saved = []
    for flags in (dict(dtype="bfloat16"), dict(dtype="bfloat16", save_dtype="float32"), dict(dtype="float32")):
        args = arguments(steps=1, **flags)
        dpo.main(args)
        config = json.loads(Path(args.out, "model/config.json").read_text())
        saved.append(load_file(f"{args.out}/model/model.safetensors"))
        assert {str(weight.dtype) for weight in saved[-1].values()} == {f"torch.{config['dtype']}"}
    half, whole, single = saved
    assert [weights["lm_head.weight"].dtype for weights in (whole, single)] == [torch.float32] * 2
    for name, weight in whole.items():
        assert torch.equal(weight.bfloat16(), half[name]) and half[name].dtype == torch.bfloat16
    assert any(not torch.equal(weight.bfloat16().float(), weight) for weight in whole.values())
