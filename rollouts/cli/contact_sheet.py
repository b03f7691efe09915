"""A contact sheet: one image with a grid of thumbnails of media, their numbers, digests and sizes."""

from __future__ import annotations

import io
import math

from PIL import Image, ImageDraw, ImageOps

from renderers import MediaSource
from renderers.errors import MediaDigestError, MediaError
from renderers.media.decoding import (
    FORMATS,
    PILLOW_ERRORS,
    is_raw,
    is_raw_video,
    raw_to_image,
    raw_video_frames,
    to_rgb,
)
from rollouts.cli.media_inventory import Description, Inventory, Medium, describe, waveform

MAX_THUMBNAILS = 400
_SIDE = 144
_MARGIN = 10
_CAPTION = 28
_LINE = 13
_TITLE = 24
_MAX_COLUMNS = 20

_BACKGROUND, _TEXT, _SECONDARY_TEXT, _FRAME, _PLACEHOLDER = "#f4f4f2", "#202020", "#707070", "#c8c8c4", "#dcdcd8"


def contact_sheet(inventory: Inventory, title: str, max_thumbnails: int = MAX_THUMBNAILS) -> Image.Image:
    """An RGB image of at most `max_thumbnails` media in the order of the inventory, numbered from 1.

    The title has the number of media without a thumbnail. A medium that cannot be shown (a video file, damaged data)
    is a tile with the reason.
    """
    media = inventory.media[:max_thumbnails]
    columns = max(4, min(_MAX_COLUMNS, math.ceil(math.sqrt(1.5 * len(media)))))
    rows = math.ceil(len(media) / columns)
    across, down = _SIDE + _MARGIN, _SIDE + _CAPTION + _MARGIN
    sheet = Image.new("RGB", (_MARGIN + columns * across, _TITLE + _MARGIN + rows * down), _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    count = len(inventory.media)
    more = f"; the first {len(media)} are shown, {count - len(media)} more are not" if len(media) < count else ""
    heading = f"{count} media, {inventory.nbytes:,} bytes{more}: {title}"
    draw.text((_MARGIN, 8), _shortened(draw, heading, sheet.width - 2 * _MARGIN), _TEXT)
    for place, medium in enumerate(media):
        row, column = divmod(place, columns)
        _draw_tile(sheet, draw, _MARGIN + column * across, _TITLE + _MARGIN + row * down, place + 1, medium)
    return sheet


def _draw_tile(sheet: Image.Image, draw: ImageDraw.ImageDraw, left: int, top: int, number: int, medium: Medium) -> None:
    described, image, reason = _described_thumbnail(medium)
    if image is None:
        draw.rectangle((left, top, left + _SIDE - 1, top + _SIDE - 1), _PLACEHOLDER, _FRAME)
        draw.multiline_text((left + _SIDE / 2, top + _SIDE / 2), reason, _SECONDARY_TEXT, anchor="mm", align="center")
    else:
        at = (left + (_SIDE - image.width) // 2, top + (_SIDE - image.height) // 2)
        draw.rectangle((at[0] - 1, at[1] - 1, at[0] + image.width, at[1] + image.height), None, _FRAME)
        sheet.paste(image, at)
    if described is not None and described.modality != "image":
        draw.rectangle((left + 6, top + 6, left + 25, top + 21), _TEXT)
        draw.polygon(((left + 13, top + 9), (left + 13, top + 18), (left + 20, top + 13.5)), _BACKGROUND)
    kind = "" if described is None else f"{described.format} {described.size}"
    below = top + _SIDE + 3
    draw.text((left, below), _shortened(draw, f"#{number}  {medium.digest[:16]}", _SIDE), _TEXT)
    draw.text((left, below + _LINE), _shortened(draw, kind, _SIDE), _SECONDARY_TEXT)


def _described_thumbnail(medium: Medium) -> tuple[Description | None, Image.Image | None, str]:
    """Its description, its thumbnail, and the reason to show where there is no thumbnail."""
    try:
        source = medium.read()
        source.verify()
        described = describe(medium)
    except OSError:
        return None, None, "unreadable"
    except MediaDigestError:
        return None, None, "damaged"
    image = _drawn_waveform(source) if described.modality == "audio" else thumbnail(source)
    if image is not None and (factor := _SIDE // max(image.size)) > 1:  # each pixel of a small image becomes a square
        image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    return described, image, f"{described.format}\n{'video' if described.modality == 'video' else 'not decodable'}"


def _drawn_waveform(source: MediaSource) -> Image.Image | None:
    heights = waveform(source, _SIDE)
    if heights is None:
        return None
    image = Image.new("RGB", (_SIDE, _SIDE // 2), _PLACEHOLDER)
    draw, middle = ImageDraw.Draw(image), _SIDE // 4
    for x, height in enumerate(heights):
        draw.line((x, middle - height * middle, x, middle + height * middle), _TEXT)
    return image


def thumbnail(source: MediaSource) -> Image.Image | None:
    """RGB, rotated as EXIF data say; of a video the first frame. None if Pillow cannot read the medium."""
    try:
        if is_raw_video(source.data):
            image = Image.fromarray(raw_video_frames(source.data)[0][0])
        elif is_raw(source.data):
            image = to_rgb(raw_to_image(source.data))
        else:
            with Image.open(io.BytesIO(source.data), formats=FORMATS) as file:
                file.draft("RGB", (2 * _SIDE, 2 * _SIDE))  # a JPEG is decoded at a fraction of its size
                image = to_rgb(ImageOps.exif_transpose(file))
        image.thumbnail((_SIDE, _SIDE))
    except (MediaError, Image.DecompressionBombError, *PILLOW_ERRORS):
        return None
    return image


def _shortened(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """`text` cut to `width` pixels; characters that the built-in font may lack are question marks."""
    text = text.encode("ascii", "replace").decode()
    if draw.textlength(text) <= width:
        return text
    while text and draw.textlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."
