"""Runs that are killed: the same command resumes, and gives the same bits as a run that was never interrupted."""
import os
import shutil
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from models import bad_input, build, equal, parametrize
from runs import EACH, FOLDER, SCRIPTS, TIED, arguments, needs_peft, read, run_until, save, tiny, without_speed
from transformers.optimization import Adafactor

import dpo

RUNS = {  # together they have every kind of state
    "dpo": dict(model=save(build("llama", TIED), "tied"), eval_every=2), "dpo-lora": dict(ref="swap", lora_r=4),
    "dpo-bfloat16": dict(dtype="bfloat16", schedule="cosine", ref="swap", tokens_per_forward=300),
    "kto": dict(ref="live"), "rloo": dict(k=3, updates_per_rollout=2, eval_every=2, max_new_tokens=4),
}


def command(name, out, **changes):
    """The script and its arguments."""
    script = name.split("-")[0]
    return SCRIPTS[script].main, arguments(script, **dict(save_every=1, out=str(out)) | RUNS[name] | changes)


def start(*names, **changes):
    main, args = command(*names, **changes)
    return main(args)


@cache
def whole(name):
    """The folder of a run that nobody interrupts."""
    out = Path(FOLDER.name) / f"whole-{name}"
    start(name, out)
    return out


@cache
def killed(**changes):
    """The folder of a run of dpo.py that died in its third step."""
    out = Path(FOLDER.name) / f"killed-{len(changes)}"
    run_until("learning_rate 3", *command("dpo", out, **changes))
    return out


def results(out):
    """What is equal in equal runs."""
    bits = {path.name: hash(path.read_bytes()) for path in (*out.glob("samples.jsonl"), *(out / "model").iterdir())}
    return {path.name for path in out.iterdir()}, without_speed(read(out / "metrics.jsonl")), bits


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- Runs that die

@parametrize("name, kills", [
    ("dpo", ["replace reference_logprobs.pkl", "append 1", "replace resume-1", "rename .metadata", "learning_rate 2",
             "fsync 4", "rmtree resume-1", "replace resume-3", "replace model"]),
    ("dpo-bfloat16", ["learning_rate 3", "fsync 4"]), ("kto", ["learning_rate 3", "append 1"]),
    ("rloo", ["learning_rate 3", "append 2"]), pytest.param("dpo-lora", ["fsync 5"], marks=needs_peft)])
def test_resume_after_kills_is_bitwise_equal(name, kills, tmp_path):
    """Each command resumes from where the one before it died."""
    for die_at in kills:
        words = run_until(die_at, *command(name, tmp_path))
        last_step = max(dpo.checkpoints(tmp_path), default=0)
        assert words == f"stopped: the same command continues after step {last_step}" or "CheckpointEx" in words
    start(name, tmp_path, save_every=7)
    assert results(tmp_path) == results(whole(name))


@pytest.mark.slow
@parametrize("name", RUNS)
def test_resume_from_every_event_is_bitwise_equal(name, tmp_path):
    for n_events in range(1, 99):
        out = tmp_path / str(n_events)
        run_until(n_events, *command(name, out))
        if (out / "model").exists():  # before its last event, the removal of a checkpoint
            break
        start(name, out)
        assert results(out) == results(whole(name))
    assert n_events > 25


def test_kill_before_the_checkpoint_is_removed_is_mended_by_the_same_command(tmp_path):
    run_until("rmtree resume-3", *command("dpo", tmp_path))
    assert (tmp_path / "model").exists() and dpo.checkpoints(tmp_path) == {3}
    with bad_input("holds a finished run: name another --out"):
        start("dpo", tmp_path)
    assert results(tmp_path) == results(whole("dpo"))


def test_leftovers_of_kills_do_no_harm_and_files_of_the_user_stay(tmp_path):
    shutil.copytree(killed(), tmp_path, dirs_exist_ok=True)
    names = ["resume-9-best/a", "resume-7/a", "model/a"]  # no checkpoints: they have no .metadata
    for name in (*names[:2], ".model/a", ".resume/__0_0.distcp"):  # the last is half of a save
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("mine")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "lo')

    start("dpo", tmp_path)
    for name in names:
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    for folder in tmp_path.glob("resume-*"):
        folder.rmdir()
    assert results(tmp_path) == results(whole("dpo"))


# --- Checkpoints

@EACH
def test_checkpoints_come_every_save_every_steps_and_at_the_end(script, monkeypatch):
    steps = []
    monkeypatch.setattr(SCRIPTS[script], "save_checkpoint", lambda out, step, *_: steps.append(step))
    SCRIPTS[script].main(arguments(script, save_every=2))
    assert steps == [2, 3]


@parametrize("optimizer", [
    partial(torch.optim.SGD, momentum=0.9), lambda groups: pytest.importorskip("bitsandbytes").optim.AdamW8bit(groups),
    partial(Adafactor, lr=1.0, relative_step=False, scale_parameter=False)])
