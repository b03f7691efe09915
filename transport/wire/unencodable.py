"""Where in an object is what cannot be encoded, for the error: found after encoding failed, at any cost of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgpack

from transport.errors import EncodeError, quoted
from transport.wire import registry, wire_format

_DEPTH: Final = 1000


def located(root: object, name: str, error: Exception, error_of: Callable[[object], Exception | None]) -> EncodeError:
    """The error with the path of the first part of `root` that cannot be encoded; `name` stands for `root` in it.

    `error` is that of the whole, and `error_of` encodes one value by itself.
    """
    done: dict[int, object] = {}  # parts that can be encoded
    stack: list[tuple[str, object, Iterator[tuple[str, object]]]] = [(name, None, iter([("", root)]))]
    open_ids: set[int] = set()
    while stack:
        path, value, parts = stack[-1]
        for step, part in parts:
            if id(part) in done:
                continue
            if id(part) in open_ids:
                what = "a cycle: a list or dict" if isinstance(part, list | dict) else "the object"
                return EncodeError(path + step, f"{what} contains itself", "Refer to the parent by index or id.")
            inner = _parts_of(part)
            if inner is None:
                if (wrong := error_of(part)) is not None:
                    return _at(path + step, wrong)
                done[id(part)] = part
                continue
            if isinstance(part, dict) and not all(map(_is_key, part)):
                reason = "dict with a key that is neither str nor an int of 64 bits"
                return EncodeError(path + step, reason, "Use str or int keys.")
            open_ids.add(id(part))
            stack.append((path + step, part, inner))
            break
        else:
            stack.pop()
            open_ids.discard(id(value))
            done[id(value)] = value
    return _at(name, error)


def _at(path: str, error: Exception) -> EncodeError:
    if isinstance(error, EncodeError):
        return EncodeError(path, error.reason, error.cure)
    if isinstance(error, UnicodeEncodeError):
        return EncodeError(path, f"text that is not Unicode: {error.reason}", "Replace lone surrogates.")
    return EncodeError(
        path,
        f"msgpack cannot pack it: {str(error).rstrip('.')}",
        f"Remove lists and objects nested over {_DEPTH} deep, non-contiguous memoryviews and strings over 4 GiB.",
    )


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
