"""What the scripts have in common: blocks of the same text, help for every flag, README commands that parse."""
import ast
import inspect
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tyro

import dpo
import kto
import mutants
import rloo

ROOT = Path(dpo.__file__).parent
SCRIPTS = {"dpo": dpo, "kto": kto, "rloo": rloo}
TEXTS = {name: (ROOT / f"{name}.py").read_text() for name in (*SCRIPTS, "refcache")}
DATA = {"dpo": "pairs", "kto": "feedback", "rloo": "prompts"}
EACH = pytest.mark.parametrize("script", SCRIPTS)


# ---- The text of the scripts ----------------------------------------------------------------------------------------


def blocks(script):
    """The text between each ruler comment and the next one, by the words of the ruler."""
    parts = re.split(r"^# -{3,} (.*?) -{3,}$", TEXTS[script], flags=re.M)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def shared_blocks():
    """(words of the ruler, the scripts that it names), of all rulers that say "the same in ..."."""
    found = {name for script in SCRIPTS for name in blocks(script) if "the same in" in name}
    return sorted((name, tuple(re.findall(r"(\w+)\.py", name.split("the same in")[1]))) for name in found)


@pytest.mark.parametrize("name, scripts", shared_blocks(), ids=lambda x: x if isinstance(x, str) else "")
def test_blocks_that_are_said_to_be_the_same_are_the_same_text(name, scripts):
    assert len(scripts) > 1 and set(scripts) <= set(SCRIPTS)
    first, *others = (blocks(script)[name].splitlines() for script in scripts)  # KeyError: a script lacks the block
    for other in others:
        assert first == other
    for script in set(SCRIPTS) - set(scripts):
        assert name not in blocks(script), f"{script}.py has it too: name it in the ruler"


