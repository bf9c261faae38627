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

RUNS = {  # name -> script and flags: together they have every kind of state
    "dpo": ("dpo", dict(model=save(build("llama", TIED), "tied"), eval_every=2, samples=2)),
    "dpo-lora": ("dpo", dict(ref="swap", lora_r=4)),
    "dpo-bfloat16": ("dpo", dict(dtype="bfloat16", schedule="cosine", ref="swap", tokens_per_forward=300, samples=2)),
    "kto": ("kto", dict(ref="live", samples=2)),
    "rloo": ("rloo", dict(k=3, updates_per_rollout=2, eval_every=2)),
}


def command(name, out, **changes):
    """The script and its arguments."""
    script, flags = RUNS[name]
    return SCRIPTS[script].main, arguments(
        script, **dict(save_every=1, max_new_tokens=4, out=str(out)) | flags | changes)


def start(name, out, **changes):
    main, args = command(name, out, **changes)
    return main(args)


@cache
def whole(name):
    """The folder of a run that nobody interrupts."""
    out = Path(FOLDER.name) / f"whole-{name}"
    start(name, out)
    return out


def results(out):
    """What is equal in equal runs. A kill may leave one checkpoint more."""
    names = {path.name for path in out.iterdir() if not path.name.startswith("resume-")}
    bits = {path.name: hash(path.read_bytes()) for path in (out / "samples.jsonl", *(out / "model").iterdir())}
    return names, without_speed(read(out / "metrics.jsonl")), bits


# --- Runs that die

@parametrize("name, kills", [
    ("dpo", ["learning_rate 3", 12]), ("dpo-bfloat16", ["learning_rate 3", 6]), ("kto", ["learning_rate 3", 10]),
    ("rloo", ["learning_rate 3", 8]), pytest.param("dpo-lora", ["fsync 4"], marks=needs_peft), ("dpo", ["rmtree 3"]),
    ("dpo", ["replace run.json", "replace model"])])
def test_resume_after_kills_is_bitwise_equal(name, kills, tmp_path):
    for die_at in kills:
        words = run_until(die_at, *command(name, tmp_path))
        last_step = max(dpo.checkpoints(tmp_path), default=0)
        assert words == f"stopped: the same command continues after step {last_step}"
    start(name, tmp_path, save_every=7)
    assert results(tmp_path) == results(whole(name))


def test_leftovers_of_kills_are_removed_and_files_of_the_user_stay(tmp_path):
    out = tmp_path
    run_until("learning_rate 3", *command("dpo", out))
    best = shutil.copytree(out / "resume-2", out / "resume-9-best")
    before = contents(best)
    (out / "resume-notes").mkdir()
    for name in dpo.LOGS:
        with open(out / name, "a") as file:
            file.write('{"step": 1, "lo')
    for name in (".model", "resume-3"):  # half of a save
        (out / name).mkdir()
        (out / name / "old.safetensors").touch()

    run_until("replace model", *command("dpo", out))
    assert not list(out.glob("*/old.safetensors")) and dpo.checkpoints(out) == {3}
    start("dpo", out)
    assert results(out) == results(whole("dpo"))
    assert {path.name for path in out.glob("resume-*")} == {"resume-9-best", "resume-notes"}
    assert contents(best) == before


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock-0"}


# --- Checkpoints

@EACH
def test_checkpoints_come_every_save_every_steps_and_at_the_end(script, monkeypatch):
    steps = []
    monkeypatch.setattr(SCRIPTS[script], "save_checkpoint", lambda out, step, *_: steps.append(step))
    SCRIPTS[script].main(arguments(script, steps=3, save_every=2))
    assert steps == [2, 3]


def adam_8bit(groups):
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(groups)


@parametrize("optimizer", [
    partial(torch.optim.SGD, momentum=0.9), adam_8bit,
    partial(Adafactor, lr=1.0, relative_step=False, scale_parameter=False)])
