"""Calls with their arguments as literals: Python's (Llama, LFM2) or Gemma's own."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from renderers.parsing.json_text import InvalidJsonError, end_of_json, parse_json
from renderers.parsing.literals import PYTHON, Language, LiteralReader
from renderers.parsing.markers import MarkerEncoding
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.json_calls import json_calls, object_attempt, skip
from renderers.parsing.syntaxes.syntax import Attempt, CallText, JsonStrings, ToolCallSyntax
from renderers.parsing.values import JSON_STRING, PYTHON_STRINGS, DelimiterSearch, Value

_LOOKS_LIKE_CALL = re.compile(r'\s*\{\s*"(?:name|type|function)"\s*:')
_LOOKS_LIKE_CALLS = re.compile(r"\s*\[\s*[^\W\d][\w.]*\(\s*(?:[^\W\d]\w*\s*=|\)\s*[\],])")
_JSON_OBJECTS = re.compile(r"\s*\[?\s*\{")
_GEMMA_QUOTE = '<|"|>'
_GEMMA_HEAD = re.compile(r"\s*call:\s*([^\s{}]*)\s*\{")


@dataclass(frozen=True, slots=True)
class PythonicCalls(ToolCallSyntax):
    """`[get_weather(city='Zürich', days=2), run()]`; values are literals, JSON's true, false and null included.

    Llama 4 and, between two tokens, LFM2, which also writes JSON objects there. Without markers (`start_markers` empty,
    `unmarked_starts` "[") a turn that begins with such a list is a block, and text behind the list is content.
    """

    unmarked_starts: str | tuple[str, ...] = "["

    def values(self, encoding: MarkerEncoding) -> tuple[Value, ...]:
        return PYTHON_STRINGS

    def attempts(self, block: CallText) -> Iterable[Attempt]:
        start, end = block.body
        if not start and _LOOKS_LIKE_CALLS.match(block.text) is None:
            return []
        if start and _JSON_OBJECTS.match(block.text, start, end) is not None:
            return json_calls(block, canonical=False)
        reader = LiteralReader(block.text, start, end, PYTHON, block.encoding)
        calls: list[Attempt] = []
        if reader.accept("["):
            while (attempt := _python_call(block, reader)) is not None:
                calls.append(attempt)
                if not reader.accept(","):
                    break
            if reader.accept("]"):
                if reader.at_end():
                    return calls
                if not start and calls:
                    return _with_text_behind(calls, reader.position, end)
        reader.skip_space()
        return [*calls, (block._replace(start=reader.position) if calls else block).failed()]


def _with_text_behind(calls: list[Attempt], start: int, end: int) -> list[Attempt]:
    """Calls and the text `start:end` behind them, which is content; such calls are not canonical."""
    noncanonical = [call._replace(status=Status.NONCANONICAL) if call.status is Status.OK else call for call in calls]
    return [*noncanonical, Attempt(start, end, None, None, None)]


@dataclass(frozen=True, slots=True)
class LlamaCalls(JsonStrings):
    """`{"name": "get_weather", "parameters": {...}}` as the whole turn, or several of them separated by `;`.

    Llama 3. `<|python_tag|>` is followed by the same objects or by `name.call(key="value")`. JSON without a name and
    parameters is content, not a call. Not canonical are calls divided by `<|python_tag|>`, and a call with text behind
    it, which is content.
    """

    start_markers: tuple[str, ...] = ("<|python_tag|>",)
    unmarked_starts: str | tuple[str, ...] = "{"

    def attempts(self, block: CallText) -> list[Attempt]:
        parts = self._parts(block)
        found = [self._calls(part, is_last=part is parts[-1]) for part in parts]
        calls = [call for of_part in found for call in of_part]
        if not all(found) or not calls:
            return [block.failed()] if block.body[0] else []
        if len(parts) > 1:
            calls = [c._replace(status=Status.NONCANONICAL) if c.status is Status.OK else c for c in calls]
        return calls

    def _parts(self, block: CallText) -> list[CallText]:
        """The texts between the tags that are outside of strings."""
        start, end = block.body
        tag = re.escape(block.encoding[self.start_markers[0]])
        edges = [found.span() for found in DelimiterSearch(block.values, tag).finditer(block.text, start, end)]
        starts, ends = [start, *(edge[1] for edge in edges)], [*(edge[0] for edge in edges), end]
        parts = [block._replace(start=a, end=b, body=(a, b)) for a, b in zip(starts, ends, strict=True)]
        return [part for part in parts if part.body_text.strip()]

    def _calls(self, part: CallText, *, is_last: bool) -> list[Attempt]:
        """The calls of a part; none if it is not a list of calls."""
        start, end = part.body
        if part.body_text.lstrip().startswith("["):
            calls = list(json_calls(part, canonical=False))
            return calls if all(call.name for call in calls) else []
        calls, position = [], skip(part.text, start, end)
        while (
            position < end and (call := self._object(part._replace(start=position, body=(position, end)))) is not None
        ):
            calls.append(call)
            position = behind = skip(part.text, call.end, end)
            if behind < end and part.text[behind] == ";":
                position = skip(part.text, behind, end, ";")
            else:
                break
        if position == end:
            return calls
        if not calls:
            return self._code(part) if start else []
        is_followed = is_last and all(call.status in (Status.OK, Status.NONCANONICAL) for call in calls)
        return _with_text_behind(calls, position, end) if is_followed else []

    def _object(self, call: CallText) -> Attempt | None:
        """The call in the JSON value at the beginning of the body; None if the value is content."""
        start, end = call.body
        stop = end_of_json(call.text, start)
        stop = end if stop is None or stop > end else stop
        # Nothing closes a call without markers: it is whole if its JSON is.
        call = call._replace(end=stop, closed=True)
        text = call.plain_text(start, stop)
        try:
            value = parse_json(text)
        except InvalidJsonError:
            looks_like_call = _LOOKS_LIKE_CALL.match(text) is not None and '"parameters"' in text
            return call.failed(Status.INVALID_JSON) if looks_like_call else None
        if not isinstance(value, dict) or "name" not in value or not value.keys() & {"parameters", "arguments"}:
            return None
        return object_attempt(call, value, arguments_key="parameters")

    def _code(self, part: CallText) -> list[Attempt]:
        reader = LiteralReader(part.text, *part.body, PYTHON, part.encoding)
        call = _python_call(part, reader)
        if call is None or call.name is None or not reader.at_end():
            return []
        return [part.attempt(call.name.removesuffix(".call"), call.arguments)]


def _python_call(block: CallText, reader: LiteralReader) -> Attempt | None:
    """The call `name(key=value, ...)` that comes next; None, without moving the reader, if there is none."""
    reader.skip_space()
    start = reader.position
    name = reader.name()
    if name is not None and reader.accept("("):
        try:
            arguments = reader.mapping("=", ")")
        except ValueError:
            pass
        else:
            return block._replace(start=start, end=reader.position, closed=True).attempt(name, arguments)
    reader.position = start
    return None


@dataclass(frozen=True, slots=True)
class GemmaCalls(ToolCallSyntax):
    """`<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|>` (Gemma 4); keys have no quotes.

    Strings and keys as JSON writes them are read, too.
    """

    start_markers: tuple[str, ...] = ("<|tool_call>",)
    end_markers: tuple[str, ...] = ("<tool_call|>",)
    inner_markers: tuple[str, ...] = (_GEMMA_QUOTE,)

    def values(self, encoding: MarkerEncoding) -> tuple[Value, ...]:
        mark = re.escape(encoding[_GEMMA_QUOTE])
        return (Value(mark, mark), JSON_STRING)

    def attempts(self, block: CallText) -> Iterator[Attempt]:
        head = _GEMMA_HEAD.match(block.text, *block.body)
        if head is None:
            yield block.failed()
            return
        name = block.encoding.decode(head[1])
        mark = re.escape(block.encoding[_GEMMA_QUOTE])
        string = re.compile(f"{mark}((?:(?!{mark}).)*){mark}", re.DOTALL)
        keys = re.compile(rf"(?:(?!{mark})[^:,{{}}\[\]])+")
        language = Language(string, escapes=False, keys=keys, json_strings=True)
        reader = LiteralReader(block.text, head.end(), block.body[1], language, block.encoding)
        try:
            arguments = reader.mapping(":", "}")
        except ValueError:
            yield block.failed(name=name)
        else:
            error = None if reader.at_end() else Status.MALFORMED_STRUCTURE
            yield block.attempt(name, arguments, error=error, canonical=reader.canonical)
