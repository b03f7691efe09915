"""One running call for several concurrent callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar

from renderers.fork_reset import register_fork_reset

T = TypeVar("T")


class _LoopEndedError(Exception):
    """The event loop that ran a call ended before the result."""


class _Running(NamedTuple, Generic[T]):
    result: Future[T]
    loop: asyncio.AbstractEventLoop


class SingleFlight(Generic[T]):
    """At most one running call per key: concurrent callers, on any event loop, get its result or its error.

    A caller that is cancelled does not cancel the call. Results are not kept after the call has ended. A forked
    process begins without running calls.
    """

    def __init__(self) -> None:
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Hashable, _Running[T]] = {}

    async def run(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the running call of this key, else of `make()`."""
        while True:
            try:
                return await asyncio.wrap_future(self._join(key, make))
            except _LoopEndedError:
                continue  # start the call again on this loop

    def _join(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        loop = asyncio.get_running_loop()
        with self._lock:
            running = self._running.get(key)
            if running is not None and not running.loop.is_closed():
                return running.result
            result: Future[T] = Future()
            result.set_running_or_notify_cancel()  # so that a cancelled caller cannot cancel it
            self._running[key] = _Running(result, loop)
        task = loop.create_task(make())
        task.add_done_callback(lambda task: self._settle(key, result, task))
        return result

    def _settle(self, key: Hashable, result: Future[T], task: asyncio.Task[T]) -> None:
        with self._lock:
            running = self._running.get(key)
            if running is not None and running.result is result:
                del self._running[key]
        if task.cancelled():
            result.set_exception(_LoopEndedError())
        elif (error := task.exception()) is not None:
            result.set_exception(error)
        else:
            result.set_result(task.result())
