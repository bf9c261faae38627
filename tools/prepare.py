"""Makes plain rows of a data set for dpo.py, kto.py and rloo.py, and holds a part of the prompts out.

    python tools/prepare.py --data Anthropic/hh-rlhf --out out/hh --chat
    python dpo.py --model Qwen/Qwen3-0.6B --data out/hh/train.jsonl --eval_data out/hh/test.jsonl

--data is a .jsonl, .json, .csv or .parquet file, or NAME, NAME:SPLIT or NAME:CONFIG:SPLIT of the hub. Its
columns are TRL's (`prompt, chosen, rejected`, `prompt, completion, label`, or `prompt`), ShareGPT's
(`conversations`) or Alpaca's (`instruction, input, output`). The latter two have `chosen, rejected` or a
`label`, or serve as prompts. A text is a string or a list of messages. Without its column, the prompt is what
both conversations of a pair begin with. They may be dialogues "\\n\\nHuman: ..\\n\\nAssistant: ..". A column
`system` becomes a message, `tools` and `chat_template_kwargs` are for the chat template, and others are kept.

For another format, copy this program and edit one function, `convert`.
"""
import csv
import io
import json
import math
import os
import random
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import tyro
from tqdm import tqdm

ANSWERS = ("chosen", "rejected", "completion")  # columns
JSON_COLUMNS = ("tools", "chat_template_kwargs")  # may be text in a file
REWARDS = ("chosen_reward", "rejected_reward")
USED = ("prompt", "label", *ANSWERS, *JSON_COLUMNS, *REWARDS)
KNOWN = (*USED, "system", "conversations", "messages", "instruction", "input", "output")
LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
ANSWERING = ("assistant", "tool", "function", "ipython")  # roles
SAID = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")  # keys of a message
ROLES = ("system", "developer", "user", *ANSWERING)
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
CONTROL_TOKEN = re.compile(r"<[|｜]\w[^<>\s]*[|｜]>|</?s>|\[/?INST\]|<(start|end)_of_turn>|<[be]os>")


@dataclass
class Args:
    data: str  # a file, or data of the hub
    out: str  # folder for train.jsonl and test.jsonl
    eval_size: int = 128  # number of prompts that are held out, at most a tenth of all
    rows: Literal["auto", "rated", "prompts"] = "auto"  # what to write; auto: what the columns hold
    chat: bool = False  # makes messages of strings
    rename: tuple[str, ...] = ()  # columns, OLD=NEW: question=prompt good=chosen bad=rejected


class BadInput(ValueError):
    """A mistake of the user. It ends the program with one sentence."""


class Dropped(Exception):
    """Why a row is left out."""


def main(args: Args):
    out = Path(args.out)
    record = out / "prepared.json"
    source = json.loads(record.read_text())["data"] if record.exists() else "other data"
    if source != args.data and any((out / name).exists() for name in ("train.jsonl", "test.jsonl")):
        raise BadInput(f"{out} holds rows of {source}: name another --out, or delete it")
    write(prepare(args), out, args)


def convert(columns: dict, args: Args) -> dict:
    """The columns of a row under the names above. Edit this function for another format, such as this one:

    answers = sorted(columns["answers"], key=lambda answer: answer["score"])
    return {"prompt": columns["question"], "chosen": answers[-1]["text"], "rejected": answers[0]["text"]}
    """
    names = {"kto_tag": "label"} | dict(pair.split("=") for pair in args.rename)
    row = {names.get(name, name): value for name, value in columns.items()}
    if len(row) < len(columns):
        raise ValueError(f"--rename gives two columns one name: the columns are {', '.join(columns)}")
    if "prompt" in row:
        return row

    turns = row.pop("conversations", None) or row.pop("messages", None)
    if turns:
        row["prompt"] = turns
        role = turns[-1].get("from") or turns[-1].get("role")
        if SHAREGPT_ROLES.get(role, role) == "assistant":
            row["prompt"], row["completion"] = turns[:-1], turns[-1:]
    elif "instruction" in row:
        row["prompt"] = []
        for question, answer in row.pop("history", None) or []:
            row["prompt"] += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        lines = filter(None, [row.pop("instruction"), row.pop("input", None)])
        row["prompt"].append({"from": "human", "value": "\n".join(lines)})
        if "output" in row and "chosen" not in row:
            row["completion"] = row.pop("output")
    return row


