"""A format has the stop tokens, the markers of reasoning and the syntax of tool calls of a model family.

`Format`, `ReasoningMarkers` and a subclass of `ToolCallSyntax` describe the format of another model.
"""

from renderers.formats.detection import detect_format
from renderers.formats.families import by_name, names
from renderers.parsing.format import Format, MessageChannels, ReasoningMarkers
from renderers.parsing.json_text import InvalidJsonError
from renderers.parsing.response import ToolCallParseStatus
from renderers.parsing.syntaxes.json_calls import JsonCalls
from renderers.parsing.syntaxes.syntax import Attempt, CallText, ToolCallSyntax
from renderers.parsing.values import JSON_STRING, Value

__all__ = [
    "JSON_STRING",
    "Attempt",
    "CallText",
    "Format",
    "InvalidJsonError",
    "JsonCalls",
    "MessageChannels",
    "ReasoningMarkers",
    "ToolCallParseStatus",
    "ToolCallSyntax",
    "Value",
    "by_name",
    "detect_format",
    "names",
]
