"""The modules of the project are imported by name, and each test has other files of them."""

import gc
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    path, thresholds = list(sys.path), gc.get_threshold()
    for name in ("vowels_env", "held", "beside", "digits"):  # of the test before, or of a fixture of the module
        sys.modules.pop(name, None)
    yield
    sys.path[:] = path
    gc.unfreeze()
    gc.set_threshold(*thresholds)