def prepare(args: Args) -> list[tuple[int, dict]]:
    """The plain rows of --data, each with its number there. Those that teach nothing are dropped."""
    all_columns = list(tqdm(read_rows(args.data), desc="read", unit=" rows"))
    if not all_columns:
        raise BadInput(f"{args.data} is empty")
    for pair in args.rename:
        old_name = pair.split("=")[0]
        if not any(old_name in columns for columns in all_columns):
            raise BadInput(f"no column {old_name}: the columns are {', '.join(all_columns[0])}")

    rows = []
    notes = defaultdict(set)  # note -> numbers of the rows that it is true of
    for number, columns in enumerate(tqdm(all_columns, desc="prepare", unit=" rows"), 1):
        try:
            if not isinstance(columns, dict) or None in columns:  # None: cells without a column
                raise ValueError(f"is {columns!r:.99}: expected a value for each column")
            row = convert(columns, args)
            row = {name: to_json(value, name, number, notes) for name, value in row.items()}

            rows += [(number, row) for row in prepare_row(row, number, notes, args)]
            if kind_of(rows[-1][1]) != kind_of(rows[0][1]):
                raise ValueError(f"is not one of the {kind_of(rows[0][1])}, as row {rows[0][0]} is")
        except Dropped as reason:
            notes[f"dropped: {reason}"].add(number)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            words = error if isinstance(error, ValueError) else repr(error)  # KeyError('answers')
            raise BadInput(f"{args.data}, row {number}: {words}") from error

    if not rows:
        raise BadInput(f"{args.data}: no row is left; {'; '.join(notes)}; the columns are "
                       f"{', '.join(all_columns[0])}: give --rename, or copy prepare.py and edit `convert`")
    note_repetitions(rows, notes)
    print(f"{args.data}: {len(all_columns):,} rows")
    for note, numbers in notes.items():
        print(f"{len(numbers):8,} {note} (first: row {min(numbers)})")
    others = dict.fromkeys(name for _, row in rows for name in row if name not in USED)
    print("columns that are kept, and that the scripts do not use:", ", ".join(others) or "none")
    return rows


def note_repetitions(rows: list[tuple[int, dict]], notes: dict):
    """Notes which rows repeat an earlier row, or contradict it."""
    seen = {}  # a hash of the prompt and its answers -> which is the good one
    for number, row in rows:
        answers = sorted(json.dumps(row[name], sort_keys=True) for name in ANSWERS if name in row)
        key = hash(json.dumps([row["prompt"], answers], sort_keys=True))
        verdict = row.get("chosen", "completion" in row and row["label"])
        if key not in seen:
            seen[key] = verdict
        elif seen[key] == verdict:
            notes["repeat the prompt and the answers of an earlier row, and are kept"].add(number)
        else:
            notes["contradict an earlier row: the same answers, judged the other way round"].add(number)


