"""The ZeroMQ sockets of client and server. All methods except the constructors run in the I/O thread.

ZeroMQ reconnects without reporting which frames were lost. Therefore a client observes its connection, and closes its
socket when the connection breaks. A server sees the next connection as another route.
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import socket as system_sockets
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from transport.errors import LinkAddressError
from transport.link.limits import LinkLimits
from transport.wire.wire_format import Buffer

_Z85 = frozenset(string.digits + string.ascii_letters + ".-:+=^!/*?&<>()[]{}@%$#")


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The server's pair, and the public keys of the clients that may connect; the handshake rejects all others.

    While a client is connected, no client with another key can use its name.
    """

    public: str
    secret: str = field(repr=False)
    clients: frozenset[str]

    def __init__(self, public: str, secret: str, clients: Iterable[str]) -> None:
        for name, value in (("public", public), ("secret", secret), ("clients", frozenset(clients))):
            object.__setattr__(self, name, value)
        for key in (public, secret, *self.clients):
            _check(key)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The client's pair, and the server's public key."""

    public: str
    secret: str = field(repr=False)
    server: str

    def __post_init__(self) -> None:
        for key in (self.public, self.secret, self.server):
            _check(key)


def generate_keypair() -> tuple[str, str]:
    """Return a new public key and its secret key."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _check(key: str) -> None:
    """Raise `ValueError` for text that is not a key. The text may be a secret, so the error does not contain it."""
    if len(key) != 40:
        raise ValueError(
            f"a CURVE key has 40 characters and this one has {len(key)}. Make pairs with generate_keypair()."
        )
    if not _Z85.issuperset(key):
        raise ValueError("a CURVE key has a character that Z85 does not. Make pairs with generate_keypair().")


# Messages in ZeroMQ's queue of one connection, beyond those that the windows allow. A ROUTER that is `mandatory` and a
# DEALER refuse to send when the queue is full: then the peer does not read, and its connection ends.
HIGH_WATER = 1000
_LARGEST_HIGH_WATER = (1 << 31) - 1
DEAD_AFTER = 60  # seconds after which the kernel closes a TCP connection without a response
LINGER_MS = 200  # for the final messages; all data was flushed before
# ZeroMQ hands out small frames as views on a shared receive buffer of 8 KiB, which a single kept view keeps alive;
# frames up to this size are copied.
COPIED_FRAME = 8192
_DOMAIN = "mmrollouts"  # of the authentication; ZeroMQ distinguishes the servers of one context by it


class Change(enum.Enum):
    OPENED = enum.auto()
    BROKEN = enum.auto()
    DENIED = enum.auto()  # the server rejects this client's key


@dataclass(frozen=True, slots=True)
class ReceivedFrames:
    route: bytes  # identifies the connection
    user: str  # the client's public key, if the server requires keys
    frames: list[Buffer]


