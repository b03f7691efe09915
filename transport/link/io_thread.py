"""The only thread that uses a link's sockets: it reads frames, updates the state, and sends."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import zmq

from renderers.media.item import MediaSource
from transport.errors import (
    DecodeError,
    LinkClosedError,
    LinkRefusedError,
    LinkTimeoutError,
    MalformedError,
    PeerLostError,
    TransportError,
)
from transport.link.limits import LinkLimits, LinkStats, PeerConnected, PeerEvent, PeerLost
from transport.link.messages import (
    MAX_REASON,
    Ack,
    Bye,
    Data,
    Hello,
    LinkMessage,
    Ping,
    Refused,
    Welcome,
    from_frames,
    is_valid_name,
    to_frames,
)
from transport.link.peer import Incoming, Peer
from transport.link.zmq_sockets import Change, DealerSocket, ReceivedFrames, RouterSocket, Wake
from transport.wire.decoding import build_media
from transport.wire.wire_format import Buffer

T = TypeVar("T")


class SharedState:
    """All methods except the constructor, `wait` and `wait_async` are called under `lock`.

    `address` and `wake`, which ends the poll of the I/O thread, are set when the socket exists.
    """

    address: str
    wake: Callable[[], None]

    def __init__(self, limits: LinkLimits, heartbeat: float, peer_timeout: float) -> None:
        if not 0 < 2 * heartbeat <= peer_timeout:
            raise ValueError(
                f"peer_timeout is {peer_timeout:g} s and heartbeat {heartbeat:g} s. "
                "Make the heartbeat positive and the timeout at least twice that."
            )
        self.lock = threading.Condition()
        self.limits = limits
        self.heartbeat = heartbeat
        self.peer_timeout = peer_timeout
        self.stats = LinkStats()
        self.peers: dict[str, Peer] = {}  # the connected ones, by name
        self.first_messages: list[tuple[bytes, LinkMessage]] = []  # by route; sent before those of peers
        self.failure: TransportError | None = None  # why no message can be sent or received any more
        self.unreported = 0  # unacknowledged messages lost by `failure`, until a call has raised it
        self.closing = False
        self.close_by = 0.0  # `time.monotonic` at which a closing link stops waiting for its peers
        # Seconds during which the I/O thread ran. A process that was stopped or suspended received nothing from its
        # peers; that time must not count as silence of the peers.
        self.active_seconds = 0.0
        self._last_advance = time.monotonic()
        # What the application has not received, in order, with the connection to which it belongs.
        self._unread: deque[tuple[Peer, Incoming | PeerEvent]] = deque()
        self._departed: set[Peer] = set()  # ended connections with unread messages or events
        self._wake_requested = False
        self._process = os.getpid()
        self._async_waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    # -- callers

    def check_process(self) -> None:
        """Raise `LinkClosedError` in a child process after a fork, in which the lock may be held without an owner."""
        if os.getpid() != self._process:
            raise LinkClosedError(self.address, f"was made by process {self._process}, before this one was forked")

    def wait(self, attempt: Callable[[], T | None], timeout: float | None, what: str) -> T:
        """Call `attempt` under the lock until it returns a value other than None, which must be true; return it."""
        if timeout is not None and math.isnan(timeout):
            raise ValueError(f"timeout is {timeout}. Pass a number of seconds, or None for no limit.")
        self.check_process()
        with self.lock:
            longest = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
            result = self.lock.wait_for(lambda: self._attempt(attempt), longest)
        if result is None:
            raise LinkTimeoutError(what, timeout or 0.0)
        return result

    async def wait_async(self, attempt: Callable[[], T | None]) -> T:
        """`wait` for an event loop."""
        self.check_process()
        event = asyncio.Event()
        waiter = (asyncio.get_running_loop(), event)
        try:
            while True:
                with self.lock:
                    event.clear()
                    result = self._attempt(attempt)
                    if result is not None:
                        return result
                    self._async_waiters.add(waiter)
                await event.wait()
        finally:
            with self.lock:
                self._async_waiters.discard(waiter)

    def _attempt(self, attempt: Callable[[], T | None]) -> T | None:
        if self.closing:
            raise LinkClosedError(self.address)
        result = attempt()
        if result is None and self.failure is not None:
            self.unreported = 0
            raise copy.copy(self.failure)  # the callers' threads would share its traceback
        return result

    def notify_waiters(self) -> None:
        self.lock.notify_all()
        for loop, event in self._async_waiters:
            with contextlib.suppress(RuntimeError):  # the loop was closed during the call
                loop.call_soon_threadsafe(event.set)
        self._async_waiters.clear()

    # -- the I/O thread

    def wake_io_thread(self) -> None:
        if not self._wake_requested:
            self._wake_requested = True
            self.wake()

    def begin_turn(self, now: float) -> None:
        """Let `active_seconds` follow the time, by no more than a heartbeat, and accept the next wake."""
        self.active_seconds += min(now - self._last_advance, self.heartbeat)
        self._last_advance = now
        self._wake_requested = False

    def is_silent(self, since: float) -> bool:
        """Whether nothing has been received for `peer_timeout`. `since` is in `active_seconds`."""
        return self.active_seconds - since > self.peer_timeout

    def fail(self, error: TransportError, unacknowledged: int = 0) -> None:
        """Every further call raises `error`, after all received messages; the first error is kept."""
        if self.failure is None:
            self.failure = error
            self.unreported = unacknowledged
        self.notify_waiters()

    # -- peers and what was received of them

    @property
    def occupied_places(self) -> int:
        """The number of connections that use memory: unread messages are kept when a connection ends."""
        return len(self.peers) + len(self._departed)

    def add_peer(self, peer: Peer, *, report: bool) -> None:
        self.peers[peer.name] = peer
        self.stats.connections += 1
        if report:
            self.add_unread(peer, PeerConnected(peer.name))
        self.notify_waiters()

    def remove_peer(self, peer: Peer, reason: str, *, report: bool) -> None:
        """End a connection. With `report`, the application receives `PeerLost` after its messages."""
        del self.peers[peer.name]
        self.stats.lost += 1
        if report:
            self._departed.add(peer)
            self.add_unread(peer, PeerLost(peer.name, reason, peer.unacknowledged))
        self.notify_waiters()

    def add_unread(self, peer: Peer, item: Incoming | PeerEvent) -> None:
        peer.unread += 1
        self._unread.append((peer, item))
        self.notify_waiters()

    def next_unread(self) -> tuple[Peer, Incoming | PeerEvent] | None:
        """Remove and return what was received first; None if there is nothing."""
        if not self._unread:
            return None
        peer, item = self._unread.popleft()
        peer.unread -= 1
        if not peer.unread:
            self._departed.discard(peer)
        return peer, item

    def return_unread(self, peer: Peer, item: Incoming | PeerEvent) -> None:
        """Undo `next_unread`."""
        peer.unread += 1
        self._unread.appendleft((peer, item))
        self.notify_waiters()


# The connections of a server: which peer each one belongs to, and which ones are accepted or refused.


_MAX_LISTED = 5  # peers listed in an error text


class ServerConnections:
    """A server's side of `io_thread.Connections`. A route identifies one connection; a name has at most one at a time.

    A client that connects again before the end of its old connection was noticed replaces that connection.
    """

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._routes: dict[bytes, Peer] = {}

    def find(self, name: str) -> Peer:
        """Return the peer with this name. Raises `PeerLostError` if none is connected."""
        peer = self._state.peers.get(name)
        if peer is None:
            names = [repr(each) for each in self._state.peers]
            listed = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
            raise PeerLostError(name, f"is not connected (connected: {listed or 'none'})")
        return peer

    def refuse(self, peer: Peer, reason: str) -> None:
        """End a connection; its client receives the reason as `LinkRefusedError`."""
        self._refuse_route(peer.route, reason)
        self.end(peer, f"was refused: {reason}")

    def end(self, peer: Peer, reason: str) -> None:
        """End a connection."""
        del self._routes[peer.route]
        self._state.remove_peer(peer, reason, report=True)

    # -- called by the I/O thread

    def handle_socket_changes(self) -> None:
        """Nothing to do: a ROUTER socket reports no changes."""

    def handle(self, received: ReceivedFrames, message: LinkMessage) -> Peer | None:
        """Handle a message about the connection itself; return the peer of any other message."""
        peer = self._routes.get(received.route)
        if peer is None:
            if isinstance(message, Hello):
                self._welcome(received, message)
            else:
                self._state.stats.ignored += 1
            return None
        peer.last_received = self._state.active_seconds
        if isinstance(message, Bye):
            if not peer.bye_sent:
                self._state.first_messages.append((peer.route, Bye()))
            self.end(peer, "closed its link")
        elif isinstance(message, Refused):
            self.end(peer, f"refuses this server: {message.reason}")
        elif isinstance(message, Hello | Welcome):
            self.refuse(peer, "a client greets once, with HELLO")
        else:
            return peer
        return None

    def reject(self, received: ReceivedFrames, error: DecodeError) -> None:
        """Refuse the connection, which violated the protocol."""
        peer = self._routes.get(received.route)
        if peer is not None:
            self.refuse(peer, str(error))
        else:
            self._refuse_route(received.route, str(error))

    def handle_broken(self, peer: Peer) -> None:
        self.end(peer, "closed its connection, or its process ended")

    def end_dead_connections(self, *, drained: bool) -> None:
        """End the connections that have been silent for too long."""
        for peer in list(self._state.peers.values()):
            if self._state.is_silent(peer.last_received):
                # For a client that was only stopped: without this message it waits for the server for `peer_timeout`.
                self._state.first_messages.append((peer.route, Bye()))
                self.end(peer, f"has been silent for {self._state.peer_timeout:g} s")

    def _welcome(self, received: ReceivedFrames, hello: Hello) -> None:
        state = self._state
        if not is_valid_name(hello.name):
            raise MalformedError(f"client name of {len(hello.name)} characters")
        old = state.peers.get(hello.name)
        if old is not None and old.user != received.user:
            self._refuse_route(received.route, f"the name {hello.name!r} is used by a client with another key")
            return
        if old is not None:
            self.refuse(old, "another process took over this name; give each worker its own name")
        if state.occupied_places >= state.limits.peers:
            self._refuse_route(received.route, f"the server has {state.limits.peers} peers, which is its limit")
            return
        peer = Peer(
            hello.name, received.route, received.user, hello.window, state.limits, state.stats, state.active_seconds
        )
        self._routes[peer.route] = peer
        state.first_messages.append((peer.route, Welcome(state.limits.window)))
        state.add_peer(peer, report=True)

    def _refuse_route(self, route: bytes, reason: str) -> None:
        self._state.stats.refused += 1
        self._state.first_messages.append((route, Refused(reason[:MAX_REASON])))


# The connection of a client to its server. A client has one; when it ends, the link is of no further use.


_ROUTE = b""  # a DEALER socket has one connection


class ClientConnection:
    """A client's side of `io_thread.Connections`. The only peer is the server; its name is its address."""

    def __init__(self, state: SharedState, socket: DealerSocket, name: str) -> None:
        self._state = state
        self._socket = socket
        self._name = name
        self._greeted = False
        self._broken = False

    @property
    def server(self) -> Peer | None:
        """The server, while it is connected."""
        return self._state.peers.get(self._state.address)

    # -- called by the I/O thread

    def handle_socket_changes(self) -> None:
        """Greet over a new connection, and notice a broken one."""
        for change in self._socket.changes():
            if change is Change.DENIED:
                self._end(LinkRefusedError(self._state.address, "the server does not accept this client's key"))
            elif change is Change.OPENED and not self._greeted:
                self._greeted = True
                self._state.first_messages.append((_ROUTE, Hello(self._name, self._state.limits.window)))
            elif change is Change.BROKEN and self._greeted:
                self._broken = True

    def handle(self, received: ReceivedFrames, message: LinkMessage) -> Peer | None:
        """Handle a message about the connection itself; return the server for any other message."""
        state, server = self._state, self.server
        if state.failure is not None:
            return None
        if isinstance(message, Refused):
            self._end(LinkRefusedError(state.address, message.reason[:MAX_REASON]))
        elif server is None:
            if not isinstance(message, Welcome):
                raise MalformedError("the first message of the server is not WELCOME")
            now = state.active_seconds
            state.add_peer(
                Peer(state.address, _ROUTE, "", message.window, state.limits, state.stats, now), report=False
            )
        elif isinstance(message, Bye):
            if server.bye_sent:  # the server confirms everything
                server.confirm_all()
            else:
                state.first_messages.append((_ROUTE, Bye()))
            self._lose("closed its link")
        else:
            server.last_received = state.active_seconds
            return server
        return None

    def reject(self, received: ReceivedFrames, error: DecodeError) -> None:
        self._state.stats.refused += 1
        self._state.first_messages.append((_ROUTE, Refused(str(error)[:MAX_REASON])))
        reason = f"the server sent data that violates the protocol: {error}"
        self._end(LinkRefusedError(self._state.address, reason))

    def handle_broken(self, peer: Peer) -> None:
        """A message could not be sent."""
        self._broken = True

    def end_dead_connections(self, *, drained: bool) -> None:
        """Fail if the connection broke and all frames received over it have been read, or the server is silent."""
        server = self.server
        if self._broken and drained:
            self._lose("closed its connection, or its process ended")
        elif self._state.is_silent(server.last_received if server is not None else 0.0):
            what = "has been silent for" if server is not None else "did not answer within"
            self._lose(f"{what} {self._state.peer_timeout:g} s")

    def _lose(self, reason: str) -> None:
        server = self.server
        self._end(server.lost(reason) if server is not None else PeerLostError(self._state.address, reason))

    def _end(self, error: LinkRefusedError | PeerLostError) -> None:
        server = self.server
        unacknowledged = 0
        if server is not None:
            unacknowledged = server.unacknowledged
            self._state.remove_peer(server, str(error), report=False)
        self._state.fail(error, unacknowledged)


