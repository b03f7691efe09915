"""The types that a link returns to the application: deliveries, events and counters."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Delivery:
    """One received object.

    `session` identifies the sending link during the lifetime of its process; `sequence` numbers its messages to this
    process from 1. The pair is a permanent unique key of the message.
    """

    peer: str
    obj: Any
    session: str
    sequence: int


class PeerChange(enum.Enum):
    """The kinds of `PeerEvent`."""

    CONNECTED = "connected"
    LOST = "lost"  # silent for longer than `peer_timeout`
    LEFT = "left"  # it closed its link
    REPLACED = "replaced"  # another process took over its name
    REFUSED = "refused"  # one side sent data that violates the protocol
    REJECTED = "rejected"  # it could not decode a message of this process; its connection is unchanged
    FORGOTTEN = "forgotten"  # removed by the application, or to make room for a new peer


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """A change of a peer. `unacknowledged`: sequence numbers of the messages that the peer has not acknowledged."""

    change: PeerChange
    peer: str
    session: str
    reason: str = ""
    unacknowledged: tuple[int, ...] = field(default=(), repr=False)


@dataclass(slots=True)
class LinkStats:
    """Counters since the link was created. Bytes are those of the frames, without the framing bytes of ZeroMQ."""

    sent: int = 0  # messages sent for the first time
    resent: int = 0
    acknowledged: int = 0  # by the peers
    received: int = 0
    delivered: int = 0  # returned by `recv`
    duplicates_dropped: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    blobs_sent: int = 0
    blobs_received: int = 0
    blobs_pulled: int = 0  # requested from the peer, because they are not in the cache here
    refused: int = 0  # peers disconnected because of a protocol violation
    ignored: int = 0  # messages of refused or unknown peers
    lost: int = 0
    connections: int = 0
    undecodable: int = 0  # messages that arrived and could not be decoded
    rejected: int = 0  # messages that the peers could not decode
