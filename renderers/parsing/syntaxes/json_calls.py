"""Calls as one JSON object, or a list of them, between two markers: Hermes and similar formats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from renderers.parsing.json_text import InvalidJsonError, end_of_json, parse_json
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.syntax import (
    Attempt,
    Block,
    CallRegion,
    ToolCallSyntax,
    make_attempt,
    make_malformed_attempt,
)


@dataclass(frozen=True, slots=True)
class JsonCalls(ToolCallSyntax):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; other families use other markers."""

    start_markers: tuple[str, ...] = ("<tool_call>",)
    end_markers: tuple[str, ...] = ("</tool_call>",)

    def decode(self, block: Block) -> list[Attempt]:
        region = block.region(self)
        start, end = region.body
        calls = list(json_calls(block, start, end))
        if calls:
            return calls
        is_empty_list = bool(block.text[start:end].strip())
        error = Status.MALFORMED if is_empty_list else Status.INVALID_JSON
        return [make_attempt(block, region, None, None, error=error)]


def json_calls(block: Block, start: int, end: int) -> Iterator[Attempt]:
    """The calls of a JSON object, or of several in a list or separated by commas, that fill `start:end`."""
    for part in json_parts(block.text, start, end, ","):
        region = CallRegion(*part, part, block.closed)
        try:
            value = parse_json(block.plain_text(*part))
        except InvalidJsonError:
            yield make_attempt(block, region, None, None, error=Status.INVALID_JSON)
        else:
            yield make_object_attempt(block, region, value)


def json_parts(text: str, start: int, end: int, separator: str) -> Iterator[tuple[int, int]]:
    """The ranges of the JSON values in `text[start:end]`, or in the list that it is.

    The last range may hold no JSON: it is then the rest of the text.
    """
    inside = text[start:end]
    if inside.lstrip().startswith("["):
        start = text.index("[", start) + 1
        if inside.rstrip().endswith("]"):
            end = text.rindex("]", start - 1, end)
    position = start
    while (position := _skip(text, position, end, separator if position > start else "")) < end:
        stop = end_of_json(text, position)
        # Something else than a separator behind a value: what follows is not a list of values.
        behind = end if stop is None else _skip(text, stop, end, "")
        if stop is None or stop > end or (behind < end and text[behind] != separator):
            yield position, end
            return
        yield position, stop
        position = stop


def _skip(text: str, position: int, end: int, separator: str) -> int:
    """The first position that holds neither white space nor the separator."""
    skipped = re.compile(rf"[ \t\r\n{separator}]*").match(text, position, end)
    return position if skipped is None else skipped.end()


def make_object_attempt(block: Block, region: CallRegion, value: Any, *, arguments_key: str = "arguments") -> Attempt:
    """A call that is a JSON object; absent arguments count as an empty object."""
    if not isinstance(value, dict):
        return make_malformed_attempt(block, region)
    call_id = value.get("id", value.get("tool_call_id"))
    return make_attempt(
        block,
        region,
        value.get("name"),
        value.get(arguments_key, {}),
        id=call_id if isinstance(call_id, str) and call_id else None,
    )
