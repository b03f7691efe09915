"""Source bytes -> an upright RGB image; sources of images that were given as pixels.

The decoders are Pillow's. Modes are converted as by `convert_to_rgb` of transformers, which composites
transparency on white, with two exceptions where that function alters the image: 16-bit grey is scaled to 8
bits (there it is clipped, so that nearly everything turns white), and premultiplied alpha (RGBa, La) is
undone and composited on white (there it is dropped or refused).
"""

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError, features

from renderers.errors import MediaError, MediaLimitError
from renderers.media.item import IMAGE_MAGIC, VIDEO_MAGIC, MediaSource
from renderers.media.policy import Deadline, MediaPolicy, TimedBytes

# The source forms of images and videos that were given as pixels, not as a file: a header, then the pixels.
#
# Numbers are little-endian, pixels uint8. Each form describes itself, so a digest of it covers everything in
# the header.
#
# - image: magic `mmpx` (4 bytes), mode (4 bytes ASCII, padded with NUL: L, RGB or RGBA), width and height (uint32),
#   then for each channel of the mode height * width bytes, row by row. Planes, because resizing and cutting into
#   patches take planes, and because Pillow writes one channel far faster than it interleaves three.
# - video: magic `mmpv` (4 bytes), frames, width and height (uint32), frames per second (float64, 0.0 where unknown),
#   then frames * height * width * 3 bytes RGB, frame by frame, row by row.


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


def raw_planes(data: bytes | memoryview, *, digest: str | None = None) -> np.ndarray:
    """uint8 (channels, height, width), a read-only view of raw source bytes, of mode L, RGB or RGBA.

    Raises `MediaError` for bytes of another length; `digest` is for it.
    """
    if len(data) < _HEADER.size:
        raise MediaError("raw pixels end inside their header", digest=digest)
    _, mode_field, width, height = _HEADER.unpack_from(data)
    mode, held = mode_field.rstrip(b"\0").decode("ascii", "replace"), len(data) - _HEADER.size
    expected = _CHANNELS.get(mode, 0) * width * height
    if not expected or held != expected:
        reason = f"raw pixels of mode {mode!r} and size {width}x{height} hold {held} bytes, not {expected}"
        raise MediaError(reason, digest=digest)
    planes = np.frombuffer(data, np.uint8, offset=_HEADER.size).reshape(_CHANNELS[mode], height, width)
    planes.setflags(write=False)
    return planes


def raw_to_image(data: bytes | memoryview) -> Image.Image:
    bands = [plane_image(plane) for plane in raw_planes(data)]
    return bands[0] if len(bands) == 1 else Image.merge(_MODE_OF_CHANNELS[len(bands)], bands)


def plane_image(plane: np.ndarray) -> Image.Image:
    """A grey image of uint8 (height, width), without a copy where the plane is contiguous."""
    return Image.fromarray(np.ascontiguousarray(plane))


def image_planes(image: Image.Image) -> np.ndarray:
    """uint8 (channels, height, width) of an image of mode L, RGB or RGBA, read-only."""
    planes = np.frombuffer(b"".join(_bands(image)), np.uint8)
    return planes.reshape(_CHANNELS[image.mode], image.height, image.width)


def image_to_raw(image: Image.Image) -> bytes:
    """Copy the pixels of a PIL image, upright; modes other than L and RGBA become RGB.

    Raises `MediaError` for a file that Pillow has opened but cannot read to its end.
    """
    try:
        image = eight_bits(upright(image))
        if "transparency" in image.info or image.mode in ("LA", "PA"):
            image = image.convert("RGBA")
        elif image.mode not in _CHANNELS:
            image = image.convert("RGB")
    except PILLOW_ERRORS as error:
        raise MediaError(f"a PIL image of mode {image.mode} cannot be read: {error}") from error
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
    # Pillow reads 16-bit PGM as mode I, of which no other file says its range.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
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
        raise MediaError(
            f"an image array is uint8, not {array.dtype}: whether floats run from 0 to 1 or to 255 cannot "
            "be told. Scale them yourself and cast to uint8"
        )
    if array.ndim == 2:
        array = array[:, :, None]
    mode = _MODE_OF_CHANNELS.get(array.shape[2]) if array.ndim == 3 else None
    if mode is None or 0 in array.shape:
        raise MediaError(f"an image array is (height, width), or (height, width, 3 or 4), not {array.shape}")
    height, width = array.shape[:2]
    return b"".join([_header(mode, width, height), np.ascontiguousarray(array.transpose(2, 0, 1)).data])


def frames_to_raw(frames: np.ndarray, fps: float | None = None) -> bytes:
    """Copy uint8 frames of shape (time, height, width, 3) with `fps` frames per second (None: unknown)."""
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise MediaError(
            f"video frames are uint8 (time, height, width, 3) and at least one pixel, not {frames.dtype} {frames.shape}"
        )
    count, height, width, _ = frames.shape
    header = _VIDEO_HEADER.pack(VIDEO_MAGIC, count, width, height, fps or 0.0)
    return b"".join((header, np.ascontiguousarray(frames).data.cast("B")))


