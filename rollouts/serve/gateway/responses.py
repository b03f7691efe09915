"""OpenAI's Responses: a body as a request, and completions as `response` objects or events."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field

from rollouts.errors import short_repr
from rollouts.serve.bodies import Strict, check_depth, check_encodable, validated, without_nulls
from rollouts.serve.errors import RequestError, invalid_message, unsupported_field
from rollouts.serve.gateway.dialect import Choice, Dialect, Event, Place, Reading, TurnCompletion, TurnRequest, Writer
from rollouts.serve.gateway.history import History
from rollouts.serve.gateway.request_checks import (
    SAMPLES_FREELY,
    Name,
    OpenAIBody,
    PlainMessages,
    Sampled,
    Text,
    TextFormat,
    TextPart,
    as_list,
    assistant_message,
    check_count,
    checked_tools,
    content_of,
    function_tool,
    media_part,
)
from rollouts.serve.gateway.session import StoredResponse


class _Text(TextPart):
    type: Literal["input_text", "output_text"]
    without_effect = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})


class _Refusal(TextPart):
    type: Literal["refusal"]
    text: Text = Field(alias="refusal")


class _Image(Strict):
    type: Literal["input_image"]
    image_url: str | None = None
    without_effect = frozenset({"detail", "prompt_cache_breakpoint"})

    def read(self, place: str, *, allow_urls: bool) -> dict[str, Any]:
        return media_part(self.image_url, "image", place, allow_urls=allow_urls)


_Part = Annotated[_Text | _Refusal | _Image, Field(discriminator="type")]
_Parts = Annotated[list[_Part], BeforeValidator(partial(as_list, kind="input_text"))]


class _Message(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts
    without_effect = frozenset({"id", "phase", "status"})


class _FunctionCall(Sampled):
    type: Literal["function_call"]
    call_id: Name
    namespace: Name | None = None
    name: Name
    arguments: Text


class _FunctionCallOutput(Strict):
    type: Literal["function_call_output"]
    call_id: Name
    output: _Parts
    without_effect = frozenset({"caller", "id", "name", "namespace", "status"})


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


class _Function(Strict):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    defer_loading: Literal[False] = False
    without_effect = frozenset({"strict"})


class _Namespace(Strict):
    type: Literal["namespace"]
    name: Name
    tools: list[_Function]
    without_effect = frozenset({"description"})


class _TextConfig(Strict):
    format: TextFormat | None = None
    without_effect = frozenset({"verbosity"})


# What OpenAI's own tools return is in no response here, nor is encrypted reasoning: reasoning is sent as text. Images
# are in the input, and log-probabilities are refused.
_Included = Annotated[str, Field(pattern=r"^([a-z_]+_call(_output)?|message\.input_image|reasoning)\.")]
_NO_LOGPROBS: Final = "log-probabilities are not supported here: chat completions have them"
_NOT_SHORTENED: Final = "not supported: the server shortens no conversation"


class _ResponsesBody(OpenAIBody):
    typed = ("tools",)
    input: Annotated[
        list[Any],
        BeforeValidator(lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value),
    ]
    instructions: Text | None = None
    tools: list[Annotated[_Function | _Namespace, Field(discriminator="type")]] = Field([])
    text: _TextConfig = Field(_TextConfig(), description=SAMPLES_FREELY)
    include: list[_Included] = Field([], description=_NO_LOGPROBS)
    previous_response_id: Text | None = None
    store: bool = True
    max_output_tokens: Any = None
    # What this server does not do.
    background: Literal[False] = Field(False, description="not supported: a request is answered at once")
    context_management: list[Any] = Field([], max_length=0, description=_NOT_SHORTENED)
    top_logprobs: Literal[0] = Field(0, description=_NO_LOGPROBS)
    conversation: None = Field(None, description="not supported: send previous_response_id or all items")
    prompt: None = Field(None, description="not supported: no prompts are stored; send instructions")
    truncation: Literal["disabled"] = Field("disabled", description=_NOT_SHORTENED)
    # How much the model thinks, its template decides.
    without_effect = OpenAIBody.without_effect | {
        *("client_metadata", "max_tool_calls", "prompt_cache_options", "reasoning", "stream_options"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(TurnRequest):
    """A checked request. `echoed` are its fields in the response; `num_instructions` messages are the instructions.

    `namespaces` has the namespace of a function and its name there, by the name that the model knows.
    """

    num_instructions: int
    namespaces: Mapping[str, tuple[str, str]]
    echoed: dict[str, Any]

    def after(
        self, stored: StoredResponse, messages: Sequence[Any], identities: Sequence[bytes], max_parts: int
    ) -> ResponsesRequest:
        """The request with the conversation of a stored response after its own instructions. Raises `RequestError`."""
        first, own = self.num_instructions, self.history
        num_before = len(messages) - stored.first
        messages = [*own.messages[:first], *messages[stored.first :], *own.messages[first:]]
        identities = [*own.identities[:first], *identities[stored.first :], *own.identities[first:]]
        check_count({"input": messages, "tools": self.tools}, max_parts)

        def place(index: int) -> Place:
            if first <= index < first + num_before:
                return Place("previous_response_id", "previous_response_id")
            return self.place(index if index < first else index - num_before)

        return replace(self, history=History(messages, self.tools, identities, stored.turn), place=place)


def _read(read: _ResponsesBody, fields: dict[str, Any], reading: Reading) -> ResponsesRequest:
    namespaces: dict[str, tuple[str, str]] = {}
    tools = []
    for tool in read.tools if read.calls_tools else ():
        for function in tool.tools if isinstance(tool, _Namespace) else (tool,):
            name = function.name
            if isinstance(tool, _Namespace):
                name = f"{tool.name}__{name}"
                namespaces[name] = (tool.name, function.name)
            tools.append(function_tool(name, function.description, function.parameters))
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
    unnamed = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return ResponsesRequest(
        body=read,
        history=History([*first, *(message for message, _ in conversation)], checked_tools(tools)),
        place=place,
        tools=tools or None,
        sampling=used,
        num_instructions=len(first),
        namespaces=namespaces,
        echoed={**unnamed, "temperature": used.temperature, "top_p": used.top_p, **echoed},
    )


_NOT_ECHOED: Final = frozenset({"client_metadata", "include", "input", "stream", "stream_options"})
#: The id of an item of a response that the gateway made: the items of a completion share the second part.
_ITEM_ID: Final = re.compile(r"[a-z]{2,3}_([0-9a-f]{32})_\d+")


_PLAIN: Final = PlainMessages(
    ("user", "assistant", "system", "developer"),
    {"type", "id", "status", "role", "content"},
    ("input_text", "output_text"),
    {"type", "text", "annotations", "logprobs"},
)


def _conversation(items: Sequence[Any], allow_urls: bool) -> list[tuple[dict[str, Any], list[int]]]:
    """The messages, each with the indices of its items.

    What the model wrote in a row is one message, unless the ids of its items say that they are of two completions.
    """
    conversation: list[tuple[list[dict[str, Any]], list[int]]] = []
    completion: str | None = None  # that of the last message
    was_own = False
    for index, raw in enumerate(items):
        message = _PLAIN.read(raw) or _message(raw, index, allow_urls)
        if message is None:
            continue
        is_own = message["role"] == "assistant"
        if is_own and was_own:
            messages, indices = conversation[-1]
            completion = completion or _completion_of(items[indices[-1]])
            if completion is None or _completion_of(raw) in (None, completion):
                messages.append(message)
                indices.append(index)
                continue
        conversation.append(([message], [index]))
        completion, was_own = None, is_own
    return [(messages[0] if len(messages) == 1 else _joined(messages), indices) for messages, indices in conversation]


def _completion_of(item: Mapping[str, Any]) -> str | None:
    """The completion of an item, told by its id; None for ids that the gateway did not make."""
    identifier = item.get("id")
    made = _ITEM_ID.fullmatch(identifier) if isinstance(identifier, str) else None
    return None if made is None else made[1]


def _joined(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One message of the model for several."""
    thoughts = [message.get("reasoning_content", "") for message in messages]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return assistant_message([message["content"] for message in messages], thoughts, calls)


