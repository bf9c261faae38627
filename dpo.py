"""DPO and its relatives: learn from pairs of a better and a worse answer.

Rafailov et al. 2023, Direct Preference Optimization, arXiv:2305.18290, equation 7:

    L(θ) = −E log σ( β log π(y_w|x)/π_ref(y_w|x) − β log π(y_l|x)/π_ref(y_l|x) )

    python dpo.py                                                               # the demo: offline, under a minute
    python dpo.py --model Qwen/Qwen3-0.6B --data pairs.jsonl --out out/qwen     # your model, your data

As long as the reference π_ref does not change, its log-probs are computed once, before the policy is loaded, and kept in a
file that later runs share: there is never a second model in memory. --ref names the other ways to hold it. The same command
resumes a killed run, at its newest checkpoint.

Data      rows `prompt, chosen, rejected`, or `chosen, rejected` that begin alike, as strings or as chat messages
          ([{"role": ..., "content": ...}, ...]). Strings get the tokenizer's EOS; chats end as their template ends them.
          The rpo losses also want the columns `chosen_reward, rejected_reward`.
Not here  several GPUs, quantized weights, tools and images.
Shapes    B pairs in an optimizer batch; whatever the losses see is (B,). w is y_w, the chosen; l is y_l, the rejected.
Metrics   loss | rewards/chosen, rewards/rejected: β (log π − log π_ref), summed over tokens (averaged, for simpo) | rewards/margins: their
          difference | rewards/accuracies: share of pairs with a positive margin, ties count 1/2 | logps/chosen,
          logps/rejected: log π(y|x) | humanline/unclamped: share of a pair's tokens whose log-ratio it leaves alone | grad_norm
          before clipping | lr | num_tokens so far, a prompt counted once. eval_*: the same, held out; eval_score: mean --score.
          seconds.jsonl: reference, update.
"""
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

DEMO = dict(model="demo/model", data="demo/pairs.jsonl", eval_data="demo/pairs_test.jsonl", score="demo/score.py:success", lr=2e-4)
Loss = Literal["sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
               "apo_down", "discopop", "aot", "aot_unpaired", "rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl", "simpo"]


@dataclass
class Args:
    model: str | None = None  # policy: checkpoint folder or hub name (default: the demo's, with its data)
    data: str | None = None  # pairs: .jsonl .json .csv .parquet, or hub NAME[:SPLIT]
    eval_data: str | None = None  # held-out pairs, in the same formats (default: eval_size prompts of data)
    eval_size: int = 128  # prompts held out of data where there is no eval_data; at most a tenth of them
    out: str = "out/dpo"  # folder for the model, metrics.jsonl, samples.jsonl, seconds.jsonl, checkpoints, args.json, reference_logprobs.pkl

    ref: Literal["cache", "swap", "adapter", "live", "none"] = "cache"  # cache: its log-probs, computed once; swap: its weights, on the CPU; adapter: LoRA's start; live: a second model; none: log π_ref = 0
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

    loss: Loss = "sigmoid"  # sigmoid is DPO; preference_loss is the table
    beta: float = 0.1  # strength of the pull towards the reference; the losses a token want more: sigmoid_norm 5, simpo 2
    label_smoothing: float = 0.0  # share of pairs presumed mislabelled, for sigmoid (cDPO), robust, exo_pair and aot
    simpo_gamma: float = 0.5  # simpo's target margin
    rpo_eta: float = 1.0  # rpo's scale of the data's reward differences
    sft_weight: float = 0.0  # adds this times −log π(chosen), averaged over its tokens

    steps: int | None = None  # optimizer steps (default: as epochs says)
    epochs: float = 1.0  # passes over the data
    batch_size: int = 32  # pairs per optimizer step
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
import torch.nn.functional as F  # noqa: E402

