"""GLM: nothing closes a turn, so the stops are the tokens of the roles that may come next."""

from __future__ import annotations

from renderers.formats.family import Family
from renderers.parsing.format import Format, ReasoningMarkers
from renderers.parsing.syntaxes import GlmCalls

_STOPS = ("<|user|>", "<|observation|>", "<|endoftext|>")
_CONTROL = ("[gMASK]", "<|assistant|>")

#: GLM-4 and GLM-Z1 of 2024 and 2025, whose templates show no calls.
GLM4 = Family(Format("glm-4", _STOPS, ReasoningMarkers()), required_tokens=_CONTROL)
#: GLM 4.5 and 4.6 write each part of a turn on a line of its own, GLM 4.7 and 5 do not.
GLM45 = Family(
    Format("glm-4.5", _STOPS, ReasoningMarkers(), GlmCalls()),
    required_tokens=_CONTROL,
    required_source=(r"'\n<tool_call>'",),
)
GLM5 = Family(Format("glm-5", _STOPS, ReasoningMarkers(), GlmCalls()), required_tokens=_CONTROL)
