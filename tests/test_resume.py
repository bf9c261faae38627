"""Runs that end early: the same command goes on, and ends with the same bits as a run that was never interrupted."""
import json
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

import dpo
import kto
import rloo
from models import SMALL, build
from refcache import BadInput, ReferenceCache

ROOT = Path(dpo.__file__).parent
MODEL = str(ROOT / "demo/model")
SCRIPTS = {"dpo": dpo, "kto": kto, "rloo": rloo}
DATA = {"dpo": "pairs", "kto": "feedback", "rloo": "prompts"}
REWARD = """
import random
import numpy as np
import torch

def noisy(prompts, completions, **columns):  # depends on the state of every random number generator
    noise = random.random() + np.random.rand() + torch.rand(()).item()
    return [len(str(y)) / 100 + noise * i for i, y in enumerate(completions)]
"""
RUNS = {  # name -> script and flags: together they have every kind of state
    "dpo": ("dpo", dict(eval_every=2)),
    "dpo-moving": ("dpo", dict(ref="swap", sync_reference=2, sync_mix=0.6)),
    "dpo-humanline": ("dpo", dict(ref="swap", humanline=(-1.0, 1.5), tokens_per_forward=300)),
    "dpo-bfloat16": ("dpo", dict(ref="live", loss=("ipo", "sft"), dtype="bfloat16", save_dtype="bfloat16",
                                 schedule="cosine")),
    "kto": ("kto", dict(tokens_per_forward=300)),
    "kto-lora-dropout": ("kto", dict(ref="swap", lora_r=4, lora_dropout=0.3)),
    "kto-merge": ("kto", dict(lora_r=4, merge=True)),
    "rloo": ("rloo", dict(k=3, updates_per_rollout=2, sync_reference=2, eval_every=2)),
    "rloo-lora": ("rloo", dict(lora_r=4)),
}
STEPS = 3
NEEDS_PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")


def slow_but(*quick):
    """All runs; those that are not named are slow."""
    marks = {name: [NEEDS_PEFT] if flags.get("lora_r") else [] for name, (_, flags) in RUNS.items()}
    return [pytest.param(name, marks=marks[name] + ([] if name in quick else [pytest.mark.slow])) for name in RUNS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data and rewards of all tests here."""
    folder = tmp_path_factory.mktemp("resume")
    for name in DATA.values():
        rows = open(ROOT / f"demo/{name}.jsonl").readlines()
        (folder / f"{name}.jsonl").write_text("".join(rows[:14]))
        (folder / f"{name}_test.jsonl").write_text("".join(rows[40:42]))
    (folder / "reward_of_test_resume.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def flags_of(folder):
    def flags_of(name, out, **changes):
        script, special = RUNS[name]
        files = dict(data=f"{folder}/{DATA[script]}.jsonl", eval_data=f"{folder}/{DATA[script]}_test.jsonl")
        common = dict(model=MODEL, steps=STEPS, batch_size=4, lr=1e-3, samples=2, max_new_tokens=4, save_every=100)
        reward = dict(reward=(f"{folder}/reward_of_test_resume.py:noisy",)) if script == "rloo" else {}
        return files | common | reward | special | changes | dict(out=str(out))
    return flags_of


def start(name, flags):
    module = SCRIPTS[RUNS[name][0]]
    return module.main(module.Args(**flags))


def files_of(out):
    """The results of a finished run. There must be no other files beside them."""
    out = Path(out)
    names = {path.name for path in out.iterdir()} - {"reference_logprobs.pkl", "reference_logprobs.pkl.lock"}
    assert names == {"model", "metrics.jsonl", "samples.jsonl", "args.json", "checkpoint.safetensors", ".run.lock"}
    results = [out / "metrics.jsonl", out / "samples.jsonl", *sorted((out / "model").iterdir())]
    return {path.name: path.read_bytes() for path in results}


@pytest.fixture(scope="module")
def whole(flags_of, tmp_path_factory):
    """whole(name) -> the folder of a run that was not interrupted: one for all tests."""
    known = {}

    def whole(name):
        if name not in known:
            out = tmp_path_factory.mktemp("whole") / name
            start(name, flags_of(name, out))
            known[name] = out
        return known[name]
    return whole


@pytest.fixture
def same_as_whole(whole, flags_of):
    """Gives the same command again, and compares the results with those of an uninterrupted run."""
    def same_as_whole(name, out):
        history = start(name, flags_of(name, out))
        assert [values["step"] for values in history] == list(range(STEPS + 1))
        expected = files_of(whole(name))
        assert [name for name, data in files_of(out).items() if data != expected.get(name)] == []
    return same_as_whole


def signal_in_step(patch, step, number=signal.SIGTERM):
    """The signal arrives in the middle of an optimizer step."""
    count = []

    def interrupted(self, original=torch.optim.AdamW.step):
        count.append(1)
        if len(count) == step:
            os.kill(os.getpid(), number)
        return original(self)
    patch.setattr(torch.optim.AdamW, "step", interrupted)


def stop(name, flags, step=2, number=signal.SIGTERM):
    script = SCRIPTS[RUNS[name][0]]
    step *= flags.get("updates_per_rollout", 1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(script.Stopped, match=number.name) as stopped:
        signal_in_step(patch, step, number)
        start(name, flags)
    return stopped.value


@pytest.fixture(scope="module")
def stopped(flags_of, tmp_path_factory):
    """The folder of a run that a signal stopped after step 2: tests copy it."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    stop("dpo", flags_of("dpo", out))
    return out


@pytest.fixture
def copied(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "out"))


# ---- Signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_but("dpo-moving", "kto-lora-dropout"))
def test_resume_after_a_signal_is_bitwise_equal(name, flags_of, same_as_whole, tmp_path):
    stop(name, flags_of(name, tmp_path / "out"), 2, signal.SIGINT if "lora" in name else signal.SIGTERM)
    assert not (tmp_path / "out/model").exists()
    same_as_whole(name, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but())