from refcache import (  # noqa: E402
    BadInput, Run, answer, batch_rows, check_args, check_start, command_line, encode, eval_mode, hold_out, load_function, load_references,
    load_tokenizer, log_ratios, lr_factor, micro_batches, parse_pair, reference_logprobs, reference_window, report, save_model, with_defaults)

# ---------------------------------------------------------------------------------------------------------------------
# The loss


class Batch(NamedTuple):
    """What the losses see of B pairs, (B,) each: sums over the tokens of an answer."""
    logp_w: torch.Tensor  # log π(y_w|x)
    logp_l: torch.Tensor
    rho_w: torch.Tensor  # log π(y_w|x) − log π_ref(y_w|x)
    rho_l: torch.Tensor
    len_w: torch.Tensor  # |y_w| in tokens
    len_l: torch.Tensor
    score_w: torch.Tensor  # the data's chosen_reward, else 0
    score_l: torch.Tensor
    unclamped: torch.Tensor | None = None  # share of their tokens that humanline leaves alone


def preference_loss(loss: str, batch: Batch, beta: float, eps=0.0, gamma=0.5, eta=1.0) -> torch.Tensor:
    """The loss of every pair, (B,), float32. eps is label smoothing, gamma SimPO's margin, eta RPO's reward scale."""
    logp_w, logp_l, rho_w, rho_l, len_w, len_l, score_w, score_l, _ = batch
    log_sigma, sigma = F.logsigmoid, torch.sigmoid
    margin = beta * (rho_w - rho_l)  # of the implicit rewards
    delta = eta * (score_w - score_l)  # of the data's rewards

    def cdpo(x): return -(1 - eps) * log_sigma(x) - eps * log_sigma(-x)
    def kl(x, log_q, log_not_q): return sigma(x) * (log_sigma(x) - log_q) + sigma(-x) * (log_sigma(-x) - log_not_q)  # KL(σ(x) || q)
    def sort(x): return x.sort().values

    match loss:
        case "sigmoid": return -(1 - eps) * log_sigma(margin) - eps * log_sigma(-margin)  # DPO, equation 7; eps > 0 is cDPO
        case "hinge": return torch.relu(1 - margin)  # SLiC, arXiv:2305.10425; RSO, arXiv:2309.06657
        case "ipo": return (rho_w / len_w - rho_l / len_l - 1 / (2 * beta)) ** 2  # arXiv:2310.12036 (17), averaged over tokens
        case "sigmoid_norm": return -log_sigma(beta * (rho_w / len_w - rho_l / len_l))  # Tülu 3, arXiv:2411.15124 (6)
        case "robust": return (-(1 - eps) * log_sigma(margin) + eps * log_sigma(-margin)) / (1 - 2 * eps)  # arXiv:2403.00409
        case "exo_pair": return kl(margin, math.log(1 - eps), math.log(eps))  # arXiv:2402.00856 (16)
        case "nca_pair": return -log_sigma(beta * rho_w) - 0.5 * log_sigma(-beta * rho_w) - 0.5 * log_sigma(-beta * rho_l)  # arXiv:2402.05369
        case "bco_pair": return -log_sigma(beta * rho_w) - log_sigma(-beta * rho_l)  # arXiv:2404.04656, without its reward shift
        case "sppo_hard": return (rho_w - 0.5 / beta) ** 2 + (rho_l + 0.5 / beta) ** 2  # arXiv:2405.00675
        case "apo_zero": return 1 - sigma(beta * rho_w) + sigma(beta * rho_l)  # arXiv:2408.06266
        case "apo_down": return sigma(beta * rho_w) + 1 - sigma(margin)  # the same
        case "discopop":  # arXiv:2406.08414; the product with exp(−margin) is taken in logarithms: 0 · inf is no number
            return -sigma(-margin / 0.05) * log_sigma(margin) + torch.exp(log_sigma(margin / 0.05) - margin)
        case "aot": return cdpo(beta * (sort(logp_w - logp_l) - sort((logp_w - rho_w) - (logp_l - rho_l))))  # arXiv:2406.05882
        case "aot_unpaired": return cdpo(beta * (sort(rho_w) - sort(rho_l)))  # the same: quantiles of the whole batch
        case "rpo_sq": return (margin - delta) ** 2  # RPO as NeMo-Aligner has it, after Nemotron-4, arXiv:2406.11704
        case "rpo_bwd_kl": return kl(delta, log_sigma(margin), log_sigma(-margin))
        case "rpo_fwd_kl": return kl(margin, log_sigma(delta), log_sigma(-delta))
        case "simpo": return -log_sigma(beta * (logp_w / len_w - logp_l / len_l) - gamma)  # arXiv:2405.14734 (6): no reference
    raise BadInput(f"there is no loss {loss!r}")


