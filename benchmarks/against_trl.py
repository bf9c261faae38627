"""dpo.py, kto.py and rloo.py against TRL's trainers: seconds per step, peak memory, and losses.

    pip install trl==1.16.0 peft datasets                                   # needed only here
    python tools/prepare.py --data hh_train.jsonl --out out/hh --chat       # Anthropic's HH, as chats
    python benchmarks/against_trl.py --model out/smollm2 --data out/hh/train.jsonl  # demo/get_model.py
    python benchmarks/against_trl.py                                        # random models, invented rows
    python benchmarks/against_trl.py --baseline ../older --rounds 9         # against another checkout
    python benchmarks/against_trl.py --works dpo kto --steps 30 --rounds 1  # the losses of 30 steps
    python benchmarks/against_trl.py --shapes long --works long --steps 1 --rounds 1  # memory of RLOO
    python benchmarks/against_trl.py --tiny                                 # does it run?

reference   log-probs of the frozen model. refcache: ReferenceCache.compute. trl: precompute_ref_log_probs of
            DPOTrainer. trl + cache: demo/trl_cache.py, which also loads the reference
dpo, kto    a step of main() and of DPOTrainer or KTOTrainer; the reference's log-probs are known
rloo P+T    rollout of T tokens after P, reward, reference and update: a step of main() and of RLOOTrainer
rloo sums   with --model: RLOO on demo/sums.py, and the reward of held-out sums. `rloo P+T` then has prompts
            with so many solved sums that they have almost P tokens. Both sides stop at a token that the model
            never draws, so each sample has its T tokens
long        the same after 2,900 tokens, of a tiny random Qwen3 with the full vocabulary of 151,936

Both sides have the same weights, token ids, order, batch size, AdamW and precision, and no gradient
checkpointing; only prompts of 3,000 tokens with --model need it, on both sides. Every run is a process of its
own; the sides take turns, every other round backwards. Each round of RLOO has another seed. A step lasts from
one log line, or on_step_end, to the next; the first does not count. Time is CPU seconds of one thread; of two
threads (--model), or on a GPU, it is the clock's. Memory is the resident set (Linux), on a GPU what was
allocated: at its peak, and before the first step. RLOO's samples differ between the sides.
"""
import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
CHECKOUT = os.environ.get("CHECKOUT", str(ROOT))
sys.path[:0] = [CHECKOUT, str(ROOT / "demo")]  # first: the scripts that are measured
import sums

import dpo
import kto
import rloo

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")
SHAPES = {
    "body-heavy": ("llama", 384, 1024, 8, 6, 3, 64, 2_048, False),  # 15 M parameters
    "head-heavy": ("llama", 256, 688, 4, 4, 2, 64, 20_480, False),  # 13 M
    "Qwen2.5-0.5B": ("llama", 896, 4864, 24, 14, 2, 64, 151_936, True),
    "Qwen2.5-1.5B": ("llama", 1536, 8960, 28, 12, 2, 128, 151_936, True),
    "long": ("qwen3", 64, 192, 2, 4, 2, 32, 151_936, True),
    "tiny": ("llama", 64, 128, 1, 2, 1, 32, 512, False),
}
ROLLOUTS = {  # prompt tokens, new tokens, k
    "rloo 256+16, k=2": (256, 16, 2),
    "rloo 256+16, k=4": (256, 16, 4),
    "rloo 256+16, k=8": (256, 16, 8),
    "rloo 32+64, k=4": (32, 64, 4),
    **{f"long, k={k}": (2900, 200, k) for k in (2, 4, 8)},
}
MODEL_ROLLOUTS = {  # those of --model
    "rloo sums, k=8": (0, 12, 8),
    **{f"rloo 256+16, k={k}": (256, 16, k) for k in (2, 4, 8)},
    "rloo 48+64, k=4": (48, 64, 4),  # a single sum: sharing helps least
    "rloo 3000+100, k=8": (3000, 100, 8),
}
NEVER_DRAWN = ("<gh_stars>", "<unused0>")  # tokens that SmolLM2 or Gemma know, but give no probability
MODEL_SIZES = {  # beginnings of the works of --model, and their sizes
    "dpo": dict(steps=20, batch_size=4, lr=1e-5),
    "kto": dict(steps=20, batch_size=4, lr=1e-5),
    "rloo sums": dict(steps=20, batch_size=8, lr=1e-5),
    "rloo 256": dict(steps=4, batch_size=4, lr=5e-6),
    "rloo 48": dict(steps=4, batch_size=4, lr=5e-6),
    "rloo 3000": dict(steps=3, batch_size=1, lr=5e-6),
}
HEAD = "| work | side | seconds | times refcache's | peak GiB | before |\n" + "|---" * 6 + "|"


