"""Rows of different lengths as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch


def padded(rows: Sequence[np.ndarray], fill: Any, dtype: npt.DTypeLike, side: Literal["left", "right"]) -> torch.Tensor:
    """Rows (n_i,) as one tensor (rows, largest n_i) of `dtype`, padded on `side` with `fill`."""
    width = max(len(row) for row in rows)
    table = np.full((len(rows), width), fill, dtype=dtype)
    for line, row in zip(table, rows, strict=True):
        if side == "left":
            line[width - len(row) :] = row
        else:
            line[: len(row)] = row
    return torch.from_numpy(table)


def presence(lengths: Sequence[int], side: Literal["left", "right"]) -> torch.Tensor:
    """Int64 (rows, longest): 1 on the tokens of rows padded on `side`, 0 on padding."""
    return padded([np.ones(length, dtype=np.int64) for length in lengths], 0, np.int64, side)
