"""The body of a chat-completions request: every field is honoured, is known to have no effect, or is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rollouts.engines.protocol import SamplingParams
from rollouts.serve.bodies import unknown_field
from rollouts.serve.errors import invalid_field, unsupported_field
from rollouts.serve.gateway.chat_messages import read_message
from rollouts.serve.gateway.dialect import Place, Reading, TurnRequest
from rollouts.serve.gateway.history import History
from rollouts.serve.gateway.request_checks import (
    OWN_MESSAGE,
    SAMPLES_FREELY,
    OpenAIBody,
    StopString,
    Strict,
    TextFormat,
    check_tool_results,
    check_tools,
    read_fields,
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


_ONE_TEXT: Final = "completions are text"
_TEMPLATE: Final = (
    "no request changes the prompts of a server: they are those of the chat template in its model directory. A program "
    "can set variables of the template for all requests: Gateway(engine, load_renderer(DIR, chat_template_kwargs=...))"
)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class _StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] = False


class _Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(min_length=1)


class _Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"] = "function"
    function: _Function


class _ChatBody(OpenAIBody):
    """The fields of a body but for the options of the engine. Messages are read by `read_message`."""

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
    stream_options: _StreamOptions = Field(
        _StreamOptions(), description="the number of tokens is in the last chunk alone, with include_usage"
    )
    # What this server does not do.
    add_generation_prompt: Literal[True] = Field(True, description=OWN_MESSAGE)
    audio: None = Field(None, description=_ONE_TEXT)
    best_of: Literal[1] = Field(1, description="every completion is returned; use n")
    chat_template: None = Field(None, description=_TEMPLATE)
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=0, description=_TEMPLATE)
    continue_final_message: Literal[False] = Field(False, description=OWN_MESSAGE)
    function_call: None = Field(None, description="use tools")
    functions: list[Any] = Field([], max_length=0, description="use tools")
    ignore_eos: Literal[False] = Field(False, description="a turn ends at the stop tokens of the template")
    modalities: list[Literal["text"]] = Field(["text"], description=_ONE_TEXT)
    prediction: None = Field(None, description="there is no speculative decoding from the request")
    reasoning_effort: None = Field(None, description=_TEMPLATE)
    response_format: TextFormat = Field(TextFormat(), description=SAMPLES_FREELY)
    verbosity: None = Field(None, description="ask for it in the messages")
    web_search_options: None = Field(None, description="the server fetches nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(TurnRequest):
    """A checked request of chat completions."""

    logprobs: bool
    top_logprobs: int
    return_token_ids: bool
    include_usage: bool


def read_chat_request(body: bytes, reading: Reading) -> ChatRequest:
    """The request in a body, as `Dialect` says it."""
    fields, ignored = read_fields(body, reading, ("function",))
    read = validated(_ChatBody, fields)
    for name in read.model_extra or ():
        if name not in _ENGINE_OPTIONS:
            raise unknown_field(name)
    if read.top_logprobs and not read.logprobs:
        raise invalid_field("top_logprobs are alternatives in logprobs; send logprobs true, too", "top_logprobs")
    calls_tools = read.tool_choice == "auto"
    # Without the tools in the prompt the model does not know of them.
    tools = (fields.get("tools") or None) if calls_tools else None
    check_tools(tools or [])
    messages = [
        read_message(message, index, allow_urls=reading.allow_urls) for index, message in enumerate(read.messages)
    ]

    def place(index: int) -> Place:
        at = f"messages[{index}]"
        calls = [f"{at}.tool_calls[{number}]" for number in range(len(messages[index].get("tool_calls", ())))]
        return Place(at, f"{at}.content", 0, calls, "function.arguments", "tool_call_id")

    request = ChatRequest(
        model=read.model,
        history=History(messages, tools),
        place=place,
        tools=tools,
        sampling=_sampling(fields, reading),
        stop=tuple(read.stop),
        calls_tools=calls_tools,
        logprobs=read.logprobs,
        top_logprobs=read.top_logprobs,
        return_token_ids=read.return_token_ids,
        stream=read.stream,
        ignored_tools=ignored,
        include_usage=read.stream_options.include_usage,
    )
    check_tool_results(request)
    return request


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
    if sampling.n > reading.max_choices:
        raise unsupported_field(f"n is {sampling.n}; this server takes at most {reading.max_choices}", "n")
    return sampling
