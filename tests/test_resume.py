"""Runs that are killed: the same command goes on, and ends with the same bits as if nothing had happened."""
import importlib
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import needs_peft
from transformers import AutoModelForSequenceClassification

import dpo
import kto
import refcache
import rloo
from refcache import BadInput, Stopped

ROOT = Path(dpo.__file__).parent
MODEL = str(ROOT / "demo/model")
REWARD = '''
import random, sys
import numpy as np
sys.path.insert(0, "{root}/demo")
from score import sentiment
def noisy(prompts, completions, **columns):  # its random states belong to the checkpoint too
    return [x + random.random() + np.random.rand() for x in sentiment(prompts, completions, **columns)]
'''
RUNS = {  # name -> (script, data, what is special): together they have every kind of state
    "dpo": ("dpo", "pairs", dict(eval_every=2)),
    "dpo-moving": ("dpo", "pairs", dict(ref="swap", ref_ahead=3, sync_reference=2, sync_mix=0.6)),
    "kto": ("kto", "feedback", dict(tokens_per_forward=300)),
    "kto-lora": ("kto", "feedback", dict(ref="adapter", lora_r=4, lora_dropout=0.3, humanline=True)),
    "rloo": ("rloo", "prompts", dict(k=3, updates_per_rollout=2, lr=1e-4)),
    "rloo-lora": ("rloo", "prompts", dict(lora_r=4, lr=1e-3, sync_reference=3, eval_every=3)),
}

NAMES = [pytest.param(name, marks=[needs_peft] if "lora" in name else []) for name in RUNS]


