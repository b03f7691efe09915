"""Gemma: plain turns up to Gemma 3, channels and calls in a language of their own from Gemma 4 on."""

from __future__ import annotations

from renderers.formats.family import Family
from renderers.parsing.format import Format, ReasoningMarkers
from renderers.parsing.syntaxes import GemmaCalls

GEMMA3 = Family(Format("gemma-3", ("<end_of_turn>",)), required_tokens=("<start_of_turn>",))
GEMMA4 = Family(
    Format(
        "gemma-4",
        # The model stops where it wants the answer to its calls.
        ("<turn|>", "<|tool_response>"),
        ReasoningMarkers("<|channel>", "<channel|>", label="thought"),
        GemmaCalls(),
    ),
    required_tokens=("<|turn>", "<|tool_call>"),
)
