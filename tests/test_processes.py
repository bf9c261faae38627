"""Several processes give the run of one. They are forked here; torchrun itself is behind `slow`."""
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
from contextlib import chdir
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist
from models import MODELS, bad_input, build, cases, slow_but
from runs import ROOT, SCRIPTS, TOKENIZER, arguments, data, finished, run_until, same, save, tiny


UNEVEN = dict(batch_size=5, steps=3, tokens_per_forward=150)  # unequal forwards
CASES = {
    "dpo": {}, "dpo-swap": dict(ref="swap", gradient_checkpointing=True), "dpo-lora": dict(lora_r=4, lr=2e-2),
    "dpo-bfloat16": dict(dtype="bfloat16", ref="swap"), "kto": {},
    "kto-one-row": dict(batch_size=1, model=tiny(1), ref_model=tiny()),  # z is positive
    "rloo": dict(updates_per_rollout=2), "rloo-one-prompt": dict(batch_size=1)}
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
    script, flags = name.split("-")[0], CASES.get(name)
    if "lora" in name:
        pytest.importorskip("peft")
    if name in FAMILIES:
        model_type, config = MODELS[name]
        model = build(model_type, config | dict(vocab_size=len(TOKENIZER), eos_token_id=3))
        script, flags = "dpo", dict(batch_size=1, model=save(model, name))
    return SCRIPTS[script].main, arguments(script, **UNEVEN | flags | changes)


@cache
def whole(name, n_processes):
    main, args = flags_of(name)
    return finished(args, in_processes(n_processes, main, args))


@cases("name", slow_but(["llama-tied", "kto-one-row", "rloo"], [*CASES, *FAMILIES]))
def test_two_processes_give_the_run_of_one(name):
    if name == "dpo-bfloat16":  # it rounds otherwise than one process would, but like its reference
        assert whole(name, 2).history[1]["abs_logratio"] == 0
    else:
        assert same(whole(name, 1), whole(name, 2))


@cases("name", slow_but(["dpo-swap"], CASES))
def test_runs_resume_with_another_number_of_processes(name):
    main, args = flags_of(name, save_every=1)
    for last_step, n in ((1, 2), (2, 1)):
        in_processes(n, run_until, "learning_rate 2", main, args)
        assert len(list(Path(args.out).glob(f"resume-{last_step}/*.distcp"))) == n
    resumed = finished(args, in_processes(2, main, args))
    assert name == "dpo-bfloat16" or same(whole(name, 1), resumed)


def main_in(folder, main, args):
    with chdir(folder / os.environ["RANK"]):
        main(args)


@cases("script", SCRIPTS)
def test_processes_with_other_rows_are_refused(script, tmp_path):
    lines = Path(data(script)[0]).read_text().splitlines(keepends=True)
    for rank in (0, 1):
        (tmp_path / f"{rank}").mkdir()
        (tmp_path / f"{rank}/rows.jsonl").write_text("".join(lines[rank:]))
    with bad_input("or another process, has a run with other data_sha256"):
        in_processes(2, main_in, tmp_path, SCRIPTS[script].main, arguments(script, data="rows.jsonl"))


@pytest.mark.slow
def test_torchrun(tmp_path):
    command = "-m torch.distributed.run --standalone --nproc_per_node=2 dpo.py --steps 2 --out".split()
    subprocess.run([sys.executable, *command, tmp_path / "out"], cwd=ROOT, check=True, timeout=120)
    assert (tmp_path / "out/model").exists()