Socket: TypeAlias = RouterSocket | DealerSocket
# Their methods are called under the link's lock.
Connections: TypeAlias = ServerConnections | ClientConnection

_BATCH = 256  # messages read, or sent to one peer, before the thread switches the direction


class IoThread(threading.Thread):
    """Runs from `start` until the link is closed or has failed, and then closes the socket."""

    def __init__(self, state: SharedState, socket: Socket, connections: Connections, wake: Wake) -> None:
        super().__init__(name=f"link {state.address}", daemon=True)
        self._state = state
        self._socket = socket
        self._connections = connections
        self._wake = wake
        # The media in use, by digest: what several peers send is stored once.
        self._media: weakref.WeakValueDictionary[str, MediaSource] = weakref.WeakValueDictionary()

    def run(self) -> None:
        state = self._state
        try:
            poller = zmq.Poller()
            poller.register(self._wake.fileno(), zmq.POLLIN)
            self._socket.register(poller)
            pause = 0.0
            while not self._may_end():
                poller.poll(round(pause * 1000))
                pause = self._run_once()
            self._send_last_messages()
        finally:
            with state.lock:
                state.fail(LinkClosedError(state.address, "has ended"))
            self._socket.close()
            self._wake.close()

    def _run_once(self) -> float:
        """Read and write once. Returns the seconds to sleep if no event happens."""
        state = self._state
        now = time.monotonic()
        with state.lock:
            self._wake.clear()
            state.begin_turn(now)
            self._connections.handle_socket_changes()
        drained = self._read()
        with state.lock:
            self._connections.end_dead_connections(drained=drained)
            for route, message in state.first_messages:
                self._socket.send(route, to_frames(message))
            state.first_messages.clear()
            complete = all(list(map(self._send_to_peer, list(state.peers.values()))))
            if not drained or not complete:
                return 0.0
            until_closed = max(state.close_by - now, 0.0) if state.closing else state.heartbeat
            return min(state.heartbeat / 2, until_closed)

    def _read(self) -> bool:
        """Handle up to one batch of received messages. Returns True if no more are waiting."""
        for _ in range(_BATCH):
            received = self._socket.receive()
            if received is None:
                return True
            self._handle_frames(received)
        return False

    def _handle_frames(self, received: ReceivedFrames) -> None:
        state = self._state
        try:
            message, following = from_frames(received.frames, state.limits)
            sources = []
            if isinstance(message, Data):  # hashing is slow, so it runs outside the lock
                sources = [self._check_media(*each) for each in zip(message.sent, following, strict=False)]
            with state.lock:
                state.stats.bytes_received += _size(received.frames)
                peer = self._connections.handle(received, message)
                if peer is not None:
                    _handle_message(state, peer, message, sources, following)
        except DecodeError as error:
            with state.lock:
                self._connections.reject(received, error)

    def _check_media(self, digest: str, data: Buffer) -> MediaSource:
        """Return a sent media source. Raises `ChecksumError` unless its bytes have the digest."""
        return self._media.setdefault(digest, build_media(digest, memoryview(data)))

    def _send_to_peer(self, peer: Peer) -> bool:
        """Send a batch of the messages that a peer is to get now. Returns True if no more are left."""
        state = self._state
        for _ in range(_BATCH):
            frames = peer.next_to_send(leaving=state.closing)
            if frames is None:
                if state.active_seconds - peer.last_sent < state.heartbeat:
                    return True
                frames = to_frames(Ping())
            if not self._socket.send(peer.route, frames):
                self._connections.handle_broken(peer)
                return True
            peer.last_sent = state.active_seconds
            state.stats.bytes_sent += _size(frames)
        return False

    def _may_end(self) -> bool:
        """Whether the link failed, or is closing and every peer has answered BYE, or `close_by` has passed.

        Until a peer has answered, what was sent before the BYE may be lost: closing a socket discards frames.
        """
        state = self._state
        with state.lock:
            if not state.closing:
                return state.failure is not None
            return not state.peers or time.monotonic() >= state.close_by

    def _send_last_messages(self) -> None:
        """Send BYE to the peers that have not received it, because they do not read."""
        with self._state.lock:
            for peer in self._state.peers.values():
                if not peer.bye_sent:
                    self._socket.send(peer.route, to_frames(Bye()))


def _handle_message(
    state: SharedState, peer: Peer, message: LinkMessage, sources: list[MediaSource], following: list[Buffer]
) -> None:
    if isinstance(message, Data):
        state.add_unread(peer, peer.receive(message, sources, following[len(sources) :]))
    elif isinstance(message, Ack):
        peer.receive_ack(message)
        state.notify_waiters()
    elif not isinstance(message, Ping):
        raise MalformedError(f"{type(message).__name__} at a time when it is not allowed")


def _size(frames: list[Buffer]) -> int:
    return sum([memoryview(frame).nbytes for frame in frames])
