"""Runs that are killed: the same command resumes, and gives the same bits as a run that was never interrupted."""
import os
import shutil
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from models import bad_input, build, equal, cases
from runs import EACH, FOLDER, REWARDS, SCRIPTS, TIED, arguments, needs_peft, read, run_until, save, without_speed

import dpo

RUNS = {  # together they have every kind of state
    "dpo": dict(model=save(build("llama", TIED), "tied"), eval_every=2), "dpo-lora": dict(ref="swap", lora_r=4),
    "dpo-bfloat16": dict(dtype="bfloat16", schedule="cosine", ref="swap", tokens_per_forward=300),
    "kto": dict(ref="live"),
    "rloo": dict(k=3, updates_per_rollout=2, eval_every=2, max_new_tokens=4, reward=(f"{REWARDS}:letters",)),
}


def command(name, out, **changes):
    script = name.split("-")[0]
    return SCRIPTS[script].main, arguments(script, **dict(save_every=1, out=str(out)) | RUNS[name] | changes)


def start(name, out, **changes):
    main, args = command(name, out, **changes)
    main(args)


@cache
def whole(name):
    out = Path(FOLDER.name) / f"whole-{name}"
    start(name, out)
    return out


def results(out):
    bits = {path.name: hash(path.read_bytes()) for path in (*out.glob("samples.jsonl"), *(out / "model").iterdir())}
    return {path.name for path in out.iterdir()}, without_speed(read(out / "metrics.jsonl")), bits


# --- Runs that die

@cases("name, kills", [
    ("dpo", ["replace reference_logprobs.pkl", "append 1", "replace resume-1", "rename .metadata", "learning_rate 2",
             "fsync 4", "rmtree resume-1", "replace resume-3", "replace model"]),
    ("dpo-bfloat16", ["learning_rate 3", "fsync 4"]), ("kto", ["learning_rate 3", "append 1"]),
    ("rloo", ["learning_rate 3", "append 2"]), pytest.param("dpo-lora", ["fsync 5"], marks=needs_peft)])
def test_resume_after_kills_is_bitwise_equal(name, kills, tmp_path):
    for die_at in kills:
        run_until(die_at, *command(name, tmp_path))
    start(name, tmp_path, save_every=7)
    assert results(tmp_path) == results(whole(name))


@pytest.mark.slow
@cases("name", RUNS)
def test_resume_from_every_event_is_bitwise_equal(name, tmp_path):
    for n_events in range(1, 99):
        out = tmp_path / str(n_events)
        run_until(n_events, *command(name, out))
        if (out / "model").exists():  # before its last event, the removal of a checkpoint
            break
        start(name, out)
        assert results(out) == results(whole(name))
    assert n_events > 25


def test_leftovers_of_kills_do_no_harm(tmp_path):
    run_until("learning_rate 3", *command("dpo", tmp_path))
    for name in ("resume-best/.metadata", "resume-9/a", ".model/a", ".resume/__0_0.distcp"):  # three halves
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("mine")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "lo')
    start("dpo", tmp_path)
    assert (tmp_path / "resume-best/.metadata").read_text() == "mine"
    for name in ("resume-best", "resume-9"):
        shutil.rmtree(tmp_path / name)
    assert results(tmp_path) == results(whole("dpo"))


# --- Checkpoints

def test_runs_of_another_optimizer_resume_bitwise(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, **_: torch.optim.SGD(groups, momentum=0.9))
    run_until("learning_rate 3", *command("dpo", tmp_path / "killed", lr=0.1))
    for out in ("killed", "whole"):
        start("dpo", tmp_path / out, lr=0.1)
    assert results(tmp_path / "killed") == results(tmp_path / "whole")


def test_weight_without_a_gradient_has_no_state(tmp_path):
    """As an expert that no token has reached yet. Adam would count steps that it did not make."""
    def step(policy, optimizer, part):
        policy[part](torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    one = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    two = deepcopy(one)
    first, second = (torch.optim.AdamW(policy.parameters(), fused=True) for policy in (one, two))
    step(one, first, 0)
    dpo.save_checkpoint(tmp_path, 1, one, first)
    dpo.restore_checkpoint(tmp_path, 1, two, second)
    for part in (1, 0, 1):
        step(one, first, part)
        step(two, second, part)
    assert equal(one.state_dict(), two.state_dict())


def test_files_are_synced_before_they_get_names(tmp_path, monkeypatch):
    """A power cut loses what was written last: lines of the log, and weights."""
    events, rename = [], os.replace
    monkeypatch.setattr(os, "sync", lambda: events.append(
        (len(read(tmp_path / "metrics.jsonl")), len(list(tmp_path.glob(".model/*.safetensors"))))))
    monkeypatch.setattr(os, "fsync", lambda file: events.append(Path(os.readlink(f"/proc/self/fd/{file}")).name))
    monkeypatch.setattr(os, "replace", lambda old, new: events.append(Path(new).name) or rename(old, new))
    dpo.main(arguments(out=str(tmp_path), steps=1, save_every=1, ref="swap"))
    assert events == [".args.json.partial", "args.json",
                      "__0_0.distcp", ".metadata.tmp", (2, 0), "resume-1", (2, 1), "model"]


# --- Which command resumes a run

@EACH
def test_only_the_same_command_goes_on_in_a_folder(script, tmp_path):
    """Also without a checkpoint, or without args.json. The folder may be moved, the data may not be edited."""
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows = Path(arguments(script).data).read_text()
    data.write_text(rows)
    out.mkdir()
    kind = "eval_data" if script == "dpo" else "data"

    def go_on(out=out, **changes):
        SCRIPTS[script].open_folder(out, arguments(script, out=str(out), **{kind: str(data)}, **changes))

    def refused(other, **changes):
        (out / "metrics.jsonl").write_text("a line")
        with bad_input(f"a run with other .*{other}.*: name another --out"):
            go_on(**changes)
        assert (out / "metrics.jsonl").read_text() == "a line"

    go_on(lr=1.0)  # without a log there is nothing to lose
    go_on()
    refused("lr", lr=1.0)
    data.write_text(rows[:-1])
    refused("data_sha256")
    data.write_text(rows)
    go_on(out.rename(tmp_path / "moved"), save_every=7, eval_every=9, tokens_per_forward=50)
    (tmp_path / "moved").rename(out)
    (out / "args.json").unlink()
    refused("script")


def test_folder_of_a_running_run_is_not_touched(tmp_path):
    with FileLock(tmp_path / ".lock-0"), bad_input(f"a process .* holds {tmp_path}/.lock-0: end it"):
        start("dpo", tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
