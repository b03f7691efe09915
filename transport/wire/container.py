"""The container of encoded values: its header, and its blobs joined to one object."""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from transport.errors import ChecksumError, MalformedError, TruncatedError
from transport.wire.decoding import as_bytes, check_version
from transport.wire.limits import DecodeLimits
from transport.wire.wire_format import Buffer

# Joining buffers to one `bytes` object, for large results on huge pages where the system has them.
#
# A new buffer of 100 MB costs more in page faults than in copying: on Linux each page of 4 KiB is cleared and mapped
# when it is first written, 70 ms for 126 MB where the copy itself takes 18. numpy requests pages of 2 MiB for its
# arrays; `bytes` does not, so this module requests them.


# A smaller result comes from the heap, whose pages are mapped already, and bytes.join() is faster.
_LARGE: Final = 4 << 20


def join_buffers(parts: Sequence[Buffer]) -> bytes:
    """`b"".join(parts)`, for large results in a third of the time."""
    size = sum(memoryview(part).nbytes for part in parts)
    advise = _find_madvise() if size >= _LARGE else None
    return b"".join(parts) if advise is None else _join_on_huge_pages(parts, size, advise)


def _join_on_huge_pages(parts: Sequence[Buffer], size: int, advise: Callable[[int, int, int], int]) -> bytes:
    # PyBytes_FromStringAndSize without contents is CPython's documented way to make a bytes object and fill it before
    # other code has it: https://docs.python.org/3/c-api/bytes.html#c.PyBytes_FromStringAndSize
    prototype: Any = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)
    result: bytes = prototype(("PyBytes_FromStringAndSize", ctypes.pythonapi))(None, size)
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)
    address: int = prototype(("PyBytes_AsString", ctypes.pythonapi))(result)
    first_page = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    page_bytes = (address + size - first_page) // mmap.PAGESIZE * mmap.PAGESIZE
    advise(first_page, page_bytes, mmap.MADV_HUGEPAGE)  # a refusal is harmless
    target = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
    end = 0
    for part in parts:
        view = memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"")
        target[end : end + view.nbytes] = view
        end += view.nbytes
    return result


@functools.cache
def _find_madvise() -> Callable[[int, int, int], int] | None:
    """The system's madvise(); None if there is none, or this Python may store the contents of `bytes` elsewhere."""
    if sys.implementation.name != "cpython" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


# A container: the frames of a message in one bytes object, each aligned, with a checksum over the header.
#
#     offset 0     magic, format version, number of frames F, CRC-32
#     16           F frame lengths, unsigned 64-bit
#     ...          frame 0, frame 1, ...: each at the next multiple of 64 bytes
#
# All integers are little-endian. The CRC-32 covers the bytes before it, the lengths and frame 0. It does not cover the
# other frames: a file has a checksum per record, and media have their digests.


ALIGNMENT: Final = 64  # a cache line, and more than any element type requires
_MAGIC: Final = b"MMRT"
_VERSION: Final = 2
_START: Final = struct.Struct("<4sHxxI")
_CHECKSUM: Final = struct.Struct("<I")
_LENGTHS_START: Final = _START.size + _CHECKSUM.size


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def join(header: Sequence[Buffer], frames: Sequence[Buffer]) -> bytes:
    """One container of a first frame, which is given in parts, and other frames; every byte is copied once."""
    sizes = [sum(memoryview(part).nbytes for part in header), *[memoryview(frame).nbytes for frame in frames]]
    lengths = struct.pack(f"<{len(sizes)}Q", *sizes)
    start = _START.pack(_MAGIC, _VERSION, len(sizes))
    end = _LENGTHS_START + len(lengths)
    parts: list[Buffer] = [start, _CHECKSUM.pack(_crc(start, lengths, *header)), lengths, bytes(aligned(end) - end)]
    parts += header
    end = aligned(end) + sizes[0]
    for frame, size in zip(frames, sizes[1:], strict=True):
        parts.append(bytes(aligned(end) - end))
        parts.append(frame)
        end = aligned(end) + size
    return join_buffers(parts)


def split(buffer: Buffer, limits: DecodeLimits) -> list[memoryview]:
    """The frames as views on `buffer`."""
    view = as_bytes(buffer)
    limits.check("max_total_bytes", view.nbytes)
    if view.nbytes < _LENGTHS_START:
        raise TruncatedError("message container", _LENGTHS_START, view.nbytes)
    magic, version, count = _START.unpack_from(view)
    if magic != _MAGIC:
        raise MalformedError(f"message container starts with {magic!r}, not {_MAGIC!r}")
    check_version("message container", version)
    limits.check("max_frames", count)
    lengths_end = _LENGTHS_START + 8 * count
    if view.nbytes < lengths_end:
        raise TruncatedError("table of frame lengths", lengths_end, view.nbytes)
    frames: list[memoryview] = []
    end = lengths_end
    for length in np.frombuffer(view[_LENGTHS_START:lengths_end], "<u8").tolist():
        start = aligned(end)
        end = start + length
        if end > view.nbytes:
            raise TruncatedError(f"frame {len(frames)} of the message", end, view.nbytes)
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