@dataclass
class Args:
    shapes: tuple[str, ...] = ("body-heavy", "head-heavy")  # of SHAPES
    works: tuple[str, ...] = ("reference", "dpo", "kto", "rloo")  # or beginnings of names: "rloo 32"
    baseline: str | None = None  # another checkout of this project, to compare with instead of TRL
    model: str | None = None  # a chat model's folder, instead of random models; see MODEL_SIZES
    data: str | None = None  # for --model: pairs of chats, plain rows as tools/prepare.py writes them
    results: str | None = None  # of --model: a .json in which these works are replaced; None: MODEL.json here
    pairs: int = 64  # for random models; a real one has as many as its steps need
    max_length: int = 512  # tokens of a row
    rounds: int = 3  # of all sides, in turn
    trl_rounds: int | None = None  # fewer rounds of TRL, which is slow; None: as many
    steps: int | None = None  # of a process; the first one is not timed; None: 4, or what MODEL_SIZES says
    batch_size: int | None = None  # pairs, half of KTO's rows, prompts of RLOO; None: 4, or MODEL_SIZES
    reference_batch: int = 8  # pairs in a forward of TRL's reference pass
    lr: float = 1e-4
    eps: float = 1e-3  # AdamW's; at 1e-8 the first updates are lr · sign(gradient), which amplifies rounding
    seed: int = 0  # of the order, and of RLOO's samples in the first round
    extra: str = "{}"  # JSON: more flags of the scripts
    tiny: bool = False  # does it run?
    threads: int | None = None  # None: 1, with --model 2; of one thread CPU seconds count, else the clock's
    folder: str = ""  # of models and data; for the processes
    job: tuple[str, str, str, int] | None = None  # side, shape, work and round; for the processes


def even_words(prompts, completions, **columns):
    """A reward that differs between samples: how many words have an even number."""
    return [float(sum(word[-1] in "02468" for word in text.split())) for text in completions]


# ---- What all sides read: a model, pairs, prompts; and TRL's rows, in the order of main()

def invent_pairs(args: Args, vocab: int) -> list[tuple[list[int], ...]]:
    """(prompt, chosen, rejected) as ids from 2 on, of many lengths, that fit into max_length with EOS."""
    rng = np.random.default_rng(0)
    lengths = 4 + rng.lognormal(np.log([120, 60, 60]), 0.8, (20 * args.pairs, 3)).astype(int)
    fit = [row for row in lengths if row[0] + max(row[1:]) < args.max_length]
    return [[rng.integers(2, vocab, length).tolist() for length in row] for row in fit[:args.pairs]]


def text_of(ids) -> str:
    return " ".join(f"w{i}" for i in ids)


def make_model(folder: Path, shape: str, **changes):
    """A random model, and a tokenizer that has one word for each token. `changes` are those of its config."""
    sizes = dict(zip(NAMES, SHAPES[shape]))
    words = {"<pad>": 0, "<eos>": 1}
    words |= {f"w{i}": i for i in range(2, sizes["vocab_size"])}  # word i is token i
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    special = dict(max_position_embeddings=8192, pad_token_id=0, eos_token_id=1, bos_token_id=None) | changes
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes, **special))
    model.to(torch.bfloat16 if DEVICE == "cuda" else torch.float32).save_pretrained(folder)


def write_lines(path: Path, rows: list[dict]):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_pairs(path: Path, pairs: list):
    names = ("prompt", "chosen", "rejected")
    rows = [(text_of(x), " " + text_of(w), " " + text_of(l)) for x, w, l in pairs]
    write_lines(path, [dict(zip(names, row)) for row in rows])


