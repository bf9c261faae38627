"""docs/change_it.md: its commands run, and each of its three idioms, applied to dpo.py, does what the page says."""
import re
import shutil
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from models import GROUPS, build
from runs import ROOT, arguments, load, without_speed
from test_changes import apply

PAGE = (ROOT / "docs/change_it.md").read_text()
IDIOMS = re.findall(r"^```diff\n(.*?)^```", PAGE, re.S | re.M)


def changed(idiom):
    module = ModuleType("idiom")
    module.__file__ = str(ROOT / "dpo.py")
    exec(apply(idiom, (ROOT / "dpo.py").read_text()), vars(module))
    return module


def test_statistic_over_the_whole_batch(monkeypatch):
    """It is known before the first backward, and is the same for all sizes of micro-batches."""
    module, seen = changed(IDIOMS[0].replace("mean_margin =", "mean_margin = totals['mean_margin'] =")), []
    for tokens_per_forward in (1, 10_000):
        args = arguments(steps=2, beta=0.3, tokens_per_forward=tokens_per_forward)
        history = module.main(args)
        seen.append([])
        for values in history[1:]:
            assert 0.3 * values["mean_margin"] == pytest.approx(values["rewards/margins"], abs=1e-5)
            seen[-1].append(values["mean_margin"])
    assert seen[0] == pytest.approx(seen[1], abs=1e-5) and seen[0][1] != 0


@pytest.mark.parametrize("kind", ["llama", "bloom"])  # the second cannot share prompts
def test_full_logits_of_completions(kind):
    model = load() if kind == "llama" else build("bloom", dict(vocab_size=120, hidden_size=32, n_layer=2, n_head=4))
    expected = []
    for prompt, completions in GROUPS:
        for ids in completions:
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1]
            expected.append(torch.distributions.Categorical(logits=logits).entropy())
    found = changed(IDIOMS[1]).token_entropies(model, GROUPS)
    assert torch.allclose(found, torch.cat(expected), atol=1e-4)


def test_running_state_resumes_bitwise(monkeypatch):
    module = changed(IDIOMS[2])
    flags = dict(steps=4, save_every=2, eval_every=None)
    whole = without_speed(module.main(arguments(**flags)))
    assert len({values["running_margin"] for values in whole[1:]}) == 4

    args, run_batch, steps = arguments(**flags), module.run_batch, []

    def interrupted(*inputs, train):
        steps.append(train)
        if sum(steps) == 4:
            raise KeyboardInterrupt
        return run_batch(*inputs, train=train)

    monkeypatch.setattr(module, "run_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        module.main(args)
    monkeypatch.setattr(module, "run_batch", run_batch)
    assert without_speed(module.main(args)) == whole


# --- Commands

def copy_scripts(folder):
    for name in ("dpo.py", "rloo.py", "refcache.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "changes").symlink_to(ROOT / "changes")


@pytest.mark.skipif(not shutil.which("patch"), reason="needs patch(1)")
def test_commands_of_the_page_make_scripts(tmp_path):
    copy_scripts(tmp_path)
    one, stacked, _ = re.search(r"^```bash\n(.*?)^```", PAGE, re.S | re.M)[1].splitlines()
    for command in (one.partition(" && ")[0], stacked.replace(";", " &&")):
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    for name in ("orpo", "my"):
        compile((tmp_path / f"{name}.py").read_text(), name, "exec")
    assert {"nf4", "k3"} <= set(re.findall(r"nf4|k3", (tmp_path / "my.py").read_text()))


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("patch"), reason="needs patch(1)")
def test_reward_model_is_where_the_page_says(tmp_path):
    """`python reward_model.py`, then `rloo.py` with the flag that the table gives."""
    copy_scripts(tmp_path)
    subprocess.run("patch dpo.py changes/reward_model.patch -o reward_model.py", shell=True, cwd=tmp_path, check=True)
    flag = re.search(r"then `rloo\.py (--reward_model \S+)`", PAGE)[1].split()
    for script, kind, flags in (("reward_model", "dpo", []), ("rloo", "rloo", [*flag, "--max_new_tokens", "6"])):
        args = arguments(kind)
        flags = [f"{script}.py", "--model", args.model, "--data", args.data, "--steps", "1", *flags]
        subprocess.run([sys.executable, *flags], cwd=tmp_path, check=True)
    assert '"rewards/model"' in (tmp_path / "out/rloo/metrics.jsonl").read_text()
