"""RLOO: learn from a reward, with k samples of a prompt as each other's baseline.

Ahmadian et al. 2024, Back to Basics: Revisiting REINFORCE Style Optimization, arXiv:2402.14740, REINFORCE leave-one-out:

    (1)   ∇J(θ) = E 1/k Σ_i [ R(y_i, x) − 1/(k−1) Σ_{j≠i} R(y_j, x) ] ∇ log π(y_i|x)        y_1 .. y_k ~ π(·|x)
    (2)   R(y, x) = reward(y, x) − β log π(y|x)/π_ref(y|x)

    python rloo.py                                                                         # the demo: offline, under a minute
    python rloo.py --model Qwen/Qwen3-0.6B --data prompts.jsonl --reward rewards.py:helpful --out out/qwen

A prompt costs its tokens once, whatever k is: once in the rollout, whose cache is expanded to k rows, once in the reference
pass and once in training. The reference scores all samples of a step together: its weights come in and go out once. The same
command resumes a killed run, at its newest checkpoint.

Data      rows `prompt`, a string or chat messages, and any columns for the reward. rewards.py:f is a function
          f(prompts, completions, **columns) -> one float a completion, or None where it has nothing to say: 0 beside other
          rewards; a sample that none of them judges is left out, also of its siblings' baseline.
Not here  several GPUs, quantized weights, tools and several turns, vLLM, KL in the loss instead of in the reward.
Shapes    B prompts a step, k samples each: rewards, log-probs and advantages are (B, k).
Metrics   reward, reward_std: over all samples, before clipping and KL | rewards/NAME: of one function | frac_reward_zero_std: prompts whose
          samples all got the same | kl: log π − log π_ref, a token | entropy: of the distribution that was sampled from, in nats a token |
          completions/mean_length | completions/clipped_ratio: samples that max_new_tokens cut off | clip_ratio: ratios beyond the clip that
          lost their gradient | loss | grad_norm before clipping (these three of the step's last update) | lr | num_tokens so far, a prompt
          counted once. eval_*: held out; eval_score: mean --score.
          seconds.jsonl: rollout, reward, reference, update.
"""
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

DEMO = dict(model="demo/model", data="demo/prompts.jsonl", eval_data="demo/prompts_test.jsonl", score="demo/score.py:success", lr=2e-4)


@dataclass
class Args:
    model: str | None = None  # policy: checkpoint folder or hub name (default: the demo's, with its data and reward)
    data: str | None = None  # prompts: .jsonl .json .csv .parquet, or hub NAME[:SPLIT]
    eval_data: str | None = None  # held-out prompts, in the same formats (default: eval_size prompts of data)
    eval_size: int = 128  # prompts held out of data where there is no eval_data; at most a tenth of them
    out: str = "out/rloo"  # folder for the model, metrics.jsonl, samples.jsonl, seconds.jsonl, checkpoints, args.json

    reward: tuple[str, ...] = ()  # FILE.py:FUNCTION(prompts, completions, **columns) -> floats or None; several are added
    reward_model: str | None = None  # a sequence classifier with one output, added too: folder or hub name
    reward_weights: tuple[float, ...] = ()  # of the functions, then of the model (default: 1 each)
    reward_clip: tuple[float, float] | None = None  # the total reward is clamped to this range, before KL

    ref: Literal["swap", "adapter", "live", "none"] | None = None  # swap: its weights, on the CPU; adapter: LoRA's start; live: a second model; none: with beta 0 (default: swap; adapter with LoRA)
    ref_model: str | None = None  # reference: checkpoint folder or hub name (default: the model itself)
    ref_dtype: Literal["float32", "bfloat16"] = "float32"  # weights of --ref live
    sync_reference: int | None = None  # steps after which the reference follows the policy
    sync_mix: float = 1.0  # weight of the policy in each sync; 1 copies it

    lora_r: int | None = None  # train a LoRA adapter of this rank instead of all weights
    lora_alpha: float | None = None  # its scale is alpha / r (default: 2 r)
    lora_dropout: float = 0.0  # in training steps only
    lora_target: str = "all-linear"  # layer names, comma between them
    merge: bool = False  # save the whole model, the adapter merged into it

    k: int = 4  # samples a prompt; TRL's num_generations
    beta: float = 0.05  # price of a nat away from the reference
    updates_per_rollout: int = 1  # optimizer steps on the same samples; from the second on the ratio is clipped
    clip_eps: float = 0.2  # the ratio is clipped to [1 − clip_eps, 1 + clip_eps]
    mask_truncated: bool = False  # leave samples without an end out, also of their siblings' baseline

    temperature: float = 1.0  # of the samples, and of the log-probs with them
    top_p: float = 1.0  # nucleus sampling; log-probs and gradient are still the whole distribution's
    top_k: int = 0  # the same; 0 is off
    max_new_tokens: int = 128  # of a sample
    rollout_tokens: int = 65536  # places in the cache of one rollout batch; memory and speed only, never the result

    steps: int | None = None  # rollouts (default: as epochs says)
    epochs: float = 1.0  # passes over the data
    batch_size: int = 8  # prompts per step
    lr: float | None = None  # peak learning rate (default: 1e-6, for the demo 2e-4)
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # after the warmup
    warmup: float = 0.1  # share of the steps
    weight_decay: float = 0.0  # AdamW's
    max_grad_norm: float = 1.0  # longer gradients are clipped
    max_length: int = 1024  # tokens of prompt and sample; longer prompts are dropped, and counted
    truncate: bool = False  # cut the beginning of longer prompts instead of dropping them

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the forward (auto: bfloat16 on CUDA); what trains and the loss are float32
    tokens_per_forward: int = 16384  # memory and speed only, never the result
    gradient_checkpointing: bool = False  # memory and speed only, never the result
    seed: int = 0  # of data order, held-out split and samples

    save_every: int = 100  # steps between checkpoints, from which the same command goes on
    keep: int = 1  # checkpoints that stay
    eval_every: int | None = None  # steps between evaluations (default: before and after only)
    samples: int = 64  # held-out prompts answered at every evaluation
    score: str | None = None  # FILE.py:FUNCTION like a reward, for these answers only
    show_data: bool = False  # print one prompt as the model reads it, and stop
    tensorboard: bool = False  # also write TensorBoard events