def test_resume_after_each_step_is_bitwise_equal(name, flags_of, same_as_whole, tmp_path):
    for _ in range(1, STEPS):
        stop(name, flags_of(name, tmp_path / "out"), 1)  # each process stops after a step of its own
    same_as_whole(name, tmp_path / "out")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_step_has_its_own_seed(name, flags_of, tmp_path, monkeypatch):
    seeds = []
    monkeypatch.setattr(SCRIPTS[name], "set_seed", seeds.append)
    start(name, flags_of(name, tmp_path / "out", samples=0, eval_data=None))
    assert len({*seeds}) == 1 + STEPS  # the first is of what comes before the steps


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_its_step_says_so_and_gives_its_handler_back(flags_of, tmp_path, number):
    handler = signal.getsignal(number)
    error = stop("dpo", flags_of("dpo", tmp_path / "out", ref="none", loss=("simpo",), samples=0), 1, number)
    assert "step 1 is saved" in error.__notes__[0] and "\n" not in str(error) and signal.getsignal(number) == handler
    assert read_state(tmp_path / "out/checkpoint.safetensors")[0]["step"] == 1


def test_a_second_signal_stops_at_once(flags_of, tmp_path, monkeypatch):
    def step(self):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(KeyboardInterrupt):
        start("dpo", flags_of("dpo", tmp_path / "out", ref="none", loss=("simpo",), samples=0))


@pytest.mark.slow
def test_a_signal_in_the_last_step_lets_the_run_finish(flags_of, same_as_whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        signal_in_step(patch, STEPS)
        start("dpo", flags_of("dpo", tmp_path / "out"))
    same_as_whole("dpo", tmp_path / "out")


def test_a_moved_folder_without_its_reference_cache_resumes_with_the_same_bits(copied, same_as_whole):
    """The reference is scored before the checkpoint is read: else the half-trained policy would be the reference."""
    (copied / "reference_logprobs.pkl").unlink()
    same_as_whole("dpo", copied)


def test_a_finished_run_says_so_and_does_nothing(flags_of, whole, monkeypatch, capsys):
    def times():
        return {path: path.stat().st_mtime_ns for path in whole("dpo").rglob("*") if path.name != ".run.lock"}
    before = times()
    monkeypatch.setattr(dpo, "load_model", None)
    history = start("dpo", flags_of("dpo", whole("dpo")))
    assert [values["step"] for values in history] == list(range(STEPS + 1))
    assert "finished after 3 steps: nothing to do" in capsys.readouterr().out
    assert before == times()
    assert (whole("dpo") / "checkpoint.safetensors").stat().st_size < 20_000  # without weights


# ---- Exceptions inside a step ---------------------------------------------------------------------------------------


def fail_in_step(patch, name, step, error):
    """The loss raises `error`, or is multiplied by it."""
    script, flags = RUNS[name]
    loss, done = {"dpo": "preference_loss", "kto": "feedback_loss", "rloo": "policy_loss"}[script], []

    def counting(self, original=torch.optim.AdamW.step):
        done.append(1)
        return original(self)

    def failing(*inputs, original=getattr(SCRIPTS[script], loss)):
        fails = torch.is_grad_enabled() and len(done) == (step - 1) * flags.get("updates_per_rollout", 1)
        if fails and isinstance(error, Exception):
            raise error
        return original(*inputs) * (error if fails else 1)
    patch.setattr(torch.optim.AdamW, "step", counting)
    patch.setattr(SCRIPTS[script], loss, failing)


@pytest.mark.parametrize("name, error", [
    ("dpo", float("nan")), ("kto", float("inf")), ("rloo", float("nan")), ("dpo-moving", RuntimeError("a fault")),
    ("kto", torch.OutOfMemoryError("CUDA out of memory"))])
@pytest.mark.slow
def test_a_failing_step_saves_the_steps_before_it_and_the_same_command_goes_on(
        name, error, flags_of, same_as_whole, tmp_path, monkeypatch):
    expected = type(error) if isinstance(error, Exception) else SCRIPTS[RUNS[name][0]].Stopped
    with monkeypatch.context() as patch, pytest.raises(expected) as raised:
        fail_in_step(patch, name, 3, error)
        start(name, flags_of(name, tmp_path / "out"))
    assert "step 2 is saved" in " ".join(raised.value.__notes__) and not (tmp_path / "out/model").exists()
    same_as_whole(name, tmp_path / "out")


@pytest.mark.parametrize("name, function", [("dpo", "evaluate"), pytest.param("kto", "answer", marks=pytest.mark.slow)])
def test_a_failing_last_evaluation_saves_the_last_step(name, function, flags_of, same_as_whole, tmp_path, monkeypatch):
    calls, original = [], getattr(SCRIPTS[name], function)
    def failing(*inputs):
        calls.append(1)
        if len(calls) == (3 if name == "dpo" else 2):
            raise BadInput("it failed")
        return original(*inputs)
    with monkeypatch.context() as patch, pytest.raises(BadInput, match="it failed") as error:
        patch.setattr(SCRIPTS[name], function, failing)
        start(name, flags_of(name, tmp_path / "out"))
    assert error.value.__notes__ == ["step 3 is saved: run the same command to resume"]
    monkeypatch.setattr(torch.optim.AdamW, "step", None)  # it is not trained again
    same_as_whole(name, tmp_path / "out")


@pytest.mark.parametrize("call, signalled, saved", [  # calls: held-out rows, step 1, step 2, held-out rows, step 3
    (5, False, 2), (4, False, 2), (6, False, 3), pytest.param(5, True, 2, marks=pytest.mark.slow)])
def test_a_reward_that_raises_saves_the_steps_before_it_and_the_same_command_goes_on(
        call, signalled, saved, flags_of, same_as_whole, tmp_path, monkeypatch):
    """Calls 4 and 6 are of the evaluations after steps 2 and 3, whose updates are done: only these are repeated.
    Signalled: Ctrl-C reaches all processes of a terminal, so that a reward may fail at the same time."""
    def call_reward(*inputs, original=rloo.call_reward, calls=[]):
        calls.append(1)
        if len(calls) == call:
            if signalled:
                os.kill(os.getpid(), signal.SIGINT)
            raise BadInput("the reward failed")
        return original(*inputs)
    with monkeypatch.context() as patch, pytest.raises(BadInput):
        patch.setattr(rloo, "call_reward", call_reward)
        start("rloo", flags_of("rloo", tmp_path / "out"))
    checkpoint = tmp_path / "out/checkpoint.safetensors"
    assert (read_state(checkpoint)[0]["step"] if checkpoint.exists() else None) == saved
    same_as_whole("rloo", tmp_path / "out")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()], ids=repr)
