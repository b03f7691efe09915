"""Calls of Llama 3: a turn that is a JSON object, or code behind `<|python_tag|>`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from renderers.parsing.json_text import InvalidJsonError, parse_json
from renderers.parsing.literals import PYTHON, LiteralReader
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.json_calls import json_parts, make_object_attempt
from renderers.parsing.syntaxes.pythonic import python_call
from renderers.parsing.syntaxes.syntax import (
    Attempt,
    Block,
    CallRegion,
    ToolCallSyntax,
    make_attempt,
    make_malformed_attempt,
)

_LOOKS_LIKE_CALL = re.compile(r'\s*\{\s*"(?:name|type|function)"\s*:')


@dataclass(frozen=True, slots=True)
class LlamaCalls(ToolCallSyntax):
    """`{"name": "get_weather", "parameters": {...}}` as the whole turn, or several of them separated by `;`.

    `<|python_tag|>` is followed by the same objects or by `name.call(key="value")`. JSON without a name and parameters
    is content, not a call.
    """

    start_markers: tuple[str, ...] = ("<|python_tag|>",)
    unmarked_starts: str = "{"

    def decode(self, block: Block) -> list[Attempt]:
        whole = block.region(self)
        start, end = whole.body
        attempts = [self._object(block, *part) for part in json_parts(block.text, start, end, ";")]
        calls = [attempt for attempt in attempts if attempt is not None]
        if start and not any(call.name for call in calls):
            return [self._code(block, whole)]
        return calls if len(calls) == len(attempts) else []

    def _object(self, block: Block, start: int, end: int) -> Attempt | None:
        """The call in a JSON value; None if the value is content."""
        region = CallRegion(start, end, (start, end), block.closed)
        text = block.plain_text(start, end)
        try:
            value = parse_json(text)
        except InvalidJsonError:
            if _LOOKS_LIKE_CALL.match(text) is None or '"parameters"' not in text:
                return None
            return make_attempt(block, region, None, None, error=Status.INVALID_JSON)
        if not isinstance(value, dict) or "name" not in value:
            return None
        key = next((key for key in ("parameters", "arguments") if key in value), None)
        return None if key is None else make_object_attempt(block, region, value, arguments_key=key)

    def _code(self, block: Block, region: CallRegion) -> Attempt:
        reader = LiteralReader(block.text, *region.body, PYTHON, block.encoding)
        call = python_call(block, reader)
        if call is None or call.name is None or not reader.at_end():
            return make_malformed_attempt(block, region)
        return make_attempt(block, region, call.name.removesuffix(".call"), call.arguments)
