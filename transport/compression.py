"""zstd from Python's own library (3.14) or the package `zstandard`, and never more output than was announced."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

from transport.errors import MalformedError, TransportError
from transport.limits import DecodeLimits
from transport.wire import Buffer

_LEVEL: Final = 3  # zstd's own default


class MissingCompressionError(TransportError):
    """Records are or should be compressed, and nothing here can do it."""

    def __init__(self, compression: str) -> None:
        self.compression = compression
        super().__init__(f"nothing here compresses with {compression}. Install mmrollouts[zstd].")


def find_compressor(compression: str | None) -> Callable[[Buffer], bytes] | None:
    """What compresses a payload; None for None. Raises `ValueError` and `MissingCompressionError`."""
    if compression is None:
        return None
    if compression != "zstd":
        raise ValueError(f'compression {compression!r} is neither "zstd" nor None')
    standard, package = _find_library()
    if package is not None:
        compress: Callable[[Buffer], bytes] = package.ZstdCompressor(level=_LEVEL).compress
        return compress
    return lambda data: standard.compress(data, level=_LEVEL)


def decompress(data: memoryview, limits: DecodeLimits) -> bytes:
    """What `find_compressor` was given. The size that `data` announces is held against `limits` before it is used.

    Raises `MalformedError` for anything but one whole zstd frame of the announced size, `LimitError`,
    `MissingCompressionError`.
    """
    standard, package = _find_library()
    refusal = package.ZstdError if package is not None else standard.ZstdError
    try:
        size = _announced(data, standard, package)
        limits.check("max_total_bytes", size)
        if package is not None:
            whole: bytes = package.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
        else:
            reading = standard.ZstdDecompressor()
            whole = reading.decompress(data, max_length=size)
            if not reading.eof or reading.unused_data:
                raise MalformedError("compressed record does not end where it says")
    except refusal as error:
        raise MalformedError(f"compressed record is not a zstd frame: {error}") from error
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
        raise MissingCompressionError("zstd") from None
