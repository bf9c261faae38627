"""changes/: each patch applies and runs. Loss and gradient of each batch are those of a plain loop over rows."""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from functools import cache
from math import log, nan
from pathlib import Path
from types import ModuleType

import pytest
import torch
import tyro
from models import bad_input, equal, gradient, logps, parametrize, slow_but
from runs import ROOT, SCRIPTS, TOKENIZER, arguments, load, read, tiny, weights_of, without_speed
from slow_losses import (
    alpha_po, aot, coins, dpo_loss, dpop, f_divergence, model_with_many_ends, of_pairs, orpo, plain, rpo, weighted,
    wpo)
from torch import tensor
from transformers import AutoModelForSequenceClassification

import dpo
import refcache
import rloo

PATCHES = {file.stem: file.read_text() for file in sorted((ROOT / "changes").glob("*.patch"))}
TABLE = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", (ROOT / "docs/change_it.md").read_text(), re.M))
SLOW = pytest.mark.slow
needs_patch = pytest.mark.skipif(not shutil.which("patch") or not shutil.which("git"), reason="needs patch(1) and git")
MACHINERY = ["compile", "load_in_4bit", "vllm_rollouts"]  # they stack on all others
UNDER_TIS = "grpo dr_grpo dapo gspo cispo reinforce_pp".split()
SCRIPTS_OF = {name: [re.search(r"^--- (\w+)\.py$", patch, re.M)[1]] for name, patch in PATCHES.items()}
SCRIPTS_OF |= {"compile": list(SCRIPTS), "load_in_4bit": list(SCRIPTS)}
SCRIPTS_OF |= {"humanline": ["kto", "dpo"], "tr_dpo": ["dpo", "kto"]}


def apply(patch, text):
    for hunk in re.split(r"^@@ .*\n", patch, flags=re.M)[1:]:
        old, new = ("".join(line[1:] for line in hunk.splitlines(True) if line[0] in signs) for signs in (" -", " +"))
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def text_of(script, names):
    text = (ROOT / f"{script}.py").read_text()
    for name in names:
        text = apply(PATCHES[name], text)
    return text


def changed(name, script=None):
    """The module that a patch makes of a script. NAME+OTHER: two patches."""
    return patched(name, script or SCRIPTS_OF[name.split("+")[0]][0])


@cache
def patched(name, script):
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = SCRIPTS[script].__file__
    exec(compile(text_of(script, name.split("+")), name, "exec"), vars(module))
    module.enable_shared_prompts = SCRIPTS[script].enable_shared_prompts
    if "load_in_4bit" not in name:
        module.AutoModelForCausalLM = SCRIPTS[script].AutoModelForCausalLM
    return module


# --- The patches as files

def run_patch(script, name, out):
    subprocess.run(["patch", "--fuzz=0", script, ROOT / f"changes/{name}.patch", "-o", out], check=True)
    return out.read_text()


@parametrize("name", slow_but(MACHINERY, PATCHES))
@needs_patch
def test_patch_applies_to_each_of_its_scripts_and_others_stack_on_it(name, tmp_path):
    """The order of two patches changes nothing."""
    subprocess.run(["git", "apply", "-p0", "--check", f"changes/{name}.patch"], cwd=ROOT, check=True)
    one = tmp_path / "one.py"
    for script in SCRIPTS_OF[name]:
        assert run_patch(ROOT / f"{script}.py", name, one) == text_of(script, [name])
        for other in MACHINERY:
            if other != name and script in SCRIPTS_OF[other]:
                both = run_patch(one, other, tmp_path / "both.py")
                compile(both, f"{name}+{other}", "exec")
                assert both == text_of(script, [other, name])
        if name in UNDER_TIS:
            assert run_patch(one, "tis", tmp_path / "both.py") == text_of(script, [name, "tis"])


@parametrize("name", PATCHES)
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
        if not options.get("train", True):
            return fast(model, *inputs, **options)
        expected = slow_loss(model, *inputs)
        result = fast(model, *inputs, **options)
        found = result[-1] if isinstance(result, tuple) else result
        loss = found["loss"] if isinstance(found, dict) else found
        if expected is not None:
            parts = torch.autograd.grad(expected, list(model.parameters()))
            slow_gradient = torch.cat([part.flatten() for part in parts])
            assert loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
            assert (gradient(model) - slow_gradient).norm() <= 1e-5 * slow_gradient.norm() + 1e-7
            losses.append((loss, slow_gradient.norm().item()))
        return result

    monkeypatch.setattr(changed(name), function, watched)
    return losses


