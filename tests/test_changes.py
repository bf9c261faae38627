"""changes/: each patch is applied to its script, and the result runs. Loss and gradient of each batch are those of a
plain loop over rows."""
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from functools import cache, partial
from math import log
from pathlib import Path
from types import ModuleType

import pytest
import torch
import tyro
from models import bad_input, gradient, logps, parametrize, slow_but
from runs import ROOT, SCRIPTS, TOKENIZER, arguments, load, tiny, weights_of, without_speed
from slow_losses import (
    alpha_po, aot, coins, dpo_loss, dpop, f_divergence, model_with_many_ends, of_pairs, orpo, plain, rpo, weighted,
    wpo)
from torch import tensor

import dpo
import refcache
import rloo
from refcache import log_ratios

PATCHES = {file.stem: file.read_text() for file in sorted((ROOT / "changes").glob("*.patch"))}
TABLE = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", (ROOT / "docs/change_it.md").read_text(), re.M))
EACH_PATCH = parametrize("name", PATCHES)
SLOW = pytest.mark.slow
MACHINERY = ["compile", "load_in_4bit", "vllm_rollouts"]  # these stack on all others
SCRIPTS_OF = {name: [re.search(r"^--- (\w+)\.py$", patch, re.M)[1]] for name, patch in PATCHES.items()}
SCRIPTS_OF |= {"compile": list(SCRIPTS), "load_in_4bit": list(SCRIPTS), "humanline": ["kto", "dpo"]}


def apply(patch, text):
    for hunk in re.split(r"^@@ .*\n", patch, flags=re.M)[1:]:
        old, new = ("".join(line[1:] for line in hunk.splitlines(True) if line[0] in signs) for signs in (" -", " +"))
        assert text.count(old) == 1, f"stands {text.count(old)} times in the script: {old}"
        text = text.replace(old, new)
    return text


def text_of(script, names):
    text = (ROOT / f"{script}.py").read_text()
    for name in names:
        text = apply(PATCHES[name], text)
    return text


def changed(name, script=None):
    """The module that a patch makes of a script. NAME+OTHER: with a patch of the machinery on top."""
    return patched(name, script or SCRIPTS_OF[name.split("+")[0]][0])


@cache
def patched(name, script):
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = SCRIPTS[script].__file__
    exec(compile(text_of(script, name.split("+")), name, "exec"), vars(module))
    module.enable_shared_prompts = SCRIPTS[script].enable_shared_prompts
    if "load_in_4bit" not in name:
        module.load_checkpoint = SCRIPTS[script].load_checkpoint
    return module


# --- The patches as files

def run_patch(script, name, out):
    subprocess.run(["patch", "--fuzz=0", script, ROOT / f"changes/{name}.patch", "-o", out], check=True)
    return out.read_text()


@parametrize("name", slow_but(MACHINERY, PATCHES))
@pytest.mark.skipif(not shutil.which("patch") or not shutil.which("git"), reason="needs patch(1) and git")
def test_patch_applies_to_each_of_its_scripts_and_the_machinery_stacks_on_it(name, tmp_path):
    """In the other order two patches give the same text, so no part went to a wrong place. git takes a patch, too."""
    subprocess.run(["git", "apply", "-p0", "--check", f"changes/{name}.patch"], cwd=ROOT, check=True)
    one = tmp_path / "one.py"
    for script in SCRIPTS_OF[name]:
        assert run_patch(ROOT / f"{script}.py", name, one) == text_of(script, [name])
        for other in MACHINERY:
            if other != name and script in SCRIPTS_OF[other]:
                both = run_patch(one, other, tmp_path / "both.py")
                compile(both, f"{name}+{other}", "exec")
                assert both == text_of(script, [other, name])


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

def test_compile_covers_norms_mlps_and_the_log_softmax(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, dynamic: compiled.append(type(self).__name__))
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled.append(function.__name__) or function)
    module = changed("compile")
    module.compile_log_softmax.cache_clear()
    for trains in (True, False):
        module.load_model(tiny(), "cpu", module.Args(dtype="float32"), trains)
    assert sorted(compiled) == 2 * ["LlamaMLP"] + 6 * ["LlamaRMSNorm"] + ["log_softmax_at"]


