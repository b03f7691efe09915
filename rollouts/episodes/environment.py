"""The protocol of environments."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from renderers import Message


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment returns for an assistant turn.

    `messages` are the new messages, `reward` is the reward of this turn, a finite number, and `done` ends the episode.
    `info` is stored with the turn and may hold whatever `transport.encode` accepts.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One episode at a time: `reset`, then `step` until done. Either method may be `async`.

    Synchronous methods are called on the event loop, which keeps episodes reproducible; wrap an environment that
    computes or waits for long in `ThreadedEnvironment`. An environment may have an attribute or property `tools` (a
    list of `ToolSpec`); it is read once, after `reset`. An environment that has a method `attach(context)` receives
    the `EpisodeContext` of its episode before `reset`.
    """

    def reset(self, seed: int) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Start an episode that depends on `seed` alone; return the first messages."""
        ...

    def step(self, assistant: Message) -> StepResult | Awaitable[StepResult]:
        """Return the result of an assistant turn."""
        ...


class ThreadedEnvironment:
    """Runs the synchronous methods of an environment in worker threads, so that they do not block the event loop."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    @property
    def tools(self) -> Any:
        return declared_tools(self._environment)

    def attach(self, context: Any) -> Any:
        attach = getattr(self._environment, "attach", None)
        return attach(context) if callable(attach) else None

    async def reset(self, seed: int) -> Sequence[Message]:
        messages: Sequence[Message] = await resolve(await asyncio.to_thread(_call, self._environment.reset, seed))
        return messages

    async def step(self, assistant: Message) -> StepResult:
        result: StepResult = await resolve(await asyncio.to_thread(_call, self._environment.step, assistant))
        return result


def declared_tools(environment: Any) -> Any:
    """The attribute `tools` of an environment; None if it has none. An AttributeError inside a property is raised."""
    try:
        return environment.tools
    except AttributeError:
        if inspect.getattr_static(environment, "tools", None) is not None:
            raise
        return None


async def resolve(value: Any) -> Any:
    """The result of an awaitable; any other value as it is."""
    return await value if inspect.isawaitable(value) else value


def _call(method: Callable[[Any], Any], argument: Any) -> Any:
    """Call a method in a thread. A future cannot hold a StopIteration: the coroutine would wait forever."""
    try:
        return method(argument)
    except StopIteration as error:
        raise RuntimeError("the method raised StopIteration") from error
