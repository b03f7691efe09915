"""Anything that an episode may hold, as JSON has it."""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from renderers import MediaSource


def plain(value: Any) -> Any:
    """Lists, dicts, text and numbers. What JSON lacks: keys become text (or, where two would be one, the dict a list of
    pairs), a float that is not finite null, an array a list, bytes {"base64"}, a source {"digest"}; of anything else,
    tensors among them, what `str` says.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, (float, np.floating)):
        return short_float(value)
    if isinstance(value, np.generic):
        return plain(value.item()) if value.dtype.kind in "biuSU" else str(value)
    if isinstance(value, np.ndarray):
        return [plain(one) for one in value] if value.ndim else plain(value[()])
    if isinstance(value, Mapping):
        named = {key if isinstance(key, str) else str(key): one for key, one in value.items()}
        if len(named) < len(value):
            return [[plain(key), plain(one)] for key, one in value.items()]
        return {key: plain(one) for key, one in named.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(one) for one in value]
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, MediaSource):
        return {"digest": value.digest}
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value)


def short_float(value: float | np.floating[Any]) -> float | None:
    """A float that reads back to the same bits in its own precision: -0.1 for float32 -0.1, not -0.10000000149."""
    return float(str(value)) if math.isfinite(value) else None
