"""Token sequences with media, laid out in rows: one sequence a row with padding, or several sequences packed in a row.

Every image, video and sound is placed by its range, not by token id: a policy can sample a literal
`<|image_pad|>`, which a search by token id would mistake for an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from renderers import MediaItem, PlaceholderRange
from renderers.placement import PlacedItem
from renderers.rendered import TOKEN_TYPE_IDS
from rollouts.errors import ArgumentError, SampleError
from rollouts.values import check_choice, check_integer

if TYPE_CHECKING:
    import torch

Rows = TypeVar("Rows", np.ndarray, "torch.Tensor")

Layout = Literal["padded", "packed"]
"""padded: one sequence a row, padded to the width of the longest. packed: all of them one after another in one row."""

Side = Literal["left", "right"]
"""The side on which a row is padded. A packed row is padded on the right."""


class TokenRow:
    """A row of n tokens with media: what a forward pass computes. Rows with more columns (samples, data) extend it.

    `token_ids` integers (n,); `media` in prompt order, whose ranges count from the first token; `name` is for errors.
    `experts`, integers (n, layers, experts a token), compute each token in place of those that the model
    chooses, which remain where they are -1, and everywhere if they are None.
    """

    experts: np.ndarray | None = None

    def __init__(
        self,
        token_ids: np.ndarray,
        media: Sequence[PlacedItem] = (),
        name: str = "-",
        experts: np.ndarray | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.media = media
        self.name = name
        self.experts = experts

    def __len__(self) -> int:
        return len(self.token_ids)

    def part(self, begin: int, end: int) -> TokenRow:
        """The tokens `begin:end` with the media in them, numbers that cut no range of an item."""
        media = [(item, at.shifted(-begin)) for item, at in self.media if begin <= at.offset < end]
        experts = None if self.experts is None else self.experts[begin:end]
        return TokenRow(self.token_ids[begin:end], media, self.name, experts)


class RowItem(NamedTuple):
    """An item in rows: its sequence, its row, and its range in columns of the row."""

    item: MediaItem
    sequence: int
    row: int
    placeholder: PlaceholderRange


class Path(NamedTuple):
    """A whole sequence in rows: its row, and int64 (n,) the column of each of its tokens.

    The first `shared` of its tokens are placed with another sequence, for which they stand too.
    """

    sequence: TokenRow
    row: int
    columns: np.ndarray
    shared: int = 0


@dataclass(frozen=True, eq=False)
class PlacedRows:
    """N sequences in B rows and T columns.

    `input_ids` int64 (B, T); `position_ids` int64 (B, T), the position of a token within its sequence, 0 on
    padding; `sequence_ids` int32 (B, T), the index in `sequences`, -1 on padding; `starts` int64 (N, 2), row
    and column of the first token of each sequence. `packed`: a row may hold several sequences, which do not
    attend to each other.

    In rows of prefix trees (`tree_rows`), `sequences` are the parts of whole sequences, each of which stands
    once: `tree` has the whole ones, and `position_ids` count from their first tokens.
    """

    sequences: tuple[TokenRow, ...]
    input_ids: np.ndarray
    position_ids: np.ndarray
    sequence_ids: np.ndarray
    starts: np.ndarray
    packed: bool
    tree: tuple[Path, ...] | None = None

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The whole sequences."""
        return self.tree or tuple(
            Path(sequence, row, np.arange(column, column + len(sequence)))
            for sequence, (row, column) in zip(self.sequences, self.starts.tolist(), strict=True)
        )

    @property
    def attention_mask(self) -> np.ndarray:
        """bool (B, T), False on padding."""
        mask: np.ndarray = self.sequence_ids >= 0
        return mask

    @cached_property
    def items(self) -> Sequence[RowItem]:
        """The media of all sequences, by row and column."""
        placed = [
            RowItem(item, index, row, placeholder.shifted(column))
            for index, (sequence, (row, column)) in enumerate(zip(self.sequences, self.starts.tolist(), strict=True))
            for item, placeholder in sequence.media
        ]
        return sorted(placed, key=lambda each: (each.row, each.placeholder.offset))

    def experts(self) -> np.ndarray | None:
        """int32 (B, T, layers, experts a token) of `TokenRow.experts`, -1 elsewhere; None if there are none.

        Raises `SampleError` for a sequence with another number of layers, or of experts a token.
        """
        given = [(each.name, each.experts) for each in self.sequences if each.experts is not None]
        if not given:
            return None
        first = given[0][1].shape[1:]
        for name, experts in given:
            if (own := experts.shape[1:]) != first:
                reason = f"its experts are of {own} layers and experts a token, of another row {first}"
                raise SampleError(name, f"{reason}; pass rows of one sampler")
        none = np.empty((0, *first), dtype=np.int32)
        parts = [none if each.experts is None else each.experts for each in self.sequences]
        return laid_out(parts, self.starts, np.full((*self.input_ids.shape, *first), -1, dtype=np.int32))

    def token_types(self) -> np.ndarray:
        """int64 (B, T): 1 on feature tokens of images, 2 of videos, 3 of sounds, by range; 0 elsewhere."""
        types = np.zeros(self.input_ids.shape, dtype=np.int64)
        for each in self.items:
            for modality, start, end in each.placeholder.runs_of(each.item):
                types[each.row, start:end] = TOKEN_TYPE_IDS[modality]
        return types


