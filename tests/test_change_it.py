"""docs/change_it.md: each of its idioms does what the page says."""
from runs import ROOT, arguments, without_speed
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
