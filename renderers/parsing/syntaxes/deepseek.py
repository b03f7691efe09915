# ruff: noqa: RUF001, RUF002  (DeepSeek spells its tokens with a fullwidth bar)
"""Calls of DeepSeek V3, R1 and V3.1: a section of calls, each between tokens, the arguments as JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass

from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.syntax import (
    Attempt,
    Block,
    CallRegion,
    ToolCallSyntax,
    make_attempt,
    make_json_attempt,
    make_malformed_attempt,
)

_FENCED = re.compile(r"([^\n]*)\n```json\n(.*)\n```\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DeepSeekCalls(ToolCallSyntax):
    """Between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`, either of two layouts.

    `fenced` (V3, R1): `function<｜tool▁sep｜>name`, then a line "```json", the arguments and a line "```"; otherwise
    (V3.1): `name<｜tool▁sep｜>arguments`.
    """

    fenced: bool = True
    start_markers: tuple[str, ...] = ("<｜tool▁calls▁begin｜>",)
    end_markers: tuple[str, ...] = ("<｜tool▁calls▁end｜>",)
    inner_markers: tuple[str, ...] = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")

    def decode(self, block: Block) -> list[Attempt]:
        opening, separator, closing = map(block.encoding.__getitem__, self.inner_markers)
        return block.read_calls(self, opening, closing, lambda region: self._call(block, region, separator))

    def _call(self, block: Block, region: CallRegion, separator: str) -> Attempt:
        start, end = region.body
        middle = block.text.find(separator, start, end)
        if middle < 0:
            return make_malformed_attempt(block, region)
        name = block.plain_text(start, middle).strip()
        arguments = block.plain_text(middle + len(separator), end)
        if self.fenced:
            fenced = _FENCED.fullmatch(arguments)
            if fenced is None:
                name = arguments.strip().partition("\n")[0]
                return make_attempt(block, region, name, None, error=Status.MALFORMED)
            name, arguments = fenced[1].strip(), fenced[2]
        return make_json_attempt(block, region, name, arguments)
