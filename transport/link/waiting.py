"""Waiting for a condition under a lock, in threads and in event loops, with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from transport.link.errors import LinkTimeoutError

T = TypeVar("T")


class Deadline:
    """The time `timeout` seconds from now; None: no deadline. Raises `ValueError` for NaN."""

    def __init__(self, timeout: float | None) -> None:
        if timeout is not None and math.isnan(timeout):
            raise ValueError(f"timeout is {timeout}. Pass a number of seconds, or None for no limit.")
        self._timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    def left(self) -> float:
        """Return the remaining seconds; at least 0."""
        return math.inf if self._end is None else max(self._end - time.monotonic(), 0.0)

    def step(self, what: str, most: float) -> float:
        """Return the seconds to wait, at most `most`. Raises `LinkTimeoutError` after the deadline."""
        if self._end is None or self._timeout is None:
            return most
        left = self._end - time.monotonic()
        if left <= 0:
            raise LinkTimeoutError(what, self._timeout)
        return min(left, most)


class Waiters:
    """The callers that wait for a change of the state guarded by `lock`.

    They check their condition after each notification and every `poll_seconds`: the silence of a peer causes no
    notification.
    """

    def __init__(self, poll_seconds: float) -> None:
        self.lock = threading.Condition()
        self._poll_seconds = poll_seconds
        self._async_waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def wait(self, attempt: Callable[[], T | None], deadline: Deadline, what: str) -> T:
        """Call `attempt` under the lock until it returns a value other than None; return that value."""
        with self.lock:
            while True:
                result = attempt()
                if result is not None:
                    return result
                self.lock.wait(deadline.step(what, self._poll_seconds))

    async def wait_async(self, attempt: Callable[[], T | None]) -> T:
        """`wait` for an event loop."""
        event = asyncio.Event()
        sleeper = (asyncio.get_running_loop(), event)
        try:
            while True:
                with self.lock:
                    event.clear()
                    result = attempt()
                    if result is not None:
                        return result
                    self._async_waiters.add(sleeper)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), self._poll_seconds)
        finally:
            with self.lock:
                self._async_waiters.discard(sleeper)

    def notify_waiters(self) -> None:
        """Wake all waiting callers. Called under the lock."""
        self.lock.notify_all()
        for loop, event in self._async_waiters:
            with contextlib.suppress(RuntimeError):  # the loop was closed during the call
                loop.call_soon_threadsafe(event.set)
        self._async_waiters.clear()
