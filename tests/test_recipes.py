"""docs/recipes.md: each command runs for two steps, with a tiny model of the same architecture, and with rows in the
columns of the data set."""
import re
import shlex
import sys
from math import log
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro
from models import build, parametrize
from runs import ROOT, SCRIPTS, TINY, TOKENIZER
from test_changes import changed
from transformers import AutoConfig, AutoModelForSequenceClassification

PAGE = (ROOT / "docs/recipes.md").read_text()
RECIPES = [text.replace("\\\n", "") for text in re.findall("```bash\n(.*?)```", PAGE, flags=re.S)]
COLUMNS = dict(re.findall(r"^\| `([\w/.-]+)`[^|]* \| ([^|]*) \|", PAGE, flags=re.M))
MODELS = {
    "alignment-handbook/zephyr-7b-sft-full": "mistral",
    "allenai/Llama-3.1-Tulu-3-8B-SFT": "llama",
    "allenai/Olmo-3-7B-Instruct-SFT": "olmo3",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama",
    "smollm3-sft": "smollm3",
    "llama3-8b_sft/FINAL": "llama",
    "trl-lib/pythia-1b-deduped-tldr-sft": "gpt_neox",
}
QUICK = re.compile("out/(tulu3|smollm3|rloo-tldr)$")
FIRST_LOSS = {"sigmoid": log(2), "sigmoid_norm": log(2), "apo_zero": 1.0, "kto": 0.5}  # where policy = reference


def load_dataset(name, config=None, split="train"):
    assert (config == "Preference") == ("smoltalk2" in name)
    for i in range(24):
        user = {"content": f"Name {i} soups.", "role": "user"}
        chosen, rejected = ([user, {"content": word, "role": "assistant"}] for word in ("Broth", "Stew"))
        values = dict(prompt=user["content"], chosen=chosen, rejected=rejected,
                      chat_template_kwargs={"enable_thinking": False})
        yield {column: values.get(column, "") for column in re.findall(r"`(\w+)`", COLUMNS[name])}


def script_and_flags(recipe):
    script, flags = re.search(r"(\w+)\.py\s+(--.*)$", recipe).groups()
    script = SCRIPTS.get(script) or changed("load_in_4bit", "dpo")
    return script, tyro.cli(script.Args, args=shlex.split(flags), use_underscores=True)


def test_each_of_nine_recipes_is_parsed_by_its_script():
    assert len(RECIPES) == 9
    assert {script_and_flags(recipe)[1].model for recipe in RECIPES} == set(MODELS)


@parametrize("recipe", [
    pytest.param(recipe, marks=[pytest.mark.slow] * (not QUICK.search(recipe)), id=recipe.split()[-1])
    for recipe in RECIPES])
def test_recipe_runs_with_its_own_flags(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.chdir(tmp_path)
    script, args = script_and_flags(recipe)
    kind = MODELS[args.model]
    build(kind, TINY | dict(sliding_window=8 if kind in ("mistral", "olmo3") else None)).save_pretrained("model")
    TOKENIZER.save_pretrained("model")
    args.model, args.steps, args.batch_size, args.max_new_tokens = "model", 2, 4, 3

    if "rloo.py" in recipe:
        Path("no_eos.py").write_text(re.search("\ndef no_eos.*?(?=```)", PAGE, flags=re.S)[0])
        config = AutoConfig.for_model(kind, **TINY | dict(num_labels=1))
        AutoModelForSequenceClassification.from_config(config).save_pretrained(args.reward_model)
        TOKENIZER.save_pretrained(args.reward_model)

    _, first, _ = script.main(args)  # before training, and two steps
    loss = "".join(vars(args).get("loss", ()))
    if loss in FIRST_LOSS:
        assert first["loss"] == pytest.approx(FIRST_LOSS[loss], abs=1e-4)
    assert Path(args.out, "model").exists()
