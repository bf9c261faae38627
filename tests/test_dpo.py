"""dpo.py from end to end: what it learns and writes, what changes memory only, its reference, and what it refuses."""
import gc
import json
import math
import os
import re
import shutil
import sys
import weakref
from copy import deepcopy
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import SMALL
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import dpo
import kto
from dpo import Args, batch_rows, lr_factor
from refcache import BadInput, ReferenceCache, completion_logprobs, tokenizer_digest

ROOT = Path(dpo.__file__).parent
MODEL = str(ROOT / "demo/model")
ROWS = [json.loads(line) for line in (ROOT / "demo/pairs.jsonl").open().readlines()[:24]]
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data files, and a cache of the reference that all runs share."""
    gc.freeze()  # what is imported: every pass over a reference collects garbage, and would look at all of it
    folder = tmp_path_factory.mktemp("dpo")
    write(folder / "train.jsonl", ROWS[:20])
    write(folder / "eval.jsonl", ROWS[20:])
    return folder


@pytest.fixture(scope="module")
def arguments(folder):
    """The arguments of a run of three steps, with its own output folder."""
    def arguments(**changes):
        arguments.runs += 1
        flags = dict(model=MODEL, data=str(folder / "train.jsonl"), eval_data=str(folder / "eval.jsonl"), steps=3,
                     batch_size=4, lr=1e-3, samples=0, out=str(folder / f"out{arguments.runs}"),
                     ref_cache=str(folder / "shared.pkl"))
        return Args(**flags | changes)
    arguments.runs = 0
    return arguments


@pytest.fixture(scope="module")
def first(arguments):
    """The first run: it fills its own cache, answers held-out prompts, and counts the models that exist at once."""
    alive, most, loaded, load = weakref.WeakSet(), [], [], dpo.load_model

    def load_model(folder, *rest, **more):
        alive.add(model := load(folder, *rest, **more))
        gc.collect()
        most.append(len(alive))
        loaded.append(folder)
        return model

    args = arguments(ref_cache=None, samples=2, max_new_tokens=4, eval_every=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpo, "load_model", load_model)
        history = dpo.main(args)
    shutil.copy(f"{args.out}/reference_logprobs.pkl", arguments().ref_cache)
    return SimpleNamespace(args=args, out=Path(args.out), history=history, most=most, loaded=loaded)


@pytest.fixture(scope="module")
def run(arguments, first):
    """Another run, with the cache of the first one. Returns its arguments and its history."""
    def run(**changes):
        args = arguments(**changes)
        return SimpleNamespace(args=args, out=Path(args.out), history=dpo.main(args))
    return run


def weights(done):
    return load_file(done.out / "model/model.safetensors")


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a)


def pairs_of(args):
    return [dpo.load_rows(source, TOKENIZER, 256, args) for source in (args.data, args.eval_data)]


# ---- A run, and what it leaves --------------------------------------------------------------------------------------


def test_learns_from_a_part_of_the_demo(folder):
    lines = (ROOT / "demo/pairs.jsonl").open().readlines()
    (folder / "many.jsonl").write_text("".join(lines[24:120]))
    (folder / "many_eval.jsonl").write_text("".join((ROOT / "demo/pairs_test.jsonl").open().readlines()[:24]))
    history = dpo.main(Args(model=MODEL, data=str(folder / "many.jsonl"), eval_data=str(folder / "many_eval.jsonl"),
                            steps=14, batch_size=12, lr=4e-4, out=str(folder / "learns"), max_new_tokens=20,
                            score=f"{ROOT}/demo/score.py:success"))
    assert history[0]["eval_rewards/accuracies"] == 0.5 and history[-1]["eval_rewards/accuracies"] > 0.7
    assert history[0]["eval_score"] + 0.3 < history[-1]["eval_score"]


@pytest.mark.slow
def test_learns_the_demo(tmp_path):
    history = dpo.main(Args(out=str(tmp_path / "out")))
    assert history[0]["eval_rewards/accuracies"] == 0.5 and history[-1]["eval_rewards/accuracies"] > 0.95
    assert history[0]["eval_score"] < 0.5 < 0.9 < history[-1]["eval_score"]


def test_step_0_is_ln_2(first):
    for values in (first.history[0]["eval_loss"], first.history[1]["loss"]):
        assert values == pytest.approx(math.log(2), abs=1e-5)
    assert abs(first.history[1]["rewards/margins"]) < 1e-5 and first.history[1]["rewards/accuracies"] == 0.5
    assert first.history[0]["eval_rewards/accuracies"] == 0.5


def test_files_of_a_finished_run(first):
    cache = {"reference_logprobs.pkl", "reference_logprobs.pkl.lock"}
    names = {"model", "metrics.jsonl", "samples.jsonl", "args.json", "checkpoint.safetensors", ".run.lock"} | cache
    assert {file.name for file in first.out.iterdir()} == names
    assert [json.loads(line) for line in open(first.out / "metrics.jsonl")] == first.history
    assert [values["step"] for values in first.history] == [0, 1, 2, 3]
    assert json.loads((first.out / "args.json").read_text())["lr"] == 1e-3
    samples = [json.loads(line) for line in open(first.out / "samples.jsonl")]
    assert [sample["step"] for sample in samples] == [0, 0, 3, 3] and all(sample["held_out"] for sample in samples)
    assert [sample["prompt"] for sample in samples] == [row["prompt"] for row in ROWS[20:22]] * 2
    size = (first.out / "checkpoint.safetensors").stat().st_size
    assert size < 100_000, "a finished run keeps no weights in its checkpoint"


def test_saved_model_loads_with_its_tokenizer(first):
    model = AutoModelForCausalLM.from_pretrained(first.out / "model")
    assert model.config._attn_implementation == "sdpa" and model.generation_config.eos_token_id == 3
    assert model.config.eos_token_id == 3
    assert AutoTokenizer.from_pretrained(first.out / "model").chat_template == TOKENIZER.chat_template


def test_every_metric_is_explained_in_the_docstring(first, run):
    more = run(humanline=(-1.0, 1.5), ref="swap", steps=1, ref_cache=None)
    names = {name.removeprefix("eval_") for values in first.history + more.history for name in values} - {"step"}
    assert not [name for name in names if name not in dpo.__doc__]


def test_evaluation_takes_place_before_after_and_every_few_steps(first):
    assert ["eval_loss" in values for values in first.history] == [True, False, True, True]


def test_num_tokens_counts_every_prompt_once(first):
    train, _ = pairs_of(first.args)
    seen = [row for step in (1, 2) for row in batch_rows(step, train, 4, 0)]
    assert first.history[2]["num_tokens"] == sum(len(p.prompt) + len(p.chosen) + len(p.rejected) for p in seen)


@pytest.mark.parametrize("save_dtype", ["float32", "bfloat16"])
def test_reported_numbers_are_those_of_the_saved_model(first, run, save_dtype):
    done = first if save_dtype == "float32" else run(save_dtype=save_dtype)
    assert {p.dtype for p in weights(done).values()} == {getattr(torch, save_dtype)}
    policy = dpo.load_model(str(done.out / "model"), "cpu", replace(done.args, dtype="float32"))
    known, (_, held) = ReferenceCache(), pairs_of(done.args)
    known.score(AutoModelForCausalLM.from_pretrained(MODEL), dpo.groups(held))
    values = dpo.evaluate(policy, held, known, replace(done.args, dtype="float32"))
    assert values == pytest.approx({name: done.history[-1][name] for name in values}, abs=2e-5, rel=1e-5)
    assert abs(values["eval_rewards/margins"]) > 1e-3


def test_same_seed_same_bits(first, run):
    again = run()
    assert largest_difference(weights(first), weights(again)) == 0
    assert first.history[1] == again.history[1] and first.history[-1] == again.history[-1]


def test_another_seed_gives_other_weights(first, run):
    assert largest_difference(weights(first), weights(run(seed=1))) > 1e-5


def test_lr_zero_changes_nothing(run):
    done = run(lr=0.0)
    assert largest_difference(weights(done), load_file(Path(MODEL) / "model.safetensors")) == 0
    assert done.history[-1]["eval_loss"] == done.history[0]["eval_loss"]


@pytest.mark.parametrize("changes", [dict(tokens_per_forward=90), dict(gradient_checkpointing=True)],
                         ids=lambda changes: [*changes][0])
def test_memory_knobs_change_memory_only(first, run, changes):
    done = run(eval_every=2, **changes)
    assert largest_difference(weights(first), weights(done)) < 2e-5
    for one, other in zip(first.history, done.history):
        assert one == pytest.approx(other, abs=1e-4, rel=1e-4)


def test_cached_run_equals_a_slow_loop_with_two_models(first):
    """One forward per sequence, the loss as in the paper."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(MODEL) for _ in range(2))
    train, _ = pairs_of(first.args)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)

    def log_ratio(prompt, y):
        def logp(model):
            logits = model(torch.tensor([prompt + y])).logits[0, len(prompt) - 1:-1]
            return logits.log_softmax(-1).gather(1, torch.tensor(y)[:, None]).sum()
        with torch.no_grad():
            ref = logp(reference)
        return logp(policy) - ref

    for step in (1, 2, 3):
        optimizer.param_groups[0]["lr"] = 1e-3 * lr_factor(step, 3, 0.1, "linear")
        pairs = batch_rows(step, train, 4, 0)
        ratios = [[log_ratio(pair.prompt, y) for y in (pair.chosen, pair.rejected)] for pair in pairs]
        loss = torch.stack([-torch.nn.functional.logsigmoid(0.1 * (c - r)) for c, r in ratios]).mean()
        assert loss.item() == pytest.approx(first.history[step]["loss"], abs=1e-5)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        assert grad_norm.item() == pytest.approx(first.history[step]["grad_norm"], rel=1e-3)
        optimizer.step()
    assert largest_difference(dict(policy.named_parameters()), weights(first)) < 1e-4


