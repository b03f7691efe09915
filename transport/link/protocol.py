"""Both directions of one peer without any socket: sequence numbers, acknowledgement, credit, resending, media.

An `Outbox` keeps what was sent until it is acknowledged; an `Inbox` keeps what has arrived until the application
acknowledges it. A connection keeps order and may break at any moment, losing whatever was on its way. When a new one
opens, each inbox says how far it has come and each outbox goes on from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from renderers.media.source import MediaSource
from transport.errors import MalformedError
from transport.link.blobs import BlobStore, KnownDigests
from transport.link.limits import FRAME_COST, NO_CREDIT, Credit
from transport.link.messages import NO_SESSION
from transport.wire.wire_format import Buffer

_REJECTED_KEPT = 1024  # more than a connection has under way, unless it carries nothing else


def message_size(frames: Sequence[Buffer], media_sizes: Sequence[int]) -> int:
    """What a message counts for on both sides, in bytes."""
    carried = sum([memoryview(frame).nbytes for frame in frames]) + sum(media_sizes)
    return carried + FRAME_COST * (len(frames) + len(media_sizes))


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A message before it has a number: the frames of `encode_frames` and the media they leave out."""

    frames: list[Buffer]
    sources: tuple[MediaSource, ...]
    size: int

    @classmethod
    def of(cls, frames: list[Buffer], sources: Sequence[MediaSource]) -> Payload:
        return cls(frames, tuple(sources), message_size(frames, [source.nbytes for source in sources]))


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    sequence: int
    payload: Payload


class Outbox:
    """What goes to one peer, within `limit`, numbered from 1."""

    def __init__(self, limit: Credit, known_blobs: int) -> None:
        self.acknowledged = 0
        self.bytes = 0
        self._limit = limit
        self._kept: dict[int, Outgoing] = {}  # ascending
        self._last = 0  # the highest number given
        self._cursor = 1  # the next number to put on this connection
        self._furthest = 0  # the highest number ever put on one
        self._flying = 0  # bytes of what is kept and before the cursor
        self._credit = NO_CREDIT
        self._known = KnownDigests(known_blobs)
        self._users: dict[str, int] = {}  # digest -> kept messages that refer to it
        self._sources: dict[str, MediaSource] = {}
        self._asked: dict[str, None] = {}
        self._rejected: set[int] = set()  # kept messages that the receiver could not decode

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def first_kept(self) -> int:
        return self.acknowledged + 1

    @property
    def unacknowledged(self) -> tuple[int, ...]:
        return tuple(self._kept)

    @property
    def largest(self) -> int:
        """Bytes of the largest message kept."""
        return max((each.payload.size for each in self._kept.values()), default=0)

    def has_room(self, size: int) -> bool:
        fits = len(self._kept) < self._limit.messages and self.bytes + size <= self._limit.bytes
        return fits or not self._kept

    def put(self, payload: Payload) -> int:
        """Take a message and return its number."""
        self._last += 1
        self._kept[self._last] = Outgoing(self._last, payload)
        self.bytes += payload.size
        for source in payload.sources:
            self._users[source.digest] = self._users.get(source.digest, 0) + 1
            self._sources.setdefault(source.digest, source)
        return self._last

    def resume(self, received: int | None, acknowledged: int, credit: Credit) -> int:
        """Go on over a new connection to a receiver that has everything up to `received`; None: it knows nothing.

        Returns how many messages its acknowledgement settles; those that it rejected do not count.
        """
        settled = 0
        self._asked.clear()
        if received is None:
            self._known.clear()
            self._cursor = self.first_kept
        else:
            if not self.acknowledged <= received <= self._last or acknowledged > received:
                raise MalformedError(
                    f"peer says it has message {received} and {self.first_kept} to {self._last} are kept"
                )
            self._cursor = received + 1
            settled = self._release(acknowledged)
        self._flying = sum(each.payload.size for number, each in self._kept.items() if number < self._cursor)
        self._credit = credit
        return settled

    def acknowledge(self, acknowledged: int, credit: Credit) -> int:
        """The receiver's application has everything up to here. Returns how many messages that settles."""
        if acknowledged >= self._cursor:
            raise MalformedError(f"peer acknowledges message {acknowledged} and {self._cursor - 1} is the last sent")
        self._credit = credit
        return self._release(acknowledged)

    def reject(self, sequence: int) -> bool:
        """The receiver could not decode a message; it acknowledges it next. False if it said so before."""
        if sequence >= self._cursor:
            raise MalformedError(f"peer rejects message {sequence} and {self._cursor - 1} is the last sent")
        if sequence not in self._kept or sequence in self._rejected:
            return False
        self._rejected.add(sequence)
        return True

    def next(self) -> Outgoing | None:
        """What may be sent now; the same again until `advance`."""
        outgoing = self._kept.get(self._cursor)
        if outgoing is None:
            return None
        flying = self._cursor - self.first_kept
        if flying >= self._credit.messages:
            return None
        if flying and self._flying + outgoing.payload.size > self._credit.bytes:
            return None
        return outgoing

    def advance(self) -> bool:
        """`next` was sent. Returns whether that was for the first time."""
        self._flying += self._kept[self._cursor].payload.size
        self._cursor += 1
        fresh = self._cursor - 1 > self._furthest
        self._furthest = max(self._furthest, self._cursor - 1)
        return fresh

    def blob_for(self, outgoing: Outgoing) -> MediaSource | None:
        """A source that must be sent before this message."""
        return next((source for source in outgoing.payload.sources if source.digest not in self._known), None)

    def asked_blob(self) -> MediaSource | None:
        """A source that the peer pulled."""
        digest = next(iter(self._asked), None)
        return None if digest is None else self._sources[digest]

    def blob_sent(self, digest: str) -> None:
        self._known.add(digest)
        self._asked.pop(digest, None)

    def peer_has(self, digest: str) -> None:
        """The peer sent this source itself."""
        self._known.add(digest)

    def pull(self, digest: str) -> bool:
        """The peer lacks a source. False if no message that is kept refers to it."""
        if digest not in self._sources:
            return False
        self._asked[digest] = None
        return True

    def _release(self, acknowledged: int) -> int:
        count = 0
        while self.acknowledged < acknowledged:
            self.acknowledged += 1
            payload = self._kept.pop(self.acknowledged).payload
            self.bytes -= payload.size
            self._flying -= payload.size
            count += self.acknowledged not in self._rejected
            self._rejected.discard(self.acknowledged)
            for source in payload.sources:
                self._users[source.digest] -= 1
                if not self._users[source.digest]:
                    del self._users[source.digest], self._sources[source.digest]
                    self._asked.pop(source.digest, None)
        return count


