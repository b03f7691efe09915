"""Fetches media from URLs: which addresses a policy allows, connections to just those addresses, bounded bodies."""

from __future__ import annotations

import functools
import logging
import re
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urljoin

import httpcore

from renderers.errors import MediaError, MediaFetchError, MediaLimitError, MediaPolicyError
from renderers.media.policy import Deadline, MediaPolicy
from renderers.media.sniffing import check_type
from renderers.media.urls import Target, allowed_target, public_addresses
from renderers.process.threads import on_event_loop


def client_tls_context() -> ssl.SSLContext:
    """A context for HTTP/1.1 clients that verifies the server's certificate and host name.

    Trusted are the authorities of the operating system; OpenSSL's environment variables `SSL_CERT_FILE` and
    `SSL_CERT_DIR` replace them. Loading them takes milliseconds, so callers keep the context.
    """
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class HttpResponse(NamedTuple):
    """A complete response: the body, or for a redirect the `location` header and no body."""

    body: bytes
    content_type: str
    location: str | None


def get(target: Target, addresses: Sequence[str], *, max_bytes: int, deadline: Deadline) -> HttpResponse:
    """Request `target` from one of `addresses` and read the response.

    httpcore is the connection layer of httpx, whose client would log the whole URL, and follow redirects and
    decompress bodies by rules of its own. The certificate is checked against the host name. No proxy, netrc
    or cookie is used, nothing is decompressed. Raises `MediaFetchError`, `MediaLimitError`, and TimeoutError
    after the deadline.
    """
    backend = _PinnedBackend(addresses, deadline)
    headers = [
        ("Host", target.authority),
        ("User-Agent", "mmrollouts"),
        ("Accept", "*/*"),
        ("Accept-Encoding", "identity"),
        # No later request may go over this connection: its address was checked for this one.
        ("Connection", "close"),
    ]
    url = httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
    tls = tls_context() if target.scheme == "https" else None
    try:
        with (
            _no_log_records(),
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
    except httpcore.ProtocolError:  # its text may quote the response, which may quote the request
        raise MediaFetchError(f"{target.redacted_url}: the server does not speak proper HTTP") from None


@functools.cache
def tls_context() -> ssl.SSLContext:
    """The TLS context of all fetches; making one takes milliseconds."""
    return client_tls_context()


class _PinnedBackend(httpcore.NetworkBackend):
    """Connects to the given addresses only, whatever host httpcore names."""

    stream: _DeadlineStream

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
                # Each address gets an equal share of the time: one that never answers leaves time for the others.
                stream = httpcore.SyncBackend().connect_tcp(address, port, self._deadline.remaining() / left)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if left == 1:
                    raise
            else:
                self.stream = _DeadlineStream(stream, self._deadline)
                return self.stream
        raise httpcore.ConnectError("no address")


class _DeadlineStream(httpcore.NetworkStream):
    """A connection with one deadline for all that is read and written; it counts the bytes of the body.

    httpcore limits the time of each single read, which a server that sends one byte now and then never
    exceeds. And it does not report that a server sent more than Content-Length: until the head of the
    response is complete, the stream returns one line at a time, so that everything read afterwards is
    exactly the body.
    """

    def __init__(self, stream: httpcore.NetworkStream, deadline: Deadline) -> None:
        self._stream = stream
        self._deadline = deadline
        self._unread = b""
        self._body_bytes = 0
        self.in_head = True  # until the reader of the response has its head

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._unread or self._stream.read(max(max_bytes, 2**18), self._deadline.remaining())
        if self.in_head:
            end = data.find(b"\n") + 1 or len(data)
            data, self._unread = data[:end], data[end:]
        else:
            self._unread = b""
            self._body_bytes += len(data)
        return data

    @property
    def received(self) -> int:
        """Bytes of the body that have arrived so far."""
        return self._body_bytes + len(self._unread)

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


def _read_response(response: httpcore.Response, stream: _DeadlineStream, url: str, max_bytes: int) -> HttpResponse:
    """The response, read to its end. `url` is the redacted URL for errors."""
    stream.in_head = False
    headers = {name.lower(): _header_text(value) for name, value in response.headers}
    content_type = headers.get(b"content-type", "")
    if response.status in (301, 302, 303, 307, 308) and b"location" in headers:
        return HttpResponse(b"", content_type, headers[b"location"])
    if response.status != 200:
        raise MediaFetchError(f"{url}: the server answers with status {response.status}, not 200")
    if headers.get(b"content-encoding", "identity").lower() not in ("", "identity"):
        raise MediaFetchError(f"{url}: the body is compressed in transit, although that was not asked for")
    announced = None  # Content-Length where it counts; h11 has checked that it is a number
    if b"transfer-encoding" not in headers and b"content-length" in headers:
        announced = int(headers[b"content-length"].split(",")[0])
    if announced is not None and announced > max_bytes:
        raise MediaLimitError(f"{url}: {announced} bytes are announced, more than max_bytes={max_bytes} of the policy")
    chunks: list[bytes] = []
    received = 0
    try:
        for chunk in response.iter_stream():
            received += len(chunk)
            if received > max_bytes:
                raise MediaLimitError(f"{url}: the body is larger than max_bytes={max_bytes} of the policy")
            chunks.append(chunk)
    except httpcore.RemoteProtocolError:
        of = "" if announced is None else f" of {announced}"
        raise MediaFetchError(f"{url}: the body ends after {received}{of} bytes, before it is complete") from None
    # What follows may be a second response, or the body longer than its header says.
    if announced is not None and stream.received > announced:
        raise MediaFetchError(f"{url}: more bytes arrive than the {announced} announced")
    if not received:
        raise MediaFetchError(f"{url}: the body is empty")
    return HttpResponse(b"".join(chunks), content_type, None)


def _header_text(value: bytes) -> str:
    try:
        return value.decode().strip()
    except UnicodeDecodeError:
        # latin-1 reads any bytes, which a header may hold.
        return value.decode("latin-1").strip()


# httpcore logs the headers of each response, Location and cookies included, where the program logs at DEBUG.
_this_thread = threading.local()


def _may_be_logged(record: logging.LogRecord) -> bool:
    return not getattr(_this_thread, "silent", False)


@contextmanager
def _no_log_records() -> Iterator[None]:
    for name in ("httpcore.connection", "httpcore.http11"):
        logging.getLogger(name).addFilter(_may_be_logged)  # a filter that is there is not added again
    _this_thread.silent = True
    try:
        yield
    finally:
        _this_thread.silent = False


_log = logging.getLogger("renderers")
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,40}/[\w.+-]{1,80}")


