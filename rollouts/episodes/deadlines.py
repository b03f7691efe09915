"""The deadlines of an episode, and the updates of weights whose time does not count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary

from rollouts.engines.protocol import InFlight
from rollouts.episodes.activity import EpisodeActivity
from rollouts.episodes.errors import EpisodeLimitError
from rollouts.episodes.limits import EpisodeLimits


class UpdatePauses:
    """Says when an engine's weights are updated, which counts for no deadline. Runners share it."""

    def __init__(self) -> None:
        self.requesting: set[EpisodeDeadlines] = set()
        self._updating: set[object] = set()  # who updates

    @classmethod
    def of(cls, engine: object) -> UpdatePauses:
        """Those of an engine: the same for one object. An engine that cannot be referred to weakly gets new ones."""
        try:
            return _pauses_of_engines.setdefault(engine, cls())
        except TypeError:  # it has `__slots__`, or compares by value and has no hash
            return cls()

    @property
    def is_updating(self) -> bool:
        return bool(self._updating)

    def set_update(self, updater: object, in_flight: InFlight | None) -> None:
        """An update by `updater` begins, or has ended (None), which has no effect where none was begun.

        With "wait" requests that run are not stopped, and their time counts.
        """
        if in_flight is None:
            self._updating.discard(updater)
            if not self._updating:
                for deadlines in list(self.requesting):
                    deadlines.release()
            return
        self._updating.add(updater)
        if in_flight != "wait":
            for deadlines in list(self.requesting):
                deadlines.hold()


#: An engine is passed to each of its runners by itself, and has no place for what they share.
_pauses_of_engines: WeakKeyDictionary[object, UpdatePauses] = WeakKeyDictionary()


class EpisodeDeadlines:
    """Cancels the block of `async with deadlines.scope` at the earlier deadline of turn and episode.

    The block then raises `TimeoutError`, and `passed` is not None. Made where the episode begins, on its event loop.
    """

    def __init__(self, limits: EpisodeLimits, pauses: UpdatePauses) -> None:
        self._limits = limits
        self._pauses = pauses
        self._requests = 0  # those that run
        self._held_since: float | None = None
        self._loop = asyncio.get_running_loop()
        self._episode_end = _later(self._loop.time(), limits.episode_seconds)
        self._turn_end: float | None = None
        self.scope = asyncio.timeout(None)

    def begin_turn(self) -> None:
        """Begin the time of a turn, inside the scope."""
        if self._limits.turn_seconds is None and (self._episode_end is None or self.scope.when() is not None):
            return  # there is no deadline, or that of the episode is set
        if self._held_since is not None:  # while another agent's request waits for an update
            self._turn_end = _later(self._held_since, self._limits.turn_seconds)
            return
        self._turn_end = _later(self._loop.time(), self._limits.turn_seconds)
        self._schedule()

    @contextmanager
    def requesting(self) -> Iterator[None]:
        """The block of a request, in which the time of weight updates does not count."""
        self._requests += 1
        self._pauses.requesting.add(self)
        if self._requests == 1 and self._pauses.is_updating:
            self.hold()
        try:
            yield
        finally:
            self._requests -= 1
            if self._requests == 0:
                self._pauses.requesting.discard(self)
                self.release()

    def hold(self) -> None:
        """Let the time stand still until `release`."""
        if self._held_since is None:
            self._held_since = self._loop.time()
            with suppress(RuntimeError):  # the scope has ended
                self.scope.reschedule(None)

    def release(self) -> None:
        """Let the time go on. Has no effect unless it stands still."""
        if self._held_since is None:
            return
        held = self._loop.time() - self._held_since
        self._held_since = None
        self._turn_end, self._episode_end = (
            None if end is None else end + held for end in (self._turn_end, self._episode_end)
        )
        self._schedule()

    def _schedule(self) -> None:
        ends = [end for end in (self._turn_end, self._episode_end) if end is not None]
        if ends:
            with suppress(RuntimeError):  # the scope has ended
                self.scope.reschedule(min(ends))

    def passed(self, activity: EpisodeActivity) -> EpisodeLimitError | None:
        """The deadline that ended the scope; None if none did."""
        when = self.scope.when()
        # The event loop may call a timer earlier than due, by the resolution of its clock.
        if when is None or self._loop.time() + 1.0 < when or not self.scope.expired():
            return None
        name, seconds = "episode_seconds", self._limits.episode_seconds
        if self._episode_end is None or (self._turn_end is not None and self._turn_end < self._episode_end):
            name, seconds = "turn_seconds", self._limits.turn_seconds
        return EpisodeLimitError(
            name, f"{seconds:g} s passed in turn {activity.turn}, which waited for {activity.part}"
        )


def _later(now: float, seconds: float | None) -> float | None:
    return None if seconds is None else now + seconds
