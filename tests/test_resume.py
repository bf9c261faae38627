"""Runs that are killed: the same command resumes, and gives the same bits as a run that was never interrupted."""
import os
import random
import shutil
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from models import bad_input, build, equal, parametrize
from runs import EACH, FOLDER, SCRIPTS, TIED, arguments, needs_peft, read, save, tiny, without_speed
from transformers.optimization import Adafactor

import dpo

REWARD = """
import torch

def noisy(prompts, completions, **columns):  # depends on the state of torch's random number generator
    noise = torch.rand(()).item()
    return [len(str(y)) / 100 + noise * i for i, y in enumerate(completions)]
"""
RUNS = {  # name -> script and flags: together they have every kind of state
    "dpo": ("dpo", dict(model=save(build("llama", TIED), "tied"), eval_every=2)),
    "dpo-lora": ("dpo", dict(ref="swap", lora_r=4)),
    "dpo-bfloat16": ("dpo", dict(dtype="bfloat16", schedule="cosine", ref="swap", tokens_per_forward=300)),
    "kto": ("kto", dict(ref="live")),
    "rloo": ("rloo", dict(k=3, updates_per_rollout=2, eval_every=2)),
}
STEPS = 3


def flags_of(name, out, **changes):
    script, special = RUNS[name]
    flags = dict(steps=STEPS, save_every=1, max_new_tokens=4, out=str(out)) | special
    if script == "rloo":
        file = Path(FOLDER.name) / "reward_of_test_resume.py"
        file.write_text(REWARD)
        flags["reward"] = (f"{file}:noisy",)
    else:
        flags["samples"] = 2
    return arguments(script, **flags | changes)


def start(name, out, **changes):
    return SCRIPTS[RUNS[name][0]].main(flags_of(name, out, **changes))


@cache
def whole(name):
    """The folder of a run that nobody interrupts."""
    out = Path(FOLDER.name) / f"whole-{name}"
    start(name, out)
    return out


def results(out):
    """The bytes of the files of a finished run, and its metrics."""
    files = {path.name: path.read_bytes() for path in (out / "samples.jsonl", *(out / "model").iterdir())}
    return files | {"metrics": without_speed(read(out / "metrics.jsonl"))}


def other_files(out):
    """What lies beside the checkpoints: a kill may leave the one before the last."""
    return {path.name for path in out.iterdir() if not path.name.startswith("resume-")}


def assert_same_as_whole(name, out):
    """Gives the same command again: all files are those of an uninterrupted run."""
    start(name, out)
    expected, ours = results(whole(name)), results(out)
    assert [values["step"] for values in ours["metrics"]] == list(range(STEPS + 1))
    assert [file for file, content in ours.items() if content != expected.get(file)] == []
    assert other_files(out) == other_files(whole(name))


# --- Runs that die

def run_until(die_at, name, out, **changes):
    """Runs a script. Counts what changes a file or a weight, and dies before event number `die_at`, or before the event
    of that name, such as "learning_rate 2" or "replace model"."""
    counts = Counter()
    dead = []

    def mortal(owner, name):
        function = getattr(owner, name)

        def wrapper(*inputs, **more):
            counts[name] += 1
            target = os.path.basename(str(inputs[-1]))
            if dead or die_at in (counts.total(), f"{name} {counts[name]}", f"{name} {target}"):
                dead.append(True)  # then nothing changes a file any more, as after a kill
                raise KeyboardInterrupt
            return function(*inputs, **more)
        patch.setattr(owner, name, wrapper)

    module = SCRIPTS[RUNS[name][0]]
    with pytest.MonkeyPatch.context() as patch:
        mortal(module, "learning_rate")  # in the middle of an optimizer step
        mortal(module, "append")
        mortal(os, "fsync")  # after a file of a checkpoint was written, perhaps not yet completely
        mortal(os, "replace")
        mortal(shutil, "rmtree")
        try:
            module.main(flags_of(name, out, **changes))
        except BaseException:
            if not dead:
                raise
    assert dead


@parametrize("name", ["dpo", "dpo-bfloat16", "kto", "rloo"])
def test_resume_after_kills_is_bitwise_equal(name, tmp_path):
    run_until("learning_rate 3", name, tmp_path)
    run_until(random.Random(name).randint(1, 15), name, tmp_path)
    assert_same_as_whole(name, tmp_path)


@parametrize("name, die_at", [
    ("dpo", "rmtree 3"), pytest.param("dpo-lora", "fsync 4", marks=needs_peft), ("dpo", "replace run.json"),
    ("dpo", "replace model")])
def test_resume_after_kill_while_files_change_is_bitwise_equal(name, die_at, tmp_path):
    run_until(die_at, name, tmp_path)
    assert not (tmp_path / "model").exists()
    assert_same_as_whole(name, tmp_path)


