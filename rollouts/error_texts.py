"""Short, storable texts of values and exceptions, for error messages."""

from __future__ import annotations


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


def text_with_notes(error: BaseException, text: str) -> str:
    """`text` of an exception, and the notes that it was given (`add_note`)."""
    return "; ".join([text, *map(str, getattr(error, "__notes__", ()))])


def exception_text(error: BaseException) -> str:
    """The text of an exception; a note about the failure if its `__str__` raises."""
    try:
        return as_unicode(str(error))
    except Exception as problem:  # noqa: BLE001  an exception of a user may raise anything from its __str__
        return f"(no text: its __str__ raised {type(problem).__name__})"
