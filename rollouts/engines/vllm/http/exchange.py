"""One request and its response over aiohttp: the body in segments, bounded reading, typed errors."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.payload import Payload
from yarl import URL

from rollouts.engines.vllm.http.server_address import redacted
from rollouts.errors import EngineError, MalformedResultError, ServerTimeoutError, ServerUnreachableError

Body = Sequence[bytes | memoryview]

# Small bodies are joined, which makes one system call; larger segments are cut to pieces of this size, because the
# event loop copies what the socket does not accept at once. So there is never a copy of more than one piece.
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
        for segment in self._value:
            view = memoryview(segment).cast("B")
            for start in range(0, len(view), _PIECE_BYTES):
                await writer.write(view[start : start + _PIECE_BYTES])


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
            return MalformedResultError(self.name, f"{self.place}: not a valid HTTP response: {error.message}")
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
    try:
        async for piece in response.content.iter_any():
            remaining -= len(piece)
            if remaining < 0:
                raise MalformedResultError(
                    call.name,
                    f"{call.place}: the response is larger than response_bytes, {byte_limit}. Raise it if such "
                    "responses are expected",
                )
            yield piece
    except aiohttp.ClientError as error:
        raise call.error(error) from error
