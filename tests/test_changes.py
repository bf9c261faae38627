"""changes/: each patch applies and runs. Loss and gradient of each batch are those of a plain loop over rows."""
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed.checkpoint as dcp
import tyro
from models import GROUPS, build, gradient, logps, cases, slow, slow_but, values_and_gradients
from runs import FOLDER, ROOT, SCRIPTS, TINY, TOKENIZER, arguments, load, run_until, said, save, tiny, without_speed
from slow_losses import LOSSES, all_losses, dpo_loss, masked, of_pairs, orpo
from torch import tensor

import logprobs
from demo import reward_model

PATCHES = {file.stem: file.read_text() for file in sorted((ROOT / "changes").glob("*.patch"))}
SLOW = pytest.mark.slow
needs_patch = pytest.mark.skipif(not shutil.which("patch"), reason="needs patch")
MACHINERY = ["compile", "load_in_4bit", "vllm_rollouts", "cuda_graph"]  # they stack on all others
SCRIPTS_OF = {name: [re.search(r"^--- (\w+)", patch, re.M)[1]] for name, patch in PATCHES.items()}
SCRIPTS_OF |= dict(compile=list(SCRIPTS), load_in_4bit=list(SCRIPTS), humanline=["kto", "dpo"], tr_dpo=["dpo", "kto"])


def apply(patch, text):
    for hunk in re.split(r"^@@ .*\n", patch, flags=re.M)[1:]:
        lines = hunk.splitlines(True)
        old, new = ("".join(line[1:] for line in lines if line[0] in marks) for marks in (" -", " +"))
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def changed(name, script=None):
    """The module that a patch makes of a script, once. NAME+OTHER: two patches."""
    first, *others = name.split("+")
    script = script or SCRIPTS_OF[first][0]
    text = (ROOT / f"{script}.py").read_text()
    for patch in (first, *others):
        text = apply(PATCHES[patch], text)
    label = f"{name} of {script}"
    return sys.modules.get(label) or module_of(text, label, script)


def module_of(text, name, script):
    module = sys.modules[name] = ModuleType(name)
    module.__file__, module.text = SCRIPTS[script].__file__, text
    exec(compile(text, name, "exec"), vars(module))
    return module


# --- The patches as files

@cases("name", slow_but(MACHINERY, PATCHES))
@needs_patch
def test_patch_applies_and_others_stack_on_it(name, tmp_path):
    """Without an offset in its own script. The linter finds no unused or missing name."""
    file = tmp_path / "patched.py"
    for script in SCRIPTS_OF[name]:
        command = ["patch", "--fuzz=0", ROOT / f"{script}.py", ROOT / f"changes/{name}.patch", "-o", file]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert file.read_text() == changed(name, script).text
        assert "offset" not in told or script != SCRIPTS_OF[name][0]
        ruff = "-m ruff check --no-cache --isolated --select F".split()
        subprocess.run([sys.executable, *ruff, file], check=find_spec("ruff") is not None)
        for other in MACHINERY:
            if other != name and script in SCRIPTS_OF[other] and {name, other} != {"reward_model", "load_in_4bit"}:
                changed(f"{other}+{name}", script)


def test_patches_and_tables_agree():
    table = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", (ROOT / "docs/change_it.md").read_text(), re.M))
    in_readme = dict(re.findall(r"`(\w+)`(?: \(.*?\))? \+(\d+)", (ROOT / "README.md").read_text()))
    assert set(in_readme) == set(table) == set(PATCHES)
    for name, patch in PATCHES.items():
        _, lines, command = (cell.strip() for cell in table[name].split(" | "))
        assert int(lines) == int(in_readme[name]) == len(re.findall(r"^\+(?!\+\+ )", patch, re.M))
        flags = re.fullmatch(rf"`python {name}\.py ?(.*)`", command)[1]
        tyro.cli(changed(name).Args, args=shlex.split(flags), use_underscores=True)


# --- Runs

