"""dpo.py from end to end, and what kto.py has in common with it: files, reference, samples, what is refused."""
import gc
import json
import math
import weakref
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import bad_input, parametrize
from runs import (
    BOTH, EACH, ROOT, SCRIPTS, TOKENIZER, arguments, data, distance, load, read, run, same, same_metrics, tiny,
    without_speed)
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo
from dpo import Args, generate, learning_rate, load_rows, rows_in_order, write_samples
from refcache import ReferenceCache, checkpoint_digest

FIRST = dict(eval_every=2, samples=2, max_new_tokens=4, save_every=50, score=f"{ROOT}/demo/score.py:success")


def pair(whole_prompt, **columns):
    """A row whose answers are one token each."""
    return dpo.Row(whole_prompt, (4,), (5,), (0, 0), whole_prompt, columns)


# --- A run, and what it leaves

def test_losses_of_step_0_are_weighted_and_accuracies_are_a_half():
    """At the reference ipo is 1 / (2 β)², and sigmoid ln 2."""
    before, first = run(steps=1, loss=("ipo", "sigmoid"), loss_weights=(0.5, 1.0)).history
    assert [before["eval_loss"], first["loss"]] == pytest.approx([0.5 * 25 + math.log(2)] * 2, abs=1e-3)
    assert before["eval_rewards/accuracies"] == first["rewards/accuracies"] == 0.5


def test_files_of_a_finished_run():
    first = run(**FIRST)
    names = {file.name for file in first.out.iterdir()} - {".lock-0", "reference_logprobs.pkl.lock"}
    assert names == {"model", "metrics.jsonl", "samples.jsonl", "args.json", "reference_logprobs.pkl"}  # no checkpoint
    lines = read(first.out / "metrics.jsonl")
    assert without_speed(lines) == first.history
    assert [(line["step"], "eval_loss" in line) for line in lines] == [(0, True), (1, False), (2, True), (3, True)]
    rows = load_rows(first.args.eval_data, TOKENIZER, first.args)[:2]
    samples = [(sample["step"], sample["prompt"], sample["score"]) for sample in read(first.out / "samples.jsonl")]
    assert samples == [(step, TOKENIZER.decode(row.whole_prompt), 0.0) for step in (0, 2, 3) for row in rows]
    assert AutoModelForCausalLM.from_pretrained(first.model).config._attn_implementation == "sdpa"
    assert AutoTokenizer.from_pretrained(first.model).chat_template == TOKENIZER.chat_template


@EACH
def test_every_metric_is_explained(script):
    out = run(script, **{} if script == "rloo" else FIRST).out
    names = {name for line in read(out / "metrics.jsonl") for name in line} - {"step"}
    reward = "eval_reward" if script == "rloo" else "eval_score"
    assert {"learning_rate", "grad_norm", "tokens_per_second", "samples/distinct", reward} <= names
    text = SCRIPTS[script].__doc__.replace("NAME", "letters")
    assert not [name for name in names if name.removeprefix("eval_") not in text]


@parametrize("script, tokens", [("dpo", 90), ("kto", 40)])
def test_memory_flags_change_memory_only(script, tokens):
    flags = dict(tokens_per_forward=tokens, gradient_checkpointing=True)  # every batch is divided
    assert same(run(script, **FIRST), run(script, **FIRST, **flags), 1e-4)


@EACH
def test_a_forward_that_only_fsdp_needs_counts_nothing(script, monkeypatch):
    expected, module = run(script).history, SCRIPTS[script]
    monkeypatch.setattr(module, "micro_batches", lambda *inputs, original=module.micro_batches: (
        [*original(*inputs), ([0], 0.0)]))
    assert same_metrics(without_speed(module.main(arguments(script))), expected)