@pytest.fixture(scope="module")
def server():
    """Processes that start with everything imported, and compute with one thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dpo", "kto", "rloo"])
    return context


def arguments(name, folder, out, **changes):
    script, data, special = RUNS[name]
    if not (folder / "train.jsonl").exists():
        rows = open(ROOT / f"demo/{data}.jsonl").readlines()
        (folder / "train.jsonl").write_text("".join(rows[:40]))
        (folder / "test.jsonl").write_text("".join(rows[40:48]))
        (folder / "reward.py").write_text(REWARD.format(root=ROOT))
    common = dict(model=MODEL, data=str(folder / "train.jsonl"), eval_data=str(folder / "test.jsonl"), out=str(folder / out), steps=6, batch_size=8,
                  lr=1e-3, samples=2, max_new_tokens=8, save_every=2)
    if script == "rloo":
        common |= dict(batch_size=4, reward=(f"{folder}/reward.py:noisy",))
    return script, common | special | changes


def live(script, args, die_at=None, largest_file=None, events=None):
    """The life of one process: it counts whatever changes a file or a weight, and kills itself at a given count."""
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.environ.get("LIVE_LOG", os.devnull), "a")
    count = 0

    def mortal(f):
        def wrapper(*a, **k):
            nonlocal count
            count += 1
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return f(*a, **k)
        return wrapper
    os.fsync, os.replace = mortal(os.fsync), mortal(os.replace)
    torch.optim.AdamW.step = mortal(torch.optim.AdamW.step)
    refcache.ReferenceCache._score = mortal(refcache.ReferenceCache._score)
    refcache.ReferenceCache.score.__defaults__ = (16384, None, 0, "float32", 1.0)  # the cache is saved after every forward
    module = importlib.import_module(script)
    try:
        if largest_file:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        module.main(module.Args(**args))
    except (BadInput, Stopped) as error:
        Path(f"{args['out']}.error").write_text(f"{error}\n")
        os._exit(error.exit_code)
    if events:
        Path(events).write_text(str(count))


def start(server, *what, **how):
    process = server.Process(target=live, args=what, kwargs=how)
    process.start()
    return process


def finished(server, *what, **how):
    process = start(server, *what, **how)
    process.join(120)
    return process.exitcode


def result(folder):
    files = ["metrics.jsonl", "samples.jsonl", *(f.name for f in Path(folder).glob("*model.safetensors"))]
    assert len(files) == 3 and (Path(folder) / "finished.json").exists() and not list(Path(folder).glob(".*")) and not (Path(folder) / "checkpoints").exists()
    return {name: (Path(folder) / name).read_bytes() for name in files}


def die_again_and_again(server, name, tmp_path, kills, seed):
    """-> at which counts it died, of how many there are in a whole run."""
    script, args = arguments(name, tmp_path, "whole")
    assert finished(server, script, args, events=tmp_path / "events") == 0
    total, rng, deaths = int((tmp_path / "events").read_text()), random.Random(f"{name} {seed}"), []
    script, args = arguments(name, tmp_path, "killed")
    for _ in range(kills):
        deaths.append(rng.randint(1, total * 2 // 3))
        code = finished(server, script, args, die_at=deaths[-1])
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            break
    assert finished(server, script, args) == 0
    assert result(tmp_path / "killed") == result(tmp_path / "whole"), f"{name} killed at {deaths} of {total}"
    return deaths, total


@pytest.mark.parametrize("name", NAMES)
def test_killed_runs_end_with_the_same_bits(server, name, tmp_path):
    die_again_and_again(server, name, tmp_path, kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_runs_killed_ten_times_end_with_the_same_bits(server, name, seed, tmp_path):
    print(name, *die_again_and_again(server, name, tmp_path, kills=10, seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs_killed_by_the_clock_end_with_the_same_bits(server, name, tmp_path):
    script, args = arguments(name, tmp_path, "whole")
    begin = time.monotonic()
    assert finished(server, script, args) == 0
    seconds, rng = time.monotonic() - begin, random.Random(0)
    script, args = arguments(name, tmp_path, "killed")
    for _ in range(10):
        process = start(server, script, args)
        process.join(rng.uniform(0, seconds))
        process.kill()
        process.join()
    assert finished(server, script, args) == 0 and result(tmp_path / "killed") == result(tmp_path / "whole")


def test_a_run_killed_at_every_single_moment_of_a_save_goes_on(server, tmp_path):
    """One save of a checkpoint, from its first fsync to the removal of the one before it."""
    script, args = arguments("dpo", tmp_path, "whole", ref="none", steps=4, samples=0)
    assert finished(server, script, args, events=tmp_path / "events") == 0
    total = int((tmp_path / "events").read_text())
    for die_at in range(total - 30, total, 4):
        script, args = arguments("dpo", tmp_path, f"killed{die_at}", ref="none", steps=4, samples=0)
        assert finished(server, script, args, die_at=die_at) == -signal.SIGKILL
        assert finished(server, script, args) == 0 and result(args["out"]) == result(tmp_path / "whole")


def test_a_resumed_reference_pass_comes_before_the_checkpoint_is_read(tmp_path, monkeypatch):
    """Else a half-trained policy would be recorded as the reference."""
    script, args = arguments("dpo", tmp_path, "out")
    stop_after(monkeypatch, 3)
    with pytest.raises(Stopped):
        dpo.main(dpo.Args(**args))
    monkeypatch.undo()
    whole = refcache.ReferenceCache()
    whole.load(tmp_path / "out/reference_logprobs.pkl")
    (tmp_path / "out/reference_logprobs.pkl").unlink()
    dpo.main(dpo.Args(**args))
    again = refcache.ReferenceCache()
    again.load(tmp_path / "out/reference_logprobs.pkl")
    assert {k: v.tobytes() for k, v in whole.items()} == {k: v.tobytes() for k, v in again.items()}


# --- asked to stop --------------------------------------------------------------------------------------------------


def stop_after(monkeypatch, steps, number=signal.SIGTERM):
    """The signal arrives in the middle of a step."""
    count = []
    def step(self, original=torch.optim.AdamW.step):
        count.append(1)
        if len(count) == steps:
            os.kill(os.getpid(), number)
        return original(self)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_and_the_same_command_goes_on(tmp_path, monkeypatch, number):
    script, args = arguments("dpo", tmp_path, "out", save_every=100)
    handler = signal.getsignal(number)
    stop_after(monkeypatch, 3, number)
    with pytest.raises(Stopped, match=f"{number.name} after step 3; step 3 is saved") as stopped:
        dpo.main(dpo.Args(**args))
    assert stopped.value.exit_code == 128 + number and signal.getsignal(number) == handler
    monkeypatch.undo()
    history = dpo.main(dpo.Args(**args))
    assert [values["step"] for values in history] == list(range(7))
    assert history == dpo.main(dpo.Args(**arguments("dpo", tmp_path, "whole", save_every=100)[1]))


def test_a_moving_reference_comes_back_from_the_checkpoint(tmp_path, monkeypatch):
    """From a step at which it is neither where it began nor the policy."""
    script, args = arguments("dpo-moving", tmp_path, "out")
    stop_after(monkeypatch, 3)
    with pytest.raises(Stopped):
        dpo.main(dpo.Args(**args))
    monkeypatch.undo()
    assert dpo.main(dpo.Args(**args)) == dpo.main(dpo.Args(**args | dict(out=str(tmp_path / "whole"))))


def test_a_second_signal_stops_at_once(tmp_path, monkeypatch):
    def step(self):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(KeyboardInterrupt):
        dpo.main(dpo.Args(**arguments("dpo", tmp_path, "out")[1]))


def test_checkpoints_beyond_keep_are_removed(tmp_path, monkeypatch):
    _, args = arguments("dpo", tmp_path, "out", save_every=1, keep=2)
    stop_after(monkeypatch, 5)
    with pytest.raises(Stopped):
        dpo.main(dpo.Args(**args))
    assert sorted(f.name for f in (tmp_path / "out/checkpoints").iterdir()) == ["4", "5"]


def test_a_finished_run_says_so_and_trains_nothing(tmp_path, monkeypatch, capsys):
    for name in ("dpo", "kto", "rloo"):
        (tmp_path / name).mkdir()
        script, args = arguments(name, tmp_path / name, "out")
        module = importlib.import_module(script)
        history = module.main(module.Args(**args))
        before = result(args["out"])
        with monkeypatch.context() as patch:
            patch.setattr(refcache, "load_model", None)
            assert module.main(module.Args(**args)) == history and result(args["out"]) == before
        assert "is finished, after 6 steps: nothing to do" in capsys.readouterr().out


def test_other_arguments_or_data_are_refused_with_the_difference(tmp_path, monkeypatch):
    _, args = arguments("dpo", tmp_path, "out")
    args = dpo.Args(**args)
    stop_after(monkeypatch, 3)
    with pytest.raises(Stopped):
        dpo.main(args)
    monkeypatch.undo()
    for changes, words in ((dict(lr=0.1), "lr 0.001, and not 0.1"), (dict(loss="ipo"), "loss 'sigmoid', and not 'ipo'"), (dict(seed=5), "seed 0, and not 5")):
        with pytest.raises(BadInput, match=f"holds a run of 3 steps with {words}"):
            dpo.main(replace(args, **changes))
    (tmp_path / "train.jsonl").write_text("".join(open(ROOT / "demo/pairs.jsonl").readlines()[60:100]))
    with pytest.raises(BadInput, match="other rows"):
        dpo.main(args)
    (tmp_path / "train.jsonl").write_text("".join(open(ROOT / "demo/pairs.jsonl").readlines()[:40]))
    with monkeypatch.context() as patch, pytest.raises(BadInput, match="other weights behind the same names"):
        patch.setattr(refcache, "checkpoint_digest", lambda name: "another")
        dpo.main(args)
    history = dpo.main(replace(args, tokens_per_forward=200, gradient_checkpointing=True, save_every=1))  # memory and speed may differ
    assert len(history) == 7


def test_arguments_are_named_before_rows_and_speed_flags_may_change(tmp_path, monkeypatch):
    _, args = arguments("rloo", tmp_path, "out")
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 5)
        rloo.main(rloo.Args(**args))
    rows = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text("\n".join(rows.split("\n")[:30]))
    with pytest.raises(BadInput, match="with temperature 1.0, and not 0.5"):  # 'rows' sorts before it, but says less
        rloo.main(rloo.Args(**args | dict(temperature=0.5)))
    (tmp_path / "train.jsonl").write_text(rows)
    board = SimpleNamespace(add_scalar=lambda *a: None, close=lambda: None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda *a, **k: board))
    rloo.main(rloo.Args(**args | dict(rollout_tokens=50, tensorboard=True)))


def test_the_reference_of_rloo_moves_once_a_step_before_its_updates_and_by_sync_mix(tmp_path, monkeypatch):
    def kl(out, **changes):
        args = arguments("rloo", tmp_path, out, steps=4, save_every=9, samples=0, lr=1e-3, updates_per_rollout=2, **changes)[1]
        return [values["kl"] for values in rloo.main(rloo.Args(**args))[1:]]
    mixes = []
    monkeypatch.setattr(refcache.Swap, "sync", lambda self, mix=1.0, real=refcache.Swap.sync: mixes.append(mix) or real(self, mix))
    still, moved = kl("still"), kl("moved", sync_reference=1, sync_mix=0.6)
    assert mixes == [0.6] * 4 and moved[:2] == still[:2] and abs(moved[2] - still[2]) > 1e-4  # one update behind
    late = kl("late", sync_reference=2)
    assert late[:2] == still[:2] and abs(late[2] - still[2]) > 1e-4 and len(mixes) == 6


def test_answers_differ_by_seed(tmp_path):
    texts = []
    for seed in (0, 1):
        dpo.main(dpo.Args(**arguments("dpo", tmp_path, f"out{seed}", steps=1, seed=seed, samples=8)[1]))
        texts.append([row["completion"] for row in map(json.loads, open(tmp_path / f"out{seed}/samples.jsonl")) if row["step"] == 0])
    assert texts[0] != texts[1]


def test_another_reward_model_is_refused_and_other_code_of_a_reward_is_said(tmp_path, monkeypatch, capsys):
    """Code may have been mended, so the run goes on; a reward that changes in silence would be two runs in one."""
    def judge(scale):
        config = refcache.AutoConfig.from_pretrained(MODEL, num_labels=1)
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        model.score.weight.data.mul_(scale)
        model.save_pretrained(tmp_path / "judge")
        refcache.load_tokenizer(MODEL)[0].save_pretrained(tmp_path / "judge")
    judge(1.0)
    _, args = arguments("rloo", tmp_path, "out", reward_model=str(tmp_path / "judge"))
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 5)
        rloo.main(rloo.Args(**args))
    judge(2.0)
    with pytest.raises(BadInput, match="other weights behind the same names"):
        rloo.main(rloo.Args(**args))
    judge(1.0)
    assert "has changed since" not in capsys.readouterr().out
    (tmp_path / "reward.py").write_text((tmp_path / "reward.py").read_text() + "# mended")
    assert len(rloo.main(rloo.Args(**args))) == 7 and "the file of a reward or score has changed since" in capsys.readouterr().out


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A folder with a checkpoint after step 3."""
    folder = tmp_path_factory.mktemp("stopped")
    _, args = arguments("dpo", folder, "out")
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            dpo.main(dpo.Args(**args))
    return folder


