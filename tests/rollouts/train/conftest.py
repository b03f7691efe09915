"""The module of the project is imported by name, and each test has another file of it."""

import gc
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    path, thresholds = list(sys.path), gc.get_threshold()
    yield
    sys.modules.pop("vowels_env", None)
    sys.path[:] = path
    gc.unfreeze()
    gc.set_threshold(*thresholds)
