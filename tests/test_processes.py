"""Several processes give the run of one. The processes are forked here; torchrun itself is behind `slow`."""
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import traceback
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import GROUPS, bad_input, equal, flat, make, parametrize
from runs import SCRIPTS, arguments, needs_peft, tiny, weights_of, without_speed

import dpo
import refcache
from refcache import BadInput, ReferenceCache, completion_logprobs, micro_batches

UNEVEN = dict(batch_size=5, steps=3, tokens_per_forward=150, max_new_tokens=6)  # unequal forwards
CASES = {  # what differs between processes: weights, gradients, data, references, rollouts
    "dpo": ("dpo", dict(samples=3)),
    "dpo-swap": ("dpo", dict(ref="swap", gradient_checkpointing=True)),
    "dpo-lora": ("dpo", dict(lora_r=4, lr=2e-2)),
    "dpo-bfloat16": ("dpo", dict(dtype="bfloat16", ref="swap")),
    "kto": ("kto", dict(samples=3)),
    "kto-one-row": ("kto", dict(batch_size=1, steps=2, model=tiny(1), ref_model=tiny())),  # z is positive
    "rloo": ("rloo", dict(updates_per_rollout=2, steps=2)),
    "dpo-one-row": ("dpo", dict(batch_size=1)),
    "rloo-one-prompt": ("rloo", dict(batch_size=1)),
    "rloo-truncated": ("rloo", dict(mask_truncated=True)),
}


def slow_but(*quick):
    """All cases. Those that are not named are slow."""
    marks = {name: [needs_peft] * ("lora" in name) + [pytest.mark.slow] * (name not in quick) for name in CASES}
    return [pytest.param(name, marks=marks[name]) for name in CASES]


FORKS = {}  # number of processes -> [(process, end of the pipe where it waits for work), ..]


def kill(n):
    for process, _ in FORKS.pop(n, ()):
        process.kill()
        process.join()


@pytest.fixture(autouse=True, scope="module")
def no_fork_stays():
    yield
    for n in list(FORKS):
        kill(n)


def forks(n):
    """They stay, because the first steps of a process take long."""
    context = multiprocessing.get_context("fork")
    if n not in FORKS:
        FORKS[n] = []
        for rank in range(n):
            end, pipe = context.Pipe()
            FORKS[n].append((context.Process(target=work, args=(pipe, rank, n), daemon=True), end))
            FORKS[n][-1][0].start()
    return [end for _, end in FORKS[n]]


