"""Real preferences on a CPU: Anthropic's HH, all three scripts, with TRL beside them.

    python benchmarks/hh.py --data hh_train.jsonl                   # rows prompt, chosen, rejected; about half an hour
    python benchmarks/hh.py --data hh_train.jsonl --ways dpo "trl dpo" --seeds 0
    python benchmarks/hh.py --data hh_train.jsonl --hidden 64 --layers 1 --lm_epochs 0.1 --pairs 16 --test 8 --new_tokens 8
                                                                    # tiny: does it run?

1. A small Llama with its own tokenizer learns the training dialogues (prompt + chosen) as a language model.
2. The same model, with a new head, learns to tell chosen from rejected (Bradley-Terry): RLOO's reward model.
3. dpo.py, kto.py, rloo.py, and TRL's DPOTrainer and KTOTrainer start from 1, each with some seeds. TRL gets the same
   rows in the same order, batch size, constant learning rate and β; every run is a process of its own.
4. All models are measured by one function on the same held-out pairs: the share where β (log π − log π_ref) is higher
   for chosen, and by how much.

Seconds are CPU seconds of the whole command, medians over the seeds; the runs of a seed follow each other. dpo.py and
kto.py share one file of reference log-probs, TRL runs its second model in every step, as both do by default.
Needs `pip install trl==1.16.0`. The same command goes on where it was stopped.
"""
import json
import math
import os
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev

import tyro

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
WAYS = ("dpo", "trl dpo", "kto", "trl kto", "rloo")


@dataclass
class Args:
    data: str
    out: str = "out/hh"
    ways: tuple[str, ...] = WAYS
    seeds: tuple[int, ...] = (0, 1, 2)
    test: int = 256  # held-out pairs
    pairs: int = 512  # training pairs of the reward model and of every run; the language model learns from all
    hidden: int = 256
    layers: int = 4
    vocab: int = 4096
    max_length: int = 256  # longer rows are left out
    lm_epochs: float = 4.0
    lm_lr: float = 1e-3
    lr: float = 1e-4
    beta: float = 0.1
    batch_size: int = 16  # pairs; KTO has two rows per pair, RLOO half as many prompts with 4 samples each
    new_tokens: int = 64  # of RLOO's samples
    way: str | None = None  # run this one with the first seed, for the processes


# ---------------------------------------------------------------------------------------------------------------------
# The checkpoint that everything starts from


def train_tokenizer(texts: list[str], size: int):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|pad|>", "<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|end|>")


def optimize(model, batches: list, loss_of, lr: float, name: str):
    """AdamW over the batches, once, with a cosine."""
    import torch
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    for step, batch in enumerate(batches):
        factor = min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / len(batches)))
        optimizer.param_groups[0]["lr"] = lr * factor
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"{name}: step {step + 1} of {len(batches)}, loss {loss.item():.3f}", flush=True)
    model.eval()


