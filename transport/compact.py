"""Messages of one connection in which each media source travels once.

The first message that refers to a source brings its bytes; later ones name its digest. The sender decides what the
receiver forgets and says so in the message, so both sides hold the same sources without asking each other.

    frame 0      prelude: magic, format version, connection, message number, sources brought B, sources forgotten F
                 B digests, then F digests, 32 bytes each
    frame 1...   the sources brought, as they are
    the others   the message (`transport.wire.wire_format`), all of its sources left out

The connection must deliver whole messages in order (a socket, a queue, a file read from its start): each has a number,
and one that is missing is an error at the next. The numbers of one connection, which is named at random, mean nothing
in another. For a file with random access see `transport.records.reader`.
"""

from __future__ import annotations

import secrets
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from renderers.media.source import MediaSource
from transport.errors import MalformedError, MessageOrderError, TruncatedError
from transport.wire import codec, container
from transport.wire.limits import DecodeLimits
from transport.wire.unpacking import as_bytes, build_media, check_version
from transport.wire.wire_format import Buffer

_MAGIC: Final = b"MMRC"
_PRELUDE: Final = struct.Struct("<4sHxxQQII")
_VERSION: Final = 2
_DIGEST_BYTES: Final = 32
_DEFAULT_BYTES: Final = 1 << 30
_LEAST_BYTES: Final = 512  # what a source counts as: to hold one of a single byte takes about 750
_DEFAULT_LIMITS = DecodeLimits()


class CompactEncoder:
    """The sending end of one connection; not safe for threads.

    The receiver is made to hold at most `max_bytes` of sources between messages, each counted as 512 bytes or more, the
    least recently used forgotten first; its `CompactDecoder` must allow as much. While a message is decoded it holds
    that message's sources, too.
    """

    def __init__(self, max_bytes: int = _DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self.restart()

    def restart(self) -> None:
        """Begin anew, as for a new connection: the receiver forgets what it held."""
        self._connection = secrets.randbits(64)
        self._number = 0
        self._held: OrderedDict[str, int] = OrderedDict()  # digest -> bytes, least recently used first

    def encode_frames(self, obj: object) -> list[Buffer]:
        """The next message of the connection. Send every one: each counts on those before it.

        Takes what `transport.encode_frames` takes. Raises `EncodeError`, and is then as if it had not been called.
        """
        used: dict[str, MediaSource] = {}

        def leave_out(source: MediaSource) -> bool:
            used[source.digest] = source
            return True

        frames = codec.encode_frames(obj, omit_media=leave_out)
        held = self._held.copy()
        brought = [source for digest, source in used.items() if digest not in held]
        for digest, source in used.items():
            held[digest] = _weight(source)
            held.move_to_end(digest)
        forgotten = _make_room(held, self._max_bytes)
        digests = [source.digest for source in brought] + forgotten
        counts = (len(brought), len(forgotten))
        prelude = _PRELUDE.pack(_MAGIC, _VERSION, self._connection, self._number, *counts)
        self._number, self._held = self._number + 1, held
        return [prelude + bytes.fromhex("".join(digests)), *(source.data for source in brought), *frames]

    def encode(self, obj: object) -> bytes:
        """`encode_frames` in one container."""
        return container.join(self.encode_frames(obj))


class CompactDecoder:
    """The receiving end of one connection; not safe for threads.

    Holds at most `max_bytes` of sources between messages, each counted as 512 bytes or more. A message that cannot be
    decoded changes nothing, so it can be given again.
    """

    def __init__(self, max_bytes: int = _DEFAULT_BYTES, *, limits: DecodeLimits = _DEFAULT_LIMITS) -> None:
        self._max_bytes = max_bytes
        self._limits = limits
        self._connection = 0
        self._number = 0
        self._held: dict[str, MediaSource] = {}

    def decode_frames(self, frames: Sequence[Buffer]) -> Any:
        """The object of the next message. Sources are verified against their digests when they are brought.

        Raises `DecodeError`; `MessageOrderError` if messages are missing.
        """
        views = [as_bytes(frame) for frame in frames]
        self._limits.check("max_frames", len(views))
        self._limits.check("max_total_bytes", sum(view.nbytes for view in views))
        connection, number, brought, forgotten = _read_prelude(views)
        if number != 0 and (connection, number) != (self._connection, self._number):
            raise MessageOrderError(self._number, number)
        held = dict(self._held) if number else {}
        for digest, view in zip(brought, views[1:], strict=False):
            held[digest] = build_media(digest, memoryview(bytes(view)))  # not a view: it would keep the message alive
        obj = codec.decode_frames(views[1 + len(brought) :], limits=self._limits, find_media=held.get)
        for digest in forgotten:
            if held.pop(digest, None) is None:
                raise MalformedError(f"message forgets media sha256 {digest}, which is not held here")
        nbytes = sum(map(_weight, held.values()))
        if nbytes > self._max_bytes:
            raise MalformedError(
                f"the sender counts on {nbytes} bytes of sources held here and max_bytes is {self._max_bytes}",
                "Give CompactEncoder and CompactDecoder the same max_bytes.",
            )
        self._connection, self._number, self._held = connection, number + 1, held
        return obj

    def decode(self, buffer: Buffer) -> Any:
        """`decode_frames` for what `CompactEncoder.encode` gave."""
        return self.decode_frames(container.split(buffer, self._limits))


def _weight(source: MediaSource) -> int:
    return max(source.nbytes, _LEAST_BYTES)


def _make_room(held: OrderedDict[str, int], max_bytes: int) -> list[str]:
    """Forget until the rest fits; the digests forgotten."""
    forgotten = []
    excess = sum(held.values()) - max_bytes
    while excess > 0:
        digest, nbytes = held.popitem(last=False)
        excess -= nbytes
        forgotten.append(digest)
    return forgotten


def _read_prelude(views: Sequence[memoryview]) -> tuple[int, int, list[str], list[str]]:
    """Connection, message number, digests brought, digests forgotten."""
    first = views[0] if views else memoryview(b"")
    if first.nbytes < _PRELUDE.size:
        raise TruncatedError("prelude of a compact message", _PRELUDE.size, first.nbytes)
    magic, version, connection, number, brought, forgotten = _PRELUDE.unpack_from(first)
    if magic != _MAGIC:
        raise MalformedError(
            f"message starts with {magic!r}, not {_MAGIC!r}", "Pass what a CompactEncoder gave, or use decode."
        )
    check_version("compact message", version)
    size = _PRELUDE.size + _DIGEST_BYTES * (brought + forgotten)
    if first.nbytes != size:
        raise TruncatedError("prelude of a compact message", size, first.nbytes)
    if brought >= len(views):
        raise MalformedError(f"compact message brings {brought} sources in {len(views) - 1} frames")
    digests = [first[start : start + _DIGEST_BYTES].hex() for start in range(_PRELUDE.size, size, _DIGEST_BYTES)]
    if len(set(digests[:brought])) != brought:
        raise MalformedError("compact message brings one source twice")
    return connection, number, digests[:brought], digests[brought:]
