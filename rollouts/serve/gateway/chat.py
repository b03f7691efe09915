"""OpenAI's chat completions: a body as a request, and completions as `chat.completion` objects or chunks."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field

from renderers.messages import MEDIA_PART_TYPES, ROLES, media_value
from rollouts.engines.protocol import SamplingParams
from rollouts.serve.bodies import END_OF_STREAM, Strict, unknown_field, validated, without_nulls
from rollouts.serve.errors import RequestError, error_fields, invalid_field, invalid_message, unsupported_field
from rollouts.serve.gateway.dialect import (
    Choice,
    Dialect,
    Event,
    Place,
    Reading,
    TokenTexts,
    TurnCompletion,
    TurnRequest,
    Writer,
)
from rollouts.serve.gateway.history import History
from rollouts.serve.gateway.request_checks import (
    OWN_MESSAGE,
    SAMPLES_FREELY,
    Name,
    OpenAIBody,
    PlainMessages,
    Sampled,
    StopString,
    Text,
    TextFormat,
    TextPart,
    as_list,
    checked_tools,
    content_of,
    media_part,
)

#: Sampling options for the engine, each with the value that means nothing. Engines refuse those they lack.
_ENGINE_OPTIONS: Final[Mapping[str, Any]] = {
    "allowed_token_ids": None,
    "bad_words": [],
    "frequency_penalty": 0,
    "logit_bias": {},
    "min_p": 0,
    "min_tokens": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
}
_TEMPLATE: Final = (
    "no request changes the prompts of a server: they are those of the chat template in its model directory. A program "
    "can set variables of the template for all requests: Gateway(engine, load_renderer(DIR, chat_template_kwargs=...))"
)
#: Keys without effect on the tokens: clients copy them from responses, or write them for others.
_WITHOUT_EFFECT: Final = frozenset({"cache_control", "id", "index", "provider_specific_fields", "status"})


class _Text(TextPart):
    type: Literal["text"]
    without_effect = _WITHOUT_EFFECT


class _Source(Strict):
    url: Text | None = None
    data: Text | None = None
    without_effect = frozenset({"detail", "format"})


_Medium = Annotated[_Source | None, BeforeValidator(lambda value: {"url": value} if isinstance(value, str) else value)]


class _Media(Strict):
    type: Literal["image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio"]
    image: _Medium = None
    image_url: _Medium = None
    video: _Medium = None
    video_url: _Medium = None
    audio: _Medium = None
    audio_url: _Medium = None
    input_audio: _Medium = None
    base64: Text | None = None
    without_effect = _WITHOUT_EFFECT

    def read(self, place: str, *, allow_urls: bool) -> dict[str, Any]:
        value = media_value(self.model_dump(exclude_none=True))
        return media_part(value, MEDIA_PART_TYPES[self.type], place, allow_urls=allow_urls)


class _CalledFunction(Sampled):
    name: Name
    arguments: Text | dict[str, Any] | None = None


class _ToolCall(Sampled):
    type: Literal["function"] = "function"
    id: Text | None = None
    function: _CalledFunction

    def read(self) -> dict[str, Any]:
        arguments = self.function.arguments
        # How some clients write a call without arguments.
        if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
            arguments = "{}"
        function = {"name": self.function.name, "arguments": arguments}
        return without_nulls({"type": "function", "function": function, "id": self.id})


class _Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[Annotated[_Text | _Media, Field(discriminator="type")]] | None,
        BeforeValidator(partial(as_list, kind="text")),
    ] = None
    name: Text | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: list[_ToolCall] | None = None
    without_effect = _WITHOUT_EFFECT | {"annotations"}


class _StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] = False


class _Function(BaseModel, strict=True, extra="allow"):
    name: Name


class _Tool(BaseModel, strict=True, extra="allow"):
    type: Literal["function"] = "function"
    function: _Function


class _ChatBody(OpenAIBody, extra="allow"):
    """The fields of a body but for the options of the engine."""

    messages: list[Any] = Field(min_length=1)
    tools: list[_Tool] = Field([])
    stop: Annotated[list[StopString], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)] = (
        Field([], max_length=64)
    )
    stop_token_ids: list[Any] = Field([])
    max_completion_tokens: Any = None
    max_tokens: Any = None
    n: Any = None
    seed: Any = None
    top_k: Any = None
    logprobs: bool = False
    # OpenAI's limit, and vLLM's default.
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    return_token_ids: bool = False
    without_effect = OpenAIBody.without_effect | {"store"}  # no list of completions is kept
    stream_options: _StreamOptions = Field(
        _StreamOptions(), description="the number of tokens is in the last chunk alone, with include_usage"
    )
    # What this server does not do.
    add_generation_prompt: Literal[True] = Field(True, description=OWN_MESSAGE)
    chat_template: None = Field(None, description=_TEMPLATE)
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=0, description=_TEMPLATE)
    continue_final_message: Literal[False] = Field(False, description=OWN_MESSAGE)
    ignore_eos: Literal[False] = Field(False, description="a turn ends at the stop tokens of the template")
    functions: None = Field(None, description="not supported: send tools of the type function")
    modalities: list[Literal["text"]] = Field(["text"], description="completions are text")
    reasoning_effort: None = Field(None, description=_TEMPLATE)
    response_format: TextFormat = Field(TextFormat(), description=SAMPLES_FREELY)


def _read(read: _ChatBody, fields: dict[str, Any], reading: Reading) -> TurnRequest:
    for name in read.model_extra or ():
        if name not in _ENGINE_OPTIONS:
            raise unknown_field(name)
    if read.top_logprobs and not read.logprobs:
        raise invalid_field("top_logprobs are alternatives in logprobs; send logprobs true, too", "top_logprobs")
    # Without the tools in the prompt the model does not know of them.
    tools = fields.get("tools", []) if read.calls_tools else []
    messages = [_message_of(message, index, reading.allow_urls) for index, message in enumerate(read.messages)]

    def place(index: int) -> Place:
        at = f"messages[{index}]"
        calls = [f"{at}.tool_calls[{number}]" for number in range(len(messages[index].get("tool_calls", ())))]
        return Place(at, f"{at}.content", 0, calls, "function.arguments", "tool_call_id")

    return TurnRequest(
        body=read,
        history=History(messages, checked_tools(tools)),
        place=place,
        tools=tools or None,
        sampling=_sampling(fields, reading),
        stop=read.stop,
    )


def _sampling(fields: Mapping[str, Any], reading: Reading) -> SamplingParams:
    defaults = reading.sampling
    given = {name: fields[name] for name in ("n", "seed", "temperature", "top_k", "top_p") if name in fields}
    if given.get("top_k") == -1:
        given["top_k"] = 0  # vLLM's value for no limit
    limits = [fields[name] for name in ("max_completion_tokens", "max_tokens") if name in fields]
    if limits:
        given["max_tokens"] = limits[0]
    if "stop_token_ids" in fields:
        given["stop_token_ids"] = tuple(fields["stop_token_ids"])
    extra = {
        name: fields[name] for name, neutral in _ENGINE_OPTIONS.items() if name in fields and fields[name] != neutral
    }
    given["top_logprobs"] = max(defaults.top_logprobs, fields.get("top_logprobs", 0))
    sampling = replace(defaults, **given, extra={**defaults.extra, **extra})
    if sampling.n > reading.limits.max_choices:
        raise unsupported_field(f"n is {sampling.n}; this server takes at most {reading.limits.max_choices}", "n")
    return sampling


_PLAIN: Final = PlainMessages(ROLES, {"role", "content"}, ("text",), {"type", "text"})


def _message_of(raw: Any, index: int, allow_urls: bool) -> dict[str, Any]:
    """Message `index` for a renderer. Raises `RequestError`."""
    if (plain := _PLAIN.read(raw)) is not None:
        return plain
    place = f"messages[{index}]"
    read = validated(_Message, raw, place)
    is_assistant = read.role == "assistant"
    if read.content is None and not is_assistant:
        raise invalid_message(f"{place} has no content; send text or a list of parts", f"{place}.content")
    if read.tool_calls and not is_assistant:
        raise invalid_message(f"{place}.tool_calls: only an assistant message has tool calls", f"{place}.tool_calls")
    message = {
        "role": read.role,
        "content": content_of(read.content or (), f"{place}.content", allow_urls=allow_urls),
        "name": read.name,
        "tool_call_id": read.tool_call_id,
        "reasoning_content": read.reasoning_content or read.reasoning,
        "tool_calls": [call.read() for call in read.tool_calls or ()] or None,
    }
    return without_nulls(message)


class ChatWriter(Writer):
    """Each choice has the index of its `turn`, the object its `session_id`.

    Each part of a message is one chunk: role, reasoning, content, and the name and the arguments of each tool
    call. Log-probabilities and token ids are in the last chunk of their choice.
    """

    last: ClassVar[bytes] = END_OF_STREAM
    _first: dict[str, Any]  # fields of the next chunk alone

    def whole(self, completion: TurnCompletion) -> dict[str, Any]:
        choices = []
        for choice in completion.choices:
            # As OpenAI's, the content of a message with nothing but tool calls is null.
            content = choice.message["content"] or (None if choice.message.get("tool_calls") else "")
            choices.append(self._entry(choice, message={**choice.message, "content": content, "refusal": None}))
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": _usage(completion),
            **self._prompt_ids(completion.prompt_ids),
        }

    def begin(self, prompt_ids: list[int]) -> Iterator[Event]:
        self._first = self._prompt_ids(prompt_ids)
        return iter(())

    def begin_choice(self, index: int) -> Iterator[Event]:
        yield self._delta(index, {"role": "assistant", "content": ""})

    def text(self, index: int, key: str, text: str) -> Iterator[Event]:
        yield self._delta(index, {key: text})

    def call(self, index: int, number: int, call: Mapping[str, Any]) -> Iterator[Event]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        begun = {"index": number, "id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
        yield self._delta(index, {"tool_calls": [begun]})
        yield self._delta(index, {"tool_calls": [{"index": number, "function": {"arguments": arguments}}]})

    def end_choice(self, choice: Choice) -> Iterator[Event]:
        yield self._chunk(self._entry(choice, delta={}))

    def end(self, completion: TurnCompletion) -> Iterator[Event]:
        if self.request.body.stream_options.include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(completion)}

    def failed(self, error: RequestError) -> Event:
        return error_fields(error)

    def _head(self, kind: str) -> dict[str, Any]:
        id, created, model, session_id = self.head
        return {"id": f"chatcmpl-{id}", "object": kind, "created": created, "model": model, "session_id": session_id}

    def _prompt_ids(self, prompt_ids: list[int]) -> dict[str, Any]:
        return {"prompt_token_ids": prompt_ids} if self.request.body.return_token_ids else {}

    def _delta(self, index: int, delta: dict[str, Any]) -> Event:
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def _chunk(self, entry: dict[str, Any]) -> Event:
        first, self._first = self._first, {}
        usage = {"usage": None} if self.request.body.stream_options.include_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [entry], **usage, **first}

    def _entry(self, choice: Choice, **content: Any) -> dict[str, Any]:
        body = self.request.body
        finish_reason = "length" if choice.is_cut else "tool_calls" if choice.message.get("tool_calls") else "stop"
        return {
            "index": choice.index,
            **content,
            "logprobs": _logprobs(choice, self.texts, self.request.body.top_logprobs)
            if self.request.body.logprobs
            else None,
            "finish_reason": finish_reason,
            "turn": choice.turn.index,
            **({"token_ids": choice.completion.token_ids.tolist()} if body.return_token_ids else {}),
        }


CHAT = Dialect("chat/completions", ("function",), _ChatBody, _read, ChatWriter)


def _logprobs(choice: Choice, texts: TokenTexts | None, k: int) -> dict[str, Any]:
    """The log-probabilities of the tokens, with k alternatives for each."""
    assert texts is not None  # checked at the beginning
    sampled = choice.completion
    token_ids: list[int] = sampled.token_ids.tolist()
    alternatives: list[list[dict[str, Any]]] = [[] for _ in token_ids]
    if k and sampled.top_logprobs is not None:
        ids, values = (column[:, :k] for column in sampled.top_logprobs)
        # As the second of two: a decoder may drop the space before the first token of a text.
        named = {token: texts([token, token])[1] for token in np.unique(ids).tolist()}
        alternatives = [
            [_logprob(*named[token], logprob) for token, logprob in zip(*row, strict=True)]
            for row in zip(ids.tolist(), values.tolist(), strict=True)
        ]
    entries = [
        {**_logprob(text, data, logprob), "top_logprobs": others}
        for (text, data), logprob, others in zip(texts(token_ids), sampled.logprobs.tolist(), alternatives, strict=True)
    ]
    return {"content": entries, "refusal": None}


def _logprob(text: str, data: bytes | None, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": None if data is None else list(data)}


def _usage(completion: TurnCompletion) -> dict[str, int]:
    prompt, sampled = len(completion.prompt_ids), completion.num_sampled
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
