"""The bounds of values that can be printed or exported.

A file of a few hundred bytes can hold a tuple of which both members are one tuple, of which both members are one tuple,
and so on: it is decoded in no time, because a shared value is built once, but printing or exporting it would not end.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np

from renderers import MediaSource

MAX_DEPTH: Final = 100
MAX_VALUES: Final = 1 << 24
MAX_BITS: Final = 1 << 13  # Python refuses to print an integer of more than about 14,000 bits
_LEAF: Final = (1, 0)


def limit_violation(value: Any) -> str | None:
    """Why `value` cannot be walked in bounded time and recursion, or None: too deep, too many parts, an endless int.

    A part counts as often as it is found, and is looked at once.
    """
    sizes: dict[int, tuple[int, int] | None] = {}  # by id: parts and depth; None while those are not known
    waiting = [(value, False)]
    while waiting:
        part, counted = waiting.pop()
        if counted:
            inside = [sizes.get(id(one), _LEAF) for one in _parts(part)]
            known = [one for one in inside if one is not None]
            if len(known) < len(inside):
                return "values that contain themselves"
            size, depth = 1 + sum(one[0] for one in known), 1 + max(one[1] for one in known)
            if depth > MAX_DEPTH:
                return f"values more than {MAX_DEPTH} deep"
            if size > MAX_VALUES:
                return f"more than {MAX_VALUES:,} values"
            sizes[id(part)] = size, depth
        elif type(part) is int and part.bit_length() > MAX_BITS:
            return f"an integer of {part.bit_length()} bits"
        elif isinstance(part, np.ndarray) and not part.nbytes:
            if (rows := math.prod(max(one, 1) for one in part.shape)) > MAX_VALUES:
                return f"{rows:,} rows of nothing"
            sizes[id(part)] = rows, 1
        elif id(part) not in sizes and (inside_it := _parts(part)):
            sizes[id(part)] = None
            waiting.append((part, True))
            waiting += [(one, False) for one in inside_it]
    return None


def _parts(value: Any) -> Collection[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, MediaSource):
        return (value.digest,)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (enum.Enum, type)):  # whose attributes lead everywhere
        return ()
    return list(getattr(value, "__dict__", {}).values())
