"""Deadlines, cancellation, slots, and closing."""

from __future__ import annotations

import asyncio

import pytest
from fake_http import error_response
from fake_responses import hold
from fake_server import GENERATE, FakeVLLM
from http_calls import Clock, generate

from rollouts.engines.http.connection import HttpLimits, ServerConnection
from rollouts.errors import (
    EngineClosedError,
    ServerTimeoutError,
)

pytestmark = [pytest.mark.filterwarnings("error::ResourceWarning"), pytest.mark.usefixtures("nothing_leaks")]


async def test_the_total_deadline_ends_a_request_and_its_connection(
    server: FakeVLLM, connection: ServerConnection
) -> None:
    server.script[GENERATE] += [hold(asyncio.Event())]
    with pytest.raises(ServerTimeoutError, match=r"0\.05 s.*waiting for the response"):
        await generate(connection, seconds=0.05)
    await server.requests[0].disconnected.wait()


async def test_the_total_deadline_counts_the_wait_for_a_slot(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url, limits=HttpLimits(concurrency=1))
    arrived, release = asyncio.Event(), asyncio.Event()
    server.script[GENERATE] += [hold(release, arrived)]
    running = asyncio.create_task(generate(connection))
    await arrived.wait()
    with pytest.raises(ServerTimeoutError, match="waiting for a free slot"):
        await generate(connection, seconds=0.05)
    release.set()
    assert (await running).status == 200
    await connection.close()


async def test_cancelling_the_caller_closes_the_connection_and_frees_the_slot(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url, limits=HttpLimits(concurrency=1))
    arrived = asyncio.Event()
    server.script[GENERATE] += [hold(asyncio.Event(), arrived)]
    running = asyncio.create_task(generate(connection))
    waiting = asyncio.create_task(generate(connection))
    await arrived.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await waiting).status == 200
    await server.requests[0].disconnected.wait()
    await connection.close()


async def test_closing_ends_calls_that_run_wait_for_a_slot_or_sleep(server: FakeVLLM, clock: Clock) -> None:
    asleep = asyncio.Event()

    async def sleep_for_ever(seconds: float) -> None:
        asleep.set()
        await asyncio.Event().wait()

    clock.sleep = sleep_for_ever  # type: ignore[method-assign]
    connection = ServerConnection(server.base_url, limits=HttpLimits(concurrency=2))
    arrived = asyncio.Event()
    server.script[GENERATE] += [hold(asyncio.Event(), arrived), error_response(503)]
    calls = [asyncio.create_task(generate(connection)) for _ in range(4)]
    await arrived.wait()
    await asleep.wait()
    await connection.close()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [EngineClosedError] * 4
    with pytest.raises(EngineClosedError):
        await generate(connection)
    assert len(server.requests) == 2
    await connection.close()  # twice is once
