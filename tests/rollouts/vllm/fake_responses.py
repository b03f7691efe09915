"""Scripted responses of `FakeVLLM`: delays, faults and edits that a real server cannot be made to produce."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Mapping

from fake_generation import first_of
from fake_http import Channel, Json, Response, Seen, encoded_response, json_response
from fake_server import FakeVLLM, Step


def answer(
    content: Json = None,
    *,
    status: int = 200,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    compress: bool = False,
) -> Step:
    """Exactly this answer: JSON content or bytes; without either, what vLLM would have said."""

    async def step(server: FakeVLLM, seen: Seen, channel: Channel) -> Response | None:
        if body is not None:
            response = Response(status, body, {"content-type": "application/json"})
        elif content is not None:
            response = json_response(content, status)
        else:
            response = await server.respond(seen)
        if compress:
            response.body = gzip.compress(response.body)
            response.headers["content-encoding"] = "gzip"
        response.headers |= headers or {}
        return response

    return step


def busy(status: int = 503, *, retry_after: str | None = None) -> Step:
    """429 or 503, as a gateway or a paused server says it."""
    headers = {} if retry_after is None else {"retry-after": retry_after}
    return answer(
        {"error": {"message": "busy", "type": "Busy", "param": None, "code": status}}, status=status, headers=headers
    )


def hold(until: asyncio.Event, arrived: asyncio.Event | None = None, *, tokens_before: int = 1) -> Step:
    """Answer as usual, but only after `until`; `arrived` is set when the request has come.

    A held generation that is aborted in the meantime (by id, or by a pause) answers at once, with finish reason abort
    and its first `tokens_before` tokens.
    """

    async def step(server: FakeVLLM, seen: Seen, channel: Channel) -> Response | None:
        if arrived is not None:
            arrived.set()
        await first_of(until, seen.aborted)
        if seen.aborted.is_set():
            return server.generated(seen, cut=tokens_before)
        return await server.respond(seen)

    return step


def change(edit: Callable[[Json], Json | None]) -> Step:
    """The usual answer after `edit`, which changes the decoded JSON in place or returns another."""

    async def step(server: FakeVLLM, seen: Seen, channel: Channel) -> Response | None:
        response = await server.respond(seen)
        if response.chunks is not None:
            response.chunks = [_edit_event(chunk, edit) for chunk in response.chunks]
            return response
        content = response.json
        edited = edit(content)
        response.body = json.dumps(content if edited is None else edited).encode()
        return response

    return step


def half(fraction: float = 0.5) -> Step:
    """The usual answer with all of its Content-Length, of which only a part is sent before the connection ends."""

    async def step(server: FakeVLLM, seen: Seen, channel: Channel) -> Response | None:
        response = await server.respond(seen)
        sent = encoded_response(response)
        channel.write(sent[: len(sent) - len(response.body) + int(len(response.body) * fraction)])
        channel.close()
        return None

    return step


def reset(*, after_head: bool = False) -> Step:
    """The connection is reset, before anything was answered or after the head of the answer."""

    async def step(server: FakeVLLM, seen: Seen, channel: Channel) -> Response | None:
        if after_head:
            channel.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\ncontent-type: application/json\r\n\r\n{")
            channel.close()
        else:
            channel.reset()
        return None

    return step


def raw(data: bytes, *, close: bool = True) -> Step:
    """These bytes, HTTP or not."""

    async def step(server: FakeVLLM, seen: Seen, channel: Channel) -> Response | None:
        channel.write(data)
        if close:
            channel.close()
        return None

    return step


def malformed() -> Step:
    """HTTP 200 with JSON that ends too early."""

    async def step(server: FakeVLLM, seen: Seen, channel: Channel) -> Response | None:
        response = await server.respond(seen)
        response.body = response.body[: len(response.body) // 2]
        return response

    return step


def stream_pieces(*pieces: bytes | asyncio.Event, status: int = 200) -> Step:
    """A stream of these pieces; an event in between is waited for."""

    async def step(server: FakeVLLM, seen: Seen, channel: Channel) -> Response | None:
        return Response(status, headers={"content-type": "text/event-stream; charset=utf-8"}, chunks=list(pieces))

    return step


def without_logprobs(content: Json) -> None:
    for choice in content["choices"]:
        choice["logprobs"] = None


def one_logprob_short(content: Json) -> None:
    for choice in content["choices"]:
        choice["logprobs"]["content"].pop()


def clamped_logprob(content: Json) -> None:
    """What vLLM writes for a log-probability of minus infinity or NaN."""
    for choice in content["choices"]:
        choice["logprobs"]["content"][-1]["logprob"] = -9999.0


def one_choice_short(content: Json) -> None:
    content["choices"].pop()


def finished_by(reason: str) -> Callable[[Json], None]:
    def edit(content: Json) -> None:
        for choice in content["choices"]:
            choice["finish_reason"] = reason

    return edit


def _edit_event(chunk: bytes | asyncio.Event, edit: Callable[[Json], Json | None]) -> bytes | asyncio.Event:
    if isinstance(chunk, asyncio.Event) or b"[DONE]" in chunk:
        return chunk
    content = json.loads(chunk.removeprefix(b"data: "))
    edited = edit(content)
    return b"data: " + json.dumps(content if edited is None else edited).encode() + b"\n\n"