def make_files(args: Args, shape: str) -> tuple[list, int]:
    """Returns the rows of dpo.py, and how many tokens they have."""
    folder = Path(args.folder, shape)
    if args.model:
        write_chats(args, folder)
        return count(write_orders(args, shape))

    vocab = SHAPES[shape][NAMES.index("vocab_size")]
    make_model(folder / "model", shape)
    rng = np.random.default_rng(0)
    for length in {length for length, *_ in ROLLOUTS.values()}:
        prompts = rng.integers(2, vocab, (args.batch_size * args.steps, length))
        write_lines(folder / f"prompts-{length}.jsonl", [{"prompt": text_of(ids)} for ids in prompts])
    write_pairs(folder / "pairs.jsonl", invent_pairs(args, vocab))
    return count(write_orders(args, shape))


def count(pairs: list) -> tuple[list, int]:
    return pairs, sum(2 * len(row.prompt) + len(row.chosen) + len(row.rejected) for row in pairs)


def write_chats(args: Args, folder: Path):
    """The model, the first pairs that fit, and prompts for the rollouts of each length."""
    folder.mkdir()
    (folder / "model").symlink_to(Path(args.model).absolute())
    tokenizer = dpo.load_tokenizer(args.model)
    write_endless(args.model, folder / "endless")

    def n_tokens(messages):
        return len(tokenizer.apply_chat_template(messages, return_dict=False))

    rows = map(json.loads, open(args.data))
    fit = (row for row in rows if n_tokens(row["prompt"] + row["chosen"]) <= args.max_length
           and n_tokens(row["prompt"] + row["rejected"]) <= args.max_length)
    write_lines(folder / "pairs.jsonl", list(islice(fit, args.pairs)))

    with quiet():
        sums.main(folder / "sums")
    prompts = [json.loads(line) for line in open(folder / "sums/prompts.jsonl")]
    solved = [json.loads(line) for line in open(folder / "sums/pairs.jsonl")]
    rng = np.random.default_rng(0)
    for length in {length for length, *_ in ROLLOUTS.values()}:
        chats = []
        for row in prompts[:args.batch_size * args.steps] if length else prompts:
            messages = row["prompt"]
            while n_tokens(messages) < length - 40:  # a solved sum has fewer tokens
                other = solved[rng.integers(len(solved))]
                messages = other["prompt"] + other["chosen"] + messages
            chats.append(row | {"prompt": messages})
        write_lines(folder / f"prompts-{length}.jsonl", chats)


