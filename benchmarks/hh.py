"""Real preferences on a CPU: Anthropic's HH, all three scripts, with TRL beside them.

    python benchmarks/hh.py --data hh_train.jsonl       # about 45 CPU minutes; the same command goes on after a stop
    python benchmarks/hh.py --data hh_train.jsonl --hidden 64 --layers 1 --lm_epochs 1 --pairs 16 --test 8    # tiny

From rows prompt, chosen, rejected a small Llama with its own tokenizer learns the dialogues (prompt + chosen) as a
language model. With a new head it learns to tell chosen from rejected (Bradley-Terry): RLOO's reward model. Then
dpo.py, kto.py, rloo.py and TRL's DPOTrainer and KTOTrainer start from it, each with some seeds and in a process of its
own. TRL gets the same rows in the same order, batch size, constant learning rate and β. All models are measured by one
function on held-out pairs: the share where β (log π − log π_ref) is higher for chosen (ties 1/2), and by how much.

Seconds are CPU seconds of the whole command, medians over the seeds; the ways alternate. dpo.py and kto.py share one
file of reference log-probs, TRL runs its second model in every step: the defaults. Needs `pip install trl==1.16.0`.
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


@dataclass
class Args:
    data: str
    out: str = "out/hh"
    ways: tuple[str, ...] = ("dpo", "trl dpo", "kto", "trl kto", "rloo")
    seeds: tuple[int, ...] = (0, 1, 2)
    test: int = 256  # held-out pairs
    pairs: int = 512  # training pairs of the reward model and of every run; the language model learns from all
    hidden: int = 256
    layers: int = 4
    vocab: int = 4096
    max_length: int = 256  # longer rows are left out
    lm_epochs: int = 3
    lr: float = 1e-4
    beta: float = 0.1
    batch_size: int = 16  # pairs; of KTO twice as many rows, of RLOO 8 prompts with 4 samples each
    new_tokens: int = 64  # of RLOO's samples
    way: str | None = None  # run this one with the first seed, for the processes


# ---- The models that everything starts from -------------------------------------------------------------------------

def train_tokenizer(rows: list[dict], size: int):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = [row[name] for row in rows for name in ("prompt", "chosen", "rejected")]
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, special_tokens=["<|pad|>", "<|end|>"],
                                                       initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|end|>")


def optimize(model, batches: list, loss_of, lr: float):
    """AdamW over the batches, once, with a cosine."""
    import torch
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step, batch in enumerate(batches):
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / len(batches))
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 20, cosine)
        loss_of(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def make_files(args: Args):
    """train.jsonl, test.jsonl, a language model in model/, a reward model in reward/. Prints how good they are."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
    torch.manual_seed(0)
    out, lines = Path(args.out), open(args.data).readlines()
    out.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(lines[i]) for i in torch.randperm(len(lines)).tolist()]
    tokenizer = train_tokenizer(rows[args.test:], args.vocab)

    def encode(row, name): return tokenizer(row["prompt"] + row[name] + tokenizer.eos_token).input_ids
    rows = [row for row in rows if row["chosen"] != row["rejected"] and
            max(len(encode(row, name)) for name in ("chosen", "rejected")) <= args.max_length]
    test, asked = rows[:args.test], {row["prompt"] for row in rows[:args.test]}
    train = [row for row in rows[args.test:] if row["prompt"] not in asked]
    pairs = train[:args.pairs]
    for name, part in (("train", pairs), ("test", test)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))

    def blocks(part):  # (n, max_length): the dialogues one after the other, cut into rows
        ids = torch.tensor([token for row in part for token in encode(row, "chosen")])
        return ids[:len(ids) // args.max_length * args.max_length].view(-1, args.max_length)

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=args.hidden, intermediate_size=int(2.75 * args.hidden), pad_token_id=0,
        num_hidden_layers=args.layers, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True,
        max_position_embeddings=args.max_length + 256, bos_token_id=None, eos_token_id=tokenizer.eos_token_id))
    ids = blocks(train)
    batches = [ids[part] for _ in range(args.lm_epochs) for part in torch.randperm(len(ids)).split(8)]
    optimize(model, batches, lambda x: model(input_ids=x, labels=x).loss, 1e-3)
    with torch.no_grad():
        losses = [model(input_ids=x, labels=x).loss.item() for x in blocks(test).split(8)]
    print(f"{model.num_parameters():,} parameters, {ids.numel():,} tokens; held out {mean(losses):.2f} nats per token")
    model.save_pretrained(out / "model")
    judge = LlamaForSequenceClassification.from_pretrained(out / "model", num_labels=1)

    def margin(pairs):  # (n,): score of chosen − score of rejected
        texts = [row["prompt"] + row[name] + tokenizer.eos_token for name in ("chosen", "rejected") for row in pairs]
        batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        scores = judge(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0]
        return scores[:len(pairs)] - scores[len(pairs):]

    batches = [pairs[i:i + args.batch_size] for i in range(0, len(pairs), args.batch_size)]
    optimize(judge, batches, lambda batch: -torch.nn.functional.logsigmoid(margin(batch)).mean(), args.lr)
    with torch.no_grad():
        margins = torch.cat([margin(test[i:i + 16]) for i in range(0, len(test), 16)])
    print(f"reward model: held-out accuracy {(margins > 0).float().mean():.3f}")
    judge.save_pretrained(out / "reward")
    for name in ("model", "reward"):
        tokenizer.save_pretrained(out / name)