def raw_video_frames(data: bytes | memoryview, *, digest: str | None = None) -> tuple[np.ndarray, float | None]:
    """Frames (time, height, width, 3), a read-only view of the bytes, and frames per second (None: unknown).

    Raises `MediaError` for bytes of another length; `digest` is for it.
    """
    if len(data) < _VIDEO_HEADER.size:
        raise MediaError("raw video ends inside its header", digest=digest)
    _, count, width, height, fps = _VIDEO_HEADER.unpack_from(data)
    held, expected = len(data) - _VIDEO_HEADER.size, count * width * height * 3
    if not expected or held != expected or not (fps == 0 or 1e-6 <= fps <= 1e6):
        of_size = f"raw video of {count} frames of {width}x{height}, {fps:g} a second,"
        raise MediaError(f"{of_size} holds {held} bytes, not {expected}", digest=digest)
    frames = np.frombuffer(data, dtype=np.uint8, offset=_VIDEO_HEADER.size).reshape(count, height, width, 3)
    frames.flags.writeable = False
    return frames, fps or None


# The formats that are decoded. Not EPS: Pillow runs Ghostscript, an interpreter, on those.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF", "TGA")

_TILE_WIDTH, _TILE_HEIGHT = 322, 323
# Scans of a JPEG with as many pixels as the policy allows; proportionally more with fewer pixels. Encoders
# write at most 18. A decoder visits all coefficients once for each scan, and a scan may take as few as 20
# bytes: neither pixels nor bytes bound its time.
_MAX_SCANS = 32
# Segments of Exif data in a JPEG, which Pillow joins one by one; cameras write one.
_MAX_EXIF_SEGMENTS = 64
# All segments; colour profiles and large metadata have hundreds.
_MAX_SEGMENTS = 10_000
# A segment as Pillow and libjpeg find it, also behind the data of a scan: its marker, its length, and whether
# it may hold Exif data. Other markers stand alone, or end the decoder; that of the end of a picture stands
# alone, too.
_SEGMENT = re.compile(rb"\xff(?![\xc8\xd0-\xd8\xf0-\xfd])([\xc0-\xfe])(.{0,2})(Exif\0\0)?", re.DOTALL)
_END_OF_PICTURE, _START_OF_SCAN, _APP1 = b"\xd9", b"\xda", b"\xe1"
_ICON_HEAD = 6 + 16 * 65535

_QUICK_FORMATS = {"image": "a baseline JPEG or PNG", "video": "H.264 in MP4", "sound": "WAV"}
# Decoders of lossy formats, whose output may change with their version, by Pillow's names.
_LOSSY_DECODERS = ("jpg", "libjpeg_turbo", "jpg_2000", "webp", "avif")


def decode_image(source: MediaSource, policy: MediaPolicy) -> Image.Image:
    """Decode to RGB, turned upright by the EXIF orientation, transparency composited on white.

    The size is checked before anything is decompressed; reading and decoding may take `policy.timeout`
    seconds. Raises `MediaLimitError`, `MediaError`.
    """
    if source.raw_modality == "image":
        _raw_planes_within(policy, source)
        return to_rgb(raw_to_image(source.data))
    deadline = Deadline(policy.timeout)
    with decode_errors(source, policy, deadline):
        _check_icon(source, policy)
        scans = _count_scans(source)
        with Image.open(TimedBytes(source.data, deadline), formats=FORMATS) as image:
            policy.check_size(*image.size, digest=source.digest)
            check_tiles(image, source, policy)
            _check_scans(image, scans, source, policy)
            # An MPO (which `formats` opens as JPEG) is a photo followed by a preview or a gain map, not an animation.
            if image.format != "MPO" and getattr(image, "is_animated", False):
                count = count_frames(image, policy.max_frames)
                raise MediaError(
                    f"an animation of {count} frames{' or more' * (count > policy.max_frames)} where one "
                    f"image is expected ({source.digest[:12]}); pass one frame, or the whole as a video",
                    digest=source.digest,
                )
            return to_rgb(upright(image))


@contextmanager
def decode_errors(
    source: MediaSource, policy: MediaPolicy, deadline: Deadline, *, kind: Literal["image", "video", "sound"] = "image"
) -> Iterator[None]:
    """Raise errors of the decoders as `MediaError`s. It wraps calls of decoders alone."""
    name = f"{kind} {source.digest[:12]}"
    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # the warning under -W error
        raise MediaLimitError(f"{name} is larger than Pillow opens: {error}", digest=source.digest) from error
    except PILLOW_ERRORS as error:
        # A TimeoutError, or an error caused by one: Pillow treats any error as "another format".
        if deadline.passed:
            raise MediaLimitError(
                f"{name} takes longer to decode than timeout={policy.timeout} of the policy; re-encode it as "
                f"{_QUICK_FORMATS[kind]}",
                digest=source.digest,
            ) from error
        if isinstance(error, UnidentifiedImageError):
            raise MediaError(
                f"{source.nbytes} bytes ({source.digest[:12]}) are not an image that Pillow can read",
                digest=source.digest,
            ) from error
        raise MediaError(f"{name} is corrupt: {error}", digest=source.digest) from error


