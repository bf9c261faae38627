"""How rows of a file become token ids: formats, rendering, boundaries, truncation, counted rows, hostile files.

The code is the same text in every script (tests/test_scripts.py), so it is tested here through dpo.py and kto.py.
"""
import csv
import gzip
import importlib
import json
import os
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import dpo
import kto
from refcache import BadInput

ROOT = Path(dpo.__file__).parent
MODEL = str(ROOT / "demo/model")
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)
END = "<|end|>"
CHATS = [json.loads(line) for line in (ROOT / "demo/pairs.jsonl").open().readlines()[:12]]
TEXT = dict(prompt="The tea", chosen=" was warm.", rejected=" was bad.")


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def load(tmp_path):
    """The rows of dpo.py or kto.py from rows or from a file."""
    def load(rows, tokenizer=TOKENIZER, limit=1024, script=dpo, **flags):
        path = rows if isinstance(rows, (str, Path)) else write(tmp_path / "rows.jsonl", rows)
        return script.load_rows(str(path), tokenizer, limit, script.Args(**flags))
    return load


def texts(row, tokenizer=TOKENIZER):
    return [tokenizer.decode(ids) for ids in (row.prompt, row.chosen, row.rejected)]


def said(text, role="assistant"):
    return [{"role": role, "content": text}]


def variant(template):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = template
    return tokenizer


