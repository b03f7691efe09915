"""Reads arguments written as a sequence of elements, one per parameter."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from renderers.parsing.json_text import InvalidJsonError
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.syntax import Block


class Arguments(NamedTuple):
    """The values, and the status of the first kind of error in the elements, if any."""

    values: dict[str, Any]
    error: Status | None


def read_elements(
    block: Block,
    start: int,
    end: int,
    *,
    opening: re.Pattern[str],
    closing: str,
    read: Callable[[str, str, re.Match[str]], Any],
    on_lines: bool = False,
) -> Arguments:
    """The arguments in `start:end` of a block: each a match of `opening` (group 1 is the key), a value, `closing`.

    `read(key, text, match)` gives the value or raises `InvalidJsonError`; the text is then the value. With `on_lines`,
    values are on lines of their own. An element without its end, a duplicate key, and other text than white space
    between elements make the call malformed.
    """
    values: dict[str, Any] = {}
    error: Status | None = None
    malformed = False
    position = start
    while (match := opening.search(block.text, position, end)) is not None:
        close = block.text.find(closing, match.end(), end)
        if close < 0:
            return Arguments(values, Status.MALFORMED)
        key, text = block.encoding.decode(match[1]).strip(), block.plain_text(match.end(), close)
        if on_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        malformed = malformed or key in values or bool(block.text[position : match.start()].strip())
        try:
            values[key] = read(key, text, match)
        except InvalidJsonError:
            values[key], error = text, Status.INVALID_JSON
        position = close + len(closing)
    malformed = malformed or bool(block.text[position:end].strip())
    return Arguments(values, Status.MALFORMED if malformed else error)
