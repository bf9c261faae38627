"""The reference of a run: where it is held must not change the training, and it moves when the papers say it does."""
import json
import shutil
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from models import MOE, build
from runs import (  # noqa: F401
    BOTH, GROUPS, LORA, SCRIPTS, TINY, TOKENIZER, adapt, arguments, load, logprobs, needs_peft, resolve_args, run, same,
    save, tiny)
from torch import tensor
from transformers import AutoModelForCausalLM

import kto
from refcache import BadInput, Swap, reference_logprobs

NARROW, WIDE = (-0.03, 0.05), (-1e3, 1e3)  # bounds of humanline: one that a few steps reach, one that nothing reaches


# --- the same reference, wherever it is ------------------------------------------------------------------------------


@pytest.mark.parametrize("script, lora", [
    ("dpo", {}), ("kto", {}), pytest.param("dpo", LORA, marks=needs_peft),
    pytest.param("kto", LORA, marks=[needs_peft, pytest.mark.slow])])
def test_run_is_the_same_with_a_cached_a_swapped_and_a_live_reference(run, script, lora):
    cached = run(script, **lora)
    assert abs(cached.history[-1]["eval_rewards/margins"]) > 1e-3 and (cached.out / "reference_logprobs.pkl").exists()
    for ref in ("swap", "live"):
        other = run(script, ref=ref, **lora)
        assert same(other, cached) and not (other.out / "reference_logprobs.pkl").exists(), ref


@pytest.mark.parametrize("lora", [{}, pytest.param(LORA, marks=[needs_peft, pytest.mark.slow])])
def test_rloo_run_is_the_same_with_a_swapped_and_a_live_reference(run, lora):
    swapped = run("rloo", **lora)
    assert same(run("rloo", ref="live", **lora), swapped) and abs(swapped.history[-1]["kl"]) > 1e-4


