"""Runs that are killed: the same command resumes, and gives the same bits as a run that was never interrupted."""
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from models import bad_input, build, parametrize
from runs import EACH, FOLDER, SCRIPTS, TIED, arguments, data, needs_peft, read, save, tiny, without_speed
from safetensors.torch import load_file
from tqdm import tqdm

import dpo

REWARD = """
import torch

def noisy(prompts, completions, **columns):  # depends on the state of torch's random number generator
    noise = torch.rand(()).item()
    return [len(str(y)) / 100 + noise * i for i, y in enumerate(completions)]
"""
RUNS = {  # name -> script and flags: together they have every kind of state
    "dpo": ("dpo", dict(model=save(build("llama", TIED), "tied"), eval_every=2)),
    "dpo-lora": ("dpo", dict(ref="swap", sync_reference=1, lora_r=4)),
    "dpo-bfloat16": ("dpo", dict(dtype="bfloat16", schedule="cosine", ref="swap", tokens_per_forward=300)),
    "kto": ("kto", dict(ref="live")),
    "rloo": ("rloo", dict(k=3, updates_per_rollout=2, sync_reference=2, eval_every=2)),
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
    """The folder of a run that nobody interrupts, and the number of its events."""
    out = Path(FOLDER.name) / f"whole-{name}"
    return out, run_until(None, name, out)


def results(out):
    """The bytes of the files of a finished run, and its metrics."""
    files = {path.name: path.read_bytes() for path in (out / "samples.jsonl", *(out / "model").iterdir())}
    return files | {"metrics": without_speed(read(out / "metrics.jsonl"))}


def other_files(out):
    """What lies in a folder beside the checkpoints: a kill after the last one may leave the one before it."""
    return {path.name for path in out.iterdir() if not path.name.startswith("resume-")}


def assert_same_as_whole(name, out):
    """Gives the same command again: its results are those of an uninterrupted run, and nothing else lies around."""
    run_until(None, name, out)
    theirs, _ = whole(name)
    expected, ours = results(theirs), results(out)
    assert [values["step"] for values in ours["metrics"]] == list(range(STEPS + 1))
    assert [file for file, content in ours.items() if content != expected.get(file)] == []
    assert other_files(out) == other_files(theirs)


# --- Processes that kill themselves

def live(args, script, die_at, report):
    """Runs a script. Counts what changes a file or a weight, and kills itself before event number `die_at`, or before
    the event of that name, such as "learning_rate 2" or "replace model"."""
    tqdm.set_lock(threading.RLock())  # a killed process would keep the one that forks share
    sys.stdout = sys.stderr = open(os.devnull, "w")
    module = SCRIPTS[script]
    counts = Counter()

    def mortal(owner, name):
        function = getattr(owner, name)

        def wrapper(*inputs, **more):
            counts[name] += 1
            target = os.path.basename(str(inputs[-1]))
            if die_at in (counts.total(), f"{name} {counts[name]}", f"{name} {target}"):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*inputs, **more)
        setattr(owner, name, wrapper)

    mortal(module, "learning_rate")  # in the middle of an optimizer step
    mortal(module, "append")
    mortal(os, "fsync")  # after a file of a checkpoint was written, perhaps not yet completely
    mortal(os, "replace")
    mortal(shutil, "rmtree")
    module.main(args)
    report.send(counts.total())


def run_until(die_at, name, out, **changes):
    """Runs in a fork, with everything imported, which kills itself at the event `die_at`; None: it ends. Returns the
    number of its events. That is safe while there are no threads and no GPU: training in bfloat16, which starts
    threads, happens only in forks here."""
    assert torch.get_num_threads() == 1 and not torch.cuda.is_available(), "set OMP_NUM_THREADS=1"
    context = multiprocessing.get_context("fork")
    end, report = context.Pipe()
    args = flags_of(name, out, **changes)
    script = RUNS[name][0]
    if args.dtype != "bfloat16":
        SCRIPTS[script].load_model(args.model, "cpu", args, trains=True)  # conftest.py remembers: forks inherit that
    process = context.Process(target=live, args=(args, script, die_at, report))
    process.start()
    process.join(120)
    assert process.exitcode == (-signal.SIGKILL if die_at else 0)
    return None if die_at else end.recv()


