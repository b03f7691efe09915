# ruff: noqa: RUF001  (DeepSeek spells its tokens with a fullwidth bar)
"""DeepSeek: fenced JSON calls (V3, R1), unfenced JSON calls (V3.1), DSML (V3.2, V4)."""

from __future__ import annotations

from renderers.formats.family import Family
from renderers.parsing.format import Format, ReasoningMarkers
from renderers.parsing.syntaxes import DeepSeekCalls, InvokeCalls

_STOPS = ("<｜end▁of▁sentence｜>",)
_CONTROL = ("<｜User｜>", "<｜Assistant｜>")


def _dsml(block: str) -> InvokeCalls:
    return InvokeCalls(start_markers=(f"<｜DSML｜{block}>",), end_markers=(f"</｜DSML｜{block}>",), prefix="｜DSML｜")


#: Templates that show no calls: V2.5, the first V3, the distilled R1.
DEEPSEEK = Family(Format("deepseek", _STOPS, ReasoningMarkers()), required_tokens=_CONTROL)
DEEPSEEK_V3 = Family(
    Format("deepseek-v3", _STOPS, ReasoningMarkers(), DeepSeekCalls(), arguments="json"), required_tokens=_CONTROL
)
DEEPSEEK_V31 = Family(
    Format("deepseek-v3.1", _STOPS, ReasoningMarkers(), DeepSeekCalls(fenced=False), arguments="json"),
    required_tokens=_CONTROL,
)
DEEPSEEK_V32 = Family(
    Format("deepseek-v3.2", _STOPS, ReasoningMarkers(), _dsml("function_calls")),
    required_tokens=(*_CONTROL, "｜DSML｜"),
)
DEEPSEEK_V4 = Family(
    Format("deepseek-v4", _STOPS, ReasoningMarkers(), _dsml("tool_calls")), required_tokens=(*_CONTROL, "｜DSML｜")
)
