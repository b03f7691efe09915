"""A key for plain data: equal for equal values of equal types, and for nothing else."""

from __future__ import annotations

import marshal
from typing import Any

_SCALARS = frozenset((str, int, float, bool, type(None)))


def cache_key(value: Any) -> bytes | None:
    """Bytes that stand for strings, numbers, None and lists, tuples and dicts of them; None for anything else.

    `marshal` by itself would also take numpy's numbers and arrays, and write those of different types as equal bytes.
    """
    try:
        # Version 2 writes equal values as equal bytes; later ones depend on which objects are shared.
        return marshal.dumps(value, 2) if _is_plain(value) else None
    except (RecursionError, ValueError):  # nested too deep for either
        return None


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return kind in (list, tuple) and all(map(_is_plain, value))
