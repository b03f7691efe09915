"""Calls of an environment's methods, with checks of the values that they return."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from renderers import Message
from renderers.errors import MessageError
from renderers.messages import check_messages, check_tools, without_media
from rollouts.episodes.environment import Environment, StepResult, declared_tools, resolve
from rollouts.episodes.errors import EnvironmentFailedError, EnvironmentProtocolError, wrap_exceptions
from rollouts.error_texts import short_repr
from transport import EncodeError
from transport.wire.codec import check_encodable


async def make_environment(factory: Callable[[], Environment | Awaitable[Environment]]) -> Environment:
    """Call `factory`, and await what it returns if it is awaitable. Raises `EnvironmentFailedError`."""
    with wrap_exceptions(lambda error: EnvironmentFailedError("", "make_environment", error)):
        environment: Environment = await resolve(factory())
        return environment


async def reset_environment(environment: Environment, seed: int) -> list[Message]:
    """Call `reset` and check the messages. Raises `EnvironmentFailedError` and `EnvironmentProtocolError`."""
    name = type(environment).__name__
    with wrap_exceptions(
        lambda error: EnvironmentFailedError(name, "reset", error), unchanged=(EnvironmentProtocolError,)
    ):
        messages = _checked_messages(await resolve(environment.reset(seed)), f"{name}.reset")
    if not messages:
        raise EnvironmentProtocolError(f"{name}.reset returned no messages; return the first messages")
    return messages


def environment_tools(environment: Environment) -> Any:
    """The tools of an environment, or None. Raises `EnvironmentFailedError` and `EnvironmentProtocolError`."""
    name = type(environment).__name__
    with wrap_exceptions(lambda error: EnvironmentFailedError(name, "tools", error)):
        tools = declared_tools(environment)
    try:
        check_tools(tools)
    except MessageError as error:
        raise EnvironmentProtocolError(f"{name}.tools: {error}") from error
    return tools


async def step_environment(environment: Environment, assistant: Message) -> StepResult:
    """Call `step` and check its result, except for reward and info, which `Trajectory.record_reward` checks.

    Raises `EnvironmentFailedError` and `EnvironmentProtocolError`.
    """
    name = type(environment).__name__
    with wrap_exceptions(
        lambda error: EnvironmentFailedError(name, "step", error), unchanged=(EnvironmentProtocolError,)
    ):
        result = await resolve(environment.step(assistant))
        if not isinstance(result, StepResult):
            raise EnvironmentProtocolError(
                f"{name}.step returned {type(result).__name__}, not a StepResult; return "
                "StepResult(messages, reward, done, info)"
            )
        if not isinstance(result.done, bool | np.bool_):
            raise EnvironmentProtocolError(
                f"{name}.step returned done={short_repr(result.done)}, which is neither True nor False"
            )
        # Each field is read once: a subclass may compute it.
        messages = _checked_messages(result.messages, f"{name}.step")
        checked = StepResult(messages, result.reward, bool(result.done), result.info)
    if not checked.done and not checked.messages:
        raise EnvironmentProtocolError(
            f"{name}.step returned no messages and is not done: the model would have to continue its own turn. "
            "Return messages, or done=True"
        )
    return checked


def _checked_messages(messages: Any, method: str) -> list[Message]:
    """The messages as a list that can be stored. The renderer checks the contents of the messages."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise EnvironmentProtocolError(f"{method} returned {type(messages).__name__}, not a list of messages")
    listed = list(messages)
    for index, message in enumerate(listed):
        if not isinstance(message, Mapping):
            raise EnvironmentProtocolError(f"{method}: message {index} is a {type(message).__name__}, not a dict")
    try:
        # Media are stored as the sources that the renderer makes of them.
        check_encodable(without_media(check_messages(listed)), f"{method}: messages")
    except MessageError as error:
        raise EnvironmentProtocolError(f"{method}: {error}") from error
    except EncodeError as error:
        raise EnvironmentProtocolError(f"cannot be stored: {error}") from error
    return listed