# --- Checkpoints

def newest(out):
    folder, = [file.parent for file in Path(out).glob("resume-*/run.json")]
    return folder


@cache
def killed(name):
    """The folder of a run that died in its last step: tests copy it."""
    out = Path(FOLDER.name) / f"killed-{name}"
    run_until(f"learning_rate {STEPS}", name, out)
    return out


def copy_of(name, folder):
    return Path(shutil.copytree(killed(name), folder / "out"))


@EACH
def test_checkpoints_come_every_save_every_steps_and_at_the_end(script, monkeypatch):
    steps = []
    monkeypatch.setattr(SCRIPTS[script], "save_checkpoint", lambda out, step, *_: steps.append(step))
    SCRIPTS[script].main(arguments(script, steps=3, save_every=2))
    assert steps == [2, 3]


def adam_8bit(groups):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    return bitsandbytes.optim.AdamW8bit(groups)


def adafactor(groups):
    return Adafactor(groups, lr=1.0, relative_step=False, scale_parameter=False)


@parametrize("make_optimizer", [partial(torch.optim.SGD, momentum=0.9), torch.optim.Adafactor, adafactor, adam_8bit])
def test_runs_of_other_optimizers_resume_bitwise(make_optimizer, tmp_path, monkeypatch):
    """Their state has other names, numbers that are no tensors, and bytes."""
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, fused: make_optimizer(groups))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start("dpo", whole, lr=0.1, weight_decay=0.1)
    run_until("learning_rate 3", "dpo", killed, lr=0.1, weight_decay=0.1)
    start("dpo", killed, lr=0.1, weight_decay=0.1)
    assert results(killed) == results(whole)
    assert len({line["loss"] for line in read(whole / "metrics.jsonl")[1:]}) == STEPS


def test_weight_without_a_gradient_gets_no_state(tmp_path):
    """As an expert that no token has reached yet, or all weights after a rollout without any reward."""
    policy = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters())
    policy[0](torch.ones(2)).sum().backward()
    optimizer.step()
    (tmp_path / "args.json").write_text('{"wandb": false}')
    for log in dpo.LOGS:
        (tmp_path / log).touch()
    dpo.save_checkpoint(tmp_path, 1, policy, optimizer)
    state = optimizer.state[policy[0].weight]

    resumed = deepcopy(policy)
    optimizer = torch.optim.AdamW(resumed.parameters())
    assert dpo.restore_checkpoint(tmp_path, {"wandb": False}, resumed, optimizer) == 1
    assert equal(optimizer.state[resumed[0].weight], state) and not optimizer.state[resumed[1].weight]
    assert equal(resumed.state_dict(), policy.state_dict())


# --- Files of the user

def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock-0"}


def test_only_checkpoints_of_the_run_are_removed_at_its_end(tmp_path):
    out = copy_of("dpo", tmp_path)
    best = shutil.copytree(newest(out), out / "resume-9-best")
    (out / "resume-notes").mkdir()
    (out / ".model").mkdir()  # left by a killed save
    (out / ".model/half of the weights").touch()
    before = contents(best)
    start("dpo", out)
    assert contents(best) == before
    assert {path.name for path in out.glob("resume-*")} == {"resume-9-best", "resume-notes"}
    assert not (out / ".model").exists() and not (out / "model/half of the weights").exists()


def test_files_of_a_killed_save_are_removed(tmp_path):
    """Such as the shards of other processes."""
    out = copy_of("dpo", tmp_path)
    (out / f"resume-{STEPS}").mkdir()
    (out / f"resume-{STEPS}/old.safetensors").touch()
    run_until("replace model", "dpo", out)
    assert not list(out.glob("*/old.safetensors")) and newest(out).name == f"resume-{STEPS}"


def test_half_a_line_that_a_kill_left_is_dropped(tmp_path):
    out = copy_of("dpo", tmp_path)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(out / name, "a") as file:
            file.write('{"step": 1, "lo')
    start("dpo", out)
    assert results(out) == results(whole("dpo"))


def test_files_are_on_the_disk_before_the_name_that_makes_them_count(tmp_path, monkeypatch):
    """A power cut loses what was written last."""
    events = []
    rename = os.replace

    def fsync(file):
        events.append("fsync " + os.path.basename(os.readlink(f"/proc/self/fd/{file}")))

    def sync():
        assert {"model.safetensors", "tokenizer.json"} < {path.name for path in (tmp_path / ".model").iterdir()}
        events.append("sync")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "sync", sync)
    monkeypatch.setattr(os, "replace", lambda old, new: events.append(os.path.basename(new)) or rename(old, new))
    dpo.main(arguments(out=str(tmp_path), steps=1, save_every=1, samples=2, max_new_tokens=4))
    logs = ["fsync samples.jsonl", "fsync metrics.jsonl"]
    begin, step = events.index("args.json"), events.index("run.json")
    assert [name for name in events if name in logs] == logs * 2  # of steps 0 and 1
    assert begin < events.index(logs[0]) and any(name.endswith(".safetensors") for name in events[:step])
    assert events[step - 1:] == ["fsync .run.json.partial", "run.json", "sync", "model"]


