"""What a chat template cannot tell: where a turn stops, how reasoning and tool calls are marked."""

from renderers.formats.detection import detect_format
from renderers.formats.registry import by_name, names
from renderers.parsing.format import Format, MessageChannels, ReasoningMarkers

__all__ = [
    "Format",
    "MessageChannels",
    "ReasoningMarkers",
    "by_name",
    "detect_format",
    "names",
]
