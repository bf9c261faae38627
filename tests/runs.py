"""Short runs of the scripts for the tests of references and adapters, each in a folder of its own."""
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import tensor

import dpo
import kto
import refcache
import rloo
from refcache import ReferenceCache, load_model, reference_logprobs

ROOT = Path(dpo.__file__).parent
MODEL = str(ROOT / "demo/model")
SCRIPTS = {"dpo": dpo, "kto": kto, "rloo": rloo}
FILES = {"dpo": "pairs", "kto": "feedback", "rloo": "prompts"}
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
BOTH = pytest.mark.parametrize("script", ["dpo", "kto"])
LORA = dict(lora_r=4, lora_alpha=32.0, lr=1e-2)  # so that a few steps are felt
IDS = tensor([[5, 9, 33, 60, 12, 7, 90, 41]])
GROUPS = [((5, 9, 33), [(60, 12, 7), (90, 41)]), ((8, 3), [(77, 21, 4, 96)])]


@pytest.fixture
def settle(tmp_path):
    """The arguments of a short run with an out of its own."""
    def settle(script="dpo", **changes):
        files = [tmp_path / f"{script}_{name}.jsonl" for name in ("train", "eval")]
        for file, rows in zip(files, (slice(12), slice(12, 15))):
            file.write_text("".join((ROOT / f"demo/{FILES[script]}.jsonl").open().readlines()[rows]))
        settle.runs += 1
        common = dict(model=MODEL, data=str(files[0]), eval_data=str(files[1]), out=str(tmp_path / f"out{settle.runs}"), steps=5,
                      batch_size=4, lr=1e-3, warmup=0.0, samples=0, eval_every=2)
        return SCRIPTS[script].settle(SCRIPTS[script].Args(**(common | changes)))
    settle.runs = 0
    return settle


@pytest.fixture
def run(settle, monkeypatch):
    """A run: its history, its folder, the policy it ended with."""
    def run(script="dpo", **changes):
        args, kept = settle(script, **changes), []
        monkeypatch.setattr(SCRIPTS[script], "save_model", lambda policy, *rest: kept.append(deepcopy(policy)) or
                            refcache.save_model(policy, *rest))
        return SimpleNamespace(history=SCRIPTS[script].main(args), out=Path(args.out), policy=kept[0], args=args)
    return run


def alike(one, two, tolerance=1e-5):
    return all(a.keys() == b.keys() and all(a[k] == pytest.approx(b[k], abs=tolerance, rel=1e-4) for k in a)
               for a, b in zip(one.history, two.history, strict=True))


def distance(one, two):
    return max((a - b).abs().max().item() for a, b in zip(one.policy.parameters(), two.policy.parameters(), strict=True))


def logprobs(model):
    known = ReferenceCache()
    known.score(model, GROUPS)
    return {key: known[key].tolist() for key in known}


def of(reference, args):
    return {key: value.tolist() for key, value in reference_logprobs(reference, GROUPS, args).items()}


def adapt(folder, base=MODEL, seed=0, **config):
    """An SFT adapter: one with a B that is not zero."""
    torch.manual_seed(seed)
    config = dict(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"]) | config
    import peft
    model = peft.get_peft_model(load_model(base, "cpu"), peft.LoraConfig(**config))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and "lora_A" not in name: p.add_(torch.randn_like(p) * 0.05)
    model.save_pretrained(folder)
    return str(folder)
