"""rloo.py: advantages by hand, samples against transformers' generate(), training against a slow loop, and what it refuses."""
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import needs_peft
from safetensors.torch import load_file
from torch import tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import refcache
import rloo
from refcache import BadInput, batch_rows, load_tokenizer, lr_factor
from rloo import Args, RewardModel, Rollout, Row, judge, leave_one_out, main, policy_loss, rollout

ROOT = Path(rloo.__file__).parent
MODEL = str(ROOT / "demo/model")
ROWS = [json.loads(line) for line in open(ROOT / "demo/prompts.jsonl")][:24]
TOKENIZER, _ = load_tokenizer(MODEL)
NAN = math.nan
REWARDS = """
def vowels(prompts, completions, **columns):
    return [sum(x in "aeiou" for x in (y if isinstance(y, str) else y[-1]["content"])) / 10 for y in completions]
def score(completions, **columns):
    return [None] * len(completions)
"""
def vowels(text): return sum(x in "aeiou" for x in text) / 10


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def args(tmp_path):
    """A run of three steps, whose samples have an end about as often as not."""
    write(tmp_path / "vowels.py", [REWARDS])
    return Args(model=MODEL, data=write(tmp_path / "train.jsonl", ROWS), eval_data=write(tmp_path / "eval.jsonl", ROWS[:4]), steps=3, batch_size=4,
                lr=1e-3, samples=2, max_new_tokens=12, reward=(f"{tmp_path}/vowels.py:vowels",), out=str(tmp_path / "out"))


@pytest.fixture
def run(args, tmp_path, monkeypatch):
    """run(**changes) -> (history, weights, rollouts of the steps), each in a fresh folder."""
    count = iter(range(99))
    def run(**changes):
        rollouts, mine = [], replace(args, out=str(tmp_path / f"run{next(count)}"), **changes)
        with monkeypatch.context() as patch:
            patch.setattr(rloo, "rollout", lambda *a: rollouts.append(rollout(*a)) or rollouts[-1])
            history = main(mine)
        run.out = Path(mine.out)
        trained = load_file(run.out / ("adapter_model.safetensors" if mine.lora_r else "model.safetensors"))
        return history, trained, [r for r in rollouts if len(r.groups[0][1]) > 1]
    return run


