"""Pads rows of ids with media into arrays; every image and video is placed by its range, not by token id.

A policy can sample a literal `<|image_pad|>`, which a search by token id would mistake for an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from renderers import MediaItem
from renderers.placement import PlacedItem
from rollouts.models.mrope import mrope_positions


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """A padded batch of B rows and T columns.

    `input_ids` int64 (B, T); `attention_mask` bool (B, T), False on padding; `position_ids` int64 (3, B, T), the
    temporal, row and column positions of M-RoPE; `next_positions` int64 (B,), the position of each row's next token;
    `visual_mask` bool (B, T), True on placeholder tokens; `items` the distinct media; `feature_rows` int64 (number
    of True in `visual_mask`,): the row in the concatenated features of `items` for each visual position.
    """

    input_ids: np.ndarray
    attention_mask: np.ndarray
    position_ids: np.ndarray
    next_positions: np.ndarray
    visual_mask: np.ndarray
    items: list[MediaItem]
    feature_rows: np.ndarray


def place_rows(
    ids: Sequence[np.ndarray],
    media: Sequence[Sequence[PlacedItem]],
    *,
    pad_id: int,
    merge_size: int,
    side: Literal["left", "right"],
) -> PlacedRows:
    """Pad the rows on one side and place their images; an image that occurs in several rows is listed once."""
    width = max(len(row) for row in ids)
    shape = (len(ids), width)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=bool)
    position_ids = np.zeros((3, *shape), dtype=np.int64)
    next_positions = np.zeros(len(ids), dtype=np.int64)
    visual_mask = np.zeros(shape, dtype=bool)
    items: list[MediaItem] = []
    first_feature_row: dict[str, int] = {}
    feature_rows: list[np.ndarray] = []
    total = 0

    for index, (row, placed) in enumerate(zip(ids, media, strict=True)):
        start = width - len(row) if side == "left" else 0
        columns = slice(start, start + len(row))
        input_ids[index, columns] = row
        attention_mask[index, columns] = True
        position_ids[:, index, columns], next_positions[index] = mrope_positions(len(row), placed, merge_size)
        for item, placeholder in placed:
            if item.mm_hash not in first_feature_row:
                first_feature_row[item.mm_hash] = total
                items.append(item)
                total += item.num_tokens
            for begin, end in placeholder.runs:
                visual_mask[index, start + begin : start + end] = True
            feature_rows.append(np.arange(item.num_tokens) + first_feature_row[item.mm_hash])
    rows = np.concatenate(feature_rows) if feature_rows else np.empty(0, dtype=np.int64)
    return PlacedRows(input_ids, attention_mask, position_ids, next_positions, visual_mask, items, rows)
