"""One peer: its inbox and outbox, and the next message to send to it."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from renderers.media.source import MediaSource
from transport.link.application_types import LinkStats, PeerChange
from transport.link.errors import MessageRejectedError, MessageTooLargeError, PeerLostError
from transport.link.limits import Credit, LinkLimits
from transport.link.message_streams import Inbox, MediaCache, Outbox, Payload, message_size
from transport.link.messages import (
    PULL_BATCH,
    Ack,
    Blob,
    Data,
    Greeting,
    Hello,
    LinkMessage,
    Pull,
    Reject,
    Signal,
    Welcome,
)


class Peer:
    """`route`: the ZeroMQ routing id of its connection; None before its greeting."""

    def __init__(self, name: str, limits: LinkLimits, window: Credit, store: MediaCache, stats: LinkStats) -> None:
        self.name = name
        self.owner = ""  # the public key that first used the name
        self.session = uuid.uuid4().bytes  # of the messages to this peer
        self.route: bytes | None = None
        self.state = PeerChange.LOST
        self.last_received = 0.0
        self.last_sent = 0.0
        self.inbox = Inbox(window)
        self.outbox = Outbox(Credit(limits.send_messages, limits.send_bytes), limits.known_blobs)
        self.max_message: int | None = None  # bytes that the peer accepts; unknown before its greeting
        self.ack_needed = False
        self.greeting: Callable[[Greeting], Hello | Welcome] | None = None  # makes the message of the greeting to send
        self.open = False  # both sides of this connection have greeted
        self.broken = False  # `route` accepts no more data; received frames are still to be read
        self.bye_sent = False
        self.rejected: dict[int, str] = {}  # sequence -> reason, until reported to the application
        self.too_large: dict[int, int] = {}  # the same, sequence -> size, of messages that were not sent
        self._limits = limits
        self._store = store
        self._stats = stats

    @property
    def connected(self) -> bool:
        return self.state is PeerChange.CONNECTED

    @property
    def listening(self) -> bool:
        """Whether messages sent now can reach the peer."""
        return self.open and self.connected and not self.broken

    def put(self, payload: Payload) -> int:
        """Queue a message. Raises `MessageTooLargeError`."""
        if self.max_message is not None and payload.size > self.max_message:
            raise MessageTooLargeError(payload.size, self.max_message)
        return self.outbox.put(payload)

    def greet(self, theirs: Greeting, first: int | None = None) -> None:
        """Apply the greeting of the other side. `first`: the first message to expect of a new session."""
        self.inbox.start(theirs.session, theirs.first_kept if first is None else first)
        same_session = theirs.receiving_session == self.session
        received, acknowledged = (theirs.received, theirs.acknowledged) if same_session else (None, 0)
        self._stats.acknowledged += self.outbox.resume(received, acknowledged, theirs.credit)
        self.max_message = theirs.max_message
        self.too_large |= self.outbox.withdraw(theirs.max_message)
        self.ack_needed = True  # their new session may have changed the credit
        self.open = True

    def disconnect(self) -> None:
        """Reset the state of the connection; inbox and outbox are kept for the next one."""
        self.route, self.greeting, self.open, self.broken, self.bye_sent = None, None, False, False, False
        self.inbox.disconnect()

    def lost(self, reason: str) -> PeerLostError:
        return PeerLostError(self.name, reason, self.outbox.unacknowledged)

    def check_rejected(self) -> None:
        """Raise `MessageRejectedError`, once for each message that the peer could not decode.

        Raises `MessageTooLargeError`, once for each message that was queued before the limit of the peer was known.
        """
        if self.too_large and self.max_message is not None:
            too_large, self.too_large = self.too_large, {}
            raise MessageTooLargeError(max(too_large.values()), self.max_message, tuple(too_large))
        if self.rejected:
            rejected, self.rejected = self.rejected, {}
            raise MessageRejectedError(self.name, rejected)

    def receive(self, message: Data | Ack | Reject | MediaSource | Pull) -> None:
        """Handle a message; a blob comes as its media source. Raises `DecodeError` for a protocol violation."""
        match message:
            case Data(sequence, media, frames):
                limits = self._limits.decode
                limits.check("max_frames", len(frames) + len(media))
                limits.check("max_total_bytes", message_size(frames, [size for _, size in media]))
                if self.inbox.receive(sequence, frames, media, self._store):
                    self._stats.received += bool(frames)
                    self.ack_needed |= not frames
                else:
                    self._stats.duplicates_dropped += 1
            case Ack(session, acknowledged, credit):
                if session == self.session:
                    self._stats.acknowledged += self.outbox.acknowledge(acknowledged, credit)
            case Reject(session, sequence, reason):
                if session == self.session and self.outbox.reject(sequence):
                    self._stats.rejected += 1
                    self.rejected[sequence] = reason
            case MediaSource():
                self._stats.blobs_received += 1
                self._store.keep(message)
                self.outbox.peer_has(message.digest)
                self.inbox.receive_blob(message)
            case Pull(digests):
                for digest in digests:
                    self.outbox.pull(digest)

    def next_to_send(self, *, leaving: bool = False) -> LinkMessage | None:
        """Return the next message to send; the same one until `mark_sent`. Data needs a greeting and credit.

        A link that is `leaving` sends no more data, only acknowledgements and then BYE.
        """
        if self.greeting is not None:
            return self.greeting(self._position())
        if not self.open:
            return None
        rejection = next(iter(self.inbox.rejections_to_send.items()), None)
        if rejection is not None:
            return Reject(self.inbox.session, *rejection)
        if self.ack_needed:
            return self.acknowledgement()
        if leaving:
            return None if self.bye_sent else Signal.BYE
        wanted = tuple(self.inbox.digests_to_pull)[:PULL_BATCH]
        if wanted:
            return Pull(wanted)
        outgoing = self.outbox.next()
        source = self.outbox.next_blob(outgoing[1].sources if outgoing is not None else ())
        if source is not None:
            return Blob(source.digest, source.data)
        if outgoing is None:
            return None
        sequence, payload = outgoing
        return Data(sequence, tuple((each.digest, each.nbytes) for each in payload.sources), payload.frames)

    def mark_sent(self, message: LinkMessage) -> None:
        """A message of `next_to_send` was sent."""
        match message:
            case Hello() | Welcome():
                self.greeting, self.ack_needed = None, False
            case Reject(_, sequence):
                del self.inbox.rejections_to_send[sequence]
            case Ack():
                self.ack_needed = False
            case Signal.BYE:
                self.bye_sent = True
            case Pull(digests):
                self.inbox.mark_pull_sent(digests)
                self._stats.blobs_pulled += len(digests)
            case Blob(digest, data):
                self._store.keep(MediaSource(digest, memoryview(data)))  # so that the peer need not send it to us
                self.outbox.blob_sent(digest)
                self._stats.blobs_sent += 1
            case Data():
                if self.outbox.advance():
                    self._stats.sent += 1
                else:
                    self._stats.resent += 1

    def acknowledgement(self) -> Ack:
        return Ack(self.inbox.session, self.inbox.acknowledged, self.inbox.grant_credit())

    def answer_to_bye(self) -> list[LinkMessage]:
        """Return the response to BYE, which confirms all earlier messages; empty if this side sent BYE first."""
        if not self.open or self.broken or self.bye_sent:
            return []
        return [self.acknowledgement(), Signal.BYE] if self.ack_needed else [Signal.BYE]

    def _position(self) -> Greeting:
        return Greeting(
            self.session,
            self.outbox.first_kept,
            self.inbox.session,
            self.inbox.received,
            self.inbox.acknowledged_in_greeting,
            self.inbox.grant_credit(),
            self._limits.decode.max_total_bytes,
        )
