"""changes/: each patch applies and runs. Loss and gradient of each batch are those of a plain loop over rows."""
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from math import log
from pathlib import Path
from types import ModuleType

import pytest
import torch
import tyro
from models import bad_input, equal, gradient, logps, parametrize, slow_but
from runs import ROOT, SCRIPTS, TOKENIZER, arguments, load, run_until, same_metrics, tiny, weights_of, without_speed
from slow_losses import LOSSES, all_losses, assistant_turns, dpo_loss, of_pairs, orpo
from torch import tensor
from transformers import AutoModelForSequenceClassification

import dpo
import refcache
import rloo

PATCHES = {file.stem: file.read_text() for file in sorted((ROOT / "changes").glob("*.patch"))}
TABLE = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", (ROOT / "docs/change_it.md").read_text(), re.M))
SLOW = pytest.mark.slow
needs_patch = pytest.mark.skipif(
    not shutil.which("patch") or not shutil.which("git"), reason="needs patch(1) and git")
MACHINERY = ["compile", "load_in_4bit", "vllm_rollouts"]  # they stack on all others
SCRIPTS_OF = {name: [re.search(r"^--- (\w+)", patch, re.M)[1]] for name, patch in PATCHES.items()}
SCRIPTS_OF |= dict(compile=list(SCRIPTS), load_in_4bit=list(SCRIPTS))
SCRIPTS_OF |= dict(humanline=["kto", "dpo"], tr_dpo=["dpo", "kto"])


def hunks(patch):
    """(old text, new text) of each."""
    pairs = []
    for hunk in re.split(r"^@@ .*\n", patch, flags=re.M)[1:]:
        lines = hunk.splitlines(True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        pairs.append((old, "".join(line[1:] for line in lines if line[0] in " +")))
    return pairs


def apply(patch, text):
    for old, new in hunks(patch):
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
    return module_of(text_of(script, name.split("+")), f"{name} of {script}", script)


def module_of(text, name, script):
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = SCRIPTS[script].__file__
    exec(compile(text, name, "exec"), vars(module))
    return module


# --- The patches as files

RUFF = [sys.executable, "-m", "ruff", "check", "--no-cache", "--isolated", "--select", "F"]


def run_patch(script, name, out):
    subprocess.run(["patch", "--fuzz=0", script, ROOT / f"changes/{name}.patch", "-o", out], check=True)
    return out.read_text()


@parametrize("name", slow_but(MACHINERY, PATCHES))
@needs_patch
def test_patch_applies_to_each_of_its_scripts_and_others_stack_on_it(name, tmp_path):
    """The order of two patches changes nothing. The linter finds no unused or missing name."""
    subprocess.run(["git", "apply", "-p0", "--check", f"changes/{name}.patch"], cwd=ROOT, check=True)
    one = tmp_path / "one.py"
    for script in SCRIPTS_OF[name]:
        assert run_patch(ROOT / f"{script}.py", name, one) == text_of(script, [name])
        if find_spec("ruff"):
            subprocess.run([*RUFF, one], check=True)
        for other in MACHINERY:
            if other != name and script in SCRIPTS_OF[other]:
                both = run_patch(one, other, tmp_path / "both.py")
                compile(both, f"{name}+{other}", "exec")
                assert both == text_of(script, [other, name])


@parametrize("script", SCRIPTS)
def test_small_change_of_a_script_breaks_at_most_one_patch(script):
    """A comment that is deleted, or a new line in Args or in Loss."""
    text = (ROOT / f"{script}.py").read_text()
    spans = []  # lines of each hunk
    for name in PATCHES:
        for old, _ in hunks(PATCHES[name]) if script in SCRIPTS_OF[name] else ():
            begin = text[:text.index(old)].count("\n")
            spans.append((name, begin, begin + old.count("\n")))

    is_list = False
    for n, line in enumerate(text.splitlines()):
        if "#" in line:
            assert len({name for name, begin, end in spans if begin <= n < end}) <= 1, line
        if is_list:  # a new line above this one
            assert len({name for name, begin, end in spans if begin < n < end}) <= 1, line
        if line in ("class Args:", "Loss = Literal["):
            is_list = True
        elif line == "]" or line.startswith("# ---- The loss"):
            is_list = False


def test_patches_and_tables_agree():
    in_readme = dict(re.findall(r"`(\w+)`(?: \(.*?\))? \+(\d+)", (ROOT / "README.md").read_text()))
    assert set(in_readme) == set(TABLE) == set(PATCHES)
    for name, patch in PATCHES.items():
        header, _, diff = patch.partition("--- ")
        paper, formula, lines, command = (cell.strip() for cell in TABLE[name].split(" | "))
        assert header.count("\n") == 3 and max(map(len, header.splitlines())) <= 110
        assert int(lines) == int(in_readme[name]) == len(re.findall(r"^\+(?!\+\+ )", diff, re.M))
        assert set(re.findall(r"\d{4}\.\d{5}", paper)) <= set(re.findall(r"\d{4}\.\d{5}", header))
        flags = re.fullmatch(rf"`python {name}\.py ?(.*)`", command)[1]
        tyro.cli(changed(name).Args, args=shlex.split(flags), use_underscores=True)


# --- Runs

def watch(monkeypatch, name, slow_loss, function="run_batch"):
    """Compares the batches of main() with slow_loss. Returns losses and norms of gradients."""
    fast, losses = getattr(changed(name), function), []

    def watched(model, *inputs, **options):
        if not options.get("train", True):
            return fast(model, *inputs, **options)
        expected = slow_loss(model, *inputs)
        expected.backward()
        slow_gradient = gradient(model)
        model.zero_grad()
        result = fast(model, *inputs, **options)
        found = result[-1] if isinstance(result, tuple) else result
        assert found["loss"] == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
        assert (gradient(model) - slow_gradient).norm() <= 1e-5 * slow_gradient.norm() + 1e-7
        losses.append((found["loss"], slow_gradient.norm().item()))
        return result

    monkeypatch.setattr(changed(name), function, watched)
    return losses


def run(name, script=None, **flags):
    module = changed(name, script)
    args = arguments(Path(module.__file__).stem, module, **flags)
    return module.main(args), args


@SLOW
@parametrize("name, flags", [
    ("sft", dict(lora_r=4, gradient_checkpointing=True)), ("grpo", {}), ("reward_model", {})])
def test_compiled_runs_of_each_script_equal_others(monkeypatch, name, flags):
    compiled, compile_module = set(), torch.nn.Module.compile

    def watched(module, **options):
        compiled.add(type(module).__name__)
        compile_module(module, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", watched)
    monkeypatch.setattr(refcache, "log_softmax_at", refcache.log_softmax_at)
    changed(f"{name}+compile").compile_log_softmax.cache_clear()
    one, other = (without_speed(run(patches, steps=2, **flags)[0]) for patches in (name, f"{name}+compile"))
    assert hasattr(refcache.log_softmax_at, "get_compiler_config") and compiled == {"LlamaMLP", "LlamaRMSNorm"}
    assert same_metrics(one, other)


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
    ("tr_dpo", dict(ref="live"), "--ref swap"), ("humanline", {}, "--ref swap"),
    ("losses", dict(loss=("exo_pair",)), "needs --label_smoothing"),
    ("losses", dict(loss=("hinge",), label_smoothing=0.1), "robust and exo_pair")])
