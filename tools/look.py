"""Shows what a script reads from a file, and which tokens a run has made more or less likely.

    python tools/look.py --model Qwen/Qwen3-0.6B --data pairs/train.jsonl  # before training: prints
    python tools/look.py out/dpo out/kto  # after: writes OUT/look.html for each, with the curves of both

Before: the columns of the file decide whether dpo.py, kto.py or rloo.py reads it. Printed are the first row,
the lengths, and how many rows are dropped, lose text or stop the script. After: the page shows log π −
log π_ref, at temperature 1, of each token of held-out answers. π is OUT/model. log π_ref is read from the
run's cache, or computed where it is not there, after π is freed. Pages need matplotlib.
"""
import json
import re
import sys
from collections import defaultdict
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
import tyro
from markupsafe import Markup, escape  # comes with torch; Markup.format escapes what is no Markup
from transformers import AutoConfig, GenerationConfig

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (0, 1)]  # tools, and the scripts
import plot

import dpo
import kto
import rloo
from logprobs import BadInput, progress_bar
from refcache import ReferenceCache, checkpoint_digest

SCRIPTS = {"dpo.py": dpo, "kto.py": kto, "rloo.py": rloo}
ANSWERS = {dpo: ("chosen", "rejected"), kto: ("completion",), rloo: ()}  # columns
SAID = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")  # keys of a message
MAX_BYTES = 19_000_000  # of the rows of a page, which has less than 20 MB with its curves


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]] = ()  # folders of runs, which get pages
    rows: int = 50  # held-out rows on a page
    ref_model: str | None = None  # the model to compare with; None: the run's reference
    model: str | None = None  # checkpoint folder or hub name that is to be trained
    data: str | None = None  # what it reads, a .jsonl file of plain rows


def main(args: Args):
    if not (args.runs or (args.model and args.data)):
        raise BadInput("name the folders of runs, or give --model and --data")
    if not args.runs:
        describe(args)
    curves = {folder: plot.read_run(folder) for folder in args.runs}
    for folder in args.runs:
        write_page(Path(folder), curves, args)


# ---- Before: what a script reads of a file ---------------------------

def describe(args: Args):
    """Prints the first row as the model reads it, the lengths of all rows, and what is lost."""
    lines = list(filter(str.strip, open(args.data, encoding="utf-8-sig")))
    columns = json.loads(lines[0]) if lines else {}
    script = next(script for script, names in ANSWERS.items() if set(names) <= set(columns))
    tokenizer = script.load_tokenizer(args.model)
    stops = stop_texts(script.base_of(args.model), tokenizer)
    flags = script.resolve(script.Args(model=args.model, data=args.data, steps=0, max_length=sys.maxsize))
    limits = {1024, 2048, 4096, 8192, 16384, flags.max_length}  # the last one is what the model allows
    flags = replace(flags, max_length=sys.maxsize)

    notes = defaultdict(list)  # note -> numbers of its rows
    first, lengths = None, []  # (number, prompt, answers) of the first row; tokens of each row
    examples = progress_bar(read_rows(script, lines, tokenizer, flags), total=len(lines), desc="read")
    for number, example in enumerate(examples, start=1):
        if isinstance(example, str):
            notes[example].append(number)
            continue
        prompt, answers = example[:2]
        first = first or (number, prompt, answers)
        lengths.append(len(prompt) + max(map(len, answers), default=0))
        for note in notes_on(script, tokenizer, stops, *example):
            notes[note].append(number)
    if not first:
        raise BadInput(f"{script.__name__}.py reads no row of {args.data}: all {'; '.join(notes)}")

    print(f"{script.__name__}.py reads {len(lengths):,} of {len(lines):,} rows of {args.data}, of any length")
    for note, numbers in notes.items():
        print(f"{len(numbers):8,} {note} (first: row {numbers[0]})")
    for percent in (50, 90, 99, 100):
        print(f"{percent:6} % of the rows have at most {np.percentile(lengths, percent):,.0f} tokens")
    for limit in sorted(limits):
        if limit < max(lengths):
            print(f"{sum(length > limit for length in lengths):8,} rows are longer than {limit:,} tokens")

    print(f"row {first[0]}, | where training begins:\n  {tokenizer.decode(first[1])!r}")
    for answer in first[2]:
        print(f"  | {tokenizer.decode(answer)!r}")


