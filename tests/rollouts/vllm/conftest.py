import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture
def nothing_leaks() -> Iterator[None]:
    """An unclosed transport or an unfinished coroutine of this test warns when it is collected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what earlier tests in this process left behind is not this test's
        gc.collect()
    yield
    gc.collect()
