"""OpenAI's Responses: a body as messages of a renderer, tools and sampling options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field

from rollouts.engines.protocol import SamplingParams
from rollouts.errors import short_repr
from rollouts.serve.bodies import json_object, without_nulls
from rollouts.serve.errors import invalid_message, unsupported_field
from rollouts.serve.gateway.dialect import Place, TurnRequest
from rollouts.serve.gateway.history import History
from rollouts.serve.gateway.request_checks import (
    Name,
    OpenAIBody,
    Sampled,
    Strict,
    Text,
    check_count,
    check_depth,
    check_encodable,
    check_tools,
    function_tool,
    media_part,
    objects,
    plain_text,
    text_or_parts,
    validated,
)


class _Text(Strict):
    type: Literal["input_text", "output_text"]
    text: Text
    annotations: Any = None
    logprobs: Any = None
    parsed: Any = None
    prompt_cache_breakpoint: Any = None


class _Refusal(Strict):
    type: Literal["refusal"]
    refusal: Text


class _Image(Strict):
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: None = None
    detail: Any = None
    prompt_cache_breakpoint: Any = None


_Part = Annotated[_Text | _Refusal | _Image, Field(discriminator="type")]


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


_Parts = Annotated[list[_Part], BeforeValidator(_as_parts)]


class _Message(Strict):
    type: Literal["message"] = "message"
    id: Any = None
    status: Any = None
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts
    phase: Any = None


class _FunctionCall(Sampled):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Text


class _FunctionCallOutput(Strict):
    type: Literal["function_call_output"]
    id: Any = None
    status: Any = None
    call_id: Name
    output: _Parts
    name: Any = None
    caller: Any = None


class _ReasoningText(Sampled):
    type: Literal["reasoning_text"]
    text: Text


class _Reasoning(Sampled):
    type: Literal["reasoning"]
    content: list[_ReasoningText] | None = None


_ITEMS: Final[Mapping[Any, type[BaseModel]]] = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionCallOutput,
    "reasoning": _Reasoning,
}


def _as_items(content: Any) -> Any:
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


class _Tool(Strict):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Any = None
    defer_loading: Literal[False] = False
    output_schema: None = None


class _Format(Strict):
    type: Literal["text"] = "text"


class _TextConfig(Strict):
    format: _Format | None = None
    verbosity: Any = None


# What OpenAI's own tools return is in no response here, nor is encrypted reasoning: reasoning is sent as text.
_Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class _ResponsesBody(OpenAIBody):
    input: Annotated[list[Any], BeforeValidator(_as_items)]
    instructions: Text | None = None
    tools: list[_Tool] = Field([])
    text: _TextConfig = _TextConfig()
    include: list[_Included] = Field([])
    previous_response_id: Text | None = None
    store: bool = True
    max_output_tokens: Any = None
    # The model samples freely: no grammar forces a call or forbids a second one.
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: Literal[True] = True
    # What this server does not do: it answers at once, keeps no conversations or prompts, and shortens nothing.
    background: Literal[False] = False
    context_management: list[Any] = Field([], max_length=0)
    conversation: None = None
    prompt: None = None
    top_logprobs: Literal[0] = 0
    truncation: Literal["disabled"] = "disabled"
    # These say nothing about the completion here: how much the model thinks, its template decides.
    client_metadata: Any = None
    max_tool_calls: Any = None
    prompt_cache_options: Any = None
    reasoning: Any = None
    stream_options: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(TurnRequest):
    """A checked request. `echoed` are its fields in the response; `num_instructions` messages are the instructions."""

    num_instructions: int
    previous_response_id: str | None
    store: bool
    echoed: dict[str, Any]

    def after(self, previous: Sequence[Mapping[str, Any]]) -> ResponsesRequest:
        """The request with the messages of an earlier response after its own instructions."""
        first, own = self.num_instructions, self.history.messages
        messages = [*own[:first], *previous, *own[first:]]

        def place(index: int) -> Place:
            if first <= index < first + len(previous):
                return Place("previous_response_id", "previous_response_id")
            return self.place(index if index < first else index - len(previous))

        return replace(self, history=History(messages, self.tools), place=place)


def read_responses_request(
    body: bytes, defaults: SamplingParams, *, allow_urls: bool, max_choices: int, max_parts: int
) -> ResponsesRequest:
    """The request in a body of `/v1/responses`, as `Dialect` says it."""
    fields = without_nulls(json_object(body))
    items = list(objects(fields.get("input")))
    lists = [item.get(key) for item in items for key in ("content", "output")]
    check_count((fields.get("input"), fields.get("tools"), *lists), max_parts, "input")
    read = validated(_ResponsesBody, fields)
    calls_tools = read.tool_choice == "auto"
    offered = read.tools if calls_tools else []
    tools = [function_tool(tool.name, tool.description, tool.parameters) for tool in offered]
    check_tools(tools)
    if not read.input and read.previous_response_id is None:
        raise unsupported_field("input has no items; send a text or at least one item", "input")
    sampling = {"max_tokens": read.max_output_tokens, "temperature": read.temperature, "top_p": read.top_p}
    used = replace(defaults, **without_nulls(sampling))
    conversation = _conversation(read.input, allow_urls)
    first = [{"role": "system", "content": read.instructions}] if read.instructions else []

    def place(index: int) -> Place:
        if index < len(first):
            return Place("instructions", "instructions")
        message, item = conversation[index - len(first)]
        return Place(f"input[{item}]", f"input[{item}].{'output' if message['role'] == 'tool' else 'content'}")

    for name, value in fields.items():
        if name not in _NOT_ECHOED:
            check_encodable(value, name)
            if name != "tools":  # whose parameters are checked one by one
                check_depth(value, name)
    return ResponsesRequest(
        model=read.model,
        history=History([*first, *(message for message, _ in conversation)], tools or None),
        place=place,
        tools=tools or None,
        sampling=used,
        calls_tools=calls_tools,
        stream=read.stream,
        num_instructions=len(first),
        previous_response_id=read.previous_response_id,
        store=read.store,
        echoed={
            **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
            **{"temperature": used.temperature, "top_p": used.top_p},
            **{name: value for name, value in fields.items() if name not in _NOT_ECHOED},
        },
    )


_NOT_ECHOED: Final = frozenset({"client_metadata", "include", "input", "stream", "stream_options"})


def _conversation(items: Sequence[Any], allow_urls: bool) -> list[tuple[dict[str, Any], int]]:
    """The messages, each with its first item's index; what the model wrote in a row is one message."""
    conversation: list[tuple[dict[str, Any], int]] = []
    for index, raw in enumerate(items):
        message = _message(raw, index, allow_urls)
        if message["role"] == "assistant" and conversation and conversation[-1][0]["role"] == "assistant":
            own = conversation[-1][0]
            for key, value in message.items():
                own[key] = own[key] + value if key in own and key != "role" else value
        else:
            conversation.append((message, index))
    return conversation


