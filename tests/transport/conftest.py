"""Fixtures that several test files of transport share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from transport.link import LinkClient, LinkServer, PeerConnected


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test may write a record file."""
    return tmp_path / "episodes.mmr"


@pytest.fixture
def pair() -> Iterator[tuple[LinkServer, LinkClient]]:
    """A server and a client named "worker" that is connected to it."""
    with LinkServer() as server, LinkClient(server.address, name="worker") as client:
        assert server.recv(timeout=60) == PeerConnected("worker")
        yield server, client
