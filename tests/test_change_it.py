"""docs/change_it.md: each of its idioms does what the page says."""
import torch
from runs import ROOT, TOKENIZER, adapt, arguments, load, needs_peft, without_speed
from test_changes import apply, module_of, resumed
from test_scripts import blocks


def test_another_optimizer_and_metric_resume_bitwise():
    text = (ROOT / "dpo.py").read_text()
    for idiom in blocks("docs/change_it.md", "diff"):
        text = apply(idiom, text)
    module, args = module_of(text, "idiom", "dpo"), arguments(steps=4, save_every=2)
    whole = without_speed(module.main(args))
    assert whole[-1]["loss"] != whole[1]["loss"] and whole[1]["length/difference"] != 0
    assert resumed(module, args)[0] == whole


@needs_peft
def test_merged_adapter_is_the_same_model(tmp_path, monkeypatch):
    adapter = adapt("to merge")
    TOKENIZER.save_pretrained(adapter)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out/dpo").mkdir(parents=True)
    (tmp_path / "out/dpo/model").symlink_to(adapter)
    exec(blocks("docs/change_it.md")[-1], {})
    merged, expected = (load(folder)(torch.tensor([[5, 6, 7, 8]])).logits for folder in ("out/merged", adapter))
    assert torch.allclose(merged, expected, atol=1e-4)