def run(name, script=None, **flags):
    script = script or SCRIPTS_OF[name.split("+")[0]][0]
    defaults = asdict(SCRIPTS[script].Args())
    given = asdict(arguments(script)).items()
    args = changed(name, script).Args(**{flag: value for flag, value in given if value != defaults[flag]} | flags)
    return changed(name, script).main(args), args


# --- All three scripts

@SLOW
@parametrize("name, flags", [
    ("sft", dict(lora_r=4, gradient_checkpointing=True)), ("tis", {}), ("reward_model", {})])
def test_compiled_runs_of_each_script_equal_others(monkeypatch, name, flags):
    compiled, compile_module = set(), torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: (
        compiled.add(type(module).__name__), compile_module(module, **options)))
    monkeypatch.setattr(refcache, "log_softmax_at", refcache.log_softmax_at)
    changed(f"{name}+compile").compile_log_softmax.cache_clear()
    one, other = (without_speed(run(patches, steps=2, **flags)[0]) for patches in (name, f"{name}+compile"))
    assert hasattr(refcache.log_softmax_at, "get_compiler_config") and compiled == {"LlamaMLP", "LlamaRMSNorm"}
    for values, theirs in zip(one, other, strict=True):
        assert values == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@SLOW
@parametrize("name", ["load_in_4bit", "grpo+load_in_4bit"])
def test_policy_and_reference_in_4_bits_are_equal_at_step_1(name):
    bitsandbytes, _ = map(pytest.importorskip, ("bitsandbytes", "peft"))
    history, args = run(name, steps=2, lora_r=4, dtype="bfloat16")
    weights = changed(name).load_model(f"{args.out}/model", "cpu", args, trains=True).parameters()
    assert {x.quant_type for x in weights if isinstance(x, bitsandbytes.nn.Params4bit)} == {"nf4"}
    assert abs(history[1]["kl" if "grpo" in name else "logratio"]) <= 1e-6 and history[2]["grad_norm"] > 0
    assert "grpo" in name or b" in NF4" in Path(args.out, "reference_logprobs.pkl").read_bytes()


@parametrize("name, flags, words", [
    ("load_in_4bit", {}, "an adapter.* one process"), ("reward_model", dict(lora_r=4), "all its weights"),
    ("tr_dpo", dict(ref="live", sync_reference=2), "--ref swap"), ("humanline", {}, "--ref swap"),
    ("tr_rloo", dict(ref="live", sync_reference=2), "--ref swap"), ("iterative_dpo", dict(ref="swap"), "--score")])
def test_misuse_is_refused(name, flags, words):
    with bad_input(words):
        run(name, **flags)


# --- Moving references, and other state

@parametrize("script, loss", [("kto", 0.5), ("dpo", log(2))])
def test_humanline_clamps_log_ratios_and_copies_before_the_update(monkeypatch, script, loss):
    module, calls = changed("humanline", script), []
    copy, step = module.copy_policy, torch.optim.AdamW.step
    assert module.HUMANLINE == (-1.0, 1.5)
    monkeypatch.setattr(module, "HUMANLINE", (0.0, 0.0))
    monkeypatch.setattr(module, "copy_policy", lambda reference: calls.append("copy") or copy(reference))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *inputs, **_: calls.append("step") or step(*inputs))
    history, _ = run("humanline", script, ref="swap")
    assert calls[1:] == 3 * ["copy", "step"]  # one makes the optimizer's state
    assert [values["loss"] for values in history[1:]] == pytest.approx(3 * [loss])


def resumed(monkeypatch, module, args):
    """The history of a run that is killed after its first checkpoint, and begun again."""
    save_checkpoint = module.save_checkpoint

    def save_and_die(*inputs):
        save_checkpoint(*inputs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "save_checkpoint", save_and_die)
        module.main(args)
    saved = weights_of(f"{args.out}/resume-2")
    return without_speed(module.main(args)), saved


MOVING = dict(ref="swap", sync_reference=2, sync_mix=0.6)


