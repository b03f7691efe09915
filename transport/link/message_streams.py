"""The two directions of one peer, without sockets: sequence numbers, acknowledgement, credit, resending, media.

An `Outbox` keeps sent messages until they are acknowledged; an `Inbox` keeps received messages until the application
acknowledges them. A connection keeps order and may break at any time; data in transit is then lost. When a new
connection opens, each inbox reports the last message that it received, and each outbox continues after that message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from renderers.byte_lru import ByteLRU
from renderers.media.source import MediaSource
from transport.errors import MalformedError
from transport.link.limits import FRAME_COST, NO_CREDIT, Credit
from transport.link.messages import NO_SESSION
from transport.wire.wire_format import Buffer

_REJECTED_KEPT = 1024  # more than are in flight on a connection, unless it has no other messages


def message_size(frames: Sequence[Buffer], media_sizes: Sequence[int]) -> int:
    """The size of a message for limits and credit, in bytes."""
    data = sum([memoryview(frame).nbytes for frame in frames]) + sum(media_sizes)
    return data + FRAME_COST * (len(frames) + len(media_sizes))


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A message without a sequence number: the frames of `encode_frames` and the media sources that they refer to."""

    frames: list[Buffer]
    sources: tuple[MediaSource, ...]
    size: int

    @classmethod
    def of(cls, frames: list[Buffer], sources: Sequence[MediaSource]) -> Payload:
        return cls(frames, tuple(sources), message_size(frames, [source.nbytes for source in sources]))


_WITHDRAWN = Payload([], (), 0)


class MediaCache(ByteLRU[str, MediaSource]):
    """The media sources that a link shares between its peers, by digest; each counts 512 bytes more than its data."""

    def keep(self, source: MediaSource) -> None:
        """Store a source. The caller has checked its bytes against its digest."""
        if source.digest not in self:
            self.put(source.digest, source, source.nbytes + FRAME_COST)


class Outbox:
    """The messages to one peer, within `limit`, numbered from 1."""

    def __init__(self, limit: Credit, known_blobs: int) -> None:
        self.acknowledged = 0
        self.bytes = 0
        self._limit = limit
        self._kept: dict[int, Payload] = {}  # by sequence number, ascending
        self._last = 0  # the highest number assigned
        self._cursor = 1  # the next number to send over this connection
        self._highest_sent = 0  # the highest number sent over any connection
        self._in_flight_bytes = 0  # bytes of the kept messages before the cursor
        self._credit = NO_CREDIT
        # Digests that the peer has; an evicted one causes one resend.
        self._known: ByteLRU[str, bool] = ByteLRU(known_blobs)
        self._reference_counts: dict[str, int] = {}  # digest -> kept messages that refer to it
        self._sources: dict[str, MediaSource] = {}
        self._requested: dict[str, None] = {}
        self._rejected: set[int] = set()  # kept messages that the receiver could not decode, and withdrawn ones

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def first_kept(self) -> int:
        return self.acknowledged + 1

    @property
    def unacknowledged(self) -> tuple[int, ...]:
        return tuple(self._kept)

    def has_room(self, size: int) -> bool:
        fits = len(self._kept) < self._limit.messages and self.bytes + size <= self._limit.bytes
        return fits or not self._kept

    def put(self, payload: Payload) -> int:
        self._last += 1
        self._kept[self._last] = payload
        self.bytes += payload.size
        for source in payload.sources:
            self._reference_counts[source.digest] = self._reference_counts.get(source.digest, 0) + 1
            self._sources.setdefault(source.digest, source)
        return self._last

    def resume(self, received: int | None, acknowledged: int, credit: Credit) -> int:
        """Continue over a new connection after message `received`; None: the receiver has none of this session.

        Returns the number of newly acknowledged messages, without the rejected and the withdrawn ones.
        """
        settled = 0
        self._requested.clear()
        if received is None:
            self._known.clear()
            self._cursor = self.first_kept
        else:
            if not self.acknowledged <= received <= self._last or acknowledged > received:
                raise MalformedError(
                    f"peer reports message {received} as received; {self.first_kept} to {self._last} are kept"
                )
            self._cursor = received + 1
            settled = self._release(acknowledged)
        self._in_flight_bytes = sum(each.size for number, each in self._kept.items() if number < self._cursor)
        self._credit = credit
        return settled

    def withdraw(self, max_size: int) -> dict[int, int]:
        """Drop the messages of more than `max_size` bytes that the peer has not received; return their sizes by number.

        Their numbers stay in use: a message without frames is sent in the place of each.
        """
        sizes = {n: each.size for n, each in self._kept.items() if n >= self._cursor and each.size > max_size}
        for number in sizes:
            self._drop(self._kept[number])
            self._kept[number] = _WITHDRAWN
        self._rejected.update(sizes)
        return sizes

    def acknowledge(self, acknowledged: int, credit: Credit) -> int:
        """Apply an acknowledgement of all messages up to this one. Returns how many are newly acknowledged."""
        if acknowledged >= self._cursor:
            raise MalformedError(f"peer acknowledges message {acknowledged}; the last one sent is {self._cursor - 1}")
        self._credit = credit
        return self._release(acknowledged)

    def reject(self, sequence: int) -> bool:
        """The receiver could not decode a message; its acknowledgement follows. False if already reported."""
        if sequence >= self._cursor:
            raise MalformedError(f"peer rejects message {sequence}; the last one sent is {self._cursor - 1}")
        if sequence not in self._kept or sequence in self._rejected:
            return False
        self._rejected.add(sequence)
        return True

    def next(self) -> tuple[int, Payload] | None:
        """Return the next message and its number, if credit allows it; the same one until `advance`."""
        payload = self._kept.get(self._cursor)
        in_flight = self._cursor - self.first_kept
        if payload is None or in_flight >= self._credit.messages:
            return None
        if in_flight and self._in_flight_bytes + payload.size > self._credit.bytes:
            return None
        return self._cursor, payload

    def advance(self) -> bool:
        """The message of `next` was sent. Returns True if it was sent for the first time."""
        self._in_flight_bytes += self._kept[self._cursor].size
        self._cursor += 1
        first_time = self._cursor - 1 > self._highest_sent
        self._highest_sent = max(self._highest_sent, self._cursor - 1)
        return first_time

    def next_blob(self, needed: Sequence[MediaSource]) -> MediaSource | None:
        """Return a media source to send now: one that the peer requested, or a `needed` one that it does not have."""
        requested = next(iter(self._requested), None)
        if requested is not None:
            return self._sources[requested]
        return next((source for source in needed if source.digest not in self._known), None)

    def peer_has(self, digest: str) -> None:
        """The peer sent this media source, so it has it; a request of the peer for it is still answered."""
        self._known.put(digest, True, 1)

    def blob_sent(self, digest: str) -> None:
        self._known.put(digest, True, 1)
        self._requested.pop(digest, None)

    def pull(self, digest: str) -> None:
        """The peer requests a media source; ignored if no kept message refers to it."""
        if digest in self._sources:
            self._requested[digest] = None

    def _release(self, acknowledged: int) -> int:
        count = 0
        while self.acknowledged < acknowledged:
            self.acknowledged += 1
            payload = self._kept.pop(self.acknowledged)
            self._in_flight_bytes -= payload.size
            count += self.acknowledged not in self._rejected
            self._rejected.discard(self.acknowledged)
            self._drop(payload)
        return count

    def _drop(self, payload: Payload) -> None:
        self.bytes -= payload.size
        for source in payload.sources:
            self._reference_counts[source.digest] -= 1
            if not self._reference_counts[source.digest]:
                del self._reference_counts[source.digest], self._sources[source.digest]
                self._requested.pop(source.digest, None)


