"""Models as the scripts load and save them: dtypes, weights that are missing, stop tokens."""
import json
from copy import deepcopy
from pathlib import Path

import torch
from models import ROUNDING, SMALL, bad_input, build, cases
from runs import BOTH, EACH, SCRIPTS, TINY, TOKENIZER, arguments, load, needs_peft, run, save, tiny
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo
from logprobs import full_tensor


@EACH
def test_weights_that_train_are_not_rounded(script):
    """In a run in bfloat16. Whether the checkpoint is float32 or not."""
    stored = load_file(f"{tiny()}/model.safetensors")
    policy, reference = (load(None, SCRIPTS[script], trains, dtype="bfloat16") for trains in (True, False))
    assert all(full_tensor(weight).equal(stored[name]) for name, weight in policy.named_parameters())
    assert {weight.dtype for weight in reference.parameters()} == {torch.bfloat16}
    half = save(AutoModelForCausalLM.from_pretrained(tiny()).bfloat16(), "tiny in bfloat16")
    assert {weight.dtype for weight in load(half, SCRIPTS[script], trains=True).parameters()} == {torch.float32}


@torch.no_grad()
@cases("dtype", ["float32", "bfloat16"])
def test_saved_model_is_the_one_that_was_evaluated(dtype, tmp_path):
    """It routes tokens to experts by weights that stay float32."""
    policy = load(save(build(*ROUNDING["ernie-moe-float32-router"]), "router"), trains=True, dtype=dtype)
    dpo.save_model(policy, TOKENIZER, tmp_path, dpo.Args(dtype=dtype))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").eval()
    ids = torch.arange(3, 97)[None]
    assert policy(ids).logits.equal(model(ids).logits) and model.dtype == getattr(torch, dtype)


@cases("stops, saved", [(None, [3]), ([7, 8], [7, 8, 3]), (3, 3)])
@BOTH
def test_saved_model_stops_where_answers_end(script, stops, saved):
    model = build("llama", TINY)
    model.generation_config.eos_token_id = stops  # token 3 is <|end|>
    args = arguments(script, model=save(model, f"stops at {stops}"), steps=1)
    SCRIPTS[script].main(args)
    assert json.loads(Path(args.out, "model/generation_config.json").read_text())["eos_token_id"] == saved


@needs_peft
@BOTH
def test_tokenizer_of_an_adapter_ends_where_answers_end(script):
    folder = save(build("llama", TINY | dict(eos_token_id=1)), "another end")
    tokenizer = AutoTokenizer.from_pretrained(folder, eos_token="<|user|>")
    tokenizer.save_pretrained(folder)
    saved = AutoTokenizer.from_pretrained(run(script, model=folder, lora_r=4, steps=1).model)
    assert saved.eos_token == "<|end|>"


def test_loss_of_routers_does_not_disturb_sampling():
    experts = SMALL | TINY | dict(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    assert len(run("rloo", model=save(build("mixtral", experts), "experts"), steps=1).history) == 2


@EACH
def test_weights_that_are_missing_are_refused(script, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny())
    state = {name: weight for name, weight in model.state_dict().items() if "up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    for trains in (True, False):
        with bad_input(f"{tmp_path} has no weights for model.layers.0.mlp.up_proj"):
            load(tmp_path, SCRIPTS[script], trains)


@EACH
def test_a_reference_with_another_tokenizer_is_refused(script, tmp_path, monkeypatch):
    tokenizer = deepcopy(TOKENIZER)
    tokenizer.add_tokens("another")
    AutoModelForCausalLM.from_pretrained(tiny()).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with bad_input("has another tokenizer than"):
        SCRIPTS[script].main(arguments(script, ref_model=str(tmp_path)))
