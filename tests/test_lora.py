"""LoRA: what the reference under an adapter is, what trains, and what is saved."""
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from models import build
from runs import (  # noqa: F401
    BOTH, FOLDER, GROUPS, LORA, TINY, TOKENIZER, adapt, distance, load, logits, logprobs, run, same, save, resolve_args,
    tiny)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import dpo
import kto
from refcache import BadInput, Swap, completion_logprobs, reference_logprobs

peft = pytest.importorskip("peft")


def train(policy, steps=2):
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], 3e-2)
    for _ in range(steps):
        completion_logprobs(policy, GROUPS)[0][0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def held_by(swap):
    return {key: value.tolist() for key, value in reference_logprobs(swap, GROUPS).items()}


def with_peft(folder, base=None):
    """What peft itself makes of a saved adapter."""
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base or tiny()), folder).eval()


# --- the reference ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
def test_reference_of_a_new_adapter_is_the_bare_model_bit_for_bit_whatever_its_dropout(checkpointing):
    policy = load(trains=True, lora_r=4, lora_dropout=0.5, gradient_checkpointing=checkpointing)
    swap, bare = Swap(policy), logprobs(load())
    assert held_by(swap) == bare
    train(policy)
    assert held_by(swap) == bare != logprobs(policy)
    assert {m.training for name, m in policy.named_modules() if name.endswith("lora_dropout")} == {True}


def test_run_from_an_sft_adapter_has_it_as_reference_with_its_own_dropout_off(run):
    """The reference is the adapter as it was saved, not the bare model below it, wherever it is held."""
    folder = adapt("dropping", lora_dropout=0.5)
    cached, *others = (run(model=folder, ref=ref, lr=2e-2) for ref in ("cache", "swap", "live"))
    assert all(same(other, cached) for other in others) and abs(cached.history[-1]["eval_rewards/margins"]) > 1e-3
    first = cached.history[1]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6) and first["rewards/accuracies"] == 0.5


def test_lora_dropout_is_also_that_of_an_sft_adapter(run):
    first = run(model=adapt("dropping", lora_dropout=0.5), lora_dropout=0.5, steps=1).history[1]
    assert abs(first["rewards/margins"]) > 1e-3


@pytest.mark.parametrize("config", [
    {}, dict(modules_to_save=["lm_head"]), dict(modules_to_save=["embed_tokens"]), dict(bias="all"),
    dict(use_dora=True), dict(trainable_token_indices={"embed_tokens": [9, 12]})], ids=str)
def test_sft_adapter_of_any_kind_is_the_reference_trains_and_is_saved(config, tmp_path):
    folder = adapt(f"kind {config}", **config)
    policy, truth = load(folder, trains=True), logits(with_peft(folder))
    swap = Swap(policy)
    assert (logits(policy) - truth).abs().max() < 1e-5 < (logits(load()) - truth).abs().max()
    train(policy)
    with swap:
        assert (logits(policy) - truth).abs().max() < 1e-5, "the reference is the adapter as it began"
    dpo.save_model(policy, TOKENIZER, tmp_path, dpo.Args())
    dpo.move_model(tmp_path)
    assert (logits(with_peft(tmp_path / "model")) - logits(policy)).abs().max() < 1e-5
    assert (logits(policy) - truth).abs().max() > 1e-2


@pytest.mark.parametrize("target, tied, refused", [
    ("lm_head", True, True), ("embed_tokens,q_proj", True, True), ("q_proj", True, False), ("lm_head", False, False)])
def test_merging_into_tied_embeddings_is_refused(target, tied, refused, tmp_path):
    """peft would add the head's adapter to the weights that the embeddings share."""
    folder = save(build("llama", dict(TINY, tie_word_embeddings=tied), 0), f"tied {tied}")
    flags = dict(lora_r=2, lora_target=target, merge=True)
    if refused:
        with pytest.raises(BadInput, match="because this model ties them"):
            load(folder, trains=True, **flags)
        load(folder, trains=True, **flags | dict(merge=False))
    else:
        load(folder, trains=True, **flags)


