"""Calls of Kimi K2: a section of calls, each named by its id."""

from __future__ import annotations

import re
from dataclasses import dataclass

from renderers.parsing.syntaxes.syntax import (
    Attempt,
    Block,
    CallRegion,
    ToolCallSyntax,
    make_json_attempt,
    make_malformed_attempt,
)

_NUMBER = re.compile(r":\d+\Z")


@dataclass(frozen=True, slots=True)
class KimiCalls(ToolCallSyntax):
    """`<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, in a section."""

    start_markers: tuple[str, ...] = ("<|tool_calls_section_begin|>",)
    end_markers: tuple[str, ...] = ("<|tool_calls_section_end|>",)
    inner_markers: tuple[str, ...] = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")

    def decode(self, block: Block) -> list[Attempt]:
        opening, separator, closing = map(block.encoding.__getitem__, self.inner_markers)
        return block.read_calls(self, opening, closing, lambda region: self._call(block, region, separator))

    def _call(self, block: Block, region: CallRegion, separator: str) -> Attempt:
        start, end = region.body
        middle = block.text.find(separator, start, end)
        if middle < 0:
            return make_malformed_attempt(block, region)
        call_id = block.plain_text(start, middle).strip()
        name = _NUMBER.sub("", call_id).removeprefix("functions.")
        return make_json_attempt(
            block, region, name, block.plain_text(middle + len(separator), end), id=call_id or None
        )
