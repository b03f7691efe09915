"""Calls of an environment's methods, with checks of the values that they return."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from renderers import Message, ParsedResponse
from renderers.errors import MessageError
from renderers.messages import check_messages, check_tools, without_media
from rollouts.episodes.environment import (
    Environment,
    StepResult,
    call_step,
    declared_tools,
    environment_name,
    resolve,
)
from rollouts.episodes.errors import (
    EnvironmentFailedError,
    EnvironmentProtocolError,
    EpisodeArgumentError,
    EpisodeLimitError,
    ends_task,
    wrap_exceptions,
)
from rollouts.error_texts import is_unicode, short_repr
from transport import EncodeError
from transport.wire.codec import check_encodable

log = logging.getLogger("rollouts")

#: Makes the environment of an episode.
EnvironmentFactory = Callable[[], Environment | Awaitable[Environment]]

#: How long an episode waits for the `close` of its environment. A cancelled run ends within a few seconds.
CLOSE_SECONDS = 2.0

# Raised on the way through `reset` or `step`, and no failure of the environment: the second is one of the episode.
_UNCHANGED = (EnvironmentProtocolError, EpisodeLimitError)


def check_environment(environment: object) -> None:
    """Raises `EpisodeArgumentError` for what is not an environment, a class of environments included."""
    methods = (getattr(environment, name, None) for name in ("reset", "step"))
    if isinstance(environment, type) or not all(map(callable, methods)):
        rule = "pass an instance of a class that has reset and step"
        raise EpisodeArgumentError("environment", environment, rule)


async def make_environment(factory: EnvironmentFactory) -> Environment:
    """Call `factory`, and await what it returns if it is awaitable.

    Raises `EnvironmentFailedError`, and `EnvironmentProtocolError` for what is no environment.
    """
    with wrap_exceptions(lambda error: EnvironmentFailedError("", "make_environment", error)):
        environment: Environment = await resolve(factory())
    if isinstance(environment, type):
        name = environment.__name__
        raise EnvironmentProtocolError(f"make_environment returned the class {name}; return an instance: {name}(...)")
    steps = callable(getattr(environment, "step", None)) or callable(getattr(environment, "step_parsed", None))
    if not steps or not callable(getattr(environment, "reset", None)):
        rule = "return an instance of a class that has reset and step"
        raise EnvironmentProtocolError(f"make_environment returned {short_repr(environment)}; {rule}")
    return environment


async def attach_context(environment: Environment, context: object) -> None:
    """Call `attach` of an environment that has it. Raises `EnvironmentFailedError`."""
    attach = getattr(environment, "attach", None)
    if callable(attach):
        name = environment_name(environment)
        with wrap_exceptions(lambda error: EnvironmentFailedError(name, "attach", error)):
            await resolve(attach(context))


async def reset_environment(environment: Environment, seed: int) -> list[Message]:
    """Call `reset` and check the messages. Raises `EnvironmentFailedError` and `EnvironmentProtocolError`."""
    try:
        messages = _checked_messages(await resolve(environment.reset(seed)), environment, "reset")
    except BaseException as error:  # noqa: BLE001  raised below
        _raise_environment_error(error, environment, "reset")
    if not messages:
        name = environment_name(environment)
        raise EnvironmentProtocolError(f"{name}.reset returned no messages; return the first messages")
    return messages


def environment_tools(environment: Environment) -> Any:
    """The tools of an environment, or None. Raises `EnvironmentFailedError` and `EnvironmentProtocolError`."""
    name = environment_name(environment)
    with wrap_exceptions(lambda error: EnvironmentFailedError(name, "tools", error)):
        tools = declared_tools(environment)
    try:
        check_tools(tools)
    except MessageError as error:
        raise EnvironmentProtocolError(f"{name}.tools: {error}") from error
    return tools


class CheckedStep(NamedTuple):
    """The values of a `StepResult`: valid, but for reward and info, which `Trajectory.record_reward` checks."""

    messages: list[Message]
    reward: float
    done: bool
    info: Mapping[str, Any]
    truncation_reason: str


async def step_environment(environment: Environment, assistant: Message, parsed: ParsedResponse) -> CheckedStep:
    """Call `step` or `step_parsed` and check its result.

    Raises `EnvironmentFailedError` and `EnvironmentProtocolError`.
    """
    try:
        result = call_step(environment, assistant, parsed)
        if type(result) is not StepResult:
            result = await resolve(result)
        return _checked_step(result, environment)
    except BaseException as error:  # noqa: BLE001  raised below
        _raise_environment_error(error, environment, "step")


def _checked_step(result: Any, environment: Environment) -> CheckedStep:
    if not isinstance(result, StepResult):
        raise EnvironmentProtocolError(
            f"{environment_name(environment)}.step returned {type(result).__name__}, not a StepResult; return "
            "StepResult(messages, reward, done, info)"
        )
    done = result.done
    if type(done) is not bool and not isinstance(done, np.bool_):
        raise EnvironmentProtocolError(
            f"{environment_name(environment)}.step returned done={short_repr(done)}, which is neither True nor False"
        )
    # Each field is read once: a subclass may compute it.
    messages = _checked_messages(result.messages, environment, "step")
    reason = result.truncation_reason
    if not isinstance(reason, str) or not is_unicode(reason) or (reason and not done):
        raise EnvironmentProtocolError(
            f"{environment_name(environment)}.step returned truncation_reason={short_repr(reason)} with "
            f"done={done}; return text, and done=True"
        )
    if not done and not messages:
        raise EnvironmentProtocolError(
            f"{environment_name(environment)}.step returned no messages and is not done: the model would have to "
            "continue its own turn. Return messages, or done=True"
        )
    return CheckedStep(messages, result.reward, bool(done), result.info, reason)


async def close_environment(environment: Environment) -> None:
    """Call `close` if the environment has it, and wait for at most `CLOSE_SECONDS` where it is `async`.

    An exception, or a `close` that takes longer, is logged: the episode is over and its turns are complete.
    """
    name = environment_name(environment)
    deadline: asyncio.Timeout | None = None
    try:
        close = getattr(environment, "close", None)
        if callable(close):
            async with asyncio.timeout(CLOSE_SECONDS) as deadline:
                await resolve(close())
    except BaseException as error:  # an environment of a user may raise anything
        if ends_task(error):
            raise
        if deadline is not None and deadline.expired():
            log.warning("%s.close had not ended after %s seconds and was cancelled", name, CLOSE_SECONDS)
        else:
            log.exception("%s.close failed", name)


def _raise_environment_error(error: BaseException, environment: Environment, method: str) -> NoReturn:
    """Raise what an episode raises for an exception of an environment's `method`, which may be anything.

    A limit that the episode reached in the method is raised as it is, also out of a group of such errors: a method that
    calls the policy several times at once has them from a `TaskGroup`.
    """
    try:
        if isinstance(error, ExceptionGroup):
            limits, others = error.split(EpisodeLimitError)
            if limits is not None and others is None:
                raise _first_of(limits) from error
        if isinstance(error, _UNCHANGED) or ends_task(error):
            raise error
        raise EnvironmentFailedError(environment_name(environment), method, error) from error
    finally:
        del error  # it refers to this frame


def _first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _checked_messages(messages: Any, environment: Environment, method: str) -> list[Message]:
    """The messages as a list that can be stored. The renderer checks the contents of the messages."""
    if type(messages) is list and all(map(_is_text_of_user, messages)):
        return messages.copy()
    method = f"{environment_name(environment)}.{method}"
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise EnvironmentProtocolError(f"{method} returned {type(messages).__name__}, not a list of messages")
    listed = list(messages)
    if isinstance(messages, tuple) and not all(isinstance(message, Mapping) for message in listed):
        kinds = ", ".join(type(value).__name__ for value in listed[:3])  # of `reset` of Gymnasium: (messages, {})
        raise EnvironmentProtocolError(
            f"{method} returned a tuple ({kinds}), not a list of messages; return the list of messages alone"
        )
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


def _is_text_of_user(message: object) -> bool:
    """Whether a message has the form of most, which needs no further check: {"role": "user", "content": a text}."""
    if type(message) is not dict or len(message) != 2:
        return False
    role, content = message.get("role"), message.get("content")
    return type(role) is str and role == "user" and type(content) is str and is_unicode(content)
