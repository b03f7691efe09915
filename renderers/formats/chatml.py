"""ChatML (`<|im_start|>role ... <|im_end|>`), with and without Hermes tool calls."""

from __future__ import annotations

from renderers.formats.family import Family
from renderers.parsing.format import Format, ReasoningMarkers
from renderers.parsing.syntaxes import JsonCalls

CHATML = Family(Format("chatml", ("<|im_end|>",), ReasoningMarkers()))
HERMES = Family(Format("hermes", ("<|im_end|>",), ReasoningMarkers(), JsonCalls()))
