"""The body of a chat-completions request: every field is honoured, is known to have no effect, or is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from rollouts.engines.protocol import SamplingParams
from rollouts.error_texts import is_unicode, short_repr
from rollouts.serve.gateway.chat_messages import check_tool_results, read_message
from rollouts.serve.gateway.errors import InvalidChatRequestError, UnsupportedFieldError
from rollouts.serve.gateway.history import History
from rollouts.serve.json_size import MAX_JSON_VALUES, has_more_values

#: Fields that say something to OpenAI and nothing about the completion.
_WITHOUT_EFFECT: Final = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

#: Sampling options that are passed to the engine, with the value that means nothing. Engines refuse those they lack.
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

_CONSTRAINED: Final[Mapping[str, _Only]] = {
    "audio": _Only((), _ONE_TEXT),
    "best_of": _Only((1,), "every completion is returned; use n"),
    "chat_template": _Only((), "the template is the served model's"),
    "chat_template_kwargs": _Only(({},), "the template has the options that the server was started with"),
    "continue_final_message": _Only((False,), "each completion is a message of its own"),
    "add_generation_prompt": _Only((True,), "each completion is a message of its own"),
    "function_call": _Only((), "use tools"),
    "functions": _Only(([],), "use tools"),
    "ignore_eos": _Only((False,), "a turn ends at the stop tokens of the template, or the next one could not follow"),
    "modalities": _Only((["text"],), _ONE_TEXT),
    "parallel_tool_calls": _Only((True,), f"{_TOKENS_ONLY}, and it may make several calls in one message"),
    "prediction": _Only((), "there is no speculative decoding from the request"),
    "reasoning_effort": _Only((), "the template has the options that the server was started with"),
    "response_format": _Only(({"type": "text"},), f"{_TOKENS_ONLY}. Ask for the format in the messages"),
    "tool_choice": _Only(("auto", "none"), f"{_TOKENS_ONLY}, so that no call can be forced"),
    "top_logprobs": _Only((0,), "the engine reports the log-probability of the sampled token alone"),
    "verbosity": _Only((), "ask for it in the messages"),
    "web_search_options": _Only((), "the server fetches nothing"),
}

_READ: Final = frozenset(
    {
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "n",
        "return_token_ids",
        "seed",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_options",
        "temperature",
        "tools",
        "top_k",
        "top_p",
    }
)

_MAX_STOPS: Final = 64
#: Of one stop string: the text before its end is searched with each token.
_MAX_STOP_CHARACTERS: Final = 1024
#: Deepest nesting of the schemas of tools. Templates walk through them recursively.
_MAX_TOOL_DEPTH: Final = 64


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request. `stop` are stop strings; `calls_tools` is False for `tool_choice` "none"."""

    model: str | None
    history: History
    tools: list[dict[str, Any]] | None
    sampling: SamplingParams
    stop: tuple[str, ...]
    calls_tools: bool
    logprobs: bool
    return_token_ids: bool
    stream: bool
    include_usage: bool


def read_chat_request(
    body: bytes,
    defaults: SamplingParams,
    *,
    allow_urls: bool,
    max_choices: int,
    max_parts: int,
    developer_role: str = "developer",
) -> ChatRequest:
    """The request in a body. `defaults` are the sampling options that it does not name.

    Messages of the role developer get `developer_role`.

    Raises `GatewayError`; `InvalidRequestError` for sampling options out of range.
    """
    fields = {name: value for name, value in read_json_object(body).items() if value is not None}
    _check_fields(fields)
    choice = fields.get("tool_choice", "auto")
    tools = _tools(fields.get("tools"))
    # Without the tools in the prompt the model does not know of them.
    prompt_tools = tools if choice == "auto" else None
    stream_options = _typed(fields, "stream_options", dict, "an object") or {}
    if unknown := stream_options.keys() - {"include_usage", "include_obfuscation", "continuous_usage_stats"}:
        raise _unknown(f"stream_options.{min(unknown)}")
    for name in stream_options:
        _typed(stream_options, name, bool, "true or false", within="stream_options.")
    if stream_options.get("continuous_usage_stats"):
        reason = "the number of tokens is in the last chunk alone; send false, and include_usage"
        raise UnsupportedFieldError(f"stream_options.continuous_usage_stats true: {reason}", "stream_options")
    return ChatRequest(
        model=_model(fields),
        history=History(_messages(fields, allow_urls, max_parts, developer_role), prompt_tools),
        tools=prompt_tools,
        sampling=_sampling(fields, defaults, max_choices),
        stop=_stop(fields.get("stop")),
        calls_tools=choice == "auto",
        logprobs=bool(_typed(fields, "logprobs", bool, "true or false")),
        return_token_ids=bool(_typed(fields, "return_token_ids", bool, "true or false")),
        stream=bool(_typed(fields, "stream", bool, "true or false")),
        include_usage=bool(stream_options.get("include_usage")),
    )


