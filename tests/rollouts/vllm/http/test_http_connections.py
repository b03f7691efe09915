"""How connections are kept and closed, on one event loop and on another one after it."""

from __future__ import annotations

import asyncio

import pytest
from fake_http import event_stream
from fake_server import GENERATE, FakeVLLM
from http_calls import GENERATION, generate

from rollouts.engines.http.connection import HttpLimits, ServerConnection
from rollouts.errors import (
    EngineClosedError,
)

pytestmark = [pytest.mark.filterwarnings("error::ResourceWarning"), pytest.mark.usefixtures("nothing_leaks")]


async def test_idle_connections_are_closed_without_waiting_for_another_request(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url, limits=HttpLimits(keepalive_seconds=0.02))
    await asyncio.gather(*(generate(connection) for _ in range(5)))
    for seen in server.requests:
        await seen.disconnected.wait()
    await connection.close()


async def test_closing_inside_of_a_stream_or_cancelled_closes_idle_connections_too(
    server: FakeVLLM, connection: ServerConnection
) -> None:
    await asyncio.gather(*(generate(connection) for _ in range(3)))
    server.script[GENERATE] += [event_stream(b"data: 1\n\n", asyncio.Event())]

    async def close_inside() -> None:
        async with connection.stream(GENERATE, name="s", body=GENERATION) as events:
            async for _ in events:
                await connection.close()

    with pytest.raises((EngineClosedError, asyncio.CancelledError)):
        await close_inside()
    for seen in server.requests:
        await seen.disconnected.wait()
