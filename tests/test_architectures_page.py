"""docs/architectures.md is what benchmarks/architectures.py writes of the figures that it keeps."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[1] / "benchmarks" / "architectures.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("architectures", _SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_the_one_of_the_figures(script):
    assert script.PAGE.read_text("utf-8") == script.page(json.loads(script.FIGURES.read_text("utf-8")))


def test_a_page_counts_each_architecture_once_and_names_what_is_missing(script):
    results = {
        "a": {"samples": "", "trains": "", "sees": ""},
        "b": {"set": "max_position_embeddings", "samples": "", "trains": ""},
        "c": {"samples": "no cache", "trains": ""},
        "d": {"samples": "x", "trains": "bert: tokens depend on later tokens"},
        "e": {"built": "ImportError: it requires the timm library"},
    }
    text = script.page(script.figures(results))
    counts = [int(number) for number in re.findall(r"^\| [^|]+ \| (\d+)(?:, \d+)? \|$", text, re.MULTILINE)]
    assert counts == [2, 1, 1, 1, 1]  # sample and train, with images, train, refused, not tried
    assert "| d | refused: tokens attend to later ones |" in text
    assert "| b | sample if config.json has `max_position_embeddings` |" in text
    assert text.endswith("With images: a.\n\nWith text: the other 1 of that release.\n")
