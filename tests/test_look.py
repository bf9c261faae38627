"""tools/look.py: what it tells of a file is what the script then does, and a page has the models' numbers."""
import json
import re
import subprocess
from pathlib import Path
from shutil import copy, which
from tempfile import mkdtemp

import numpy as np
import pytest
from models import cases
from runs import (
    CALL, CALLING, EACH, PAIR, PLAIN, RATED, ROOT, SCRIPTS, TOKENIZER, TOOLS, A, Q, adapt, byte_level, chat, load,
    needs_peft, read, run, said, tiny)
from transformers import LlamaConfig

from logprobs import completion_logprobs
from tools import look

pytest.importorskip("matplotlib")

PLAIN = PLAIN.replace("{{ m.content }}", "{{ m.content }}</s>")
CALLS = "{{ tools | tojson if tools }}" + PLAIN.replace(
    "{{ m.content", "{{ m.tool_calls | tojson if m.tool_calls }}{{ m.content")
THOUGHTLESS = PLAIN.replace("m.content", "m.content.split('</think>')[-1] if m.role == 'assistant' else m.content")
STRICT = "{% if messages | length > 2 %}{{ raise_exception('Roles must alternate') }}{% endif %}" + PLAIN
THINKS = PLAIN.replace("%}<assistant>", "%}<assistant><think>")
ADDS = "{{ tools[0].name + '' if tools }}" + PLAIN  # a TypeError if the name is a number

BEGUN = Q + said("The tea is")

TEXT = "have text that the template does not write"


def notes(printed):
    """The number of rows, the note and the number of the first row, of each note."""
    return re.findall(r"^ +(\d+) (.*) \(first: row (\d+)\)$", printed, re.M)


@pytest.fixture
def describe(tmp_path, capsys):
    """What is printed of rows. The script must keep as many, or raise an error at the first row that is told."""
    def describe(rows, template=PLAIN, stops=("</s>", "<en>"), adds=(), model=None):
        data = tmp_path / "rows.jsonl"
        data.write_text("\n".join(map(json.dumps, rows)))
        if model is None:
            tokenizer = byte_level(template, front=adds)
            model = mkdtemp(dir=tmp_path)
            tokenizer.save_pretrained(model)
            stop_ids = tokenizer.convert_tokens_to_ids(stops)
            LlamaConfig(eos_token_id=stop_ids, max_position_embeddings=1500).save_pretrained(model)
        capsys.readouterr()
        look.main(look.Args(model=model, data=str(data)))
        printed = capsys.readouterr().out

        name, n_read = re.match(r"(\w+).py reads (\d+) of", printed).groups()
        script = SCRIPTS[name]
        stopped = [number for _, note, number in notes(printed) if note.startswith("stop")]
        try:
            kept = script.load_rows(str(data), script.load_tokenizer(model), script.Args(max_length=10**6))
        except Exception as error:
            assert stopped and all(f"row {min(stopped)}" in note for note in getattr(error, "__notes__", []))
        else:
            assert len(kept) == int(n_read) and not stopped
        return printed
    return describe


# --- Before

@cases("template, row, expected", [
    (PLAIN, chat(tools=TOOLS), ["have tools that the template does not write"]),
    (PLAIN, chat(tools=[dict(parameters=dict(role="captain"))]), ["have tools that the template does not write"]),
    (PLAIN, chat(CALLING), [TEXT]),  # calls of an earlier turn
    (CALLS, chat(CALLING, tools=TOOLS), []),
    (PLAIN, chat(said("q\U000F0000\U000F0001", "user")), []),  # characters of the marks
    (THOUGHTLESS, chat(said("<think>Hm.</think>a", "user"), said("<think>Hm.</think>a")), [TEXT]),
    (THOUGHTLESS, chat(said("<think>Hm.</think>a") + Q), []),  # an earlier thought
    (PLAIN, chat(chosen=said("a", thinking="Hm.")), [TEXT]),
    (CALLS, chat(chosen=said("a ", tool_calls=[dict(name="f", arguments=dict(to='1\n"m"'))])), []),
    (PLAIN, chat(chosen=said("", tool_calls=CALL)), ["are dropped: empty or equal answers"]),
    (STRICT, chat(BEGUN), ["stop the script with TemplateError: Roles must alternate"]),
    (ADDS, chat(tools=[dict(name=7)]), ["stop the script with TypeError: "]),
    (PLAIN, dict(prompt=Q, chosen=A), ["stop the script with KeyError: 'rejected'"]),
    (PLAIN, PAIR, ["are strings, to which the chat template is not", "have an answer without </s>, which the script"])])
