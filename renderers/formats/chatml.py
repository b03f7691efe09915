"""ChatML (`<|im_start|>role ... <|im_end|>`), and what is left when no family fits."""

from __future__ import annotations

from renderers.formats.family import Family
from renderers.parsing.format import Format, ReasoningMarkers
from renderers.parsing.syntaxes import JsonCalls

CHATML = Family(Format("chatml", ("<|im_end|>",), ReasoningMarkers()))
HERMES = Family(Format("hermes", ("<|im_end|>",), ReasoningMarkers(), JsonCalls()))
