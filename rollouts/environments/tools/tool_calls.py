"""The calls of a turn: made at the same time, each answered in its place."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from renderers import Message, ParsedResponse, ParsedToolCall, ToolCallParseStatus
from rollouts.calls import gathered
from rollouts.environments.tools.errors import (
    ToolArgumentsError,
    ToolFailedError,
    ToolResultError,
    ToolUnavailableError,
)
from rollouts.environments.tools.tool import FunctionCall, Tool
from rollouts.environments.tools.tool_content import tool_content_of
from rollouts.episodes.environment import resolve
from rollouts.episodes.errors import EpisodeLimitError
from rollouts.errors import EngineError, describe_exception, short_repr

log = logging.getLogger("rollouts.environments.tools")

#: The text of an exception that a model gets is at most this long.
_MAX_ERROR_CHARACTERS = 500


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
        calls.append(RequestedCall(call_id, attempt.name, attempt.arguments, _why_not_made(attempt), is_surplus))
    return calls


def _why_not_made(attempt: ParsedToolCall) -> str:
    """Why an attempt that is no call of its message was not made: a clause that the model is told."""
    call = f"this call of {attempt.name}" if attempt.name else "this call"
    problems = {
        ToolCallParseStatus.INVALID_JSON: f"the arguments of {call} are not valid JSON",
        ToolCallParseStatus.UNCLOSED_BLOCK: f"{call} has no end",
        ToolCallParseStatus.MISSING_NAME: f"{call} does not name a tool",
        ToolCallParseStatus.SURPLUS_CALL: f"{call} is not the first of its turn, and a turn can make one call",
    }
    return problems.get(attempt.status, f"{call} does not have the form of a tool call")


async def answer_calls(
    calls: Sequence[RequestedCall], tools: Mapping[str, Tool], limits: CallLimits
) -> list[tuple[Message, dict[str, Any]]]:
    """Make all calls at the same time; the tool message of each call, in their order, and what is stored of it.

    The outcome is "ok", "malformed", "surplus", "unknown_tool", "invalid_arguments", "failed" or "timeout".

    Raises `ToolResultError`, `ToolUnavailableError`, and `EpisodeLimitError` and `EngineError` of tools that
    call the policy; whatever else goes wrong is answered.
    """
    outcomes = await gathered(_outcome(call, tools, limits) for call in calls)
    return [
        (
            # Some templates print a tool message only with the name of its tool.
            {"role": "tool", "tool_call_id": call.call_id, "name": call.name or "invalid_call", "content": content},
            {"id": call.call_id, "name": call.name, "outcome": outcome},
        )
        for call, (outcome, content) in zip(calls, outcomes, strict=True)
    ]


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
        return await tool.call(arguments, on_begin)
    on_begin(asyncio.get_running_loop().time())
    return await resolve(tool.call(arguments))


def _failure(name: str, error: Exception | SystemExit) -> tuple[str, str]:
    """The outcome and the text for an exception that a tool raised."""
    # Not the model's to read: a defect of the tool, and what ends the episode whoever calls the tool.
    if isinstance(error, ToolResultError | ToolUnavailableError | EpisodeLimitError | EngineError):
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
    except (ValueError, RecursionError):
        return arguments
