"""Images as coloured half-blocks of a terminal: two pixels a character."""

from __future__ import annotations

import base64
import io
from typing import Final

from PIL import Image
from rich.text import Text

from rollouts.trajectory.token_node import MediaReference
from rollouts.view.media_frames import display_medium

MAX_COLUMNS: Final = 48
MAX_ROWS: Final = 16
_FRAMES: Final = 4
_GAP: Final = "  "


def image_lines(reference: MediaReference, columns: int) -> list[Text]:
    """An image, or the first 4 of the shown frames of a video, in at most `columns` columns and 16 rows.

    One line with the reason where the medium cannot be decoded.
    """
    medium = display_medium(reference.source, reference.modality, 2 * MAX_COLUMNS)
    frames = medium["frames"][:_FRAMES]
    if not frames:
        return [Text(f"[{reference.modality} not shown: {medium.get('error', 'it has no frames')}]", "dim")]
    each = max(4, (min(columns, MAX_COLUMNS * len(frames)) - len(_GAP) * (len(frames) - 1)) // len(frames))
    drawn = [_half_blocks(base64.b64decode(frame["data"]), min(each, MAX_COLUMNS)) for frame in frames]
    rows = max(map(len, drawn))
    lines = []
    for row in range(rows):
        line = Text()
        for number, picture in enumerate(drawn):
            line.append(_GAP if number else "")
            line.append_text(picture[row] if row < len(picture) else Text(" " * len(picture[0])))
        lines.append(line)
    return lines


def _half_blocks(file: bytes, columns: int) -> list[Text]:
    image = Image.open(io.BytesIO(file)).convert("RGB")
    scale = min(columns / image.width, 2 * MAX_ROWS / image.height, 1.0)
    width, height = max(1, round(image.width * scale)), max(2, round(image.height * scale))
    pixels = image.resize((width, height + height % 2)).load()
    assert pixels is not None
    return [
        Text.assemble(*(("▀", f"{_hex(pixels[x, y])} on {_hex(pixels[x, y + 1])}") for x in range(width)))
        for y in range(0, height, 2)
    ]


def _hex(pixel: object) -> str:
    assert isinstance(pixel, tuple)
    return "#{:02x}{:02x}{:02x}".format(*pixel)
