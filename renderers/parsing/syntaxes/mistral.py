"""Calls of Mistral: a JSON list behind one token (to 2024), or a name and arguments behind one token each."""

from __future__ import annotations

from dataclasses import dataclass

from renderers.parsing.syntaxes.json_calls import json_calls
from renderers.parsing.syntaxes.syntax import (
    Attempt,
    Block,
    CallRegion,
    ToolCallSyntax,
    make_json_attempt,
    make_malformed_attempt,
)


@dataclass(frozen=True, slots=True)
class MistralCalls(ToolCallSyntax):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call.

    In the second form `[CALL_ID]` and an id may precede `[ARGS]`. Only the end of the turn closes the last call.
    """

    start_markers: tuple[str, ...] = ("[TOOL_CALLS]",)
    inner_markers: tuple[str, ...] = ("[ARGS]", "[CALL_ID]")

    def decode(self, block: Block) -> list[Attempt]:
        opening = block.encoding["[TOOL_CALLS]"]
        attempts: list[Attempt] = []
        start = 0
        while start < len(block.text):
            following = block.text.find(opening, start + len(opening))
            end = len(block.text) if following < 0 else following
            region = CallRegion(start, end, (start + len(opening), end), closed=following >= 0 or block.closed)
            attempts += self._calls(block, region)
            start = end
        return attempts

    def _calls(self, block: Block, region: CallRegion) -> list[Attempt]:
        """The calls of one `[TOOL_CALLS]`: one, or those of a JSON list."""
        inside, end = region.body
        arguments_mark, id_mark = block.encoding["[ARGS]"], block.encoding["[CALL_ID]"]
        middle = block.text.find(arguments_mark, inside, end)
        if middle < 0:
            calls = list(json_calls(block, inside, end)) if "[" in block.text[inside:end] else []
            return calls or [make_malformed_attempt(block, region)]
        name_end = block.text.find(id_mark, inside, middle)
        call_id = None if name_end < 0 else block.plain_text(name_end + len(id_mark), middle).strip()
        name = block.plain_text(inside, middle if name_end < 0 else name_end).strip()
        arguments = block.plain_text(middle + len(arguments_mark), end)
        return [make_json_attempt(block, region, name, arguments, id=call_id or None)]
