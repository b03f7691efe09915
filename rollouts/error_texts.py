"""Short, storable texts of values and exceptions, for error messages."""

from __future__ import annotations

from typing import Final

import numpy as np

_MAX_BITS: Final = 1 << 13  # Python refuses to print an integer of more than about 14,000 bits


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode the text. It cannot encode half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_unicode(text: str) -> str:
    r"""The text with each half of a surrogate pair written as `\udxxx`."""
    return text if is_unicode(text) else text.encode(errors="backslashreplace").decode()


def short_repr(value: object, limit: int = 80) -> str:
    """The `repr` of a value in at most `limit` characters; the name of its type if `repr` raises."""
    try:
        text = as_unicode(repr(value))
    except Exception:  # noqa: BLE001  an object of a user may raise anything from its __repr__
        return f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def describe_exception(error: BaseException) -> str:
    """The type and the text of an exception."""
    return f"{type(error).__name__}: {exception_text(error)}"


def exception_text(error: BaseException) -> str:
    """The text of an exception; a note about the failure if its `__str__` raises."""
    try:
        return as_unicode(str(error))
    except Exception as problem:  # noqa: BLE001  an exception of a user may raise anything from its __str__
        return f"(no text: its __str__ raised {type(problem).__name__})"


def quoted(value: object) -> str:
    """The `repr` of a text or a number in at most 40 characters; the type of any other value.

    A decoded container may hold itself so often that its `repr` never ends.
    """
    is_plain = isinstance(value, str | bytes | float | np.number) or value is None
    if is_plain or (isinstance(value, int) and value.bit_length() <= _MAX_BITS):
        return f"{value!r:.40}"
    return f"a {type(value).__name__}"
