"""Many media in one image: a grid of thumbnails with their numbers, digests and sizes."""

from __future__ import annotations

import math

from PIL import Image, ImageDraw

from renderers.errors import MediaDigestError
from rollouts.cli.media.description import Description, describe
from rollouts.cli.media.inventory import Inventory, Medium
from rollouts.cli.media.thumbnail import thumbnail

MOST_THUMBNAILS = 400
_SIDE = 144
_MARGIN = 10
_CAPTION = 28
_LINE = 13
_TITLE = 24
_WIDEST = 20  # columns

_PAPER, _INK, _FAINT, _FRAME, _BLANK = "#f4f4f2", "#202020", "#707070", "#c8c8c4", "#dcdcd8"


def contact_sheet(inventory: Inventory, title: str, most: int = MOST_THUMBNAILS) -> Image.Image:
    """RGB: at most `most` media in the order of the inventory, numbered from 1; the title says how many more there are.

    What cannot be shown (a video file, damage) is a tile that says so.
    """
    shown = inventory.media[:most]
    columns = max(4, min(_WIDEST, math.ceil(math.sqrt(1.5 * len(shown)))))
    rows = math.ceil(len(shown) / columns)
    across, down = _SIDE + _MARGIN, _SIDE + _CAPTION + _MARGIN
    sheet = Image.new("RGB", (_MARGIN + columns * across, _TITLE + _MARGIN + rows * down), _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((_MARGIN, 8), _fitting(draw, _title(inventory, title, len(shown)), sheet.width - 2 * _MARGIN), _INK)
    for place, medium in enumerate(shown):
        row, column = divmod(place, columns)
        _draw_tile(sheet, draw, _MARGIN + column * across, _TITLE + _MARGIN + row * down, place + 1, medium)
    return sheet


def _title(inventory: Inventory, title: str, shown: int) -> str:
    count = len(inventory.media)
    more = f"; the first {shown} are shown, {count - shown} more are not" if shown < count else ""
    return f"{count} media, {inventory.nbytes:,} bytes{more}: {title}"


def _draw_tile(sheet: Image.Image, draw: ImageDraw.ImageDraw, left: int, top: int, number: int, medium: Medium) -> None:
    described, image, trouble = _look_at(medium)
    if image is None:
        draw.rectangle((left, top, left + _SIDE - 1, top + _SIDE - 1), _BLANK, _FRAME)
        draw.multiline_text((left + _SIDE / 2, top + _SIDE / 2), trouble, _FAINT, anchor="mm", align="center")
    else:
        at = (left + (_SIDE - image.width) // 2, top + (_SIDE - image.height) // 2)
        draw.rectangle((at[0] - 1, at[1] - 1, at[0] + image.width, at[1] + image.height), None, _FRAME)
        sheet.paste(image, at)
    if described is not None and described.is_video:
        _draw_play_sign(draw, left + 6, top + 6)
    kind = "" if described is None else described.format + ("" if described.width is None else f" {described.size}")
    below = top + _SIDE + 3
    draw.text((left, below), _fitting(draw, f"#{number}  {medium.digest[:16]}", _SIDE), _INK)
    draw.text((left, below + _LINE), _fitting(draw, kind, _SIDE), _FAINT)


def _look_at(medium: Medium) -> tuple[Description | None, Image.Image | None, str]:
    """What it is, its thumbnail, and what to say where there is none."""
    try:
        source = medium.read()
        source.verify()
        described = describe(medium)
    except OSError:
        return None, None, "unreadable"
    except MediaDigestError:
        return None, None, "damaged"
    trouble = f"{described.format}\nvideo" if described.is_video else f"{described.format}\nnot decodable"
    image = thumbnail(source, _SIDE)
    return described, image and _enlarged(image), trouble


def _enlarged(image: Image.Image) -> Image.Image:
    """An image of a few pixels, each of them as a square."""
    factor = _SIDE // max(image.size)
    if factor < 2:
        return image
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _draw_play_sign(draw: ImageDraw.ImageDraw, left: int, top: int) -> None:
    draw.rectangle((left, top, left + 19, top + 15), _INK)
    draw.polygon(((left + 7, top + 3), (left + 7, top + 12), (left + 14, top + 7.5)), _PAPER)


def _fitting(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """`text` cut to `width` pixels; characters that the built-in font may lack are question marks."""
    text = text.encode("ascii", "replace").decode()
    if draw.textlength(text) <= width:
        return text
    while text and draw.textlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."
