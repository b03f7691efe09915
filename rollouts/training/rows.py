"""The rows of a batch: which samples each holds, and their columns."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from rollouts.errors import ArgumentError
from rollouts.values import check_choice, check_integer

Layout = Literal["padded", "packed"]
"""padded: one sample a row, padded to the width of the longest. packed: all samples one after another in one row."""

Side = Literal["left", "right"]
"""The side on which a row is padded. A packed row is padded on the right."""


class Placement(NamedTuple):
    """`rows` and `columns` of a batch, and `starts` int64 (N, 2): row and column of the first token of each sample."""

    rows: int
    columns: int
    starts: np.ndarray


def place_samples(lengths: np.ndarray, layout: Layout, side: Side, multiple_of: int) -> Placement:
    """Place samples of `lengths` int64 (N,); the number of columns is rounded up to a multiple of `multiple_of`.

    No samples have 0 rows and 0 columns.
    """
    count = len(lengths)
    if layout == "packed":
        columns = _rounded_up(int(lengths.sum()), multiple_of)
        first = np.cumsum(lengths) - lengths
        return Placement(min(1, count), columns, np.stack([np.zeros(count, np.int64), first], axis=1))
    columns = _rounded_up(int(lengths.max(initial=0)), multiple_of)
    first = columns - lengths if side == "left" else np.zeros(count, np.int64)
    return Placement(count, columns, np.stack([np.arange(count), first], axis=1))


def token_numbers(first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64 (sum of `lengths`,): first[0], first[0] + 1, ... for `lengths[0]` numbers, then those of first[1]..."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(first - before, lengths) + np.arange(int(lengths.sum()))


def padding_bounds(first: np.ndarray, lengths: np.ndarray, size: int) -> list[tuple[int, int]]:
    """The half-open runs of the numbers from 0 to `size` that belong to no sample."""
    order = np.argsort(first, kind="stable")
    starts = np.concatenate([[0], (first + lengths)[order]])
    ends = np.concatenate([first[order], [size]])
    kept = starts < ends
    return list(zip(starts[kept].tolist(), ends[kept].tolist(), strict=True))


def check_layout(layout: object, side: object, multiple_of: object) -> None:
    """Raise `ArgumentError` for a value that `place_samples` does not take."""
    check_choice("layout", layout, Layout)
    check_choice("side", side, Side)
    check_integer("multiple_of", multiple_of)
    if layout == "packed" and side == "left":
        raise ArgumentError("side", side, 'leave it out with layout="packed": a packed row is padded on the right')


def _rounded_up(length: int, multiple_of: int) -> int:
    return -(-length // multiple_of) * multiple_of
