"""Limits of the memory that a link uses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from transport.wire.limits import DecodeLimits, checked_limit

# Bytes of memory that one frame or media reference uses in addition to its data (an upper bound of measurements). If
# frames did not count, a peer could fill the memory with empty frames within its window.
FRAME_COST = 512
# The largest values that fit the fields of a greeting.
_MOST_MESSAGES = (1 << 32) - 1
_MOST_BYTES = (1 << 63) - 1
_MESSAGE_LIMITS = DecodeLimits(max_frames=1 << 14, max_total_bytes=1 << 30)


class Window(NamedTuple):
    """What one side of a connection accepts. It stores `messages` and `bytes` until the application receives them.

    `media_bytes`: media sources that it stores for later messages. `max_message`: bytes of one message.
    """

    messages: int
    bytes: int
    media_bytes: int
    max_message: int


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds of each connection, in messages and bytes; a server accepts at most `peers` connections.

    The size of a message includes its media, and 512 bytes for each frame. `send_*`: messages that the other
    application has not received. `receive_*`: received messages that this application has not read. One message is
    always accepted, so that memory can exceed `send_bytes` and `receive_bytes` by `decode.max_total_bytes`.
    `media_bytes`: media sources that are stored because later messages may refer to them.
    """

    send_messages: int = 1024
    send_bytes: int = 256 << 20
    receive_messages: int = 1024
    receive_bytes: int = 64 << 20
    media_bytes: int = 64 << 20
    peers: int = 256
    decode: DecodeLimits = _MESSAGE_LIMITS

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if each.name != "decode":
                value = checked_limit(f"LinkLimits.{each.name}", getattr(self, each.name), 1)
                object.__setattr__(self, each.name, value)
                most = _MOST_BYTES if each.name.endswith("_bytes") else _MOST_MESSAGES
                if value > most:
                    raise ValueError(f"LinkLimits.{each.name} is {value} and must be at most {most}.")

    @property
    def window(self) -> Window:
        return Window(self.receive_messages, self.receive_bytes, self.media_bytes, self.decode.max_total_bytes)

    @property
    def max_digests(self) -> int:
        """The largest number of media sources that one message may send, refer to and evict."""
        return self.decode.max_frames + self.media_bytes // FRAME_COST


# The types that a link returns to the application: deliveries, connections of peers, counters.


@dataclass(frozen=True, slots=True)
class Delivery:
    """One received object. `peer`: the name of the client that sent it; on a client, the address of the server."""

    peer: str
    obj: Any


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """A client connected; the messages of its connection follow."""

    peer: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection of a client ended; all messages received over it were returned before.

    `unacknowledged`: the number of messages sent to the client that its application did not receive, as far as is known
    here. They are not sent again.
    """

    peer: str
    reason: str
    unacknowledged: int


PeerEvent: TypeAlias = PeerConnected | PeerLost


@dataclass(slots=True)
class LinkStats:
    """Counters since the link was created. Bytes are those of the frames, without the framing bytes of ZeroMQ."""

    sent: int = 0  # messages
    received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    media_sent: int = 0  # media sources
    media_received: int = 0
    connections: int = 0
    lost: int = 0  # connections that ended, for any reason
    refused: int = 0  # connections that this process refused
    ignored: int = 0  # messages of connections that belong to no peer
    undecodable: int = 0
