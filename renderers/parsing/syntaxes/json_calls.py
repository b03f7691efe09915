"""One JSON object, or a list of them, between two markers: Hermes and its relatives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from renderers.parsing.errors import InvalidJsonError
from renderers.parsing.json_text import end_of_json, read_json
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.syntax import Attempt, Block, judged


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; other families use other markers and keys."""

    start: str = "<tool_call>"
    end: str = "</tool_call>"
    name_key: str = "name"
    arguments_key: str = "arguments"
    inner: tuple[str, ...] = ()
    bare: str = ""

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.start,)

    @property
    def closes(self) -> tuple[str, ...]:
        return (self.end,)

    def decode(self, block: Block) -> list[Attempt]:
        start, end = block.inside(self.opens, self.closes)
        calls = list(json_calls(block, start, end, name_key=self.name_key, arguments_key=self.arguments_key))
        if not calls:
            flaw = (
                Status.MALFORMED if block.text[start:end].strip() else Status.INVALID_JSON
            )  # an empty list, or nothing
            calls = [judged(block, 0, len(block.text), None, None, closed=block.closed, flaw=flaw)]
        return calls


def json_calls(
    block: Block,
    start: int,
    end: int,
    *,
    separators: str = ",",
    name_key: str = "name",
    arguments_key: str = "arguments",
) -> Iterator[Attempt]:
    """The calls of a JSON object, or of several in a list or one behind the other, that fill `start:end`."""
    for begin, stop in json_parts(block.text, start, end, separators):
        try:
            value = read_json(block.plain(begin, stop))
        except InvalidJsonError:
            yield judged(block, begin, stop, None, None, closed=block.closed, flaw=Status.INVALID_JSON)
        else:
            yield judged_object(
                block, begin, stop, value, name_key=name_key, arguments_key=arguments_key, closed=block.closed
            )


def json_parts(text: str, start: int, end: int, separators: str) -> Iterator[tuple[int, int]]:
    """Where the JSON values in `text[start:end]`, or in the list that it is, stand; the last range may hold no JSON."""
    inside = text[start:end]
    if inside.lstrip().startswith("["):
        start = text.index("[", start) + 1
        if inside.rstrip().endswith("]"):
            end = text.rindex("]", start - 1, end)
    position = start
    while (position := _skip(text, position, end, separators if position > start else "")) < end:
        stop = end_of_json(text, position)
        # A value that something else than a separator follows is not one of several.
        behind = end if stop is None else _skip(text, stop, end, "")
        if stop is None or stop > end or (behind < end and text[behind] not in separators):
            yield position, end
            return
        yield position, stop
        position = stop


def _skip(text: str, position: int, end: int, more: str) -> int:
    """The first character behind white space and characters of `more`."""
    skipped = re.compile(rf"[ \t\r\n{more}]*").match(text, position, end)
    return position if skipped is None else skipped.end()


def judged_object(
    block: Block,
    start: int,
    end: int,
    value: Any,
    *,
    name_key: str = "name",
    arguments_key: str = "arguments",
    closed: bool = True,
) -> Attempt:
    """A call that is a JSON object; absent arguments are none."""
    if not isinstance(value, dict):
        return judged(block, start, end, None, None, closed=closed, flaw=Status.MALFORMED)
    call_id = value.get("id", value.get("tool_call_id"))
    return judged(
        block,
        start,
        end,
        value.get(name_key),
        value.get(arguments_key, {}),
        closed=closed,
        id=call_id if isinstance(call_id, str) and call_id else None,
    )