def test_bfloat16_forwards_train_weights_in_float32(run):
    done = run(dtype="bfloat16", ref_cache=None, steps=1)
    assert done.history[1]["loss"] == pytest.approx(math.log(2), abs=0.02)
    assert {p.dtype for p in weights(done).values()} == {torch.float32}


def test_loss_flags_reach_the_run(run, folder):
    """Several losses, one of which reads the data's rewards: (0 − 2 (1 − 0.25))² · 0.5 + ln 2 at the reference."""
    rows = [dict(row, chosen_reward=1.0, rejected_reward=0.25) for row in ROWS]
    data, eval_data = write(folder / "scored.jsonl", rows[:20]), write(folder / "scored_eval.jsonl", rows[20:])
    done = run(data=data, eval_data=eval_data, steps=1, loss=("rpo_sq", "sigmoid"), loss_weights=(0.5, 1.0),
               rpo_eta=2.0)
    assert done.history[1]["loss"] == pytest.approx(0.5 * 1.5 ** 2 + math.log(2), abs=1e-4)


@pytest.mark.parametrize("model_type, config", [
    ("opt", dict(dropout=0.5, ffn_dim=64, word_embed_proj_dim=32)),
    ("falcon", dict(hidden_dropout=0.5, attention_dropout=0.5))])
