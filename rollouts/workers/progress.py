"""The calls of an `EpisodeObserver` as values that a worker sends to the process of the runner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from rollouts.episodes.activity import EpisodeObserver, Part, TurnCounts, TurnSeconds

#: A call of an `EpisodeObserver`, as a worker reports it: the name of the method and its arguments.
Progress: TypeAlias = tuple[Any, ...]


class ProgressObserver:
    """An `EpisodeObserver` in a worker: passes what the episode reports to `send`, as `Progress`."""

    def __init__(self, send: Callable[[Progress], object]) -> None:
        self._send = send

    def waiting(self, turn: int, part: Part) -> None:
        self._send(("waiting", turn, part))

    def requesting(self) -> AbstractContextManager[object]:
        return nullcontext()  # the runner counts the tokens of a job from its beginning

    def turn_finished(self, turn: int, counts: TurnCounts, seconds: TurnSeconds, failed: bool) -> None:
        self._send(("turn_finished", turn, counts, seconds, failed))


def report_progress(progress: Progress, observer: EpisodeObserver) -> None:
    """Make the call of an observer in a worker at another observer."""
    name, *arguments = progress
    getattr(observer, name)(*arguments)
