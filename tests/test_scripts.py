"""What the scripts share: order, functions of the same text, help, the README's commands and code, the demo."""
import re
import runpy
import shlex
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import torch
import tyro
from models import logps, parametrize
from runs import EACH, ROOT, SCRIPTS, arguments

import refcache

TEXTS = {name: (ROOT / f"{name}.py").read_text() for name in (*SCRIPTS, "refcache")}
README = (ROOT / "README.md").read_text()


# --- The text of the scripts

@EACH
def test_the_algorithm_comes_first(script):
    rulers = re.findall(r"^# -{3,} (.*?) -{3,}$", TEXTS[script], flags=re.M)
    assert rulers[:4] == ["The loss", "A batch", "Training", "Flags"]
    assert rulers[-3:] == ["Data", "Models", "Files of a run"]


# What is about pairs in dpo.py, answers in kto.py and prompts in rloo.py. All else of one name is the same text.
OWN = {"Args", "Row", "Batch", "metrics", "groups_of", "compute_batch", "run_batch", "evaluate", "train", "resolve",
       "load_data", "load_rows", "split_prompt"}
OWN_IN_RLOO = {"report", "tokenize_rows", "render", "describe_run"}


def sources(script):
    """The text of each function and class of a script, with decorators and comments."""
    found = re.findall(r"^((?:@.*\n)*(?:def|class) (\w+).*\n(?:(?: .*)?\n)*)", TEXTS[script], flags=re.M)
    return {name: text.strip() for text, name in found}


def test_functions_of_one_name_are_the_same_text():
    """An edit that was forgotten in another script would stay there."""
    texts = {script: sources(script) for script in SCRIPTS}
    n_scripts = Counter(chain(*texts.values()))
    assert n_scripts["load_model"] == 3
    for name in (name for name, n in n_scripts.items() if n > 1):
        versions = {script: texts[script][name] for script in SCRIPTS if name in texts[script]}
        if name in OWN_IN_RLOO:
            assert versions.pop("rloo") != versions["dpo"], f"{name}: take it from the list"
        assert (len(set(versions.values())) == 1) != (name in OWN), f"{name} of {', '.join(versions)}"


def test_refcache_knows_no_script():
    assert not re.search(r"\bargs\.|\b(dpo|kto|rloo)\.py", TEXTS["refcache"])


# --- The command line

