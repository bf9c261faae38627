"""changes/: each patch is applied to its script, and the result runs. Loss and gradient of each batch are those of a
plain loop over rows."""
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from functools import cache, partial
from math import exp, log
from pathlib import Path
from types import ModuleType

import pytest
import torch
import tyro
from models import GROUPS, flat, gradient, logps, values_and_gradients
from runs import EACH, ROOT, SCRIPTS, TOKENIZER, arguments, load, tiny, weights_of, without_speed
from slow_losses import (
    alpha_po, aot, coins, dpo_loss, dpop, f_divergence, model_with_many_ends, of_pairs, orpo, plain, rpo, weighted,
    wpo)
from torch import tensor

import dpo
import kto
import refcache
import rloo
from refcache import BadInput, completion_logprobs, log_ratios

PATCHES = {file.stem: file.read_text() for file in sorted((ROOT / "changes").glob("*.patch"))}
SCRIPT_OF = {name: re.search(r"^--- (\w+)\.py$", patch, re.M)[1] for name, patch in PATCHES.items()}
TABLE = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", (ROOT / "docs/change_it.md").read_text(), re.M))
EACH_PATCH = pytest.mark.parametrize("name", PATCHES)
SLOW = pytest.mark.slow
MACHINERY = ["compile", "load_in_4bit", "vllm_rollouts"]  # these stack on all others
SCRIPTS_OF = {name: [script] for name, script in SCRIPT_OF.items()}
SCRIPTS_OF |= {"compile": list(SCRIPTS), "load_in_4bit": list(SCRIPTS), "humanline": ["kto", "dpo"]}
STACKS = [(name, script, other) for name in PATCHES for script in SCRIPTS_OF[name] for other in MACHINERY
          if script in SCRIPTS_OF[other] and name != other]
NEEDS_PATCH = pytest.mark.skipif(not shutil.which("patch"), reason="needs patch(1)")


def apply(patch, text):
    lines = text.splitlines(keepends=True)
    parts = re.split(r"^@@ -\d+(?:,\d+)? \+(\d+).*\n", patch, flags=re.M)
    for start, hunk in zip(parts[1::2], parts[2::2]):
        old, new = ([line[1:] for line in hunk.splitlines(keepends=True) if line[0] in signs] for signs in (" -", " +"))
        places = [n for n in range(len(lines)) if lines[n:n + len(old)] == old]
        assert places, f"the script has changed here: {''.join(old)}"
        place = min(places, key=lambda n: abs(n + 1 - int(start)))
        lines[place:place + len(old)] = new
    return "".join(lines)


def changed(name, script=None):
    """The module that a patch makes of a script. NAME+OTHER: with a patch of the machinery on top."""
    return patched(name, script or SCRIPT_OF[name.split("+")[0]])


@cache
def patched(name, script):
    script = SCRIPTS[script]
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = script.__file__
    text = (ROOT / f"{script.__name__}.py").read_text()
    for part in name.split("+"):
        text = apply(PATCHES[part], text)
    exec(compile(text, name, "exec"), vars(module))
    module.enable_shared_prompts = script.enable_shared_prompts
    if "load_in_4bit" not in name:
        module.load_checkpoint = script.load_checkpoint
    return module


# --- The patches as files

