"""demo/sums.py and demo/get_model.py: data, reward and model of the README's hello world."""
import json
import runpy
import sys

import pytest
from runs import ROOT, TOKENIZER, read

SUMS = runpy.run_path(str(ROOT / "demo/sums.py"))


def test_no_sum_is_in_both_files_and_the_answers_are_right(tmp_path):
    SUMS["main"](tmp_path)
    questions = {}
    for suffix in ("", "_test"):
        prompts, pairs, rated = (read(f"{tmp_path}/{name}{suffix}.jsonl") for name in ("prompts", "pairs", "rated"))
        questions[suffix] = {json.dumps(row["prompt"]) for row in prompts}
        assert questions[suffix] == {json.dumps(row["prompt"]) for row in pairs + rated}

        for name, expected in (("chosen", 1.0), ("rejected", 0.0)):
            assert {SUMS["right"]([], [row[name]], [row["answer"]])[0] for row in pairs} == {expected}
        rewards = SUMS["right"]([], [row["completion"] for row in rated], [row["answer"] for row in rated])
        assert rewards == [float(row["label"]) for row in rated]
    assert questions[""] and questions["_test"] and not questions[""] & questions["_test"]


def test_gemma_needs_its_terms_to_be_accepted(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["get_model.py", "gemma3", str(tmp_path / "model")])
    with pytest.raises(SystemExit, match="--accept_gemma_terms"):
        runpy.run_path(str(ROOT / "demo/get_model.py"), run_name="__main__")


def test_plain_template_ends_answers_and_keeps_prompts():
    template = runpy.run_path(str(ROOT / "demo/get_model.py"))["PLAIN_TEMPLATE"]
    chat = [{"role": "user", "content": "3 + 5?"}, {"role": "assistant", "content": "8"}]
    prompt, whole = (
        TOKENIZER.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=begins)
        for messages, begins in ((chat[:1], True), (chat, False)))
    assert prompt.endswith("User: 3 + 5?\nAssistant:") and whole == f"{prompt} 8{TOKENIZER.eos_token}\n"


def test_frontier_ranks_samples_and_holds_things_out(tmp_path):
    frontier = runpy.run_path(str(ROOT / "demo/frontier.py"))
    frontier["write_prompts"](tmp_path)
    train, held_out = (read(tmp_path / f"{name}.jsonl") for name in ("prompts", "prompts_test"))
    assert len(train) == 252 and len(held_out) == 48
    assert not any("the sea at night" in str(row) for row in train)

    rewards = [[0.1, 0.7, -0.4], [0.5, 0.5, 0.5]]  # the second prompt has no best sample
    samples = [train[i] | {"completion": str(x), "reward": x} for i in range(2) for x in rewards[i]]
    frontier["write_pairs"](tmp_path, samples)
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("0.7", "-0.4"))
    assert read(tmp_path / "pairs.jsonl") == [train[0] | {"chosen": chosen, "rejected": rejected}]
    assert [row["label"] for row in read(tmp_path / "rated.jsonl")] == [True, False]


def test_frontier_rewards_positive_sentences():
    pytest.importorskip("vaderSentiment")
    positive = runpy.run_path(str(ROOT / "demo/frontier.py"))["positive"]
    good, bad = positive([[{"role": "assistant", "content": text}] for text in ("A lovely day.", "A horrible day.")])
    assert good > 0.5 and bad < -0.5
