"""Models as the scripts load and save them: dtypes, weights that are missing, stop tokens."""
import json
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import torch
from models import ROUNDING, SMALL, bad_input, build, equal, parametrize
from runs import BOTH, EACH, SCRIPTS, TIED, TINY, TOKENIZER, arguments, load, run, save, tiny
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo
from logprobs import full_tensor


@EACH
def test_weights_that_train_are_not_rounded_and_a_reference_is(script):
    """In a run in bfloat16. Whether the checkpoint is float32 or not."""
    stored = load_file(f"{tiny()}/model.safetensors")
    policy, reference = (load(None, SCRIPTS[script], trains, dtype="bfloat16") for trains in (True, False))
    assert all(full_tensor(weight).equal(stored[name]) for name, weight in policy.named_parameters())
    assert {weight.dtype for weight in reference.parameters()} == {torch.bfloat16}
    half = save(AutoModelForCausalLM.from_pretrained(tiny()).bfloat16(), "tiny in bfloat16")
    assert {weight.dtype for weight in load(half, SCRIPTS[script], trains=True).parameters()} == {torch.float32}


@parametrize("dtype", ["float32", "bfloat16"])
def test_model_is_saved_in_the_dtype_of_its_forwards(dtype, tmp_path, monkeypatch):
    """Integers stay integers, and tied weights are saved once, even if a GPU gives two copies of them."""
    monkeypatch.setattr(dpo, "get_model_state_dict", lambda *inputs, original=dpo.get_model_state_dict, **options: {
        name: weight.clone() for name, weight in original(*inputs, **options).items()})
    policy = load(save(build("llama", TIED), "tied"), trains=True, dtype=dtype)
    policy.register_buffer("count", torch.tensor([70_001]))  # bfloat16 would round it to 70,144
    dpo.save_model(policy, TOKENIZER, tmp_path, dpo.Args(dtype=dtype))
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == dtype
    expected = {name: full_tensor(weight).to(getattr(torch, dtype)) for name, weight in policy.named_parameters()}
    assert equal(load_file(tmp_path / "model/model.safetensors"), expected | dict(count=policy.count))


@torch.no_grad()
def test_saved_bfloat16_model_is_the_one_that_was_evaluated(tmp_path):
    """It routes tokens to experts by weights that stay float32."""
    folder = save(build(*ROUNDING["ernie-moe-float32-router"]), "router")
    policy = load(folder, trains=True, dtype="bfloat16")
    dpo.save_model(policy, TOKENIZER, tmp_path, dpo.Args(dtype="bfloat16"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").eval()
    ids = torch.arange(3, 97)[None]
    assert policy(ids).logits.equal(model(ids).logits)


@parametrize("stops, saved", [(None, [3]), ([7, 8], [7, 8, 3]), (3, 3)])
@BOTH
def test_saved_model_stops_where_answers_end(script, stops, saved):
    """An adapter is saved without a generation config: its tokenizer says where."""
    model = build("llama", TINY)
    model.generation_config.eos_token_id = stops
    folder = save(model, f"stops at {stops}")
    tokenizer = deepcopy(TOKENIZER)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(1)  # token 3 is <|end|>
    tokenizer.save_pretrained(folder)
    for lora in [{}, dict(lora_r=4)] if find_spec("peft") else [{}]:
        args = arguments(script, model=folder, steps=1, **lora)
        SCRIPTS[script].main(args)
        expected = 1 if stops == 3 else 3
        assert AutoTokenizer.from_pretrained(f"{args.out}/model").eos_token_id == expected
        config = Path(args.out, "model/generation_config.json")
        assert lora or json.loads(config.read_text())["eos_token_id"] == saved


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
