"""Every benchmark runs with tiny sizes; docs/trl.md and docs/cache.md are true."""
import os
import re
import subprocess
import sys

import pytest
from models import parametrize
from runs import ROOT, load
from test_scripts import blocks

from refcache import ReferenceCache


def start(name, *flags):
    command = [sys.executable, f"{ROOT}/benchmarks/{name}.py", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@parametrize("line, row", [
    (f"against_trl --tiny --works rloo --baseline {ROOT}", "| rloo 16+4, k=2 | baseline | "),
    ("against_trl --tiny", "| reference | trl + cache | "),
    ("gpu numbers --tiny", "ok    a saved model, loaded again | max_nats 0,"),
    ("gpu speed --tiny", "tiny, rloo.py, k=8 | "), ("gpu trl --tiny", "| dpo | trl | "),
    ("trl_precompute 1", "learning_rate=2e-06 | yes |"), ("trl_precompute 7", "bf16=True | no | -9.9")])
def test_benchmark_prints_rows(line, row):
    if "trl" in line:
        pytest.importorskip("trl")
    assert row in start(*line.split())


@pytest.mark.slow
def test_plot_prints_the_table_of_a_real_model_and_draws_it(tmp_path):
    pytest.importorskip("matplotlib")
    table = start("plot", ROOT / "benchmarks/smollm2.json", "--out", tmp_path / "curves.png")
    assert "| reference pass of `dpo` | " in table and "runs: held-out reward" in table
    assert (tmp_path / "curves.png").exists()
    table = start("plot", *(ROOT / "benchmarks/runs").glob("*_sums"), "--out", tmp_path / "curves.png")
    assert re.search(r"\| eval_score \| 0\.\d+ ± 0\.\d+ \| ", table)


@pytest.mark.slow
def test_cache_becomes_columns_and_a_cache_again(tmp_path):
    datasets = pytest.importorskip("datasets")
    groups = [((5, 6), [(7, 8), (9,)]), ((5,), [(7,), (8, 9, 10)])]
    cache, names = ReferenceCache(reference="a"), {}
    cache.compute(load(), groups)
    exec(blocks("docs/trl.md")[2], names)

    rows = [dict(prompt_ids=x, chosen_ids=w, rejected_ids=l) for x, (w, l) in groups]
    names["add_columns"](datasets.Dataset.from_list(rows), cache).save_to_disk(tmp_path)
    published = datasets.load_from_disk(tmp_path)
    for row, (x, (w, l)) in zip(published, groups):
        assert (row["ref_chosen_logps"], row["ref_rejected_logps"]) == (cache[x, w].sum(), cache[x, l].sum())
    assert names["read_columns"](published, reference="a").table == cache.table


@pytest.mark.slow
def test_example_of_trl_page_runs(tmp_path):
    pytest.importorskip("trl")
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    command = [sys.executable, "-c", "".join(blocks("docs/trl.md")[:2])]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    assert (tmp_path / "out/trl/checkpoint-10/model.safetensors").exists()
