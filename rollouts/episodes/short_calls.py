"""Calls of a renderer that are so short that a thread would cost more than the call.

A thread takes a tenth of a millisecond to begin a call and hand over its result, and several times that while other
threads hold the interpreter's lock. Parsing a short completion, adding a short message, or rendering a short first
prompt takes about as long or less, and a thread that computes in Python keeps the event loop waiting, too: for up to
5 ms, after which it has to release the lock. So such calls are made on the event loop itself if they take a millisecond
at most on average. Of many that are due at once, a few are made at a time; then the loop looks at what else is due.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Final, TypeVar

from renderers import RendererPool, TemplateRenderer

T = TypeVar("T")

_LONGEST_CALL_SECONDS: Final = 0.001

#: Larger calls are made on threads: calls whose result the renderer has cached say little about one that is not cached.
_LARGEST_SIZE: Final = 4096


#: As many calls are made before the loop looks at what else is due, or fewer that take so long by their means.
_CALLS_AT_ONCE: Final = 8
_SECONDS_AT_ONCE: Final = 0.004

#: The fixed part of a call's cost, as if it had so many tokens or characters more.
_FIXED_SIZE: Final = 64

#: The share of the latest call in the mean cost of its kind.
_LATEST_SHARE: Final = 0.1


class ShortCalls:
    """Makes calls on the event loop or on the threads of a pool, by what calls of the same kind have cost.

    Only calls of a `TemplateRenderer` that threads share are made on the event loop: it computes, and waits for
    nothing. The first two calls of a kind are made on threads.
    """

    def __init__(self) -> None:
        self._seconds_per_size: dict[str, float] = {}  # by kind: the mean of recent calls
        self._made = 0  # since the loop has looked at what else is due
        self._planned_seconds = 0.0  # of these
        self._waiting: deque[tuple[asyncio.Future[None], float]] = deque()  # with the seconds that the call may take

    async def run(self, pool: RendererPool, kind: str, size: int, call: Callable[[], T]) -> T:
        """Make a call whose cost grows with `size`, a number of tokens or characters. `call` needs no media."""
        seconds = self._expected_seconds(kind, size)
        if seconds > _LONGEST_CALL_SECONDS or not _shares_template_renderer(pool):
            # Processor time: a thread also waits for other threads.
            return await pool.run_on_thread(lambda: self._measured(kind, size, call, time.thread_time))
        if self._are_enough() or self._waiting:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, seconds))
            await turn
        else:
            if not self._made:
                asyncio.get_running_loop().call_soon(self._next_calls)
            self._plan(seconds)
        return self._measured(kind, size, call, time.perf_counter)

    def _expected_seconds(self, kind: str, size: int) -> float:
        """How long a call may take; infinite where that is not known."""
        return inf if size > _LARGEST_SIZE else self._seconds_per_size.get(kind, inf) * (size + _FIXED_SIZE)

    def _are_enough(self) -> bool:
        """Whether the loop has to look at what else is due before the next call."""
        return self._made >= _CALLS_AT_ONCE or self._planned_seconds >= _SECONDS_AT_ONCE

    def _plan(self, seconds: float) -> None:
        self._made += 1
        self._planned_seconds += seconds

    def _next_calls(self) -> None:
        """Let the next calls begin. The loop calls this after it has looked at what is due."""
        self._made, self._planned_seconds = 0, 0.0
        while self._waiting and not self._are_enough():
            turn, seconds = self._waiting.popleft()
            if not turn.done():  # it is cancelled with its caller
                turn.set_result(None)
                self._plan(seconds)
        if self._made:
            asyncio.get_running_loop().call_soon(self._next_calls)

    def _measured(self, kind: str, size: int, call: Callable[[], T], clock: Callable[[], float]) -> T:
        started = clock()
        result = call()
        rate = (clock() - started) / (size + _FIXED_SIZE)
        mean = self._seconds_per_size.get(kind)
        if mean is None:
            self._seconds_per_size[kind] = inf  # the first call also fills caches, so that it does not count
        else:
            self._seconds_per_size[kind] = rate if mean == inf else mean + _LATEST_SHARE * (rate - mean)
        return result


def _shares_template_renderer(pool: RendererPool) -> bool:
    return pool.shares_one_renderer and isinstance(pool.renderer, TemplateRenderer)
