"""Kimi K2 and K2.5."""

from __future__ import annotations

from renderers.formats.family import Family
from renderers.parsing.format import Format, ReasoningMarkers
from renderers.parsing.syntaxes import KimiCalls

KIMI_K2 = Family(
    # The template prints the id of a call where others print its name.
    Format("kimi-k2", ("<|im_end|>",), ReasoningMarkers(), KimiCalls(), call_id="functions.{name}:{index}"),
    required_tokens=("<|im_assistant|>", "<|im_middle|>"),
)
