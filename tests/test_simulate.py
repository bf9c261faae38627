"""main() of every script on a simulated GPU: devices, waits of the host, kernels. And what the simulation counts."""
import contextlib
import io
import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent


def import_simulate():
    for name in ("dpo", "kto", "rloo", "refcache"):
        del sys.modules[name]  # conftest.py has changed them
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import simulate
    return simulate


def count():
    """What is counted in a run of every script, and in a few operators."""
    simulate = import_simulate()
    from simulate import FakeGPU, dpo, torch
    args = simulate.Args(median=20, tiny=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        simulate.main(args, [])
    with FakeGPU("H100") as gpu, gpu.measure() as found:
        x = torch.ones(256, 512).to("cuda")
        y = x @ x.T
        y.sum().item()
        torch.arange(9).pin_memory().to("cuda", non_blocking=True)
        try:
            y + torch.ones(256, 256)
        except RuntimeError as error:
            found.error = str(error)
    memory = memory_of_steps(simulate, replace(args, what="dpo", model="tiny", tokens=1000))
    pairs = [len(simulate.random_rows(dpo, replace(args, tokens=n))) for n in (1000, 2000)]
    others = {"graph": count_graph(simulate), "pairs": pairs, "phases": phases_of(printed.getvalue())}
    return vars(found) | memory | others


def phases_of(table):
    """(script, phase) -> [(kernels, waits), ..] of its runs."""
    phases = {}
    for line in table.splitlines()[2:]:
        flags, phase, kernels, waits = line.strip("| ").replace(",", "").split(" | ")[:4]
        phases.setdefault((flags.split()[0], phase), []).append((int(kernels), int(waits)))
    return phases


def count_patched(folder):
    """The phases of rloo.py with changes/cuda_graph.patch."""
    for file in ROOT.glob("*.py"):
        shutil.copy(file, folder)
    with open(ROOT / "changes/cuda_graph.patch") as patch:
        subprocess.run(["patch", "-d", folder, "-s"], stdin=patch, check=True)
    os.environ["CHECKOUT"] = str(folder)
    simulate = import_simulate()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        args = simulate.Args("rloo", model="tiny", tokens=300, median=20)
        simulate.main(args, ["--k", "2", "--max_new_tokens", "20"])
    table, _, _ = printed.getvalue().rpartition("a rollout takes")
    return phases_of(table)


def count_graph(simulate):
    """Kernels and waits of a product that is recorded and repeated twice; and the error of one that waits."""
    torch = simulate.torch
    with simulate.FakeGPU("H100") as gpu, gpu.measure() as found:
        x = torch.ones(4096, 4096, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x @ x
        recorded = found.peak - found.before
        graph.replay()
        graph.replay()
    with simulate.FakeGPU("H100") as gpu, pytest.raises(RuntimeError) as error:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones(3, device="cuda").sum().item()
    return dict(counts=found.counts, waits=found.waits, peak=recorded, error=str(error.value), refused=gpu.forbidden)


def memory_of_steps(simulate, args):
    """Bytes at the peak of dpo.py's steps: plain, with gradient checkpointing, with three times the tokens; and the
    lines of metrics.jsonl."""
    lines = []
    append = simulate.dpo.append
    simulate.dpo.append = lambda path, new: lines.extend(new) or append(path, new)

    def peak(*flags, **changes):
        return dict(simulate.run(replace(args, **changes), list(flags)))["step"].peak

    return dict(peaks=[peak(), peak("--gradient_checkpointing"), peak(tokens=3000)], lines=lines)


def in_a_fork(function, *inputs):
    if torch.version.cuda:
        pytest.skip("the simulated GPU takes the place of CUDA in a CPU build of torch")
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as fork:  # with everything imported
        return fork.submit(function, *inputs).result()


@pytest.fixture(scope="module")
def found():
    """What was counted by hand, and the phases of all scripts."""
    return in_a_fork(count)


def test_simulation_counts_what_a_hand_counts(found):
    assert found["counts"]["kernels"] == 4 and found["counts"]["flops"] == 2 * 256 * 512 * 256
    assert found["waits"] == ["copy to the GPU", "_local_scalar_dense"]
    assert found["before"] == 0 and found["peak"] == 4 * (256 * 512 + 256 * 256) + 8 * 9
    assert "cuda:0" in found["error"] and "cpu" in found["error"]


def test_graph_is_counted_once_and_repeated(found):
    graph = found["graph"]
    assert graph["counts"]["kernels"] == 1 + 2 and graph["waits"] == ["capture"]  # torch.ones, then two products
    assert graph["peak"] == 2 * 4 * 4096 ** 2
    assert "synchronizing" in graph["error"] and graph["refused"] == ["_local_scalar_dense"]


def test_checkpointing_saves_memory_and_tokens_need_it(found):
    plain, with_checkpointing, of_3000_tokens = found["peaks"]
    assert with_checkpointing < 0.9 * plain and 1.5 * plain < of_3000_tokens < 3 * plain
    assert all("memory_gb" in line for line in found["lines"] if line["step"])


SWAP = 2 * 12  # waits: each of the 12 weights is copied from the CPU, and to it


@pytest.mark.parametrize("script, phase, most", [
    ("dpo", "run_batch", 1), ("dpo", "compute", 1), ("dpo", "step", 3 + 2 * SWAP), ("kto", "compute", 1),
    ("kto", "run_batch", 2), ("kto", "step", 3), ("rloo", "compute_logprobs", 2 * SWAP), ("rloo", "run_batch", 1),
    ("rloo", "rollout", 7 + 20)])
def test_waits_for_the_gpu(script, phase, most, found):
    """Each wait costs time; without one, the CPU would read copies that are not complete."""
    assert max(waits for _, waits in found["phases"][script, phase]) == most


def test_graph_of_the_patch_waits_for_nothing(tmp_path):
    phases = in_a_fork(count_patched, tmp_path)
    ((_, waits),) = phases["rloo", "graph of a token"]
    assert waits == 0
    assert max(waits for _, waits in phases["rloo", "rollout"]) < 12, "not one for each of 20 tokens"


def test_no_kernel_per_row(found):
    phases = found["phases"]
    small, large = found["pairs"]
    assert large >= small + 10
    (few, _), (many, _) = phases["dpo", "compute"]
    assert many == few
    (few, _), (many, _) = phases["dpo", "run_batch"]
    assert many - few <= 6 * (large - small)  # the sums over each answer's tokens
