"""The body of a chat-completions request: every field is honoured, is known to have no effect, or is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rollouts.engines.protocol import SamplingParams
from rollouts.errors import short_repr
from rollouts.serve.bodies import invalid_body, json_object, unknown_field
from rollouts.serve.errors import invalid_field, unsupported_field
from rollouts.serve.gateway.chat_messages import check_tool_results, read_message
from rollouts.values import check_integer, check_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Upper bounds.

    - `max_body_bytes`: of the body of a request, media in base64 included.
    - `max_parts`: messages of a request, parts of their contents, tool calls and tools, together.
    - `max_field_bytes`: of each field that a session keeps: `group_id`, `error`, `metrics`, and the `info` of a reward.
    - `body_seconds`: until the body of a request has arrived.
    - `request_seconds`: until a completion is finished; then it is aborted, with HTTP 504.
    - `max_choices`: `n` of a request.
    - `max_sessions`: sessions at a time; further ones are refused with HTTP 503.
    - `max_bytes`: of all sessions together, as estimated from all that they keep: tokens, messages, tools, images, the
      prompts of their last turns, and the fields above; further sessions, completions and infos are refused with HTTP
      503.
    - `idle_seconds`: a session without a request for so long is evicted.

    Raises `ArgumentError` for counts that are not integers from 1, and for seconds that are not above 0.
    """

    max_body_bytes: int = 64 * 2**20
    max_parts: int = 10_000
    max_field_bytes: int = 2**20
    body_seconds: float = 60.0
    request_seconds: float = 1800.0
    max_choices: int = 128
    max_sessions: int = 16384
    max_bytes: int = 4 * 2**30
    idle_seconds: float = 3600.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name.endswith("_seconds"):
                check_positive(one.name, value, "pass a number of seconds above 0")
            else:
                check_integer(one.name, value)


def kept_bytes(*values: object) -> int:
    """The memory that texts, numbers, lists and dicts take, with all that they hold."""
    total, remaining = 0, list(values)
    while remaining:
        value = remaining.pop()
        total += sys.getsizeof(value)
        if isinstance(value, Mapping):
            remaining += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            remaining += value
    return total


# When messages of a request are those of a recorded conversation: equality by a digest of each prefix.
#
# Clients do not send back messages as they received them: they drop the reasoning, write the arguments of tool calls
# again, send missing content as null or an empty text, and text as one part or several. None of that is a change. The
# digest of a prefix covers what is left: role, text, images, names, tool calls without their ids, ids of tool results.
#
# Two things are compared where the client sends them, and are ignored where it does not: reasoning, and the ids of tool
# calls (`rollouts.serve.gateway.session` compares both).


_DIGEST_BYTES: Final = 16


class History:
    """The conversation of a request: its checked messages, and a digest for each prefix. `tools` are part of it.

    `digests[k]` is that of the tools and the first k messages.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> None:
        self.messages = messages
        self.digests = [_digest(json.dumps(tools or None, sort_keys=True).encode())]
        for message in messages:
            self.digests.append(extended_digest(self.digests[-1], message))

    @cached_property
    def turn_ends(self) -> list[int]:
        """The lengths of the prefixes that end with an assistant message, the longest first."""
        ends = [end for end, message in enumerate(self.messages, 1) if message["role"] == "assistant"]
        return ends[::-1]

    def call_ids(self) -> Iterator[str]:
        """The ids of the tool calls in the messages, the last message first."""
        for end in self.turn_ends:
            for call in self.messages[end - 1].get("tool_calls") or ():
                if "id" in call:
                    yield call["id"]


def extended_digest(digest: bytes, message: Mapping[str, Any]) -> bytes:
    """The digest of a conversation with one more message."""
    return _digest(digest + _identity(message))


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """The reasoning of a message without white space around it; None where it has none."""
    return (message.get("reasoning_content") or "").strip() or None


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _identity(message: Mapping[str, Any]) -> bytes:
    """What must be equal for two messages to be the same."""
    role, content = message["role"], message.get("content")
    parts: Any = content if isinstance(content, str) else _joined_parts(content or ())
    if role != "assistant":
        return repr((role, parts, message.get("name"), message.get("tool_call_id"))).encode("utf-8", "surrogatepass")
    # Some clients remove white space around what the model wrote, and some add the name of the agent.
    if isinstance(parts, str):
        parts = parts.strip()
    calls = [
        (call["function"]["name"], _argument_identity(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return repr((role, parts, calls)).encode("utf-8", "surrogatepass")


def _joined_parts(content: Sequence[Mapping[str, Any]]) -> Any:
    """Text for parts of text alone; otherwise texts, adjacent ones joined, and (modality, digest) of media."""
    joined: list[Any] = []
    for part in content:
        if part["type"] != "text":
            joined.append((part["type"], _digest(part[part["type"]].encode("utf-8", "surrogatepass"))))
        elif joined and isinstance(joined[-1], str):
            joined[-1] += part["text"]
        else:
            joined.append(part["text"])
    if not joined:
        return ""
    return joined[0] if len(joined) == 1 and isinstance(joined[0], str) else joined


def _argument_identity(arguments: str | Mapping[str, Any]) -> str:
    """A text that is equal for arguments of equal value, whatever the order of their keys."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return repr(_without_order(value))
    except (ValueError, RecursionError):  # no JSON
        return str(arguments).strip()