_PLAIN_KEYS: Final = frozenset({"type", "id", "status", "role", "content"})
_ROLES: Final = ("user", "assistant", "system", "developer")


def _message(raw: Any, index: int, allow_urls: bool) -> dict[str, Any]:
    text = plain_text(raw, _PLAIN_KEYS)
    if text is not None and raw.get("role") in _ROLES:
        return {"role": raw["role"], "content": text}
    place = f"input[{index}]"
    kind = raw.get("type", "message") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise unsupported_field(f"{place} is {short_repr(raw)}: an item is one of {', '.join(_ITEMS)}", place)
    item: Any = validated(_ITEMS[kind], raw, place)
    match item:
        case _Reasoning(content=parts):
            thinking = "".join(part.text for part in parts or ())
            return {"role": "assistant", "content": "", **({"reasoning_content": thinking} if thinking else {})}
        case _FunctionCall(call_id=call_id, name=name, arguments=arguments):
            function = {"name": name, "arguments": arguments.strip() or "{}"}
            calls = [{"type": "function", "id": call_id, "function": function}]
            return {"role": "assistant", "content": "", "tool_calls": calls}
        case _FunctionCallOutput(call_id=call_id, output=output):
            content = text_or_parts(_parts(output, f"{place}.output", allow_urls))
            return {"role": "tool", "content": content, "tool_call_id": call_id}
        case _:
            read = _parts(item.content, f"{place}.content", allow_urls)
            if item.role != "assistant":
                return {"role": item.role, "content": text_or_parts(read)}
            if any(part["type"] != "text" for part in read):
                raise invalid_message(f"{place}.content: an assistant message has no images", f"{place}.content")
            return {"role": "assistant", "content": "".join(part["text"] for part in read)}


def _parts(parts: Sequence[Any], place: str, allow_urls: bool) -> list[dict[str, Any]]:
    return [
        media_part(part.image_url, "image", f"{place}[{index}]", allow_urls=allow_urls)
        if isinstance(part, _Image)
        else {"type": "text", "text": part.refusal if isinstance(part, _Refusal) else part.text}
        for index, part in enumerate(parts)
    ]