def read_json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises `InvalidChatRequestError`."""
    if has_more_values(body, MAX_JSON_VALUES):
        raise InvalidChatRequestError(f"the body has more than {MAX_JSON_VALUES} commas; shorten it")
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except RecursionError:
        raise InvalidChatRequestError("the body is nested too deep") from None
    except ValueError as error:  # also of bytes that are no UTF-8, and of integers with thousands of digits
        raise InvalidChatRequestError(f"the body is not JSON: {short_repr(str(error), 200)[1:-1]}") from None
    if not isinstance(value, dict):
        raise InvalidChatRequestError("the body is not a JSON object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _check_fields(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in _READ or name in _WITHOUT_EFFECT or name in _ENGINE_OPTIONS:
            continue
        constraint = _CONSTRAINED.get(name)
        if constraint is None:
            raise _unknown(name)
        # 1 == True in Python.
        if not any(value == allowed and type(value) is type(allowed) for allowed in constraint.allowed):
            allowed = " or ".join(map(json.dumps, constraint.allowed))
            cure = f"send {allowed}, or leave it out" if allowed else "leave it out"
            raise UnsupportedFieldError(f"{name} {short_repr(value)}: {constraint.reason}; {cure}", name)


def _unknown(name: str) -> InvalidChatRequestError:
    return InvalidChatRequestError(f"unknown field {short_repr(name)[1:-1]}; leave it out", name[:80])


def _typed(fields: Mapping[str, Any], name: str, kind: type, expected: str, *, within: str = "") -> Any:
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise InvalidChatRequestError(f"{within}{name} is {short_repr(value)}, not {expected}", f"{within}{name}")
    return value


def _model(fields: Mapping[str, Any]) -> str | None:
    model: str | None = _typed(fields, "model", str, "the name of a model")
    if model is not None and not is_unicode(model):
        raise InvalidChatRequestError("model holds half of a surrogate pair", "model")
    return model


def _messages(fields: Mapping[str, Any], allow_urls: bool, max_parts: int, developer_role: str) -> list[dict[str, Any]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidChatRequestError("messages is a list of at least one message", "messages")
    lists = [message.get(key) for message in messages if isinstance(message, dict) for key in ("content", "tool_calls")]
    count = len(messages) + sum(len(each) for each in (*lists, fields.get("tools")) if isinstance(each, list))
    if count > max_parts:
        raise InvalidChatRequestError(
            f"the request has {count} messages, parts of contents, tool calls and tools; this server takes at most "
            f"{max_parts}",
            "messages",
        )
    read = [
        read_message(message, index, allow_urls=allow_urls, developer_role=developer_role)
        for index, message in enumerate(messages)
    ]
    check_tool_results(read)
    return read


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise InvalidChatRequestError(f"tools is {short_repr(tools)}, not a list", "tools")
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise InvalidChatRequestError(f'{place} is not {{"type": "function", "function": {{...}}}}', place)
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidChatRequestError(f"{place} has no name", f"{place}.function.name")
        if _deeper_than(tool, _MAX_TOOL_DEPTH):
            raise InvalidChatRequestError(f"{place} is nested deeper than {_MAX_TOOL_DEPTH} levels", place)
    try:
        json.dumps(tools, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidChatRequestError("tools hold half of a surrogate pair", "tools") from None
    return tools or None


def _deeper_than(value: Any, depth: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_deeper_than(child, depth - 1) for child in children)


def _sampling(fields: Mapping[str, Any], defaults: SamplingParams, max_choices: int) -> SamplingParams:
    given = {name: fields[name] for name in ("n", "seed", "temperature", "top_k", "top_p") if name in fields}
    if given.get("top_k") == -1:
        given["top_k"] = 0  # vLLM's value for no limit
    limits = [fields[name] for name in ("max_completion_tokens", "max_tokens") if name in fields]
    if limits:
        given["max_tokens"] = limits[0]
    if "stop_token_ids" in fields:
        given["stop_token_ids"] = tuple(_typed(fields, "stop_token_ids", list, "a list of token ids"))
    extra = {
        name: fields[name] for name, neutral in _ENGINE_OPTIONS.items() if name in fields and fields[name] != neutral
    }
    sampling = replace(defaults, **given, extra={**defaults.extra, **extra})
    if sampling.n > max_choices:
        raise UnsupportedFieldError(f"n is {sampling.n}; this server takes at most {max_choices}", "n")
    return sampling


def _stop(stop: Any) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(strings, list) or not all(isinstance(one, str) and one for one in strings):
        raise InvalidChatRequestError(
            f"stop is {short_repr(stop)}, not a text or a list of texts that are not empty", "stop"
        )
    if not all(map(is_unicode, strings)):
        raise InvalidChatRequestError("stop holds half of a surrogate pair, which no text of the model has", "stop")
    if len(strings) > _MAX_STOPS:
        raise InvalidChatRequestError(f"stop has {len(strings)} strings; at most {_MAX_STOPS} are taken", "stop")
    if (longest := max(map(len, strings), default=0)) > _MAX_STOP_CHARACTERS:
        raise InvalidChatRequestError(
            f"stop has a string of {longest} characters; at most {_MAX_STOP_CHARACTERS} are taken", "stop"
        )
    return tuple(strings)
