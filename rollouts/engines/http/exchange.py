"""One HTTP exchange: the server's address, the request's bytes, the response, the events of a stream."""

from __future__ import annotations

import base64
import json
import re
import ssl
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import getmembers, iscoroutinefunction
from typing import Any, NamedTuple, TypeVar, cast

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from yarl import URL

from rollouts.errors import (
    EngineError,
    MalformedResultError,
    ServerError,
    ServerRelatedError,
    ServerTimeoutError,
    ServerUnreachableError,
)

# The user:password@ of a URL; the value of an Authorization header.
_CREDENTIALS = re.compile(r"(?i)(?<=//)[^/\s'\"]*@|\b(bearer|basic)\s+[\w.~+/=-]{4,}")


def parse_address(base_url: str, *, api_key: str | None) -> tuple[str, str | None]:
    """The URL of a server's root without credentials or trailing slash, and the Authorization header's value.

    `user:password@` becomes a Basic Authorization header, `api_key` a Bearer one. Raises `ValueError`, whose text
    contains no credentials.
    """
    redacted_url = redacted(re.split(r"[?#]", base_url)[0])
    try:
        url = URL(base_url.strip())
    except ValueError as error:
        raise ValueError(f"base_url {redacted_url!r} is not a URL: {redacted(str(error))}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"base_url {redacted_url!r} must look like http://host:8000 or https://host")
    if url.raw_query_string or url.raw_fragment:
        raise ValueError(f"base_url {redacted_url!r} has a query or a fragment; give the server's root only")
    if url.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"base_url {redacted_url!r} ends in /v1; give the server's root, one level above")
    if not re.fullmatch(r"[\x21-\x7e]+", base_url.strip().rpartition("@")[2]):
        raise ValueError(f"base_url {redacted_url!r} must be ASCII without spaces; encode it (punycode, %20) first")
    if api_key and not re.fullmatch(r"[\x21-\x7e]+", api_key):
        raise ValueError("api_key has spaces, line ends or other characters that no HTTP header can carry; strip it")
    authorization = f"Bearer {api_key}" if api_key else None
    if url.user is not None or url.password is not None:
        if authorization is not None:
            raise ValueError(f"base_url {redacted_url!r} has credentials and api_key is given too; give one of them")
        credentials = f"{url.user or ''}:{url.password or ''}"
        authorization = "Basic " + base64.b64encode(credentials.encode()).decode()
    return str(url.with_user(None)).rstrip("/"), authorization


def server_identity(base_url: str) -> str:
    """A text that is equal for addresses that name one server, as far as the addresses tell: `localhost` by any name,
    and the default port whether it is written or not.
    """
    url = URL(base_url)
    host = "127.0.0.1" if url.host in ("localhost", "::1", "0.0.0.0") else url.host  # noqa: S104  nothing is bound
    return f"{url.scheme}://{host}:{url.port}{url.path.rstrip('/')}"


def redacted(text: str) -> str:
    """The text without credentials of URLs and values of Authorization headers."""
    return _CREDENTIALS.sub(lambda match: f"{match[1]} ..." if match[1] else "", text)


class EventDecoder:
    """Decodes one stream, whose size the caller bounds.

    Lines end in LF, CRLF or CR; an empty line ends an event; several `data` lines of one event are joined by LF;
    comments and the fields `event`, `id` and `retry` are ignored. An event that is cut off by the end of the stream is
    dropped. The data stay bytes, so that no cut can split a character.
    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []  # pieces of the line that has not ended yet
        self._data: list[bytes] = []  # of the event that has not ended yet
        self._after_cr = False
        self._at_start = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ends in this piece."""
        if self._after_cr and piece:
            piece = piece.removeprefix(b"\n")  # the second half of a CRLF
            self._after_cr = False
        if b"\n" not in piece and b"\r" not in piece:
            self._line.append(piece)
            return []
        self._after_cr = piece.endswith(b"\r")
        first, *rest = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        lines = [b"".join((*self._line, first)), *rest]
        self._line = [lines.pop()]
        if self._at_start:
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        events: list[bytes] = []
        for line in lines:
            if not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
            elif line == b"data" or line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events


_EXCERPT_CHARACTERS = 2000


class HttpResponse(NamedTuple):
    """A whole response. `headers` ignores case; `name` is that of the request, `sent` the bytes of its body."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    name: str = "response"
    sent: int = 0

    def json(self) -> Any:
        """The decoded body. Raises `MalformedResultError`."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise MalformedResultError(
                self.name, f"the response (HTTP {self.status}) is not JSON ({error}): {excerpt(self.body)!r}"
            ) from None


def response_error(name: str, response: HttpResponse, action: str) -> ServerError:
    """The error for an error response: the failed `action`, the status, and the server's message.

    Reads vLLM's `{"error": {"message", ...}}`, its control routes' `{"error": text}` and FastAPI's `{"detail": ...}`.
    Other bodies are quoted from their beginning. Credentials are removed.
    """
    message = _message(response.body)
    if response.status == 413 or "length limit exceeded" in message:  # as vLLM's Rust frontend says it
        action += (
            f" (the request has {response.sent} bytes; vLLM's Rust frontend takes 32 MiB unless it was started with "
            "another VLLM_HTTP_MAX_REQUEST_BODY_SIZE, in bytes: raise it, or send fewer or smaller images)"
        )
    return server_error(name, action, response.status, message)


def server_error(name: str, action: str, status: int, message: str) -> ServerError:
    """The error for a server's message, with the cure if its engine has died."""
    if "EngineCore encountered an issue" in message:  # of vLLM while it shuts down
        action += " (the server's engine has died and the server ends; its log has the cause. Start it again)"
    return ServerError(name, action, status=status, body=message)