@dataclass(slots=True, eq=False)
class Incoming:
    """A message that arrived. It may be handed out once `missing`, the sizes of media still to come, is empty."""

    session: bytes
    sequence: int
    frames: list[Buffer]
    size: int
    media: dict[str, MediaSource] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)


class Inbox:
    """What comes from one peer, within the window that it is granted."""

    def __init__(self, window: Credit) -> None:
        self.window = window
        self.session = NO_SESSION
        self.expected = 1
        self._told = NO_CREDIT  # the most that the peer was told on this connection
        self._pending: deque[Incoming] = deque()
        self._unacknowledged: dict[int, int] = {}  # number -> bytes, of the current session, ascending
        self._bytes = 0
        self._leftover: dict[tuple[bytes, int], int] = {}  # the same of sessions before, which are dead
        self._leftover_bytes = 0
        self._waiting: dict[str, list[Incoming]] = {}  # by a digest that they lack
        self._wanted: dict[str, None] = {}  # digests to pull
        self._pulled: set[str] = set()  # asked for on this connection
        # Messages of the current session that could not be decoded, ascending, and why. The peer is known to have heard
        # of it once it keeps the message no longer, which its next greeting says.
        self._rejected: dict[int, str] = {}
        self._unsaid: dict[int, str] = {}  # those to be said on this connection

    @property
    def received(self) -> int:
        return self.expected - 1

    @property
    def acknowledged(self) -> int:
        """Everything of the current session up to here is acknowledged by the application."""
        return next(iter(self._unacknowledged), self.expected) - 1

    @property
    def safe_to_forget(self) -> int:
        """`acknowledged` as a greeting has it: up to a rejected message that the peer may not have heard of yet.

        On a connection REJECT goes before the ACK of its message; a greeting would be an ACK without it.
        """
        return min(self.acknowledged, next(iter(self._rejected), self.expected) - 1)

    @property
    def idle(self) -> bool:
        """Nothing waits for the application, or for its acknowledgement."""
        return not self._unacknowledged and not self._leftover

    @property
    def credit(self) -> Credit:
        if self._leftover_bytes >= self.window.bytes:
            return NO_CREDIT
        return Credit(max(self.window.messages - len(self._leftover), 0), self.window.bytes - self._leftover_bytes)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Digests to ask the peer for."""
        return tuple(self._wanted)

    def start(self, session: bytes, first: int) -> None:
        """A connection opened over which the peer's `session` keeps its messages from `first` on."""
        if session == self.session:
            if first > self.expected:
                raise MalformedError(f"peer has dropped messages {self.expected} to {first - 1} unacknowledged")
        else:
            self._retire()
            self.session, self.expected = session, first
            self._rejected.clear()
        self._rejected = {number: reason for number, reason in self._rejected.items() if number >= first}
        self._unsaid = dict(self._rejected)
        self._pulled.clear()
        self._wanted = dict.fromkeys(self._waiting)

    def grant(self, window: Credit) -> bool:
        """Change the window; True if the peer should be told."""
        changed = window != self.window
        self.window = window
        return changed

    def tell_credit(self) -> Credit:
        """The credit as it is now, for the peer: until the connection breaks it may make use of this much."""
        credit = self.credit
        self._told = Credit(max(credit.messages, self._told.messages), max(credit.bytes, self._told.bytes))
        return credit

    def disconnect(self) -> None:
        """The connection is gone, and with it what was told over it."""
        self._told = NO_CREDIT

    def take(self, sequence: int, frames: list[Buffer], media: Sequence[tuple[str, int]], store: BlobStore) -> bool:
        """Queue a message; False if it was here before. Raises `MalformedError` for a gap or a breach of credit."""
        if sequence < self.expected:
            return False
        if sequence > self.expected:
            raise MalformedError(f"message {sequence} came where {self.expected} was due")
        size = message_size(frames, [size for _, size in media])
        over = self._bytes + size > self._told.bytes and self._unacknowledged
        if over or len(self._unacknowledged) >= self._told.messages:
            raise MalformedError(f"message {sequence} of {size} bytes is beyond the peer's credit")
        incoming = Incoming(self.session, sequence, frames, size)
        for digest, expected_size in media:
            self._look_up(incoming, digest, expected_size, store)
        self._pending.append(incoming)
        self._unacknowledged[sequence] = size
        self._bytes += size
        self.expected += 1
        return True

    def take_blob(self, source: MediaSource) -> None:
        """A source arrived, its bytes already checked against its digest."""
        self._wanted.pop(source.digest, None)
        self._pulled.discard(source.digest)
        for incoming in self._waiting.pop(source.digest, ()):
            _check_size(source, incoming.missing.pop(source.digest))
            incoming.media[source.digest] = source

    def pulled(self, digests: Sequence[str]) -> None:
        """These were asked for."""
        for digest in digests:
            self._wanted.pop(digest, None)
            self._pulled.add(digest)

    @property
    def ready(self) -> bool:
        return bool(self._pending) and not self._pending[0].missing

    def hand_out(self) -> Incoming:
        """The next message; it stays unacknowledged. Only when `ready`."""
        return self._pending.popleft()

    def give_back(self, incoming: Incoming) -> None:
        """A message that was handed out comes first again."""
        self._pending.appendleft(incoming)

    def acknowledge(self, session: bytes, sequence: int) -> bool:
        """The application is done with a message. True if the peer should be told."""
        if session == self.session and sequence in self._unacknowledged:
            self._bytes -= self._unacknowledged.pop(sequence)
            return True
        size = self._leftover.pop((session, sequence), None)
        if size is None:
            return False
        self._leftover_bytes -= size
        return True

    def reject(self, session: bytes, sequence: int, reason: str) -> bool:
        """A message cannot be decoded, so the application is done with it. True if the peer should be told."""
        if not self.acknowledge(session, sequence):
            return False
        if session == self.session:
            self._rejected[sequence] = self._unsaid[sequence] = reason
            self._rejected = dict(sorted(self._rejected.items())[-_REJECTED_KEPT:])
        return True

    def next_rejected(self) -> tuple[int, str] | None:
        """What the peer is to be told it sent in vain; the same again until `rejection_said`."""
        return next(iter(self._unsaid.items()), None)

    def rejection_said(self, sequence: int) -> None:
        del self._unsaid[sequence]

    def _look_up(self, incoming: Incoming, digest: str, size: int, store: BlobStore) -> None:
        source = store.find(digest)
        if source is None:
            incoming.missing[digest] = size
            self._waiting.setdefault(digest, []).append(incoming)
            if digest not in self._pulled:
                self._wanted[digest] = None
            return
        _check_size(source, size)
        incoming.media[digest] = source

    def _retire(self) -> None:
        """The peer's old session is over. What came whole is still handed out; what waits for media never will be."""
        whole: deque[Incoming] = deque()
        while self.ready:
            whole.append(self._pending.popleft())
        for incoming in self._pending:
            self._bytes -= self._unacknowledged.pop(incoming.sequence)
        self._pending = whole
        self._waiting.clear()
        self._leftover.update({(self.session, number): size for number, size in self._unacknowledged.items()})
        self._leftover_bytes += self._bytes
        self._unacknowledged, self._bytes = {}, 0


def _check_size(source: MediaSource, size: int) -> None:
    if source.nbytes != size:
        raise MalformedError(f"media sha256 {source.digest} has {source.nbytes} bytes and was announced with {size}")