def test_dropout_in_the_config_is_off_also_with_gradient_checkpointing(tmp_path, model_type, config):
    config = AutoConfig.for_model(model_type, **SMALL | config)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    groups, logps = [((5, 9, 33), [(60, 12, 7), (90, 41)])], []
    for checkpointing in (True, True, False):
        args = Args(dtype="float32", gradient_checkpointing=checkpointing)
        policy = dpo.load_model(str(tmp_path / "model"), "cpu", args, trains=True)
        logps.append(torch.cat(completion_logprobs(policy, groups)[0]))
        logps[-1].sum().backward()
    assert logps[0].equal(logps[1]) and torch.allclose(logps[0], logps[2], atol=1e-5)


# ---- The reference --------------------------------------------------------------------------------------------------


def test_never_two_models_in_memory(first):
    assert first.most == [1, 1] and first.loaded == [MODEL, MODEL]


def test_a_complete_cache_never_loads_the_reference(run, monkeypatch):
    loaded, load = [], dpo.load_model
    monkeypatch.setattr(dpo, "load_model", lambda *rest, **more: loaded.append(more) or load(*rest, **more))
    run(lr=5e-4, seed=3, steps=1)  # other settings, the same reference
    assert loaded == [dict(trains=True)]


def test_a_complete_cache_is_read_and_not_written(run):
    path = Path(run(steps=1).args.ref_cache)
    before = path.stat()
    run(steps=1)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("changes", [dict(ref="none"), dict(loss=("simpo",)), dict(loss=("simpo", "sft"))])
def test_runs_without_a_reference_load_none_and_cache_none(run, monkeypatch, changes):
    loaded, load = [], dpo.load_model
    monkeypatch.setattr(dpo, "load_model", lambda *rest, **more: loaded.append(more) or load(*rest, **more))
    done = run(**changes, ref_cache=None, steps=1)
    assert loaded == [dict(trains=True)] and not list(done.out.glob("*.pkl"))
    assert done.history[1]["rewards/chosen"] < -0.01, "the log-ratios are the log-probs"


def test_another_reference_model_is_used_and_its_cache_is_its_own(run, tmp_path, capsys):
    shutil.copytree(MODEL, tmp_path / "other")
    state = load_file(tmp_path / "other/model.safetensors")
    save_file({k: v * 1.05 for k, v in state.items()}, tmp_path / "other/model.safetensors", metadata={"format": "pt"})
    done = run(ref_model=str(tmp_path / "other"), ref_cache=str(tmp_path / "other.pkl"), steps=1)
    assert abs(done.history[1]["rewards/margins"]) > 1e-4
    assert "differ by at most" not in capsys.readouterr().out, "policy and reference are not compared"
    with pytest.raises(BadInput, match="other.pkl .*made with reference"):
        run(ref_cache=str(tmp_path / "other.pkl"))


def test_a_cache_that_lies_stops_the_run_at_step_0(run, arguments, tmp_path):
    args, model = arguments(ref_cache=str(tmp_path / "lies.pkl")), AutoModelForCausalLM.from_pretrained(MODEL)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.1)
    cache = ReferenceCache(reference=dpo.digest_of(MODEL), tokenizer=tokenizer_digest(TOKENIZER), dtype="float32")
    cache.fill(lambda: model, dpo.groups(sum(pairs_of(args), [])), path=args.ref_cache)
    with pytest.raises(BadInput, match="step 0: .*differ"):
        dpo.main(args)
    assert [json.loads(line)["step"] for line in open(f"{args.out}/metrics.jsonl")] == [0]
    assert not (Path(args.out) / "model").exists()


