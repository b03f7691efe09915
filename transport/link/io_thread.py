"""The only thread that uses a link's sockets: it reads frames, updates the state, and sends."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TypeAlias

import zmq

from renderers.media.source import MediaSource
from transport.errors import DecodeError, MalformedError
from transport.link.client_connection import ClientConnection
from transport.link.errors import LinkClosedError
from transport.link.messages import Ack, Bye, Data, LinkMessage, Ping, from_frames, to_frames
from transport.link.peer import Peer
from transport.link.server_connections import ServerConnections
from transport.link.shared_state import SharedState
from transport.link.zmq_sockets import DealerSocket, ReceivedFrames, RouterSocket, Wake
from transport.wire.unpacking import build_media
from transport.wire.wire_format import Buffer

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
