"""The calls of one assistant turn, and the tool messages that answer them."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from renderers import Message, ParsedResponse, ParsedToolCall, ToolCallParseStatus
from renderers.media.reference import part_of_value
from renderers.messages import MEDIA_PART_TYPES, NOUNS, PART_TYPES, Content
from rollouts.calls import call_on_thread, gathered
from rollouts.environments.tools.tool import (
    FunctionCall,
    Tool,
    ToolArgumentsError,
    ToolFailedError,
    ToolResultError,
    ToolUnavailableError,
)
from rollouts.episodes.environment import resolve
from rollouts.episodes.errors import EpisodeLimitError
from rollouts.errors import EngineError, as_unicode, describe_exception, short_repr

_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})


def tool_content(tool: str, result: Any, *, max_characters: int, max_images: int) -> Content:
    """The content of the message that holds a tool's result.

    - Text is passed on.
    - A PIL image and a numpy array of uint8 (height, width) or (height, width, 1, 3 or 4) are an image part.
    - `{"array": samples, "sampling_rate": hertz}` is an audio part. A numpy array of samples alone is numbers.
    - Bytes are the file of an image, of a sound or of a video.
    - A list or tuple with one of these or a content part in it is a list of parts, one for each item.
    - Anything else is JSON: numbers, dicts, lists, dataclasses, pydantic models, dates, enums, arrays of numbers.

    Text of more than `max_characters` characters in all is cut off, and images, sounds and videos beyond `max_images`
    are left out; a text in the message says so. Raises `ToolResultError` for a value that cannot be written as JSON,
    for a text part whose `text` is no str, and for an array that has the shape of an image and not its dtype. Raises
    `ToolFailedError` for what the arguments of a call may lead to: an image without pixels, such as the part of a photo
    that lies beside it, a sound without samples, and an integer of so many digits that Python does not write it.
    """
    if not isinstance(result, (list, tuple)) or not any(map(_is_content, result)):
        if isinstance(result, str):
            return _cut(result, max_characters)
        result = [result]
    parts = [_part(tool, item) for item in result]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return _cut(parts[0]["text"], max_characters)
    return _bounded(parts, max_characters, max_images)  # type: ignore[return-value]  # checked by the renderer


async def tool_content_of(tool: str, result: Any, *, max_characters: int, max_images: int) -> Content:
    """`tool_content`, on a thread unless it is done at once: a list of a million numbers takes a while."""
    limits = {"max_characters": max_characters, "max_images": max_images}
    if isinstance(result, str | int | float | None) or part_of_value(result):
        return tool_content(tool, result, **limits)
    content: Content = await call_on_thread(functools.partial(tool_content, tool, result, **limits))
    return content


def _part(tool: str, item: Any) -> dict[str, Any]:
    if _is_part(item):
        if item["type"] == "text" and not isinstance(item["text"], str):
            raise ToolResultError(tool, f'returned a text part whose "text" is {short_repr(item["text"])}; pass a str')
        _check_not_empty(tool, item)
        return dict(item)
    if part := part_of_value(item):
        _check_not_empty(tool, part)
        return part
    text = item if isinstance(item, str) else _json(tool, item)
    return {"type": "text", "text": text}


def _is_content(item: Any) -> bool:
    """Whether an item makes its list a list of content parts."""
    return type(item) not in _PLAIN_TYPES and (_is_part(item) or part_of_value(item) is not None)


def _is_part(item: Any) -> bool:
    kind = item.get("type") if isinstance(item, Mapping) else None
    return isinstance(kind, str) and kind in PART_TYPES and kind in item


def _check_not_empty(tool: str, part: Mapping[str, Any]) -> None:
    """Raise `ToolFailedError` for an empty file, an image that is 0 pixels wide or high, and a sound of no samples."""
    kind, value = part["type"], part[part["type"]]
    if isinstance(value, (bytes, bytearray)) and not value:
        raise ToolFailedError(f"{tool} returned {NOUNS[MEDIA_PART_TYPES[kind]]} of 0 bytes")
    size: tuple[int, ...] = value.size[::-1] if isinstance(value, Image.Image) else getattr(value, "shape", ())[:2]
    if kind == "image" and len(size) == 2 and not all(size):
        raise ToolFailedError(f"{tool} returned an image of {size[1]}x{size[0]} pixels, which has nothing to see")
    samples = value.get("array") if isinstance(value, Mapping) else value
    if kind == "audio" and isinstance(samples, np.ndarray) and not samples.size:
        raise ToolFailedError(f"{tool} returned a sound of 0 samples, which has nothing to hear")


def _json(tool: str, value: Any) -> str:
    """A value as JSON. Raises `ToolResultError`, and `ToolFailedError` for an integer that Python does not write."""
    from pydantic_core import PydanticSerializationError

    if isinstance(value, np.ndarray) and value.ndim == 3 and value.shape[2] in (3, 4):
        raise ToolResultError(
            tool,
            f"returned an array {value.shape} of {value.dtype}; an image is uint8: whether other numbers run from 0 to "
            "1 or to 255 cannot be told. Scale it and cast it to numpy.uint8, or return a list",
        )
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain_value)
    except (PydanticSerializationError, RecursionError, ValueError, TypeError) as error:
        if isinstance(value, int):  # of more digits than `sys.get_int_max_str_digits()`
            reason = f"{tool} returned a number of {value.bit_length()} bits, which is too long to write"
            raise ToolFailedError(reason) from error
        raise ToolResultError(
            tool,
            f"returned a {type(value).__name__} that cannot be written as JSON ({describe_exception(error)}); return "
            "text, an image, a sound with its sampling rate, or plain data",
        ) from error


def _plain_value(value: Any) -> Any:
    """What `json` can write of an object that it does not know."""
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value, fallback=_plain_numbers)


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _cut(text: str, limit: int) -> str:
    text = as_unicode(text)
    return text if len(text) <= limit else f"{text[:limit]}\n[{len(text) - limit} more characters were left out]"


def _bounded(parts: Sequence[dict[str, Any]], max_characters: int, max_images: int) -> list[dict[str, Any]]:
    """The parts within the limits, and a last part that says what was left out."""
    kept: list[dict[str, Any]] = []
    characters = media = left_out = 0
    kinds_left_out: set[str] = set()
    for part in parts:
        if part["type"] != "text":
            media += 1
            if media <= max_images:
                kept.append(part)
            else:
                kinds_left_out.add(MEDIA_PART_TYPES[part["type"]])
            continue
        text = as_unicode(part["text"])
        room = max(max_characters - characters, 0)
        characters += len(text)
        left_out += max(len(text) - room, 0)
        if text[:room]:
            kept.append({**part, "text": text[:room]})
    notes = []
    if left_out:
        notes.append(f"{left_out} more characters were left out")
    if media > max_images:
        noun = "images" if kinds_left_out == {"image"} else "media"
        notes.append(f"{media - max_images} more {noun} were left out")
    return [*kept, {"type": "text", "text": f"\n[{'; '.join(notes)}]"}] if notes else kept


log = logging.getLogger("rollouts.environments.tools")

#: The text of an exception that a model gets is at most this long.
_MAX_ERROR_CHARACTERS = 500
#: The name in the answer of a call without one. Some templates print a tool message only with the name of its tool.
_UNNAMED = "invalid_call"

# Not the model's to read: a defect of the tool, and what ends the episode whoever calls the tool.
_NOT_ANSWERED = (ToolResultError, ToolUnavailableError, EpisodeLimitError, EngineError)


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """One call of a turn. `problem` says why it cannot be made, for the model; empty for a call that can.

    `is_surplus`: the call is well-formed, but not the first of a turn that can make one.
    """

    call_id: str
    name: str | None
    arguments: Any
    problem: str = ""
    is_surplus: bool = False


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of each call: its time in seconds, and the size of its result."""

    seconds: float
    max_characters: int
    max_images: int