def watch(monkeypatch, name, slow_loss, function="run_batch"):
    """Compares the batches of main() with slow_loss. Returns the norms of the gradients."""
    norms, fast = [], getattr(changed(name), function)

    def watched(model, *inputs, **options):
        if options.get("backward") is False:
            return fast(model, *inputs, **options)
        expected = slow_loss(model, *inputs)
        expected.backward()
        slow_gradient = gradient(model)
        norms.append(slow_gradient.norm().item())
        model.zero_grad()
        result = fast(model, *inputs, **options)
        found = result[-1] if isinstance(result, tuple) else result
        assert found["loss"] == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
        assert (gradient(model) - slow_gradient).norm() <= 1e-5 * norms[-1] + 1e-7
        return result

    monkeypatch.setattr(changed(name), function, watched)
    return norms


def run(name, script=None, **flags):
    module = changed(name, script)
    args = arguments(Path(module.__file__).stem, module, **flags)
    return module.main(args), args


def resumed(module, args):
    """The same run again, killed after step 2: its history, and the checkpoint from which it goes on."""
    args = replace(args, out=f"{args.out}-again")
    run_until("learning_rate 3", module.main, args)
    saved = shutil.copytree(f"{args.out}/resume-2", f"{args.out}-saved")
    return without_speed(module.main(args)), saved


@SLOW
def test_compiled_model_has_the_same_log_probs_and_gradients(monkeypatch):
    monkeypatch.setattr(logprobs, "log_softmax_at", logprobs.log_softmax_at)
    compiled = load(script=changed("compile"), trains=True, gradient_checkpointing=True)
    names = {type(part).__name__ for part in compiled.modules() if part._compiled_call_impl}
    assert names == {"LlamaMLP", "LlamaRMSNorm"}
    expected = values_and_gradients(slow, load(trains=True), GROUPS)
    found = values_and_gradients(logprobs.completion_logprobs, compiled, GROUPS)
    assert all(map(partial(torch.allclose, atol=1e-4, rtol=1e-4), found, expected))


@SLOW
def test_policy_and_reference_in_4_bits_are_equal():
    bitsandbytes, _ = map(pytest.importorskip, ("bitsandbytes", "peft"))
    module = changed("load_in_4bit")
    history, args = run("load_in_4bit", lora_r=4, dtype="bfloat16", save_every=2)
    weights = module.load_model(f"{args.out}/model", "cpu", args, trains=True).parameters()
    assert {x.quant_type for x in weights if isinstance(x, bitsandbytes.nn.Params4bit)} == {"nf4"}
    assert history[1]["abs_logratio"] <= 1e-6 and resumed(module, args)[0] == without_speed(history)
    assert b" in NF4" in Path(args.out, "reference_logprobs.pkl").read_bytes()


# --- Pairs

def write_rows(name, rows):
    path = Path(FOLDER.name, f"{name}.jsonl")
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


CONVERSATIONS = write_rows("conversations", [dict(prompt="a", chosen=" b c", rejected=" d")] + [
    dict(prompt=said("film", "user"), tools=[dict(name="look")], chat_template_kwargs=dict(thought="so"),
         chosen=said("good") + said("yes why", speaker) + said("yes"),
         rejected=said("a bad film") * n + said("no why", speaker) + said("no") * n)
    for n, speaker in [(0, "user"), (1, "tool"), (1, "user")] * 2])


@cases("name, formula, flags", [
    ("losses", orpo, dict(loss=("orpo",))),
    ("losses", all_losses, dict(loss=tuple(LOSSES), loss_weights=(1, 2, 3, 4, 5, 6, 7, 8), label_smoothing=0.1)),
    ("multi_turn", masked, dict(loss=("sigmoid_norm",), data=CONVERSATIONS, eval_data=None))])
def test_loss_of_pairs(monkeypatch, name, formula, flags):
    norms = watch(monkeypatch, name, of_pairs(formula, load()))
    history, _ = run(name, beta=0.3, model=tiny(1), ref_model=tiny(), **flags)
    assert len(norms) == 3
    if formula is orpo:  # without a reference, and per token
        assert history[1]["rewards/chosen"] == pytest.approx(-0.3 * history[1]["nll/chosen"])


