"""Sums of two numbers below ten: data to train a small chat model with, and the reward for a right answer.

    python demo/sums.py out/sums
    python rloo.py --model out/smollm2 --data out/sums/prompts.jsonl --eval_data out/sums/prompts_test.jsonl \\
        --reward demo/sums.py:right --k 8 --lr 1e-5 --beta 0.01 --schedule constant \\
        --max_new_tokens 12 --steps 20 --dtype bfloat16

The files are for rloo.py, dpo.py and kto.py. Every row also has the right `answer`:

    prompts*.jsonl      prompt
    pairs*.jsonl        prompt, chosen (right), rejected (wrong)
    rated*.jsonl        prompt, completion, label; as many are right as are wrong

The *_test files ask for other sums than the rest. 3 + 5 and 5 + 3 are two rows, but they are always in the same file.

SmolLM2-135M-Instruct (demo/get_model.py) has to learn the numbers, and to answer at all: half of its most likely
answers are right, but only a seventh of its samples, because most of them just talk. The right answers have the form
that the model itself uses most, `3 + 5 = 8`. A right answer `8` is about 17 times less likely, and with
such answers a run of dpo.py did not raise the score. The wrong answers have three forms, so that pairs teach the form,
too.
"""
import json
import re
from pathlib import Path

import numpy as np
import tyro

QUESTION = "What is {a} + {b}? Answer with the number only."
RIGHT_FORM = "{a} + {b} = {c}"
WRONG_FORMS = (RIGHT_FORM, "The answer is {c}.", "To solve this problem, we add {a} and {b}, which is {c}.")
N_TEST = 16  # held-out sums, of 81


def right(prompts, completions, answer, **columns):
    """1.0 if the last number of a completion is the answer, else 0.0. Completions are strings or lists of messages."""
    rewards = []
    for completion, value in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
        is_right = bool(numbers) and float(numbers[-1]) == float(value)
        rewards.append(float(is_right))
    return rewards


def split(rng) -> tuple[list, list]:
    """Sums (a, b) to train on, and held-out ones. Both orders of a sum are on the same side."""
    train, test = [], []
    pairs = [(a, b) for a in range(1, 10) for b in range(a, 10)]
    for i in rng.permutation(len(pairs)):
        a, b = pairs[i]
        side = test if len(test) < N_TEST else train
        side += sorted({(a, b), (b, a)})  # one for 4 + 4
    return train, test


def wrong_numbers(rng, a: int, b: int) -> list[int]:
    """A different wrong number for each of the forms: near the sum, ten too many, or of another operation."""
    c = a + b
    numbers = {c - 2, c - 1, c + 1, c + 2, c + 10, a * b, abs(a - b)} - {0, c}
    return rng.permutation(sorted(numbers))[:len(WRONG_FORMS)].tolist()


def say(role: str, form: str, **numbers) -> list[dict]:
    return [{"role": role, "content": form.format(**numbers)}]


def make_rows(rng, sums: list) -> dict[str, list[dict]]:
    """The rows of each file."""
    prompts, pairs, rated = [], [], []
    for i, (a, b) in enumerate(sums):
        row = {"prompt": say("user", QUESTION, a=a, b=b), "answer": str(a + b)}
        good = say("assistant", RIGHT_FORM, a=a, b=b, c=a + b)
        numbers = wrong_numbers(rng, a, b)
        bad = [say("assistant", form, a=a, b=b, c=c) for form, c in zip(WRONG_FORMS, numbers)]

        prompts.append(row)
        pairs += [row | {"chosen": good, "rejected": answer} for answer in bad]
        rated.append(row | {"completion": good, "label": True})
        rated.append(row | {"completion": bad[i % len(bad)], "label": False})
    return {"prompts": prompts, "pairs": pairs, "rated": rated}


def main(folder: tyro.conf.Positional[Path] = Path("out/sums")):
    rng = np.random.default_rng(0)
    train, test = split(rng)
    print(f"{len(train)} sums to train on, {len(test)} held out")

    folder.mkdir(parents=True, exist_ok=True)
    for suffix, sums in ("", train), ("_test", test):
        for name, rows in make_rows(rng, sums).items():
            path = folder / f"{name}{suffix}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            print(f"{path}  {len(rows)} rows")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__, use_underscores=True)