def make_files(args: Args):
    """train.jsonl, test.jsonl, a language model in model/, a reward model in reward/. Prints how good they are."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, set_seed
    out, generator = Path(args.out), torch.Generator().manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in open(args.data)]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=generator)]
    tokenizer = train_tokenizer([row[name] for row in rows[args.test:] for name in ("prompt", "chosen", "rejected")],
                                args.vocab)
    end = tokenizer.eos_token

    def encode(row, name): return tokenizer(row["prompt"] + row[name] + end).input_ids

    rows = [row for row in rows if row["chosen"] != row["rejected"] and
            max(len(encode(row, name)) for name in ("chosen", "rejected")) <= args.max_length]
    prompts = {row["prompt"] for row in rows[:args.test]}
    test, train = rows[:args.test], [row for row in rows[args.test:] if row["prompt"] not in prompts]
    for name, part in (("train", train[:args.pairs]), ("test", test)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))

    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=args.hidden, intermediate_size=int(2.75 * args.hidden),
        num_hidden_layers=args.layers, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True,
        max_position_embeddings=args.max_length + 256, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)
    model = LlamaForCausalLM(config)
    ids = torch.tensor([token for row in train for token in encode(row, "chosen")])
    blocks = ids[:len(ids) // args.max_length * args.max_length].view(-1, args.max_length)
    epochs = [torch.randperm(len(blocks), generator=generator) for _ in range(math.ceil(args.lm_epochs))]
    order = torch.cat(epochs)[:max(8, int(args.lm_epochs * len(blocks)))]
    optimize(model, [blocks[part] for part in order.split(8)],
             lambda model, ids: model(input_ids=ids, labels=ids).loss, args.lm_lr, "language model")
    with torch.no_grad():
        ids = torch.tensor([token for row in test for token in encode(row, "chosen")])
        blocks = ids[:len(ids) // args.max_length * args.max_length].view(-1, args.max_length)
        losses = [model(input_ids=block[None], labels=block[None]).loss.item() for block in blocks]
    print(f"{model.num_parameters() / 1e6:.1f} M parameters, {len(train)} dialogues, {len(order) * args.max_length:,} "
          f"tokens seen; held out: {mean(losses):.2f} nats per token")
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")

    judge = LlamaForSequenceClassification.from_pretrained(out / "model", num_labels=1)

    def margin(model, pairs):  # (n,): score of chosen − score of rejected
        texts = [row["prompt"] + row[name] + end for name in ("chosen", "rejected") for row in pairs]
        batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        scores = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0]
        return scores[:len(pairs)] - scores[len(pairs):]

    part, size = train[:args.pairs], args.batch_size
    optimize(judge, [part[i:i + size] for i in range(0, len(part), size)],
             lambda model, pairs: -torch.nn.functional.logsigmoid(margin(model, pairs)).mean(), args.lr, "reward model")
    with torch.no_grad():
        margins = torch.cat([margin(judge, test[i:i + size]) for i in range(0, len(test), size)])
    print(f"reward model: held-out accuracy {(margins > 0).float().mean():.3f}")
    judge.save_pretrained(out / "reward")
    tokenizer.save_pretrained(out / "reward")


# ---------------------------------------------------------------------------------------------------------------------
# One run, in a process of its own


def ours(script: str, seed: int, args: Args):
    flags = dict(model=f"{args.out}/model", data=f"{args.out}/train.jsonl", eval_data=f"{args.out}/test.jsonl",
                 lr=args.lr, beta=args.beta, batch_size=args.batch_size, schedule="constant", warmup=0.0, seed=seed,
                 out=f"{args.out}/{script}-{seed}", dtype="float32", samples=0)
    flags |= {"ref_cache": f"{args.out}/reference_logprobs.pkl"}
    if script == "kto":
        flags |= {"batch_size": 2 * args.batch_size}
    if script == "rloo":
        del flags["ref_cache"]
        flags |= dict(reward_model=f"{args.out}/reward", max_new_tokens=args.new_tokens, samples=128,
                      max_length=args.max_length + args.new_tokens, batch_size=max(1, args.batch_size // 2),
                      steps=math.ceil(args.pairs / args.batch_size), beta=0.05)
    command = [sys.executable, f"{ROOT}/{script}.py", *(f"--{name}={value}" for name, value in flags.items())]
    subprocess.run(command, check=True, capture_output=True)


def trl(script: str, seed: int, args: Args):
    """TRL's trainer, with the rows in the order in which ours draws them."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    module = __import__(script)
    tokenizer = AutoTokenizer.from_pretrained(f"{args.out}/model")
    flags = module.settle(module.Args(model=f"{args.out}/model", data=f"{args.out}/train.jsonl"))
    rows = module.load_rows(flags.data, tokenizer, args.max_length, flags)
    rows = [rows[i] for i in module.generator(seed, "order", 0).permutation(len(rows))]
    if script == "dpo":
        table = [{name: row.row[name] for name in ("prompt", "chosen", "rejected")} for row in rows]
    else:
        table = [{"prompt": row.row["prompt"], "completion": row.row["chosen" if row.label else "rejected"],
                  "label": row.label} for row in rows]
    config, trainer = {"dpo": (trl.DPOConfig, trl.DPOTrainer), "kto": (trl.KTOConfig, trl.KTOTrainer)}[script]
    out = f"{args.out}/trl-{script}-{seed}"
    config = config(
        output_dir=out, per_device_train_batch_size=args.batch_size * (2 if script == "kto" else 1), beta=args.beta,
        learning_rate=args.lr, lr_scheduler_type="constant", num_train_epochs=1, max_length=args.max_length, seed=seed,
        train_sampling_strategy="sequential", gradient_checkpointing=False, bf16=False, use_cpu=True, logging_steps=1,
        report_to="none", save_strategy="no", disable_tqdm=True)
    model = AutoModelForCausalLM.from_pretrained(f"{args.out}/model", dtype=torch.float32)
    trainer = trainer(model=model, args=config, train_dataset=Dataset.from_list(table), processing_class=tokenizer)
    trainer.train()
    trainer.save_model(f"{out}/model")
    Path(out, "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in trainer.state.log_history))


# ---------------------------------------------------------------------------------------------------------------------
# All runs


def held_out(folder: str, args: Args) -> tuple[float, float]:
    """Accuracy and mean margin on the held-out pairs."""
    import dpo
    import torch
    flags = dpo.settle(dpo.Args(model=f"{args.out}/model", data=f"{args.out}/test.jsonl", beta=args.beta))
    tokenizer, longest = dpo.load_tokenizer(flags.model)
    pairs = dpo.groups(dpo.load_rows(flags.data, tokenizer, longest, flags))
    with torch.no_grad():
        logps, ref_logps = (dpo.completion_logprobs(dpo.load_model(name, "cpu", flags), pairs)
                            for name in (folder, flags.model))
    ratios = torch.tensor([[(y - z).sum() for y, z in zip(*ys)] for ys in zip(logps, ref_logps)])  # (pairs, 2)
    margins = args.beta * (ratios[:, 0] - ratios[:, 1])
    return (margins > 0).float().mean().item(), margins.mean().item()


def start(way: str, seed: int, args: Args) -> float:
    """One process. Returns its CPU seconds, of an earlier call if it was finished then."""
    folder = Path(args.out) / f"{way.replace(' ', '-')}-{seed}"
    if not (folder / "cpu_seconds").exists():
        flags = asdict(args) | {"way": way, "seeds": seed}
        del flags["ways"]
        begin = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, __file__, *(f"--{name}={value}" for name, value in flags.items())], check=True)
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        (folder / "cpu_seconds").write_text(str(end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime))
    return float((folder / "cpu_seconds").read_text())