def _without_order(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_order(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_without_order(one) for one in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)  # JavaScript writes 1.0 as 1
    return value


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
    "verbosity": _Only((), "ask for it in the messages"),
    "web_search_options": _Only((), "the server fetches nothing"),
}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

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


# The text before the end of a stop string is searched with each token.
_StopString = Annotated[str, Field(min_length=1, max_length=1024)]


class _ChatBody(BaseModel):
    """The fields that are read. Messages are read by `read_message`, sampling options by `SamplingParams`."""

    model_config = ConfigDict(strict=True, extra="allow")

    # A bound on the length also refuses half of a surrogate pair, which no response could hold.
    model: Annotated[str, Field(max_length=1024)] | None = None
    messages: list[Any] = Field(min_length=1)
    tools: list[_Tool] = []
    stop: Annotated[list[_StopString], Field(max_length=64), BeforeValidator(_as_list)] = []
    stop_token_ids: list[Any] = []
    max_completion_tokens: Any = None
    max_tokens: Any = None
    n: Any = None
    seed: Any = None
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    logprobs: bool = False
    # OpenAI's limit, and vLLM's default.
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    return_token_ids: bool = False
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()


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
    top_logprobs: int
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

    Raises `RequestError`; `InvalidRequestError` for sampling options out of range.
    """
    fields = {name: value for name, value in json_object(body).items() if value is not None}
    try:
        read = _ChatBody.model_validate(fields)
    except ValidationError as error:
        raise invalid_body(error) from None
    _check_fields(read.model_extra or {})
    if read.stream_options.continuous_usage_stats:
        reason = "the number of tokens is in the last chunk alone; send false, and include_usage"
        raise unsupported_field(f"stream_options.continuous_usage_stats true: {reason}", "stream_options")
    if read.top_logprobs and not read.logprobs:
        raise invalid_field("top_logprobs are alternatives in logprobs; send logprobs true, too", "top_logprobs")
    calls_tools = fields.get("tool_choice", "auto") == "auto"
    # Without the tools in the prompt the model does not know of them.
    tools = (_tools(fields.get("tools", [])) or None) if calls_tools else None
    return ChatRequest(
        model=read.model,
        history=History(_messages(fields, allow_urls, max_parts, developer_role), tools),
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
        if name in _WITHOUT_EFFECT or name in _ENGINE_OPTIONS:
            continue
        constraint = _CONSTRAINED.get(name)
        if constraint is None:
            raise unknown_field(name)
        # 1 == True in Python.
        if not any(value == allowed and type(value) is type(allowed) for allowed in constraint.allowed):
            allowed = " or ".join(map(json.dumps, constraint.allowed))
            cure = f"send {allowed}, or leave it out" if allowed else "leave it out"
            raise unsupported_field(f"{name} {short_repr(value)}: {constraint.reason}; {cure}", name)


def _messages(fields: Mapping[str, Any], allow_urls: bool, max_parts: int, developer_role: str) -> list[dict[str, Any]]:
    messages = fields["messages"]
    lists = [message.get(key) for message in messages if isinstance(message, dict) for key in ("content", "tool_calls")]
    count = len(messages) + sum(len(each) for each in (*lists, fields.get("tools")) if isinstance(each, list))
    if count > max_parts:
        raise invalid_field(
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


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for index, tool in enumerate(tools):
        if _deeper_than(tool, _MAX_TOOL_DEPTH):
            raise invalid_field(f"tools[{index}] is nested deeper than {_MAX_TOOL_DEPTH} levels", f"tools[{index}]")
    try:
        json.dumps(tools, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise invalid_field("tools hold half of a surrogate pair", "tools") from None
    return tools


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
        given["stop_token_ids"] = tuple(fields["stop_token_ids"])
    extra = {
        name: fields[name] for name, neutral in _ENGINE_OPTIONS.items() if name in fields and fields[name] != neutral
    }
    given["top_logprobs"] = max(defaults.top_logprobs, fields.get("top_logprobs", 0))
    sampling = replace(defaults, **given, extra={**defaults.extra, **extra})
    if sampling.n > max_choices:
        raise unsupported_field(f"n is {sampling.n}; this server takes at most {max_choices}", "n")
    return sampling
