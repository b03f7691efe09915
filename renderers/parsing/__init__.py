"""Sampled ids -> content, reasoning and tool calls."""

from renderers.parsing.parser import parse_response
from renderers.parsing.response import ParsedResponse, ParsedToolCall, ToolCallParseStatus

__all__ = ["ParsedResponse", "ParsedToolCall", "ToolCallParseStatus", "parse_response"]
