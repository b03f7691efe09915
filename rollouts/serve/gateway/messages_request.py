"""Anthropic's Messages: a body as messages of a renderer, tools and sampling options."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from rollouts.serve.bodies import without_nulls
from rollouts.serve.errors import NO_THREADS, RequestError, invalid_message, unsupported_field
from rollouts.serve.gateway.dialect import Place, Reading, TurnRequest
from rollouts.serve.gateway.history import History
from rollouts.serve.gateway.request_checks import (
    OWN_MESSAGE,
    SAMPLES_FREELY,
    Name,
    RequestBody,
    Sampled,
    StopString,
    Strict,
    Text,
    TextPart,
    as_list,
    assistant_message,
    check_depth,
    check_tool_results,
    check_tools,
    content_of,
    function_tool,
    media_part,
    plain_text,
    read_fields,
    validated,
)


class _Object(Strict):
    cache_control: Any = None


class _Text(_Object, TextPart):
    type: Literal["text"]
    citations: None = None
    parsed_output: Any = None


class _Base64(Strict):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    def as_url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class _Url(Strict):
    type: Literal["url"]
    url: Text

    def as_url(self) -> str:
        return self.url


class _Image(_Object):
    type: Literal["image"]
    source: _Base64 | _Url = Field(discriminator="type")

    def read(self, place: str, *, allow_urls: bool) -> dict[str, Any]:
        return media_part(self.source.as_url(), "image", place, allow_urls=allow_urls)


class _Thinking(Sampled):
    type: Literal["thinking"]
    thinking: Text


class _RedactedThinking(Sampled):
    type: Literal["redacted_thinking"]


class _ToolUse(Sampled):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


_IsList = BeforeValidator(partial(as_list, kind="text"))
_Part = Annotated[_Text | _Image, Field(discriminator="type")]


class _ToolResult(_Object):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: Annotated[list[_Part], _IsList] = Field([])
    is_error: bool = False  # the content says what the error is


_Block = Annotated[_Text | _Image | _Thinking | _RedactedThinking | _ToolUse | _ToolResult, Field(discriminator="type")]


class _Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_Block], _IsList]


class _Tool(_Object):
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: Any = None
    defer_loading: Literal[False] = False
    eager_input_streaming: Any = None


class _ToolChoice(Strict):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: Literal[False] = False


class _OutputConfig(Strict):
    effort: Any = None
    format: None = None


class _MessagesBody(RequestBody):
    messages: list[Any] = Field(min_length=1)
    system: Annotated[list[_Text], _IsList] = Field([])
    tools: list[_Tool] = Field([])
    tool_choice: _ToolChoice = Field(_ToolChoice(type="auto"), description=SAMPLES_FREELY)
    output_config: _OutputConfig = Field(_OutputConfig(), description=SAMPLES_FREELY)
    stop_sequences: list[StopString] = Field([], max_length=64)
    max_tokens: Any = None
    top_k: Any = None
    thread: Any = None
    # The server runs no tools.
    container: None = None
    mcp_servers: list[Any] = Field([], max_length=0)
    # These say nothing about the completion here: how much the model thinks, its template decides.
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    speed: Any = None
    thinking: Any = None


def read_messages_request(body: bytes, reading: Reading) -> TurnRequest:
    """The request in a body of `/v1/messages` or `/v1/messages/count_tokens`, as `Dialect` says it."""
    fields, ignored = read_fields(body, reading, ("custom",))
    read = validated(_MessagesBody, fields)
    if read.thread is not None:
        # With this code, Anthropic's SDK sends the whole conversation from now on.
        reason = "thread: the server holds no conversations; send the messages without it"
        raise RequestError(400, reason, "thread", code=NO_THREADS)
    calls_tools = read.tool_choice.type == "auto"
    offered = read.tools if calls_tools else []
    tools = [function_tool(tool.name, tool.description, tool.input_schema) for tool in offered]
    check_tools(tools)
    conversation = list(_conversation(read, reading.allow_urls))
    if conversation[-1][0]["role"] == "assistant":
        place = f"messages[{len(read.messages) - 1}]"
        raise unsupported_field(f"{place} has the role assistant: {OWN_MESSAGE}; end with another role", place)
    sampling = {name: getattr(read, name) for name in ("max_tokens", "temperature", "top_k", "top_p")}
    request = TurnRequest(
        model=read.model,
        history=History([message for message, _ in conversation], tools or None),
        place=lambda index: conversation[index][1](),
        tools=tools or None,
        sampling=replace(reading.sampling, **without_nulls(sampling)),
        stop=tuple(read.stop_sequences),
        calls_tools=calls_tools,
        stream=read.stream,
        ignored_tools=ignored,
    )
    check_tool_results(request)
    return request


def _conversation(body: _MessagesBody, allow_urls: bool) -> Iterator[tuple[dict[str, Any], Callable[[], Place]]]:
    """The messages of a renderer, each with what says its place in the body."""
    if body.system:
        content = content_of(body.system, "system", allow_urls=allow_urls)
        yield {"role": "system", "content": content}, partial(Place, "system", "system")
    for index, raw in enumerate(body.messages):
        text = plain_text(raw, _PLAIN_KEYS)
        if text is not None and raw.get("role") in ("user", "assistant"):
            yield {"role": raw["role"], "content": text}, partial(_place, index)
            continue
        place = f"messages[{index}]"
        message = validated(_Message, raw, place)
        if message.role == "assistant":
            yield _assistant(message.content, place), partial(_place, index, message.content)
        else:
            yield from _results_and_parts(message, place, allow_urls)


def _place(index: int, blocks: Sequence[Any] = ()) -> Place:
    content = f"messages[{index}].content"
    calls = [f"{content}[{number}]" for number, block in enumerate(blocks) if isinstance(block, _ToolUse)]
    return Place(f"messages[{index}]", content, calls=calls)


_PLAIN_KEYS: Final = frozenset({"role", "content"})


def _results_and_parts(
    message: _Message, place: str, allow_urls: bool
) -> Iterator[tuple[dict[str, Any], Callable[[], Place]]]:
    """A message for each result of a call, and one for the blocks before, between and after them."""
    start = 0
    blocks, content = message.content, f"{place}.content"
    for index, block in enumerate(blocks):
        if isinstance(block, _Thinking | _RedactedThinking | _ToolUse):
            raise _misplaced(f"{content}[{index}]", block, "only an assistant message has a")
    ends = [index for index, block in enumerate(blocks) if isinstance(block, _ToolResult)]
    for end in (*ends, len(blocks)):
        if end > start or not blocks:
            parts = content_of(blocks[start:end], content, start, allow_urls=allow_urls)
            yield {"role": message.role, "content": parts}, partial(Place, place, content, start)
        if end < len(blocks):
            result, at = blocks[end], f"{content}[{end}]"
            parts = content_of(result.content, f"{at}.content", allow_urls=allow_urls)
            answer = {"role": "tool", "content": parts, "tool_call_id": result.tool_use_id}
            yield answer, partial(Place, at, f"{at}.content", answered="tool_use_id")
        start = end + 1


def _misplaced(place: str, block: Any, reason: str) -> RequestError:
    return invalid_message(f"{place}: {reason} block {block.type}", place)


def _assistant(blocks: Sequence[Any], place: str) -> dict[str, Any]:
    """The message of the model. Text, thinking and calls may stand in several blocks, in any order."""
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        match block:
            case _Text():
                texts.append(block.text)
            case _Thinking():
                thoughts.append(block.thinking)
            case _ToolUse():
                check_depth(block.input, f"{place}.content[{index}].input")
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"type": "function", "id": block.id, "function": function})
            case _RedactedThinking():
                pass  # nobody but Anthropic can read it
            case _:
                raise _misplaced(f"{place}.content[{index}]", block, "an assistant message has no")
    return assistant_message(texts, thoughts, calls)
