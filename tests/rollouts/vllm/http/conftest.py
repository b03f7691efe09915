from collections.abc import AsyncIterator

import pytest
from fake_server import FakeVLLM
from http_calls import Clock

from rollouts.engines.http.connection import ServerConnection


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replaces the sleep, the jitter and the wall clock (1,700,000,000) of retries."""
    clock = Clock()
    monkeypatch.setattr("rollouts.engines.http.connection.sleep", lambda seconds: clock.sleep(seconds))
    monkeypatch.setattr("rollouts.engines.http.connection.random.random", lambda: clock.chance)
    monkeypatch.setattr("rollouts.engines.http.connection.time.time", lambda: 1_700_000_000.0)
    return clock


@pytest.fixture
async def connection(server: FakeVLLM, clock: Clock) -> AsyncIterator[ServerConnection]:
    made = ServerConnection(server.base_url)
    yield made
    await made.close()
