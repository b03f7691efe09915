import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def nothing_leaks() -> Iterator[None]:
    """An unclosed transport or an unfinished coroutine of this test warns when it is collected."""
    gc.freeze()  # what earlier tests in this process left behind is not this test's, and a gigabyte to look through
    yield
    gc.collect()
    gc.unfreeze()