def test_cache_of_an_adapter_is_refused_for_another_one_and_for_another_base(run):
    one, two, shared = adapt("one"), adapt("two", seed=1), f"{FOLDER.name}/shared.pkl"
    run(model=two, ref_cache=shared, steps=1)
    assert len({dpo.digest_of(folder) for folder in (tiny(), one, two, adapt("three", base=tiny(1)))}) == 4
    for changes in (dict(model=one), LORA):
        with pytest.raises(BadInput, match="made with reference"):
            run(ref_cache=shared, steps=1, **changes)


def test_adapter_over_a_base_that_has_changed_is_another_model():
    folder = adapt("four", base=save(load(), "changing"))
    before = dpo.digest_of(folder)
    save(load(tiny(1)), "changing")
    assert dpo.digest_of(folder) != before


def test_dropout_is_no_part_of_z():
    """Against a reference that gives every token 1 nat less than the policy, z is the mean number of tokens."""
    args = resolve_args("kto", lora_r=4, lora_dropout=0.5)
    rows, _ = kto.draw_others(kto.load_rows(args.data, TOKENIZER, 256, args), [], 256, 0)
    policy = load(adapt("sft"), kto, trains=True, lora_dropout=0.5)
    known = reference_logprobs(Swap(policy), kto.other_groups(rows))
    z = kto.estimate_kl(policy, rows, {key: known[key] - 1 for key in known}, args)
    assert z.item() == pytest.approx(sum(len(row.other) for row in rows) / len(rows), abs=1e-4)


# --- what trains and what is saved -----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["dpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("kto", "rloo"))])
def test_only_the_adapter_trains_and_the_merged_model_is_the_adapter_on_the_unchanged_base(run, script):
    adapter, merged = (run(script, **LORA, lora_target="q_proj,down_proj", merge=merge) for merge in (False, True))
    names = [{file.name for file in Path(ended.model).iterdir()} for ended in (adapter, merged)]
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names[0] and "model.safetensors" not in names[0]
    assert {"model.safetensors", "config.json"} <= names[1] and "adapter_model.safetensors" not in names[1]
    assert all("tokenizer_config.json" in files for files in names)
    assert {name.split(".")[-3] for name in adapter.weights} == {"q_proj", "down_proj"}
    whole = AutoModelForCausalLM.from_pretrained(merged.model)
    assert (logits(whole) - logits(with_peft(adapter.model))).abs().max() < 1e-4
    assert (logits(whole) - logits(load())).abs().max() > 1e-2
    assert (logits(load(adapter.model)) - logits(whole)).abs().max() < 1e-4, "a later run can start from it"
    base = AutoModelForCausalLM.from_pretrained(tiny())
    changed = {name for name, p in whole.named_parameters() if not torch.equal(p, base.get_parameter(name))}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj"}


def test_rank_and_alpha_are_those_of_the_flags():
    for flags, r, alpha in ((dict(lora_r=4), 4, 8), (dict(lora_r=2, lora_alpha=3.0), 2, 3)):
        config = load(trains=True, **flags).peft_config["default"]
        assert (config.r, config.lora_alpha) == (r, alpha)


def test_new_adapter_depends_on_the_seed_only(run):
    """Not on the random numbers that were drawn before in this process."""
    flags = LORA | dict(ref="swap", steps=1, lr=0.0)
    torch.manual_seed(11)
    one = run(**flags)
    torch.manual_seed(12)
    assert distance(run(**flags, save_every=7), one) == 0 and distance(run(**flags, seed=1), one) > 1e-3


def test_gradient_checkpointing_changes_memory_only_also_with_dropout(run):
    plain, checkpointed = run(**LORA), run(**LORA, gradient_checkpointing=True)
    dropped, both = (run(**LORA, lora_dropout=0.5, gradient_checkpointing=on) for on in (False, True))
    assert same(checkpointed, plain) and same(both, dropped) and distance(dropped, plain) > 1e-3


@pytest.mark.parametrize("script, flags", [
    ("dpo", dict(gradient_checkpointing=True)),
    *(pytest.param(script, flags, marks=pytest.mark.slow) for script, flags in (
        ("dpo", dict(merge=True)), ("kto", dict(ref="live")), ("kto", dict(ref="swap", merge=True)), ("rloo", {}),
        ("rloo", dict(merge=True))))])
