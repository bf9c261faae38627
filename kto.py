"""KTO: learn from answers that someone found good or bad, one at a time.

Ethayarajh et al. 2024, KTO: Model Alignment as Prospect Theoretic Optimization, arXiv:2402.01306, equation 7:

    ρ = log π(y|x) − log π_ref(y|x)          z = max(0, mean over the batch of log π(y'|x) − log π_ref(y'|x))
    L(θ) = E  λ_D (1 − σ(β (ρ − z)))   if y is desirable,      λ_U (1 − σ(β (z − ρ)))   if not

    python kto.py                                                               # the demo: offline, under a minute
    python kto.py --model Qwen/Qwen3-0.6B --data feedback.jsonl --out out/qwen  # your model, your data

z estimates KL(π || π_ref); no gradient flows through it. y' is the answer to another prompt; here it is drawn once for every
row, where the paper pairs the rows of each batch anew, so that its reference log-probs, too, are known before training.
--ref names other ways to hold the reference than that cache. The same command resumes a killed run, at its newest checkpoint.

Data      rows `prompt, completion, label` (true or false, 1 or 0; HALOs' `output` is read as completion), or pairs
          `prompt, chosen, rejected`, which give one row of each kind; strings or chat messages. Strings get
          the tokenizer's EOS; chats end as their template ends them.
Not here  several GPUs, quantized weights, tools and images.
Shapes    B rows in an optimizer batch; whatever the losses see is (B,).
Metrics   loss | kl: z | rewards/chosen, rewards/rejected: β ρ of the desirable and of the others | rewards/margins: their
          difference | rewards/accuracies: share of rows whose ρ has the sign of their label, ties count 1/2 |
          logps/chosen, logps/rejected: log π(y|x) | count/chosen, count/rejected: rows in the batch | humanline/unclamped: share
          of a row's tokens whose log-ratio it leaves alone | grad_norm before clipping | lr | num_tokens so far, a prompt counted
          once. A batch of one kind has no mean of the other. eval_*: the same, held out; eval_score: mean --score.
          seconds.jsonl: reference, update.
"""
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

DEMO = dict(model="demo/model", data="demo/feedback.jsonl", eval_data="demo/feedback_test.jsonl", score="demo/score.py:success", lr=2e-4)


@dataclass
class Args:
    model: str | None = None  # policy: checkpoint folder or hub name (default: the demo's, with its data)
    data: str | None = None  # rows: .jsonl .json .csv .parquet, or hub NAME[:SPLIT]
    eval_data: str | None = None  # held-out rows, in the same formats (default: eval_size prompts of data)
    eval_size: int = 128  # prompts held out of data where there is no eval_data; at most a tenth of them
    out: str = "out/kto"  # folder for the model, metrics.jsonl, samples.jsonl, seconds.jsonl, checkpoints, args.json, reference_logprobs.pkl

    ref: Literal["cache", "swap", "adapter", "live"] = "cache"  # cache: its log-probs, computed once; swap: its weights, on the CPU; adapter: LoRA's start; live: a second model
    ref_model: str | None = None  # reference: checkpoint folder or hub name (default: the model itself)
    ref_cache: str | None = None  # file of reference log-probs, completed and shared (default: inside out)
    ref_dtype: Literal["float32", "bfloat16"] = "float32"  # weights of --ref live
    ref_ahead: int = 16  # batches that one swap scores ahead; speed only, never the result
    sync_reference: int | None = None  # steps after which the reference follows the policy (TR-DPO); not with cache
    sync_mix: float = 1.0  # weight of the policy in each sync; 1 copies it
    humanline: bool = False  # clamp every token's log-ratio, and sync at every step
    log_eps_p: float = -1.0  # humanline's lower end, in nats
    log_eps_r: float = 1.5  # its upper end

    lora_r: int | None = None  # train a LoRA adapter of this rank instead of all weights
    lora_alpha: float | None = None  # its scale is alpha / r (default: 2 r)
    lora_dropout: float = 0.0  # in training steps only
    lora_target: str = "all-linear"  # layer names, comma between them
    merge: bool = False  # save the whole model, the adapter merged into it

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"  # apo_zero_unpaired has no z and no weights
    beta: float = 0.1  # strength of the pull towards the reference
    desirable_weight: float = 1.0  # λ_D
    undesirable_weight: float = 1.0  # λ_U
    balance: bool = False  # raise the weight of the rarer kind until both weigh the same

    steps: int | None = None  # optimizer steps (default: as epochs says)
    epochs: float = 1.0  # passes over the data
    batch_size: int = 32  # rows per optimizer step
    lr: float | None = None  # peak learning rate (default: 1e-6, for the demo 2e-4)
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # after the warmup
    warmup: float = 0.1  # share of the steps
    weight_decay: float = 0.0  # AdamW's
    max_grad_norm: float = 1.0  # longer gradients are clipped
    max_length: int = 1024  # tokens of prompt and answer; longer rows are dropped, and counted
    truncate: bool = False  # cut the beginning of the prompts of longer rows instead of dropping them

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the forward (auto: bfloat16 on CUDA); what trains and the loss are float32
    tokens_per_forward: int = 16384  # memory and speed only, never the result
    gradient_checkpointing: bool = False  # memory and speed only, never the result
    seed: int = 0  # of data order, held-out split and samples

    save_every: int = 100  # steps between checkpoints, from which the same command goes on
    keep: int = 1  # checkpoints that stay
    eval_every: int | None = None  # steps between evaluations (default: before and after only)
    samples: int = 64  # held-out prompts answered before and after
    max_new_tokens: int = 128  # of such an answer
    score: str | None = None  # FILE.py:FUNCTION(prompts, completions, **columns) -> floats, for these answers
    show_data: bool = False  # print one example with its trained tokens marked, and stop
    tensorboard: bool = False  # also write TensorBoard events