def count_frames(image: Image.Image, max_frames: int) -> int:
    """`n_frames`; of a TIFF at most `max_frames` + 1: Pillow counts n pages in a time like n²."""
    if image.format != "TIFF":
        return getattr(image, "n_frames", 1)
    count = 1
    try:
        while count <= max_frames:
            image.seek(count)
            count += 1
    except EOFError:
        pass
    image.seek(0)
    return count


def check_tiles(image: Image.Image, source: MediaSource, policy: MediaPolicy) -> None:
    """Raise `MediaLimitError` for a TIFF with tiles past the limit: a tile is decompressed as a whole."""
    tags = getattr(image, "tag_v2", {})
    width, height = tags.get(_TILE_WIDTH, 0), tags.get(_TILE_HEIGHT, 0)
    if width * height > policy.max_pixels:
        raise MediaLimitError(
            f"image {source.digest[:12]} has tiles of {width}x{height} pixels, more than "
            f"max_pixels={policy.max_pixels}",
            digest=source.digest,
        )


def _check_scans(image: Image.Image, scans: int, source: MediaSource, policy: MediaPolicy) -> None:
    """Raise `MediaLimitError` for a JPEG of so many scans that decoding would take minutes."""
    if scans * image.width * image.height > _MAX_SCANS * policy.max_pixels:
        raise MediaLimitError(
            f"image {source.digest[:12]} of {image.width}x{image.height} pixels has {scans} scans, more than "
            f"{_MAX_SCANS} at max_pixels={policy.max_pixels}; re-encode it as a baseline JPEG or PNG",
            digest=source.digest,
        )


def _count_scans(source: MediaSource) -> int:
    """The number of scans in the first picture of a JPEG, of which an MPO has more; 0 for another image.

    Raises `MediaLimitError` for too many segments, and for so many of Exif data that joining them would take
    minutes: those before the first scan, which Pillow reads.
    """
    at = scans = segments = exif_segments = 0
    while bytes(source.data[:2]) == b"\xff\xd8" and (segment := _SEGMENT.search(source.data, at)) is not None:
        marker, length, exif = segment.groups()
        if marker == _END_OF_PICTURE and scans:
            break
        segments += 1
        at = segment.end(1) + max(2, int.from_bytes(length, "big")) * (marker != _END_OF_PICTURE)
        scans += marker == _START_OF_SCAN
        exif_segments += marker == _APP1 and exif is not None and not scans
        for count, most, kind in ((exif_segments, _MAX_EXIF_SEGMENTS, " of Exif data"), (segments, _MAX_SEGMENTS, "")):
            if count > most:
                reason = f"has more than {most} segments{kind}; re-encode it without them"
                raise MediaLimitError(f"image {source.digest[:12]} {reason}", digest=source.digest)
    return scans


def _check_icon(source: MediaSource, policy: MediaPolicy) -> None:
    """Apply `MediaPolicy.check_size` to the images in an ICO, which Pillow decodes when it opens the file."""
    data = bytes(source.data[:_ICON_HEAD])
    if not data.startswith(b"\0\0\1\0"):
        return
    for entry in range(int.from_bytes(data[4:6], "little")):
        start = int.from_bytes(data[6 + 16 * entry + 12 : 6 + 16 * entry + 16], "little")
        head = bytes(source.data[start : start + 24])
        if head.startswith(b"\x89PNG"):
            width, height = struct.unpack(">II", head[16:24])
        elif len(head) == 24:
            width, height = (abs(side) for side in struct.unpack("<ii", head[4:12]))
        else:
            continue
        policy.check_size(width, max(1, height), digest=source.digest)


def decode_planes(source: MediaSource, policy: MediaPolicy) -> np.ndarray:
    """The pixels of `decode_image` as uint8 (3, height, width), read-only; raw RGB pixels are not copied."""
    if source.raw_modality == "image" and len(planes := _raw_planes_within(policy, source)) == 3:
        return planes
    return image_planes(decode_image(source, policy))


def _raw_planes_within(policy: MediaPolicy, source: MediaSource) -> np.ndarray:
    """Raw pixels, which are complete and within the limits."""
    planes = raw_planes(source.data, digest=source.digest)
    policy.check_size(planes.shape[2], planes.shape[1], digest=source.digest)
    return planes


def decoder_versions() -> dict[str, str | None]:
    """The versions of the lossy decoders; None where Pillow was built without one."""
    known = {*features.modules, *features.codecs, *features.features}
    return {name: features.version(name) if name in known else None for name in _LOSSY_DECODERS}


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to RGB, transparency composited on white; opaque RGB is returned as it is."""
    image = eight_bits(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
