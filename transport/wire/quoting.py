"""Decoded values in the words of an error.

A message of a few hundred bytes can hold a tuple of which both members are one tuple, of which both members are one
tuple, and so on: decoded at once, because what is shared is built once, but its `repr` doubles with every level.
"""

from __future__ import annotations

from typing import Final

_MOST: Final = 80  # characters
_MOST_BITS: Final = 256


def quoted(value: object) -> str:
    """The beginning of the `repr` of text, bytes and numbers; of anything else only its type."""
    if type(value) is int and value.bit_length() > _MOST_BITS:
        return f"an integer of {value.bit_length()} bits"
    if value is None or type(value) in (bool, int, float, str, bytes):
        return f"{value!r:.{_MOST}}"
    return f"a {type(value).__name__}"
