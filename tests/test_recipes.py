"""docs/recipes.md: each command runs for two steps, with a tiny model of the same architecture, whose template has the
role markers of the real one, and with rows in the columns of the data set."""
import re
import shlex
import sys
from math import log
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro
from models import build, parametrize
from runs import FOLDER, ROOT, SCRIPTS, TINY, TOKENIZER, read
from test_changes import changed
from transformers import AutoConfig, AutoModelForSequenceClassification

PAGE = (ROOT / "docs/recipes.md").read_text()
RECIPES = [text.replace("\\\n", "") for text in re.findall("```bash\n(.*?)```", PAGE, flags=re.S)]
COLUMNS = dict(re.findall(r"^\| `([\w/.-]+)`[^|]* \| ([^|]*) \|", PAGE, flags=re.M))

# The architecture, and what the template writes before words of ROLE, and after them.
CHATML = "<|im_start|>ROLE\n", "<|im_end|>\n"
LLAMA_3 = "<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>"
MODELS = {
    "alignment-handbook/zephyr-7b-sft-full": ("mistral", "<|ROLE|>\n", "</s>\n"),
    "allenai/Llama-3.1-Tulu-3-8B-SFT": ("llama", "<|ROLE|>\n", "\n"),
    "allenai/Olmo-3-7B-Instruct-SFT": ("olmo3", *CHATML),
    "meta-llama/Meta-Llama-3-8B-Instruct": ("llama", *LLAMA_3),
    "smollm3-sft": ("smollm3", *CHATML),
    "llama3-8b_sft/FINAL": ("llama", *LLAMA_3),
    "trl-lib/pythia-1b-deduped-tldr-sft": ("gpt_neox", "", ""),
}
NO_THOUGHT = "{% if enable_thinking is false %}<think>\n\n</think>\n{% endif %}"  # SmolLM3, before an answer
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


def checkpoint(name):
    kind, begin, end = MODELS[name]
    folder = f"{FOLDER.name}/{name}"
    window = 8 if kind in ("mistral", "olmo3") else None
    build(kind, TINY | dict(sliding_window=window)).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)

    thought = "{% if m.role == 'assistant' %}" + NO_THOUGHT + "{% endif %}"
    words = begin.replace("ROLE", "{{ m.role }}") + thought + "{{ m.content }}" + end
    answer = begin.replace("ROLE", "assistant") + NO_THOUGHT
    template = "{% for m in messages %}" + words + "{% endfor %}{% if add_generation_prompt %}" + answer + "{% endif %}"
    Path(folder, "chat_template.jinja").write_text(template)
    return folder


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
    kind, begin, end = MODELS[args.model]
    args.model, args.steps, args.batch_size, args.max_new_tokens = checkpoint(args.model), 2, 4, 3

    if "rloo.py" in recipe:
        Path("no_eos.py").write_text(re.search("\ndef no_eos.*?(?=```)", PAGE, flags=re.S)[0])
        config = AutoConfig.for_model(kind, **TINY | dict(num_labels=1))
        AutoModelForSequenceClassification.from_config(config).save_pretrained(args.reward_model)
        TOKENIZER.save_pretrained(args.reward_model)

    _, first, _ = script.main(args)  # before training, and two steps
    loss = "".join(vars(args).get("loss", ()))
    if loss in FIRST_LOSS:
        assert first["loss"] == pytest.approx(FIRST_LOSS[loss], abs=1e-4)

    prompt = re.sub(r"\d+", "0", read(f"{args.out}/samples.jsonl")[0]["prompt"])
    whole = begin.replace("ROLE", "user") + "Name 0 soups." + end + begin.replace("ROLE", "assistant")
    assert prompt == whole + "<think>\n\n</think>\n" * (kind == "smollm3")
