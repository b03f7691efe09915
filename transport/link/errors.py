"""The errors of links; their root derives from `TransportError`."""

from __future__ import annotations

from transport.errors import DecodeError, TransportError

_MAX_LISTED = 5  # messages or peers listed in an error text


def shortened_list(texts: list[str], separator: str = ", ") -> str:
    """The first texts, and the number of the others."""
    more = [f"and {len(texts) - _MAX_LISTED} more"] if len(texts) > _MAX_LISTED else []
    return separator.join(texts[:_MAX_LISTED] + more)


class LinkError(TransportError):
    """Root of the errors of links."""


class LinkAddressError(LinkError, ValueError):
    """An address that cannot be bound or connected to, or must not be."""

    def __init__(self, address: str, reason: str, cure: str) -> None:
        self.address = address
        self.reason = reason
        super().__init__(f"link address {address!r}: {reason}. {cure}")


class LinkTimeoutError(LinkError, TimeoutError):
    """A call did not finish within its timeout. `what` says what did not happen, such as "no message arrived"."""

    def __init__(self, what: str, timeout: float) -> None:
        self.what = what
        self.timeout = timeout
        super().__init__(f"{what} within {timeout:g} s. Use a longer timeout, or check the peer.")


class PeerLostError(LinkError):
    """A peer has been silent for longer than `peer_timeout`, has left, or is unknown.

    `unacknowledged`: sequence numbers of the messages that it has not acknowledged.
    """

    def __init__(self, peer: str, reason: str, unacknowledged: tuple[int, ...] = (), cure: str = "") -> None:
        self.peer = peer
        self.reason = reason
        self.unacknowledged = unacknowledged
        if not cure:
            reason += f", with {len(unacknowledged)} messages unacknowledged"
            cure = "They are resent when it reconnects; to discard them, drop the peer or close the link."
        super().__init__(f"peer {peer!r} {reason}. {cure}")


class LinkRefusedError(LinkError):
    """The server refuses this client, or this client refuses the server; a retry cannot succeed."""

    def __init__(self, address: str, reason: str) -> None:
        self.address = address
        self.reason = reason
        super().__init__(
            f"the link to {address} is refused: {reason.removesuffix('.')}. Correct that and make a new link."
        )


class MessageTooLargeError(LinkError):
    """A message is larger than the limit of the receiver and was not sent; the link stays usable. Sizes are in bytes.

    `send` raises it and does not queue the message. If the message was queued before the receiver was connected, the
    message is dropped, and the next call raises: `sequences` are then the numbers of the dropped messages, and `size`
    is the size of the largest.
    """

    def __init__(self, size: int, allowed: int, sequences: tuple[int, ...] = ()) -> None:
        self.size = size
        self.allowed = allowed
        self.sequences = sequences
        subject = "the message has"
        if sequences:
            listed = shortened_list([str(sequence) for sequence in sequences])
            subject = f"message {listed} has" if len(sequences) == 1 else f"the largest of the messages {listed} has"
        super().__init__(
            f"{subject} {size} bytes with its media and the receiver accepts at most {allowed}. "
            "Send less data in one message, or raise max_total_bytes in LinkLimits(decode=DecodeLimits(...)) at the "
            "receiver."
        )


class MessageRejectedError(LinkError):
    """A peer could not decode messages that this process sent. The messages are lost; the link stays usable.

    `rejected` maps each sequence number to the reason that the peer gave. Each message is reported once, by the next
    `send`, `flush` or `close`, on a client also by `recv`.
    """

    def __init__(self, peer: str, rejected: dict[int, str]) -> None:
        self.peer = peer
        self.rejected = rejected
        reasons = [f"message {sequence}: {reason.removesuffix('.')}" for sequence, reason in rejected.items()]
        super().__init__(
            f"peer {peer!r} could not decode messages of this process: {shortened_list(reasons, '; ')}. "
            "Correct the cause and send them again; the link stays usable."
        )


class UndecodableMessageError(LinkError, DecodeError):
    """This process cannot decode a received message. The sender is notified; the link stays usable.

    `peer`, `session` and `sequence` have the meaning of those of `Delivery`; the `DecodeError` is chained.
    """

    def __init__(self, peer: str, session: str, sequence: int, error: DecodeError) -> None:
        self.peer = peer
        self.session = session
        self.sequence = sequence
        super().__init__(
            f"message {sequence} from peer {peer!r} cannot be decoded: {error} The message is not delivered, and "
            "its sender is notified; the link stays usable."
        )


class UnacknowledgedError(LinkError):
    """A link was closed before all messages were acknowledged. `counts`: number of messages by peer."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts
        listed = ", ".join(f"{count} to {peer}" for peer, count in counts.items())
        super().__init__(f"the link was closed with messages unacknowledged: {listed}. Call flush() before closing.")


class LinkClosedError(LinkError):
    """The link is closed, or its thread ended."""

    def __init__(self, address: str) -> None:
        self.address = address
        super().__init__(f"the link at {address} is closed. Make a new one.")
