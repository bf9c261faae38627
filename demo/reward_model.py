"""A reward model as a reward of rloo.py: a file to copy, and to change where your model needs something else.

    REWARD_MODEL=Skywork/Skywork-Reward-V2-Qwen3-0.6B python rloo.py --reward demo/reward_model.py:score ...

The model is a classifier with one output. It reads messages with its own chat template, strings as they are.
Only a sample that has ended gets an end: the end of the turn, or EOS after a string.
"""
import math
import os
from functools import cache, partial

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer

BATCH_SIZE = 8  # samples per forward pass


@cache
def load(name: str) -> tuple:
    """The tokenizer and the model of a folder or hub name."""
    model, info = AutoModelForSequenceClassification.from_pretrained(name, output_loading_info=True)
    if model.config.num_labels != 1 or info["missing_keys"]:  # missing weights would stay random
        raise ValueError(f"{name} is no classifier with one output, or lacks weights")

    model.config.use_cache = False  # keys and values would take memory for nothing
    return AutoTokenizer.from_pretrained(name), model


def apply_template(tokenizer, prompt: list, completion: list, ended: bool, tools, options) -> str:
    """The text of a chat and its sample, as the chat template writes them."""
    template = partial(tokenizer.apply_chat_template, tokenize=False, tools=tools or None, **(options or {}))
    answer = completion[0]["content"]
    is_begun = prompt[-1]["role"] == "assistant"  # the sample continues this answer

    if not ended:  # the template does not see the sample: it could change a thought that was cut off
        return template(prompt, add_generation_prompt=not is_begun, continue_final_message=is_begun) + answer
    if is_begun:
        message = prompt[-1] | {"content": prompt[-1]["content"] + answer}
        return template(prompt[:-1] + [message])
    return template(prompt + completion)


def encode(tokenizer, prompt, completion, ended: bool, tools, options) -> list[int]:
    """The token ids of a prompt and its sample."""
    if not isinstance(prompt, str):
        text = apply_template(tokenizer, prompt, completion, ended, tools, options)
        return tokenizer(text, add_special_tokens=False).input_ids  # the template has written BOS

    ids = tokenizer(prompt + completion, add_special_tokens=False).input_ids
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    adds_bos = tokenizer("a").input_ids[0] == bos
    if adds_bos and ids[:1] != [bos]:  # a prompt may begin with BOS
        ids = [bos] + ids
    if ended and eos is not None and ids[-1:] != [eos]:
        ids = ids + [eos]
    return ids


@torch.no_grad()
def score(
        prompts, completions, ended, tools=None, chat_template_kwargs=None, **columns) -> list[float | None]:
    """The score of each sample. It is None if the sample is too long for the model."""
    tokenizer, model = load(os.environ["REWARD_MODEL"])
    missing = [None] * len(prompts)  # a column that no row has
    samples = zip(prompts, completions, ended, tools or missing, chat_template_kwargs or missing)
    rows = [torch.tensor(encode(tokenizer, *sample)) for sample in samples]

    # Rows of similar length share a forward pass, so that there is little padding.
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or math.inf
    fitting = [i for i, row in enumerate(rows) if len(row) <= context]
    fitting.sort(key=lambda i: len(rows[i]), reverse=True)  # longest first: out of memory comes at once
    pad = config.pad_token_id
    batch_size = 1 if pad is None else BATCH_SIZE  # by this token the model finds the end of a padded row

    model.to("cuda" if torch.cuda.is_available() else "cpu")
    scores = [None] * len(rows)
    for start in range(0, len(fitting), batch_size):
        batch = fitting[start:start + batch_size]
        ids = pad_sequence([rows[i] for i in batch], batch_first=True, padding_value=pad or 0)  # (b, T)
        mask = pad_sequence([torch.ones_like(rows[i]) for i in batch], batch_first=True)
        logits = model(ids.to(model.device), attention_mask=mask.to(model.device)).logits  # (b, 1)
        for i, logit in zip(batch, logits[:, 0].tolist()):
            scores[i] = logit

    model.cpu()  # the weights wait there for the next call
    return scores