def _message(raw: Any, index: int, allow_urls: bool) -> dict[str, Any] | None:
    """The message of an item; None for reasoning without a text."""
    place = f"input[{index}]"
    kind = raw.get("type", "message") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or kind not in _ITEMS:
        known = ", ".join(_ITEMS)
        cure = "; send the item itself, or previous_response_id" if kind == "item_reference" else ""
        raise unsupported_field(f"{place} is {short_repr(raw)}: an item is one of {known}{cure}", place)
    item: Any = validated(_ITEMS[kind], raw, place)
    match item:
        case _Reasoning(content=parts):
            thoughts = [part.text for part in parts or ()]
            return assistant_message((), thoughts, []) if any(thoughts) else None
        case _FunctionCall():
            name = item.name if item.namespace is None else f"{item.namespace}__{item.name}"
            function = {"name": name, "arguments": item.arguments.strip() or "{}"}
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


#: By the key of a text: the prefix of the ids of its items, an item without its part, a part without text.
_TEXTS: Final[Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "reasoning_content": ("rs", {"type": "reasoning", "summary": []}, {"type": "reasoning_text"}),
    "content": (
        "msg",
        {"type": "message", "role": "assistant"},
        {"type": "output_text", "annotations": [], "logprobs": []},
    ),
}


class ResponsesWriter(Writer):
    """The output of the response grows with its events."""

    request: ResponsesRequest
    _sequence_number = -1
    _key = ""  # of the text that is open
    _texts: list[str]  # its pieces

    def begin(self, prompt_ids: list[int]) -> Iterator[Event]:
        self.answer = {
            "id": f"resp_{self.head.id}",
            "object": "response",
            "created_at": self.head.created,
            "model": self.head.model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **self.request.echoed,
        }
        yield self._event("response.created", response={**self.answer, "output": []})
        yield self._event("response.in_progress", response={**self.answer, "output": []})

    def text(self, index: int, key: str, text: str) -> Iterator[Event]:
        if key != self._key:
            yield from self._end_text()
            yield from self._begin_text(key)
        self._texts.append(text)
        yield self._text_event("delta", delta=text)

    def call(self, index: int, number: int, call: Mapping[str, Any]) -> Iterator[Event]:
        yield from self._end_text()
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {"type": "function_call", "call_id": call["id"], "name": name, "arguments": ""}
        if name in self.request.namespaces:
            item["namespace"], item["name"] = self.request.namespaces[name]
        yield self._begin_item("fc", item)
        yield self._item_event("function_call_arguments.delta", delta=arguments)
        yield self._item_event("function_call_arguments.done", arguments=arguments)
        yield self._end_item({**item, "arguments": arguments})

    def end_choice(self, choice: Choice) -> Iterator[Event]:
        if not self.answer["output"]:
            yield from self._begin_text("content")
        yield from self._end_text("incomplete" if choice.is_cut else "completed")
        self.answer["status"] = "incomplete" if choice.is_cut else "completed"
        self.answer["incomplete_details"] = {"reason": "max_output_tokens"} if choice.is_cut else None

    def end(self, completion: TurnCompletion) -> Iterator[Event]:
        prompt, sampled = len(completion.prompt_ids), completion.num_sampled
        self.answer["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }
        yield self._event(f"response.{self.answer['status']}", response=self.answer)

    def failed(self, error: RequestError) -> Event:
        reason = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response={**self.answer, "status": "failed", "error": reason})

    def _event(self, name: str, **fields: Any) -> Event:
        self._sequence_number += 1
        return {"type": name, "sequence_number": self._sequence_number, **fields}

    def _item_event(self, name: str, **fields: Any) -> Event:
        output = self.answer["output"]
        return self._event(f"response.{name}", output_index=len(output) - 1, item_id=output[-1]["id"], **fields)

    def _part_event(self, name: str, **fields: Any) -> Event:
        return self._item_event(name, content_index=0, **fields)

    def _begin_item(self, prefix: str, item: dict[str, Any]) -> Event:
        output = self.answer["output"]
        output.append({"id": f"{prefix}_{self.head.id}_{len(output)}", "status": "in_progress", **item})
        return self._event("response.output_item.added", output_index=len(output) - 1, item=output[-1])

    def _end_item(self, item: dict[str, Any], status: str = "completed") -> Event:
        output = self.answer["output"]
        output[-1] = {**output[-1], **item, "status": status}
        return self._event("response.output_item.done", output_index=len(output) - 1, item=output[-1])

    def _text_event(self, name: str, **fields: Any) -> Event:
        part = _TEXTS[self._key][2]
        logprobs: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
        return self._part_event(f"{part['type']}.{name}", **fields, **logprobs)

    def _begin_text(self, key: str) -> Iterator[Event]:
        self._key, self._texts = key, []
        prefix, item, part = _TEXTS[key]
        yield self._begin_item(prefix, {**item, "content": []})
        yield self._part_event("content_part.added", part={**part, "text": ""})

    def _end_text(self, status: str = "completed") -> Iterator[Event]:
        """End the item of text or reasoning that is open, if there is one."""
        if not self._key:
            return
        part = {**_TEXTS[self._key][2], "text": "".join(self._texts)}
        yield self._text_event("done", text=part["text"])
        yield self._part_event("content_part.done", part=part)
        yield self._end_item({"content": [part]}, status)
        self._key = ""


RESPONSES: Final = Dialect("responses", ("function", "namespace"), _ResponsesBody, _read, ResponsesWriter)
