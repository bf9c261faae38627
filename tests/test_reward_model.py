"""demo/reward_model.py against transformers' own score: one forward per text, without padding."""
import os
from copy import deepcopy
from pathlib import Path
from unittest import mock

import pytest
import torch
from models import MODELS, SMALL, parametrize
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from demo.reward_model import load, score

ROOT = Path(__file__).parent.parent
CLASSIFIER = AutoModelForSequenceClassification
QUESTION = [{"role": "user", "content": "Soup?"}]
TEMPLATE = """{{ bos_token }}{{ mood }}{{ tools[0].name if tools is not none }}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""  # it changes answers: it removes white space
BERT = {"bert": ("bert", SMALL)}  # its attention sees padding, unless that is masked


def answer(text):
    return [{"role": "assistant", "content": text}]


def make(folder, name="llama", auto=CLASSIFIER, around=None, eos="<|end|>", **changes):
    """The folder of a random model. Its tokenizer puts special tokens `around` a text."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo/model", eos_token=eos)
    if around:
        tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
        ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|begin|>", "<|end|>")]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=ids)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)

    model_type, config = (MODELS | BERT)[name]
    config = config | dict(vocab_size=len(tokenizer), num_labels=1) | changes
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(model_type, **config))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)  # every token matters
    model.save_pretrained(folder)
    return str(folder)


def scores(folder, prompts, completions, ended, **columns):
    with mock.patch.dict(os.environ, REWARD_MODEL=folder):
        return score(prompts, completions, ended, **columns)


def check(folder, *cases, **columns):
    """Cases are (prompt, completion, has ended, the text that the model must read)."""
    *inputs, texts = zip(*cases)
    before = deepcopy((inputs, columns))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = CLASSIFIER.from_pretrained(folder).eval()
    ids = [torch.tensor([tokenizer(text, add_special_tokens=False).input_ids]) for text in texts]
    truth = [model(row).logits.item() for row in ids]
    assert scores(folder, *inputs, **columns) == pytest.approx(truth, abs=1e-5)
    assert (inputs, columns) == before


@parametrize("name", ["llama", "qwen3", "gpt2", "bert", "bloom-alibi"])
@parametrize("pad", [0, 3, None])  # 3 is also EOS
def test_score_equals_one_forward_per_text(name, pad, tmp_path):
    """Strings and messages of many lengths."""
    cases = []
    for n in range(11):
        text = "tea" * (n * 7 % 11 + 1)
        cases.append(("Soup?", text, True, f"Soup?{text}<|end|>"))
        cases.append((QUESTION, answer(text), True, f"<|user|>Soup?<|end|><|assistant|>{text}<|end|>"))
    check(make(tmp_path, name, pad_token_id=pad), *cases)


def test_rows_of_similar_length_share_a_forward(tmp_path):
    folder = make(tmp_path)
    shapes = []
    model = load(folder)[1]
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    scores(folder, ["Soup?"] * 16, [" tea", " tea" * 50] * 8, [False] * 16)
    assert len(shapes) == 2
    assert shapes[0][0] == shapes[1][0] == 8 and shapes[0][1] > 40 > 10 > shapes[1][1]


def test_tools_and_template_options_of_a_row_reach_the_template(tmp_path):
    text = "<|user|>Soup?<|end|><|assistant|>Good.<|end|>"
    inputs = QUESTION, answer("Good."), True
    check(make(tmp_path), (*inputs, text), (*inputs, f"look{text}"), (*inputs, f"kind{text}"),
          tools=[None, [dict(name="look")], []], chat_template_kwargs=[None, {}, dict(mood="kind")], place=[4, 5, 6])


def test_sample_that_was_cut_off_has_no_end_and_is_not_changed(tmp_path):
    check(make(tmp_path),
          ("Soup?", " Good ", False, "Soup? Good "),
          (QUESTION, answer(" Good "), False, "<|user|>Soup?<|end|><|assistant|> Good "))


def test_begun_answer_is_continued(tmp_path):
    prompt = QUESTION + answer("The")
    check(make(tmp_path),
          (prompt, answer(" tea."), True, "<|user|>Soup?<|end|><|assistant|>The tea.<|end|>"),
          (prompt, answer(" tea "), False, "<|user|>Soup?<|end|><|assistant|>The tea "))


@parametrize("around", ["<|begin|> $A", "<|begin|> $A <|end|>"])
def test_bos_and_eos_are_there_once(around, tmp_path):
    """Also if the tokenizer adds EOS to each text."""
    chat_text = "<|begin|><|user|>Soup?<|end|><|assistant|>Good."
    check(make(tmp_path, around=around),
          ("Soup?", " Good.", True, "<|begin|>Soup? Good.<|end|>"),
          ("Soup?", " Good.", False, "<|begin|>Soup? Good."),
          ("<|begin|>Soup?", " Good.", True, "<|begin|>Soup? Good.<|end|>"),
          ("<|begin|>Soup?", " Good.<|end|>", True, "<|begin|>Soup? Good.<|end|>"),
          (QUESTION, answer("Good."), True, chat_text + "<|end|>"),
          (QUESTION, answer("Good."), False, chat_text))


def test_what_the_tokenizer_does_not_add_or_have_is_not_added(tmp_path):
    check(make(tmp_path / "bos", around="$A <|end|>"), ("Soup?", " Good.", False, "Soup? Good."))
    check(make(tmp_path / "eos", eos=None), ("Soup?", " Good.", True, "Soup? Good."))


def test_sample_that_is_too_long_has_none(tmp_path):
    folder = make(tmp_path, max_position_embeddings=20)
    n = len(AutoTokenizer.from_pretrained(folder)("Soup?").input_ids)
    found = scores(folder, ["Soup?"] * 3, [" tea" * (20 - n + more) for more in (0, 1, -1)], [False] * 3)
    assert [value is None for value in found] == [False, True, False]


def test_other_models_are_refused(tmp_path):
    for folder in (make(tmp_path / "two", num_labels=2), make(tmp_path / "lm", auto=AutoModelForCausalLM)):
        with pytest.raises(ValueError, match=f"{folder} is no classifier with one output, or lacks weights"):
            load(folder)


def test_weights_wait_on_the_cpu(tmp_path, monkeypatch):
    """A forward keeps neither keys and values nor what a gradient needs."""
    folder = make(tmp_path)
    model = load(folder)[1]
    events = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(model, "to", events.append)
    monkeypatch.setattr(model, "cpu", lambda: events.append("cpu"))
    model.register_forward_hook(lambda *args: events.append([*args[2], args[2].logits.requires_grad]))
    scores(folder, ["Soup?"], [" tea"], [True])
    assert events == ["cuda", ["logits", False], "cpu"]
