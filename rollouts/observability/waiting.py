"""Which episodes wait for long, and for what."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from rollouts.observability.engine_load import PeriodicThread
from rollouts.runner.events import EpisodeEnded, EpisodeStarted, EpisodeWaiting, RunnerEvent
from rollouts.values import check_positive

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


log = logging.getLogger("rollouts.observability.waiting")

#: How many episodes that wait for the same thing one check logs a line for; the others are counted in one more line.
_MAX_LINES = 10

_MAX_CHECK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class EpisodeWait:
    """An episode that waits: for what, in which turn (from 0), and for how many seconds so far."""

    episode_id: str
    task_id: str
    turn: int
    waiting_for: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"episode {self.episode_id} of task {self.task_id} (turn {self.turn}) has waited {self.seconds:.1f} s "
            f"for {self.waiting_for}"
        )


@dataclass(slots=True)
class _Running:
    task_id: str
    turn: int
    waiting_for: str
    since: float
    logged: bool = False


class WaitWatcher:
    """A listener of a runner that logs each episode which waits for one thing longer than `threshold_seconds`.

        with WaitWatcher(threshold_seconds=120) as waits:
            async with Runner(..., listeners=[waits]) as runner:
                ...
        # WARNING episode 7-0 of task 7 (turn 3) has waited 120.4 s for environment.step

    Each wait is logged once, by a thread that runs inside the `with` block. Where something has blocked the event loop
    for that long, such as a synchronous environment, every episode waits for it: then one line has the calls in which
    the loop is, and the episode that reported last. `report` lists the episodes that wait at any time. `clock` returns
    seconds. Raises `ArgumentError` for a threshold that is not above 0.
    """

    def __init__(self, *, threshold_seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        seconds = check_positive("threshold_seconds", threshold_seconds, "pass a number of seconds above 0")
        self.threshold_seconds = seconds
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self._loop = BlockedLoop(clock)
        self._block_logged = False
        self._last_waiting = ""
        self._thread = PeriodicThread(self.check, min(seconds / 4, _MAX_CHECK_SECONDS), "rollouts-wait-watcher")

    def __call__(self, event: RunnerEvent) -> None:
        if isinstance(event, EpisodeWaiting):
            self._last_waiting = event.episode_id
            if (running := self._running.get(event.episode_id)) is not None:
                self._running[event.episode_id] = _Running(
                    running.task_id, event.turn, event.waiting_for, self._clock()
                )
        elif isinstance(event, EpisodeStarted):
            self._loop.watch()
            self._running[event.episode_id] = _Running(event.task_id, 0, "", self._clock())
        elif isinstance(event, EpisodeEnded):
            self._running.pop(event.episode_id, None)

    def report(self, longer_than: float = 0.0) -> list[EpisodeWait]:
        """The episodes that have waited for more than `longer_than` seconds, the longest wait first."""
        now = self._clock()
        waits = [
            EpisodeWait(episode_id, running.task_id, running.turn, running.waiting_for, now - running.since)
            for episode_id, running in self._running.copy().items()
            if running.waiting_for and now - running.since > longer_than
        ]
        return sorted(waits, key=lambda wait: -wait.seconds)

    def check(self) -> None:
        """Log the waits above the threshold that were not logged yet; while the event loop is blocked, that alone."""
        blocked_seconds = self._loop.blocked_seconds()
        if blocked_seconds > 0:
            if blocked_seconds > self.threshold_seconds and not self._block_logged:
                self._log_block(blocked_seconds)
                self._block_logged = True
            return
        self._block_logged = False
        new = [wait for wait in self.report(self.threshold_seconds) if self._mark_logged(wait)]
        for waiting_for in dict.fromkeys(wait.waiting_for for wait in new):
            waits = [wait for wait in new if wait.waiting_for == waiting_for]
            for wait in waits[:_MAX_LINES]:
                log.warning("%s", wait, extra={"episode_id": wait.episode_id, "task_id": wait.task_id})
            if len(waits) > _MAX_LINES:
                log.warning(
                    "%d more episodes have waited longer than %g s for %s",
                    len(waits) - _MAX_LINES,
                    self.threshold_seconds,
                    waiting_for,
                )

    def _log_block(self, seconds: float) -> None:
        last = next((wait for wait in self.report() if wait.episode_id == self._last_waiting), None)
        suspect = "" if last is None else f"; the last to report was that {last}"
        log.warning("the event loop has been blocked for %.1f s%s; it is in\n%s", seconds, suspect, self._loop.stack())

    def _mark_logged(self, wait: EpisodeWait) -> bool:
        """Whether the wait goes on and was not logged before."""
        running = self._running.get(wait.episode_id)
        if running is None or running.logged or (running.turn, running.waiting_for) != (wait.turn, wait.waiting_for):
            return False
        running.logged = True
        return True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.stop()


def wait_report(waits: Sequence[EpisodeWait], *, max_episodes: int = 20) -> str:
    """Waits as text: how many episodes wait for what, then one line for each of the first `max_episodes`.

    "no episode waits" without any.
    """
    if not waits:
        return "no episode waits"
    counts = ", ".join(f"{count} for {name}" for name, count in Counter(w.waiting_for for w in waits).most_common())
    lines = [f"{len(waits)} episodes wait: {counts}", *(f"  {wait}" for wait in waits[:max_episodes])]
    if len(waits) > max_episodes:
        lines.append(f"  and {len(waits) - max_episodes} more")
    return "\n".join(lines)
