"""The form of OpenAI's chat completions: messages of a request, the answer in a response, refusals of long prompts."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from renderers import MediaSource, ParsedResponse, ParsedToolCall
from renderers.errors import MediaError, MessageError
from renderers.media.audio_decoding import audio_info, decode_audio
from renderers.media.policy import MediaPolicy
from renderers.media.samples import raw_samples, wav_bytes
from renderers.messages import AUDIO_PART_TYPES, VIDEO_PART_TYPES, as_chat_tool
from renderers.parsing.json_text import MAX_DEPTH, InvalidJsonError, is_deeper_than, parse_json
from renderers.parsing.response import ToolCallParseStatus as Status
from rollouts.engines.http.responses import excerpt
from rollouts.engines.http.source_files import SourceFile
from rollouts.engines.protocol import ChatAnswer, ChatTokens, FinishReason
from rollouts.engines.token_checks import float32_array, logprobs_error, token_ids_error
from rollouts.errors import (
    EngineError,
    GenerationInterruptedError,
    MalformedResultError,
    MissingLogProbsError,
    is_unicode,
    short_repr,
    validation_errors,
)

# Requests.

#: In a result whose images or other media are sent in a message of the user.
_MEDIA_FOLLOW: Final = "(The {media} of this result are in a message of the user below.)"

#: The data URL of a part with an image or a sound. Raises `MediaError`.
DataURL = Callable[[Mapping[str, Any]], str]
# Media types of sounds -> their `format` in the API.
_SOUND_FORMATS: Final[Mapping[str, str]] = {"audio/wav": "wav", "audio/mpeg": "mp3"}


def sent_messages(
    messages: Sequence[Mapping[str, Any]], data_url: DataURL, tool_images: Literal["tool", "user"]
) -> list[dict[str, Any]]:
    """Checked messages as OpenAI's API takes them. Raises `MessageError` and `MediaError`.

    A result of a call that is no call of the message before it, because it was malformed, becomes a message
    of the user, after the results of the other calls: servers refuse it otherwise. With `tool_images` "user",
    so do the media of results.
    """
    sent: list[dict[str, Any]] = []
    call_ids: set[str] = set()
    following: list[dict[str, Any]] = []  # what follows the results of a turn
    for index, message in enumerate(messages):
        one = _sent_message(message, index, data_url)
        if message["role"] != "tool":
            sent += following
            following = []
            call_ids = {call["id"] for call in one.get("tool_calls", ())}
        elif message.get("tool_call_id", "") not in call_ids:
            following.append({"role": "user", "content": one["content"]})
            continue
        elif tool_images == "user" and isinstance(one["content"], list):
            media = [part for part in one["content"] if part["type"] != "text"]
            if media:
                noun = "images" if all(part["type"] == "image_url" for part in media) else "media"
                texts = [part for part in one["content"] if part["type"] == "text"]
                one["content"] = [*texts, {"type": "text", "text": _MEDIA_FOLLOW.format(media=noun)}]
                call = {"type": "text", "text": f"{noun.capitalize()} of the result of call {one['tool_call_id']}:"}
                following.append({"role": "user", "content": [call, *media]})
        sent.append(one)
    return sent + following


def _sent_message(message: Mapping[str, Any], index: int, data_url: DataURL) -> dict[str, Any]:
    content = message.get("content", "")
    if isinstance(content, str):
        sent_content: Any = _text(content, index)
    else:
        sent_content = [_sent_part(part, index, number, data_url) for number, part in enumerate(content)]
    sent = {"role": message["role"], "content": sent_content}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key):
            sent[key] = _text(message[key], index)
    calls = [_sent_call(call, index, number) for number, call in enumerate(message.get("tool_calls", ()))]
    # Beside calls, no content is null, as servers answer it: the template of DeepSeek V3 drops calls beside
    # "".
    return {**sent, "content": sent_content or None, "tool_calls": calls} if calls else sent


def _sent_part(part: Mapping[str, Any], message_index: int, part_index: int, data_url: DataURL) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": _text(part["text"], message_index, part_index)}
    if part["type"] in VIDEO_PART_TYPES:
        raise MessageError(
            "chat endpoints have no common form for videos; pass some of its frames as images",
            message_index=message_index,
            part_index=part_index,
        )
    try:
        url = data_url(part)
    except MediaError as error:
        raise error.at(message_index, part_index) from error.__cause__
    if part["type"] in AUDIO_PART_TYPES:
        media_type, _, data = url.removeprefix("data:").partition(";base64,")
        return {"type": "input_audio", "input_audio": {"data": data, "format": _SOUND_FORMATS[media_type]}}
    given = part.get("image_url")
    detail = given.get("detail") if isinstance(given, Mapping) else part.get("detail")
    return {"type": "image_url", "image_url": {"url": url, **({"detail": detail} if detail else {})}}


def wav_or_mp3(source: MediaSource, policy: MediaPolicy) -> SourceFile:
    """A WAV or MP3 file as it is; an array as a WAV of its samples; another file as a WAV in mono at its own rate.

    Every sound is decoded first. Raises `MediaError`.
    """
    if source.raw_modality == "audio":
        return SourceFile(wav_bytes(*raw_samples(source)), "audio/wav")
    info = audio_info(source, policy)
    samples = decode_audio(source, policy, info.sampling_rate)
    if info.format in _SOUND_FORMATS:
        return SourceFile(source.data, info.format)
    return SourceFile(wav_bytes(samples, info.sampling_rate), "audio/wav")


def is_json(value: Any) -> bool:
    """Whether JSON can be written of a value, and UTF-8 of that."""
    try:
        return is_unicode(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return False


def _text(text: str, message_index: int, part_index: int | None = None) -> str:
    if not is_unicode(text):
        reason = f"half of a surrogate pair in {short_repr(text)}, which no request can carry; remove it"
        raise MessageError(reason, message_index=message_index, part_index=part_index)
    return text


def _sent_call(call: Mapping[str, Any], message_index: int, number: int) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        if not is_json(arguments):
            raise MessageError("arguments that cannot be written as JSON", message_index=message_index)
        arguments = json.dumps(arguments, ensure_ascii=False)
    sent = {"name": _text(function["name"], message_index), "arguments": _text(arguments, message_index)}
    return {"id": call.get("id") or f"call_{number}", "type": "function", "function": sent}


def sent_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked tools in OpenAI's form. Raises `MessageError` for what JSON cannot hold."""
    sent = [as_chat_tool(tool) for tool in tools]
    for index, tool in enumerate(sent):
        if not is_json(tool):
            raise MessageError(f"tools[{index}] cannot be written as JSON: {short_repr(tool)}")
    return sent


