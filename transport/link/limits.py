"""How much memory a link may use."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from transport.wire.limits import DecodeLimits, checked_limit

# What one frame or media reference costs a process beside its bytes, measured high. Without it a peer could fill the
# memory with empty frames and stay within its credit.
FRAME_COST = 512
# What the header of an acknowledgement can say.
_MOST_MESSAGES = (1 << 32) - 1
_MOST_BYTES = (1 << 63) - 1


def _message_limits() -> DecodeLimits:
    return DecodeLimits(max_frames=1 << 14, max_total_bytes=1 << 30)


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds in messages and bytes; a message counts with the media it refers to, and 512 bytes for each frame.

    `send_*` bound, per peer, what is queued or unacknowledged. `receive_*` bound what has arrived and is not
    acknowledged by this application; the connected peers of a server share them evenly, each new one from when it
    comes, and a client may hold as much again of a server that was restarted. Each bound lets one message through
    whatever its size when nothing else is there, so add `decode.max_total_bytes` per peer. `blob_bytes` bounds the
    media kept for messages to come, `known_blobs` the digests remembered per peer as sent, `peers` the peers of a
    server.
    """

    send_messages: int = 1024
    send_bytes: int = 256 << 20
    receive_messages: int = 4096
    receive_bytes: int = 512 << 20
    blob_bytes: int = 512 << 20
    known_blobs: int = 1 << 16
    peers: int = 1024
    decode: DecodeLimits = field(default_factory=_message_limits)

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if each.name == "decode":
                continue
            value = checked_limit(f"LinkLimits.{each.name}", getattr(self, each.name), 1)
            object.__setattr__(self, each.name, value)
            most = _MOST_BYTES if each.name.endswith("_bytes") else _MOST_MESSAGES
            if value > most:
                raise ValueError(f"LinkLimits.{each.name} is {value} and must be at most {most}.")


@dataclass(frozen=True, slots=True)
class Credit:
    """How many messages, and how many bytes of them, may be unacknowledged."""

    messages: int
    bytes: int


NO_CREDIT = Credit(0, 0)
