"""The path of a part in an object, such as `.tags[0]`, as error messages show it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from transport.errors import quoted


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


def find_cycle(container: Any) -> str:
    """The path from a container to the first list or dict that contains itself; "" if there is none."""
    open_ids, finished = {id(container)}, set()
    stack = [(container, "", parts_of(container))]
    while stack:
        value, path, parts = stack[-1]
        for step, part in parts:
            if not isinstance(part, list | dict) or id(part) in finished:
                continue
            if id(part) in open_ids:
                return path + step
            open_ids.add(id(part))
            stack.append((part, path + step, parts_of(part)))
            break
        else:
            stack.pop()
            open_ids.remove(id(value))
            finished.add(id(value))
    return ""


def parts_of(container: Any) -> Iterator[tuple[str, object]]:
    """The parts of a container, each with the path step that leads to it."""
    if isinstance(container, dict):
        for key, value in container.items():
            yield f"[{quoted(key)}]", value
            yield f" (key {quoted(key)})", key
    elif isinstance(container, list | tuple | set | frozenset):
        for index, value in enumerate(container):
            yield f"[{index}]", value
    elif dataclasses.is_dataclass(container):
        for field in dataclasses.fields(container):
            yield f".{field.name}", getattr(container, field.name)