def test_what_is_told_of_a_row_is_what_the_script_does(describe, template, row, expected):
    found = notes(describe([chat(), row, row], template))
    told = [(n, note[:len(words)], first) for (n, note, first), words in zip(found, expected, strict=True)]
    assert told == [("2", words, "2") for words in expected]


@cases("good, bad", [
    (RATED, RATED | dict(completion="  ")), (RATED, RATED | dict(label="true")), (dict(prompt=Q), dict(prompt="")),
    (dict(prompt=Q, tools=None), dict(prompt=Q, tools=TOOLS)), (dict(prompt=Q), dict(prompt=BEGUN))])
def test_rows_of_other_scripts_are_counted_as_they_do(describe, good, bad):
    describe([good, bad, *[good] * 70, bad])


def test_the_first_row_is_shown_as_the_model_reads_it(describe):
    shown = "row 1, | where training begins:\n  "
    assert shown + "'<user>q</s><assistant>'\n  | 'a</s>'\n  | 'b</s>'\n" in describe([chat()])
    assert shown + "'<user>q</s><assistant>The tea is'\n" in describe([dict(prompt=BEGUN)])


def test_prompts_that_end_early_are_told(describe):
    row = RATED | dict(prompt="The tea wa", completion="s warm.")
    printed = describe([row], model=str(ROOT / "demo/model")), describe([chat()], THINKS)
    for found in map(notes, printed):
        assert ("1", "have a prompt that ends early: a token spans its end, or the template changes it", "1") in found


def test_rows_without_bos_or_a_stop_token_are_told(describe):
    assert notes(describe([chat()], adds=["<s>"], stops=["<en>"])) == [
        ("1", "do not begin with <s>, which the template does not write", "1"),
        ("1", "have an answer that does not end with <en>, where generation stops", "1")]


@needs_peft
def test_an_adapter_reads_as_its_base_does(describe):
    assert describe([PAIR], model=adapt("looked")) == describe([PAIR], model=tiny())


# --- After

def page_of(*runs, **flags):
    look.main(look.Args(runs=tuple(map(str, runs)), **flags))
    return (Path(runs[0]) / "look.html").read_text()


def values_of(page):
    return [float(nats) for nats in re.findall("title='(.*?) nats'", page[page.index("<article>"):])]


@EACH
def test_numbers_of_a_page_are_those_of_both_models(script, monkeypatch):
    module, finished, loaded = SCRIPTS[script], run(script), []
    load_model = module.load_model
    monkeypatch.setattr(module, "load_model", lambda name, *rest, **options: (
        loaded.append(name) or load_model(name, *rest, **options)))
    page = page_of(finished.out)
    assert loaded == [finished.model] + [tiny()] * (script == "rloo")  # the others have a cache

    expected = []
    rows = look.load_rows(module, finished.args, finished.out, module.load_tokenizer(finished.model))
    if script == "rloo":
        ended = [sample["ended"] for sample in read(finished.out / "samples.jsonl")[-3:]]
        assert [row.answers["after"][-1] == TOKENIZER.eos_token_id for row in rows] == ended
    for row in rows:
        groups = [(row.prompt, list(row.answers.values()))]
        new, old = (completion_logprobs(load(model), groups)[0] for model in (finished.model, tiny()))
        for x, y in zip(new, old):
            expected += (x - y).tolist()
            assert f" <b>{(x - y).sum():+.2f}</b><p" in page
    assert sorted(values_of(page)) == pytest.approx(sorted(expected), abs=1e-5) and np.ptp(expected) > 0.1
    assert list(map(float, re.findall(r"<td>([+-]\d+\.\d{5})\b", page))) == values_of(page)