if __name__ == "__main__":
    ARGS = tyro.cli(Args, description=__doc__.split("\n")[0], use_underscores=True)

import torch  # noqa: E402  the slow imports come after the command line, so that --help answers at once

from refcache import (  # noqa: E402
    BadInput, Run, answer, batch_rows, check_args, check_start, command_line, columns, encode, eval_mode, generator, hold_out, load_function,
    load_references, load_tokenizer, log_ratios, lr_factor, micro_batches, parse_pair, reference_logprobs, reference_window,
    report, save_model, text_of, with_defaults)

# ---------------------------------------------------------------------------------------------------------------------
# The loss


class Batch(NamedTuple):
    """What the losses see of B rows, (B,) each: sums over the tokens of an answer."""
    logp: torch.Tensor  # log π(y|x)
    rho: torch.Tensor  # log π(y|x) − log π_ref(y|x)
    label: torch.Tensor  # bool: desirable
    unclamped: torch.Tensor | None = None  # share of its tokens that humanline leaves alone


def feedback_loss(loss: str, batch: Batch, z: torch.Tensor, beta: float, desirable=1.0, undesirable=1.0) -> torch.Tensor:
    """The loss of every row, (B,), float32. z is a number without gradient, in nats."""
    _, rho, label, _ = batch
    match loss:
        case "kto": return torch.where(label, desirable * (1 - torch.sigmoid(beta * (rho - z))),  # equation 7
                                       undesirable * (1 - torch.sigmoid(beta * (z - rho))))
        case "apo_zero_unpaired": return torch.where(label, 1 - torch.sigmoid(beta * rho), torch.sigmoid(beta * rho))  # arXiv:2408.06266
    raise BadInput(f"there is no loss {loss!r}")


def objective(batch: Batch, z: torch.Tensor, args: Args) -> torch.Tensor:  # (B,)
    return feedback_loss(args.loss, batch, z, args.beta, args.desirable_weight, args.undesirable_weight)


