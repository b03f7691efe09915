"""Runs an ASGI application on a port until it is interrupted."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollouts.errors import ArgumentError, CommandFileError, MissingExtraError, RolloutsError
from rollouts.serve.access import is_loopback

try:
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


def read_api_key(path: Path) -> str:
    """The key in a file, without spaces and line breaks around it. Raises `CommandFileError`."""
    key = read_key_file(path)
    if not is_key(key):
        raise CommandFileError(path, "the file must hold one key of printable ASCII characters without spaces")
    return key


def read_key_file(path: Path) -> str:
    """The text of a file of keys, without spaces and line breaks around it. Raises `CommandFileError`."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise CommandFileError(path, reason) from error


def is_key(text: str) -> bool:
    """Whether a text is printable ASCII without spaces, as a header can carry it."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def base_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(app: Any, listener: socket.socket, *, on_ready: Callable[[], None], access_log: bool = False) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. `on_ready` is called once requests are answered.

    Running requests have some seconds to end after the signal, or until a second SIGINT; then their connections are
    closed, the application is shut down, which no further signal ends, and `KeyboardInterrupt` is raised. Called from
    the main thread.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=access_log,
        timeout_keep_alive=75,  # clients keep idle connections for less: 3 s in `HttpLimits`, 5 s in the OpenAI client
        timeout_graceful_shutdown=5,
        server_header=False,
        http=HttpProtocol,
    )
    server = _Server(config, on_ready, listener.getsockname()[:2])
    # uvicorn raises the signal again at the end, where the usual SIGTERM would end the process with its files open.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` sets it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)


class HttpProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn, with a limit of the time until the headers of a request have arrived.

    h11 limits their size: to 16 KiB, or to what one read returns. httptools, which uvicorn prefers where it is
    installed, has no limit.
    """

    header_seconds = 30.0
    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_time()

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
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves the shutdown of the application to the next signal to interrupt
            await self.lifespan.shutdown()
