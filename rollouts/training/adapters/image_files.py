"""The files of images, as trainers that process images themselves take them."""

from __future__ import annotations

import io
from typing import Literal

from PIL import ExifTags, Image

from renderers import MediaSource
from renderers.media.decoding import PILLOW_ERRORS, decode_image
from renderers.media.policy import MediaPolicy
from renderers.media.sniffing import sniff

ImageFormat = Literal["png", "jpeg"]

_FORMATS: dict[str, ImageFormat] = {"image/png": "png", "image/jpeg": "jpeg"}


def image_file(source: MediaSource) -> tuple[bytes, ImageFormat]:
    """The bytes of a PNG or JPEG, and its format.

    A PNG or JPEG of plain RGB or grey pixels is returned as it is. One that is turned by EXIF data or has transparent
    pixels, other formats and raw pixels become a PNG of the RGB pixels that `decode_image` makes: readers differ in
    what they do with such files. Raises `MediaError` for a source that cannot be decoded.
    """
    image_format = _FORMATS.get(sniff(source.data) or "")
    if image_format is not None and _is_plain(source.data):
        return bytes(source.data), image_format
    file = io.BytesIO()
    decode_image(source, MediaPolicy()).save(file, format="PNG")
    return file.getvalue(), "png"


def _is_plain(data: bytes | memoryview) -> bool:
    """Whether the file has RGB or grey pixels of 8 bits, upright and opaque."""
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
            return image.mode in ("L", "RGB") and upright and "transparency" not in image.info
    except PILLOW_ERRORS:
        return False
