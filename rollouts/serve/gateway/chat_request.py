"""The body of a chat-completions request: every field is honoured, is known to have no effect, or is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rollouts.engines.protocol import SamplingParams
from rollouts.errors import short_repr
from rollouts.serve.bodies import json_object, unknown_field, without_nulls
from rollouts.serve.errors import invalid_field, unsupported_field
from rollouts.serve.gateway.chat_messages import read_message
from rollouts.serve.gateway.dialect import Place, TurnRequest
from rollouts.serve.gateway.history import History
from rollouts.serve.gateway.request_checks import (
    OpenAIBody,
    StopString,
    Strict,
    check_count,
    check_tools,
    validated,
)

#: Sampling options that are passed to the engine, with the value that means nothing. Engines refuse those
#: they lack.
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


class _Only(NamedTuple):
    """A field that may have these values only."""

    allowed: tuple[Any, ...]
    reason: str


_TOKENS_ONLY: Final = "the model samples freely: no grammar constrains its tokens"
_ONE_TEXT: Final = "completions are text"

_TEMPLATE: Final = (
    "no request changes the prompts of a server: they are those of the chat template in its model directory. A program "
    "can set variables of the template for all requests: Gateway(engine, load_renderer(DIR, chat_template_kwargs=...))"
)

_CONSTRAINED: Final[Mapping[str, _Only]] = {
    "audio": _Only((), _ONE_TEXT),
    "best_of": _Only((1,), "every completion is returned; use n"),
    "chat_template": _Only((), _TEMPLATE),
    "chat_template_kwargs": _Only(({},), _TEMPLATE),
    "continue_final_message": _Only((False,), "each completion is a message of its own"),
    "add_generation_prompt": _Only((True,), "each completion is a message of its own"),
    "function_call": _Only((), "use tools"),
    "functions": _Only(([],), "use tools"),
    "ignore_eos": _Only((False,), "a turn ends at the stop tokens of the template, or the next one could not follow"),
    "modalities": _Only((["text"],), _ONE_TEXT),
    "parallel_tool_calls": _Only((True,), f"{_TOKENS_ONLY}, and it may make several calls in one message"),
    "prediction": _Only((), "there is no speculative decoding from the request"),
    "reasoning_effort": _Only((), _TEMPLATE),
    "response_format": _Only(({"type": "text"},), f"{_TOKENS_ONLY}. Ask for the format in the messages"),
    "tool_choice": _Only(("auto", "none"), f"{_TOKENS_ONLY}, so that no call can be forced"),
    "verbosity": _Only((), "ask for it in the messages"),
    "web_search_options": _Only((), "the server fetches nothing"),
}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class _StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class _Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(min_length=1)


class _Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"] = "function"
    function: _Function


class _ChatBody(OpenAIBody):
    """The fields that are read. Messages are read by `read_message`."""

    model_config = ConfigDict(strict=True, extra="allow")

    messages: list[Any] = Field(min_length=1)
    tools: list[_Tool] = Field([])
    stop: Annotated[list[StopString], BeforeValidator(_as_list)] = Field([], max_length=64)
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
    store: Any = None  # no list of completions is kept
    stream_options: _StreamOptions = _StreamOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(TurnRequest):
    """A checked request of chat completions."""

    logprobs: bool
    top_logprobs: int
    return_token_ids: bool
    include_usage: bool


def read_chat_request(
    body: bytes,
    defaults: SamplingParams,
    *,
    allow_urls: bool,
    max_choices: int,
    max_parts: int,
) -> ChatRequest:
    """The request in a body. Raises `RequestError`; `InvalidRequestError` for options out of range."""
    fields = without_nulls(json_object(body))
    read = validated(_ChatBody, fields)
    _check_fields(read.model_extra or {})
    if read.stream_options.continuous_usage_stats:
        reason = "the number of tokens is in the last chunk alone; send false, and include_usage"
        raise unsupported_field(f"stream_options.continuous_usage_stats true: {reason}", "stream_options")
    if read.top_logprobs and not read.logprobs:
        raise invalid_field("top_logprobs are alternatives in logprobs; send logprobs true, too", "top_logprobs")
    messages = fields["messages"]
    lists = [message.get(key) for message in messages if isinstance(message, dict) for key in ("content", "tool_calls")]
    check_count((messages, fields.get("tools"), *lists), max_parts, "messages")
    calls_tools = fields.get("tool_choice", "auto") == "auto"
    # Without the tools in the prompt the model does not know of them.
    tools = (fields.get("tools") or None) if calls_tools else None
    check_tools(tools or [])
    read_messages = [read_message(message, index, allow_urls=allow_urls) for index, message in enumerate(messages)]
    return ChatRequest(
        model=read.model,
        history=History(read_messages, tools),
        place=lambda index: Place(f"messages[{index}]", f"messages[{index}].content"),
        tools=tools,
        sampling=_sampling(fields, defaults, max_choices),
        stop=tuple(read.stop),
        calls_tools=calls_tools,
        logprobs=read.logprobs,
        top_logprobs=read.top_logprobs,
        return_token_ids=read.return_token_ids,
        stream=read.stream,
        include_usage=read.stream_options.include_usage,
    )


def _check_fields(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in _ENGINE_OPTIONS:
            continue
        constraint = _CONSTRAINED.get(name)
        if constraint is None:
            raise unknown_field(name)
        # 1 == True in Python.
        if not any(value == allowed and type(value) is type(allowed) for allowed in constraint.allowed):
            allowed = " or ".join(map(json.dumps, constraint.allowed))
            cure = f"send {allowed}, or leave it out" if allowed else "leave it out"
            raise unsupported_field(f"{name} {short_repr(value)}: {constraint.reason}; {cure}", name)


def _sampling(fields: Mapping[str, Any], defaults: SamplingParams, max_choices: int) -> SamplingParams:
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
    if sampling.n > max_choices:
        raise unsupported_field(f"n is {sampling.n}; this server takes at most {max_choices}", "n")
    return sampling
