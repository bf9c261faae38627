"""LoRA: what the reference under an adapter is, what trains, and what is saved."""
from pathlib import Path

import pytest
import torch
from models import GROUPS, bad_input, equal, cases
from runs import TOKENIZER, adapt, arguments, load, save, tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import dpo
from logprobs import completion_logprobs, full_tensor
from refcache import Swap

peft = pytest.importorskip("peft")
KINDS = cases("config", [
    {}, dict(modules_to_save=["lm_head"]), dict(bias="all"), dict(use_dora=True),
    dict(trainable_token_indices={"embed_tokens": [9, 12]})], ids=str)


def with_peft(folder):
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny()), folder).eval()


@torch.no_grad()
def difference(one, two):
    ids = torch.arange(5, 13)[None]
    return (one(ids).logits - two(ids).logits).abs().max().item()


@KINDS
def test_sft_adapter_trains_and_is_saved(config, tmp_path):
    folder = adapt(f"kind {config}", **config)
    policy = load(folder, trains=True)
    assert not any(p.requires_grad for p in load(folder).parameters())
    truth = with_peft(folder)
    swap = Swap(policy)
    assert difference(policy, truth) < 1e-5 < difference(load(), truth)

    completion_logprobs(policy, GROUPS)[0][0].sum().backward()
    torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], 3e-2).step()
    assert difference(policy, truth) > 1e-2
    with swap:
        assert difference(policy, truth) < 1e-5
    dpo.save_model(policy, TOKENIZER, tmp_path, dpo.Args(model=folder, dtype="float32"))
    for load_saved in (with_peft, load):
        assert difference(load_saved(tmp_path / "model"), policy) < 1e-5


@cases("checkpointing", [False, True])
def test_gradient_checkpointing_computes_a_layer_twice(checkpointing):
    policy, forwards = load(trains=True, gradient_checkpointing=checkpointing), []
    policy.model.layers[0].self_attn.register_forward_hook(lambda *_: forwards.append(1))
    completion_logprobs(policy, GROUPS)[0][0].sum().backward()
    assert len(forwards) == 1 + checkpointing


@KINDS
def test_float32_adapter_on_a_bfloat16_base_is_exact(config):
    base = save(AutoModelForCausalLM.from_pretrained(tiny()).bfloat16(), "base in bfloat16")
    path = adapt(f"on bfloat16 {config}", base=base, **config) + "/adapter_model.safetensors"
    saved = {name: tensor.float() + 1e-5 * torch.rand(tensor.shape) for name, tensor in load_file(path).items()}
    save_file(saved, path)
    for dtype in ("float32", "bfloat16"):
        policy = load(str(Path(path).parent), trains=True, dtype=dtype)
        assert policy.get_base_model().model.norm.weight.dtype == getattr(torch, dtype)
        loaded = peft.get_peft_model_state_dict(policy)
        assert equal({name: full_tensor(tensor) for name, tensor in loaded.items()}, saved)


def test_flags_choose_the_new_adapter():
    for alpha, scale in ((3.0, 3), (None, 8)):
        policy = load(trains=True, lora_r=4, lora_alpha=alpha, lora_target=("q_proj",))
        config = policy.peft_config["default"]
        assert (config.lora_alpha, config.r, config.target_modules) == (scale, 4, {"q_proj"})


def test_adapter_whose_weights_do_not_fit_is_refused():
    folder = adapt("misfit")
    path = f"{folder}/adapter_model.safetensors"
    save_file(dict(list(load_file(path).items())[::2]), path)
    for trains in (True, False):
        with bad_input("has no weights for base_model.model.*lora_"):
            load(folder, trains=trains)


def test_adapter_as_model_gets_no_second_one():
    for flags in (dict(model=adapt("sft")), dict(lora_r=4)):
        assert dpo.resolve(arguments(lr=None, **flags)).lr == 1e-5
    with bad_input("--lora_r makes a new adapter, but --model is one"):
        dpo.resolve(arguments(model=adapt("sft"), lora_r=4))