def read_rows(script, lines: list[str], tokenizer, flags, size=64):
    """Yields for each line what read_file does, or why the script refuses a file of this line alone."""
    for start in range(0, len(lines), size):
        part = lines[start:start + size]
        with TemporaryDirectory() as folder, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            file = f"{folder}/part.jsonl"
            Path(file).write_text("".join(part), encoding="utf-8")
            try:
                examples = read_file(script, file, tokenizer, flags)
            except Exception as error:  # a chat template is a program, and may raise anything
                examples = []
                words = str(error).removeprefix(f"{file}: ").split("\n")[0]
                reason = f"stop the script with {type(error).__name__}: {words:.99}"
                if words == "no row is left":
                    reason = "are dropped: empty or equal answers"

        if len(examples) == len(part):
            yield from examples
        elif size > 1:
            yield from read_rows(script, part, tokenizer, flags, size=1)
        else:
            yield reason


def read_file(script, file: str, tokenizer, flags) -> list[tuple]:
    """(prompt, answers, columns, prompt before it is cut) of each row that the script keeps."""
    rows = script.load_rows(file, tokenizer, flags)
    if script is rloo:
        return [(row.prompt, [], row.columns, row.prompt) for row in rows]
    tokenized = script.tokenize_rows(file, ANSWERS[script], tokenizer)
    return [(*group, columns, ids[0]) for group, (columns, ids) in zip(script.groups_of(rows), tokenized)]


def stop_texts(model: str, tokenizer) -> tuple[str, ...]:
    """The tokens at which generation stops."""
    try:
        config = GenerationConfig.from_pretrained(model)
    except OSError:  # the model has no generation_config.json
        config = AutoConfig.from_pretrained(model)
    stops = np.atleast_1d(config.eos_token_id).tolist()  # of a number, a list or None
    return tuple(tokenizer.decode([token]) for token in stops if token is not None)


def render(script, columns: dict, tokenizer) -> list[str]:
    """The texts that the script makes of the prompt, and of the prompt with each answer."""
    if script is rloo:
        return [rloo.render(columns, tokenizer)]
    return script.render(columns, ANSWERS[script], tokenizer)


def notes_on(script, tokenizer, stops: tuple[str, ...], prompt, answers, columns: dict, whole_prompt):
    """Yields the notes on a row that the script keeps."""
    if isinstance(columns["prompt"], list):
        for name in lost_columns(script, columns, tokenizer):
            yield f"have {name} that the template does not write"
        if tokenizer("a").input_ids[0] == tokenizer.bos_token_id != prompt[0]:
            yield f"do not begin with {tokenizer.bos_token}, which the template does not write"
    else:
        if tokenizer.chat_template:
            yield "are strings, to which the chat template is not applied: prepare.py --chat makes messages"
        texts = render(script, columns, tokenizer)
        if any(columns["prompt"] + columns[name] not in texts for name in ANSWERS[script]):
            yield f"have an answer without {tokenizer.eos_token}, which the script adds"

    if len(prompt) < len(whole_prompt):
        yield "have a prompt that ends early: a token spans its end, or the template changes it"
    if not all(tokenizer.decode(answer[-9:]).rstrip().endswith(stops) for answer in answers):
        yield f"have an answer that does not end with {' or '.join(stops)}, where generation stops"