def test_runs_of_other_optimizers_resume_bitwise(optimizer, tmp_path, monkeypatch):
    """Their state has other names, numbers that are no tensors, and bytes."""
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, fused: optimizer(groups))
    flags = dict(lr=0.1, weight_decay=0.1)
    start("dpo", tmp_path / "whole", **flags)
    run_until("learning_rate 3", *command("dpo", tmp_path / "killed", **flags))
    start("dpo", tmp_path / "killed", **flags)
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    assert len({line["loss"] for line in read(tmp_path / "whole/metrics.jsonl")[1:]}) == 3


def test_weight_without_a_gradient_gets_no_state(tmp_path):
    """As an expert that no token has reached yet, or all weights after a rollout without any reward."""
    policy = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters())
    policy[0](torch.ones(2)).sum().backward()
    optimizer.step()
    dpo.save_checkpoint(tmp_path, 1, policy, optimizer)
    state = optimizer.state[policy[0].weight]

    for log in dpo.LOGS:
        (tmp_path / log).touch()
    resumed = deepcopy(policy)
    optimizer = torch.optim.AdamW(resumed.parameters())
    assert dpo.restore_checkpoint(tmp_path, {"wandb": False}, resumed, optimizer) == 1
    assert equal(optimizer.state[resumed[0].weight], state) and not optimizer.state[resumed[1].weight]
    assert equal(resumed.state_dict(), policy.state_dict())


def test_files_are_on_the_disk_before_the_name_that_makes_them_count(tmp_path, monkeypatch):
    """A power cut loses what was written last."""
    events = []
    rename = os.replace

    def sync():
        assert {"model.safetensors", "tokenizer.json"} < {path.name for path in (tmp_path / ".model").iterdir()}
        events.append("sync")

    monkeypatch.setattr(os, "fsync", lambda file: events.append(Path(os.readlink(f"/proc/self/fd/{file}")).name))
    monkeypatch.setattr(os, "sync", sync)
    monkeypatch.setattr(os, "replace", lambda old, new: events.append(Path(new).name) or rename(old, new))
    dpo.main(arguments(out=str(tmp_path), steps=1, save_every=1, samples=2, max_new_tokens=4))

    *begin, shard, partial, run, synced, model = events[events.index("args.json"):]
    empty_logs = [".metrics.jsonl.partial", "metrics.jsonl", ".samples.jsonl.partial", "samples.jsonl"]
    assert begin == ["args.json", *empty_logs, *["samples.jsonl", "metrics.jsonl"] * 2]  # of steps 0 and 1
    assert shard.endswith(".safetensors")
    assert [partial, run, synced, model] == [".run.json.partial", "run.json", "sync", "model"]


# --- Which command resumes a run

@EACH
def test_flags_that_may_change(script):
    """A new flag changes the result, or it is named here."""
    flags = "out tokens_per_forward gradient_checkpointing save_every eval_every wandb chat_template_kwargs "
    flags += "ref rollout_tokens" if script == "rloo" else "ref_cache"
    assert set(flags.split()) == set(SCRIPTS[script].MAY_CHANGE)


@EACH
def test_other_rows_and_weights_are_another_run(script, tmp_path):
    """Whatever their paths are."""
    folders = {name: str(shutil.copytree(tiny(), tmp_path / name)) for name in ("model", "ref_model")}
    args = arguments(script, **folders)
    a, b, c = ("a",), ("b",), ("c",)
    first = SCRIPTS[script].describe_run([a, b], [c], args)

    def differing(train=(a, b), held_out=(c,)):
        run = SCRIPTS[script].describe_run([*train], [*held_out], args)
        return [name for name in run if run[name] != first[name]]

    assert not differing() and differing([b, a]) == differing([a], [b, c]) == ["rows"]
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
    with bad_input("a run with other script: name another --out"):
        main(args)
    assert contents(tmp_path) == before


@parametrize("name", dpo.LOGS)
def test_log_of_a_user_is_not_touched(name, tmp_path):
    (tmp_path / name).write_text("mine\n")
    with bad_input("has logs, but not of a run of this script: name another --out"):
        dpo.main(arguments(out=str(tmp_path), steps=1))
    assert (tmp_path / name).read_text() == "mine\n"


def test_folder_of_a_running_run_is_refused(tmp_path):
    with FileLock(tmp_path / ".lock-0"), bad_input(f"{tmp_path} is used by a run that has not ended"):
        start("dpo", tmp_path)
