"""What the scripts share: functions of the same text, one line for wrong input. The pages: commands and code."""
import inspect
import re
import runpy
import shlex
import sys
from collections import Counter
from importlib import import_module
from itertools import chain

import pytest
import tyro
from models import logps, cases
from runs import EACH, ROOT, SCRIPTS

import refcache


# --- The text of the scripts

# What is about pairs in dpo.py, answers in kto.py and prompts in rloo.py. All else of one name is the same text.
OWN = {"Args", "Row", "Batch", "metrics", "groups_of", "compute_batch", "run_batch", "evaluate", "train", "resolve",
       "load_rows"}
OWN_IN_RLOO = {"report", "render", "open_folder", "append"}


def sources(script):
    """The text of each function and class of a script, with decorators and comments."""
    own = {name: thing for name, thing in vars(SCRIPTS[script]).items() if getattr(thing, "__module__", "") == script}
    return {name: inspect.getsource(thing) for name, thing in own.items()}


def test_functions_of_one_name_are_the_same_text():
    texts = {script: sources(script) for script in SCRIPTS}
    n_scripts = Counter(chain(*texts.values()))
    assert n_scripts["load_model"] == 3
    for name in (name for name, n in n_scripts.items() if n > 1):
        versions = {script: texts[script][name] for script in SCRIPTS if name in texts[script]}
        if name in OWN_IN_RLOO:
            assert versions.pop("rloo") != versions["dpo"], name
        assert (len(set(versions.values())) == 1) != (name in OWN), name


# --- The command line

@EACH
def test_wrong_input_is_one_line(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--model", f"{ROOT}/demo/model"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    assert capsys.readouterr().err.startswith(f"{script}.py: give ")


# --- The pages

def blocks(page, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)


def test_every_command_parses():
    tools = [file.stem for file in ROOT.glob("tools/*.py") if "class Args" in file.read_text()]
    programs = SCRIPTS | {f"tools/{tool}": import_module(f"tools.{tool}") for tool in tools}
    texts = [module.__doc__ for module in SCRIPTS.values()]
    texts += chain(*(blocks(page, "bash") for page in ("README.md", "docs/recipes.md")))
    text = "\n".join(texts).replace("\\\n", " ")
    commands = re.findall(r"(?:python|torchrun .*?) ([\w/]+)\.py(.*?)(?:  #.*)?$", text, re.M)
    assert {name for name, _ in commands} >= {*SCRIPTS, "tools/prepare"}
    for name, flags in commands:
        if name in programs:
            words = shlex.split(flags.replace("--model ...", ""))
            tyro.cli(programs[name].Args, args=words, use_underscores=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder where the programs of the pages run. The demo's model stands for a trained one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    (tmp_path / "out/dpo").mkdir(parents=True)
    (tmp_path / "out/dpo/model").symlink_to(ROOT / "demo/model")


@cases("page, number, words", [
    ("docs/change_it.md", 0, r"6\.93.*e-01"),
    ("docs/change_it.md", 1, r"step 1: loss 0\.693\n(step .*\n){6}step 8: loss 0\.[0-5]")])
def test_program_of_a_page_runs(folder, page, number, words, capsys):
    exec(blocks(page)[number], {})
    assert re.search(words, capsys.readouterr().out)


def test_the_cache_can_be_used_by_other_code(folder):
    names = {}
    with_project, without_project = blocks("docs/cache.md")
    exec(with_project, names)
    policy, (prompt, (_, answer)), cache = names["policy"], names["groups"][0], names["cache"]
    assert logps(policy, [(prompt, answer)])[0].tolist() == pytest.approx(cache[prompt, answer], abs=1e-5)

    exec(without_project, {})
    changed = refcache.ReferenceCache(**cache.header)
    changed.load("cache.pkl")
    assert changed[prompt, answer].tolist() == [-0.5, -1.5]