def in_processes(n, function, *args):
    """function(*args) in n forked processes: what the first one returned. Raises any error."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for end in forks(n):
        end.send((port, function, args))
    results = [end.recv() if end.poll(120) else ("hangs", None) for end in forks(n)]
    if any(kind == "hangs" for kind, _ in results):
        kill(n)
    for kind, value in sorted(results, key=str):  # an error makes others hang
        if kind != "result":
            raise value if isinstance(value, BadInput) else AssertionError(f"{kind} {value}")
    return pickle.loads(results[0][1])


def work(pipe, rank, ranks):
    if rank:
        sys.stdout = open(os.devnull, "w")
    while True:
        port, function, args = pipe.recv()
        if ranks > 1:
            os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="localhost",
                               MASTER_PORT=str(port))
        try:
            pipe.send(("result", pickle.dumps(function(*args))))  # tensors as bytes
        except BadInput as error:
            pipe.send(("error", error))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
        if dist.is_initialized():
            dist.destroy_process_group()


def flags_of(name, **changes):
    script, flags = CASES[name]
    return script, arguments(script, **UNEVEN | flags | changes)


@cache
def whole(name, n):
    script, args = flags_of(name)
    main = SCRIPTS[script].main
    history = main(args) if n == 1 else in_processes(n, main, args)
    return without_speed(history), weights_of(f"{args.out}/model"), Path(args.out)


def assert_same(one, several):
    for a, b in zip(one[0], several[0], strict=True):
        assert a == pytest.approx(b, abs=1e-5, rel=1e-4)
    assert one[1].keys() == several[1].keys()
    for name, weights in one[1].items():
        assert torch.allclose(weights, several[1][name], atol=1e-5), name


@parametrize("name", slow_but("dpo-one-row", "kto-one-row", "rloo"))
def test_two_processes_give_the_run_of_one(name):
    if name == "dpo-bfloat16":  # it rounds otherwise than one process would, but like its reference
        assert whole(name, 2)[0][1]["logratio"] == 0
    else:
        assert_same(whole(name, 1), whole(name, 2))


# --- Log-probs

@refcache.process_group()
def logps_and_gradients(name):
    """Of the sum of squares of all log-probs. Each process does its share."""
    model = make(name)
    if refcache.process_count() > 1:
        refcache.apply_fsdp(model, "cpu")
    model.requires_grad_(True)
    found = {}
    for indices, weight in micro_batches(model, GROUPS, 12):
        logps = completion_logprobs(model, [GROUPS[i] for i in indices])
        (sum((y ** 2).sum() for ys in logps for y in ys) * weight).backward()
        found |= {i: [y.detach() for y in ys] for i, ys in zip(indices, logps) if weight}
    found = {i: ys for part in refcache.all_gather(found) for i, ys in part.items()}
    gradients = [refcache.full_tensor(p.grad).flatten() for p in model.parameters() if p.grad is not None]
    return flat([found[i] for i in sorted(found)]), torch.cat(gradients)


@parametrize("name", ["llama-tied", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "glm4-moe-buffer", "gemma2-softcaps", "mamba"))])
def test_split_models_equal_whole_ones(name):
    logps, gradients = logps_and_gradients(name)
    theirs, sums = in_processes(2, logps_and_gradients, name)
    assert torch.allclose(logps, theirs, atol=2e-6)
    assert (gradients - sums).abs().max() < 2e-6 * gradients.abs().max()


@refcache.process_group()
def bfloat16_gradient():
    model = make("llama")
    refcache.apply_fsdp(model, "cpu", "bfloat16")
    completion_logprobs(model, [GROUPS[refcache.process_rank()]])[0][0].sum().backward()
    return refcache.full_tensor(model.model.norm.weight.grad)


def test_gradients_of_bfloat16_processes_are_added_in_float32():
    gradient = in_processes(2, bfloat16_gradient)
    assert (gradient.bfloat16().float() != gradient).float().mean() > 0.2


def test_micro_batches_of_processes_are_equal(monkeypatch):
    model = make("llama")
    rng = np.random.default_rng(0)
    for ranks in (1, 2, 3, 4, 8):
        for rows in (1, 2, 7, 64):
            groups = [((1,) * n, [(2,) * int(rng.integers(1, 60))]) for n in rng.integers(1, 200, rows)]
            shares = []
            for rank in range(ranks):
                monkeypatch.setattr(refcache, "process_rank", lambda rank=rank: rank)
                monkeypatch.setattr(refcache, "process_count", lambda ranks=ranks: ranks)
                shares.append(micro_batches(model, groups, 600))
            batches = [indices for share in shares for indices, weight in share if weight]
            assert len({len(share) for share in shares}) == 1
            assert all(indices for share in shares for indices, _ in share), "FSDP needs equally many forwards"
            assert sorted(i for batch in batches for i in batch) == list(range(rows))
            loads = [sum(len(groups[i][0]) + len(groups[i][1][0]) for i in batch) for batch in batches]
            assert max(loads) <= 600
            assert rows < 8 * ranks or max(loads) < 1.25 * np.mean(loads)
            assert rows > ranks or len(batches) == rows, "no process waits for one that has two"


# --- Checkpoints and faults

class Killed(Exception):
    pass


def run_until(step, main, args):
    module = sys.modules[main.__module__]

    def save_checkpoint(out, saved, *state, original=module.save_checkpoint):
        original(out, saved, *state)
        if saved == step:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module, "save_checkpoint", save_checkpoint)
        main(args)
    return step


@parametrize("processes", [(2, 1, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
@parametrize("name", slow_but("dpo-swap"))
def test_runs_resume_with_any_number_of_processes(name, processes):
    script, args = flags_of(name, save_every=1)
    main = SCRIPTS[script].main
    for step in (1, 2):
        assert in_processes(processes[step - 1], run_until, step, main, args) == step
        shards = {path.name[:11] for path in Path(args.out).glob(f"resume-{step}/shard-*")}
        assert len(shards) == processes[step - 1]
    history = without_speed(in_processes(2, main, args))
    weights = weights_of(f"{args.out}/model")
    if name != "dpo-bfloat16":
        assert_same(whole(name, 1), (history, weights))
    if processes[1] == 2:
        assert history == whole(name, 2)[0] and equal(weights, whole(name, 2)[1])


def test_one_process_calls_the_score(tmp_path):
    file, calls = tmp_path / "score.py", tmp_path / "calls"
    file.write_text(f"import os\n\ndef score(prompts, **_):\n    open('{calls}', 'a').write(os.environ['RANK'])\n"
                    "    return [1] * len(prompts)")
    _, args = flags_of("dpo", samples=2, steps=1, score=f"{file}:score")
    in_processes(2, dpo.main, args)
    assert calls.read_text() == "000"


def main_with_another(kind, main, args):
    """main(args), where the second process has another flag, or other files under the same paths."""
    module = sys.modules[main.__module__]
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            if kind == "flag":
                args = replace(args, lr=0.1)
            if kind == "rows":
                patch.setattr(module, "load_rows", lambda *rest, load=module.load_rows: load(*rest)[::-1])
            if kind == "weights":
                patch.setattr(module, "checkpoint_digest", lambda folder: "of another")
        return main(args)


@parametrize("kind", ["flag", "rows", "weights"])
@parametrize("script, ref", [("dpo", "cache"), ("dpo", "swap"), ("rloo", "swap")])
def test_processes_that_differ_are_refused(script, ref, kind):
    with bad_input("the processes have other flags, rows or weights: give all of them the same files"):
        in_processes(2, main_with_another, kind, SCRIPTS[script].main, arguments(script, ref=ref))


@refcache.process_group()
def fill(path):
    cache = ReferenceCache(reference="abc")
    prompt, completions = GROUPS[refcache.process_rank()]
    y = completions[0]  # equally many
    cache.table[refcache.bytes_of(prompt), refcache.bytes_of(y)] = bytes(4 * len(y))
    cache.fill(lambda: make("llama"), GROUPS, path=path)


def test_different_cache_files_are_refused(tmp_path):
    with bad_input("the processes have different caches: start again"):
        in_processes(2, fill, tmp_path / "c.pkl")


@pytest.mark.slow
def test_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "dpo.py", "--out",
               str(tmp_path / "out"), "--steps", "2"]
    run = subprocess.run(command, cwd=Path(dpo.__file__).parent, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0
    assert run.stdout.count("\nsee ") == 1
