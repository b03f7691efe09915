"""What a request looks like on the wire, which responses can be read, deadlines, and how connections are closed."""

import asyncio
import tracemalloc

import numpy as np
import pytest
from fake_http import Response, error_response, event_stream, json_response
from fake_responses import hold, raw
from fake_server import GENERATE, FakeVLLM
from http_calls import GENERATION, Clock, generate
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engines.http.connection import HttpLimits, ServerConnection
from rollouts.errors import (
    EngineClosedError,
    MalformedResultError,
    ServerError,
    ServerTimeoutError,
)

pytestmark = [pytest.mark.filterwarnings("error::ResourceWarning"), pytest.mark.usefixtures("nothing_leaks")]


@given(sizes=st.lists(st.sampled_from([0, 1, 100, 262_143, 262_144, 262_145, 700_000]), max_size=6))
def test_any_split_into_segments_arrives_whole(sizes: list[int]) -> None:
    async def run() -> None:
        async with FakeVLLM() as server:
            server.script["/echo"] += [json_response({})]
            connection = ServerConnection(server.base_url)
            segments = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
            await connection.request("POST", "/echo", name="e", body=segments)
            assert server.requests[0].body == b"".join(segments)
            await connection.close()

    asyncio.run(run())


async def test_a_response_before_the_end_of_the_request_body_ends_the_request() -> None:
    refused, connections = asyncio.Event(), 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")
        await refused.wait()  # and reads nothing more
        writer.close()

    body = memoryview(np.zeros(48 * 2**20, np.uint8))
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as listening:
        connection = ServerConnection(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        tracemalloc.start()
        try:
            for _ in range(2):
                reply = await connection.request("POST", "/", name="big", body=[body])
                assert (reply.status, reply.body) == (413, b"big")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        refused.set()
        await connection.close()
    assert connections == 2  # on the first one half a question is under way
    assert peak < 4 * 2**20


async def test_a_proxy_in_the_environment_is_not_used(
    server: FakeVLLM, connection: ServerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert (await generate(connection)).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "gzip, gzip"])
async def test_a_compressed_response_is_an_error_because_none_was_asked_for(
    server: FakeVLLM, connection: ServerConnection, encoding: str
) -> None:
    server.script[GENERATE] += [Response(body=b"{}", headers={"content-encoding": encoding})]
    with pytest.raises(MalformedResultError, match="was not asked for"):
        await generate(connection)
    assert len(server.requests) == 1
    assert server.requests[0].headers["accept-encoding"] == "identity"


@pytest.mark.slow
async def test_the_size_of_a_response_is_bounded_while_it_is_read(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url, limits=HttpLimits(response_bytes=1000))
    for size, outcome in ((1000, None), (1001, "1000")):
        server.script[GENERATE] += [Response(body=b"x" * size)]
        if outcome is None:
            assert len((await generate(connection)).body) == size
        else:
            with pytest.raises(MalformedResultError, match=outcome):
                await generate(connection)
    await server.requests[-1].disconnected.wait()
    await connection.close()


async def test_an_endless_head_is_an_error(server: FakeVLLM, connection: ServerConnection) -> None:
    server.script[GENERATE] += [raw(b"HTTP/1.1 200 OK\r\nx-long: " + b"x" * 200_000)]
    with pytest.raises(MalformedResultError):
        await generate(connection)


async def test_a_redirect_is_refused_and_its_credentials_are_not_shown(
    server: FakeVLLM, connection: ServerConnection
) -> None:
    place = "http://user:hidden@elsewhere:9/v2/path?token=hidden#hidden"
    server.script[GENERATE] += [Response(body=b"{}", status=307, headers={"location": place})]
    with pytest.raises(ServerError, match="http://elsewhere:9/v2/path") as caught:
        await generate(connection)
    assert caught.value.status == 307
    assert "hidden" not in str(caught.value)
    assert len(server.requests) == 1


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
