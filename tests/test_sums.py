"""demo/sums.py: data and reward of the README's example."""
import json
import runpy

from runs import ROOT, read


def test_no_sum_is_in_both_files_and_the_answers_are_right(tmp_path):
    sums = runpy.run_path(str(ROOT / "demo/sums.py"))
    sums["main"](tmp_path)
    questions = {}
    for suffix in ("", "_test"):
        prompts, pairs, rated = (read(f"{tmp_path}/{name}{suffix}.jsonl") for name in ("prompts", "pairs", "rated"))
        questions[suffix] = {json.dumps(row["prompt"]) for row in prompts}
        assert questions[suffix] == {json.dumps(row["prompt"]) for row in pairs + rated}
        for name, expected in (("chosen", 1.0), ("rejected", 0.0)):
            assert {sums["right"]([], [row[name]], [row["answer"]])[0] for row in pairs} == {expected}
        rewards = sums["right"]([], [row["completion"] for row in rated], [row["answer"] for row in rated])
        assert rewards == [float(row["label"]) for row in rated]
    assert questions[""] and questions["_test"] and not questions[""] & questions["_test"]
