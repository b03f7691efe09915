"""Modules beside a configuration are imported by name, and each test has others of the same names."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def forgotten_modules() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).endswith(("_env.py", "_tasks.py", "colours.py", "score.py")):
            del sys.modules[name]
    sys.path[:] = path
