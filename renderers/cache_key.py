"""A cache key for plain data: equal keys for equal values of equal types only."""

from __future__ import annotations

import marshal
from typing import Any

_SCALARS = frozenset((str, int, float, bool, type(None)))


def cache_key(value: Any) -> bytes | None:
    """Key of a value made of strings, numbers, None, lists, tuples and dicts; None for any other value.

    `marshal` by itself also accepts numpy's numbers and arrays, and writes those of different types as equal bytes.
    """
    try:
        # Version 2 writes equal values as equal bytes; later ones depend on which objects are shared.
        key = marshal.dumps(value, 2)
    except ValueError:  # it holds an object of another type, or is nested too deeply, for example inside itself
        return None
    return key if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    """Whether a value that is not nested inside itself holds nothing but plain data."""
    waiting = [value]
    for item in waiting:  # the list grows meanwhile
        kind = type(item)
        if kind in _SCALARS:
            continue
        if kind is dict:
            waiting += item
            waiting += item.values()
        elif kind is list or kind is tuple:
            waiting += item
        else:
            return False
    return True