if __name__ == "__main__":
    ARGS = tyro.cli(Args, description=__doc__.split("\n")[0], use_underscores=True)

import numpy as np  # noqa: E402  the slow imports come after the command line, so that --help answers at once
import torch  # noqa: E402
from transformers import AutoModelForSequenceClassification  # noqa: E402

from refcache import (  # noqa: E402
    BadInput, Run, adapter_base, base_model, batch_rows, call_scorer, check_args, check_rows, check_start, command_line, encode, eval_mode, from_checkpoint,
    generator, hold_out, load_function, load_references, load_tokenizer, log_ratios, lr_factor, micro_batches, pack, pad,
    reference_logprobs, render, report, sample, save_model, stop_tokens, text_of, with_defaults)

# ---------------------------------------------------------------------------------------------------------------------
# The loss


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """(B, k) -> (B, k): each reward minus the mean of its siblings'. NaN is a sample left out: it has no advantage and is in no
    baseline; alone, a sample has nothing to be compared with. Never divided by the standard deviation: that would be biased."""
    counts = (~rewards.isnan()).sum(dim=1, keepdim=True)  # (B, 1)
    baseline = (rewards.nansum(dim=1, keepdim=True) - rewards) / (counts - 1)  # of (1)
    return torch.where(counts > 1, rewards - baseline, 0.0).nan_to_num(0.0)


def policy_loss(logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, clip_eps: float) -> torch.Tensor:
    """The loss of every sample. At old_logp = logp its gradient is −A ∇ log π(y|x), the estimator above."""
    ratio = torch.exp((logp - old_logp).clamp(max=20))  # of the whole sequence, which is the action; e^89 would be inf, and inf · 0 NaN
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages)


# ---------------------------------------------------------------------------------------------------------------------
# Data


class Row(NamedTuple):
    prompt: tuple[int, ...]  # token ids
    row: dict  # as it stands in the file: the prompt, and columns for the reward


def parse_prompt(row: dict, where: str):
    return text_of(row, "prompt", where), []


def load_rows(source: str, tokenizer, max_length: int, args: Args) -> list[Row]:
    return [Row(prompt, row) for prompt, _, row, _ in encode(tokenizer, source, parse_prompt, max_length, args.truncate)]


# ---------------------------------------------------------------------------------------------------------------------
# Rollouts and rewards


class Rollout(NamedTuple):
    groups: list  # [(prompt, [y_1 .. y_k]), ..]: token ids, a sample with its stop token
    ended: torch.Tensor  # (B, k) bool: not cut off by max_new_tokens
    entropy: float  # nats a token


def rollout(policy, tokenizer, prompts: list[tuple], k: int, step: int, args: Args) -> Rollout:
    """y_1 .. y_k ~ π(·|x) of (1), for each prompt, a function of (seed, step): no batching or padding changes them."""
    completions, entropy = sample(policy, tokenizer, prompts, k, generator(args.seed, "rollout", step), args,
                                  args.temperature, args.top_p, args.top_k, args.rollout_tokens)
    stop = stop_tokens(policy, tokenizer)
    return Rollout(list(zip(prompts, completions)), torch.tensor([[y[-1] in stop for y in ys] for ys in completions]), entropy)


