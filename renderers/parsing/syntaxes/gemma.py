"""Calls of Gemma 4: a small language of its own, strings between tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

from renderers.parsing.errors import LiteralError
from renderers.parsing.literals import Language, LiteralReader
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.syntax import Attempt, Block, judged

_QUOTE = '<|"|>'
_HEAD = re.compile(r"\s*call:\s*([^\s{}]*)\s*\{")


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """`<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|>`; keys stand without quotes."""

    opens: tuple[str, ...] = ("<|tool_call>",)
    closes: tuple[str, ...] = ("<tool_call|>",)
    inner: tuple[str, ...] = (_QUOTE,)
    bare: str = ""

    def decode(self, block: Block) -> list[Attempt]:
        start, end = block.inside(self.opens, self.closes)
        length = len(block.text)
        head = _HEAD.match(block.text, start, end)
        if head is None:
            return [judged(block, 0, length, None, None, closed=block.closed, flaw=Status.MALFORMED)]
        name = block.alphabet.plain(head[1])
        reader = LiteralReader(block.text, head.end(), end, _language(block.alphabet[_QUOTE]), block.alphabet)
        try:
            arguments = reader.mapping(":", "}")
        except LiteralError:
            return [judged(block, 0, length, name, None, closed=block.closed, flaw=Status.MALFORMED)]
        flaw = None if reader.at_end() else Status.MALFORMED
        return [judged(block, 0, length, name, arguments, closed=block.closed, flaw=flaw)]


def _language(quote: str) -> Language:
    mark = re.escape(quote)
    string = re.compile(f"{mark}((?:(?!{mark}).)*){mark}", re.DOTALL)
    return Language(string, escapes=False, keys=re.compile(rf"(?:(?!{mark})[^:,{{}}\[\]])+"))