def spread(values) -> str:
    return f"{mean(values):.3f} ± {stdev(values) if len(values) > 1 else 0:.3f}"


def main(args: Args):
    out = Path(args.out)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not (out / "reward").exists():
        make_files(args)
    found = {way: [] for way in args.ways}
    for seed in args.seeds:
        for way in args.ways:
            seconds = start(way, seed, args)
            folder = out / f"{way.replace(' ', '-')}-{seed}"
            found[way].append((*held_out(f"{folder}/model", args), seconds))
            print(way, seed, *(f"{value:.3f}" for value in found[way][-1]), flush=True)
    print("\n| | held-out accuracy | held-out margin | CPU seconds |\n|---|---|---|---|")
    for way, values in found.items():
        accuracies, margins, seconds = zip(*values)
        print(f"| {way} | {spread(accuracies)} | {spread(margins)} | {median(seconds):.0f} |")
    for name in ("eval_reward", "eval_kl") if "rloo" in found else ():
        logs = [(out / f"rloo-{seed}/metrics.jsonl").read_text().splitlines() for seed in args.seeds]
        before, after = ([json.loads(log[i])[name] for log in logs] for i in (0, -1))
        print(f"\nrloo, {name}: {spread(before)} -> {spread(after)}")


if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    if args.way:
        (trl if args.way.startswith("trl") else ours)(args.way.split()[-1], args.seeds[0], args)
    else:
        main(args)
