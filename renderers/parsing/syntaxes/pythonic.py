"""Calls as a Python list of calls: Llama 4 (without markers), LFM2 (between two tokens)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from renderers.parsing.literals import PYTHON, LiteralError, LiteralReader
from renderers.parsing.syntaxes.syntax import (
    Attempt,
    Block,
    CallRegion,
    ToolCallSyntax,
    make_attempt,
    make_malformed_attempt,
)

_LOOKS_LIKE_CALLS = re.compile(r"\s*\[\s*[^\W\d][\w.]*\(\s*(?:[^\W\d]\w*\s*=|\)\s*[\],])")


@dataclass(frozen=True, slots=True)
class PythonicCalls(ToolCallSyntax):
    """`[get_weather(city='Zürich', days=2), run()]`; values are literals, JSON's true, false and null included.

    Without markers (`start_markers` empty, `unmarked_starts` "[") a turn that begins with such a list is a block.
    """

    unmarked_starts: str = "["

    def decode(self, block: Block) -> list[Attempt]:
        whole = block.region(self)
        start, end = whole.body
        if not start and _LOOKS_LIKE_CALLS.match(block.text) is None:
            return []
        reader = LiteralReader(block.text, start, end, PYTHON, block.encoding)
        attempts: list[Attempt] = []
        if reader.accept("["):
            while (attempt := python_call(block, reader)) is not None:
                attempts.append(attempt)
                if not reader.accept(","):
                    break
            if reader.accept("]") and reader.at_end():
                return attempts
        reader.skip_space()
        rest = whole._replace(start=reader.position) if attempts else whole
        return [*attempts, make_malformed_attempt(block, rest)]


def python_call(block: Block, reader: LiteralReader) -> Attempt | None:
    """The call `name(key=value, ...)` that comes next; None, without moving the reader, if there is none."""
    reader.skip_space()
    start = reader.position
    name = reader.name()
    if name is not None and reader.accept("("):
        try:
            arguments = reader.mapping("=", ")")
        except LiteralError:
            reader.position = start
            return None
        region = CallRegion(start, reader.position, (start, reader.position), closed=True)
        return make_attempt(block, region, name, arguments)
    reader.position = start
    return None