@parametrize("script", ["dpo", "rloo"])
def test_report_shows_answers_and_metrics_before_and_now(script, tmp_path, capsys):
    metrics = [dict(step=0, a="low", b=None, c=1.5), dict(step=1, d=0), dict(step=2, a=[1], b=2, c=-0.25)]
    samples = []
    for step, prompt in product(range(3), ("p" * 80, "q" * 81, "r", "s")):
        message = [{"role": "user", "content": prompt}] if script == "rloo" else prompt
        samples.append(dict(step=step, prompt=message, completion=f"{prompt[0]}{step}", held_out=True))
    for name, lines in dict(metrics=metrics, samples=samples).items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))

    assert SCRIPTS[script].report(tmp_path) == metrics
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:9] == [
        f"prompt '{'p' * 80}'", "before 'p0'", "now 'p2'",
        f"prompt '…{'q' * 79}'", "before 'q0'", "now 'q2'",
        "prompt 'r'", "before 'r0'", "now 'r2'"]
    assert lines[10:13] == ["a low [1]", "b None 2.000", "c 1.500 -0.250"]


@EACH
def test_every_step_has_a_random_state_of_its_own(script, monkeypatch):
    found = []
    monkeypatch.setattr(SCRIPTS[script], "learning_rate", lambda *_: found.append(torch.initial_seed()) or 0.0)
    SCRIPTS[script].main(arguments(script, steps=2, seed=70, max_new_tokens=2))
    assert found == [71, 72]


@EACH
def test_max_grad_norm_0_does_not_clip(script):
    one, two, clipped = (run(script, steps=1, max_grad_norm=bound) for bound in (0.0, 1e9, 1e-9))
    assert same(one, two) and distance(one, clipped) > 1e-3
    assert one.history[1]["grad_norm"] == clipped.history[1]["grad_norm"] > 0.01


# --- The reference

@parametrize("flags, models", [
    ({}, [(False, 1), (True, 1)]), (dict(ref="none"), [(True, 1)]),
    (dict(loss=("simpo", "sft"), ref="swap"), [(True, 1)])])
def test_one_model_is_in_memory_and_a_reference_only_if_it_is_needed(monkeypatch, flags, models):
    loaded = []  # for each load_model: whether it loads the policy, and how many models are in memory then
    alive = weakref.WeakSet()

    def load_model(*rest, trains=False, original=dpo.load_model):
        model = original(*rest, trains=trains)
        alive.add(model)
        gc.collect()
        loaded.append((trains, len(alive)))
        return model

    monkeypatch.setattr(dpo, "load_model", load_model)
    args = arguments(steps=1, **flags)
    dpo.main(args)
    assert loaded == models
    assert len(list(Path(args.out).glob("*.pkl"))) == len(models) - 1


@BOTH
def test_steps_0_only_fills_the_cache(script, monkeypatch):
    args = arguments(script, steps=0, samples=2)
    assert SCRIPTS[script].main(args) == []
    files = {file.name for file in Path(args.out).iterdir()}
    assert "reference_logprobs.pkl" in files and not files & {"model", "metrics.jsonl", "samples.jsonl"}
    monkeypatch.setattr(ReferenceCache, "compute", None)
    assert len(SCRIPTS[script].main(replace(args, steps=1, samples=0))) == 2, "the same folder goes on"


@EACH
def test_steps_follow_from_epochs(script):
    assert len(run(script, steps=-1, epochs=0.6, batch_size=4).history) == 1 + 2


@BOTH
def test_only_what_the_run_needs_is_scored(script):
    """Of 12 rows those of two steps, and 3 held-out ones; two answers each."""
    cache = ReferenceCache(reference=checkpoint_digest(tiny()))
    cache.load(run(script, steps=2, batch_size=2).out / "reference_logprobs.pkl")
    assert len(cache) == 2 * (2 * 2 + 3)


@EACH
def test_log_probs_of_another_model_stop_the_run(script, monkeypatch):
    def load_another(name, *rest, trains=False, load_model=SCRIPTS[script].load_model):
        return load_model(name if trains else tiny(1), *rest, trains=trains)

    monkeypatch.setattr(SCRIPTS[script], "load_model", load_another)
    with bad_input("differ by"):
        SCRIPTS[script].main(arguments(script, ref="live"))


