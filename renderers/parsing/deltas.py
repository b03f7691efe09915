"""The deltas of a completion that is parsed piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

from renderers.parsing.response import ParsedToolCall


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning. All of them, joined, are `ParsedResponse.reasoning_content`."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More content. All of them, joined, are `ParsedResponse.content`."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the text of tool calls, or, with `call`, the finished call.

    Text has the index of the first call of its block, markers included; when the block ends, each call in it gets a
    delta with an empty text under its own index (its place in `ParsedResponse.tool_calls`).
    """

    index: int
    raw: str
    call: ParsedToolCall | None = None


Delta = ReasoningDelta | ContentDelta | ToolCallDelta
