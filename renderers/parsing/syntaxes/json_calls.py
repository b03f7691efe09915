# ruff: noqa: RUF001, RUF002  (DeepSeek spells its tokens with a fullwidth bar)
"""Calls with their arguments as JSON: JSON objects (Hermes and similar), or a name beside the arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from renderers.parsing.literals import InvalidJsonError, end_of_json, parse_json
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.syntax import Attempt, CallText, ToolCallSyntax

_FENCED = re.compile(r"([^\n]*)\n```json\n(.*)\n```\s*", re.DOTALL)
_CALL_NUMBER = re.compile(r":\d+\Z")


@dataclass(frozen=True, slots=True)
class JsonCalls(ToolCallSyntax):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; other families use other markers."""

    start_markers: tuple[str, ...] = ("<tool_call>",)
    end_markers: tuple[str, ...] = ("</tool_call>",)

    def attempts(self, block: CallText) -> list[Attempt]:
        is_empty_list = bool(block.body_text.strip())
        empty = block.failed(Status.MALFORMED_STRUCTURE if is_empty_list else Status.INVALID_JSON)
        return list(_json_calls(block)) or [empty]


@dataclass(frozen=True, slots=True)
class DeepSeekCalls(ToolCallSyntax):
    """DeepSeek V3, R1 and V3.1: a section of calls, each between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`.

    `fenced` (V3, R1): `function<｜tool▁sep｜>name`, then a line "```json", the arguments and a line "```"; otherwise
    (V3.1): `name<｜tool▁sep｜>arguments`.
    """

    fenced: bool = True
    start_markers: tuple[str, ...] = ("<｜tool▁calls▁begin｜>",)
    end_markers: tuple[str, ...] = ("<｜tool▁calls▁end｜>",)
    inner_markers: tuple[str, ...] = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")

    def attempts(self, block: CallText) -> Iterable[Attempt]:
        opening, separator, closing = map(block.encoding.__getitem__, self.inner_markers)

        def read(call: CallText) -> Attempt:
            name, found, arguments = map(call.encoding.decode, call.body_text.partition(separator))
            if not found:
                return call.failed()
            if self.fenced:
                fenced = _FENCED.fullmatch(arguments)
                if fenced is None:
                    return call.failed(name=arguments.strip().partition("\n")[0])
                name, arguments = fenced.groups()
            return call.json_attempt(name.strip(), arguments)

        return block.read_calls(opening, closing, read)


@dataclass(frozen=True, slots=True)
class KimiCalls(ToolCallSyntax):
    """Kimi K2: a section of calls, each named by its id.

    `<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`
    """

    start_markers: tuple[str, ...] = ("<|tool_calls_section_begin|>",)
    end_markers: tuple[str, ...] = ("<|tool_calls_section_end|>",)
    inner_markers: tuple[str, ...] = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")

    def attempts(self, block: CallText) -> Iterable[Attempt]:
        opening, separator, closing = map(block.encoding.__getitem__, self.inner_markers)

        def read(call: CallText) -> Attempt:
            head, found, arguments = map(call.encoding.decode, call.body_text.partition(separator))
            call_id = head.strip()
            name = _CALL_NUMBER.sub("", call_id).removeprefix("functions.")
            return call.json_attempt(name, arguments, id=call_id) if found else call.failed()

        return block.read_calls(opening, closing, read)


@dataclass(frozen=True, slots=True)
class MistralCalls(ToolCallSyntax):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call.

    In the second form `[CALL_ID]` and an id may precede `[ARGS]`. Only the end of the turn closes the last call.
    """

    start_markers: tuple[str, ...] = ("[TOOL_CALLS]",)
    inner_markers: tuple[str, ...] = ("[ARGS]", "[CALL_ID]")

    def attempts(self, block: CallText) -> Iterator[Attempt]:
        opening, arguments_mark, id_mark = map(block.encoding.__getitem__, (*self.start_markers, *self.inner_markers))
        start = 0
        while start < block.end:
            inside = start + len(opening)
            following = block.text.find(opening, inside)
            end = block.end if following < 0 else following
            call = block._replace(start=start, end=end, body=(inside, end), closed=following >= 0 or block.closed)
            head, found, arguments = call.body_text.partition(arguments_mark)
            if found:
                name, _, call_id = (block.encoding.decode(text).strip() for text in head.partition(id_mark))
                yield call.json_attempt(name, block.encoding.decode(arguments), id=call_id)
            else:
                calls = list(_json_calls(call._replace(closed=block.closed))) if "[" in head else []
                yield from calls or [call.failed()]
            start = end


def _json_calls(block: CallText) -> Iterator[Attempt]:
    """The calls of a JSON object, or of several in a list or separated by commas, that fill the body of the block."""
    for part in json_parts(block, ","):
        try:
            value = parse_json(part.plain_text(*part.body))
        except InvalidJsonError:
            yield part.failed(Status.INVALID_JSON)
        else:
            yield object_attempt(part, value)


def json_parts(block: CallText, separator: str) -> Iterator[CallText]:
    """The JSON values in the body of the block, or in the list that it is.

    The last part may hold no JSON: it is then the rest of the text.
    """
    text, inside, (start, end) = block.text, block.body_text, block.body
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
            stop = end
        yield block._replace(start=position, end=stop, body=(position, stop))
        position = stop


def _skip(text: str, position: int, end: int, separator: str) -> int:
    """The first position that holds neither white space nor the separator."""
    skipped = re.compile(rf"[ \t\r\n{separator}]*").match(text, position, end)
    return position if skipped is None else skipped.end()


def object_attempt(call: CallText, value: Any, *, arguments_key: str = "arguments") -> Attempt:
    """A call that is a JSON object; absent arguments count as an empty object."""
    if not isinstance(value, dict):
        return call.failed()
    call_id = value.get("id", value.get("tool_call_id"))
    arguments = value.get(arguments_key, {})
    return call.attempt(value.get("name"), arguments, id=call_id if isinstance(call_id, str) else None)
