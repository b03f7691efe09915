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
        return marshal.dumps(value, 2) if _is_plain(value) else None
    except (RecursionError, ValueError):  # nested too deeply for `_is_plain` or `marshal`
        return None


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return kind in (list, tuple) and all(map(_is_plain, value))