@SLOW
@parametrize("name, flags", [
    ("humanline", dict(lora_r=4, gradient_checkpointing="on")), ("tis", {}), ("reward_model", {})])
def test_compiled_runs_of_each_script_equal_others(monkeypatch, name, flags):
    monkeypatch.setattr(refcache, "log_softmax_at", refcache.log_softmax_at)  # as before, after the test
    changed(f"{name}+compile").compile_log_softmax.cache_clear()
    one, other = (without_speed(run(patches, steps=2, **flags)[0]) for patches in (name, f"{name}+compile"))
    assert hasattr(refcache.log_softmax_at, "get_compiler_config")
    for values, compiled in zip(one, other, strict=True):
        assert values == pytest.approx(compiled, rel=1e-4, abs=1e-5)


@SLOW
@parametrize("name", ["load_in_4bit", "humanline+load_in_4bit", "grpo+load_in_4bit"])
def test_policy_and_reference_in_4_bits_are_equal_at_step_1(name):
    """Also when the saved adapter is loaded, its base is in 4 bits. The header of a cache says so."""
    bitsandbytes, _ = map(pytest.importorskip, ("bitsandbytes", "peft"))
    history, args = run(name, steps=2, lora_r=4, dtype="bfloat16")
    layers = changed(name).load_model(f"{args.out}/model", "cpu", args, trains=True).modules()
    quantized = [layer for layer in layers if isinstance(layer, bitsandbytes.nn.Linear4bit)]
    assert quantized and all(layer.weight.quant_state.quant_type == "nf4" for layer in quantized)
    assert abs(history[1]["kl" if "grpo" in name else "logratio"]) <= 1e-6 and history[2]["grad_norm"] > 0
    assert "grpo" in name or b" in NF4" in Path(args.out, "reference_logprobs.pkl").read_bytes()


@parametrize("processes, flags", [(1, {}), (2, dict(lora_r=4))])
def test_load_in_4bit_needs_an_adapter_and_one_process(monkeypatch, processes, flags):
    monkeypatch.setattr(changed("load_in_4bit"), "process_count", lambda: processes)
    with bad_input("adapter.* one process"):
        run("load_in_4bit", **flags)


# --- Single answers

@parametrize("script, loss", [("kto", 0.5), ("dpo", log(2))])
def test_humanline_clamps_log_ratios_and_copies_before_the_update(monkeypatch, script, loss):
    module, calls = changed("humanline", script), []
    sync, step = refcache.Swap.sync, torch.optim.AdamW.step
    assert module.log_ratios.keywords == {"clamp": (-1.0, 1.5)}  # in nats
    monkeypatch.setattr(module, "log_ratios", partial(log_ratios, clamp=(0.0, 0.0)))
    monkeypatch.setattr(refcache.Swap, "sync", lambda *inputs: calls.append("sync") or sync(*inputs))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *inputs: calls.append("step") or step(*inputs))
    history, _ = run("humanline", script, ref="swap", sync_reference=1)
    assert calls[1:] == 3 * ["sync", "step"]  # the first step makes the optimizer's state
    assert [values["loss"] for values in history[1:]] == pytest.approx(3 * [loss])


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


@parametrize("name, formula, flags", [
    ("orpo", orpo, {}), ("alpha_po", alpha_po, {}), ("wpo", wpo, {}),
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
    pytest.param("rpo", rpo(lambda m, d: coins(d, m)), {}, marks=SLOW),
    ("aot", "aot", dict(tokens_per_forward=1)),  # the whole batch is compared in each micro-batch
    ("aot", "aot_unpaired", dict(tokens_per_forward=1, loss=("aot_unpaired",)))])
def test_loss_of_pairs(monkeypatch, name, formula, flags):
    add_columns(monkeypatch, name)
    slow_loss = aot(formula, load()) if name == "aot" else of_pairs(formula, load())
    losses = watch(monkeypatch, name, slow_loss)
    run(name, beta=0.3, steps=2, **flags)
    assert len(losses) == 2


def test_orpo_loads_no_reference():
    assert changed("orpo").resolve(changed("orpo").Args(model=tiny(), data="x")).ref == "none"