# --- Which command resumes a run

def test_flags_of_memory_files_and_evaluation_may_change(tmp_path):
    flags = dict(tokens_per_forward=100, gradient_checkpointing=True, save_every=7, eval_every=1)
    history = start("dpo", copy_of("dpo", tmp_path), **flags)
    expected = read(whole("dpo") / "metrics.jsonl")
    for name in ("loss", "eval_loss", "grad_norm"):
        assert history[-1][name] == pytest.approx(expected[-1][name], abs=1e-4)


@EACH
def test_every_other_flag_is_part_of_a_run(script):
    """A new flag changes the result, or it is named here."""
    args = SCRIPTS[script].resolve(arguments(script))
    may_change = {*"out tokens_per_forward gradient_checkpointing save_every eval_every wandb".split()}
    may_change |= {"chat_template_kwargs"}
    may_change |= {"ref", "rollout_tokens"} if script == "rloo" else {"ref_cache"}
    run = SCRIPTS[script].describe_run([], [], args)
    compared = {"script", "rows"} | {f"{name}'s weights" for name in vars(args) if name.endswith("model")}
    assert vars(args).keys() | compared == run.keys() and may_change == set(SCRIPTS[script].MAY_CHANGE)


@EACH
def test_other_rows_and_weights_are_another_run(script, tmp_path):
    """Whatever their paths are."""
    for name in ("model", "ref_model"):
        shutil.copytree(tiny(), tmp_path / name)
    args = arguments(script, model=str(tmp_path / "model"), ref_model=str(tmp_path / "ref_model"))
    rows = [("a",), ("b",), ("c",)]

    def differing(train=rows[:2], held_out=rows[2:]):
        run = SCRIPTS[script].describe_run(train, held_out, args)
        return [name for name in run if run[name] != first[name]]

    first = SCRIPTS[script].describe_run(rows[:2], rows[2:], args)
    assert not differing() and differing(rows[1::-1]) == differing(rows[:1], rows[1:]) == ["rows"]
    for name in ("model", "ref_model"):
        shutil.copy(Path(tiny(1), "model.safetensors"), tmp_path / name)
        assert differing()[-1:] == [f"{name}'s weights"]


@parametrize("script, save_every", [("dpo", 1), ("dpo", 0), ("kto", 0), ("rloo", 0)])
def test_folder_of_another_run_or_script_is_refused(script, save_every, tmp_path, monkeypatch):
    """Also if its model was moved away, and if it never saved a checkpoint."""
    main = SCRIPTS[script].main
    args = arguments(script, out=str(tmp_path), steps=1, save_every=save_every)
    main(args)
    (tmp_path / "model").rename(tmp_path / "mine")
    before = contents(tmp_path)
    with bad_input("a run with other lr: name another --out"):
        main(replace(args, lr=0.1))
    monkeypatch.setattr(SCRIPTS[script], "__file__", "orpo.py")
    with bad_input("a run with other script: name another --out"):
        main(args)
    assert contents(tmp_path) == before


@parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_log_of_a_user_is_not_touched(name, tmp_path):
    (tmp_path / name).write_text("mine\n")
    with bad_input("has logs, but not of a run of this script: name another --out"):
        dpo.main(arguments(out=str(tmp_path), steps=1))
    assert (tmp_path / name).read_text() == "mine\n"


def test_folder_of_a_finished_or_a_running_run_is_refused(tmp_path):
    finished = whole("dpo")
    before = contents(finished)
    with bad_input("finished.*--out"):
        start("dpo", finished)
    assert contents(finished) == before

    with FileLock(tmp_path / ".lock-0"), bad_input(f"{tmp_path} is used by a run that has not ended"):
        start("dpo", tmp_path)


@EACH
def test_ctrl_c_says_where_the_run_continues(script, tmp_path, monkeypatch):
    args = arguments(script, out=str(tmp_path), save_every=1)
    rate = SCRIPTS[script].learning_rate

    def interrupt(step, *rest):
        if step == 3:
            raise KeyboardInterrupt
        return rate(step, *rest)

    monkeypatch.setattr(SCRIPTS[script], "learning_rate", interrupt)
    with pytest.raises(KeyboardInterrupt, match="^stopped: the same command continues after step 2$"):
        SCRIPTS[script].main(args)
