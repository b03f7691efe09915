"""A server over the tiny Qwen3-VL, in a thread of this process, on a free port of the loopback address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served_in_thread import ServedInThread, serve_directory


@pytest.fixture
def serve_app() -> Iterator[Callable[..., ServedInThread]]:
    """Starts applications: `serve_app(app)`. They end with the test."""
    servers: list[ServedInThread] = []

    def start(app: Any) -> ServedInThread:
        servers.append(ServedInThread(app))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def tiny_server(tiny_model_dir: Path) -> Iterator[ServedInThread]:
    """A server that tests share: they leave it running, awake and with its first weights."""
    with serve_directory(tiny_model_dir, name="tiny") as server:
        yield server
