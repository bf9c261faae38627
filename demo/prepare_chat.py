"""Turns rows of strings into rows of chat messages: pairs, rated answers, or prompts alone.

    python demo/prepare_chat.py strings.jsonl messages.jsonl  # either may end in .gz
    python dpo.py --model Qwen/Qwen3-0.6B --data messages.jsonl

A prompt becomes a message of the user, an answer one of the assistant. A dialogue "\\n\\nHuman: ..\\n\\nAssistant: ..",
as in Anthropic's HH (huggingface.co/datasets/Anthropic/hh-rlhf, arXiv:2204.05862), becomes one message per turn.

For a model without a chat template, --strings leaves strings, and gives them a column prompt. The prompt of a dialogue
ends with its last "Assistant:".

    python demo/prepare_chat.py hh.jsonl strings.jsonl --strings
"""
import gzip
import json
import os
import re
import sys
from pathlib import Path

ROLES = {"Human": "user", "Assistant": "assistant"}


def is_dialogue(text: str) -> bool:
    return re.match(r"\s*Human:", text) is not None


def messages(text: str, answer: str) -> list[dict]:
    """A prompt and its answer as a list of {"role", "content"}."""
    turns = ["Human", text, "Assistant", answer]
    if is_dialogue(text + answer):
        _, *turns = re.split(r"(?:^|\n\n)(Human|Assistant):", (text + answer).lstrip())
    elif not text.strip():
        raise ValueError("no prompt")
    return [{"role": ROLES[name], "content": words.strip()} for name, words in zip(turns[::2], turns[1::2])]


def convert(row: dict) -> dict | None:
    """The row with messages. None if an answer is empty or of the user, or if two answers have different prompts."""
    names = [name for name in ("chosen", "rejected", "completion") if name in row]
    if not names:
        prompt = messages(row["prompt"], "")
        return row | {"prompt": prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt}

    dialogues = [messages(row.get("prompt") or "", row[name]) for name in names]
    prompt = dialogues[0][:-1]
    answers = [dialogue[-1:] for dialogue in dialogues]
    is_same = all(dialogue[:-1] == prompt for dialogue in dialogues)
    if not prompt or not is_same or any(y["role"] == "user" or not y["content"] for (y,) in answers):
        return None
    return row | {"prompt": prompt} | dict(zip(names, answers))


def divide(row: dict) -> dict | None:
    """The row with strings: a prompt and answers that do not repeat it. None where `convert` gives None."""
    if convert(row) is None:
        return None
    divided = dict(row)
    for name in ("chosen", "rejected", "completion"):
        text = (row.get("prompt") or "") + row.get(name, "")
        if name in row and is_dialogue(text):
            before, mark, answer = text.rpartition("\n\nAssistant:")
            divided |= {"prompt": before + mark, name: answer}
    return divided


def main(source: str, target: str, change=convert):
    n_rows = 0
    kept = []
    open_source = gzip.open if source.endswith(".gz") else open
    with open_source(source, "rt", encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            n_rows += 1
            try:
                row = change(json.loads(line))
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                sys.exit(f"{source}:{number}: {error!r}: expected strings: a prompt, chosen and rejected or completion")
            if row:
                kept.append(json.dumps(row) + "\n")

    open_target = gzip.open if target.endswith(".gz") else open
    partial_file = f"{target}.partial"  # a killed run leaves no half of the target
    with open_target(partial_file, "wt", encoding="utf-8") as file:
        file.writelines(kept)
    os.replace(partial_file, target)
    print(f"{target}: {len(kept)} of {n_rows} rows; others have an empty answer, or dialogues that differ before it")


if __name__ == "__main__":
    files = [word for word in sys.argv[1:] if word != "--strings"]
    if len(files) != 2 or not Path(files[0]).exists():
        sys.exit(__doc__)
    main(*files, change=divide if "--strings" in sys.argv else convert)
