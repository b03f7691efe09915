"""Runs an ASGI application on a port until it is interrupted."""

import asyncio
import gc
import logging
import math
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Final

from renderers.errors import MissingExtraError
from rollouts.calls import in_tiny_pieces
from rollouts.errors import ArgumentError, CommandFileError, RolloutsError
from rollouts.serve.access import is_loopback

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise MissingExtraError("rollouts serve", "serve", "uvicorn") from error


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound to the address; port 0 is any free one. Raises `RolloutsError`."""
    with ExitStack() as on_error:
        try:
            ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            listener = on_error.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except (OSError, OverflowError) as error:
            raise _not_listening(host, port, getattr(error, "strerror", None) or str(error)) from error
        on_error.pop_all()
    return listener


def _not_listening(host: str, port: int, reason: str) -> RolloutsError:
    return RolloutsError(f"cannot listen on {host} port {port}: {reason}. Pass --port 0 for any free port, or another")


def check_protection(host: str, api_key: str | None) -> None:
    """Raise `ArgumentError` for an address that other machines reach, without a key."""
    if api_key is None and not is_loopback(host):
        rule = (
            "it is not an address of this machine alone, and there is no API key: anyone who reaches the port could "
            "use the model. Pass --api-key-file, or --host 127.0.0.1"
        )
        raise ArgumentError("host", host, rule)


def read_keys(path: Path, *, most: int | None = None, prefix: str = "") -> tuple[str, ...]:
    """The keys in a file, one a line, as a header can carry them. Raises `CommandFileError`."""
    try:
        keys = tuple(filter(None, map(str.strip, path.read_text(encoding="utf-8").splitlines())))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise CommandFileError(path, reason) from error
    are_keys = all(key.isascii() and key.isprintable() and " " not in key and key.startswith(prefix) for key in keys)
    if not keys or not are_keys or len({*keys}) < len(keys) or (most is not None and len(keys) > most):
        several = "one key" if most else "different keys, one a line,"
        begins = f" that begin with {prefix}" if prefix else ""
        raise CommandFileError(path, f"it must hold {several} of printable ASCII characters without spaces{begins}")
    return keys


def base_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(app: Any, listener: socket.socket, *, on_ready: Callable[[], None]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. `on_ready` is called once requests are answered.

    Running requests have some seconds to end after the signal, or until a second SIGINT; then their
    connections are closed, the application is shut down, which no further signal ends, and
    `KeyboardInterrupt` is raised. Called from the main thread.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,  # clients keep idle connections for less: 3 s in `HttpLimits`, 5 s in the OpenAI client
        timeout_graceful_shutdown=5,
        server_header=False,
        http=HttpProtocol,
        backlog=_ACCEPTED,
    )
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    _raise_descriptor_limit()
    server = _Server(config, on_ready, listener.getsockname()[:2])
    # uvicorn raises the signal again at the end, where the usual SIGTERM would end the process with its files
    # open.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` sets it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    gc.freeze()  # what is loaded stays: the collection with which Python ends takes seconds over torch's objects
    try:
        server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Whether it is not the traceback of a request that was running after the time for its end."""
    return not record.exc_info or not isinstance(record.exc_info[1], asyncio.CancelledError)


#: Connections that asyncio accepts at a time, before any of them is refused.
_ACCEPTED: Final = 16
#: As many descriptors suffice, where the system allows more.
_MOST_DESCRIPTORS: Final = 2**16


def _raise_descriptor_limit() -> None:
    """Let the process open as many files and sockets as its user may; shells begin programs with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _CountingConnection(h11.Connection):
    """Counts the pieces in which the body of a request arrives, and refuses one of many tiny chunks."""

    pieces = received = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.pieces = self.received = 0
        elif isinstance(event, h11.Data):
            self.pieces += 1
            self.received += len(event.data)
            if in_tiny_pieces(self.pieces, self.received):
                raise h11.RemoteProtocolError("tiny chunks")
        return event


_log = logging.getLogger("rollouts.serve")
_WARNING_SECONDS: Final = 60.0
_FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class HttpProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn, with limits: of the time until the headers of a request have arrived, of the
    number of connections (a third of the descriptors that the process may open), and of tiny chunks of a
    body.

    h11 limits their size: to 16 KiB, or to what one read returns. httptools, which uvicorn prefers where it
    is installed, has no limit.
    """

    header_seconds = 30.0
    _closing: asyncio.TimerHandle | None = None
    _warned: ClassVar[float] = -math.inf

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = self._counting = _CountingConnection(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Requests to a server behind this one need descriptors, too, and files.
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = descriptors // 3
        if descriptors == resource.RLIM_INFINITY or len(self.connections) <= most:
            self._limit_time()
            return
        transport.write(_FULL)
        transport.close()
        if time.monotonic() > HttpProtocol._warned + _WARNING_SECONDS:
            HttpProtocol._warned = time.monotonic()
            text = "%d connections are open: further ones get HTTP 503. Raise the limit of open files (ulimit -n)"
            _log.warning(text, most)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # the response has begun
            self.transport.close()
            return
        counted = self._counting
        if in_tiny_pieces(counted.pieces, counted.received):
            msg = f"The body comes in tiny chunks, {counted.pieces} of {counted.received} bytes; send larger ones."
        super().send_400_response(msg)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _limit_time(self) -> None:
        """Close the connection later, unless a request is being answered. Between requests uvicorn has a timer."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._closing is None:
            self._closing = self.loop.call_later(self.header_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None], address: tuple[str, int]) -> None:
        super().__init__(config)
        self._address = address
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another program has bound the same port at the same time, and listens already
            host, port = self._address
            raise _not_listening(host, port, error.strerror or str(error)) from error
        if not self.should_exit:
            for one in sockets or ():
                one.listen(socket.SOMAXCONN)
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves the shutdown of the application to the next signal to interrupt
            await self.lifespan.shutdown()
