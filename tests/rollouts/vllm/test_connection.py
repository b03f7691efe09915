"""How requests reach a server: slots, deadlines, retries, bounds, and what is closed when."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tracemalloc
import warnings
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import fake_server
import numpy as np
import pytest
from fake_server import GENERATE, FakeVLLM, answer, busy, half, hang_up, hold, malformed, raw, reset
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engines.vllm.http.connection import ServerConnection
from rollouts.engines.vllm.http.limits import HttpLimits
from rollouts.engines.vllm.http.response import HttpResponse, response_error
from rollouts.engines.vllm.http.retrying import retry_delay
from rollouts.errors import (
    EngineClosedError,
    InvalidRequestError,
    MalformedResultError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
)

pytestmark = [pytest.mark.filterwarnings("error::ResourceWarning"), pytest.mark.usefixtures("nothing_leaks")]

KEY = "sk-very-secret"


class Clock:
    """Time that passes only when a retry sleeps; `chance` is what the jitter draws."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.chance = 1.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
async def server() -> AsyncIterator[FakeVLLM]:
    async with FakeVLLM() as running:
        yield running


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replaces the sleep, the jitter and the wall clock (1,700,000,000) of retries."""
    clock = Clock()
    monkeypatch.setattr("rollouts.engines.vllm.http.connection.sleep", lambda seconds: clock.sleep(seconds))
    monkeypatch.setattr("rollouts.engines.vllm.http.retrying.random.random", lambda: clock.chance)
    monkeypatch.setattr("rollouts.engines.vllm.http.retrying.time.time", lambda: 1_700_000_000.0)
    return clock


@pytest.fixture
async def connection(server: FakeVLLM, clock: Clock) -> AsyncIterator[ServerConnection]:
    made = ServerConnection(server.base_url)
    yield made
    await made.close()


def body_of(**content: object) -> list[bytes]:
    return [json.dumps(content).encode()]


GENERATION = body_of(request_id="r", token_ids=[1, 2, 3], sampling_params={"max_tokens": 4, "logprobs": 0})


async def generate(connection: ServerConnection, name: str = "r", **options: object) -> HttpResponse:
    return await connection.request("POST", GENERATE, name=name, body=GENERATION, **options)  # type: ignore[arg-type]


# One request.


async def test_an_answer_comes_back_with_its_status_headers_and_body(connection: ServerConnection) -> None:
    reply = await generate(connection)
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["choices"][0]["token_ids"] == fake_server.completion_of([1, 2, 3], 4)


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 422, 500, 502, 504])
async def test_an_error_status_is_an_answer_and_is_not_tried_again(
    server: FakeVLLM, connection: ServerConnection, clock: Clock, status: int
) -> None:
    server.script[GENERATE] += [answer({"error": "no"}, status=status)]
    assert (await generate(connection)).status == status
    assert len(server.requests) == 1
    assert clock.slept == []


async def test_method_path_parameters_and_headers_arrive_as_given(
    server: FakeVLLM, connection: ServerConnection
) -> None:
    await connection.request(
        "POST", "/pause", name="p", params={"mode": "keep", "clear_cache": False, "n": 2}, headers={"X-Session": "e 1"}
    )
    (seen,) = server.requests
    assert (seen.method, seen.path, seen.body) == ("POST", "/pause", b"")
    assert seen.query == {"mode": "keep", "clear_cache": "false", "n": "2"}
    assert seen.headers["x-session"] == "e 1"
    assert seen.headers.get("content-length", "0") == "0"


async def test_segments_arrive_in_order_with_their_exact_length(server: FakeVLLM, connection: ServerConnection) -> None:
    pixels = np.arange(600_000, dtype=np.uint32)  # 2.4 MB: several pieces; and not a view of bytes
    segments = [b'{"a":"', memoryview(pixels), b"", memoryview(b"tail"), b'"}' * 3]
    server.script["/echo"] += [answer({})]
    await connection.request("POST", "/echo", name="e", body=segments)
    (seen,) = server.requests
    assert seen.body == b"".join(bytes(segment) for segment in segments)
    assert int(seen.headers["content-length"]) == len(seen.body)


@given(sizes=st.lists(st.sampled_from([0, 1, 100, 262_143, 262_144, 262_145, 700_000]), max_size=6))
def test_any_split_into_segments_arrives_whole(sizes: list[int]) -> None:
    async def run() -> None:
        async with FakeVLLM() as server:
            server.script["/echo"] += [answer({})]
            connection = ServerConnection(server.base_url)
            segments = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
            await connection.request("POST", "/echo", name="e", body=segments)
            assert server.requests[0].body == b"".join(segments)
            await connection.close()

    asyncio.run(run())


async def test_a_large_body_is_sent_without_a_copy_of_it() -> None:
    size, digest = 48 * 2**20, hashlib.sha256()

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        left = size
        while left:
            piece = await reader.read(65536)
            digest.update(piece)
            left -= len(piece)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    body = memoryview(np.arange(size // 4, dtype=np.uint32))
    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as listening:
        connection = ServerConnection(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        tracemalloc.start()
        try:
            assert (await connection.request("POST", "/", name="big", body=[body])).status == 200
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        await connection.close()
    assert digest.digest() == hashlib.sha256(body).digest()
    assert peak < 4 * 2**20


async def test_an_answer_before_the_end_of_the_question_ends_the_question() -> None:
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


@pytest.mark.parametrize(
    ("path", "headers"), [("/a b", {}), ("/a\r\nx: y", {}), ("/a", {"x-session": "e\r\nx-evil: 1"}), ("/ü", {})]
)
async def test_a_path_or_header_that_would_smuggle_something_is_refused(
    server: FakeVLLM, connection: ServerConnection, path: str, headers: dict[str, str]
) -> None:
    with pytest.raises(InvalidRequestError):
        await connection.request("GET", path, name="r", headers=headers)
    assert server.requests == []


async def test_a_proxy_in_the_environment_is_not_used(
    server: FakeVLLM, connection: ServerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert (await generate(connection)).status == 200


# What an answer may look like.


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.0 200 OK\r\n\r\n{}",  # ended by the connection
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\nx-trailer: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n",  # more than was asked for
    ],
    ids=["interim answers", "HTTP/1.0", "connection: close", "chunked with a trailer", "unasked bytes"],
)
async def test_every_framing_of_http_is_read(
    server: FakeVLLM, connection: ServerConnection, clock: Clock, head: bytes
) -> None:
    server.script[GENERATE] += [raw(head)]
    assert (await generate(connection)).json() == {}
    assert (await generate(connection)).status == 200  # and the next one meets no remains
    assert clock.slept == []


async def test_an_answer_that_nobody_asked_for_is_not_given_to_the_next_request(
    server: FakeVLLM, connection: ServerConnection
) -> None:
    one = b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n"
    server.script[GENERATE] += [raw(one + b'"asked"' + one + b'"never"', close=False)]
    assert (await generate(connection)).json() == "asked"
    assert (await generate(connection)).json()["request_id"] == "generate-tokens-r"


async def test_gzip_is_decoded(server: FakeVLLM, connection: ServerConnection) -> None:
    server.script[GENERATE] += [answer(compress=True)]
    assert (await generate(connection)).json()["request_id"] == "generate-tokens-r"


@pytest.mark.parametrize(("body", "encoding"), [(b"never zipped", "gzip"), (b"{}", "zstd")])
async def test_a_broken_or_unknown_encoding_is_an_error(
    server: FakeVLLM, connection: ServerConnection, body: bytes, encoding: str
) -> None:
    server.script[GENERATE] += [answer(body=body, headers={"content-encoding": encoding})]
    with pytest.raises(MalformedResultError, match=r"encoding|compressed"):
        await generate(connection)
    assert len(server.requests) == 1


async def test_gzip_data_that_end_too_early_are_no_json(server: FakeVLLM, connection: ServerConnection) -> None:
    body = zlib.compress(json.dumps({"text": "x" * 99}).encode(), wbits=31)[:-12]
    server.script[GENERATE] += [answer(body=body, headers={"content-encoding": "gzip"})]
    with pytest.raises(MalformedResultError):
        (await generate(connection)).json()


async def test_a_broken_chunk_is_an_error_and_not_an_endless_wait(
    server: FakeVLLM, connection: ServerConnection, clock: Clock
) -> None:
    broken = raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n", close=False)
    server.script[GENERATE] += [broken] * 20
    with pytest.raises((MalformedResultError, ServerUnreachableError)):
        await generate(connection, seconds=30)


async def test_an_answer_is_bounded_while_it_is_read(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url, limits=HttpLimits(response_bytes=1000))
    for size, outcome in ((1000, None), (1001, "1000")):
        server.script[GENERATE] += [answer(body=b"x" * size)]
        if outcome is None:
            assert len((await generate(connection)).body) == size
        else:
            with pytest.raises(MalformedResultError, match=outcome):
                await generate(connection)
    await server.requests[-1].disconnected.wait()
    await connection.close()


async def test_a_gzip_bomb_is_stopped_at_the_bound(server: FakeVLLM) -> None:
    bomb = zlib.compress(bytes(256 * 2**20), wbits=31)
    connection = ServerConnection(server.base_url, limits=HttpLimits(response_bytes=2**20))
    server.script[GENERATE] += [answer(body=bomb, headers={"content-encoding": "gzip"})]
    tracemalloc.start()
    try:
        with pytest.raises(MalformedResultError, match="response_bytes"):
            await generate(connection)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20
    await connection.close()


async def test_what_is_no_http_is_said_once_and_not_tried_again(
    server: FakeVLLM, connection: ServerConnection, clock: Clock
) -> None:
    server.script[GENERATE] += [raw(b"SSH-2.0-OpenSSH_9.7\r\n\r\n")]
    with pytest.raises(MalformedResultError, match="HTTP"):
        await generate(connection)
    assert len(server.requests) == 1
    assert clock.slept == []


async def test_an_endless_head_is_no_answer(server: FakeVLLM, connection: ServerConnection) -> None:
    server.script[GENERATE] += [raw(b"HTTP/1.1 200 OK\r\nx-long: " + b"x" * 200_000)]
    with pytest.raises(MalformedResultError):
        await generate(connection)


async def test_broken_json_names_the_request_and_quotes_the_body(
    server: FakeVLLM, connection: ServerConnection
) -> None:
    server.script[GENERATE] += [malformed()]
    reply = await generate(connection, name="episode-7")
    with pytest.raises(MalformedResultError, match=r"episode-7.*generate-tokens-r"):
        reply.json()


@pytest.mark.parametrize("body", [b"", b"\xff\xfe\xfd", b"[" * 100_000, b"{" + b'"a":{' * 50_000])
def test_json_that_cannot_be_read_is_one_kind_of_error(body: bytes) -> None:
    with pytest.raises(MalformedResultError):
        HttpResponse(200, {}, body).json()


async def test_a_redirect_is_refused_and_its_credentials_are_not_shown(
    server: FakeVLLM, connection: ServerConnection
) -> None:
    place = "http://user:hidden@elsewhere:9/v2/path?token=hidden#hidden"
    server.script[GENERATE] += [answer({}, status=307, headers={"location": place})]
    with pytest.raises(ServerError, match="http://elsewhere:9/v2/path") as caught:
        await generate(connection)
    assert caught.value.status == 307
    assert "hidden" not in str(caught.value)
    assert len(server.requests) == 1


# Trying again.


@pytest.mark.parametrize(
    ("step", "unanswered"),
    [
        (reset(), True),
        (reset(after_head=True), False),
        (half(), False),
        (raw(b"HTTP/1.1 20"), True),
        (busy(503), False),
        (busy(429), False),
    ],
    ids=["reset", "reset after the head", "half an answer", "half a status line", "503", "429"],
)
async def test_lost_connections_and_busy_servers_are_tried_again(
    server: FakeVLLM, connection: ServerConnection, clock: Clock, step: fake_server.Step, unanswered: bool
) -> None:
    server.script[GENERATE] += [step, step]
    reply = await generate(connection)
    assert reply.json()["choices"][0]["token_ids"] == fake_server.completion_of([1, 2, 3], 4)
    assert len(server.requests) == 3
    assert [seen.body for seen in server.requests] == [b"".join(GENERATION)] * 3
    assert clock.slept[-1] == 0.5
    assert len(clock.slept) == (1 if unanswered else 2)  # the first connection without a response costs no wait


async def test_backoff_doubles_up_to_its_bound_and_then_the_reply_is_given_back(server: FakeVLLM, clock: Clock) -> None:
    limits = HttpLimits(retries=5, backoff_seconds=1, longest_backoff_seconds=6)
    connection = ServerConnection(server.base_url, limits=limits)
    server.script[GENERATE] += [busy(503)] * 6
    reply = await generate(connection)
    assert reply.status == 503
    assert reply.json()["error"]["message"] == "busy"
    assert clock.slept == [1, 2, 4, 6, 6]
    assert len(server.requests) == 6
    await connection.close()


async def test_retry_after_is_honoured_in_both_forms_and_bounded(
    server: FakeVLLM, connection: ServerConnection, clock: Clock
) -> None:
    clock.chance = 0.5
    server.script[GENERATE] += [
        busy(429, retry_after="2"),
        busy(503, retry_after="Tue, 14 Nov 2023 22:13:27 GMT"),  # 7 s after the clock's 1,700,000,000
        busy(503, retry_after="86400"),
        busy(503, retry_after="soon"),
    ]
    assert (await generate(connection)).status == 200
    jitter = 0.5 * 0.25
    assert clock.slept == [2 + jitter, 7 + jitter, 15 + jitter, 0.5 * 2.0]


async def test_a_refused_connection_is_tried_again_and_names_the_server(clock: Clock) -> None:
    async with FakeVLLM() as gone:
        url = gone.base_url
    losses: list[int] = []
    connection = ServerConnection(url, limits=HttpLimits(retries=2), on_lost=lambda: losses.append(1))
    with pytest.raises(ServerUnreachableError, match=f"{url}/version failed 3 times") as caught:
        await connection.request("GET", "/version", name="probe")
    assert caught.value.request_id == "probe"
    assert clock.slept == [0.25, 0.5]
    assert len(losses) == 3
    await connection.close()


async def test_a_server_that_comes_back_is_found_again(clock: Clock) -> None:
    server = FakeVLLM()
    await server.start()
    losses: list[int] = []
    connection = ServerConnection(server.base_url, on_lost=lambda: losses.append(1))
    await asyncio.gather(*(generate(connection) for _ in range(8)))
    await server.stop()
    clock.sleep = lambda seconds: server.start()  # type: ignore[method-assign, assignment]
    assert (await generate(connection)).status == 200
    assert losses
    await connection.close()
    await server.stop()


async def test_what_must_not_happen_twice_is_tried_once_on_a_new_connection(
    server: FakeVLLM, connection: ServerConnection, clock: Clock
) -> None:
    await generate(connection)
    server.script[GENERATE] += [busy(503), reset()]
    assert (await generate(connection, retry=False)).status == 503
    with pytest.raises(ServerUnreachableError, match="failed once"):
        await generate(connection, retry=False)
    assert [seen.connection for seen in server.requests] == [1, 2, 3]
    assert clock.slept == []


async def test_a_kept_connection_that_the_server_closed_costs_no_wait(
    server: FakeVLLM, connection: ServerConnection, clock: Clock
) -> None:
    server.script[GENERATE] += [hang_up()] * 5
    for _ in range(6):
        assert (await generate(connection)).status == 200
    assert clock.slept == []
    assert len(server.requests) == 6


async def test_a_kept_connection_that_the_server_closed_does_not_count_as_a_try(server: FakeVLLM, clock: Clock) -> None:
    connection = ServerConnection(server.base_url, limits=HttpLimits(retries=1))
    server.script[GENERATE] += [answer(), reset(), reset(), answer(), *[reset()] * 3]
    await generate(connection)
    assert (await generate(connection)).status == 200  # a kept one was lost, a new one too, the retry came through
    assert len(clock.slept) == 1
    with pytest.raises(ServerUnreachableError, match="failed 3 times"):
        await generate(connection)
    assert len(clock.slept) == 2
    await connection.close()


async def test_on_lost_is_called_for_broken_connections_only(server: FakeVLLM, clock: Clock) -> None:
    losses: list[int] = []
    connection = ServerConnection(server.base_url, on_lost=lambda: losses.append(1))
    server.script[GENERATE] += [busy(503), answer({}, status=500)]
    await generate(connection)
    assert losses == []
    server.script[GENERATE] += [half()]
    await generate(connection)
    assert losses == [1]
    await connection.close()


async def test_no_wait_is_begun_that_the_deadline_would_cut(
    server: FakeVLLM, connection: ServerConnection, clock: Clock
) -> None:
    server.script[GENERATE] += [busy(503, retry_after="9"), reset(), reset()]
    assert (await generate(connection, seconds=5)).status == 503
    with pytest.raises(ServerUnreachableError):
        await generate(connection, seconds=0.2)
    assert clock.slept == []


async def test_a_spell_of_trouble_is_one_warning_and_its_end_one_line(
    server: FakeVLLM, connection: ServerConnection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "rollouts.engines.vllm")
    server.script[GENERATE] += [busy(503)] * 12
    await asyncio.gather(*(generate(connection) for _ in range(8)))
    levels = [record.levelname for record in caplog.records]
    assert levels.count("WARNING") == 1
    assert levels.count("DEBUG") == 11
    assert levels[-1] == "INFO"


@given(attempt=st.integers(1, 10_000), demanded=st.none() | st.floats(0, 1e9))
def test_a_retry_delay_is_never_negative_and_never_above_its_bound(attempt: int, demanded: float | None) -> None:
    delay = retry_delay(attempt, HttpLimits(), None if demanded is None else str(demanded))
    assert 0 <= delay <= 15.25
    if demanded is not None:
        assert delay >= min(demanded, 15)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("1.5", 1.5),
        ("Tue, 14 Nov 2023 22:13:20 GMT", 0.0),
        ("Tue, 14 Nov 2023 22:14:20 GMT", 60.0),
        ("Tue, 14 Nov 2023 21:00:00 GMT", 0.0),
        ("Tuesday, 14-Nov-23 22:14:20 GMT", 60.0),
    ],
)
def test_retry_after_is_read_as_a_number_or_a_date(clock: Clock, value: str, seconds: float) -> None:
    clock.chance = 0.0
    assert retry_delay(3, HttpLimits(longest_backoff_seconds=1000), value) == seconds


@pytest.mark.parametrize("value", [None, "-3", "nan", "inf", "later", "Tue, 99 Nov 2023 22:14:20 GMT"])
def test_a_retry_after_without_a_meaning_is_ignored(clock: Clock, value: str | None) -> None:
    assert retry_delay(3, HttpLimits(), value) == 1.0


@given(st.text())
def test_any_retry_after_gives_a_delay(value: str) -> None:
    assert 0 <= retry_delay(1, HttpLimits(), value) <= 15.25


# Deadlines, cancellation, slots.


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


async def test_silence_between_two_pieces_has_its_own_deadline(server: FakeVLLM, clock: Clock) -> None:
    connection = ServerConnection(server.base_url, limits=HttpLimits(read_seconds=0.05))
    server.script[GENERATE] += [raw(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", close=False)]
    with pytest.raises(ServerTimeoutError, match="read_seconds while reading the response"):
        await generate(connection)
    await server.requests[0].disconnected.wait()
    assert clock.slept == []
    await connection.close()


async def test_a_connection_attempt_without_an_end_is_given_up_and_tried_again(clock: Clock) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:  # accepts nothing
        address = listening.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:  # more than the backlog holds, so that further connections are not answered
            each.setblocking(False)
            each.connect_ex(address)
        limits = HttpLimits(connect_seconds=0.05, retries=1)
        connection = ServerConnection(f"http://127.0.0.1:{address[1]}", limits=limits)
        with pytest.raises(ServerUnreachableError, match=r"failed 2 times.*timeout"):
            await generate(connection)
        assert len(clock.slept) == 1
        for each in waiting:
            each.close()
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


async def test_a_cancelled_wait_for_a_slot_leaves_the_slot_to_others(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url, limits=HttpLimits(concurrency=1))
    arrived, release = asyncio.Event(), asyncio.Event()
    server.script[GENERATE] += [hold(release, arrived)]
    running = asyncio.create_task(generate(connection))
    await arrived.wait()
    waiting = [asyncio.create_task(generate(connection)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    release.set()
    assert (await running).status == 200
    assert [reply.status for reply in await asyncio.gather(*waiting[1:])] == [200, 200]
    await connection.close()


async def test_no_more_requests_are_in_flight_than_there_are_slots(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url, limits=HttpLimits(concurrency=2))
    release = asyncio.Event()
    server.script[GENERATE] += [hold(release)] * 5
    running = [asyncio.create_task(generate(connection)) for _ in range(5)]
    await server.requests_seen(2, GENERATE)
    # A control call has slots of its own; had a third generation been let in, it would have come before this.
    await connection.request("GET", "/version", name="v", slot=False)
    assert len(server.generations) == 2
    release.set()
    await asyncio.gather(*running)
    assert len(server.generations) == 5
    assert server.connections == 3
    await connection.close()


async def test_closing_ends_what_runs_waits_and_sleeps(server: FakeVLLM, clock: Clock) -> None:
    asleep = asyncio.Event()

    async def sleep_for_ever(seconds: float) -> None:
        asleep.set()
        await asyncio.Event().wait()

    clock.sleep = sleep_for_ever  # type: ignore[method-assign]
    connection = ServerConnection(server.base_url, limits=HttpLimits(concurrency=2))
    arrived = asyncio.Event()
    server.script[GENERATE] += [hold(asyncio.Event(), arrived), busy(503)]
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


# Keeping connections.


async def test_connections_are_kept_and_used_again(server: FakeVLLM, connection: ServerConnection) -> None:
    for _ in range(4):
        await generate(connection)
    assert [seen.connection for seen in server.requests] == [1, 1, 1, 1]


async def test_without_a_keep_alive_time_every_request_has_its_own_connection(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url, limits=HttpLimits(keepalive_seconds=0))
    for _ in range(2):
        await generate(connection)
    assert [seen.connection for seen in server.requests] == [1, 2]
    await connection.close()


async def test_idle_connections_are_closed_without_waiting_for_another_request(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url, limits=HttpLimits(keepalive_seconds=0.02))
    await asyncio.gather(*(generate(connection) for _ in range(5)))
    for seen in server.requests:
        await seen.disconnected.wait()
    await connection.close()


async def test_the_keep_alive_default_is_below_that_of_the_server() -> None:
    assert HttpLimits().keepalive_seconds < 5


async def test_closing_closes_idle_connections(server: FakeVLLM, connection: ServerConnection) -> None:
    await asyncio.gather(*(generate(connection) for _ in range(5)))
    await connection.close()
    for seen in server.requests:
        await seen.disconnected.wait()


# Event loops and threads.


def requests_on_a_loop_of_their_own(connection: ServerConnection, count: int) -> list[int]:
    async def run() -> list[int]:
        replies = await asyncio.gather(*(generate(connection, name=f"r{number}") for number in range(count)))
        return [reply.status for reply in replies]

    return asyncio.run(run())


async def test_several_loops_in_several_threads_share_one_connection_object(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url, limits=HttpLimits(concurrency=4))
    threads = [asyncio.to_thread(requests_on_a_loop_of_their_own, connection, 20) for _ in range(4)]
    assert await asyncio.gather(*threads) == [[200] * 20] * 4
    assert (await generate(connection)).status == 200
    await connection.close()
    for seen in server.requests:
        await seen.disconnected.wait()


async def test_what_a_loop_held_is_closed_when_the_loop_ends(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url)
    for _ in range(3):
        await asyncio.to_thread(requests_on_a_loop_of_their_own, connection, 3)
    for seen in server.requests:
        await seen.disconnected.wait()


async def test_a_loop_that_was_dropped_without_being_wound_up_is_forgotten(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url)

    def careless() -> None:
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(generate(connection)).status == 200
        loop.close()

    await asyncio.to_thread(careless)
    assert (await generate(connection)).status == 200
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the loop that nobody wound up
        gc.collect()
    await server.requests[0].disconnected.wait()
    await connection.close()


async def test_closing_reaches_the_loops_of_other_threads(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url)
    arrived = asyncio.Event()
    server.script[GENERATE] += [hold(asyncio.Event(), arrived)]
    elsewhere = asyncio.create_task(asyncio.to_thread(requests_on_a_loop_of_their_own, connection, 1))
    await arrived.wait()
    await connection.close()
    with pytest.raises(EngineClosedError):
        await elsewhere
    await server.requests[0].disconnected.wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_leaves_the_connections_of_its_parent_alone(tmp_path: Path) -> None:
    script = tmp_path / "forking.py"
    script.write_text(
        """