def write(rows: list[tuple[int, dict]], out: Path, args: Args):
    """Writes the files, with all rows of some prompts in test.jsonl. No seed changes which these are."""
    prompts = sorted({text_of(row["prompt"]) for _, row in rows})
    held_out = set(random.Random(0).sample(prompts, min(args.eval_size, len(prompts) // 10)))
    parts = {"prepared.json": [json.dumps(vars(args)) + "\n"], "test.jsonl": [], "train.jsonl": []}
    for _, row in rows:
        name = "test.jsonl" if text_of(row["prompt"]) in held_out else "train.jsonl"
        parts[name].append(json.dumps(row, ensure_ascii=False) + "\n")

    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out, prefix=".prepare") as folder:
        for name, lines in parts.items():
            Path(folder, name).write_text("".join(lines), encoding="utf-8")
        os.sync()  # files are on the disk before they get their names

        # train.jsonl appears last: where it exists, all files are whole and belong together.
        (out / "train.jsonl").unlink(missing_ok=True)
        (out / "test.jsonl").unlink(missing_ok=True)
        for name, lines in parts.items():
            if lines:
                os.replace(Path(folder, name), out / name)

    kind = kind_of(rows[0][1])
    print(f"{out / 'train.jsonl'}: {len(parts['train.jsonl']):,} {kind}")
    none = f"no prompt of {len(prompts)} is held out: a tenth would be, at most --eval_size {args.eval_size}"
    print(f"{out / 'test.jsonl'}: {len(parts['test.jsonl']):,} {kind}" if held_out else none)


def text_of(text: str | list[dict]) -> str:
    """The text without white space. That of messages is without the system's, and with their calls."""
    if isinstance(text, list):
        turns = [message for message in text if message["role"] not in ("system", "developer")]
        values = [message[name] for message in turns or text for name in SAID if message.get(name)]
        text = "".join(v if isinstance(v, str) else json.dumps(v, sort_keys=True) for v in values)
    return "".join(text.split())


def kind_of(row: dict) -> str:
    if "chosen" in row:
        return "pairs, for dpo.py"
    return "rated answers, for kto.py" if "completion" in row else "prompts, for rloo.py"


def prepare_row(columns: dict, number: int, notes: dict, args: Args) -> list[dict]:
    """The plain rows of a row: one, or two rated answers of a pair."""
    for name in columns:
        if name not in KNOWN and name.strip().lower() in KNOWN:
            raise ValueError(f"has a column {name!r}: give --rename '{name}={name.strip().lower()}'")
    names = [name for name in ANSWERS if name in columns]
    if names not in (["chosen", "rejected"], ["completion"], []):
        raise ValueError(f"has {', '.join(names)}: expected chosen and rejected, or completion, or neither")

    prompt, *answers = [read_text(columns.get(name), name) for name in ("prompt", *names)]
    if any(isinstance(text, list) for text in (prompt, *answers)):
        prompt, *answers = divide_conversations(prompt, answers)
    else:
        if not prompt and answers:
            prompt, *answers = divide_dialogues(answers)
        if prompt and any(answer.startswith(prompt) for answer in answers):
            notes["have an answer that begins with its prompt, which is then read twice"].add(number)
        if any("\n\nHuman:" in answer for answer in answers):
            notes["have an answer that is a dialogue, which stays one text"].add(number)
        if args.chat:
            prompt, *answers = to_messages(prompt, answers)

    if not text_of(prompt):
        raise Dropped("no prompt, and chosen and rejected do not begin alike" if answers[1:] else "no prompt")
    if CONTROL_TOKEN.search(json.dumps([prompt, *answers], ensure_ascii=False)):
        notes["have a control token in a text, such as <|im_end|>"].add(number)
    if columns.get("system"):
        if isinstance(prompt, str) or prompt[0]["role"] == "system":
            raise ValueError("a column system needs a prompt of messages (--chat) without a system message")
        prompt = read_text([{"role": "system", "content": columns["system"]}], "system") + prompt

    others = {name: value for name, value in columns.items() if name not in ("prompt", "system", *ANSWERS)}
    if args.rows == "prompts":
        return [{"prompt": prompt} | others]
    if args.rows == "rated" and not answers:
        raise ValueError(f"has no answer for --rows rated: the columns are {', '.join(columns)}")
    if not all(map(text_of, answers)):
        raise Dropped("an empty answer")
    if answers[1:] and answers[0] == answers[1]:
        raise Dropped("equal answers")
    if isinstance(prompt, list):
        if any(message["role"] not in ANSWERING for message in sum(answers, [])):
            raise Dropped("an answer has a message of the user or of the system")
        if answers and prompt[-1]["role"] == "assistant":
            notes["have a prompt that ends with an answer, which only rloo.py continues"].add(number)

    if names == ["completion"]:
        label = LABELS.get(str(columns.get("label")).lower())
        if label is None:
            raise ValueError(f"label is {columns.get('label')!r}: expected true or false, or --rows prompts")
        others["label"] = label
    if args.rows == "rated" and answers[1:]:
        rated = zip(answers, (True, False))
        return [{"prompt": prompt, "completion": y} | others | {"label": label} for y, label in rated]
    return [{"prompt": prompt} | dict(zip(names, answers)) | others]


def divide_dialogues(dialogues: list[str]) -> list[str]:
    """The prompt of dialogues, which ends with their last "Assistant:", and their answers."""
    before, marks, answers = zip(*(dialogue.rpartition("\n\nAssistant:") for dialogue in dialogues))
    if len(set(before)) > 1 or any("\n\nHuman:" in answer for answer in answers):
        raise Dropped("dialogues that differ before the last answer, or that end with the human")
    return [before[0] + marks[0], *answers]


def to_messages(prompt: str, answers: list[str]) -> list[list[dict]]:
    """Strings as messages. A dialogue becomes a message per turn."""
    before, *turns = re.split(r"(?:^|\n\n)(Human|Assistant):", prompt)
    if before.strip() or not turns:  # no dialogue
        turns = ["Human", prompt]
    turns = zip(map(str.lower, turns[::2]), turns[1::2])
    messages = [{"role": SHAREGPT_ROLES.get(name, name), "content": text.strip()} for name, text in turns]
    if messages[-1] == {"role": "assistant", "content": ""}:  # the answer follows
        messages.pop()
    return [messages, *([{"role": "assistant", "content": answer.strip()}] for answer in answers)]


def divide_conversations(prompt: str | list[dict], answers: list) -> list[list[dict]]:
    """The prompt may stand in the answers, too, or only there. Strings beside messages become messages."""
    answers = [[{"role": "assistant", "content": y}] if isinstance(y, str) else y for y in answers]
    shared = []
    for message, *others in zip(*answers):
        if others != [message]:
            break
        shared.append(message)
    question = {"role": "user", "content": prompt}
    if not prompt or question in shared:
        prompt = shared
    elif isinstance(prompt, str):
        prompt = [question]

    if all(answer[:len(prompt)] == prompt for answer in answers):
        answers = [answer[len(prompt):] for answer in answers]
    return [prompt, *answers]


def to_json(value, name: str, number: int, notes: dict):
    """A value of a column as JSON holds it. A cell of a CSV file may hold JSON as text."""
    if name in REWARDS and value not in (None, ""):
        if isinstance(value, bool) or not math.isfinite(float(value)):
            raise ValueError(f"{name} is {value!r}: expected a finite number")
        return float(value)

    is_messages = isinstance(value, str) and re.match(r"""\s*\[\s*\{\s*["'](role|content)["']""", value)
    if is_messages or (isinstance(value, str) and name in (*JSON_COLUMNS, *REWARDS)):
        value = json.loads(value or "null")
    if isinstance(value, list) and name == "tools":
        value = [json.loads(tool) if isinstance(tool, str) else tool for tool in value]
    text = json.dumps(value, ensure_ascii=False, default=str)  # a date becomes a string
    text.encode()  # refuses half of a character, "\ud800", which no file can hold
    value = json.loads(text)

    if name not in ("prompt", *ANSWERS, *JSON_COLUMNS):
        return value
    plain = json.loads(text, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if v is not None})
    if plain != value:  # files of columns fill in such keys, and a chat template would write "null"
        notes["have keys that are null, which are left out"].add(number)
    return plain


def read_text(text, name: str) -> str | list[dict]:
    """A prompt or an answer: a string, or messages. Null is an empty string."""
    if text is None or isinstance(text, str):
        return text or ""
    return [read_message(turn, name) for turn in (text if isinstance(text, list) else [text])]


def read_message(message: dict, name: str) -> dict:
    """A message, whose parts of text are joined. A turn of ShareGPT becomes one."""
    if isinstance(message, dict) and "from" in message:
        role, text = message["from"], message["value"]
        message = {"role": SHAREGPT_ROLES.get(role, role), "content": text}
        if role == "function_call":
            calls = json.loads(f"[{text}]") if text.lstrip().startswith("{") else json.loads(text)
            calls = [{"type": "function", "function": call} for call in calls]
            message = {"role": "assistant", "content": "", "tool_calls": calls}
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"{name} has {message!r:.99}: expected a string, or messages of {', '.join(ROLES)}; "
                         "for another format, copy prepare.py and edit `convert`")

    content = message.get("content", "")
    parts = content if isinstance(content, list) else [{"text": content}]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise ValueError(f"{name} has the content {content!r:.99}: expected a string, or parts with text")
    if isinstance(content, list):
        message["content"] = "".join(part["text"] for part in parts)
    if message.get("tool_calls") == []:  # some templates take an empty list for calls
        del message["tool_calls"]
    return message