def metrics(batch: Batch, z: torch.Tensor, args: Args) -> dict[str, float]:
    reward, sign = args.beta * batch.rho, torch.where(batch.label, 1.0, -1.0)
    accuracy = torch.where(reward.abs() < 1e-5, 0.5, (reward * sign > 0).float())  # a tie, to rounding, counts one half
    values = {"loss": objective(batch, z, args), "rewards/accuracies": accuracy} | ({"kl": z} if args.loss == "kto" else {})
    values |= {"humanline/unclamped": batch.unclamped} if args.humanline else {}
    for name, kind in (("chosen", batch.label), ("rejected", ~batch.label)):
        values[f"count/{name}"] = kind.sum().float()
        if kind.any():
            values |= {f"rewards/{name}": reward[kind], f"logps/{name}": batch.logp[kind]}
    if 0 < batch.label.sum() < len(batch.label):
        values["rewards/margins"] = reward[batch.label].mean() - reward[~batch.label].mean()
    return {name: value.mean().item() for name, value in values.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Data


class Row(NamedTuple):
    prompt: tuple[int, ...]  # token ids: with an answer's, a key of the cache
    completion: tuple[int, ...]
    label: bool
    other: tuple[int, ...]  # y', the answer to another prompt, for z
    row: dict  # as it stands in the file


def parse_row(row: dict, where: str):
    """A row of the file -> its prompt and its answers, one or two, as strings or as lists of messages."""
    if "chosen" in row and "rejected" in row:
        return parse_pair(row, where)
    if row.get("label") not in (0, 1, "0", "1", "true", "false", "True", "False"):
        raise BadInput(f"{where}: label must be true or false, 1 or 0, not {repr(row.get('label'))[:50]} (its columns: {columns(row)})")
    return text_of(row, "prompt", where), [text_of(row, "output" if "output" in row and "completion" not in row else "completion", where)]


def load_rows(source: str, tokenizer, max_length: int, args: Args) -> list[Row]:
    rows = []
    for prompt, answers, row, _ in encode(tokenizer, source, parse_row, max_length, args.truncate):
        labels = [True, False] if len(answers) == 2 else [row["label"] in (1, "1", "true", "True")]
        rows += [Row(prompt, y, label, (), row) for y, label in zip(answers, labels)]
    return rows


def derange(prompts: list, seed: int) -> list[int]:
    """For every row another one with another prompt, each used once. Rows of a prompt lie side by side in a random order,
    and the whole is turned by as many places as the most frequent prompt has rows."""
    places: dict = {}
    for i in generator(seed, "derange").permutation(len(prompts)).tolist():
        places.setdefault(prompts[i], []).append(i)
    order, turn = [i for rows in places.values() for i in rows], max(map(len, places.values()))
    if 2 * turn > len(prompts):
        raise BadInput(f"one prompt has {turn} of the {len(prompts)} rows, so not every row finds an answer to another prompt for the "
                       "KL estimate: add rows of other prompts, or use --loss apo_zero_unpaired")
    return [partner for _, partner in sorted((i, order[(at + turn) % len(order)]) for at, i in enumerate(order))]


def draw_others(train: list[Row], held: list[Row], max_length: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Gives every row its y', once for all epochs; held-out rows get an answer from the training rows."""
    partners, n, cut = derange([row.prompt for row in train], seed), len(train), 0
    partners += [next(j for j in (partners[(i + k) % n] for k in range(n)) if train[j].prompt != row.prompt) for i, row in enumerate(held)]
    rows = []
    for row, j in zip(train + held, partners):
        rows.append(row._replace(other=train[j].completion[:max_length - len(row.prompt)]))
        cut += len(rows[-1].other) < len(train[j].completion)
    if cut:
        print(f"the answers to other prompts, for z: {cut} of {len(rows)} cut to fit into {max_length} tokens")
    return rows[:n], rows[n:]


def weigh(train: list[Row], args: Args) -> Args:
    """Says how the weighted kinds compare (equation 8), and balances them if asked."""
    desirable = sum(row.label for row in train)
    undesirable = len(train) - desirable
    if not desirable or not undesirable:
        raise BadInput(f"{args.data}: all {len(train)} rows have the same label, and KTO needs both kinds")
    if args.balance:
        args = replace(args, balance=False, desirable_weight=max(1.0, undesirable / desirable), undesirable_weight=max(1.0, desirable / undesirable))
    if args.loss != "kto":
        return args
    ratio = args.desirable_weight * desirable / (args.undesirable_weight * undesirable)
    print(f"{desirable} desirable rows of weight {args.desirable_weight:.3g}, {undesirable} others of weight {args.undesirable_weight:.3g}: ratio "
          f"{ratio:.2f}" + ("" if 0.999 < ratio < 1.334 else ", outside of [1, 4/3] (equation 8): --balance sets the weights"))
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Training


def groups(rows: list[Row], others: bool = False) -> list:
    return [(row.prompt, [row.other if others else row.completion]) for row in rows]


def asked(rows: list[Row], args: Args) -> list:
    """All that a step wants to know of the reference."""
    return groups(rows) + (groups(rows, others=True) if args.loss == "kto" else [])


def measure(policy, rows: list[Row], known, args: Args) -> Batch:
    """What the losses see of some rows. `known` maps (prompt, answer) to the reference's log-probs."""
    """What the losses see of some rows. `known` maps (prompt, answer) to the reference's log-probs."""
    logp, rho, unclamped = log_ratios(policy, groups(rows), known, args)
    label, size = torch.tensor([[row.label, len(row.completion)] for row in rows], device=logp.device).unbind(1)
    return Batch(logp, rho, label.bool(), unclamped / size)


@torch.no_grad()
def estimate_kl(policy, rows: list[Row], known, args: Args) -> torch.Tensor:
    """z of the whole optimizer batch: clamped once, not multiplied by beta."""
    if args.loss != "kto":
        return torch.zeros((), device=policy.device)
    with eval_mode(policy):
        return log_ratios(policy, groups(rows, others=True), known, args)[1].mean().clamp(min=0)


def backward(policy, rows: list[Row], known, args: Args) -> tuple[Batch, torch.Tensor]:
    """The gradient of the batch's mean loss, one micro-batch after the other; also returns z."""
    z, seen = estimate_kl(policy, rows, known, args), []
    for micro in micro_batches(policy, groups(rows), args.tokens_per_forward):
        batch = measure(policy, [rows[i] for i in micro], known, args)
        (objective(batch, z, args).sum() / len(rows)).backward()
        seen.append(Batch(*(x.detach() for x in batch)))
    return Batch(*map(torch.cat, zip(*seen))), z


@torch.no_grad()
def evaluate(policy, rows: list[Row], reference, args: Args) -> dict[str, float]:
    if not rows:
        return {}
    known = reference_logprobs(reference, asked(rows, args), args)
    with eval_mode(policy):
        batch, z = measure(policy, rows, known, args), estimate_kl(policy, rows, known, args)
        return {f"eval_{name}": value for name, value in metrics(batch, z, args).items()}


def settle(args: Args) -> Args:
    """Fills in the defaults that depend on others, and refuses what cannot be meant."""
    args = with_defaults(args, DEMO)
    weighted = (args.desirable_weight, args.undesirable_weight) != (1, 1)
    check_args(
        args, "beta desirable_weight undesirable_weight",
        (args.loss != "kto" and (args.balance or weighted), f"--loss {args.loss} has no weights: leave out --balance, --desirable_weight and --undesirable_weight"),
        (args.balance and weighted, "--balance sets the weights: leave them out"))
    return args


def main(args: Args) -> list[dict]:
    """Trains, and returns what metrics.jsonl holds: a dict a step."""
    args = settle(args)
    device, out, start = "cuda" if torch.cuda.is_available() else "cpu", Path(args.out), time.monotonic()
    score = load_function(args.score) if args.score else None
    tokenizer, context = load_tokenizer(args.model)
    train, held = load_rows(args.data, tokenizer, max_length := min(args.max_length, context), args), []
    if args.eval_data:
        held = load_rows(args.eval_data, tokenizer, max_length, args)
    else:
        train, held = hold_out(train, args.eval_size, args.seed)
    args = weigh(train, args)
    if args.show_data:
        marked = (" ".join(f"[{token}]" for token in tokenizer.batch_decode([[i] for i in ids])) for ids in train[0][1:2])
        print(tokenizer.decode(train[0].prompt), *marked, sep="\n--> ")
        return []
    if args.loss == "kto":
        train, held = draw_others(train, held, max_length, args.seed)
    args = replace(args, batch_size=min(args.batch_size, len(train)))
    steps = args.steps or math.ceil(args.epochs * len(train) / args.batch_size)
    run = Run(args, train + held)
    if run.finished:
        return run.history

    policy, reference = load_references(run, tokenizer, asked(train + held, args), device)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], weight_decay=args.weight_decay, fused=device == "cuda")
    run.restore(policy, optimizer, reference)
    if not run.done:
        answers, scored = answer(policy, tokenizer, held, score, args)
        run.write({"step": 0, **evaluate(policy, held, reference, args), **scored}, answers)

    def batch_of(step): return [train[i] for i in batch_rows(step, len(train), args.batch_size, args.seed)]

    known, tokens = None, run.history[-1].get("num_tokens", 0)
    for step in run.steps(steps, policy, optimizer, reference):
        rows, window = batch_of(step), reference_window(step, steps, args)
        if known is None or step == window.start:  # the reference's log-probs of this batch and of the next ones
            known = reference_logprobs(reference, asked([row for s in window for row in batch_of(s)], args), args)
        run.lap("reference")
        for group in optimizer.param_groups:
            group["lr"] = args.lr * lr_factor(step, steps, args.warmup, args.schedule)
        batch, z = backward(policy, rows, known, args)
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).item()
        tokens += sum(len(row.prompt) + len(row.completion) for row in rows)
        values = {"step": step, **metrics(batch, z, args), "grad_norm": grad_norm, "lr": group["lr"], "num_tokens": tokens}
        if step == 1:
            check_start(policy, groups(rows), known, f"KL estimate {z:.1e}, loss {values['loss']:.4f}", args)
        run.check(values)
        if args.sync_reference and step % args.sync_reference == 0:
            reference.sync(args.sync_mix)  # before the update: the reference stays one step behind
        optimizer.step()
        optimizer.zero_grad()
        run.lap("update")
        if step == steps or args.eval_every and step % args.eval_every == 0:
            values |= evaluate(policy, held, reference, args)
        answers, scored = answer(policy, tokenizer, held, score, args) if step == steps else ([], {})
        run.write(values | scored, answers)
        run.show(f"loss {values['loss']:.3f}, accuracy {values['rewards/accuracies']:.2f}")

    save_model(policy, tokenizer, out, args.merge)
    run.finish()
    report(run)
    print(f"\n{steps} steps of {args.batch_size} rows in {time.monotonic() - start:.0f} s; the model is in {out}")
    return run.history


if __name__ == "__main__":
    command_line(main, ARGS)
