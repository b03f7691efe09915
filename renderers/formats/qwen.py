"""Qwen: JSON calls up to Qwen3, XML functions from Qwen3-Coder on; and Nemotron 3, which writes calls as the latter."""

from __future__ import annotations

from renderers.formats.family import Family
from renderers.parsing.format import Format, ReasoningMarkers
from renderers.parsing.syntaxes import JsonCalls, QwenXmlCalls

_STOPS = ("<|im_end|>",)
_THINK = ("<think>", "</think>")

QWEN3 = Family(Format("qwen3", _STOPS, ReasoningMarkers(), JsonCalls()), required_tokens=("<tool_call>", *_THINK))
QWEN3_CODER = Family(Format("qwen3-coder", _STOPS, ReasoningMarkers(), QwenXmlCalls()))
QWEN35 = Family(
    Format("qwen3.5", _STOPS, ReasoningMarkers(), QwenXmlCalls()),
    required_tokens=_THINK,
    required_source=("reasoning_content",),
)
NEMOTRON3 = Family(
    Format("nemotron-3", _STOPS, ReasoningMarkers(), QwenXmlCalls()), required_source=("truncate_history_thinking",)
)
#: Qwen2-VL and Qwen2.5-VL, whose templates show images and no tools.
QWEN_VL = Family(
    Format("qwen-vl", _STOPS),
    required_tokens=("<|vision_start|>", "<|image_pad|>"),
    required_source=("<|vision_start|>",),
)
