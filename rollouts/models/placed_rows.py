"""Token sequences with media, laid out in rows: one sequence a row with padding, or several sequences packed in a row.

Every image, video and sound is placed by its range, not by token id: a policy can sample a literal `<|image_pad|>`,
which a search by token id would mistake for an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from renderers import MediaItem, PlaceholderRange
from renderers.placement import PlacedItem
from renderers.rendered import TOKEN_TYPE_IDS


class TokenSequence(NamedTuple):
    """Token ids, integers (n,), with media in prompt order; ranges count from the first token. `name` is for errors."""

    ids: np.ndarray
    media: Sequence[PlacedItem] = ()
    name: str = "-"


def beginning(sequence: TokenSequence, length: int) -> TokenSequence:
    """The first `length` tokens of a sequence, a number that cuts no range of an item."""
    media = tuple(pair for pair in sequence.media if pair[1].offset < length)
    return TokenSequence(sequence.ids[:length], media, sequence.name)


class RowItem(NamedTuple):
    """An item in rows: its sequence, its row, and its range in columns of the row."""

    item: MediaItem
    sequence: int
    row: int
    placeholder: PlaceholderRange


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRows:
    """N sequences in B rows and T columns.

    `input_ids` int64 (B, T); `position_ids` int64 (B, T), the position of a token within its sequence, 0 on padding;
    `sequence_ids` int32 (B, T), the index in `sequences`, -1 on padding; `starts` int64 (N, 2), row and column of the
    first token of each sequence. `packed`: a row may hold several sequences, which do not attend to each other.
    """

    sequences: tuple[TokenSequence, ...]
    input_ids: np.ndarray
    position_ids: np.ndarray
    sequence_ids: np.ndarray
    starts: np.ndarray
    packed: bool

    @property
    def attention_mask(self) -> np.ndarray:
        """bool (B, T), False on padding."""
        mask: np.ndarray = self.sequence_ids >= 0
        return mask

    def items(self) -> list[RowItem]:
        """The media of all sequences, by row and column."""
        placed = [
            RowItem(item, index, int(row), placeholder.shifted(int(column)))
            for index, (sequence, (row, column)) in enumerate(zip(self.sequences, self.starts, strict=True))
            for item, placeholder in sequence.media
        ]
        return sorted(placed, key=lambda each: (each.row, each.placeholder.offset))

    def token_types(self) -> np.ndarray:
        """int64 (B, T): 1 on feature tokens of images, 2 of videos, 3 of sounds, by range; 0 elsewhere."""
        types = np.zeros(self.input_ids.shape, dtype=np.int64)
        for each in self.items():
            for modality, start, end in each.placeholder.runs_of(each.item):
                types[each.row, start:end] = TOKEN_TYPE_IDS[modality]
        return types


def padded_rows(
    sequences: Sequence[TokenSequence], *, pad_id: int, side: Literal["left", "right"] = "right"
) -> PlacedRows:
    """One sequence a row, padded on one side to the longest of them."""
    width = max(len(sequence.ids) for sequence in sequences)
    starts = np.zeros((len(sequences), 2), dtype=np.int64)
    starts[:, 0] = np.arange(len(sequences))
    if side == "left":
        starts[:, 1] = [width - len(sequence.ids) for sequence in sequences]
    return placed_rows(sequences, starts, (len(sequences), width), pad_id=pad_id, packed=False)


def placed_rows(
    sequences: Sequence[TokenSequence], starts: np.ndarray, shape: tuple[int, int], *, pad_id: int, packed: bool
) -> PlacedRows:
    """Sequences that begin at `starts`, int64 (N, 2) row and column, in rows of `shape` (B, T)."""
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    sequence_ids = np.full(shape, -1, dtype=np.int32)
    for index, (sequence, (row, column)) in enumerate(zip(sequences, starts, strict=True)):
        columns = slice(column, column + len(sequence.ids))
        input_ids[row, columns] = sequence.ids
        position_ids[row, columns] = np.arange(len(sequence.ids))
        sequence_ids[row, columns] = index
    return PlacedRows(tuple(sequences), input_ids, position_ids, sequence_ids, starts, packed)
