"""Calls that several callers want at once and that are made once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _AbandonedError(Exception):
    """The event loop that made a call ended before the answer."""


class _Running(NamedTuple, Generic[T]):
    answer: Future[T]
    loop: asyncio.AbstractEventLoop


class SingleFlight(Generic[T]):
    """One running call a key: whoever asks meanwhile, on any event loop, gets the same answer or the same error.

    A caller that is cancelled leaves the call to the others. Nothing is remembered once a call has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Hashable, _Running[T]] = {}

    async def run(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The answer of the running call of this key, else of `make()`."""
        while True:
            try:
                return await asyncio.wrap_future(self._join(key, make))
            except _AbandonedError:
                continue  # the loop that had begun is gone: begin again on this one

    def _join(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        loop = asyncio.get_running_loop()
        with self._lock:
            running = self._running.get(key)
            if running is not None and not running.loop.is_closed():
                return running.answer
            answer: Future[T] = Future()
            answer.set_running_or_notify_cancel()  # from now on a caller that is cancelled cannot cancel it
            self._running[key] = _Running(answer, loop)
        task = loop.create_task(make())
        task.add_done_callback(lambda ended: self._settle(key, answer, ended))
        return answer

    def _settle(self, key: Hashable, answer: Future[T], ended: asyncio.Task[T]) -> None:
        with self._lock:
            running = self._running.get(key)
            if running is not None and running.answer is answer:
                del self._running[key]
        if ended.cancelled():
            answer.set_exception(_AbandonedError())
        elif (error := ended.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(ended.result())