def place(
    lengths: Sequence[int], layout: Layout, side: Side = "right", multiple_of: int = 1
) -> tuple[np.ndarray, tuple[int, int]]:
    """Where sequences of these lengths begin, int64 (N, 2) row and column, and how many rows and columns.

    The number of columns is rounded up to a multiple of `multiple_of`; no sequences have 0 rows and 0
    columns. Raises `ArgumentError` for values that do not exist.
    """
    check_choice("layout", layout, Layout)
    check_choice("side", side, Side)
    check_integer("multiple_of", multiple_of)
    count, sizes = len(lengths), np.array(lengths, dtype=np.int64)
    starts = np.zeros((count, 2), dtype=np.int64)
    if layout == "packed":
        if side == "left":
            raise ArgumentError("side", side, 'leave it out with layout="packed": a packed row is padded on the right')
        starts[:, 1] = np.cumsum(sizes) - sizes
        rows, columns = min(1, count), int(sizes.sum())
    else:
        starts[:, 0] = np.arange(count)
        rows, columns = count, int(sizes.max(initial=0))
    columns = -(-columns // multiple_of) * multiple_of
    if side == "left":
        starts[:, 1] = columns - sizes
    return starts, (rows, columns)


def numbered(starts: np.ndarray, lengths: Sequence[int], shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """`position_ids` and `sequence_ids`, as `PlacedRows` has them, of sequences that begin at `starts`."""
    position_ids = np.zeros(shape, dtype=np.int64)
    sequence_ids = np.full(shape, -1, dtype=np.int32)
    ascending = np.arange(max(lengths, default=0))
    for index, ((row, column), length) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        position_ids[row, column : column + length] = ascending[:length]
        sequence_ids[row, column : column + length] = index
    return position_ids, sequence_ids


def laid_out(parts: Sequence[Any], starts: np.ndarray | torch.Tensor, out: Rows) -> Rows:
    """`out` (B, T, ...), into which the rows of each sequence were written, from its row and column in `starts` on."""
    for part, (row, column) in zip(parts, starts.tolist(), strict=True):
        out[row, column : column + len(part)] = part
    return out


def placed_rows(
    sequences: Sequence[TokenRow], *, pad_id: int, layout: Layout = "padded", side: Side = "right"
) -> PlacedRows:
    """Sequences in rows, with `pad_id` on padding."""
    lengths = [len(sequence) for sequence in sequences]
    starts, shape = place(lengths, layout, side)
    ids = [sequence.token_ids for sequence in sequences]
    input_ids = laid_out(ids, starts, np.full(shape, pad_id, dtype=np.int64))
    return PlacedRows(tuple(sequences), input_ids, *numbered(starts, lengths, shape), starts, layout == "packed")
