"""A container: the frames of a message in one bytes object, each aligned, with a checksum over the header.

    offset 0     magic, format version, number of frames F, CRC-32
    16           F frame lengths, unsigned 64-bit
    ...          frame 0, frame 1, ...: each at the next multiple of 64 bytes

All integers are little-endian. The CRC-32 covers the lengths and frame 0. It does not cover the other frames:
a file has a checksum per record, and media have their digests.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import Final

from transport.errors import ChecksumError, MalformedError
from transport.wire.decoding import as_bytes, check_version
from transport.wire.limits import DecodeLimits
from transport.wire.wire_format import Buffer

ALIGNMENT: Final = 64  # a cache line, and more than any element type requires
_MAGIC: Final = b"MMRT"
_VERSION: Final = 3
_START: Final = struct.Struct("<4sHxxII")


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def join(frames: Sequence[Buffer]) -> bytes:
    """One container of the frames; every byte is copied once."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    lengths = struct.pack(f"<{len(sizes)}Q", *sizes)
    parts: list[Buffer] = [_START.pack(_MAGIC, _VERSION, len(sizes), _crc(lengths, frames)), lengths]
    end = _START.size + len(lengths)
    for frame, size in zip(frames, sizes, strict=True):
        parts += bytes(aligned(end) - end), frame
        end = aligned(end) + size
    return b"".join(parts)


def split(buffer: Buffer, limits: DecodeLimits) -> list[memoryview]:
    """The frames as views on `buffer`."""
    view = as_bytes(buffer)
    limits.check("max_total_bytes", view.nbytes)
    if view.nbytes < _START.size:
        raise MalformedError(f"the message container needs {_START.size} bytes and has {view.nbytes}")
    magic, version, count, expected = _START.unpack_from(view)
    if magic != _MAGIC:
        raise MalformedError(f"message container starts with {magic!r}, not {_MAGIC!r}")
    check_version("message container", version, _VERSION)
    limits.check("max_frames", count)
    lengths = view[_START.size : _START.size + 8 * count]
    frames: list[memoryview] = []
    end = _START.size + 8 * count
    for length in struct.unpack(f"<{lengths.nbytes // 8}Q", lengths[: lengths.nbytes // 8 * 8]):
        start = aligned(end)
        end = start + length
        frames.append(view[start:end])
    if end != view.nbytes:
        raise MalformedError(f"the message container needs {end} bytes and has {view.nbytes}")
    actual = _crc(lengths, frames)
    if actual != expected:
        raise ChecksumError("message header", f"{expected:08x}", f"{actual:08x}")
    return frames


def _crc(lengths: Buffer, frames: Sequence[Buffer]) -> int:
    return zlib.crc32(frames[0] if frames else b"", zlib.crc32(lengths))
