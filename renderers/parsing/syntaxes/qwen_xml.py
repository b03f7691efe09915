"""Calls of Qwen3-Coder, Qwen3.5 and later, and Nemotron 3: functions and parameters as XML, values on own lines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from renderers.parsing.syntaxes.elements import read_elements
from renderers.parsing.syntaxes.syntax import (
    Attempt,
    Block,
    CallRegion,
    ToolCallSyntax,
    make_attempt,
    make_malformed_attempt,
)

_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")


@dataclass(frozen=True, slots=True)
class QwenXmlCalls(ToolCallSyntax):
    """A function between two markers; its parameters have no types.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Zürich
    </parameter>
    </function>
    </tool_call>
    """

    start_markers: tuple[str, ...] = ("<tool_call>",)
    end_markers: tuple[str, ...] = ("</tool_call>",)

    def decode(self, block: Block) -> list[Attempt]:
        return block.read_calls(self, "<function=", "</function>", lambda region: self._function(block, region))

    def _function(self, block: Block, region: CallRegion) -> Attempt:
        text, (start, end) = block.text, region.body
        head_end = text.find(">", start, end)
        if head_end < 0:
            return make_malformed_attempt(block, region)
        name = block.plain_text(start, head_end).strip()
        schema = block.tools.of_arguments(name)
        arguments = read_elements(
            block,
            head_end + 1,
            end,
            opening=_PARAMETER,
            closing="</parameter>",
            read=lambda key, text, _: schema.property(key).parse_value(text, python_constants=True),
            on_lines=True,
        )
        region = region._replace(closed=region.closed and block.closed)
        return make_attempt(block, region, name, arguments.values, error=arguments.error)