@pytest.mark.parametrize("ref", ["cache", "swap", "live"])
def test_a_reference_with_another_tokenizer_is_refused(run, tmp_path, ref):
    """Its token ids mean something else."""
    shutil.copytree(MODEL, tmp_path / "other")
    tokenizer = json.loads((tmp_path / "other/tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, two = list(vocab)[300:302]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(BadInput, match="tokenizer"):
        run(ref_model=str(tmp_path / "other"), ref=ref, ref_cache=None, steps=1)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_steps_before(run, arguments):
    args = arguments(lr=1e17, warmup=0.0, max_grad_norm=1e17)
    with pytest.raises(dpo.Stopped, match="step 2") as error:
        dpo.main(args)
    assert [json.loads(line)["step"] for line in open(f"{args.out}/metrics.jsonl")] == [0, 1]
    assert not (Path(args.out) / "model").exists() and "step 1 is saved" in error.value.__notes__[0]


# ---- Order, held-out rows, learning rate ----------------------------------------------------------------------------


def test_batches_are_permutations_and_a_function_of_seed_and_step():
    rows = list(range(10))
    orders = [[i for step in range(1, 11) for i in batch_rows(step, rows, 3, seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and orders[0][:10] != orders[0][10:20]
    for epoch in range(3):
        assert sorted(orders[0][10 * epoch:10 * epoch + 10]) == rows


def test_hold_out_keeps_all_rows_of_a_prompt_on_one_side():
    rows = [SimpleNamespace(prompt=(i % 30,)) for i in range(90)]
    train, held = dpo.hold_out(rows, 128, 0)
    assert len(train) + len(held) == 90 and len(held) == 9, "at most a tenth of the prompts"
    assert not {row.prompt for row in train} & {row.prompt for row in held}
    assert {row.prompt for row in dpo.hold_out(rows, 3, 1)[1]} != {row.prompt for row in dpo.hold_out(rows, 3, 0)[1]}
    assert dpo.hold_out(rows, 0, 0) == (rows, [])


def test_held_out_prompts_are_not_trained_on(run, monkeypatch):
    trained, backward = [], dpo.backward
    monkeypatch.setattr(dpo, "backward", lambda policy, rows, *rest: trained.extend(rows) or
                        backward(policy, rows, *rest))
    done = run(eval_data=None, eval_size=2, samples=2, max_new_tokens=2, steps=None, epochs=2.0, batch_size=9)
    held = [json.loads(line)["prompt"] for line in open(done.out / "samples.jsonl")]
    assert len(held) == 4 and len(done.history) == 1 + 4 and len(trained) == 36  # 2 epochs of 18 rows
    assert not [row for row in trained if row.row["prompt"] in held] and "eval_loss" in done.history[0]


@pytest.mark.parametrize("epochs, steps", [(1.0, 3), (0.5, 2), (2.5, 7)])
def test_epochs_say_how_many_steps(arguments, monkeypatch, epochs, steps):
    """20 rows in batches of 8: of 2.5 batches the last one is a whole one too."""
    class Enough(Exception):
        pass

    def stop(*rest):
        raise Enough
    seen, args = [], arguments(steps=None, epochs=epochs, batch_size=8, ref="none", ref_cache=None)
    monkeypatch.setattr(dpo, "lr_factor", lambda step, steps, *rest: seen.append(steps) or 1.0)
    monkeypatch.setattr(dpo, "evaluate", stop)
    with pytest.raises(Enough):
        dpo.main(args)
    assert set(seen) == {steps}


def test_learning_rate_rises_over_the_warmup_and_falls_to_almost_zero():
    for schedule in ("linear", "cosine", "constant"):
        factors = [lr_factor(step, 20, 0.25, schedule) for step in range(1, 21)]
        assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]) and all(0 < factor <= 1 for factor in factors)
        assert factors[5:] == sorted(factors[5:], reverse=True) and (factors[-1] == 1) == (schedule == "constant")
    assert [lr_factor(step, 4, 0.0, "linear") for step in range(1, 5)] == [1.0, 0.75, 0.5, 0.25]
    assert lr_factor(1, 1, 0.0, "cosine") == lr_factor(1, 1, 1.0, "linear") == 1


def test_learning_rates_of_a_run_are_those_of_the_schedule(first):
    expected = [1e-3 * lr_factor(step, 3, 0.1, "linear") for step in (1, 2, 3)]
    assert [values["lr"] for values in first.history[1:]] == pytest.approx(expected)


# ---- Answers to held-out prompts, and their scores ------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy():
    return dpo.load_model(MODEL, "cpu", Args(dtype="float32"))


def answers_of(policy, score=None, seed=0, step=7, **changes):
    args = Args(model=MODEL, dtype="float32", **dict(max_new_tokens=12, score="score.py:rate") | changes)
    held = [SimpleNamespace(row=row, prompt=tuple(TOKENIZER.apply_chat_template(
        row["prompt"], add_generation_prompt=True, return_dict=False))) for row in ROWS]
    torch.manual_seed(seed)
    return dpo.answer(policy, TOKENIZER, held, score, step, args)


def test_answers_come_from_the_model_whatever_its_generation_config_says(policy):
    plain, _ = answers_of(policy)
    warped = deepcopy(policy)
    warp = dict(temperature=0.1, top_k=1, top_p=0.1, repetition_penalty=5.0, no_repeat_ngram_size=1, min_new_tokens=12,
                suppress_tokens=list(range(10, 400)), max_length=3, do_sample=True)
    for name, value in warp.items():
        setattr(warped.generation_config, name, value)
    assert answers_of(warped)[0] == plain and len({sample["completion"] for sample in plain}) > 15
    assert warped.generation_config.top_k == 1, "it is saved with the model"
    assert answers_of(policy, seed=1)[0] != plain and all(sample["step"] == 7 for sample in plain)


def test_only_padding_is_masked_in_answers(policy, monkeypatch):
    """Token 0 may stand in a prompt, too."""
    masks = []

    def generate(self, ids, attention_mask, original=type(policy).generate, **more):
        masks.extend(attention_mask.tolist())
        return original(self, ids, attention_mask=attention_mask, **more)
    monkeypatch.setattr(type(policy), "generate", generate)
    held = [SimpleNamespace(row={"prompt": "x"}, prompt=prompt) for prompt in ((0, 5), (7, 0, 0, 9))]
    dpo.answer(policy, TOKENIZER, held, None, 0, Args(model=MODEL, dtype="float32", max_new_tokens=2))
    assert masks == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_answers_are_drawn_from_the_whole_vocabulary(policy):
    """Of 704 equally probable tokens; transformers' default would keep 50."""
    uniform = deepcopy(policy)
    with torch.no_grad():
        uniform.lm_head.weight.zero_()
    samples, _ = answers_of(uniform)
    assert len({token for sample in samples for token in TOKENIZER(sample["completion"]).input_ids}) > 100


def test_answers_end_before_their_eos_token(policy):
    samples, _ = answers_of(policy, max_new_tokens=60)
    assert all("<|" not in sample["completion"] for sample in samples)
    ended = [sample for sample in samples if sample["completion"].endswith((".", "!"))]
    assert len(ended) > len(samples) / 2


def test_answers_of_models_that_cannot_share_prompts_see_no_padding(policy, monkeypatch):
    """Rows of one prompt each: the same greedy answers as one generate() per prompt."""
    monkeypatch.setattr(dpo, "shares_prompts", lambda model: False)
    assert len(answers_of(policy, samples=3)[0]) == 3
    shapes, generate = [], policy.generate
    monkeypatch.setattr(policy, "generate", lambda ids, **more: shapes.append(ids.shape[0]) or generate(ids, **more))
    answers_of(policy, samples=3)
    assert shapes == [1, 1, 1]


def test_prompts_without_room_for_an_answer_get_none_and_are_counted(policy, capsys):
    assert answers_of(policy, step=0, max_new_tokens=250) == ([], {})
    assert "0 prompts are answered: the others leave no room for --max_new_tokens" in capsys.readouterr().out
    assert answers_of(policy, step=0, samples=0) == ([], {}) and not capsys.readouterr().out


def test_scores_get_columns_and_messages_and_none_is_left_out(policy):
    def rate(prompts, completions, thing, place, **columns):
        assert thing == [row["thing"] for row in ROWS[:2]] and prompts == [row["prompt"] for row in ROWS[:2]]
        assert [[message["role"] for message in y] for y in completions] == [["assistant"]] * 2
        return [None, 3.0]
    samples, scored = answers_of(policy, rate, samples=2)
    assert scored == {"eval_score": 3.0} and samples[1]["score"] == 3.0


def test_scores_get_columns_that_the_first_row_lacks(policy):
    rows = [{"prompt": row["prompt"]} | more for row, more in zip(ROWS, ({}, {"answer": "42"}))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(answers_of.__globals__, "ROWS", rows)
        _, scored = answers_of(policy, lambda answer, **_: [float(x == "42") for x in answer], samples=2)
    assert scored == {"eval_score": 0.5}


def test_a_score_may_change_its_arguments(policy):
    def rate(prompts, completions, **columns):
        for prompt, answer in zip(prompts, completions):
            prompt.extend(answer)
        return [float(len(prompt)) for prompt in prompts]
    for _ in range(2):
        samples, scored = answers_of(policy, rate, samples=2)
        assert scored == {"eval_score": 2.0} and [len(sample["prompt"]) for sample in samples] == [1, 1]


def test_scores_of_numpy_and_torch_are_numbers(policy):
    for scores in (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]).numpy(), [True, 2]):
        samples, scored = answers_of(policy, lambda **columns: scores, samples=2)
        assert scored == {"eval_score": 1.5} and json.loads(json.dumps(samples))[1]["score"] == 2.0


def test_without_any_score_there_is_no_mean_score(policy):
    _, scored = answers_of(policy, lambda **columns: [None, None], samples=2)
    assert scored == {}


@pytest.mark.parametrize("score, words", [
    (lambda **columns: [1.0], "shorter"), (lambda **columns: [1.0] * 3, "longer"), (lambda **columns: None, "NoneType"),
    (lambda **columns: ["good", "bad"], "ValueError"), (lambda **columns: columns["nothing"], "KeyError"),
    (lambda prompts: [1.0, 1.0], "TypeError"), (lambda **columns: sys.exit(0), "SystemExit")])
def test_scorers_that_fail_are_named(policy, score, words):
    with pytest.raises(BadInput, match=f"--score score.py:rate failed: .*{words}") as error:
        answers_of(policy, score, samples=2)
    assert "\n" not in str(error.value)


def test_score_files_are_loaded_with_their_neighbours(tmp_path):
    (tmp_path / "neighbour_of_score.py").write_text("value = 4.0\n")
    (tmp_path / "my_score.py").write_text("from neighbour_of_score import value\ndef rate(): return value\n")
    assert dpo.load_function(f"{tmp_path}/my_score.py:rate")() == 4.0
    (tmp_path / "json.py").write_text("def rate(): pass\n")
    (tmp_path / "broken_score.py").write_text("1 / 0\n")
    for spec in ("my_score.py:no", "my_score.py", "no_such.py:rate", "json.py:rate", "broken_score.py:rate"):
        with pytest.raises(BadInput, match="as FILE.py:FUNCTION"):
            dpo.load_function(f"{tmp_path}/{spec}")


def test_tensorboard_gets_the_metrics(run, monkeypatch):
    written = []
    writer = SimpleNamespace(SummaryWriter=lambda folder, *rest, **more: SimpleNamespace(
        add_scalar=lambda name, value, step: written.append((name, step)), close=lambda: None, flush=lambda: None))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    run(tensorboard=True, steps=1)
    assert {("eval_loss", 0), ("loss", 1), ("eval_loss", 1)} <= set(written)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(BadInput, match="pip install tensorboard"):
        run(tensorboard=True, steps=1)


def test_show_data_marks_what_is_trained_and_trains_nothing(arguments, capsys):
    args = arguments(show_data=True)
    assert dpo.main(args) == [] and not Path(args.out).exists()
    printed = capsys.readouterr().out
    for row in (ROWS[0]["chosen"], ROWS[0]["rejected"]):
        tokens = TOKENIZER.batch_decode([[token] for token in TOKENIZER(row[0]["content"]).input_ids])
        assert "".join(f"[{token}]" for token in tokens) in printed
    assert ROWS[0]["prompt"][0]["content"] in printed and printed.count("[<|end|>]") == 2


# ---- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, words", [
    (dict(data="nothing.jsonl"), "nothing.jsonl"), (dict(model="no/such-model"), "no/such-model"),
    (dict(ref_model="no/such-model"), "no/such-model"), (dict(model=None), "--model and --data"),
    (dict(data=None), "--model and --data"), (dict(out=MODEL), "--out"), (dict(out="/proc/nothing"), "--out"),
    (dict(loss=("ipo",), label_smoothing=0.1), "--label_smoothing"), (dict(label_smoothing=0.5), "below 0.5"),
    (dict(loss=("exo_pair",)), "needs --label_smoothing"), (dict(loss=("rpo_sq",)), "chosen_reward"),
    (dict(loss=("sigmoid", "sft"), loss_weights=(1.0,)), "one number per --loss"), (dict(loss=()), "--loss"),
    (dict(loss=("dpo2",)), "--loss"), (dict(loss="ipo"), "--loss"), (dict(divergence="kl"), "--divergence"),
    (dict(alpha=0.0), "--alpha"), (dict(ld_alpha=-0.1), "--ld_alpha"),
    (dict(ref="none", ref_model=MODEL), "--ref_model"), (dict(ref="frozen"), "--ref"),
    (dict(sync_reference=2), "--ref swap"), (dict(sync_reference=2, ref="live"), "--ref swap"),
    (dict(humanline=(-1.0, 1.5)), "--ref swap"),
    (dict(humanline=(0.5, 1.5), ref="swap", ref_cache=None), "--humanline"),
    (dict(humanline=(-1e39, 1.5), ref="swap", ref_cache=None), "--humanline"),
    (dict(humanline=(-1.0, 1.5), ref="swap", ref_cache=None, loss=("aot",)), "aot_unpaired"),
    (dict(out=""), "--out"), (dict(out="x\0y"), "--out"), (dict(ref_cache="x/metrics.jsonl"), "--ref_cache"),
    (dict(sync_mix=0.5), "--sync_reference"), (dict(ref="swap"), "--ref_cache"),
    (dict(lora_alpha=8.0), "--lora_r"), (dict(lora_target="q_proj"), "--lora_r"),
    (dict(lr=-1.0), "--lr"), (dict(lr="1e-3"), "--lr"), (dict(lr=math.inf), "--lr"), (dict(warmup=1.5), "--warmup"),
    (dict(warmup=math.nan), "--warmup"), (dict(weight_decay=math.nan), "--weight_decay"), (dict(seed=-1), "--seed"),
    (dict(samples=-1), "--samples"), (dict(eval_size=-1), "--eval_size"), (dict(beta=0.0), "--beta"),
    (dict(epochs=math.inf, steps=None), "--epochs"), (dict(epochs=0.0, steps=None), "--epochs"),
    (dict(max_grad_norm=0.0), "--max_grad_norm"),
    (dict(beta=math.nan), "--beta"), (dict(batch_size=0), "--batch_size"), (dict(steps=-1), "--steps"),
    (dict(steps=2.5), "--steps"), (dict(save_dtype="float16"), "--save_dtype"),
    (dict(gradient_checkpointing="no"), "--grad"),
    (dict(score="nothing.py:f", samples=1), "nothing.py:f"), (dict(max_length=5), "too few rows"),
    # flags that would do nothing
    (dict(score="nothing.py:f"), "--score"), (dict(eval_size=9), "--eval_size"), (dict(alpha=0.3), "--alpha"),
    (dict(simpo_gamma=1.0), "--simpo_gamma"), (dict(rpo_eta=2.0), "--rpo_eta"),
    (dict(loss=("ipo",), divergence="js"), "--divergence"), (dict(epochs=2.0), "--epochs"),
    (dict(loss=("simpo",)), "leave out --ref"), (dict(loss=("sft",), ref_cache=None, ref="live"), "leave out --ref"),
    (dict(loss=("simpo",), ref_cache=None, ref_model="other"), "no folder other|leave out --ref"),
    (dict(loss_weights=(0.0,)), "--loss_weights"),
    # what a shell or a notebook makes of an empty variable, and numbers of numpy
    (dict(ref_model=""), "--ref_model"), (dict(eval_data=""), "--eval_data"), (dict(ref_cache=""), "--ref_cache"),
    (dict(beta=np.float64(-0.1)), "--beta"), (dict(lr=np.float64("nan")), "--lr"), (dict(steps=True), "--steps"),
    (dict(out="out\udcff"), "--out"), (dict(loss=("sigmoid", 5)), "--loss"),
    (dict(batch_size=10**15), "--batch_size"),
    (dict(loss=("sigmoid", "sft"), loss_weights=(1.0, "2")), "--loss_weights"),
])
def test_bad_arguments_are_refused_in_one_sentence_before_anything_is_written(arguments, changes, words):
    args = arguments(**changes)
    with pytest.raises(BadInput, match=words) as error:
        dpo.main(args)
    assert "\n" not in str(error.value)
    if "out" not in changes:
        assert not Path(args.out).exists()


