"""Comparing two values bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from transport.errors import NotEncodableError
from transport.wire.arrays import array_bytes, is_tensor, tensor_parts

_PLAIN = (str, int, bytes, bool, type(None))
_MAX_DEPTH: Final = 100


def same_value(one: Any, other: Any) -> bool:
    """Whether two values have the same type, equal parts in the same order, and bitwise equal numbers.

    Compares the parts of mappings, lists, tuples, dataclasses, numpy arrays and torch tensors, to a depth of 100.
    Objects of any other type, and deeper objects, are the same only if they are one object.
    """
    return _same(one, other, _MAX_DEPTH)


def _same(one: Any, other: Any, depth: int) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _PLAIN):
        return bool(one == other)
    if type(one) is float or type(one) is complex:
        return np.array(one).tobytes() == np.array(other).tobytes()  # zero has a sign, and NaN is not equal to itself
    if type(one) is np.ndarray:  # a subclass holds more than its elements
        return _same_arrays(one, other)
    if is_tensor(one):
        return _same_tensors(one, other)
    if not depth:
        return False
    if dataclasses.is_dataclass(one):
        return all(_same(getattr(one, f.name), getattr(other, f.name), depth - 1) for f in dataclasses.fields(one))
    if isinstance(one, Mapping):
        keys_same = _same(list(one), list(other), depth - 1)
        return keys_same and all(_same(value, other[key], depth - 1) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(
            _same(mine, theirs, depth - 1) for mine, theirs in zip(one, other, strict=True)
        )
    return False


def _same_arrays(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.dtype.hasobject or not one.dtype.itemsize:
        return False
    return np.array_equal(array_bytes(one), array_bytes(other))


def _same_tensors(one: Any, other: Any) -> bool:
    try:
        name, shape, data = tensor_parts(one)
        other_name, other_shape, other_data = tensor_parts(other)
    except NotEncodableError:
        return False
    return name == other_name and shape == other_shape and np.array_equal(data, other_data)
