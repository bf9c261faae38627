"""KTO: learn from answers that someone found good or bad, one at a time.

Ethayarajh et al. 2024, KTO: Model Alignment as Prospect Theoretic Optimization, arXiv:2402.01306, equation 7:

    ρ = log π(y|x) − log π_ref(y|x)          z = max(0, mean over the batch of log π(y'|x) − log π_ref(y'|x))
    L(θ) = E  λ_D (1 − σ(β (ρ − z)))   if y is desirable,      λ_U (1 − σ(β (z − ρ)))   if not

    python kto.py                                                               # the demo: offline, under a minute
    python kto.py --model Qwen/Qwen3-0.6B --data feedback.jsonl --out out/qwen  # your model, your data

z estimates KL(π || π_ref); no gradient flows through it. y' is the answer to another prompt; here it is drawn once for every
row, where the paper pairs the rows of each batch anew, so that its reference log-probs, too, are known before training.

Data      rows `prompt, completion, label` (true or false, 1 or 0; HALOs' `output` is read as completion), or pairs
          `prompt, chosen, rejected`, which give one row of each kind; strings or chat messages. Strings get
          the tokenizer's EOS; chats end as their template ends them.
Not here  several GPUs, LoRA, a moving reference, resuming.
Shapes    B rows in an optimizer batch; whatever the losses see is (B,).
Metrics   loss | kl: z | rewards/chosen, rewards/rejected: β ρ of the desirable and of the others | rewards/margins: their
          difference | rewards/accuracies: share of rows whose ρ has the sign of their label, ties count 1/2 |
          logps/chosen, logps/rejected: log π(y|x) | count/chosen, count/rejected: rows in the batch | grad_norm before
          clipping | lr | num_tokens so far, a prompt counted once. A batch of one kind has no mean of the other. eval_*: the same, held out.
"""
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
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
    out: str = "out/kto"  # folder for the model, metrics.jsonl, args.json and reference_logprobs.pkl

    ref_model: str | None = None  # reference: checkpoint folder or hub name (default: the model itself)
    ref_cache: str | None = None  # file of reference log-probs, completed and shared (default: inside out)

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
from tqdm import tqdm  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

from refcache import (  # noqa: E402
    BadInput, Diverged, ReferenceCache, call_scorer, check_vocabulary, checkpoint_digest, columns, completion_logprobs, context_length,
    encode, eval_mode, load_function, load_model, load_tokenizer, micro_batches, parse_pair, peak_memory, save_model,
    share_prompts, text_of, tokenizer_digest, write_whole)

# ---------------------------------------------------------------------------------------------------------------------
# The loss


class Batch(NamedTuple):
    """What the losses see of B rows, (B,) each: sums over the tokens of an answer."""
    logp: torch.Tensor  # log π(y|x)
    rho: torch.Tensor  # log π(y|x) − log π_ref(y|x)
    label: torch.Tensor  # bool: desirable


def feedback_loss(loss: str, batch: Batch, z: torch.Tensor, beta: float, desirable=1.0, undesirable=1.0) -> torch.Tensor:
    """The loss of every row, (B,), float32. z is a number without gradient, in nats."""
    _, rho, label = batch
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
    rng = np.random.default_rng(seed)
    places: dict = {}
    for i in rng.permutation(len(prompts)).tolist():
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


def groups(rows: list[Row], others: bool = False) -> list:
    return [(row.prompt, [row.other if others else row.completion]) for row in rows]


