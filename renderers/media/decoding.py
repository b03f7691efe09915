"""Source bytes -> an upright RGB picture."""

from __future__ import annotations

import io

from PIL import Image, ImageOps, UnidentifiedImageError

from renderers.errors import MediaDecodeError, MediaLimitError
from renderers.media.policy import MediaPolicy
from renderers.media.raw import PILLOW_ERRORS, eight_bits, is_raw, raw_size, raw_to_image
from renderers.media.source import MediaSource

# Formats that cameras, screens and papers write. Not EPS: Pillow hands those to Ghostscript, an interpreter.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF", "TGA")


def decode_image(source: MediaSource, policy: MediaPolicy) -> Image.Image:
    """Decode to RGB, turned upright by its EXIF orientation, transparency laid on white.

    The size is checked from the header, before anything is decompressed. Raises `MediaLimitError`, `MediaDecodeError`.
    """
    if is_raw(source.data):
        _, width, height = raw_size(source.data)
        _check_size(source, width, height, policy)
        return _to_rgb(raw_to_image(source.data))
    try:
        with Image.open(io.BytesIO(source.data), formats=_FORMATS) as image:
            _check_size(source, *image.size, policy)
            # An MPO (a JPEG to Pillow's `formats`) is a photo with a preview or a gain map behind it, not an animation.
            if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                raise MediaDecodeError(
                    f"an animation of {image.n_frames} frames where one picture is expected ({source.digest[:12]}); "  # type: ignore[attr-defined]
                    "pass one frame"
                )
            return _to_rgb(ImageOps.exif_transpose(image))
    except UnidentifiedImageError as error:
        raise MediaDecodeError(
            f"{source.nbytes} bytes ({source.digest[:12]}) are not a picture that Pillow can read"
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # the latter under -W error
        raise MediaLimitError(f"picture {source.digest[:12]} is larger than Pillow opens: {error}") from error
    except PILLOW_ERRORS as error:
        raise MediaDecodeError(f"picture {source.digest[:12]} is corrupt: {error}") from error


def _check_size(source: MediaSource, width: int, height: int, policy: MediaPolicy) -> None:
    if width * height > policy.max_pixels:
        raise MediaLimitError(
            f"picture {source.digest[:12]} has {width}x{height} pixels, more than max_pixels={policy.max_pixels}"
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    image = eight_bits(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")
