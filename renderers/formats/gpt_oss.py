"""gpt-oss: harmony, a turn of several messages on channels."""

from __future__ import annotations

from renderers.formats.family import Family
from renderers.parsing.format import Format, MessageChannels, ReasoningMarkers

GPT_OSS = Family(
    Format(
        "gpt-oss",
        # Sampled at the end of an answer, and at the end of a call.
        ("<|return|>", "<|call|>"),
        ReasoningMarkers("<|channel|>analysis<|message|>", "<|end|>"),
        channels=MessageChannels(),
        history_ends=("<|end|>",),
    ),
    required_tokens=("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
)
