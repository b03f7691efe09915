"""One connection to a peer, without sockets: what is queued, sent and received over it.

A connection keeps order. When it ends, its peer and all queued messages are dropped: the next connection starts anew.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from renderers.media.item import MediaSource
from renderers.process.caches import ByteLRU
from transport.errors import MalformedError, MessageTooLargeError, PeerLostError
from transport.link.limits import FRAME_COST, LinkLimits, LinkStats, Window
from transport.link.messages import Ack, Bye, Data, to_frames
from transport.wire.wire_format import Buffer


def message_size(frames: Sequence[Buffer], sources: Sequence[MediaSource]) -> int:
    """The size of a message for limits, in bytes; both sides compute the same."""
    data = sum([memoryview(frame).nbytes for frame in frames]) + sum([source.nbytes for source in sources])
    return data + FRAME_COST * (len(frames) + len(sources))


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A message: the frames of `encode_frames` and the media sources to which they refer."""

    frames: list[Buffer]
    sources: list[MediaSource]
    size: int

    @classmethod
    def of(cls, frames: list[Buffer], sources: list[MediaSource]) -> Payload:
        return cls(frames, sources, message_size(frames, sources))


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """A received message with the media to which it refers, by digest."""

    peer: Peer
    frames: list[Buffer]
    media: dict[str, MediaSource]
    size: int


class Peer:
    """`route`: the ZeroMQ routing id of the connection. `user`: the public key of the peer, if the server has keys.

    `window`: what the peer accepts. `last_received` and `last_sent` are in seconds of the clock of the caller.
    """

    def __init__(
        self, name: str, route: bytes, user: str, window: Window, limits: LinkLimits, stats: LinkStats, now: float
    ) -> None:
        self.name = name
        self.route = route
        self.user = user
        self.last_received = self.last_sent = now
        self.bye_sent = False
        self.unread = 0  # messages and events of this connection that the application has not received
        self._limits = limits
        self._stats = stats

        self._window = window
        self._queue: deque[Payload] = deque()
        self._in_flight: deque[int] = deque()  # sizes of the messages sent and not acknowledged
        self._queued_bytes = 0
        self._in_flight_bytes = 0
        self._acknowledged = 0
        # Digests that the peer stores. It evicts what the messages sent to it say, so both sides store the same.
        self._known: ByteLRU[str, bool] = ByteLRU(sys.maxsize)

        self._stored: dict[str, MediaSource] = {}
        self._stored_bytes = 0
        self._unread_messages = 0
        self._unread_bytes = 0
        self._read = 0
        self._ack_needed = False

    # -- sending

    @property
    def unacknowledged(self) -> int:
        """The number of messages that the application of the peer has not received."""
        return len(self._queue) + len(self._in_flight)

    def lost(self, reason: str) -> PeerLostError:
        return PeerLostError(self.name, reason, self.unacknowledged)

    def put(self, payload: Payload) -> bool:
        """Queue a message; False if the queue is full. Raises `MessageTooLargeError`."""
        if payload.size > self._window.max_message:
            raise MessageTooLargeError(payload.size, self._window.max_message)
        nbytes = self._queued_bytes + self._in_flight_bytes + payload.size
        fits = self.unacknowledged < self._limits.send_messages and nbytes <= self._limits.send_bytes
        if not fits and self.unacknowledged:
            return False
        self._queue.append(payload)
        self._queued_bytes += payload.size
        return True

    def next_to_send(self, *, leaving: bool = False) -> list[Buffer] | None:
        """Return the next message to send, which counts as sent. A link that is `leaving` ends with `Bye`."""
        if self._ack_needed:
            self._ack_needed = False
            return to_frames(Ack(self._read))
        if self._queue and self._peer_accepts(self._queue[0].size):
            return self._send(self._queue.popleft())
        if leaving and not self._queue and not self.bye_sent:
            self.bye_sent = True
            return to_frames(Bye())
        return None

    def receive_ack(self, ack: Ack) -> None:
        """Raises `MalformedError` for messages that were not sent."""
        count = ack.received - self._acknowledged
        if not 0 <= count <= len(self._in_flight):
            sent = self._acknowledged + len(self._in_flight)
            raise MalformedError(
                f"peer acknowledges {ack.received} messages after {self._acknowledged}; {sent} were sent"
            )
        self._acknowledged = ack.received
        for _ in range(count):
            self._in_flight_bytes -= self._in_flight.popleft()

    def confirm_all(self) -> None:
        """The process of the peer received every message that was sent."""
        self._in_flight.clear()

    def _peer_accepts(self, size: int) -> bool:
        if not self._in_flight:
            return True
        return len(self._in_flight) < self._window.messages and self._in_flight_bytes + size <= self._window.bytes

    def _send(self, payload: Payload) -> list[Buffer]:
        self._queued_bytes -= payload.size
        self._in_flight_bytes += payload.size
        self._in_flight.append(payload.size)
        new = [source for source in payload.sources if self._known.get(source.digest) is None]
        stored = tuple(source.digest for source in payload.sources if source.digest in self._known)
        for source in new:
            self._known.put(source.digest, True, source.nbytes + FRAME_COST)
        evicted = tuple(digest for digest, _ in self._known.evict_to(self._window.media_bytes))
        self._stats.sent += 1
        self._stats.media_sent += len(new)
        header = Data(tuple(source.digest for source in new), stored, evicted)
        return to_frames(header, [*(source.data for source in new), *payload.frames])

    # -- receiving

    def receive(self, data: Data, sources: Sequence[MediaSource], frames: list[Buffer]) -> Incoming:
        """Accept a message. `sources`: those that it sends, checked against their digests. Raises `DecodeError`."""
        limits = self._limits
        limits.decode.check("max_frames", len(frames) + len(data.sent) + len(data.stored))
        media = {source.digest: source for source in sources}
        for digest in data.stored:
            if digest not in self._stored:
                raise MalformedError(f"message refers to media sha256 {digest}, which is not stored here")
            media[digest] = self._stored[digest]
        size = message_size(frames, list(media.values()))
        limits.decode.check("max_total_bytes", size)
        over = self._unread_bytes + size > limits.receive_bytes and self._unread_messages
        if over or self._unread_messages >= limits.receive_messages:
            raise MalformedError(f"message of {size} bytes is beyond what this side of the connection accepts")
        self._store(sources, data.evicted)
        self._unread_messages += 1
        self._unread_bytes += size
        self._stats.received += 1
        self._stats.media_received += len(sources)
        return Incoming(self, frames, media, size)

    def mark_read(self, incoming: Incoming) -> None:
        """The application received a message."""
        self._unread_messages -= 1
        self._unread_bytes -= incoming.size
        self._read += 1
        self._ack_needed = True

    def _store(self, sources: Sequence[MediaSource], evicted: Sequence[str]) -> None:
        for source in sources:
            if source.digest in self._stored:
                raise MalformedError(f"message sends media sha256 {source.digest}, which is stored here")
            self._stored[source.digest] = source
            self._stored_bytes += source.nbytes + FRAME_COST
        for digest in evicted:
            removed = self._stored.pop(digest, None)
            if removed is None:
                raise MalformedError(f"message evicts media sha256 {digest}, which is not stored here")
            self._stored_bytes -= removed.nbytes + FRAME_COST
        if self._stored_bytes > self._limits.media_bytes:
            allowed = self._limits.media_bytes
            raise MalformedError(f"{self._stored_bytes} bytes of media are to be stored; {allowed} are allowed")
