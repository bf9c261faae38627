"""demo/reward_model.py against transformers' own score: one forward per text, without padding."""
import os
from copy import deepcopy
from unittest import mock

import pytest
import torch
from models import MODELS, SMALL, parametrize
from runs import ROOT, said
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from demo.reward_model import load, score

CLASSIFIER = AutoModelForSequenceClassification
QUESTION = said("Soup?", "user")
TEMPLATE = """{{ bos_token }}{{ mood }}{{ tools[0].name if tools is not none }}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""  # it changes answers: it removes white space
BERT = {"bert": ("bert", SMALL)}  # its attention sees padding, unless that is masked


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


@parametrize("name", ["llama", "gpt2", "bert"])
@parametrize("pad", [0, 3, None])  # 3 is also EOS
def test_score_equals_one_forward_per_text(name, pad, tmp_path):
    """Strings and messages of many lengths."""
    cases = []
    for n in range(11):
        text = "tea" * (n * 7 % 11 + 1)
        cases.append(("Soup?", text, True, f"Soup?{text}<|end|>"))
        cases.append((QUESTION, said(text), True, f"<|user|>Soup?<|end|><|assistant|>{text}<|end|>"))
    check(make(tmp_path, name, pad_token_id=pad), *cases)


def test_tools_and_template_options_of_a_row_reach_the_template(tmp_path):
    text = "<|user|>Soup?<|end|><|assistant|>Good.<|end|>"
    inputs = QUESTION, said("Good."), True
    check(make(tmp_path), (*inputs, text), (*inputs, f"look{text}"), (*inputs, f"kind{text}"),
          tools=[None, [dict(name="look")], []], chat_template_kwargs=[None, {}, dict(mood="kind")], place=[4, 5, 6])


def test_cut_off_sample_has_no_end_and_begun_answer_is_continued(tmp_path):
    begun = QUESTION + said("The")
    check(make(tmp_path),
          ("Soup?", " Good ", False, "Soup? Good "),
          (QUESTION, said(" Good "), False, "<|user|>Soup?<|end|><|assistant|> Good "),
          (begun, said(" tea."), True, "<|user|>Soup?<|end|><|assistant|>The tea.<|end|>"),
          (begun, said(" tea "), False, "<|user|>Soup?<|end|><|assistant|>The tea "))


@parametrize("around", ["<|begin|> $A", "<|begin|> $A <|end|>"])
def test_bos_and_eos_are_there_once(around, tmp_path):
    """Also if the tokenizer adds EOS to each text."""
    chat_text = "<|begin|><|user|>Soup?<|end|><|assistant|>Good."
    check(make(tmp_path, around=around),
          ("Soup?", " Good.", True, "<|begin|>Soup? Good.<|end|>"),
          ("Soup?", " Good.", False, "<|begin|>Soup? Good."),
          ("<|begin|>Soup?", " Good.", True, "<|begin|>Soup? Good.<|end|>"),
          ("<|begin|>Soup?", " Good.<|end|>", True, "<|begin|>Soup? Good.<|end|>"),
          (QUESTION, said("Good."), True, chat_text + "<|end|>"),
          (QUESTION, said("Good."), False, chat_text))


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