def _message(body: bytes) -> str:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return excerpt(body) or "(no body)"
    if isinstance(content, dict):
        error = content.get("error") or content.get("detail") or content.get("message")
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            kind = error.get("type")
            error = f"{kind}: {error['message']}" if isinstance(kind, str) else error["message"]
        elif isinstance(error, list) and all(isinstance(item, dict) and "msg" in item for item in error):
            error = "; ".join(f"{'.'.join(map(str, item.get('loc') or ()))}: {item['msg']}" for item in error)
        if isinstance(error, str):
            return excerpt(error.encode("utf-8", "replace"))
    return excerpt(body)


def excerpt(body: bytes) -> str:
    """The beginning of a body, without credentials, at most 2,000 characters."""
    text = redacted(body[: 4 * _EXCERPT_CHARACTERS].decode("utf-8", "replace"))
    return text if len(text) <= _EXCERPT_CHARACTERS else f"{text[:_EXCERPT_CHARACTERS]}... ({len(body)} bytes)"


# One attempt to send a request over aiohttp: the body in segments, bounded reading, typed errors.
#
# `connection.ServerConnection` decides whether there is another attempt.


#: The views are of bytes, with one axis.
Body = Sequence[bytes | memoryview]

# Small bodies are joined, which makes one system call; larger segments are cut to pieces of this size, because the
# event loop copies what the socket does not accept at once. So there is never a copy of more than one piece.
_PIECE_BYTES = 256 * 1024


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
    """One request through all of its attempts. `response_bytes` bounds the decompressed body of each response."""

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
    _gzip: Any = None  # the decompressor of the response

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
            self._gzip = self._decompressor(response)
            if 300 <= response.status < 400:
                target = re.split(r"[?#]", redacted(response.headers.get("location", "")))[0]
                raise ServerError(
                    self.name,
                    f"{self.place} was redirected; redirects are not followed. Give the server's own address as "
                    "base_url",
                    status=response.status,
                    body=f"to {target or 'an unknown address'}",
                )
            pieces = []
            if whole or response.status >= 400:
                self.stage = "reading the response"
                while piece := await self.read(response):
                    pieces.append(piece)
            return response, b"".join(pieces)
        except BaseException:
            response.close()
            raise

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        """The next piece of the decompressed body as it arrives; empty at its end."""
        piece = b""
        while not piece and not response.content.at_eof():
            try:
                piece = await response.content.readany()
            except aiohttp.ClientError as error:
                raise self._typed(error) from error
            if self._gzip is not None:
                piece = self._decompressed(piece)
        if not piece and self._gzip is not None and not self._gzip.eof:
            raise MalformedResultError(self.name, f"{self.place}: the compressed body ends too early")
        self.received += len(piece)
        if self.received > self.response_bytes:
            raise MalformedResultError(
                self.name,
                f"{self.place}: the response is larger than response_bytes, {self.response_bytes}. Raise it if such "
                "responses are expected",
            )
        return piece

    def _decompressor(self, response: aiohttp.ClientResponse) -> Any:
        encoding = response.headers.get("content-encoding", "identity").lower()
        if encoding == "identity":
            return None
        if encoding != "gzip":
            raise MalformedResultError(self.name, f"{self.place}: the encoding {encoding!r:.40} was not asked for")
        return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    def _decompressed(self, piece: bytes) -> bytes:
        """At most one byte more than the bound of the response; what exceeds it is refused by `read`."""
        try:
            data: bytes = self._gzip.decompress(piece, self.response_bytes + 1 - self.received)
        except zlib.error as error:
            raise MalformedResultError(self.name, f"{self.place}: the compressed body is invalid: {error}") from error
        return data

    def unreachable(self, reason: ConnectionError) -> ServerUnreachableError:
        times = "once" if self.attempt == 1 else f"{self.attempt} times"
        return ServerUnreachableError(
            self.name,
            f"{self.place} failed {times}; the last error: {reason}. Is the server running, and at this address?",
        )

    def _typed(self, error: aiohttp.ClientError) -> EngineError | ConnectionError:
        """The typed error for an aiohttp error; a `ConnectionError` if the request may be sent again."""
        self.unanswered = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError) and not isinstance(
            error, aiohttp.ClientConnectorError
        )
        if isinstance(error, aiohttp.SocketTimeoutError):
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
                self.name, f"{self.place}: not a valid HTTP response: {redacted(error.message)}"
            )
        return ConnectionError(redacted(str(error)) or type(error).__name__)


C = TypeVar("C", bound=type)
M = TypeVar("M", bound=Callable[..., Any])


@contextmanager
def error_context(server: str, request_id: str | None = None) -> Iterator[None]:
    """Let each error of the block concern the server, and each `EngineError` name this request where one is given.

    An error of another request that this one needed (the probe of a server, whether it is paused) becomes the cause of
    a new error, because several requests may wait for the same result.
    """
    try:
        yield
    except ServerRelatedError as error:
        error.concern(server)
        if not isinstance(error, EngineError):
            raise
        error.server = server
        if request_id is None or error.request_id == request_id:
            raise
        raise error.for_request(request_id) from error


def name_errors_after_methods(cls: C) -> C:
    """Let the errors of each public coroutine method of a class name the method (as their request) and the server.

    `base_url` of its objects is the address of the server, without credentials.
    """
    for name, method in getmembers(cls, iscoroutinefunction):
        if not name.startswith("_"):
            setattr(cls, name, _in_error_context(method, name))
    return cls


def name_server_in_errors(method: M) -> M:
    """Let the errors of a method name the server."""
    return _in_error_context(method, None)


def _in_error_context(method: M, request_id: str | None) -> M:
    @wraps(method)
    async def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with error_context(self.base_url, request_id):
            return await method(self, *args, **kwargs)

    return cast(M, wrapper)
