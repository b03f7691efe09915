"""One attempt to send a request over aiohttp: the body in segments, bounded reading, typed errors.

`connection.ServerConnection` decides whether there is another attempt.
"""

import json
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from yarl import URL

from rollouts.calls import in_tiny_pieces
from rollouts.engines.http.address import redacted
from rollouts.errors import (
    EngineError,
    InvalidRequestError,
    MalformedResultError,
    ServerError,
    ServerUnreachableError,
)

#: The views are of bytes, with one axis.
Body = Sequence[bytes | memoryview]
# Small bodies are joined, which makes one system call; larger segments are cut to pieces of this size,
# because the event loop copies what the socket does not accept at once. So there is never a copy of more than
# one piece.
_PIECE_BYTES = 256 * 1024
# Not the connection to a proxy, whose own address the text has, nor a handshake that ended.
_NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ClientConnectorDNSError)

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def open_object(name: str, fields: Mapping[str, Any]) -> bytes:
    """The JSON of an object without its last brace. Raises `InvalidRequestError` for request `name`."""
    try:
        return _ENCODER.encode(fields)[:-1].encode()
    except (TypeError, ValueError) as error:
        reason = f"a sampling option cannot be written as JSON ({error}): {fields['sampling_params']}"
        raise InvalidRequestError(name, reason) from error


class SegmentsPayload(Payload):
    """A request body of JSON in segments, of known size. Large segments are sent without joining or copying them."""

    def __init__(self, segments: Body) -> None:
        super().__init__(segments, content_type="application/json")
        self._size: int = sum(map(len, segments))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        if self._size <= _PIECE_BYTES:
            await writer.write(b"".join(self._value))
            return
        for segment in self._value:
            view = memoryview(segment)
            for start in range(0, len(view), _PIECE_BYTES):
                await writer.write(view[start : start + _PIECE_BYTES])


@dataclass(eq=False, slots=True)
class Call:
    """One request through all of its attempts. `response_bytes` bounds the body of each response."""

    name: str
    method: str
    url: URL
    body: SegmentsPayload | None
    headers: Mapping[str, str] | None
    seconds: float
    response_bytes: int
    stage: str = "waiting for a free slot"
    attempt: int = 0
    deadline: float = 0.0
    unanswered: bool = False  # whether the last attempt ended before the first byte of a response
    received: int = 0

    @property
    def place(self) -> str:
        """Method and URL, for errors."""
        return f"{self.method} {self.url}".partition("?")[0]

    @property
    def sent(self) -> int:
        """Bytes of the body of the request."""
        return 0 if self.body is None else self.body.size or 0

    async def send(self, session: aiohttp.ClientSession, *, whole: bool) -> tuple[aiohttp.ClientResponse, bytes]:
        """One attempt: the response and its body (empty if not `whole`, unless an error); `ConnectionError`: retry."""
        self.attempt += 1
        self.stage, self.received = "waiting for the response", 0
        try:
            response = await session.request(
                self.method, self.url, data=self.body, headers=self.headers, allow_redirects=False
            )
        except aiohttp.ClientError as error:
            raise self._typed(error) from error
        try:
            if (encoding := response.headers.get("content-encoding", "identity")).lower() != "identity":
                reason = f"the encoding {encoding!r:.40} was not asked for"
                raise MalformedResultError(self.name, f"{self.place}: {reason}")
            if 300 <= response.status < 400:
                target = re.split(r"[?#]", redacted(response.headers.get("location", "")))[0]
                raise ServerError(
                    self.name,
                    f"{self.place} was redirected; redirects are not followed. Give the server's own "
                    "address as base_url",
                    status=response.status,
                    body=f"to {target or 'an unknown address'}",
                )
            pieces = []
            if whole or response.status >= 400:
                self.stage = "reading the response"
                while piece := await self.read(response):
                    pieces.append(piece)
                    if in_tiny_pieces(len(pieces), self.received):
                        reason = f"comes in tiny pieces: {len(pieces)} of {self.received} bytes together"
                        raise MalformedResultError(self.name, f"{self.place}: the response {reason}")
            return response, b"".join(pieces)
        except BaseException:
            # Not released to the pool: the rest of the body would be read as the next response.
            response.close()
            raise

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        """The next piece of the body as it arrives; empty at its end."""
        try:
            piece = await response.content.readany()
        except aiohttp.ClientError as error:
            raise self._typed(error) from error
        self.received += len(piece)
        if self.received > self.response_bytes:
            raise MalformedResultError(
                self.name,
                f"{self.place}: the response is larger than response_bytes, {self.response_bytes}. Raise it "
                "if such responses are expected",
            )
        return piece

    def unreachable(self, reason: ConnectionError) -> ServerUnreachableError:
        times = "once" if self.attempt == 1 else f"{self.attempt} times"
        return ServerUnreachableError(
            self.name,
            f"{self.place} failed {times}; the last error: {reason}. Is the server running, and at this address?",
        )

    def _typed(self, error: aiohttp.ClientError) -> EngineError | ConnectionError:
        """The typed error for an aiohttp error; a `ConnectionError` if the request may be sent again."""
        # A connection that could not be made was never a kept one.
        self.unanswered = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError) and not isinstance(
            error, aiohttp.ClientConnectorError
        )
        # A handshake that just ends is a server that goes away, and may be tried again.
        if isinstance(error, aiohttp.ClientSSLError) and not isinstance(error.os_error, ssl.SSLEOFError):
            return ServerUnreachableError(
                self.name,
                f"{self.place}: the TLS handshake failed ({error.os_error}). Check that the server speaks "
                "https, and that its certificate is signed by an authority that this machine trusts "
                "(SSL_CERT_FILE adds one)",
            )
        if isinstance(error, aiohttp.ClientResponseError):
            return MalformedResultError(
                self.name, f"{self.place}: not a valid HTTP response: {redacted(error.message)}"
            )
        if isinstance(error, aiohttp.ClientConnectorError) and type(error) in _NOT_CONNECTED:
            # The text of aiohttp has the address again, and "ssl:default" also without TLS.
            number = error.errno or 0
            return ConnectionError(f"no connection ({os.strerror(number) if number > 0 else error.strerror})")
        return ConnectionError(redacted(str(error)) or type(error).__name__)
