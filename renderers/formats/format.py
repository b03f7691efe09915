"""A format as frozen data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The tokens around reasoning, and whether the generation prompt already opens it."""

    start: str = "<think>"
    end: str = "</think>"
    opened_by_prompt: bool = False


@dataclass(frozen=True, slots=True)
class HermesToolCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one JSON object between two tokens."""

    start: str = "<tool_call>"
    end: str = "</tool_call>"


@dataclass(frozen=True, slots=True)
class Format:
    """How one model family writes a turn. `turn_end` is the token that the template prints to close one."""

    name: str
    turn_end: str
    stop_tokens: tuple[str, ...]
    reasoning: ReasoningMarkers | None = None
    tool_calls: HermesToolCalls | None = None
