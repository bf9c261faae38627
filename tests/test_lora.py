"""LoRA: what the reference under an adapter is, what trains, and what is saved."""
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from models import GROUPS, build, equal
from runs import (  # noqa: F401
    LORA, TIED, TINY, TOKENIZER, adapt, arguments, distance, load, logprobs, run, same, save, tiny, weights_of)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import dpo
from refcache import BadInput, Swap, completion_logprobs, reference_logprobs

peft = pytest.importorskip("peft")
KINDS = pytest.mark.parametrize("config", [
    {}, dict(modules_to_save=["lm_head"]), dict(modules_to_save=["embed_tokens"]), dict(bias="all"),
    dict(use_dora=True), dict(trainable_token_indices={"embed_tokens": [9, 12]})], ids=str)


def train(policy, steps=2):
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], 3e-2)
    for _ in range(steps):
        completion_logprobs(policy, GROUPS)[0][0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def held_by(swap):
    return {key: value.tolist() for key, value in reference_logprobs(swap, GROUPS).items()}


def with_peft(folder, base=None):
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base or tiny()), folder).eval()


@torch.no_grad()
def difference(one, two):
    ids = torch.tensor([[5, 9, 33, 60, 12, 7, 90, 41]])
    return (one(ids).logits - two(ids).logits).abs().max().item()


# --- The reference

@pytest.mark.parametrize("checkpointing", [False, True])
def test_reference_of_a_new_adapter_is_the_bare_model(checkpointing):
    policy = load(trains=True, lora_r=4, gradient_checkpointing="on" if checkpointing else "off")
    swap = Swap(policy)
    bare = logprobs(load())
    assert held_by(swap) == bare
    train(policy)
    assert held_by(swap) == bare != logprobs(policy)


