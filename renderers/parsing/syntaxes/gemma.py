"""Calls of Gemma 4: literals of their own form, strings between tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

from renderers.parsing.literals import Language, LiteralError, LiteralReader
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.syntax import Attempt, Block, ToolCallSyntax, make_attempt, make_malformed_attempt

_QUOTE = '<|"|>'
_HEAD = re.compile(r"\s*call:\s*([^\s{}]*)\s*\{")


@dataclass(frozen=True, slots=True)
class GemmaCalls(ToolCallSyntax):
    """`<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|>`; keys have no quotes."""

    start_markers: tuple[str, ...] = ("<|tool_call>",)
    end_markers: tuple[str, ...] = ("<tool_call|>",)
    inner_markers: tuple[str, ...] = (_QUOTE,)

    def decode(self, block: Block) -> list[Attempt]:
        region = block.region(self)
        start, end = region.body
        head = _HEAD.match(block.text, start, end)
        if head is None:
            return [make_malformed_attempt(block, region)]
        name = block.encoding.decode(head[1])
        reader = LiteralReader(block.text, head.end(), end, _language(block.encoding[_QUOTE]), block.encoding)
        try:
            arguments = reader.mapping(":", "}")
        except LiteralError:
            return [make_attempt(block, region, name, None, error=Status.MALFORMED)]
        error = None if reader.at_end() else Status.MALFORMED
        return [make_attempt(block, region, name, arguments, error=error)]


def _language(quote: str) -> Language:
    mark = re.escape(quote)
    string = re.compile(f"{mark}((?:(?!{mark}).)*){mark}", re.DOTALL)
    return Language(string, escapes=False, keys=re.compile(rf"(?:(?!{mark})[^:,{{}}\[\]])+"))
