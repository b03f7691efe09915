"""Runs a recipe of tinker-cookbook, unmodified, on the small data sets of `examples/tinker_recipe.py` and further ones.

    python tests/dropin/tinker_offline_recipe.py MODULE [OPTION=VALUE ...]

In place of `uv run python -m MODULE`, as the tests of tinker-cookbook start their recipes.
"""

import runpy
import sys
from pathlib import Path

import datasets

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import tinker_recipe


def problems(seed, count):
    rows = [
        {"problem": text, "solution": f"It is \\boxed{{{answer}}}.", "question": text, "final_answer": str(answer)}
        for text, answer, _ in tinker_recipe.cards(seed, count)
    ]
    return datasets.Dataset.from_list(rows)


def thoughts(seed, count):
    rows = [
        {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": f"It is {answer}."}]}
        for text, answer, _ in tinker_recipe.cards(seed, count)
    ]
    return datasets.Dataset.from_list(rows)


tinker_recipe.DATA |= {
    "EleutherAI/hendrycks_math": lambda: {"train": problems(10, 512), "test": problems(11, 64)},
    "HuggingFaceH4/MATH-500": lambda: {"test": problems(12, 64)},
    "zwhe99/DeepMath-103K": lambda: {"train": problems(13, 512)},
    "allenai/tulu-3-sft-mixture": lambda: {"train": tinker_recipe.conversations(14, 512)},
    "open-thoughts/OpenThoughts3-1.2M": lambda: {"train": thoughts(15, 512)},
}


def load_dataset(path, *args, streaming=False, **options):
    found = tinker_recipe.load_dataset(path, *args, **options)
    return found.to_iterable_dataset() if streaming else found


if __name__ == "__main__":
    datasets.load_dataset, datasets.get_dataset_config_names = load_dataset, lambda _: ["default"]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
