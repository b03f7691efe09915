"""The one thread that touches a link's sockets: it reads, has the state take what came, and sends what is due."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from transport.errors import DecodeError
from transport.link.connections import Connections
from transport.link.errors import LinkError
from transport.link.messages import Blob, Refused, Reject, Signal, from_frames, to_frames
from transport.link.peer import Due, Peer
from transport.link.state import LinkState
from transport.wire.unpacking import build_media
from transport.wire.wire_format import Buffer

if TYPE_CHECKING:
    from transport.link.sockets import Arrival, DealerSocket, RouterSocket, Wake

    Socket: TypeAlias = RouterSocket | DealerSocket

_LOG = logging.getLogger("transport.link")

_BATCH = 256  # messages read, or sent to one peer, before the other direction gets its turn
_FULL_RETRY = 0.001  # seconds; ZeroMQ does not say when a ROUTER's queue to one peer has room again


class IoThread:
    """Runs from `start` until the state is closing, and then closes the socket."""

    def __init__(self, state: LinkState, socket: Socket, connections: Connections, wake: Wake) -> None:
        self._state = state
        self._socket = socket
        self._connections = connections
        self._wake = wake
        self._thread = threading.Thread(target=self._run, name=f"link {state.address}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        import zmq

        state, poller = self._state, zmq.Poller()
        try:
            poller.register(self._wake.fileno(), zmq.POLLIN)
            self._socket.register(poller)
            pause = 0.0
            while not self._parted():
                poller.poll(round(pause * 1000))
                pause = self._turn(poller)
            self._part()
        finally:
            with state.lock:
                state.ended = True
                state.announce()
            self._socket.close()
            self._wake.close()

    def _turn(self, poller: Any) -> float:
        """Read and write once. Returns for how many seconds nothing is to do unless something happens."""
        state = self._state
        with state.lock:
            self._wake.clear()
            state.heard_ring()
        self._connections.look(poller)
        drained = self._read()
        if drained:
            self._connections.drained(poller)
        with state.lock:
            now = time.monotonic()
            state.tick(now)
            self._connections.tend()
            pauses = [self._send_due(peer, now) for peer in list(state.peers.values())]
            for route, message in state.parting:
                self._socket.send(route, to_frames(message))
            state.parting.clear()
        if not drained:
            return 0.0
        if state.closing:
            pauses.append(max(state.part_by - now, 0.0))
        return min([*pauses, state.heartbeat / 2])

    def _read(self) -> bool:
        """Take what has arrived, up to a batch of it. Returns whether that was all."""
        for _ in range(_BATCH):
            arrival = self._socket.receive()
            if arrival is None:
                return True
            self._take(arrival)
        return False

    def _take(self, arrival: Arrival) -> None:
        state = self._state
        with state.lock:
            if self._connections.ignores(arrival):
                return
        try:
            message = from_frames(arrival.frames, state.limits.decode)
            # Hashing takes a while, so it happens outside the lock.
            content = build_media(message.digest, memoryview(message.data)) if isinstance(message, Blob) else message
        except DecodeError as error:
            with state.lock:
                self._connections.reject(arrival, error)
                state.announce()
            return
        with state.lock:
            state.stats.bytes_received += _size(arrival.frames)
            try:
                peer = self._connections.greeted(arrival, message)
                if peer is not None and not isinstance(content, Signal | Refused):
                    peer.take(content)  # type: ignore[arg-type]  # greetings belong to no peer
                    if isinstance(content, Reject):
                        self._rejected(peer, content)
                    state.mark_ready(peer)
            except (DecodeError, LinkError) as error:
                self._connections.reject(arrival, error)
            state.announce()

    def _rejected(self, peer: Peer, reject: Reject) -> None:
        self._state.report_rejected(peer, reject.reason)
        _LOG.error("peer %r could not decode message %d of this process: %s", peer.name, reject.sequence, reject.reason)

    def _send_due(self, peer: Peer, now: float) -> float:
        """Send a peer what is due to it. Returns in how many seconds to try again."""
        heartbeat, leaving = self._state.heartbeat, self._state.closing
        for _ in range(_BATCH):
            if peer.route is None or peer.broken:
                return heartbeat / 2
            due = peer.next_due(leaving=leaving)
            if due is None:
                if not peer.open or leaving or now - peer.last_sent < heartbeat:
                    return heartbeat / 2
                due = peer.ping()
            if not self._send_one(peer, peer.route, due, now):
                return _FULL_RETRY
        return 0.0

    def _send_one(self, peer: Peer, route: bytes, due: Due, now: float) -> bool:
        from transport.link.sockets import Sent

        frames = to_frames(due.message)
        outcome = self._socket.send(route, frames)
        if outcome is Sent.FULL:
            return False
        if outcome is Sent.GONE:
            self._connections.vanished(peer)
            return True
        due.done()
        peer.last_sent = now
        self._state.stats.bytes_sent += _size(frames)
        return True

    def _parted(self) -> bool:
        """Whether the link is closing and every peer that listens has answered BYE with BYE, or the time is over.

        Until a peer has answered, the acknowledgements before the BYE may be lost with the connection: closing a socket
        discards what has not been delivered. The peer would send those messages again, to the next life of this end.
        """
        state = self._state
        with state.lock:
            if not state.closing:
                return False
            return time.monotonic() >= state.part_by or not any(peer.listening for peer in state.peers.values())

    def _part(self) -> None:
        """Last words to peers that were not told yet: no greeting came back from them, or they do not read."""
        with self._state.lock:
            for peer in self._state.peers.values():
                if peer.route is None or peer.broken or peer.said_bye:
                    continue
                if peer.open and peer.ack_due:
                    self._socket.send(peer.route, to_frames(peer.acknowledgement()))
                self._socket.send(peer.route, to_frames(Signal.BYE))


def _size(frames: list[Buffer]) -> int:
    return sum([memoryview(frame).nbytes for frame in frames])
