"""Source bytes -> an upright RGB picture.

The decoders are Pillow's. What a mode means follows `convert_to_rgb` of transformers, transparency laid on white
included, with two exceptions, where that shows what nobody drew: 16-bit grey is scaled to 8 bits (there it is clipped,
so that nearly everything turns white), and premultiplied alpha (RGBa, La) is undone and laid on white (there it is
dropped, or refused).
"""

from __future__ import annotations

import io
from functools import cache

import numpy as np
from PIL import Image, UnidentifiedImageError, features

from renderers.errors import MediaDecodeError, MediaLimitError
from renderers.media.policy import MediaPolicy
from renderers.media.raw import (
    PILLOW_ERRORS,
    eight_bits,
    image_planes,
    is_raw,
    raw_planes,
    raw_size,
    raw_to_image,
    upright,
)
from renderers.media.source import MediaSource

# Formats that cameras, screens and papers write. Not EPS: Pillow hands those to Ghostscript, an interpreter.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF", "TGA")

# The libraries whose output may change with their version, by Pillow's names: lossy formats.
_LOSSY = ("jpg", "libjpeg_turbo", "jpg_2000", "webp", "avif")


def decode_image(source: MediaSource, policy: MediaPolicy) -> Image.Image:
    """Decode to RGB, turned upright by its EXIF orientation, transparency laid on white.

    The size is checked from the header, before anything is decompressed. Raises `MediaLimitError`, `MediaDecodeError`.
    """
    if is_raw(source.data):
        _check_raw(source, policy)
        return to_rgb(raw_to_image(source.data))
    try:
        with Image.open(io.BytesIO(source.data), formats=_FORMATS) as image:
            check_size(*image.size, policy, digest=source.digest)
            # An MPO (a JPEG to Pillow's `formats`) is a photo with a preview or a gain map behind it, not an animation.
            if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                raise MediaDecodeError(
                    f"an animation of {image.n_frames} frames where one picture is expected ({source.digest[:12]}); "  # type: ignore[attr-defined]
                    "pass one frame, or the whole as a video",
                    digest=source.digest,
                )
            return to_rgb(upright(image))
    except UnidentifiedImageError as error:
        raise MediaDecodeError(
            f"{source.nbytes} bytes ({source.digest[:12]}) are not a picture that Pillow can read", digest=source.digest
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # the latter under -W error
        raise MediaLimitError(
            f"picture {source.digest[:12]} is larger than Pillow opens: {error}", digest=source.digest
        ) from error
    except PILLOW_ERRORS as error:
        raise MediaDecodeError(f"picture {source.digest[:12]} is corrupt: {error}", digest=source.digest) from error


def decode_planes(source: MediaSource, policy: MediaPolicy) -> np.ndarray:
    """The pixels of `decode_image` as uint8 (3, height, width), read-only; raw RGB pixels are not copied."""
    if is_raw(source.data) and _check_raw(source, policy) == "RGB":
        return raw_planes(source.data)
    return image_planes(decode_image(source, policy))


def _check_raw(source: MediaSource, policy: MediaPolicy) -> str:
    """The mode of raw pixels that are whole and within the limits."""
    try:
        mode, width, height = raw_size(source.data)
    except MediaDecodeError as error:
        raise MediaDecodeError(error.reason, digest=source.digest) from None
    check_size(width, height, policy, digest=source.digest)
    return mode


@cache
def decoder_versions() -> dict[str, str | None]:
    """The versions of the decoders that change pixels; None where Pillow was built without one."""
    known = {*features.modules, *features.codecs, *features.features}
    return {name: features.version(name) if name in known else None for name in _LOSSY}


def check_size(width: int, height: int, policy: MediaPolicy, *, digest: str) -> None:
    """Raise `MediaLimitError` for a picture or a frame past the policy's `max_pixels` or `max_aspect_ratio`."""
    if width * height > policy.max_pixels:
        raise MediaLimitError(
            f"picture {digest[:12]} has {width}x{height} pixels, more than max_pixels={policy.max_pixels}",
            digest=digest,
        )
    if max(width, height) > policy.max_aspect_ratio * min(width, height):
        raise MediaLimitError(
            f"picture {digest[:12]} has {width}x{height} pixels and is longer than "
            f"max_aspect_ratio={policy.max_aspect_ratio} of the policy; crop it first",
            digest=digest,
        )


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB, transparency laid on white; the same object where it is opaque RGB already."""
    image = eight_bits(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
