"""The errors of links; their root derives from `TransportError`."""

from __future__ import annotations

from transport.errors import DecodeError, TransportError


class LinkError(TransportError):
    """Root of the errors of links.

    Cure: that of the class that was raised.
    """


class LinkAddressError(LinkError, ValueError):
    """An address that cannot be bound or connected to, or must not be.

    Cure: write the address as `tcp://host:port`, and choose a free port.
    """

    def __init__(self, address: str, reason: str, cure: str) -> None:
        self.address = address
        self.reason = reason
        super().__init__(f"link address {address!r}: {reason}. {cure}")


class LinkTimeoutError(LinkError, TimeoutError):
    """A call did not finish within its timeout. `what` says what did not happen, such as "no message arrived".

    Cure: use a longer timeout, or check that the peer runs.
    """

    def __init__(self, what: str, timeout: float) -> None:
        self.what = what
        self.timeout = timeout
        super().__init__(f"{what} within {timeout:g} s. Use a longer timeout, or check the peer.")


class PeerLostError(LinkError):
    """The connection to a peer ended, or there is none.

    `unacknowledged`: the number of messages that its application did not receive, as far as is known here.

    Cure: repeat the unacknowledged work over a new connection: a client makes a new link, a server waits for
    `PeerConnected`.
    """

    def __init__(self, peer: str, reason: str, unacknowledged: int = 0) -> None:
        self.peer = peer
        self.reason = reason
        self.unacknowledged = unacknowledged
        super().__init__(
            f"peer {peer!r} {reason}; {unacknowledged} messages to it are not acknowledged and are not sent again. "
            "Repeat their work over a new connection: a client makes a new link, a server waits for `PeerConnected`."
        )


class LinkRefusedError(LinkError):
    """The server refuses this client, or this client refuses the server; a retry cannot succeed.

    Cure: correct what the text names (keys, version, address), then make a new link.
    """

    def __init__(self, address: str, reason: str) -> None:
        self.address = address
        self.reason = reason
        super().__init__(
            f"the link to {address} is refused: {reason.removesuffix('.')}. Correct that and make a new link."
        )


class MessageTooLargeError(LinkError):
    """A message is larger than the receiver accepts and was not queued; the link stays usable. Sizes are in bytes.

    Cure: send less data in one message, or raise `max_total_bytes` in `LinkLimits` at the receiver.
    """

    def __init__(self, size: int, allowed: int) -> None:
        self.size = size
        self.allowed = allowed
        super().__init__(
            f"the message has {size} bytes with its media and the receiver accepts at most {allowed}. Send less data "
            "in one message, or raise max_total_bytes in LinkLimits(decode=DecodeLimits(...)) at the receiver."
        )


class UndecodableMessageError(LinkError, DecodeError):
    """This process cannot decode a message of `peer`. It is dropped; the link stays usable.

    The `DecodeError` is chained. The sender is not notified.

    Cure: import the types of the message in this process, or raise its limits, as the chained `DecodeError` says.
    """

    def __init__(self, peer: str, error: DecodeError) -> None:
        self.peer = peer
        super().__init__(f"a message of peer {peer!r} cannot be decoded: {error} It is dropped; the link stays usable.")


class UnacknowledgedError(LinkError):
    """A link was closed before its peers received all messages. `counts`: the number of lost messages by peer.

    Cure: make `linger` longer, or let the peers receive before the link is closed.
    """

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts
        listed = ", ".join(f"{count} to {peer}" for peer, count in counts.items())
        super().__init__(
            f"the link was closed with messages unacknowledged: {listed}. Make `linger` longer, or let the peers "
            "receive before the link is closed."
        )


class LinkClosedError(LinkError):
    """The link is closed, its thread ended, or it was made by another process.

    Cure: make a new link.
    """

    def __init__(self, address: str, reason: str = "is closed") -> None:
        self.address = address
        self.reason = reason
        super().__init__(f"the link at {address} {reason}. Make a new one.")
