"""Flags, Weights & Biases, and the saved model."""
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import ROUNDING, bad_input, build, parametrize
from runs import BOTH, EACH, ROOT, SCRIPTS, TIED, TINY, TOKENIZER, arguments, load, read, run_until, save
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import dpo
from refcache import ReferenceCache, full_tensor

DEMO = str(ROOT / "demo")
OF_EACH_SCRIPT = [
    *((dict([(flag, value)]), rf"--{flag}\b") for flag, value in (
        ("lr", 0.0), ("lr", math.nan), ("warmup", -0.1), ("epochs", 0.0), ("steps", -2), ("lora_r", 0),
        ("beta", -0.1), ("max_grad_norm", -1.0), ("batch_size", 0), ("save_every", -1))),
    *((dict([(flag, f"{DEMO}/nothing")]), "demo/nothing does not exist") for flag in ("model", "ref_model")),
    (dict(data=None), "^give .*--model"),
    (dict(data="some/data"), "some/data is no file: give a .jsonl file"),
    (dict(lora_alpha=8.0), "need --lora_r"), (dict(lora_target=("q_proj",)), "need --lora_r"),
    (dict(ref="swap", ref_model=f"{DEMO}/model"), "--ref swap holds the policy's own start"),
    (dict(warmup=3, steps=2), "--warmup 3: the run has only 2 steps")]


@parametrize("script, flags, words", [
    *((script, *case) for script in SCRIPTS for case in OF_EACH_SCRIPT),
    ("dpo", dict(beta=0.0), "--beta"), ("dpo", dict(ref="swop"), "--ref swop"),
    ("dpo", dict(label_smoothing=0.5), "--label_smoothing"), ("dpo", dict(label_smoothing=math.nan), "--label_smooth"),
    ("dpo", dict(label_smoothing=0.4, loss=("ipo",)), "--label_smoothing"),
    ("dpo", dict(loss=("sigmoid", "sft"), loss_weights=(1.0,)), "--loss_weights"),
    ("dpo", dict(steps=0, ref="live"), "--steps 0 only fills the cache"),
    ("dpo", dict(steps=0, loss=("sft",)), "--steps 0 only fills the cache"),
    ("kto", dict(beta=0.0), "--beta"), ("kto", dict(desirable_weight=0.0), "--desirable_weight"),
    ("kto", dict(undesirable_weight=-1.0), "--undesirable_weight"),
    ("rloo", dict(k=1), "--k"), ("rloo", dict(clip_eps=0.0), "--clip_eps"),
    ("rloo", dict(temperature=0.0), "--temperature"), ("rloo", dict(updates_per_rollout=0), "--updates_per"),
    ("rloo", dict(max_new_tokens=0), "--max_new_tokens"), ("rloo", dict(max_new_tokens=256), "has 256 positions"),
    ("rloo", dict(reward=()), "--reward"), ("rloo", dict(reward_weights=(1.0, 1.0)), "--reward_weights")])
def test_flags_that_no_run_can_have_are_refused(script, flags, words):
    with bad_input(words):
        SCRIPTS[script].main(arguments(script, **flags))


@EACH
def test_false_on_the_command_line_is_no_string(script):
    """tyro reads only True and False as truth values."""
    args = SCRIPTS[script].resolve(arguments(script, chat_template_kwargs=dict(a="false", b="true", c=0, d="x")))
    assert list(map(repr, args.chat_template_kwargs.values())) == ["False", "True", "0", "'x'"]


@EACH
@parametrize("flag, file, words", [
    *((flag, "args.json", "is the folder of a run: did you mean .*/model?") for flag in ("model", "ref_model")),
    *(("out", file, "is a checkpoint or a checkout: name a folder for the run") for file in ("config.json", ".git"))])
def test_folders_of_another_kind_are_refused(script, flag, file, words, tmp_path):
    (tmp_path / file).touch()
    with bad_input(f"{tmp_path} {words}"):
        SCRIPTS[script].resolve(arguments(script, **{flag: str(tmp_path)}))


@EACH
def test_folder_without_out_goes_on_or_is_the_next(script, monkeypatch, tmp_path):
    def out_of(out=None):
        return Path(SCRIPTS[script].resolve(arguments(script, out=out)).out).absolute()

    monkeypatch.chdir(tmp_path)
    for name in (script, f"{script}-2", f"{script}-3"):
        folder = tmp_path / "out" / name
        assert out_of() == folder
        folder.mkdir(parents=True)
        assert out_of() == folder
        (folder / "model").mkdir()
    with bad_input("holds a finished run: name another --out"):
        out_of(f"out/{script}")


@parametrize("missing, flags", [("peft", dict(lora_r=4)), ("wandb", dict(wandb=True))])
def test_a_package_that_is_missing_is_told_before_the_reference_pass(missing, flags, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(ReferenceCache, "fill", None)
    with pytest.raises(ModuleNotFoundError, match=missing):
        dpo.main(arguments(**flags))


def test_wandb_gets_every_line_of_metrics_once_and_finds_the_run_in_the_folder(monkeypatch):
    begun, logged = [], []
    stand_in = SimpleNamespace(init=lambda **options: begun.append(options),
                               log=lambda values, step: logged.append((step, values)))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    args = arguments(wandb=True, save_every=1)
    run_until("replace model", dpo.main, args)
    dpo.main(args)  # nothing is left to do but to save
    out = Path(args.out)
    assert logged == [(values["step"], values) for values in read(out / "metrics.jsonl")] and len(logged) == 4
    assert begun == [dict(name=out.name, dir=out, config=begun[0]["config"], resume="auto")] * 2


# --- The saved model

@parametrize("dtype", ["float32", "bfloat16"])
def test_model_is_saved_in_the_dtype_of_its_forwards(dtype, tmp_path, monkeypatch):
    """Integers stay integers, and tied weights are saved once, even if a GPU gives two copies of them."""
    monkeypatch.setattr(dpo, "get_model_state_dict", lambda *inputs, original=dpo.get_model_state_dict, **options: {
        name: weight.clone() for name, weight in original(*inputs, **options).items()})
    folder = save(build("llama", TIED), "tied")
    policy = load(folder, trains=True, dtype=dtype)
    policy.register_buffer("count", torch.tensor([70_001]))  # bfloat16 would round it to 70,144
    dpo.save_model(policy, TOKENIZER, tmp_path, dpo.Args(model=folder, dtype=dtype))
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
    dpo.save_model(policy, TOKENIZER, tmp_path, dpo.Args(model=folder, dtype="bfloat16"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").eval()
    ids = torch.arange(3, 97)[None]
    assert policy(ids).logits.equal(model(ids).logits)


@parametrize("stops, saved", [(None, [3]), ([7, 8], [7, 8, 3]), (3, 3)])
@BOTH
def test_saved_model_stops_where_answers_end_and_has_files_for_images(script, stops, saved, capsys):
    model = build("llama", TINY)
    model.generation_config.eos_token_id = stops  # token 3 is <|end|>
    folder = save(model, f"stops at {stops}")
    for name in ("preprocessor_config.json", "processor_config.json", "other_processor.json"):
        Path(folder, name).touch()

    args = arguments(script, model=folder, steps=1)
    SCRIPTS[script].main(args)
    assert ("Answers end with <|end|>, where" in capsys.readouterr().out) == (stops != saved)
    model = Path(args.out, "model")
    assert json.loads((model / "generation_config.json").read_text())["eos_token_id"] == saved
    assert {path.name for path in model.glob("*pro*")} == {"preprocessor_config.json", "processor_config.json"}
