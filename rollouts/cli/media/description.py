"""The format and the size of a medium, read from its header."""

from __future__ import annotations

from typing import NamedTuple

from PIL import Image

from renderers.errors import MediaError
from renderers.media.decoding import FORMATS
from renderers.media.raw import PILLOW_ERRORS, is_raw, is_raw_video, raw_size, raw_video_size
from renderers.media.sniffing import sniff
from rollouts.cli.media.inventory import Medium

_HEAD = 1024
_VIDEO_NAMES = {"quicktime": "mov", "x-matroska": "mkv", "x-msvideo": "avi", "mp2t": "ts", "x-ms-asf": "asf"}
_SUFFIXES = {"jpeg": "jpg", "mpo": "jpg", "tiff": "tif", "jpeg2000": "jp2", "unknown": "bin"}


class Description(NamedTuple):
    """`format` is short and lower-case (png, jpeg, raw, mp4...). width and height are None where no header has them."""

    format: str
    width: int | None
    height: int | None
    is_video: bool

    @property
    def suffix(self) -> str:
        """The suffix of a file that holds the bytes unchanged."""
        return _SUFFIXES.get(self.format, self.format if self.format.isalnum() else "bin")


def describe(medium: Medium) -> Description:
    """Format and size from the header; nothing is decoded. Raises `OSError`."""
    with medium.open() as file:
        head = file.read(_HEAD)
        file.seek(0)
        if is_raw(head) or is_raw_video(head):
            return _describe_raw(file.read())
        media_type = sniff(head) or "unknown"
        kind, _, name = media_type.partition("/")
        if kind == "video":
            return Description(_VIDEO_NAMES.get(name, name.removeprefix("x-")), None, None, is_video=True)
        try:
            with Image.open(file, formats=FORMATS) as image:
                name = (image.format or name or "unknown").lower()
                # An MPO is a photo followed by a preview, not an animation.
                animated = name != "mpo" and bool(getattr(image, "is_animated", False))
                return Description(name, image.width, image.height, is_video=animated)
        except (Image.DecompressionBombError, *PILLOW_ERRORS):
            return Description(name or "unknown", None, None, is_video=False)


def _describe_raw(data: bytes) -> Description:
    try:
        if is_raw(data):
            _, width, height = raw_size(data)
            return Description("raw", width, height, is_video=False)
        _, width, height, _ = raw_video_size(data)
        return Description("raw video", width, height, is_video=True)
    except MediaError:
        return Description("raw", None, None, is_video=is_raw_video(data))
