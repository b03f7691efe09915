"""Anthropic's Messages: a body as messages of a renderer, tools and sampling options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from rollouts.engines.protocol import SamplingParams
from rollouts.serve.bodies import json_object, without_nulls
from rollouts.serve.errors import NO_THREADS, RequestError, invalid_message, unsupported_field
from rollouts.serve.gateway.dialect import Place, TurnRequest
from rollouts.serve.gateway.history import History
from rollouts.serve.gateway.request_checks import (
    Name,
    RequestBody,
    Sampled,
    StopString,
    Strict,
    Text,
    check_count,
    check_depth,
    check_tools,
    function_tool,
    media_part,
    objects,
    plain_text,
    text_or_parts,
    validated,
)


class _Object(Strict):
    cache_control: Any = None


class _Text(_Object):
    type: Literal["text"]
    text: Text
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


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _blocks(kinds: Any) -> Any:
    """A list of blocks, of which a text alone is the short form."""
    return Annotated[list[kinds], BeforeValidator(_as_blocks)]


_Part = Annotated[_Text | _Image, Field(discriminator="type")]


class _ToolResult(_Object):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: _blocks(_Part) = Field([])  # type: ignore[valid-type]
    is_error: bool = False  # the content says what the error is


_Block = Annotated[_Text | _Image | _Thinking | _RedactedThinking | _ToolUse | _ToolResult, Field(discriminator="type")]


class _Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: _blocks(_Block)  # type: ignore[valid-type]


class _Tool(_Object):
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: Any = None
    defer_loading: Literal[False] = False
    eager_input_streaming: Any = None


# The model samples freely: no grammar forces a call, forbids a second one, or gives the text a form.
class _ToolChoice(Strict):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: Literal[False] = False


class _OutputConfig(Strict):
    effort: Any = None
    format: None = None


class _MessagesBody(RequestBody):
    messages: list[Any] = Field(min_length=1)
    system: _blocks(_Text) = Field([])  # type: ignore[valid-type]
    tools: list[_Tool] = Field([])
    tool_choice: _ToolChoice = _ToolChoice(type="auto")
    output_config: _OutputConfig = _OutputConfig()
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


def read_messages_request(
    body: bytes, defaults: SamplingParams, *, allow_urls: bool, max_choices: int, max_parts: int
) -> TurnRequest:
    """The request in a body of `/v1/messages` or `/v1/messages/count_tokens`, as `Dialect` says it."""
    fields = without_nulls(json_object(body))
    check_count(_lists(fields), max_parts, "messages")
    read = validated(_MessagesBody, fields)
    if read.thread is not None:
        # With this code, Anthropic's SDK sends the whole conversation from now on.
        reason = "thread: the server holds no conversations; send the messages without it"
        raise RequestError(400, reason, "thread", code=NO_THREADS)
    calls_tools = read.tool_choice.type == "auto"
    offered = read.tools if calls_tools else []
    tools = [function_tool(tool.name, tool.description, tool.input_schema) for tool in offered]
    check_tools(tools)
    conversation = list(_conversation(read, allow_urls))
    if conversation[-1][0]["role"] == "assistant":
        place = f"messages[{len(read.messages) - 1}]"
        reason = "each completion is a message of its own, and none continues the last one; end with another role"
        raise unsupported_field(f"{place} has the role assistant: {reason}", place)
    sampling = {name: getattr(read, name) for name in ("max_tokens", "temperature", "top_k", "top_p")}
    return TurnRequest(
        model=read.model,
        history=History([message for message, _ in conversation], tools or None),
        place=lambda index: _place(conversation[index][1]),
        tools=tools or None,
        sampling=replace(defaults, **without_nulls(sampling)),
        stop=tuple(read.stop_sequences),
        calls_tools=calls_tools,
        stream=read.stream,
    )


def _lists(fields: Mapping[str, Any]) -> Iterator[Any]:
    """All lists in a body whose lengths are bounded, of which nothing is checked yet."""
    yield from (fields.get("messages"), fields.get("system"), fields.get("tools"))
    for message in objects(fields.get("messages")):
        content = message.get("content")
        if type(content) is list:
            yield content
            yield from [block.get("content") for block in content if type(block) is dict]


def _place(origin: int | Place) -> Place:
    return origin if isinstance(origin, Place) else Place(f"messages[{origin}]", f"messages[{origin}].content")


def _conversation(body: _MessagesBody, allow_urls: bool) -> Iterator[tuple[dict[str, Any], int | Place]]:
    """The messages of a renderer, each with its place in the body, or the index of the message that it is."""
    if body.system:
        content = text_or_parts(_parts(body.system, "system", allow_urls))
        yield {"role": "system", "content": content}, Place("system", "system")
    for index, raw in enumerate(body.messages):
        text = plain_text(raw, _PLAIN_KEYS)
        if text is not None and raw.get("role") in ("user", "assistant"):
            yield {"role": raw["role"], "content": text}, index
            continue
        place = f"messages[{index}]"
        message = validated(_Message, raw, place)
        if message.role == "assistant":
            yield _assistant(message.content, place), index
        else:
            yield from _results_and_parts(message, place, allow_urls)


_PLAIN_KEYS: Final = frozenset({"role", "content"})


def _results_and_parts(message: _Message, place: str, allow_urls: bool) -> Iterator[tuple[dict[str, Any], Place]]:
    """A message for each result of a call, and one for the blocks before, between and after them."""
    start = 0
    blocks = message.content
    ends = [index for index, block in enumerate(blocks) if isinstance(block, _ToolResult)]
    for end in (*ends, len(blocks)):
        if end > start or not blocks:
            parts = _parts(blocks[start:end], f"{place}.content", allow_urls, start)
            yield {"role": message.role, "content": text_or_parts(parts)}, Place(place, f"{place}.content", start)
        if end < len(blocks):
            result, at = blocks[end], f"{place}.content[{end}]"
            content = text_or_parts(_parts(result.content, f"{at}.content", allow_urls))
            yield {"role": "tool", "content": content, "tool_call_id": result.tool_use_id}, Place(at, f"{at}.content")
        start = end + 1


def _parts(blocks: Sequence[Any], place: str, allow_urls: bool, first: int = 0) -> list[dict[str, Any]]:
    parts = []
    for index, block in enumerate(blocks, first):
        if isinstance(block, _Text):
            parts.append({"type": "text", "text": block.text})
        elif isinstance(block, _Image):
            parts.append(media_part(block.source.as_url(), "image", f"{place}[{index}]", allow_urls=allow_urls))
        else:
            at = f"{place}[{index}]"
            raise invalid_message(f"{at}: only an assistant message has a block {block.type}", at)
    return parts


def _assistant(blocks: Sequence[Any], place: str) -> dict[str, Any]:
    """The message of the model. Text, thinking and calls may stand in several blocks, in any order."""
    message: dict[str, Any] = {"role": "assistant"}
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
                at = f"{place}.content[{index}]"
                raise invalid_message(f"{at}: an assistant message has no block {block.type}", at)
    message["content"] = "".join(texts)
    if thinking := "".join(thoughts):
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message
