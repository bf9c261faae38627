"""LoRA: the reference under an adapter, what trains, and what is saved."""
import json
import shutil
import sys

import pytest
import torch
from runs import BOTH, GROUPS, IDS, LORA, MODEL, ROOT, adapt, alike, distance, logprobs, needs_peft, of, run, settle  # noqa: F401
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import kto
import refcache
from refcache import BadInput, Swap, checkpoint_digest, load_model, load_policy

peft = pytest.importorskip("peft")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_reference_of_a_new_adapter_is_the_bare_model_bit_for_bit_whatever_the_dropout(settle, checkpointing):
    args = settle(ref="adapter", lora_r=4, lora_dropout=0.5, gradient_checkpointing=checkpointing)
    policy = load_policy(args, "cpu")
    swap, optimizer = Swap(policy), torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], 1e-2)
    for _ in range(2):
        refcache.completion_logprobs(policy, GROUPS)[0][0].sum().backward()
        optimizer.step()
    bare = logprobs(load_model(MODEL, "cpu"))
    assert of(swap, args) == bare and logprobs(policy) != bare
    assert [m.training for name, m in policy.named_modules() if name.endswith("lora_dropout")] == [True] * 14


@pytest.mark.parametrize("config", [{}, dict(lora_dropout=0.5), dict(modules_to_save=["lm_head"]), dict(modules_to_save=["embed_tokens"]),
                                    dict(trainable_token_indices={"embed_tokens": [9, 12]}), dict(bias="all"), dict(use_dora=True)])
def test_a_run_that_begins_with_an_sft_adapter_has_it_as_its_reference(run, tmp_path, config):
    folder = adapt(tmp_path / "sft", **config)
    truth = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL), folder).eval()(IDS).logits.log_softmax(-1)
    truth = truth[0, 2:5].gather(1, IDS[0, 3:6, None])[:, 0].tolist()
    ended = run(model=folder, ref="adapter", steps=3, lr=3e-2)
    policy = load_policy(ended.args, "cpu")
    known = of(Swap(policy), ended.args)
    assert known[GROUPS[0][0], (60, 12, 7)] == pytest.approx(truth, abs=1e-5) and known != logprobs(load_model(MODEL, "cpu"))
    assert abs(ended.history[1]["rewards/margins"]) < 1e-5 or config.get("lora_dropout")
    assert abs(ended.history[0]["eval_rewards/margins"]) < 1e-5 < 1e-4 < abs(ended.history[-1]["eval_rewards/margins"])
    if not config:
        cached, live = run(model=folder, steps=3, lr=3e-2), run(model=folder, ref="live", steps=3, lr=3e-2)
        assert alike(ended, cached) and alike(ended, live) and distance(ended, cached) < 2e-5
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL), ended.out).eval()
    assert (again(IDS).logits - ended.policy.eval()(IDS).logits).abs().max() < 1e-5


