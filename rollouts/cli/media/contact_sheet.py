"""A contact sheet: one image with a grid of thumbnails, their numbers, digests and sizes."""

from __future__ import annotations

import math

from PIL import Image, ImageDraw

from renderers.errors import MediaDigestError
from rollouts.cli.media.description import Description, describe
from rollouts.cli.media.inventory import Inventory, Medium
from rollouts.cli.media.thumbnail import thumbnail

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
    draw.text((_MARGIN, 8), _shortened(draw, _title(inventory, title, len(media)), sheet.width - 2 * _MARGIN), _TEXT)
    for place, medium in enumerate(media):
        row, column = divmod(place, columns)
        _draw_tile(sheet, draw, _MARGIN + column * across, _TITLE + _MARGIN + row * down, place + 1, medium)
    return sheet


def _title(inventory: Inventory, title: str, thumbnails: int) -> str:
    count = len(inventory.media)
    more = f"; the first {thumbnails} are shown, {count - thumbnails} more are not" if thumbnails < count else ""
    return f"{count} media, {inventory.nbytes:,} bytes{more}: {title}"


def _draw_tile(sheet: Image.Image, draw: ImageDraw.ImageDraw, left: int, top: int, number: int, medium: Medium) -> None:
    described, image, reason = _thumbnail(medium)
    if image is None:
        draw.rectangle((left, top, left + _SIDE - 1, top + _SIDE - 1), _PLACEHOLDER, _FRAME)
        draw.multiline_text((left + _SIDE / 2, top + _SIDE / 2), reason, _SECONDARY_TEXT, anchor="mm", align="center")
    else:
        at = (left + (_SIDE - image.width) // 2, top + (_SIDE - image.height) // 2)
        draw.rectangle((at[0] - 1, at[1] - 1, at[0] + image.width, at[1] + image.height), None, _FRAME)
        sheet.paste(image, at)
    if described is not None and described.is_video:
        _draw_play_symbol(draw, left + 6, top + 6)
    kind = "" if described is None else described.format + ("" if described.width is None else f" {described.size}")
    below = top + _SIDE + 3
    draw.text((left, below), _shortened(draw, f"#{number}  {medium.digest[:16]}", _SIDE), _TEXT)
    draw.text((left, below + _LINE), _shortened(draw, kind, _SIDE), _SECONDARY_TEXT)


def _thumbnail(medium: Medium) -> tuple[Description | None, Image.Image | None, str]:
    """Its description, its thumbnail, and the reason to show where there is no thumbnail."""
    try:
        source = medium.read()
        source.verify()
        described = describe(medium)
    except OSError:
        return None, None, "unreadable"
    except MediaDigestError:
        return None, None, "damaged"
    reason = f"{described.format}\nvideo" if described.is_video else f"{described.format}\nnot decodable"
    image = thumbnail(source, _SIDE)
    return described, image and _enlarged(image), reason


def _enlarged(image: Image.Image) -> Image.Image:
    """A small image with each pixel enlarged to a square."""
    factor = _SIDE // max(image.size)
    if factor < 2:
        return image
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _draw_play_symbol(draw: ImageDraw.ImageDraw, left: int, top: int) -> None:
    draw.rectangle((left, top, left + 19, top + 15), _TEXT)
    draw.polygon(((left + 7, top + 3), (left + 7, top + 12), (left + 14, top + 7.5)), _BACKGROUND)


def _shortened(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """`text` cut to `width` pixels; characters that the built-in font may lack are question marks."""
    text = text.encode("ascii", "replace").decode()
    if draw.textlength(text) <= width:
        return text
    while text and draw.textlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."