def test_damaged_checkpoints_are_refused_in_one_sentence(stopped, tmp_path):
    rng = random.Random(0)
    for name in ("weights.safetensors", "optimizer.pt", "state.json"):
        whole = (stopped / "out/checkpoints/3" / name).read_bytes()
        flipped = bytearray(whole)
        flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        for damaged in (b"", whole[:len(whole) // 2], bytes(flipped), None):
            if name == "state.json" and damaged == bytes(flipped):
                continue  # one digit of a random state more or less: below
            shutil.copytree(stopped / "out", tmp_path / "out", dirs_exist_ok=True)
            file = tmp_path / "out/checkpoints/3" / name
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(BadInput, match="damaged") as refusal:
                dpo.main(replace(dpo.Args(**arguments("dpo", stopped, "out")[1]), out=str(tmp_path / "out")))
            assert "\n" not in str(refusal.value)


def test_a_hostile_checkpoint_runs_nothing(stopped, tmp_path):
    import pickle
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)
    shutil.copytree(stopped / "out", tmp_path / "out")
    folder = tmp_path / "out/checkpoints/3"
    state = json.loads((folder / "state.json").read_text())
    for write in (lambda file: torch.save({"optimizer": Bomb()}, file), lambda file: file.write_bytes(pickle.dumps(Bomb()))):
        write(folder / "optimizer.pt")
        state["files"]["optimizer.pt"] = refcache._file_digest(folder / "optimizer.pt")
        (folder / "state.json").write_text(json.dumps(state))
        with pytest.raises(BadInput, match="damaged"):
            dpo.main(replace(dpo.Args(**arguments("dpo", stopped, "out")[1]), out=str(tmp_path / "out")))
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("limit, what", [(10_000, "reference_logprobs.pkl"), (500_000, "cannot save step 2"), (2_500, "cannot write into")])
def test_a_full_disk_is_one_sentence_and_nothing_is_lost(server, tmp_path, limit, what):
    """Real failing writes: the system refuses what goes beyond a size that the cache, a checkpoint, or the samples reach first."""
    special = dict(ref="none", samples=8, save_every=100) if limit < 9000 else {}
    script, args = arguments("dpo", tmp_path, "out", **special)
    assert finished(server, script, args, largest_file=limit) in (1, 2)
    assert what in (message := (tmp_path / "out.error").read_text()) and message.count("\n") == 1
    assert not list((tmp_path / "out").glob("**/.*[!k]"))  # but for the lock of the cache
    assert finished(server, script, args) == 0
    _, whole = arguments("dpo", tmp_path, "whole", **special)
    assert finished(server, script, whole) == 0 and result(tmp_path / "out") == result(tmp_path / "whole")


def test_three_jobs_fill_one_cache_at_once(server, tmp_path):
    jobs = []
    for out, name in (("a", "dpo"), ("b", "dpo"), ("c", "kto")):
        (tmp_path / out).mkdir()
        script, args = arguments(name, tmp_path / out, out, ref_cache=str(tmp_path / "shared.pkl"), steps=1)
        if out == "b":  # half of the same rows, and as many others
            (tmp_path / "b/train.jsonl").write_text("".join(open(ROOT / "demo/pairs.jsonl").readlines()[20:60]))
        jobs.append((script, args))
    processes = [start(server, *job) for job in jobs]
    assert [process.join() or process.exitcode for process in processes] == [0, 0, 0]
    union, alone = refcache.ReferenceCache(), set()
    union.load(tmp_path / "shared.pkl")
    for script, args in jobs:
        own = dict(args, ref_cache=None, out=args["out"] + "-alone")
        assert finished(server, script, own) == 0
        (one := refcache.ReferenceCache()).load(f"{own['out']}/reference_logprobs.pkl")
        alone |= set(one)
    assert set(union) == alone


def test_a_reference_deleted_between_runs_is_named(tmp_path):
    shutil.copytree(MODEL, tmp_path / "reference")
    _, args = arguments("dpo", tmp_path, "out", ref_model=str(tmp_path / "reference"), steps=1)
    dpo.main(dpo.Args(**args))
    shutil.rmtree(tmp_path / "reference")
    with pytest.raises(BadInput, match=f"cannot read the model {tmp_path}/reference"):
        dpo.main(dpo.Args(**dict(args, out=str(tmp_path / "again"))))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_every_script_and_keeps_the_last_checkpoint(tmp_path, monkeypatch, value):
    for module, function in ((dpo, "preference_loss"), (kto, "feedback_loss"), (rloo, "policy_loss")):
        calls = []
        def broken(*a, original=getattr(module, function), **k):
            calls.append(1)
            return original(*a, **k) * (value if torch.is_grad_enabled() and len(calls) > 8 else 1)
        monkeypatch.setattr(module, function, broken)
        (folder := tmp_path / module.__name__).mkdir()
        _, args = arguments(module.__name__, folder, "out", eval_every=None, save_every=1, steps=20)
        with pytest.raises(refcache.Diverged, match=r"step \d+: .*loss is -?(nan|inf)"):
            module.main(module.Args(**args))
        assert list((folder / "out/checkpoints").glob("[0-9]*"))


@pytest.mark.parametrize("module", [dpo, kto, rloo])
def test_held_out_numbers_that_are_none_stop_the_run(tmp_path, monkeypatch, module):
    calls, real = [], module.evaluate
    def broken(*a):
        calls.append(1)
        bad = {"eval_loss": math.nan, "eval_kl": math.nan} if len(calls) > 1 else {}
        return (real(*a)[0], real(*a)[1] | bad) if module is rloo else real(*a) | bad
    monkeypatch.setattr(module, "evaluate", broken)
    with pytest.raises(refcache.Diverged, match="eval_loss is nan"):
        module.main(module.Args(**arguments(module.__name__, tmp_path, "out")[1] | dict(steps=2)))


def test_a_disabled_bar_disables_nothing_else(tmp_path):
    args = [sys.executable, "dpo.py", "--model", MODEL, "--data", "demo/pairs.jsonl", "--out", str(tmp_path), "--steps", "1", "--samples", "0"]
    subprocess.run(args, cwd=ROOT, env=os.environ | {"TQDM_DISABLE": "1"}, check=True, capture_output=True)


def test_alien_folders_and_a_damaged_end_cost_no_checkpoint(tmp_path):
    args = dpo.settle(dpo.Args(model=MODEL, data="pairs.jsonl", out=str(tmp_path)))
    for name in ("2", "12x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "finished.json").write_text("garbage")
    with pytest.raises(BadInput, match="finished.json is damaged"):
        refcache.Run(args, [])
    (tmp_path / "finished.json").unlink()
    with pytest.raises(BadInput, match="checkpoints/2/state.json is damaged"):
        refcache.Run(args, [])


def test_a_lap_is_the_time_since_the_last(monkeypatch):
    run, times = SimpleNamespace(laps={}, lapped=0.0), iter([1.0, 3.0, 6.0])
    monkeypatch.setattr(refcache.time, "monotonic", lambda: next(times))
    for part in "abc":
        refcache.Run.lap(run, part)
    assert run.laps == dict(a=1.0, b=2.0, c=3.0)


def test_one_refusal_inside_another_keeps_its_own_sentence():
    with pytest.raises(BadInput, match="^inner$"):
        with refcache.refusing("outer"):
            raise BadInput("inner")
    with pytest.raises(BadInput, match="^outer: ValueError x{200}; do$"):
        with refcache.refusing("outer", "; do"):
            raise ValueError("x" * 999)
