"""Whether two values are the same down to the bits of their arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from transport.arrays import UnsupportedArrayError, array_bytes, is_tensor, tensor_parts

_PLAIN = (str, int, float, complex, bytes, bool, type(None))


def same_value(one: Any, other: Any) -> bool:
    """True only for values that nothing could tell apart: one type, equal parts in one order, arrays bit for bit.

    Looks into mappings, lists, tuples, dataclasses, numpy arrays and torch tensors. Two objects of any other type are
    the same only if they are one.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _PLAIN):
        return bool(one == other)
    if isinstance(one, np.ndarray):
        return _same_arrays(one, other)
    if is_tensor(one):
        return _same_tensors(one, other)
    if dataclasses.is_dataclass(one):
        return all(same_value(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same_value(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_value, one, other))
    return False


def _same_arrays(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.dtype.hasobject:
        return False
    return np.array_equal(array_bytes(one), array_bytes(other))


def _same_tensors(one: Any, other: Any) -> bool:
    try:
        name, shape, data = tensor_parts(one)
        other_name, other_shape, other_data = tensor_parts(other)
    except UnsupportedArrayError:
        return False
    return name == other_name and shape == other_shape and np.array_equal(data, other_data)
