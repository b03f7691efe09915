"""Where inside an object another one sits, for errors that say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any


def locate(container: Any, target: object) -> str:
    """The steps from a container to the very object `target`. Slow: it looks at everything."""
    seen = set()
    stack = [(container, "")]
    while stack:
        value, path = stack.pop()
        if value is target and path:
            return path
        if id(value) in seen or (value is not container and not isinstance(value, list | dict)):
            continue
        seen.add(id(value))
        stack.extend((part, path + step) for step, part in steps_into(value))
    return ""


def steps_into(container: Any) -> Iterator[tuple[str, object]]:
    """What a container holds, each part behind the step that leads to it."""
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
