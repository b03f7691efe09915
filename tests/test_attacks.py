"""The time for inputs of strangers grows with their size, and not with its square."""

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

LARGER = 8
MOST_GROWTH = 24  # linear is 8, quadratic 64
SHORT = 0.02  # processor seconds: at these sizes, quadratic work takes at least ten times as long


def _attacks() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "attacks.py"
    spec = importlib.util.spec_from_file_location("attacks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["attacks"] = module
    spec.loader.exec_module(module)
    return module


ATTACKS = _attacks().ATTACKS


def seconds(name: str, size: int) -> float:
    """The processor time of one call, of this thread alone."""
    call = ATTACKS[name].prepare(size)
    started = time.thread_time()
    call()
    return time.thread_time() - started


@pytest.mark.parametrize("name", ATTACKS)
def test_an_input_of_eight_times_the_size_takes_about_eight_times_the_processor_time(name: str) -> None:
    size = ATTACKS[name].size
    measured = []
    for _ in range(3):  # again only where a busy machine, or a collection of garbage, may be the cause
        few, many = seconds(name, size // LARGER), seconds(name, size)
        if many < SHORT or many < MOST_GROWTH * few:
            return
        measured.append(f"{few:.4f} s, then {many:.4f} s")
    pytest.fail("; ".join(measured))