def read_rows(source: str):
    """Yields the rows of a file, or of NAME, NAME:SPLIT or NAME:CONFIG:SPLIT of the hub."""
    path = Path(source)
    if path.suffix not in (".jsonl", ".json", ".csv"):
        if path.exists() and path.suffix != ".parquet":
            raise BadInput(f"{source}: expected a .jsonl, .json, .csv or .parquet file")
        import datasets
        name, bracket, part = source.partition("[")  # a split may be a slice, train[:1000]
        name, *config = name.split(":")
        split = config.pop() if config else "train"
        if path.suffix == ".parquet":
            yield from datasets.load_dataset("parquet", data_files=source, split="train")
        else:
            yield from datasets.load_dataset(name, *config, split=split + bracket + part)
        return

    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{source} is not UTF-8 text ({error}): save the file as UTF-8") from error

    if path.suffix == ".csv":  # its cells stay text: 00501 is no number
        csv.field_size_limit(2**31 - 1)  # characters of a cell; the default is 131,072
        yield from csv.DictReader(io.StringIO(text, newline=""))
        return
    lines = [text] if text.lstrip().startswith("[") else text.split("\n")  # splitlines splits at U+2028, too
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line) if line.strip() else []
        except ValueError as error:
            raise BadInput(f"{source}, line {number} is not JSON: {line.strip()!r:.60}") from error
        yield from value if isinstance(value, list) else [value]


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__, use_underscores=True))
    except (BadInput, FileNotFoundError, KeyboardInterrupt) as error:
        print("prepare.py:", error, file=sys.stderr)
        sys.exit(2)