def byte_level(front=(), back=(), **tokens):
    """One token per byte, and special tokens before and after every text."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["<s>", "</s>", "<en>"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(names)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<en>"])
    backend.post_processor = processors.TemplateProcessing(
        single=[*front, "$A", *back], special_tokens=[(name, names.index(name)) for name in ("<s>", "</s>", "<en>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **dict(bos_token="<s>", eos_token="</s>") | tokens)


# ---- Rendering ------------------------------------------------------------------------------------------------------


def test_chats_end_as_their_template_ends_them(load):
    for row, source in zip(load(CHATS), CHATS, strict=True):
        prompt, chosen, rejected = texts(row)
        assert prompt == TOKENIZER.apply_chat_template(source["prompt"], tokenize=False, add_generation_prompt=True)
        assert prompt + chosen == TOKENIZER.apply_chat_template(source["prompt"] + source["chosen"], tokenize=False)
        assert prompt + rejected == TOKENIZER.apply_chat_template(source["prompt"] + source["rejected"], tokenize=False)


def test_strings_end_with_one_eos_token(load):
    first, second = load([TEXT, dict(TEXT, chosen=TEXT["chosen"] + END)])
    assert texts(first) == ["The tea", " was warm." + END, " was bad." + END]
    assert first[:3] == second[:3]


def test_pairs_without_a_prompt_share_the_beginning_of_their_answers(load, capsys):
    chat = CHATS[0]
    named = load([dict(prompt="How was it? It", chosen=" was fine.", rejected=" stank."), chat])
    shared = load([dict(chosen="How was it? It was fine.", rejected="How was it? It stank."),
                   dict(chosen=chat["prompt"] + chat["chosen"], rejected=chat["prompt"] + chat["rejected"])])
    assert [row[:3] for row in named] == [row[:3] for row in shared]
    assert "cut" not in capsys.readouterr().out, "the space before the answers is no part of their prompt"


def test_ultrafeedback_layout_is_a_string_prompt_and_whole_conversations(load):
    question = CHATS[0]["prompt"][0]["content"]
    whole = dict(prompt=question, chosen=CHATS[0]["prompt"] + CHATS[0]["chosen"],
                 rejected=CHATS[0]["prompt"] + CHATS[0]["rejected"])
    answers_only = dict(whole, chosen=CHATS[0]["chosen"], rejected=CHATS[0]["rejected"])
    expected = load(CHATS[:1])[0][:3]
    assert load([whole])[0][:3] == load([answers_only])[0][:3] == expected


@pytest.mark.parametrize("prompt", [CHATS[0]["prompt"], CHATS[0]["prompt"][0]["content"]])
def test_kto_takes_whole_conversations_too_and_a_string_before_messages(load, prompt):
    completions = [CHATS[0]["chosen"]] + [CHATS[0]["prompt"] + CHATS[0]["chosen"]] * (not isinstance(prompt, str))
    rows = load([dict(prompt=prompt, completion=y, label=True) for y in completions], script=kto)
    assert {row[:2] for row in rows} == {load(CHATS[:1])[0][:2]}


def test_a_conversation_without_an_answer_is_dropped(load, capsys):
    question, rejected = CHATS[0]["prompt"], CHATS[0]["rejected"]
    load([dict(prompt=question, chosen=question, rejected=question + rejected), *CHATS])
    assert "1 dropped: no tokens" in capsys.readouterr().out


def test_answers_of_several_turns_are_rendered_whole(load):
    turns = said("It was fine.") + said("And the soup?", "user") + said("Bad.")
    prompt, chosen, _ = texts(load([dict(CHATS[0], chosen=turns)])[0])
    assert prompt + chosen == TOKENIZER.apply_chat_template(CHATS[0]["prompt"] + turns, tokenize=False)


@pytest.mark.parametrize("call", [
    "{{ strftime_now('%d %b %Y') }}", "{{ strftime_now( format = '%d %b %Y' ) }}",
    "{% set now = strftime_now %}{% set f = '%d %b %Y' %}{{ now(f) }}",
    "{% if strftime_now is defined %}{{ strftime_now('%d ') + strftime_now('%b %Y') }}{% endif %}"])
def test_chat_templates_see_a_fixed_date(load, call, capsys):
    template = call + ": {% for m in messages %}{{ m.content }};{% endfor %}"
    row = dict(prompt=said("q", "user"), chosen=said("a"), rejected=said("b"))
    for tokenizer, kwargs in ((variant(template), {}), (TOKENIZER, {"chat_template": template})):
        assert texts(load([row], tokenizer, chat_template_kwargs=json.dumps(kwargs))[0])[0] == "01 Jan 2026: q;"
        assert "always 01 January 2026" in capsys.readouterr().out


@pytest.mark.parametrize("code", "a A b B d -d m -m y Y H M S p e F j T I -I D U".split())
def test_the_fixed_date_is_written_as_python_writes_it(load, code):
    tokenizer = variant("{{ strftime_now('%" + code + "') }}: {% for m in messages %}{{ m.content }};{% endfor %}")
    row = dict(prompt=said("q", "user"), chosen=said("a"), rejected=said("b"))
    assert texts(load([row], tokenizer)[0])[0] == f"{dpo.TODAY.strftime('%' + code)}: q;"


def test_a_template_chosen_by_name_sees_the_fixed_date(load, capsys):
    dated = "{{ strftime_now('%F') }}{% for m in messages %}{{ m.content }};{% endfor %}"
    tokenizer = variant({"default": "{{ raise_exception('no') }}", "dated": dated})
    row = dict(prompt=said("q", "user"), chosen=said("a"), rejected=said("b"))
    kwargs = json.dumps({"chat_template": "dated"})
    assert texts(load([row], tokenizer, chat_template_kwargs=kwargs)[0])[0] == "2026-01-01q;"
    assert "always 01 January 2026" in capsys.readouterr().out


def test_a_template_that_the_tokenizer_does_not_have_is_refused(load):
    """transformers would take its name for the template."""
    with pytest.raises(BadInput, match="the tokenizer has no chat template named 'tool_use'"):
        load([CHATS[0]], chat_template_kwargs='{"chat_template": "tool_use"}')


def test_the_fixed_date_changes_no_white_space_of_a_template(load):
    """trim_blocks and lstrip_blocks treat the beginning of a template specially."""
    row = dict(prompt=said("q", "user"), chosen=said("a"), rejected=said("b"))
    for start in ("\n", "  {% if true %}x{% endif %}", "\n\n  {% set x = 1 %}\n "):
        template = start + "{% for m in messages %}{{ m.content }};{% endfor %}"
        (prompt, *_), (dated, *_) = (texts(load([row], variant(text))[0]) for text in (
            template, template + "{% if messages[9] %}{{ strftime_now('%d') }}{% endif %}"))
        assert prompt == dated


def test_a_prompt_that_ends_with_a_beginning_of_the_answer_is_continued(load):
    """As TRL does: no second header of the assistant stands between them."""
    row = dict(prompt=said("q", "user") + said("The tea is"), chosen=said(" warm."), rejected=said(" cold."))
    tokenizer = variant("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
                        "{% if add_generation_prompt %}<assistant>{% endif %}")
    prompt, chosen, _ = texts(load([row], tokenizer)[0], tokenizer)
    assert prompt == "<user>q<assistant>The tea is" and chosen == "<assistant> warm."


def test_chat_template_kwargs_reach_the_template(load):
    tokenizer = variant("{% if loud %}LOUD{% endif %}{% for m in messages %}{{ m.content }};{% endfor %}")
    row = dict(prompt=said("q", "user"), chosen=said("a"), rejected=said("b"))
    assert texts(load([row], tokenizer)[0])[0] == "q;"
    assert texts(load([row], tokenizer, chat_template_kwargs='{"loud": true}')[0])[0] == "LOUDq;"
    for broken in ("{loud", "[1]"):
        with pytest.raises(BadInput, match="line 1"):
            load([row], tokenizer, chat_template_kwargs=broken)


def test_chat_template_kwargs_of_a_row_come_before_the_flag(load):
    tokenizer = variant("{{ mood }}{% for m in messages %}{{ m.content }};{% endfor %}")
    row = dict(prompt=said("q", "user"), chosen=said("a"), rejected=said("b"))
    rows = [row | dict(chat_template_kwargs=kwargs) for kwargs in (dict(mood="sad"), {}, None)]
    loaded = load(rows, tokenizer, chat_template_kwargs='{"mood": "glad"}')
    assert [texts(row, tokenizer)[0] for row in loaded] == ["sadq;", "gladq;", "gladq;"]
    with pytest.raises(BadInput, match="line 1 cannot be rendered"):
        load([row | dict(chat_template_kwargs="sad")], tokenizer)


@pytest.mark.parametrize("row", [TEXT, CHATS[0]])
@pytest.mark.parametrize("name", ["tools", "image", "images"])
def test_columns_that_would_change_the_prompt_are_refused_unless_they_are_empty(load, row, name):
    assert len(load([row | {name: None}, row | {name: []}])) == 2
    with pytest.raises(BadInput, match=f"line 2: it has \\['{name}'\\], which this script would not use"):
        load([row, row | {name: [{"type": "function"}]}])


def test_columns_of_the_file_are_kept(load):
    row = load([CHATS[0]])[0].row
    assert row["thing"] == CHATS[0]["thing"] and row["prompt"] == CHATS[0]["prompt"]


# ---- The boundary between prompt and answer -------------------------------------------------------------------------


def test_a_token_that_spans_the_end_of_the_prompt_moves_to_the_answers(load, capsys):
    """The prompt is cut to the tokens that prompt + answer begin with. It is counted, and no token is lost."""
    row, clean = load([dict(prompt="The tea wa", chosen="s warm.", rejected="s bad."), TEXT])
    assert row.prompt + row.chosen == tuple(TOKENIZER("The tea was warm." + END, add_special_tokens=False).input_ids)
    assert row.prompt + row.rejected == tuple(TOKENIZER("The tea was bad." + END, add_special_tokens=False).input_ids)
    assert "The tea".startswith(texts(row)[0]) and row[:3] == clean[:3]
    assert re.search(r"2 of 2 rows; 1 with a prompt cut .*rows.jsonl line 1\)", capsys.readouterr().out)


def test_a_template_that_ends_a_lone_prompt_differently_keeps_the_common_tokens(load, capsys):
    """Such as one that opens a thinking block in its generation prompt."""
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" \
               "{% if add_generation_prompt %}<|assistant|>Honestly, {% endif %}"
    rows = load(CHATS, variant(template))
    for row, expected in zip(rows, load(CHATS)):
        assert row.prompt + row.chosen == expected.prompt + expected.chosen and row.prompt == expected.prompt
    assert "12 with a prompt cut" in capsys.readouterr().out


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no\nsuch role') }}", "{{ 1 / 0 }}", "{% if %}"])
def test_a_template_that_fails_is_named_with_the_line(load, template):
    with pytest.raises(BadInput, match="rows.jsonl line 1 cannot be rendered") as error:
        load(CHATS, variant(template))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("template", [
    "", "Hello.", "{% for m in messages %}{{ m.role }};{% endfor %}",  # answers that render the same
    "{% for m in messages | reverse %}{{ m.content }}{% endfor %}"])  # a prompt that is no beginning
def test_a_template_under_which_nothing_is_left_is_refused(load, template):
    with pytest.raises(BadInput, match="too few rows"):
        load(CHATS, variant(template))


def test_strings_without_an_eos_token_are_refused(load):
    with pytest.raises(BadInput, match="line 1 cannot be rendered"):
        load([TEXT], byte_level(eos_token=None))


FRONTS = [(), ("<s>",), ("<s>", "<en>"), ("<en>", "<s>", "<s>")]


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("back", [(), ("</s>",)])
def test_what_the_tokenizer_puts_before_a_text_stays_in_front(load, front, back):
    tokenizer = byte_level(front, back)
    ids = tuple(tokenizer.convert_tokens_to_ids(front))
    row = load([TEXT], tokenizer)[0]
    assert row.prompt == ids + tuple(tokenizer("The tea", add_special_tokens=False).input_ids)
    assert row.chosen == tuple(tokenizer(" was warm.", add_special_tokens=False).input_ids) + (tokenizer.eos_token_id,)


def test_bos_stays_in_front_for_a_tokenizer_of_few_characters(load, capsys):
    """Such as one for DNA, which has no token for the letter a."""
    tokens = {token: i for i, token in enumerate(["<s>", "</s>", *"ACGT"])}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    row = dict(prompt="ACGT", chosen="GG", rejected="TT")
    assert load([row], tokenizer)[0][:3] == ((0, 2, 3, 4, 5), (4, 4, 1), (5, 5, 1))
    rows = load([row, dict(row, prompt="xyz"), dict(row, prompt="xyz ACGT")], tokenizer)
    assert [row.prompt for row in rows] == [(0, 2, 3, 4, 5)] * 2
    assert "1 dropped: no tokens" in capsys.readouterr().out


@pytest.mark.parametrize("front", FRONTS)
def test_a_truncated_prompt_keeps_what_the_tokenizer_puts_before_it(load, front, capsys):
    tokenizer, limit = byte_level(front), 20
    ids = tuple(tokenizer.convert_tokens_to_ids(front))
    row, short = load([dict(TEXT, prompt="The cake, the pie and the tea"), dict(prompt="a", chosen="b", rejected="c")],
                      tokenizer, limit, truncate=True)
    assert len(row.prompt) + max(len(row.chosen), len(row.rejected)) == limit and len(short.prompt) == len(ids) + 1
    assert row.prompt[:len(ids)] == ids and (row.chosen, row.rejected) == load([TEXT], tokenizer)[0][1:3]
    assert "The cake, the pie and the tea".endswith(tokenizer.decode(row.prompt[len(ids):]))
    assert "2 of 2 rows; 1 truncated to 20 tokens (first: " in capsys.readouterr().out


def test_a_chat_gets_no_bos_beyond_its_template(load):
    tokenizer = byte_level(("<s>",))
    tokenizer.chat_template = "<s>{% for m in messages %}{{ m.content }};{% endfor %}"
    row = load([dict(prompt=said("q", "user"), chosen=said("a"), rejected=said("b"))], tokenizer)[0]
    assert row.prompt.count(tokenizer.bos_token_id) == 1 and row.prompt[0] == tokenizer.bos_token_id


# ---- Rows that do not fit -------------------------------------------------------------------------------------------


def test_rows_that_are_too_long_are_dropped_and_counted(load, capsys):
    limit = max(len(row.prompt) + max(len(row.chosen), len(row.rejected)) for row in load(CHATS))
    long = dict(CHATS[1], prompt=said("and so on " * 50, "user"))
    assert len(load([*CHATS, long, dict(TEXT, prompt="and so on " * 50)], limit=limit)) == 12
    printed = capsys.readouterr().out
    assert re.search(rf"12 of 14 rows; 2 dropped: longer than {limit} tokens \(first: .*rows.jsonl line 13\)", printed)
    assert len(load([long] * 9 + CHATS[:1], limit=limit)) == 1  # they are good rows, however many there are
    with pytest.raises(BadInput, match="too few rows"):
        load(CHATS, limit=5)


def test_a_chat_that_is_too_long_is_dropped_even_with_truncate(load, capsys):
    long = dict(CHATS[1], prompt=said("and so on " * 50, "user"))
    assert len(load([CHATS[0], long], limit=60, truncate=True)) == 1
    assert "1 of 2 rows; 1 dropped: longer than 60 tokens" in capsys.readouterr().out


def test_answers_that_leave_no_room_for_a_prompt_are_dropped_even_with_truncate(load, capsys):
    assert len(load([TEXT, dict(TEXT, chosen=" and so on" * 50)], limit=60, truncate=True)) == 1
    assert "1 dropped: longer than 60 tokens" in capsys.readouterr().out
    tokenizer = byte_level(("<s>",))  # <s> alone is no prompt
    limit = len(load([TEXT], tokenizer)[0].chosen)
    assert len(load([TEXT, dict(prompt="a", chosen="b", rejected="c")], tokenizer, limit, truncate=True)) == 1
    assert f"1 dropped: longer than {limit} tokens" in capsys.readouterr().out


def test_texts_that_begin_with_bos_get_no_second_one(load):
    tokenizer = byte_level(("<s>",))
    for prompt in ("The tea", "<s>The tea"):
        assert texts(load([TEXT | dict(prompt=prompt)], tokenizer)[0], tokenizer)[0] == "<s>The tea"


# ---- Rows that are left out, and rows that are refused --------------------------------------------------------------


@pytest.mark.parametrize("bad, words", [
    (dict(TEXT, prompt=""), "prompt is empty"), (dict(TEXT, chosen=""), "chosen is empty"),
    (dict(TEXT, chosen=" \n"), "chosen is empty"), (dict(CHATS[0], prompt=[]), "prompt is empty"),
    (dict(CHATS[0], chosen=said("")), "chosen is empty"),
    (dict(TEXT, chosen=TEXT["rejected"]), "chosen equals rejected"),
    (dict(TEXT, chosen=" same" + END, rejected=" same"), "both answers the same"),
    (dict(prompt="Here is once more the tea ", chosen="Here is once more the tea, warm.",
          rejected="Here is once more the tea, cold."),
     "begin with the prompt"),
    (dict(prompt=said("Where is the tea today?", "user"), chosen=said("Where is the tea today? Here."),
          rejected=said("Where is the tea today? There.")), "begin with the prompt"),
])
@pytest.mark.parametrize("script", [dpo, kto])
def test_rows_that_teach_nothing_are_dropped_and_counted_with_the_first_place(load, capsys, script, bad, words):
    per_row = len(load([TEXT], script=script))
    assert len(load([TEXT, bad, TEXT, bad], script=script)) == 2 * per_row
    printed = capsys.readouterr().out
    assert re.search(rf"2 of 4 rows; 2 dropped: .*{words}.*rows.jsonl line 2\)", printed)
    with pytest.raises(BadInput, match="too few rows"):  # more than half are bad
        load([TEXT, bad, bad], script=script)
    with pytest.raises(BadInput, match="too few rows"):
        load([bad], script=script)


@pytest.mark.parametrize("script", [dpo, kto])
def test_pairs_without_a_prompt_and_nothing_in_common_are_dropped_and_counted(load, capsys, script):
    good, bad = dict(chosen="The tea was warm.", rejected="The tea was bad."), dict(chosen="x", rejected="xy")
    assert len(load([good, bad, good, dict(chosen="x", rejected="y")], script=script)) == 2 * (1 + (script is kto))
    printed = capsys.readouterr().out
    assert re.search(r"2 dropped: no column prompt.*rows.jsonl line 2\)", printed)
    assert "2 without a column prompt: it is what the answers have in common" in printed


@pytest.mark.parametrize("script", [dpo, kto])
def test_a_row_that_alone_lacks_a_prompt_is_refused(load, script):
    """Else its prompt would be what its answers have in common."""
    with pytest.raises(BadInput, match="rows.jsonl line 2: it has no prompt, but other rows have one"):
        load([TEXT, {name.title() if name == "prompt" else name: x for name, x in TEXT.items()}], script=script)


@pytest.mark.parametrize("row", [
    dict(prompt="Hello", chosen="Hello! How are you?", rejected="Hello you"),
    dict(prompt="Hello\n", chosen=" Hello! How are you?", rejected="\nHello you"),
    dict(prompt="Where is the warm tea today? ", chosen="Here.", rejected="Where is the warm tea today? There."),
    dict(prompt=said("Where is the warm tea?", "user"), chosen=said("Here."), rejected=said("Where is the warm tea?")),
])
def test_answers_that_begin_with_a_short_prompt_and_a_single_one_are_kept_and_counted(load, capsys, row):
    assert len(load([CHATS[0] if isinstance(row["prompt"], list) else TEXT, row])) == 2
    assert "1 with an answer that begins with the prompt (first: " in capsys.readouterr().out


@pytest.mark.parametrize("yes, no", [
    (True, False), (1, 0), (1.0, 0.0), ("1", "0"), ("1.0", "0.0"), ("true", "false"), ("True", "False"),
    ("TRUE", "FALSE")])
def test_labels_are_what_json_python_and_spreadsheets_write(load, yes, no):
    rows = load([dict(prompt="The tea", completion=" was warm.", label=label) for label in (yes, no)], script=kto)
    assert [row.label for row in rows] == [True, False]


@pytest.mark.parametrize("bad, words", [
    ("{broken", ""), ('["a list"]', ""), ("7", ""), ("null", ""), ("[" * 100_000, ""), ('{"prompt": ', ""),
    ({"prompt": "x", "chosen": "y"}, "rejected must be a string .*columns: "), (dict(TEXT, chosen=5), "chosen must be"),
    (dict(TEXT, prompt=None), "prompt must be"), (dict(CHATS[0], chosen=[{"role": "assistant"}]), "chosen must be"),
    (dict(CHATS[0], chosen=["a"]), "chosen must be"), (dict(CHATS[0], chosen=[{"content": "a"}]), "chosen must be"),
    (dict(CHATS[0], chosen=[{"role": "assistant", "content": [{"type": "text"}]}]), "chosen must be"),
    (dict(TEXT, chosen=json.dumps(said("a"))), "chosen must be"),
    (dict(CHATS[0], chosen="a", rejected="b"), "all be lists"), (dict(TEXT, chosen=said("a")), "all be lists"),
    (dict(CHATS[0], chosen=said("a", "user"), rejected=said("b", "user")), "role user"),
    (dict(CHATS[0], chosen=said("x", "system") + CHATS[0]["prompt"] + said("a")), "role system"),
    (dict(TEXT, prompt=' [ {"content": "q", "role": "user"}]'), "messages written as a string"),
    (dict(TEXT, chosen="{'content': 'a', 'role': 'user'}"), "messages written as a string"),
    (dict(TEXT, prompt="[{'from': 'human', 'value': 'q'}]"), "messages written as a string"),
    (dict(TEXT, prompt='"[{\\"role\\": \\"user\\", \\"content\\": \\"q\\"}]"'), "messages written as a string"),
    (dict(TEXT, prompt="\ufeff[Message(role='user', content='q')]"), "messages written as a string"),
    (dict(TEXT, chosen=" \ud800"), "cannot be rendered"), (dict(TEXT, prompt="half \udfff"), "cannot be rendered"),
])
def test_malformed_rows_are_refused_in_one_sentence_that_names_the_line(load, bad, words):
    with pytest.raises(BadInput, match=rf"rows.jsonl line 2\b.*{words}") as error:
        load([TEXT, bad, TEXT, TEXT])
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 700


@pytest.mark.parametrize("bad, words", [
    (dict(prompt="a", completion=" b"), "label must be true or false.*None.*columns: .*prompt.*completion"),
    (dict(prompt="a", completion=" b", label=0.5), "not '?0.5"),
    (dict(prompt="a", completion=" b", label="good"), "label"),
    (dict(prompt="a", completion=" b", label=[1]), "label"),
    (dict(prompt="a", completion=" b", label="x" * 999), "label"),
    (dict(prompt="a", label=True), "must be"), (dict(completion=" b", label=True), "it has no prompt")])
def test_malformed_feedback_is_refused_in_one_sentence_that_names_the_line(load, bad, words):
    with pytest.raises(BadInput, match=rf"rows.jsonl line 2\b.*{words}") as error:
        load([TEXT, bad, TEXT, TEXT], script=kto)
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 400


def test_labels_and_columns_of_feedback_in_every_spelling(load):
    labels = [True, 1, 1.0, "1", "true", "True", False, 0, 0.0, "0", "false", "False"]
    rows = load([dict(prompt="The tea", completion=" was warm.", label=label) for label in labels], script=kto)
    assert [row.label for row in rows] == [True] * 6 + [False] * 6
    halos, = load([dict(prompt="The tea", output=" was warm.", label=1, type="binary_feedback")], script=kto)
    assert halos[:3] == rows[0][:3]


def test_pairs_give_kto_one_row_of_each_kind(load):
    rows, pairs = load(CHATS, script=kto), load(CHATS)
    assert [row.label for row in rows] == [True, False] * len(pairs)
    assert [row[:2] for row in rows] == [(pair.prompt, y) for pair in pairs for y in (pair.chosen, pair.rejected)]


# ---- Files ----------------------------------------------------------------------------------------------------------

ROWS = [dict(prompt=f"The tea, {i}", chosen=' was "warm",\nvery.', rejected=" was bad.") for i in range(3)]


def write_as(path, rows):
    if path.suffix.lower() == ".jsonl":  # with a byte order mark, CRLF and empty lines
        path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(map(json.dumps, rows)).encode())
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            (writer := csv.DictWriter(file, rows[0])).writeheader()
            writer.writerows(rows)
    else:
        pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(path)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.JSONL.GZ", "rows.csv.gz", "rows[1].csv", "rows[0-9].parquet"])
def test_compressed_files_and_names_with_brackets_are_read(load, tmp_path, name):
    if "json" not in name:
        pytest.importorskip("datasets")
    path = write_as(tmp_path / name.removesuffix(".gz").removesuffix(".GZ"), ROWS)
    if name != path.name:
        (tmp_path / name).write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert [row[:3] for row in load(tmp_path / name)] == [row[:3] for row in load(ROWS)]


def test_a_damaged_compressed_file_is_refused(load, tmp_path):
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"x" * 999)[:30])
    with pytest.raises(BadInput, match="cannot read .*rows.jsonl.gz"):
        load(tmp_path / "rows.jsonl.gz")


def repeated(path, n):
    """A file of n equal rows, which is small although they are not."""
    line = json.dumps({"prompt": "x" * 2**15, "chosen": "a", "rejected": "b"}).encode() + b"\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(line * n))
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list([json.loads(line)] * n).to_parquet(path)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json.gz", "rows.csv.gz", "rows.parquet"])
def test_a_file_that_unpacks_to_much_more_than_its_size_is_refused(load, tmp_path, name, monkeypatch):
    path = repeated(tmp_path / name, 1000)
    monkeypatch.setattr(dpo, "SMALL", 2**20)
    assert path.stat().st_size < 2**25 / 320
    with pytest.raises(BadInput, match=f"cannot read .*{name}: .*much more than its size"):
        load(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_two_columns_of_one_name_are_refused(load, tmp_path, name):
    path, row = tmp_path / name, '{"prompt": "x", "chosen": " a", "rejected": " b", "chosen": " c"}'
    if name == "rows.parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        table = importlib.import_module("pyarrow").table(
            [["x"], [" a"], [" b"], [" c"]], names=["prompt", "chosen", "rejected", "chosen"])
        parquet.write_table(table, path)
    else:
        path.write_text({"rows.jsonl": row, "rows.json": f"[{row}]"}.get(name, "prompt,chosen,chosen\nx, a, c\n"))
    with pytest.raises(BadInput, match=f"{name}.* (two columns have one name|an object has one name twice)"):
        load(path)


@pytest.mark.parametrize("name, data", [
    ("rows.json.gz", gzip.compress(b"[" + b"{}," * 8000 + b"{}]")),  # 64 bytes per object
    ("rows.jsonl.gz", gzip.compress(b'{"a": [' + b"1e1," * 12000 + b"1]}")),  # 32 bytes per number
    ("rows.csv", b"a," * 5000 + b"a\n" + b"x\n" * 5000)], ids=["objects", "numbers", "header"])  # a dict of 5000 keys per row
def test_objects_count_towards_the_unpacked_size(load, tmp_path, name, data, monkeypatch):
    monkeypatch.setattr(dpo, "SMALL", 2**20)
    data = data.replace(b"a,", b"%d,") % tuple(range(5000)) if name == "rows.csv" else data
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadInput, match=f"cannot read .*{name}: .*(much more than its size|fewer cells than the header)"):
        load(tmp_path / name)


def test_a_parquet_page_that_unpacks_to_much_more_than_its_size_is_not_read(load, tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = importlib.import_module("pyarrow").table({"prompt": ["x" * 2**20] * 32})
    parquet.write_table(table, tmp_path / "rows.parquet", compression="zstd", use_dictionary=False)
    monkeypatch.setattr(dpo, "SMALL", 2**20)
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", None)
    with pytest.raises(BadInput, match="cannot read .*rows.parquet: .*much more than its size"):
        load(tmp_path / "rows.parquet")


@pytest.mark.parametrize("kind", ["list of nulls", "list of booleans", "null columns"])
def test_values_that_take_no_room_in_parquet_count_too(load, tmp_path, kind, monkeypatch):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {name: ["x"] for name in TEXT}
    if kind == "null columns":
        columns = {name: x * 1000 for name, x in columns.items()} | {f"c{n}": arrow.nulls(1000) for n in range(200)}
    else:
        x = arrow.nulls(2 * 10**5) if kind == "list of nulls" else arrow.array([False] * 2 * 10**5)
        columns["x"] = arrow.ListArray.from_arrays(arrow.array([0, len(x)], arrow.int32()), x)
    parquet.write_table(arrow.table(columns), tmp_path / "rows.parquet", compression="zstd")
    monkeypatch.setattr(dpo, "SMALL", 2**10)
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", None)
    assert (tmp_path / "rows.parquet").stat().st_size < 2**17
    with pytest.raises(BadInput, match="much more than its size"):
        load(tmp_path / "rows.parquet")


@pytest.mark.parametrize("row", [dict(TEXT, prompt="a " * 10**6), dict(CHATS[0], chosen=said("a " * 10**6))])
def test_a_text_that_can_never_fit_is_dropped_before_it_is_tokenized(load, capsys, row, monkeypatch):
    def tokenize(tokenizer, prompt, answers, *more, original=dpo.tokenize):
        assert len(str(prompt)) + len(str(answers)) < 10**6
        return original(tokenizer, prompt, answers, *more)
    monkeypatch.setattr(dpo, "tokenize", tokenize)
    assert len(load([TEXT if isinstance(row["prompt"], str) else CHATS[1], row])) == 1
    assert "1 dropped: longer than 1024 tokens" in capsys.readouterr().out


def test_a_name_that_is_no_file_is_refused_at_once_if_no_hub_answers(load, monkeypatch):
    pytest.importorskip("datasets")
    hub = importlib.import_module("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.HfApi, "dataset_info", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("nobody")))
    monkeypatch.setattr(importlib.import_module("datasets"), "load_dataset", None)
    with pytest.raises(BadInput, match="cannot read some/name: .*nobody"):
        load("some/name")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet", "JSONL"])
def test_every_format_gives_the_same_rows(load, tmp_path, suffix):
    if suffix.lower() != "jsonl":
        pytest.importorskip("datasets")
    expected = load(ROWS)
    assert [row[:3] for row in load(write_as(tmp_path / f"file.{suffix}", ROWS))] == [row[:3] for row in expected]


def test_chats_in_parquet_are_those_of_jsonl(load, tmp_path):
    pytest.importorskip("datasets")
    assert [row[:3] for row in load(write_as(tmp_path / "chats.parquet", CHATS))] == [row[:3] for row in load(CHATS)]


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet"])
def test_errors_in_other_formats_name_the_row(load, tmp_path, suffix):
    pytest.importorskip("datasets")
    rows = [TEXT, dict(TEXT, chosen=json.dumps(said("a"))), TEXT]
    with pytest.raises(BadInput, match=rf"file.{suffix} row 2\b.*chosen must be"):
        load(write_as(tmp_path / f"file.{suffix}", rows))


@pytest.mark.parametrize("name, words", [
    ("nothing.jsonl", "no such file"), ("nothing.csv", "no such file"), ("rows.txt", ".jsonl, .json"),
    ("rows", ".jsonl, .json"), ("empty.jsonl", "holds no rows"), ("blank.jsonl", "holds no rows")])
def test_files_that_cannot_be_read_are_named(load, tmp_path, name, words):
    texts = {"rows.txt": json.dumps(TEXT), "rows": json.dumps(TEXT), "empty.jsonl": "", "blank.jsonl": "\n \r\n"}
    for file, text in texts.items():
        (tmp_path / file).write_text(text)
    with pytest.raises(BadInput, match=f"{name}.*{words}"):
        load(tmp_path / name)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_files_of_text_do_without_the_datasets_package(load, tmp_path, monkeypatch, suffix):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert len(load(write_as(tmp_path / f"rows.{suffix}", ROWS))) == len(ROWS)
    with pytest.raises(BadInput, match="pip install datasets"):
        load("no/file")


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet"])
def test_a_file_that_was_replaced_is_read_anew_although_its_time_is_the_same(tmp_path, suffix):
    for answer in (" good.", " better!"):
        path = write_as(tmp_path / f"rows.{suffix}", [dict(TEXT, chosen=answer)])
        os.utime(path, (1, 1))
        assert dpo.read_rows(str(path))[0][1]["chosen"] == answer


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_values_are_read_as_they_are_written(tmp_path, suffix):
    row = dict(TEXT, prompt="NA", answer="00123", date="2024-01-01", none="None", number="1.10")
    assert dpo.read_rows(str(write_as(tmp_path / f"rows.{suffix}", [row])))[0][1] == row


def test_cells_beyond_the_header_are_refused_also_if_every_row_has_them(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,chosen,rejected\np, good, bad, and more\nq, good, bad, and more\n")
    with pytest.raises(BadInput, match="line 2 has more or fewer cells than the header"):
        dpo.read_rows(str(tmp_path / "rows.csv"))


@pytest.mark.parametrize("source, asked", [
    ("some/dataset", (("some/dataset",), "train")), ("some/dataset:test", (("some/dataset",), "test")),
    ("some/dataset:config:test", (("some/dataset", "config"), "test"))])
def test_hub_datasets_are_loaded_by_name_config_and_split(load, monkeypatch, source, asked):
    calls = []
    fake = SimpleNamespace(load_dataset=lambda *names, split, **more: calls.append((names, split)) or CHATS)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert len(load(source)) == len(CHATS) and calls == [asked]


def test_cells_beyond_the_header_of_a_csv_file_do_not_shift_the_columns(load, tmp_path):
    """pandas takes the first column for an index if every row has one cell more than the header."""
    pytest.importorskip("datasets")
    (tmp_path / "rows.csv").write_text("prompt,chosen,rejected\nThe tea, was warm., was bad.,more\n")
    try:
        assert load(tmp_path / "rows.csv")[0][:3] == load([TEXT])[0][:3]
    except BadInput:
        pass


HOSTILE = {
    "deep.jsonl": b"[" * 100_000, "deep.json": b"[" * 100_000, "open.jsonl": b'{"a":' * 999, "zeros.jsonl": b"\0" * 99,
    "columns.jsonl": b'{"a\\nb\\u2028\\ud800": 1}', "big.jsonl": b"9" * 5000, "latin.jsonl": b'{"prompt": "\xff\xfe"}',
    "bytes.json": bytes(range(256)), "bytes.csv": bytes(range(256)), "bytes.parquet": bytes(range(256)),
    "ragged.csv": b"prompt,chosen,rejected\np, a, b\np, a, b,more\n", "short.csv": b"prompt,chosen,rejected\np, a\n",
    "empty.csv": b"", "empty.json": b"", "empty.parquet": b"", "pickle.jsonl": b"\x80\x04cos\nsystem\n."}


@pytest.mark.parametrize("script", [dpo, kto])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_one_sentence(load, tmp_path, name, script):
    if not name.endswith("jsonl"):
        pytest.importorskip("datasets")
    (tmp_path / name).write_bytes(HOSTILE[name])
    with pytest.raises(BadInput) as error:
        load(tmp_path / name, script=script)
    assert name in str(error.value) and len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 700


ODD = ["\ufeff", "\0", "\r\n", "\u2028", "\u202eשלום", "👩‍👩‍👧", "e\u0301", " ", "\n\n", " \t ", END, "<|assistant|>",
       "</s>", "[{", "1e999", '"', "a", "Is", " the", " tea", "long " * 40, "ـ", "\x7f"]
JUNK = [b"", b"x", b'{"a":' * 99, b"NaN", b'"', b",", b"\\ud800", b"\xff", b"\0", b"\r", b"\n\n", b"\xef\xbb\xbf", b"]",
        b"\xe2\x80\xa8", b"null", b"{}", b"}\n{"]


def odd_rows(rng, n):
    """Rows of odd text: strings or chats, as pairs or as feedback."""
    def text(): return "".join(rng.choices(ODD, k=rng.randint(0, 4)))
    def message(): return {"role": rng.choice(["user", *["assistant"] * 3, "tool"]), "content": text()}
    def chat(): return [message() for _ in range(rng.randint(1, 3))]
    for _ in range(n):
        make = rng.choice([text, chat])
        pair = dict(prompt=make(), chosen=make(), rejected=make(), id=rng.choice([None, 10**400, float("nan"), [[{}]]]))
        feedback = dict(prompt=pair["prompt"], completion=pair["chosen"], label=rng.choice([True, 0, "1"]))
        yield pair if rng.random() < 0.7 else feedback


def check_rows(rows, tokenizer, limit, truncate):
    """Every kept row holds the tokens of its texts, and nothing else."""
    for row in rows:
        source = row.row
        if hasattr(row, "chosen"):
            answers = [(row.chosen, source["chosen"]), (row.rejected, source["rejected"])]
            assert row.chosen != row.rejected
        else:
            pair = "chosen" in source
            answers = [(row.completion, source[("chosen" if row.label else "rejected") if pair else "completion"])]
        for ids, text in answers:
            assert row.prompt and ids and len(row.prompt) + len(ids) <= limit
            assert all(type(i) is int and 0 <= i < len(tokenizer) for i in row.prompt + ids)
            if not truncate and isinstance(text, str):
                text = text.removesuffix(tokenizer.eos_token) + tokenizer.eos_token
                front = tuple(tokenizer("a").input_ids[:-1]) if tokenizer.bos_token else ()
                wholes = [source["prompt"] + text]
                if text.startswith(source["prompt"]):  # the file may have no column prompt: then the answer holds it
                    wholes.append(text)
                wholes = [front + tuple(tokenizer(whole, add_special_tokens=False).input_ids) for whole in wholes]
                assert row.prompt + ids in wholes


@pytest.mark.parametrize("script", [dpo, kto])
@pytest.mark.parametrize("files", [60, pytest.param(3000, marks=pytest.mark.fuzz)])
def test_odd_and_damaged_files_are_read_right_or_refused_in_one_sentence(tmp_path, capsys, script, files):
    """The same random files every time. A kept row is whole; every other row is counted, or the file is refused."""
    rng, path, outcomes = random.Random(0), tmp_path / "rows.jsonl", []
    bos = byte_level(("<s>",))
    bos.chat_template = TOKENIZER.chat_template
    for n in range(files):
        rows = [TEXT, CHATS[n % 12], *odd_rows(rng, 3)] if script is dpo or n % 2 else list(odd_rows(rng, 4))
        data = "\n".join(map(json.dumps, rows)).encode()
        if n % 3 == 0:
            at = rng.randrange(len(data) + 1)
            data = data[:at] + rng.choice(JUNK) + data[at + rng.choice([0, 0, 1, 3, 9999]):]
        path.write_bytes(data)
        tokenizer, truncate = rng.choice([TOKENIZER, bos]), rng.random() < 0.5
        try:
            rows = script.load_rows(str(path), tokenizer, 60, script.Args(truncate=truncate))
        except BadInput as error:
            assert len(str(error).splitlines()) == 1 and "rows.jsonl" in str(error) and len(str(error)) < 700
            capsys.readouterr()
            outcomes.append("refused")
            continue
        kept, of = map(int, re.search(r": (\d+) of (\d+) rows", printed := capsys.readouterr().out).groups())
        assert kept == len({id(row.row) for row in rows})
        assert kept + sum(map(int, re.findall(r"(\d+) dropped", printed))) == of
        check_rows(rows, tokenizer, 60, truncate)
        outcomes.append("read")
    assert min(outcomes.count("read"), outcomes.count("refused")) > files / 10
