"""Several processes give the run of one. The processes are forked here; torchrun itself is behind `slow`."""
import math
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import make
from runs import SCRIPTS, adapt, arguments, needs_peft, tiny, weights_of
from torch.distributed.device_mesh import init_device_mesh

import dpo
import refcache
import rloo
from refcache import BadInput, ReferenceCache, completion_logprobs, micro_batches

UNEVEN = dict(batch_size=5, steps=3, tokens_per_forward=150)  # 5 rows on 2 or 4 processes, several forwards each
CASES = {  # what differs between processes: weights, gradients, data, references, rollouts
    "dpo": ("dpo", {}),
    "dpo-ddp": ("dpo", dict(parallel="ddp")),
    "dpo-one-row": ("dpo", dict(batch_size=1)),
    "dpo-whole-batch": ("dpo", dict(loss=("aot",))),
    "dpo-checkpointed": ("dpo", dict(gradient_checkpointing=True)),
    "dpo-humanline": ("dpo", dict(ref="swap", humanline=(-1.0, 1.5))),
    "dpo-sync": ("dpo", dict(ref="swap", sync_reference=2, sync_mix=0.6)),
    "dpo-live": ("dpo", dict(ref="live", ref_model=1)),
    "dpo-swap-other": ("dpo", dict(ref="swap", ref_model=1)),
    "dpo-bfloat16": ("dpo", dict(save_dtype="bfloat16")),
    "dpo-lora": ("dpo", dict(lora_r=4, lr=2e-2)),
    "dpo-lora-ddp": ("dpo", dict(lora_r=4, lr=2e-2, parallel="ddp")),
    "dpo-lora-merge": ("dpo", dict(lora_r=4, lr=2e-2, merge=True)),
    "dpo-adapter": ("dpo", dict(model="adapter", lr=2e-2, ref="swap")),
    "kto": ("kto", {}),
    "kto-ddp": ("kto", dict(parallel="ddp")),
    "kto-lora": ("kto", dict(lora_r=4, lr=2e-2)),
    "rloo": ("rloo", {}),
    "rloo-ddp": ("rloo", dict(parallel="ddp", updates_per_rollout=2)),
    "rloo-sync": ("rloo", dict(sync_reference=2, mask_truncated=True)),
    "rloo-lora": ("rloo", dict(lora_r=4, lr=2e-2)),
}
QUICK = {"dpo-one-row", "kto-ddp", "rloo"}


def slow_but(quick):
    """All cases; those that are not named are slow."""
    marks = {name: [needs_peft] if flags.get("lora_r") or flags.get("model") else []
             for name, (_, flags) in CASES.items()}
    return [pytest.param(name, marks=marks[name] + ([] if name in quick else [pytest.mark.slow])) for name in CASES]


