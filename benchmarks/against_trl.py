"""dpo.py, kto.py and rloo.py against TRL's trainers: seconds of a step, peak memory, and the losses of both sides.

    pip install trl==1.16.0 peft datasets                                     # needed only here
    python benchmarks/against_trl.py --data pairs.jsonl                       # without --data: invented rows
    python benchmarks/against_trl.py --works dpo kto --steps 30 --rounds 1    # the losses of 30 steps
    python benchmarks/against_trl.py --tiny                                   # does it run?

reference   log-probs of the frozen model: ReferenceCache.score; precompute_ref_log_probs of DPOTrainer; and HALOs' pass
            (ContextualAI/HALOs, train/models.py), written again here: data order, rows padded to max_length,
            log_softmax over the logits of every position, lists of floats in a dict, a pickle
dpo, kto    a step of main() and of DPOTrainer or KTOTrainer; both know the reference's log-probs beforehand
rloo P+T    rollout of T tokens after P, reward, reference and update: a step of main() and of RLOOTrainer

Both sides have the same weights, token ids, order, batch size, AdamW and precision, and no gradient checkpointing,
TRL's default, which is slower. Every run is a process of its own; the sides take turns. A step lasts from one log line,
or on_step_end, to the next; the first does not count. On a CPU the time is CPU seconds of one thread, which depend
little on other work; on a GPU it is the clock's. Peak memory is the whole process's: its largest resident set, or what
it had allocated on the GPU. RLOO's samples differ between the sides, and so do its losses.
"""
import importlib.metadata
import importlib.util
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
if "--job" in sys.argv:  # the processes only: on Linux a child's ru_maxrss starts at its parent's resident set
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback

    import dpo
    import kto
    import rloo
    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")
SHAPES = {name: dict(zip(NAMES, sizes)) for name, sizes in {
    "head-heavy": ("llama", 256, 688, 4, 4, 2, 64, 20_480, False),  # 13 M parameters
    "body-heavy": ("llama", 384, 1024, 8, 6, 3, 64, 2_048, False),  # 15 M
    "Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, True),
    "Llama-3.2-3B": ("llama", 3072, 8192, 28, 24, 8, 128, 128_256, True),
    "tiny": ("llama", 64, 128, 1, 2, 1, 32, 512, False)}.items()}
ROLLOUTS = {"rloo 256+16, k=2": (256, 16, 2), "rloo 256+16, k=8": (256, 16, 8), "rloo 32+64, k=4": (32, 64, 4)}


@dataclass
class Args:
    shapes: tuple[str, ...] = ()  # of SHAPES; none: the first two on a CPU, the next two on a GPU
    works: tuple[str, ...] = ("reference", "dpo", "kto", "rloo")  # as in the table, or how its names begin: "rloo 32"
    data: str | None = None  # .jsonl with prompt, chosen and rejected as strings; None: rows of preference-like lengths
    pairs: int = 64  # of the data: the first ones that fit into max_length
    max_length: int = 512  # tokens of a row
    rounds: int = 3  # of all sides, in turn
    steps: int = 5  # of a process; the first one is not timed
    batch_size: int = 4  # pairs of a DPO step, half the rows of a KTO step, prompts of an RLOO step
    reference_batch: int = 8  # pairs in a forward of TRL's and HALOs' reference pass
    lr: float = 1e-4
    eps: float = 1e-3  # AdamW's; at 1e-8 the first updates are nearly lr · sign(gradient), which can amplify rounding
    tiny: bool = False  # does it run?
    job: tuple[str, str, str, int] | None = None  # side, shape, work and round of this process; main() sets it
    folder: str = ""  # of models and data; main() sets it


def reward(prompts, completions, **columns):
    """Share of words with an even number: a reward that any two completions disagree about."""
    return [sum(int(word[1:]) % 2 == 0 for word in text.split()) / max(1, len(text.split())) for text in completions]


# ---- Files: a checkpoint with its tokenizer, pairs and prompts; and what TRL trains on, in the order of main() -------