def test_an_error_between_the_two_log_files_leaves_the_step_in_none(
        error, flags_of, same_as_whole, tmp_path, monkeypatch):
    class FullDisk:
        def __str__(self):
            raise error

    def write(self, values, lines, original=rloo.Log.write):
        original(self, values, [FullDisk()] if values["step"] == 2 else lines)
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(rloo.Log, "write", write)
        start("rloo", flags_of("rloo", tmp_path / "out"))
    assert len((tmp_path / "out/metrics.jsonl").read_text().splitlines()) == 2  # steps 0 and 1
    same_as_whole("rloo", tmp_path / "out")


@pytest.mark.parametrize("place", ["the last checkpoint", "rmdir", "move_model"])
def test_a_kill_while_the_run_is_finished_is_harmless(place, flags_of, same_as_whole, tmp_path, monkeypatch):
    """The model is written to .model, the last checkpoint says that the run is finished, .model becomes model."""
    def save_checkpoint(out, step, identity, original=dpo.save_checkpoint, **objects):
        if not objects:
            raise KeyboardInterrupt  # nothing catches it, as nothing catches a kill
        original(out, step, identity, **objects)

    def rmdir(path, original=os.rmdir, **more):
        if str(path).endswith(".checkpoint") and (tmp_path / "out/.model").exists():
            raise KeyboardInterrupt
        original(path, **more)

    def move_model(out):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if place == "move_model":
            patch.setattr(dpo, "move_model", move_model)
        elif place == "rmdir":
            patch.setattr(os, "rmdir", rmdir)
        else:
            patch.setattr(dpo, "save_checkpoint", save_checkpoint)
        start("dpo", flags_of("dpo", tmp_path / "out"))
    assert (tmp_path / "out/.model").exists() and not (tmp_path / "out/model").exists()
    same_as_whole("dpo", tmp_path / "out")
    assert not (tmp_path / "out/.model").exists()


# ---- Identity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    dict(lr=0.1), dict(loss=("ipo",)), dict(seed=5), dict(steps=9), dict(save_dtype="bfloat16"), dict(ref="live")],
    ids=lambda changes: next(iter(changes)))
def test_another_flag_is_refused_by_name(changes, flags_of, copied):
    (name, value), = changes.items()
    with pytest.raises(BadInput, match=rf"\b{name}\b.*{value[0] if isinstance(value, tuple) else value}") as error:
        start("dpo", flags_of("dpo", copied, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changes", [
    dict(temperature=0.5), dict(k=2), dict(reward_clip=(0.0, 1.0)), dict(mask_truncated=True)])
def test_another_flag_of_rloo_is_refused_by_name(changes, flags_of, whole):
    (name, _), = changes.items()
    with pytest.raises(BadInput, match=rf"\b{name}\b"):
        start("rloo", flags_of("rloo", whole("rloo"), **changes))


def test_a_row_moved_from_the_training_to_the_held_out_rows_is_refused(flags_of, copied, folder, tmp_path):
    rows, held = (open(folder / f"{name}.jsonl").readlines() for name in ("pairs", "pairs_test"))
    (tmp_path / "fewer.jsonl").write_text("".join(rows[:-1]))
    (tmp_path / "more.jsonl").write_text("".join(rows[-1:] + held))
    with pytest.raises(BadInput, match="rows"):
        start("dpo", flags_of("dpo", copied, data=f"{tmp_path}/fewer.jsonl", eval_data=f"{tmp_path}/more.jsonl"))


def test_more_steps_are_refused_where_the_warmup_would_have_been_longer(flags_of, tmp_path):
    constant = dict(schedule="constant", ref="none", loss=("simpo",), samples=0)
    stop("dpo", flags_of("dpo", tmp_path / "out", **constant), 1)
    with pytest.raises(BadInput, match="steps of --warmup 0 and not 2"):
        start("dpo", flags_of("dpo", tmp_path / "out", **constant, ) | dict(steps=20))
    assert len(start("dpo", flags_of("dpo", tmp_path / "out", **constant) | dict(steps=4))) == 5