def objective(batch: Batch, args: Args) -> torch.Tensor:  # (B,)
    losses = preference_loss(args.loss, batch, args.beta, args.label_smoothing, args.simpo_gamma, args.rpo_eta)
    return losses - args.sft_weight * batch.logp_w / batch.len_w


def metrics(batch: Batch, args: Args) -> dict[str, float]:
    per_token = args.loss == "simpo"  # its paper's reward
    reward_w = args.beta * batch.rho_w / (batch.len_w if per_token else 1)
    reward_l = args.beta * batch.rho_l / (batch.len_l if per_token else 1)
    margin = reward_w - reward_l
    accuracy = torch.where(margin.abs() < 1e-5, 0.5, (margin > 0).float())  # a tie, to rounding, counts one half
    values = {"loss": objective(batch, args), "rewards/chosen": reward_w, "rewards/rejected": reward_l, "rewards/margins": margin,
              "rewards/accuracies": accuracy, "logps/chosen": batch.logp_w, "logps/rejected": batch.logp_l}
    values |= {"humanline/unclamped": batch.unclamped} if args.humanline else {}
    return {name: value.mean().item() for name, value in values.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Data


class Row(NamedTuple):
    prompt: tuple[int, ...]  # token ids: with an answer's, a key of the cache
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    score_w: float
    score_l: float
    row: dict  # as it stands in the file


def load_rows(source: str, tokenizer, max_length: int, args: Args) -> list[Row]:
    rows = []
    for prompt, (chosen, rejected), row, where in encode(tokenizer, source, parse_pair, max_length, args.truncate):
        scores = [0.0, 0.0]
        if args.loss.startswith("rpo"):
            try:
                scores = [float(row["chosen_reward"]), float(row["rejected_reward"])]
            except (KeyError, TypeError, ValueError, OverflowError):
                scores = [math.nan]
            if not all(map(math.isfinite, scores)):
                raise BadInput(f"{where}: --loss {args.loss} needs numbers in the columns chosen_reward and rejected_reward")
        rows.append(Row(prompt, chosen, rejected, *scores, row))
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Training


def groups(rows: list[Row]) -> list:
    return [(row.prompt, [row.chosen, row.rejected]) for row in rows]


def measure(policy, rows: list[Row], known, args: Args) -> Batch:
    """What the losses see of some rows. `known` maps (prompt, answer) to the reference's log-probs."""
    logp, rho, unclamped = (x.view(-1, 2).unbind(1) for x in log_ratios(policy, groups(rows), known, args))  # (B,) of y_w and y_l each
    rest = torch.tensor([[len(row.chosen), len(row.rejected), row.score_w, row.score_l] for row in rows], device=logp[0].device)
    rest = rest.float().unbind(1)
    return Batch(*logp, *rho, *rest, sum(unclamped) / (rest[0] + rest[1]))


def backward(policy, rows: list[Row], known, args: Args) -> Batch:
    """The gradient of the batch's mean loss, one micro-batch after the other."""
    micros, others = micro_batches(policy, groups(rows), args.tokens_per_forward), None
    if args.loss.startswith("aot") and len(micros) > 1:  # one loss of the whole batch: the other micro-batches enter as constants
        with torch.no_grad():
            others = [measure(policy, [rows[i] for i in micro], known, args) for micro in micros]
    seen = []
    for n, micro in enumerate(micros):
        batch = measure(policy, [rows[i] for i in micro], known, args)
        whole = Batch(*map(torch.cat, zip(*others[:n], batch, *others[n + 1:]))) if others else batch
        (objective(whole, args).sum() / len(rows)).backward()
        seen.append(Batch(*(x.detach() for x in batch)))
    return Batch(*map(torch.cat, zip(*seen)))


@torch.no_grad()
def evaluate(policy, rows: list[Row], reference, args: Args) -> dict[str, float]:
    if not rows:
        return {}
    known = reference_logprobs(reference, groups(rows), args)
    with eval_mode(policy):
        return {f"eval_{name}": value for name, value in metrics(measure(policy, rows, known, args), args).items()}


def settle(args: Args) -> Args:
    """Fills in the defaults that depend on others, and refuses what cannot be meant."""
    args = with_defaults(replace(args, ref="none") if args.loss == "simpo" and args.ref == "cache" else args, DEMO)
    smooths = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")
    check_args(
        args, "beta",
        (args.loss == "simpo" and args.ref != "none", f"--loss simpo has no reference: leave out --ref {args.ref}"),
        (args.humanline and args.loss == "aot", "--loss aot compares log-probs, not log-ratios, so --humanline has nothing to clamp: use aot_unpaired"),
        (args.label_smoothing and args.loss not in smooths, f"--loss {args.loss} has no label smoothing: leave out --label_smoothing"),
        (args.simpo_gamma != Args.simpo_gamma and args.loss != "simpo", f"--loss {args.loss} has no margin: leave out --simpo_gamma"),
        (args.rpo_eta != Args.rpo_eta and not args.loss.startswith("rpo"), f"--loss {args.loss} reads no rewards: leave out --rpo_eta"),
        (not math.isfinite(args.simpo_gamma + args.rpo_eta) or not 0 <= args.sft_weight < math.inf,
         "--simpo_gamma and --rpo_eta must be numbers, and --sft_weight one that is not negative"),
        (not 0 <= args.label_smoothing < 0.5, "--label_smoothing must be at least 0 and less than 0.5"),
        (args.loss == "exo_pair" and not args.label_smoothing, "--loss exo_pair needs --label_smoothing above 0, such as 0.001"))
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
    if args.show_data:
        marked = (" ".join(f"[{token}]" for token in tokenizer.batch_decode([[i] for i in ids])) for ids in train[0][1:3])
        print(tokenizer.decode(train[0].prompt), *marked, sep="\n--> ")
        return []
    args = replace(args, batch_size=min(args.batch_size, len(train)))
    steps = args.steps or math.ceil(args.epochs * len(train) / args.batch_size)
    run = Run(args, train + held)
    if run.finished:
        return run.history

    policy, reference = load_references(run, tokenizer, groups(train + held), device)
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
            known = reference_logprobs(reference, groups([row for s in window for row in batch_of(s)]), args)
        run.lap("reference")
        for group in optimizer.param_groups:
            group["lr"] = args.lr * lr_factor(step, steps, args.warmup, args.schedule)
        batch = backward(policy, rows, known, args)
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).item()
        tokens += sum(len(row.prompt) + len(row.chosen) + len(row.rejected) for row in rows)
        values = {"step": step, **metrics(batch, args), "grad_norm": grad_norm, "lr": group["lr"], "num_tokens": tokens}
        if step == 1:
            check_start(policy, groups(rows), known, f"margin {values['rewards/margins']:.1e}, loss {values['loss']:.4f}" +
                        (f" (ln 2 = {math.log(2):.4f})" if args.loss == "sigmoid" and not args.sft_weight else ""), args)
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
