"""The deadlines of an episode and of its turns."""

from __future__ import annotations

import asyncio

from rollouts.episodes.activity import EpisodeActivity
from rollouts.episodes.errors import EpisodeLimitError
from rollouts.episodes.limits import EpisodeLimits


class EpisodeDeadlines:
    """Cancels the block of `async with deadlines.scope` at the earlier deadline of turn and episode.

    The block then raises `TimeoutError`, and `passed` is not None. Made where the episode begins, on its event loop.
    """

    def __init__(self, limits: EpisodeLimits) -> None:
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._episode_end = _later(self._loop.time(), limits.episode_seconds)
        self._turn_end: float | None = None
        self.scope = asyncio.timeout(None)

    def begin_turn(self) -> None:
        """Begin the time of a turn, inside the scope."""
        if self._limits.turn_seconds is None and self.scope.when() is not None:
            return  # the end of the episode is set
        self._turn_end = _later(self._loop.time(), self._limits.turn_seconds)
        ends = [end for end in (self._turn_end, self._episode_end) if end is not None]
        if ends and not self.scope.expired():
            self.scope.reschedule(min(ends))

    def passed(self, activity: EpisodeActivity) -> EpisodeLimitError | None:
        """The deadline that ended the scope; None if none did."""
        if not self.scope.expired():
            return None
        name, seconds = "episode_seconds", self._limits.episode_seconds
        if self._episode_end is None or (self._turn_end is not None and self._turn_end < self._episode_end):
            name, seconds = "turn_seconds", self._limits.turn_seconds
        return EpisodeLimitError(
            name, f"{seconds:g} s passed in turn {activity.turn}, which waited for {activity.part}"
        )


def _later(now: float, seconds: float | None) -> float | None:
    return None if seconds is None else now + seconds
