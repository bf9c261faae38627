"""Makes rows of messages of Anthropic's HH (arXiv:2204.05862): dialogues as strings, which differ in the last answer.

    python demo/prepare_hh.py train.jsonl.gz pairs.jsonl  # a file of huggingface.co/datasets/Anthropic/hh-rlhf
    python dpo.py --model Qwen/Qwen3-0.6B --data pairs.jsonl
"""
import gzip
import json
import os
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
    pairs = []
    open_source = gzip.open if str(source).endswith(".gz") else open
    with open_source(source, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                pairs.append(pair(json.loads(line)))
            except (LookupError, TypeError, ValueError):
                sys.exit(f"{source}:{number}: expected chosen and rejected, dialogues of Human: and Assistant:")
    kept = [row for row in pairs if row]
    with open(f"{target}.partial", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in kept)
    os.replace(f"{target}.partial", target)  # a killed run leaves no half of it
    print(f"{target}: {len(kept)} of {len(pairs)} rows; the others differ before their last answer, or lack one")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