@pytest.mark.parametrize("name", ["model", "model/cache.pkl", ".model/x.pkl", ".run", ".run.lock", ".checkpoint/x.pkl"])
def test_a_cache_where_a_run_writes_and_deletes_is_refused(arguments, name):
    args = arguments()
    with pytest.raises(BadInput, match="--ref_cache .* another output"):
        dpo.main(replace(args, ref_cache=f"{args.out}/{name}"))


@pytest.mark.parametrize("path", ["/proc/nothing/cache.pkl", "/"])
def test_a_cache_that_cannot_be_used_is_refused_before_the_reference_pass(arguments, monkeypatch, path):
    monkeypatch.setattr(dpo, "load_model", None)
    with pytest.raises(BadInput, match=f"{path}.* cannot be (used|written)|cannot be written|cannot use .*{path}"):
        dpo.main(arguments(ref_cache=path))


@pytest.mark.parametrize("script", [dpo, kto])
def test_steps_0_fills_the_cache_for_a_job_on_another_machine(script, folder, tmp_path, monkeypatch):
    machines = [tmp_path / name for name in ("one", "two")]
    for machine in machines:  # the same files at other places
        shutil.copytree(MODEL, machine / "model")
        shutil.copy(folder / "train.jsonl", machine / "train.jsonl")
        shutil.copy(folder / "eval.jsonl", machine / "eval.jsonl")
    one, two = (script.Args(model=str(machine / "model"), data=str(machine / "train.jsonl"), batch_size=4, samples=0,
                            eval_data=str(machine / "eval.jsonl"), out=str(machine / "out"), lr=1e-3, steps=0,
                            ref_cache=str(machine / "cache.pkl")) for machine in machines)
    history = script.main(one)
    assert [line["step"] for line in history] == [0] and math.isfinite(history[0]["eval_loss"])
    assert not (machines[0] / "out/model").exists() and not (machines[0] / "out/checkpoint.safetensors").exists()
    shutil.copy(machines[0] / "cache.pkl", machines[1] / "cache.pkl")
    loaded = []
    load_model = script.load_model
    monkeypatch.setattr(script, "load_model", lambda *args, **more: loaded.append(more) or load_model(*args, **more))
    assert [line["step"] for line in script.main(replace(two, steps=2))] == [0, 1, 2]
    assert loaded == [dict(trains=True)], "the second machine never loads the reference"
    assert [line["step"] for line in script.main(replace(one, steps=2))] == [0, 1, 2], "the same --out goes on"


