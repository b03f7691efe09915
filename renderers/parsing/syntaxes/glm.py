"""Calls of GLM 4.5 and later: a name, then pairs of a key and a value, each between its own tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.elements import read_elements
from renderers.parsing.syntaxes.syntax import Attempt, Block, ToolCallSyntax, make_attempt


@dataclass(frozen=True, slots=True)
class GlmCalls(ToolCallSyntax):
    """`<tool_call>name<arg_key>city</arg_key><arg_value>Zürich</arg_value></tool_call>`, line breaks between or not."""

    start_markers: tuple[str, ...] = ("<tool_call>",)
    end_markers: tuple[str, ...] = ("</tool_call>",)
    inner_markers: tuple[str, ...] = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def decode(self, block: Block) -> list[Attempt]:
        region = block.region(self)
        start, end = region.body
        key_start, key_end, value_start, value_end = map(block.encoding.__getitem__, self.inner_markers)
        pairs_at = block.text.find(key_start, start, end)
        name_end = end if pairs_at < 0 else pairs_at
        name = block.plain_text(start, name_end).strip()
        pair = re.compile(
            f"{re.escape(key_start)}((?:(?!{re.escape(key_end)}|{re.escape(key_start)}).)*)"
            rf"{re.escape(key_end)}\s*{re.escape(value_start)}",
            re.DOTALL,
        )
        schema = block.tools.of_arguments(name)
        arguments = read_elements(
            block,
            name_end,
            end,
            opening=pair,
            closing=value_end,
            read=lambda key, text, _: schema.property(key).parse_value(text),
        )
        error = Status.MALFORMED if "\n" in name else arguments.error
        return [make_attempt(block, region, name, arguments.values, error=error)]
