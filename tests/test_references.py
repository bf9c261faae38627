"""Where the reference is (a file, host memory, beside the policy) and when it moves: each way gives the training it says, to rounding."""
import json
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from models import SMALL, make
from runs import BOTH, IDS, LORA, MODEL, ROOT, SCRIPTS, alike, distance, needs_peft, run, settle  # noqa: F401
from torch import tensor
from transformers import AutoConfig, AutoModelForCausalLM

import dpo
import kto
import refcache
from refcache import BadInput, Swap, load_model, load_policy, reference_window

# --- the same reference, wherever it is ------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("lora", [{}, pytest.param(LORA, marks=needs_peft)])
def test_the_run_is_the_same_wherever_the_reference_is(run, script, lora):
    held = "adapter" if lora else "swap"
    first = run(script, ref="cache", **lora)
    assert abs(first.history[-1]["eval_rewards/margins"]) > 1e-2
    for changes in (dict(ref=held, ref_ahead=1), dict(ref=held, ref_ahead=2), dict(ref=held), dict(ref="live")):
        other = run(script, **changes, **lora)
        assert alike(first, other) and distance(first, other) < 2e-5 and not (other.out / "reference_logprobs.pkl").exists(), changes


@pytest.mark.parametrize("sync", [None, 1, 2, 3])
@pytest.mark.parametrize("ahead", [1, 2, 16])
def test_windows_cover_every_step_once_and_end_where_the_reference_moves(ahead, sync):
    args = SimpleNamespace(ref_ahead=ahead, sync_reference=sync)
    for steps in (1, 5, 7):
        windows = [reference_window(step, steps, args) for step in range(1, steps + 1)]
        for step, window in enumerate(windows, 1):
            assert step in window and all(windows[s - 1] == window for s in window) and len(window) <= ahead
            assert not sync or all(s % sync for s in window[:-1]), "the reference moves in the middle"
            assert len(window) == ahead or window[-1] == steps or sync and window[-1] % sync == 0, "it could be longer"


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_swap_brings_the_reference_bit_for_bit_and_the_policy_back_even_when_the_block_raises(name):
    policy, reference = make(name, 1), make(name, 2)
    before, answer, swap = deepcopy(policy.state_dict()), policy(IDS).logits, Swap(policy, reference)
    for error in (None, RuntimeError):
        with pytest.raises(error) if error else nullcontext():
            with swap as model:
                assert model is policy and torch.equal(model(IDS).logits, reference(IDS).logits)
                if error: raise error
        assert all(torch.equal(p, before[key]) for key, p in policy.state_dict().items()) and torch.equal(policy(IDS).logits, answer)
        assert (policy.lm_head.weight is policy.model.embed_tokens.weight) == (name == "llama-tied")


def test_a_swap_between_two_steps_changes_nothing():
    ends = []
    for swaps in (False, True):
        policy = make("llama-tied", 1)
        optimizer, swap = torch.optim.AdamW(policy.parameters(), 1e-3), Swap(policy, make("llama-tied", 2))
        for step in range(3):
            if step == 2 and swaps:
                with swap: pass
            optimizer.zero_grad()
            policy(IDS, labels=IDS).loss.backward()
            optimizer.step()
        ends.append([*policy.parameters(), *(x for state in optimizer.state.values() for x in state.values())])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("ref", ["swap", "live"])
def test_another_reference_of_the_same_shape_is_used_and_one_of_another_shape_is_refused(run, tmp_path, ref):
    other = load_model(MODEL, "cpu")
    with torch.no_grad(): other.lm_head.weight.mul_(1.1)
    other.save_pretrained(tmp_path / "other")
    held, cached = run(ref=ref, ref_model=str(tmp_path / "other")), run(ref_model=str(tmp_path / "other"))
    assert alike(held, cached) and abs(held.history[1]["rewards/margins"]) > 1e-3
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL | dict(vocab_size=704))).save_pretrained(tmp_path / "small")
    with pytest.raises(BadInput, match="not shaped like the policy's.*name another") as error:
        run(ref=ref, ref_model=str(tmp_path / "small"), out=str(tmp_path / "no"), **(dict(sync_reference=2) if ref == "live" else {}))
    assert "\n" not in str(error.value) and not (tmp_path / "no/metrics.jsonl").exists(), "refused at the door, not at the first move"