def test_iterative_dpo_trains_on_answers_of_its_reference(monkeypatch):
    module, reference, drawn = changed("iterative_dpo"), load(model_with_many_ends()), []
    generate = module.generate

    def watched_generate(model, *inputs):
        reference.load_state_dict(model.state_dict())
        drawn.append(generate(model, *inputs))
        return drawn[-1]

    def slow_loss(policy, rows, *_):
        assert all(y in drawn[-1] or y[:-1] in drawn[-1] for row in rows for y in (row.chosen, row.rejected))
        return of_pairs(plain, reference)(policy, rows)

    monkeypatch.setattr(module, "generate", watched_generate)
    losses = watch(monkeypatch, "iterative_dpo", slow_loss)
    run("iterative_dpo", model=model_with_many_ends(), beta=0.3, max_new_tokens=6, score=arguments("rloo").reward[0],
        ref="swap", sync_reference=2)
    assert [abs(loss - log(2)) < 1e-5 for loss, _ in losses] == [True, False, True]


def test_iterative_dpo_pairs_the_best_and_the_worst_of_four_answers(monkeypatch):
    """Those without a score are left out. An answer that was not cut off ends with EOS."""
    module, eos = changed("iterative_dpo"), TOKENIZER.eos_token_id
    monkeypatch.setattr(module, "generate", lambda *_: [(n,) if n != 2 else (2, 2) for n in range(8)])
    rows = [dpo.Row((8,), (), (), (8,), {"prompt": "?"}), dpo.Row((9,), (), (), (9,), {"prompt": "?", "truth": 1})]

    def score(truth, **_):
        assert truth == 4 * [None] + 4 * [1]  # the columns of all rows
        return [None, 1.0, 2.0, None] + 4 * [None]

    pairs = module.draw_pairs(None, TOKENIZER, rows, score, module.Args(score="by hand", max_new_tokens=2))
    assert [row[:3] for row in pairs] == [((8,), (2, 2), (1, eos)), ((9,), (4, eos), (4, eos))]


@SLOW
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


def test_reward_model_learns_and_scores_in_rloo_where_the_page_says(monkeypatch, tmp_path):
    def score(model, ids):
        return model(tensor([ids])).logits[0, 0]

    def slow_loss(model, rows, *_):
        margins = [score(model, row.prompt + row.chosen) - score(model, row.prompt + row.rejected) for row in rows]
        return sum(map(dpo_loss, margins)) / len(rows)

    module, losses = changed("reward_model"), watch(monkeypatch, "reward_model", slow_loss)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward_model.py").write_text(text_of("dpo", ["reward_model"]))
    monkeypatch.setattr(module, "__file__", str(tmp_path / "reward_model.py"))
    _, args = run("reward_model", steps=2, samples=64, out=None)  # it can write no answers
    folder = re.search(r"then `rloo\.py --reward_model (\S+)`", TABLE["reward_model"])[1]
    judge = rloo.RewardModel(folder, "cpu", rloo.Args())

    rows = dpo.load_rows(args.data, TOKENIZER, dpo.Args(score="keeps the columns"))
    prompts, answers = ([row.columns[name] for row in rows] for name in ("prompt", "chosen"))
    expected = [score(judge.model, row.prompt + row.chosen).item() for row in rows]
    assert judge(prompts, answers, [True] * 12) == pytest.approx(expected, abs=1e-5) and len(losses) == 2


def test_sft_is_a_mean_over_tokens(monkeypatch):
    def slow_loss(policy, rows, *_):
        return -torch.cat(logps(policy, [(row.prompt, row.completion) for row in rows])).mean()

    losses = watch(monkeypatch, "sft", slow_loss)
    run("sft", steps=2)
    assert len(losses) == 2


def test_sft_leaves_out_undesirable_answers(tmp_path):
    rows = [dict(completion="a"), dict(completion="b", label=True), dict(completion="c", label=False),
            dict(chosen="d", rejected="e")]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row | dict(prompt="?")) for row in rows))
    rows = changed("sft").load_rows(f"{tmp_path}/rows.jsonl", TOKENIZER, changed("sft").Args(model=tiny()))
    assert [TOKENIZER.decode(row.completion[:-1]) for row in rows] == ["a", "b", "d"]