# --- Order, held-out rows, learning rate

def test_batches_are_permutations():
    rows = list(range(10))
    order = rows_in_order(rows, 30, seed=0)
    assert order == rows_in_order(rows, 30, seed=0) != rows_in_order(rows, 30, seed=1)
    epochs = order[:10], order[10:20], order[20:]
    assert epochs[0] != epochs[1]
    assert [sorted(epoch) for epoch in epochs] == [rows] * 3


def test_held_out_rows_are_few_and_do_not_depend_on_the_seed(monkeypatch):
    rows = [pair((i,)) for i in range(90)]
    monkeypatch.setattr(dpo, "load_rows", lambda *rest: rows)

    def held_out(size, seed=0):
        return dpo.load_data(None, Args(model=tiny(), eval_size=size, seed=seed))[1]

    assert [len(held_out(size)) for size in (128, 3, 0)] == [9, 3, 0]
    assert held_out(3, seed=1) == held_out(3) != rows[:3]


@parametrize("schedule, warmup, steps, rates", [
    ("linear", 0.0, 4, [2.0, 1.5, 1.0, 0.5]),
    ("cosine", 0.0, 4, [2.0, 1.707, 1.0, 0.293]),
    ("constant", 0.0, 4, [2.0, 2.0, 2.0, 2.0]),
    ("cosine", 0.5, 4, [1.0, 2.0, 2.0, 1.0]),
    ("linear", 2.5, 3, [1.0, 2.0, 2.0]),  # from 1 on the warmup is a number of steps
    ("linear", 0.1, 16, [1.0, 2.0, 2.0]),  # 1.6 steps are 2
    ("linear", 0.1, 4, [2.0, 1.5])])  # 0.4 steps are none
def test_learning_rate_by_hand(schedule, warmup, steps, rates):
    args = Args(lr=2.0, warmup=warmup, schedule=schedule)
    found = [learning_rate(step, steps, args) for step in range(1, len(rates) + 1)]
    assert found == pytest.approx(rates, abs=1e-3)


# --- Answers to held-out prompts, and their scores

def answers_of(policy, prompts=((5, 9), (7, 8, 9)) * 10, seed=0, tokens=12):
    torch.manual_seed(seed)
    return generate(policy, TOKENIZER, list(prompts), Args(dtype="float32", max_new_tokens=tokens))


def test_generation_config_changes_no_answer():
    policy = load()
    plain = answers_of(policy)
    assert answers_of(policy, seed=1) != plain and len(set(plain)) > 10
    vars(policy.generation_config).update(temperature=0.1, top_k=1, repetition_penalty=5.0, max_length=3)
    assert answers_of(policy) == plain
    with pytest.raises(ValueError):
        answers_of(policy, tokens=0)
    assert policy.generation_config.top_k == 1, "it is saved with the model"


def test_longer_prompts_of_a_batch_change_no_answer():
    policy = load()
    policy.lm_head.weight.data.mul_(1e4)  # so each next token is certain
    prompts = [(5,), (9, 4, 7, 300), (7, 8), (60, 12, 7, 90, 41, 3)]
    assert answers_of(policy, prompts) == [answers_of(policy, [prompt])[0] for prompt in prompts]


def test_answers_are_of_the_whole_vocabulary():
    """transformers' default would keep 50 tokens of the 704, which are almost equally probable here."""
    policy = load()
    policy.lm_head.weight.data.mul_(1e-3)
    assert len(set(answers_of(policy, [(5, 9)] * 200, tokens=1))) > 100


def test_answers_hold_no_stop_token():
    policy = load()
    policy.generation_config.eos_token_id = list(range(300))
    answers = answers_of(policy)
    assert {type(answer) for answer in answers} == {tuple} and len({len(answer) for answer in answers}) > 3
    assert min(token for answer in answers for token in answer) >= 300


