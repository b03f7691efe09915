"""Converts all values that an episode may hold to JSON. The `repr` of a value is never used: it omits elements."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import enum
import math
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from renderers import MediaSource
from renderers.vision.patches import bfloat16_to_float32
from rollouts.errors import NoJsonFormError
from transport.wire.arrays import is_tensor, tensor_parts

# Types whose `str` is complete and can be parsed.
_TEXT: Final = (
    decimal.Decimal,
    uuid.UUID,
    pathlib.PurePath,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
)
# torch's names of the element types that numpy has too.
_NUMPY_NAMES: Final = frozenset(np.dtype(code).name for code in "?bBhHiIqQefdFD")


def plain(value: Any) -> Any:
    """`value` as lists, dicts, text, numbers, booleans and None.

    A key that is not text becomes text (a dict in which two keys would become equal becomes a list of pairs). A float
    that is not finite becomes null, an array or tensor {"dtype", "shape", "data"} with its elements in C order in one
    list, bytes {"base64"} (also the elements of dtypes that numpy lacks, except bfloat16), a complex number {"real",
    "imag"}, a source {"digest"}, a dataclass or pydantic model a dict. Dates, times, paths, decimal numbers and UUIDs
    become text. Raises `NoJsonFormError` for anything else.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, (float, np.floating)):
        return short_float(value)
    if isinstance(value, np.generic):
        return _scalar(value)
    if isinstance(value, np.ndarray):
        return _array(_dtype(value.dtype), value)
    if is_tensor(value):
        return _tensor(value)
    if isinstance(value, complex):
        return {"real": plain(value.real), "imag": plain(value.imag)}
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(one) for one in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, MediaSource):
        return {"digest": value.digest}
    if isinstance(value, _TEXT):
        return str(value)
    return _object(value)


def short_float(value: float | np.floating[Any]) -> float | None:
    """A float that reads back to the same bits in its own precision: -0.1 for float32 -0.1, not -0.10000000149."""
    return float(str(value)) if math.isfinite(value) else None


def _mapping(value: Mapping[Any, Any]) -> Any:
    named = {key if isinstance(key, str) else str(plain(key)): one for key, one in value.items()}
    if len(named) < len(value):
        return [[plain(key), plain(one)] for key, one in value.items()]
    return {key: plain(one) for key, one in named.items()}


def _scalar(value: np.generic) -> Any:
    if value.dtype.names is not None:
        return {name: plain(value[name]) for name in value.dtype.names}  # type: ignore[index]
    if value.dtype.kind in "mM":
        return str(value)
    return plain(value.tobytes() if value.dtype.kind == "V" else value.item())


def _dtype(dtype: np.dtype[Any]) -> Any:
    """numpy's name; of a structured dtype [[name of a field, its dtype, its shape], ...]."""
    if dtype.fields is None:
        return str(dtype)
    fields = {name: dtype.fields[name][0] for name in dtype.names or ()}
    return [[name, _dtype(field.base), list(field.shape)] for name, field in fields.items()]


def _array(dtype: Any, array: np.ndarray) -> dict[str, Any]:
    json_elements = array.dtype.kind in "biuU"
    flat = array.reshape(-1)
    return {
        "dtype": dtype,
        "shape": list(array.shape),
        "data": flat.tolist() if json_elements else [plain(one) for one in flat],
    }


def _tensor(tensor: Any) -> dict[str, Any]:
    name, shape, data = tensor_parts(tensor)
    if name in _NUMPY_NAMES:
        return _array(name, data.view(np.dtype(name)).reshape(shape))
    if name == "bfloat16":
        return _array(name, bfloat16_to_float32(data.view(np.uint16)).reshape(shape))
    return {"dtype": name, "shape": shape, "data": plain(data.tobytes())}


def _object(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    fields = getattr(type(value), "model_fields", None)  # of a pydantic model
    if isinstance(fields, Mapping):
        extra: dict[str, Any] = getattr(value, "model_extra", None) or {}
        return {name: plain(one) for name, one in [*((name, getattr(value, name)) for name in fields), *extra.items()]}
    raise NoJsonFormError(value)
