"""The source form of pixels that never were a file: a 16-byte header, then the rows.

Layout: magic `mmpx` (4 bytes), mode (4 bytes ASCII, padded with NUL: L or RGB or RGBA), width and height (uint32
little-endian each), then height * width * channels bytes, row by row. Self-describing, so that a digest of it names
mode, size and pixels.
"""

from __future__ import annotations

import struct

import numpy as np
from PIL import Image, ImageOps

from renderers.errors import MediaDecodeError

_HEADER = struct.Struct("<4s4sII")
_MAGIC = b"mmpx"
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}
_STRAIGHT = {"La": "LA", "RGBa": "RGBA"}

#: What Pillow's decoders raise for broken files, besides its own errors.
PILLOW_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    struct.error,
)
_MODE_OF_CHANNELS = {count: mode for mode, count in _CHANNELS.items()}


def is_raw(data: bytes | memoryview) -> bool:
    return bytes(data[:4]) == _MAGIC


def raw_size(data: bytes | memoryview) -> tuple[str, int, int]:
    """(mode, width, height) of raw source bytes, checked against their length."""
    if len(data) < _HEADER.size:
        raise MediaDecodeError("raw pixels end inside their header")
    _, mode_field, width, height = _HEADER.unpack_from(data)
    mode = mode_field.rstrip(b"\0").decode("ascii", "replace")
    expected = _CHANNELS.get(mode, 0) * width * height
    if not expected or len(data) - _HEADER.size != expected:
        raise MediaDecodeError(
            f"raw pixels of mode {mode!r} and size {width}x{height} hold {len(data) - _HEADER.size} bytes, not "
            f"{expected}"
        )
    return mode, width, height


def raw_to_image(data: bytes | memoryview) -> Image.Image:
    mode, width, height = raw_size(data)
    return Image.frombytes(mode, (width, height), bytes(data[_HEADER.size :]))


def image_to_raw(image: Image.Image) -> bytes:
    """Snapshot a PIL image, upright; modes other than L and RGBA become RGB, as a vision model would see them.

    Raises `MediaDecodeError` for a file that Pillow opened but cannot read to its end.
    """
    try:
        image = eight_bits(ImageOps.exif_transpose(image))
        if image.mode not in _CHANNELS:
            image = image.convert("RGBA" if "transparency" in image.info or image.mode in ("LA", "PA") else "RGB")
    except PILLOW_ERRORS as error:
        raise MediaDecodeError(f"a PIL image of mode {image.mode} cannot be read: {error}") from error
    return _HEADER.pack(_MAGIC, image.mode.encode().ljust(4, b"\0"), *image.size) + image.tobytes()


def eight_bits(image: Image.Image) -> Image.Image:
    """16-bit grey scaled to 8 bits (Pillow would clip it: a white square), premultiplied alpha undone."""
    if image.mode.startswith("I;16"):
        return image.convert("I").point(lambda value: value / 256).convert("L")
    return image.convert(_STRAIGHT[image.mode]) if image.mode in _STRAIGHT else image


def array_to_raw(array: np.ndarray) -> bytes:
    """Snapshot uint8 pixels of shape (height, width), (height, width, 1), (.., 3) or (.., 4)."""
    if array.dtype != np.uint8:
        raise MediaDecodeError(
            f"an image array is uint8, not {array.dtype}: whether floats run from 0 to 1 or to 255 cannot be told. "
            "Scale them yourself and cast to uint8"
        )
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    mode = _MODE_OF_CHANNELS.get(array.shape[2] if array.ndim == 3 else 1) if array.ndim in (2, 3) else None
    if mode is None or 0 in array.shape:
        raise MediaDecodeError(f"an image array is (height, width), or (height, width, 3 or 4), not {array.shape}")
    height, width = array.shape[:2]
    return _HEADER.pack(_MAGIC, mode.encode().ljust(4, b"\0"), width, height) + array.tobytes()