def read_pairs(args: Args, vocab: int) -> list[tuple[list[int], ...]]:
    """(prompt, chosen, rejected) as ids from 2 on. Text is encoded by a byte-level BPE trained on it."""
    if args.data is None:
        rng = np.random.default_rng(0)
        def draw(middle): return rng.integers(2, vocab, int(rng.lognormal(np.log(middle), 0.8)) + 4).tolist()
        rows = [(draw(120), draw(60), draw(60)) for _ in range(20 * args.pairs)]
    else:
        rows = [json.loads(line) for line in Path(args.data).read_text().splitlines()]
        rows = [(row["prompt"], row["chosen"], row["rejected"]) for row in rows]
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        bpe.train_from_iterator((text for row in rows for text in row), trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False))
        rows = [[bpe.encode(text).ids for text in row] for row in rows]
    fit = [(x, w, l) for x, w, l in rows if w != l and len(x) + max(len(w), len(l)) < args.max_length]  # <: and EOS
    return fit[:args.pairs]


def make_files(args: Args, shape: str):
    folder, vocab = Path(args.folder) / shape, SHAPES[shape]["vocab_size"]
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, vocab)}  # word i is token i
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    special = dict(max_position_embeddings=4096, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[shape] | special))
    model.to(torch.bfloat16 if DEVICE == "cuda" else torch.float32).save_pretrained(folder / "model")

    def text(ids): return " ".join(f"w{i}" for i in ids)
    rng = np.random.default_rng(0)
    files = {f"prompts-{n}": [dict(prompt=text(rng.integers(2, vocab, n))) for _ in range(args.batch_size * args.steps)]
             for n, *_ in ROLLOUTS.values()}
    files["pairs"] = [dict(prompt=text(x), chosen=" " + text(w), rejected=" " + text(l))
                      for x, w, l in read_pairs(args, vocab)]
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pairs, feedback = load_rows(args, shape, "dpo"), load_rows(args, shape, "kto")
    feedback, _ = kto.draw_others(feedback, [], args.max_length, seed=0)  # y', the answers to other prompts
    ordered = {"reference": pairs}
    for name, rows, n in (("dpo", pairs, args.batch_size), ("kto", feedback, 2 * args.batch_size)):
        ordered[name] = [row for step in range(1, args.steps + 1) for row in dpo.batch_rows(step, rows, n, seed=0)]
    theirs = dict(prompt="prompt_ids", chosen="chosen_ids", rejected="rejected_ids", completion="completion_ids",
                  other="KL_completion_ids", label="label")
    for name, rows in ordered.items():
        rows = [{theirs[key]: value for key, value in row._asdict().items() if key in theirs} for row in rows]
        (folder / f"{name}.json").write_text(json.dumps(rows))


# ---- The sides: seconds of a step, or of the reference pass; and the losses of the steps ----------------------------

def clock() -> float:
    if DEVICE == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def per_step(ticks: list[float]) -> float:
    return (ticks[-1] - ticks[1]) / (len(ticks) - 2)  # ticks: before the first step, and at the end of every step


def settings(args: Args, shape: str, work: str, out: str = ""):
    """The arguments of main() for this work."""
    folder = f"{args.folder}/{shape}"
    common = dict(model=f"{folder}/model", data=f"{folder}/pairs.jsonl", out=f"{folder}/{out}", steps=args.steps,
                  eval_size=0, samples=0, lr=args.lr, schedule="constant", warmup=0.0, save_every=10**6,
                  max_length=args.max_length, batch_size=args.batch_size)
    if work in ROLLOUTS:
        prompt, new, k = ROLLOUTS[work]
        common |= dict(data=f"{folder}/prompts-{prompt}.jsonl", max_length=prompt + new)
        return rloo.resolve_args(rloo.Args(**common, reward=(f"{__file__}:reward",), k=k, max_new_tokens=new))
    if work == "kto":
        return kto.resolve_args(kto.Args(**common | dict(batch_size=2 * args.batch_size)))
    return dpo.resolve_args(dpo.Args(**common))


def load_rows(args: Args, shape: str, work: str) -> list:
    script, given = kto if work == "kto" else dpo, settings(args, shape, work)
    return script.load_rows(given.data, script.load_tokenizer(given.model)[0], args.max_length, given)


