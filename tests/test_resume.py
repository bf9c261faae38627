"""Runs that are killed: the same command resumes, and gives the same bits as a run that was never interrupted."""
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from models import build
from runs import EACH, FOLDER, SCRIPTS, TIED, TOKENIZER, arguments, data, needs_peft, read, save, tiny, without_speed
from safetensors.torch import load_file
from tqdm import tqdm

import dpo
from refcache import BadInput

REWARD = """
import torch

def noisy(prompts, completions, **columns):  # depends on the state of torch's random number generator
    noise = torch.rand(()).item()
    return [len(str(y)) / 100 + noise * i for i, y in enumerate(completions)]
"""
GPT2 = dict(vocab_size=len(TOKENIZER), n_embd=32, n_layer=1, n_head=4, n_positions=256, bos_token_id=None,
            eos_token_id=3)
RUNS = {  # name -> script and flags: together they have every kind of state
    "dpo": ("dpo", dict(model=save(build("llama", TIED), "tied"), eval_every=2)),
    "dpo-swap": ("dpo", dict(ref="swap", tokens_per_forward=300)),
    "dpo-sync-lora": ("dpo", dict(ref="swap", sync_reference=1, lora_r=4)),
    "dpo-bfloat16": ("dpo", dict(dtype="bfloat16", schedule="cosine")),
    "kto": ("kto", dict(model=save(build("gpt2", GPT2), "gpt2"), tokens_per_forward=300)),
    "kto-lora": ("kto", dict(ref="live", lora_r=4)),
    "rloo": ("rloo", dict(k=3, updates_per_rollout=2, sync_reference=2, eval_every=2)),
}
STEPS = 3
SLOW = pytest.mark.slow


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


def whole(name):
    count_events(name)
    return Path(FOLDER.name) / f"whole-{name}"


def results(out):
    """The bytes of the files of a finished run, and its metrics."""
    files = {path.name: path.read_bytes() for path in (out / "samples.jsonl", *(out / "model").iterdir())}
    return files | {"metrics": without_speed(read(out / "metrics.jsonl"))}


def other_files(out):
    """What lies in a folder beside the checkpoints: a kill after the last one may leave the one before it."""
    return {path.name for path in out.iterdir() if not path.name.startswith("resume-")}


def assert_same_as_whole(name, out):
    """Gives the same command again: its results are those of an uninterrupted run, and nothing else lies around."""
    finish(name, out)
    expected, ours = results(whole(name)), results(out)
    assert [values["step"] for values in ours["metrics"]] == list(range(STEPS + 1))
    assert [file for file, content in ours.items() if content != expected.get(file)] == []
    assert other_files(out) == other_files(whole(name))


# --- Processes that kill themselves

def live(args, script, die_at, sleep, report):
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
            time.sleep(sleep)
            return function(*inputs, **more)
        setattr(owner, name, wrapper)

    mortal(module, "learning_rate")  # in the middle of an optimizer step
    mortal(module, "append")
    mortal(os, "fsync")  # after a file of a checkpoint was written, perhaps not yet completely
    mortal(os, "replace")
    mortal(shutil, "rmtree")
    module.main(args)
    report.send(counts.total())


def start_process(name, out, die_at=None, sleep=0.0, **changes):
    """A fork, with everything imported. That is safe while there are no threads and no GPU: training in bfloat16, which
    starts threads, happens only in forks here."""
    assert torch.get_num_threads() == 1 and not torch.cuda.is_available(), "set OMP_NUM_THREADS=1"
    context = multiprocessing.get_context("fork")
    end, report = context.Pipe()
    args = flags_of(name, out, **changes)
    script = RUNS[name][0]
    if args.dtype != "bfloat16":
        SCRIPTS[script].load_model(args.model, "cpu", args, trains=True)  # conftest.py remembers: forks inherit that
    inputs = (args, script, die_at, sleep, report)
    process = context.Process(target=live, args=inputs)
    process.start()
    return process, end


def kill(name, out, die_at, **changes):
    process, _ = start_process(name, out, die_at, **changes)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def finish(name, out):
    """A run to its end. Returns the number of its events."""
    process, end = start_process(name, out)
    process.join(120)
    assert process.exitcode == 0
    return end.recv()


