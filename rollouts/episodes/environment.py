"""The protocol of environments, and one whose methods run on threads."""

import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from renderers import Message, ParsedResponse
from renderers.process.threads import DaemonThreads, available_cores
from rollouts.calls import result_of


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment returns for an assistant turn.

    `messages` are the new messages, `reward` is the reward of this turn, a finite number, and `done` ends the episode.
    `info` is stored with the turn and may hold whatever `transport.encode` accepts. With `truncation_reason`, a text,
    the episode that `done` ends is `truncated`: a limit of the environment ended it, not its task.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    truncation_reason: str = ""


class Environment(Protocol):
    """One episode at a time: `reset`, then `step` until done. Either method may be `async`.

    Synchronous methods are called on the event loop, which keeps episodes reproducible; wrap an environment that
    computes or waits for long in `ThreadedEnvironment`.

    An environment may have, in addition:

    - a method `attach(context)`, which receives the `EpisodeContext` of the episode before `reset`;
    - an attribute or property `tools` (a list of `ToolSpec`), which is read once, after `reset`;
    - a method `step_parsed(assistant, parsed)`, which is called in place of `step` and also receives the
      `ParsedResponse`: it has the malformed tool calls, which the message has as text only;
    - a method `close()`, `async` or not, which is called once when the episode has ended, whether it was completed,
      failed or was cancelled.
    """

    def reset(self, seed: int) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Start an episode that depends on `seed` alone; return the first messages."""

    def step(self, assistant: Message) -> StepResult | Awaitable[StepResult]:
        """Return the result of an assistant turn."""


class ThreadedEnvironment:
    """Runs the synchronous methods of an environment in worker threads, so that they do not block the event loop.

    One method runs at a time: after a cancellation, `close` begins when the method that still runs has ended. A method
    that hangs does not keep the process alive. All environments together have as many threads as `asyncio.to_thread`
    has: the number of cores and 4 more, at most 32. `close` has other threads: it does not wait for methods of other
    environments.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._running = threading.Lock()

    @property
    def tools(self) -> Any:
        return declared_tools(self._environment)

    def attach(self, context: Any) -> Any:
        attach = getattr(self._environment, "attach", None)
        return attach(context) if callable(attach) else None

    async def reset(self, seed: int) -> Sequence[Message]:
        messages: Sequence[Message] = await self._call(self._environment.reset, seed)
        return messages

    async def step(self, assistant: Message) -> StepResult:
        result: StepResult = await self._call(self._environment.step, assistant)
        return result

    async def step_parsed(self, assistant: Message, parsed: ParsedResponse) -> StepResult:
        result: StepResult = await self._call(call_step, self._environment, assistant, parsed)
        return result

    async def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if callable(close):
            await self._call(close, threads=_closing_threads())

    async def _call(self, method: Callable[..., Any], *arguments: Any, threads: DaemonThreads | None = None) -> Any:
        threads = threads or environment_threads()
        return await resolve(await threads.run(_call_with, self._running, method, *arguments))


@functools.cache
def environment_threads() -> DaemonThreads:
    """The threads of this process for blocking methods of environments, in place of those of `asyncio.to_thread`."""
    return DaemonThreads(min(32, available_cores() + 4), "environment")


@functools.cache
def _closing_threads() -> DaemonThreads:
    """The threads for `close`, which is cancelled after a few seconds: one that has not begun then never runs."""
    return DaemonThreads(256, "environment-close")


def environment_name(environment: Any) -> str:
    """The class of an environment; of one in a `ThreadedEnvironment`, the class in it."""
    while isinstance(environment, ThreadedEnvironment):
        environment = environment._environment
    return type(environment).__name__


def call_step(environment: Any, assistant: Message, parsed: ParsedResponse) -> Any:
    """What `step_parsed` returns, or `step` for an environment without it."""
    step_parsed = getattr(environment, "step_parsed", None)
    return environment.step(assistant) if step_parsed is None else step_parsed(assistant, parsed)


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


def _call_with(lock: threading.Lock, method: Callable[..., Any], *arguments: Any) -> Any:
    with lock:
        return result_of(method, *arguments)


#: Makes the environment of an episode.
EnvironmentFactory = Callable[[], Environment | Awaitable[Environment]]