# ---- One run --------------------------------------------------------------------------------------------------------

def ours(script: str, out: str, seed: int, args: Args):
    flags = dict(model=f"{args.out}/model", data=f"{args.out}/train.jsonl", eval_data=f"{args.out}/test.jsonl", out=out,
                 lr=args.lr, schedule="constant", warmup=0.0, seed=seed, dtype="float32")
    if script == "rloo":
        flags |= dict(reward_model=f"{args.out}/reward", max_new_tokens=args.new_tokens, batch_size=8,
                      max_length=args.max_length + args.new_tokens, samples=128,
                      steps=math.ceil(args.pairs / args.batch_size))
    else:
        flags |= dict(ref_cache=f"{args.out}/reference_logprobs.pkl", beta=args.beta, samples=0,
                      batch_size=args.batch_size * (2 if script == "kto" else 1))
    command = [sys.executable, f"{ROOT}/{script}.py", *(f"--{name}={value}" for name, value in flags.items())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # its errors are shown


def trl(script: str, out: str, seed: int, args: Args):
    """TRL's trainer, with the rows in the order in which ours draws them."""
    import trl
    from datasets import Dataset
    module, model = __import__(script), f"{args.out}/model"
    flags, (tokenizer, _) = module.Args(model=model, data=f"{args.out}/train.jsonl"), module.load_tokenizer(model)
    rows = module.load_rows(flags.data, tokenizer, args.max_length, flags)
    rows = [rows[i] for i in module.generator(seed, "order", 0).permutation(len(rows))]
    if script == "dpo":
        config, trainer, size = trl.DPOConfig, trl.DPOTrainer, args.batch_size
        table = [{name: row.row[name] for name in ("prompt", "chosen", "rejected")} for row in rows]
    else:
        config, trainer, size = trl.KTOConfig, trl.KTOTrainer, 2 * args.batch_size
        table = [{"prompt": row.row["prompt"], "completion": row.row["chosen" if row.label else "rejected"],
                  "label": row.label} for row in rows]
    config = config(
        output_dir=out, per_device_train_batch_size=size, beta=args.beta, learning_rate=args.lr, seed=seed,
        lr_scheduler_type="constant", num_train_epochs=1, max_length=args.max_length, report_to="none", bf16=False,
        train_sampling_strategy="sequential", gradient_checkpointing=False, use_cpu=True, save_strategy="no")
    trainer = trainer(model=model, args=config, train_dataset=Dataset.from_list(table), processing_class=tokenizer)
    trainer.train()
    trainer.save_model(f"{out}/model")


# ---- All runs -------------------------------------------------------------------------------------------------------

def held_out(folder: str, args: Args) -> tuple[float, float]:
    """Accuracy and mean margin on the held-out pairs."""
    import dpo
    import torch
    flags = dpo.resolve_args(dpo.Args(model=f"{args.out}/model", data=f"{args.out}/test.jsonl", dtype="float32"))
    tokenizer, longest = dpo.load_tokenizer(flags.model)
    rows = dpo.load_rows(flags.data, tokenizer, longest, flags)
    known = dpo.ReferenceCache(reference=dpo.digest_of(flags.model))
    known.fill(lambda: dpo.load_model(flags.model, "cpu", flags), dpo.groups(rows), path=f"{args.out}/reference.pkl")
    with torch.no_grad():
        batch = dpo.measure(dpo.load_model(folder, "cpu", flags), rows, known, flags)
    values = dpo.metrics(batch, dpo.replace(flags, beta=args.beta))
    return values["rewards/accuracies"], values["rewards/margins"]


def spread(values) -> str:
    return f"{mean(values):.3f} ± {stdev(values) if len(values) > 1 else 0:.3f}"


def main(args: Args):
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    if not Path(args.out, "reward/tokenizer.json").exists():
        make_files(args)
    found, folders = {way: [] for way in args.ways}, [f"{args.out}/seed-{seed}" for seed in args.seeds]
    for seed, folder in zip(args.seeds, folders):
        for way in args.ways:
            done = Path(folder, f"{way}.cpu_seconds")
            if not done.exists():
                flags = {name: value for name, value in asdict(args).items() if name != "ways"}
                flags = [f"--{name}={value}" for name, value in (flags | {"way": way, "seeds": seed}).items()]
                begin = resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run([sys.executable, __file__, *flags], check=True, stdout=subprocess.DEVNULL)
                end = resource.getrusage(resource.RUSAGE_CHILDREN)
                done.write_text(str(end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime))
            found[way].append((*held_out(f"{folder}/{way}/model", args), float(done.read_text())))
    print("\n| | held-out accuracy | held-out margin | CPU seconds |\n|---|---|---|---|")
    for way, values in found.items():
        accuracies, margins, seconds = zip(*values)
        print(f"| {way} | {spread(accuracies)} | {spread(margins)} | {median(seconds):.0f} |")
    logs = [Path(folder, "rloo/metrics.jsonl").read_text().splitlines() for folder in folders if "rloo" in found]
    before, after = ([json.loads(log[i])["eval_reward"] for log in logs] for i in (0, -1))
    print(f"\nrloo, reward of samples for held-out prompts: {spread(before)} -> {spread(after)}" if logs else "")


if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    if args.way:
        run = trl if args.way.startswith("trl") else ours
        run(args.way.split()[-1], f"{args.out}/seed-{args.seeds[0]}/{args.way}", args.seeds[0], args)
    else:
        main(args)
