"""Passes events to the listeners of a runner, counts them, and logs the failures of its episodes."""

import logging
from collections.abc import Iterable
from typing import Final

from rollouts.episodes.errors import EnvironmentFailedError, RemoteFailureError, RendererFailedError
from rollouts.episodes.limits import EpisodeLimits
from rollouts.runner.events import (
    EpisodeEnded,
    EpisodeRetried,
    EpisodeStarted,
    GroupDelivered,
    GroupFinished,
    GroupSkipped,
    GroupStale,
    Listener,
    RunnerEvent,
    TurnFinished,
    WeightsUpdated,
    WeightUpdateFailed,
)
from rollouts.trajectory.tree import Trajectory

#: The counts that are 0 at first. Their names are those of `rollouts.observability.METRICS`.
COUNTED: Final = (
    *("episodes_started", "episodes_retried", "episodes_running", "forks", "length_stops"),
    *("turns", "prompt_tokens", "completion_tokens", "prompt_images", "prompt_sounds"),
    *("turn_seconds_sum/engine", "turn_seconds_sum/renderer", "turn_seconds_sum/environment"),
    *("groups_finished", "groups_delivered", "weight_updates", "weight_update_failures"),
)


def count_event(event: RunnerEvent, counts: dict[str, float]) -> None:
    """Add what an event counts to the counts of a run."""
    for name, amount in _counts_of(event).items():
        counts[name] = counts.get(name, 0) + amount


def _counts_of(event: RunnerEvent) -> dict[str, float]:
    """What an event adds to the counts of a run, by name; those with a label are `name/label`."""
    match event:
        case EpisodeStarted():
            return {"episodes_started": 1, "episodes_running": 1}
        case EpisodeRetried():
            return {"episodes_retried": 1}
        case TurnFinished():
            return {
                "turns": 1,
                "prompt_tokens": event.prompt_tokens,
                "completion_tokens": event.completion_tokens,
                "prompt_images": event.images,
                "prompt_sounds": event.sounds,
                "turn_seconds_sum/engine": event.engine_seconds,
                "turn_seconds_sum/renderer": event.renderer_seconds,
                "turn_seconds_sum/environment": event.environment_seconds,
            }
        case EpisodeEnded():
            return {
                "episodes_running": -1,
                f"episodes_ended/{event.outcome}": 1,
                "forks": event.forks,
                "length_stops": event.length_stops,
            }
        case GroupFinished():
            return {"groups_finished": 1}
        case GroupDelivered():
            return {"groups_delivered": 1}
        case GroupSkipped():
            return {f"groups_skipped/{event.reason}": 1}
        case GroupStale():
            return {f"groups_stale/{event.action}": 1}
        case WeightsUpdated():
            return {"weight_updates": 1}
        case WeightUpdateFailed():
            return {"weight_update_failures": 1}
    return {}


log = logging.getLogger("rollouts.runner")

# An episode without a limit that has had as many turns is reported once.
_MANY_TURNS = 1000


class Reporter:
    """The counts and listeners of a runner. A listener that raises is logged and receives no more."""

    def __init__(self, listeners: Iterable[Listener], limits: EpisodeLimits) -> None:
        self.counts: dict[str, float] = dict.fromkeys(COUNTED, 0)
        self.listeners = list(listeners)
        self._warns_of_turns = limits.max_turns is None and limits.episode_seconds is None
        self._logged: set[tuple[object, ...]] = set()  # the kinds of failures
        self.is_outage_logged = False  # since the latest turn

    def emit(self, event: RunnerEvent) -> None:
        """Count an event and pass it to the listeners."""
        count_event(event, self.counts)
        # A copy: one that fails is removed within the loop.
        for listener in self.listeners.copy():
            try:
                listener(event)
            except Exception:
                log.exception("listener %r failed for a %s and gets no more events", listener, type(event).__name__)
                self.listeners.remove(listener)

    def log_failure(self, episode: Trajectory, error: BaseException) -> None:
        """Log the error of an episode that failed for good: once for each kind and place of an exception."""
        # Of the code of a user, in which the traceback of an exception shows the line to correct.
        cause = error.__cause__ if isinstance(error, EnvironmentFailedError | RendererFailedError) else None
        trace = None if cause is None else cause.__traceback__
        # The innermost frame is the line of the user's code that raised.
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = None if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        kind: tuple[object, ...] = (type(error), type(cause), place)
        remote = ""
        if isinstance(error, RemoteFailureError):
            failure = error.failure
            places = [line for line in failure.trace.splitlines() if line.lstrip().startswith("File ")]
            kind, remote = (failure.error_type, failure.kind, *places[-1:]), failure.trace and f"\n{failure.trace}"
        if kind in self._logged:
            return
        self._logged.add(kind)
        log.warning(
            "episode %s failed: %s (further failures of this kind are in the episodes' `error` and not logged)%s",
            episode.episode_id,
            episode.error,
            remote,
            exc_info=cause,
        )

    def warn_of_outage(self, episode: Trajectory, seconds: float) -> None:
        """Log, once until a turn ends, that an episode waits for an engine that cannot be reached."""
        if not self.is_outage_logged:
            self.is_outage_logged = True
            log.warning(
                "the engine cannot be reached; each episode that needs it begins again for up to %g seconds "
                "(RetryPolicy.outage_seconds), after which such attempts count. Episode %s failed: %s",
                seconds,
                episode.episode_id,
                episode.error,
            )

    def warn_of_score(self, episode_id: str, error: BaseException, text: str) -> None:
        """Log, once for each kind of error, that an episode could not be scored, which is tried again."""
        if (kind := ("score", type(error))) not in self._logged:
            self._logged.add(kind)
            log.warning("episode %s could not be scored, which is tried again (RetryPolicy): %s", episode_id, text)

    def turn_finished(self, event: TurnFinished) -> None:
        """Emit the event; log once that an episode without a limit of turns or time goes on and on."""
        self.is_outage_logged = False
        self.emit(event)
        if self._warns_of_turns and event.turn + 1 >= _MANY_TURNS:
            self._warns_of_turns = False
            log.warning(
                "episode %s has had %d turns and has no limit of turns or time; if its environment is never done, pass "
                "limits=EpisodeLimits(max_turns=...) or episode_seconds=... to the Runner",
                event.episode_id,
                event.turn + 1,
            )
