"""Makes everything else in this folder: a tiny chat model, its tokenizer, and the data to align it with.

    python demo/make.py          # about a minute on two cores; the same bytes every time on the same machine

The model learns from scratch to say how a dish was somewhere. Its opinions are good or bad by the toss of a coin, so
about a quarter of its replies are praise throughout. To make it all of them is the task of dpo.py, kto.py and rloo.py.

    model/              Llama, float32, 0.43 M parameters; byte-level BPE, large enough for a token a word
    pairs*.jsonl        prompt, chosen (praise throughout), rejected (at least one opinion is bad)
    feedback*.jsonl     prompt, completion, label (two thumbs up for three down)
    prompts*.jsonl      prompt

Every row also has the `thing` and the `place` asked about, for score.py. The *_test files ask about things and places
that occur in no other data file (the model met them in SFT), so that they measure what carries over.
"""

import json
import math
import random
import re
import time
from itertools import product
from pathlib import Path

import torch
import tyro
from score import BAD, GOOD, PEOPLE, PLACES, QUESTIONS, REPLIES, THINGS, sentiment, success
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
STEPS, BATCH, LR = 1000, 48, 4e-3
PAD, USER, ASSISTANT, END = SPECIAL = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]

# <|end|> is the EOS token and closes every turn, so a reply stops by itself. System messages are left out.
CHAT_TEMPLATE = (
    "{% for message in messages if message.role != 'system' %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


# ----------------------------------------------------------------------------------------------------------------------
# Data


def ask(rng, rows, things, places):
    """Rows with a question each, all different while there are enough of them."""
    questions = list(product(QUESTIONS, things, places))
    rng.shuffle(questions)
    questions *= math.ceil(rows / len(questions))
    for question, thing, place in questions[:rows]:
        text = question.format(thing=thing, place=place)
        yield {"prompt": [{"role": "user", "content": text}], "thing": thing, "place": place}


def answer(rng, row, praise=None):
    """A reply with each opinion good or bad by a coin; `praise` True or False: all of them good, or not all."""
    form = rng.choice(REPLIES)  # before the coins, or short replies would be the good ones
    slots = re.findall("{(taste|manner)}", form)
    while True:
        coins = [rng.random() < 0.5 for _ in slots]
        if praise is None or praise == all(coins):
            break
    for slot, good in zip(slots, coins):
        form = form.replace(f"{{{slot}}}", rng.choice((GOOD if good else BAD)[slot]), 1)
    text = form.format(thing=row["thing"], place=row["place"], who=rng.choice(PEOPLE))
    return [{"role": "assistant", "content": text}]


def write_data(rng):
    train, test = (THINGS[:32], PLACES[:12]), (THINGS[32:], PLACES[12:])
    for suffix, words, sizes in ("", train, (1000, 2000, 500)), ("_test", test, (128, 192, 64)):
        pairs, feedback, prompts = (list(ask(rng, size, *words)) for size in sizes)
        for row in pairs:
            row |= {"chosen": answer(rng, row, True), "rejected": answer(rng, row, False)}
        for row in feedback:
            label = rng.random() < 0.4
            row |= {"completion": answer(rng, row, label), "label": label}
        for name, rows in ("pairs", pairs), ("feedback", feedback), ("prompts", prompts):
            with open(HERE / f"{name}{suffix}.jsonl", "w") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


# ----------------------------------------------------------------------------------------------------------------------
# Model


def train_tokenizer(texts):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes, so that any text can be encoded
    options = {"special_tokens": SPECIAL, "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=704, **options))
    tokens = {"pad_token": PAD, "eos_token": END, "extra_special_tokens": [USER, ASSISTANT]}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHAT_TEMPLATE, model_max_length=256, **tokens)


def new_model(tokenizer):
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,  # the fewest that can copy a word from the question
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,  # the usual 0.02 is for wider models; this one would wake up late
        **special,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, **special)  # sample all it believes
    return model


def sft(model, tokenizer, chats):
    """One pass over the chats, loss on what the assistant says."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98))
    assistant, pad = tokenizer.convert_tokens_to_ids([ASSISTANT, PAD])
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        batch = tokenizer(chats[step * BATCH : (step + 1) * BATCH], padding=True, return_tensors="pt")
        ids = batch.input_ids  # (B, T)
        spoken = ((ids == assistant).cumsum(1) > 0) & (ids != assistant) & (ids != pad)  # (B, T) up to and with <|end|>
        loss = model(**batch, labels=ids.where(spoken, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0:
            print(f"step {step + 1}  loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def lead_with_the_head(model, times=16):
    # The same function, but Adam, which moves every weight by about the learning rate whether it matters or not, now
    # reaches further through the head. Otherwise it would unlearn to copy the dish's name before an opinion changes.
    model.lm_head.weight /= times
    model.model.norm.weight *= times


def sample(model, tokenizer, prompts):
    texts = [tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) for prompt in prompts]
    batch = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    ids = model.eval().generate(**batch, max_new_tokens=32)
    return tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)


def main():
    start = time.time()
    rng = random.Random(0)
    torch.manual_seed(0)
    torch.set_num_threads(2)  # sums in another order make another model
    write_data(rng)

    chats = [row["prompt"] + answer(rng, row) for row in ask(rng, STEPS * BATCH, THINGS, PLACES)]
    tokenizer = train_tokenizer(message["content"] for chat in chats for message in chat)
    model = new_model(tokenizer)
    sft(model, tokenizer, [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats])
    lead_with_the_head(model)
    model.save_pretrained(HERE / "model")
    tokenizer.save_pretrained(HERE / "model")

    rows = [json.loads(line) for line in open(HERE / "prompts_test.jsonl")] * 16  # 1024 samples: a quarter +- 0.014
    prompts, things, places = ([row[name] for row in rows] for name in ("prompt", "thing", "place"))
    replies = sample(model, tokenizer, prompts)
    answered = sum(share >= 0 for share in sentiment(prompts, replies, things, places)) / len(rows)
    praised = sum(success(prompts, replies, things, places)) / len(rows)
    for row, reply in zip(rows[:3], replies):
        print(f"  {row['prompt'][0]['content']}  ->  {reply}")
    print(f"{model.num_parameters():,} parameters, made in {time.time() - start:.0f} s")
    print(f"answered {answered:.3f}  success {praised:.3f}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__, use_underscores=True)
