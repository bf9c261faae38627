"""Makes plain rows of a data set for dpo.py, kto.py and rloo.py, and holds a part of the prompts out.

    python tools/prepare.py --data chats.jsonl --out out/chats --model Qwen/Qwen3-0.6B
    python dpo.py --model Qwen/Qwen3-0.6B --data out/chats/train.jsonl --eval_data out/chats/test.jsonl
    python tools/prepare.py --data Anthropic/hh-rlhf --out out/hh --chat --rows rated

--data is a .jsonl, .json, .csv or .parquet file, or NAME, NAME:SPLIT or NAME:CONFIG:SPLIT of the hub. It has
TRL's columns: `prompt, chosen, rejected`, `prompt, completion, label`, or `prompt`. A text is a string or a
list of messages. Without its column, the prompt is what both conversations of a pair begin with. They may be
dialogues "\\n\\nHuman: ..\\n\\nAssistant: ..". A column `system` becomes the first message, `tools` and
`chat_template_kwargs` are for the chat template, and other columns are kept.

The files are the same for every model. --model shows what this model reads of them. For another format, copy
this program and edit one function, `convert`.
"""
import csv
import io
import json
import os
import random
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

ANSWERS = ("chosen", "rejected", "completion")  # columns
JSON_COLUMNS = ("tools", "chat_template_kwargs", "chosen_reward", "rejected_reward")  # may be text in a file
LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
ANSWERING = ("assistant", "tool", "function", "ipython")  # roles
ROLES = ("system", "developer", "user", *ANSWERING)
SAID = ("content", "reasoning_content", "reasoning", "thinking")  # keys of a message


@dataclass
class Args:
    data: str  # a file, or data of the hub
    out: str  # folder for train.jsonl and test.jsonl
    eval_size: int = 128  # number of prompts that are held out, at most a tenth of all
    rows: Literal["auto", "rated", "prompts"] = "auto"  # what to write; auto: what the columns hold
    chat: bool = False  # makes messages of strings
    rename: tuple[str, ...] = ()  # columns, OLD=NEW: question=prompt good=chosen bad=rejected
    model: str | None = None  # folder or hub name: shows what this model reads, changes nothing
    chat_template_kwargs: dict[str, bool | int | str] = field(default_factory=dict)  # for --model


class BadInput(ValueError):
    """A mistake of the user. It ends the program with one sentence."""


class Dropped(Exception):
    """Why a row is left out."""


def main(args: Args):
    if Path(args.data).resolve().parent == Path(args.out).resolve():
        raise BadInput(f"--out {args.out} is the folder of --data, which could be overwritten: name another")
    rows = prepare(args.data, args)
    if args.model:
        describe(rows, args)
    write(rows, Path(args.out), args.eval_size)


def convert(columns: dict, args: Args) -> dict:
    """The columns of a row under the names above. Edit this function for another format, such as ShareGPT's:

    def message(turn):
        roles = {"system": "system", "human": "user", "gpt": "assistant"}
        return {"role": roles[turn["from"]], "content": turn["value"]}

    prompt = [message(turn) for turn in columns["conversations"]]
    return {"prompt": prompt, "chosen": message(columns["chosen"]), "rejected": message(columns["rejected"])}
    """
    names = dict(pair.split("=") for pair in args.rename)
    renamed = {names.get(name, name): value for name, value in columns.items()}
    if len(renamed) < len(columns):
        raise ValueError(f"--rename gives two columns one name: the columns are {', '.join(columns)}")
    return renamed


def prepare(source: str, args: Args) -> list[tuple[int, dict]]:
    """The plain rows of this data, each with its number there. Those that teach nothing are dropped."""
    rows = []
    notes = defaultdict(list)  # note -> numbers of the rows that it is true of
    number = 0
    for number, columns in enumerate(tqdm(read_rows(source), desc="prepare", unit=" rows"), 1):
        try:
            if not isinstance(columns, dict) or None in columns:  # None: cells without a column
                raise ValueError(f"is {columns!r:.99}: expected a value for each column")
            columns = {name: to_json(value, name) for name, value in convert(columns, args).items()}
            rows += [(number, row) for row in prepare_row(columns, number, notes, args)]
        except Dropped as reason:
            notes[f"dropped: {reason}"].append(number)
        except ValueError as error:
            raise BadInput(f"{source}, row {number}: {error}") from error
        except (LookupError, TypeError, AttributeError) as error:  # of a convert for another format
            raise BadInput(f"{source}, row {number}: {error!r}") from error

    if not number:
        raise BadInput(f"{source} is empty")
    if not rows:
        raise BadInput(f"{source}: no row is left; {'; '.join(notes)}; the columns are {', '.join(columns)}")
    print_notes(f"{source}: {number:,} rows", notes)
    used = {"prompt", "label", *ANSWERS, *JSON_COLUMNS}
    others = dict.fromkeys(name for _, row in rows for name in row if name not in used)
    if others:
        print("columns that are kept, and that the scripts do not use:", ", ".join(others))
    return rows


