"""Short runs of the scripts with a tiny model. Equal runs are made only once."""
import json
import os
import shutil
import sys
from collections import Counter
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from models import SMALL, build, cases
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import dpo
import kto
import rloo

ROOT = Path(dpo.__file__).parent
REWARDS = ROOT / "tests/rewards.py"
TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "demo/model")
TINY = SMALL | dict(vocab_size=len(TOKENIZER), num_hidden_layers=1, bos_token_id=None, eos_token_id=3)
TIED = TINY | dict(tie_word_embeddings=True)
RUNS = count()
FOLDER = TemporaryDirectory()  # removed when the tests end
SCRIPTS = {"dpo": dpo, "kto": kto, "rloo": rloo}
FILES = {"dpo": "pairs", "kto": "feedback", "rloo": "prompts"}
LORA = dict(lora_r=4, lora_alpha=32.0, lr=2e-2)  # a few steps change the model visibly
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
BOTH = cases("script", ["dpo", "kto"])
EACH = cases("script", SCRIPTS)
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" \
        "{% if add_generation_prompt %}<assistant>{% endif %}"  # a chat template


def save(model, name):
    """Saves a checkpoint with the demo's tokenizer. Returns its folder."""
    folder = f"{FOLDER.name}/{name}"
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@cache
def tiny(seed=0):
    return save(build("llama", TINY, seed), f"tiny{seed}")


@cache
def data(script):
    """The demo's first rows: a file to train on, and one to evaluate."""
    lines = (ROOT / f"demo/{FILES[script]}.jsonl").read_text().splitlines(keepends=True)
    paths = f"{FOLDER.name}/{script}_train.jsonl", f"{FOLDER.name}/{script}_eval.jsonl"
    for path, part in zip(paths, (lines[:12], lines[12:15])):
        Path(path).write_text("".join(part))
    return paths


def arguments(script="dpo", module=None, **changes):
    """The arguments of a short run of a script, or of a patched `module` of it, with an output folder of its own."""
    train, held_out = data(script)
    flags = dict(model=tiny(), data=train, eval_data=held_out, out=f"{FOLDER.name}/out{next(RUNS)}", steps=3,
                 batch_size=3, lr=3e-3, warmup=0.0, save_every=0)
    if script == "rloo":
        flags |= dict(reward=(f"{REWARDS}:letters",), max_new_tokens=6)
    return (module or SCRIPTS[script]).Args(**flags | changes)


def without_speed(history):
    """What is equal in equal runs."""
    speed = {"seconds", "tokens_per_second", "memory_gb"}
    return [{name: value for name, value in values.items() if name not in speed} for values in history]


def finished(args, history):
    weights = {}
    for file in Path(args.out, "model").glob("*.safetensors"):
        weights |= {name: weight.float() for name, weight in load_file(file).items()}
    return SimpleNamespace(history=without_speed(history), out=Path(args.out), model=f"{args.out}/model", args=args,
                           weights=weights)


def run(script="dpo", **changes):
    return run_once(script, tuple(sorted(changes.items())))


@cache
def run_once(script, changes):
    args = arguments(script, **dict(changes))
    return finished(args, SCRIPTS[script].main(args))


def run_until(die_at, main, args):
    """Runs a script, which dies before event number `die_at`, or before the event of that name, such as
    "learning_rate 2" or "replace model". Each event changes a file or weights."""
    counts, dead = Counter(), []

    def mortal(owner, name):
        function = getattr(owner, name)

        def wrapper(*inputs, **options):
            counts[name] += 1
            target = os.path.basename(str(inputs[-1]))
            if dead or die_at in (counts.total(), f"{name} {counts[name]}", f"{name} {target}"):
                dead.append(True)  # then nothing changes a file any more, as after a kill
                raise KeyboardInterrupt
            return function(*inputs, **options)
        patch.setattr(owner, name, wrapper)

    script = sys.modules[main.__module__]
    with pytest.MonkeyPatch.context() as patch, pytest.raises((KeyboardInterrupt, CheckpointException)):
        mortal(script, "learning_rate")  # in the middle of an optimizer step
        mortal(script, "append")
        mortal(os, "fsync")  # after a file of a checkpoint was written, perhaps not yet completely
        mortal(os, "rename")
        mortal(os, "replace")
        mortal(shutil, "rmtree")
        main(args)
    assert dead


def same(one, two, tolerance=1e-5):
    """Whether two runs have the same metrics and the same saved weights, to rounding."""
    for mine, theirs in zip(one.history, two.history, strict=True):
        if mine != pytest.approx(theirs, abs=tolerance, rel=1e-4):
            return False
    return distance(one, two) < 2 * tolerance


def distance(one, two):
    assert one.weights.keys() == two.weights.keys()
    return max((one.weights[name] - two.weights[name]).abs().max().item() for name in one.weights)


def read(path):
    """The lines of a .jsonl file. U+2028, at which str.splitlines would split, may be in one."""
    return [json.loads(line) for line in Path(path).read_text().split("\n") if line]


def said(text, role="assistant", **keys):
    return [dict(role=role, content=text, **keys)]


def byte_level(template=None, front=()):
    """A tokenizer with one token per byte. It puts special tokens before every text."""
    special = ["<s>", "</s>", "<en>"]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing(
        single=[*front, "$A"], special_tokens=list(zip(special, range(3))))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template)


def load(folder=None, script=dpo, trains=False, **flags):
    """A model as the scripts load it: the policy if it trains, else a reference."""
    return script.load_model(folder or tiny(), "cpu", script.Args(**dict(dtype="float32") | flags), trains=trains)


def adapt(name, base=None, seed=0, **config):
    """The folder of an adapter as supervised fine-tuning leaves it: its B is not zero, and it has no tokenizer."""
    import peft
    model = AutoModelForCausalLM.from_pretrained(base or tiny())
    torch.manual_seed(seed)
    config = dict(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"], lora_dropout=0.5) | config
    model = peft.get_peft_model(model, peft.LoraConfig(**config))
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.requires_grad and "lora_A" not in key:
                p.add_(torch.randn_like(p) * 0.05)
    model.save_pretrained(f"{FOLDER.name}/{name}")
    return f"{FOLDER.name}/{name}"


# --- Rows

PAIR = dict(prompt="The tea", chosen=" was warm.", rejected=" was bad.")
RATED = dict(prompt="The tea", completion=" was warm.", label=True)
Q, A, B = said("q", "user"), said("a"), said("b")
CALL = [dict(name="f", arguments=dict(port="Brest"))]
TOOLS = [dict(name="f", parameters=dict(port=dict(enum=["Brest", None])))]
CALLING = Q + said("", tool_calls=CALL) + said("rain", "tool")


def chat(prompt=Q, chosen=A, rejected=B, **columns):
    return dict(prompt=prompt, chosen=chosen, rejected=rejected) | columns
