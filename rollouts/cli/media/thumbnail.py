"""Thumbnails of media, rotated as their EXIF data says."""

from __future__ import annotations

import io
import warnings

from PIL import Image, ImageOps

from renderers import MediaSource
from renderers.errors import MediaError
from renderers.media.decoding import FORMATS, to_rgb
from renderers.media.raw import PILLOW_ERRORS, is_raw, raw_to_image
from renderers.media.raw_video import is_raw_video, raw_video_frames


def thumbnail(source: MediaSource, side: int) -> Image.Image | None:
    """RGB, at most `side` x `side` pixels, of a video the first frame; None if Pillow cannot read the medium."""
    try:
        if is_raw_video(source.data):
            image = Image.fromarray(raw_video_frames(source.data)[0][0])
        elif is_raw(source.data):
            image = to_rgb(raw_to_image(source.data))
        else:
            image = _of_file(source, side)
        image.thumbnail((side, side))
    except (MediaError, Image.DecompressionBombError, *PILLOW_ERRORS):
        return None
    return image


def _of_file(source: MediaSource, side: int) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(io.BytesIO(source.data), formats=FORMATS) as image:
            image.draft("RGB", (2 * side, 2 * side))  # a JPEG is decoded at a fraction of its size
            return to_rgb(ImageOps.exif_transpose(image))
