"""Source bytes -> an upright RGB picture."""

from __future__ import annotations

import io

from PIL import Image, ImageOps, UnidentifiedImageError

from renderers.errors import MediaDecodeError, MediaLimitError
from renderers.media.policy import MediaPolicy
from renderers.media.raw import is_raw, raw_size, raw_to_image
from renderers.media.source import MediaSource


def decode_image(source: MediaSource, policy: MediaPolicy) -> Image.Image:
    """Decode to RGB, turned upright by its EXIF orientation, transparency laid on white.

    The size is checked from the header, before anything is decompressed. Raises `MediaLimitError`, `MediaDecodeError`.
    """
    if is_raw(source.data):
        _, width, height = raw_size(source.data)
        _check_size(source, width, height, policy)
        return _to_rgb(raw_to_image(source.data))
    try:
        with Image.open(io.BytesIO(source.data)) as image:
            _check_size(source, *image.size, policy)
            if getattr(image, "n_frames", 1) > 1:
                raise MediaDecodeError(
                    f"an animation of {image.n_frames} frames where one picture is expected ({source.digest[:12]}); "  # type: ignore[attr-defined]
                    "pass one frame"
                )
            return _to_rgb(ImageOps.exif_transpose(image))
    except UnidentifiedImageError as error:
        raise MediaDecodeError(
            f"{source.nbytes} bytes ({source.digest[:12]}) are not a picture that Pillow can read"
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise MediaDecodeError(f"picture {source.digest[:12]} is corrupt: {error}") from error


def _check_size(source: MediaSource, width: int, height: int, policy: MediaPolicy) -> None:
    if width * height > policy.max_pixels:
        raise MediaLimitError(
            f"picture {source.digest[:12]} has {width}x{height} pixels, more than max_pixels={policy.max_pixels}"
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    if image.mode.startswith("I;16"):
        # Pillow clips 16-bit grey to 8 bits; the model should see the picture, not a white square.
        return image.point(lambda value: value / 256).convert("L").convert("RGB")
    return image.convert("RGB")