class RewardModel:
    """A sequence classifier with one output, as a reward function. Between its calls it waits on the CPU."""

    def __init__(self, name: str, device: str, tokens_per_forward: int):
        self.device, self.tokens_per_forward = device, tokens_per_forward
        self.tokenizer, _ = load_tokenizer(name)
        self.model = from_checkpoint(AutoModelForSequenceClassification, name, "a reward model").eval()
        if self.model.config.num_labels != 1:
            raise BadInput(f"{name} is no reward model: it has {self.model.config.num_labels} outputs, and needs one")

    @torch.no_grad()
    def __call__(self, prompts, completions, **columns) -> list[float]:
        texts = [render(self.tokenizer, prompt, [y], "a sample for the reward model")[1] for prompt, y in zip(prompts, completions)]
        ids = [self.tokenizer(text, add_special_tokens=isinstance(prompt, str)).input_ids for text, prompt in zip(texts, prompts)]
        check_rows(self.model, ((len(row), max(row)) for row in ids), "the reward model")
        scores, end = torch.zeros(len(ids)), self.model.config.pad_token_id  # by which the model finds where a row ends: without one they go alone
        self.model.to(self.device)
        for batch in pack(list(map(len, ids)), 0 if end is None else self.tokens_per_forward, [1] * len(ids)):
            padded, mask = pad([ids[i] for i in batch], "right", self.device, end or 0)
            scores[batch] = self.model(input_ids=padded, attention_mask=mask).logits[:, 0].float().cpu()
        self.model.to("cpu")
        torch.cuda.empty_cache()
        return scores.tolist()


def load_rewards(args: Args, device: str) -> list[tuple]:
    """[(name, function, weight), ..]"""
    functions = {spec: load_function(spec) for spec in args.reward}
    if args.reward_model:
        functions[args.reward_model] = RewardModel(args.reward_model, device, args.tokens_per_forward)
    names = [Path(spec).name.split(":")[-1] for spec in functions]
    names = [name if names.count(name) == 1 else spec for name, spec in zip(names, functions)]
    return list(zip(names, functions.values(), args.reward_weights or [1.0] * len(names)))


def judge(drawn: Rollout, rows: list[Row], tokenizer, functions: list[tuple]) -> tuple[torch.Tensor, list[dict], dict]:
    """The weighted rewards (B, k), NaN where no function had anything to say; the samples for samples.jsonl; each function's mean."""
    texts = tokenizer.batch_decode([y for _, ys in drawn.groups for y in ys], skip_special_tokens=True)
    repeated = [row.row for row, (_, ys) in zip(rows, drawn.groups) for _ in ys]
    samples = [{"prompt": row["prompt"], "completion": text} for row, text in zip(repeated, texts)]
    scores = torch.stack([torch.tensor([math.nan if x is None else x for x in call_scorer(function, name, samples, repeated)])
                          for name, function, _ in functions])  # (functions, B·k)
    weights = torch.tensor([weight for *_, weight in functions])[:, None]
    spoke = (~scores.isnan() & (weights != 0)).any(dim=0)  # --score weighs 0: it makes no reward of a sample that the others left out
    total = torch.where(spoke, (weights * scores.nan_to_num(0.0)).sum(dim=0), math.nan)
    means = {f"rewards/{name}": row.nanmean().item() for (name, *_), row in zip(functions, scores) if not row.isnan().all()}
    for answer, reward in zip(samples, total.tolist()):
        answer["reward"] = None if math.isnan(reward) else reward
    return total.view(len(rows), -1), samples, means


# ---------------------------------------------------------------------------------------------------------------------
# Training


class Seen(NamedTuple):
    """What the first update of a step learns from its one forward, (B, k) each, and the later ones need."""
    logp: torch.Tensor  # log π_old(y|x)
    rho: torch.Tensor  # log π_old(y|x) − log π_ref(y|x)
    advantages: torch.Tensor


