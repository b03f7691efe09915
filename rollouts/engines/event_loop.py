"""The event loop that an engine belongs to, and calls on it that several callers share."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import Any, Generic, TypeVar

from rollouts.errors import EngineError

T = TypeVar("T")


class EngineLoop:
    """The event loop of an engine: that of its first call. Another one may follow once that one is closed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def enter(self, request_id: str) -> bool:
        """Whether the running loop is a new one. Raises `EngineError` while the one before is open."""
        running = asyncio.get_running_loop()
        if self._loop is running:
            return False
        if self._loop is not None and not self._loop.is_closed():
            raise _of_another_loop(request_id)
        self._loop = running
        return True


def _of_another_loop(request_id: str) -> EngineError:
    return EngineError(
        request_id,
        "the engine belongs to another event loop, on which it was used first; use it there, or make an "
        "engine for each event loop, thread and process",
    )


def expire(timeouts: Iterable[asyncio.Timeout]) -> None:
    """End the blocks of timeouts, by moving their deadlines to now."""
    for timeout in list(timeouts):
        if not timeout.expired():
            timeout.reschedule(0.0)


class SingleFlight(Generic[T]):
    """One running call per key, which concurrent callers share; cancelling a caller leaves it running."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[T]] = {}

    async def run(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the running call of this key, else of `make()`. Raises `EngineError` on another open loop."""
        task = self._running.get(key)
        if task is not None and task.get_loop() is not asyncio.get_running_loop():
            if not task.get_loop().is_closed():
                raise _of_another_loop(str(key))
            task = None
        if task is None:
            task = self._running[key] = asyncio.create_task(make())
            task.add_done_callback(lambda ended: self._end(key, ended))
        return await asyncio.shield(task)

    def _end(self, key: Hashable, task: asyncio.Task[T]) -> None:
        if self._running.get(key) is task:
            del self._running[key]
        if not task.cancelled():
            task.exception()  # whose callers may all be gone: it is not logged then
