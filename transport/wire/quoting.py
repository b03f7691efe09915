"""Printing decoded values in error messages.

The `repr` of a decoded value can be too long to print: a message of a few hundred bytes can hold a tuple whose two
members are the same tuple, whose two members are the same tuple, and so on. It decodes fast, because a shared object is
built once, but its `repr` doubles with every level.
"""

from __future__ import annotations

from typing import Final

_MAX_CHARACTERS: Final = 80
_MAX_BITS: Final = 256


def quoted(value: object) -> str:
    """The beginning of the `repr` of text, bytes and numbers; for any other value only its type."""
    if type(value) is int and value.bit_length() > _MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    if value is None or type(value) in (bool, int, float, str, bytes):
        return f"{value!r:.{_MAX_CHARACTERS}}"
    return f"a {type(value).__name__}"
