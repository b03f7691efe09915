"""Calls of an environment by an episode: each may return or raise anything, and is checked."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from renderers import Message, ParsedResponse
from renderers.errors import MessageError
from renderers.messages import check_messages, check_tools, without_media
from rollouts.episodes.environment import (
    Environment,
    EnvironmentFactory,
    StepResult,
    call_step,
    declared_tools,
    environment_name,
    resolve,
)
from rollouts.episodes.errors import (
    EnvironmentFailedError,
    EnvironmentProtocolError,
    EpisodeLimitError,
    ends_task,
    single_errors,
    wrap_exceptions,
)
from rollouts.errors import ArgumentError, is_unicode, short_repr
from transport import EncodeError
from transport.wire.codec import check_encodable

log = logging.getLogger("rollouts")

#: How long an episode waits for the `close` of its environment. A cancelled run ends within a few seconds.
CLOSE_SECONDS = 2.0


_SHAPE = "an instance of a class that has reset and step"


def _is_environment(value: object) -> bool:
    """Whether a value has the methods of an environment; a class of environments is none."""
    steps = any(callable(getattr(value, name, None)) for name in ("step", "step_parsed"))
    return steps and callable(getattr(value, "reset", None)) and not isinstance(value, type)


def check_environment(environment: object) -> None:
    """Raises `ArgumentError` for what is not an environment, a class of environments included."""
    if not _is_environment(environment):
        raise ArgumentError("environment", environment, f"pass {_SHAPE}")


async def make_environment(factory: EnvironmentFactory) -> Environment:
    """The environment of `factory`. Raises `EnvironmentFailedError`, `EnvironmentProtocolError`."""
    with wrap_exceptions(lambda error: EnvironmentFailedError("", "make_environment", error)):
        environment: Environment = await resolve(factory())
    if not _is_environment(environment):
        raise EnvironmentProtocolError(f"make_environment returned {short_repr(environment)}; return {_SHAPE}")
    return environment


async def attach_context(environment: Environment, context: object) -> None:
    """Call `attach` of an environment that has it. Raises `EnvironmentFailedError`."""
    attach = getattr(environment, "attach", None)
    if callable(attach):
        with _naming(environment, "attach"):
            await resolve(attach(context))


async def reset_environment(environment: Environment, seed: int) -> list[Message]:
    """Call `reset` and check the messages. Raises `EnvironmentFailedError` and `EnvironmentProtocolError`."""
    method = f"{environment_name(environment)}.reset"
    with _naming(environment, "reset"):
        messages = _checked_messages(await resolve(environment.reset(seed)), method)
    if not messages:
        raise EnvironmentProtocolError(f"{method} returned no messages; return the first messages")
    return messages


def environment_tools(environment: Environment) -> Any:
    """The tools of an environment, or None. Raises `EnvironmentFailedError` and `EnvironmentProtocolError`."""
    with _naming(environment, "tools"):
        tools = declared_tools(environment)
    try:
        check_tools(tools)
    except MessageError as error:
        raise EnvironmentProtocolError(f"{environment_name(environment)}.tools: {error}") from error
    return tools


async def step_environment(environment: Environment, assistant: Message, parsed: ParsedResponse) -> StepResult:
    """Call `step` or `step_parsed`; its result, checked but for reward and info, which `record_reward` checks.

    Raises `EnvironmentFailedError` and `EnvironmentProtocolError`.
    """
    with _naming(environment, "step"):
        result = await resolve(call_step(environment, assistant, parsed))
        return _checked_step(result, f"{environment_name(environment)}.step")


def _checked_step(result: Any, method: str) -> StepResult:
    if not isinstance(result, StepResult):
        kind = type(result).__name__
        rule = "return StepResult(messages, reward, done, info)"
        raise EnvironmentProtocolError(f"{method} returned {kind}, not a StepResult; {rule}")
    done = result.done
    if type(done) is not bool and not isinstance(done, np.bool_):
        raise EnvironmentProtocolError(f"{method} returned done={short_repr(done)}, which is neither True nor False")
    # Each field is read once: a subclass may compute it.
    messages = _checked_messages(result.messages, method)
    reason = result.truncation_reason
    if not isinstance(reason, str) or not is_unicode(reason) or (reason and not done):
        given = f"truncation_reason={short_repr(reason)} with done={done}"
        raise EnvironmentProtocolError(f"{method} returned {given}; return text, and done=True")
    if not done and not messages:
        rule = "the model would have to continue its own turn. Return messages, or done=True"
        raise EnvironmentProtocolError(f"{method} returned no messages and is not done: {rule}")
    return StepResult(messages, result.reward, bool(done), result.info, reason)


async def close_environment(environment: Environment) -> None:
    """Call `close`, if any, for at most `CLOSE_SECONDS`. Failures are logged: the turns are complete."""
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


@contextmanager
def _naming(environment: Environment, method: str) -> Iterator[None]:
    """Replace an exception of an environment's `method`, which may be anything, by `EnvironmentFailedError`.

    A limit that the episode reached in the method is raised as it is, also out of a group of such errors: a method that
    calls the policy several times at once has them from a `TaskGroup`.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, ExceptionGroup) and error.split(EpisodeLimitError)[1] is None:
            raise next(single_errors(error)) from error
        if isinstance(error, EnvironmentProtocolError | EpisodeLimitError) or ends_task(error):
            raise
        raise EnvironmentFailedError(environment_name(environment), method, error) from error


def _checked_messages(messages: Any, method: str) -> list[Message]:
    """The messages as a list that can be stored. The renderer checks the contents of the messages."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise EnvironmentProtocolError(f"{method} returned {type(messages).__name__}, not a list of messages")
    try:
        # Media are stored as the sources that the renderer makes of them.
        check_encodable(without_media(check_messages(messages)), f"{method}: messages")
    except MessageError as error:
        raise EnvironmentProtocolError(f"{method}: {error}") from error
    except EncodeError as error:
        raise EnvironmentProtocolError(f"cannot be stored: {error}") from error
    return list(messages)
