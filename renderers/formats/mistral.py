"""Mistral."""

from __future__ import annotations

from renderers.formats.family import Family
from renderers.parsing.format import Format, ReasoningMarkers
from renderers.parsing.syntaxes import MistralCalls

MISTRAL = Family(
    # Its templates insist on ids of nine letters and digits.
    Format("mistral", ("</s>",), ReasoningMarkers("[THINK]", "[/THINK]"), MistralCalls(), call_id="call0000{index}"),
    required_tokens=("[TOOL_CALLS]",),
)
