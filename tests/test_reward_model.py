"""demo/reward_model.py against transformers' own score: one forward per text, without padding."""
import pytest
import torch
from models import MODELS, SMALL, parametrize
from runs import ROOT, said
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from demo.reward_model import score

QUESTION = said("Soup?", "user")
BEGUN = QUESTION + said("The")
TEMPLATE = """{{ bos_token }}{{ mood }}{{ tools[0].name if tools is not none }}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""  # it changes answers: it removes white space
BERT = {"bert": ("bert", SMALL)}  # its attention sees padding, unless that is masked
CHAT = "<|begin|><|user|>Soup?<|end|><|assistant|>"
CASES = [  # prompt, completion, whether it has ended, tools, template options, the text that the model must read
    *(("Soup?", "tea" * n, True, None, None, f"<|begin|>Soup?{'tea' * n}<|end|>") for n in range(1, 11)),
    ("<|begin|>Soup?", " Good.<|end|>", True, None, None, "<|begin|>Soup? Good.<|end|>"),
    ("Soup?", " Good ", False, None, None, "<|begin|>Soup? Good "),
    (QUESTION, said(" Good "), True, [], {}, CHAT + "Good<|end|>"),
    (QUESTION, said(" Good "), False, None, None, CHAT + " Good "),
    (BEGUN, said(" tea."), True, None, None, CHAT + "The tea.<|end|>"),
    (BEGUN, said(" tea "), False, None, None, CHAT + "The tea "),
    (QUESTION, said("Good."), True, [dict(name="look")], dict(mood="kind"),
     CHAT.replace("<|user|>", "kindlook<|user|>") + "Good.<|end|>")]


def make(folder, name="llama", around="<|begin|> $A <|end|>", **changes):
    """The folder of a random model. Its tokenizer puts special tokens `around` a text."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo/model", eos_token="<|end|>", bos_token="<|begin|>")
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|begin|>", "<|end|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=ids)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)

    model_type, config = (MODELS | BERT)[name]
    config = config | dict(vocab_size=len(tokenizer), num_labels=1) | changes
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(model_type, **config))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)  # every token matters
    model.save_pretrained(folder)
    return str(folder)


@parametrize("name, pad, around", [
    ("llama", 0, "<|begin|> $A <|end|>"), ("gpt2", 3, "<|begin|> $A"), ("bert", None, "<|begin|> $A"),
    ("llama", 3, "$A <|end|>")])  # 3 is also EOS; the last tokenizer adds no BOS
def test_score_equals_one_forward_per_text(name, pad, around, tmp_path, monkeypatch):
    folder = make(tmp_path, name, around, pad_token_id=pad)
    monkeypatch.setenv("REWARD_MODEL", folder)
    prompts, completions, ended, tools, options, texts = zip(*CASES)
    found = score(prompts, completions, ended, tools, options, place=range(len(CASES)))

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    if "begin" not in around:
        texts = [text if isinstance(prompt, list) or prompt[0] == "<" else text.removeprefix("<|begin|>")
                 for prompt, text in zip(prompts, texts)]
    rows = [torch.tensor([tokenizer(text, add_special_tokens=False).input_ids]) for text in texts]
    assert found == pytest.approx([model.eval()(row).logits.item() for row in rows], abs=1e-5)


def test_sample_that_is_too_long_has_none(tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_MODEL", make(tmp_path, max_position_embeddings=20))
    n = len(AutoTokenizer.from_pretrained(tmp_path)("Soup?").input_ids) - 1  # with BOS, without EOS
    found = score(["Soup?"] * 3, [" tea" * (20 - n + more) for more in (0, 1, -1)], [False] * 3)
    assert [value is None for value in found] == [False, True, False]