def refcache(args: Args, shape: str, work: str, round: int) -> dict:
    given, ticks = settings(args, shape, work, out=f"{work}-{round}"), []
    if work == "reference":
        groups = dpo.groups(load_rows(args, shape, work))
        model = dpo.load_model(given.model, DEVICE, given)
        begin = clock()
        cache = dpo.ReferenceCache()
        cache.score(model, groups, given.tokens_per_forward, given.dtype, path=f"{args.folder}/cache.pkl")
        return {"seconds": clock() - begin}
    script = {"dpo": dpo, "kto": kto}.get(work, rloo)
    write, adamw = script.Log.write, torch.optim.AdamW

    def timed_write(self, *values):
        write(self, *values)
        ticks.append(clock())

    script.Log.write = timed_write
    torch.optim.AdamW = lambda *values, **names: adamw(*values, eps=args.eps, **names)
    history = script.main(given)
    return {"seconds": per_step(ticks), "losses": [values["loss"] for values in history[1:]]}


def trl(args: Args, shape: str, work: str, round: int) -> dict:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer
    folder, gpu, ticks, losses = Path(args.folder) / shape, DEVICE == "cuda", [], []
    classes = {"dpo": (DPOConfig, DPOTrainer), "reference": (DPOConfig, DPOTrainer), "kto": (KTOConfig, KTOTrainer)}
    make_config, trainer_class = classes.get(work, (RLOOConfig, RLOOTrainer))

    class Trainer(trainer_class):
        def _prepare_dataset(self, dataset, *rest):  # DPO's and KTO's rows are token ids already
            return dataset

        def _precompute_ref_logps(self, *values):
            ticks.append(clock())
            dataset = super()._precompute_ref_logps(*values)
            ticks.append(clock())
            return dataset

        def training_step(self, *values, **names):
            loss = super().training_step(*values, **names)
            losses.append(loss.item())
            return loss

    class Steps(TrainerCallback):
        def on_train_begin(self, *values, **names):
            ticks[:] = [clock()]

        def on_step_end(self, *values, **names):
            ticks.append(clock())

    common = dict(
        output_dir=f"{folder}/trl", max_steps=args.steps, learning_rate=args.lr, lr_scheduler_type="constant",
        warmup_steps=0, weight_decay=0.0, adam_epsilon=args.eps, max_grad_norm=1.0, gradient_checkpointing=False,
        bf16=gpu, use_cpu=not gpu, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        dataloader_pin_memory=gpu)
    if work in ROLLOUTS:
        prompt, new, k = ROLLOUTS[work]
        rows = [json.loads(line) for line in (folder / f"prompts-{prompt}.jsonl").read_text().splitlines()]
        extra = {"reward_funcs": reward}
        config = make_config(**common, per_device_train_batch_size=args.batch_size * k, num_generations=k, beta=0.05,
                             max_completion_length=new, shuffle_dataset=False)
    else:
        rows, extra = json.loads((folder / f"{work}.json").read_text()), {}
        config = make_config(**common, per_device_train_batch_size=args.batch_size * (2 if work == "kto" else 1),
                             beta=0.1, max_length=args.max_length, precompute_ref_log_probs=True,
                             precompute_ref_batch_size=args.reference_batch, train_sampling_strategy="sequential")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    trainer = Trainer(model=f"{folder}/model", args=config, train_dataset=Dataset.from_list(rows),
                      processing_class=tokenizer, callbacks=[Steps()], **extra)
    if work == "reference":
        return {"seconds": ticks[1] - ticks[0]}
    trainer.train()
    return {"seconds": per_step(ticks), "losses": losses}


def halos(args: Args, shape: str, work: str, round: int) -> dict:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(f"{args.folder}/{shape}/model", dtype=dtype).to(DEVICE).eval()
    rows = [(row.prompt, y) for row in load_rows(args, shape, work) for y in (row.chosen, row.rejected)]
    begin, logprobs = clock(), []
    with torch.no_grad():
        for at in range(0, len(rows), 2 * args.reference_batch):
            batch = rows[at:at + 2 * args.reference_batch]
            pads = [args.max_length - len(x) - len(y) for x, y in batch]
            ids = torch.tensor([[*x, *y] + n * [0] for (x, y), n in zip(batch, pads)], device=DEVICE)
            labels = [len(x) * [-100] + [*y] + n * [-100] for (x, y), n in zip(batch, pads)]
            labels = torch.tensor(labels, device=DEVICE)[:, 1:]
            logits = model(ids, attention_mask=(ids != 0).long()).logits[:, :-1]
            logps = logits.float().log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
            for key, values in zip(ids.tolist(), logps.tolist()):
                logprobs.append((tuple(token for token in key if token > 1), values))  # without padding and EOS
    with open(f"{args.folder}/halos.pkl", "wb") as file:
        pickle.dump(dict(logprobs), file)
    return {"seconds": clock() - begin}