def test_other_rows_and_other_weights_are_refused(flags_of, copied, folder, tmp_path):
    rows = open(folder / "pairs.jsonl").readlines()
    for name, changed in (("fewer", rows[:-1]), ("swapped", rows[1::-1] + rows[2:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(changed))
        with pytest.raises(BadInput, match="rows"):
            start("dpo", flags_of("dpo", copied, data=str(tmp_path / f"{name}.jsonl")))
    model = dpo.AutoModelForCausalLM.from_pretrained(MODEL)
    model.lm_head.weight.data[0, 0] += 1e-3
    shutil.copytree(MODEL, tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    for changes in (dict(model=str(tmp_path / "model"), ref_model=MODEL), dict(ref_model=str(tmp_path / "model"))):
        with pytest.raises(BadInput, match="weights of --(model|ref_model)"):
            start("dpo", flags_of("dpo", copied, **changes))


def test_other_spellings_of_paths_and_other_flags_of_speed_and_memory_are_accepted(
        flags_of, copied, folder, tmp_path, monkeypatch):
    class Accepted(Exception):
        pass

    def load_model(*inputs, **more):
        raise Accepted
    shutil.copytree(folder, tmp_path / "moved")
    (tmp_path / "link").symlink_to(MODEL)
    monkeypatch.chdir(tmp_path)
    paths = dict(model="link/", ref_model=f"{MODEL}/", data="moved/pairs.jsonl", eval_data="./moved/pairs_test.jsonl")
    speed = dict(tokens_per_forward=200, gradient_checkpointing=True, save_every=1, ref_cache="cache.pkl")
    for out, changes in (("out/", paths), (copied, speed)):
        with monkeypatch.context() as patch, pytest.raises(Accepted):
            patch.setattr(dpo, "load_model", load_model)
            start("dpo", flags_of("dpo", out, **changes))


def test_another_chat_template_or_generation_config_is_refused(flags_of, copied, tmp_path):
    model = shutil.copytree(MODEL, tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": [3, 4, 5]}')
    with pytest.raises(BadInput, match="settings of --model"):
        start("dpo", flags_of("dpo", copied, model=str(model)))
    same, other = dpo.Args(model=MODEL), {"model": str(model)}
    before = dpo.identify(same, [], other)
    (model / "templates").mkdir()
    (model / "templates/x.jinja").write_text("x")
    assert before["settings of --model"] != dpo.identify(same, [], other)["settings of --model"]


def test_another_generation_config_of_an_adapters_base_is_another_run(tmp_path):
    model, adapter = shutil.copytree(MODEL, tmp_path / "model"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model)}))
    shutil.copy(model / "model.safetensors", adapter / "adapter_model.safetensors")
    before = dpo.identify(dpo.Args(model=MODEL), [], {"model": str(adapter)})
    (model / "generation_config.json").write_text('{"eos_token_id": [3, 4, 5]}')
    after = dpo.identify(dpo.Args(model=MODEL), [], {"model": str(adapter)})
    assert [name for name in before if before[name] != after[name]] == ["settings of --model"]


def test_with_lora_dropout_the_size_of_forwards_is_part_of_the_run():
    """The masks depend on what lies in one forward."""
    for dropout in (0.0, 0.1):
        mine = dpo.identify(dpo.Args(model=MODEL, lora_r=2, lora_dropout=dropout), [], {})
        assert ("tokens_per_forward" in mine) == ("parallel" in mine) == bool(dropout)


def test_a_score_in_a_folder_with_an_apostrophe_is_found(tmp_path):
    (tmp_path / "bob's").mkdir()
    (tmp_path / "bob's/score.py").write_text("")
    for score in (f"{tmp_path}/bob's/score.py:f", None):
        assert dpo.identify(dpo.Args(model=MODEL, score=score), [], {})["score"] == (["score.py:f"] if score else [])


def test_another_code_of_the_reward_is_said(flags_of, whole, tmp_path, capsys):
    """It is not refused: a run whose reward raised goes on after the mistake is mended."""
    out = shutil.copytree(whole("rloo"), tmp_path / "out")
    reward = tmp_path / "reward_of_test_resume.py"
    (file, name), = [spec.rsplit(":", 1) for spec in flags_of("rloo", out)["reward"]]
    reward.write_text(Path(file).read_text() + "\n")
    start("rloo", flags_of("rloo", out))
    assert "has changed" not in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rloo, "load_function", lambda spec: print)
        start("rloo", flags_of("rloo", out, reward=(f"{reward}:{name}",)))
    assert "the code of --reward has changed since this run began" in capsys.readouterr().out


def test_logs_without_a_checkpoint_are_replaced_and_that_is_said(flags_of, tmp_path, capsys):
    start("dpo", flags_of("dpo", tmp_path / "out", steps=0))
    assert "is replaced" not in capsys.readouterr().out
    start("dpo", flags_of("dpo", tmp_path / "out", steps=0, seed=5))
    assert "metrics.jsonl is replaced: that run has no checkpoint" in capsys.readouterr().out


def test_what_appears_in_the_model_folder_during_a_run_is_not_deleted(flags_of, tmp_path, same_as_whole):
    out = tmp_path / "out"
    def write(self, values, lines, original=dpo.Log.write):
        original(self, values, lines)
        (out / "model").mkdir(exist_ok=True)
        (out / "model/precious").write_text("precious")
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="model"):
            patch.setattr(dpo.Log, "write", write)
            start("dpo", flags_of("dpo", out))
    assert (out / "model/precious").read_text() == "precious"
    shutil.rmtree(out / "model")
    same_as_whole("dpo", out)


def test_a_model_with_several_chat_templates_is_saved(flags_of, tmp_path):
    model = shutil.copytree(MODEL, tmp_path / "several")
    (model / "additional_chat_templates").mkdir()
    shutil.copy(model / "chat_template.jinja", model / "additional_chat_templates/plain.jinja")
    start("dpo", flags_of("dpo", tmp_path / "out", model=str(model), steps=1))
    assert (tmp_path / "out/model/additional_chat_templates/plain.jinja").exists()


def test_a_finished_run_without_its_model_is_not_called_finished(flags_of, whole, tmp_path):
    out = shutil.copytree(whole("dpo"), tmp_path / "out")
    shutil.rmtree(out / "model")
    with pytest.raises(BadInput, match="its model is gone"):
        start("dpo", flags_of("dpo", out))


@pytest.mark.parametrize("flags", [dict(ref_cache="loop"), dict(out="loop/x"), dict(data="loop")], ids=str)
def test_symlink_loops_are_no_traceback(flags, flags_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    flags = flags_of("dpo", tmp_path / "out", steps=0) | flags
    try:
        start("dpo", flags)
    except BadInput:
        assert "ref_cache" not in flags  # such a link is replaced, as a broken one is


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    dict(tokens_per_forward=200, gradient_checkpointing=True, save_every=1), dict(model=f"{MODEL}/"),
    dict(ref_cache="cache.pkl")])
