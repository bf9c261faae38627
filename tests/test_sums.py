"""demo/sums.py and demo/get_smollm2.py: data, reward and model of the README's hello world."""
import json
import runpy
import subprocess
import sys

import pytest
from runs import ROOT, read

import rloo

SUMS = runpy.run_path(str(ROOT / "demo/sums.py"))


def test_files_have_no_sum_in_both_and_right_answers(tmp_path):
    SUMS["main"](tmp_path)
    questions = {}
    for suffix in ("", "_test"):
        prompts, pairs, rated = (read(tmp_path / f"{name}{suffix}.jsonl") for name in ("prompts", "pairs", "rated"))
        questions[suffix] = {json.dumps(row["prompt"]) for row in prompts}
        assert questions[suffix] == {json.dumps(row["prompt"]) for row in pairs + rated}

        for answer_of, expected in (("chosen", 1.0), ("rejected", 0.0)):
            answers = [row[answer_of] for row in pairs]
            assert set(SUMS["right"]([], answers, [row["answer"] for row in pairs])) == {expected}
        rewards = SUMS["right"]([], [row["completion"] for row in rated], [row["answer"] for row in rated])
        assert rewards == [float(row["label"]) for row in rated]
    assert questions[""] and questions["_test"] and not questions[""] & questions["_test"]


@pytest.mark.slow
def test_rloo_teaches_sums_to_a_real_chat_model(tmp_path):
    folder = tmp_path / "smollm2"
    made = subprocess.run([sys.executable, ROOT / "demo/get_smollm2.py", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"the model cannot be made here: {made.stderr[-300:]}")
    assert "The capital of France is Paris." in made.stdout

    SUMS["main"](tmp_path)
    history = rloo.main(rloo.Args(
        model=str(folder), data=f"{tmp_path}/prompts.jsonl", eval_data=f"{tmp_path}/prompts_test.jsonl",
        reward=(f"{ROOT}/demo/sums.py:right",), out=f"{tmp_path}/out", k=8, lr=5e-6, beta=0.01, max_new_tokens=12,
        steps=12, schedule="constant", dtype="bfloat16", save_every=0))
    assert history[-1]["eval_reward"] >= 2 * history[0]["eval_reward"] > 0
