"""Reads sampled JSON: no text exhausts the stack, every value is Unicode and can be written as JSON again."""

import json
from collections.abc import Mapping
from typing import Any

from renderers.errors import RendererError, short_repr

# Templates and JSON writers recurse, and a policy can sample more brackets than their stack allows.
MAX_DEPTH = 64

_DECODER = json.JSONDecoder()
_FIRST_PIECE = 4096  # characters
_LONGEST_WORD = len("-Infinity")


class InvalidJsonError(RendererError, ValueError):
    """The text is not JSON, or its value cannot be written as JSON again.

    Cure: none here: the parser keeps the text of the tool call, with a status that says what is wrong.
    """


def require(is_valid: bool) -> None:
    """Raise `ValueError` for sampled text that is no value; the parser reports it by a status."""
    if not is_valid:
        raise ValueError("no value")


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number that is too large")
    return value


_STRICT_DECODER = json.JSONDecoder(
    object_pairs_hook=_object_of_pairs, parse_float=finite_float, parse_constant=_reject_constant
)


def parse_json(text: str) -> Any:
    """The value of a JSON text with white space around it.

    Raises `InvalidJsonError`, also for a key that comes twice, of which one value would be lost, and for NaN and
    infinity.
    """
    try:
        value = _STRICT_DECODER.decode(text)
        if "\\u" in text:
            # A lone surrogate cannot be encoded, so no template or message could contain the value.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidJsonError(str(error)) from error
    return value


def no_object_reason(value: Any) -> str | None:
    """Why a value is neither a JSON object nor, by `parse_json`, the text of one; None if it is."""
    detail = ""
    try:
        if isinstance(value, Mapping):
            json.dumps(value, allow_nan=False, default=str)
            return None
        if isinstance(value, str) and isinstance(parse_json(value), Mapping):
            return None
    except (InvalidJsonError, ValueError, RecursionError) as error:
        detail = f": {error}"
    return f"{short_repr(value)} is not the text of a JSON object{detail}"


def end_of_json(text: str, start: int) -> int | None:
    """The end of the JSON value that begins at `start`; None if there is none."""
    length = _FIRST_PIECE
    while True:  # an error counts the lines before it, so that it must not have all of the text
        piece = text[start : start + length]
        is_rest = start + length >= len(text)
        try:
            end = _DECODER.raw_decode(piece)[1]
            if is_rest or end < length:
                return start + end
        except json.JSONDecodeError as error:
            is_cut = error.msg.startswith("Unterminated") or error.pos > length - _LONGEST_WORD
            if is_rest or not is_cut:
                return None
        except (ValueError, RecursionError):
            return None
        length *= 2


def is_deeper_than(value: Any, levels: int) -> bool:
    """Whether containers are nested more than `levels` deep, found level by level, without recursion."""
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
