"""docs/change_it.md: its commands run, and each of its idioms does what the page says."""
import subprocess

from runs import ROOT, arguments, read, without_speed
from test_changes import apply, module_of, needs_patch, resumed
from test_scripts import blocks

from tools import prepare

PAGE = "docs/change_it.md"
OPTIMIZER, METRIC = blocks(PAGE, "diff")
*_, WORDS, CONVERT = blocks(PAGE)


def changed(idiom):
    return module_of(apply(idiom, (ROOT / "dpo.py").read_text()), "idiom", "dpo")


def test_another_optimizer_resumes_bitwise():
    module, args = changed(OPTIMIZER), arguments(steps=4, save_every=2)
    whole = without_speed(module.main(args))
    assert whole[-1]["loss"] != whole[1]["loss"] and resumed(module, args)[0] == whole


def test_metric():
    before, now = changed(METRIC).main(arguments(steps=1))
    assert before["eval_length/difference"] == now["eval_length/difference"] != 0


def test_words_of_a_sample_and_rows_of_another_format(tmp_path, monkeypatch):
    exec(WORDS + CONVERT, names := {})
    assert names["words"]([[dict(role="assistant", content="good  soup")]], ended=[True]) == [2]

    monkeypatch.setattr(prepare, "convert", names["convert"])
    (tmp_path / "rows.jsonl").write_text('{"instruction": "Add.", "input": "2 3", "output": "5"}')
    prepare.main(prepare.Args(data=f"{tmp_path}/rows.jsonl", out=f"{tmp_path}/out"))
    assert read(tmp_path / "out/train.jsonl") == [dict(prompt="Add.\n2 3", completion="5", label=True)]


@needs_patch
def test_commands_of_the_page_make_scripts(tmp_path):
    one, stacked = blocks(PAGE, "bash")[0].splitlines()
    commands = [f"cp -r {ROOT}/changes {ROOT}/dpo.py {ROOT}/rloo.py .", one.partition(" && ")[0], stacked]
    subprocess.run(["bash", "-ec", "\n".join(commands)], cwd=tmp_path, check=True)
    mine = (tmp_path / "my.py").read_text()
    assert "log_odds" in (tmp_path / "losses.py").read_text() and "nf4" in mine and "k3" in mine
