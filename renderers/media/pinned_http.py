"""One HTTP request to an address that was checked before, under a deadline and a byte cap, that nobody logs."""

from __future__ import annotations

import functools
import logging
import ssl
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpcore
import httpx

from renderers.errors import MediaFetchError, MediaLimitError
from renderers.media.deadline import Deadline
from renderers.media.urls import Target

_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK = 2**18


class HttpResponse(NamedTuple):
    """A whole answer: the body, or where it is said to be (`location`)."""

    body: bytes
    content_type: str
    location: str | None


def get(target: Target, addresses: Sequence[str], *, max_bytes: int, deadline: Deadline) -> HttpResponse:
    """Ask one of `addresses` for `target` and read the answer.

    The certificate is checked against the name, nothing is taken from the environment (proxies, netrc), no cookie is
    kept, nothing is decompressed. Raises `MediaFetchError`, `MediaLimitError`, and TimeoutError after the deadline.
    """
    backend = _PinnedBackend(addresses, deadline)
    headers = [
        ("Host", target.authority),
        ("User-Agent", "mmrollouts"),
        ("Accept", "*/*"),
        ("Accept-Encoding", "identity"),
        ("Connection", "close"),
    ]
    url = httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
    tls = tls_context() if target.scheme == "https" else None
    try:
        with (
            _unlogged(),
            httpcore.ConnectionPool(ssl_context=tls, network_backend=backend) as pool,
            pool.stream("GET", url, headers=headers) as response,
        ):
            return _read_response(response, backend.stream, target.redacted_url, max_bytes)
    except httpcore.TimeoutException:
        raise TimeoutError from None
    except httpcore.ConnectError as error:  # its text comes from this system: refused, unreachable, certificate
        raise MediaFetchError(f"{target.redacted_url}: no connection ({error})") from None
    except httpcore.NetworkError:
        raise MediaFetchError(f"{target.redacted_url}: the connection broke off") from None
    except httpcore.ProtocolError:  # its text may quote what the server sent, and that what was asked for
        raise MediaFetchError(f"{target.redacted_url}: the server does not speak proper HTTP") from None


@functools.cache
def tls_context() -> ssl.SSLContext:
    """Trusts the authorities that httpx ships, whatever the environment says."""
    return httpx.create_ssl_context(trust_env=False)


class _PinnedBackend(httpcore.NetworkBackend):
    """Connects to the given addresses only, whatever name httpcore asks for."""

    stream: _CountedStream

    def __init__(self, addresses: Sequence[str], deadline: Deadline) -> None:
        self._addresses = addresses
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        for left, address in zip(range(len(self._addresses), 0, -1), self._addresses, strict=True):
            try:
                # One address that never answers leaves time for the others.
                stream = httpcore.SyncBackend().connect_tcp(address, port, self._deadline.remaining() / left)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if left == 1:
                    raise
            else:
                self.stream = _CountedStream(stream, self._deadline)
                return self.stream
        raise httpcore.ConnectError("no address")


class _CountedStream(httpcore.NetworkStream):
    """A connection with one deadline for all that is read and written, which counts the bytes of the body.

    httpcore sets a limit for each single read, which a byte now and then never reaches. And it does not tell whether
    a server sent more than it announced: until the head of the answer is complete it is handed on line by line, so
    that what is read after it is exactly the body.
    """

    def __init__(self, stream: httpcore.NetworkStream, deadline: Deadline) -> None:
        self._stream = stream
        self._deadline = deadline
        self._ahead = b""
        self._in_head = True
        self.body_bytes = 0

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._ahead or self._stream.read(max(max_bytes, _CHUNK), self._deadline.remaining())
        if self._in_head:
            end = data.find(b"\n") + 1 or len(data)
            data, self._ahead = data[:end], data[end:]
        else:
            self._ahead = b""
            self.body_bytes += len(data)
        return data

    def head_is_read(self) -> None:
        self._in_head = False
        self.body_bytes = 0

    @property
    def received(self) -> int:
        """Bytes after the head that have arrived so far."""
        return self.body_bytes + len(self._ahead)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.remaining())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        self._stream = self._stream.start_tls(ssl_context, server_hostname, self._deadline.remaining())
        return self

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _read_response(
    response: httpcore.Response, stream: _CountedStream, redacted_url: str, max_bytes: int
) -> HttpResponse:
    stream.head_is_read()
    headers = {name.lower(): _text(value).strip() for name, value in response.headers}
    content_type = headers.get(b"content-type", "")
    if response.status in _REDIRECTS and b"location" in headers:
        return HttpResponse(b"", content_type, headers[b"location"])
    if response.status != 200:
        raise MediaFetchError(f"{redacted_url}: the server answers with status {response.status}, not 200")
    encoding = headers.get(b"content-encoding", "identity").lower()
    if encoding not in ("", "identity"):
        raise MediaFetchError(f"{redacted_url}: the body is compressed in transit, although that was not asked for")
    announced = _announced(headers)
    if announced is not None and announced > max_bytes:
        raise MediaLimitError(
            f"{redacted_url}: {announced} bytes are announced, more than max_bytes={max_bytes} of the policy"
        )
    body = _body(response, redacted_url, announced, max_bytes)
    if announced is not None and stream.received > announced:
        raise MediaFetchError(f"{redacted_url}: more bytes arrive than the {announced} announced")
    if not body:
        raise MediaFetchError(f"{redacted_url}: the body is empty")
    return HttpResponse(body, content_type, None)


def _text(header: bytes) -> str:
    try:
        return header.decode()
    except UnicodeDecodeError:
        return header.decode("latin-1")


def _announced(headers: Mapping[bytes, str]) -> int | None:
    """Content-Length where it counts; its spelling was checked by h11."""
    if b"transfer-encoding" in headers or b"content-length" not in headers:
        return None
    return int(headers[b"content-length"].split(",")[0])


def _body(response: httpcore.Response, redacted_url: str, announced: int | None, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    received = 0
    try:
        for chunk in response.iter_stream():
            received += len(chunk)
            if received > max_bytes:
                raise MediaLimitError(f"{redacted_url}: the body is larger than max_bytes={max_bytes} of the policy")
            chunks.append(chunk)
    except httpcore.RemoteProtocolError:
        of = "" if announced is None else f" of {announced}"
        raise MediaFetchError(
            f"{redacted_url}: the body ends after {received}{of} bytes, before it is complete"
        ) from None
    return b"".join(chunks)


# httpcore logs the headers of every answer, Location and cookies included, when the program logs at DEBUG.
_this_thread = threading.local()


def _may_be_logged(record: logging.LogRecord) -> bool:
    return not getattr(_this_thread, "silent", False)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep what httpcore would log on this thread meanwhile out of the logs."""
    for name in ("httpcore.connection", "httpcore.http11"):
        logging.getLogger(name).addFilter(_may_be_logged)  # once: a filter that is there is not added again
    _this_thread.silent = True
    try:
        yield
    finally:
        _this_thread.silent = False
