"""Parsing of sampled JSON: it neither exhausts the stack nor gives text that is not Unicode."""

from __future__ import annotations

import json
from typing import Any

from renderers.errors import RendererError

# Templates and JSON writers recurse, and a policy can sample more brackets than their stack allows.
MAX_DEPTH = 64

_DECODER = json.JSONDecoder()


class InvalidJsonError(RendererError, ValueError):
    """The text is not JSON, or its value cannot be written as JSON again."""


def parse_json(text: str) -> Any:
    """The value of a JSON text with white space around it. Raises `InvalidJsonError`."""
    try:
        value = json.loads(text)
        if "\\u" in text:
            # A lone surrogate cannot be encoded, so no template or message could contain the value.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidJsonError(str(error)) from error
    return value


def end_of_json(text: str, start: int) -> int | None:
    """The end of the JSON value that begins at `start`; None if there is none."""
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def is_deeper_than(value: Any, levels: int) -> bool:
    """Whether containers are nested more than `levels` deep. It goes level by level and never exhausts the stack."""
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for item in layer
            if isinstance(item, (dict, list))
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not layer:
            return False
    return any(isinstance(item, (dict, list)) for item in layer)
