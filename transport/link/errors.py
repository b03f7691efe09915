"""What can go wrong on a link, under the package's root."""

from __future__ import annotations

from transport.errors import DecodeError, TransportError

_LISTED = 5  # messages that an error quotes


class LinkError(TransportError):
    """Root of the errors of links."""


class LinkAddressError(LinkError, ValueError):
    """An address that cannot be bound or connected to, or must not be."""

    def __init__(self, address: str, reason: str, cure: str) -> None:
        self.address = address
        self.reason = reason
        super().__init__(f"link address {address!r}: {reason}. {cure}")


class LinkTimeoutError(LinkError, TimeoutError):
    """What a call waited for did not happen in time."""

    def __init__(self, what: str, timeout: float) -> None:
        self.what = what
        self.timeout = timeout
        super().__init__(f"{what} did not happen within {timeout:g} s. Wait longer, or look at what the peer is doing.")


class PeerLostError(LinkError):
    """A peer has been silent for longer than `peer_timeout`, has left, or was never there.

    `unacknowledged` are the sequence numbers of what it was sent and has not acknowledged.
    """

    def __init__(self, peer: str, reason: str, unacknowledged: tuple[int, ...] = ()) -> None:
        self.peer = peer
        self.reason = reason
        self.unacknowledged = unacknowledged
        super().__init__(
            f"peer {peer!r} {reason}, with {len(unacknowledged)} messages unacknowledged. They are sent again when it "
            "comes back; to give up on it, drop the peer or close the link."
        )


class LinkRefusedError(LinkError):
    """The other side refuses this client, or this client its server, and trying again would not help."""

    def __init__(self, address: str, reason: str) -> None:
        self.address = address
        self.reason = reason
        super().__init__(f"the link to {address} is refused: {reason}. Correct that and make a new link.")


class MessageTooLargeError(LinkError):
    """A message is larger than the receiver takes, so it was not sent. Sizes are in bytes."""

    def __init__(self, size: int, allowed: int) -> None:
        self.size = size
        self.allowed = allowed
        super().__init__(
            f"the message has {size} bytes with its media and the receiver takes {allowed}. "
            "Send it in parts, or give the receiver LinkLimits(decode=DecodeLimits(max_total_bytes=...))."
        )


class MessageRejectedError(LinkError):
    """A peer could not decode messages that this process sent. They are lost, and the link goes on.

    `rejected` has, by sequence number, what the peer says. Raised once for each message, by the next `send`, `flush` or
    `close`, on a client also by `recv`.
    """

    def __init__(self, peer: str, rejected: dict[int, str]) -> None:
        self.peer = peer
        self.rejected = rejected
        listed = "; ".join(f"message {sequence}: {reason}" for sequence, reason in list(rejected.items())[:_LISTED])
        more = f"; and {len(rejected) - _LISTED} more" if len(rejected) > _LISTED else ""
        super().__init__(
            f"peer {peer!r} could not decode what was sent to it, and did not get it. It says of {listed}{more} "
            "Correct that and send it again; the link goes on."
        )


class UndecodableMessageError(LinkError, DecodeError):
    """A message arrived that this process cannot decode. Its sender is told, and the link goes on.

    `peer`, `session` and `sequence` are those of a `Delivery`; the `DecodeError` that says why is chained.
    """

    def __init__(self, peer: str, session: str, sequence: int, error: DecodeError) -> None:
        self.peer = peer
        self.session = session
        self.sequence = sequence
        super().__init__(
            f"message {sequence} from peer {peer!r} cannot be decoded: {error} The message is not delivered and its "
            "sender is told so; the link goes on."
        )


class UnacknowledgedError(LinkError):
    """A link was closed before everything sent was acknowledged. `counts` has the number of messages by peer."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts
        listed = ", ".join(f"{count} to {peer}" for peer, count in counts.items())
        super().__init__(f"the link was closed with messages unacknowledged: {listed}. Call flush() before closing.")


class LinkClosedError(LinkError):
    """The link was closed, or its thread ended."""

    def __init__(self, address: str) -> None:
        self.address = address
        super().__init__(f"the link at {address} is closed. Make a new one.")