def command_line(script, *flags):
    """Runs a script as the command line does, in this process. Returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script}.py", *map(str, flags)])
        try:
            runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
        except SystemExit as error:
            return error.code
    return 0


def short_run(script, **changes):
    args = arguments(script)
    flags = dict(model=args.model, data=args.data, out=args.out) | changes
    if script == "rloo":
        flags["reward"] = args.reward[0]
    return command_line(script, *[word for name, value in flags.items() for word in (f"--{name}", value)])


@EACH
def test_help_explains_every_flag_and_shows_paragraphs(script, capsys):
    """Lines without an empty line before them would be joined to one paragraph."""
    assert command_line(script, "--help") == 0
    lines = [line.strip(" │") for line in capsys.readouterr().out.splitlines()]
    for words in ("Data: ", "Shapes: ", "Metrics: "):
        (place,) = [i for i, line in enumerate(lines) if line.startswith(words)]
        assert lines[place - 1] == ""
    for name in SCRIPTS[script].Args.__dataclass_fields__:
        is_explained = re.search(rf"^    {name}: .*?  # .+$", TEXTS[script], re.M)
        assert is_explained or name in ("weight_decay", "max_grad_norm", "seed"), f"--{name} has no help text"
        assert any(line.startswith(f"--{name}") for line in lines)


@EACH
def test_wrong_input_is_one_sentence(script, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}')
    for flags, words in ((dict(lr=-1), "--lr.* must be above 0"),
                         (dict(data=tmp_path / "rows.jsonl"), f"{tmp_path}/rows.jsonl, row 1: has no column .*")):
        assert short_run(script, **flags) == 2
        *above, sentence = capsys.readouterr().err.splitlines()
        assert re.fullmatch(rf"{script}\.py: {words}", sentence)
        assert not any("Traceback" in line for line in above)


@EACH
def test_full_gpu_and_missing_package_say_what_to_do(script, monkeypatch):
    def fail(name):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(refcache, "checkpoint_digest", fail)
    with pytest.raises(torch.OutOfMemoryError) as error:
        short_run(script)
    assert error.value.__notes__[0].startswith("lower --tokens_per_forward")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError) as error:
        short_run(script, data="some/data")
    assert error.value.__notes__ == ["pip install datasets"]


@EACH
def test_demo_keeps_the_flags_that_are_given(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resolve, Args = SCRIPTS[script].resolve, SCRIPTS[script].Args
    args = resolve(Args(eval_data="mine"))
    assert Path(args.model).is_dir() and Path(args.data).exists() and args.eval_data == "mine" and args.lr == 2e-4
    assert resolve(Args(lr=1e-6)).lr == 1e-6
    assert resolve(arguments(script, lr=None)).lr == 1e-6, "not the demo"


@pytest.mark.slow
@EACH
def test_demo_learns(script, tmp_path):
    history = SCRIPTS[script].main(SCRIPTS[script].Args(out=f"{tmp_path}/out"))
    metric = "eval_reward" if script == "rloo" else "eval_score"
    assert history[0][metric] < 0.6 and history[-1][metric] > 0.9


# --- README

def commands():
    """(script, flags) of every command that starts a script, in the README and in the docstrings."""
    texts = re.findall(r"^```bash\n(.*?)^```", README, re.S | re.M) + [module.__doc__ for module in SCRIPTS.values()]
    lines = [line for text in texts for line in text.replace("\\\n", " ").splitlines()]
    found = [re.search(r"(?:python|torchrun .*?) (dpo|kto|rloo)\.py(.*)", line) for line in lines]
    return sorted({(match[1], match[2].partition("  #")[0].strip()) for match in found if match})


@parametrize("script, flags", commands())
def test_every_command_parses(script, flags):
    tyro.cli(SCRIPTS[script].Args, args=shlex.split(flags.replace("--model ...", "")), use_underscores=True)


def test_readme_is_short_and_names_every_script():
    assert README.count("\n") <= 190 and {script for script, _ in commands()} == set(SCRIPTS)


def code_of(page, number=-1):
    """A block of Python code of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)[number]


def test_the_readme_loads_a_trained_model_and_asks_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out/dpo").mkdir(parents=True)
    (tmp_path / "out/dpo/model").symlink_to(ROOT / "demo/model")
    exec(code_of("README.md"), {})
    assert "soup" in capsys.readouterr().out


def test_the_cache_can_be_used_from_other_code_and_without_the_project(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    names = {}
    exec(code_of("docs/cache.md", 0), names)
    policy, (prompt, (other, answer)) = names["policy"], names["groups"][0]
    cache = names["cache"]
    assert logps(policy, [(prompt, answer)])[0].tolist() == pytest.approx(cache[prompt, answer], abs=1e-5)
    assert "tensor(" in capsys.readouterr().out

    exec(code_of("docs/cache.md", 1), {})
    changed = refcache.ReferenceCache(**cache.header)
    changed.load("cache.pkl")
    assert changed[prompt, answer].tolist() == [-0.5, -1.5]
    assert changed[prompt, other].tolist() == cache[prompt, other].tolist()


@parametrize("page", ["README.md", "docs/change_it.md", "benchmarks/README.md"])
def test_every_file_that_a_page_names_exists(page):
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'src="([^"]+)"', text)
    files = [(ROOT / page).parent / link for link in links if not link.startswith("http")]
    files += [ROOT / name for name in re.findall(r"`((?:tests|demo|benchmarks)/[\w./]+)`", text)]
    assert not [file for file in files if not file.exists()]