@pytest.mark.slow
@parametrize("name", ["dpo", "dpo-bfloat16", "kto", "rloo"])
def test_resume_after_random_kills_is_bitwise_equal(name, tmp_path):
    rng = random.Random(name)
    for _ in range(2):
        run_until(rng.randint(1, whole(name)[1] // 2), name, tmp_path)
    assert_same_as_whole(name, tmp_path)


@parametrize("name, die_at", [
    ("dpo", "rmtree 3"), pytest.param("dpo-lora", "fsync 4", marks=[needs_peft, pytest.mark.slow]),
    *(pytest.param("dpo", f"replace {name}", marks=pytest.mark.slow) for name in ("run.json", "model"))])
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


@parametrize("name", ["dpo", pytest.param("dpo-lora", marks=needs_peft)])
def test_checkpoint_holds_each_changing_tensor_once(name):
    (folder,) = killed(name).glob("resume-*")
    assert folder.name == f"resume-{STEPS - 1}"
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    names = [key for path in folder.glob("*.safetensors") for key in load_file(path)]
    if "lora" in name:
        assert names and all("lora_" in key for key in names)
    else:
        assert names and not [key for key in names if "lm_head" in key]  # it is tied to the embedding


# --- Files of the user

def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}


@parametrize("name", ["samples.jsonl", "metrics.jsonl", "args.json"])
def test_files_of_another_program_are_refused_and_stay(name, tmp_path):
    (tmp_path / name).write_text('{"prompt": "The tea"}\n')
    before = contents(tmp_path)
    with bad_input(f"{name} is of another program.*--out"):
        dpo.main(arguments(out=str(tmp_path), ref="swap"))
    assert contents(tmp_path) == before


def test_a_faster_process_may_write_its_files_first(tmp_path, monkeypatch):
    monkeypatch.setattr(dpo, "all_gather", lambda mine: (tmp_path / "metrics.jsonl").touch() or [mine])
    assert dpo.restore_checkpoint(tmp_path, {"wandb": 0}, {}) == 0


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


@parametrize("damage", ["no shard", "short shard", "short log"])
def test_checkpoint_or_log_that_lost_bytes_is_refused_before_training(damage, tmp_path):
    out = copy_of("dpo", tmp_path)
    path = out / "samples.jsonl" if damage == "short log" else min(newest(out).glob("*.safetensors"))
    content = path.read_bytes()
    path.unlink()
    if damage != "no shard":
        path.write_bytes(content[:-1])
    before = contents(out)
    with bad_input(f"{path.name} had {len(content)} bytes: restore it"):
        start("dpo", out)
    assert contents(out) == before


@parametrize("owner, name", [(dpo.dcp.HuggingFaceStorageWriter, "write_data"), (dpo, "save_model")])
def test_full_disk_is_one_sentence_and_the_run_resumes(owner, name, tmp_path, monkeypatch):
    def write(*_, **__):
        raise RuntimeError("No space left on device")  # safetensors and torch have their own

    out = copy_of("dpo", tmp_path)
    with monkeypatch.context() as patch, bad_input(f"^{out}: the disk is full, the same command resumes$"):
        patch.setattr(owner, name, write)
        start("dpo", out)
    assert_same_as_whole("dpo", out)


# --- Which command resumes a run

def test_flags_of_memory_files_and_evaluation_may_change(tmp_path):
    flags = dict(tokens_per_forward=100, gradient_checkpointing="on", save_every=7, eval_every=1, samples=1)
    history = start("dpo", copy_of("dpo", tmp_path), **flags)
    expected = read(whole("dpo")[0] / "metrics.jsonl")
    assert history[-1]["samples/distinct"] == 1 < expected[-1]["samples/distinct"]
    for name in ("loss", "eval_loss", "grad_norm"):
        assert history[-1][name] == pytest.approx(expected[-1][name], abs=1e-4)


@EACH
def test_every_other_flag_is_part_of_a_run(script):
    """A new flag must not be forgotten: it changes the result, or it is named here."""
    args = SCRIPTS[script].resolve(arguments(script))
    may_change = {"out", "tokens_per_forward", "gradient_checkpointing", "save_every", "save_dtype", "eval_every",
                  "wandb", "code"} | {"model", "ref_model", "data", "eval_data"}  # their content is compared instead
    may_change |= {"reward_model", "ref", "rollout_tokens"} if script == "rloo" else {"ref_cache", "samples"}
    run = SCRIPTS[script].describe_run([], [], args)
    compared = {"model's weights", "model's settings", "ref_model's weights", "rows", "held-out rows", "functions"}
    assert vars(args).keys() | compared < run.keys()
    assert may_change == set(SCRIPTS[script].MAY_CHANGE)


@pytest.mark.slow
@parametrize("name", ["kto", "rloo"])
def test_resume_refuses_other_rows_weights_and_functions(name, tmp_path):
    files = [Path(shutil.copy(file, tmp_path)) for file in data(RUNS[name][0])]
    models = [shutil.copytree(tiny(), tmp_path / flag) for flag in ("model", "ref_model")]
    function = tmp_path / "function.py"
    function.write_text("def rate(completions, **columns):\n    return [float(len(str(y))) for y in completions]\n")
    flags = dict(zip(("data", "eval_data", "model", "ref_model"), map(str, files + models)))
    flags |= dict(reward=(f"{function}:rate",)) if name == "rloo" else dict(score=f"{function}:rate")
    out = tmp_path / "out"
    run_until("append 5", name, out, **flags)

    edits = [(function, function.read_bytes().replace(b"float", b"-float"), "functions")]
    for file, words in zip(files, ("other rows", "held-out rows")):
        edits.append((file, b"".join(reversed(file.read_bytes().splitlines(True))), words))
    for model in models:
        edits.append((model / "model.safetensors", Path(tiny(1), "model.safetensors").read_bytes(), "weights"))
        for settings in ("generation_config.json", "chat_template.jinja"):
            edits.append((model / settings, (model / settings).read_bytes() + b" ", f"{model.name}'s settings"))
    for file, edited, words in edits:
        before = file.read_bytes()
        file.write_bytes(edited)
        with bad_input(f"{words}.*--out"):
            start(name, out, **flags)
        file.write_bytes(before)
    flags["model"] = str(shutil.copytree(models[0], tmp_path / "moved"))  # equal bytes in another place
    assert len(start(name, out, **flags)) == STEPS + 1


def test_edited_script_is_named_at_a_resume(tmp_path, capsys, monkeypatch):
    """A line that prints must not cost the run, but other numbers must not come unnoticed."""
    script = tmp_path / "dpo.py"
    script.write_text(Path(dpo.__file__).read_text() + "# edited")
    monkeypatch.setattr(dpo, "__file__", str(script))
    monkeypatch.setattr(dpo.transformers, "__version__", "9.9")
    start("dpo", copy_of("dpo", tmp_path))
    changes = "; dpo.py has changed since; transformers has changed since\n"  # refcache.py has not
    assert f"resumes after step {STEPS - 1}{changes}" in capsys.readouterr().out


def test_folder_of_another_run_or_script_is_refused(tmp_path, monkeypatch):
    out = copy_of("dpo", tmp_path)
    before = contents(out)
    with bad_input("a run with other lr: name another --out"):
        start("dpo", out, lr=0.1)
    monkeypatch.setattr(dpo, "__file__", shutil.copy(dpo.__file__, tmp_path / "orpo.py"))
    with bad_input("a run with other script: name another --out"):
        start("dpo", out)
    assert contents(out) == before


def test_folder_is_free_after_a_run_that_was_interrupted(tmp_path, monkeypatch):
    """As in a notebook, where the traceback lives on."""
    def load_data(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        patch.setattr(dpo, "load_data", load_data)
        dpo.main(arguments(out=str(tmp_path)))
    assert len(dpo.main(arguments(out=str(tmp_path), steps=1))) == 2 and caught.traceback


def test_folder_of_a_finished_or_a_running_run_is_refused(tmp_path):
    finished, _ = whole("dpo")
    before = contents(finished)
    with bad_input("finished.*--out"):
        start("dpo", finished)
    assert contents(finished) == before

    with dpo.lock_folder(tmp_path), bad_input("another run.*--out"):
        start("dpo", tmp_path)