def calls_of_message(assistant: Message) -> list[RequestedCall]:
    """The calls of an assistant message, which are all well-formed."""
    return [
        RequestedCall(call.get("id") or f"call_{index}", call["function"]["name"], call["function"]["arguments"])
        for index, call in enumerate(assistant.get("tool_calls", ()))
    ]


def calls_of_turn(assistant: Message, parsed: ParsedResponse) -> list[RequestedCall]:
    """The calls of a turn in the order in which the model wrote them, with those that are not calls of the message.

    Such a call has the id that the model wrote, else one of the form that the chat template expects.
    """
    well_formed = iter(calls_of_message(assistant))
    count = len(assistant.get("tool_calls", ()))
    calls: list[RequestedCall] = []
    for attempt in parsed.tool_calls:
        if attempt.status.is_well_formed and attempt.name is not None:
            calls.append(next(well_formed))
            continue
        new_id = parsed.call_id.replace("{name}", attempt.name or "").replace("{index}", str(count))
        call_id = attempt.id or new_id
        count += 1
        is_surplus = attempt.status is ToolCallParseStatus.SURPLUS_CALL
        calls.append(RequestedCall(call_id, attempt.name, attempt.arguments, _problem(attempt), is_surplus))
    return calls


def _problem(attempt: ParsedToolCall) -> str:
    """Why a call that is not one of the message was not made, for the model."""
    call = f"this call of {attempt.name}" if attempt.name else "this call"
    match attempt.status:
        case ToolCallParseStatus.INVALID_JSON:
            return f"the arguments of {call} are not valid JSON"
        case ToolCallParseStatus.UNCLOSED_BLOCK:
            return f"{call} has no end"
        case ToolCallParseStatus.MISSING_NAME:
            return f"{call} does not name a tool"
        case ToolCallParseStatus.SURPLUS_CALL:
            return f"{call} is not the first of its turn, and a turn can make one call"
        case _:
            return f"{call} does not have the form of a tool call"


