"""The only thread that uses a link's sockets: it reads frames, updates the state, and sends."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from transport.errors import DecodeError
from transport.link.application_types import PeerChange
from transport.link.client_connection import ClientConnection
from transport.link.messages import Blob, Refused, Reject, Signal, from_frames, to_frames
from transport.link.peer import Peer
from transport.link.server_connections import ServerConnections
from transport.link.shared_state import SharedState
from transport.wire.unpacking import build_media
from transport.wire.wire_format import Buffer

if TYPE_CHECKING:
    from transport.link.zmq_sockets import DealerSocket, ReceivedFrames, RouterSocket, Wake

    Socket: TypeAlias = RouterSocket | DealerSocket

# Their methods are called under the link's lock, except `handle_socket_changes` and `handle_drained`.
Connections: TypeAlias = ServerConnections | ClientConnection

_LOG = logging.getLogger("transport.link")

_BATCH = 256  # messages read, or sent to one peer, before the thread switches the direction
_FULL_RETRY = 0.001  # seconds; ZeroMQ does not signal when a ROUTER's queue to one peer has room again


class IoThread(threading.Thread):
    """Runs from `start` until the link is closing, and then closes the socket."""

    def __init__(self, state: SharedState, socket: Socket, connections: Connections, wake: Wake) -> None:
        super().__init__(name=f"link {state.address}", daemon=True)
        self._state = state
        self._socket = socket
        self._connections = connections
        self._wake = wake

    def run(self) -> None:
        import zmq

        state, poller = self._state, zmq.Poller()
        try:
            poller.register(self._wake.fileno(), zmq.POLLIN)
            self._socket.register(poller)
            pause = 0.0
            while not self._may_close():
                poller.poll(round(pause * 1000))
                pause = self._run_once(poller)
            self._send_last_messages()
        finally:
            with state.lock:
                state.ended = True
                state.notify_waiters()
            self._socket.close()
            self._wake.close()

    def _run_once(self, poller: Any) -> float:
        """Read and write once. Returns the seconds to sleep if no event happens."""
        state = self._state
        with state.lock:
            self._wake.clear()
            state.wake_requested = False
        self._connections.handle_socket_changes(poller)
        drained = self._read()
        if drained:
            self._connections.handle_drained(poller)
        with state.lock:
            now = time.monotonic()
            state.advance_clock(now)
            self._connections.check_silence()
            pauses = [self._send_to_peer(peer, now) for peer in list(state.peers.values())]
            for route, message in state.final_messages:
                self._socket.send(route, to_frames(message))
            state.final_messages.clear()
        if not drained:
            return 0.0
        if state.closing:
            pauses.append(max(state.close_by - now, 0.0))
        return min([*pauses, state.heartbeat / 2])

    def _read(self) -> bool:
        """Handle up to one batch of received frames. Returns True if no more are waiting."""
        for _ in range(_BATCH):
            received = self._socket.receive()
            if received is None:
                return True
            self._handle_frames(received)
        return False

    def _handle_frames(self, received: ReceivedFrames) -> None:
        state = self._state
        with state.lock:
            if self._connections.should_ignore(received):
                return
        try:
            message = from_frames(received.frames, state.limits.decode)
            # Hashing is slow, so it runs outside the lock.
            content = build_media(message.digest, memoryview(message.data)) if isinstance(message, Blob) else message
        except DecodeError as error:
            with state.lock:
                self._connections.reject(received, error)
                state.notify_waiters()
            return
        with state.lock:
            state.stats.bytes_received += _size(received.frames)
            try:
                peer = self._connections.handle(received, message)
                if peer is not None and not isinstance(content, Signal | Refused):
                    peer.receive(content)  # type: ignore[arg-type]  # greetings belong to no peer
                    if isinstance(content, Reject):
                        state.report(peer, PeerChange.REJECTED, content.reason)
                        _LOG.error(
                            "peer %r could not decode message %d of this process: %s",
                            peer.name,
                            content.sequence,
                            content.reason,
                        )
                    state.mark_ready(peer)
            except DecodeError as error:
                self._connections.reject(received, error)
            state.notify_waiters()

    def _send_to_peer(self, peer: Peer, now: float) -> float:
        """Send the messages that a peer is to get now. Returns the seconds until the next attempt."""
        from transport.link.zmq_sockets import Sent

        heartbeat, leaving = self._state.heartbeat, self._state.closing
        for _ in range(_BATCH):
            if peer.route is None or peer.broken:
                return heartbeat / 2
            message = peer.next_to_send(leaving=leaving)
            if message is None:
                if not peer.open or leaving or now - peer.last_sent < heartbeat:
                    return heartbeat / 2
                message = Signal.PING
            frames = to_frames(message)
            outcome = self._socket.send(peer.route, frames)
            if outcome is Sent.FULL:
                return _FULL_RETRY
            if outcome is Sent.NO_ROUTE:
                self._connections.handle_lost_connection(peer)
                continue
            peer.mark_sent(message)
            peer.last_sent = now
            self._state.stats.bytes_sent += _size(frames)
        return 0.0

    def _may_close(self) -> bool:
        """Whether the link is closing and every reachable peer has answered BYE with BYE, or `close_by` has passed.

        Until a peer has answered, the acknowledgements sent before the BYE may be lost: closing a socket discards
        undelivered frames. The peer would then resend those messages to the next session of this process.
        """
        state = self._state
        with state.lock:
            if not state.closing:
                return False
            return time.monotonic() >= state.close_by or not any(peer.listening for peer in state.peers.values())

    def _send_last_messages(self) -> None:
        """Send BYE to the peers that have not received it: those that did not greet back, or do not read."""
        with self._state.lock:
            for peer in self._state.peers.values():
                if peer.route is None or peer.broken or peer.bye_sent:
                    continue
                if peer.open and peer.ack_needed:
                    self._socket.send(peer.route, to_frames(peer.acknowledgement()))
                self._socket.send(peer.route, to_frames(Signal.BYE))


def _size(frames: list[Buffer]) -> int:
    return sum([memoryview(frame).nbytes for frame in frames])
