"""The formats of model families: stop tokens, markers of reasoning, and syntaxes of tool calls."""

from renderers.formats.detection import detect_format
from renderers.formats.families import by_name, names
from renderers.parsing.format import Format, MessageChannels, ReasoningMarkers

__all__ = [
    "Format",
    "MessageChannels",
    "ReasoningMarkers",
    "by_name",
    "detect_format",
    "names",
]
