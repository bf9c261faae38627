"""main() of every script on a simulated GPU: devices, waits of the host, kernels. And what the simulation counts."""
import contextlib
import io
import multiprocessing
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def count():
    """What is counted in a run of every script, and in a few operators."""
    for name in ("dpo", "kto", "rloo", "refcache"):
        del sys.modules[name]  # conftest.py has changed them
    sys.path.insert(0, str(BENCHMARKS))
    import simulate
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
    others = {"graph": count_graph(simulate), "pairs": pairs, "table": printed.getvalue().splitlines()}
    return vars(found) | memory | others


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
    """Bytes of dpo.py's steps, before and at the peak; what step_memory said of GPUs of 80 GB; metrics.jsonl."""
    shares, lines = [], []
    step_memory, append = simulate.dpo.step_memory, simulate.dpo.append

    def remembered(*inputs):
        memory = step_memory(*inputs)
        shares.append(memory.used)
        return memory

    simulate.dpo.step_memory = remembered
    simulate.dpo.append = lambda path, new: lines.extend(new) or append(path, new)

    def step(size=80, checkpointing="auto", **changes):
        simulate.GPUS["H100"] = (size, *simulate.GPUS["A100"][1:])
        return dict(simulate.run(replace(args, **changes), ["--gradient_checkpointing", checkpointing]))["step"]

    steps = [step(checkpointing="off"), step(checkpointing="on"), step(tokens=3000)]
    steps += [step(80 * shares[0] / used) for used in (0.84, 0.86)] + [step(80 * shares[0], "off")]
    return dict(shares=shares[:3], befores=[one.before for one in steps], peaks=[one.peak for one in steps],
                lines=lines)


@pytest.fixture(scope="module")
def found():
    """(script, phase) -> [(kernels, waits), ..] of its runs; and what was counted by hand."""
    if torch.version.cuda:
        pytest.skip("the simulated GPU takes the place of CUDA in a CPU build of torch")
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as fork:  # with everything imported
        result = fork.submit(count).result()
    phases = {}
    for line in result["table"][2:]:
        flags, phase, kernels, waits = line.strip("| ").replace(",", "").split(" | ")[:4]
        phases.setdefault((flags.split()[0], phase), []).append((int(kernels), int(waits)))
    return result | {"phases": phases}


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


def test_memory_is_said_and_saved_where_it_is_short(found):
    off, on, _, large, small, forced = found["peaks"]
    assert on == small < off == large == forced, "auto: from 85 % of the GPU on"
    share, _, of_3000_tokens = found["shares"]
    assert share < of_3000_tokens < 3 * share and of_3000_tokens * 80e9 < found["peaks"][2]
    without_tokens = (3 * share - of_3000_tokens) / 2 * 80e9
    assert without_tokens == pytest.approx(found["befores"][0] * 4 / 3, rel=1e-3), "weights, gradients, Adam"
    assert all("memory_gb" in line for line in found["lines"] if line["step"])


@pytest.mark.parametrize("script, phase, most", [
    ("dpo", "run_batch", 1), ("dpo", "score", 1), ("dpo", "step", 5), ("kto", "score", 1),
    ("kto", "run_batch", 2), ("kto", "step", 3), ("rloo", "score_reference", 0), ("rloo", "run_batch", 2),
    ("rloo", "rollout", 8), ("rloo", "graph of a token", 0)])
def test_waits_for_the_gpu(script, phase, most, found):
    """Each wait costs time; without one, the CPU would read copies that are not complete."""
    assert max(waits for _, waits in found["phases"][script, phase]) == most


def test_no_kernel_per_row(found):
    phases = found["phases"]
    small, large = found["pairs"]
    assert large >= small + 10
    (few, _), (many, _) = phases["dpo", "score"]
    assert many == few
    (few, _), (many, _) = phases["dpo", "run_batch"]
    assert many - few <= 6 * (large - small)  # the sums over each answer's tokens
