"""Indices of rows: integers, slices, lists of integers and masks, as the numbers of the rows that they select."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from rollouts.errors import RowIndexError
from rollouts.numbers import whole_number

RowsIndex: TypeAlias = "slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor"
RowIndex: TypeAlias = "int | RowsIndex"


def row_numbers(index: RowIndex, count: int) -> np.ndarray:
    """int64 (k,): the numbers, from 0 to `count` - 1, of the rows that `index` selects, in its order.

    A negative integer counts from the end; a slice or a list may select nothing; a mask has one bool for each row.
    Raises `RowIndexError` for a number that no row has, a mask of another length, and other values.
    """
    if isinstance(index, slice):
        return np.arange(count)[index]
    single = whole_number(index)
    array = np.array([single]) if single is not None else _as_array(index, count)
    if array.dtype == np.bool_:
        if len(array) != count:
            raise RowIndexError(index, count, f"the mask has {len(array)} values; pass one for each row")
        return np.flatnonzero(array)
    outside = (array < -count) | (array >= count)
    if outside.any():
        wrong = int(array[outside][0])
        raise RowIndexError(index, count, f"there is no row {wrong}; pass numbers from {-count} to {count - 1}")
    return np.where(array < 0, array + count, array)


def _as_array(index: object, count: int) -> np.ndarray:
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    elif isinstance(index, Sequence) and all(isinstance(each, int | np.integer | np.bool_) for each in index):
        index = np.array(index, dtype=None if len(index) else np.int64)
    if not isinstance(index, np.ndarray) or index.ndim != 1 or index.dtype.kind not in "bui":
        raise RowIndexError(index, count, "pass an integer, a slice, a list of integers or a mask of bools")
    return index if index.dtype == np.bool_ else index.astype(np.int64)