def lost_columns(script, columns: dict, tokenizer) -> set[str]:
    """"tools" and "text", if the chat template leaves some out.

    Each text gets a mark at its end, a character for private use, and must stand directly before it: one that
    stands elsewhere by chance is not taken for it. Thoughts of earlier answers may be left out."""
    taken = set(json.dumps(columns, ensure_ascii=False))
    marks = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in taken)
    texts = {}  # mark -> (column, text)
    names = [name for name in ("tools", "prompt", *ANSWERS[script]) if columns.get(name)]
    marked = {name: mark_texts(columns[name], name, marks, texts) for name in names}
    try:
        rendered = "".join(render(script, columns | marked, tokenizer))
    except Exception:  # of a template that takes only some texts
        return {"text that cannot be marked, perhaps some"}
    pieces = re.split(f"({'|'.join(texts)})", rendered)
    before = dict(zip(pieces[1::2], pieces[::2]))  # mark -> the text between it and the mark before it

    thoughts = []
    for message in columns["prompt"][:-1]:
        if message["role"] == "assistant":
            thoughts += map(message.get, SAID)
    lost = set()
    noise = re.compile(r"\\[nrt]|\W")  # what changes when a template strips a text or writes it as JSON
    for mark, (name, text) in texts.items():
        is_whole = mark in before and noise.sub("", text) in noise.sub("", before[mark])
        if not is_whole and text not in thoughts:
            lost.add("tools" if name == "tools" else "text")
    return lost


def mark_texts(value, column: str, marks, texts: dict[str, tuple[str, str]]):
    """A copy of a JSON value with a mark at the end of each text."""
    if isinstance(value, list):
        return [mark_texts(item, column, marks, texts) for item in value]
    if isinstance(value, dict):
        names = SAID if "role" in value and column != "tools" else value.keys() - {"type", "id"}
        return value | {key: mark_texts(value[key], column, marks, texts) for key in names if key in value}
    if not isinstance(value, str) or not value.strip():
        return value
    mark = next(marks)
    texts[mark] = (column, value)
    return value + mark


# ---- After: log-ratios of held-out answers ---------------------------

class Row(NamedTuple):
    prompt: tuple[int, ...]
    answers: dict[str, tuple[int, ...]]  # chosen, rejected, desirable, undesirable; of rloo.py before, after
    rewards: dict[str, float | None]  # of rloo.py, for the samples before and after training
    ratios: dict[str, np.ndarray] = {}  # log π − log π_ref of each token

    def margin(self) -> float:
        """Below 0 the answers are ranked wrong, or the reward fell."""
        if self.rewards:
            before, after = self.rewards["before"], self.rewards["after"]
            return 0.0 if None in (before, after) else after - before
        signs = {"chosen": 1, "desirable": 1, "rejected": -1, "undesirable": -1}
        return sum(signs[name] * ratios.sum() for name, ratios in self.ratios.items())


def load_rows(script, run, out: Path, tokenizer) -> list[Row]:
    """The held-out rows of a run, without log-ratios."""
    if script is rloo:
        return load_samples(run, out, tokenizer)
    rows = script.load_rows(run.eval_data or run.data, tokenizer, run)
    if script is dpo:
        return [Row(row.prompt, {"chosen": row.chosen, "rejected": row.rejected}, {}) for row in rows]
    kinds = ["desirable" if row.is_desirable else "undesirable" for row in rows]
    return [Row(row.prompt, {kind: row.completion}, {}) for row, kind in zip(rows, kinds)]


def load_samples(run, out: Path, tokenizer) -> list[Row]:
    """The samples of the first and of the last evaluation. The file has texts, which are tokenized again."""
    steps = defaultdict(list)  # step -> samples
    for sample in map(json.loads, (out / "samples.jsonl").open()):
        if sample["held_out"]:
            steps[sample["step"]].append(sample)

    rows = []
    for i, row in enumerate(rloo.load_rows(run.eval_data, tokenizer, run) if steps else []):
        answers, rewards = {}, {}
        for name, step in (("before", min(steps)), ("after", max(steps))):
            sample = steps[step][i]
            if sample["prompt"] != row.columns["prompt"]:
                raise BadInput(f"{run.eval_data} has other prompts than {out}/samples.jsonl")
            ids = tokenizer(sample["completion"], add_special_tokens=False).input_ids
            answers[name] = tuple([*ids, tokenizer.eos_token_id] if sample["ended"] or not ids else ids)
            rewards[name] = sample["reward"] and round(sample["reward"], 3)  # None: left out
        rows.append(Row(row.prompt, answers, rewards))
    return rows


