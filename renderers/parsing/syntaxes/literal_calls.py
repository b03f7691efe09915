"""Calls with their arguments as literals: Python's (Llama, LFM2) or Gemma's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from renderers.parsing.literals import PYTHON, InvalidJsonError, Language, LiteralError, LiteralReader, parse_json
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.json_calls import json_parts, object_attempt
from renderers.parsing.syntaxes.syntax import Attempt, CallText, ToolCallSyntax

_LOOKS_LIKE_CALL = re.compile(r'\s*\{\s*"(?:name|type|function)"\s*:')
_LOOKS_LIKE_CALLS = re.compile(r"\s*\[\s*[^\W\d][\w.]*\(\s*(?:[^\W\d]\w*\s*=|\)\s*[\],])")
_GEMMA_QUOTE = '<|"|>'
_GEMMA_HEAD = re.compile(r"\s*call:\s*([^\s{}]*)\s*\{")


@dataclass(frozen=True, slots=True)
class PythonicCalls(ToolCallSyntax):
    """`[get_weather(city='Zürich', days=2), run()]`; values are literals, JSON's true, false and null included.

    Llama 4 and, between two tokens, LFM2. Without markers (`start_markers` empty, `unmarked_starts` "[") a turn that
    begins with such a list is a block.
    """

    unmarked_starts: str = "["

    def attempts(self, block: CallText) -> Iterator[Attempt]:
        start, end = block.body
        if not start and _LOOKS_LIKE_CALLS.match(block.text) is None:
            return
        reader = LiteralReader(block.text, start, end, PYTHON, block.encoding)
        found = False
        if reader.accept("["):
            while (attempt := _python_call(block, reader)) is not None:
                yield attempt
                found = True
                if not reader.accept(","):
                    break
            if reader.accept("]") and reader.at_end():
                return
        reader.skip_space()
        yield (block._replace(start=reader.position) if found else block).failed()


@dataclass(frozen=True, slots=True)
class LlamaCalls(ToolCallSyntax):
    """`{"name": "get_weather", "parameters": {...}}` as the whole turn, or several of them separated by `;`.

    Llama 3. `<|python_tag|>` is followed by the same objects or by `name.call(key="value")`. JSON without a name and
    parameters is content, not a call.
    """

    start_markers: tuple[str, ...] = ("<|python_tag|>",)
    unmarked_starts: str = "{"

    def attempts(self, block: CallText) -> list[Attempt]:
        attempts = [self._object(part) for part in json_parts(block, ";")]
        calls = [attempt for attempt in attempts if attempt is not None]
        if block.body[0] and not any(call.name for call in calls):
            return [self._code(block)]
        return calls if len(calls) == len(attempts) else []

    def _object(self, call: CallText) -> Attempt | None:
        """The call in a JSON value; None if the value is content."""
        text = call.plain_text(*call.body)
        try:
            value = parse_json(text)
        except InvalidJsonError:
            looks_like_call = _LOOKS_LIKE_CALL.match(text) is not None and '"parameters"' in text
            return call.failed(Status.INVALID_JSON) if looks_like_call else None
        if not isinstance(value, dict) or "name" not in value:
            return None
        key = next((key for key in ("parameters", "arguments") if key in value), None)
        # Nothing closes a call without markers: it is whole if its JSON is.
        return None if key is None else object_attempt(call._replace(closed=True), value, arguments_key=key)

    def _code(self, block: CallText) -> Attempt:
        reader = LiteralReader(block.text, *block.body, PYTHON, block.encoding)
        call = _python_call(block, reader)
        if call is None or call.name is None or not reader.at_end():
            return block.failed()
        return block.attempt(call.name.removesuffix(".call"), call.arguments)


def _python_call(block: CallText, reader: LiteralReader) -> Attempt | None:
    """The call `name(key=value, ...)` that comes next; None, without moving the reader, if there is none."""
    reader.skip_space()
    start = reader.position
    name = reader.name()
    if name is not None and reader.accept("("):
        try:
            arguments = reader.mapping("=", ")")
        except LiteralError:
            pass
        else:
            return block._replace(start=start, end=reader.position, closed=True).attempt(name, arguments)
    reader.position = start
    return None


@dataclass(frozen=True, slots=True)
class GemmaCalls(ToolCallSyntax):
    """`<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|>` (Gemma 4); keys have no quotes."""

    start_markers: tuple[str, ...] = ("<|tool_call>",)
    end_markers: tuple[str, ...] = ("<tool_call|>",)
    inner_markers: tuple[str, ...] = (_GEMMA_QUOTE,)

    def attempts(self, block: CallText) -> Iterator[Attempt]:
        head = _GEMMA_HEAD.match(block.text, *block.body)
        if head is None:
            yield block.failed()
            return
        name = block.encoding.decode(head[1])
        mark = re.escape(block.encoding[_GEMMA_QUOTE])
        string = re.compile(f"{mark}((?:(?!{mark}).)*){mark}", re.DOTALL)
        language = Language(string, escapes=False, keys=re.compile(rf"(?:(?!{mark})[^:,{{}}\[\]])+"))
        reader = LiteralReader(block.text, head.end(), block.body[1], language, block.encoding)
        try:
            arguments = reader.mapping(":", "}")
        except LiteralError:
            yield block.failed(name=name)
        else:
            yield block.attempt(name, arguments, error=None if reader.at_end() else Status.MALFORMED_STRUCTURE)
