"""What an environment is: something that asks, looks at the answer, and pays."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from renderers import Message
from rollouts.errors import EnvironmentFailedError, EnvironmentProtocolError


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment says to an assistant turn: new messages, the reward of this turn, whether it is over."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One episode at a time: `reset`, then `step` until done. Either method may be `async`.

    Synchronous methods are called on the event loop, which keeps episodes reproducible; wrap an environment that
    computes or waits for long in `in_thread`. An environment may have an attribute `tools` (a list of `ToolSpec`).
    """

    def reset(self, seed: int) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Start an episode that depends on nothing but `seed`; return the opening messages."""
        ...

    def step(self, assistant: Message) -> StepResult | Awaitable[StepResult]:
        """React to an assistant turn."""
        ...


class in_thread:  # noqa: N801  (reads as the adverb that it is: in_thread(env))
    """The same environment with its synchronous methods run in a worker thread, so that they block nobody."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.tools = getattr(environment, "tools", None)

    async def reset(self, seed: int) -> Sequence[Message]:
        messages: Sequence[Message] = await _resolve(await asyncio.to_thread(self._environment.reset, seed))
        return messages

    async def step(self, assistant: Message) -> StepResult:
        result: StepResult = await _resolve(await asyncio.to_thread(self._environment.step, assistant))
        return result


async def reset_environment(environment: Environment, seed: int) -> list[Message]:
    """Call `reset` and check what it returns. Raises `EnvironmentFailedError` and `EnvironmentProtocolError`."""
    messages = await _called(environment, "reset", seed)
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise EnvironmentProtocolError(
            f"{type(environment).__name__}.reset returned {type(messages).__name__}, not a list of opening messages"
        )
    return list(messages)


async def step_environment(environment: Environment, assistant: Message) -> StepResult:
    """Call `step` and check what it returns. Raises `EnvironmentFailedError` and `EnvironmentProtocolError`."""
    result = await _called(environment, "step", assistant)
    if not isinstance(result, StepResult):
        raise EnvironmentProtocolError(
            f"{type(environment).__name__}.step returned {type(result).__name__}, not a StepResult"
        )
    if not result.done and not result.messages:
        raise EnvironmentProtocolError(
            f"{type(environment).__name__}.step is not done but has nothing to say: the model would be asked to "
            "continue its own turn. Return messages, or done=True"
        )
    return result


async def _called(environment: Environment, method: str, argument: object) -> Any:
    try:
        return await _resolve(getattr(environment, method)(argument))
    except Exception as error:  # an environment may raise anything, and must not take the turns with it
        raise EnvironmentFailedError(type(environment).__name__, method, error) from error


async def _resolve(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