@parametrize("name, script, flags", [
    ("tr_dpo", "kto", MOVING), ("tr_dpo", "dpo", MOVING | dict(dtype="bfloat16")),
    ("tr_rloo", "rloo", MOVING), ("humanline", "kto", dict(ref="swap")), ("ema", "dpo", {}),
    ("iterative_dpo", "dpo", dict(ref="swap", sync_reference=2, score=f"{ROOT}/demo/score.py:success"))])
def test_resumed_run_has_the_same_bits(monkeypatch, name, script, flags):
    whole, args = run(name, script, save_every=2, **flags)
    again = replace(args, out=f"{args.out}-again")
    history, saved = resumed(monkeypatch, changed(name, script), again)
    assert history == without_speed(whole)
    assert equal(weights_of(f"{again.out}/model"), weights_of(f"{args.out}/model"))

    for number, (name, first) in enumerate(load().state_dict().items() if "sync_mix" in flags else ()):
        assert torch.allclose(saved[f"reference.{number}"], 0.6 * saved[name] + 0.4 * first, atol=1e-6)


def test_ema_saves_the_average():
    args, (_, averaged) = arguments(steps=1), run("ema", steps=1, ema=0.3)
    dpo.main(args)
    first, last, average = map(weights_of, (tiny(), f"{args.out}/model", f"{averaged.out}/model"))
    assert all(torch.allclose(average[name], 0.7 * first[name] + 0.3 * last[name], atol=1e-6) for name in first)


@SLOW
def test_reference_moves_in_any_number_of_processes(tmp_path):
    """Two, then one, then two give the run of one."""
    whole, args = run("tr_dpo", steps=4, batch_size=5, save_every=1, **MOVING)
    text = text_of("dpo", ["tr_dpo"]).replace("progress.set_postfix(", "step == STOP and sys.exit()\n        dict(")
    text = re.sub(r"tyro\.cli\(.*\)\)", f"Args(**{vars(args) | dict(out=str(tmp_path))}))", text)
    for stop, processes in ((2, 2), (3, 1), (9, 2)):
        (tmp_path / "my.py").write_text(text.replace("STOP", str(stop)))
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}",
                        "my.py"], cwd=tmp_path, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    for mine, theirs in zip(*map(without_speed, (read(tmp_path / "metrics.jsonl"), whole)), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-4)


# --- Pairs

def add_columns(monkeypatch, name):
    """Gives each row the columns that token_weights and rpo read."""
    encode = changed(name).encode

    def with_columns(*inputs):
        row = encode(*inputs)
        w, l = ([t % 3 for t in range(len(y))] for y in (row.chosen, row.rejected))
        return row._replace(columns=row.columns | {
            "chosen_weights": w, "rejected_weights": l, "chosen_reward": sum(w) / 9, "rejected_reward": "0.2"})

    monkeypatch.setattr(changed(name), "encode", with_columns)


@parametrize("name, formula, flags", [
    ("orpo", orpo, {}), ("alpha_po", alpha_po, dict(loss=("simpo",))), ("wpo", wpo, {}),
    ("dpop", dpop, dict(model=tiny(1), ref_model=tiny())),  # else the sign of a ratio of 0 is rounding
    ("ld_dpo", weighted(lambda t, shorter: 1 if t < shorter else 0.5), {}),
    # Without the constant of f' these two losses would be others.
    ("f_divergence", f_divergence(lambda r: 1 - 1 / r, lambda w, l, n_w, n_l: (w / n_w - l / n_l - 1 / 0.6) ** 2),
     dict(divergence="forward_kl", loss=("ipo",))),
    ("f_divergence", f_divergence(lambda r: (1 - r ** -0.2) / 0.2,
                                  lambda w, l, *_: 1 - torch.sigmoid(0.3 * w) + torch.sigmoid(0.3 * l)),
     dict(divergence="alpha", alpha=0.2, loss=("apo_zero",))),
    ("token_weights", weighted(lambda t, shorter: t % 3), {}),
    ("token_weights", lambda w, *_: -(torch.arange(len(w)) % 3 * w).mean(), dict(loss=("sft",))),
    ("rpo", rpo(lambda m, d: coins(m, 2 * d)), dict(distance="fwd_kl", rpo_eta=2.0)),
    ("rpo", rpo(lambda m, d: coins(d, m)), {}),
    ("aot", "aot", dict(tokens_per_forward=1, loss=("aot",))),  # each micro-batch compares the whole batch
    ("aot", "aot_unpaired", dict(tokens_per_forward=1, loss=("aot_unpaired",)))])
