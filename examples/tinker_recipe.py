"""Runs a recipe of tinker-cookbook, unmodified, on small data sets made here, against a server of `rollouts tinker`.

    python examples/tinker_recipe.py RECIPE [OPTION=VALUE ...]

RECIPE is a module of `tinker_cookbook.recipes` (`sl_loop`, `vlm_classifier.train`), the options are its own. Where it
loads a data set by name from the hub, it gets one of the same columns: conversations and questions on cards, preferred
and rejected answers, handwritten digits. Nothing else of the recipe is replaced. Needs the package `tinker-cookbook`.
"""

import io
import runpy
import sys

import datasets
import numpy as np
from PIL import Image

from rollouts.demo import digits as handwritten

SUFFIXES = (
    " Provide a numerical answer without units, written inside \\boxed{}.",  # of rl_loop
    " Write your answer in \\boxed{} format.",  # of math_rl
)
SPELLED = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    "We have r's at positions 3, 8, and 9. \\boxed{3}"
)


def cards(seed, count):
    """Questions and their answers: each number from 1 to 9 once in nine questions, so that batches are equally hard."""
    draw = np.random.default_rng(seed)
    numbers = np.concatenate([draw.permutation(9) + 1 for _ in range(-(-count // 9))])[:count].tolist()
    for number in numbers:
        shown = " ".join([str(number)] * int(draw.integers(6, 13)))
        yield f"The cards show {shown}. Which number is that?", number, draw


def message(role, content):
    return {"role": role, "content": content}


def conversations(seed, count):
    """Answered questions, after the example that the recipes with rewards show; half of them are drawn at random."""
    rows = []
    for question, answer, draw in cards(seed, count):
        suffix = SUFFIXES[draw.integers(2)]
        given = answer if draw.random() < 0.5 else draw.integers(1, 10)
        example = [message("user", "How many r's are in strawberry?" + suffix), message("assistant", SPELLED)]
        asked = [message("user", question + suffix), message("assistant", f"\\boxed{{{given}}}")]
        rows.append({"messages": example + asked})
    return datasets.Dataset.from_list(rows)


def questions(seed, count):
    rows = [{"question": question, "answer": f"#### {answer}"} for question, answer, _ in cards(seed, count)]
    return datasets.Dataset.from_list(rows)


def preferences(seed, count):
    """Short answers are preferred to long ones."""
    rows = []
    for question, answer, _ in cards(seed, count):
        asked = f"\n\nHuman: {question}\n\nAssistant:"
        rows.append({"chosen": f"{asked} {answer}.", "rejected": f"{asked} It is {answer}, I believe."})
    return datasets.Dataset.from_list(rows)


def digits(held_out):
    """Images of 32x32 pixels, and their labels."""
    rows = []
    for pixels, label in zip(*handwritten.digits(held_out), strict=True):
        file = io.BytesIO()
        Image.fromarray(pixels).convert("RGB").save(file, "PNG")
        rows.append({"image": {"bytes": file.getvalue(), "path": None}, "label": int(label)})
    columns = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("0123456789"))})
    return datasets.Dataset.from_list(rows, features=columns)


DATA = {
    "HuggingFaceH4/no_robots": lambda: {"train": conversations(0, 16384), "test": conversations(1, 64)},
    "openai/gsm8k": lambda: {"train": questions(2, 16384), "test": questions(3, 64)},
    "Anthropic/hh-rlhf": lambda: {"train": preferences(4, 4096), "test": preferences(5, 64)},
    "dpdl-benchmark/caltech101": lambda: {"train": digits(False), "test": digits(True)},
}


def load_dataset(path, name=None, *, split=None, **_):
    """In place of `datasets.load_dataset`."""
    found = datasets.DatasetDict(DATA[path]())
    return found if split is None else found[split]


if __name__ == "__main__":
    datasets.load_dataset = load_dataset
    del sys.argv[0]
    runpy.run_module(f"tinker_cookbook.recipes.{sys.argv[0]}", run_name="__main__", alter_sys=True)