def test_wrong_rows_come_first():
    page = page_of(run("dpo").out)
    assert f"<td>{run('dpo').history[-1]['eval_loss']:.3f}" in page
    margins = [float(text) for text in re.findall(r"margin ([+-][\d.]+)", page)]
    assert margins == sorted(margins) and len(margins) == 3 and page.count("wrong</b>") == np.sum(np.less(margins, 0))
    rows = [look.Row((), {}, {}, dict(chosen=np.ones(2), rejected=np.ones(3))),
            look.Row((), {}, {}, dict(undesirable=np.ones(1))), look.Row((), {}, dict(before=1.5, after=0.5)),
            look.Row((), {}, dict(before=3, after=None))]
    assert [row.margin() for row in rows] == [-1, -1, -1, 0]


def test_text_of_files_is_escaped_and_nothing_else_is_loaded(tmp_path):
    text = "<script>alert(1)</script>"
    data = tmp_path / "<b>.jsonl"
    data.write_text(json.dumps(dict(prompt=text, chosen=text + "1", rejected=text)))
    page = page_of(run("dpo", data=str(data), eval_data=str(data), steps=1, out=f"{tmp_path}/<u>").out)
    assert not re.search(r"<(script|b>\.|u>)", page) and "&lt;u&gt;" in page and "alert" in re.sub("<.*?>", "", page)
    assert not re.search(r"""(src|href)=["']?[^#"']|url\((?!#)|@import""", page)


def test_tokens_that_moved_most_are_listed():
    ids = (*range(40, 80), 1)  # 1 is </s>
    ratios = np.append(np.linspace(1, -1, 40), 0.001)
    rows = [look.Row((), dict(chosen=ids), {}, dict(chosen=ratios)),
            look.Row((), dict(chosen=ids[:1]), {}, dict(chosen=np.array([2.0])))]
    listed = re.findall(r"nats'>(\S+)</i><td>(\S+)<td>(\d+)", look.show_moved(rows, byte_level(), 1.0))
    assert len(listed) == 21 and listed[10] == ("&lt;/s&gt;", "+0.00", "1")
    assert (listed[0][1:], listed[-1][1:]) == (("+1.50", "2"), ("-1.00", "1"))


def test_another_reference_and_unfinished_runs(tmp_path):
    finished = run("dpo")
    page = page_of(finished.out, ref_model=finished.model, rows=1)
    assert not any(values_of(page)) and page.count("<article>") == 1
    for name in ("args.json", "metrics.jsonl"):
        copy(finished.out / name, tmp_path)
    page = page_of(tmp_path, finished.out)
    assert page.count("<svg") == 7 and page.count("━</b>") == 2 and "<article>" not in page


@pytest.mark.slow
@pytest.mark.skipif(not which("chromium"), reason="needs chromium")
def test_a_browser_shows_all_tokens_without_an_error(tmp_path):
    file = run("dpo").out / "look.html"
    values = values_of(page_of(file.parent))
    program = """<script>const tokens = [...document.querySelectorAll('article i')].filter(i => /nats$/.test(i.title))
        document.title = [tokens.length, document.documentElement.scrollWidth <= innerWidth]</script>"""
    page = tmp_path / "page.html"
    page.write_text(re.sub("<meta http-equiv.*?>", "", file.read_text()) + program)
    options = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --window-size=390,800 --dump-dom".split()
    shown = subprocess.run(["chromium", *options, f"--user-data-dir={tmp_path}", page.as_uri()],
                           capture_output=True, text=True, timeout=120)
    assert f"<title>{len(values)},true</title>" in shown.stdout and "CONSOLE" not in shown.stderr
