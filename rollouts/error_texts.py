"""Texts of values and exceptions for errors: short, storable, and there whatever the objects of a user do."""

from __future__ import annotations


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold the text; half of a surrogate pair it cannot."""
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


def shortened(value: object, most: int = 80) -> str:
    """The `repr` of anything in at most `most` characters, its type where it has none."""
    try:
        text = as_unicode(repr(value))
    except Exception:  # noqa: BLE001  an object of a user may raise anything from its __repr__
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def described(error: BaseException) -> str:
    """The type and the text of an exception."""
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(error: BaseException) -> str:
    """The text of an exception; where its `__str__` raises, that it has none."""
    try:
        return as_unicode(str(error))
    except Exception as problem:  # noqa: BLE001  an exception of a user may raise anything from its __str__
        return f"(no text: its __str__ raised {type(problem).__name__})"
