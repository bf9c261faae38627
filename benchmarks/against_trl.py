"""dpo.py, kto.py and rloo.py against TRL's trainers: seconds of a step, peak memory, and the losses of both.

    pip install trl==1.16.0 peft datasets                       # needed only here
    python benchmarks/against_trl.py --data pairs.jsonl         # a table for each shape; without --data invented rows
    python benchmarks/against_trl.py --works dpo kto --steps 31 --rounds 1    # the loss curves over 30 steps and more
    python benchmarks/against_trl.py --tiny                     # does it run?

reference   the log-probs of the frozen model: ReferenceCache.score; DPOTrainer's precompute_ref_log_probs; and
            HALOs' way (ContextualAI/HALOs, train/models.py), written again here: data order, every row padded to
            max_length, log_softmax over the logits of every position, lists of floats in a dict, a pickle
dpo, kto    a training step of main() and of DPOTrainer or KTOTrainer, the reference's log-probs known beforehand
rloo        rollout, reward, reference and update of main() and of RLOOTrainer: P + T is P prompt tokens, T new ones

Both sides get the same weights, token ids, order, batch size, learning rate, AdamW and precision, and no gradient
checkpointing (TRL's default is to checkpoint, which is slower). Each side runs in a process of its own; the sides take
turns. A step lasts from one log line (or on_step_end) to the next; the first does not count. On a CPU one thread is
used and the seconds are CPU seconds, so that other work on the machine matters less; on a GPU it is the clock's time.
Peak memory is of the whole process: its resident set, or what it had allocated on the GPU. The samples of RLOO differ
between the sides, so only the losses of DPO and KTO are compared.
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
from typing import Literal

import tyro  # torch is imported by the processes only: on Linux a child's ru_maxrss starts at its parent's resident set

sys.path.insert(0, str(Path(__file__).parent.parent))
SHAPES = {
    "head-heavy": dict(model_type="llama", hidden_size=256, intermediate_size=688, num_hidden_layers=4,
                       num_attention_heads=4, num_key_value_heads=2, vocab_size=20_480),
    "body-heavy": dict(model_type="llama", hidden_size=384, intermediate_size=1024, num_hidden_layers=8,
                       num_attention_heads=6, num_key_value_heads=3, vocab_size=2_048),
    "Qwen3-0.6B": dict(model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, head_dim=128,
                       num_attention_heads=16, num_key_value_heads=8, vocab_size=151_936, tie_word_embeddings=True),
    "Llama-3.2-3B": dict(model_type="llama", hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
                         num_attention_heads=24, num_key_value_heads=8, vocab_size=128_256, tie_word_embeddings=True),
    "tiny": dict(model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=1,
                 num_attention_heads=2, num_key_value_heads=1, vocab_size=512),
}
ROLLOUTS = {"rloo 256+16 k=2": (256, 16, 2), "rloo 256+16 k=8": (256, 16, 8), "rloo 32+64 k=4": (32, 64, 4)}
REWARD = '''\
def reward(prompts, completions, **columns):
    """Share of words with an even number: a reward that any two completions disagree about."""
    return [sum(int(word[1:]) % 2 == 0 for word in text.split()) / max(1, len(text.split())) for text in completions]
'''


@dataclass
class Args:
    shapes: tuple[str, ...] = ()  # of SHAPES; none: the first two on a CPU, the next two on a GPU
    works: tuple[Literal["reference", "dpo", "kto", "rloo"], ...] = ("reference", "dpo", "kto", "rloo")
    data: str | None = None  # .jsonl with prompt, chosen and rejected as strings; None: rows of preference-like lengths
    rounds: int = 3  # of both sides, in turn
    steps: int = 5  # optimizer steps of a process; the first one is not timed
    pairs: int = 64  # of the data: the first that fit into max_length
    max_length: int = 512  # tokens of a row
    batch_size: int = 4  # pairs of a DPO step, half the rows of a KTO step, prompts of an RLOO step
    reference_batch: int = 8  # pairs in a forward of TRL's and HALOs' reference pass
    lr: float = 1e-3
    eps: float = 1e-3  # AdamW's; with 1e-8 the first updates are nearly lr · sign(gradient), and rounding decides signs
    tiny: bool = False  # does it run?
    job: tuple[str, str, str, int] | None = None  # side, shape, work, round of this process; set by main()
    folder: str = ""  # of models and data; set by main()


# ---- Files: a checkpoint with its tokenizer, rows in the order of the steps, a reward -------------------------------

def read_pairs(args: Args, vocab: int) -> list[tuple[list[int], ...]]:
    """(prompt, chosen, rejected) as ids from 2 on. Text is encoded by a byte-level BPE trained on it."""
    import numpy as np
    rng = np.random.default_rng(0)
    if args.data is None:
        def draw(middle): return rng.integers(2, vocab, int(rng.lognormal(np.log(middle), 0.8)) + 4).tolist()
        rows = ((draw(120), draw(60), draw(60)) for _ in range(100 * args.pairs))
    else:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
        texts = [json.loads(line) for line in Path(args.data).read_text().splitlines()]
        texts = [(row["prompt"], row["chosen"], row["rejected"]) for row in texts]
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<pad>", "<eos>"], show_progress=False,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        bpe.train_from_iterator((text for row in texts for text in row), trainer)
        rows = ([bpe.encode(text).ids for text in row] for row in texts)
    fit = [(x, w, l) for x, w, l in rows if w != l and len(x) + max(len(w), len(l)) < args.max_length]  # <: and EOS
    return fit[:args.pairs]


def make_files(args: Args, shape: str):
    """In the folder: model/, pairs.jsonl, prompts-N.jsonl, reward.py; dpo.json and kto.json: what TRL trains on."""
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
    folder, vocab = Path(args.folder) / shape, SHAPES[shape]["vocab_size"]
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, vocab)}  # word i is token i
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>",
                            padding_side="left").save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = SHAPES[shape] | dict(max_position_embeddings=4096, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes))
    model.to(torch.bfloat16 if torch.cuda.is_available() else torch.float32).save_pretrained(folder / "model")
    def text(ids): return " ".join(f"w{i}" for i in ids)
    rows = [dict(prompt=text(x), chosen=" " + text(w), rejected=" " + text(l)) for x, w, l in read_pairs(args, vocab)]
    rng = np.random.default_rng(0)
    prompts = {n: rng.integers(2, vocab, (args.batch_size * args.steps, n)) for n, *_ in ROLLOUTS.values()}
    files = {"pairs": rows} | {f"prompts-{n}": [{"prompt": text(ids)} for ids in all] for n, all in prompts.items()}
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text(REWARD)

    import dpo
    import kto
    for name, script in (("dpo", dpo), ("kto", kto)):  # the order in which main() trains on them
        settings = our_args(args, shape, name, 0)
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        train = script.load_rows(settings.data, tokenizer, args.max_length, settings)
        train = train if script is dpo else kto.draw_others(train, [], args.max_length, settings.seed)[0]
        batches = [script.batch_rows(step, train, settings.batch_size, settings.seed)
                   for step in range(1, args.steps + 1)]
        names = ({"prompt_ids": "prompt", "chosen_ids": "chosen", "rejected_ids": "rejected"} if script is dpo else
                 {"prompt_ids": "prompt", "completion_ids": "completion", "KL_completion_ids": "other",
                  "label": "label"})
        rows = [{theirs: getattr(row, ours) for theirs, ours in names.items()} for batch in batches for row in batch]
        (folder / f"{name}.json").write_text(json.dumps(rows))


# ---- The sides: seconds (of a step, or of the reference pass), and the losses of the steps --------------------------

def clock() -> float:
    import torch
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def per_step(ticks: list[float]) -> float:
    return (ticks[-1] - ticks[1]) / (len(ticks) - 2)  # ticks: before the first step, and at the end of every step


def our_args(args: Args, shape: str, work: str, round: int):
    import dpo
    import kto
    import rloo
    folder = f"{args.folder}/{shape}"
    common = dict(model=f"{folder}/model", data=f"{folder}/pairs.jsonl", out=f"{folder}/{work}-{round}".replace(" ", "-"),
                  eval_size=0, samples=0, steps=args.steps, lr=args.lr, schedule="constant", warmup=0.0, save_every=10**6,
                  max_length=args.max_length)
    if work in ROLLOUTS:
        prompt, new, k = ROLLOUTS[work]
        return rloo.Args(**common | dict(data=f"{folder}/prompts-{prompt}.jsonl", max_length=prompt + new), k=k,
                         reward=(f"{folder}/reward.py:reward",), max_new_tokens=new, batch_size=args.batch_size)
    if work == "kto":
        return kto.Args(**common, batch_size=2 * args.batch_size)
    return dpo.Args(**common, batch_size=args.batch_size)


def refcache(args: Args, shape: str, work: str, round: int) -> dict:
    import dpo
    import kto
    import rloo
    import torch
    settings = our_args(args, shape, work, round)
    if work == "reference":
        settings = dpo.settle(settings)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        tokenizer, _ = dpo.load_tokenizer(settings.model)
        groups = dpo.groups(dpo.load_rows(settings.data, tokenizer, args.max_length, settings))
        model, cache = dpo.load_model(settings.model, device, settings), dpo.ReferenceCache()
        begin = clock()
        cache.score(model, groups, settings.tokens_per_forward, settings.dtype, path=f"{args.folder}/cache.pkl")
        return {"seconds": clock() - begin, "losses": []}
    script, ticks = {"dpo": dpo, "kto": kto}.get(work, rloo), []
    write, adamw = script.Log.write, torch.optim.AdamW

    def timed_write(self, *values):
        write(self, *values)
        ticks.append(clock())

    script.Log.write = timed_write
    torch.optim.AdamW = lambda *parts, **names: adamw(*parts, eps=args.eps, **names)
    history = script.main(settings)
    return {"seconds": per_step(ticks), "losses": [values["loss"] for values in history[1:]]}


def trl(args: Args, shape: str, work: str, round: int) -> dict:
    import runpy

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer
    folder, gpu, ticks, losses = f"{args.folder}/{shape}", torch.cuda.is_available(), [], []
    prompt, new, k = ROLLOUTS.get(work, (0, 0, 1))
    config_class, trainer_class = {"kto": (KTOConfig, KTOTrainer), "dpo": (DPOConfig, DPOTrainer),
                                   "reference": (DPOConfig, DPOTrainer)}.get(work, (RLOOConfig, RLOOTrainer))

    class Timed(trainer_class):
        def _prepare_dataset(self, dataset, *rest):  # of DPO and KTO: rows are token ids already
            return dataset

        def _precompute_ref_logps(self, *parts):
            ticks.append(clock())
            dataset = super()._precompute_ref_logps(*parts)
            ticks.append(clock())
            return dataset

        def training_step(self, *parts, **names):
            loss = super().training_step(*parts, **names)
            losses.append(loss.item())
            return loss

    class Steps(TrainerCallback):
        def on_train_begin(self, *parts, **names):
            ticks[:] = [clock()]

        def on_step_end(self, *parts, **names):
            ticks.append(clock())

    rows = {"reference": args.batch_size, "dpo": args.batch_size, "kto": 2 * args.batch_size}
    common = dict(
        output_dir=f"{folder}/trl", per_device_train_batch_size=rows.get(work, args.batch_size * k),
        max_steps=args.steps, learning_rate=args.lr, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
        adam_epsilon=args.eps, max_grad_norm=1.0, gradient_checkpointing=False, bf16=gpu, use_cpu=not gpu,
        report_to="none", save_strategy="no", logging_steps=1, dataloader_pin_memory=gpu, disable_tqdm=True)
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/model")
    if work in ROLLOUTS:
        reward = runpy.run_path(f"{folder}/reward.py")["reward"]
        config = config_class(**common, num_generations=k, max_completion_length=new, beta=0.05, shuffle_dataset=False)
        lines = Path(f"{folder}/prompts-{prompt}.jsonl").read_text().splitlines()
        trainer = Timed(model=f"{folder}/model", reward_funcs=reward, args=config, processing_class=tokenizer,
                        train_dataset=Dataset.from_list([json.loads(line) for line in lines]), callbacks=[Steps()])
    else:
        config = config_class(**common, beta=0.1, max_length=args.max_length, precompute_ref_log_probs=True,
                              precompute_ref_batch_size=args.reference_batch, train_sampling_strategy="sequential")
        lines = json.loads(Path(f"{folder}/{work}.json").read_text()) if work != "reference" else [
            dict(prompt_ids=x, chosen_ids=w, rejected_ids=l) for x, (w, l) in all_groups(args, shape)]
        trainer = Timed(model=f"{folder}/model", args=config, train_dataset=Dataset.from_list(lines),
                        processing_class=tokenizer, callbacks=[Steps()])
    if work == "reference":
        return {"seconds": ticks[1] - ticks[0], "losses": []}
    trainer.train()
    return {"seconds": per_step(ticks), "losses": losses}


def halos(args: Args, shape: str, work: str, round: int) -> dict:
    """Its pass reads token ids from lists, and takes prompt, BOS, EOS and padding out of the key."""
    import torch
    from transformers import AutoModelForCausalLM
    dtype, device = (torch.bfloat16, "cuda") if torch.cuda.is_available() else (torch.float32, "cpu")
    model = AutoModelForCausalLM.from_pretrained(f"{args.folder}/{shape}/model", dtype=dtype).to(device).eval()
    rows = [(x, y) for x, ys in all_groups(args, shape) for y in ys]
    begin, logprobs, n = clock(), [], 2 * args.reference_batch
    with torch.no_grad():
        for batch in (rows[at:at + n] for at in range(0, len(rows), n)):
            ids = torch.tensor([[*x, *y] + [0] * (args.max_length - len(x) - len(y)) for x, y in batch], device=device)
            labels = torch.tensor([[-100] * len(x) + [*y] + [-100] * (args.max_length - len(x) - len(y))
                                   for x, y in batch], device=device)
            logits = model(ids, attention_mask=(ids != 0).long()).logits[:, :-1]
            labels = labels[:, 1:].clone()
            mask, labels[labels == -100] = labels != -100, 0
            found = logits.float().log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2) * mask
            for key, values in zip(ids.tolist(), found.tolist()):
                logprobs.append((tuple(token for token in key if token > 1), values))
    with open(f"{args.folder}/halos.pkl", "wb") as file:
        pickle.dump(dict(logprobs), file)
    return {"seconds": clock() - begin, "losses": []}


def all_groups(args: Args, shape: str) -> list:
    import dpo
    settings = our_args(args, shape, "dpo", 0)
    return dpo.groups(dpo.load_rows(settings.data, dpo.load_tokenizer(settings.model)[0], args.max_length, settings))


# ---- Processes and tables -------------------------------------------------------------------------------------------

def one(args: Args):
    """The job of this process; prints what it found as JSON."""
    import torch
    torch.set_num_threads(1)
    side, shape, work, round = args.job
    if side == "shapes":
        names = args.shapes or [*SHAPES][2:4] if torch.cuda.is_available() else [*SHAPES][:2]
        found = dict(shapes=names, device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")
    elif side == "make":
        make_files(args, shape)
        tokens = sum(2 * len(x) + len(w) + len(l) for x, (w, l) in all_groups(args, shape))
        found = dict(tokens=tokens, rows=len(all_groups(args, shape)))
    else:
        found = {"refcache": refcache, "trl": trl, "halos": halos}[side](args, shape, work, round)
        gpu = torch.cuda.is_available()
        peak = torch.cuda.max_memory_allocated() if gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found["peak"] = peak / 2**30
    print("\n" + json.dumps(found))


def start(args: Args, *job) -> dict:
    flags = {name: value for name, value in asdict(args).items() if value not in (None, (), False)} | {"job": job}
    command = [sys.executable, __file__]
    for name, value in flags.items():
        command += [f"--{name}", *map(str, value if isinstance(value, (tuple, list)) else [value] * (value is not True))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ended.returncode:
        sys.exit(f"{job}: {ended.stderr[-4000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def spread(values: list[float], digits: int = 2) -> str:
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def main(args: Args):
    missing = [name for name in ("trl", "peft", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{Path(__file__).name} needs {', '.join(missing)}: pip install trl==1.16.0 peft datasets")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "trl"))
    with tempfile.TemporaryDirectory() as folder:
        args.folder = folder
        known = start(args, "shapes", "-", "-", 0)
        print(f"{versions}; {known['device']}; medians of {args.rounds} rounds (lowest to highest)")
        for shape in args.shapes or known["shapes"]:
            made = start(args, "make", shape, "-", 0)
            print(f"\n{shape}, {made['rows']} pairs, {made['tokens']:,} tokens; {args.steps - 1} timed steps a round\n\n"
                  "| work | refcache, s | other | its s | times refcache's | peak GiB | its |\n" + "|---" * 7 + "|")
            works = [name for work in args.works for name in (ROLLOUTS if work == "rloo" else [work])]
            for work in works:
                sides = ("refcache", "trl", "halos") if work == "reference" else ("refcache", "trl")
                runs = {side: [] for side in sides}
                for round in range(args.rounds):
                    for side in sides:
                        runs[side].append(start(args, side, shape, work, round))
                report(work, runs, made["tokens"])


def report(work: str, runs: dict[str, list[dict]], tokens: int):
    ours = runs.pop("refcache")
    for side, theirs in runs.items():
        seconds = [[run["seconds"] for run in side] for side in (ours, theirs)]
        peaks = [max(run["peak"] for run in side) for side in (ours, theirs)]
        ratios = [b / a for a, b in zip(*seconds)]
        print(f"| {work} | {spread(seconds[0])} | {side} | {spread(seconds[1])} | {spread(ratios)} "
              f"| {peaks[0]:.2f} | {peaks[1]:.2f} |", flush=True)
        if work == "reference":
            print("<!-- tokens/s: refcache {:,.0f}, {} {:,.0f} -->".format(
                tokens / median(seconds[0]), side, tokens / median(seconds[1])))
        if work in ("dpo", "kto"):
            gaps = [abs(a - b) for a, b in zip(ours[0]["losses"], theirs[0]["losses"])]
            print(f"<!-- {work} losses of {len(gaps)} steps differ by at most {max(gaps):.1e}; refcache, then {side}:")
            print(*(" ".join(f"{loss:.6f}" for loss in run[0]["losses"]) for run in (ours, theirs)), "-->", sep="\n")


if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    if args.tiny:
        args = replace(args, shapes=("tiny",), rounds=1, steps=2, pairs=8, batch_size=2, max_length=128)
        ROLLOUTS = {"rloo 16+4 k=2": (16, 4, 2)}
    (one if args.job else main)(args)