def sampled(tmp_path, score):
    """Means and lines of samples.jsonl, for two held-out prompts and this score."""
    args = Args(samples=2, score="score.py:rate", max_new_tokens=4)
    rows = load_rows(data("dpo")[1], TOKENIZER, args)
    rows[1].columns["answer"] = "42"
    means = write_samples(load(), TOKENIZER, rows, score, 0, tmp_path, args)
    return means, read(tmp_path / "samples.jsonl")


def test_scores_get_the_columns_of_all_rows_and_none_is_left_out_of_the_mean(tmp_path):
    means, lines = sampled(tmp_path, lambda answer, **columns: [0.25 if text is None else None for text in answer])
    assert (means["eval_score"], means["samples/distinct"]) == (0.25, 2)
    assert [(line["step"], line["score"]) for line in lines] == [(0, 0.25), (0, None)]


def test_a_score_gets_strings_and_messages_of_its_own():
    def score(prompts, completions, **columns):
        prompts[0].append("more")
        return [len(prompts[0]), completions[1] == "b"]

    rows = [pair((), prompt=[{"role": "user", "content": "q"}], completions="theirs"), pair((), prompt="q")]
    assert [dpo.score_answers(score, rows, ["a", "b"], Args()) for _ in range(2)] == [[2, 1], [2, 1]]


@BOTH
def test_score_is_tried_before_the_reference_pass(script, monkeypatch):
    calls = []
    module = SimpleNamespace(rate=lambda prompts, **columns: calls.append(prompts) or 1 / 0)
    monkeypatch.setattr(SCRIPTS[script], "load_module", lambda file: module)
    monkeypatch.setattr(ReferenceCache, "fill", None)
    with pytest.raises(ZeroDivisionError):
        SCRIPTS[script].main(arguments(script, score=f"{ROOT}/demo/score.py:rate"))
    assert calls == [[read(data(script)[1])[0]["prompt"]]]


@parametrize("answers, distinct, ended", [([(5,), (5,)], 1, 1), ([(5,) * 4, (6,) * 3], 2, 0.5)])
def test_answers_that_differ_and_that_end_are_counted(tmp_path, monkeypatch, answers, distinct, ended):
    """An answer of 4 tokens, --max_new_tokens, has no stop token."""
    monkeypatch.setattr(dpo, "generate", lambda *_: answers)
    means, _ = sampled(tmp_path, lambda **columns: [0, 0])
    assert means == {"eval_score": 0, "samples/distinct": distinct, "samples/ended": ended}


@parametrize("value", [{0: 1.0, 1: 2.0}, {1.0, 2.0}, "12", [1.0], [1.0] * 3], ids=str)
def test_what_is_no_list_of_numbers_is_refused(tmp_path, value):
    with bad_input("expected 2 numbers or None"):
        sampled(tmp_path, lambda **columns: value)


def test_each_whole_prompt_with_room_for_an_answer_gets_one(tmp_path, capsys):
    """The model has 256 positions. Rows of one prompt may begin their answers at different tokens."""
    row = pair((9,) * 5)
    rows = [row, row._replace(prompt=(9,)), pair((9,) * 6)]
    assert write_samples(load(), TOKENIZER, rows, None, 0, tmp_path, Args(max_new_tokens=251))
    assert len(read(tmp_path / "samples.jsonl")) == 1
    assert write_samples(load(), TOKENIZER, rows, None, 0, tmp_path, Args(max_new_tokens=252)) == {}
    assert "with room for 252 tokens" in capsys.readouterr().out


@EACH
@parametrize("flags", [dict(lr=1e17, max_grad_norm=1e17), dict(lr=3e38, steps=1)], ids=["loss", "weights"])
def test_run_that_is_not_finite_stops_and_saves_nothing(script, flags):
    args = arguments(script, dtype="float32", **flags)
    with bad_input("step [12]: .*not finite") as error:
        SCRIPTS[script].main(args)
    step = int(str(error.value)[5])
    assert [line["step"] for line in read(f"{args.out}/metrics.jsonl")] == list(range(step))
    assert not list(Path(args.out).glob("*model"))
