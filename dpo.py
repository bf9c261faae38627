"""DPO and its relatives: learn from pairs of a better and a worse answer.

Rafailov et al. 2023, Direct Preference Optimization, arXiv:2305.18290, equation 7:

    L(θ) = −E log σ( β log π(y_w|x)/π_ref(y_w|x) − β log π(y_l|x)/π_ref(y_l|x) )

    python dpo.py                                                               # the demo: offline, under a minute
    python dpo.py --model Qwen/Qwen3-0.6B --data pairs.jsonl --out out/qwen     # your model, your data

The reference π_ref never changes, so its log-probs are computed once, before the policy is loaded, and kept in a file
that later runs share. There is never a second model in memory.

Data      rows `prompt, chosen, rejected`, or `chosen, rejected` that begin alike, as strings or as chat messages
          ([{"role": ..., "content": ...}, ...]). Strings get the tokenizer's EOS; chats end as their template ends them.
          The rpo losses also want the columns `chosen_reward, rejected_reward`.
Not here  several GPUs, LoRA, a moving reference, resuming.
Shapes    B pairs in an optimizer batch; whatever the losses see is (B,). w is y_w, the chosen; l is y_l, the rejected.
Metrics   loss | rewards/chosen, rewards/rejected: β (log π − log π_ref), summed over tokens (averaged, for simpo) | rewards/margins: their
          difference | rewards/accuracies: share of pairs with a positive margin, ties count 1/2 | logps/chosen,
          logps/rejected: log π(y|x) | grad_norm before clipping | lr | num_tokens so far, a prompt counted once. eval_*: the same, held out.
"""
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
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
    out: str = "out/dpo"  # folder for the model, metrics.jsonl, args.json and reference_logprobs.pkl

    ref: Literal["cache", "none"] = "cache"  # cache: log-probs computed once, before training; none: no reference, log π_ref = 0
    ref_model: str | None = None  # reference: checkpoint folder or hub name (default: the model itself)
    ref_cache: str | None = None  # file of reference log-probs, completed and shared (default: inside out)

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

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the forward (auto: bfloat16 on CUDA); weights and loss are float32
    tokens_per_forward: int = 16384  # memory and speed only, never the result
    gradient_checkpointing: bool = False  # memory and speed only, never the result
    seed: int = 0  # of data order, held-out split and samples

    eval_every: int | None = None  # steps between evaluations (default: before and after only)
    samples: int = 64  # held-out prompts answered before and after
    max_new_tokens: int = 128  # of such an answer
    score: str | None = None  # FILE.py:FUNCTION(prompts, completions, **columns) -> floats, for these answers
    show_data: bool = False  # print one example with its trained tokens marked, and stop
    tensorboard: bool = False  # also write TensorBoard events


if __name__ == "__main__":
    ARGS = tyro.cli(Args, description=__doc__.split("\n")[0], use_underscores=True)

import numpy as np  # noqa: E402  the slow imports come after the command line, so that --help answers at once
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from tqdm import tqdm  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

from refcache import (  # noqa: E402
    BadInput, Diverged, ReferenceCache, call_scorer, check_vocabulary, checkpoint_digest, completion_logprobs, context_length,
    encode, eval_mode, load_function, load_model, load_tokenizer, micro_batches, parse_pair, peak_memory, save_model,
    share_prompts, tokenizer_digest, write_whole)

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


def preference_loss(loss: str, batch: Batch, beta: float, eps=0.0, gamma=0.5, eta=1.0) -> torch.Tensor:
    """The loss of every pair, (B,), float32. eps is label smoothing, gamma SimPO's margin, eta RPO's reward scale."""
    logp_w, logp_l, rho_w, rho_l, len_w, len_l, score_w, score_l = batch
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


