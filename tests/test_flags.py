"""Flags, Weights & Biases, and the saved model."""
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import ROUNDING, bad_input, build, parametrize
from runs import EACH, ROOT, SCRIPTS, TIED, TOKENIZER, arguments, load, read, save, tiny
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import dpo
from refcache import full_tensor

BAD_VALUES = [  # of every script
    ("lr", 0.0), ("lr", math.nan), ("warmup", -0.1), ("epochs", 0.0), ("steps", -2), ("lora_r", 0), ("beta", -0.1),
    ("max_grad_norm", -1.0), ("batch_size", 0), ("max_new_tokens", 0)]
CONTRADICTIONS = [
    (dict(data=None), "^give both --model and --data"),
    (dict(lora_alpha=8.0), "need --lora_r"),
    (dict(lora_target=("q_proj",)), "need --lora_r"),
    (dict(ref="swap", ref_model=ROOT / "demo/model"), "--ref swap holds the policy's own start"),
    (dict(warmup=3, steps=2), "--warmup 3: the run has only 2 steps")]


def resolve(script, **flags):
    return SCRIPTS[script].resolve(arguments(script, **flags))


@parametrize("script, flag, value", [
    *((script, *bad) for script in SCRIPTS for bad in BAD_VALUES),
    ("dpo", "beta", 0.0), ("dpo", "label_smoothing", 0.5), ("dpo", "label_smoothing", math.nan), ("kto", "beta", 0.0),
    ("dpo", "ref", "swop"), ("rloo", "k", 1), ("rloo", "clip_eps", 0.0), ("rloo", "temperature", 0.0),
    ("rloo", "updates_per_rollout", 0)])
def test_values_that_no_run_can_have_are_refused(script, flag, value):
    with bad_input(rf"--{flag}\b"):
        resolve(script, **{flag: value})


@EACH
def test_smallest_values_are_accepted(script):
    flags = dict(steps=-1, lr=1e-30, warmup=0.0, batch_size=1, lora_r=1, max_grad_norm=0.0, eval_size=0)
    flags |= dict(k=2, beta=0.0, max_new_tokens=1) if script == "rloo" else {}
    assert vars(resolve(script, **flags)).items() >= flags.items()
    assert resolve(script, max_length=10**6).max_length <= 256, "the model has no more positions"


@EACH
def test_false_on_the_command_line_is_no_string(script):
    """tyro reads only True and False as truth values."""
    options = resolve(script, chat_template_kwargs=dict(a="false", b="true", c=0, d="x")).chat_template_kwargs
    assert list(map(repr, options.values())) == ["False", "True", "0", "'x'"]


@EACH
def test_paths_are_absolute(script, monkeypatch, tmp_path):
    """A user's function may change the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("model").symlink_to(tiny())
    for name in ("rows.jsonl", "score.py"):
        Path(name).touch()
    flags = dict(model="model", data="~/rows.jsonl", eval_data="rows.jsonl", out="~/run")
    if script == "rloo":
        assert resolve(script, **flags, reward=("score.py:f",)).reward == (f"{tmp_path}/score.py:f",)
    else:
        flags |= dict(ref_cache="~/c.pkl", score="score.py:f")
    args = vars(resolve(script, **flags))
    for flag, path in flags.items():
        assert args[flag] == f"{tmp_path}/{path.removeprefix('~/')}"
    assert args["ref_model"] == args["model"]


@parametrize("script, flags, words", [
    *((script, *case) for script in SCRIPTS for case in CONTRADICTIONS),
    ("dpo", dict(label_smoothing=0.4, loss=("ipo",)), "--label_smoothing"),
    ("dpo", dict(loss=("sigmoid", "sft"), loss_weights=(1.0,)), "--loss_weights"),
    ("dpo", dict(score="nothing.py:f"), "expected FILE.py:FUNCTION")])
def test_flags_that_contradict_each_other_are_refused(script, flags, words):
    with bad_input(words):
        SCRIPTS[script].main(arguments(script, **flags))


@EACH
def test_folder_without_out_goes_on_or_is_the_next(script, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in (script, f"{script}-2", f"{script}-3"):
        folder = tmp_path / "out" / name
        assert resolve(script, out=None).out == str(folder)
        folder.mkdir(parents=True)
        assert resolve(script, out=None).out == str(folder)
        (folder / "model").mkdir()
    with bad_input("holds a finished run: name another --out"):
        resolve(script, out=f"out/{script}")


def test_wandb_gets_every_line_of_metrics_once_and_finds_the_run_in_the_folder(monkeypatch):
    begun, logged = [], []
    stand_in = SimpleNamespace(init=lambda **options: begun.append(options),
                               log=lambda values, step: logged.append((step, values)))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    dpo.main(arguments(steps=1))
    assert not begun and not logged, "not without --wandb"

    args = arguments(wandb=True, save_every=1)
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(dpo, "save_model", None)
        dpo.main(args)
    dpo.main(args)  # nothing is left to do but to save
    assert logged == [(values["step"], values) for values in read(f"{args.out}/metrics.jsonl")] and len(logged) == 4
    out = Path(args.out)
    assert begun == [dict(name=out.name, dir=out, config=begun[0]["config"], resume="auto")] * 2


# --- The saved model

@parametrize("dtype", ["float32", "bfloat16"])
def test_model_is_saved_in_the_dtype_of_its_forwards(dtype, tmp_path, monkeypatch):
    """Integers stay integers, and tied weights are saved once, even if a GPU gives two copies of them."""
    monkeypatch.setattr(dpo, "get_model_state_dict", lambda *inputs, original=dpo.get_model_state_dict, **options: {
        name: weight.clone() for name, weight in original(*inputs, **options).items()})
    policy = load(save(build("llama", TIED), "tied"), trains=True, dtype=dtype)
    policy.register_buffer("count", torch.tensor([70_001]))  # bfloat16 would round it to 70,144
    dpo.save_model(policy, TOKENIZER, tmp_path, dpo.Args(dtype=dtype))
    saved = load_file(tmp_path / "model/model.safetensors")
    assert saved.pop("count").tolist() == [70_001]
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == dtype
    weights = dict(policy.named_parameters())
    assert saved.keys() == weights.keys()
    for name, weight in weights.items():
        assert saved[name].equal(full_tensor(weight).to(getattr(torch, dtype)))


@torch.no_grad()
def test_saved_bfloat16_model_is_the_one_that_was_evaluated(tmp_path):
    """It routes tokens to experts by weights that stay float32."""
    folder = save(build(*ROUNDING["ernie-moe-float32-router"]), "router")
    policy = load(folder, trains=True, dtype="bfloat16")
    dpo.save_model(policy, TOKENIZER, tmp_path, dpo.Args(dtype="bfloat16"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").eval()
    ids = torch.arange(3, 97)[None]
    assert policy(ids).logits.equal(model(ids).logits)
