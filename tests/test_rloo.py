"""rloo.py: advantages and gradients by hand, rewards, training against a slow loop of two models, refusals."""
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import rloo
from refcache import BadInput
from rloo import (Args, RewardModel, Rollout, Row, batch_rows, call_reward, judge, leave_one_out, load_function,
                  lr_factor, main, policy_loss, rollout)

ROOT = Path(rloo.__file__).parent
MODEL = str(ROOT / "demo/model")
ROWS = [json.loads(line) for line in open(ROOT / "demo/prompts.jsonl")][:24]
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)
NAN = math.nan
REWARDS = """
def vowels(prompts, completions, **columns):
    return [sum(x in "aeiou" for x in (y if isinstance(y, str) else y[-1]["content"])) / 10 for y in completions]

def silent(completions, **columns):
    return [None] * len(completions)
"""


def vowels(text):
    return sum(x in "aeiou" for x in text) / 10


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of two steps, in which about half of the samples end by themselves."""
    folder = tmp_path_factory.mktemp("base")  # one for all tests: Python imports a module of a name once
    files = dict(data=write(folder / "train.jsonl", ROWS), eval_data=write(folder / "eval.jsonl", ROWS[:4]))
    reward = write(folder / "rewards_of_test_rloo.py", [REWARDS])
    return Args(model=MODEL, **files, out=str(folder / "out"), reward=(f"{reward}:vowels",), steps=2, batch_size=4,
                lr=1e-3, samples=2, max_new_tokens=12)


@pytest.fixture
def args(base, tmp_path):
    return replace(base, out=str(tmp_path / "out"))


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """run(**changes) -> its metrics, weights and rollouts. Tests share runs with the same changes."""
    known = {}

    def run(again=0, **changes):
        key = repr((again, sorted(changes.items())))
        if key not in known:
            out, rollouts = tmp_path_factory.mktemp("run"), []

            def spy(*inputs):
                rollouts.append(rollout(*inputs))
                return rollouts[-1]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(rloo, "rollout", spy)
                history = main(replace(base, out=str(out), **changes))
            weights, = (out / "model").glob("*model.safetensors")
            steps = [drawn for drawn in rollouts if len(drawn.groups[0][1]) > 1]
            known[key] = SimpleNamespace(history=history, weights=load_file(weights), rollouts=steps, out=out)
        return known[key]
    return run


def largest_difference(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


def same_history(one, other, tolerance=1e-5):
    return all(values == pytest.approx(others, abs=tolerance, rel=tolerance)
               for values, others in zip(one, other, strict=True))


def read(path):
    return [json.loads(line) for line in open(path)]


# ---- Advantages and loss, by hand -----------------------------------------------------------------------------------


def test_advantages_by_hand_without_standard_deviation_and_without_samples_left_out():
    advantages = leave_one_out(tensor([[1.0, 2.0, 6.0], [10.0, 20.0, 60.0], [3.0, 3.0, 3.0]]))
    assert advantages.tolist() == [[-3, -1.5, 4.5], [-30, -15, 45], [0, 0, 0]]
    assert leave_one_out(torch.randn(5, 4)).sum(1).abs().max() < 1e-5
    advantages = leave_one_out(tensor([[1.0, NAN, 6.0, 2.0], [NAN, 5.0, NAN, NAN], [NAN] * 4, [NAN, 1.0, 4.0, NAN]]))
    assert advantages.tolist() == [[-3, 0, 4.5, -1.5], [0, 0, 0, 0], [0, 0, 0, 0], [0, -3, 3, 0]]


def loss_and_gradient(log_ratios, advantages, start=-70.0):
    logps = (tensor(log_ratios) + start).requires_grad_()
    losses = policy_loss(logps, torch.full_like(logps, start).detach(), tensor(advantages), 0.2)
    return losses.tolist(), torch.autograd.grad(losses.sum(), logps)[0].tolist()


def test_policy_loss_and_its_gradient_by_hand():
    ratios, advantages = [1.0, 1.0, 1.0, 1.5, 1.5, 0.5, 0.5, 1.1], [1.5, -2.0, 0.0, 2.0, -2.0, 2.0, -2.0, 2.0]
    losses, gradient = loss_and_gradient([math.log(ratio) for ratio in ratios], advantages)
    assert losses == pytest.approx([-1.5, 2, 0, -2.4, 3, -1, 1.6, -2.2], abs=1e-4)
    assert gradient == pytest.approx([-1.5, 2, 0, 0, 3, -1, 0, -2.2], abs=1e-4)


def test_a_bad_sample_that_became_much_likelier_still_has_the_gradient_of_its_ratio():
    _, gradient = loss_and_gradient([20.0, 40.0, 80.0], [-1.0, -1.0, -1.0], start=0.0)
    assert gradient == pytest.approx([math.exp(20), math.exp(40), math.exp(80)], rel=1e-4)


def test_a_ratio_beyond_the_largest_float_gives_no_nan():
    losses, gradient = loss_and_gradient([100.0, 100.0, 100.0, -200.0], [1.0, 0.0, -1.0, 1.0], start=0.0)
    assert all(map(math.isfinite, losses + gradient)) and gradient[:2] == [0, 0] and gradient[3] == 0


# ---- Rewards --------------------------------------------------------------------------------------------------------


def judged(*functions, rows=[dict(prompt="a"), dict(prompt="b")]):
    """Rewards of the samples soup and tea of one prompt, bread and cake of another."""
    ys = [tuple(TOKENIZER(text).input_ids) for text in (" soup", " tea", " bread", " cake")]
    drawn = Rollout([((1,), ys[:2]), ((2,), ys[2:])], None, None, None)
    functions = [(f"f{i}", function, weight) for i, (function, weight) in enumerate(functions)]
    return judge(drawn, [Row((1,), row) for row in rows], TOKENIZER, functions)


def test_rewards_are_weighted_and_a_sample_without_any_is_left_out():
    def f(**columns):
        return [1.0, None, None, 4]

    def g(**columns):
        return [10, 20.0, None, None]
    rewards, samples, means = judged((f, 2.0), (g, 0.5))
    assert torch.equal(rewards.nan_to_num(-1), tensor([[7.0, 10.0], [-1.0, 8.0]])) and rewards[1, 0].isnan()
    assert means == {"rewards/f0": 2.5, "rewards/f1": 15} and [line["reward"] for line in samples] == [7, 10, None, 8]
    assert [line["completion"] for line in samples] == [" soup", " tea", " bread", " cake"]
    # a weight of 0 is only reported, and makes no reward of a sample without one
    rewards, _, means = judged((f, 1.0), (lambda **c: [5.0] * 4, 0.0), (lambda **c: [None] * 4, 1.0))
    assert rewards.isnan().tolist() == [[False, True], [True, False]] and means == {"rewards/f0": 2.5, "rewards/f1": 5}


def test_columns_come_once_per_sample_with_token_ids_and_chats_as_messages():
    seen, chat = {}, [{"role": "user", "content": "a"}]

    def reward(**columns):
        seen.update(columns)
        return [0.0] * 4
    judged((reward, 1.0), rows=[dict(prompt=chat, thing=1), dict(prompt="b", other=None)])  # each lacks one's column
    answers = [*([{"role": "assistant", "content": text}] for text in (" soup", " tea")), " bread", " cake"]
    ids = [TOKENIZER(text).input_ids for text in (" soup", " tea", " bread", " cake")]
    assert seen == dict(prompts=[chat, chat, "b", "b"], completions=answers, completion_ids=ids,
                        thing=[1, 1, None, None], other=[None] * 4)


@pytest.mark.parametrize("scores, words", [
    (lambda: [1.0] * 3, "4"), (lambda: [0, 0, NAN, 0], "nan"), (lambda: [0, -math.inf, 0, 0], "-inf"),
    (lambda: [0, 0, 0, 1e300], "1e\\+300"), (lambda: 1 / 0, "ZeroDivisionError"), (lambda: None, "NoneType|None"),
    (lambda: [0, 0, "x", 0], "'x'|str"), (lambda: sys.exit(3), "SystemExit"),
    (lambda: {0: 1, 1: 1, 2: 1, 3: 1}, "list|dict"), (lambda: {1.0, 2.0, 3.0, 4.0}, "list|set"),
    (lambda: [0, 0, [1], 0], "list"), (lambda: "1234", "str|'1'")])
def test_a_reward_that_fails_is_named_with_what_it_returned(scores, words):
    with pytest.raises(BadInput, match=f"f1.*({words})") as error:
        judged((lambda **c: [0.0] * 4, 1.0), (lambda **c: scores(), 1.0))
    assert "\n" not in str(error.value)


def test_lists_arrays_and_tensors_of_numbers_are_rewards():
    for scores in ([2], (2.0,), [True * 2], np.array([2]), tensor([2.0]), tensor([2.0], dtype=torch.bfloat16)):
        assert call_reward(lambda scores=scores, **_: scores, "f", ["x"], [(1,)], [{"prompt": "p"}]) == [2.0]


def test_out_of_memory_in_a_reward_is_no_bad_input():
    def full(**columns):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        judged((full, 1.0))


def test_what_a_reward_changes_in_place_reaches_no_other_reward_and_no_row():
    def wild(prompts, completions, completion_ids, thing, **columns):
        prompts[0][0]["content"] = "changed"
        completions[0][0]["content"] = "changed"
        completion_ids[0].append(99)
        thing[0].append("changed")
        torch.set_grad_enabled(False)
        return [0.0] * 4
    seen, rows = {}, [{"prompt": [{"role": "user", "content": "hi"}], "thing": []} for _ in range(2)]

    def after(**columns):
        seen.update(columns)
        return [0.0] * 4
    _, samples, _ = judged((wild, 1.0), (after, 1.0), rows=rows)
    assert "changed" not in repr((rows, seen, samples)) and 99 not in seen["completion_ids"][0]
    assert torch.is_grad_enabled()


def test_a_reward_file_may_import_its_neighbour_and_a_name_taken_by_another_module_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_of_the_reward.py").write_text("value = 2.0")
    (tmp_path / "neighbourly.py").write_text("from neighbour_of_the_reward import value\n"
                                             "def f(prompts, **columns):\n    return [value]\n")
    assert load_function(f"{tmp_path}/neighbourly.py:f")(["p"]) == [2.0]
    (tmp_path / "json.py").write_text("def f(**columns):\n    return [1.0]\n")
    for spec in ("json.py:f", "neighbourly.py:g", "neighbourly.py", "nowhere.py:f"):
        with pytest.raises(BadInput, match=f"cannot load .*{spec}") as error:
            load_function(f"{tmp_path}/{spec}")
        assert "\n" not in str(error.value)


def test_samples_without_any_reward_change_nothing_and_a_score_is_no_reward(base, run):
    silent = run(reward=(base.reward[0].replace("vowels", "silent"),), score=base.reward[0], steps=1)
    values = silent.history[1]
    assert "reward" not in values and "eval_reward" not in values and values["eval_score"] > 0
    assert values["grad_norm"] == 0 and largest_difference(silent.weights, load_file(f"{MODEL}/model.safetensors")) == 0


# ---- Reward models --------------------------------------------------------------------------------------------------


def classifier(path, outputs=1, **changes):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(MODEL, num_labels=outputs, **changes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return str(path)


def reward_model(folder, budget=10**6):
    return RewardModel(folder, "cpu", Args(tokens_per_forward=budget))


def watch(model, see):
    """Calls see() with the token ids of every forward."""
    model.register_forward_pre_hook(lambda module, args, kwargs: see(kwargs["input_ids"]), with_kwargs=True)


@pytest.mark.parametrize("pad", [0, None])
def test_a_reward_model_gives_the_scores_of_one_forward_per_text(tmp_path, pad):
    path = classifier(tmp_path / "judge", pad_token_id=pad)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    chats = [row["prompt"] for row in ROWS[:6]]
    answers = [[{"role": "assistant", "content": "The soup was nice. " * n}] for n in range(6)]
    texts = [TOKENIZER.apply_chat_template(p + y, tokenize=False) for p, y in zip(chats, answers)]
    strings = [("How was it?", " Fine."), ("Why", " not, said the waiter.")]
    for prompts, ys, texts in ((chats, answers, texts), (*zip(*strings), [p + y + "<|end|>" for p, y in strings])):
        ids = [torch.tensor([TOKENIZER(text, add_special_tokens=False).input_ids]) for text in texts]
        truth = [model(x).logits.item() for x in ids]
        for budget in (1, 90, 10**6):
            assert reward_model(path, budget)(prompts, ys) == pytest.approx(truth, abs=1e-5)


def test_a_reward_model_adds_to_the_functions_with_its_weight(run, tmp_path):
    path = classifier(tmp_path / "judge")
    history = run(reward_model=path, reward_weights=(1.0, 0.5), steps=1).history
    assert all(values["reward"] == pytest.approx(values["rewards/vowels"] + 0.5 * values["rewards/judge"], abs=1e-5)
               for values in history[1:])


def test_main_takes_functions_as_rewards(base, run, tmp_path):
    history = rloo.main(replace(base, reward=(), out=str(tmp_path / "out")), rewards=(load_function(base.reward[0]),))
    assert history == run().history
    with pytest.raises(BadInput, match="rewards .* name another --out"):  # it is another run
        rloo.main(replace(base, reward=(), out=str(tmp_path / "out")), rewards=lambda completions, **_: [0.0])


def test_a_reward_that_changes_the_working_directory_moves_no_file(args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    def wanders(completions, **_):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        os.chdir(tmp_path / "elsewhere")
        return [float(len(y)) for y in completions]
    rloo.main(replace(args, model=str(Path(MODEL).absolute()), reward=(), out="here"), rewards=(wanders,))
    assert (tmp_path / "here/model/model.safetensors").exists() and not [*(tmp_path / "elsewhere").iterdir()]


def test_a_file_of_rewards_that_changes_the_working_directory_moves_no_file(args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data.jsonl").write_text(Path(args.data).read_text())
    (tmp_path / "wandering_reward.py").write_text(
        "import os\nos.chdir('elsewhere')\n"
        "def count(completions, **_):\n    return [float(len(y)) for y in completions]\n")
    files = dict(data="data.jsonl", reward=("wandering_reward.py:count",), out="here")
    rloo.main(replace(args, model=str(Path(MODEL).absolute()), **files))
    assert (tmp_path / "here/model/model.safetensors").exists() and not [*(tmp_path / "elsewhere").iterdir()]


def test_a_file_of_rewards_that_is_missing_is_no_missing_package(args):
    with pytest.raises(BadInput, match="there is no file nowhere.py"):
        main(replace(args, reward=("nowhere.py:f",)))


def test_a_reward_model_keeps_to_tokens_per_forward_and_to_its_positions(tmp_path):
    chats = [[{"role": "user", "content": "a"}]] * 4
    answers = [[{"role": "assistant", "content": "soup " * n}] for n in (1, 9, 4, 9)]
    texts = [TOKENIZER.apply_chat_template(p + y, tokenize=False) for p, y in zip(chats, answers)]
    longest, shapes = max(len(TOKENIZER(text, add_special_tokens=False).input_ids) for text in texts), []
    fits = reward_model(classifier(tmp_path / "a", max_position_embeddings=longest), 2 * longest)
    watch(fits.model, lambda ids: shapes.append(ids.numel()))
    assert len(fits(chats, answers)) == 4 and max(shapes) <= 2 * longest and len(shapes) == 2
    with pytest.raises(BadInput, match=f"{longest} tokens is too long for the reward model"):
        reward_model(classifier(tmp_path / "b", max_position_embeddings=longest - 1))(chats, answers)


@pytest.mark.parametrize("chat", [True, False])
def test_a_reward_model_gets_the_bos_of_its_tokenizer_once(tmp_path, chat):
    from tokenizers.processors import TemplateProcessing
    model, seen, bos = reward_model(classifier(tmp_path / "a")), [], TOKENIZER.convert_tokens_to_ids("<|user|>")
    front = TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", bos)])
    model.tokenizer._tokenizer.post_processor = front
    watch(model.model, lambda ids: seen.extend(ids.tolist()))
    question, answer = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    model([question if chat else "a"], [answer if chat else "b"])
    assert seen[0][0] == bos and seen[0].count(bos) == 1


def test_what_is_no_reward_model_is_refused(tmp_path):
    for name, words in ((classifier(tmp_path / "two", outputs=2), "is no reward model"), (MODEL, "lacks weights")):
        with pytest.raises(BadInput, match=words) as error:
            reward_model(name)
        assert "\n" not in str(error.value)


# ---- Training -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_learns_the_demo(tmp_path):
    history = main(Args(out=str(tmp_path / "out")))
    assert history[0]["eval_score"] < 0.45 and history[-1]["eval_score"] > 0.9 and abs(history[1]["kl"]) < 1e-5


def test_learns_a_reward(run):
    """More vowels."""
    changes = dict(k=8, beta=0.01, max_new_tokens=8, lr=3e-3, warmup=0.0, schedule="constant")
    history = run(steps=6, samples=0, **changes).history
    assert min(values["reward"] for values in history[5:]) > 1.25 * history[1]["reward"]


def sequence_logp(model, prompt, y, temperature=1.0):
    """The slow way: one forward per sequence."""
    ids = torch.tensor([prompt + y])
    logps = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
    return logps.gather(1, ids[0, 1:, None])[len(prompt) - 1:].sum()


@pytest.mark.parametrize("changes", [
    dict(updates_per_rollout=2, temperature=0.8, reward_clip=(0.9, 1.2), mask_truncated=True),
    pytest.param(dict(), marks=pytest.mark.slow),
    pytest.param(dict(steps=4, updates_per_rollout=3), marks=pytest.mark.slow)])
def test_training_equals_a_slow_loop_of_two_models(run, changes):
    one, steps = run(**changes), changes.get("steps", 2)
    history = one.history
    args = replace(Args(), **changes)
    policy, base = (AutoModelForCausalLM.from_pretrained(MODEL) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for step, drawn in enumerate(one.rollouts, 1):
        optimizer.param_groups[0]["lr"] = 1e-3 * lr_factor(step, steps, 0.1, "linear")
        tokens = sum(len(y) for _, ys in drawn.groups for y in ys)
        old = None
        for _ in range(args.updates_per_rollout):
            loss, clipped, kl = 0, 0, 0
            logps = [[sequence_logp(policy, p, y, args.temperature) for y in ys] for p, ys in drawn.groups]
            old = old or [[logp.item() for logp in row] for row in logps]
            for b, (prompt, ys) in enumerate(drawn.groups):
                with torch.no_grad():
                    reference = [sequence_logp(base, prompt, y, args.temperature).item() for y in ys]
                ratios = [logp - ref for logp, ref in zip(old[b], reference)]
                kl += sum(ratios) / tokens
                texts = TOKENIZER.batch_decode(ys, skip_special_tokens=True)
                low, high = args.reward_clip or (-99, 99)
                total = {i: min(max(vowels(text), low), high) - args.beta * ratios[i] for i, text in enumerate(texts)
                         if drawn.ended[b, i] or not args.mask_truncated}
                for i in total if len(total) > 1 else ():
                    ratio = (logps[b][i] - old[b][i]).exp()
                    advantage = total[i] - sum(total[j] for j in total if j != i) / (len(total) - 1)
                    loss = loss - torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / 16
                    clipped += (advantage > 0 and ratio > 1.2 or advantage < 0 and ratio < 0.8) / 16
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        assert loss.item() == pytest.approx(history[step]["loss"], abs=1e-3)
        assert clipped == pytest.approx(history[step]["clip_ratio"])
        assert kl == pytest.approx(history[step]["kl"], abs=1e-3)
    assert abs(history[-1]["kl"]) > 1e-3 and len(one.rollouts) == steps
    assert any(0 < values["completions/clipped_ratio"] < 1 for values in history[1:])
    assert (max(values["clip_ratio"] for values in history[1:]) > 0) == (args.updates_per_rollout > 1)
    gaps = torch.cat([(p - one.weights[name]).abs().flatten() for name, p in policy.named_parameters()])
    # but for a few of 426,624: where a gradient is 1e-8, Adam makes a whole step of its rounding
    assert gaps.topk(20).values[-1] < 1e-4


MEMORY = [dict(tokens_per_forward=60), dict(gradient_checkpointing=True), dict(rollout_tokens=1)]


@pytest.mark.parametrize("changes", [
    MEMORY[0] | MEMORY[1] | MEMORY[2], *(pytest.param(changes, marks=pytest.mark.slow) for changes in MEMORY)])
def test_memory_flags_change_no_sample_and_no_result(run, changes):
    one, other = run(), run(**changes)
    assert [drawn.groups for drawn in one.rollouts] == [drawn.groups for drawn in other.rollouts]
    assert same_history(one.history, other.history, 1e-4) and largest_difference(one.weights, other.weights) < 2e-5


def test_same_seed_gives_the_same_bits_and_another_seed_others(run):
    runs = [run(), run(again=1), run(seed=1)]
    for name in ("model/model.safetensors", "metrics.jsonl", "samples.jsonl"):
        first, second, third = ((one.out / name).read_bytes() for one in runs)
        assert first == second != third


def test_lr_zero_changes_nothing(run):
    one = run(lr=0.0, steps=1)
    first, last = one.history
    assert largest_difference(one.weights, load_file(f"{MODEL}/model.safetensors")) == 0
    assert all(first[name] == last[name] for name in first if name != "step")


def test_beta_0_loads_no_reference_and_reports_no_kl(run, monkeypatch):
    monkeypatch.setattr(rloo, "Swap", None)
    assert not [name for values in run(beta=0.0).history for name in values if "kl" in name]


@pytest.mark.parametrize("lora", [dict(), pytest.param(dict(lora_r=4), marks=[
    pytest.mark.skipif(find_spec("peft") is None, reason="needs peft"), pytest.mark.slow])])
def test_a_swapped_reference_gives_the_metrics_of_a_live_one(run, lora):
    swapped, live = run(**lora), run(ref="live", **lora)
    assert same_history(swapped.history, live.history) and abs(swapped.history[2]["kl"]) > 1e-5


def test_the_reference_follows_after_the_update_of_a_step(run):
    still, moved = run().history, run(sync_reference=1).history
    assert moved[1]["kl"] == still[1]["kl"] and abs(still[2]["kl"]) > 1e-3 and abs(moved[2]["kl"]) < 1e-5


@pytest.mark.slow
def test_sync_reference_and_sync_mix_say_when_and_how_far_the_reference_moves(run):
    changes = dict(steps=4, samples=0)
    still, second, mixed = (run(**changes, **more).history for more in (
        {}, dict(sync_reference=2), dict(sync_reference=2, sync_mix=0.5)))
    assert same_history(still[:3], second[:3]) and same_history(still[:3], mixed[:3])
    assert abs(second[3]["kl"]) < 1e-5 < abs(mixed[3]["kl"]) < abs(still[3]["kl"])


@pytest.mark.parametrize("steps", [1, 2])
def test_an_update_into_nowhere_saves_no_model(args, steps):
    """Step 2 sees the weights of step 1 in its own numbers, the last step only in the held-out ones."""
    with pytest.raises(rloo.Stopped, match="nan"):
        main(replace(args, lr=1e17, steps=steps, warmup=0.0))
    assert not (Path(args.out) / "model").exists()


# ---- Files, data, refusals ------------------------------------------------------------------------------------------


def test_metrics_by_hand_and_what_the_files_hold(run):
    one = run(steps=3, eval_every=2, reward_clip=(-1.0, 0.4))
    names = {name.removeprefix("eval_") for values in one.history for name in values} - {"step", "rewards/vowels"}
    assert not [name for name in names if name not in rloo.__doc__] and "rewards/NAME" in rloo.__doc__
    samples = read(one.out / "samples.jsonl")
    assert read(one.out / "metrics.jsonl") == one.history
    assert ["eval_reward" in values for values in one.history] == [True, False, True, True]
    assert sum(line["held_out"] for line in samples) == 6
    tokens = 0
    for step, drawn in enumerate(one.rollouts, 1):
        rows = batch_rows(step, ROWS, 4, 0)
        lines = [line for line in samples if line["step"] == step and not line["held_out"]]
        texts = [TOKENIZER.decode(y, skip_special_tokens=True) for _, ys in drawn.groups for y in ys]
        rewards, lengths = list(map(vowels, texts)), [len(y) for _, ys in drawn.groups for y in ys]
        assert [line["prompt"] for line in lines] == [row["prompt"] for row in rows for _ in range(4)]
        assert [line["completion"] for line in lines] == texts
        assert [line["reward"] for line in lines] == pytest.approx(rewards)
        tokens += sum(len(prompt) for prompt, _ in drawn.groups) + sum(lengths)
        expected = {
            "reward": np.mean(rewards), "reward_std": np.std(rewards), "rewards/vowels": np.mean(rewards),
            "num_tokens": tokens, "entropy": drawn.entropy, "completions/mean_length": np.mean(lengths),
            "completions/clipped_ratio": 1 - drawn.ended.float().mean().item(),
            "frac_reward_zero_std": np.mean([len(set(rewards[b * 4:b * 4 + 4])) == 1 for b in range(4)])}
        assert {name: one.history[step][name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_a_prompt_without_room_for_its_sample_is_dropped_or_truncated_and_counted(run, tmp_path, capsys):
    long, changes = dict(ROWS[0], prompt="and so on " * 60), dict(max_length=80, steps=1, samples=0)
    run(data=write(tmp_path / "long.jsonl", ROWS[:8] + [long]), **changes)
    assert "8 of 9 rows; 1 dropped: longer than 68 tokens (first: " in capsys.readouterr().out
    one = run(data=write(tmp_path / "longer.jsonl", ROWS[:3] + [long]), truncate=True, **changes)
    assert "1 truncated" in capsys.readouterr().out and 68 in [len(prompt) for prompt, _ in one.rollouts[0].groups]


def test_prompt_and_sample_may_fill_the_positions_of_the_model(run, tmp_path):
    """Of which there are 256."""
    data = write(tmp_path / "long.jsonl", [dict(ROWS[0], prompt="and so on " * 200)] * 2)
    files, changes = dict(data=data, eval_data=data), dict(truncate=True, max_length=999, max_new_tokens=40)
    groups = run(**files, **changes, samples=0, steps=1, temperature=9.0).rollouts[0].groups
    assert {len(prompt) for prompt, _ in groups} == {216} and max(len(y) for _, ys in groups for y in ys) == 40


BROKEN = "broken.py:broken"


@pytest.mark.parametrize("changes, words", [
    (dict(k=1), "--k"), (dict(data="no.jsonl"), "no.jsonl"), (dict(data="empty.jsonl"), "no rows"),
    (dict(reward=()), "no reward"), (dict(reward=(BROKEN,)), "broken failed.*no idea"),
    (dict(reward=("broken.py:other",)), "broken.py:other"), (dict(reward=("no.py:f",)), "no.py:f"),
    (dict(reward=(BROKEN, BROKEN)), "broken"), (dict(reward_weights=(1.0, 2.0)), "--reward_weights"),
    (dict(reward_weights=(0.0,)), "--reward_weights"), (dict(reward_weights=(NAN,)), "--reward_weights"),
    (dict(reward_weights=(math.inf,)), "--reward_weights"),
    (dict(reward_clip=(1.0, -1.0)), "--reward_clip"), (dict(reward_clip=(NAN, 1.0)), "--reward_clip"),
    (dict(temperature=0.0), "--temperature"), (dict(temperature=NAN), "--temperature"), (dict(top_p=2.0), "--top_p"),
    (dict(top_p=0.0), "--top_p"), (dict(top_k=-1), "--top_k"), (dict(beta=-1.0), "--beta"), (dict(beta=NAN), "--beta"),
    (dict(ref="none"), "--ref"), (dict(ref="live", sync_reference=1), "--sync_reference"),
    (dict(beta=0.0, sync_reference=1), "--sync_reference"), (dict(clip_eps=0.1), "--clip_eps"),
    (dict(beta=0.0, ref_model="demo"), "--beta 0"),
    (dict(clip_eps=1.0), "--clip_eps"), (dict(lr=1e38), "--lr"), (dict(max_length=12), "--max_length"),
    (dict(max_new_tokens=256), "--max_new_tokens|too few rows"),
    (dict(updates_per_rollout=0), "--updates_per_rollout"), (dict(rollout_tokens=0), "--rollout_tokens"),
    (dict(model=None), "--model"), (dict(lora_r=4, lora_dropout=0.1, updates_per_rollout=2), "--lora_dropout")])
def test_misuse_is_refused_in_one_sentence(args, changes, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    Path("broken.py").write_text("def broken(**columns):\n    raise ValueError('no\\nidea')\n")
    Path("empty.jsonl").write_text("")
    with pytest.raises(BadInput, match=words) as error:
        main(replace(args, **changes))
    assert "\n" not in str(error.value)


def test_a_tokenizer_larger_than_the_model_is_refused_in_one_sentence(args, tmp_path):
    config = AutoConfig.from_pretrained(MODEL, vocab_size=50)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "small")
    TOKENIZER.save_pretrained(tmp_path / "small")
    with pytest.raises(BadInput, match="50") as error:
        main(replace(args, model=str(tmp_path / "small")))
    assert "\n" not in str(error.value)


def test_mask_truncated_with_a_model_that_never_ends_is_refused(args, tmp_path):
    shutil.copytree(MODEL, tmp_path / "endless")
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        settings = json.loads((tmp_path / "endless" / name).read_text())
        settings = {key: value for key, value in settings.items() if "eos" not in key}
        (tmp_path / "endless" / name).write_text(json.dumps(settings))
    with pytest.raises(BadInput, match="mask_truncated"):
        main(replace(args, model=str(tmp_path / "endless"), mask_truncated=True))


def test_a_run_whose_samples_are_all_masked_says_that_it_learnt_nothing(args, capsys):
    """One token per sample: none ends, and rewards differ, but no sample has a gradient."""
    history = main(replace(args, max_new_tokens=1, mask_truncated=True, steps=1))
    assert history[-1]["grad_norm"] == 0 and history[-1]["frac_reward_zero_std"] < 1
    assert "there was nothing to learn" in capsys.readouterr().out


@pytest.mark.slow
def test_the_script_runs_alone_with_refcache_and_exits_with_2_on_bad_input(tmp_path, args):
    for name in ("rloo.py", "refcache.py"):
        shutil.copy(ROOT / name, tmp_path)
    write(tmp_path / "vowels.py", [REWARDS])
    flags = ["--model", MODEL, "--data", args.data, "--steps", "1", "--samples", "2", "--max_new_tokens", "4"]

    def call(reward):
        return subprocess.run([sys.executable, "rloo.py", *flags, "--reward", reward], cwd=tmp_path, env=os.environ,
                              capture_output=True, text=True)
    done = call("vowels.py:vowels")
    assert done.returncode == 0 and (tmp_path / "out/rloo/model/model.safetensors").exists(), done.stderr
    done = call("vowels.py:consonants")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("rloo.py: cannot load vowels.py:consonants")