def test_misuse_is_refused(name, flags, words):
    with bad_input(words):
        run(name, **flags)


# --- Pairs

OTHER_START = dict(model=tiny(1), ref_model=tiny())  # no log-ratio is 0


@parametrize("name, formula, flags", [
    ("orpo", orpo, {}),
    ("losses", all_losses, OTHER_START | dict(
        loss=tuple(LOSSES), loss_weights=tuple(range(1, len(LOSSES) + 1)), label_smoothing=0.1)),
    ("multi_turn", assistant_turns, OTHER_START | dict(loss=("sigmoid_norm",)))])
def test_loss_of_pairs(monkeypatch, tmp_path, name, formula, flags):
    if name == "multi_turn":
        flags |= dict(data=conversations(tmp_path), eval_data=None)
    losses = watch(monkeypatch, name, of_pairs(formula, load()))
    run(name, beta=0.3, steps=3, **flags)
    assert len(losses) == 3


@parametrize("loss", LOSSES)
def test_log_ratios_of_hundreds_of_nats_stay_finite(loss):
    ratios = tensor([[500.0, -500.0, 500.0], [-500.0, 500.0, 500.0]], requires_grad=True)
    ones = torch.ones(3)
    batch = dpo.Batch(-ones, -ones, *ratios, ones, ones, ones, ones)
    values = changed("losses").preference_loss(loss, batch, dpo.Args(label_smoothing=0.1))
    values.sum().backward()
    assert values.isfinite().all() and ratios.grad.isfinite().all()


def conversations(folder):
    """Rows of several turns, and a row of strings. The second answer follows a question or a result of a tool."""
    rows = [dict(prompt="a", chosen=" b c", rejected=" d")]
    for n, speaker in enumerate(["user", "tool", "user"] * 2):
        row = {}
        for name, first, last in (("chosen", "good", "yes"), ("rejected", "a bad film", "no")):
            turns = [("user", f"film {n}"), ("assistant", first), (speaker, f"{last} why"), ("assistant", last)]
            row[name] = [dict(role=role, content=text) for role, text in turns]
        rows.append(row)
    path = folder / "conversations.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_multi_turn_never_trains_a_turn_that_the_template_rewrites(tmp_path, monkeypatch, capsys):
    """This template writes a thought before the last message alone, as Qwen3's does."""
    module = changed("multi_turn")
    template = TOKENIZER.chat_template.replace("{{ message.content }}", (
        "{% if loop.last and message.role == 'assistant' %}thought {% endif %}{{ message.content }}"))
    monkeypatch.setattr(TOKENIZER, "chat_template", template)
    _, *rows = module.load_rows(conversations(tmp_path), TOKENIZER, module.Args())
    assert len(rows) == 6 and "; 12 turns that are not trained" in capsys.readouterr().out
    for row in rows:
        for tokens, mask, text in zip((row.chosen, row.rejected), row.trained, ("yes", "no")):
            assert TOKENIZER.decode(tensor(tokens)[tensor(mask)]) == f"thought {text}<|end|>"

    template = template.replace("<|assistant|>", "<|assistant|>why ")  # answers do not begin with it
    monkeypatch.setattr(TOKENIZER, "chat_template", template)
    with bad_input("too few rows"):
        module.load_rows(conversations(tmp_path), TOKENIZER, module.Args())
    assert "; 6 dropped: no turn" in capsys.readouterr().out