def definitions(script):
    """The source of each function and class."""
    lines = TEXTS[script].splitlines()
    return {node.name: "\n".join(lines[node.lineno - 1:node.end_lineno]) for node in ast.parse(TEXTS[script]).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_what_two_scripts_have_in_common_lies_in_a_shared_block():
    """A function or class of one name either differs on purpose, or a ruler says that it is the same."""
    assert {len(scripts) for _, scripts in shared_blocks()} == {2, 3}
    sources = {script: definitions(script) for script in SCRIPTS}
    for one, other in itertools.combinations(SCRIPTS, 2):
        said = "".join(text for name, text in blocks(one).items() if "the same in" in name and f"{other}.py" in name)
        copied = [name for name, source in sources[one].items()
                  if source == sources[other].get(name) and source.count("\n") > 3]
        assert len(copied) > 10 and not [name for name in copied if sources[one][name] not in said]


def test_scripts_read_in_one_order():
    rulers = [[name.split(":")[0] for name in blocks(script) if "the same in" in name] for script in SCRIPTS]
    for one in rulers:
        for other in rulers:
            assert [name for name in one if name in other] == [name for name in other if name in one]
    for script in SCRIPTS:
        assert [name.split(":")[0] for name in blocks(script)][0::len(blocks(script)) - 1] == ["The loss", "Training"]


def test_refcache_takes_parameters_and_never_the_arguments_of_a_script():
    assert not re.search(r"\bargs\.", TEXTS["refcache"]) and not re.search(r"\b(dpo|kto|rloo)\.py", TEXTS["refcache"])


@pytest.mark.parametrize("name", TEXTS)
def test_lines_have_at_most_120_columns(name):
    long = [n for n, line in enumerate(TEXTS[name].splitlines(), 1) if len(line) > 120]
    assert not long, f"{name}.py lines {long}"


@EACH
def test_every_flag_and_every_import_is_used(script):
    """A field of Args that nothing reads would be a promise."""
    tree = ast.parse(TEXTS[script])
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    read |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not [name for name in SCRIPTS[script].Args.__dataclass_fields__ if name not in read]
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names - used


# ---- The command line -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def help_of():
    """What --help prints, how long it takes, and the modules that it loads; one process for each script."""
    done = {}
    code = "import runpy, sys; sys.argv = [sys.argv[1], '--help']\n" \
           "try: runpy.run_path(sys.argv[0], run_name='__main__')\nfinally: print('\\nMODULES', *sys.modules)"
    for script in SCRIPTS:
        start = time.monotonic()
        process = subprocess.run([sys.executable, "-c", code, f"{script}.py"], cwd=ROOT, capture_output=True, text=True,
                                 env=os.environ | {"COLUMNS": "500", "TERM": "dumb"})
        text, modules = process.stdout.split("\nMODULES")
        done[script] = process.returncode, time.monotonic() - start, text, modules.split()
    return done


@EACH
def test_help_answers_without_importing_torch(help_of, script):
    code, seconds, text, modules = help_of[script]
    assert code == 0 and not {"torch", "transformers", "numpy"} & set(modules)
    assert SCRIPTS[script].__doc__.splitlines()[0] in text


@pytest.mark.parametrize("flags", ["--lr 1 --lr=2", "--lora-r 2 --lora_r 3", "--merge --no-merge"])
def test_a_flag_that_is_given_twice_is_refused(flags):
    """tyro would take the last."""
    done = subprocess.run([sys.executable, "dpo.py", *flags.split()], cwd=ROOT, capture_output=True, text=True)
    flag = "--" + flags.split()[0][2:].replace("-", "_")
    assert done.returncode == 2 and done.stderr == f"dpo.py: {flag} is given twice: put all values after one {flag}\n"


@pytest.mark.slow
@EACH
def test_help_answers_in_two_seconds(script):
    start = time.monotonic()
    assert subprocess.run([sys.executable, f"{script}.py", "--help"], cwd=ROOT, capture_output=True).returncode == 0
    assert time.monotonic() - start < 2


def help_entries(text):
    """Flag -> its lines in the output of --help, as one string."""
    lines = [line.strip("│ ").rstrip() for line in text.splitlines()]
    starts = [n for n, line in enumerate(lines) if line.startswith("-")] + [len(lines)]
    entries = (" ".join(lines[start:stop]) for start, stop in zip(starts, starts[1:]))
    return {re.search(r"--(\w+)", entry)[1]: " ".join(entry.split()) for entry in entries if "--" in entry}


@EACH
def test_help_explains_every_flag_with_one_default(help_of, script):
    entries = help_entries(help_of[script][2])
    assert set(entries) == set(SCRIPTS[script].Args.__dataclass_fields__) | {"help"}
    source = inspect.getsource(SCRIPTS[script].Args)
    for name in SCRIPTS[script].Args.__dataclass_fields__:
        explained = re.search(rf"^    {name}: .*?  # (.+)$", source, re.M)
        assert explained and len(explained[1]) > 5, f"--{name} has no help text"
        assert explained[1].split()[0] in entries[name]
    entries.pop("help")
    several = [name for name, entry in entries.items() if len(re.findall(r"\bdefaults?\b", entry)) != 1]
    assert not several, f"these flags show no default, or more than one: {several}"


@pytest.mark.parametrize("flags", [["--loss", "nonsense"], ["--unknown_flag", "1"], ["--steps", "many"]])
def test_wrong_flags_are_refused_by_the_parser(flags):
    with pytest.raises(SystemExit) as error:
        tyro.cli(dpo.Args, args=flags, use_underscores=True)
    assert error.value.code == 2


@EACH
def test_the_demo_is_found_from_every_folder(script, tmp_path, monkeypatch):
    module = SCRIPTS[script]
    monkeypatch.chdir(ROOT)
    assert module.resolve_args(module.Args()).model == "demo/model"
    monkeypatch.chdir(tmp_path)
    args = module.resolve_args(module.Args())
    assert Path(args.model).samefile(ROOT / "demo/model") and Path(args.data).exists() and Path(args.eval_data).exists()
    functions = args.reward if script == "rloo" else [args.score]
    assert functions and all(Path(spec.split(":")[0]).samefile(ROOT / "demo/score.py") for spec in functions)


def test_the_demo_keeps_the_flags_that_are_given():
    args = dpo.resolve_args(dpo.Args(lr=0.5, score="mine.py:f"))
    assert args.lr == 0.5 and args.score == "mine.py:f" and args.data.endswith("demo/pairs.jsonl")
    assert dpo.resolve_args(dpo.Args()).lr != dpo.resolve_args(dpo.Args(model="m", data="d.jsonl")).lr


@EACH
def test_a_script_without_a_demo_folder_asks_for_model_and_data(script, tmp_path, monkeypatch):
    monkeypatch.setattr(SCRIPTS[script], "__file__", str(tmp_path / f"{script}.py"))
    with pytest.raises(dpo.BadInput, match="--model and --data"):
        SCRIPTS[script].resolve_args(SCRIPTS[script].Args())


# ---- README ---------------------------------------------------------------------------------------------------------


def commands():
    """(script, flags) of every command in README.md that starts one of the scripts."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    fenced = re.findall(r"^```(?:bash|sh|shell|console)?\n(.*?)^```", text, re.S | re.M)
    lines = [line for block in fenced for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", text)
    found = [re.search(rf"(?:^|\s)(?:python|torchrun)\s.*?\b({'|'.join(SCRIPTS)})\.py(.*)", line) for line in lines]
    split = [(match[1], re.split(r"\s[#&|;>]", match[2] + " #")[0]) for match in found if match]
    return sorted({(script, tuple(shlex.split(flags))) for script, flags in split if "..." not in flags})


def test_readme_has_a_command_of_every_script():
    assert {script for script, _ in commands()} == set(SCRIPTS)


@pytest.mark.parametrize("script, flags", commands(), ids=lambda x: x if isinstance(x, str) else " ".join(x) or "demo")
def test_every_command_in_the_readme_parses(script, flags):
    tyro.cli(SCRIPTS[script].Args, args=list(flags), use_underscores=True)


@EACH
def test_every_command_in_a_docstring_parses(script):
    lines = re.findall(rf"^ *python {script}\.py(.*)$", SCRIPTS[script].__doc__, re.M)
    assert len(lines) >= 2
    for line in lines:
        tyro.cli(SCRIPTS[script].Args, args=shlex.split(line, comments=True), use_underscores=True)


def test_the_text_of_every_mutant_stands_in_its_file_once():
    for number, (file, names, old, new) in enumerate(mutants.MUTANTS):
        assert (ROOT / file).read_text().count(old) == 1 and old != new, number
        assert (ROOT / f"tests/{names}.py").exists()
    assert set(mutants.EQUIVALENT) <= {old for _, _, old, _ in mutants.MUTANTS}


def test_readme_names_only_files_that_exist():
    text = (ROOT / "README.md").read_text()
    names = set(re.findall(r"`((?:tests|demo|benchmarks)/[\w./]+|\w+\.py)`", text)) - {"rewards.py", "score.py"}
    assert names and not [name for name in names if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", ["README.md", "docs/change_it.md", "benchmarks/README.md"])
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page):
    text = (ROOT / page).read_text()
    for target in [*re.findall(r"\]\(([^)]+)\)", text), *re.findall(r'src="([^"]+)"', text)]:
        if not target.startswith("http"):
            name, _, heading = target.partition("#")
            file = (ROOT / page).parent / name if name else ROOT / page
            assert file.exists(), target
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.M) if heading else []
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not heading or heading in slugs, target


@pytest.mark.slow
def test_the_output_that_the_readme_quotes_is_what_the_demo_prints(tmp_path):
    quoted = re.search(r"python dpo.py .*?\n\n(held out.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    done = subprocess.run([sys.executable, ROOT / "dpo.py", "--out", tmp_path], capture_output=True, text=True)
    assert quoted in done.stdout


# ---- A script on its own --------------------------------------------------------------------------------------------


@pytest.mark.slow
@EACH
def test_a_script_runs_when_copied_alone_with_refcache_and_exits_with_2_on_bad_input(script, tmp_path):
    for name in (script, "refcache"):
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    lines = (ROOT / f"demo/{DATA[script]}.jsonl").open().readlines()[:24]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    flags = ["--model", str(ROOT / "demo/model"), "--steps", "1", "--samples", "2", "--max_new_tokens", "8"]
    flags += ["--reward", f"{ROOT}/demo/score.py:sentiment"] if script == "rloo" else []

    def start(data, *more):
        command = [sys.executable, f"{script}.py", *flags, "--data", data, *more]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    done = start("rows.jsonl")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"out/{script}/model/model.safetensors").exists()
    done = start("nothing.jsonl", "--out", "other")
    assert done.returncode == 2 and done.stderr.startswith(f"{script}.py: ") and len(done.stderr.splitlines()) == 1
    assert "nothing.jsonl" in done.stderr
