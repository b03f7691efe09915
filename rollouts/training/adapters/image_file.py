"""Images as PNG and JPEG files, which all readers decode to the pixels that the renderer saw."""

import io
from typing import Literal

from PIL import ExifTags, Image

from renderers import MediaSource
from renderers.media.decoding import PILLOW_ERRORS, decode_image
from renderers.media.policy import MediaPolicy


def image_file(source: MediaSource) -> tuple[bytes, Literal["png", "jpeg"]]:
    """The bytes of a PNG or JPEG, and its format.

    A PNG or JPEG of plain RGB or grey pixels is returned as it is. One that is turned by EXIF data or has
    transparent pixels, other formats and raw pixels become a PNG of the RGB pixels that `decode_image` makes:
    readers differ in what they do with such files. Raises `MediaError` for a source that cannot be decoded.
    """
    try:
        with Image.open(io.BytesIO(source.data), formats=("PNG", "JPEG")) as image:
            upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
            if image.mode in ("L", "RGB") and upright and "transparency" not in image.info:
                return bytes(source.data), "png" if image.format == "PNG" else "jpeg"
    except PILLOW_ERRORS:
        pass  # no PNG or JPEG
    file = io.BytesIO()
    decode_image(source, MediaPolicy()).save(file, format="PNG")
    return file.getvalue(), "png"