def test_a_run_goes_on_with_other_flags_of_speed_memory_and_paths(
        changes, flags_of, copied, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    history = start("dpo", flags_of("dpo", copied, **changes))
    assert history[-1]["loss"] == pytest.approx(start("dpo", flags_of("dpo", whole("dpo")))[-1]["loss"], abs=1e-4)


@pytest.mark.slow
def test_rollout_tokens_may_change(flags_of, tmp_path):
    stop("rloo", flags_of("rloo", tmp_path / "out"))
    assert len(start("rloo", flags_of("rloo", tmp_path / "out", rollout_tokens=50))) == STEPS + 1


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_part_of_the_identity_but_those_of_files_and_speed(script):
    """A new flag must not be forgotten: it changes the result, or it is named here."""
    module = SCRIPTS[script]
    args = module.resolve_args(module.Args(model=MODEL, data="rows.jsonl"))
    free = {"model", "ref_model", "reward_model", "data", "eval_data", "out", "ref_cache", "save_every", "tensorboard",
            "tokens_per_forward", "rollout_tokens", "gradient_checkpointing", "parallel"}
    assert {name for name in vars(args)} - set(module.identify(args, [], {})) == free & set(vars(args))


@pytest.mark.parametrize("schedule, save_dtype", [
    ("constant", "float32"), ("constant", "bfloat16"), ("linear", "float32"), ("cosine", "float32")])
def test_more_steps_are_the_same_run_only_where_that_changes_no_earlier_step(schedule, save_dtype):
    args = dpo.Args(model=MODEL, data="rows.jsonl", schedule=schedule, save_dtype=save_dtype)
    same = (schedule, save_dtype) == ("constant", "float32")  # bfloat16 rounds the weights in the last step
    assert ("steps" not in dpo.identify(args, [], {})) == same == ("epochs" not in dpo.identify(args, [], {}))


# ---- Damaged and hostile files --------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def read_state(path):
    """A checkpoint: what it holds as JSON, and its tensors."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["run"]), {name: file.get_tensor(name).clone() for name in file.keys()}


def write_state(path, state, tensors):
    run = state if isinstance(state, str) else json.dumps(state)
    save_file(tensors, path, {"run": run, "sha256": dpo.checksum(run, tensors)})


def change(**entries):
    """Another value of an entry of the checkpoint; None deletes it."""
    def damage(path):
        state, tensors = read_state(path)
        write_state(path, {name: x for name, x in (state | entries).items() if x is not None}, tensors)
    return damage


def change_tensors(how):
    def damage(path):
        state, tensors = read_state(path)
        write_state(path, state, how(tensors))
    return damage


def change_first(pattern, how):
    """Changes the first tensor whose name has this pattern and that is a matrix, if there is one."""
    def damage(tensors):
        names = [name for name in tensors if re.search(pattern, name)]
        name = next((name for name in names if tensors[name].dim() == 2), names[0])
        return tensors | {name: how(tensors[name])}
    return change_tensors(damage)


def without(pattern):
    return change_tensors(lambda tensors: {name: x for name, x in tensors.items() if not re.search(pattern, name)})


def flip_bit(path):
    data, tensor = bytearray(path.read_bytes()), next(iter(read_state(path)[1].values()))
    data[data.index(tensor.numpy().tobytes()) + 1] ^= 4
    path.write_bytes(data)


def cut(share):
    return lambda path: path.write_bytes(path.read_bytes()[:int(share * path.stat().st_size)])


DAMAGES = {
    "empty": cut(0), "truncated": cut(0.5), "almost whole": cut(0.999), "a bit flipped in a tensor": flip_bit,
    "a pickle bomb": lambda path: path.write_bytes(pickle.dumps(Bomb(path.parent / "boom"))),
    "a bomb as torch saves it": lambda path: torch.save({"step": Bomb(path.parent / "boom")}, path),
    "no metadata": lambda path: save_file(read_state(path)[1], path),
    "nested lists": lambda path: write_state(path, "[" * 10**5 + "]" * 10**5, read_state(path)[1]),
    "a list": lambda path: write_state(path, "[]", read_state(path)[1]),
    "a string for a step": change(step="3"), "a list for a step": change(step=[3]),
    "true for a step": change(step=True),
    "a fraction for a step": change(step=2.5), "a negative step": change(step=-1), "no step": change(step=None),
    "a huge step": change(step=10**400),
    "no sizes": change(sizes=None), "no identity": change(identity=None), "no pending": change(pending=None),
    "a number for an identity": change(identity=3),
    "strings for sizes": change(sizes={"metrics.jsonl": "x", "samples.jsonl": "x"}),
    "negative sizes": change(sizes={"metrics.jsonl": -5, "samples.jsonl": -5}),
    "no log": change(sizes={"metrics.jsonl": 0, "samples.jsonl": 0}),
    "no optimizer": without("^optimizer"), "no policy": without("^policy"),
    "one tensor less": without("^policy.*0.*q_proj"),
    "one tensor more": change_tensors(lambda tensors: tensors | {"policy.x": torch.zeros(3)}),
    "a policy tensor of another shape": change_first("^policy", lambda x: torch.zeros(3, 4)),
    "a policy tensor transposed": change_first("^policy", lambda x: x.T.contiguous()),
    "a policy tensor of another dtype": change_first("^policy", lambda x: x.half()),
    "optimizer without a moment": without("exp_avg_sq$"),
    "optimizer without a moment of a tensor": without("0.exp_avg$"),
    "optimizer without steps": without("step$"),
    "an optimizer tensor of another shape": change_first("exp_avg$", lambda x: torch.zeros(3, 4)),
    "an optimizer tensor of one number": change_first("exp_avg_sq$", lambda x: torch.zeros(())),
    "an optimizer tensor of one element": change_first("exp_avg_sq$", lambda x: torch.zeros(1)),
    "an optimizer tensor of another dtype": change_first("exp_avg_sq$", lambda x: x.half()),
    "an optimizer of a tensor before the first": change_tensors(lambda tensors: tensors | {
        name.replace("optimizer.0.", "optimizer.-1."): x.clone()
        for name, x in tensors.items() if "optimizer.0." in name}),
    "an optimizer tensor transposed": change_first("exp_avg_sq$", lambda x: x.T.contiguous()),
    "a step of two numbers": change_first("step$", lambda x: torch.zeros(2)),
    "an optimizer of a tensor too many": change_tensors(lambda tensors: tensors | {
        f"optimizer.999.{slot}": torch.zeros(()) for slot in ("step", "exp_avg", "exp_avg_sq")}),
    "an optimizer tensor without a number": change_tensors(
        lambda tensors: tensors | {"optimizer.x.step": torch.zeros(())}),
}
DAMAGES |= {f"pending {pending}": change(pending=pending) for pending in (
    5, "x", [{}, []], [{"step": "2"}, []], [{"step": 2.0}, []], [{"step": 1}, []], [{"step": 2, "loss": []}, []],
    [[], []], [{"step": 2}], [{"step": 2}, 5], [{"step": 2}, [], []])}
DAMAGES["pending 10 ** 400"] = change(pending=[{"step": 2, "loss": 10**400}, []])
QUICK = {"pending 5", "pending [{'step': 2}]", "no optimizer", "no metadata", "truncated", "a bit flipped in a tensor",
         "a string for a step", "a policy tensor of another shape", "an optimizer tensor of one number",
         "one tensor less", "a policy tensor of another dtype", "pending [{'step': 2.0}, []]", "no log"}


def test_fewer_steps_than_a_run_has_made_are_refused(flags_of, copied):
    """With a constant schedule other --steps are allowed, as long as they are more."""
    state, _ = read_state(copied / "checkpoint.safetensors")
    with pytest.raises(BadInput, match="name another --out"):
        start("dpo", flags_of("dpo", copied) | dict(steps=state["step"] - 1, schedule="constant"))


@pytest.mark.parametrize("kind", [pytest.param(x, marks=[] if x in QUICK else [pytest.mark.slow]) for x in DAMAGES])
def test_a_damaged_or_hostile_checkpoint_is_refused_in_one_sentence_and_runs_nothing(
        kind, flags_of, copied, monkeypatch):
    def files():
        return {path.name: path.read_bytes() for path in copied.glob("*.[jp]*") if path.name != "args.json"}
    DAMAGES[kind](copied / "checkpoint.safetensors")
    before = files()
    monkeypatch.setattr(torch.optim.AdamW, "step", None)
    with pytest.raises(BadInput, match="checkpoint.safetensors|metrics.jsonl") as error:
        start("dpo", flags_of("dpo", copied))
    assert "\n" not in str(error.value) and not (copied / "boom").exists() and not (copied / "model").exists()
    assert before == files()


def test_values_of_a_hostile_checkpoint_are_shortened(flags_of, copied):
    value = "\x1b[31m"
    for _ in range(7):
        value = [value] * 6
    change(identity={"model_type": value, "batch_size": value})(copied / "checkpoint.safetensors")
    with pytest.raises(BadInput, match="another --out") as error:
        start("dpo", flags_of("dpo", copied))
    assert len(str(error.value)) < 400 + len(str(copied)) and "\x1b" not in str(error.value)


def test_the_weights_of_a_checkpoint_are_those_of_the_policy(stopped):
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    tensors = read_state(stopped / "checkpoint.safetensors")[1]
    weights = {name[7:]: x for name, x in tensors.items() if name.startswith("policy.")}
    loaded = model.load_state_dict(weights, strict=False)
    assert not loaded.unexpected_keys and {*loaded.missing_keys} <= {"lm_head.weight"}
    assert any((model.state_dict()[name] != x).any() for name, x in before.items())


def test_tensors_that_share_memory_are_saved_and_restored(tmp_path):
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text("{}\n")
    model, x = torch.nn.Linear(3, 2), torch.arange(6.0).view(2, 3)
    for name, buffer in (("one", x), ("two", x), ("row", x[1]), ("empty", x[:0]), ("turned", x.T)):
        model.register_buffer(name, buffer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dpo.save_checkpoint(tmp_path, 2, {}, policy=model)
    other = torch.nn.Linear(3, 2)
    for name in ("one", "two", "row", "empty", "turned"):
        other.register_buffer(name, torch.zeros_like(before[name]))
    dpo.restore(tmp_path, dpo.read_checkpoint(tmp_path, {}), policy=other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_a_parameter_that_never_had_a_gradient_resumes(tmp_path):
    """AdamW has no state for it, such as for a part of the model that these rows do not use."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text("{}\n")

    def make():
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)])
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(model, optimizer):
        model[2](model[0](torch.ones(3))).sum().backward()  # not model[1]
        optimizer.step()
        optimizer.zero_grad()
    one, other = make(), make()
    step(*one)
    dpo.save_checkpoint(tmp_path, 1, {}, policy=one[0], optimizer=one[1])
    dpo.restore(tmp_path, dpo.read_checkpoint(tmp_path, {}), policy=other[0], optimizer=other[1])
    step(*one)
    step(*other)
    assert all(map(torch.equal, one[0].parameters(), other[0].parameters()))


