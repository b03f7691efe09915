"""Sampled ids -> content, reasoning and tool calls."""

from renderers.parsing.parser import ResponseParser, parse_response
from renderers.parsing.prompt_reasoning import ends_in_reasoning
from renderers.parsing.response import (
    ContentDelta,
    Delta,
    ParsedResponse,
    ParsedToolCall,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallParseStatus,
)

__all__ = [
    "ContentDelta",
    "Delta",
    "ParsedResponse",
    "ParsedToolCall",
    "ReasoningDelta",
    "ResponseParser",
    "ToolCallDelta",
    "ToolCallParseStatus",
    "ends_in_reasoning",
    "parse_response",
]