@cache
def count_events(name):
    return finish(name, Path(FOLDER.name) / f"whole-{name}")


@pytest.mark.parametrize("name, kills", [
    ("dpo-bfloat16", 1), *(pytest.param(name, 2, marks=SLOW) for name in ("dpo", "dpo-swap", "dpo-bfloat16", "rloo"))])
def test_resume_after_random_kills_is_bitwise_equal(name, kills, tmp_path):
    rng = random.Random(name)
    for _ in range(kills):
        kill(name, tmp_path, rng.randint(1, count_events(name) // 2))
    assert_same_as_whole(name, tmp_path)


@pytest.mark.parametrize("die_at", [
    "fsync 2", "rmtree resume-1", *(pytest.param(f"replace {name}", marks=SLOW) for name in ("run.json", "model"))])
def test_resume_after_kill_while_writing_is_bitwise_equal(die_at, tmp_path):
    kill("dpo-swap", tmp_path, die_at)
    assert not (tmp_path / "model").exists()
    assert_same_as_whole("dpo-swap", tmp_path)


# --- Checkpoints

def newest(out):
    folder, = [file.parent for file in Path(out).glob("resume-*/run.json")]
    return folder


@cache
def killed(name):
    """The folder of a run that died in its last step: tests copy it."""
    out = Path(FOLDER.name) / f"killed-{name}"
    kill(name, out, f"learning_rate {STEPS * RUNS[name][1].get('updates_per_rollout', 1)}")
    return out


def copy_of(name, folder):
    return Path(shutil.copytree(killed(name), folder / "out"))


@pytest.mark.parametrize("name", ["dpo", "kto", pytest.param("dpo-sync-lora", marks=needs_peft)])
def test_checkpoint_holds_each_changing_tensor_once(name):
    (folder,) = killed(name).glob("resume-*")
    assert folder == newest(killed(name)) and folder.name == f"resume-{STEPS - 1}"
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    names = [key for path in folder.glob("*.safetensors") for key in load_file(path)]
    if "lora" in name:
        assert names and all("lora_" in key for key in names)
    else:
        assert names and not [key for key in names if "lm_head" in key], "it is tied to the embedding"


def test_a_checkpoint_has_64_tensors_per_file(tmp_path):
    """The writer holds a file in memory."""
    for name in dpo.LOGS:
        (tmp_path / name).touch()
    dpo.save_checkpoint(tmp_path, 1, {}, {"training": {f"{n}": torch.ones(1) for n in range(65)}})
    assert sorted(len(load_file(path)) for path in tmp_path.glob("*/*.safetensors")) == [1, 64]


def test_shards_of_a_killed_save_are_removed(tmp_path):
    """The order of files in the folder would decide which of two shards is read."""
    out = copy_of("dpo", tmp_path)
    stale = out / f"resume-{STEPS}/shard-00002-model-00001-of-00001.safetensors"
    stale.parent.mkdir()
    stale.touch()
    kill("dpo", out, "replace model")  # after the last checkpoint
    assert newest(out) == stale.parent and not stale.exists()
    assert_same_as_whole("dpo", out)


# --- Files of the user

def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize("script", ["dpo", pytest.param("kto", marks=SLOW), pytest.param("rloo", marks=SLOW)])
@pytest.mark.parametrize("name, text", [
    ("samples.jsonl", '{"prompt": "The tea"}\n'), ("metrics.jsonl", ""), ("args.json", '{"lr": 1}')])
def test_files_of_another_program_are_refused_and_stay(script, name, text, tmp_path):
    """They may even be the data of this run."""
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match=f"{name} is of another program.*--out"):
        SCRIPTS[script].main(arguments(script, out=str(tmp_path), ref="swap"))
    assert contents(tmp_path) == {tmp_path / name: text.encode()}


def test_only_checkpoints_of_the_run_are_removed_at_its_end(tmp_path):
    out = copy_of("dpo", tmp_path)
    shutil.copytree(newest(out), out / "resume-best")  # the natural way to keep one
    (out / "resume-notes").mkdir()
    (out / ".model").mkdir()  # a killed save of the model has left it
    (out / ".model/half of the weights").touch()
    before = contents(out / "resume-best")
    start("dpo", out)
    assert contents(out / "resume-best") == before and (out / "resume-notes").exists()
    assert [path.name for path in out.glob("resume-*") if path.name[7:].isdigit()] == []
    assert not (out / ".model").exists() and not (out / "model/half of the weights").exists()


@pytest.mark.parametrize("damage", ["no shard", "short shard", "no log", "short log"])
def test_checkpoint_or_log_that_lost_bytes_is_refused_before_training(damage, tmp_path):
    """A checkpoint without its first shard would be half of the base, and a log would be filled up with zeros."""
    out = copy_of("dpo", tmp_path)
    path = out / "samples.jsonl" if "log" in damage else min(newest(out).glob("*.safetensors"))
    if "no" in damage.split():
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    before = contents(out)
    with pytest.raises(BadInput, match=f"{path.name} had \\d+ bytes: restore it"):
        start("dpo", out)
    assert contents(out) == before


def test_sizes_in_a_checkpoint_truncate_only_the_logs_of_the_run(tmp_path):
    """Somebody else may have written it."""
    out = copy_of("dpo", tmp_path)
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    file = newest(out) / "run.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(saved | {"sizes": saved["sizes"] | {str(mine): 1, "../mine.txt": 1}}))
    start("dpo", out)
    assert mine.read_text() == "mine"


# --- Which command resumes a run

def test_flags_of_memory_and_files_may_change(tmp_path):
    changes = dict(tokens_per_forward=100, gradient_checkpointing="on", save_every=7)
    history = without_speed(start("dpo", copy_of("dpo", tmp_path), **changes))
    expected = results(whole("dpo"))["metrics"]
    assert len(history) == STEPS + 1
    for values, others in zip(history, expected):
        assert values == pytest.approx(others, abs=1e-4)


def test_flags_of_evaluation_may_change(tmp_path):
    out = copy_of("dpo", tmp_path)
    start("dpo", out, eval_every=1, samples=1)
    files = results(out)
    expected = results(whole("dpo"))
    assert files["model.safetensors"] == expected["model.safetensors"]
    assert len(files["samples.jsonl"].splitlines()) == len(expected["samples.jsonl"].splitlines()) - 1


@EACH
def test_every_other_flag_is_part_of_a_run(script):
    """A new flag must not be forgotten: it changes the result, or it is named here."""
    args = SCRIPTS[script].resolve(arguments(script))
    may_change = {"out", "tokens_per_forward", "gradient_checkpointing", "save_every", "save_dtype", "eval_every",
                  "wandb", "code"} | {"model", "ref_model", "data", "eval_data"}  # their content is compared instead
    may_change |= {"reward_model", "ref", "rollout_tokens"} if script == "rloo" else {"ref_cache", "samples"}
    run = SCRIPTS[script].describe_run([], [], args)
    assert vars(args).keys() < run.keys() and {"model's weights", "ref_model's weights", "rows"} < run.keys()
    assert may_change == set(SCRIPTS[script].MAY_CHANGE)


@pytest.mark.parametrize("changes", [dict(lr=0.1), dict(loss=("ipo",))], ids=str)
def test_folder_of_another_run_is_refused(changes, tmp_path):
    out = copy_of("dpo", tmp_path)
    before = {path: path.read_bytes() for path in out.glob("*.jsonl")}
    with pytest.raises(BadInput, match=rf"\b{next(iter(changes))}\b.*--out"):
        start("dpo", out, **changes)
    assert before == {path: path.read_bytes() for path in out.glob("*.jsonl")}


@pytest.mark.parametrize("name", [pytest.param("kto-lora", marks=needs_peft), pytest.param("rloo", marks=SLOW)])
def test_resume_refuses_other_rows_weights_and_functions(name, tmp_path):
    files = [Path(shutil.copy(file, tmp_path)) for file in data(RUNS[name][0])]
    models = [shutil.copytree(tiny(), tmp_path / flag) for flag in ("model", "ref_model")]
    function = tmp_path / "function.py"
    function.write_text("def rate(completions, **columns):\n    return [float(len(str(y))) for y in completions]\n")
    flags = dict(zip(("data", "eval_data", "model", "ref_model"), map(str, files + models)))
    flags |= dict(reward=(f"{function}:rate",)) if name == "rloo" else dict(score=f"{function}:rate")
    kill(name, tmp_path / "out", "append 5", **flags)
    edits = []
    for file, words in zip(files, ("other rows", "held-out rows")):
        first, second, *others = file.read_bytes().splitlines(True)
        edits.append((file, b"".join([second, first, *others]), words))
    edits.append((function, function.read_bytes().replace(b"return", b"return 2 *"), "functions"))
    for model in models:
        edits.append((model / "model.safetensors", Path(tiny(1), "model.safetensors").read_bytes(), "weights"))
        for settings in ("generation_config.json", "chat_template.jinja")[:1 + (model.name == "model")]:
            text = (model / settings).read_bytes().replace(b"\n", b" \n").replace(b"{%", b"{% ", 1)
            edits.append((model / settings, text, f"{model.name}'s settings"))
    for file, edited, words in edits:
        before = file.read_bytes()
        file.write_bytes(edited)
        assert edited != before
        with pytest.raises(BadInput, match=f"{words}.*--out"):
            start(name, tmp_path / "out", **flags)
        file.write_bytes(before)
    flags["model"] = str(shutil.copytree(models[0], tmp_path / "moved"))  # equal bytes in another place
    assert len(start(name, tmp_path / "out", **flags)) == STEPS + 1


def test_edited_script_is_named_at_a_resume(tmp_path, capsys, monkeypatch):
    """A line that prints must not cost the run, but other numbers must not come unnoticed."""
    for edited in (False, True):
        out = copy_of("dpo", tmp_path / str(edited))
        if edited:
            script = tmp_path / "dpo.py"
            script.write_text(Path(dpo.__file__).read_text() + "# edited")
            monkeypatch.setattr(dpo, "__file__", str(script))
            monkeypatch.setattr(dpo, "version", lambda library: version(library) + "1" * (library == "transformers"))
        start("dpo", out)
        printed = capsys.readouterr().out
        assert f"resumes after step {STEPS - 1}" in printed
        named = ["dpo.py has changed since" in printed, "transformers has changed" in printed]
        assert named == [edited] * 2 and "refcache.py has" not in printed


def test_run_of_another_script_is_refused(tmp_path, monkeypatch):
    out = copy_of("dpo", tmp_path)
    script = shutil.copy(dpo.__file__, tmp_path / "orpo.py")
    monkeypatch.setattr(dpo, "__file__", str(script))
    with pytest.raises(BadInput, match="a run with other script: name another --out"):
        start("dpo", out)


@pytest.mark.parametrize("error", [KeyboardInterrupt, BadInput])
def test_folder_is_free_after_a_run_that_ended_in_an_error(error, tmp_path, monkeypatch):
    """As in a notebook, where the traceback lives on."""
    def load_data(*_):
        raise error("now")

    with monkeypatch.context() as patch, pytest.raises(error) as caught:
        patch.setattr(dpo, "load_data", load_data)
        dpo.main(arguments(out=str(tmp_path)))
    assert len(dpo.main(arguments(out=str(tmp_path), steps=1))) == 2 and caught.traceback


def test_folder_of_a_finished_run_is_refused():
    out = whole("dpo")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".lock"}
    with pytest.raises(BadInput, match="finished.*--out"):
        start("dpo", out)
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".lock"}


def test_folder_of_a_running_run_is_refused(tmp_path):
    process, _ = start_process("dpo-swap", tmp_path / "busy", sleep=30.0)
    while not (tmp_path / "busy/.lock").exists():
        time.sleep(0.1)
    began = time.monotonic()
    try:
        with pytest.raises(BadInput, match="busy"):
            start("dpo-swap", tmp_path / "busy")
        assert time.monotonic() - began < 5
    finally:
        process.kill()
        process.join()
