"""A container: the frames of a message in one bytes object, each aligned, with a checksum over the header.

    offset 0     magic, format version, number of frames F, CRC-32
    16           F frame lengths, unsigned 64-bit
    ...          frame 0, frame 1, ...: each at the next multiple of 64 bytes

All integers are little-endian. The CRC-32 covers the bytes before it, the lengths and frame 0. It does not cover the
other frames: a file has a checksum per record, and media have their digests.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np

from transport.errors import ChecksumError, MalformedError
from transport.wire.decoding import as_bytes, check_version
from transport.wire.limits import DecodeLimits
from transport.wire.wire_format import Buffer

ALIGNMENT: Final = 64  # a cache line, and more than any element type requires
_MAGIC: Final = b"MMRT"
_VERSION: Final = 2
_START: Final = struct.Struct("<4sHxxI")
_CHECKSUM: Final = struct.Struct("<I")
_LENGTHS_START: Final = _START.size + _CHECKSUM.size


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def join(frames: Sequence[Buffer]) -> bytes:
    """One container of the frames; every byte is copied once."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    lengths = struct.pack(f"<{len(sizes)}Q", *sizes)
    start = _START.pack(_MAGIC, _VERSION, len(sizes))
    parts: list[Buffer] = [start, _CHECKSUM.pack(_crc(start, lengths, *frames[:1])), lengths]
    end = _LENGTHS_START + len(lengths)
    for frame, size in zip(frames, sizes, strict=True):
        parts += bytes(aligned(end) - end), frame
        end = aligned(end) + size
    return b"".join(parts)


def split(buffer: Buffer, limits: DecodeLimits) -> list[memoryview]:
    """The frames as views on `buffer`."""
    view = as_bytes(buffer)
    limits.check("max_total_bytes", view.nbytes)
    if view.nbytes < _LENGTHS_START:
        raise MalformedError(f"the message container needs {_LENGTHS_START} bytes and has {view.nbytes}")
    magic, version, count = _START.unpack_from(view)
    if magic != _MAGIC:
        raise MalformedError(f"message container starts with {magic!r}, not {_MAGIC!r}")
    check_version("message container", version, _VERSION)
    limits.check("max_frames", count)
    lengths_end = _LENGTHS_START + 8 * count
    if view.nbytes < lengths_end:
        raise MalformedError(f"the table of frame lengths needs {lengths_end} bytes and has {view.nbytes}")
    frames: list[memoryview] = []
    end = lengths_end
    for length in np.frombuffer(view[_LENGTHS_START:lengths_end], "<u8").tolist():
        start = aligned(end)
        end = start + length
        if end > view.nbytes:
            raise MalformedError(f"frame {len(frames)} of the message needs {end} bytes and has {view.nbytes}")
        frames.append(view[start:end])
    if end != view.nbytes:
        raise MalformedError(f"message container is followed by {view.nbytes - end} bytes that are not part of it")
    (expected,) = _CHECKSUM.unpack_from(view, _START.size)
    actual = _crc(view[: _START.size], view[_LENGTHS_START:lengths_end], *frames[:1])
    if actual != expected:
        raise ChecksumError("message header", f"{expected:08x}", f"{actual:08x}")
    return frames


def _crc(*parts: Buffer) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value
