"""Episodes as spans of OpenTelemetry."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
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
_OF_EPISODE = frozenset({"environment.make", "environment.reset"})


@dataclass(slots=True)
class _Episode:
    span: Span
    outside: Context
    turn: int = -1
    turn_span: Span | None = None
    wait_span: Span | None = None


class EpisodeSpans:
    """A listener of a runner that makes spans of OpenTelemetry. Needs the extra `opentelemetry`.

    Each attempt at an episode is a trace of its own: the span `episode`, in it `environment.make`, `environment.reset`
    and a span `turn` for each turn, and in that `renderer`, `engine` and `environment.step`. The episode links to the
    span that is current where it starts. While one of the inner spans lasts it is the current one, so that spans of an
    instrumented environment or HTTP client are its children. A weight update is a span `weight_update`.

    Attributes begin with `mmrollouts.`: `episode.id`, `task.id`, `episode.index`, `attempt`, `turn`, `outcome`,
    `reward`, `images`; the token counts of a turn are those of the conventions for generative AI
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
        self._make_current(span)

    def _waiting(self, event: EpisodeWaiting) -> None:
        episode = self._running.get(event.episode_id)
        if episode is None:
            return
        _end_wait(episode)
        parent = episode.span if event.waiting_for in _OF_EPISODE else self._turn_span(episode, event)
        episode.wait_span = self._tracer.start_span(
            event.waiting_for,
            context=self._trace.set_span_in_context(parent, self._context.Context()),
            attributes={"mmrollouts.episode.id": event.episode_id, "mmrollouts.turn": event.turn},
        )
        self._make_current(episode.wait_span)

    def _turn_span(self, episode: _Episode, event: EpisodeWaiting) -> Span:
        if episode.turn_span is None or episode.turn != event.turn:
            _end_turn(episode)
            episode.turn = event.turn
            episode.turn_span = self._tracer.start_span(
                "turn",
                context=self._trace.set_span_in_context(episode.span, self._context.Context()),
                attributes={"mmrollouts.episode.id": event.episode_id, "mmrollouts.turn": event.turn},
            )
        return episode.turn_span

    def _turn_finished(self, event: TurnFinished) -> None:
        episode = self._running.get(event.episode_id)
        if episode is None:
            return
        if episode.turn_span is not None and episode.turn == event.turn:
            episode.turn_span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": event.prompt_tokens,
                    "gen_ai.usage.output_tokens": event.completion_tokens,
                    "mmrollouts.images": event.images,
                }
            )
        _end_turn(episode)
        self._make_current(episode.span)

    def _ended(self, event: EpisodeEnded) -> None:
        episode = self._running.pop(event.episode_id, None)
        if episode is None:
            return
        if event.outcome == "failed":
            status = self._trace.Status(self._trace.StatusCode.ERROR, event.error)
            for span in (episode.wait_span, episode.turn_span, episode.span):
                if span is not None:
                    span.set_status(status)
        _end_turn(episode)
        episode.span.set_attributes({"mmrollouts.outcome": event.outcome, "mmrollouts.reward": event.reward})
        episode.span.end()
        current = self._trace.get_current_span().get_span_context()
        if current.trace_id == episode.span.get_span_context().trace_id:
            self._context.attach(episode.outside)

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


def _end_wait(episode: _Episode) -> None:
    if episode.wait_span is not None:
        episode.wait_span.end()
        episode.wait_span = None


def _end_turn(episode: _Episode) -> None:
    _end_wait(episode)
    if episode.turn_span is not None:
        episode.turn_span.end()
        episode.turn_span = None
