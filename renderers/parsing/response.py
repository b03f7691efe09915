"""A parsed completion, its message, and its deltas while it is parsed piece by piece."""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from renderers.messages import Message, ToolCall

#: The form of tool-call arguments that a template reads: a JSON object, or the text of one.
ArgumentsForm = Literal["object", "json"]


class ToolCallParseStatus(StrEnum):
    """The status of one attempt at a tool call. An attempt that is no call is kept, never dropped.

    `noncanonical`: the template would print the call in another form, and the attempt has one reading: it is a call.
    """

    OK = "ok"
    NONCANONICAL = "noncanonical"
    INVALID_JSON = "invalid_json"
    UNCLOSED_BLOCK = "unclosed_block"
    MISSING_NAME = "missing_name"
    MALFORMED_STRUCTURE = "malformed_structure"
    UNKNOWN_TOOL = "unknown_tool"
    SURPLUS_CALL = "surplus_call"  # well-formed, but the chat template prints one call in a turn

    @property
    def is_call(self) -> bool:
        """Whether the attempt is a call of a tool that is offered: `ok` or `noncanonical`."""
        return self in (ToolCallParseStatus.OK, ToolCallParseStatus.NONCANONICAL)

    @property
    def is_well_formed(self) -> bool:
        """Whether the attempt is a call of the message: name and arguments were read, whether or not there is the tool.

        Other servers return a call of a tool that is not offered, too. Any other attempt is text of the
        message.
        """
        return self.is_call or self is ToolCallParseStatus.UNKNOWN_TOOL


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One attempt: `raw` is its text, `token_span` the half-open range of its tokens, markers included.

    Several calls in one block have their own texts and ranges, without the markers of the block. `id` is
    the id that the model wrote, None where the format has none. `arguments` are text where they are not
    valid JSON (`INVALID_JSON`), and None where the attempt has none.
    """

    raw: str
    name: str | None = None
    arguments: dict[str, Any] | str | None = None
    token_span: tuple[int, int] | None = None
    status: ToolCallParseStatus = ToolCallParseStatus.OK
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning. All of them, joined, are `ParsedResponse.reasoning_content`."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More content. All of them, joined, are `ParsedResponse.content`."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the text of tool calls, or, with `call`, the finished call.

    Text has the index of the first call of its block, markers included; when the block ends, each call in
    it gets a delta with an empty text under its own index (its place in `ParsedResponse.tool_calls`).
    """

    index: int
    raw: str
    call: ParsedToolCall | None = None


Delta = ReasoningDelta | ContentDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """Content, reasoning and tool calls of one completion. `stopped` says whether it ended with a stop token.

    `reasoning_complete` is False while reasoning is open. `arguments_form` and `call_id` are what the chat template
    expects in a message: the form of arguments, and the id of a call without one (`{name}` and `{index}` are filled
    in).
    """

    content: str
    reasoning_content: str | None = None
    tool_calls: list[ParsedToolCall] = field(default_factory=list)
    reasoning_complete: bool = True
    stopped: bool = True
    arguments_form: ArgumentsForm = "object"
    call_id: str = "call_{index}"

    def to_message(self) -> Message:
        """The completion as an assistant message. Attempts that are no well-formed calls stay content."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        calls: list[ToolCall] = []
        for call in self.tool_calls:
            if not call.status.is_well_formed or call.name is None:
                message["content"] = f"{message['content']}{call.raw}"
                continue
            arguments: Any = call.arguments or {}
            if self.arguments_form == "json":
                arguments = json.dumps(arguments, ensure_ascii=False)
            call_id = call.id or self.call_id.replace("{name}", call.name).replace("{index}", str(len(calls)))
            calls.append({"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
        if calls:
            message["tool_calls"] = calls
        return message