def in_processes(n, function, *args):
    """function(*args) in n processes. Returns what the first one returned; raises what any of them raised."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context, ends = multiprocessing.get_context("fork"), []
    for rank in range(n):
        end, other = context.Pipe()
        process = context.Process(target=_process, args=(other, rank, n, port, function, args), daemon=True)
        process.start()
        ends.append((process, end))
    results = [end.recv() if end.poll(120) else ("hangs", None) for _, end in ends]
    for process, _ in ends:
        process.kill()
        process.join()
    for kind, value in results:
        if kind != "result":
            raise value if isinstance(value, BadInput) else AssertionError(f"{kind} {value}")
    return pickle.loads(results[0][1])


def _process(pipe, rank, ranks, port, function, args):
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="localhost",
                       MASTER_PORT=str(port))
    if rank:
        sys.stdout = open(os.devnull, "w")
    try:
        pipe.send(("result", pickle.dumps(function(*args))))  # tensors as bytes: this process ends at once
    except BadInput as error:
        pipe.send(("error", error))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()


def flags_of(name, **changes):
    script, flags = CASES[name]
    flags = UNEVEN | flags | changes
    if "ref_model" in flags:
        flags["ref_model"] = tiny(flags["ref_model"])
    if flags.get("model") == "adapter":
        flags["model"] = adapt("processes", seed=3)
    return script, arguments(script, **flags)


def train(name, n, **changes):
    script, args = flags_of(name, **changes)
    main = SCRIPTS[script].main
    history = main(args) if n == 1 else in_processes(n, main, args)
    return history, weights_of(f"{args.out}/model"), args


def assert_same(one, several):
    for a, b in zip(one[0], several[0], strict=True):
        assert a == pytest.approx(b, abs=1e-5, rel=1e-4)
    assert one[1].keys() == several[1].keys()
    for name, weights in one[1].items():
        assert torch.allclose(weights, several[1][name], atol=1e-5), name


@pytest.mark.parametrize("name", slow_but(QUICK))
def test_two_processes_give_the_run_of_one(name):
    assert_same(train(name, 1), train(name, 2))


def layer_by_layer(main, args):
    """As if there were no room for all weights on one GPU."""
    @contextmanager
    def gathered(model):
        yield True

    sys.modules[main.__module__].gathered = gathered
    return main(args)


@pytest.mark.parametrize("name", ["rloo", pytest.param("dpo", marks=pytest.mark.slow)])
def test_samples_are_the_same_when_processes_gather_each_layer_for_each_token(name, monkeypatch):
    monkeypatch.setattr(rloo, "stop_tokens", lambda *_: list(range(0, 5000, 4)))  # samples end at different tokens
    _, one = flags_of(name, samples=3)
    script, two = flags_of(name, samples=3)
    main = SCRIPTS[script].main
    assert_same((main(one), {}), (in_processes(2, layer_by_layer, main, two), {}))
    assert Path(f"{one.out}/samples.jsonl").read_text() == Path(f"{two.out}/samples.jsonl").read_text()


@pytest.mark.parametrize("name", slow_but([]))
def test_four_processes_give_the_run_of_one(name):
    assert_same(train(name, 1), train(name, 4))


# ---- Log-probs ------------------------------------------------------------------------------------------------------

GROUPS = [((5, 9, 33), [(60, 12, 7), (90, 41)]), ((8, 3), [(77, 21, 4, 96)]), ((8, 3, 71, 14), [(2,), (9, 9), (1,)])]


def logps_and_gradients(name, layout=None, checkpointing=False, dtype="float32"):
    """Of the sum of squares of all log-probs; with a layout of processes each of them does its share."""
    model = make(name)
    if dtype == "bfloat16":
        model = model.bfloat16().float()  # as a checkpoint in bfloat16 is loaded
    if layout:
        mesh = init_device_mesh("cpu", layout, mesh_dim_names=("copies", "parts")[-len(layout):])
        refcache.shard(model, mesh, dtype)
    if checkpointing:
        dpo.checkpoint_layers(model)
    model.requires_grad_(True)
    found = {}
    for micro in micro_batches(model, GROUPS, 12, *refcache.processes()):
        logps = completion_logprobs(model, [GROUPS[i] for i in micro or [0]], dtype=dtype)
        loss = sum((y ** 2).sum() for ys in logps for y in ys)
        (loss * bool(micro)).backward()
        found |= {i: [y.detach() for y in ys] for i, ys in zip(micro, logps)}
    found = {i: ys for part in refcache.all_gather(found) for i, ys in part.items()}
    gradients = {key: refcache.full_tensor(p.grad) for key, p in model.named_parameters() if p.grad is not None}
    return torch.cat([y for i in sorted(found) for y in found[i]]), gradients


def in_two(layout, *args):
    dist.init_process_group()
    return logps_and_gradients(args[0], layout, *args[1:])


@pytest.mark.parametrize("layout", [(2,), (2, 1)], ids=["fsdp", "ddp"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma2-softcaps", "glm4-moe-buffer", "mamba"])
def test_log_probs_and_gradients_of_split_models_are_those_of_whole_ones(name, layout):
    logps, gradients = logps_and_gradients(name)
    theirs, sums = in_processes(2, in_two, layout, name)
    assert torch.allclose(logps, theirs, atol=2e-6)
    assert gradients.keys() == sums.keys()
    largest = max(g.abs().max() for g in gradients.values())
    assert all((g - sums[key]).abs().max() < 2e-6 * largest for key, g in gradients.items())


@pytest.mark.parametrize("layout", [(2,), (2, 1)], ids=["fsdp", "ddp"])
def test_checkpointed_layers_of_split_models_are_exact(layout):
    logps, gradients = logps_and_gradients("llama-tied")
    theirs, sums = in_processes(2, in_two, layout, "llama-tied", True)
    assert torch.allclose(logps, theirs, atol=2e-6)
    assert all(torch.allclose(g, sums[key], rtol=1e-5, atol=1e-4) for key, g in gradients.items())


@pytest.mark.parametrize("layout", [(2,), (2, 1)], ids=["fsdp", "ddp"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_bfloat16_log_probs_of_split_models_are_the_same(layout, checkpointing):
    """Layers gathered in bfloat16 give what autocast makes of whole ones in float32; gradients are summed otherwise."""
    logps, gradients = logps_and_gradients("llama-tied", None, checkpointing, "bfloat16")
    exact, _ = logps_and_gradients("llama-tied")
    theirs, sums = in_processes(2, in_two, layout, "llama-tied", checkpointing, "bfloat16")
    assert (logps - theirs).abs().mean() < 0.2 * (logps - exact).abs().mean()
    assert all((g - sums[key]).norm() < 0.02 * g.norm() for key, g in gradients.items())


def test_micro_batches_of_processes_are_equally_many_and_full_and_hold_everything():
    model, random = make("llama"), np.random.default_rng(0)
    for ranks in (1, 2, 3, 4, 8):
        for rows in (1, 2, 7, 64):
            groups = [(tuple([1] * n), [(2,) * int(random.integers(1, 60))]) for n in random.integers(1, 200, rows)]
            shares = [micro_batches(model, groups, 600, rank, ranks) for rank in range(ranks)]
            batches = [batch for share in shares for batch in share]
            assert len({len(share) for share in shares}) == 1
            assert sorted(i for batch in batches for i in batch) == list(range(rows))
            loads = [sum(len(x) + len(ys[0]) for x, ys in (groups[i] for i in batch)) for batch in batches]
            assert max(loads) <= 600
            if rows >= 8 * ranks:
                assert max(loads) < 1.25 * np.mean(loads)


def test_a_process_keeps_only_the_log_probs_it_will_ask_for():
    cache, model = ReferenceCache(), make("llama")
    cache.score(model, GROUPS)
    cache.keep_share(model, [GROUPS[:1], [], [(GROUPS[2][0], [(9, 9)])]], 64)
    assert sorted(cache) == sorted([(GROUPS[0][0], (60, 12, 7)), (GROUPS[0][0], (90, 41)), (GROUPS[2][0], (9, 9))])


# ---- Checkpoints ----------------------------------------------------------------------------------------------------

def start_and_stop(name, n, out):
    """Two of three steps, as if SIGTERM had come; the arguments to go on."""
    script, args = flags_of(name, out=out, save_every=1)
    module = SCRIPTS[script]
    log = module.Log.write

    def write(self, values, samples):
        log(self, values, samples)
        if values["step"] == 2 and refcache.processes()[0] == n - 1:  # one process alone gets the signal
            os.kill(os.getpid(), signal.SIGTERM)

    def stop():
        module.Log.write = write
        try:
            module.main(args)
        except module.Stopped as error:
            return error.__notes__[0]
        finally:
            module.Log.write = log
        return "not stopped"

    assert "step 2 is saved" in (stop() if n == 1 else in_processes(n, stop))
    return module, args


@pytest.mark.parametrize("name, before, after", [
    ("dpo", 2, 2), *(pytest.param("dpo-sync", *n, marks=pytest.mark.slow) for n in ((2, 1), (1, 2))),
    pytest.param("kto", 4, 2, marks=pytest.mark.slow), pytest.param("rloo-sync", 2, 4, marks=pytest.mark.slow),
    pytest.param("dpo-lora", 2, 2, marks=[pytest.mark.slow, needs_peft]),
    pytest.param("dpo-lora", 2, 1, marks=[pytest.mark.slow, needs_peft])])
def test_runs_go_on_with_the_same_or_another_number_of_processes(name, before, after, tmp_path):
    whole_run = train(name, after)
    module, args = start_and_stop(name, before, str(tmp_path / "out"))
    history = module.main(args) if after == 1 else in_processes(after, module.main, args)
    rest = history, weights_of(f"{args.out}/model"), args
    if before == after:
        assert whole_run[0] == history
        assert all(torch.equal(weights, rest[1][key]) for key, weights in whole_run[1].items())
    assert_same(whole_run, rest)
    assert history == module.read_lines(Path(args.out) / "metrics.jsonl")


# ---- Faults ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("flag, value, name", [("data", "eval_data", "rows"), ("tokens_per_forward", 99, "tokens_per"),
                                               ("steps", 2, "steps")])
def test_processes_with_different_rows_or_flags_are_refused(flag, value, name):
    """Some flags change no result, but processes with different ones would wait for each other for ever."""
    args = arguments("dpo", ref="none", schedule="constant")
    other = replace(args, **{flag: vars(args).get(value, value)})

    with pytest.raises(BadInput, match=f"the processes differ in .*{name}"):
        in_processes(2, lambda: dpo.main(other if os.environ["RANK"] == "1" else args))


def test_different_cache_files_are_refused(tmp_path):
    def fill():
        dist.init_process_group()
        cache = ReferenceCache()
        prompt, y = ((8, 3), (77, 21, 4, 96)) if refcache.processes()[0] else ((8, 3, 71, 14), (9, 9))  # equally many
        cache.table[refcache.bytes_of(prompt)] = {refcache.bytes_of(y): bytes(4 * len(y))}
        cache.fill(lambda: make("llama"), GROUPS, path=tmp_path / "c.pkl")

    with pytest.raises(BadInput, match="do all of them read the same"):
        in_processes(2, fill)


def test_a_number_that_is_not_finite_on_one_process_stops_all():
    args = arguments("dpo", batch_size=5)

    def diverge():
        measure = dpo.measure

        def broken(*args):
            batch = measure(*args)
            return batch._replace(ratio_w=batch.ratio_w * math.nan) if refcache.processes()[0] == 1 else batch

        dpo.measure = broken
        try:
            dpo.main(args)
        except dpo.Stopped as error:
            return str(error)

    assert "loss is nan" in in_processes(2, diverge)


def test_the_reference_is_split_while_it_scores_and_then_gone():
    def fill():
        dist.init_process_group()
        alive, sizes = [], []

        def load_model():
            model = make("llama-tied")
            refcache.shard(model, init_device_mesh("cpu", (2,), mesh_dim_names=("parts",)))
            sizes.append(sum(refcache.local(p).numel() for p in model.parameters()) / model.num_parameters())
            alive.append(weakref.ref(model))
            return model

        cache = ReferenceCache()
        cache.fill(load_model, GROUPS)
        return {key: cache[key] for key in cache}, refcache.all_gather([sizes[0], alive[0]() is None])

    known, told = in_processes(2, fill)
    one = ReferenceCache()
    one.fill(lambda: make("llama-tied"), GROUPS)
    assert all(size < 0.6 and gone for size, gone in told)
    assert known.keys() == set(one)
    assert all(np.allclose(known[key], one[key], atol=2e-6) for key in one)


# ---- torchrun -------------------------------------------------------------------------------------------------------

def torchrun(tmp_path, *flags, act=None):
    """What two processes print, and the exit codes that torchrun names. act(processes) is called after two steps."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "dpo.py", "--out",
               str(tmp_path / "out"), *flags]
    run = subprocess.Popen(command, cwd=Path(dpo.__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    lines, metrics = [], tmp_path / "out/metrics.jsonl"
    reader = threading.Thread(target=lambda: lines.extend(run.stdout))
    reader.start()
    while act and run.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.05)
    if act:
        children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True).stdout.split()
        act(run, list(map(int, children)))
    began = time.monotonic()
    run.wait(120)
    reader.join()
    return [line for line in lines if line.startswith("dpo.py: ")], "".join(lines), time.monotonic() - began