def run_patch(script, name, out):
    """patch(1), as the README says."""
    command = ["patch", "--fuzz=0", script, ROOT / f"changes/{name}.patch", "-o", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{name}: {done.stdout}"


@EACH_PATCH
@NEEDS_PATCH
def test_patch_applies_to_each_of_its_scripts(name, tmp_path):
    for script in SCRIPTS_OF[name]:
        run_patch(ROOT / f"{script}.py", name, tmp_path / "out.py")
        assert (tmp_path / "out.py").read_text() == apply(PATCHES[name], (ROOT / f"{script}.py").read_text())


@EACH_PATCH
@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_patch_applies_with_git(name, tmp_path):
    shutil.copy(ROOT / f"{SCRIPT_OF[name]}.py", tmp_path)
    command = ["git", "apply", "-p0", ROOT / f"changes/{name}.patch"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    text = (ROOT / f"{SCRIPT_OF[name]}.py").read_text()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"{SCRIPT_OF[name]}.py").read_text() == apply(PATCHES[name], text)


@NEEDS_PATCH
@pytest.mark.parametrize("name, script, other", STACKS)
def test_patches_of_the_machinery_stack_on_each_other_patch(name, script, other, tmp_path):
    """In the other order they give the same text, so no part went to a wrong place."""
    run_patch(ROOT / f"{script}.py", name, tmp_path / "one.py")
    run_patch(tmp_path / "one.py", other, tmp_path / "both.py")
    both = (tmp_path / "both.py").read_text()
    compile(both, f"{name}+{other}", "exec")
    assert both == apply(PATCHES[name], apply(PATCHES[other], (ROOT / f"{script}.py").read_text()))


def test_all_patches_together_have_at_most_80000_characters():
    assert sum(map(len, PATCHES.values())) <= 80_000


@EACH_PATCH
def test_patch_and_table_agree(name):
    header, _, diff = PATCHES[name].partition("--- ")
    assert header.count("\n") == 3 and max(map(len, header.splitlines())) <= 120
    paper, formula, lines, command = (cell.strip() for cell in TABLE[name].split(" | "))
    assert int(lines) == len(re.findall(r"^\+(?!\+\+ )", diff, re.M))
    assert set(re.findall(r"\d{4}\.\d{5}", paper)) <= set(re.findall(r"\d{4}\.\d{5}", header))
    flags = re.fullmatch(rf"`python {name}\.py ?(.*)`", command)[1]
    if flags:
        tyro.cli(changed(name).Args, args=shlex.split(flags), use_underscores=True)


def test_all_patches_are_in_both_tables():
    in_readme = re.findall(r"`(\w+)`(?: \(.*?\))? \+(\d+)", (ROOT / "README.md").read_text())
    assert dict(in_readme) == {name: row.split(" | ")[2].strip() for name, row in TABLE.items()}
    assert set(TABLE) == set(PATCHES)


# --- Loss and gradient

def watch(monkeypatch, name, slow_loss, function="run_batch", script=None):
    """Compares the batches of main() with slow_loss. Returns losses and norms of gradients."""
    fast, losses = getattr(changed(name, script), function), []

    def watched(model, *inputs, **options):
        expected = slow_loss(model, *inputs) if options.get("train", True) else None
        result = fast(model, *inputs, **options)
        if expected is not None:
            found = result[-1] if isinstance(result, tuple) else result
            loss = found["loss"] if isinstance(found, dict) else found
            parts = torch.autograd.grad(expected, list(model.parameters()))
            slow_gradient = torch.cat([part.flatten() for part in parts])
            assert loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
            assert (gradient(model) - slow_gradient).norm() <= 1e-5 * slow_gradient.norm() + 1e-7
            losses.append((loss, slow_gradient.norm().item()))
        return result

    monkeypatch.setattr(changed(name, script), function, watched)
    return losses


def run(name, script=None, **flags):
    script = script or SCRIPT_OF[name.split("+")[0]]
    defaults = asdict(SCRIPTS[script].Args())
    given = asdict(arguments(script)).items()
    args = changed(name, script).Args(**{flag: value for flag, value in given if value != defaults[flag]} | flags)
    return changed(name, script).main(args), args


# --- All three scripts

@EACH
def test_compile_covers_norms_mlps_and_the_log_softmax(monkeypatch, script):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, dynamic: compiled.append(type(self).__name__))
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled.append(function.__name__) or function)
    module = changed("compile", script)
    module.compile_log_softmax.cache_clear()
    for trains in (True, False):
        module.load_model(tiny(), "cpu", module.Args(dtype="float32"), trains)
    assert sorted(compiled) == 2 * ["LlamaMLP"] + 6 * ["LlamaRMSNorm"] + ["log_softmax_at"]


