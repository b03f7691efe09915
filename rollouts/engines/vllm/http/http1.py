"""One HTTP/1.1 connection: h11 says what the bytes that come mean, asyncio moves them.

Why not httpx: its pool looks at every connection for every request, which with 512 of them takes milliseconds of
processor time each, more than all the rest of a request together (`benchmarks/engine_requests.py` shows both).
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import cast

import h11

Body = Sequence[bytes | memoryview]

# Small segments are joined up to this size and large ones cut to it: one system call each, and never a second copy of
# more than one piece, whatever the size of the image.
_PIECE_BYTES = 256 * 1024
_HEAD_BYTES = 64 * 1024
# What may arrive before anyone reads it; beyond, the socket is left to push back.
_UNREAD_BYTES = 1024 * 1024

# RFC 9110 sections 5.1 and 5.5 (without obs-text), RFC 9112 section 3.2.
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"(?:[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?)?")
_TARGET = re.compile(r"/[\x21-\x7e]*")


def body_bytes(body: Body) -> int:
    return sum(memoryview(segment).nbytes for segment in body)


def header_lines(headers: Iterable[tuple[str, str]]) -> str:
    """The lines of a head. Raises `ValueError`, without values, if a line end or the like would get in."""
    lines = []
    for name, value in headers:
        if _NAME.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
            raise ValueError(f"the header {name!r}")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines)


def request_line(method: str, target: str) -> str:
    """The first line of a head. Raises `ValueError` likewise."""
    if _NAME.fullmatch(method) is None or _TARGET.fullmatch(target) is None:
        raise ValueError("the method or the path")
    return f"{method} {target} HTTP/1.1\r\n"


@cache
def _announced(method: str) -> h11.Request:
    """What h11 must know of a request to read its answer."""
    return h11.Request(method=method, target="/", headers=[("host", "unsaid")])


class Http1Connection(asyncio.Protocol):
    """A connection that carries one exchange at a time and may be kept for the next.

    Everything fails with `ConnectionError` once the connection is refused, reset or ended in the middle of an answer,
    with `TimeoutError` after `read_seconds` without a byte, with `h11.RemoteProtocolError` if what comes is not HTTP.
    """

    def __init__(self, read_seconds: float | None) -> None:
        self._read_seconds = read_seconds
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._failure: str | None = None
        self._unread = 0
        self._heard = False  # whether anything of the present answer has come,
        self._answered = False  # and all of its head
        self._sent = False
        self._exchanges = 0
        self._full = False  # the transport's buffer, while sending
        self._reading = True
        self._ended = False
        self.idle_since = 0.0

    @classmethod
    async def open(
        cls, host: str, port: int, *, tls: ssl.SSLContext | None, connect_seconds: float, read_seconds: float | None
    ) -> Http1Connection:
        """Connect. Raises `ConnectionError`, or `ssl.SSLError` if the two sides cannot agree: no retry helps."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(connect_seconds):
                _, connection = await loop.create_connection(lambda: cls(read_seconds), host, port, ssl=tls)
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {connect_seconds:g} s") from error
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise ConnectionError(f"the connection ended in the TLS handshake ({error.reason})") from error
        except ssl.SSLError:
            raise
        except OSError as error:
            raise ConnectionError(str(error)) from error
        return connection

    # What an exchange does.

    async def exchange(self, method: str, head: bytes, body: Body) -> h11.Response:
        """Send a request, whose head declares the size of `body`; the head of the answer."""
        transport = self._open_transport()
        self._exchanges += 1
        self._heard = self._answered = False
        # h11 reads the answer but does not write the request: it would check every header of every request anew, and
        # copy the body.
        self._http.send(_announced(method))
        self._http.send(h11.EndOfMessage())
        self._sent = await self._send(transport, head, body)
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                self._answered = True
                return event

    async def _send(self, transport: asyncio.Transport, head: bytes, body: Body) -> bool:
        """Whether all was sent: a server may answer, or leave, before the end of the question."""
        pending: list[bytes | memoryview] = [head]
        for segments in _pieces(body):
            pending += segments
            transport.write(b"".join(pending) if len(pending) > 1 else pending[0])
            pending.clear()
            if self._full:
                await self._room()
            if self._unread or self._over:
                return False
        if pending:
            transport.write(head)
        return True

    async def piece(self) -> bytes:
        """The next piece of the answer's body; empty at its end."""
        while self._http.their_state is h11.SEND_BODY:
            event = await self._event()
            if isinstance(event, h11.Data) and event.data:
                return bytes(event.data)
        return b""

    def keep(self, now: float) -> bool:
        """Make ready for another exchange; whether it can carry one."""
        done = self._sent and self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        if not done or self._over or self._http.trailing_data[0]:
            return False
        self._http.start_next_cycle()
        self._unread = 0
        self.idle_since = now
        return True

    @property
    def usable(self) -> bool:
        """Whether an idle connection is still good: not closed, and nothing has come that nobody asked for."""
        return not self._over and not self._unread

    @property
    def answered_nothing_when_reused(self) -> bool:
        """Whether this exchange was not the first and got no byte back: the server had probably let go of it before."""
        return self._exchanges > 1 and not self._heard

    def abort(self) -> None:
        """Close at once; the server sees the disconnect."""
        self._fail("closed by this side")
        if self._transport is not None:
            self._transport.abort()

    @property
    def _over(self) -> bool:
        return self._ended or self._failure is not None

    def _open_transport(self) -> asyncio.Transport:
        if self._failure is not None:
            raise ConnectionResetError(self._failure)
        assert self._transport is not None
        return self._transport

    async def _event(self) -> h11.Event:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._ended:
                return self._last_event()
            self._unread = 0
            transport = self._open_transport()
            if not self._reading:
                self._reading = True
                transport.resume_reading()
            if self._read_seconds is None:
                await self._change()
            else:
                async with asyncio.timeout(self._read_seconds):
                    await self._change()
        if event is h11.PAUSED:
            raise h11.RemoteProtocolError("more came than was asked for")
        return cast("h11.Event", event)

    def _last_event(self) -> h11.Event:
        """What the end of the connection means: for some answers it is the end of the body."""
        # h11 hears of it only now: whatever it objected to before was no HTTP, what it objects to now was cut off.
        self._http.receive_data(b"")
        try:
            return cast("h11.Event", self._http.next_event())
        except h11.RemoteProtocolError as error:
            words = str(error) if self._answered else "the server closed the connection without an answer"
            raise ConnectionResetError(words) from error

    async def _room(self) -> None:
        """Wait until more can be written, or an answer has come."""
        while self._full and not self._unread and not self._over:
            await self._change()

    async def _change(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
        self._wake()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._http.receive_data(data)
        self._heard = True
        self._unread += len(data)
        if self._unread > _UNREAD_BYTES and self._reading and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self._ended = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None or not self._ended:
            self._fail("closed" if exc is None else str(exc))
        self._full = False
        self._wake()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._wake()


def _pieces(body: Body) -> Iterator[list[memoryview]]:
    """The body in groups of segments to be written at once, none much larger than a piece."""
    group: list[memoryview] = []
    size = 0
    for segment in body:
        view = memoryview(segment).cast("B")
        if size + len(view) > _PIECE_BYTES and group:
            yield group
            group, size = [], 0
        if len(view) <= _PIECE_BYTES:
            group.append(view)
            size += len(view)
            continue
        for start in range(0, len(view), _PIECE_BYTES):
            yield [view[start : start + _PIECE_BYTES]]
    if group:
        yield group