# Responses. Only what is read is checked: servers add fields of their own.


_FINISH_REASONS: Final = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}
#: A server ended the completion: vLLM, SGLang; DeepSeek.
_INTERRUPTED: Final = ("abort", "error", "insufficient_system_resource")


class _Read(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Function(_Read):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(_Read):
    id: str | None = None
    function: _Function | None = None


class _Part(_Read):
    """A part of a content, as some servers send it: text, or the thinking before it (Mistral)."""

    type: Literal["text", "thinking"]
    text: str = ""
    thinking: str | list[_Part] = ""

    def joined(self) -> str:
        if self.type == "text":
            return self.text
        return self.thinking if isinstance(self.thinking, str) else "".join(part.text for part in self.thinking)


class _Message(_Read):
    content: str | list[_Part] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(_Read):
    message: _Message
    finish_reason: str


#: A count beyond this is no count.
_MOST_TOKENS: Final = 2**40


class _Usage(_Read):
    prompt_tokens: int | None = Field(None, ge=0, le=_MOST_TOKENS)
    completion_tokens: int | None = Field(None, ge=0, le=_MOST_TOKENS)


class _Logprob(_Read):
    logprob: float


class _Logprobs(_Read):
    content: list[_Logprob]


_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _ChoiceOfTokens(_Read):
    token_ids: list[_Int64]
    logprobs: _Logprobs


class _Tokens(_Read):
    """What a response has in addition where token ids were requested."""

    prompt_token_ids: list[_Int64]
    choices: list[_ChoiceOfTokens]


class _Response(_Read):
    choices: list[_Choice] = Field(min_length=1, max_length=1)
    model: str | None = None
    usage: _Usage | None = None


def read_answer(
    request_id: str,
    content: bytes,
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    with_tokens: bool = False,
) -> ChatAnswer:
    """The answer in the body of a response.

    Raises `GenerationInterruptedError`, `MalformedResultError`, and `EngineError` where a filter withheld it.
    """
    try:
        response = _Response.model_validate_json(content)
    except ValidationError as error:
        first = validation_errors(error)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        body = short_repr(excerpt(content), 300)
        reason = f"this is no chat completion: {place}: {first['msg']}: {body}"
        raise MalformedResultError(request_id, reason) from None
    (choice,) = response.choices
    if choice.finish_reason in _INTERRUPTED:
        raise GenerationInterruptedError(request_id, f"the server ended the completion: {choice.finish_reason!r}")
    if choice.finish_reason == "content_filter":
        raise EngineError(
            request_id,
            "the content filter of the server withheld the completion (finish_reason content_filter); "
            "change the messages, or leave the task out",
        )
    finish_reason = _FINISH_REASONS.get(choice.finish_reason)
    if finish_reason is None:
        known = ", ".join((*_FINISH_REASONS, *_INTERRUPTED, "content_filter"))
        raise MalformedResultError(
            request_id, f"finish_reason is {short_repr(choice.finish_reason)}; this client knows {known}"
        )
    usage = response.usage or _Usage(prompt_tokens=None, completion_tokens=None)
    parsed = _parsed(choice.message, finish_reason, tools)
    tokens, counts = None, (usage.prompt_tokens, usage.completion_tokens)
    if with_tokens:
        tokens = _tokens(request_id, content)
        sent = len(tokens.prompt_ids), len(tokens.token_ids)
        for name, told, count in zip(("prompt_tokens", "completion_tokens"), counts, sent, strict=True):
            if told not in (None, count):
                raise MalformedResultError(request_id, f"usage.{name} is {told}, and the answer has {count} ids")
        counts = sent
    return ChatAnswer(parsed.to_message(), parsed, finish_reason, *counts, response.model, tokens)


def _tokens(request_id: str, content: bytes) -> ChatTokens:
    """Raises `MalformedResultError` and `MissingLogProbsError`."""
    try:
        response = _Tokens.model_validate_json(content)
    except ValidationError as error:
        first = validation_errors(error)[0]
        raise MalformedResultError(
            request_id,
            f"return_token_ids is set, and {'.'.join(map(str, first['loc']))} of the answer: "
            f"{first['msg']}. vLLM and the gateway of this project return token ids; leave return_token_ids "
            "out for other servers",
        ) from None
    choice = response.choices[0]
    ids = [np.array(values, np.int64) for values in (response.prompt_token_ids, choice.token_ids)]
    logprobs = float32_array([each.logprob for each in choice.logprobs.content])
    for name, values in zip(("prompt_token_ids", "token_ids"), ids, strict=True):
        if (wrong := token_ids_error(values) or (None if len(values) else "no token")) is not None:
            raise MalformedResultError(request_id, f"{name} of the answer: {wrong}")
    if (wrong := logprobs_error(logprobs, len(ids[1]))) is not None:
        raise MissingLogProbsError(request_id, f"logprobs of the answer: {wrong}")
    return ChatTokens(ids[0].astype(np.int32), ids[1].astype(np.int32), logprobs)


def _parsed(message: _Message, reason: FinishReason, tools: Sequence[Mapping[str, Any]] | None) -> ParsedResponse:
    offered = {tool.get("function", tool).get("name") for tool in tools or ()}
    calls = message.tool_calls or ()
    # A refusal is what the model wrote; OpenAI puts it beside an empty content.
    content, thinking = message.content, ""
    if isinstance(content, list):
        thinking = "".join(part.joined() for part in content if part.type == "thinking")
        content = "".join(part.joined() for part in content if part.type == "text")
    content = content or message.refusal or ""
    reasoning = message.reasoning_content or message.reasoning or thinking or None
    stopped = reason is FinishReason.STOP
    taken = {call.id for call in calls}
    free = (f"call_{number}" for number in itertools.count() if f"call_{number}" not in taken)
    return ParsedResponse(
        content,
        reasoning,
        [_parsed_call(call.id or next(free), call.function or _Function(), offered) for call in calls],
        reasoning_complete=stopped or not reasoning or bool(content or calls),
        stopped=stopped,
    )


def _parsed_call(call_id: str | None, function: _Function, offered: Collection[str | None]) -> ParsedToolCall:
    """A call with the status that the parsers of this project give; `raw` is its JSON."""
    name, given = function.name or None, function.arguments
    arguments: Any = given
    status = Status.OK if name in offered or not offered else Status.UNKNOWN_TOOL
    if name is None:
        status, arguments = Status.MISSING_NAME, None
    elif isinstance(given, str) and given.strip():
        try:
            arguments = parse_json(given)
        except InvalidJsonError:
            status = Status.INVALID_JSON
    elif given and not is_json(given):
        status, arguments = Status.INVALID_JSON, None
    elif not given:  # some servers send an empty text for a call without arguments
        arguments = {}
    if status.is_well_formed and (not isinstance(arguments, dict) or is_deeper_than(arguments, MAX_DEPTH)):
        status, arguments = Status.MALFORMED_STRUCTURE, None
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    raw = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {text}}}'
    return ParsedToolCall(raw, name, arguments, status=status, id=call_id or None)