def test_a_schedule_that_is_all_warmup_ends():
    assert [lr_factor(step, 2, 1.0, "linear") for step in (1, 2, 3)] == [0.5, 1.0, 0.0]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "args.json", ".model"])
@pytest.mark.parametrize("kind", ["file", "link", "fifo"])
def test_files_of_somebody_else_in_the_output_folder_are_refused_and_stay(arguments, tmp_path, name, kind):
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    out.mkdir()
    theirs.mkdir()
    (theirs / "file").write_text("precious")
    if kind == "link":
        (out / name).symlink_to(theirs if name == ".model" else theirs / "file")
        (out / ".run.lock").touch()  # also if a run has been here
    elif kind == "fifo":
        os.mkfifo(out / name)
    elif name == ".model":
        shutil.copytree(theirs, out / name)
    else:
        shutil.copy(theirs / "file", out / name)
    with pytest.raises(BadInput, match=f"{name} is .*name another --out"):
        dpo.main(arguments(out=str(out)))
    assert (theirs / "file").read_text() == "precious" and os.path.lexists(out / name)


def test_values_that_are_no_json_are_written_as_text(tmp_path):
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).touch()
    log = dpo.Log(tmp_path, False)
    log.write({"step": 0}, [{"prompt": [{"role": "user", "content": "x", "time": datetime(2024, 1, 1)}]}])
    assert "2024-01-01 00:00:00" in (tmp_path / "samples.jsonl").read_text()


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400, "NaN"])
def test_numbers_that_no_run_logs_are_refused(tmp_path, number):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": ' + number + "}\n")
    with pytest.raises(BadInput, match="metrics.jsonl is damaged"):
        dpo.Log(tmp_path, False)


