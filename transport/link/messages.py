"""The messages of a connection: one header frame of fixed layout, then the frames that it announces.

    every header   magic, version, kind
    HELLO          greeting, then the client's name in UTF-8        client, first on each connection
    WELCOME        greeting                                         server, in response
    DATA           sequence, then (sha256, size) per media source   followed by the frames of `encode_frames`;
                                                                    by none: the sender withdrew the message
    ACK            session, acknowledged, credit
    BLOB           sha256                                           followed by the bytes
    PULL           sha256 ...
    REJECT         session, sequence, then a reason in UTF-8        the application cannot decode that message
    PING           empty
    BYE            empty                                            the sender closes its link; the response is BYE,
                                                                    which confirms everything sent before
    RECONNECT      empty                                            greet again over a new connection
    REFUSED        a reason in UTF-8

A greeting holds the state of both directions: the session of the sender and the first sequence number that it still
keeps; the session of the other side that it has been receiving, the last sequence number that it received, and the last
one that its application acknowledged. All integers are little-endian. Connections keep order, so DATA has no session.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from transport.errors import MalformedError, VersionError
from transport.link.limits import Credit
from transport.wire.limits import DecodeLimits
from transport.wire.unpacking import as_bytes
from transport.wire.wire_format import Buffer

LINK_VERSION: Final = 1
NO_SESSION: Final = bytes(16)
MAX_NAME_BYTES: Final = 200
MAX_REASON_BYTES: Final = 1000
PULL_BATCH: Final = 512  # digests in one PULL

_MAGIC: Final = b"MMRL"
_PREFIX: Final = struct.Struct("<4sBB")
_GREETING: Final = struct.Struct("<16sQ16sQQIQQ")
_SEQUENCE: Final = struct.Struct("<Q")
_MEDIA: Final = struct.Struct("<32sQ")
_ACK: Final = struct.Struct("<16sQIQ")
_REJECT: Final = struct.Struct("<16sQ")
_DIGEST_BYTES: Final = 32
_LONGEST_WITHOUT_MEDIA: Final = PULL_BATCH * _DIGEST_BYTES  # a full PULL


class Kind(enum.IntEnum):
    HELLO = 1
    WELCOME = 2
    DATA = 3
    ACK = 4
    BLOB = 5
    PULL = 6
    PING = 7
    BYE = 8
    REFUSED = 9
    RECONNECT = 10
    REJECT = 11


class Greeting(NamedTuple):
    """The state of both directions, as one side knows it. `max_message` is in bytes."""

    session: bytes
    first_kept: int
    receiving_session: bytes
    received: int
    acknowledged: int
    credit: Credit
    max_message: int


class Hello(NamedTuple):
    greeting: Greeting
    name: str


class Welcome(NamedTuple):
    greeting: Greeting


class Data(NamedTuple):
    sequence: int
    media: tuple[tuple[str, int], ...]  # digest and size
    frames: list[Buffer]


class Ack(NamedTuple):
    session: bytes
    acknowledged: int
    credit: Credit


class Reject(NamedTuple):
    session: bytes
    sequence: int
    reason: str


class Blob(NamedTuple):
    digest: str
    data: Buffer


class Pull(NamedTuple):
    digests: tuple[str, ...]


class Refused(NamedTuple):
    reason: str


class Signal(enum.Enum):
    """The messages without a body."""

    PING = Kind.PING
    BYE = Kind.BYE
    RECONNECT = Kind.RECONNECT


LinkMessage: TypeAlias = "Hello | Welcome | Data | Ack | Reject | Blob | Pull | Refused | Signal"


def to_frames(message: LinkMessage) -> list[Buffer]:
    """Return the message as frames. The frames of data and blobs are shared, not copied."""
    match message:
        case Data(sequence, media, frames):
            described = b"".join([_MEDIA.pack(bytes.fromhex(digest), size) for digest, size in media])
            return [_header(Kind.DATA) + _SEQUENCE.pack(sequence) + described, *frames]
        case Ack(session, acknowledged, credit):
            return [_header(Kind.ACK) + _ACK.pack(session, acknowledged, *credit)]
        case Reject(session, sequence, reason):
            return [_header(Kind.REJECT) + _REJECT.pack(session, sequence) + _shortened(reason)]
        case Blob(digest, data):
            return [_header(Kind.BLOB) + bytes.fromhex(digest), data]
        case Pull(digests):
            return [_header(Kind.PULL) + b"".join([bytes.fromhex(digest) for digest in digests])]
        case Hello(greeting, name):
            return [_header(Kind.HELLO) + _pack_greeting(greeting) + name.encode()]
        case Welcome(greeting):
            return [_header(Kind.WELCOME) + _pack_greeting(greeting)]
        case Refused(reason):
            return [_header(Kind.REFUSED) + _shortened(reason)]
        case Signal():
            return [_header(message.value)]


def from_frames(frames: Sequence[Buffer], limits: DecodeLimits) -> LinkMessage:
    """Parse frames into a message. Raises only `DecodeError`, for any bytes.

    A header may be as long as `limits.max_frames` media sources need, not longer: a gigabyte of invented digests would
    use many times its size as Python objects.
    """
    received = as_bytes(frames[0]) if frames else memoryview(b"")
    longest = _PREFIX.size + max(_LONGEST_WITHOUT_MEDIA, _SEQUENCE.size + _MEDIA.size * limits.max_frames)
    if received.nbytes > longest:
        raise MalformedError(f"link header of {received.nbytes} bytes; at most {longest} are allowed")
    head = bytes(received)
    if len(head) < _PREFIX.size:
        raise MalformedError(f"link header of {len(head)} bytes")
    magic, version, number = _PREFIX.unpack_from(head)
    if magic != _MAGIC:
        raise MalformedError(f"link header starts with {magic!r}, not {_MAGIC!r}")
    if version > LINK_VERSION:
        raise VersionError("link protocol", version, LINK_VERSION)
    try:
        kind = Kind(number)
    except ValueError as error:
        raise MalformedError(f"link message of unknown kind {number}") from error
    following = {Kind.DATA: None, Kind.BLOB: 1}.get(kind, 0)
    if following is not None and len(frames) != 1 + following:
        raise MalformedError(f"{kind.name} followed by {len(frames) - 1} frames instead of {following}")
    try:
        return _parse(kind, head[_PREFIX.size :], list(frames[1:]))
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedError(f"{kind.name} has a wrong layout: {error}") from error


def _header(kind: Kind) -> bytes:
    return _PREFIX.pack(_MAGIC, LINK_VERSION, kind)


def _pack_greeting(greeting: Greeting) -> bytes:
    *positions, credit, max_message = greeting
    return _GREETING.pack(*positions, *credit, max_message)


def _parse(kind: Kind, body: bytes, frames: list[Buffer]) -> LinkMessage:
    if kind is Kind.DATA:
        (sequence,) = _SEQUENCE.unpack_from(body)
        media = tuple((digest.hex(), size) for digest, size in _MEDIA.iter_unpack(body[_SEQUENCE.size :]))
        if len({digest for digest, _ in media}) < len(media):
            raise MalformedError("DATA names one media source twice")
        return Data(sequence, media, frames)
    if kind is Kind.ACK:
        session, acknowledged, *credit = _ACK.unpack(body)
        return Ack(session, acknowledged, Credit(*credit))
    if kind is Kind.REJECT:
        session, sequence = _REJECT.unpack_from(body)
        return Reject(session, sequence, _reason(body[_REJECT.size :]))
    if kind is Kind.BLOB:
        (digest,) = _digests(kind, body, 1)
        return Blob(digest, frames[0])
    if kind is Kind.PULL:
        return Pull(_digests(kind, body, PULL_BATCH))
    if kind is Kind.HELLO:
        return Hello(_unpack_greeting(body[: _GREETING.size]), _name(body[_GREETING.size :]))
    if kind is Kind.WELCOME:
        return Welcome(_unpack_greeting(body))
    if kind is Kind.REFUSED:
        return Refused(_reason(body))
    if body:
        raise MalformedError(f"{kind.name} of {len(body)} bytes more than it needs")
    return Signal(kind)


def _unpack_greeting(body: bytes) -> Greeting:
    session, first_kept, receiving_session, received, acknowledged, messages, size, largest = _GREETING.unpack(body)
    if session == NO_SESSION or first_kept < 1 or received < acknowledged:
        raise MalformedError("greeting without a session, or with sequence numbers that contradict each other")
    return Greeting(session, first_kept, receiving_session, received, acknowledged, Credit(messages, size), largest)


def _digests(kind: Kind, body: bytes, most: int) -> tuple[str, ...]:
    count, rest = divmod(len(body), _DIGEST_BYTES)
    if rest or not 1 <= count <= most:
        raise MalformedError(f"{kind.name} with {len(body)} bytes of digests")
    return tuple(body[start : start + _DIGEST_BYTES].hex() for start in range(0, len(body), _DIGEST_BYTES))


def _shortened(reason: str) -> bytes:
    return reason.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore").encode()


def _reason(encoded: bytes) -> str:
    return encoded[:MAX_REASON_BYTES].decode("utf-8", "replace")


def _name(encoded: bytes) -> str:
    name = encoded.decode()
    if not 0 < len(encoded) <= MAX_NAME_BYTES or not name.isprintable():
        raise MalformedError(f"client name of {len(encoded)} bytes")
    return name