def largest_difference(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


def logp(model, prompt, y, temperature=1.0):
    """The slow way: one forward a sequence."""
    ids = torch.tensor([prompt + y])
    return (model(ids).logits[0, :-1] / temperature).log_softmax(-1).gather(1, ids[0, 1:, None])[len(prompt) - 1:].sum()


# --- the loss -------------------------------------------------------------------------------------------------------


def test_advantages_by_hand_without_a_standard_deviation_and_without_samples_left_out():
    assert leave_one_out(tensor([[1.0, 2.0, 6.0], [10.0, 20.0, 60.0], [3.0, 3.0, 3.0]])).tolist() == [[-3, -1.5, 4.5], [-30, -15, 45], [0, 0, 0]]
    assert leave_one_out(torch.randn(5, 4)).sum(1).abs().max() < 1e-5
    A = leave_one_out(tensor([[1.0, NAN, 6.0, 2.0], [NAN, 5.0, NAN, NAN], [NAN] * 4, [NAN, 1.0, 4.0, NAN]]))  # one alone learns nothing
    assert A.tolist() == [[-3, 0, 4.5, -1.5], [0, 0, 0, 0], [0, 0, 0, 0], [0, -3, 3, 0]]


def test_the_gradient_is_minus_the_advantage_times_the_ratio_and_clipping_by_hand():
    ratios, A = tensor([1.0, 1.0, 1.0, 1.5, 1.5, 0.5, 0.5, 1.1]), tensor([1.5, -2.0, 0.0, 2.0, -2.0, 2.0, -2.0, 2.0])
    logps = (ratios.log() - 70).requires_grad_()
    losses = policy_loss(logps, torch.full((8,), -70.0), A, 0.2)
    grad, = torch.autograd.grad(losses.sum(), logps)
    assert losses.tolist() == pytest.approx([-1.5, 2, 0, -2.4, 3, -1, 1.6, -2.2], abs=1e-4)
    assert grad.tolist() == pytest.approx([-1.5, 2, 0, 0, 3, -1, 0, -2.2], abs=1e-4)


# --- rewards --------------------------------------------------------------------------------------------------------


def judged(*functions, rows=[dict(prompt="a"), dict(prompt="b")]):
    ys = [tuple(TOKENIZER(text).input_ids) for text in (" soup", " tea", " bread", " cake")]
    sampled = Rollout([((1,), ys[:2]), ((2,), ys[2:])], None, None)
    return judge(sampled, [Row((1,), row) for row in rows], TOKENIZER, [(f"f{i}", f, w) for i, (f, w) in enumerate(functions)])


def test_rewards_are_weighted_and_none_of_all_leaves_a_sample_out():
    f, g = lambda **c: [1.0, None, None, 4], lambda **c: [10, 20.0, None, None]
    rewards, samples, means = judged((f, 2.0), (g, 0.5))
    assert torch.equal(rewards.nan_to_num(-1), tensor([[7.0, 10.0], [-1.0, 8.0]])) and rewards[1, 0].isnan()
    assert means == {"rewards/f0": 2.5, "rewards/f1": 15} and [s["reward"] for s in samples] == [7, 10, None, 8]
    rewards, _, means = judged((f, 1.0), (lambda **c: [5.0] * 4, 0.0), (lambda **c: [None] * 4, 1.0))  # the second is only reported
    assert rewards.isnan().tolist() == [[False, True], [True, False]] and means == {"rewards/f0": 2.5, "rewards/f1": 5}


def test_functions_and_a_model_of_one_name_are_told_apart(run, tmp_path):
    path = classifier(tmp_path / "vowels")
    history, _, _ = run(reward_model=path, steps=1)
    names = [f"rewards/{tmp_path}/vowels.py:vowels", f"rewards/{path}"]
    assert all(name in history[1] for name in names) and history[1]["reward"] == pytest.approx(sum(history[1][name] for name in names), abs=1e-5)


def test_columns_come_once_a_sample_and_chats_as_messages():
    seen, chat = {}, [{"role": "user", "content": "a"}]
    judged((lambda **columns: seen.update(columns) or [0.0] * 4, 1.0), rows=[dict(prompt=chat, thing=1), dict(prompt="b", thing=None)])
    answers = [[{"role": "assistant", "content": " soup"}], [{"role": "assistant", "content": " tea"}], " bread", " cake"]
    assert seen == dict(prompts=[chat, chat, "b", "b"], completions=answers, thing=[1, 1, None, None])


@pytest.mark.parametrize("scores, words", [
    (lambda: [1.0] * 3, "returned 3 scores for 4"), (lambda: [0, 0, NAN, 0], "returned nan for the completion ' bread'"),
    (lambda: [0, -math.inf, 0, 0], "returned -inf for the completion ' tea'"), (lambda: [0, 0, 0, 1e300], "returned 1e\\+300 for the completion ' cake'"), (lambda: 1 / 0, "ZeroDivisionError"), (lambda: None, "TypeError"),
    (lambda: [0, 0, "x", 0], "TypeError"), (lambda: sys.exit(3), "SystemExit")])
def test_a_reward_that_fails_is_named(scores, words):
    with pytest.raises(BadInput, match=f"^f1 failed.*: .*{words}") as error:
        judged((lambda **c: [0.0] * 4, 1.0), (lambda **c: scores(), 1.0))
    assert "\n" not in str(error.value)


def classifier(path, outputs=1, **changes):
    torch.manual_seed(0)
    config = refcache.AutoConfig.from_pretrained(MODEL, num_labels=outputs, **changes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("pad", [0, None])
def test_a_reward_model_scores_as_one_forward_a_text_does(tmp_path, run, pad):
    path = classifier(tmp_path / "judge", pad_token_id=pad)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    chats, answers = [row["prompt"] for row in ROWS[:6]], [[{"role": "assistant", "content": "The soup was nice. " * n}] for n in range(6)]
    texts = [TOKENIZER.apply_chat_template(p + y, tokenize=False) for p, y in zip(chats, answers)]
    strings = [("How was it?", " Fine."), ("Why", " not, said the waiter.")]
    for prompts, ys, texts in ((chats, answers, texts), (*zip(*strings), [p + y + "<|end|>" for p, y in strings])):
        truth = [model(torch.tensor([TOKENIZER(text, add_special_tokens=False).input_ids])).logits.item() for text in texts]
        for budget in (1, 90, 10**6):
            assert RewardModel(path, "cpu", budget)(prompts, ys) == pytest.approx(truth, abs=1e-5)
    history, _, _ = run(reward_model=path, reward_weights=(1.0, 0.5))
    assert all(v["reward"] == pytest.approx(v["rewards/vowels"] + 0.5 * v["rewards/judge"], abs=1e-5) for v in history[1:])


def test_out_of_memory_in_a_reward_is_no_bad_input():
    def full(**_): raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        judged((full, 1.0))


def test_a_reward_model_keeps_to_its_budget_and_its_positions(tmp_path, monkeypatch):
    chats, answers = [[{"role": "user", "content": "a"}]] * 4, [[{"role": "assistant", "content": "soup " * n}] for n in (1, 9, 4, 9)]
    longest = max(len(TOKENIZER(TOKENIZER.apply_chat_template(p + y, tokenize=False), add_special_tokens=False).input_ids) for p, y in zip(chats, answers))
    judge, shapes = RewardModel(classifier(tmp_path / "a", max_position_embeddings=longest), "cpu", 2 * longest), []
    judge.model.register_forward_pre_hook(lambda module, args, kwargs: shapes.append(kwargs["input_ids"].numel()), with_kwargs=True)
    assert len(judge(chats, answers)) == 4 and max(shapes) <= 2 * longest and len(shapes) == 2
    with pytest.raises(BadInput, match=f"longer than the reward model's {longest - 1} positions"):
        RewardModel(classifier(tmp_path / "b", max_position_embeddings=longest - 1), "cpu", 99)(chats, answers)


@pytest.mark.parametrize("chat", [True, False])
def test_a_reward_model_gets_a_bos_with_strings_only(tmp_path, chat):
    from tokenizers.processors import TemplateProcessing
    judge, seen = RewardModel(classifier(tmp_path / "a"), "cpu", 99), []
    judge.tokenizer._tokenizer.post_processor = TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", TOKENIZER.convert_tokens_to_ids("<|user|>"))])
    judge.model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["input_ids"][0].tolist()), with_kwargs=True)
    judge(*(([[{"role": "user", "content": "a"}]], [[{"role": "assistant", "content": "b"}]]) if chat else (["a"], ["b"])))
    assert seen[0].count(TOKENIZER.convert_tokens_to_ids("<|user|>")) == 1


