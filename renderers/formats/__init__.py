"""What a chat template cannot tell: where a turn stops, how reasoning and tool calls are marked."""

from renderers.formats.format import Format, HermesToolCalls, ReasoningMarkers
from renderers.formats.probing import detect_format

__all__ = ["Format", "HermesToolCalls", "ReasoningMarkers", "detect_format"]
