"""LFM2 (Liquid)."""

from __future__ import annotations

from renderers.formats.family import Family
from renderers.parsing.format import Format, ReasoningMarkers
from renderers.parsing.syntaxes import PythonicCalls

LFM2 = Family(
    Format(
        "lfm2",
        ("<|im_end|>",),
        ReasoningMarkers(),
        PythonicCalls(start_markers=("<|tool_call_start|>",), end_markers=("<|tool_call_end|>",), unmarked_starts=""),
    ),
    required_tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
)
