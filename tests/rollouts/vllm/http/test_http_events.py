"""Server-sent events: the decoder by itself, and streams over a connection."""

import asyncio
import itertools
import json

import pytest
from fake_http import error_response, event_stream
from fake_responses import raw, reset
from fake_server import GENERATE, FakeVLLM, Step
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engines.http.connection import HttpLimits, ServerConnection
from rollouts.engines.http.events import EventDecoder
from rollouts.errors import (
    MalformedResultError,
    ServerUnreachableError,
)

pytestmark = [pytest.mark.filterwarnings("error::ResourceWarning"), pytest.mark.usefixtures("nothing_leaks")]

BODY = [
    json.dumps(
        {"request_id": "s", "token_ids": [1, 2, 3], "stream": True, "sampling_params": {"max_tokens": 4, "logprobs": 0}}
    ).encode()
]


# The decoder.


def decoded(*pieces: bytes) -> list[bytes]:
    decoder = EventDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)]


# Data without line ends; written as lines, which is what a `data` field is made of.
LINES = st.lists(
    st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8), min_size=1, max_size=3
)
NOISE = st.sampled_from([": a comment", "event: message", "id: 7", "retry: 10", "unknown: field", ":"])


@given(
    events=st.lists(st.tuples(LINES, st.lists(NOISE, max_size=2)), max_size=5),
    ends=st.lists(st.sampled_from(["\n", "\r\n"]), min_size=1, max_size=7),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    blanks=st.integers(0, 2),
)
def test_events_come_out_whatever_the_line_ends_and_wherever_the_bytes_are_cut(
    events: list[tuple[list[str], list[str]]], ends: list[str], cuts: list[int], blanks: int
) -> None:
    lines = [""] * blanks
    for data, noise in events:
        lines += [*noise, *(f"data: {line}" for line in data), *[""] * (1 + blanks)]
    text = "".join(line + end for line, end in zip(lines, itertools.cycle(ends), strict=False)).encode()
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:stop] for start, stop in itertools.pairwise(places)]
    assert decoded(*pieces) == ["\n".join(data).encode() for data, _ in events]


# Streams.


async def collect(connection: ServerConnection, **options: float) -> list[bytes]:
    async with connection.stream(GENERATE, name="s", body=BODY, **options) as events:
        return [event async for event in events]


async def test_a_stream_without_its_end_is_malformed(server: FakeVLLM, connection: ServerConnection) -> None:
    server.script[GENERATE] += [event_stream(b"data: 1\n\n"), event_stream(b"data: 1\n\ndata: [DONE]")]
    for _ in range(2):
        with pytest.raises(MalformedResultError, match=r"\[DONE\]"):
            await collect(connection)


@pytest.mark.parametrize(
    "text",
    [b"data: " + b"x" * 3000, b"x" * 3000, b"data: 123456789\n" * 200, b"data: 12345678\n\n" * 300],
    ids=["a line of data", "a line", "an event", "all events"],
)
async def test_a_stream_is_bounded(server: FakeVLLM, text: bytes) -> None:
    connection = ServerConnection(server.base_url, limits=HttpLimits(response_bytes=2000))
    server.script[GENERATE] += [event_stream(text, asyncio.Event())]
    with pytest.raises(MalformedResultError, match="2000"):
        await collect(connection)
    await connection.close()


@pytest.mark.parametrize(
    "step",
    [reset(), raw(b"HTTP/1.1 200 OK\r\ntransfer-enc"), error_response(429)],
    ids=["reset", "half a head", "429"],
)
async def test_a_stream_is_tried_again_until_its_head_has_arrived(
    server: FakeVLLM, connection: ServerConnection, step: Step
) -> None:
    server.script[GENERATE] += [step, step]
    assert len(await collect(connection)) == 2
    assert len(server.requests) == 3


async def test_a_stream_that_breaks_is_not_begun_again_behind_the_callers_back(
    server: FakeVLLM, connection: ServerConnection
) -> None:
    broken = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n"
    server.script[GENERATE] += [raw(broken)]
    seen = []

    async def read() -> None:
        async with connection.stream(GENERATE, name="s", body=BODY) as events:
            async for event in events:
                seen.append(event)  # noqa: PERF401 what came before the break counts

    with pytest.raises(ServerUnreachableError):
        await read()
    assert seen == [b"1"]
    assert len(server.requests) == 1