def backward(policy, groups: list, rewards: torch.Tensor, known, seen: Seen | None, args: Args) -> tuple[Seen, dict[str, float]]:
    """The gradient of the mean loss, one micro-batch of whole prompts after the other. In the first update of a step
    π_old is π itself, so that the forward which carries the gradient also gives the KL; there is no other."""
    first, loss, clipped = seen is None, 0.0, 0.0
    if first:
        seen = Seen(*(torch.empty_like(rewards) for _ in Seen._fields))
    for micro in micro_batches(policy, groups, args.tokens_per_forward):
        logp, rho, _ = (x.view(-1, args.k) for x in log_ratios(policy, [groups[i] for i in micro], known, args))
        if first:
            seen.logp[micro], seen.rho[micro] = logp.detach(), rho.detach()
            reward = rewards[micro].clamp(*args.reward_clip) if args.reward_clip else rewards[micro]
            seen.advantages[micro] = leave_one_out(reward - args.beta * rho.detach())  # (2), and then its baseline (1)
        losses = policy_loss(logp, seen.logp[micro], seen.advantages[micro], args.clip_eps)
        (losses.sum() / rewards.numel()).backward()  # the mean of (1), over all samples: those left out have no gradient
        ratio, A = (logp - seen.logp[micro]).detach().exp(), seen.advantages[micro]
        clipped += ((ratio > 1 + args.clip_eps) & (A > 0) | (ratio < 1 - args.clip_eps) & (A < 0)).sum().item() / rewards.numel()
        loss += losses.sum().item() / rewards.numel()
    return seen, {"loss": loss, "clip_ratio": clipped}


def metrics(drawn: Rollout, rewards: torch.Tensor, rho: torch.Tensor | None) -> dict[str, float]:
    judged, lengths = rewards[~rewards.isnan()], [len(y) for _, ys in drawn.groups for y in ys]
    same = [row[~row.isnan()] for row in rewards]
    values = {"completions/mean_length": float(np.mean(lengths)),
              "completions/clipped_ratio": 1 - drawn.ended.float().mean().item(), "entropy": drawn.entropy,
              "frac_reward_zero_std": float(np.mean([len(row) < 2 or bool((row == row[0]).all()) for row in same]))}
    if len(judged):
        values |= {"reward": judged.mean().item(), "reward_std": judged.std(correction=0).item()}
    if rho is not None:
        values["kl"] = rho.sum().item() / sum(lengths)
    return values


@torch.no_grad()
def evaluate(policy, tokenizer, rows: list[Row], reference, functions: list[tuple], args: Args) -> tuple[list[dict], dict[str, float]]:
    """One sample of each held-out prompt, always with the same random numbers."""
    if not rows:
        return [], {}
    drawn = rollout(policy, tokenizer, [row.prompt for row in rows], 1, 0, args)
    rewards, samples, means = judge(drawn, rows, tokenizer, functions)
    known = reference_logprobs(reference, drawn.groups, args)
    with eval_mode(policy):
        rho = log_ratios(policy, drawn.groups, known, args)[1] if known is not None else None
    values = metrics(drawn, rewards, rho) | means
    if "rewards/--score" in values:
        values["score"] = values.pop("rewards/--score")
    return samples, {f"eval_{name}": value for name, value in values.items() if name != "frac_reward_zero_std"}


def settle(args: Args) -> Args:
    """Fills in the defaults that depend on others, and refuses what cannot be meant."""
    demo = DEMO if args.reward_model else DEMO | dict(reward=("demo/score.py:sentiment",))
    ref = args.ref or ("none" if args.beta == 0 else "adapter" if args.lora_r or args.model and adapter_base(args.model) else "swap")
    args = with_defaults(replace(args, ref=ref), demo)
    count = len(args.reward) + bool(args.reward_model)
    check_args(
        args, "rollout_tokens updates_per_rollout top_p",
        (not 1e-4 <= args.temperature <= 1e4, "--temperature must be between 0.0001 and 10000"),
        (args.lora_dropout and args.updates_per_rollout > 1, "--lora_dropout makes another policy of every forward: leave it out, or --updates_per_rollout"),
        (len(set(args.reward)) < len(args.reward), "--reward names a function twice: give it a weight instead"),
        (args.k < 2, "--k must be at least 2: a sample is compared with its siblings"),
        (not count, "there is no reward: give --reward FILE.py:FUNCTION or --reward_model"),
        (args.reward_weights and len(args.reward_weights) != count, f"--reward_weights must be {count} numbers, one a reward"),
        (not all(map(math.isfinite, args.reward_weights)) or args.reward_weights and not any(args.reward_weights),
         "--reward_weights must be numbers, and not all of them 0"),
        (args.reward_clip and not args.reward_clip[0] < args.reward_clip[1], "--reward_clip is the lowest reward and then the highest"),
        (not 0 <= args.beta < math.inf, "--beta must be a number, and not negative"),
        (args.beta > 0 and args.ref == "none", "--ref none leaves nothing to measure --beta against: add --beta 0"),
        (args.beta == 0 and args.ref != "none", f"--beta 0 needs no reference: leave out --ref {args.ref}"),
        (not 0 < args.clip_eps < 1, "--clip_eps must be between 0 and 1"),
        (args.top_p > 1 or args.top_k < 0, "--top_p must be at most 1, and --top_k not negative"),
        (args.max_new_tokens >= args.max_length, "--max_length holds prompt and sample: it must be above --max_new_tokens"))
    return args