def add_ratios(rows: list[Row], script, run, out: Path, other: str | None) -> list[Row]:
    """The rows with log-ratios, wrong ones first. `other`: a reference that is not the run's."""
    name = other or run.ref_model
    reference = ReferenceCache(name=name, reference=checkpoint_digest(name), dtype=run.dtype)
    file = Path(vars(run).get("ref_cache") or out / "reference_logprobs.pkl")  # rloo.py has none
    if file.exists() and not other:
        reference.load(file)

    policy = ReferenceCache()
    groups = [(row.prompt, list(row.answers.values())) for row in rows]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for cache, model in ((policy, f"{out}/model"), (reference, name)):
        with redirect_stdout(StringIO()):  # fill loads the model if something is missing, and frees it
            cache.fill(partial(script.load_model, model, device, run), groups, run.tokens_per_forward)

    filled = []
    for row in rows:
        keys = {name: (row.prompt, ids) for name, ids in row.answers.items()}
        filled.append(row._replace(ratios={name: policy[key] - reference[key] for name, key in keys.items()}))
    return sorted(filled, key=Row.margin)


# ---- After: the page -------------------------------------------------

SECTION = Markup("<h2>{}</h2><p class=soft>{}</p>")
COLUMNS = Markup("<div class=columns>{}</div>")
ARTICLE = Markup("<article><h3>{}<b>{}</b></h3><p class='soft text' dir=auto>{}</p>{}"
                 "<details><summary>values</summary>{}</details></article>")
ANSWER = Markup("<div>{} <b>{:+.2f}</b><p class=text dir=auto>{}</p></div>")
TOKEN = Markup("{}<i style='background: {}' title='{:+.5f} nats'>{}</i>")
CONTROLS = {code: chr(0x2400 + code) for code in range(32)} | {9: "→\t", 10: "↵\n"}  # made visible


def write_page(out: Path, curves: dict[str, dict], args: Args):
    """Writes OUT/look.html."""
    flags = json.loads((out / "args.json").read_text())
    script = SCRIPTS[flags.pop("script")]
    flags.pop("data_sha256")
    run = script.Args(**flags)
    defaults = json.loads(json.dumps(vars(script.Args())))  # tuples become lists
    changed = [(name, value) for name, value in flags.items() if value != defaults[name]]
    held_out = plot.held_out_table({out.name: plot.read_run(str(out))})
    tables = table(held_out) + table([("flag", "value"), *changed])
    parts = [COLUMNS.format(tables), show_curves(curves)]

    tokenizer = script.load_tokenizer(run.model)
    rows = load_rows(script, run, out, tokenizer) if (out / "model").exists() else []
    if rows:
        rows = add_ratios(rows, script, run, out, args.ref_model)
        nats = np.concatenate([ratios for row in rows for ratios in row.ratios.values()])
        scale = max(0.1, float(f"{np.quantile(abs(nats), 0.95):.1g}"))  # of full colour
        parts.append(show_moved(rows, tokenizer, scale))
        title = "Held-out answers" if run.eval_data else "Training answers"
        parts.append(show_rows(title, rows, tokenizer, scale, args.rows))

    skeleton = Template(Path(__file__).with_suffix(".html").read_text())
    page = skeleton.substitute(title=escape(out.name), body=Markup("\n").join(parts))
    (out / "look.html").write_text(page, encoding="utf-8")
    print(f"{out / 'look.html'}: {len(page.encode()) / 1e6:.1f} MB")


def table(rows: list[tuple]) -> Markup:
    """A table, whose first row is its head."""
    lines = []
    for row in rows:
        cell = Markup("<td>{}") if lines else Markup("<th>{}")
        lines.append(Markup("<tr>") + Markup().join(cell.format(value) for value in row))
    return Markup("<div><table>{}</table></div>").format(Markup("\n").join(lines))


def show_curves(curves: dict[str, dict]) -> Markup:
    """A picture for each metric, and one legend."""
    pictures = Markup().join(Markup(plot.draw_svg(curves, name)) for name in plot.usual_metrics(curves))
    key = Markup("<b style='color: {}'>━</b> {}&emsp;")
    keys = [key.format(colour, Path(run).name) for run, colour in zip(curves, plot.COLOURS * len(curves))]
    return SECTION.format("Curves", Markup().join(keys)) + COLUMNS.format(pictures)


