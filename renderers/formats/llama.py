"""Llama: JSON calls, or (Llama 4) a Python list of calls, without markers."""

from __future__ import annotations

from renderers.formats.family import Family
from renderers.parsing.format import Format
from renderers.parsing.syntaxes import LlamaCalls, PythonicCalls

_STOPS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_STOPS_4 = ("<|eot|>", "<|eom|>", "<|end_of_text|>")

LLAMA3 = Family(Format("llama-3", _STOPS), required_tokens=("<|start_header_id|>",))
LLAMA31 = Family(Format("llama-3.1", _STOPS, tool_calls=LlamaCalls()), required_tokens=("<|start_header_id|>",))
LLAMA4 = Family(
    Format("llama-4", _STOPS_4, tool_calls=LlamaCalls(start_markers=("<|python_start|>",))),
    required_tokens=("<|header_start|>",),
)
LLAMA4_PYTHONIC = Family(
    Format("llama-4-pythonic", _STOPS_4, tool_calls=PythonicCalls()), required_tokens=("<|header_start|>",)
)
