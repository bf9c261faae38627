"""demo/sums.py and frontier.py: data and rewards of the README's examples."""
import json
import runpy

from runs import ROOT, read, said


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


def test_frontier_ranks_samples_and_holds_things_out(tmp_path):
    frontier = runpy.run_path(str(ROOT / "demo/frontier.py"))
    frontier["write_prompts"](tmp_path)
    train, held_out = (read(tmp_path / f"{name}.jsonl") for name in ("prompts", "prompts_test"))
    assert len(train) == 252 and len(held_out) == 48
    assert not any("the sea at night" in str(row) for row in train)

    samples = [train[0] | {"completion": str(reward), "reward": reward} for reward in (0.1, 0.7, -0.4)]
    frontier["write_pairs"](tmp_path, samples)
    assert read(tmp_path / "pairs.jsonl") == [train[0] | {"chosen": said("0.7"), "rejected": said("-0.4")}]
    assert [row["label"] for row in read(tmp_path / "rated.jsonl")] == [True, False]
