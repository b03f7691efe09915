"""The errors of links; their root derives from `TransportError`."""

from __future__ import annotations

from transport.errors import DecodeError, TransportError

_MAX_LISTED = 5  # messages listed in an error text


class LinkError(TransportError):
    """Root of the errors of links."""


class LinkAddressError(LinkError, ValueError):
    """An address that cannot be bound or connected to, or must not be."""

    def __init__(self, address: str, reason: str, cure: str) -> None:
        self.address = address
        self.reason = reason
        super().__init__(f"link address {address!r}: {reason}. {cure}")


class LinkTimeoutError(LinkError, TimeoutError):
    """A call did not finish within its timeout. `what` names the event that it waited for."""

    def __init__(self, what: str, timeout: float) -> None:
        self.what = what
        self.timeout = timeout
        super().__init__(f"{what} did not happen within {timeout:g} s. Use a longer timeout, or check the peer.")


class PeerLostError(LinkError):
    """A peer has been silent for longer than `peer_timeout`, has left, or is unknown.

    `unacknowledged`: sequence numbers of the messages that it has not acknowledged.
    """

    def __init__(self, peer: str, reason: str, unacknowledged: tuple[int, ...] = ()) -> None:
        self.peer = peer
        self.reason = reason
        self.unacknowledged = unacknowledged
        super().__init__(
            f"peer {peer!r} {reason}, with {len(unacknowledged)} messages unacknowledged. They are resent when it "
            "reconnects; to discard them, drop the peer or close the link."
        )


class LinkRefusedError(LinkError):
    """The server refuses this client, or this client refuses the server; a retry cannot succeed."""

    def __init__(self, address: str, reason: str) -> None:
        self.address = address
        self.reason = reason
        super().__init__(f"the link to {address} is refused: {reason}. Correct that and make a new link.")


class MessageTooLargeError(LinkError):
    """A message is larger than the limit of the receiver and was not sent. Sizes are in bytes."""

    def __init__(self, size: int, allowed: int) -> None:
        self.size = size
        self.allowed = allowed
        super().__init__(
            f"the message has {size} bytes with its media and the receiver accepts at most {allowed}. "
            "Send it in parts, or give the receiver LinkLimits(decode=DecodeLimits(max_total_bytes=...))."
        )


class MessageRejectedError(LinkError):
    """A peer could not decode messages that this process sent. The messages are lost; the link stays usable.

    `rejected` maps each sequence number to the reason that the peer gave. Each message is reported once, by the next
    `send`, `flush` or `close`, on a client also by `recv`.
    """

    def __init__(self, peer: str, rejected: dict[int, str]) -> None:
        self.peer = peer
        self.rejected = rejected
        listed = "; ".join(f"message {sequence}: {reason}" for sequence, reason in list(rejected.items())[:_MAX_LISTED])
        more = f"; and {len(rejected) - _MAX_LISTED} more" if len(rejected) > _MAX_LISTED else ""
        super().__init__(
            f"peer {peer!r} could not decode messages of this process: {listed}{more} "
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
