"""Tensors of the media of samples: arrays of several items in one tensor, each pixel copied once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from renderers.media.item import PackedArray
from renderers.placement import PlacedItem
from renderers.vision.patches import StillPatches
from rollouts.errors import BatchError


def concatenated(arrays: Sequence[np.ndarray | PackedArray], name: str) -> torch.Tensor | None:
    """The arrays concatenated along axis 0, an array of one axis, such as the grid of an image, as one row; None if
    there are none.

    Raises `BatchError`, which names the tensor `name`, for arrays that differ in dtype or in the shape of their rows.
    """
    if not arrays:
        return None
    parts = [array if isinstance(array, StillPatches) else _rows_of(array) for array in arrays]
    kinds = {(np.dtype(np.uint8) if isinstance(part, StillPatches) else part.dtype, part.shape[1:]) for part in parts}
    if len(kinds) > 1:
        found = " and ".join(f"{dtype} rows of shape {shape}" for dtype, shape in sorted(kinds, key=str))
        raise BatchError(f"{name} has {found}; take the arrays of each item from sample.media")
    ((dtype, row_shape),) = kinds
    out: np.ndarray = np.empty((sum(part.shape[0] for part in parts), *row_shape), dtype=dtype)
    start = 0
    for part in parts:
        rows = out[start : start + part.shape[0]]
        if isinstance(part, StillPatches):
            part.unpack_into(rows)
        else:
            rows[:] = part
        start += part.shape[0]
    return torch.from_numpy(out)


def equal_media(one: Sequence[PlacedItem], other: Sequence[PlacedItem]) -> bool:
    """Whether the items have the same hashes, ranges and tensors, dtypes included."""
    if len(one) != len(other):
        return False
    for (item, placeholder), (other_item, other_placeholder) in zip(one, other, strict=True):
        if placeholder != other_placeholder or item.mm_hash != other_item.mm_hash:
            return False
        if item is not other_item and not (
            item.keys() == other_item.keys() and all(_equal_arrays(item[name], other_item[name]) for name in item)
        ):
            return False
    return True


def _equal_arrays(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def _rows_of(array: np.ndarray | PackedArray) -> np.ndarray:
    return np.atleast_2d(array if isinstance(array, np.ndarray) else array.unpack())
