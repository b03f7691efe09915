"""Messages of one connection in which every media source is sent once.

The first message that refers to a source contains its bytes; later messages refer to it by digest. The sender decides
which sources the receiver evicts, and lists them in the message. Both sides therefore store the same sources without
a request in the other direction.

    frame 0      prelude: magic, format version, connection, message number, number of sent sources S, of evicted E
                 S digests, then E digests, 32 bytes each
    frame 1...   the S sent sources
    the others   the message (`transport.wire.wire_format`) with all of its sources omitted

The connection must deliver whole messages in order (a socket, a queue, a file read from its start). Messages are
numbered, and after a missing message the next one is an error. The random number of the connection keeps the messages
of two connections apart. For a file with random access see `transport.records.reader`.
"""

from __future__ import annotations

import secrets
import struct
import sys
from collections.abc import Sequence
from typing import Any, Final

from renderers.media.item import MediaSource
from renderers.process.caches import ByteLRU
from transport.errors import MalformedError, MessageOrderError, TruncatedError
from transport.wire import codec, container
from transport.wire.decoding import as_bytes, build_media, check_version
from transport.wire.limits import DEFAULT_LIMITS, DecodeLimits, require_limits
from transport.wire.wire_format import Buffer

_MAGIC: Final = b"MMRC"
_PRELUDE: Final = struct.Struct("<4sHxxQQII")
_VERSION: Final = 2
_DIGEST_BYTES: Final = 32
_DEFAULT_MAX_BYTES: Final = 1 << 30
_MIN_SOURCE_BYTES: Final = 512  # the least that a source counts as; storing a source of one byte takes about 750


class CompactEncoder:
    """The sending end of one connection; not safe for threads.

    The receiver stores at most `max_bytes` of sources between messages, each counted as 512 bytes or more; the least
    recently used are evicted first. Its `CompactDecoder` must allow as much. While the receiver decodes a message, it
    stores the sources of that message in addition.
    """

    def __init__(self, max_bytes: int = _DEFAULT_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self.restart()

    def restart(self) -> None:
        """Start a new connection: the receiver evicts all sources."""
        self._connection = secrets.randbits(64)
        self._number = 0
        self._stored: ByteLRU[str, bool] = ByteLRU(sys.maxsize)  # digests; evicted once a message, to `max_bytes`

    def encode_frames(self, obj: object) -> list[Buffer]:
        """The next message of the connection. Send every message: later ones depend on it.

        Accepts what `transport.encode_frames` accepts. Raises `EncodeError`; the connection is then unchanged.
        """
        used: dict[str, MediaSource] = {}

        def omit(source: MediaSource) -> bool:
            used[source.digest] = source
            return True

        frames = codec.encode_frames(obj, omit_media=omit)
        sent = [source for digest, source in used.items() if self._stored.get(digest) is None]
        for digest, source in used.items():
            self._stored.put(digest, True, _counted_bytes(source))
        evicted = [digest for digest, _ in self._stored.evict_to(self._max_bytes)]
        prelude = _PRELUDE.pack(_MAGIC, _VERSION, self._connection, self._number, len(sent), len(evicted))
        digests = bytes.fromhex("".join([source.digest for source in sent] + evicted))
        self._number += 1
        return [prelude + digests, *(source.data for source in sent), *frames]

    def encode(self, obj: object) -> bytes:
        """`encode_frames` in one container."""
        prelude, *others = self.encode_frames(obj)
        return container.join([prelude], others)


class CompactDecoder:
    """The receiving end of one connection; not safe for threads.

    Stores at most `max_bytes` of sources between messages, each counted as 512 bytes or more. A message that cannot be
    decoded changes nothing, so it can be decoded again.
    """

    def __init__(self, max_bytes: int = _DEFAULT_MAX_BYTES, *, limits: DecodeLimits = DEFAULT_LIMITS) -> None:
        self._max_bytes = max_bytes
        self._limits = require_limits(limits)
        self._connection = 0
        self._number = 0
        self._stored: dict[str, MediaSource] = {}

    def decode_frames(self, frames: Sequence[Buffer]) -> Any:
        """The object of the next message. Sources are verified against their digests when they are received.

        Raises `DecodeError`; `MessageOrderError` if messages are missing.
        """
        views = [as_bytes(frame) for frame in frames]
        self._limits.check("max_frames", len(views))
        self._limits.check("max_total_bytes", sum(view.nbytes for view in views))
        connection, number, sent, evicted = _read_prelude(views)
        if number != 0 and (connection, number) != (self._connection, self._number):
            raise MessageOrderError(self._number, number)
        stored = dict(self._stored) if number else {}
        for digest, view in zip(sent, views[1:], strict=False):
            stored[digest] = build_media(digest, memoryview(bytes(view)))  # a view would keep the message alive
        obj = codec.decode_frames(views[1 + len(sent) :], limits=self._limits, find_media=stored.get)
        for digest in evicted:
            if stored.pop(digest, None) is None:
                raise MalformedError(f"message evicts media sha256 {digest}, which is not stored here")
        nbytes = sum(map(_counted_bytes, stored.values()))
        if nbytes > self._max_bytes:
            raise MalformedError(
                f"the sender requires {nbytes} bytes of sources stored here and max_bytes is {self._max_bytes}",
                "Give CompactEncoder and CompactDecoder the same max_bytes.",
            )
        self._connection, self._number, self._stored = connection, number + 1, stored
        return obj

    def decode(self, buffer: Buffer) -> Any:
        """`decode_frames` for a message of `CompactEncoder.encode`."""
        return self.decode_frames(container.split(buffer, self._limits))


def _counted_bytes(source: MediaSource) -> int:
    return max(source.nbytes, _MIN_SOURCE_BYTES)


def _read_prelude(views: Sequence[memoryview]) -> tuple[int, int, list[str], list[str]]:
    """Connection, message number, digests of the sent sources, digests of the evicted sources."""
    first = views[0] if views else memoryview(b"")
    if first.nbytes < _PRELUDE.size:
        raise TruncatedError("prelude of a compact message", _PRELUDE.size, first.nbytes)
    magic, version, connection, number, sent, evicted = _PRELUDE.unpack_from(first)
    if magic != _MAGIC:
        raise MalformedError(
            f"message starts with {magic!r}, not {_MAGIC!r}", "Pass a message of CompactEncoder, or use decode."
        )
    check_version("compact message", version)
    size = _PRELUDE.size + _DIGEST_BYTES * (sent + evicted)
    if first.nbytes != size:
        raise TruncatedError("prelude of a compact message", size, first.nbytes)
    if sent >= len(views):
        raise MalformedError(f"compact message sends {sent} sources in {len(views) - 1} frames")
    digests = [first[start : start + _DIGEST_BYTES].hex() for start in range(_PRELUDE.size, size, _DIGEST_BYTES)]
    if len(set(digests[:sent])) != sent:
        raise MalformedError("compact message sends one source twice")
    return connection, number, digests[:sent], digests[sent:]
