"""Calls as a Python list of calls: Llama 4 (bare), LFM2 (between two tokens)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from renderers.parsing.errors import LiteralError
from renderers.parsing.literals import PYTHON, LiteralReader
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.syntax import Attempt, Block, judged

_MEANT_AS_CALLS = re.compile(r"\s*\[\s*[^\W\d][\w.]*\(\s*(?:[^\W\d]\w*\s*=|\)\s*[\],])")


@dataclass(frozen=True, slots=True)
class PythonicCalls:
    """`[get_weather(city='Zürich', days=2), run()]`; values are literals, JSON's true, false and null included.

    Without markers (`opens` empty, `bare` "[") an answer that begins with such a list is one.
    """

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    bare: str = "["
    inner: tuple[str, ...] = ()

    def decode(self, block: Block) -> list[Attempt]:
        start, end = block.inside(self.opens, self.closes)
        if not start and _MEANT_AS_CALLS.match(block.text) is None:
            return []
        reader = LiteralReader(block.text, start, end, PYTHON, block.alphabet)
        attempts: list[Attempt] = []
        if reader.at("["):
            while (attempt := python_call(block, reader)) is not None:
                attempts.append(attempt)
                if not reader.at(","):
                    break
            if reader.at("]") and reader.at_end():
                return attempts
        reader.skip_space()
        rest = reader.position if attempts else 0
        broken = judged(block, rest, len(block.text), None, None, closed=block.closed, flaw=Status.MALFORMED)
        return [*attempts, broken]


def python_call(block: Block, reader: LiteralReader) -> Attempt | None:
    """The call `name(key=value, ...)` that comes next; None, and nothing read, if none does."""
    reader.skip_space()
    start = reader.position
    name = reader.word()
    if name is not None and reader.at("("):
        try:
            arguments = reader.mapping("=", ")")
        except LiteralError:
            reader.position = start
            return None
        return judged(block, start, reader.position, name, arguments)
    reader.position = start
    return None
