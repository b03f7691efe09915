"""A pytest plugin that runs a part of the tests, which the JSON file MMROLLOUTS_CHOSEN names.

`only`: the ids that are run, or null for all. `drawn`: beginnings of ids of which a quarter is run, and `quarter` (0 to
3) which one.
"""

import json
import os
import zlib
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = json.loads(Path(os.environ["MMROLLOUTS_CHOSEN"]).read_text(encoding="utf-8"))
    only = None if chosen["only"] is None else set(chosen["only"])
    drawn, quarter = tuple(chosen["drawn"]), chosen["quarter"]

    def is_run(test: str) -> bool:
        if only is not None:
            return test in only
        return not test.startswith(drawn) or zlib.crc32(test.encode()) % 4 == quarter

    config.hook.pytest_deselected(items=[item for item in items if not is_run(item.nodeid)])
    items[:] = [item for item in items if is_run(item.nodeid)]