def print_notes(title: str, notes: dict[str, list[int]]):
    print(title)
    for note, numbers in notes.items():
        print(f"{len(numbers):8,} {note} (first: row {numbers[0]})")


def write(rows: list[tuple[int, dict]], out: Path, eval_size: int):
    """Writes the files, with all rows of some prompts in test.jsonl. No seed changes which these are."""
    prompts = sorted({json.dumps(row["prompt"]) for _, row in rows})
    held_out = set(random.Random(0).sample(prompts, min(eval_size, len(prompts) // 10)))
    parts = {"test.jsonl": [], "train.jsonl": []}
    for _, row in rows:
        name = "test.jsonl" if json.dumps(row["prompt"]) in held_out else "train.jsonl"
        parts[name].append(json.dumps(row, ensure_ascii=False) + "\n")

    out.mkdir(parents=True, exist_ok=True)
    for name, lines in parts.items():
        with open(out / f".{name}.partial", "w", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())

    # train.jsonl appears last: where it exists, both files are whole and belong together.
    (out / "train.jsonl").unlink(missing_ok=True)
    for name, lines in parts.items():
        os.replace(out / f".{name}.partial", out / name)
        print(f"{out / name}: {len(lines):,} rows")


# ---- One row ---------------------------------------------------------

def prepare_row(columns: dict, number: int, notes: dict, args: Args) -> list[dict]:
    """The plain rows of a row: one, or two rated answers of a pair."""
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
            notes["have an answer that begins with its prompt, which is then read twice"].append(number)
        if args.chat:
            prompt, *answers = to_messages(prompt, answers)

    if not has_text(prompt):
        raise Dropped("no prompt, and chosen and rejected do not begin alike" if answers[1:] else "no prompt")
    if columns.get("system"):
        if isinstance(prompt, str) or prompt[0]["role"] == "system":
            raise ValueError("a column system needs a prompt of messages (--chat) without a system message")
        prompt = read_text([{"role": "system", "content": columns["system"]}], "system") + prompt

    others = {name: value for name, value in columns.items() if name not in ("prompt", "system", *ANSWERS)}
    if args.rows == "prompts":
        return [{"prompt": prompt} | others]
    if not all(map(has_text, answers)):
        raise Dropped("an empty answer")
    if answers[1:] and answers[0] == answers[1]:
        raise Dropped("equal answers")
    if isinstance(prompt, list):
        if any(message["role"] not in ANSWERING for message in chain(*answers)):
            raise Dropped("an answer has a message of the user or of the system")
        if answers and prompt[-1]["role"] == "assistant":
            notes["have a prompt that ends with an answer, which only rloo.py continues"].append(number)

    if names == ["completion"]:
        label = str(columns.get("label")).lower()
        if label not in LABELS:
            raise ValueError(f"label is {columns.get('label')!r}: expected true, false, 1 or 0")
        others["label"] = LABELS[label]
    if args.rows == "rated" and answers[1:]:
        rated = zip(answers, (True, False))
        return [{"prompt": prompt, "completion": y} | others | {"label": label} for y, label in rated]
    return [{"prompt": prompt} | dict(zip(names, answers)) | others]


def divide_dialogues(dialogues: list[str]) -> list[str]:
    """The prompt of dialogues, which ends with their last "Assistant:", and their answers."""
    parts = [dialogue.rpartition("\n\nAssistant:") for dialogue in dialogues]
    prompts = {before + mark for before, mark, _ in parts}
    answers = [answer for _, _, answer in parts]
    if len(prompts) > 1 or any("\n\nHuman:" in answer for answer in answers):
        raise Dropped("dialogues that differ before the last answer, or that end with the human")
    return [*prompts, *answers]


def to_messages(prompt: str, answers: list[str]) -> list[list[dict]]:
    """Strings as messages. A dialogue becomes a message per turn."""
    before, *turns = re.split(r"(?:^|\n\n)(Human|Assistant):", prompt)
    if before.strip() or not turns:  # no dialogue
        turns = ["Human", prompt]
    messages = []
    for name, text in zip(turns[::2], turns[1::2]):
        messages.append({"role": "user" if name == "Human" else "assistant", "content": text.strip()})
    if messages[-1] == {"role": "assistant", "content": ""}:  # the answer follows
        messages.pop()
    return [messages, *([{"role": "assistant", "content": answer.strip()}] for answer in answers)]


def divide_conversations(prompt: str | list[dict], answers: list) -> list[list[dict]]:
    """The prompt may stand in the answers, too, or only there. A string is the user's question."""
    answers = [answer or [] for answer in answers]  # null beside messages
    if any(isinstance(answer, str) for answer in answers):
        raise ValueError("strings and messages are mixed: expected one kind in the prompt and its answers")
    shared = answers[0][:common_length(*answers)] if answers[1:] else []
    question = {"role": "user", "content": prompt}
    if not prompt or question in shared:
        prompt = shared
    elif isinstance(prompt, str):
        prompt = [question]

    n = len(prompt)
    if all(answer[:n] == prompt for answer in answers):
        answers = [answer[n:] for answer in answers]
    return [prompt, *answers]


def to_json(value, name: str):
    """A value as JSON holds it. Keys that are null, which files of columns fill in, are left out."""
    if isinstance(value, list) and name == "tools":
        return [to_json(tool, name) for tool in value]
    text = json.dumps(value, ensure_ascii=False, default=str)  # a date becomes a string
    is_messages = isinstance(value, str) and re.match(r"""\s*\[\s*\{\s*["'](role|content)["']""", value)
    if is_messages or (isinstance(value, str) and name in JSON_COLUMNS):
        text = value or "null"  # JSON text, in a cell of a CSV file
    try:
        text.encode()  # refuses half of a character, "\ud800", which no file can hold
        return json.loads(text, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if v is not None})
    except ValueError as error:
        raise ValueError(f"{name} is no JSON: {value!r:.60} ({error})") from error


def read_text(text, name: str) -> str | list[dict]:
    """A prompt or an answer: a string, or messages, whose parts of text are joined. Null is empty."""
    if text is None or isinstance(text, str):
        return text or ""
    messages = text if isinstance(text, list) else [text]
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            roles = ", ".join(ROLES)
            raise ValueError(f"{name} has {message!r:.99}: expected a string, or messages of {roles}")
        content = message.get("content", "")
        parts = content if isinstance(content, list) else [{"text": content}]
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise ValueError(f"{name} has the content {content!r:.99}: expected a string, or parts with text")

        if isinstance(content, list):
            message["content"] = "".join(part["text"] for part in parts)
        if message.get("tool_calls") == []:  # some templates take an empty list for calls
            del message["tool_calls"]
    return messages


def has_text(text: str | list[dict]) -> bool:
    """Whether this is more than white space. A message may have calls instead of a content."""
    if isinstance(text, str):
        return bool(text.strip())
    texts = [str(message.get(name) or "") for message in text for name in (*SAID, "tool_calls")]
    return bool("".join(texts).strip())


def common_length(*sequences) -> int:
    """The number of items with which all of these sequences begin."""
    length = 0
    for items in zip(*sequences):
        if items.count(items[0]) < len(items):
            break
        length += 1
    return length


# ---- What a model reads ----------------------------------------------

def describe(rows: list[tuple[int, dict]], args: Args):
    """Prints what the model reads of these rows: the first one, how long they are, and what is lost."""
    model = Model(args.model, args.chat_template_kwargs)
    notes = defaultdict(list)
    read = []  # the token ids of the prompt, and of the prompt with each answer
    for number, row in tqdm(rows, desc="read as the model", unit=" rows"):
        try:
            texts = model.render(row)
            ids = model.encode(texts, row)
            model.check_answers(ids)
            found = [*model.notes_on_ends(row, texts, ids), *model.notes_on_losses(row)]
        except Dropped as reason:
            notes[f"dropped by the scripts: {reason}"].append(number)
            continue
        read.append((number, ids))
        for note in found:
            notes[note].append(number)

    if not read:
        raise BadInput(f"{args.model} reads no row of {args.data}: {'; '.join(notes)}")
    print_notes(f"{args.model} reads {len(read):,} of {len(rows):,} rows", notes)
    lengths = [max(map(len, ids)) for _, ids in read]
    for name, tokens in zip(("median", "90 %", "99 %", "longest"), np.percentile(lengths, (50, 90, 99, 100))):
        print(f"{tokens:8,.0f} tokens per row ({name})")
    for limit in sorted({1024, 2048, 4096, 8192, 16384, model.context}):
        n_longer = sum(length > limit for length in lengths)
        if n_longer:
            print(f"{n_longer:8,} rows are longer than {limit:,} tokens")

    number, (prompt, *answers) = read[0]
    end = common_length(prompt, *answers)
    print(f"row {number}, | where training begins:\n  {model.tokenizer.decode(prompt[:end])!r}")
    for answer in answers:
        print(f"  | {model.tokenizer.decode(answer[end:])!r}")


class Model:
    """What a model reads of a row, as the scripts make texts and tokens of it."""

    def __init__(self, name: str, options: dict):
        if Path(name).parent.is_dir() and "/" in name and not Path(name).exists():  # else the hub is asked
            raise BadInput(f"--model {name} does not exist")
        self.tokenizer = AutoTokenizer.from_pretrained(name, mistral_format=False)
        truths = {"true": True, "false": False}  # tyro reads only True and False as such
        self.options = {key: truths.get(value, value) for key, value in options.items()}
        tokens = self.tokenizer.added_tokens_decoder.values()
        self.specials = tuple(token.content for token in tokens if token.special)
        plain_ids = self.tokenizer("a", add_special_tokens=False).input_ids
        full_ids = self.tokenizer("a").input_ids
        self.bos = full_ids[:full_ids.index(plain_ids[0])]  # what the tokenizer puts before a text

        config = AutoConfig.from_pretrained(name)
        self.context = getattr(config.get_text_config(), "max_position_embeddings", None) or 1024
        try:
            config = GenerationConfig.from_pretrained(name)
        except OSError:  # the model has no generation_config.json
            pass
        stops = np.ravel(config.eos_token_id).tolist()  # of one token, of several, or of None
        self.stops = tuple(self.tokenizer.decode([token]) for token in stops if token is not None)

    def render(self, row: dict) -> list[str]:
        """The text of the prompt, and of the prompt with each answer."""
        prompt = row["prompt"]
        answers = [row[name] for name in ANSWERS if name in row]
        if isinstance(prompt, str):
            eos = self.tokenizer.eos_token or ""
            ends = ["" if answer.rstrip().endswith(self.specials) else eos for answer in answers]
            return [prompt, *(prompt + answer + end for answer, end in zip(answers, ends))]

        is_begun = not answers and prompt[-1]["role"] == "assistant"  # rloo.py continues this answer
        options = dict(add_generation_prompt=not is_begun, continue_final_message=is_begun)
        begun = self.apply_template(row, prompt, **options)
        texts = [self.apply_template(row, prompt + answer) for answer in answers]
        if not all(text.startswith(begun) for text in texts):
            alone = self.apply_template(row, prompt)  # without the beginning of an answer
            if not all(text.startswith(alone) for text in texts):  # some of the prompt would be trained
                raise Dropped("the template writes another prompt where an answer follows")
        return [begun, *texts]

    def apply_template(self, row: dict, messages: list[dict], **options) -> str:
        options |= self.options | (row.get("chat_template_kwargs") or {})
        tools = row.get("tools") or None
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, tools=tools, **options)
        except Exception as error:  # a template is a program, and may raise anything
            raise Dropped(f"the chat template says {str(error).splitlines()[0]:.200}") from error

    def encode(self, texts: list[str], row: dict) -> list[list[int]]:
        """Token ids. Strings get BOS if they have none. Of messages, the template writes it."""
        sequences = self.tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        bos = self.bos if isinstance(row["prompt"], str) else []
        return [ids if ids[:len(bos)] == bos else bos + ids for ids in sequences]

    def check_answers(self, ids: list[list[int]]):
        end = common_length(*ids)
        for answer in ids[1:]:
            if not self.tokenizer.decode(answer[end:], skip_special_tokens=True).strip():
                raise Dropped("an answer of which nothing is written")

    def notes_on_ends(self, row: dict, texts: list[str], ids: list[list[int]]):
        """Yields what is told of where the prompt and its answers begin and end."""
        if isinstance(row["prompt"], str):
            if self.tokenizer.chat_template:
                yield "are strings, to which the chat template is not applied: --chat makes messages of them"
            if any(row["prompt"] + row[name] not in texts for name in ANSWERS if name in row):
                yield f"have an answer without {self.tokenizer.eos_token}, which the scripts add"
        if ids[0][:len(self.bos)] != self.bos:
            yield f"do not begin with {self.tokenizer.decode(self.bos)}, which the template does not write"
        if common_length(*ids) < len(ids[0]):
            yield "have a prompt that ends early: a token spans its end, or the template changes it"
        if not all(text.rstrip().endswith(self.stops) for text in texts[1:]):
            yield f"have an answer that does not end with {' or '.join(self.stops)}, where generation stops"

    def notes_on_losses(self, row: dict):
        """Yields what the chat template leaves out.

        Each text gets a mark at its end, and must stand directly before its mark. So a text that stands
        elsewhere by chance is not taken for it. A template may leave out the thoughts of earlier answers.
        """
        if isinstance(row["prompt"], str):
            return
        texts = {}  # mark -> (column, text)
        columns = [name for name in ("tools", "prompt", *ANSWERS) if name in row]
        marked = {name: mark_texts(row[name], name, texts) for name in columns}
        pieces = re.split("([\U000F0000-\U000FFFFD])", "".join(self.render(row | marked)))
        before = dict(zip(pieces[1::2], pieces[::2]))
        thoughts = []
        for message in row["prompt"][:-1]:
            if message["role"] == "assistant":
                thoughts += map(message.get, SAID)

        lost = set()  # columns
        noise = re.compile(r"\\[nrt]|\W")  # what changes when a template strips a text or writes it as JSON
        for mark, (name, text) in texts.items():
            is_whole = mark in before and noise.sub("", text) in noise.sub("", before[mark])
            if not is_whole and text not in thoughts:
                lost.add(name)

        if "tools" in lost:
            yield "have tools that the template does not write"
        if lost - {"tools"}:
            yield "have text that the template does not write"


def mark_texts(value, column: str, texts: dict[str, tuple[str, str]]):
    """A copy of a JSON value with a mark, a character for private use, at the end of each text."""
    if isinstance(value, list):
        return [mark_texts(item, column, texts) for item in value]
    if isinstance(value, dict):
        names = (*SAID, "tool_calls") if "role" in value else value.keys() - {"type", "id"}
        return value | {name: mark_texts(value[name], column, texts) for name in names if name in value}
    if not isinstance(value, str) or not value.strip():
        return value
    mark = chr(0xF0000 + len(texts))
    texts[mark] = (column, value)
    return value + mark


# ---- Reading ---------------------------------------------------------

def read_rows(source: str):
    """Yields the rows of a file, or of data of the hub."""
    path = Path(source)
    if path.suffix not in (".jsonl", ".json", ".csv"):
        yield from load_dataset(source)
        return
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise BadInput(f"{source} does not exist") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{source}, line {line} is not UTF-8 text: save the file as UTF-8") from error

    if path.suffix == ".csv":  # its cells stay text: 00501 is no number
        csv.field_size_limit(2**31 - 1)  # characters of a cell; the default is 131,072
        yield from csv.DictReader(io.StringIO(text, newline=""))
        return
    is_list = text.lstrip().startswith("[")
    lines = [text] if is_list else text.split("\n")  # str.splitlines would also split at U+2028
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line) if line.strip() else []
        except ValueError as error:
            raise BadInput(f"{source}, line {number} is not JSON: {line.strip()!r:.60}") from error
        yield from value if isinstance(value, list) else [value]


def load_dataset(source: str):
    """A .parquet file, or NAME, NAME:SPLIT or NAME:CONFIG:SPLIT of the hub."""
    import datasets
    if Path(source).suffix == ".parquet":
        return datasets.load_dataset("parquet", data_files=source, split="train")
    if Path(source).is_file():
        raise BadInput(f"{source}: expected a .jsonl, .json, .csv or .parquet file")
    names, bracket, part = source.partition("[")  # a split may be a slice, train[:1000]
    name, *config = names.split(":")
    split = config.pop() if config else "train"
    return datasets.load_dataset(name, *config, split=split + bracket + part)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__, use_underscores=True))
    except (BadInput, KeyboardInterrupt) as error:
        print("prepare.py:", error, file=sys.stderr)
        sys.exit(2)