def main(args: Args) -> list[dict]:
    """Trains, and returns what metrics.jsonl holds: a dict a step."""
    args = settle(args)
    device, out, start = "cuda" if torch.cuda.is_available() else "cpu", Path(args.out), time.monotonic()
    functions = load_rewards(args, device)
    judges = functions + ([("--score", load_function(args.score), 0.0)] if args.score else [])  # of held-out answers
    tokenizer, context = load_tokenizer(args.model)
    room = min(args.max_length, context) - args.max_new_tokens  # for a prompt
    if room < 1:
        raise BadInput(f"--max_new_tokens {args.max_new_tokens} leaves no room for a prompt in the model's {context} positions: lower it")
    train, held = load_rows(args.data, tokenizer, room, args), []
    if args.eval_data:
        held = load_rows(args.eval_data, tokenizer, room, args)
    else:
        train, held = hold_out(train, min(args.eval_size, args.samples), args.seed)
    if args.show_data:
        print(tokenizer.decode(train[0].prompt))
        return []
    held = held[:args.samples]
    args = replace(args, batch_size=min(args.batch_size, len(train)))
    steps = args.steps or math.ceil(args.epochs * len(train) / args.batch_size)
    run = Run(args, train + held)
    if run.finished:
        return run.history

    policy, reference = load_references(run, tokenizer, [], device)
    check_rows(base_model(policy), ((len(row.prompt) + args.max_new_tokens, max(row.prompt)) for row in train + held))
    if args.mask_truncated and not stop_tokens(policy, tokenizer):
        raise BadInput("--mask_truncated leaves every sample out, because neither model nor tokenizer names a token that ends one: leave it out")
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], weight_decay=args.weight_decay, fused=device == "cuda")
    run.restore(policy, optimizer, reference)
    if not run.done:
        answers, scored = evaluate(policy, tokenizer, held, reference, judges, args)
        run.write({"step": 0, **scored}, answers)

    tokens = run.history[-1].get("num_tokens", 0)
    for step in run.steps(steps, policy, optimizer, reference):
        rows = [train[i] for i in batch_rows(step, len(train), args.batch_size, args.seed)]
        for group in optimizer.param_groups:
            group["lr"] = args.lr * lr_factor(step, steps, args.warmup, args.schedule)
        drawn = rollout(policy, tokenizer, [row.prompt for row in rows], args.k, step, args)
        run.lap("rollout")
        rewards, samples, means = judge(drawn, rows, tokenizer, functions)
        counted = torch.where(drawn.ended, rewards, math.nan) if args.mask_truncated else rewards
        run.lap("reward")
        known, seen = reference_logprobs(reference, drawn.groups, args), None
        run.lap("reference")
        for update in range(args.updates_per_rollout):
            seen, losses = backward(policy, drawn.groups, counted.to(device), known, seen, args)
            losses["grad_norm"] = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).item()
            run.check({"step": step, **losses})
            if update == 0:
                if step == 1:
                    check_start(policy, drawn.groups, known, f"KL {seen.rho.mean():.1e}", args)
                if args.sync_reference and step % args.sync_reference == 0:
                    reference.sync(args.sync_mix)  # before the update: the reference stays one step behind
            optimizer.step()
            optimizer.zero_grad()
        run.lap("update")
        tokens += sum(len(prompt) + sum(map(len, ys)) for prompt, ys in drawn.groups)
        values = {"step": step, **metrics(drawn, rewards, seen.rho if reference else None), **means, **losses, "lr": group["lr"], "num_tokens": tokens}
        answers = []
        if step == steps or args.eval_every and step % args.eval_every == 0:
            answers, scored = evaluate(policy, tokenizer, held, reference, judges, args)
            values |= scored
        run.write(values, answers, samples)
        run.show(f"reward {values.get('reward', math.nan):.3f}, kl {values.get('kl', math.nan):.4f}")

    save_model(policy, tokenizer, out, args.merge)
    run.finish()
    report(run)
    print(f"\n{steps} steps of {args.batch_size} prompts, {args.k} samples each, in {time.monotonic() - start:.0f} s; the model is in {out}")
    return run.history


if __name__ == "__main__":
    command_line(main, ARGS)