@pytest.mark.parametrize("ref, checkpointing", [("cache", True), ("swap", False), ("live", True)])
def test_sft_adapter_is_the_reference_without_dropout(run, ref, checkpointing):
    folder = adapt("dropping", lora_dropout=0.5)
    assert not list(Path(folder).glob("tokenizer*"))
    one = run(model=folder, ref=ref, gradient_checkpointing="on" if checkpointing else "off", lr=2e-2)
    assert one.history[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert one.history[1]["logps/chosen"] == pytest.approx(run(model=folder).history[1]["logps/chosen"], abs=1e-4)
    assert same(one, run(model=folder, lr=2e-2))
    assert abs(one.history[-1]["eval_rewards/margins"]) > 1e-3
    assert list(Path(one.model).glob("tokenizer*"))


@KINDS
def test_sft_adapter_trains_and_is_saved(config, tmp_path):
    folder = adapt(f"kind {config}", **config)
    policy = load(folder, trains=True)
    assert not any(p.requires_grad for p in load(folder).parameters())
    truth = with_peft(folder)
    swap = Swap(policy)
    assert difference(policy, truth) < 1e-5 < difference(load(), truth)
    train(policy)
    assert difference(policy, truth) > 1e-2
    with swap:
        assert difference(policy, truth) < 1e-5, "the reference is the adapter as it began"
    dpo.save_model(policy, TOKENIZER, tmp_path / "model", dpo.Args(dtype="float32"))
    assert difference(with_peft(tmp_path / "model"), policy) < 1e-5
    assert difference(load(tmp_path / "model"), policy) < 1e-5, "a later run can start from it"


# --- What trains and what is saved

def test_a_saved_adapter_finds_its_base_from_any_folder(run, monkeypatch):
    """A relative path of the base would mean another folder elsewhere."""
    monkeypatch.chdir(Path(tiny()).parent)
    base = Path(tiny()).name
    for model in (base, adapt("relative", base=base)):
        flags = {} if model != base else dict(lora_r=2)
        saved = run(model=model, steps=1, ref="swap", **flags).model
        found = Path(json.loads(Path(saved, "adapter_config.json").read_text())["base_model_name_or_path"])
        assert found.is_absolute() and found.samefile(tiny())


def test_rank_and_alpha_are_those_of_the_flags():
    for flags, r, alpha in ((dict(lora_r=4), 4, 8), (dict(lora_r=2, lora_alpha=3.0), 2, 3)):
        config = load(trains=True, **flags).peft_config["default"]
        assert (config.r, config.lora_alpha) == (r, alpha)


def test_a_new_adapter_depends_on_the_seed_only(run):
    """Not on the random numbers that were drawn before in this process."""
    flags = LORA | dict(ref="swap", steps=1, lr=0.0)
    torch.manual_seed(11)
    one = run(**flags)
    torch.manual_seed(12)
    assert distance(run(**flags, save_every=7), one) == 0
    assert distance(run(**flags, seed=1), one) > 1e-3


def test_gradient_checkpointing_needs_no_training_mode():
    folder = save(build("opt", TINY | dict(ffn_dim=64, word_embed_proj_dim=32, dropout=0.5)), "opt")
    policy = load(folder, trains=True, gradient_checkpointing="on")
    forwards = []
    policy.model.decoder.layers[0].fc1.register_forward_hook(lambda *_: forwards.append(1))
    ours = completion_logprobs(policy, GROUPS)
    before = len(forwards)
    ours[0][0].sum().backward()
    assert len(forwards) > before
    assert torch.equal(ours[0][0], completion_logprobs(load(folder), GROUPS)[0][0])


def test_adapter_on_tied_embeddings(run):
    folder = save(build("llama", TIED), "tied")
    flags = dict(LORA, model=folder, lora_target="embed_tokens,lm_head")
    one = run(**flags)
    assert one.history[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert difference(load(one.model), with_peft(one.model, folder)) < 1e-5 < difference(load(one.model), load(folder))
    args = arguments(**flags, ref="swap", save_every=1)
    for _ in range(2):
        dpo.main(args)  # then from its checkpoint, which holds all that trains
        resumed = weights_of(f"{args.out}/model")
        shutil.rmtree(f"{args.out}/model")
    assert equal(resumed, one.weights)


# --- Bases in bfloat16

def halved():
    return AutoModelForCausalLM.from_pretrained(tiny()).bfloat16()


def test_stored_dtype_changes_no_bit_in_bfloat16(run):
    bases = save(halved(), "halved"), save(halved().float(), "widened")
    adapters = []
    for base in bases:
        adapters.append(f"{base} with an adapter")
        shutil.copytree(adapt("one adapter for both", base=bases[1]), adapters[-1], dirs_exist_ok=True)
        config = Path(adapters[-1], "adapter_config.json")
        config.write_text(config.read_text().replace(bases[1], base))
        policy = load(adapters[-1], trains=True, dtype="bfloat16")
        dtypes = {(p.requires_grad, p.dtype) for p in policy.parameters()}
        assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    one, two = (run(model=adapter, dtype="bfloat16", lr=2e-2, steps=2) for adapter in adapters)
    assert one.history == two.history and one.history[-1] != one.history[0]
    assert distance(one, two) == 0


@KINDS
def test_float32_adapter_on_a_bfloat16_base_is_exact(config):
    folder = adapt(f"on bfloat16 {config}", base=save(halved(), "base in bfloat16"), **config)
    saved = {}
    for name, tensor in load_file(f"{folder}/adapter_model.safetensors").items():
        saved[name] = tensor.float() + 1e-5 * torch.rand(tensor.shape)
    save_file(saved, f"{folder}/adapter_model.safetensors")
    loaded = peft.get_peft_model_state_dict(load(folder, trains=True))
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


# --- What is refused

def test_an_adapter_that_lacks_a_weight_is_refused(run):
    folder = adapt("lacking", seed=5)
    path = Path(folder) / "adapter_model.safetensors"
    weights = load_file(path)
    weights.popitem()
    save_file(weights, path)
    with pytest.raises(UserWarning, match="missing adapter keys"):
        run(model=folder, ref="swap")


def test_adapter_on_an_adapter_is_refused():
    with pytest.raises(BadInput, match="--lora_r"):
        dpo.main(arguments(model=adapt("sft"), lora_r=4))


@pytest.mark.parametrize("config", [
    dict(peft_type="PREFIX_TUNING", num_virtual_tokens=4),
    dict(peft_type="ADAPTION_PROMPT", adapter_len=4, adapter_layers=1),
    dict(peft_type="LORA", r=4, target_modules=["q_proj"], alora_invocation_tokens=[5, 9])], ids=str)
def test_adapter_of_more_than_weights_is_refused(config, tmp_path):
    """Its virtual tokens, or where it begins, would be ignored."""
    config = peft.get_peft_config(dict(task_type="CAUSAL_LM", **config))
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny()), config).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="more than weights"):
        load(tmp_path)


def test_lora_target_is_a_list_of_names(run):
    names = {name.split(".")[-3] for name in run(**LORA, lora_target="q_proj,v_proj").weights}
    assert names == {"q_proj", "v_proj"}