def fetch(url: str, policy: MediaPolicy) -> bytes:
    """Fetch an image, a video or a sound: the body of a 200, complete, uncompressed, of at most `max_bytes`.

    Scheme and host must be allowed, and every address that the host resolves to must be public (or in
    `allowed_networks`); the connection goes to one of the addresses that were checked, and each redirect is
    checked like the first URL. One deadline of `policy.timeout` seconds covers all of it. Each fetch makes
    a connection of its own, which costs one more round trip than a kept one, two or three with TLS. Blocks;
    may be called from any thread except that of a running event loop.

    Errors and logs show URLs without credentials, query and fragment. Raises `MediaPolicyError`,
    `MediaLimitError`, `MediaError` for what is none of them, and `MediaFetchError` for the rest.
    """
    try:
        return _fetch(url, policy)
    except MediaError as error:
        # `from None` hides the earlier error from tracebacks, but not from debuggers and error reports, and
        # its text may quote what the server sent.
        error.__context__ = None
        raise


def _fetch(url: str, policy: MediaPolicy) -> bytes:
    target = allowed_target(url, policy)
    if on_event_loop():
        raise MediaFetchError(
            f"{target.redacted_url} would be fetched on the thread of a running event loop, which would "
            "stand still meanwhile; await asyncio.to_thread(...), use a RendererPool, or call "
            "renderer.prefetch(messages) before"
        )
    started = time.monotonic()
    try:
        body = _fetch_with_redirects(url, target, policy, Deadline(policy.timeout))
    except TimeoutError:
        raise MediaFetchError(
            f"{target.redacted_url}: not fetched within timeout={policy.timeout:g} s of the media policy, "
            "redirects included"
        ) from None
    _log.debug("fetched %s: %d bytes in %.3f s", target.redacted_url, len(body), time.monotonic() - started)
    return body


def _fetch_with_redirects(url: str, target: Target, policy: MediaPolicy, deadline: Deadline) -> bytes:
    first = target.redacted_url
    for _ in range(policy.max_redirects + 1):
        addresses = public_addresses(
            target.host,
            target.port,
            allowed_networks=policy.allowed_networks,
            deadline=deadline,
            url=first if target.redacted_url == first else f"{target.redacted_url} (redirected from {first})",
        )
        response = get(target, addresses, max_bytes=policy.max_bytes, deadline=deadline)
        if response.location is None:
            declared = _MEDIA_TYPE.match(response.content_type)
            check_type(response.body, name=target.redacted_url, declared=declared.group() if declared else None)
            return response.body
        url, target = _redirect_target(url, target, response.location, policy)
    raise MediaFetchError(f"{first} redirects more often than max_redirects={policy.max_redirects} of the policy")


def _redirect_target(url: str, target: Target, location: str, policy: MediaPolicy) -> tuple[str, Target]:
    try:
        next_url = urljoin(url, location)
    except ValueError:
        raise MediaFetchError(f"{target.redacted_url} redirects to a URL that cannot be read") from None
    try:
        next_target = allowed_target(next_url, policy)
    except MediaPolicyError as error:
        raise MediaPolicyError(f"{target.redacted_url} redirects: {error.reason}") from None
    # Whoever is in between could then exchange what is fetched.
    if target.scheme == "https" and next_target.scheme == "http":
        raise MediaPolicyError(
            f"{target.redacted_url} redirects from https to {next_target.redacted_url}, which is not encrypted"
        )
    return next_url, next_target
