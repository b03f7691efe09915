"""OpenAI's Responses: a body as messages of a renderer, tools and sampling options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field

from rollouts.errors import short_repr
from rollouts.serve.bodies import without_nulls
from rollouts.serve.errors import invalid_message, unsupported_field
from rollouts.serve.gateway.dialect import Place, Reading, TurnRequest
from rollouts.serve.gateway.history import History
from rollouts.serve.gateway.request_checks import (
    SAMPLES_FREELY,
    Name,
    OpenAIBody,
    Sampled,
    Strict,
    Text,
    TextFormat,
    TextPart,
    as_list,
    assistant_message,
    check_count,
    check_depth,
    check_encodable,
    check_tool_results,
    check_tools,
    content_of,
    function_tool,
    media_part,
    plain_text,
    read_fields,
    validated,
)
from rollouts.serve.gateway.session import StoredResponse


class _Text(TextPart):
    type: Literal["input_text", "output_text"]
    annotations: Any = None
    logprobs: Any = None
    parsed: Any = None
    prompt_cache_breakpoint: Any = None


class _Refusal(Strict):
    type: Literal["refusal"]
    refusal: Text

    def read(self, place: str, *, allow_urls: bool) -> dict[str, Any]:
        return {"type": "text", "text": self.refusal}


class _Image(Strict):
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: None = None
    detail: Any = None
    prompt_cache_breakpoint: Any = None

    def read(self, place: str, *, allow_urls: bool) -> dict[str, Any]:
        return media_part(self.image_url, "image", place, allow_urls=allow_urls)


_Part = Annotated[_Text | _Refusal | _Image, Field(discriminator="type")]
_Parts = Annotated[list[_Part], BeforeValidator(partial(as_list, kind="input_text"))]


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
    namespace: Name | None = None
    name: Name
    arguments: Text


class _FunctionCallOutput(Strict):
    type: Literal["function_call_output"]
    id: Any = None
    status: Any = None
    call_id: Name
    output: _Parts
    name: Any = None
    namespace: Any = None
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


class _Function(Strict):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Any = None
    defer_loading: Literal[False] = False
    output_schema: None = None


class _Namespace(Strict):
    type: Literal["namespace"]
    name: Name
    description: Any = None
    tools: list[_Function]


class _TextConfig(Strict):
    format: TextFormat | None = None
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
    tools: list[Annotated[_Function | _Namespace, Field(discriminator="type")]] = Field([])
    text: _TextConfig = Field(_TextConfig(), description=SAMPLES_FREELY)
    include: list[_Included] = Field([])
    previous_response_id: Text | None = None
    store: bool = True
    max_output_tokens: Any = None
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
    """A checked request. `echoed` are its fields in the response; `num_instructions` messages are the instructions.

    `namespaces` has the namespace of a function and its name there, by the name that the model knows.
    """

    num_instructions: int
    previous_response_id: str | None
    store: bool
    namespaces: Mapping[str, tuple[str, str]]
    echoed: dict[str, Any]

    def after(self, stored: StoredResponse, max_parts: int) -> ResponsesRequest:
        """The request with the conversation of a response after its own instructions. Raises `RequestError`."""
        first, own = self.num_instructions, self.history
        before, digests = stored.conversation()
        num_before = len(before) - stored.first
        messages = [*own.messages[:first], *before[stored.first :], *own.messages[first:]]
        check_count({"input": messages, "tools": self.tools}, max_parts)

        def place(index: int) -> Place:
            if first <= index < first + num_before:
                return Place("previous_response_id", "previous_response_id")
            return self.place(index if index < first else index - num_before)

        same = own.digests[first] == digests[stored.first]  # of the tools and the instructions
        history = History(messages, self.tools, digests if same else (), stored.turn)
        request = replace(self, history=history, place=place)
        check_tool_results(request)
        return request


def read_responses_request(body: bytes, reading: Reading) -> ResponsesRequest:
    """The request in a body of `/v1/responses`, as `Dialect` says it."""
    fields, ignored = read_fields(body, reading, ("function", "namespace"))
    read = validated(_ResponsesBody, fields, typed=("tools",))
    namespaces: dict[str, tuple[str, str]] = {}
    tools = []
    for tool in read.tools if read.tool_choice == "auto" else ():
        for function in tool.tools if isinstance(tool, _Namespace) else (tool,):
            name = function.name
            if isinstance(tool, _Namespace):
                name = _full_name(tool.name, name)
                namespaces[name] = (tool.name, function.name)
            tools.append(function_tool(name, function.description, function.parameters))
    check_tools(tools)
    sampling = {"max_tokens": read.max_output_tokens, "temperature": read.temperature, "top_p": read.top_p}
    used = replace(reading.sampling, **without_nulls(sampling))
    conversation = _conversation(read.input, reading.allow_urls)
    if not conversation and read.previous_response_id is None:
        raise unsupported_field("input has no items with a content; send a text or at least one item", "input")
    first = [{"role": "system", "content": read.instructions}] if read.instructions else []

    def place(index: int) -> Place:
        if index < len(first):
            return Place("instructions", "instructions")
        message, items = conversation[index - len(first)]
        calls = [f"input[{item}]" for item in items if read.input[item].get("type") == "function_call"]
        at = f"input[{items[0]}]"
        return Place(at, f"{at}.{'output' if message['role'] == 'tool' else 'content'}", calls=calls)

    echoed = {name: value for name, value in fields.items() if name not in _NOT_ECHOED}
    for name, value in echoed.items():
        check_encodable(value, name)
        if name != "tools":  # whose parameters are checked one by one
            check_depth(value, name)
    request = ResponsesRequest(
        model=read.model,
        history=History([*first, *(message for message, _ in conversation)], tools or None),
        place=place,
        tools=tools or None,
        sampling=used,
        calls_tools=read.tool_choice == "auto",
        stream=read.stream,
        ignored_tools=ignored,
        num_instructions=len(first),
        previous_response_id=read.previous_response_id,
        store=read.store,
        namespaces=namespaces,
        echoed={
            **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
            **{"temperature": used.temperature, "top_p": used.top_p},
            **echoed,
        },
    )
    if read.previous_response_id is None:
        check_tool_results(request)
    return request


_NOT_ECHOED: Final = frozenset({"client_metadata", "include", "input", "stream", "stream_options"})
#: The id of an item of a response that the gateway made: the items of a completion share the second part.
_ITEM_ID: Final = re.compile(r"[a-z]{2,3}_([0-9a-f]{32})_\d+")


def _full_name(namespace: str | None, name: str) -> str:
    """The name of a function for the model."""
    return name if namespace is None else f"{namespace}__{name}"


def _conversation(items: Sequence[Any], allow_urls: bool) -> list[tuple[dict[str, Any], list[int]]]:
    """The messages, each with the indices of its items.

    What the model wrote in a row is one message, unless the ids of its items say that they are of two completions.
    """
    conversation: list[tuple[list[dict[str, Any]], list[int]]] = []
    completion: str | None = None  # that of the last message
    for index, raw in enumerate(items):
        message = _message(raw, index, allow_urls)
        if message is None:
            continue
        identifier = raw.get("id")
        made = _ITEM_ID.fullmatch(identifier) if isinstance(identifier, str) else None
        before = conversation[-1][0][0]["role"] if conversation else None
        if message["role"] == before == "assistant" and (made is None or completion in (None, made[1])):
            conversation[-1][0].append(message)
            conversation[-1][1].append(index)
        else:
            conversation.append(([message], [index]))
            completion = None
        completion = completion if made is None else made[1]
    return [(messages[0] if len(messages) == 1 else _joined(messages), indices) for messages, indices in conversation]


def _joined(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One message of the model for several."""
    thoughts = [message.get("reasoning_content", "") for message in messages]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return assistant_message([message["content"] for message in messages], thoughts, calls)


_PLAIN_KEYS: Final = frozenset({"type", "id", "status", "role", "content"})
_ROLES: Final = ("user", "assistant", "system", "developer")


def _message(raw: Any, index: int, allow_urls: bool) -> dict[str, Any] | None:
    """The message of an item; None for reasoning without a text."""
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
            thoughts = [part.text for part in parts or ()]
            return assistant_message((), thoughts, []) if any(thoughts) else None
        case _FunctionCall():
            function = {"name": _full_name(item.namespace, item.name), "arguments": item.arguments.strip() or "{}"}
            return assistant_message((), (), [{"type": "function", "id": item.call_id, "function": function}])
        case _FunctionCallOutput():
            content = content_of(item.output, f"{place}.output", allow_urls=allow_urls)
            return {"role": "tool", "content": content, "tool_call_id": item.call_id}
        case _:
            content = content_of(item.content, f"{place}.content", allow_urls=allow_urls)
            if item.role == "assistant" and not isinstance(content, str):
                if any(part["type"] != "text" for part in content):
                    raise invalid_message(f"{place}.content: an assistant message has no images", f"{place}.content")
                content = "".join(part["text"] for part in content)
            return {"role": item.role, "content": content}
