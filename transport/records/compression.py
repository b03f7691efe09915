"""zstd from Python's own library (3.14) or the package `zstandard`, and never more output than was announced."""

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
_MOST_EXPANSION: Final = 1 << 15  # a block of zstd takes at least 4 bytes and gives at most 128 KiB


def find_compressor(compression: str | None) -> Callable[[Buffer], bytes] | None:
    """What compresses a payload; None for None. Raises `ValueError` and `MissingExtraError`."""
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
    """Decompresses for one reader. What it gave out and is still in use is at most `limits.max_total_bytes`."""

    def __init__(self, limits: DecodeLimits) -> None:
        self._limits = limits
        self._in_use = 0
        self._counting = threading.RLock()  # a buffer may be freed while its own thread counts another one

    def decompress(self, data: memoryview) -> memoryview:
        """What `find_compressor` was given, read-only. Counts until nothing looks at it any more.

        The size that `data` announces is held against the limit before it is used. Raises `MalformedError` for anything
        but one whole zstd frame of the announced size, `LimitError`, `MemoryLimitError`, `MissingExtraError`.
        """
        standard, package = _find_library()
        refusal = package.ZstdError if package is not None else standard.ZstdError
        try:
            size = _announced(data, standard, package)
            self._count(size)
            try:
                whole = _decompress(data, size, standard, package)
            except BaseException:
                self._count(-size)
                raise
        except refusal as error:
            raise MalformedError(f"compressed record is not a zstd frame: {error}") from error
        except MemoryError as error:
            raise MemoryLimitError(size) from error
        if not whole:
            return memoryview(b"")
        # Every view on this array, and every slice of one, keeps it alive; `bytes` cannot tell when they are freed.
        buffer = np.frombuffer(whole, np.uint8)
        weakref.finalize(buffer, self._count, -size).atexit = False
        return buffer.data

    def _count(self, nbytes: int) -> None:
        with self._counting:
            if nbytes > 0:
                self._limits.check("max_total_bytes", self._in_use + nbytes)
            self._in_use += nbytes


def _decompress(data: memoryview, size: int, standard: Any, package: Any) -> bytes:
    if package is not None:
        whole: bytes = package.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    else:
        reading = standard.ZstdDecompressor()
        whole = reading.decompress(data, max_length=size)
        if not reading.eof or reading.unused_data:
            raise MalformedError("compressed record does not end where it says")
    if len(whole) != size:
        raise MalformedError(f"compressed record announces {size} bytes and holds {len(whole)}")
    return whole


def _announced(data: memoryview, standard: Any, package: Any) -> int:
    if package is not None:
        size = package.get_frame_parameters(data).content_size
        unknown = size == package.CONTENTSIZE_UNKNOWN
    else:
        size = standard.get_frame_info(data).decompressed_size
        unknown = size is None
    if unknown:
        raise MalformedError("compressed record does not say how large it is")
    if size > data.nbytes * _MOST_EXPANSION:
        raise MalformedError(f"compressed record announces {size} bytes and {data.nbytes} of zstd hold fewer")
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
