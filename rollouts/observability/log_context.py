"""Which episode the running code belongs to, for log lines."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass

from rollouts.runner.events import EpisodeEnded, EpisodeStarted, EpisodeWaiting, RunnerEvent


@dataclass(frozen=True, slots=True)
class EpisodePosition:
    """An episode, its place in its group, and its turn. `index`, `attempt` and `turn` count from 0."""

    episode_id: str
    task_id: str
    index: int
    attempt: int
    turn: int


_position: ContextVar[EpisodePosition | None] = ContextVar("rollouts_episode_position", default=None)


def current_episode() -> EpisodePosition | None:
    """The episode that the calling code belongs to; None outside of episodes.

    It is known in an environment, an engine or a renderer that an episode of a runner calls, also on the threads of
    `ThreadedEnvironment` and `RendererPool`, while the runner has an `EpisodeLogContext` (or `JsonLogs`) as a listener.
    """
    return _position.get()


class EpisodeLogContext:
    """A listener of a runner that keeps `current_episode`, in the task of each episode."""

    def __call__(self, event: RunnerEvent) -> None:
        if isinstance(event, EpisodeWaiting):
            position = _position.get()
            if position is not None and position.turn != event.turn and position.episode_id == event.episode_id:
                _position.set(
                    EpisodePosition(position.episode_id, position.task_id, position.index, position.attempt, event.turn)
                )
        elif isinstance(event, EpisodeStarted):
            _position.set(EpisodePosition(event.episode_id, event.task_id, event.index, event.attempt, 0))
        elif isinstance(event, EpisodeEnded):
            position = _position.get()
            if position is not None and position.episode_id == event.episode_id:
                _position.set(None)


class EpisodeLogFilter(logging.Filter):
    """Gives each log record the attributes `episode_id`, `task_id`, `episode_index`, `attempt` and `turn`.

    They are empty texts outside of episodes, so that a format such as "%(episode_id)s %(message)s" always works. A
    record that has an attribute of the name already keeps it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        position = _position.get()
        values: tuple[object, ...] = ("", "", "", "", "")
        if position is not None:
            values = (position.episode_id, position.task_id, position.index, position.attempt, position.turn)
        for name, value in zip(POSITION_ATTRIBUTES, values, strict=True):
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


#: What `EpisodeLogFilter` adds to a record.
POSITION_ATTRIBUTES = ("episode_id", "task_id", "episode_index", "attempt", "turn")