@pytest.mark.slow
def test_torchrun_says_bad_input_once_and_all_processes_exit_with_code_2(tmp_path):
    said, text, _ = torchrun(tmp_path, "--model", "demo/model", "--data", "no.jsonl")
    assert said == ["dpo.py: no.jsonl: there is no such file\n"]
    assert "exitcode  : 2" in text and "Traceback" not in text.split("torch/distributed")[0]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_run_and_the_same_command_goes_on(tmp_path, rank):
    flags = ["--steps", "60", "--save_every", "1"]
    said, _, seconds = torchrun(tmp_path, *flags, act=lambda run, children: os.kill(children[rank], signal.SIGKILL))
    assert seconds < 60
    assert rank == 0 or said == [said[0]] and "another process has died" in said[0]
    _, text, _ = torchrun(tmp_path, *flags)
    assert "60 steps of 32 pairs" in text
    assert [line["step"] for line in dpo.read_lines(tmp_path / "out/metrics.jsonl")] == list(range(61))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_passes_a_signal_on_and_the_step_is_saved_and_said_once(tmp_path, number):
    said, _, seconds = torchrun(tmp_path, "--steps", "500", act=lambda run, children: run.send_signal(number))
    assert seconds < 60 and len(said) == 1 and "is saved: run the same command to resume" in said[0]
    lines = dpo.read_lines(tmp_path / "out/metrics.jsonl")
    assert dpo.read_checkpoint(tmp_path / "out", {})["step"] == lines[-1]["step"]
