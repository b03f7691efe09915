"""Positions of M-RoPE (multimodal rotary position embedding) of Qwen-VL: time, row and column of each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from renderers.placement import PlacedItem


def mrope_positions(length: int, placed: Sequence[PlacedItem], merge_size: int) -> tuple[np.ndarray, int]:
    """Positions int64 (3, length) of a row, and the position of the token that would follow it.

    A text token advances all three by one. An image of grid (t, h, w) starts at the next position: its tokens count
    time, rows and columns from there, and the text after it continues after the longer side. The frames of a video are
    images between their time stamps. Source: `get_rope_index` of transformers' Qwen3-VL; with ranges, adjacent images
    and literal placeholder tokens need no special case.
    """
    positions = np.empty((3, length), dtype=np.int64)
    written, position = 0, 0
    for item, placeholder in placed:
        time, height, width = (int(side) for side in item[f"{item.modality}_grid_thw"])
        height, width = height // merge_size, width // merge_size
        frames = time // len(placeholder.runs)
        for begin, end in placeholder.runs:
            gap = begin - written
            positions[:, written:begin] = np.arange(position, position + gap)
            position += gap
            positions[:, begin:end] = np.indices((frames, height, width)).reshape(3, -1) + position
            position += max(height, width)
            written = end
    rest = length - written
    positions[:, written:] = np.arange(position, position + rest)
    return positions, position + rest