def write_endless(model: str, folder: Path):
    """The same model with a stop token that it never draws: all samples are as long as they may be."""
    tokenizer = dpo.load_tokenizer(model)
    turn_end = repr(tokenizer.eos_token)  # the prompts stay as they are
    tokenizer.chat_template = tokenizer.chat_template.replace("eos_token", turn_end)
    tokenizer.eos_token = next(token for token in NEVER_DRAWN if token in tokenizer.get_vocab())
    tokenizer.save_pretrained(folder)
    stops = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    stops.save_pretrained(folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(Path(model, name).absolute())


def write_orders(args: Args, shape: str) -> list:
    """Writes kto.py's rows, and TRL's in the order of main(). Returns the rows of dpo.py."""
    rated = []
    for row in map(json.loads, open(Path(args.folder, shape, "pairs.jsonl"))):
        for name, label in (("chosen", True), ("rejected", False)):
            rated.append({"prompt": row["prompt"], "completion": row[name], "label": label})
    write_lines(Path(args.folder, shape, "rated.jsonl"), rated)

    pairs = read_rows(dpo, settings(args, shape, "dpo"))
    given = settings(args, shape, "kto")
    feedback = read_rows(kto, given)
    with quiet():
        feedback = kto.draw_others(feedback, feedback, given)  # y', the answers to other prompts
    names = dict(
        prompt="prompt_ids", chosen="chosen_ids", rejected="rejected_ids", completion="completion_ids",
        other="KL_completion_ids", is_desirable="label")
    for work, rows, n in (("reference", pairs, 0), ("dpo", pairs, 1), ("kto", feedback, 2)):
        if n:
            rows = dpo.rows_in_order(rows, args.steps * n * args.batch_size, args.seed)
        rows = [{names[key]: value for key, value in row._asdict().items() if key in names} for row in rows]
        write_lines(Path(args.folder, shape, f"{work}.jsonl"), rows)
    return pairs


# ---- The scripts -----------------------------------------------------

def settings(args: Args, shape: str, work: str, out: str = ""):
    """The arguments of main() for this work."""
    folder = f"{args.folder}/{shape}"
    flags = dict(
        model=f"{folder}/model", data=f"{folder}/pairs.jsonl", out=f"{folder}/{out}", steps=args.steps,
        lr=args.lr, schedule="constant", warmup=0.0, save_every=0, beta=0.1,
        max_length=args.max_length, batch_size=args.batch_size, seed=args.seed,
        dtype="bfloat16" if DEVICE == "cuda" else "float32")
    script = dpo
    if work in ROLLOUTS:
        script = rloo
        length, new_tokens, k = ROLLOUTS[work]
        flags |= dict(
            data=f"{folder}/prompts-{length}.jsonl", reward=(f"{__file__}:even_words",), k=k, beta=0.05,
            max_new_tokens=new_tokens, max_length=length + new_tokens)
        if args.model:
            flags |= dict(reward=(f"{ROOT}/demo/sums.py:right",), max_length=10**6)
            flags["gradient_checkpointing"] = length > 999
            if length == 0:
                flags |= dict(beta=0.01, eval_data=f"{folder}/sums/prompts_test.jsonl", eval_every=5)
            else:
                flags["model"] = f"{folder}/endless"
    elif work == "kto":
        script = kto
        flags |= dict(data=f"{folder}/rated.jsonl", batch_size=2 * args.batch_size)
    return script.Args(**flags | json.loads(args.extra))


def read_rows(script, given) -> list:
    with quiet():
        return script.load_rows(given.data, script.load_tokenizer(given.model), given)


def quiet():
    return contextlib.redirect_stdout(io.StringIO())  # among the rows of a table


def call_after_steps(script, call):
    """Calls `call` when the script has written a line of metrics.jsonl, from step 0 on."""
    append = script.append

    def append_and_call(path, *values):
        append(path, *values)
        if path.name == "metrics.jsonl":
            call()

    script.append = append_and_call


def measure_reference_pass() -> list[float]:
    """A list that gets the seconds of each ReferenceCache.compute in main()."""
    compute = dpo.ReferenceCache.compute
    seconds = []

    def timed(cache, model, groups, *values, **names):
        if DEVICE == "cuda":  # the first forwards compile kernels
            compute(dpo.ReferenceCache(), model, groups[:16])
        begin = clock()
        compute(cache, model, groups, *values, **names)
        seconds.append(clock() - begin)

    dpo.ReferenceCache.compute = timed
    return seconds


def held_out_reward(policy, tokenizer, given) -> float:
    """The mean reward of 16 samples per held-out prompt. Both sides draw with the same uniform numbers."""
    rows = read_rows(rloo, replace(given, data=given.eval_data))
    prompts = [row.prompt for row in rows]
    with quiet():
        samples = rloo.rollout(policy, tokenizer, prompts, 16, 0, replace(given, seed=0))
    answers = [row.columns["answer"] for row in rows for _ in range(16)]
    return float(np.mean(sums.right(None, chain(*samples.texts), answers)))


# ---- The sides -------------------------------------------------------

def clock() -> float:
    """CPU seconds of one thread. With more threads, or on a GPU, the clock's."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def peak_gib(now: bool = False) -> float:
    """Memory of this process: the most so far, or what it holds now."""
    if DEVICE == "cuda":
        return (torch.cuda.memory_allocated() if now else torch.cuda.max_memory_allocated()) / 2**30
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)" if now else r"VmHWM:\s+(\d+)", status)[1]) / 2**20


class Ticks(list):
    """Times before the first step, and after every step; and the memory before the first."""
    paused = 0.0  # seconds

    def __call__(self):
        if not self:
            self.memory = peak_gib(now=True)
        self.append(clock() - self.paused)

    @contextlib.contextmanager
    def pause(self):
        """What runs in it belongs to no step."""
        begin = clock()
        yield
        self.paused += clock() - begin

    def found(self) -> dict:
        first = min(1, len(self) - 2)  # the first step does not count, unless it is the only one
        steps = np.diff(self)
        return {"seconds": steps[first:].mean(), "steps": steps.tolist(), "before": self.memory}


def refcache(args: Args, shape: str, work: str, round: int) -> dict:
    given = settings(args, shape, work, out=f"{work}-{round}-{os.getpid()}")
    passes = measure_reference_pass()
    if work == "reference":
        dpo.main(replace(given, steps=0))
        return {"seconds": passes[0]}

    script = {"dpo": dpo, "kto": kto}.get(work, rloo)
    ticks, held_out = Ticks(), []

    def evaluate(policy, tokenizer, rows, reference, functions, step, *_):
        if rows:
            with ticks.pause():
                held_out.append((step, held_out_reward(policy, tokenizer, given)))
        return {}

    call_after_steps(script, ticks)
    if script is rloo:
        rloo.evaluate = evaluate
    adamw = torch.optim.AdamW
    torch.optim.AdamW = lambda *values, **names: adamw(*values, eps=args.eps, **names)
    if DEVICE == "cuda" or args.model:  # after the last step gigabytes would be written
        script.save_model = lambda *values: None
    history = script.main(given)

    lines = history[1:]
    return ticks.found() | dict(
        losses=[line["loss"] for line in lines], rewards=[line.get("reward") for line in lines],
        lengths=[line.get("completions/mean_length") for line in lines], held_out=held_out,
        reference=sum(passes))


def trl(args: Args, shape: str, work: str, round: int, cached: bool = False) -> dict:
    from datasets import Dataset
    from transformers import TrainerCallback  # imports accelerate, peft and bitsandbytes
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer
    folder = Path(args.folder, shape)
    given = settings(args, shape, work)
    make_config, parent = DPOConfig, DPOTrainer
    if cached:
        from trl_cache import CachedDPOTrainer as parent
    if work in ROLLOUTS:
        make_config, parent = RLOOConfig, RLOOTrainer
    elif work == "kto":
        make_config, parent = KTOConfig, KTOTrainer
    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    ticks, pass_ticks, held_out = Ticks(), [], []

    class Trainer(parent):
        cache_file = f"{folder}/trl-{os.getpid()}.pkl"

        def _prepare_dataset(self, dataset, *rest):  # DPO's and KTO's rows are token ids already
            return dataset

        def _precompute_ref_logps(self, dataset, *rest):
            if DEVICE == "cuda":
                super()._precompute_ref_logps(dataset.select(range(16)), *rest)  # as above
            pass_ticks.append(clock())
            dataset = super()._precompute_ref_logps(dataset, *rest)
            pass_ticks.append(clock())
            return dataset

    class Steps(TrainerCallback):
        def on_train_begin(self, *values, **names):
            self.evaluate(0, names["model"])
            ticks()

        def on_step_end(self, config, state, *values, **names):
            ticks()
            self.evaluate(state.global_step, names["model"])

        def evaluate(self, step, model):
            if work not in ROLLOUTS or not given.eval_data:
                return
            if step % given.eval_every == 0 or step == args.steps:
                with ticks.pause():
                    held_out.append((step, held_out_reward(model, tokenizer, given)))

    gpu = DEVICE == "cuda"
    common = dict(
        output_dir=f"{folder}/trl-{work}-{round}", max_steps=args.steps, learning_rate=args.lr,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, adam_epsilon=args.eps,
        max_grad_norm=1.0, beta=given.beta, gradient_checkpointing=given.gradient_checkpointing,
        seed=given.seed, bf16=gpu,
        use_cpu=not gpu, dataloader_pin_memory=gpu, report_to="none", save_strategy="no", logging_steps=1)
    if work in ROLLOUTS:
        rows = rloo.rows_in_order(read_rows(rloo, given), args.steps * args.batch_size, given.seed)
        rows = [row.columns for row in rows]
        extra = {"reward_funcs": sums.right if args.model else even_words}
        config = make_config(
            **common, per_device_train_batch_size=args.batch_size * given.k, num_generations=given.k,
            max_completion_length=given.max_new_tokens, shuffle_dataset=False)
    else:
        rows = [json.loads(line) for line in Path(f"{folder}/{work}.jsonl").read_text().splitlines()]
        extra = {}
        rows_per_pair = 2 if work == "kto" else 1
        config = make_config(
            **common, per_device_train_batch_size=args.batch_size * rows_per_pair, max_length=args.max_length,
            precompute_ref_log_probs=True, precompute_ref_batch_size=args.reference_batch,
            train_sampling_strategy="sequential")
    trainer = Trainer(
        model=given.model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[Steps()], **extra)
    seconds_of_pass = sum(pass_ticks[1::2]) - sum(pass_ticks[::2])
    if work == "reference":
        return {"seconds": seconds_of_pass}
    trainer.train()
    if not (gpu or args.model):  # as the scripts do
        trainer.save_model()

    lines = [line for line in trainer.state.log_history if "loss" in line]
    return ticks.found() | dict(
        losses=[line["loss"] for line in lines], rewards=[line.get("reward") for line in lines],
        lengths=[line.get("completions/mean_length") for line in lines], held_out=held_out,
        reference=seconds_of_pass)


SIDES = {"refcache": refcache, "baseline": refcache, "trl": trl, "trl + cache": partial(trl, cached=True)}


# ---- Processes and tables --------------------------------------------

def run_job(args: Args):
    """The job of this process. Prints what it found as JSON."""
    torch.set_num_threads(args.threads)
    side, *job = args.job
    if job[1] in ROLLOUTS:
        args = replace(args, seed=args.seed + job[2])  # other samples in each round
    found = SIDES[side](args, *job)
    print("\n" + json.dumps(found | {"peak": peak_gib()}))


def start(args: Args, *job) -> dict | None:
    """Runs a job (side, shape, work, round) in a process of its own. Returns what it found, or None if it ran
    out of memory."""
    command = [sys.executable, __file__, "--job", *map(str, job), *["--tiny"] * args.tiny]
    for name, value in asdict(args).items():
        is_for_this_process = name in ("job", "tiny", "shapes", "works", "baseline", "results")
        if not is_for_this_process and value is not None:
            command += [f"--{name}", str(value)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["OMP_NUM_THREADS"] = str(args.threads or 1)
    if job[0] == "baseline":
        environment["CHECKOUT"] = args.baseline
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ended.returncode == -9 or "OutOfMemoryError" in ended.stderr[-4000:]:  # -9: killed by the system
        return None
    if ended.returncode:
        sys.exit(f"{job}: {ended.stderr[-4000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def mean_length(runs: list[dict]) -> float:
    """Tokens per sample, over all steps of all runs."""
    return float(np.mean([run["lengths"] for run in runs]))


def spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def compare(args: Args, shape: str, work: str, tokens: int) -> str:
    """Prints a line of the table for each side. Returns what there is to say about the losses."""
    sides = ["refcache", "trl"]
    if args.baseline:
        sides = ["refcache", "baseline"]
    elif work == "reference":
        sides += ["trl + cache"]
    runs = {side: [] for side in sides}
    for round in range(args.rounds):
        for side in sides[::-1] if round % 2 else sides:
            if side == "trl" and args.trl_rounds and round >= args.trl_rounds:
                continue
            runs[side].append(start(args, side, shape, work, round))
    if args.results:
        save_results(args, work, runs)
    ours = runs["refcache"]
    for side, found in list(runs.items()):
        if None in found:
            print(f"| {work} | {side} | out of memory | | | |", flush=True)
            del runs[side]
            continue
        seconds = [run["seconds"] for run in found]
        rate = f"; {tokens / median(seconds):,.0f} tokens/s" if work == "reference" else ""
        ratio = ""
        if None not in ours:
            ratio = spread([run["seconds"] / our["seconds"] for run, our in zip(found, ours)])
        peak, before = (max(run.get(name, 0) for run in found) for name in ("peak", "before"))
        print(f"| {work} | {side} | {spread(seconds)}{rate} | {ratio} | {peak:.2f} | {before:.2f} |",
              flush=True)
    if work in ROLLOUTS:
        lengths = ", ".join(f"{side} {mean_length(found):.1f}" for side, found in runs.items())
        return f"\n{work}: tokens per sample of {lengths}"
    if work == "reference":
        return ""
    if len(runs) < 2:
        return ""
    curves = [found[0]["losses"] for found in runs.values()]
    gap = max(abs(a - b) for a, b in zip(*curves))
    return f"\n{work}: the losses of {args.steps} steps differ by at most {gap:.1e}"


def save_results(args: Args, work: str, runs: dict):
    """Replaces the entry of this work, one line of the file. Times in seconds, memory in GiB."""
    path = Path(args.results)
    results = json.loads(path.read_text()) if path.exists() else {}
    flags = ("threads", "steps", "batch_size", "lr", "eps", "max_length")
    given = {name: getattr(args, name) for name in flags}
    results[work] = {"commit": commit(), "versions": versions(), **given, **runs}
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in results.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def commit(checkout=ROOT) -> str:
    """Its commit, with "-dirty" if code or the demo's data differ from it. Where git fails, $COMMIT."""
    def git(*words):
        command = ["git", "-C", str(checkout), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "*.py", "changes", "demo")
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")


def require_trl():
    if not all(map(importlib.util.find_spec, ("trl", "peft", "datasets"))):
        sys.exit("a package is missing: pip install trl==1.16.0 peft datasets")


def versions() -> str:
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    trl = f", TRL {version('trl')}" if importlib.util.find_spec("trl") else ""
    return f"torch {torch.__version__}, transformers {transformers.__version__}{trl}, {device}"


def main(args: Args):
    if not args.baseline:
        require_trl()
    commits = f"commit {commit()}"
    if args.baseline:
        commits += f", baseline {commit(args.baseline)}"
    print(f"{commits}, {versions()}; medians of {args.rounds} rounds (lowest to highest)")
    if args.model:
        return compare_model(args)

    works = [name for name in ("reference", "dpo", "kto", *ROLLOUTS) if name.startswith(args.works)]
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            args = replace(args, folder=folder, steps=args.steps or 4, batch_size=args.batch_size or 4)
            pairs, tokens = make_files(args, shape)
            print(f"\n{shape}: {len(pairs)} pairs, {tokens:,} tokens\n\n{HEAD}", flush=True)
            print(*filter(None, [compare(args, shape, work, tokens) for work in works]), sep="\n")


def compare_model(args: Args):
    """The works of --model, each with sizes of its own."""
    print(f"\n{args.model}\n\n{HEAD}", flush=True)
    notes = []
    for work in ("dpo", "kto", *ROLLOUTS):
        if not work.startswith(args.works):
            continue
        sizes = {}
        if not args.tiny:
            sizes = next(sizes for name, sizes in MODEL_SIZES.items() if work.startswith(name))
        asked = {name: getattr(args, name) for name in ("steps", "batch_size") if getattr(args, name)}

        with tempfile.TemporaryDirectory() as folder:
            given = replace(args, folder=folder, eps=1e-8, **sizes | asked)  # 1e-8: as people train
            given.pairs = max(8, given.steps * given.batch_size)  # each at most once
            make_files(given, "model")
            notes.append(compare(given, "model", work, 0))
    print(*notes, sep="\n")


def shrink(args: Args) -> Args:
    """Sizes that only show that it runs."""
    ROLLOUTS.clear()
    ROLLOUTS["rloo 16+4, k=2"] = (16, 4, 2)
    if args.model:
        ROLLOUTS["rloo sums, k=2"] = (0, 4, 2)
    return replace(args, shapes=("tiny",), pairs=20, max_length=256, rounds=1, steps=2, batch_size=2)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__, use_underscores=True)
    if args.model:
        ROLLOUTS = MODEL_ROLLOUTS
    if args.tiny:
        args = shrink(args)
    elif args.model and not args.results:
        args.results = str(ROOT / f"benchmarks/{Path(args.model).name}.json")
    args.threads = args.threads or (2 if args.model else 1)
    run_job(args) if args.job else main(args)