def test_a_checkpoint_holds_what_trains_and_tied_weights_once():
    for tied in (True, False):
        model = build("llama", dict(SMALL, tie_word_embeddings=tied))
        model.model.layers[0].requires_grad_(False)
        names = {*model.state_dict()} - {name for name in model.state_dict() if ".layers.0." in name}
        assert {*dpo.tensors_of(model)} == names - ({"lm_head.weight"} if tied else set())


@pytest.mark.parametrize("name, make", [
    ("metrics.jsonl", Path.mkdir), ("samples.jsonl", os.mkfifo), ("checkpoint.safetensors", Path.mkdir),
    (".model", Path.touch), (".model", os.mkfifo), (".checkpoint", os.mkfifo),
    ("args.json", lambda path: path.symlink_to("metrics.jsonl"))])
def test_what_no_run_wrote_under_the_name_of_a_file_of_a_run_is_refused(copied, name, make):
    with dpo.lock_folder(copied, []):
        pass
    (copied / name).unlink(missing_ok=True)
    make(copied / name)
    with pytest.raises(BadInput, match=f"{name} is there already, but not from a run"):
        dpo.lock_folder(copied, [])


def test_a_kill_while_a_checkpoint_is_written_leaves_nothing_behind(stopped, same_as_whole, tmp_path):
    out = Path(shutil.copytree(stopped, tmp_path / "out"))
    (out / ".checkpoint").mkdir()
    (out / ".checkpoint/.tmpx").write_text("half of it")
    same_as_whole("dpo", out)
    assert not (out / ".checkpoint").exists()