def log_ratios(policy, asked: list, reference: ReferenceCache, args: Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of every group's one answer log π(y|x) and log π(y|x) − log π_ref(y|x), (B,) each; and every token's part of the second."""
    with torch.autocast(policy.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        logps = [logp for [logp] in completion_logprobs(policy, asked, args.tokens_per_forward)]
    gaps = [logp - torch.tensor(reference[prompt, y], device=logp.device) for logp, (prompt, [y]) in zip(logps, asked)]
    return torch.stack([logp.sum() for logp in logps]), torch.stack([gap.sum() for gap in gaps]), torch.cat(gaps).detach()


def measure(policy, rows: list[Row], reference: ReferenceCache, args: Args) -> tuple[Batch, torch.Tensor]:
    """What the losses see of some rows, and how far each token's log-prob is from the reference's."""
    logp, rho, gaps = log_ratios(policy, groups(rows), reference, args)
    return Batch(logp, rho, torch.tensor([row.label for row in rows], device=logp.device)), gaps.abs()


@torch.no_grad()
def estimate_kl(policy, rows: list[Row], reference: ReferenceCache, args: Args) -> torch.Tensor:
    """z of the whole optimizer batch: clamped once, not multiplied by beta."""
    if args.loss != "kto":
        return torch.zeros((), device=policy.device)
    return log_ratios(policy, groups(rows, others=True), reference, args)[1].mean().clamp(min=0)


def backward(policy, rows: list[Row], reference: ReferenceCache, args: Args) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """The gradient of the batch's mean loss, one micro-batch after the other; returns what `measure` does, and z."""
    z, seen, gaps = estimate_kl(policy, rows, reference, args), [], []
    for micro in micro_batches(policy, groups(rows), args.tokens_per_forward):
        batch, gap = measure(policy, [rows[i] for i in micro], reference, args)
        (objective(batch, z, args).sum() / len(rows)).backward()
        seen.append(Batch(*(x.detach() for x in batch)))
        gaps.append(gap)
    return Batch(*map(torch.cat, zip(*seen))), torch.cat(gaps), z


@torch.no_grad()
def evaluate(policy, rows: list[Row], reference: ReferenceCache, args: Args) -> dict[str, float]:
    if not rows:
        return {}
    batches = micro_batches(policy, groups(rows), args.tokens_per_forward)
    parts = [measure(policy, [rows[i] for i in batch], reference, args)[0] for batch in tqdm(batches, desc="evaluate", leave=False)]
    z = estimate_kl(policy, rows, reference, args)
    return {f"eval_{name}": value for name, value in metrics(Batch(*map(torch.cat, zip(*parts))), z, args).items()}


def answer(policy, tokenizer, held: list[Row], score, args: Args) -> tuple[list[str], dict[str, float]]:
    """Answers to held-out prompts, and their mean score."""
    room = context_length(policy.config) - args.max_new_tokens  # for a prompt
    asked = list({row.prompt: row for row in held if len(row.prompt) <= room}.values())[:args.samples]
    with torch.autocast(policy.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        texts = sample(policy, tokenizer, [row.prompt for row in asked], args.max_new_tokens, args.seed)
    if not score or not asked:
        return texts, {}
    prompts = [parse_row(row.row, "")[0] for row in asked]
    completions = [text if isinstance(prompt, str) else [{"role": "assistant", "content": text}] for prompt, text in zip(prompts, texts)]
    columns = {name: [row.row.get(name) for row in asked] for name in asked[0].row if name not in ("prompt", "prompts", "completions")}
    scores = [x for x in call_scorer(score, args.score, prompts, completions, columns) if x is not None]
    return texts, {"eval_score": float(np.mean(scores))} if scores else {}


def settle(args: Args) -> Args:
    """Fills in the defaults that depend on others, and refuses what cannot be meant."""
    if args.model is None and args.data is None:
        args = replace(args, **{name: value for name, value in DEMO.items() if getattr(args, name) is None})
    dtype = args.dtype if args.dtype != "auto" else "bfloat16" if torch.cuda.is_available() else "float32"
    positive = ("batch_size", "tokens_per_forward", "max_length", "max_new_tokens", "steps", "epochs", "beta", "eval_every", "max_grad_norm", "desirable_weight",
              "undesirable_weight")
    for wrong, sentence in (
        (not (args.model and args.data), "--model and --data go together: give both, or neither for the demo"),
        (Path(args.out).resolve() in (Path(args.model or "").resolve(), Path(args.ref_model or "").resolve()),
         "--out is the folder of --model or --ref_model: name another"),
        (args.loss != "kto" and (args.balance or (args.desirable_weight, args.undesirable_weight) != (1, 1)),
         f"--loss {args.loss} has no weights: leave out --balance, --desirable_weight and --undesirable_weight"),
        (args.balance and (args.desirable_weight, args.undesirable_weight) != (1, 1), "--balance sets the weights: leave them out"),
        (not 0 <= (args.lr or 0) < math.inf or not 0 <= args.weight_decay < math.inf or min(args.samples, args.eval_size) < 0,
         "--lr, --weight_decay, --samples and --eval_size must be numbers, and not negative"),
        (not 0 <= args.warmup <= 1, "--warmup is a share of the steps: between 0 and 1"),
        (not 0 <= args.seed < 2**63, "--seed must be between 0 and 2^63"),
        *((getattr(args, name) is not None and not 0 < getattr(args, name) < math.inf, f"--{name} must be above 0") for name in positive),
    ):
        if wrong:
            raise BadInput(sentence)
    return replace(args, dtype=dtype, lr=1e-6 if args.lr is None else args.lr, ref_model=args.model if Path(args.ref_model or args.model) == Path(args.model) else args.ref_model,
                   ref_cache=args.ref_cache or f"{args.out}/reference_logprobs.pkl")


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
    train, held = load_data(args, tokenizer, max_length := min(args.max_length, context))
    args = weigh(train, args)
    if args.show_data:
        marked = (" ".join(f"[{token}]" for token in tokenizer.batch_decode([[i] for i in ids])) for ids in train[0][1:2])
        print(tokenizer.decode(train[0].prompt), *marked, sep="\n--> ")
        return []
    if args.loss == "kto":
        train, held = draw_others(train, held, max_length, args.seed)
    args = replace(args, batch_size=min(args.batch_size, len(train)))
    log = Log(out, args)

    # the reference comes first and is gone when the policy comes: there are never two models in memory
    asked = groups(train + held) + (groups(train + held, others=True) if args.loss == "kto" else [])
    reference = load_reference(args, tokenizer, asked, device)
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
        batch, gaps, z = backward(policy, rows, reference, args)
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).item()
        tokens += sum(len(row.prompt) + len(row.completion) for row in rows)
        values = {"step": step, **metrics(batch, z, args), "grad_norm": grad_norm, "lr": group["lr"], "num_tokens": tokens}
        if step == 1 and args.ref_model == args.model:
            check_start(gaps, f"KL estimate {z:.1e}, loss {values['loss']:.4f}", args)
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
        print(f"kto.py: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, BadInput) else 1)
