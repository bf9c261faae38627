"""changes/: each patch is applied to its script, and the result runs. Loss and gradient of each batch are those of a
plain loop over rows."""
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from math import log
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
import rloo
from refcache import BadInput, completion_logprobs

PATCHES = {file.stem: file.read_text() for file in sorted((ROOT / "changes").glob("*.patch"))}
SCRIPT_OF = {name: re.search(r"^--- (\w+)\.py$", patch, re.M)[1] for name, patch in PATCHES.items()}
TABLE = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", (ROOT / "docs/change_it.md").read_text(), re.M))
EACH_PATCH = pytest.mark.parametrize("name", PATCHES)
SLOW = pytest.mark.slow
FOR_EACH_SCRIPT = {"compile", "load_in_4bit"}


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
    return patched(name, script or SCRIPT_OF[name])


@cache
def patched(name, script):
    script = SCRIPTS[script]
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = script.__file__
    exec(compile(apply(PATCHES[name], (ROOT / f"{script.__name__}.py").read_text()), name, "exec"), vars(module))
    module.enable_shared_prompts = script.enable_shared_prompts
    if name != "load_in_4bit":
        module.load_checkpoint = script.load_checkpoint
    return module


# --- The patches as files

@EACH_PATCH
@pytest.mark.skipif(not shutil.which("patch"), reason="needs patch(1)")
def test_patch_applies(name, tmp_path):
    patch, out = ROOT / f"changes/{name}.patch", tmp_path / "out"
    for script in SCRIPTS if name in FOR_EACH_SCRIPT else [SCRIPT_OF[name]]:
        script = ROOT / f"{script}.py"
        done = subprocess.run(["patch", "--fuzz=0", script, patch, "-o", out], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert out.read_text() == apply(PATCHES[name], script.read_text())


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

def watch(monkeypatch, name, slow_loss, function="run_batch"):
    """Compares the batches of main() with slow_loss. Returns losses and norms of gradients."""
    fast, losses = getattr(changed(name), function), []

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

    monkeypatch.setattr(changed(name), function, watched)
    return losses


def run(name, script=None, **flags):
    defaults = asdict(SCRIPTS[script or SCRIPT_OF[name]].Args())
    given = asdict(arguments(script or SCRIPT_OF[name])).items()
    args = changed(name, script).Args(**{flag: value for flag, value in given if value != defaults[flag]} | flags)
    return changed(name, script).main(args), args


# --- All three scripts

@EACH
def test_compile_covers_norms_and_mlps(monkeypatch, script):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, dynamic: compiled.append(type(self).__name__))
    for trains in (True, False):
        args = changed("compile", script).Args(dtype="float32", compile=trains)
        changed("compile", script).load_model(tiny(), "cpu", args, trains)
    assert sorted(compiled) == ["LlamaMLP"] + 3 * ["LlamaRMSNorm"]


@SLOW
@pytest.mark.parametrize("script, flags", [
    ("dpo", {}), ("kto", dict(lora_r=4, lr=2e-2, gradient_checkpointing="on")), ("rloo", {})], ids=str)
def test_compiled_runs_equal_others(script, flags):
    plain, compiled = (run("compile", script, compile=compile, **flags)[0] for compile in (False, True))
    for one, other in zip(without_speed(plain), without_speed(compiled), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("script", ["dpo", pytest.param("rloo", marks=SLOW)])
def test_load_in_4bit_equals_the_dequantized_model(script):
    bitsandbytes, peft = map(pytest.importorskip, ("bitsandbytes", "peft"))
    with pytest.raises(BadInput, match="adapter"):
        run("load_in_4bit", script, load_in_4bit=True)
    history, args = run("load_in_4bit", script, load_in_4bit=True, lora_r=4, lr=2e-2, dtype="float32")
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


# --- Pairs

@pytest.mark.parametrize("name, formula, flags", [
    ("orpo", orpo, {}), ("alpha_po", alpha_po, {}), ("wpo", wpo, {}),
    ("dpop", dpop, dict(model=tiny(1), ref_model=tiny())),  # else the sign of a ratio of 0 is rounding
    ("ld_dpo", weighted(lambda t, shorter: 1 if t < shorter else 0.5), {}),
    ("f_divergence", f_divergence(lambda r: -1 / r), dict(divergence="forward_kl")),
    ("f_divergence", f_divergence(lambda r: torch.log(2 * r / (1 + r))), {}),
    pytest.param("f_divergence", f_divergence(lambda r: (1 - r ** -0.2) / 0.2),
                 dict(divergence="alpha", alpha=0.2), marks=SLOW),
    ("token_weights", weighted(lambda t, shorter: t % 3), {}), ("rpo", rpo(coins), dict(distance="fwd_kl")),
    pytest.param("rpo", rpo(lambda m, d: (m - d) ** 2), dict(distance="sq"), marks=SLOW),
    pytest.param("rpo", rpo(lambda m, d: coins(d, m)), {}, marks=SLOW),
    ("aot", "aot", dict(tokens_per_forward=1)), ("aot", "aot", dict(tokens_per_forward=10_000)),
    ("aot", "aot_unpaired", dict(tokens_per_forward=1, loss=("aot_unpaired",)))])
def test_loss_of_pairs(monkeypatch, name, formula, flags):
    """AOT compares the sorted batch under any micro-batching."""
    encode = changed(name).encode

    def with_columns(*inputs):
        for prompt, sequences, begins, columns in encode(*inputs):
            w, l = ([t % 3 for t in range(len(ids) - min(begins))] for ids in sequences)
            yield prompt, sequences, begins, columns | {
                "chosen_weights": w, "rejected_weights": l, "chosen_reward": sum(w) / 9, "rejected_reward": "0.2"}

    monkeypatch.setattr(changed(name), "encode", with_columns)
    slow_loss = aot(formula, load()) if name == "aot" else of_pairs(formula, load())
    losses = watch(monkeypatch, name, slow_loss)
    run(name, beta=0.3, steps=2, **flags)
    assert len(losses) == 2


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
    assert [abs(loss - log(2)) < 1e-5 for loss, _ in losses] == [True, False, True] and len(drawn) == 2
    rows = dpo.load_rows(args.data, TOKENIZER, dpo.Args())
    assert prompts == [[row.prompt for row in dpo.batch_rows(step, rows, 3, 0)] for step in (1, 2, 3)]


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
    _, args = run("reward_model", steps=2)
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