@pytest.mark.parametrize("difference", [dict(tie_word_embeddings=True), dict(rope_parameters=dict(rope_type="default", rope_theta=100.0))])
def test_weights_that_mean_something_else_in_the_policy_are_refused(run, tmp_path, difference):
    """The same shapes, but not the same function: in the policy's place they would not be the reference."""
    model = load_model(MODEL, "cpu")
    if "tie_word_embeddings" in difference: model.lm_head.weight = model.model.embed_tokens.weight
    for name, value in difference.items(): setattr(model.config, name, value)
    model.save_pretrained(tmp_path / "other")
    for policy, reference in ((MODEL, tmp_path / "other"), (tmp_path / "other", MODEL)):
        if policy != MODEL: refcache.load_tokenizer(MODEL)[0].save_pretrained(policy)
        with pytest.raises(BadInput, match="name another --ref_model"):
            run(model=str(policy), ref="swap", ref_model=str(reference))


def test_a_live_reference_in_bfloat16_is_close(run, capsys):
    history = run(ref="live", ref_dtype="bfloat16").history
    gap = float(capsys.readouterr().out.split("differ by at most ")[1].split()[0])
    assert 1e-4 < gap < 0.3 and history[1]["loss"] == pytest.approx(0.6931, abs=0.05)


@pytest.mark.parametrize("sync, kinds", [(None, {torch.float32, torch.bfloat16}), (1, {torch.float32})])
def test_a_live_reference_that_moves_is_in_float32(settle, tmp_path, monkeypatch, sync, kinds):
    """In bfloat16 it would round its moves away; one that stays is stored as it was saved."""
    load_model(MODEL, "cpu").bfloat16().save_pretrained(tmp_path / "base")
    refcache.load_tokenizer(MODEL)[0].save_pretrained(tmp_path / "base")
    args = settle(model=str(tmp_path / "base"), ref="live", dtype="bfloat16", sync_reference=sync)
    _, reference = refcache.load_references(SimpleNamespace(args=args), None, [], "cpu")
    assert {p.dtype for p in reference.model.parameters()} == kinds


# --- a reference that moves, and humanline ------------------------------------------------------------------------------


