"""The reference of a run: where it is held changes no training, which is that of a slow loop as in the papers."""
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from models import GROUPS, MODELS, ROUNDING, build, equal, flat, logps, make, cases, slow_but
from runs import LORA, SCRIPTS, TOKENIZER, load, needs_peft, run, same, tiny

import kto
from logprobs import completion_logprobs, count_tokens
from refcache import ReferenceCache, Swap, log_ratios, reference_logprobs


@cases("script, metric", [
    ("dpo", "eval_rewards/margins"), ("kto", "eval_rewards/margins"), ("rloo", "kl")])
def test_cached_swapped_and_live_runs_are_equal(script, metric):
    swapped = run(script, ref="swap")
    assert abs(swapped.history[-1][metric]) > (1e-4 if metric == "kl" else 1e-3)
    for ref in ["live"] if script == "rloo" else ["live", "cache"]:
        other = run(script, ref=ref)
        assert same(other, swapped)
        assert (other.out / "reference_logprobs.pkl").exists() == (ref == "cache")


FAMILIES = MODELS | ROUNDING
del FAMILIES["bert-layers-before-the-head"]  # FSDP2 refuses how it ties weights


@cases("name", slow_but({"olmo2", "ernie-moe-float32-router", "gemma2-softcaps", "mamba"}, FAMILIES))
def test_bfloat16_policy_rounds_like_its_reference(name, tmp_path):
    """So the loss of step 0 is ln 2, wherever the reference is. The checkpoint is float32."""
    groups = [(prompt, sorted(completions, key=len, reverse=True)) for prompt, completions in GROUPS]
    groups.sort(key=lambda group: -count_tokens([group]))  # as a pass orders them: another order may round differently
    build(*FAMILIES[name]).save_pretrained(tmp_path)
    reference = load(tmp_path, dtype="bfloat16")
    policy = load(tmp_path, trains=True, dtype="bfloat16")
    cache = ReferenceCache()
    cache.fill(lambda: reference, groups)

    for place in (cache, Swap(policy), nullcontext(reference)):
        ratios = flat(log_ratios(completion_logprobs(policy, groups), groups, reference_logprobs(place, groups)))
        assert ratios.dtype == torch.float32 and not ratios.any()
    ratios.sum().backward()
    assert {weight.grad.dtype for weight in policy.parameters() if weight.grad is not None} == {torch.float32}


def slow_run(script, args, begin):
    """Losses and order of a step as in the papers. Yields a dict per step, then the evaluation and the policy."""
    module = SCRIPTS[script]
    rows, held_out = (module.load_rows(file, TOKENIZER, args) for file in (args.data, args.eval_data))
    if script == "kto":
        held_out, rows = kto.draw_others(held_out, rows, args), kto.draw_others(rows, rows, args)
    policy = load(begin, trains=True)
    reference = load(args.ref_model) if args.ref_model else deepcopy(policy)
    weights = [p for p in policy.parameters() if p.requires_grad]
    decays = [args.weight_decay * (weight.dim() > 1) for weight in weights]  # not of norms and biases
    optimizer = torch.optim.AdamW([dict(params=[p], weight_decay=decay) for p, decay in zip(weights, decays)])

    def ratios(batch, answer):
        answers = [(row.prompt, getattr(row, answer)) for row in batch]
        pairs = zip(logps(policy, answers), logps(reference, answers))
        return torch.stack([(ours - theirs.detach()).sum() for ours, theirs in pairs])

    def dpo_loss(batch):
        margin = 0.1 * (ratios(batch, "chosen") - ratios(batch, "rejected"))
        return -F.logsigmoid(margin).mean(), {"rewards/margins": margin.mean().item()}

    def kto_loss(batch):
        z = max(0.0, ratios(batch, "other").mean().item())  # no gradient flows through z
        is_desirable = torch.tensor([row.is_desirable for row in batch])
        beta = args.beta or 0.1
        rewards = beta * ratios(batch, "completion")
        utility = torch.sigmoid((rewards - beta * z) * torch.where(is_desirable, 1, -1))
        losses = (1 - utility) * torch.where(is_desirable, args.desirable_weight, args.undesirable_weight)
        margin = rewards[is_desirable].mean() - rewards[~is_desirable].mean()  # NaN: not logged
        return losses.mean(), {"kl": z, "rewards/margins": margin.item()}

    loss_of = dpo_loss if script == "dpo" else kto_loss
    ordered = module.rows_in_order(rows, args.steps * args.batch_size, args.seed)
    for step in range(args.steps):
        loss, values = loss_of(ordered[step * args.batch_size:][:args.batch_size])
        optimizer.zero_grad()
        loss.backward()
        values["grad_norm"] = torch.nn.utils.clip_grad_norm_(weights, 1.0).item()
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - step / args.steps)
        optimizer.step()
        yield {"loss": loss.item(), **values}
    with torch.no_grad():
        loss, values = loss_of(held_out)
    yield {"eval_loss": loss.item(), **{f"eval_{name}": value for name, value in values.items()}}
    yield policy


@cases("script, changes", [
    ("dpo", dict(weight_decay=2.0, ref="live", ref_model=tiny(1), seed=3)),
    ("kto", dict(ref="live", ref_model=tiny(1), lr=1e-3, seed=3, beta=0.2)),
    ("kto", dict(  # z is positive
        desirable_weight=1.3, undesirable_weight=0.7, weight_decay=2.0, ref_model=tiny(1), lr=1e-3, seed=3)),
    pytest.param("dpo", dict(ref="swap", **LORA), marks=needs_peft)])
def test_run_equals_a_slow_loop(script, changes):
    begin = tiny()
    if "lora_r" in changes:  # a new adapter is random, and the same in every run
        begin = run(**LORA | dict(ref="swap", steps=1, lr=1e-30)).model
    ended = run(script, **changes)
    *expected, policy = slow_run(script, ended.args, begin)
    history = [*ended.history[1:], ended.history[-1]]  # the last line has also the evaluation
    for ours, truth in zip(history, expected, strict=True):
        assert {name: ours.get(name, torch.nan) for name in truth} == pytest.approx(truth, 1e-3, 2e-4, nan_ok=True)
    assert script == "dpo" or ended.history[1]["kl"] > 0.1
    for name, weight in policy.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(weight, ended.weights[name.replace(".default", "")], atol=1e-4, rtol=1e-3)


# --- Swapped weights

def assert_swap_is_exact(policy):
    """Also if the block raises. Only what trains is swapped."""
    policy.get_output_embeddings().requires_grad_(False)
    start = deepcopy(policy.state_dict())
    swap = Swap(policy)
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    assert len(swap.weights) == len(trained)
    for weight in trained:
        weight.data.add_(1)

    end = deepcopy(policy.state_dict())
    with pytest.raises(KeyError), swap as model:
        assert model is policy and equal(model.state_dict(), start)
        raise KeyError
    assert equal(policy.state_dict(), end)


def test_swap_is_bitwise_equal_in_and_out():
    for name in ("llama", "llama-tied"):
        assert_swap_is_exact(make(name))
