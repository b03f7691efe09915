"""Calls as `invoke` elements with `parameter` elements inside: MiniMax M2, and DeepSeek's DSML."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from renderers.parsing.json_text import parse_json
from renderers.parsing.schemas import Schema
from renderers.parsing.syntaxes.elements import read_elements
from renderers.parsing.syntaxes.syntax import (
    Attempt,
    Block,
    CallRegion,
    ToolCallSyntax,
    make_attempt,
    make_malformed_attempt,
)


@dataclass(frozen=True, slots=True)
class InvokeCalls(ToolCallSyntax):
    """`<invoke name="get_weather"><parameter name="city">Zürich</parameter></invoke>` in a block, one or several.

    `inner_markers` are the beginnings of the four tags. In DSML the attribute `string` says whether a value is a string
    or JSON; without it, the tool's schema decides.
    """

    start_markers: tuple[str, ...] = ("<minimax:tool_call>",)
    end_markers: tuple[str, ...] = ("</minimax:tool_call>",)
    inner_markers: tuple[str, ...] = ("<invoke", "</invoke", "<parameter", "</parameter")

    def decode(self, block: Block) -> list[Attempt]:
        invoke, invoke_end, parameter, parameter_end = map(block.encoding.__getitem__, self.inner_markers)
        opening = re.compile(rf'{re.escape(parameter)} name="([^"]*)"(?: string="(true|false)")?>')
        return block.read_calls(
            self,
            f"{invoke} ",
            f"{invoke_end}>",
            lambda region: self._invocation(block, region, opening, f"{parameter_end}>"),
        )

    def _invocation(self, block: Block, region: CallRegion, opening: re.Pattern[str], closing: str) -> Attempt:
        start, end = region.body
        head = re.compile(r'name="([^"]*)">').match(block.text, start, end)
        if head is None:
            return make_malformed_attempt(block, region)
        name = block.encoding.decode(head[1])
        schema = block.tools.of_arguments(name)
        arguments = read_elements(
            block,
            head.end(),
            end,
            opening=opening,
            closing=closing,
            read=lambda key, text, match: _value(text, match[2], schema.property(key)),
        )
        return make_attempt(block, region, name, arguments.values, error=arguments.error)


def _value(text: str, is_string: str | None, schema: Schema) -> Any:
    if is_string is None:
        return schema.parse_value(text)
    return text if is_string == "true" else parse_json(text)
