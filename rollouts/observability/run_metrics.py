"""Counts what a runner reports."""

import heapq
import logging
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import TypeAlias

import numpy as np

from rollouts.errors import short_repr
from rollouts.runner.events import (
    EpisodeEnded,
    EpisodeRetried,
    EpisodeStarted,
    EpisodeWaiting,
    GroupDelivered,
    GroupFinished,
    GroupSkipped,
    GroupStale,
    RunnerEvent,
    TurnFinished,
    WeightsUpdated,
)
from rollouts.runner.reporting import COUNTED, count_event
from rollouts.values import mean_and_spread

#: Upper bounds in seconds, from a renderer's milliseconds to an episode's hour.
BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


class Histogram:
    """Durations in seconds: their number, their sum, and how many are at most each of `BOUNDS`."""

    __slots__ = ("_counts", "sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, number of durations at most that long), ascending; the last bound is infinite."""
        pairs: list[tuple[float, int]] = []
        total = 0
        for bound, count in zip((*BOUNDS, float("inf")), self._counts.copy(), strict=True):
            total += count
            pairs.append((bound, total))
        return pairs


class RecentRate:
    """Growth per second of a total over the last one to four windows of `window` seconds.

    It is 0 once nothing was added for two windows.
    """

    __slots__ = ("_begun", "_earlier_begun", "_earlier_total", "_total", "_total_then", "_window")

    def __init__(self, now: float, window: float = 10.0) -> None:
        self._window = window
        self._total = self._total_then = self._earlier_total = 0.0
        self._begun = self._earlier_begun = now

    def add(self, amount: float, now: float) -> None:
        self._total += amount
        since = now - self._begun
        if since >= self._window:
            # After a pause of a window or more, the window before the new one is the pause.
            paused = since >= 2 * self._window
            self._earlier_total = self._total - amount if paused else self._total_then
            self._earlier_begun = now - self._window if paused else self._begun
            self._total_then, self._begun = self._total, now

    def per_second(self, now: float) -> float:
        """The rate at the time `now`, taken over at least one second. May be called from any thread."""
        if now - self._begun >= 2 * self._window:
            return 0.0
        return (self._total - self._earlier_total) / max(now - self._earlier_begun, 1.0)


log = logging.getLogger("rollouts.observability")


def length_stops_warning(length_stops: int, turns: int) -> str:
    """What to say of a run in which many turns were cut; empty below 20 %."""
    if length_stops < 0.2 * turns or not length_stops:
        return ""
    return (
        f"{length_stops:,} of {turns:,} turns ({length_stops / turns:.0%}) were cut before the model had ended them: "
        "raise max_tokens of the sampling, or serve the model with a longer context"
    )


#: Over how many groups the means of rewards and staleness are taken.
RECENT_GROUPS = 64

#: Returns metrics that are not counted from events, by their keys (`EngineMonitor`, `RendererStats`).
Source: TypeAlias = Callable[[], Mapping[str, float]]


class RunMetrics:
    """A listener of a runner that counts its events; `metrics()` is a dict of numbers.

        metrics = RunMetrics()
        async with Runner(..., listeners=[metrics]) as runner:
            ...
        metrics.metrics()["turns"]

    `rollouts.observability.METRICS` has the kind, unit and meaning of each key. `sources` are functions that
    return further metrics of the table; one that raises is logged, and its metrics are absent until it
    succeeds. Events come from one event loop; `metrics` may be called from any thread. `clock` returns
    seconds.
    """

    def __init__(self, *, sources: Iterable[Source] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._sources = tuple(sources)
        self._clock = clock
        self._begun = clock()
        #: Episode id -> what it waits for, and since when.
        self._running: dict[str, tuple[str, float]] = {}
        #: When failed attempts are repeated, as a heap, so that those that have passed are found at its
        #: start.
        self._retries: list[float] = []
        self._failed_sources: set[int] = set()  # by index
        self._queued: set[str] = set()
        self._counts: dict[str, float] = dict.fromkeys(COUNTED, 0)
        self.histograms = {
            name: Histogram()
            for name in (
                "episode_seconds",
                "turn_seconds/engine",
                "turn_seconds/renderer",
                "turn_seconds/environment",
                "group_seconds",
                "weight_update_seconds",
            )
        }
        self._turn_rate, self._token_rate = RecentRate(self._begun), RecentRate(self._begun)
        self._finished: deque[GroupFinished] = deque(maxlen=RECENT_GROUPS)
        self._staleness: deque[int] = deque(maxlen=RECENT_GROUPS)
        #: The version of the last update of the weights; empty before the first.
        self.weight_version = ""

    def __call__(self, event: RunnerEvent) -> None:
        now = self._clock()
        count_event(event, self._counts)
        match event:
            case EpisodeStarted():
                self._running[event.episode_id] = ("", now)
            case EpisodeWaiting() if event.episode_id in self._running:
                self._running[event.episode_id] = (event.waiting_for, now)
            case TurnFinished():
                for part in ("engine", "renderer", "environment"):
                    self.histograms[f"turn_seconds/{part}"].add(getattr(event, f"{part}_seconds"))
                self._turn_rate.add(1, now)
                self._token_rate.add(event.completion_tokens, now)
            case EpisodeEnded():
                self._running.pop(event.episode_id, None)
                self.histograms["episode_seconds"].add(event.seconds)
            case EpisodeRetried():
                while self._retries and self._retries[0] <= now:
                    heapq.heappop(self._retries)
                heapq.heappush(self._retries, now + event.delay_seconds)
            case GroupFinished():
                self.histograms["group_seconds"].add(event.seconds)
                self._queued.add(event.task_id)
                self._finished.append(event)
            case GroupDelivered():
                self._queued.discard(event.task_id)
                self._staleness.append(event.staleness)
            case GroupSkipped() | GroupStale(action="drop"):
                self._queued.discard(event.task_id)
            case WeightsUpdated():
                self.histograms["weight_update_seconds"].add(event.seconds)
                self.weight_version = event.version

    def metrics(self) -> dict[str, float]:
        """Every metric that has a value now. A histogram has two keys, `NAME_count` and `NAME_sum`."""
        now = self._clock()
        values: dict[str, float] = {
            **self._counts.copy(),
            "turns_per_second": self._turn_rate.per_second(now),
            "completion_tokens_per_second": self._token_rate.per_second(now),
            "groups_queued": len(self._queued),
            "run_seconds": now - self._begun,
            **self._waits(now),
            **self._means(),
        }
        for key, histogram in self.histograms.items():
            name, slash, label = key.partition("/")
            values[f"{name}_count{slash}{label}"] = histogram.count
            values[f"{name}_sum{slash}{label}"] = histogram.sum
        for index, source in enumerate(self._sources):
            values.update(self._read(index, source))
        return values

    def _read(self, index: int, source: Source) -> dict[str, float]:
        """The metrics of a source; none if it fails, because what observes a run does not end it."""
        try:
            values = dict(source())
            for key, value in values.items():
                if not isinstance(key, str) or not isinstance(value, Real):
                    raise TypeError(f"a source returns numbers by name, not {short_repr(key)}: {short_repr(value)}")
        except Exception:  # a source of a user may raise anything
            if index not in self._failed_sources:
                log.exception("the source %s of metrics failed; it is left out until it succeeds", short_repr(source))
            self._failed_sources.add(index)
            return {}
        self._failed_sources.discard(index)
        return values

    def _waits(self, now: float) -> dict[str, float]:
        waits = [wait for wait in self._running.copy().values() if wait[0]]
        values: dict[str, float] = {"episodes_running": len(self._running)}
        if retries := sum(ends_at > now for ends_at in self._retries.copy()):
            values["episodes_waiting/retry"] = retries
        for waiting_for, count in Counter(waiting_for for waiting_for, _ in waits).items():
            values[f"episodes_waiting/{waiting_for}"] = count
        values["longest_wait_seconds"] = max((now - since for _, since in waits), default=0.0)
        return values

    def _means(self) -> dict[str, float]:
        values: dict[str, float] = {}
        finished = self._finished.copy()
        columns = {
            "total_reward_mean": [group.total_rewards for group in finished],
            "environment_reward_mean": [group.environment_rewards for group in finished],
            "group_reward_mean": [group.group_rewards for group in finished],
        }
        for name in sorted({name for group in finished for name in group.reward_parts}):
            parts = [group.reward_parts[name] for group in finished if name in group.reward_parts]
            columns[f"reward_part_mean/{name}"] = parts
        for name, arrays in columns.items():
            found = mean_and_spread(value for array in arrays for value in np.asarray(array, np.float64).tolist())
            if found.used:
                values[name] = found.mean
        if staleness := self._staleness.copy():
            values["staleness_mean"] = sum(staleness) / len(staleness)
            values["staleness_max"] = max(staleness)
        return values