def test_runs_of_other_optimizers_resume_bitwise(optimizer, tmp_path, monkeypatch):
    """Their state has other names, numbers that are no tensors, and bytes."""
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, fused: optimizer(groups))
    start("dpo", tmp_path / "whole", lr=0.1)
    run_until("learning_rate 3", *command("dpo", tmp_path / "killed", lr=0.1))
    start("dpo", tmp_path / "killed", lr=0.1)
    assert results(tmp_path / "killed") == results(tmp_path / "whole")


def test_weight_without_a_gradient_so_far_has_no_state_after_a_resume(tmp_path):
    """As an expert that no token has reached yet. Adam would count steps that it did not make."""
    def step(policy, optimizer, part):
        policy[part](torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    one = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    two = deepcopy(one)
    optimizers = [torch.optim.AdamW(policy.parameters(), fused=True) for policy in (one, two)]
    step(one, optimizers[0], 0)
    dpo.save_checkpoint(tmp_path, 1, {}, one, optimizers[0])
    dpo.restore_checkpoint(tmp_path, 1, {}, two, optimizers[1])
    assert not optimizers[1].state[two[1].weight]
    for part in (1, 0, 1):
        step(one, optimizers[0], part)
        step(two, optimizers[1], part)
    for x, y in zip(one.parameters(), two.parameters()):
        assert x.equal(y) and equal(optimizers[0].state[x], optimizers[1].state[y])


def test_files_are_on_the_disk_before_the_name_that_makes_them_count(tmp_path, monkeypatch):
    """A power cut loses what was written last."""
    events = []
    rename, hidden = os.replace, tmp_path / ".model"
    monkeypatch.setattr(os, "fsync", lambda file: events.append(Path(os.readlink(f"/proc/self/fd/{file}")).name))
    monkeypatch.setattr(os, "sync", lambda: events.append(len(list(hidden.glob("*.safetensors")))))
    monkeypatch.setattr(os, "replace", lambda old, new: events.append(Path(new).name) or rename(old, new))
    dpo.main(arguments(out=str(tmp_path), steps=1, save_every=1, ref="swap"))

    log = "metrics.jsonl"  # made, and written at steps 0 and 1
    assert events == [".args.json.partial", "args.json", f".{log}.partial", log, log, log,
                      "__0_0.distcp", ".metadata.tmp", "resume-1", 1, "model"]


# --- Which command resumes a run

@EACH
def test_other_rows_and_weights_are_another_run(script, tmp_path):
    """Whatever their paths are."""
    folders = {name: str(shutil.copytree(tiny(), tmp_path / name)) for name in ("model", "ref_model")}
    describe = partial(SCRIPTS[script].describe_run, args=arguments(script, **folders))
    first = describe(["a", "b"], ["c"])

    def differing(train="ab", held_out="c"):
        run = describe([*train], [*held_out])
        return [name for name in run if run[name] != first[name]]

    assert not differing() and differing("ba") == differing("a", "bc") == ["rows"]
    for name, folder in folders.items():
        shutil.copy(f"{tiny(1)}/model.safetensors", folder)
        assert differing()[-1:] == [f"{name}'s weights"]


@EACH
def test_folder_of_another_run_or_script_is_refused(script, tmp_path, monkeypatch):
    """Also if its model was moved away."""
    main = SCRIPTS[script].main
    args = arguments(script, out=str(tmp_path), steps=1)
    main(args)
    (tmp_path / "model").rename(tmp_path / "mine")
    before = contents(tmp_path)
    with bad_input("a run with other lr: name another --out"):
        main(replace(args, lr=0.1))
    monkeypatch.setattr(SCRIPTS[script], "__file__", "orpo.py")
    with bad_input(f"holds a run of {script}.py: name another --out"):
        main(args)
    assert contents(tmp_path) == before


@needs_peft
def test_checkpoint_of_another_run_or_step_is_refused_and_stays(tmp_path):
    for other, number in ((killed(lr=1e-9), 2), (killed(ref="swap", lora_r=4), 9), (killed(), 9)):
        mine = shutil.copytree(killed(), tmp_path / other.name / str(number))
        copy = mine / f"resume-{number}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(other / "resume-2", copy)
        with bad_input(f"resume-{number} is a checkpoint of another run: move it away"):
            start("dpo", mine)
        assert contents(copy) == contents(other / "resume-2")
    copy.rename(tmp_path / "moved")
    start("dpo", mine)
    assert results(mine) == results(whole("dpo"))


def test_log_of_a_user_and_folder_of_a_running_run_are_not_touched(tmp_path):
    with FileLock(tmp_path / ".lock-0"), bad_input(f"{tmp_path} is used by a run that has not ended"):
        start("dpo", tmp_path)
    (tmp_path / "metrics.jsonl").write_text("mine\n")
    with bad_input("name another --out"):
        start("dpo", tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "mine\n"
