"""Scores of tasks: which episodes count and which succeed, added up over groups, and the k of pass@k."""

from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from rollouts.errors import ArgumentError
from rollouts.evaluation.results import ErrorCount, FailedEpisodes
from rollouts.evaluation.statistics import pass_at_k
from rollouts.observability.group_metrics import GroupMetrics
from rollouts.observability.run_metrics import length_stops_warning
from rollouts.terminal.text import shortened
from rollouts.values import check_choice, check_integer, finite_number

#: Columns of more named rewards are not kept; a run that names its rewards by task would have one for each task.
MOST_PARTS: Final = 64
#: Fields of `GroupMetrics` of which the sums are kept.
TOTALS: Final = ("failed", "turns", "length_stops", "tokens", "sampled_tokens", "images", "sounds")


class ErrorCounts:
    """Counts the errors of episodes by their kinds, each with the first text of it, shortened to 1,000 characters."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, texts: Iterable[str]) -> None:
        """Count texts of the form "KindOfError: text"."""
        for text in texts:
            kind = text.partition(":")[0]
            self._counts[kind] += 1
            self._examples.setdefault(kind, shortened(text, 1000))  # it may quote a whole message

    def most_frequent(self) -> dict[str, ErrorCount]:
        """The ten most frequent kinds."""
        counts = self._counts.most_common(10)
        return {kind: ErrorCount(episodes=count, example=self._examples[kind]) for kind, count in counts}


class TaskScores:
    """Adds up the groups of a run by their tasks. It keeps a few numbers for each task, and no episode.

    A failed episode, or one with a reward that is not finite or 1e150 or more, never succeeds; it has rewards
    of 0 with "zero", and is left out with "exclude". A task with several groups, as of a training run, has
    the episodes of all.

    Columns have a value for each task, at its number in `places`:

    - `rewards`, `parts`: by name, the mean over the task's episodes that count, float64; NaN where there is
      none. The names of `rewards` are "total", "environment" and "group". Columns are complete after
      `complete`.
    - `episodes`, `counts`, `successes`, `truncated`: its episodes, those that count, that succeed, that a
      limit ended.

    `lowest` and `highest` are those of the total rewards of episodes that count, `unusable` the episodes that
    did not fail and have a reward that cannot be used.
    """

    def __init__(self, threshold: float, failed: FailedEpisodes) -> None:
        self.threshold, self.failed_episodes = checked_counting(threshold, failed)
        self.places: dict[str, int] = {}
        self.rewards: dict[str, array[float]] = {}
        self.parts: dict[str, array[float]] = {}
        self.episodes, self.counts, self.successes, self.truncated = (array("q") for _ in range(4))
        self.totals: dict[str, Any] = dict.fromkeys(TOTALS, 0)
        self.errors = ErrorCounts()
        self.lowest, self.highest = math.inf, -math.inf
        self.unusable = 0
        self.left_out_parts: set[str] = set()
        self._without_parts: list[int] = []

    def add(self, row: GroupMetrics) -> None:
        """Add a group."""
        names = ["total", "environment", "group", *row.reward_parts]
        columns = [row.total_rewards, row.environment_rewards, row.group_rewards, *row.reward_parts.values()]
        values = np.array(columns, np.float64)
        # False for NaN, too, and for rewards whose squares have no float.
        counting = np.logical_and.reduce(np.abs(values) < 1e150)
        counting[row.failed_episodes] = False
        self.unusable += int((~counting).sum()) - row.failed
        values = np.where(counting, values, 0.0)
        successes = counting & (values[0] >= self.threshold)
        if self.failed_episodes == "exclude":
            values = values[:, counting]
        place = self.places.setdefault(row.task_id, len(self.places))
        if place == len(self.counts):
            for column in (self.episodes, self.counts, self.successes, self.truncated):
                column.append(0)
        if count := values.shape[1]:
            self.lowest = min(self.lowest, float(values[0].min()))
            self.highest = max(self.highest, float(values[0].max()))
            if row.failed == len(counting):  # its parts, of which the names are not known, are 0 as its total is
                self._without_parts.append(place)
            for number, (name, rewards) in enumerate(zip(names, (values / count).tolist(), strict=True)):
                mean = math.fsum(rewards)
                self._put(self.rewards if number < 3 else self.parts, name, place, mean, count)
        self.episodes[place] += len(counting)
        self.counts[place] += count
        self.successes[place] += int(successes.sum())
        self.truncated[place] += row.truncated
        for name in TOTALS:
            self.totals[name] += getattr(row, name)
        self.errors.add(row.errors)

    def _put(self, columns: dict[str, array[float]], name: str, place: int, mean: float, count: int) -> None:
        """Set the mean of a task, or combine it with that of the task's groups before."""
        if name not in columns and len(columns) == MOST_PARTS:
            if len(self.left_out_parts) < MOST_PARTS:
                self.left_out_parts.add(name)
            return
        column = columns.setdefault(name, array("d"))
        _fill(column, place + 1)
        if not math.isnan(column[place]):
            share = count / (self.counts[place] + count)
            mean = column[place] * (1 - share) + mean * share
        column[place] = mean

    def complete(self) -> None:
        """Give the columns a value for each task so far."""
        for column in (*self.rewards.values(), *self.parts.values()):
            _fill(column, len(self.places))
        for column in self.parts.values():
            for place in self._without_parts:
                column[place] = 0.0 if math.isnan(column[place]) else column[place]

    def pass_at(self, k: int, estimate: Callable[[int, int, int], float] = pass_at_k) -> np.ndarray:
        """The estimate for k samples of each task, float64 (tasks,); NaN where fewer than `k` episodes count."""
        values = {(n, c): estimate(n, c, k) for n, c in {*zip(self.counts, self.successes, strict=True)} if k <= n}
        return np.array([values.get(pair, math.nan) for pair in zip(self.counts, self.successes, strict=True)])

    def warnings(self) -> Iterable[str]:
        """What a reader has to know of the episodes that were added."""
        if self.unusable:
            yield (
                f"{self.unusable:,} episodes have a reward that is not finite, or 1e150 or more: they count as failed"
            )
        if self.left_out_parts:
            yield f"it has more than {MOST_PARTS} named rewards; the others are left out"
        if warning := length_stops_warning(self.totals["length_stops"], self.totals["turns"]):
            yield warning


