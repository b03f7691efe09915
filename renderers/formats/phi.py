"""Phi-4-mini."""

from __future__ import annotations

from renderers.formats.family import Family
from renderers.parsing.format import Format
from renderers.parsing.syntaxes import JsonCalls

PHI4_MINI = Family(
    Format("phi-4-mini", ("<|end|>",), tool_calls=JsonCalls("<|tool_call|>", "<|/tool_call|>")),
    required_tokens=("<|tool_call|>", "<|/tool_call|>"),
)