def test_turn_that_the_template_rewrites_is_not_trained(monkeypatch):
    """A template that writes a thought before the last message alone, as Qwen3's does."""
    module = changed("multi_turn")
    thought = "{% if loop.last and message.role == 'assistant' %}{{ thought }} {{ tools[0].name }} {% endif %}"
    template = TOKENIZER.chat_template.replace("{{ message.content }}", thought + "{{ message.content }}")
    monkeypatch.setattr(TOKENIZER, "chat_template", template)

    string, *rows = module.load_rows(CONVERSATIONS, TOKENIZER, module.Args())
    assert all(map(all, string.trained)) and len(rows) == 4  # an answer without an assistant's turn is dropped
    for row in rows:
        texts = [TOKENIZER.decode(tensor(y)[tensor(mask)]) for y, mask in zip(row[1:3], row.trained)]
        assert texts == ["so look yes<|end|>", "so look no<|end|>"]
    batch = module.compute_batch(load(), rows, None)
    assert batch.logp_w.equal(batch.logratio_w)


def test_reward_model(monkeypatch):
    def score(model, row, answer):
        return model(tensor([row.prompt + answer])).logits[0, 0]

    def slow_loss(model, rows, *_):
        margins = [score(model, row, row.chosen) - score(model, row, row.rejected) for row in rows]
        return sum(map(dpo_loss, margins)) / len(rows)

    norms = watch(monkeypatch, "reward_model", slow_loss)
    model = save(build("llama", TINY | dict(pad_token_id=7)), "pads")
    _, args = run("reward_model", model=model, gradient_checkpointing=True)
    _, model = reward_model.load(f"{args.out}/model")  # a reward for rloo.py
    assert len(norms) == 3 and model.config.pad_token_id == 7


# --- Moving references

def test_humanline_clamps_log_ratios(monkeypatch):
    module = changed("humanline")
    ratios, = module.log_ratios([[tensor([-3.0, -0.9, 1.4, 3.0])]], [((1,), [(1, 2, 3, 4)])], None)
    assert ratios[0].tolist() == pytest.approx([-1, -0.9, 1.4, 1.5])
    monkeypatch.setattr(module, "HUMANLINE", (0.0, 0.0))
    assert run("humanline", "kto", steps=1)[0][1]["loss"] == pytest.approx(0.5)


MOVING = dict(sync_reference=2, sync_mix=0.6)


@cases("name, script, flags", [
    ("tr_dpo", "kto", MOVING), ("tr_dpo", "dpo", MOVING | dict(dtype="bfloat16")), ("humanline", "dpo", {})])
def test_reference_moves_and_runs_resume_bitwise(name, script, flags):
    whole, args = run(name, script, save_every=2, **flags)
    history, folder = resumed(changed(name, script), args)
    assert history == without_speed(whole)

    first, now, reference = (load().state_dict() for _ in range(3))
    dcp.load({"weights": now}, checkpoint_id=folder)
    dcp.load(reference, checkpoint_id=f"{folder}/reference")
    for key, weight in reference.items():
        if name == "tr_dpo":
            assert torch.allclose(weight, 0.6 * now[key] + 0.4 * first[key], atol=1e-6)
        else:  # the policy one step before
            assert not weight.equal(now[key]) and not weight.equal(first[key])


# --- Single answers

def test_sft_is_a_mean_over_tokens_of_good_answers(monkeypatch):
    def slow_loss(policy, rows, *_):
        assert sorted(TOKENIZER.decode(row.completion[:-1]) for row in rows) == ["a", "c", "longer"]
        return -torch.cat(logps(policy, [row[:2] for row in rows])).mean()

    rows = [dict(completion="a"), dict(completion="longer", label=True), dict(completion="b", label=False),
            dict(chosen="c", rejected="d")]
    path = write_rows("sft", [row | dict(prompt="?") for row in rows])
    norms = watch(monkeypatch, "sft", slow_loss)
    monkeypatch.setattr(changed("sft"), "ReferenceCache", None)
    run("sft", data=path, eval_data=path, steps=2, tokens_per_forward=10)
    assert len(norms) == 2
