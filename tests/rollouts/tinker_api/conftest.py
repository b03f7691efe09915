from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tinker_clients import Server


@pytest.fixture(scope="module", params=["qwen3_vl"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a tiny model of a family, with two users."""
    # Imported here: both need packages of extras, without which other tests of the folder run.
    from family_rows import loaded_family
    from tinker_clients import Server

    server = Server(loaded_family(request.param), tmp_path_factory.mktemp("run"))
    yield server
    server.stop()