def test_a_learned_prompt_is_refused(run, tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    peft.get_peft_model(load_model(MODEL, "cpu"), config).save_pretrained(tmp_path / "prompt")
    for changes in (dict(model=str(tmp_path / "prompt")), dict(ref_model=str(tmp_path / "prompt"))):
        with pytest.raises(BadInput, match="cannot load the adapter"):
            run(**changes)


def test_an_adapter_s_cache_is_its_own(run, tmp_path):
    one, two = adapt(tmp_path / "one"), adapt(tmp_path / "two", seed=1)
    assert len({*map(checkpoint_digest, (MODEL, one, two))}) == 3
    base = load_model(MODEL, "cpu")
    base.save_pretrained(tmp_path / "base")
    of_base = adapt(tmp_path / "three", base=str(tmp_path / "base"))
    before = checkpoint_digest(of_base)
    with torch.no_grad(): base.lm_head.weight.mul_(1.1)
    base.save_pretrained(tmp_path / "base")
    assert checkpoint_digest(of_base) != before, "the same adapter over other weights is another model"
    run(model=two, ref_cache=str(tmp_path / "shared.pkl"), steps=1)
    with pytest.raises(BadInput, match="was made with reference"):
        run(lora_r=4, ref_cache=str(tmp_path / "shared.pkl"), steps=1)


@pytest.mark.parametrize("merge", [False, True])
@BOTH
def test_only_the_adapter_trains_and_what_is_saved_is_what_was_trained(run, script, merge):
    ended = run(script, ref="adapter", **LORA, merge=merge, lora_target="q_proj,down_proj", steps=3)
    base = load_file(f"{MODEL}/model.safetensors")
    found = {name.removeprefix("base_model.model.").replace(".base_layer", ""): p
             for name, p in ended.policy.named_parameters() if "lora_" not in name}
    assert found.keys() == base.keys() and all(torch.equal(found[name], base[name]) for name in base)
    assert {name.split(".")[-2] for name, p in ended.policy.named_modules() if name.endswith("lora_A")} == {"q_proj", "down_proj"}
    files = {"model.safetensors", "config.json"} if merge else {"adapter_model.safetensors", "adapter_config.json"}
    others = {"adapter_model.safetensors", "adapter_config.json", "model.safetensors", "config.json"} - files
    assert files <= (names := {f.name for f in ended.out.iterdir()}) and not others & names
    saved = AutoModelForCausalLM.from_pretrained(ended.out if merge else MODEL)
    saved = saved if merge else peft.PeftModel.from_pretrained(saved, ended.out)
    assert (saved.eval()(IDS).logits - ended.policy(IDS).logits).abs().max() < 1e-4
    assert (load_model(str(ended.out), "cpu")(IDS).logits - ended.policy(IDS).logits).abs().max() < 1e-4
    assert (load_model(MODEL, "cpu")(IDS).logits - ended.policy(IDS).logits).abs().max() > 1e-2


def test_rank_and_alpha_are_the_adapter_s(settle):
    for changes, r, alpha in ((dict(lora_r=4), 4, 8), (dict(lora_r=2, lora_alpha=3.0), 2, 3)):
        config = load_policy(settle(**changes), "cpu").peft_config["default"]
        assert (config.r, config.lora_alpha) == (r, alpha)


def test_checkpointing_changes_nothing_under_lora_and_dropout_only_training(run):
    plain, checkpointed = (run(ref="adapter", **LORA, gradient_checkpointing=on) for on in (False, True))
    assert alike(plain, checkpointed) and distance(plain, checkpointed) < 2e-5
    dropped, both = (run(ref="adapter", **LORA, lora_dropout=0.5, gradient_checkpointing=on) for on in (False, True))
    assert alike(dropped, both) and distance(dropped, plain) > 1e-3


def test_dropout_is_no_part_of_z(settle, tmp_path):
    """Against a reference that gives every token 1 nat less than the policy, z is the mean number of tokens."""
    args = settle("kto", model=adapt(tmp_path / "sft", lora_dropout=0.5), ref="adapter")
    rows, _ = kto.draw_others(kto.load_rows(args.data, refcache.load_tokenizer(MODEL)[0], 256, args), [], 256, 0)
    policy = load_policy(args, "cpu")
    known = {key: value - 1 for key, value in refcache.reference_logprobs(Swap(policy), kto.asked(rows, args), args).items()}
    z = kto.estimate_kl(policy, rows, known, args).item()
    assert z == pytest.approx(sum(len(row.other) for row in rows) / len(rows), abs=1e-4)


def test_an_unknown_target_and_a_missing_peft_are_refused(run, settle, tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="--lora_target no_such_layer: ") as error:
        run(lora_r=4, lora_target="no_such_layer")
    assert "\n" not in str(error.value)
    folder = adapt(tmp_path / "sft")
    monkeypatch.setitem(sys.modules, "peft", None)
    for changes in (dict(lora_r=4), dict(model=folder)):
        with pytest.raises(BadInput, match="`pip install peft`"):
            load_policy(settle(**changes), "cpu")


@needs_peft
def test_an_adapter_on_an_adapter_or_on_itself_is_refused(tmp_path):
    first = adapt(tmp_path / "first")
    for base in ("first", "second"):
        second = shutil.copytree(first, tmp_path / "second", dirs_exist_ok=True)
        config = json.loads((second / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(tmp_path / base)}
        (second / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(BadInput, match="is an adapter too: merge"):
            refcache.load_model(str(second), "cpu")


@pytest.mark.parametrize("script, changes", [("dpo", dict(ref="cache", gradient_checkpointing=True)), ("kto", dict(ref="live")), ("rloo", {})])
def test_a_base_stored_in_bfloat16_changes_no_bit_of_a_run(run, tmp_path, monkeypatch, script, changes):
    base = AutoModelForCausalLM.from_pretrained(MODEL).bfloat16()
    base.save_pretrained(tmp_path / "base")
    refcache.load_tokenizer(MODEL)[0].save_pretrained(tmp_path / "base")
    reward = dict(reward=(str(ROOT / "demo/score.py:sentiment"),), max_new_tokens=12, samples=2) if script == "rloo" else {}
    ended = []
    for merge in (False, True):
        for stored in (True, False):
            with monkeypatch.context() as patch:
                if not stored: patch.setattr(refcache, "store_frozen", lambda model, dtype: model)
                ended.append(run(script, model=str(tmp_path / "base"), dtype="bfloat16", merge=merge, **LORA, **reward, **changes))
            kinds = {p.dtype for name, p in ended[-1].policy.named_parameters() if "lora_" not in name}
            assert (torch.bfloat16 in kinds) == stored and all(p.dtype == torch.float32 for p in ended[-1].policy.parameters() if p.requires_grad)
    assert ended[0].history == ended[1].history and ended[0].history[-1] != ended[0].history[0]
    for name, (one, two) in (("adapter_model", ended[:2]), ("model", ended[2:])):
        one, two = (load_file(one.out / f"{name}.safetensors") for one in (one, two))
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert any(not torch.equal(one[name], p) for name, p in base.named_parameters()) and {p.dtype for p in one.values()} == {torch.bfloat16}
