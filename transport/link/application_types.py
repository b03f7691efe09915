"""The types that a link returns to the application: deliveries, connections of peers, counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias


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