def shade(text: str, nats: float, scale: float) -> Markup:
    """A token on blue if it became more likely, on orange if it became less likely."""
    word = text.lstrip(" ") or text  # the space before a word has no colour
    opacity = round(190 * min(1, abs(nats) / scale) ** 0.5)  # of 255; the root shows small changes, too
    return TOKEN.format(text.removesuffix(word), f"{plot.COLOURS[int(nats < 0)]}{opacity:02x}", nats, word)


def show_moved(rows: list[Row], tokenizer, scale: float) -> Markup:
    """For each kind of answer the tokens with the largest means, up and down, and special tokens."""
    tables = []
    for kind in dict.fromkeys(name for row in rows for name in row.answers):
        ids = np.concatenate([row.answers[kind] for row in rows if kind in row.answers])
        ratios = np.concatenate([row.ratios[kind] for row in rows if kind in row.ratios])
        tokens, places, counts = np.unique(ids, return_inverse=True, return_counts=True)
        means = np.bincount(places, ratios) / counts

        lines = [(kind, "mean", "times")]
        order = np.argsort(-means)
        for rank, i in enumerate(order):
            if min(rank, len(order) - 1 - rank) < 10 or tokens[i] in tokenizer.all_special_ids:
                text = token_texts(tokenizer, [tokens[i]])[0].replace(" ", "␣")
                lines.append((shade(text, means[i], scale), f"{means[i]:+.2f}", f"{counts[i]:,}"))
        tables.append(table(lines))
    note = ("Means of log π − log π_ref in nats: the ten that rose most, the ten that fell most, end tokens. "
            "Where the end token of good answers falls, the model has learned not to stop.")
    return SECTION.format("Which tokens moved", note) + COLUMNS.format(Markup().join(tables))


def show_rows(title: str, rows: list[Row], tokenizer, scale: float, n_rows: int) -> Markup:
    """The first n_rows rows, or as many as MAX_BYTES have room for."""
    articles, n_bytes = [], 0
    for row in rows[:n_rows]:
        answers, lines = [], [("answer", "token", "log π − log π_ref")]
        for name, ids in row.answers.items():
            texts, ratios = token_texts(tokenizer, ids), row.ratios[name]
            tokens = Markup().join(shade(text, nats, scale) for text, nats in zip(texts, ratios))
            reward = f", reward {row.rewards[name]}" if row.rewards else ""
            answers.append(ANSWER.format(name + reward, ratios.sum(), tokens))
            lines += [(name, text.replace(" ", "␣"), f"{nats:+.5f}") for text, nats in zip(texts, ratios)]

        margin = f"{'gain' if row.rewards else 'margin'} {row.margin():+.2f}"
        flag = " · wrong" if row.margin() < 0 else ""
        answers = COLUMNS.format(Markup().join(answers))
        article = ARTICLE.format(margin, flag, tokenizer.decode(row.prompt), answers, table(lines))
        n_bytes += len(article.encode())
        if n_bytes > MAX_BYTES:
            break
        articles.append(article)

    note = (f"{len(articles):,} of {len(rows):,} rows (--rows; < 20 MB), wrong ones first. Blue tokens rose, "
            f"orange ones fell; full colour: {scale:g} nats. Point at a token for log π − log π_ref.")
    return SECTION.format(title, note) + Markup("\n").join(articles)


def token_texts(tokenizer, ids) -> list[str]:
    """The text of each token. Of the tokens that form a character, all but the last are shown as �."""
    texts = []
    start, known = 0, ""  # the tokens from `start` are decoded together, of which `known` is told
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:end])
        is_part = text.endswith("\ufffd")
        texts.append("\ufffd" if is_part else text[len(known):].translate(CONTROLS))
        if not is_part or end - start > 6:
            start = end - 1
            known = tokenizer.decode(ids[start:end])
    return texts


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__, use_underscores=True))
    except BadInput as error:
        print("look.py:", error, file=sys.stderr)
        sys.exit(2)
