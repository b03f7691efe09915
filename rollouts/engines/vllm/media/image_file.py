"""Encodes an image as a file that every decoder decodes to the same pixels."""

from __future__ import annotations

import io
from typing import NamedTuple

from PIL import Image

from renderers import MediaSource
from renderers.media.decoding import decode_image
from renderers.media.policy import MediaPolicy
from renderers.media.sniffing import sniff

# EXIF tag of the camera's orientation.
_ORIENTATION = 0x0112
_PLAIN_FILES = ("image/png", "image/jpeg")


class ImageFile(NamedTuple):
    """The bytes of a PNG or JPEG, and its media type."""

    data: bytes | memoryview
    media_type: str


def image_file(source: MediaSource, policy: MediaPolicy) -> ImageFile:
    """The source's own bytes if all decoders agree about them, else a PNG of the pixels as decoded here.

    Decoders disagree about images that EXIF rotates and about transparent, paletted and 16-bit ones; pixels that never
    were a file have no bytes to send. Every image is decoded first: raises `MediaLimitError` or `MediaDecodeError`.
    """
    image = decode_image(source, policy)
    media_type = sniff(source.data)
    if media_type in _PLAIN_FILES and _is_plain(source):
        return ImageFile(source.data, str(media_type))
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return ImageFile(file.getbuffer(), "image/png")


def _is_plain(source: MediaSource) -> bool:
    """Whether a PNG or JPEG is upright and opaque, with 8 bits a channel and no palette."""
    with Image.open(io.BytesIO(source.data)) as image:
        upright = image.getexif().get(_ORIENTATION, 1) == 1
        return image.mode in ("RGB", "L") and upright and "transparency" not in image.info
