"""A real HTTP server on loopback that answers as badly as it is told to."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

Handler = Callable[["Exchange"], None]


class Exchange:
    """One connection whose request was read."""

    def __init__(self, connection: socket.socket, head: str, closing: threading.Event) -> None:
        self.connection = connection
        self.path = head.split(" ")[1]
        self.headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:])
        }
        self.closing = closing

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def wait(self, seconds: float) -> bool:
        """Pause; True once the test is over."""
        return self.closing.wait(seconds)


class HostileServer:
    """Routes by path (without query). `seen` holds every request, `connections` counts those that were accepted."""

    def __init__(self, address: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.seen: list[Exchange] = []
        self.connections = 0
        self._routes: dict[str, Handler] = {}
        self._tls = tls
        self._closing = threading.Event()
        self._listener = socket.create_server((address, port))
        self.host, self.port = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, path: str, *, host: str | None = None) -> str:
        return f"{'https' if self._tls else 'http'}://{host or self.host}:{self.port}{path}"

    def on(self, path: str, handler: Handler) -> str:
        self._routes[path] = handler
        return self.url(path)

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(20)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                data = b""
                while b"\r\n\r\n" not in data:
                    received = connection.recv(65536)
                    if not received:
                        return
                    data += received
                exchange = Exchange(connection, data.decode("latin-1").partition("\r\n\r\n")[0], self._closing)
                self.seen.append(exchange)
                self._routes.get(exchange.path.partition("?")[0], answer(b"", status="404 Not Found"))(exchange)


@contextlib.contextmanager
def serving(*args: Any, **options: Any) -> Iterator[HostileServer]:
    server = HostileServer(*args, **options)
    try:
        yield server
    finally:
        server.close()


def head(*headers: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode("latin-1")


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> Handler:
    """An answer in one piece; `length` is announced instead of the true one."""
    announced = len(body) if length is None else length
    return lambda exchange: exchange.send(head(f"Content-Length: {announced}", *headers, status=status) + body)


def redirect(location: str, status: str = "302 Found") -> Handler:
    return answer(b"", f"Location: {location}", status=status)


def endless(exchange: Exchange) -> None:
    exchange.send(head("Transfer-Encoding: chunked", "Content-Type: image/png"))
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    while not exchange.wait(0):
        exchange.send(chunk)


def dripping(data: bytes, *, pause: float = 0.05) -> Handler:
    """One byte now and then: each single read is answered in time."""

    def drip(exchange: Exchange) -> None:
        for byte in data:
            exchange.send(bytes([byte]))
            if exchange.wait(pause):
                return

    return drip


def head_only(*headers: str) -> Handler:
    """The head, and then nothing more for as long as the client stays."""

    def handler(exchange: Exchange) -> None:
        exchange.send(head(*headers))
        exchange.wait(20)

    return handler
