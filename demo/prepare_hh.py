"""Makes rows of messages of Anthropic's HH (arXiv:2204.05862): dialogues as strings, which differ in the last answer.

    python demo/prepare_hh.py train.jsonl.gz pairs.jsonl  # a file of huggingface.co/datasets/Anthropic/hh-rlhf
    python dpo.py --model Qwen/Qwen3-0.6B --data pairs.jsonl
"""
import gzip
import json
import re
import sys

ROLES = {"Human": "user", "Assistant": "assistant"}


def messages(dialogue: str) -> list[dict]:
    r"""A string "\n\nHuman: ..\n\nAssistant: .." as a list of {"role", "content"}."""
    _, *turns = re.split("\n\n(Human|Assistant):", dialogue)
    return [{"role": ROLES[name], "content": text.strip()} for name, text in zip(turns[::2], turns[1::2])]


def pair(row: dict) -> dict | None:
    """prompt, chosen, rejected; None if the dialogues differ before their last answer, or it is empty in one."""
    chosen, rejected = (messages(row.get("prompt", "") + row[name]) for name in ("chosen", "rejected"))
    prompt, last = chosen[:-1], [chosen[-1], rejected[-1]]
    if prompt != rejected[:-1] or not prompt or any(x["role"] == "user" or not x["content"] for x in last):
        return None
    return {"prompt": prompt, "chosen": last[:1], "rejected": last[1:]}


def main(source: str, target: str):
    open_source = gzip.open if str(source).endswith(".gz") else open
    with open_source(source, "rt", encoding="utf-8") as lines:
        rows = [pair(json.loads(line)) for line in lines]
    pairs = [row for row in rows if row]
    with open(target, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in pairs)
    print(f"{target}: {len(pairs)} of {len(rows)} rows; the others differ before their last answer, or lack one")


if __name__ == "__main__":
    main(*sys.argv[1:])
