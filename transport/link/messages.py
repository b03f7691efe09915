"""The messages of a connection: a header frame, and after DATA the frames that it announces.

A header is 5 fixed bytes and then the message as msgpack. A connection keeps the order of its messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

import msgspec

from transport.errors import DecodeError, MalformedError
from transport.link.limits import LinkLimits, Window
from transport.wire.decoding import as_bytes
from transport.wire.wire_format import Buffer

LINK_VERSION: Final = 2
MAX_NAME_BYTES: Final = 200
MAX_REASON: Final = 1000  # characters

_MAGIC: Final = b"MMRL"
_PREFIX: Final = _MAGIC + bytes([LINK_VERSION])
_SMALL_HEADER: Final = 8192  # bytes; more than any header without digests
_DIGEST_BYTES: Final = 66  # of one digest in a header

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Digests = tuple[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")], ...]


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """The first message of a client."""

    name: str
    window: Window


class Welcome(msgspec.Struct, tag="welcome", array_like=True, frozen=True):
    """The response of a server to `Hello`."""

    window: Window


class Data(msgspec.Struct, tag="data", array_like=True, frozen=True):
    """An object. The frames of the `sent` media follow, then those of `encode_frames`.

    `stored`: the other media to which the object refers; the receiver has them. `evicted`: media that the receiver
    removes afterwards.
    """

    sent: _Digests
    stored: _Digests
    evicted: _Digests


class Ack(msgspec.Struct, tag="ack", array_like=True, frozen=True):
    """The number of objects that the application has received since the connection opened."""

    received: _Count


class Ping(msgspec.Struct, tag="ping", array_like=True, frozen=True):
    """Shows that the sender is alive."""


class Bye(msgspec.Struct, tag="bye", array_like=True, frozen=True):
    """The sender closes its link. The response is `Bye`, which confirms everything sent before."""


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The sender ends the connection."""

    reason: str


LinkMessage: TypeAlias = Hello | Welcome | Data | Ack | Ping | Bye | Refused

_DECODER: Final = msgspec.msgpack.Decoder(LinkMessage)


def to_frames(message: LinkMessage, following: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the message as frames. The `following` ones, of `Data`, are shared, not copied."""
    return [_PREFIX + msgspec.msgpack.encode(message), *following]


def from_frames(frames: Sequence[Buffer], limits: LinkLimits) -> tuple[LinkMessage, list[Buffer]]:
    """Return the message and the frames that follow its header. Raises only `DecodeError`, for any bytes.

    The length of a header is limited: a gigabyte of invented digests would use many times its size as Python objects.
    """
    header = as_bytes(frames[0]) if frames else memoryview(b"")
    longest = _SMALL_HEADER + _DIGEST_BYTES * limits.max_digests
    if header.nbytes > longest:
        raise MalformedError(f"link header of {header.nbytes} bytes; at most {longest} are allowed")
    start = bytes(header[: len(_PREFIX)])
    if len(start) < len(_PREFIX) or start[:-1] != _MAGIC:
        raise MalformedError(f"link header starts with {start!r}, not {_PREFIX!r}")
    if start[-1] != LINK_VERSION:
        raise DecodeError(
            f"link protocol has version {start[-1]} and this installation reads up to {LINK_VERSION}. "
            "Update mmrollouts here."
        )
    try:
        message = _DECODER.decode(header[len(_PREFIX) :])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedError(f"link header has a wrong layout: {error}") from error
    following = list(frames[1:])
    if isinstance(message, Data):
        referenced = {*message.sent, *message.stored}
        if len(referenced) < len(message.sent) + len(message.stored) or len(following) <= len(message.sent):
            raise MalformedError("DATA names one media source twice, or has no content")
    elif following:
        raise MalformedError(f"{type(message).__name__} followed by {len(following)} frames")
    return message, following


def is_valid_name(name: str) -> bool:
    """Whether a client may have this name: 1 to 200 bytes, printable."""
    return 0 < len(name.encode("utf-8", "replace")) <= MAX_NAME_BYTES and name.isprintable()
