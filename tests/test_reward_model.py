"""demo/reward_model.py against transformers' own score: one forward per text, without padding."""
import pytest
import torch
from models import SMALL, parametrize
from runs import ROOT, said
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from demo.reward_model import score

QUESTION = said("Soup?", "user")
BEGUN = QUESTION + said("The")
TEMPLATE = """{{ bos_token }}{{ mood }}{{ tools[0].name if tools is not none }}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""  # it changes answers: it removes white space
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


def make(folder, model_type="llama", around="<|begin|> $A <|end|>", **changes):
    """A random model. Its tokenizer puts special tokens `around` a text."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo/model", eos_token="<|end|>", bos_token="<|begin|>")
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|begin|>", "<|end|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=ids)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)

    config = SMALL | dict(vocab_size=len(tokenizer), num_labels=1) | changes
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(model_type, **config))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)  # every token matters
    model.save_pretrained(folder)
    return tokenizer, model.eval()


@parametrize("model_type, pad, around", [  # the attention of BERT sees padding, unless that is masked
    ("llama", 0, "<|begin|> $A <|end|>"), ("bert", None, "<|begin|> $A"), ("llama", 3, "<|begin|> $A")])  # 3 is EOS
def test_score_equals_one_forward_per_text(model_type, pad, around, tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_MODEL", str(tmp_path))
    tokenizer, model = make(tmp_path, model_type, around, pad_token_id=pad)
    *columns, texts = zip(*CASES)
    rows = [torch.tensor([tokenizer(text, add_special_tokens=False).input_ids]) for text in texts]
    expected = [model(row).logits.item() for row in rows]
    assert score(*columns, place=range(len(CASES))) == pytest.approx(expected, abs=1e-5)
