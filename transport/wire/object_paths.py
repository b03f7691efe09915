"""Paths of parts inside an object, such as `.tags[0]`, for errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any


def find_path(container: Any, target: object) -> str:
    """The path from a container to the object `target`, by identity; "" if it is not found. Slow: visits every part."""
    seen = set()
    stack = [(container, "")]
    while stack:
        value, path = stack.pop()
        if value is target and path:
            return path
        if id(value) in seen or (value is not container and not isinstance(value, list | dict)):
            continue
        seen.add(id(value))
        stack.extend((part, path + step) for step, part in parts_of(value))
    return ""


def parts_of(container: Any) -> Iterator[tuple[str, object]]:
    """The parts of a container, each with the path step that leads to it."""
    if isinstance(container, dict):
        for key, value in container.items():
            yield f"[{key!r}]", value
            yield f" (key {key!r:.80})", key
    elif isinstance(container, list | tuple | set | frozenset):
        for index, value in enumerate(container):
            yield f"[{index}]", value
    elif dataclasses.is_dataclass(container):
        for field in dataclasses.fields(container):
            yield f".{field.name}", getattr(container, field.name)