def test_a_hostile_checkpoint_cannot_name_files_to_cut(flags_of, copied, tmp_path, same_as_whole):
    (tmp_path / "precious").write_text("precious")
    sizes = read_state(copied / "checkpoint.safetensors")[0]["sizes"]
    change(sizes=sizes | {str(tmp_path / "precious"): 0, "../precious": 0})(copied / "checkpoint.safetensors")
    try:
        start("dpo", flags_of("dpo", copied))
    except BadInput:
        pass
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.slow
def test_a_checkpoint_with_any_byte_changed_is_refused_or_gives_the_same_bits(stopped, same_as_whole, tmp_path):
    rng, outcomes = random.Random(0), []
    data = (stopped / "checkpoint.safetensors").read_bytes()
    places = [rng.randrange(len(data)) for _ in range(12)] + [len(data) - rng.randrange(1, 9000) for _ in range(12)]
    for n, place in enumerate(places):
        out = Path(shutil.copytree(stopped, tmp_path / f"out{n}"))
        changed = bytearray(data)
        changed[place] ^= 1 << rng.randrange(8)
        (out / "checkpoint.safetensors").write_bytes(changed)
        try:
            same_as_whole("dpo", out)
            outcomes.append("same")
        except BadInput as error:
            assert "\n" not in str(error)
            outcomes.append("refused")
    assert outcomes.count("refused") > 8


@pytest.mark.parametrize("name, damage", [
    ("metrics.jsonl", cut(0.7)), ("samples.jsonl", cut(0.7)),
    *(pytest.param(*damage, marks=pytest.mark.slow) for damage in (
        ("metrics.jsonl", lambda path: path.unlink()),
        ("metrics.jsonl", lambda path: path.write_text("x" + path.read_text()[1:])),
        ("metrics.jsonl", lambda path: path.write_bytes(b"\xff" + path.read_bytes()[1:])),
        ("metrics.jsonl", lambda path: path.write_text(path.read_text().replace('"num_tokens": 1', '"num_tokens": "'))),
        ("samples.jsonl", lambda path: path.write_text("x" + path.read_text()[1:])),
        ("samples.jsonl", lambda path: path.write_text(path.read_text().replace('"prompt"', '"promt2"')))))])
def test_shortened_or_damaged_log_files_are_refused_in_one_sentence(name, damage, flags_of, copied):
    damage(copied / name)
    with pytest.raises(BadInput, match=name) as error:
        start("dpo", flags_of("dpo", copied))
    assert "\n" not in str(error.value)


# ---- The folder -----------------------------------------------------------------------------------------------------


def test_a_second_run_in_the_same_folder_is_refused_at_once(flags_of, tmp_path, monkeypatch):
    """Also in one process, where it would be the same user of the lock."""
    flags, refusals = flags_of("dpo", tmp_path / "out", ref="none", loss=("simpo",), samples=0, steps=1), []

    def step(self, original=torch.optim.AdamW.step):
        began = time.monotonic()
        with pytest.raises(BadInput, match="another run") as error:
            start("dpo", flags)
        refusals.append((str(error.value), time.monotonic() - began))
        return original(self)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    assert len(start("dpo", flags)) == 2
    (sentence, seconds), = refusals
    assert "\n" not in sentence and seconds < 2


@pytest.mark.slow
def test_a_second_process_in_the_same_folder_is_refused_and_a_third_resumes(flags_of, tmp_path, same_as_whole):
    first = process("dpo", flags_of("dpo", tmp_path / "out"), die_at=10**9, sleep=20)
    while not (tmp_path / "out/metrics.jsonl").exists():
        time.sleep(0.1)
    with pytest.raises(BadInput, match="another run"):
        start("dpo", flags_of("dpo", tmp_path / "out"))
    first.kill()
    first.join()
    same_as_whole("dpo", tmp_path / "out")


def test_an_out_that_holds_an_input_is_refused_and_untouched(flags_of, folder, tmp_path):
    shutil.copytree(MODEL, tmp_path / "home/model")
    shutil.copy(folder / "pairs.jsonl", tmp_path / "home")
    before = sorted(tmp_path.rglob("*"))
    model, data = str(tmp_path / "home/model"), str(tmp_path / "home/pairs.jsonl")
    for out, changes in (("home", dict(model=model)), ("home/model", dict(ref_model=model)), ("home", dict(data=data)),
                         ("home/model/run", dict(model=model)),
                         ("home/x/..", dict(eval_data=data)), ("home/pairs.jsonl", dict(data=data))):
        with pytest.raises(BadInput, match="--out") as error:
            start("dpo", flags_of("dpo", tmp_path / out, **changes))
        assert "\n" not in str(error.value) and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("empty", [True, False])
def test_a_model_of_someone_else_in_out_is_refused_and_untouched(flags_of, copied, tmp_path, empty):
    out = tmp_path / "new" if empty else copied  # a stopped run
    (out / "model").mkdir(parents=True)
    (out / "model/precious").write_text("precious")
    with pytest.raises(BadInput, match="is there already") as error:
        start("dpo", flags_of("dpo", out))
    assert "\n" not in str(error.value) and (out / "model/precious").read_text() == "precious"


# ---- Kills ----------------------------------------------------------------------------------------------------------


def live(name, flags, die_at, sleep, largest_file, events):
    """The life of a process: it counts what changes a file or a weight, and kills itself at a given count."""
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # one of its own: a killed process would keep the one that forks share
    sys.stdout = sys.stderr = open(f"{flags['out']}.output", "a")
    count = 0

    def mortal(function):
        def wrapper(*inputs, **more):
            nonlocal count
            count += 1
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(sleep)
            return function(*inputs, **more)
        return wrapper
    os.fsync, os.replace, os.sync = mortal(os.fsync), mortal(os.replace), lambda: None  # sync: of the whole machine
    torch.optim.AdamW.step = mortal(torch.optim.AdamW.step)
    module = SCRIPTS[RUNS[name][0]]
    sys.argv = [f"{module.__name__}.py"]
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        sys.stderr = open(f"{flags['out']}.error", "w")
    module.command_line(module.Args(**flags))
    Path(events or os.devnull).write_text(str(count))


