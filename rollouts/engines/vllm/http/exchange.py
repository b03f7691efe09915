"""One request and its response over aiohttp: the body in segments, bounded reading, typed errors."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.payload import Payload
from yarl import URL

from rollouts.engines.vllm.http.server_address import redacted
from rollouts.errors import (
    EngineError,
    MalformedResultError,
    ServerTimeoutError,
    ServerUnreachableError,
)

Body = Sequence[bytes | memoryview]

# Small segments are joined up to this size and large ones cut to it: one system call each, and never a copy of more
# than one piece, whatever the size of the image.
_PIECE_BYTES = 256 * 1024


class SegmentsPayload(Payload):
    """A request body of JSON in segments, of known size. Large segments are sent without joining or copying them."""

    def __init__(self, segments: Body) -> None:
        super().__init__(segments, content_type="application/json")
        self._size: int = sum(len(part) if type(part) is bytes else memoryview(part).nbytes for part in segments)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        if self._size <= _PIECE_BYTES:
            await writer.write(b"".join(self._value))
            return
        for piece in _pieces(self._value):
            await writer.write(piece)


@dataclass(eq=False, slots=True)
class Call:
    """One request through all of its attempts. `place` is its method and URL, for errors."""

    name: str
    method: str
    url: URL
    place: str
    body: SegmentsPayload | None
    headers: Mapping[str, str] | None
    seconds: float
    retries: int
    stage: str = "waiting for a free slot"
    attempt: int = 0
    deadline: float = 0.0
    unanswered: bool = False  # whether the last attempt ended before the first byte of a response

    def error(self, error: aiohttp.ClientError) -> EngineError | ConnectionError:
        """The typed error for an aiohttp error; a `ConnectionError` if the request may be sent again."""
        self.unanswered = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError) and not isinstance(
            error, aiohttp.ClientConnectorError
        )
        if isinstance(error, aiohttp.ServerTimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
            return ServerTimeoutError(
                self.name,
                f"{self.place}: nothing arrived for longer than read_seconds while {self.stage} "
                f"(attempt {self.attempt})",
            )
        if isinstance(error, aiohttp.ClientSSLError) and not isinstance(error.os_error, ssl.SSLEOFError):
            return ServerUnreachableError(
                self.name,
                f"{self.place}: the TLS handshake failed ({error.os_error}). Check that the server speaks https, and "
                "that its certificate is signed by an authority that this machine trusts (SSL_CERT_FILE adds one)",
            )
        if isinstance(error, aiohttp.ClientResponseError):
            return MalformedResultError(
                self.name, f"{self.place}: the response cannot be read as HTTP: {error.message}"
            )
        if isinstance(error, aiohttp.ClientPayloadError) and isinstance(error.__cause__, ContentEncodingError):
            return MalformedResultError(self.name, f"{self.place}: the compressed body is invalid: {error.__cause__}")
        return ConnectionError(redacted(str(error)) or type(error).__name__)

    def unreachable(self, reason: ConnectionError) -> ServerUnreachableError:
        times = "once" if self.attempt == 1 else f"{self.attempt} times"
        return ServerUnreachableError(
            self.name,
            f"{self.place} failed {times}; the last error: {reason}. Is the server running, and at this address?",
        )


async def body_pieces(call: Call, response: aiohttp.ClientResponse, byte_limit: int) -> AsyncIterator[bytes]:
    """The decompressed body in pieces as it arrives. `byte_limit` bounds their sum."""
    remaining = byte_limit
    while True:
        try:
            piece = await response.content.readany()
        except aiohttp.ClientError as error:
            raise call.error(error) from error
        if not piece:
            return
        remaining -= len(piece)
        if remaining < 0:
            raise MalformedResultError(
                call.name,
                f"{call.place}: the response is larger than response_bytes, {byte_limit}. Raise it if such responses "
                "are expected",
            )
        yield piece


def _pieces(segments: Body) -> Iterator[bytes | memoryview]:
    """The segments in pieces of at most `_PIECE_BYTES`, small segments joined."""
    group: list[bytes | memoryview] = []
    size = 0
    for segment in segments:
        view = memoryview(segment).cast("B")
        if size + len(view) > _PIECE_BYTES and group:
            yield b"".join(group)
            group, size = [], 0
        if len(view) <= _PIECE_BYTES:
            group.append(view)
            size += len(view)
            continue
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]
    if group:
        yield b"".join(group)