def test_tensorboard_gets_every_value_and_its_error_leaves_the_step_out_of_the_logs(tmp_path):
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).touch()
    log, seen = dpo.Log(tmp_path, False), []
    log.board = SimpleNamespace(add_scalar=lambda *values: seen.append(values))
    log.write({"step": 1, "loss": 0.5}, [])
    assert ("loss", 0.5, 1) in seen
    log.board.add_scalar = lambda *values: (_ for _ in ()).throw(OSError("the disk is full"))
    with pytest.raises(OSError):
        log.write({"step": 2, "loss": 0.4}, [])
    assert [line["step"] for line in dpo.read_lines(tmp_path / "metrics.jsonl")] == [1]


def test_a_run_without_held_out_rows_prints_no_empty_evaluation(run, capsys):
    run(eval_data=None, eval_size=0, steps=1)
    assert not re.search(r"^step \d+: *$", capsys.readouterr().out, re.M)


def test_a_name_with_gloo_in_it_is_no_end_of_another_process(monkeypatch, capsys):
    monkeypatch.setattr(dpo, "main", lambda args: dpo.refuse(True, "igloo/pairs.jsonl: there is no such file"))
    with pytest.raises(SystemExit):
        dpo.command_line(None)
    assert "igloo/pairs.jsonl: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [dict(merge=True), dict(lora_dropout=0.1)])