def test_what_is_no_reward_model_is_refused(tmp_path):
    for name in (classifier(tmp_path / "two", outputs=2), MODEL, "nowhere"):
        with pytest.raises(BadInput, match="is no reward model|lacks weights of a reward model|cannot"):
            RewardModel(name, "cpu", 99)


# --- training -------------------------------------------------------------------------------------------------------


def test_learns_the_demo(tmp_path):
    history = main(Args(out=str(tmp_path)))
    assert history[0]["eval_score"] < 0.45 and history[-1]["eval_score"] > 0.9 and abs(history[1]["kl"]) < 1e-5


@pytest.mark.parametrize("changes", [dict(), dict(updates_per_rollout=2, temperature=0.8, reward_clip=(0.5, 1.5)), dict(mask_truncated=True)])
def test_training_equals_a_slow_loop(run, changes):
    """Two models in memory, one forward a sequence, from the samples of the run."""
    history, trained, rollouts = run(**changes)
    args = replace(Args(), **changes)
    policy, base = (AutoModelForCausalLM.from_pretrained(MODEL) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for step, (groups, ended, _) in enumerate(rollouts, 1):
        optimizer.param_groups[0]["lr"] = 1e-3 * lr_factor(step, 3, 0.1, "linear")
        old, kl = None, 0
        for _ in range(args.updates_per_rollout):
            loss, beyond, logps = 0, 0, [[logp(policy, p, y, args.temperature) for y in ys] for p, ys in groups]
            old = old or [[x.item() for x in row] for row in logps]
            for b, (p, ys) in enumerate(groups):
                with torch.no_grad(): rho = [old[b][i] - logp(base, p, y, args.temperature).item() for i, y in enumerate(ys)]
                texts = TOKENIZER.batch_decode(ys, skip_special_tokens=True)
                low, high = args.reward_clip or (0, 99)
                R = {i: min(max(vowels(text), low), high) - args.beta * rho[i] for i, text in enumerate(texts) if ended[b, i] or not args.mask_truncated}
                kl += sum(rho)
                for i in R if len(R) > 1 else ():
                    ratio, A = (logps[b][i] - old[b][i]).exp(), R[i] - sum(R[j] for j in R if j != i) / (len(R) - 1)
                    loss, beyond = loss - torch.min(ratio * A, ratio.clamp(0.8, 1.2) * A) / 16, beyond + (ratio > 1.2 if A > 0 else ratio < 0.8).item() / 16
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        assert loss.item() == pytest.approx(history[step]["loss"], abs=1e-4) and beyond == pytest.approx(history[step]["clip_ratio"])
        assert kl / args.updates_per_rollout / sum(len(y) for _, ys in groups for y in ys) == pytest.approx(history[step]["kl"], abs=1e-4)
    assert abs(history[3]["kl"]) > 1e-3 and len(rollouts) == 3 and any(0 < v["completions/clipped_ratio"] < 1 for v in history[1:])
    assert (max(v["clip_ratio"] for v in history[1:]) > 0) == (args.updates_per_rollout > 1)
    gaps = torch.cat([(p - trained[name]).abs().flatten() for name, p in policy.named_parameters()])
    assert gaps.topk(20).values[-1] < 1e-5  # of 426,624: where a gradient is 1e-8, Adam makes a whole step of its rounding


def test_an_update_costs_one_forward_a_micro_batch_and_the_old_policy_none(run, monkeypatch):
    asked, scored = [], []
    monkeypatch.setattr(rloo, "log_ratios", lambda policy, groups, *rest: asked.append((torch.is_grad_enabled(), len(groups))) or
                        refcache.log_ratios(policy, groups, *rest))
    monkeypatch.setattr(rloo, "check_start", lambda *a: None)
    monkeypatch.setattr(refcache, "why_not_expanded", lambda core: "")  # its trial asks too, once a model
    forward = refcache._forward
    monkeypatch.setattr(refcache, "_forward", lambda *a: scored.extend([torch.is_grad_enabled()] * (len(a) == 4)) or forward(*a))  # 4: no probe
    run(samples=0, updates_per_rollout=2)
    assert asked == [(True, 4)] * 6 and scored == [False, True, True] * 3
    asked.clear()
    run(samples=0, tokens_per_forward=1)
    assert asked == [(True, 1)] * 12


def test_what_changes_memory_only(run):
    one, first, samples = run()
    for changes in (dict(tokens_per_forward=60), dict(gradient_checkpointing=True), dict(rollout_tokens=1)):
        many, second, others = run(**changes)
        assert [r.groups for r in samples] == [r.groups for r in others] and largest_difference(first, second) < 2e-5
        assert all(a[name] == pytest.approx(b[name], abs=1e-4, rel=1e-4) for a, b in zip(one, many) for name in a)


def test_same_seed_same_bits_and_no_clock_in_the_metrics(run):
    files = []
    for seed in (0, 0, 1):
        _, trained, _ = run(seed=seed, steps=2)
        files.append(({name: w.numpy().tobytes() for name, w in trained.items()}, *((run.out / f"{name}.jsonl").read_bytes() for name in ("metrics", "samples"))))
    assert files[0] == files[1] and all(a != b for a, b in zip(files[1], files[2]))


def test_lr_zero_changes_nothing(run):
    history, trained, _ = run(lr=0.0, steps=1)
    assert largest_difference(trained, load_file(Path(MODEL) / "model.safetensors")) == 0
    assert all(history[0][name] == history[1][name] for name in history[0] if name != "step")


def test_a_last_update_into_nowhere_saves_no_model(args):
    with pytest.raises(refcache.Diverged, match="step 1: .*eval_kl is nan"):
        main(replace(args, lr=1e30, steps=1, warmup=0.0))
    assert not list(Path(args.out).glob("*.safetensors"))


def test_beta_0_loads_no_reference_and_has_no_kl(run, monkeypatch):
    loaded = []
    monkeypatch.setattr(refcache, "load_model", lambda *a, real=refcache.load_model, **k: loaded.append(a) or real(*a, **k))
    monkeypatch.setattr(refcache, "Swap", None)
    history, _, _ = run(beta=0.0)
    assert len(loaded) == 1 and not [name for values in history for name in values if "kl" in name]


@pytest.mark.parametrize("lora", [dict(), pytest.param(dict(lora_r=4), marks=needs_peft)])
def test_wherever_the_reference_is_the_metrics_are_the_same(run, lora):
    here, there = (run(ref=ref, **lora)[0] for ref in ("adapter" if lora else "swap", "live"))
    assert all(a[name] == pytest.approx(b[name], abs=1e-5) for a, b in zip(here, there) for name in a) and abs(here[3]["kl"]) > 1e-5


# --- files and refusals ---------------------------------------------------------------------------------------------


def test_metrics_by_hand_and_what_the_files_hold(run):
    history, _, rollouts = run(eval_every=2, reward_clip=(-1.0, 0.4))
    names = {name.removeprefix("eval_") for values in history for name in values} - {"step", "rewards/vowels"}
    assert not [name for name in names if name not in rloo.__doc__] and "rewards/NAME" in rloo.__doc__
    metrics, samples, seconds = ([json.loads(line) for line in open(run.out / f"{name}.jsonl")] for name in ("metrics", "samples", "seconds"))
    assert metrics == history and [list(s) for s in seconds] == [["step", "rollout", "reward", "reference", "update"]] * 3
    assert ["eval_reward" in values for values in history] == [True, False, True, True] and sum(s["held_out"] for s in samples) == 6
    total = 0
    for step, (groups, ended, _) in enumerate(rollouts, 1):
        rows, drawn = [ROWS[i] for i in batch_rows(step, 24, 4, 0)], [s for s in samples if s["step"] == step and not s["held_out"]]
        texts = [TOKENIZER.decode(y, skip_special_tokens=True) for _, ys in groups for y in ys]
        rewards = list(map(vowels, texts))
        assert [s["prompt"] for s in drawn] == [row["prompt"] for row in rows for _ in range(4)] and [s["completion"] for s in drawn] == texts
        assert [s["reward"] for s in drawn] == pytest.approx(rewards)
        lengths = [len(y) for _, ys in groups for y in ys]
        total += sum(len(p) for p, _ in groups) + sum(lengths)
        assert history[step] == history[step] | {k: pytest.approx(v, abs=1e-6) for k, v in {
            "reward": np.mean(rewards), "reward_std": np.std(rewards), "rewards/vowels": np.mean(rewards), "num_tokens": total,
            "completions/mean_length": np.mean(lengths), "completions/clipped_ratio": 1 - ended.float().mean().item(),
            "frac_reward_zero_std": np.mean([len(set(rewards[b * 4:b * 4 + 4])) == 1 for b in range(4)])}.items()}


def test_samples_without_any_reward_teach_nothing_and_a_score_makes_none(run, tmp_path):
    history, trained, _ = run(reward=(f"{tmp_path}/vowels.py:score",), score=f"{tmp_path}/vowels.py:vowels", steps=1)
    assert "reward" not in history[1] and "eval_reward" not in history[1] and history[1]["eval_score"] > 0
    assert history[1]["grad_norm"] == 0 and largest_difference(trained, load_file(Path(MODEL) / "model.safetensors")) == 0


def test_a_prompt_without_room_for_its_sample_is_dropped_and_counted(run, tmp_path, capsys):
    long = dict(ROWS[0], prompt="and so on " * 60)
    run(data=write(tmp_path / "long.jsonl", ROWS[:8] + [long]), max_length=80, steps=1)
    assert "8 of 9 rows; 1 dropped: longer than 68 tokens, first" in capsys.readouterr().out
    _, _, rollouts = run(data=write(tmp_path / "long.jsonl", ROWS[:3] + [long]), max_length=80, steps=1, truncate=True)
    assert "1 truncated" in capsys.readouterr().out and 68 in [len(p) for p, _ in rollouts[0].groups]


BROKEN = "broken.py:broken"


@pytest.mark.parametrize("changes, words", [
    (dict(k=1), "--k must be"), (dict(data="no.jsonl"), "cannot read no.jsonl"), (dict(data="empty.jsonl"), "holds no rows"), (dict(reward=()), "no reward"),
    (dict(reward=(BROKEN,)), "^broken failed in line 2: ValueError no idea"), (dict(reward=("broken.py:other",)), "cannot load broken.py:other"),
    (dict(reward=("no.py:f",)), "cannot load no.py:f"), (dict(temperature=0.0), "--temperature"), (dict(top_p=2.0), "--top_p"), (dict(top_k=-1), "--top_k"),
    (dict(ref="none"), "add --beta 0"), (dict(beta=0.0, ref="swap"), "leave out --ref swap"), (dict(beta=-1.0), "--beta"), (dict(beta=NAN), "--beta"),
    (dict(reward_weights=(1.0, 2.0)), "--reward_weights must be 1"), (dict(reward_weights=(NAN,)), "--reward_weights"), (dict(clip_eps=1.0), "--clip_eps"),
    (dict(reward=(BROKEN, BROKEN)), "names a function twice"), (dict(mask_truncated=True, model="endless"), "--mask_truncated leaves every sample out"),
    (dict(reward_clip=(1.0, -1.0)), "--reward_clip"), (dict(lr=1e38), "--lr"), (dict(ref="live", ref_dtype="bfloat16", sync_reference=1, sync_mix=0.1), "round the small moves"), (dict(max_length=12), "above --max_new_tokens"), (dict(max_new_tokens=256), "leaves no room for a prompt"),
    (dict(updates_per_rollout=0), "--updates_per_rollout"), (dict(rollout_tokens=0), "--rollout_tokens"), (dict(model=None), "--model and --data")])
def test_misuse_is_refused_in_one_sentence(args, changes, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def broken(**columns):\n    raise ValueError('no\\nidea')\n")
    Path("empty.jsonl").write_text("")
    if changes.get("model") == "endless":
        shutil.copytree(MODEL, "endless")
        for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
            settings = json.loads(Path("endless", name).read_text())
            Path("endless", name).write_text(json.dumps({key: value for key, value in settings.items() if "eos" not in key}))
    with pytest.raises(BadInput, match=words) as error:
        main(replace(args, **changes))
    assert "\n" not in str(error.value)


def test_runs_copied_alone_with_refcache_and_exits_with_2_on_bad_input(tmp_path, args):
    for name in ("rloo.py", "refcache.py"):
        shutil.copy(ROOT / name, tmp_path)
    flags = ["--model", MODEL, "--data", args.data, "--steps", "1", "--samples", "2", "--max_new_tokens", "4", "--reward", "vowels.py:vowels"]
    call = lambda *more: subprocess.run([sys.executable, "rloo.py", *flags, *more], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    done = call()
    assert done.returncode == 0 and (tmp_path / "out/rloo/model.safetensors").exists(), done.stderr
    done = call("--reward", "vowels.py:consonants")
    assert done.returncode == 2 and "Traceback" not in done.stderr and "rloo.py: cannot load vowels.py:consonants" in done.stderr


def test_a_reward_changes_no_rows_and_returns_no_dict():
    def wild(prompts, completions, thing):
        prompts[0][0]["content"] = "changed"
        thing[0].append("changed")
        return [1.0]
    row = {"prompt": [{"role": "user", "content": "hi"}], "thing": []}
    assert refcache.call_scorer(wild, "wild", [{"prompt": row["prompt"], "completion": "x"}], [row]) == [1.0]
    assert row == {"prompt": [{"role": "user", "content": "hi"}], "thing": []}
    for scores in (iter([2]), np.array([2]), torch.tensor([2.0]), (2,)):
        assert refcache.call_scorer(lambda scores=scores, **_: scores, "f", [{"prompt": "p", "completion": "x"}], [{}]) == [2.0]
    with pytest.raises(BadInput, match="returned a set"):
        refcache.call_scorer(lambda **_: {1.0}, "f", [{"prompt": "p", "completion": "x"}], [row])
    with pytest.raises(BadInput, match="returned a dict, which has no order"):
        refcache.call_scorer(lambda **_: {0: 1.0}, "f", [{"prompt": "p", "completion": "x"}], [row])


def test_a_tokenizer_larger_than_the_model_is_refused_before_the_first_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(rloo, "sample", None)
    config = refcache.AutoConfig.from_pretrained(str(ROOT / "demo/model"), vocab_size=50)
    refcache.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    refcache.load_tokenizer(str(ROOT / "demo/model"))[0].save_pretrained(tmp_path)
    args = rloo.Args(model=str(tmp_path), data=str(ROOT / "demo/prompts.jsonl"), reward=(str(ROOT / "demo/score.py") + ":sentiment",),
                     out=str(tmp_path / "out"), steps=1)
    with pytest.raises(BadInput, match="beyond the model's 50 embeddings"):
        rloo.main(args)


def test_a_ratio_beyond_any_float_is_no_nan():
    logp = torch.tensor([[100.0, 100.0]], requires_grad=True)
    rloo.policy_loss(logp, torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]), 0.2).sum().backward()
    assert logp.grad.tolist() == [[0.0, 0.0]]


def test_columns_that_the_first_row_lacks_arrive_too():
    seen = []
    def reward(prompts, completions, extra):
        seen.append(extra)
        return [0.0, 0.0]
    samples = [{"prompt": "p", "completion": "c"}] * 2
    assert refcache.call_scorer(reward, "reward", samples, [{"prompt": "p"}, {"prompt": "p", "extra": 3}]) == [0.0, 0.0] and seen == [[None, 3]]


def test_a_reward_file_may_import_its_neighbour_and_turn_gradients_off(tmp_path):
    (tmp_path / "neighbour_of_the_reward.py").write_text("value = 2.0")
    (tmp_path / "r.py").write_text("import torch\nfrom neighbour_of_the_reward import value\n"
                                   "def f(prompts, completions):\n    torch.set_grad_enabled(False)\n    return [value]\n")
    assert refcache.call_scorer(refcache.load_function(f"{tmp_path}/r.py:f"), "f", [{"prompt": "p", "completion": "c"}], [{"prompt": "p"}]) == [2.0]
    assert torch.is_grad_enabled()