@pytest.mark.parametrize("script", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_another_reference_model_is_the_same_cached_swapped_and_live(run, script):
    cached, *others = (run(script, ref=ref, ref_model=tiny(1), steps=2) for ref in ("cache", "swap", "live"))
    assert all(same(other, cached) for other in others)
    assert abs(cached.history[1]["rewards/chosen"]) > 0.01, "not the policy's own log-probs"


def test_one_swap_for_many_steps_gives_the_run_of_a_swap_per_step(run):
    """16 steps share a swap of a reference that stays. With lr 0 one that follows the policy stays too."""
    steps = dict(ref="swap", steps=17, batch_size=1, lr=0.0)
    assert same(run(**steps), run(**steps, sync_reference=1))


@BOTH
def test_a_reference_that_moves_once_in_many_epochs_scores_each_row_once(script, monkeypatch):
    """Before the first of 3,000 steps it scores the 12 rows, not those of all steps."""
    class Enough(Exception): pass
    scored = []

    def count(reference, groups, *forward):
        scored.append(len(groups))
        if len(scored) == 2:  # after the held-out rows
            raise Enough
        return reference_logprobs(reference, groups, *forward)
    monkeypatch.setattr(SCRIPTS[script], "reference_logprobs", count)
    with pytest.raises(Enough):
        SCRIPTS[script].main(arguments(script, ref="swap", sync_reference=10**9, steps=3000, warmup=0.5))
    assert scored[1] <= 2 * 12  # kto.py also scores the answers of other prompts


def routed(seed, bias):
    """A mixture of experts for the demo's tokens, whose routing bias is a persistent buffer."""
    model = build("glm4_moe", MOE | dict(TINY, num_hidden_layers=2), seed)
    (buffer,) = (buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    buffer.copy_(tensor(bias))
    return save(model, f"routed{seed}")


def test_swap_moves_persistent_buffers_too(run):
    """With the policy's routing bias the reference would choose other experts."""
    policy, reference = routed(1, [3.0, 0.0, 0.0, -3.0]), routed(2, [-3.0, 0.0, 0.0, 3.0])
    cached, swapped = (run(model=policy, ref_model=reference, ref=ref, steps=2) for ref in ("cache", "swap"))
    assert same(swapped, cached)
    (bias,) = (weight for name, weight in swapped.weights.items() if name.endswith("e_score_correction_bias"))
    assert bias.tolist() == [3.0, 0.0, 0.0, -3.0], "the policy has its own again"


# --- references that do not fit --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ref", ["cache", "swap", "live"])
def test_reference_with_another_tokenizer_is_refused(run, ref):
    tokenizer = deepcopy(TOKENIZER)
    tokenizer.add_tokens(["<|new|>"])
    folder = save(load(), "renamed")
    tokenizer.save_pretrained(folder)
    with pytest.raises(BadInput, match="tokenizer") as error:
        run(ref=ref, ref_model=folder)
    assert "\n" not in str(error.value)


def test_swap_refuses_a_reference_of_another_shape(run):
    small = save(build("llama", TINY | dict(hidden_size=16), 1), "small")
    with pytest.raises(BadInput, match="not built like the policy") as error:
        run(ref="swap", ref_model=small)
    assert "\n" not in str(error.value)


@needs_peft
@pytest.mark.parametrize("difference", ["lora_alpha", "use_rslora", "base"])
def test_swap_of_an_adapter_with_another_scale_or_base_is_refused_or_exact(difference):
    """The scale and the base do not move with the adapter: silently they would stay the policy's."""
    config = dict(lora_alpha=dict(lora_alpha=32), use_rslora=dict(use_rslora=True), base=dict(base=tiny(1)))[difference]
    policy, reference = load(adapt("sft"), trains=True), load(adapt(difference, seed=1, **config))
    try:
        known = reference_logprobs(Swap(policy, reference), GROUPS)
    except BadInput as error:
        assert "not built like the policy" in str(error)
    else:
        assert {key: known[key].tolist() for key in known} == logprobs(reference)


# --- a reference that moves, and humanline ---------------------------------------------------------------------------


def slow_run(script, args, model):
    """Two models, one forward per sequence, losses and order of a step as in the papers. Yields a dict per step."""
    module, low, high = SCRIPTS[script], *(args.humanline or WIDE)
    rows, held = (module.load_rows(file, TOKENIZER, 256, args) for file in (args.data, args.eval_data))
    rows, held = kto.draw_others(rows, held, 256, 0) if script == "kto" else (rows, held)
    policy = load(model, module, trains=True)
    reference, weights = deepcopy(policy), [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.lr, weight_decay=0.0)

    def ratio(x, y):  # -> the sum of clamped log-ratios, and how many of them are within the bounds
        ids = tensor([x + y])
        ours, theirs = (model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[len(x) - 1:, 0]
                        for model in (policy, reference))
        u = ours - theirs.detach()
        clamped = torch.where(u < low, low, torch.where(u > high, high, u))
        return clamped.sum(), (clamped == u).sum().item()

    def dpo_loss(batch):
        ratios = [(*ratio(row.prompt, row.chosen), *ratio(row.prompt, row.rejected)) for row in batch]
        margin = torch.stack([0.1 * (w - l) for w, _, l, _ in ratios])
        free = [(n + m) / (len(row.chosen) + len(row.rejected)) for (_, n, _, m), row in zip(ratios, batch)]
        values = {"rewards/margins": margin.mean().item(), "humanline/unclamped": sum(free) / len(free)}
        return -F.logsigmoid(margin).mean(), values

    def kto_loss(batch):
        with torch.no_grad():
            z = sum(ratio(row.prompt, row.other)[0] for row in batch).div(len(batch)).clamp(min=0)
        ratios = [ratio(row.prompt, row.completion) for row in batch]
        losses = [1 - torch.sigmoid(0.1 * (rho - z) * (1 if row.label else -1)) for (rho, _), row in zip(ratios, batch)]
        free = [n / len(row.completion) for (_, n), row in zip(ratios, batch)]
        return sum(losses) / len(losses), {"kl": z.item(), "humanline/unclamped": sum(free) / len(free)}

    @torch.no_grad()
    def sync(mix):
        for r, p in zip(reference.parameters(), policy.parameters()):
            r.copy_(mix * p + (1 - mix) * r)

    loss_of = dpo_loss if script == "dpo" else kto_loss
    for step in range(1, args.steps + 1):
        loss, values = loss_of(module.batch_rows(step, rows, args.batch_size, 0))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.param_groups[0]["lr"] = args.lr * module.lr_factor(step, args.steps, 0.0, "linear")
        if args.humanline:
            sync(1.0)  # HALOs: before the update
        optimizer.step()
        if args.sync_reference and step % args.sync_reference == 0:
            sync(args.sync_mix)  # TR-DPO: after it
        if step == args.steps:
            with torch.no_grad():
                eval_loss, late = loss_of(held)
            values |= {f"eval_{name}": value for name, value in late.items()} | {"eval_loss": eval_loss.item()}
        yield {"loss": loss.item(), **values}


@pytest.mark.parametrize("script, changes", [
    ("dpo", dict(sync_reference=2)), ("kto", dict(sync_reference=2, sync_mix=0.6)),
    pytest.param("dpo", dict(sync_reference=1, sync_mix=0.6, **LORA), marks=needs_peft),
    ("dpo", dict(humanline=NARROW)), ("kto", dict(humanline=NARROW)),
    pytest.param("dpo", dict(humanline=NARROW, **LORA), marks=[needs_peft, pytest.mark.slow])])
def test_moving_reference_and_humanline_equal_a_slow_loop(run, script, changes):
    begin = tiny()
    if "lora_r" in changes:  # a new adapter is random, and the same in every run
        begin = run(**LORA | dict(ref="swap", steps=1, lr=0.0)).model
    ended = run(script, ref="swap", **changes)
    for step, truth in enumerate(slow_run(script, ended.args, begin), 1):
        for name in truth.keys() & ended.history[step].keys():
            assert ended.history[step][name] == pytest.approx(truth[name], abs=2e-4, rel=1e-3), (step, name)
    unclamped = [values.get("humanline/unclamped") for values in ended.history[1:]]
    assert unclamped[0] == 1 > min(unclamped) + 0.05 if "humanline" in changes else unclamped == [None] * 3


def test_reference_of_rloo_moves_after_its_step(run):
    """With --sync_reference 2 odd steps begin with policy and reference alike, and even ones do not."""
    still, moved = ([abs(values["kl"]) for values in run("rloo", **flags).history[1:]]
                    for flags in ({}, dict(sync_reference=2)))
    assert max(moved[0], moved[2]) < 1e-6 and moved[1] == pytest.approx(still[1], abs=1e-6)
    assert min(still[1], still[2]) > 1e-4


@pytest.mark.slow
def test_reference_of_rloo_moves_by_its_share(run):
    """In the metrics after the last step, half of the way is left with --sync_mix 0.5, nothing with 1."""
    half, whole, still = (abs(run("rloo", steps=2, **flags).history[-1]["eval_kl"]) for flags in (
        dict(sync_reference=2, sync_mix=0.5), dict(sync_reference=2), {}))
    assert whole < 1e-6 < 1e-4 < half < 0.8 * still


# --- contradictory flags ---------------------------------------------------------------------------------------------


ALL, TWO, NAN = "dpo kto rloo", "dpo kto", float("nan")
REFUSED = [  # flags, words of the message, the scripts that have such flags
    (dict(sync_reference=2), "--ref swap", TWO), (dict(sync_reference=2, ref="live"), "--ref swap", ALL),
    (dict(sync_reference=2, ref="none"), "--ref swap", "dpo"),
    (dict(sync_reference=0, ref="swap"), "--sync_reference", ALL),
    (dict(sync_reference=1.5, ref="swap"), "--sync_reference", ALL),
    *((dict(sync_reference=2, ref="swap", sync_mix=mix), "--sync_mix", ALL) for mix in (0.0, -0.1, 1.1, NAN)),
    (dict(humanline=(-1.0, 1.5)), "--ref swap", TWO), (dict(humanline=(-1.0, 1.5), ref="live"), "--ref swap", TWO),
    (dict(humanline=(-1.0, 1.5), ref="none"), "--ref swap", "dpo"),
    *((dict(humanline=bounds, ref="swap"), "--humanline", TWO)
      for bounds in ((0.1, 1.5), (-1.0, -0.1), (0.0, 0.0), (NAN, 1.0), (-1.0,), True)),
    (dict(ref="none", ref_model="other"), "--ref_model", "dpo"), (dict(ref="none"), "--ref", "kto rloo"),
    (dict(ref="cache"), "--ref", "rloo"), (dict(ref="adapter"), "--ref", ALL), (dict(lora_alpha=8.0), "--lora_r", ALL),
    (dict(lora_target="q_proj"), "--lora_r", ALL), (dict(lora_r=0), "--lora_r", ALL),
    (dict(lora_r=4, lora_alpha=0.0), "--lora_alpha", ALL), (dict(lora_r=4, lora_dropout=1.1), "--lora_dropout", ALL),
    (dict(lora_r=4, lora_dropout=0.1, updates_per_rollout=2), "--lora_dropout", "rloo")]


@pytest.mark.parametrize("changes, words, script", [
    (*case, script) for *case, scripts in REFUSED for script in scripts.split()])
def test_contradictory_flags_are_refused_in_one_sentence(changes, words, script):
    with pytest.raises(BadInput, match=words) as error:
        resolve_args(script, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=needs_peft)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_reference_with_another_tokenizer_is_refused(run, script, adapter, tmp_path):
    shutil.copytree(tiny(), tmp_path / "other")
    file = tmp_path / "other/tokenizer.json"
    tokenizer = json.loads(file.read_text())
    one, two, *_ = vocabulary = tokenizer["model"]["vocab"]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(tokenizer))
    (tmp_path / "other/tokenizer_config.json").unlink()
    folder = str(tmp_path / "other")
    if adapter:  # it has no tokenizer of its own, but its base has
        import peft
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(r=2))
        model.save_pretrained(folder := str(tmp_path / "adapter"))
    with pytest.raises(BadInput, match="another tokenizer"):
        run(script, ref_model=folder, ref="swap")
