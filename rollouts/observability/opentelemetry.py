"""Episodes as spans of OpenTelemetry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollouts.errors import MissingExtraError
from rollouts.runner.events import (
    EpisodeEnded,
    EpisodeStarted,
    EpisodeWaiting,
    RunnerEvent,
    TurnFinished,
    WeightsUpdated,
    WeightUpdateFailed,
)

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

#: Waits that belong to the episode and not to one of its turns.
_OF_EPISODE = frozenset({"environment.make", "environment.reset", "retry"})


#: The span in which turns begin, in each task of an episode: the episode, or the `environment.step` that takes them.
_scope: ContextVar[Span | None] = ContextVar("rollouts_span_scope", default=None)


@dataclass(slots=True)
class _Wait:
    waiting_for: str
    span: Span


@dataclass(slots=True)
class _Turn:
    span: Span
    scope: Span
    wait: _Wait | None = None


@dataclass(slots=True)
class _Episode:
    span: Span
    outside: Context
    turns: dict[int, _Turn] = field(default_factory=dict)
    wait: _Wait | None = None  # of the episode itself

    def open_spans(self) -> Iterator[Span]:
        """The spans that have not ended, inner ones first."""
        for turn in reversed(self.turns.values()):
            if turn.wait is not None:
                yield turn.wait.span
            yield turn.span
        if self.wait is not None:
            yield self.wait.span
        yield self.span


class EpisodeSpans:
    """A listener of a runner that makes spans of OpenTelemetry. Needs the extra `opentelemetry`.

    Each attempt at an episode is a trace of its own: the span `episode`, in it `environment.make`, `environment.reset`
    and a span `turn` for each turn, and in that `renderer`, `engine` and `environment.step`. Turns that an environment
    generates itself, and its child episodes, are in its `environment.step`; of those that run at the same time, a turn
    may have the waits of another. The episode links to the span that is current where it starts. While one of the inner
    spans lasts it is the current one, so that spans of an instrumented environment or HTTP client are its children. A
    weight update is a span `weight_update`.

    Attributes begin with `mmrollouts.`: `episode.id`, `task.id`, `episode.index`, `attempt`, `turn`, `outcome`,
    `environment_reward`, `images`, `sounds`; the token counts of a turn are those of the conventions for generative AI
    (`gen_ai.usage.input_tokens`, `gen_ai.usage.output_tokens`). A failed episode has the status ERROR with its error.

    `tracer_provider` None is the global one. Raises `MissingExtraError`.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        try:
            from opentelemetry import context, trace
        except ImportError as error:
            raise MissingExtraError("EpisodeSpans", "opentelemetry", "opentelemetry-sdk") from error
        self._context = context
        self._trace = trace
        self._tracer = trace.get_tracer("mmrollouts", tracer_provider=tracer_provider)
        self._running: dict[str, _Episode] = {}
        self._on_event: dict[type[RunnerEvent], Callable[[Any], None]] = {
            EpisodeStarted: self._started,
            EpisodeWaiting: self._waiting,
            TurnFinished: self._turn_finished,
            EpisodeEnded: self._ended,
            WeightsUpdated: self._weights_updated,
            WeightUpdateFailed: self._weight_update_failed,
        }

    def __call__(self, event: RunnerEvent) -> None:
        handle = self._on_event.get(type(event))
        if handle is not None:
            handle(event)

    def _started(self, event: EpisodeStarted) -> None:
        outside = self._context.get_current()
        current = self._trace.get_current_span().get_span_context()
        span = self._tracer.start_span(
            "episode",
            context=self._context.Context(),  # a trace of its own: one of all episodes would be too large to read
            links=[self._trace.Link(current)] if current.is_valid else None,
            attributes={
                "mmrollouts.episode.id": event.episode_id,
                "mmrollouts.task.id": event.task_id,
                "mmrollouts.episode.index": event.index,
                "mmrollouts.attempt": event.attempt,
            },
        )
        self._running[event.episode_id] = _Episode(span, outside)
        _scope.set(span)
        self._make_current(span)

    def _waiting(self, event: EpisodeWaiting) -> None:
        episode = self._running.get(event.episode_id)
        if episode is None:
            return
        if episode.wait is not None:
            episode.wait.span.end()
            episode.wait = None
        if event.waiting_for in _OF_EPISODE:
            episode.wait = self._begin_wait(self._scope_in(episode), event)
            return
        turn = self._turn(episode, event)
        if turn.wait is not None and turn.wait.waiting_for == event.waiting_for:  # again, after turns within it
            self._make_current(turn.wait.span)
        else:
            if turn.wait is not None:
                turn.wait.span.end()
            turn.wait = self._begin_wait(turn.span, event)
        if event.waiting_for == "environment.step":
            _scope.set(turn.wait.span)

    def _turn(self, episode: _Episode, event: EpisodeWaiting) -> _Turn:
        if (turn := episode.turns.get(event.turn)) is None:
            scope = self._scope_in(episode)
            turn = episode.turns[event.turn] = _Turn(self._start_span("turn", scope, event), scope)
        return turn

    def _scope_in(self, episode: _Episode) -> Span:
        scope = _scope.get()
        own = scope is not None and scope.get_span_context().trace_id == episode.span.get_span_context().trace_id
        return scope if scope is not None and own else episode.span

    def _begin_wait(self, parent: Span, event: EpisodeWaiting) -> _Wait:
        wait = _Wait(event.waiting_for, self._start_span(event.waiting_for, parent, event))
        self._make_current(wait.span)
        return wait

    def _start_span(self, name: str, parent: Span, event: EpisodeWaiting) -> Span:
        return self._tracer.start_span(
            name,
            context=self._trace.set_span_in_context(parent, self._context.Context()),
            attributes={"mmrollouts.episode.id": event.episode_id, "mmrollouts.turn": event.turn},
        )

    def _turn_finished(self, event: TurnFinished) -> None:
        episode = self._running.get(event.episode_id)
        turn = None if episode is None else episode.turns.get(event.turn)
        if episode is None or turn is None:
            return
        turn.span.set_attributes(
            {
                "gen_ai.usage.input_tokens": event.prompt_tokens,
                "gen_ai.usage.output_tokens": event.completion_tokens,
                "mmrollouts.images": event.images,
                "mmrollouts.sounds": event.sounds,
            }
        )
        if event.failed:
            return  # its spans end with the episode, with the error
        del episode.turns[event.turn]
        if turn.wait is not None:
            turn.wait.span.end()
        turn.span.end()
        _scope.set(turn.scope)
        self._make_current(turn.scope)

    def _ended(self, event: EpisodeEnded) -> None:
        episode = self._running.pop(event.episode_id, None)
        if episode is None:
            return
        episode.span.set_attributes(
            {"mmrollouts.outcome": event.outcome, "mmrollouts.environment_reward": event.environment_reward}
        )
        for span in episode.open_spans():
            if event.outcome == "failed":
                span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, event.error))
            span.end()
        current = self._trace.get_current_span().get_span_context()
        if current.trace_id == episode.span.get_span_context().trace_id:
            self._context.attach(episode.outside)
            _scope.set(None)

    def _weights_updated(self, event: WeightsUpdated) -> None:
        now = time.time_ns()
        span = self._tracer.start_span(
            "weight_update",
            start_time=now - int(event.seconds * 1e9),
            attributes={"mmrollouts.weight_version": event.version, "mmrollouts.in_flight": event.in_flight},
        )
        span.end(now)

    def _weight_update_failed(self, event: WeightUpdateFailed) -> None:
        span = self._tracer.start_span("weight_update", attributes={"mmrollouts.weight_version": event.version})
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, event.error))
        span.end()

    def _make_current(self, span: Span) -> None:
        self._context.attach(self._trace.set_span_in_context(span, self._context.get_current()))