def test_reward_model_learns_and_scores_in_rloo(monkeypatch):
    def score(model, row, answer):
        return model(tensor([row.prompt + answer])).logits[0, 0]

    def slow_loss(model, rows, *_):
        margins = [score(model, row, row.chosen) - score(model, row, row.rejected) for row in rows]
        return sum(map(dpo_loss, margins)) / len(rows)

    losses = watch(monkeypatch, "reward_model", slow_loss)
    _, args = run("reward_model", steps=2, samples=64, gradient_checkpointing=True)  # it can write no answers
    assert len(losses) == 2

    rows = dpo.load_rows(args.data, TOKENIZER, dpo.Args(score="keeps the columns"))
    prompts, answers = ([row.columns[name] for row in rows] for name in ("prompt", "chosen"))
    model = AutoModelForSequenceClassification.from_pretrained(f"{args.out}/model")
    expected = [score(model, row, row.chosen).item() for row in rows]
    judge = rloo.load_reward_model(f"{args.out}/model", "cpu", rloo.Args())
    assert judge(prompts, answers, [True] * 12) == pytest.approx(expected, abs=1e-5)


# --- Moving references

@parametrize("script, loss", [("kto", 0.5), ("dpo", log(2))])
def test_humanline_clamps_log_ratios_and_copies_before_the_update(monkeypatch, script, loss):
    module, calls = changed("humanline", script), []
    copy, step = module.copy_policy, torch.optim.AdamW.step
    assert module.HUMANLINE == (-1.0, 1.5)
    monkeypatch.setattr(module, "HUMANLINE", (0.0, 0.0))
    monkeypatch.setattr(module, "copy_policy", lambda reference: calls.append("copy") or copy(reference))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *inputs, **_: calls.append("step") or step(*inputs))
    history, _ = run("humanline", script, ref="swap")
    assert calls == 3 * ["copy", "step"]
    assert [values["loss"] for values in history[1:]] == pytest.approx(3 * [loss])


def resumed(module, args):
    """The history of a run that is killed after step 2, and begun again. The checkpoint from which it goes on."""
    run_until("learning_rate 3", module.main, args)
    saved = weights_of(f"{args.out}/resume-2")
    return without_speed(module.main(args)), saved


MOVING = dict(ref="swap", sync_reference=2, sync_mix=0.6)


@parametrize("name, script, flags", [
    ("tr_dpo", "kto", MOVING), ("tr_dpo", "dpo", MOVING | dict(dtype="bfloat16")),
    ("humanline", "kto", dict(ref="swap"))])
def test_resumed_run_has_the_same_bits(name, script, flags):
    whole, args = run(name, script, save_every=2, **flags)
    again = replace(args, out=f"{args.out}-again")
    history, saved = resumed(changed(name, script), again)
    assert history == without_speed(whole)
    assert equal(weights_of(f"{again.out}/model"), weights_of(f"{args.out}/model"))

    for name, first in load().state_dict().items() if "sync_mix" in flags else ():
        assert torch.allclose(saved[f"reference.{name}"], 0.6 * saved[name] + 0.4 * first, atol=1e-6)


# --- Single answers

def test_sft_is_a_mean_over_the_tokens_of_good_answers(monkeypatch, tmp_path):
    """The answers of rows that are good, of rows without a label, and of pairs."""
    def slow_loss(policy, rows, *_):
        assert sorted(TOKENIZER.decode(row.completion[:-1]) for row in rows) == ["a", "c", "longer"]
        return -torch.cat(logps(policy, [row[:2] for row in rows])).mean()

    rows = [dict(completion="a"), dict(completion="longer", label=True), dict(completion="b", label=False),
            dict(chosen="c", rejected="d")]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row | dict(prompt="?")) for row in rows))
    losses = watch(monkeypatch, "sft", slow_loss)
    monkeypatch.setattr(changed("sft"), "ReferenceCache", None)
    run("sft", data=str(path), eval_data=str(path), steps=2, tokens_per_forward=10)
    assert len(losses) == 2