def slow(script, args):
    """Two models, one forward a sequence, the losses as in the papers. Yields loss, margins, z and share of free tokens."""
    module, (tokenizer, _) = SCRIPTS[script], refcache.load_tokenizer(MODEL)
    rows, held = (module.load_rows(data, tokenizer, 256, args) for data in (args.data, args.eval_data))
    rows, held = kto.draw_others(rows, held, 256, 0) if script == "kto" else (rows, held)
    torch.manual_seed(args.seed)
    policy = load_policy(args, "cpu")
    reference, weights = deepcopy(policy), [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, weight_decay=0.0)

    def ratio(x, y):
        ids = tensor([x + y])
        ours, theirs = (model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[len(x) - 1:, 0]
                        for model in (policy, reference))
        u = ours - theirs.detach()
        if args.humanline:
            u = torch.where(u < args.log_eps_p, args.log_eps_p, torch.where(u > args.log_eps_r, args.log_eps_r, u))
        return u.sum(), (u == ours - theirs).float().mean() * len(y)

    def values(batch):
        if script == "dpo":
            ratios = [(*ratio(row.prompt, row.chosen), *ratio(row.prompt, row.rejected)) for row in batch]
            margin = torch.stack([0.1 * (w - l) for w, _, l, _ in ratios])
            free = [((n + m) / (len(row.chosen) + len(row.rejected))).item() for (_, n, _, m), row in zip(ratios, batch)]
            return -F.logsigmoid(margin).mean(), {"rewards/margins": margin.mean().item(), "humanline/unclamped": sum(free) / len(batch)}
        with torch.no_grad(): z = sum(ratio(row.prompt, row.other)[0] for row in batch).div(len(batch)).clamp(min=0)
        ratios = [ratio(row.prompt, row.completion) for row in batch]
        losses = [1 - torch.sigmoid(0.1 * (rho - z) * (1 if row.label else -1)) for (rho, _), row in zip(ratios, batch)]
        free = [n.item() / len(row.completion) for (_, n), row in zip(ratios, batch)]
        return sum(losses) / len(losses), {"kl": z.item(), "humanline/unclamped": sum(free) / len(free)}

    for step in range(1, args.steps + 1):
        loss, seen = values([rows[i] for i in module.batch_rows(step, len(rows), 4, 0)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        if args.sync_reference and step % args.sync_reference == 0:
            with torch.no_grad():
                for r, p in zip(reference.parameters(), policy.parameters()): r.copy_(args.sync_mix * p + (1 - args.sync_mix) * r)
        optimizer.param_groups[0]["lr"] = args.lr * module.lr_factor(step, args.steps, 0.0, "linear")
        optimizer.step()
        if step == args.steps or step % 2 == 0:
            with torch.no_grad(): eval_loss, late = values(held)
            seen |= {f"eval_{name}": value for name, value in late.items()} | {"eval_loss": eval_loss.item()}
        yield {"loss": loss.item(), **seen}


NARROW = dict(humanline=True, log_eps_p=-0.03, log_eps_r=0.05)


@pytest.mark.parametrize("script, changes", [
    ("dpo", dict(ref="swap", sync_reference=1)), ("dpo", dict(ref="live", sync_reference=1)),
    *((script, dict(ref=ref, sync_reference=2, sync_mix=0.6)) for script, ref in (("dpo", "swap"), ("kto", "swap"), ("dpo", "live"))),
    pytest.param("dpo", dict(ref="adapter", **LORA, sync_reference=2, sync_mix=0.6), marks=needs_peft),
    ("dpo", dict(ref="swap", **NARROW)), ("kto", dict(ref="swap", **NARROW)),
    pytest.param("dpo", dict(ref="adapter", **LORA, **NARROW), marks=needs_peft)])
def test_a_moving_reference_and_humanline_equal_a_slow_loop(run, script, changes):
    ended = run(script, **changes)
    for step, truth in enumerate(slow(script, ended.args), 1):
        for name in truth.keys() - (set() if "humanline" in changes else {"humanline/unclamped", "eval_humanline/unclamped"}):
            assert ended.history[step][name] == pytest.approx(truth[name], abs=2e-4, rel=1e-3), (step, name)
    clamped = [values.get("humanline/unclamped") for values in ended.history[1:]]
    assert clamped[0] == 1 and min(clamped) < 0.95 if "humanline" in changes else clamped == [None] * 5
    assert ended.args.sync_reference == changes.get("sync_reference", 1) and "humanline/unclamped" in SCRIPTS[script].__doc__


def test_the_reference_follows_one_update_behind(run):
    """At step 2 it is where the policy began, so that the margin is the first update's; at step 3 no longer."""
    still, moved = ([values["rewards/margins"] for values in run(ref="swap", **sync).history[1:]] for sync in ({}, dict(sync_reference=1)))
    assert moved[:2] == still[:2] and abs(moved[1]) > 1e-3 and abs(moved[2] - still[2]) > 1e-2


def test_log_ratios_by_hand():
    """Five tokens whose ratios are known: the ends clamp two, no gradient passes there, and without humanline none."""
    policy, key = make("llama"), ((5, 9), (60, 12, 7, 90, 41))
    groups, (logp,) = [(key[0], [key[1]])], refcache.completion_logprobs(policy, [(key[0], [key[1]])])[0]
    known = {key: (logp.detach() - tensor([0.5, 2.0, -3.0, -0.2, 1.0])).numpy()}
    for on, total, count, passes in ((True, 0.5 + 1.5 - 1.0 - 0.2 + 1.0, 3, [0, 3, 4]), (False, 0.3, 5, [0, 1, 2, 3, 4])):
        sums, rho, free = refcache.log_ratios(policy, groups, known, dpo.Args(humanline=on, dtype="float32"))
        assert rho.item() == pytest.approx(total, abs=1e-4) and free.tolist() == [count]
        assert sums.item() == pytest.approx(logp.sum().item(), abs=1e-4)
        (logp,) = refcache.completion_logprobs(policy, groups)[0]
        ours, truth = (torch.autograd.grad(x, policy.lm_head.weight)[0] for x in (rho.sum(), logp[passes].sum()))
        assert (ours - truth).abs().max() < 1e-4 < truth.abs().max()


def test_a_policy_that_does_not_train_has_nothing_to_swap():
    with pytest.raises(BadInput, match="nothing in the policy trains"):
        Swap(make("llama").requires_grad_(False))


# --- what cannot be meant -------------------------------------------------------------------------------------------------


ALL, TWO = "dpo kto rloo", "dpo kto"
REFUSED = [  # flags, words, the scripts that have such flags
    (dict(sync_reference=2), "--ref cache never moves.*use --ref swap", TWO), (dict(humanline=True), "--ref cache never moves", TWO),
    (dict(sync_reference=2, lora_r=4), "use --ref adapter", TWO), (dict(ref="none", sync_reference=2), "--ref none never moves", "dpo"),
    (dict(ref="none", humanline=True), "--ref none never moves", "dpo"),
    (dict(loss="simpo", humanline=True), "--ref none never moves", "dpo"),
    (dict(ref="none", beta=0.0, sync_reference=2), "--ref none never moves", "rloo"),
    (dict(ref="adapter"), "add --lora_r, or use --ref swap", ALL), (dict(ref="swap", lora_r=4), "use --ref adapter instead", ALL),
    (dict(ref="adapter", lora_r=4, ref_model="other"), "leave out --ref_model", ALL),
    (dict(ref="swap", ref_cache="x.pkl"), "--ref swap keeps no file", TWO),
    (dict(ref="live", ref_cache="x.pkl"), "--ref live keeps no file", TWO),
    (dict(ref_dtype="bfloat16"), "leave out --ref_dtype", ALL), (dict(merge=True), "no adapter to --merge", ALL),
    (dict(lora_alpha=8.0), "needs --lora_r", ALL), (dict(lora_dropout=0.1), "needs --lora_r", ALL),
    (dict(lora_target="q_proj"), "needs --lora_r", ALL), (dict(model="SFT", lora_r=4), "an adapter already", ALL),
    (dict(model="SFT", lora_dropout=0.1), "needs --lora_r", ALL), (dict(model="SFT", ref="swap"), "use --ref adapter instead", ALL),
    (dict(lora_r=0), "--lora_r must be above 0", ALL), (dict(lora_r=4, lora_alpha=0.0), "--lora_alpha must be above 0", ALL),
    (dict(lora_r=4, lora_dropout=1.0), "--lora_dropout must be", ALL), (dict(ref_ahead=0), "--ref_ahead must be above 0", TWO),
    (dict(ref="swap", sync_mix=0.5), "--sync_mix needs --sync_reference", ALL),
    *((dict(ref="swap", sync_reference=2, sync_mix=mix), "--sync_mix must be above 0", ALL) for mix in (0.0, -0.1, 1.1, float("nan"))),
    (dict(ref="swap", sync_reference=0), "--sync_reference must be above 0", ALL),
    (dict(ref="swap", sync_reference=2, humanline=True), "leave out --sync_reference", TWO),
    (dict(ref="swap", humanline=True, log_eps_p=0.1), "--log_eps_p", TWO),
    (dict(ref="swap", humanline=True, log_eps_r=-0.1), "--log_eps_r", TWO),
    (dict(ref="live", lora_r=4, sync_reference=1), "use --ref adapter", ALL),
    (dict(log_eps_p=-3.0), "--log_eps_\\* needs --humanline", TWO), (dict(ref="swap", humanline=True, loss="aot"), "use aot_unpaired", "dpo"),
    (dict(lora_r=4, lora_dropout=0.1, updates_per_rollout=2), "--lora_dropout makes another policy", "rloo")]


@pytest.mark.parametrize("changes, words, script", [(*case, script) for *case, scripts in REFUSED for script in scripts.split()])
def test_what_cannot_be_meant_is_refused_in_one_sentence(settle, tmp_path, changes, words, script):
    if changes.get("model"):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": MODEL}))
        changes = changes | dict(model=str(tmp_path))
    reward = dict(reward=(str(ROOT / "demo/score.py:success"),)) if script == "rloo" else {}
    with pytest.raises(BadInput, match=words) as error:
        settle(script, **reward, **changes)
    assert "\n" not in str(error.value)
