"""The source forms of images and videos that were given as pixels, not as a file: a header, then the pixels.

Numbers are little-endian, pixels uint8. Each form describes itself, so a digest of it covers everything in the header.

- image: magic `mmpx` (4 bytes), mode (4 bytes ASCII, padded with NUL: L, RGB or RGBA), width and height (uint32), then
  for each channel of the mode height * width bytes, row by row. Planes, because resizing and cutting into patches take
  planes, and because Pillow writes one channel far faster than it interleaves three.
- video: magic `mmpv` (4 bytes), frames, width and height (uint32), frames per second (float64, 0.0 where unknown), then
  frames * height * width * 3 bytes RGB, frame by frame, row by row.
"""

from __future__ import annotations

import struct
import sys

import numpy as np
from PIL import ExifTags, Image, ImageOps

from renderers.errors import MediaDecodeError, short_repr
from renderers.media.source import IMAGE_MAGIC, VIDEO_MAGIC

_HEADER = struct.Struct("<4s4sII")
_VIDEO_HEADER = struct.Struct("<4sIIId")
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}
_STRAIGHT = {"La": "LA", "RGBa": "RGBA"}

#: The errors of Pillow's decoders for broken files, besides its own classes.
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
    SystemError,  # raised by CPython where `read` fails inside the JPEG 2000 decoder
    struct.error,
)
_MODE_OF_CHANNELS = {count: mode for mode, count in _CHANNELS.items()}


def is_raw(data: bytes | memoryview) -> bool:
    return bytes(data[:4]) == IMAGE_MAGIC


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


def raw_planes(data: bytes | memoryview) -> np.ndarray:
    """uint8 (channels, height, width), a read-only view of raw source bytes."""
    mode, width, height = raw_size(data)
    planes = np.frombuffer(data, np.uint8, offset=_HEADER.size).reshape(_CHANNELS[mode], height, width)
    planes.setflags(write=False)
    return planes


def raw_to_image(data: bytes | memoryview) -> Image.Image:
    mode, _, _ = raw_size(data)
    bands = [plane_image(plane) for plane in raw_planes(data)]
    return bands[0] if len(bands) == 1 else Image.merge(mode, bands)


def plane_image(plane: np.ndarray) -> Image.Image:
    """A grey image of uint8 (height, width), without a copy where the plane is contiguous."""
    return Image.fromarray(np.ascontiguousarray(plane))


def image_planes(image: Image.Image) -> np.ndarray:
    """uint8 (channels, height, width) of an image of mode L, RGB or RGBA, read-only."""
    planes = np.frombuffer(b"".join(_bands(image)), np.uint8)
    return planes.reshape(_CHANNELS[image.mode], image.height, image.width)


def image_to_raw(image: Image.Image) -> bytes:
    """Copy the pixels of a PIL image, upright; modes other than L and RGBA become RGB.

    Raises `MediaDecodeError` for a file that Pillow has opened but cannot read to its end.
    """
    try:
        image = eight_bits(upright(image))
        if "transparency" in image.info or image.mode in ("LA", "PA"):
            image = image.convert("RGBA")
        elif image.mode not in _CHANNELS:
            image = image.convert("RGB")
    except PILLOW_ERRORS as error:
        raise MediaDecodeError(f"a PIL image of mode {image.mode} cannot be read: {error}") from error
    return b"".join([_header(image.mode, *image.size), *_bands(image)])


def upright(image: Image.Image) -> Image.Image:
    """The image turned by its EXIF orientation; the same object if it is upright already."""
    image.load()  # some formats store EXIF data behind the pixels
    is_upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
    return image if is_upright else ImageOps.exif_transpose(image)


def _bands(image: Image.Image) -> list[bytes]:
    # The bands of L, RGB and RGBA are the letters of the mode; Pillow's raw encoder packs one band by its name.
    return [image.tobytes("raw", band) for band in image.mode]


def _header(mode: str, width: int, height: int) -> bytes:
    return _HEADER.pack(IMAGE_MAGIC, mode.encode().ljust(4, b"\0"), width, height)


def eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit grey to 8 bits (Pillow would clip it to white) and undo premultiplied alpha."""
    if image.mode.startswith("I;16"):
        wide = image.convert("I")
        grey = wide.point(lambda value: value / 256).convert("L")
        key = grey.info.pop("transparency", None)  # a 16-bit value: it would match other pixels after the scaling
        if isinstance(key, int):
            alpha = Image.fromarray(np.where(np.asarray(wide) == key, 0, 255).astype(np.uint8))
            grey = Image.merge("LA", (grey, alpha))
        return grey
    return image.convert(_STRAIGHT[image.mode]) if image.mode in _STRAIGHT else image


def array_to_raw(array: np.ndarray) -> bytes:
    """Copy uint8 pixels of shape (height, width), (height, width, 1), (.., 3) or (.., 4)."""
    if array.dtype != np.uint8:
        raise MediaDecodeError(
            f"an image array is uint8, not {array.dtype}: whether floats run from 0 to 1 or to 255 cannot be told. "
            "Scale them yourself and cast to uint8"
        )
    if array.ndim == 2:
        array = array[:, :, None]
    mode = _MODE_OF_CHANNELS.get(array.shape[2]) if array.ndim == 3 else None
    if mode is None or 0 in array.shape:
        raise MediaDecodeError(f"an image array is (height, width), or (height, width, 3 or 4), not {array.shape}")
    height, width = array.shape[:2]
    return b"".join([_header(mode, width, height), np.ascontiguousarray(array.transpose(2, 0, 1)).data])


def is_raw_video(data: bytes | memoryview) -> bool:
    return bytes(data[:4]) == VIDEO_MAGIC


def frames_to_raw(frames: np.ndarray, fps: float | None = None) -> bytes:
    """Copy uint8 frames of shape (time, height, width, 3) with `fps` frames per second (None: unknown)."""
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise MediaDecodeError(
            f"video frames are uint8 (time, height, width, 3) and at least one pixel, not {frames.dtype} {frames.shape}"
        )
    if fps is not None and not 0 < fps <= sys.float_info.max:
        raise MediaDecodeError(f"fps={short_repr(fps)} is not a positive number of frames per second")
    count, height, width, _ = frames.shape
    header = _VIDEO_HEADER.pack(VIDEO_MAGIC, count, width, height, fps or 0.0)
    return b"".join((header, np.ascontiguousarray(frames).data.cast("B")))


def raw_video_size(data: bytes | memoryview) -> tuple[int, int, int, float | None]:
    """(frames, width, height, fps) of raw source bytes, checked against their length."""
    if len(data) < _VIDEO_HEADER.size:
        raise MediaDecodeError("raw video ends inside its header")
    _, count, width, height, fps = _VIDEO_HEADER.unpack_from(data)
    held, expected = len(data) - _VIDEO_HEADER.size, count * width * height * 3
    if not expected or held != expected:
        raise MediaDecodeError(f"raw video of {count} frames of {width}x{height} holds {held} bytes, not {expected}")
    if not (fps == 0 or 1e-6 <= fps <= 1e6):
        raise MediaDecodeError(f"raw video announces {fps} frames per second")
    return count, width, height, fps or None


def raw_video_frames(data: bytes | memoryview) -> tuple[np.ndarray, float | None]:
    """Frames (time, height, width, 3), a read-only view of the bytes, and frames per second (None: unknown)."""
    count, width, height, fps = raw_video_size(data)
    frames = np.frombuffer(data, dtype=np.uint8, offset=_VIDEO_HEADER.size).reshape(count, height, width, 3)
    frames.flags.writeable = False
    return frames, fps
