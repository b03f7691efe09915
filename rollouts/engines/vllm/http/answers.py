"""An answer while it arrives: decompressed, bounded, its errors typed; whole or as a stream of events."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

import h11

from rollouts.engines.vllm.http.events import EventDecoder, EventTooLongError
from rollouts.engines.vllm.http.http1 import Body, Http1Connection
from rollouts.engines.vllm.http.response import HttpResponse, response_error
from rollouts.engines.vllm.http.server_address import redacted
from rollouts.errors import (
    EngineError,
    MalformedResultError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
)

# After [DONE] only the end of the encoding is left; a server that goes on sending is not worth its connection.
_AFTER_DONE_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class Call:
    """One request on its way, through all of its attempts."""

    name: str
    method: str
    head: bytes
    body: Body
    seconds: float
    retries: int
    slot: bool
    reuse: bool
    where: str
    stage: str = "waiting for a free slot"
    attempt: int = 0
    stale: bool = False  # the last attempt met a kept connection that the server had let go of,
    excused: bool = False  # which happens once a call without counting
    ends: float = 0.0


class Answer:
    """An answer on its connection: decompressed, bounded, its errors typed."""

    def __init__(
        self,
        call: Call,
        connection: Http1Connection,
        head: h11.Response,
        *,
        response_bytes: int,
        give_back: Callable[[Http1Connection], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.call = call
        self.status = head.status_code
        self.headers = _header_mapping(head)
        self.loaded = b""
        self._is_loaded = False
        self.lost = on_lost
        self._connection: Http1Connection | None = connection
        self._give_back = give_back
        self._bound = self.left = response_bytes
        self._gzip: zlib._Decompress | None = None
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("gzip", "x-gzip"):
            self._gzip = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        elif encoding not in ("", "identity"):
            raise MalformedResultError(call.name, f"{call.where}: the answer's encoding is {encoding!r}, not gzip")

    async def load(self) -> bytes:
        """The whole body."""
        if not self._is_loaded:
            pieces = []
            while piece := await self.piece():
                pieces.append(piece)
            self.loaded = b"".join(pieces)
            self._is_loaded = True
        return self.loaded

    async def piece(self) -> bytes:
        """The next piece of the body; empty at its end."""
        while self._connection is not None:
            with typed(self.call):
                piece = await self._connection.piece()
            if self._gzip is not None:
                decoded = self._decompress(piece)
                if piece and not decoded:
                    continue
                piece = decoded
            self.left -= len(piece)
            if self.left < 0:
                raise MalformedResultError(
                    self.call.name,
                    f"{self.call.where}: the answer is larger than response_bytes, {self._bound}. Raise it if such "
                    "answers are expected",
                )
            return piece
        return b""

    async def wind_down(self) -> None:
        """Read what follows [DONE], so that the connection can be kept; not for long."""
        try:
            async with asyncio.timeout(_AFTER_DONE_SECONDS):
                await self.piece()
        except (TimeoutError, ConnectionError, EngineError):
            pass

    def release(self) -> None:
        """Give the connection back, or close it if the answer has not been read to its end."""
        if self._connection is not None:
            self._give_back(self._connection)
            self._connection = None

    def _decompress(self, piece: bytes) -> bytes:
        assert self._gzip is not None
        try:
            decoded = self._gzip.decompress(piece, self.left + 1)
        except zlib.error as error:
            raise MalformedResultError(self.call.name, f"{self.call.where}: broken gzip: {error}") from None
        if not piece and not self._gzip.eof:
            raise MalformedResultError(self.call.name, f"{self.call.where}: the gzip data end too early")
        return decoded


class EventStream:
    """An answer of server-sent events: iterate for the `data` of each (bytes), up to `[DONE]`.

    Iterating raises `MalformedResultError` if the stream ends without `[DONE]`, `ServerUnreachableError` if the
    connection breaks, and the `ServerError` that an error status stands for. Header names are in lower case.
    """

    def __init__(self, answer: Answer) -> None:
        self.status = answer.status
        self.headers: Mapping[str, str] = answer.headers
        self._answer = answer
        self._decoder = EventDecoder(answer.left)
        self._events: deque[bytes] = deque()
        self.done = False

    async def body(self) -> bytes:
        """The whole body, undecoded: for an error status."""
        return await self._read(self._answer.load())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        call = self._answer.call
        if self.status >= 400:
            raise response_error(call.name, HttpResponse(self.status, self.headers, await self.body()), call.where)
        while not self._events and not self.done:
            piece = await self._read(self._answer.piece())
            if not piece:
                raise MalformedResultError(call.name, f"{call.where}: the stream ended without [DONE]")
            try:
                self._events.extend(self._decoder.feed(piece))
            except EventTooLongError as error:
                raise MalformedResultError(call.name, f"{call.where}: {error}") from None
        if self.done or (event := self._events.popleft()) == b"[DONE]":
            self.done = True
            self._events.clear()
            raise StopAsyncIteration
        return event

    async def _read(self, reading: Awaitable[bytes]) -> bytes:
        try:
            return await reading
        except ConnectionError as error:
            self._answer.lost()
            raise unreachable(self._answer.call, redacted(str(error))) from error


@contextmanager
def typed(call: Call) -> Iterator[None]:
    """The errors of an exchange, but for a lost connection, which may be tried again."""
    try:
        yield
    except h11.RemoteProtocolError as error:
        raise MalformedResultError(call.name, f"{call.where}: what answers does not speak HTTP: {error}") from error
    except TimeoutError:
        raise ServerTimeoutError(
            call.name,
            f"{call.where}: nothing came for longer than read_seconds while {call.stage} (attempt {call.attempt})",
        ) from None


def unreachable(call: Call, trouble: str) -> ServerUnreachableError:
    times = "once" if call.attempt == 1 else f"{call.attempt} times"
    return ServerUnreachableError(
        call.name, f"{call.where} failed {times}, at last with: {trouble}. Is the server running, and at this address?"
    )


def redirected(call: Call, answer: Answer) -> ServerError:
    try:
        parts = urlsplit(answer.headers.get("location", ""))
        place = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    except ValueError:
        place = ""
    return ServerError(
        call.name,
        f"{call.where} was redirected, which is not followed; give the server's own address as base_url",
        status=answer.status,
        body=f"to {place or 'nowhere'}",
    )


def _header_mapping(head: h11.Response) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in head.headers:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
