"""Anthropic's Messages: a body as a request, and completions as `message` objects or events."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from rollouts.serve.bodies import Strict, check_depth, validated, without_nulls
from rollouts.serve.errors import NO_THREADS, RequestError, invalid_message, messages_error_fields, unsupported_field
from rollouts.serve.gateway.dialect import Choice, Dialect, Event, Place, Reading, TurnCompletion, TurnRequest, Writer
from rollouts.serve.gateway.history import History
from rollouts.serve.gateway.request_checks import (
    OWN_MESSAGE,
    SAMPLES_FREELY,
    Name,
    PlainMessages,
    RequestBody,
    Sampled,
    StopString,
    Text,
    TextPart,
    as_list,
    assistant_message,
    checked_tools,
    content_of,
    function_tool,
    media_part,
)


class _Text(TextPart):
    type: Literal["text"]
    without_effect = frozenset({"cache_control", "parsed_output"})


class _Base64(Strict):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class _Url(Strict):
    type: Literal["url"]
    url: Text


class _Image(Strict):
    type: Literal["image"]
    source: _Base64 | _Url = Field(discriminator="type")
    without_effect = frozenset({"cache_control"})

    def read(self, place: str, *, allow_urls: bool) -> dict[str, Any]:
        source = self.source
        url = source.url if isinstance(source, _Url) else f"data:{source.media_type};base64,{source.data}"
        return media_part(url, "image", place, allow_urls=allow_urls)


class _Thinking(Sampled):
    type: Literal["thinking", "redacted_thinking"]
    thinking: Text = ""  # nobody but Anthropic can read what is redacted


class _ToolUse(Sampled):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


_IsList = BeforeValidator(partial(as_list, kind="text"))
_Part = Annotated[_Text | _Image, Field(discriminator="type")]


class _ToolResult(Strict):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: Annotated[list[_Part], _IsList] = Field([])
    without_effect = frozenset({"cache_control", "is_error"})  # the content says what the error is


_Block = Annotated[_Text | _Image | _Thinking | _ToolUse | _ToolResult, Field(discriminator="type")]


class _Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_Block], _IsList]


class _Tool(Strict):
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    defer_loading: Literal[False] = False
    without_effect = frozenset({"cache_control", "eager_input_streaming", "strict"})


class _ToolChoice(Strict):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: Literal[False] = False


class _OutputConfig(Strict):
    format: None = None
    without_effect = frozenset({"effort"})


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
    container: None = Field(None, description="not supported: the server runs no code; offer a tool")
    mcp_servers: list[Any] = Field([], max_length=0, description="not supported: the server runs no tools")
    # How much the model thinks, its template decides.
    without_effect = RequestBody.without_effect | {
        *("cache_control", "context_management", "diagnostics", "inference_geo", "speed", "thinking"),
    }


def _read(read: _MessagesBody, fields: dict[str, Any], reading: Reading) -> TurnRequest:
    if read.thread is not None:
        # With this code, Anthropic's SDK sends the whole conversation from now on.
        reason = "thread: the server holds no conversations; send the messages without it"
        raise RequestError(400, reason, "thread", code=NO_THREADS)
    offered = read.tools if read.calls_tools else []
    tools = checked_tools([function_tool(tool.name, tool.description, tool.input_schema) for tool in offered])
    conversation = list(_conversation(read, reading.allow_urls))
    if conversation[-1][0]["role"] == "assistant":
        place = f"messages[{len(read.messages) - 1}]"
        raise unsupported_field(f"{place} has the role assistant: {OWN_MESSAGE}; end with another role", place)
    sampling = {name: getattr(read, name) for name in ("max_tokens", "temperature", "top_k", "top_p")}
    return TurnRequest(
        body=read,
        history=History([message for message, _ in conversation], tools),
        place=lambda index: conversation[index][1](),
        tools=tools,
        sampling=replace(reading.sampling, **without_nulls(sampling)),
        stop=read.stop_sequences,
    )


_PLAIN: Final = PlainMessages(("user", "assistant"), {"role", "content"}, ("text",), {"type", "text"})


def _conversation(body: _MessagesBody, allow_urls: bool) -> Iterator[tuple[dict[str, Any], Callable[[], Place]]]:
    """The messages of a renderer, each with what says its place in the body."""
    if body.system:
        content = content_of(body.system, "system", allow_urls=allow_urls)
        yield {"role": "system", "content": content}, partial(Place, "system", "system")
    for index, raw in enumerate(body.messages):
        if (plain := _PLAIN.read(raw)) is not None:
            yield plain, partial(_place, index)
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


def _results_and_parts(
    message: _Message, place: str, allow_urls: bool
) -> Iterator[tuple[dict[str, Any], Callable[[], Place]]]:
    """A message for each result of a call, and one for the blocks before, between and after them."""
    start, content = 0, f"{place}.content"
    for index, block in enumerate([*message.content, None]):
        at = f"{content}[{index}]"
        if isinstance(block, _Thinking | _ToolUse):
            raise invalid_message(f"{at}: only an assistant message has a block {block.type}", at)
        if isinstance(block, _Text | _Image):
            continue
        if index > start or not message.content:
            parts = content_of(message.content[start:index], content, start, allow_urls=allow_urls)
            yield {"role": message.role, "content": parts}, partial(Place, place, content, start)
        if block is not None:
            parts = content_of(block.content, f"{at}.content", allow_urls=allow_urls)
            answer = {"role": "tool", "content": parts, "tool_call_id": block.tool_use_id}
            yield answer, partial(Place, at, f"{at}.content", answered="tool_use_id")
        start = index + 1


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
            case _:
                at = f"{place}.content[{index}]"
                raise invalid_message(f"{at}: an assistant message has no block {block.type}", at)
    return assistant_message(texts, thoughts, calls)


_KINDS: Final = {"reasoning_content": "thinking", "content": "text"}


class MessagesWriter(Writer):
    """The blocks of the message grow with its events. A signature has no meaning here, and is never read."""

    _texts: list[str]  # of the last block, until it ends

    def begin(self, prompt_ids: list[int]) -> Iterator[Event]:
        self._texts = []
        self.answer = {
            "id": f"msg_{self.head.id}",
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(prompt_ids), "output_tokens": 0},
        }
        yield {"type": "message_start", "message": {**self.answer, "content": []}}
        yield {"type": "ping"}

    def text(self, index: int, key: str, text: str) -> Iterator[Event]:
        kind = _KINDS[key]
        if not self._texts or self.answer["content"][-1]["type"] != kind:
            yield from self._end_block()
            yield self._begin_block({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._texts.append(text)
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def call(self, index: int, number: int, call: Mapping[str, Any]) -> Iterator[Event]:
        yield from self._end_block()
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        yield self._begin_block({"type": "tool_use", "id": call["id"], "name": name, "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        self.answer["content"][-1]["input"] = json.loads(arguments)
        yield self._event("content_block_stop")

    def end_choice(self, choice: Choice) -> Iterator[Event]:
        yield from self._end_block()
        calls = choice.message.get("tool_calls")
        stopped = "stop_sequence" if choice.stop else "tool_use" if calls else "end_turn"
        cut = "model_context_window_exceeded" if choice.is_at_context else "max_tokens"
        self.answer["stop_reason"] = cut if choice.is_cut else stopped
        self.answer["stop_sequence"] = choice.stop

    def end(self, completion: TurnCompletion) -> Iterator[Event]:
        usage = {**self.answer["usage"], "output_tokens": completion.num_sampled}
        self.answer["usage"] = usage
        ending = {name: self.answer[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ending, "usage": usage}
        yield {"type": "message_stop"}

    def failed(self, error: RequestError) -> Event:
        return messages_error_fields(error)

    def _begin_block(self, block: dict[str, Any]) -> Event:
        self.answer["content"].append(block)
        return self._event("content_block_start", content_block=block.copy())

    def _delta(self, delta: dict[str, Any]) -> Event:
        return self._event("content_block_delta", delta=delta)

    def _event(self, name: str, **fields: Any) -> Event:
        return {"type": name, "index": len(self.answer["content"]) - 1, **fields}

    def _end_block(self) -> Iterator[Event]:
        """End the block of text or thinking that is open, if there is one."""
        if not self._texts:
            return
        block = self.answer["content"][-1]
        block[block["type"]] = "".join(self._texts)
        self._texts = []
        if block["type"] == "thinking":
            block["signature"] = self.head.id
            yield self._delta({"type": "signature_delta", "signature": self.head.id})
        yield self._event("content_block_stop")


MESSAGES: Final = Dialect("messages", ("custom",), _MessagesBody, _read, MessagesWriter)
