"""What an environment is, and the one place where its methods are called and what they return is checked."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from renderers import Message
from renderers.errors import MessageError
from renderers.messages import check_messages, check_tools, without_media
from rollouts.error_texts import shortened
from rollouts.errors import EnvironmentFailedError, EnvironmentProtocolError
from rollouts.user_code.calls import failures_as
from transport import EncodeError
from transport.wire.codec import check_encodable


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment returns for an assistant turn: new messages, the reward of this turn, whether it is over.

    `reward` is a finite number; `info` is kept with the turn and may hold whatever `transport.encode` takes.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One episode at a time: `reset`, then `step` until done. Either method may be `async`.

    Synchronous methods are called on the event loop, which keeps episodes reproducible; wrap an environment that
    computes or waits for long in `ThreadedEnvironment`. An environment may have an attribute or property `tools` (a
    list of `ToolSpec`); it is read once, after `reset`.
    """

    def reset(self, seed: int) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Start an episode that depends on nothing but `seed`; return the opening messages."""
        ...

    def step(self, assistant: Message) -> StepResult | Awaitable[StepResult]:
        """React to an assistant turn."""
        ...


class ThreadedEnvironment:
    """The same environment with its synchronous methods run in a worker thread, so that they block nobody."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    @property
    def tools(self) -> Any:
        return _declared_tools(self._environment)

    async def reset(self, seed: int) -> Sequence[Message]:
        messages: Sequence[Message] = await _resolve(await asyncio.to_thread(_call, self._environment.reset, seed))
        return messages

    async def step(self, assistant: Message) -> StepResult:
        result: StepResult = await _resolve(await asyncio.to_thread(_call, self._environment.step, assistant))
        return result


def made_environment(make: Callable[[], Environment]) -> Environment:
    """Call `make`. Raises `EnvironmentFailedError`."""
    with failures_as(lambda error: EnvironmentFailedError("", "make_environment", error)):
        return make()


async def reset_environment(environment: Environment, seed: int) -> list[Message]:
    """Call `reset` and check what it returns. Raises `EnvironmentFailedError` and `EnvironmentProtocolError`."""
    name = type(environment).__name__
    with failures_as(lambda error: EnvironmentFailedError(name, "reset", error), passing=(EnvironmentProtocolError,)):
        messages = await _resolve(environment.reset(seed))
        kept = _messages(messages, f"{name}.reset")
    if not kept:
        raise EnvironmentProtocolError(f"{name}.reset returned no messages; return the opening messages")
    return kept


def tools_of(environment: Environment) -> Any:
    """The tools of an environment, or None. Raises `EnvironmentFailedError`, and `MessageError` for what are none."""
    with failures_as(lambda error: EnvironmentFailedError(type(environment).__name__, "tools", error)):
        tools = _declared_tools(environment)
    check_tools(tools)
    return tools


async def step_environment(environment: Environment, assistant: Message) -> StepResult:
    """Call `step` and check what it returns, but for reward and info, which `Trajectory.record_reward` checks.

    Raises `EnvironmentFailedError` and `EnvironmentProtocolError`.
    """
    name = type(environment).__name__
    with failures_as(lambda error: EnvironmentFailedError(name, "step", error), passing=(EnvironmentProtocolError,)):
        result = await _resolve(environment.step(assistant))
        if not isinstance(result, StepResult):
            raise EnvironmentProtocolError(f"{name}.step returned {type(result).__name__}, not a StepResult")
        if not isinstance(result.done, bool | np.bool_):
            raise EnvironmentProtocolError(
                f"{name}.step returned done={shortened(result.done)}, which is neither True nor False"
            )
        # Read once: a subclass may compute its fields.
        checked = StepResult(_messages(result.messages, f"{name}.step"), result.reward, bool(result.done), result.info)
    if not checked.done and not checked.messages:
        raise EnvironmentProtocolError(
            f"{name}.step is not done but has nothing to say: the model would be asked to continue its own turn. "
            "Return messages, or done=True"
        )
    return checked


def _messages(messages: Any, where: str) -> list[Message]:
    """The messages as a list. What is inside them the renderer checks, but for whether it can be stored."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise EnvironmentProtocolError(f"{where} returned {type(messages).__name__}, not a list of messages")
    kept = list(messages)
    for index, message in enumerate(kept):
        if not isinstance(message, Mapping):
            raise EnvironmentProtocolError(f"{where}: message {index} is a {type(message).__name__}, not a dict")
    try:
        # The media are stored as the sources that the renderer makes of them.
        check_encodable(without_media(check_messages(kept)), f"{where}: messages")
    except MessageError as error:
        raise EnvironmentProtocolError(f"{where}: {error}") from error
    except EncodeError as error:
        raise EnvironmentProtocolError(f"cannot be stored: {error}") from error
    return kept


def _declared_tools(environment: Any) -> Any:
    """The attribute `tools`, None where there is none; an AttributeError from within a property is raised."""
    try:
        return environment.tools
    except AttributeError:
        if inspect.getattr_static(environment, "tools", None) is not None:
            raise
        return None


def _call(method: Callable[[Any], Any], argument: Any) -> Any:
    """For a thread: `asyncio` cannot hand a StopIteration over to a coroutine, which would wait for ever."""
    try:
        return method(argument)
    except StopIteration as error:
        raise RuntimeError("the method raised StopIteration") from error


async def _resolve(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