@pytest.fixture
def compiler(monkeypatch):
    """The log-softmax of refcache.py is as before after the test."""
    monkeypatch.setattr(refcache, "log_softmax_at", refcache.log_softmax_at)


@SLOW
@pytest.mark.parametrize("script, flags", [
    ("dpo", {}), ("kto", dict(lora_r=4, lr=2e-2, gradient_checkpointing="on")), ("rloo", {})], ids=str)
def test_compiled_runs_equal_others(compiler, script, flags):
    plain = SCRIPTS[script].main(arguments(script, **flags))
    changed("compile", script).compile_log_softmax.cache_clear()
    compiled, _ = run("compile", script, **flags)
    assert hasattr(refcache.log_softmax_at, "get_compiler_config")
    for one, other in zip(without_speed(plain), without_speed(compiled), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@SLOW
def test_compile_stacks_on_a_reward_model(compiler):
    plain, _ = run("reward_model", steps=2)
    changed("reward_model+compile").compile_log_softmax.cache_clear()
    compiled, _ = run("reward_model+compile", steps=2)
    for one, other in zip(without_speed(plain), without_speed(compiled), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["sft+load_in_4bit", pytest.param("grpo+load_in_4bit", marks=SLOW)])
def test_load_in_4bit_stacks_on_other_patches(name):
    bitsandbytes, _ = map(pytest.importorskip, ("bitsandbytes", "peft"))
    history, args = run(name, steps=2, lora_r=4, lr=2e-2, dtype="float32")
    layers = changed(name).load_model(args.model, "cpu", args, trains=True).modules()
    assert any(isinstance(layer, bitsandbytes.nn.Linear4bit) for layer in layers)
    assert len(history) == 3 and history[-1]["grad_norm"] > 0


def test_load_in_4bit_needs_one_process(monkeypatch):
    monkeypatch.setattr(changed("load_in_4bit"), "process_count", lambda: 2)
    with pytest.raises(BadInput, match="one process"):
        run("load_in_4bit", lora_r=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_policy_and_reference_in_4_bits_are_equal_at_step_1(dtype):
    pytest.importorskip("bitsandbytes")
    history, _ = run("load_in_4bit", lora_r=4, dtype=dtype, steps=1)
    assert history[1]["logratio"] <= 1e-6 and history[1]["loss"] == pytest.approx(log(2), abs=1e-6)


@pytest.mark.parametrize("script", ["dpo", pytest.param("rloo", marks=SLOW)])
def test_load_in_4bit_equals_the_dequantized_model(script):
    bitsandbytes, peft = map(pytest.importorskip, ("bitsandbytes", "peft"))
    with pytest.raises(BadInput, match="adapter"):
        run("load_in_4bit", script)
    history, args = run("load_in_4bit", script, lora_r=4, lr=2e-2, dtype="float32")
    assert history[1].get("logratio", history[1].get("kl")) == pytest.approx(0, abs=1e-6)
    assert script == "rloo" or b" in NF4" in Path(args.out, "reference_logprobs.pkl").read_bytes()

    policy = changed("load_in_4bit", script).load_model(f"{args.out}/model", "cpu", args, trains=True)
    other = peft.PeftModel.from_pretrained(load(), f"{args.out}/model", is_trainable=True).eval()
    for layer, linear in zip(policy.modules(), other.modules(), strict=True):
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            assert not torch.equal(weight, linear.weight)
            linear.weight.data = weight

    logps, grads = values_and_gradients(completion_logprobs, policy, GROUPS)
    other_logps, other_grads = values_and_gradients(completion_logprobs, other, GROUPS)
    assert (logps - other_logps).abs().max() < 1e-4
    assert (grads - other_grads).norm() < 1e-4 * other_grads.norm()
    with policy.disable_adapter():
        assert (logps - flat(completion_logprobs(policy, GROUPS))).abs().max() > 1e-2


# --- KTO or DPO

@pytest.mark.parametrize("script", ["kto", "dpo"])
def test_humanline_clamps_and_copies_before_the_update(monkeypatch, script):
    low, high = -0.03, 0.05  # bounds that a few steps reach
    assert changed("humanline", script).log_ratios.keywords == {"clamp": (-1.0, 1.5)}  # in nats
    monkeypatch.setattr(changed("humanline", script), "log_ratios", partial(log_ratios, clamp=(low, high)))
    reference = load()
    clamped = []

    def slow_loss(policy, rows, *_):
        def sums(name):
            answers = [(row.prompt, getattr(row, name)) for row in rows]
            with torch.no_grad():
                refs = logps(reference, answers)
            ratios = [y - ref for y, ref in zip(logps(policy, answers), refs)]
            clamped.append(sum(int(((tokens < low) | (tokens > high)).sum()) for tokens in ratios))
            return torch.stack([tokens.clamp(low, high).sum() for tokens in ratios])

        if script == "dpo":
            losses = dpo_loss(0.3 * (sums("chosen") - sums("rejected")))
        else:
            sign = tensor([1.0 if row.is_desirable else -1.0 for row in rows])
            z = sums("other").detach().mean().clamp(min=0)
            losses = 1 - torch.sigmoid(0.3 * sign * (sums("completion") - z))
        reference.load_state_dict(policy.state_dict())  # the policy before this step's update
        return losses.mean()

    losses = watch(monkeypatch, "humanline", slow_loss, script=script)
    run("humanline", script, beta=0.3, ref="swap", sync_reference=1)
    assert len(losses) == 3 and clamped[0] == 0 and min(clamped[-2:]) > 0


# --- Pairs

def add_columns(monkeypatch, name):
    """Gives each row the columns that token_weights and rpo read."""
    encode = changed(name).encode

    def with_columns(*inputs):
        for prompt, sequences, begins, columns in encode(*inputs):
            w, l = ([t % 3 for t in range(len(ids) - min(begins))] for ids in sequences)
            yield prompt, sequences, begins, columns | {
                "chosen_weights": w, "rejected_weights": l, "chosen_reward": sum(w) / 9, "rejected_reward": "0.2"}

    monkeypatch.setattr(changed(name), "encode", with_columns)


@pytest.mark.parametrize("name, formula, flags", [
    ("orpo", orpo, {}), ("alpha_po", alpha_po, {}), ("wpo", wpo, {}),
    ("dpop", dpop, dict(model=tiny(1), ref_model=tiny())),  # else the sign of a ratio of 0 is rounding
    ("ld_dpo", weighted(lambda t, shorter: 1 if t < shorter else 0.5), {}),
    ("f_divergence", f_divergence(lambda r: -1 / r), dict(divergence="forward_kl")),
    ("f_divergence", f_divergence(lambda r: torch.log(2 * r / (1 + r))), {}),
    pytest.param("f_divergence", f_divergence(lambda r: (1 - r ** -0.2) / 0.2),
                 dict(divergence="alpha", alpha=0.2), marks=SLOW),
    ("token_weights", weighted(lambda t, shorter: t % 3), {}),
    ("rpo", rpo(lambda m, d: coins(m, 2 * d)), dict(distance="fwd_kl", rpo_eta=2.0)),
    pytest.param("rpo", rpo(lambda m, d: (m - d) ** 2), dict(distance="sq"), marks=SLOW),
    pytest.param("rpo", rpo(lambda m, d: coins(d, m)), {}, marks=SLOW),
    ("aot", "aot", dict(tokens_per_forward=1)), ("aot", "aot", dict(tokens_per_forward=10_000)),
    ("aot", "aot_unpaired", dict(tokens_per_forward=1, loss=("aot_unpaired",)))])
def test_loss_of_pairs(monkeypatch, name, formula, flags):
    """AOT compares the sorted batch under any micro-batching."""
    add_columns(monkeypatch, name)
    slow_loss = aot(formula, load()) if name == "aot" else of_pairs(formula, load())
    losses = watch(monkeypatch, name, slow_loss)
    run(name, beta=0.3, steps=2, **flags)
    assert len(losses) == 2


@pytest.mark.parametrize("name", ["token_weights", "ld_dpo"])
def test_weights_of_tokens_multiply_log_probs_as_they_do_log_ratios(monkeypatch, name):
    """Without a reference both are the same."""
    add_columns(monkeypatch, name)
    history, _ = run(name, ref="none", beta=0.3, steps=1)
    for answer in ("chosen", "rejected"):
        assert history[1][f"rewards/{answer}"] == pytest.approx(0.3 * history[1][f"logps/{answer}"], rel=1e-5)


@pytest.mark.parametrize("divergence, f_prime", [
    ("forward_kl", lambda r: 1 - 1 / r), ("js", lambda r: log(2 * r / (1 + r))),
    ("alpha", lambda r: (1 - r ** -0.5) / 0.5)])
def test_constants_of_f_divergence_count_in_losses_of_single_ratios(divergence, f_prime):
    """The second pair is at π = π_ref, where the losses are known."""
    module = changed("f_divergence")
    ratio_w, ratio_l, len_w, len_l = tensor([2.0, 0.0]), tensor([-1.0, 0.0]), tensor([10.0, 10.0]), tensor([40.0, 40.0])
    batch = module.Batch(-ratio_w, -ratio_l, ratio_w, ratio_l, len_w, len_l)
    w, l = f_prime(exp(2.0)), f_prime(exp(-1.0))
    expected = {
        "ipo": [(w / 10 - l / 40 - 5) ** 2, 25.0],
        "sigmoid_norm": [log(1 + exp(-0.1 * (w / 10 - l / 40))), log(2)],
        "apo_zero": [1 - 1 / (1 + exp(-0.1 * w)) + 1 / (1 + exp(-0.1 * l)), 1.0],
    }
    for name, losses in expected.items():
        args = module.Args(loss=(name,), divergence=divergence)
        assert module.weighted_loss(batch, args).tolist() == pytest.approx(losses, rel=1e-5)


def test_orpo_loads_no_reference():
    assert changed("orpo").resolve(changed("orpo").Args(model=tiny(), data="x")).ref == "none"


def test_iterative_dpo(monkeypatch):
    module, drawn, prompts, frozen = changed("iterative_dpo"), [], [], load(model_with_many_ends())
    generate, spec = module.generate, arguments("rloo").reward[0]

    def rate(ids):
        chats = [[{"content": text}] for text in TOKENIZER.batch_decode(ids, skip_special_tokens=True)]
        return rloo.load_function(spec)(prompts=None, completions=chats)

    def spy(policy, *inputs):
        frozen.load_state_dict(policy.state_dict())
        drawn.append(generate(policy, *inputs))
        return drawn[-1]

    def slow_loss(policy, rows, *_):
        prompts.append([row.prompt for row in rows])
        extremes = [[max(four), min(four)] for four in zip(*[iter(rate(drawn[-1]))] * 4)]
        for row in rows:
            assert rate([row.chosen, row.rejected]) in extremes
            assert all(y in drawn[-1] if len(y) == 6 and y[-1] != 3 else y[:-1] in drawn[-1] for y in row[1:3])
        return of_pairs(plain, frozen)(policy, rows)

    monkeypatch.setattr(module, "generate", spy)
    losses = watch(monkeypatch, "iterative_dpo", slow_loss)
    flags = dict(model=model_with_many_ends(), max_new_tokens=6, ref="swap", sync_reference=2)
    _, args = run("iterative_dpo", beta=0.3, score=spec, **flags)
    assert [abs(loss - log(2)) < 1e-5 for loss, _ in losses] == [True, False, True] and len(drawn) == 3
    rows = dpo.load_rows(args.data, TOKENIZER, dpo.Args())
    assert prompts == [[row.prompt for row in dpo.batch_rows(step, rows, 3, 0)] for step in (1, 2, 3)]


def test_iterative_dpo_leaves_out_answers_without_a_score(monkeypatch):
    module = changed("iterative_dpo")
    monkeypatch.setattr(module, "generate", lambda *_: [(n,) for n in range(8)])
    rows = [dpo.Row((9,), (), (), (9,), {"prompt": "?"}), dpo.Row((9,), (), (), (9,), {"prompt": "?", "truth": 1})]

    def score(truth, **_):
        assert truth == 4 * [None] + 4 * [1]  # the columns of all rows
        return [None, 1.0, 2.0, None] + 4 * [None]

    pairs = module.draw_pairs(None, TOKENIZER, rows, score, module.Args(score="by hand", max_new_tokens=1))
    assert [(row.chosen, row.rejected) for row in pairs] == [((2,), (1,)), ((4,), (4,))]


def test_iterative_dpo_leaves_room_for_answers():
    args = changed("iterative_dpo").Args(model=tiny(), data="x", ref="swap", sync_reference=1, score="x")
    assert changed("iterative_dpo").resolve(args).max_length == 256 - args.max_new_tokens


def test_iterative_dpo_needs_a_score_and_a_moving_reference():
    for flags in (dict(ref="swap", sync_reference=2), dict(score="a.py:f", ref="swap")):
        with pytest.raises(BadInput, match="--score, and --sync_reference"):
            run("iterative_dpo", **flags)


def test_ema_saves_the_average():
    steps = [weights_of(tiny())]
    for n in (1, 2):
        args = arguments(steps=n, schedule="constant")
        dpo.main(args)
        steps.append(weights_of(f"{args.out}/model"))
    _, args = run("ema", steps=2, schedule="constant", ema=0.3)
    for name, average in weights_of(f"{args.out}/model").items():
        expected = 0.49 * steps[0][name] + 0.21 * steps[1][name] + 0.3 * steps[2][name]
        assert torch.allclose(average, expected, atol=1e-6)


def test_reward_model_learns_and_scores_in_rloo(monkeypatch):
    def score(model, ids):
        return model(tensor([ids])).logits[0, 0]

    def slow_loss(model, rows, *_):
        margins = [score(model, row.prompt + row.chosen) - score(model, row.prompt + row.rejected) for row in rows]
        return sum(map(dpo_loss, margins)) / len(rows)

    losses = watch(monkeypatch, "reward_model", slow_loss)
    _, args = run("reward_model", steps=2, samples=64)  # it can write no answers
    judge = rloo.RewardModel(f"{args.out}/model", "cpu", rloo.Args())
    rows = dpo.load_rows(args.data, TOKENIZER, dpo.Args(score="keeps the columns"))
    prompts, answers = ([row.columns[name] for row in rows] for name in ("prompt", "chosen"))
    expected = [score(judge.model, row.prompt + row.chosen).item() for row in rows]
    assert judge(prompts, answers, [True] * 12) == pytest.approx(expected, abs=1e-5) and len(losses) == 2
    with pytest.raises(BadInput, match="adapter"):
        changed("reward_model").load_model(tiny(), "cpu", rloo.Args(lora_r=4), trains=True)


def test_sft(monkeypatch, tmp_path):
    rows = [row.columns for row in kto.load_rows(arguments("kto").data, TOKENIZER, kto.Args(score="keeps columns"))]
    good = [row["completion"] for row in rows if row["label"]]
    without = [{name: value for name, value in row.items() if name != "label"} for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(str, without)).replace("'", '"'))

    def slow_loss(policy, rows, *_):
        return -torch.cat(logps(policy, [(row.prompt, row.completion) for row in rows])).mean()

    losses = watch(monkeypatch, "sft", slow_loss)
    _, args = run("sft", steps=2)
    assert len(losses) == 2
    args.score = "keeps columns"
    assert [row.columns["completion"] for row in changed("sft").load_rows(args.data, TOKENIZER, args)] == good
    assert len(changed("sft").load_rows(str(tmp_path / "rows.jsonl"), TOKENIZER, args)) == len(rows) > len(good)
