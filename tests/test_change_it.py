"""docs/change_it.md: its commands run, and each of its idioms does what the page says."""
import shutil
import subprocess

import pytest
from runs import ROOT, arguments, read, without_speed
from test_changes import apply, module_of, needs_patch, resumed
from test_scripts import blocks

PAGE = "docs/change_it.md"
IDIOMS = blocks(PAGE, "diff")


def changed(idiom):
    return module_of(apply(idiom, (ROOT / "dpo.py").read_text()), "idiom", "dpo")


def test_another_optimizer_resumes_bitwise():
    module = changed(IDIOMS[0])
    flags = dict(steps=4, save_every=2)
    whole = without_speed(module.main(arguments(**flags)))
    assert whole[-1]["loss"] != whole[1]["loss"]
    assert resumed(module, arguments(**flags))[0] == whole


def test_metric_of_generated_text():
    args = arguments(steps=1, samples=3, max_new_tokens=8)
    history = changed(IDIOMS[1]).main(args)
    texts = [line["completion"] for line in read(f"{args.out}/samples.jsonl") if line["step"] == 1]
    assert history[-1]["samples/words"] == pytest.approx(sum(len(text.split()) for text in texts) / len(texts))


@needs_patch
def test_commands_of_the_page_make_scripts(tmp_path):
    for name in ("dpo.py", "rloo.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "changes").symlink_to(ROOT / "changes")
    one, stacked, _ = blocks(PAGE, "bash")[0].splitlines()
    for command in (one.partition(" && ")[0], stacked):
        subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
    assert "log_odds" in (tmp_path / "orpo.py").read_text()
    mine = (tmp_path / "my.py").read_text()
    assert "nf4" in mine and "k3" in mine