def test_base_stored_in_bfloat16_changes_no_bit_of_a_run(run, script, flags):
    """Under bfloat16 forwards a base saved in bfloat16 stays so. The same numbers in float32 give the same run."""
    halved = AutoModelForCausalLM.from_pretrained(tiny()).bfloat16()
    folders = save(halved, "halved"), save(halved.float(), "widened")
    kinds = [{p.dtype for name, p in load(folder, trains=True, dtype="bfloat16", lora_r=4).named_parameters()
              if "proj.base_layer" in name} for folder in folders]
    assert kinds == [{torch.bfloat16}, {torch.float32}]
    one, two = (run(script, model=folder, dtype="bfloat16", **LORA, **flags) for folder in folders)
    assert one.history == two.history and one.history[-1] != one.history[0]
    assert one.weights.keys() == two.weights.keys() and distance(one, two) == 0
    assert {p.dtype for p in one.weights.values()} == {torch.float32}


# --- what is refused -------------------------------------------------------------------------------------------------


def one_sentence(error):
    return "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("target", ["no_such_layer", "q_proj,no_such_layer", "q_proj,proj"])
def test_unknown_target_is_refused(run, target):
    with pytest.raises(BadInput, match=f"--lora_target {target}: ") as error:
        run(lora_r=4, lora_target=target)
    assert one_sentence(error)


def test_targets_may_have_spaces_between_them():
    model = load(trains=True, lora_r=4, lora_target="q_proj, v_proj")
    names = {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}
    assert names == {"q_proj", "v_proj"}


@pytest.mark.parametrize("config", [{}, dict(modules_to_save=["lm_head"]), dict(modules_to_save=["embed_tokens"]),
                                    dict(use_dora=True)], ids=str)
def test_an_adapter_is_loaded_bit_for_bit_onto_a_base_that_was_saved_in_bfloat16(config):
    base = save(AutoModelForCausalLM.from_pretrained(tiny()).bfloat16(), "base in bfloat16")
    folder = adapt(f"on bfloat16 {config}", base=base, **config)
    saved = load_file(f"{folder}/adapter_model.safetensors")
    with torch.no_grad():
        saved = {name: tensor.float() + 1e-5 * torch.rand(tensor.shape) for name, tensor in saved.items()}
    save_file(saved, f"{folder}/adapter_model.safetensors")
    loaded = peft.get_peft_model_state_dict(load(folder, trains=True))
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_an_adapter_that_lacks_a_weight_is_refused(run):
    folder = adapt("lacking", seed=5)
    path = Path(folder) / "adapter_model.safetensors"
    save_file(dict(list(load_file(path).items())[1:]), path)
    with pytest.raises(BadInput, match="missing adapter keys") as error:
        run(model=folder, ref="swap")
    assert one_sentence(error)


def test_missing_peft_is_refused(run, monkeypatch):
    folder = adapt("sft")
    monkeypatch.setitem(sys.modules, "peft", None)
    for changes in (dict(lora_r=4), dict(model=folder)):
        with pytest.raises(BadInput, match="`pip install peft`") as error:
            run(**changes)
        assert one_sentence(error)


def test_learned_prompt_is_refused(run):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    folder = save(peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny()), config), "prompt")
    for changes in (dict(model=folder), dict(ref_model=folder)):
        with pytest.raises(BadInput, match="no LoRA adapter") as error:
            run(**changes)
        assert one_sentence(error)


@BOTH
def test_adapter_on_top_of_the_adapter_in_the_model_folder_is_refused(run, script):
    with pytest.raises(BadInput, match="leave out --lora_r") as error:
        run(script, model=adapt("sft"), lora_r=4)
    assert one_sentence(error)


def test_adapter_whose_base_is_an_adapter_or_itself_is_refused(run, tmp_path):
    first = adapt("sft")
    for base in (first, tmp_path / "second"):
        second = shutil.copytree(first, tmp_path / "second", dirs_exist_ok=True)
        config = json.loads((second / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(base)}
        (second / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(BadInput, match="is an adapter too: merge") as error:
            run(model=str(second))
        assert one_sentence(error)