# Whether a server refuses a request because it does not fit into the context, by its message.


_OVERFLOW_CODES: Final = ("context_length_exceeded", "exceed_context_size_error")  # OpenAI and this project; llama.cpp
_OVERFLOW = re.compile(r"(?i)context (length|size|window)|leaves no room within the model|max_model_len=\d")
# A number is of at most 15 digits: more are no length, and a search must not begin at each of them.
_LIMIT = re.compile(
    r"(?i)(?:context length (?:is|of|\()\s*(?:only )?|limit of |within the model's |size \(|max_model_len=)"
    r"(\d{1,15})(?!\d)"
)
#: "at least": vLLM has not counted the whole prompt; what this project has counted of one is more than the
#: limit.
_PROMPT = re.compile(
    r"(?i)(?<!at least )\b(\d{1,15}) input tokens|\b(\d{1,15}) in the messages|resulted in (\d{1,15}) tokens"
    r"|prompt of (\d{1,15}) tokens|\b(\d{1,15}) tokens from the input|input \((\d{1,15}) tokens"
    r"|prompt length \((?:at least )?(\d{1,15})\)"
)


def error_code(body: bytes) -> str | None:
    """The code of OpenAI's error in a body, else its type."""
    try:
        error = json.loads(body)["error"]
        code = error.get("code") or error.get("type")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return code if isinstance(code, str) else None


def overflow_in(status: int, code: str | None, message: str) -> tuple[int | None, int | None] | None:
    """The length of prompt and context in tokens (None: not said) in an error of a server; None for another error."""
    if status != 400 or not (code in _OVERFLOW_CODES or _OVERFLOW.search(message)):
        return None

    def number(pattern: re.Pattern[str]) -> int | None:
        match = pattern.search(message)
        return None if match is None or match.lastindex is None else int(match[match.lastindex])

    return number(_PROMPT), number(_LIMIT)