def hold_out(rows: list, size: int, seed: int) -> tuple[list, list]:
    """Splits off the rows of `size` prompts, at most a tenth of them; all rows of a prompt stay on one side."""
    prompts = sorted({row.prompt for row in rows})
    held = {prompts[i] for i in np.random.default_rng(seed).permutation(len(prompts))[:min(size, len(prompts) // 10)]}
    return [row for row in rows if row.prompt not in held], [row for row in rows if row.prompt in held]


def batch_rows(step: int, n: int, batch_size: int, seed: int) -> list[int]:
    """The rows of a step (from 1): epoch after epoch of permutations, each a function of (seed, epoch) alone."""
    places = range((step - 1) * batch_size, step * batch_size)
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(n) for epoch in {place // n for place in places}}
    return [int(orders[place // n][place % n]) for place in places]


def lr_factor(step: int, steps: int, warmup: float, schedule: str) -> float:
    """Share of the peak learning rate at a step (from 1): linear warmup, then constant, or falling so that step steps + 1 had 0."""
    if step <= (rise := round(warmup * steps)):
        return step / rise
    left = (steps - step + 1) / (steps - rise)  # 1 .. 1 / (steps − rise)
    return {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[schedule]


@torch.no_grad()
def sample(model, tokenizer, prompts: list[tuple], max_new_tokens: int, seed: int) -> list[str]:
    """One answer to each prompt from the model's own distribution: temperature 1, nothing cut off, whatever its config says."""
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens,
                              eos_token_id=sorted(ends) or None, pad_token_id=tokenizer.pad_token_id or 0)
    longest, answers, own = max(map(len, prompts), default=0), [], model.generation_config
    model.generation_config = GenerationConfig()  # or generate() would take from it what `config` leaves open
    with torch.random.fork_rng(), eval_mode(model):
        torch.manual_seed(seed)
        for at in tqdm(range(0, len(prompts), 32), desc="sample", leave=False):
            ids = torch.tensor([[0] * (longest - len(p)) + [*p] for p in prompts[at:at + 32]], device=model.device)  # left-padded
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts[at:at + 32]], device=model.device)
            new = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, longest:]
            answers += tokenizer.batch_decode(new, skip_special_tokens=True)
    model.generation_config = own
    return answers


# ---------------------------------------------------------------------------------------------------------------------
# Training


class Log:
    """metrics.jsonl, one JSON object a step, and TensorBoard."""

    def __init__(self, out: Path, args: Args):
        self.out, self.args, self.history, self.board, self.file = out, args, [], None, None
        try:
            out.mkdir(parents=True, exist_ok=True)
            write_whole(out / ".writable", b"")
            (out / ".writable").unlink()
            if args.tensorboard:
                from torch.utils.tensorboard import SummaryWriter
                self.board = SummaryWriter(out)
        except OSError as error:
            raise BadInput(f"cannot write into --out {out}: {error}") from None
        except ImportError:
            raise BadInput("--tensorboard needs `pip install tensorboard`") from None

    def write(self, values: dict):
        if not self.file:  # only now: a run that is refused before its first line leaves the last one's files alone
            write_whole(self.out / "args.json", json.dumps(asdict(self.args), indent=2).encode())
            self.file = open(self.out / "metrics.jsonl", "w")
        self.history.append(values)
        print(json.dumps(values), file=self.file, flush=True)
        if self.board:
            for name, value in values.items():
                self.board.add_scalar(name, value, values["step"])


def groups(rows: list[Row]) -> list:
    return [(row.prompt, [row.chosen, row.rejected]) for row in rows]


def measure(policy, rows: list[Row], reference: ReferenceCache | None, args: Args) -> tuple[Batch, torch.Tensor]:
    """What the losses see of some rows, and how far each token's log-prob is from the reference's."""
    with torch.autocast(policy.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        logps = completion_logprobs(policy, groups(rows), args.tokens_per_forward)
    sums, gaps = [], []
    for row, (w, l) in zip(rows, logps):
        ref_w, ref_l = (torch.tensor(reference[row.prompt, y], device=w.device) if reference is not None else torch.zeros(())
                        for y in (row.chosen, row.rejected))
        sums.append(torch.stack([w.sum(), l.sum(), (w - ref_w).sum(), (l - ref_l).sum()]))
        gaps += [(w - ref_w).detach().abs(), (l - ref_l).detach().abs()]
    known = torch.tensor([[len(row.chosen), len(row.rejected), row.score_w, row.score_l] for row in rows], device=w.device)
    return Batch(*torch.cat([torch.stack(sums), known.float()], dim=1).unbind(1)), torch.cat(gaps)


def backward(policy, rows: list[Row], reference: ReferenceCache | None, args: Args) -> tuple[Batch, torch.Tensor]:
    """The gradient of the batch's mean loss, one micro-batch after the other; returns what `measure` does."""
    micros, others = micro_batches(policy, groups(rows), args.tokens_per_forward), None
    if args.loss.startswith("aot") and len(micros) > 1:  # one loss of the whole batch: the other micro-batches enter as constants
        with torch.no_grad():
            others = [measure(policy, [rows[i] for i in micro], reference, args)[0] for micro in micros]
    seen, gaps = [], []
    for n, micro in enumerate(micros):
        batch, gap = measure(policy, [rows[i] for i in micro], reference, args)
        whole = Batch(*map(torch.cat, zip(*others[:n], batch, *others[n + 1:]))) if others else batch
        (objective(whole, args).sum() / len(rows)).backward()
        seen.append(Batch(*(x.detach() for x in batch)))
        gaps.append(gap)
    return Batch(*map(torch.cat, zip(*seen))), torch.cat(gaps)


@torch.no_grad()
def evaluate(policy, rows: list[Row], reference: ReferenceCache | None, args: Args) -> dict[str, float]:
    if not rows:
        return {}
    batches = micro_batches(policy, groups(rows), args.tokens_per_forward)
    parts = [measure(policy, [rows[i] for i in batch], reference, args)[0] for batch in tqdm(batches, desc="evaluate", leave=False)]
    return {f"eval_{name}": value for name, value in metrics(Batch(*map(torch.cat, zip(*parts))), args).items()}


def answer(policy, tokenizer, held: list[Row], score, args: Args) -> tuple[list[str], dict[str, float]]:
    """Answers to held-out prompts, and their mean score."""
    room = context_length(policy.config) - args.max_new_tokens  # for a prompt
    asked = list({row.prompt: row for row in held if len(row.prompt) <= room}.values())[:args.samples]
    with torch.autocast(policy.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        texts = sample(policy, tokenizer, [row.prompt for row in asked], args.max_new_tokens, args.seed)
    if not score or not asked:
        return texts, {}
    prompts = [parse_pair(row.row, "")[0] for row in asked]
    completions = [text if isinstance(prompt, str) else [{"role": "assistant", "content": text}] for prompt, text in zip(prompts, texts)]
    columns = {name: [row.row.get(name) for row in asked] for name in asked[0].row if name not in ("prompt", "prompts", "completions")}
    scores = [x for x in call_scorer(score, args.score, prompts, completions, columns) if x is not None]
    return texts, {"eval_score": float(np.mean(scores))} if scores else {}


def settle(args: Args) -> Args:
    """Fills in the defaults that depend on others, and refuses what cannot be meant."""
    if args.model is None and args.data is None:
        args = replace(args, **{name: value for name, value in DEMO.items() if getattr(args, name) is None})
    dtype = args.dtype if args.dtype != "auto" else "bfloat16" if torch.cuda.is_available() else "float32"
    smooths, no_reference = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"), args.ref == "none" or args.loss == "simpo"
    positive = ("batch_size", "tokens_per_forward", "max_length", "max_new_tokens", "steps", "epochs", "beta", "eval_every", "max_grad_norm")
    for wrong, sentence in (
        (not (args.model and args.data), "--model and --data go together: give both, or neither for the demo"),
        (Path(args.out).resolve() in (Path(args.model or "").resolve(), Path(args.ref_model or "").resolve()),
         "--out is the folder of --model or --ref_model: name another"),
        (no_reference and (args.ref_model or args.ref_cache), "there is no reference here: leave out --ref_model and --ref_cache"),
        (args.label_smoothing and args.loss not in smooths, f"--loss {args.loss} has no label smoothing: leave out --label_smoothing"),
        (args.simpo_gamma != Args.simpo_gamma and args.loss != "simpo", f"--loss {args.loss} has no margin: leave out --simpo_gamma"),
        (args.rpo_eta != Args.rpo_eta and not args.loss.startswith("rpo"), f"--loss {args.loss} reads no rewards: leave out --rpo_eta"),
        (not math.isfinite(args.simpo_gamma + args.rpo_eta) or not 0 <= args.sft_weight < math.inf,
         "--simpo_gamma and --rpo_eta must be numbers, and --sft_weight one that is not negative"),
        (not 0 <= args.label_smoothing < 0.5, "--label_smoothing must be at least 0 and less than 0.5"),
        (args.loss == "exo_pair" and not args.label_smoothing, "--loss exo_pair needs --label_smoothing above 0, such as 0.001"),
        (not 0 <= (args.lr or 0) < math.inf or not 0 <= args.weight_decay < math.inf or min(args.samples, args.eval_size) < 0,
         "--lr, --weight_decay, --samples and --eval_size must be numbers, and not negative"),
        (not 0 <= args.warmup <= 1, "--warmup is a share of the steps: between 0 and 1"),
        (not 0 <= args.seed < 2**63, "--seed must be between 0 and 2^63"),
        *((getattr(args, name) is not None and not 0 < getattr(args, name) < math.inf, f"--{name} must be above 0") for name in positive),
    ):
        if wrong:
            raise BadInput(sentence)
    return replace(args, dtype=dtype, lr=1e-6 if args.lr is None else args.lr, ref="none" if no_reference else args.ref,
                   ref_model=args.model if Path(args.ref_model or args.model) == Path(args.model) else args.ref_model, ref_cache=args.ref_cache or f"{args.out}/reference_logprobs.pkl")


def load_data(args: Args, tokenizer, max_length: int) -> tuple[list[Row], list[Row]]:
    train = load_rows(args.data, tokenizer, max_length, args)
    if args.eval_data:
        return train, load_rows(args.eval_data, tokenizer, max_length, args)
    return hold_out(train, args.eval_size, args.seed)


def load_reference(args: Args, tokenizer, asked: list, device: str) -> ReferenceCache:
    """The reference's log-probs of all groups: from the file, and for the rest from the model, which is gone afterwards."""
    if args.ref_model != args.model:
        check_vocabulary(tokenizer, args.ref_model)
    reference = ReferenceCache(reference=checkpoint_digest(args.ref_model), tokenizer=tokenizer_digest(tokenizer), dtype=args.dtype)
    try:
        Path(args.ref_cache).parent.mkdir(parents=True, exist_ok=True)
        if Path(args.ref_cache).exists():
            reference.load(args.ref_cache)
        reference.save(args.ref_cache)  # at the door, not after the pass: can it be written?
    except OSError as error:
        raise BadInput(f"cannot read and write --ref_cache {args.ref_cache}: {error}") from None
    with torch.autocast(device, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        scored = reference.fill(lambda: load_model(args.ref_model, device), asked, args.tokens_per_forward, args.ref_cache)
    print(f"reference: {scored} answers scored, the other {len(reference) - scored} known from {args.ref_cache}")
    return reference


def check_start(gaps: torch.Tensor, values: str, args: Args):
    """Before its first update the policy is the reference: they must agree, to rounding."""
    print(f"step 0: policy and reference differ by at most {gaps.max():.1e} nats a token; {values}")
    if not gaps.mean() < {"float32": 1e-4, "bfloat16": 3e-2}[args.dtype]:
        raise Diverged(f"step 0: policy and reference are the same model, but differ by {gaps.mean():.2g} nats a token on average: "
                       f"{args.ref_cache} does not hold what it says (delete it), or this model's forward is not deterministic")


def report(before: dict, after: dict, tokenizer, held: list[Row], answers: tuple[list[str], list[str]]):
    """What changed, on held-out data."""
    for prompt, old, new in list(zip(dict.fromkeys(row.prompt for row in held), *answers))[:3]:
        print(f"\n{tokenizer.decode(prompt, skip_special_tokens=True).strip()}\n  before  {old}\n  after   {new}")
    print(f"\n{'held out':28}{'before':>8}{'after':>8}")
    for name in ("eval_loss", "eval_kl", "eval_rewards/margins", "eval_rewards/accuracies", "eval_score"):
        if name in before:
            print(f"{name:28}{before[name]:8.3f}{after[name]:8.3f}")


def main(args: Args) -> list[dict]:
    """Trains, and returns what metrics.jsonl holds: a dict a step."""
    args = settle(args)
    device, out = "cuda" if torch.cuda.is_available() else "cpu", Path(args.out)
    torch.manual_seed(args.seed)
    score = load_function(args.score) if args.score else None
    tokenizer, context = load_tokenizer(args.model)
    train, held = load_data(args, tokenizer, min(args.max_length, context))
    if args.show_data:
        marked = (" ".join(f"[{token}]" for token in tokenizer.batch_decode([[i] for i in ids])) for ids in train[0][1:3])
        print(tokenizer.decode(train[0].prompt), *marked, sep="\n--> ")
        return []
    args = replace(args, batch_size=min(args.batch_size, len(train)))
    log = Log(out, args)

    # the reference comes first and is gone when the policy comes: there are never two models in memory
    reference = load_reference(args, tokenizer, groups(train + held), device) if args.ref == "cache" else None
    policy = load_model(args.model, device, args.gradient_checkpointing)
    why_not = share_prompts(policy)
    print(f"policy: {sum(p.numel() for p in policy.parameters()):,} parameters on {device}, {args.dtype} forwards, " +
          (f"padded rows because {why_not}" if why_not else "every prompt encoded once, no padding"))
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=args.weight_decay, fused=device == "cuda")
    steps = args.steps or math.ceil(args.epochs * len(train) / args.batch_size)
    answers, scored = answer(policy, tokenizer, held, score, args)
    before = evaluate(policy, held, reference, args) | scored
    log.write({"step": 0, **before})

    tokens, start, bar = 0, time.monotonic(), tqdm(range(1, steps + 1), desc="train")
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * lr_factor(step, steps, args.warmup, args.schedule)
        rows = [train[i] for i in batch_rows(step, len(train), args.batch_size, args.seed)]
        batch, gaps = backward(policy, rows, reference, args)
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).item()
        tokens += sum(len(row.prompt) + len(row.chosen) + len(row.rejected) for row in rows)
        values = {"step": step, **metrics(batch, args), "grad_norm": grad_norm, "lr": group["lr"], "num_tokens": tokens}
        if step == 1 and args.ref == "cache" and args.ref_model == args.model:
            check_start(gaps, f"margin {values['rewards/margins']:.1e}, loss {values['loss']:.4f}" +
                        (f" (ln 2 = {math.log(2):.4f})" if args.loss == "sigmoid" and not args.sft_weight else ""), args)
        if not math.isfinite(values["loss"] + grad_norm):
            raise Diverged(f"step {step}: the loss is {values['loss']} and the gradient's norm {grad_norm}; {out} keeps what it had: "
                           "lower --lr, or look at this step's rows")
        optimizer.step()
        optimizer.zero_grad()
        if step == steps or args.eval_every and step % args.eval_every == 0:
            values |= evaluate(policy, held, reference, args)
        if not math.isfinite(values.get("eval_loss", 0)):
            raise Diverged(f"step {step}: the loss of the held-out rows is {values['eval_loss']}; {out} keeps what it had: lower --lr")
        if step == steps:
            new_answers, scored = answer(policy, tokenizer, held, score, args)
            values |= scored
        log.write(values)
        bar.set_postfix_str(f"loss {values['loss']:.3f}, accuracy {values['rewards/accuracies']:.2f}, "
                            f"{tokens / (time.monotonic() - start):,.0f} tokens/s, {peak_memory()}")

    save_model(policy, tokenizer, out)
    report(before, values, tokenizer, held, (answers, new_answers))
    print(f"\n{steps} steps of {args.batch_size} rows, trained and evaluated in {time.monotonic() - start:.0f} s; the model is in {out}")
    return log.history


if __name__ == "__main__":
    try:
        main(ARGS)
    except (BadInput, Diverged) as error:
        print(f"dpo.py: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, BadInput) else 1)