import asyncio, os, sys
from fake_server import GENERATE, FakeVLLM
from rollouts.engines.vllm.http.connection import ServerConnection

async def in_child(connection):
    assert (await connection.request("GET", "/version", name="child")).status == 200
    await connection.close()

async def main():
    async with FakeVLLM() as server:
        connection = ServerConnection(server.base_url)
        await connection.request("GET", "/version", name="before")
        if (child := os.fork()) == 0:
            asyncio._set_running_loop(None)
            asyncio.run(in_child(connection))
            os._exit(0)
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            await asyncio.sleep(0.01)
        await connection.request("GET", "/version", name="after")
        assert [seen.connection for seen in server.requests] == [1, 2, 1], server.requests
        await connection.close()

asyncio.run(main())
print("done")
"""
    )
    paths = os.pathsep.join([str(Path(fake_server.__file__).parent), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == "done\n", result.stderr


# Addresses and secrets.


@pytest.mark.parametrize(
    ("given_url", "kept"),
    [
        ("http://host:8000", "http://host:8000"),
        ("http://host:8000/", "http://host:8000"),
        ("http://host", "http://host"),
        ("https://host:443/gpu-3/", "https://host/gpu-3"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://me:pass@host:8000", "http://host:8000"),
    ],
)
def test_the_address_is_kept_without_credentials_and_trailing_slash(given_url: str, kept: str) -> None:
    assert ServerConnection(given_url).base_url == kept


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8000",
        "ftp://me:hidden@host",
        "http://",
        "http://me:hidden@:8000",
        "http://host:port",
        "http://host:99999",
        "ftp://me:hid@hidden@host",
        "http://host/?key=hidden",
        "http://host/#hidden",
        "http://host:8000/v1",
        "http://hôst:8000",
        "http://ho st",
        "http://[::1",
    ],
)
def test_an_address_that_cannot_be_right_is_refused_without_showing_secrets(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        ServerConnection(url)
    assert "hidden" not in str(caught.value)
    assert caught.value.__cause__ is None


async def test_a_path_prefix_is_put_before_every_route(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url + "/gpu-3/")
    await connection.request("GET", "/version", name="v")
    assert server.requests[0].path == "/gpu-3/version"
    await connection.close()


async def test_the_key_goes_into_the_authorization_header_and_nowhere_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with FakeVLLM(api_key=KEY) as server:
        connection = ServerConnection(server.base_url, api_key=KEY, limits=HttpLimits(retries=1, backoff_seconds=0))
        assert (await generate(connection)).status == 200
        assert {name for name, value in server.requests[0].headers.items() if KEY in value} == {"authorization"}
        echo = answer({"error": {"message": f"bad header Authorization: Bearer {KEY}"}}, status=401)
        server.script[GENERATE] += [echo, reset(), reset(), reset(), raw(b"nonsense\r\n\r\n"), hold(asyncio.Event())]
        said = [repr(connection), str(response_error("r", await generate(connection), "generating"))]
        for expected in (ServerUnreachableError, MalformedResultError, ServerTimeoutError):
            with pytest.raises(expected) as caught:
                await generate(connection, seconds=0.05)
            said += [str(caught.value), repr(caught.value)]
        await connection.close()
    assert KEY not in "\n".join(said + [record.getMessage() for record in caplog.records])


async def test_credentials_in_the_address_become_a_header_and_are_shown_nowhere(
    server: FakeVLLM, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = server.base_url.replace("://", "://me:p%40ss-hidden@")
    connection = ServerConnection(url, limits=HttpLimits(retries=1))
    server.script[GENERATE] += [reset()]
    await generate(connection)
    assert server.requests[-1].headers["authorization"] == "Basic bWU6cEBzcy1oaWRkZW4="
    server.script[GENERATE] += [reset()] * 3
    with pytest.raises(ServerUnreachableError) as caught:
        await generate(connection)
    assert "hidden" not in repr(connection) + str(caught.value) + caplog.text
    await connection.close()


def test_two_kinds_of_credentials_and_keys_that_no_header_can_carry_are_refused() -> None:
    with pytest.raises(ValueError, match="one of them"):
        ServerConnection("http://me:hidden@host", api_key=KEY)
    for key in ("with space", "line\n", "käse"):
        with pytest.raises(ValueError, match="api_key") as caught:
            ServerConnection("http://host", api_key=key)
        assert key not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"concurrency": 2.5},
        {"retries": -1},
        {"response_bytes": 0},
        {"connect_seconds": 0},
        {"read_seconds": -1},
        {"total_seconds": float("nan")},
        {"total_seconds": float("inf")},
        {"keepalive_seconds": -0.1},
        {"backoff_seconds": float("inf")},
        {"longest_backoff_seconds": float("nan")},
    ],
)
def test_limits_that_make_no_sense_are_refused_by_name(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        HttpLimits(**wrong)  # type: ignore[arg-type]


# Errors out of answers.


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            b'{"error":{"message":"The model `nope` does not exist.","type":"NotFoundError","param":"model"}}',
            "NotFoundError: The model `nope` does not exist.",
        ),
        (b'{"error":"Failed to pause generation"}', "Failed to pause generation"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[{"loc":["body","x"],"msg":"Field required"}]}', "body.x: Field required"),
        (b'{"object":"error","message":"old shape"}', "old shape"),
        (b"<html>502</html>", "<html>502</html>"),
        (b'["unexpected"]', '["unexpected"]'),
        (b'{"error":{}}', '{"error":{}}'),
        (b"", "(no body)"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"refused for http://me:hidden@host/x", "refused for http://host/x"),
        (b"refused for http://me:hid@den@host/x", "refused for http://host/x"),
    ],
)
def test_what_a_server_says_about_an_error_is_dug_out(body: bytes, said: str) -> None:
    error = response_error("r1", HttpResponse(404, {}, body), "asking for models")
    assert (error.request_id, error.status, error.body) == ("r1", 404, said)
    assert str(error) == f"request r1: asking for models: HTTP 404 {said}"


@given(
    st.binary()
    | st.recursive(
        st.none() | st.text() | st.integers(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["error", "detail", "message", "type", "loc", "msg"]), inner)
        ),
    ).map(lambda content: json.dumps(content).encode())
)
def test_any_body_makes_an_error_of_bounded_length(body: bytes) -> None:
    assert len(str(response_error("r", HttpResponse(500, {}, body), "doing"))) < 2200


def test_a_long_body_is_quoted_from_its_beginning_only() -> None:
    error = response_error("r", HttpResponse(500, {}, b"x" * 5_000_000), "doing")
    assert len(str(error)) < 2200
    assert "5000000 bytes" in error.body


# TLS.


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A key and a certificate for 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    both = tmp_path / "both.pem"
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=fake"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    both.write_bytes(key.read_bytes() + cert.read_bytes())
    return both


async def test_https_works_with_a_trusted_certificate_only_and_a_bad_one_is_not_tried_again(
    certificate: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    async with FakeVLLM(tls=context) as server:
        assert server.base_url.startswith("https://")
        distrustful = ServerConnection(server.base_url)
        with pytest.raises(ServerUnreachableError, match="SSL_CERT_FILE"):
            await generate(distrustful)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        trusting = ServerConnection(server.base_url)
        for _ in range(2):
            assert (await generate(trusting)).status == 200
        assert server.requests[0].connection == server.requests[1].connection
        assert clock.slept == []
        await distrustful.close()
        await trusting.close()
