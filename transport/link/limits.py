"""Limits of the memory that a link uses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from transport.wire.limits import DecodeLimits, checked_limit

# Bytes of memory that one frame or media reference uses in addition to its data (an upper bound of measurements). If
# frames did not count, a peer could fill the memory with empty frames within its credit.
FRAME_COST = 512
# The largest values that fit the fields of an ACK header.
_MOST_MESSAGES = (1 << 32) - 1
_MOST_BYTES = (1 << 63) - 1
_MESSAGE_LIMITS = DecodeLimits(max_frames=1 << 14, max_total_bytes=1 << 30)


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds in messages and bytes. The size of a message includes its media, and 512 bytes for each frame.

    `send_*`: per peer, the messages that are queued or unacknowledged. `receive_*`: the messages that were received and
    not yet acknowledged by this application. The connected peers of a server get equal shares of `receive_*`; the
    shares change when a peer connects. After a server restart a client may hold up to twice this amount: messages of
    the old and of the new session. One message is always accepted, so memory can exceed the bound by
    `decode.max_total_bytes` per peer. `blob_bytes`: the cache of media sources. `known_blobs`: per peer, the digests
    remembered as sent. `peers`: the peers of a server.
    """

    send_messages: int = 1024
    send_bytes: int = 256 << 20
    receive_messages: int = 4096
    receive_bytes: int = 512 << 20
    blob_bytes: int = 512 << 20
    known_blobs: int = 1 << 16
    peers: int = 1024
    decode: DecodeLimits = _MESSAGE_LIMITS

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if each.name != "decode":
                value = checked_limit(f"LinkLimits.{each.name}", getattr(self, each.name), 1)
                object.__setattr__(self, each.name, value)
                most = _MOST_BYTES if each.name.endswith("_bytes") else _MOST_MESSAGES
                if value > most:
                    raise ValueError(f"LinkLimits.{each.name} is {value} and must be at most {most}.")


class Credit(NamedTuple):
    """The number of messages, and of bytes, that may be unacknowledged."""

    messages: int
    bytes: int


NO_CREDIT = Credit(0, 0)
