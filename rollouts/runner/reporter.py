"""Counts what happens in a runner, and tells its listeners."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import ParamSpec

from rollouts.episodes.activity import Part, TurnSeconds
from rollouts.runner.counters import RunnerCounters
from rollouts.runner.events import EpisodeWaiting, Listener, RunnerEvent, TurnFinished

P = ParamSpec("P")
log = logging.getLogger("rollouts.runner")


class Reporter:
    """The counters and listeners of a runner.

    A listener that raises is logged and receives no further event: what observes a run does not end it.
    """

    def __init__(self, listeners: Iterable[Listener]) -> None:
        self.counters = RunnerCounters()
        self._listeners = list(listeners)

    def emit(self, make_event: Callable[P, RunnerEvent], *args: P.args, **kwargs: P.kwargs) -> None:
        """Make an event and pass it to the listeners; without listeners, none is made."""
        if not self._listeners:
            return
        event = make_event(*args, **kwargs)
        for listener in self._listeners.copy():
            try:
                listener(event)
            except Exception:
                log.exception("listener %r failed for a %s and gets no more events", listener, type(event).__name__)
                self._listeners.remove(listener)


class EpisodeReporter:
    """An `EpisodeObserver` for one attempt. `on_waiting` is called with each part that the episode waits for."""

    __slots__ = ("_episode_id", "_on_waiting", "_reporter")

    def __init__(self, reporter: Reporter, episode_id: str, on_waiting: Callable[[Part], None]) -> None:
        self._reporter = reporter
        self._episode_id = episode_id
        self._on_waiting = on_waiting

    def waiting(self, turn: int, part: Part) -> None:
        self._on_waiting(part)
        self._reporter.emit(EpisodeWaiting, self._episode_id, turn, part)

    def turn_finished(
        self, turn: int, prompt_tokens: int, completion_tokens: int, images: int, seconds: TurnSeconds
    ) -> None:
        counters = self._reporter.counters
        counters.turns += 1
        counters.prompt_tokens += prompt_tokens
        counters.completion_tokens += completion_tokens
        counters.prompt_images += images
        counters.engine_seconds += seconds.engine
        counters.renderer_seconds += seconds.renderer
        counters.environment_seconds += seconds.environment
        self._reporter.emit(
            TurnFinished,
            self._episode_id,
            turn,
            prompt_tokens,
            completion_tokens,
            images,
            seconds.engine,
            seconds.renderer,
            seconds.environment,
        )
