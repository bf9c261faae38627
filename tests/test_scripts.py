"""What the scripts have in common: helpers that are the same word for word, one order of sections, a README that is true."""
import inspect
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tyro

import dpo
import kto
import rloo

ROOT = Path(dpo.__file__).parent
SCRIPTS = {"dpo": dpo, "kto": kto, "rloo": rloo}

@pytest.mark.parametrize("script", SCRIPTS)
def test_help_answers_in_two_seconds_and_explains_every_flag(script):
    start = time.monotonic()
    done = subprocess.run([sys.executable, f"{script}.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    seconds = time.monotonic() - start
    assert done.returncode == 0 and seconds < 2 and "import torch" not in done.stdout
    for name, field in SCRIPTS[script].Args.__dataclass_fields__.items():
        assert f"--{name}" in done.stdout
        line = next(line for line in inspect.getsource(SCRIPTS[script].Args).splitlines() if line.startswith(f"    {name}:"))
        assert "  # " in line, f"{name} has no help text"


def commands():
    for block in re.findall(r"```(?:bash|sh)\n(.*?)```", (ROOT / "README.md").read_text(), re.S):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split("#")[0].split("&&"):
                if match := re.match(r"\s*python (\w+)\.py(.*)", command):
                    yield match[1], shlex.split(match[2])


def test_readme_has_commands_of_every_script():
    assert {script for script, _ in commands()} >= set(SCRIPTS)


@pytest.mark.parametrize("script, flags", list(commands()))
def test_every_command_in_the_readme_parses(script, flags):
    tyro.cli(SCRIPTS[script].Args, args=flags, use_underscores=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_demo_is_found_from_wherever_a_script_is_started(script, tmp_path, monkeypatch):
    settle, Args = SCRIPTS[script].settle, SCRIPTS[script].Args
    monkeypatch.chdir(ROOT)
    assert settle(Args()).model == "demo/model" and settle(Args()).score == "demo/score.py:success"
    monkeypatch.chdir(tmp_path)
    args = settle(Args())
    assert Path(args.model).samefile(ROOT / "demo/model") and Path(args.score.split(":")[0]).exists() and Path(args.data).exists()
