"""Finds out from another thread that an event loop is blocked, and where."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable

_MAX_FRAMES = 8


class BlockedLoop:
    """Asks an event loop to call a function, and measures for how long it does not.

    `watch` is called on the event loop, `blocked_seconds` and `stack` on another thread. `clock` returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._asked_at: float | None = None

    def watch(self) -> None:
        """Watch the running event loop, if there is one, instead of the former."""
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._thread_id = threading.get_ident()

    def blocked_seconds(self) -> float:
        """For how long the loop has not called the function; 0 if it did, if it has ended, and at the first call."""
        loop, asked_at = self._loop, self._asked_at
        if loop is None or loop.is_closed() or not loop.is_running():
            self._asked_at = None
            return 0.0
        if asked_at is not None:
            return self._clock() - asked_at
        self._asked_at = self._clock()
        loop.call_soon_threadsafe(self._answer)
        return 0.0

    def stack(self) -> str:
        """The innermost calls of the loop's thread, the last one last, as in a traceback."""
        frame = sys._current_frames().get(self._thread_id)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-_MAX_FRAMES:]).rstrip()

    def _answer(self) -> None:
        self._asked_at = None
