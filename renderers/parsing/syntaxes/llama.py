"""Calls of Llama 3: an answer that is a JSON object, or code behind `<|python_tag|>`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from renderers.parsing.errors import InvalidJsonError
from renderers.parsing.json_text import read_json
from renderers.parsing.literals import PYTHON, LiteralReader
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.json_calls import json_parts, judged_object
from renderers.parsing.syntaxes.pythonic import python_call
from renderers.parsing.syntaxes.syntax import Attempt, Block, judged

_MEANT_AS_CALL = re.compile(r'\s*\{\s*"(?:name|type|function)"\s*:')


@dataclass(frozen=True, slots=True)
class LlamaCalls:
    """`{"name": "get_weather", "parameters": {...}}` as the whole answer, several with `;` between them.

    Behind `<|python_tag|>` stand the same objects or `name.call(key="value")`. JSON without a name and parameters is an
    answer in JSON, not a call.
    """

    opens: tuple[str, ...] = ("<|python_tag|>",)
    closes: tuple[str, ...] = ()
    bare: str = "{"
    inner: tuple[str, ...] = ()

    def decode(self, block: Block) -> list[Attempt]:
        start, end = block.inside(self.opens, self.closes)
        attempts = [self._object(block, *part) for part in json_parts(block.text, start, end, ";")]
        meant = [attempt for attempt in attempts if attempt is not None]
        if start and not any(attempt.name for attempt in meant):
            return [self._code(block, start, end)]
        return meant if len(meant) == len(attempts) else []

    def _object(self, block: Block, start: int, end: int) -> Attempt | None:
        """The call that a JSON value is; None if it is not meant as one."""
        text = block.plain(start, end)
        try:
            value = read_json(text)
        except InvalidJsonError:
            if _MEANT_AS_CALL.match(text) is None or '"parameters"' not in text:
                return None
            return judged(block, start, end, None, None, closed=block.closed, flaw=Status.INVALID_JSON)
        if not isinstance(value, dict) or "name" not in value:
            return None
        key = next((key for key in ("parameters", "arguments") if key in value), None)
        return None if key is None else judged_object(block, start, end, value, arguments_key=key)

    def _code(self, block: Block, start: int, end: int) -> Attempt:
        reader = LiteralReader(block.text, start, end, PYTHON, block.alphabet)
        call = python_call(block, reader)
        if call is None or call.name is None or not reader.at_end():
            return judged(block, 0, end, None, None, closed=block.closed, flaw=Status.MALFORMED)
        name = call.name.removesuffix(".call")
        return judged(block, 0, end, name, call.arguments, closed=block.closed)
