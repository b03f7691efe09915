"""Where in an object is what cannot be encoded, for the error: found after encoding failed, at any cost of time."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgpack

from transport.errors import EncodeError, quoted
from transport.wire import registry, wire_format

WRONG_KEY: Final = "dict with a key that is neither str nor an int of 64 bits", "Use str or int keys."


def located(root: object, name: str, error: Exception, error_of: Callable[[object], Exception | None]) -> EncodeError:
    """The error with the path of the first part of `root` that cannot be encoded.

    `name` stands for `root` in the path. `error` is that of the whole, and `error_of` encodes one value by
    itself.
    """
    visited: dict[int, object] = {}  # alive, because another part could get the id of one
    around: set[int] = set()

    def search(part: object, path: str) -> EncodeError | None:
        if id(part) in around:
            what = "a cycle: a list or dict" if isinstance(part, list | dict) else "the object"
            return EncodeError(path, f"{what} contains itself", "Refer to the parent by index or id.")
        if id(part) in visited:
            return None
        visited[id(part)] = part
        inner = _parts_of(part)
        if inner is None:
            wrong = error_of(part)
            return None if wrong is None else _at(path, wrong)
        if isinstance(part, dict) and not all(map(_is_key, part)):
            return EncodeError(path, *WRONG_KEY)
        around.add(id(part))
        found = next(filter(None, (search(one, path + step) for step, one in inner)), None)
        around.discard(id(part))
        return found

    try:
        found = search(root, name)
    except RecursionError:  # so many levels are too many for the encoder, too
        found = None
    return found or _at(name, error)


def _at(path: str, error: Exception) -> EncodeError:
    if isinstance(error, EncodeError):
        return EncodeError(path, error.reason, error.cure)
    if isinstance(error, UnicodeEncodeError):
        return EncodeError(path, f"text that is not Unicode: {error.reason}", "Replace lone surrogates.")
    cure = "Remove lists and objects nested over 1000 deep, non-contiguous memoryviews and strings over 4 GiB."
    return EncodeError(path, f"msgpack cannot pack it: {str(error).rstrip('.')}", cure)


def _is_key(key: object) -> bool:
    if type(key) is int:
        return -(1 << 63) <= key < 1 << 64
    return type(key) in wire_format.KEY_TYPES


def _parts_of(value: Any) -> Iterator[tuple[str, object]] | None:
    """The parts of a value, each with the path step that leads to it; None for a value without parts."""
    kind = type(value)
    if kind is dict:
        return _items(value)
    if kind is list or kind is tuple:
        return ((f"[{index}]", part) for index, part in enumerate(value))
    registered = None if kind is msgpack.ExtType else registry.registration_of_class(kind)
    if registered is None or not all(hasattr(value, field) for field in registered.fields):
        return None
    return ((f".{field}", getattr(value, field)) for field in registered.fields)


def _items(value: dict[Any, object]) -> Iterator[tuple[str, object]]:
    for key, part in value.items():
        yield f"[{quoted(key)}]", part
        yield f" (key {quoted(key)})", key
