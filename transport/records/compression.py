"""Compression of records with zstd, and decompression within the limits of a reader."""

from __future__ import annotations

import importlib
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from renderers.errors import MissingExtraError
from transport.errors import DecodeError, MalformedError
from transport.wire.limits import DecodeLimits
from transport.wire.wire_format import Buffer


def find_compressor(compression: str | None) -> Callable[[Buffer], bytes] | None:
    """The function that compresses a payload; None for None. Raises `ValueError` and `MissingExtraError`."""
    if compression is None:
        return None
    if compression != "zstd":
        raise ValueError(f'compression {compression!r} is neither "zstd" nor None')
    zstd = _import_zstd()
    # zstd's own default
    compressor = zstd.ZstdCompressor(level=3)
    return lambda data: compressor.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)


class Decompression:
    """Decompresses for one reader. The decompressed bytes still in use are at most `limits.max_total_bytes`."""

    def __init__(self, limits: DecodeLimits) -> None:
        self._limits = limits
        self._in_use = 0
        self._lock = threading.RLock()  # reentrant: a buffer may be freed while its own thread counts another one

    def decompress(self, data: memoryview) -> memoryview:
        """The decompressed bytes, read-only. They count against the limit until the last view on them is freed.

        The size that `data` announces is checked against the limit before memory is allocated. Raises
        `MalformedError` for anything but one whole zstd frame of the announced size, `LimitError`,
        `MissingExtraError`, and `DecodeError` where there is no memory for it.
        """
        zstd = _import_zstd()
        try:
            size = _announced_size(data, zstd.get_frame_info(data).decompressed_size)
            self._count(size)
            try:
                decompressor = zstd.ZstdDecompressor()
                whole: bytes = decompressor.decompress(data, max_length=size)
                if not decompressor.eof or decompressor.unused_data or len(whole) != size:
                    raise MalformedError(f"compressed record is not one whole zstd frame of {size} bytes")
            except BaseException:
                self._count(-size)
                raise
        except zstd.ZstdError as error:
            raise MalformedError(f"compressed record is not a zstd frame: {error}") from error
        except MemoryError as error:
            raise DecodeError(
                f"decompression needs {size} bytes of memory, which the system refused. Read the file on a "
                "larger machine, or pass DecodeLimits(max_total_bytes=...) to refuse such records."
            ) from error
        if not whole:
            return memoryview(b"")
        # Every view on this array keeps it alive, so that a finalizer runs when the last view is freed; `bytes` has
        # none.
        buffer = np.frombuffer(whole, np.uint8)
        weakref.finalize(buffer, self._count, -size).atexit = False
        return buffer.data

    def _count(self, nbytes: int) -> None:
        with self._lock:
            if nbytes > 0:
                self._limits.check("max_total_bytes", self._in_use + nbytes)
            self._in_use += nbytes


def _announced_size(data: memoryview, size: int | None) -> int:
    if size is None:
        raise MalformedError("compressed record does not say how large it is")
    # a zstd block of 4 bytes, the smallest, decompresses to at most 128 KiB
    if size > data.nbytes * 1 << 15:
        raise MalformedError(f"compressed record announces {size} bytes and {data.nbytes} bytes of zstd hold fewer")
    return size


def _import_zstd() -> Any:
    try:
        return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError as error:
        raise MissingExtraError("zstd compression", "zstd", "backports.zstd") from error
