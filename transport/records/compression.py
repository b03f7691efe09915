"""zstd compression with Python's own library (3.14) or the package `zstandard`; the output size is always limited."""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from transport.errors import MalformedError, MemoryLimitError, MissingExtraError
from transport.wire.limits import DecodeLimits
from transport.wire.wire_format import Buffer

_LEVEL: Final = 3  # zstd's own default
_MAX_EXPANSION: Final = 1 << 15  # a zstd block of 4 bytes, the smallest, decompresses to at most 128 KiB


def find_compressor(compression: str | None) -> Callable[[Buffer], bytes] | None:
    """The function that compresses a payload; None for None. Raises `ValueError` and `MissingExtraError`."""
    if compression is None:
        return None
    if compression != "zstd":
        raise ValueError(f'compression {compression!r} is neither "zstd" nor None')
    standard, package = _find_library()
    if package is not None:
        compress: Callable[[Buffer], bytes] = package.ZstdCompressor(level=_LEVEL).compress
        return compress
    return lambda data: standard.compress(data, level=_LEVEL)


class Decompression:
    """Decompresses for one reader. The decompressed bytes still in use are at most `limits.max_total_bytes`."""

    def __init__(self, limits: DecodeLimits) -> None:
        self._limits = limits
        self._in_use = 0
        self._lock = threading.RLock()  # reentrant: a buffer may be freed while its own thread counts another one

    def decompress(self, data: memoryview) -> memoryview:
        """The decompressed bytes, read-only. They count against the limit until the last view on them is freed.

        The size that `data` announces is checked against the limit before memory is allocated. Raises `MalformedError`
        for anything but one whole zstd frame of the announced size, `LimitError`, `MemoryLimitError`,
        `MissingExtraError`.
        """
        standard, package = _find_library()
        zstd_error = package.ZstdError if package is not None else standard.ZstdError
        try:
            size = _announced_size(data, standard, package)
            self._count(size)
            try:
                whole = _decompress(data, size, standard, package)
            except BaseException:
                self._count(-size)
                raise
        except zstd_error as error:
            raise MalformedError(f"compressed record is not a zstd frame: {error}") from error
        except MemoryError as error:
            raise MemoryLimitError(size) from error
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


def _decompress(data: memoryview, size: int, standard: Any, package: Any) -> bytes:
    if package is not None:
        whole: bytes = package.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    else:
        decompressor = standard.ZstdDecompressor()
        whole = decompressor.decompress(data, max_length=size)
        if not decompressor.eof or decompressor.unused_data:
            raise MalformedError("compressed record is not one whole zstd frame")
    if len(whole) != size:
        raise MalformedError(f"compressed record announces {size} bytes and holds {len(whole)}")
    return whole


def _announced_size(data: memoryview, standard: Any, package: Any) -> int:
    if package is not None:
        size = package.get_frame_parameters(data).content_size
        unknown = size == package.CONTENTSIZE_UNKNOWN
    else:
        size = standard.get_frame_info(data).decompressed_size
        unknown = size is None
    if unknown:
        raise MalformedError("compressed record does not say how large it is")
    if size > data.nbytes * _MAX_EXPANSION:
        raise MalformedError(f"compressed record announces {size} bytes and {data.nbytes} bytes of zstd hold fewer")
    return int(size)


def _find_library() -> tuple[Any, Any]:
    """(`compression.zstd`, None) or (None, `zstandard`)."""
    try:
        return importlib.import_module("compression.zstd"), None
    except ImportError:
        pass
    try:
        return None, importlib.import_module("zstandard")
    except ImportError:
        raise MissingExtraError("zstd compression", "zstd", "zstandard") from None
