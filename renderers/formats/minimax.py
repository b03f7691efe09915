"""MiniMax M2 and M3."""

from __future__ import annotations

from renderers.formats.family import Family
from renderers.parsing.format import Format, ReasoningMarkers
from renderers.parsing.syntaxes import InvokeCalls, MiniMaxM3Calls

MINIMAX_M2 = Family(Format("minimax-m2", ("[e~[",), ReasoningMarkers(), InvokeCalls()), required_tokens=("]~b]",))
MINIMAX_M3 = Family(
    Format("minimax-m3", ("[e~[",), ReasoningMarkers("<mm:think>", "</mm:think>"), MiniMaxM3Calls()),
    required_tokens=("]~b]", "]<]minimax[>["),
)