# ---- Processes and tables -------------------------------------------------------------------------------------------

def one(args: Args):
    """The job of this process. Prints what it found as JSON."""
    torch.set_num_threads(1)
    (side, shape, work, round), gpu = args.job, DEVICE == "cuda"
    if side == "look":
        found = dict(shapes=[*SHAPES][2 * gpu:][:2], device=torch.cuda.get_device_name() if gpu else "CPU")
    elif side == "make":
        make_files(args, shape)
        rows = load_rows(args, shape, "dpo")
        found = dict(rows=len(rows), tokens=sum(2 * len(r.prompt) + len(r.chosen) + len(r.rejected) for r in rows))
    else:
        found = {"refcache": refcache, "trl": trl, "halos": halos}[side](args, shape, work, round)
        resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found["peak"] = (torch.cuda.max_memory_allocated() if gpu else resident) / 2**30
    print("\n" + json.dumps(found))


def start(args: Args, *job) -> dict:
    command = [sys.executable, __file__, "--job", *map(str, job), *["--tiny"] * args.tiny]
    for name, value in asdict(args).items():
        if name not in ("job", "tiny", "shapes", "works") and value is not None:
            command += [f"--{name}", str(value)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ended.returncode:
        sys.exit(f"{job}: {ended.stderr[-4000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def compare(args: Args, shape: str, work: str, tokens: int) -> str:
    """Prints a line of the table for each side. Returns what there is to say about the losses."""
    runs = {side: [] for side in (["refcache", "trl", "halos"] if work == "reference" else ["refcache", "trl"])}
    for round in range(args.rounds):
        for side in runs:
            runs[side].append(start(args, side, shape, work, round))
    ours = runs["refcache"]
    for side, found in runs.items():
        seconds = [run["seconds"] for run in found]
        rate = f"; {tokens / median(seconds):,.0f} tokens/s" if work == "reference" else ""
        ratio = spread([run["seconds"] / our["seconds"] for run, our in zip(found, ours)]) if found is not ours else ""
        peak = max(run["peak"] for run in found)
        print(f"| {work} | {side} | {spread(seconds)}{rate} | {ratio} | {peak:.2f} |", flush=True)
    if work not in ("dpo", "kto"):
        return ""
    losses = [runs[side][0]["losses"] for side in ("refcache", "trl")]
    gap = max(abs(a - b) for a, b in zip(*losses))
    curves = "".join("\n    " + " ".join(f"{loss:.6f}" for loss in curve) for curve in losses)
    return f"\n{work}: the losses of {args.steps} steps differ by at most {gap:.1e}; refcache's, then trl's:{curves}"


def main(args: Args):
    if missing := [name for name in ("trl", "peft", "datasets") if importlib.util.find_spec(name) is None]:
        sys.exit(f"{Path(__file__).name} needs {', '.join(missing)}: pip install trl==1.16.0 peft datasets")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "trl"))
    works = [name for name in ("reference", "dpo", "kto", *ROLLOUTS) if name.startswith(args.works)]
    with tempfile.TemporaryDirectory() as folder:
        args = replace(args, folder=folder)
        machine = start(args, "look", "-", "-", 0)
        print(f"{versions}, {machine['device']}; medians of {args.rounds} rounds (lowest to highest)")
        for shape in args.shapes or machine["shapes"]:
            made = start(args, "make", shape, "-", 0)
            print(f"\n{shape}: {made['rows']} pairs, {made['tokens']:,} tokens\n\n"
                  "| work | side | seconds | times refcache's | peak GiB |\n" + "|---" * 5 + "|", flush=True)
            print(*filter(None, [compare(args, shape, work, made["tokens"]) for work in works]), sep="\n")


if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    if args.tiny:
        args = replace(args, shapes=("tiny",), pairs=8, max_length=128, rounds=1, steps=2, batch_size=2)
        ROLLOUTS = {"rloo 16+4, k=2": (16, 4, 2)}
    (one if args.job else main)(args)