def test_flags_of_adapters_are_refused_without_one(arguments, flags):
    with pytest.raises(BadInput, match="are for adapters"):
        dpo.main(arguments(**flags))


def test_paths_may_be_path_objects(run, folder):
    done = run(data=folder / "train.jsonl", out=folder / "as_path", model=Path(MODEL), steps=1)
    assert (folder / "as_path/model/model.safetensors").exists() and len(done.history) == 2


@pytest.mark.parametrize("name, content", [
    ("model.safetensors", b""), ("model.safetensors", b"\0" * 99), ("model.safetensors", None), ("config.json", b"{"),
    ("config.json", None), ("tokenizer.json", b"{"), ("model.safetensors.index.json", b"{")])
def test_damaged_models_are_refused_in_one_sentence(arguments, tmp_path, name, content):
    shutil.copytree(MODEL, tmp_path / "bad")
    (tmp_path / "bad" / name).write_bytes(content) if content is not None else (tmp_path / "bad" / name).unlink()
    if name.endswith("index.json"):
        (tmp_path / "bad/model.safetensors").unlink()
    with pytest.raises(BadInput, match="bad") as error:
        dpo.main(arguments(model=str(tmp_path / "bad"), ref="none", ref_cache=None))
    assert len(str(error.value).splitlines()) == 1


def test_lacking_weights_are_refused(arguments, tmp_path):
    shutil.copytree(MODEL, tmp_path / "other")
    state = load_file(tmp_path / "other/model.safetensors")
    state.pop("model.norm.weight")
    save_file(state, tmp_path / "other/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match="model.norm.weight"):
        dpo.main(arguments(model=str(tmp_path / "other"), ref="none", ref_cache=None))


@pytest.mark.parametrize("error, code", [
    (BadInput("where, what"), 2), (dpo.Stopped("step 3 is saved"), 1), (OSError("disk full"), 1),
    (KeyboardInterrupt(), 130), (torch.OutOfMemoryError("out of memory"), 1)])
def test_the_command_line_says_one_sentence_and_exits_with_a_code(monkeypatch, capsys, error, code):
    def main(args):
        raise error
    monkeypatch.setattr(dpo, "main", main)
    with pytest.raises(SystemExit) as exit:
        dpo.command_line(Args())
    printed = capsys.readouterr().err
    assert exit.value.code == code and len(printed.splitlines()) == 1 and str(error) in printed
    assert ("--tokens_per_forward" in printed) == isinstance(error, torch.OutOfMemoryError)


def test_the_command_line_shows_the_traceback_of_a_bug(monkeypatch):
    for error in (KeyError("a"), RuntimeError("shapes"), TypeError("b")):
        def main(args):
            raise error
        monkeypatch.setattr(dpo, "main", main)
        with pytest.raises(type(error)):
            dpo.command_line(Args())