async def answer_calls(
    calls: Sequence[RequestedCall], tools: Mapping[str, Tool], limits: CallLimits
) -> list[tuple[Message, dict[str, Any]]]:
    """Make all calls at the same time; the tool message of each call, in their order, and what is stored of it.

    The outcome is "ok", "malformed", "surplus", "unknown_tool", "invalid_arguments", "failed" or "timeout".

    Raises `ToolResultError`, `ToolUnavailableError`, and `EpisodeLimitError` and `EngineError` of tools that call the
    policy; whatever else goes wrong is answered.
    """
    return await gathered(_answer(call, tools, limits) for call in calls)


async def _answer(call: RequestedCall, tools: Mapping[str, Tool], limits: CallLimits) -> tuple[Message, dict[str, Any]]:
    outcome, content = await _outcome(call, tools, limits)
    name = call.name or _UNNAMED
    message: Message = {"role": "tool", "tool_call_id": call.call_id, "name": name, "content": content}
    return message, {"id": call.call_id, "name": call.name, "outcome": outcome}


async def _outcome(call: RequestedCall, tools: Mapping[str, Tool], limits: CallLimits) -> tuple[str, Any]:
    """The outcome of a call, and the content that answers it."""
    if call.problem or call.name is None:
        return "surplus" if call.is_surplus else "malformed", f"error: {call.problem}. The call was not made"
    tool = tools.get(call.name)
    if tool is None:
        return "unknown_tool", f"error: there is no tool {call.name!r}; the tools are {', '.join(tools)}"
    arguments = _decoded(call.arguments)
    if not isinstance(arguments, dict):
        return "malformed", f"error: the arguments of {call.name} are {short_repr(arguments)}, not a JSON object"
    seconds = limits.seconds if tool.timeout_seconds is None else tool.timeout_seconds
    deadline = asyncio.timeout(None)

    def begin(time: float) -> None:
        with suppress(RuntimeError):  # the call was cancelled meanwhile
            deadline.reschedule(time + seconds)

    try:
        async with deadline:
            result = await _result(tool, arguments, begin)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling() > 0:
            raise
        return "failed", "error: the tool waited for something that was cancelled"
    except (Exception, SystemExit) as error:  # noqa: BLE001  a tool may raise anything, and the model is told
        if deadline.expired():
            return "timeout", f"error: {call.name} had not ended after {seconds:g} seconds and was stopped"
        return _failure(call.name, error)
    try:
        return "ok", await tool_content_of(
            tool.name, result, max_characters=limits.max_characters, max_images=limits.max_images
        )
    except ToolFailedError as error:
        return _failure(call.name, error)


async def _result(tool: Tool, arguments: dict[str, Any], on_begin: Callable[[float], object]) -> Any:
    """What the tool returns. `on_begin` gets the time of the event loop from which the call's time counts."""
    if isinstance(tool.call, FunctionCall):
        return await tool.call.call(arguments, on_begin)
    on_begin(asyncio.get_running_loop().time())
    return await resolve(tool.call(arguments))


def _failure(name: str, error: Exception | SystemExit) -> tuple[str, str]:
    """The outcome and the text for an exception that a tool raised."""
    if isinstance(error, _NOT_ANSWERED):
        raise error
    if isinstance(error, ToolArgumentsError):
        return "invalid_arguments", f"error: {error}"
    if isinstance(error, ToolFailedError):
        text = error.reason
    else:
        text = describe_exception(error)
        log.info("tool %s raised %s, which the model is told", name, text, exc_info=error)
    shortened = text if len(text) <= _MAX_ERROR_CHARACTERS else f"{text[: _MAX_ERROR_CHARACTERS - 3]}..."
    return "failed", f"error: {shortened}"


def _decoded(arguments: Any) -> Any:
    """Arguments as a dict; some templates need them as JSON text in the message."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
