"""Conversion of Python, numpy and torch numbers to `int` and `float`."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

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


#: Numbers whose squares have no float are scaled by a power of two before the squares are summed.
_SMALL, _LARGE = 1e-140, 1e140
_SCALE: Final = 2.0**600


class MeanAndSpread(NamedTuple):
    """The mean and the standard deviation of `used` finite numbers among `given` ones; NaN where `used` is 0."""

    mean: float
    spread: float
    used: int
    given: int

    @property
    def not_finite(self) -> int:
        return self.given - self.used


def mean_and_spread(values: Iterable[float]) -> MeanAndSpread:
    """The mean and the standard deviation of the finite numbers among `values`.

    The result is finite for every list with a finite number: sums and squares of numbers up to 1.8e308 do not overflow.
    """
    array = np.fromiter(values, np.float64)
    finite = array[np.isfinite(array)]
    if not len(finite):
        return MeanAndSpread(math.nan, math.nan, 0, len(array))
    largest = np.abs(finite).max()
    scale = 1 / _SCALE if largest > _LARGE else _SCALE if largest < _SMALL else 1.0
    scaled = finite * scale
    return MeanAndSpread(float(scaled.mean()) / scale, float(scaled.std()) / scale, len(finite), len(array))


def whole_number(value: Any) -> int | None:
    """A Python or numpy integer as an int; None for anything else, including True, False and 1.0."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return None
    return operator.index(value)
