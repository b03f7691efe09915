"""Conversion of Python, numpy and torch numbers to `int` and `float`."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import numpy as np

from transport.wire.arrays import is_tensor


def finite_number(value: Any) -> float | None:
    """A finite real number, or an array or tensor without axes that holds one, as a float; None for anything else."""
    if type(value) is float:  # most are, and asking an abstract class takes longer than the rest
        return value if math.isfinite(value) else None
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
    """A Python or numpy integer as an int; None for anything else, including True, False and 1.0."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return None
    return operator.index(value)