def process(name, flags, die_at=None, sleep=0.0, largest_file=None, events=None):
    """One that starts with everything imported. A fork is safe while there are no threads and no GPU."""
    safe = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    context = multiprocessing.get_context("fork" if safe else "forkserver")
    if not safe:
        context.set_forkserver_preload(["dpo", "kto", "rloo"])
    process = context.Process(target=live, args=(name, flags, die_at, sleep, largest_file, events))
    process.start()
    return process


def exit_code(*inputs, **more):
    child = process(*inputs, **more)
    child.join(120)
    return child.exitcode


def test_resume_after_two_kills_is_bitwise_equal(flags_of, same_as_whole, tmp_path):
    for die_at in (11, 2):  # in the checkpoint of step 3, and in step 3
        assert exit_code("rloo", flags_of("rloo", tmp_path / "out", save_every=1), die_at=die_at) == -signal.SIGKILL
    same_as_whole("rloo", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", slow_but())
def test_resume_after_ten_kills_is_bitwise_equal(name, seed, flags_of, same_as_whole, tmp_path):
    flags = flags_of(name, tmp_path / "out", save_every=1)
    assert exit_code(name, flags | dict(out=str(tmp_path / "first")), events=tmp_path / "events") == 0
    total, rng = int((tmp_path / "events").read_text()), random.Random(f"{name} {seed}")
    for _ in range(10):
        if exit_code(name, flags, die_at=rng.randint(1, total * 2 // 3)) != -signal.SIGKILL:
            break  # it came to its end
    same_as_whole(name, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but())
def test_resume_after_kills_by_the_clock_is_bitwise_equal(name, flags_of, same_as_whole, tmp_path):
    began = time.monotonic()
    assert exit_code(name, flags_of(name, tmp_path / "first")) == 0
    seconds, rng = time.monotonic() - began, random.Random(0)
    for _ in range(8):
        child = process(name, flags_of(name, tmp_path / "out", save_every=1))
        child.join(rng.uniform(0, seconds))
        child.kill()
        child.join()
    same_as_whole(name, tmp_path / "out")


@pytest.mark.slow
def test_a_kill_at_any_event_of_the_end_of_a_run_is_harmless(flags_of, same_as_whole, tmp_path):
    """From the last optimizer step to the checkpoint that marks the run as finished."""
    assert exit_code("dpo", flags_of("dpo", tmp_path / "first"), events=tmp_path / "events") == 0
    total = int((tmp_path / "events").read_text())
    for die_at in range(total - 8, total + 1):
        out = tmp_path / f"out{die_at}"
        assert exit_code("dpo", flags_of("dpo", out), die_at=die_at) == -signal.SIGKILL
        same_as_whole("dpo", out)


@pytest.mark.parametrize("name, saved", [("save_file", 1), ("save_model", STEPS)])
def test_a_save_that_fails_says_what_is_saved(name, saved, flags_of, same_as_whole, tmp_path, monkeypatch):
    def fails_later(*inputs, original=getattr(dpo, name)):
        if (tmp_path / "out/checkpoint.safetensors").exists():
            raise OSError("no space left")
        return original(*inputs)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left") as error:
        patch.setattr(dpo, name, fails_later)
        start("dpo", flags_of("dpo", tmp_path / "out", save_every=1))
    assert error.value.__notes__ == [f"step {saved} is saved: run the same command to resume"]
    same_as_whole("dpo", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name, limit", [
    ("rloo", 1_000_000), ("rloo", 1_000), ("dpo", 1_000)], ids=["checkpoint", "samples", "reference cache"])
def test_a_full_disk_is_one_sentence_and_loses_nothing(name, limit, flags_of, same_as_whole, tmp_path):
    """Real writes that fail: the system refuses what goes beyond a size."""
    assert exit_code(name, flags_of(name, tmp_path / "out", save_every=2), largest_file=limit) in (1, 2)
    sentence = (tmp_path / "out.error").read_text().splitlines()[-1]
    assert "File too large" in sentence and sentence.startswith(f"{RUNS[name][0]}.py: ")
    assert "Traceback" not in (tmp_path / "out.error").read_text()
    assert {path.name for path in (tmp_path / "out").glob(".*")} <= {".run.lock", ".checkpoint"}
    assert not [*(tmp_path / "out").glob(".checkpoint/*")]
    same_as_whole(name, tmp_path / "out")


@pytest.mark.slow
def test_three_processes_fill_one_reference_cache_at_once(flags_of, folder, tmp_path):
    rows = open(ROOT / "demo/pairs.jsonl").readlines()
    (tmp_path / "others.jsonl").write_text("".join(rows[7:25]))  # half of them the same
    jobs = [("dpo", "a", {}), ("dpo", "b", dict(data=str(tmp_path / "others.jsonl"))), ("kto", "c", {})]
    common = dict(steps=1, ref_cache=str(tmp_path / "shared.pkl"))
    flags = [flags_of(name, tmp_path / out, **common, **more) for name, out, more in jobs]
    children = [process(name, mine) for (name, *_), mine in zip(jobs, flags)]
    assert [child.join() or child.exitcode for child in children] == [0, 0, 0]
    union, alone = ReferenceCache(), set()
    union.header = {}
    union.load(tmp_path / "shared.pkl")
    for (name, out, _), mine in zip(jobs, flags):
        assert exit_code(name, mine | dict(ref_cache=None, out=str(tmp_path / f"{out}-alone"))) == 0
        one = ReferenceCache()
        one.header = {}
        one.load(tmp_path / f"{out}-alone/reference_logprobs.pkl")
        alone |= set(one)
    assert set(union) == alone
