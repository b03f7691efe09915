"""A completion read back as a message."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from renderers.messages import Message, ToolCall


class ToolCallParseStatus(StrEnum):
    """How one attempt at a tool call ended. A malformed call is kept, never dropped."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    UNCLOSED = "unclosed"
    MISSING_NAME = "missing_name"
    MALFORMED = "malformed"
    UNKNOWN_TOOL = "unknown_tool"


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One attempt: `raw` is its text, `token_span` the half-open range of its tokens, markers included."""

    raw: str
    name: str | None
    arguments: dict[str, Any] | None
    token_span: tuple[int, int]
    status: ToolCallParseStatus = ToolCallParseStatus.OK


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """Content, reasoning and tool calls of one completion. `stopped` says whether it ended with a stop token."""

    content: str
    reasoning_content: str | None = None
    tool_calls: list[ParsedToolCall] = field(default_factory=list)
    reasoning_complete: bool = True
    stopped: bool = True

    def to_message(self) -> Message:
        """The assistant message that this completion is. Malformed tool calls stay visible as content."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        calls: list[ToolCall] = []
        for call in self.tool_calls:
            if call.status is ToolCallParseStatus.OK and call.name is not None:
                function = {"name": call.name, "arguments": call.arguments or {}}
                calls.append({"id": f"call_{len(calls)}", "type": "function", "function": function})  # type: ignore[typeddict-item]
            else:
                message["content"] = f"{message['content']}{call.raw}"
        if calls:
            message["tool_calls"] = calls
        return message
