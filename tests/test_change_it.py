"""docs/change_it.md: its commands run, and each of its three idioms does in dpo.py what the page says."""
import re
import shutil
import subprocess
from types import ModuleType

import pytest
import torch
from models import GROUPS, parametrize, ready
from runs import ROOT, arguments, without_speed
from test_changes import apply, needs_patch, resumed

PAGE = (ROOT / "docs/change_it.md").read_text()
IDIOMS = re.findall(r"^```diff\n(.*?)^```", PAGE, re.S | re.M)


def changed(idiom):
    module = ModuleType("idiom")
    module.__file__ = str(ROOT / "dpo.py")
    exec(apply(idiom, (ROOT / "dpo.py").read_text()), vars(module))
    return module


def test_statistic_over_the_whole_batch_in_any_micro_batches():
    """It is known before the first backward."""
    module, seen = changed(IDIOMS[0].replace("mean_margin =", "mean_margin = totals['mean_margin'] =")), []
    for tokens_per_forward in (1, 10_000):
        _, *history = module.main(arguments(steps=2, beta=0.3, tokens_per_forward=tokens_per_forward))
        seen.append([values["mean_margin"] for values in history])
        margins = [values["rewards/margins"] for values in history]
        assert margins == pytest.approx([0.3 * mean for mean in seen[-1]], abs=1e-5) and margins[1] != 0
    assert seen[0] == pytest.approx(seen[1], abs=1e-5)


@parametrize("name", ["llama", "bloom-alibi"])  # bloom cannot share prompts
def test_full_logits_of_completions(name):
    model = ready(name)
    logits = [model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1] for prompt, ys in GROUPS for ids in ys]
    expected = torch.distributions.Categorical(logits=torch.cat(logits)).entropy()
    found = changed(IDIOMS[1]).token_entropies(model, GROUPS)
    assert torch.allclose(found, expected, atol=1e-4)


def test_running_state_resumes_bitwise(monkeypatch):
    module = changed(IDIOMS[2])
    flags = dict(steps=4, save_every=2)
    whole = without_speed(module.main(arguments(**flags)))
    assert len({values["running_margin"] for values in whole[1:]}) == 4
    assert resumed(monkeypatch, module, arguments(**flags))[0] == whole


@needs_patch
def test_commands_of_the_page_make_scripts(tmp_path):
    for name in ("dpo.py", "rloo.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "changes").symlink_to(ROOT / "changes")
    one, stacked, _ = re.search(r"^```bash\n(.*?)^```", PAGE, re.S | re.M)[1].splitlines()
    for command in (one.partition(" && ")[0], stacked.replace(";", " &&")):
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert "log_odds" in (tmp_path / "orpo.py").read_text()
    assert {"nf4", "k3"} <= set(re.findall(r"nf4|k3", (tmp_path / "my.py").read_text()))