@dataclass(slots=True, eq=False)
class Incoming:
    """A received message. It is complete when `missing` (digest -> size of media not received yet) is empty."""

    session: bytes
    sequence: int
    frames: list[Buffer]
    size: int
    media: dict[str, MediaSource] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)


class Inbox:
    """The messages from one peer, within its credit window."""

    def __init__(self, window: Credit) -> None:
        self.window = window
        self.session = NO_SESSION
        self.expected = 1
        self._granted = NO_CREDIT  # the largest credit sent over this connection
        self._pending: deque[Incoming] = deque()
        self._unacknowledged: dict[int, int] = {}  # sequence -> bytes, of the current session, ascending
        self._bytes = 0
        self._previous_unacknowledged: dict[tuple[bytes, int], int] = {}  # the same for earlier sessions
        self._previous_bytes = 0
        self._waiting: dict[str, list[Incoming]] = {}  # missing digest -> messages
        self.digests_to_pull: dict[str, None] = {}  # to request from the peer; an ordered set
        self._pull_sent: set[str] = set()  # digests requested over this connection
        # Sequence -> reason of messages of the current session that could not be decoded, ascending. An entry is
        # removed when a greeting of the peer shows that it no longer keeps the message, hence received the rejection.
        self._rejected: dict[int, str] = {}
        self.rejections_to_send: dict[int, str] = {}  # sequence -> reason, to send over this connection

    @property
    def received(self) -> int:
        return self.expected - 1

    @property
    def acknowledged(self) -> int:
        """The application has acknowledged all messages of the current session up to this one."""
        return next(iter(self._unacknowledged), self.expected) - 1

    @property
    def acknowledged_in_greeting(self) -> int:
        """`acknowledged`, limited to before the first rejected message whose REJECT may not have reached the peer.

        Over a connection, REJECT is sent before the ACK of its message; a greeting would be an ACK without REJECT.
        """
        return min(self.acknowledged, next(iter(self._rejected), self.expected) - 1)

    @property
    def idle(self) -> bool:
        """True if no message is undelivered or unacknowledged."""
        return not self._unacknowledged and not self._previous_unacknowledged

    @property
    def credit(self) -> Credit:
        if self._previous_bytes >= self.window.bytes:
            return NO_CREDIT
        return Credit(
            max(self.window.messages - len(self._previous_unacknowledged), 0), self.window.bytes - self._previous_bytes
        )

    def start(self, session: bytes, first: int) -> None:
        """A connection opened. The peer's `session` still keeps its messages from `first` on."""
        if session == self.session:
            if first > self.expected:
                raise MalformedError(f"peer has dropped messages {self.expected} to {first - 1} unacknowledged")
        else:
            self._end_session()
            self.session, self.expected = session, first
            self._rejected.clear()
        self._rejected = {number: reason for number, reason in self._rejected.items() if number >= first}
        self.rejections_to_send = dict(self._rejected)
        self._pull_sent.clear()
        self.digests_to_pull = dict.fromkeys(self._waiting)

    def grant(self, window: Credit) -> bool:
        """Change the window. Returns True if the peer must be notified."""
        changed = window != self.window
        self.window = window
        return changed

    def grant_credit(self) -> Credit:
        """Return the current credit, to be sent to the peer, which may use it until the connection breaks."""
        credit = self.credit
        self._granted = Credit(max(credit.messages, self._granted.messages), max(credit.bytes, self._granted.bytes))
        return credit

    def disconnect(self) -> None:
        """Reset the credit that was granted over the broken connection."""
        self._granted = NO_CREDIT

    def receive(self, sequence: int, frames: list[Buffer], media: Sequence[tuple[str, int]], store: MediaCache) -> bool:
        """Queue a message; False for a duplicate. Raises `MalformedError` for a gap, or beyond the credit.

        A message without frames takes the place of one that its sender withdrew, and is not queued.
        """
        if sequence < self.expected:
            return False
        if sequence > self.expected:
            raise MalformedError(f"received message {sequence} instead of {self.expected}")
        if not frames:
            self.expected += 1
            return True
        size = message_size(frames, [size for _, size in media])
        over = self._bytes + size > self._granted.bytes and self._unacknowledged
        if over or len(self._unacknowledged) >= self._granted.messages:
            raise MalformedError(f"message {sequence} of {size} bytes is beyond the peer's credit")
        incoming = Incoming(self.session, sequence, frames, size)
        for digest, expected_size in media:
            self._look_up(incoming, digest, expected_size, store)
        self._pending.append(incoming)
        self._unacknowledged[sequence] = size
        self._bytes += size
        self.expected += 1
        return True

    def receive_blob(self, source: MediaSource) -> None:
        """A media source was received; its bytes have been checked against its digest."""
        self.digests_to_pull.pop(source.digest, None)
        self._pull_sent.discard(source.digest)
        for incoming in self._waiting.pop(source.digest, ()):
            _check_size(source, incoming.missing.pop(source.digest))
            incoming.media[source.digest] = source

    def mark_pull_sent(self, digests: Sequence[str]) -> None:
        for digest in digests:
            self.digests_to_pull.pop(digest, None)
            self._pull_sent.add(digest)

    @property
    def ready(self) -> bool:
        return bool(self._pending) and not self._pending[0].missing

    def pop_ready(self) -> Incoming:
        """Remove and return the next message; it stays unacknowledged. Only if `ready`."""
        return self._pending.popleft()

    def return_to_front(self, incoming: Incoming) -> None:
        """Put a message of `pop_ready` back to the front of the queue."""
        self._pending.appendleft(incoming)

    def acknowledge(self, session: bytes, sequence: int) -> bool:
        """The application acknowledges a message. Returns True if an ACK must be sent."""
        if session == self.session and sequence in self._unacknowledged:
            self._bytes -= self._unacknowledged.pop(sequence)
            return True
        size = self._previous_unacknowledged.pop((session, sequence), None)
        if size is None:
            return False
        self._previous_bytes -= size
        return True

    def reject(self, session: bytes, sequence: int, reason: str) -> bool:
        """A message cannot be decoded; it counts as acknowledged. Returns True if the peer must be notified."""
        if not self.acknowledge(session, sequence):
            return False
        if session == self.session:
            self._rejected[sequence] = self.rejections_to_send[sequence] = reason
            self._rejected = dict(sorted(self._rejected.items())[-_REJECTED_KEPT:])
        return True

    def _look_up(self, incoming: Incoming, digest: str, size: int, store: MediaCache) -> None:
        source = store.get(digest)
        if source is None:
            incoming.missing[digest] = size
            self._waiting.setdefault(digest, []).append(incoming)
            if digest not in self._pull_sent:
                self.digests_to_pull[digest] = None
            return
        _check_size(source, size)
        incoming.media[digest] = source

    def _end_session(self) -> None:
        """End the peer's old session. Complete messages are still delivered; messages that miss media are dropped."""
        complete: deque[Incoming] = deque()
        while self.ready:
            complete.append(self._pending.popleft())
        for incoming in self._pending:
            self._bytes -= self._unacknowledged.pop(incoming.sequence)
        self._pending = complete
        self._waiting.clear()
        self._previous_unacknowledged.update(
            {(self.session, number): size for number, size in self._unacknowledged.items()}
        )
        self._previous_bytes += self._bytes
        self._unacknowledged, self._bytes = {}, 0


def _check_size(source: MediaSource, size: int) -> None:
    if source.nbytes != size:
        raise MalformedError(f"media sha256 {source.digest} has {source.nbytes} bytes and was announced with {size}")