def test_loss_of_pairs(monkeypatch, name, formula, flags):
    add_columns(monkeypatch, name)
    slow_loss = aot(formula, load()) if name == "aot" else of_pairs(formula, load())
    losses = watch(monkeypatch, name, slow_loss)
    run(name, beta=0.3, steps=2, **flags)
    assert len(losses) == 2


def test_iterative_dpo_pairs_the_best_and_the_worst_of_four_answers_of_its_reference(monkeypatch):
    """One of four answers has no score."""
    module, reference, drawn = changed("iterative_dpo"), load(model_with_many_ends()), []
    generate, stops = module.generate, reference.generation_config.eos_token_id

    def watched_generate(model, tokenizer, prompts, *inputs, **options):
        reference.load_state_dict(model.state_dict())
        drawn[:] = zip(prompts, generate(model, tokenizer, prompts, *inputs, **options))
        return [y for _, y in drawn]

    def slow_loss(policy, rows, *_):
        assert [(row.prompt, row.chosen) for row in rows] == drawn[3::4]
        assert [(row.whole_prompt, row.rejected) for row in rows] == drawn[1::4]
        assert all(y[-1] in stops or len(y) == 6 for _, y in drawn) and len({y[-1] for _, y in drawn} & {*stops}) > 1
        return of_pairs(plain, reference)(policy, rows)

    order = module.rows_in_order  # as if a token spanned the end of each prompt
    monkeypatch.setattr(module, "rows_in_order", lambda *args: [row._replace(prompt=(9,)) for row in order(*args)])
    monkeypatch.setattr(module, "generate", watched_generate)
    monkeypatch.setattr(module, "score_answers", lambda score, rows, *_: [0.5, 0.0, nan, 1.0] * (len(rows) // 4))
    losses = watch(monkeypatch, "iterative_dpo", slow_loss)
    run("iterative_dpo", model=model_with_many_ends(), beta=0.3, max_new_tokens=6, ref="swap", sync_reference=2,
        score=f"{ROOT}/demo/score.py:success")
    assert [abs(loss - log(2)) < 1e-5 for loss, _ in losses] == [True, False, True]


def test_reward_model_learns_and_scores_in_rloo(monkeypatch):
    def score(model, ids):
        return model(tensor([ids])).logits[0, 0]

    def slow_loss(model, rows, *_):
        margins = [score(model, row.prompt + row.chosen) - score(model, row.prompt + row.rejected) for row in rows]
        return sum(map(dpo_loss, margins)) / len(rows)

    losses = watch(monkeypatch, "reward_model", slow_loss)
    assert re.search(r"`rloo\.py --reward_model (\S+)/model`.* --out \1`", TABLE["reward_model"])
    _, args = run("reward_model", steps=2, samples=64)  # it can write no answers
    judge = rloo.load_reward_model(f"{args.out}/model", "cpu", rloo.Args())

    rows = dpo.load_rows(args.data, TOKENIZER, dpo.Args(score="keeps the columns"))
    prompts, answers = ([row.columns[name] for row in rows] for name in ("prompt", "chosen"))
    model = AutoModelForSequenceClassification.from_pretrained(f"{args.out}/model")
    expected = [score(model, row.prompt + row.chosen).item() for row in rows]
    assert judge(prompts, answers, [True] * 12) == pytest.approx(expected, abs=1e-5) and len(losses) == 2


def test_sft_is_a_mean_over_tokens(monkeypatch):
    def slow_loss(policy, rows, *_):
        return -torch.cat(logps(policy, [(row.prompt, row.completion) for row in rows])).mean()

    losses = watch(monkeypatch, "sft", slow_loss)
    monkeypatch.setattr(changed("sft"), "Swap", None)
    run("sft", steps=2)
    assert len(losses) == 2


def test_sft_leaves_out_undesirable_answers(tmp_path):
    rows = [dict(completion="a"), dict(completion="b", label=False), dict(chosen="c", rejected="d")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | dict(prompt="?")) + "\n" for row in rows))
    rows = changed("sft").load_rows(f"{tmp_path}/rows.jsonl", TOKENIZER, changed("sft").Args())
    assert [TOKENIZER.decode(row.completion[:-1]) for row in rows] == ["a", "c"]
