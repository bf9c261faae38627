"""Several processes give the run of one. The processes are forked here; torchrun itself is behind `slow`."""
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from models import GROUPS, MODELS, bad_input, build, equal, make, parametrize, slow_but
from runs import ROOT, SCRIPTS, TOKENIZER, arguments, finished, run_until, same, save, tiny
from test_changes import MOVING, changed

import refcache
from refcache import ReferenceCache, completion_logprobs, divide_batches

UNEVEN = dict(batch_size=5, steps=3, tokens_per_forward=150, max_new_tokens=6)  # unequal forwards
CASES = {  # what differs between processes: weights, gradients, data, references, rollouts
    "dpo": ("dpo", dict(samples=3)),
    "dpo-swap": ("dpo", dict(ref="swap", gradient_checkpointing=True)),
    "dpo-lora": ("dpo", dict(lora_r=4, lr=2e-2)),
    "dpo-bfloat16": ("dpo", dict(dtype="bfloat16", ref="swap")),
    "kto": ("kto", dict(samples=3)),
    "kto-one-row": ("kto", dict(batch_size=1, model=tiny(1), ref_model=tiny())),  # z is positive
    "tr_dpo": ("dpo", MOVING),
    "rloo": ("rloo", dict(updates_per_rollout=2)),
    "rloo-one-prompt": ("rloo", dict(batch_size=1)),
    "rloo-truncated": ("rloo", dict(mask_truncated=True)),
}
TR_DPO = changed("tr_dpo")  # the forks must have this module
FAMILIES = ["llama-tied", "glm4-moe-buffer", "gemma2-softcaps", "mamba"]  # models of dpo runs


@cache
def forks():
    """Two processes. They stay, because a new one is slow at first."""
    return [multiprocessing.get_context("fork").Pool(1) for _ in range(2)]


@pytest.fixture(autouse=True, scope="module")
def no_fork_stays():
    yield
    end_forks()


def end_forks():
    for pool in forks():
        pool.terminate()
    forks.cache_clear()


def in_processes(n, function, *args):
    """function(*args) in one process, or in each of two: what the first one returned."""
    if n == 1:
        return function(*args)

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    jobs = [pool.apply_async(join, (rank, port, function, args)) for rank, pool in enumerate(forks())]
    try:
        first, _ = [job.get(timeout=120) for job in jobs]
    except multiprocessing.TimeoutError:
        end_forks()
        raise
    return pickle.loads(first)


def join(rank, port, function, args):
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost",
                       MASTER_PORT=str(port))
    try:
        return pickle.dumps(function(*args))  # tensors as bytes
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def flags_of(name, **changes):
    if "lora" in name:
        pytest.importorskip("peft")
    script, flags = CASES.get(name, ("dpo", dict(batch_size=1)))
    if name in FAMILIES:
        model_type, config = MODELS[name]
        model = build(model_type, config | dict(vocab_size=len(TOKENIZER), eos_token_id=3))
        flags = flags | dict(model=save(model, name))
    module = TR_DPO if name == "tr_dpo" else SCRIPTS[script]
    return module.main, arguments(script, module, **UNEVEN | flags | changes)


@cache
def whole(name, n_processes):
    main, args = flags_of(name)
    return finished(args, in_processes(n_processes, main, args))


@parametrize("name", slow_but(["llama-tied", "kto-one-row", "rloo"], [*CASES, *FAMILIES]))
def test_two_processes_give_the_run_of_one(name):
    if name == "dpo-bfloat16":  # it rounds otherwise than one process would, but like its reference
        assert whole(name, 2).history[1]["logratio"] == 0
    else:
        assert same(whole(name, 1), whole(name, 2))


@parametrize("processes", [(2, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
@parametrize("name", slow_but(["dpo-swap"], CASES))
def test_runs_resume_with_any_number_of_processes(name, processes):
    main, args = flags_of(name, save_every=1)
    for last_step, n in enumerate(processes, start=1):
        in_processes(n, run_until, "learning_rate 2", main, args)
        shards = {path.name[:11] for path in Path(args.out).glob(f"resume-{last_step}/shard-*")}
        assert len(shards) == n

    resumed = finished(args, in_processes(2, main, args))
    if name != "dpo-bfloat16":
        assert same(whole(name, 1), resumed)
    if processes == (2, 2):
        assert resumed.history == whole(name, 2).history and equal(resumed.weights, whole(name, 2).weights)


@refcache.process_group()
def bfloat16_gradient():
    model = make("llama")
    refcache.apply_fsdp(model, "cpu", "bfloat16")
    completion_logprobs(model, [GROUPS[refcache.process_rank()]])[0][0].sum().backward()
    return refcache.full_tensor(model.model.norm.weight.grad)


def test_gradients_of_bfloat16_processes_are_added_in_float32():
    gradient = in_processes(2, bfloat16_gradient)
    assert not gradient.equal(gradient.bfloat16().float())


def test_micro_batches_of_processes_are_equal(monkeypatch):
    rng = np.random.default_rng(0)
    for ranks, rows in product((1, 2, 3, 4, 8), (1, 2, 7, 64)):
        lengths = rng.integers(2, 200, rows)
        monkeypatch.setattr(refcache, "process_count", lambda ranks=ranks: ranks)
        shares = []
        for rank in range(ranks):
            monkeypatch.setattr(refcache, "process_rank", lambda rank=rank: rank)
            shares.append(divide_batches(lengths, 600))

        assert len({len(share) for share in shares}) == 1, "FSDP needs equally many forwards"
        batches = [batch for batch in chain(*shares) if batch]
        assert sorted(chain(*batches)) == list(range(rows))
        assert rows > ranks or len(batches) == rows, "no process waits for one that has two"
        loads = [lengths[batch].sum() for batch in batches]
        assert max(loads) <= 600
        assert rows < 8 * ranks or max(loads) < 1.25 * np.mean(loads)


def test_one_process_calls_the_score(tmp_path):
    file, calls = tmp_path / "score.py", tmp_path / "calls"
    file.write_text(f"import os\n\ndef score(prompts, **_):\n    open('{calls}', 'a').write(os.environ['RANK'])\n"
                    "    return [1] * len(prompts)")
    in_processes(2, *flags_of("dpo", samples=2, steps=1, score=f"{file}:score"))
    assert calls.read_text() == "000"


# --- What is refused

def main_with_another_rate(main, args):
    return main(replace(args, lr=1.0 + int(os.environ["RANK"])))


@parametrize("script", ["dpo", "rloo"])
def test_processes_that_differ_are_refused(script):
    with bad_input("the processes have other flags, rows or weights: give all of them the same files"):
        in_processes(2, main_with_another_rate, SCRIPTS[script].main, arguments(script))


@refcache.process_group()
def fill_another(path):
    cache = ReferenceCache(reference="abc")
    prompt, completions = GROUPS[refcache.process_rank()]
    cache.table[refcache.bytes_of(prompt), refcache.bytes_of(completions[0])] = b""
    cache.fill(None, GROUPS, path=path)


def test_different_cache_files_are_refused(tmp_path):
    with bad_input("the processes have different caches: start again"):
        in_processes(2, fill_another, tmp_path / "c.pkl")


@pytest.mark.slow
def test_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "dpo.py", "--out",
               str(tmp_path / "out"), "--steps", "2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0
    assert run.stdout.count("\nsee ") == 1