class Wake:
    """Ends the poll of the I/O thread, from any thread."""

    def __init__(self) -> None:
        self._reading, self._writing = system_sockets.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)

    def fileno(self) -> int:
        return self._reading.fileno()

    def wake_io_thread(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: a wake is pending; closed: no thread polls
            self._writing.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reading.recv(4096):
                pass

    def close(self) -> None:
        self._reading.close()
        self._writing.close()


_LARGEST_PORT = 65_535


class RouterSocket:
    """The socket of a server: binds, and identifies its connections by route."""

    def __init__(self, address: str, keys: ServerKeys | None, limits: LinkLimits, *, allow_remote: bool) -> None:
        check_bindable(address, keyed=keys is not None, allow_remote=allow_remote)
        self._keyed = keys is not None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            _configure(self._socket, address, limits)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if keys is not None:
                self._require_keys(keys)
            self._bind(address)
        except BaseException:
            self.close()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)

    def receive(self) -> ReceivedFrames | None:
        """Return the frames of the next message, or None."""
        try:
            route, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        user = str(frames[0].get("User-Id")) if self._keyed and frames else ""
        return ReceivedFrames(route.bytes, user, [_keep(frame) for frame in frames])

    def send(self, route: bytes, frames: Sequence[Buffer]) -> bool:
        """Send a message. Returns False if the connection has ended, or its peer does not read."""
        try:
            return _send(self._socket, [route, *frames])
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise

    def close(self) -> None:
        self._socket.close(LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _require_keys(self, keys: ServerKeys) -> None:
        self._authenticator = ThreadAuthenticator(self._context)
        allowed = SimpleNamespace(callback=lambda domain, key: key.decode() in keys.clients)
        self._authenticator.configure_curve_callback(_DOMAIN, allowed)
        self._authenticator.start()
        self._socket.curve_server = True
        self._socket.curve_publickey = keys.public.encode()
        self._socket.curve_secretkey = keys.secret.encode()
        self._socket.zap_domain = _DOMAIN.encode()

    def _bind(self, address: str) -> None:
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise LinkAddressError(address, f"cannot be bound: {error}", "Choose another address.") from error


class DealerSocket:
    """The socket of a client: one connection at a time."""

    def __init__(self, address: str, keys: ClientKeys | None, limits: LinkLimits) -> None:
        _host(address)
        self.address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._connect(keys, limits)
        except BaseException:
            self._context.destroy(0)
            raise

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def changes(self) -> list[Change]:
        """What happened to the connection since the last call."""
        found = []
        while self._monitor.poll(0):
            event: Any = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            change = _CHANGES.get(event["event"])
            if change is not None:
                found.append(change)
        return found

    def receive(self) -> ReceivedFrames | None:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return ReceivedFrames(b"", "", [_keep(frame) for frame in frames])

    def send(self, route: bytes, frames: Sequence[Buffer]) -> bool:
        """Send a message. Returns False if there is no connection, or the server does not read."""
        return _send(self._socket, frames)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(LINGER_MS)
        self._context.term()

    def _connect(self, keys: ClientKeys | None, limits: LinkLimits) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket, self.address, limits)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing for a connection that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if keys is not None:
            self._socket.curve_publickey = keys.public.encode()
            self._socket.curve_secretkey = keys.secret.encode()
            self._socket.curve_serverkey = keys.server.encode()
        self._monitor = self._socket.get_monitor_socket(sum(_CHANGES))
        self._monitor.linger = 0
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            raise LinkAddressError(
                self.address, f"cannot be connected to: {error}", "Write tcp://host:port."
            ) from error


_CHANGES = {
    zmq.Event.HANDSHAKE_SUCCEEDED: Change.OPENED,
    zmq.Event.DISCONNECTED: Change.BROKEN,
    zmq.Event.HANDSHAKE_FAILED_AUTH: Change.DENIED,
}


def check_bindable(address: str, *, keyed: bool, allow_remote: bool) -> None:
    """Raise `LinkAddressError` for an address that other machines can reach, unless allowed and protected by keys."""
    if _is_loopback(_host(address)):
        return
    if not allow_remote:
        raise LinkAddressError(
            address, "can be reached by other machines", "Bind to 127.0.0.1, or pass allow_remote=True and keys."
        )
    if not keyed:
        raise LinkAddressError(
            address,
            "would accept messages from any machine on the network",
            "Pass keys=ServerKeys(...) with the client keys.",
        )


def _host(address: str) -> str:
    """Return the host of "tcp://host:port". Raises `LinkAddressError` for anything else."""
    scheme, separator, rest = address.partition("://") if isinstance(address, str) else ("", "", "")
    host, colon, port = rest.rpartition(":")
    if not separator or scheme != "tcp" or not host or not colon:
        raise LinkAddressError(address, "is not tcp://host:port", "Write it like tcp://127.0.0.1:5555.")
    # ZeroMQ uses larger numbers modulo 65536 and would open another port.
    if port.isdecimal() and int(port[:6]) > _LARGEST_PORT:
        raise LinkAddressError(address, f"has a port larger than {_LARGEST_PORT}", "Choose another port.")
    return host.strip("[]")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _configure(socket: zmq.Socket[bytes], address: str, limits: LinkLimits) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, min(limits.send_messages + HIGH_WATER, _LARGEST_HIGH_WATER))
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.decode.max_total_bytes)
    socket.setsockopt(zmq.IPV6, "[" in address)
    # Without these options a connection to a dead machine keeps its queue for a quarter of an hour, and an idle one
    # stays open without limit.
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * DEAD_AFTER)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, DEAD_AFTER // 2)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, DEAD_AFTER // 6)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def _send(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> bool:
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    return True


def _keep(frame: zmq.Frame) -> Buffer:
    return frame.bytes if len(frame) <= COPIED_FRAME else frame.buffer
