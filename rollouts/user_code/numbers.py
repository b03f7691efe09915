"""Numbers as people pass them: Python's, numpy's and torch's."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import numpy as np

from transport.wire.arrays import is_tensor


def finite_number(value: Any) -> float | None:
    """A real number, numpy's among them, or an array or tensor without axes, as a float; None for anything else."""
    if isinstance(value, np.ndarray) or is_tensor(value):
        if tuple(value.shape) != ():
            return None
        value = value.item()
    if not isinstance(value, numbers.Real | np.bool_):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def whole_number(value: Any) -> int | None:
    """An integer, numpy's among them, as an int; None for anything else, among it True, False and 1.0."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return None
    return operator.index(value)