def known(column: Any) -> np.ndarray:
    """The values of a column that are there, float64."""
    values = np.asarray(column, np.float64)
    found: np.ndarray = values[np.isfinite(values)]
    return found


def _fill(column: array[float], length: int) -> None:
    column.extend(itertools.repeat(math.nan, length - len(column)))


def chosen_k(samples: int, k: Iterable[int] | None) -> tuple[int, ...]:
    """The k of pass@k and pass^k: those given, or the powers of 2 up to `samples`, and `samples` itself.

    Raises `ArgumentError` for a k that `samples` episodes of a task do not allow.
    """
    if k is None:
        return tuple(sorted({1 << power for power in range(samples.bit_length())} | {samples}))
    chosen = sorted({check_integer("k", one) for one in k})
    if chosen and chosen[-1] > samples:
        raise ArgumentError(
            "k", chosen[-1], f"pass at most {samples}, the number of episodes of a task, or sample more"
        )
    return tuple(chosen)


def checked_counting(threshold: float, failed: FailedEpisodes) -> tuple[float, FailedEpisodes]:
    """The arguments that say which episodes succeed. Raises `ArgumentError`."""
    number = finite_number(threshold)
    if number is None or isinstance(threshold, bool):
        raise ArgumentError("threshold", threshold, "pass a finite number")
    check_choice("failed", failed, FailedEpisodes)
    return number, failed
