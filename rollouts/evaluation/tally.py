"""The estimates of an evaluation, added up over the groups of its tasks."""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np

from rollouts.errors import ArgumentError
from rollouts.evaluation.results import ErrorCount, EvaluationResults, FailedEpisodes
from rollouts.evaluation.statistics import (
    Estimate,
    mean_of_tasks,
    pass_at_k,
    pass_hat_k,
    rate_of_tasks,
    reward_of_tasks,
)
from rollouts.evaluation.task_scores import checked_counting, chosen_k, task_scores, unusable_warning
from rollouts.observability.group_metrics import GroupMetrics
from rollouts.observability.run_metrics import length_stops_warning
from rollouts.runner import Runner
from rollouts.task import Task
from rollouts.terminal.text import shortened
from rollouts.values import check_integer

_TOTALS: Final = ("failed", "turns", "length_stops", "tokens", "sampled_tokens", "images", "sounds")


class Tally:
    """Adds up the groups of an evaluation. It keeps a few numbers for each task, and no episode.

        tally = Tally(samples=4, threshold=1.0)
        for group in groups:
            tally.add(GroupMetrics.of(group))
        tally.results(complete=True).pass_at_k[1].value

    - `samples`: the episodes of each task.
    - `threshold`: the total reward from which on an episode succeeds.
    - `failed`: how failed episodes count.
    - `k`: those of pass@k and pass^k (`chosen_k`).

    Raises `ArgumentError` for other values.
    """

    def __init__(
        self,
        *,
        samples: int,
        threshold: float = 1.0,
        failed: FailedEpisodes = "zero",
        k: Iterable[int] | None = None,
    ) -> None:
        self._samples = check_integer("samples", samples)
        self._threshold, self._failed = checked_counting(threshold, failed)
        self._rewards: defaultdict[str, array[float]] = defaultdict(_column)
        self._parts: defaultdict[str, array[float]] = defaultdict(_column)
        self._pass_at: dict[int, array[float]] = {one: _column() for one in chosen_k(self._samples, k)}
        self._pass_hat: dict[int, array[float]] = {one: _column() for one in self._pass_at}
        self._truncated = _column()
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._episodes = self._without_parts = self._unusable = 0
        self._lowest, self._highest = math.inf, -math.inf
        self._errors: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, row: GroupMetrics) -> None:
        """Add the group of a task. Raises `ArgumentError` for another number of episodes than `samples`."""
        count = len(row.total_rewards)
        if count != self._samples:
            rule = f"the group of task {row.task_id!r:.80} has so many episodes; pass groups of {self._samples}"
            raise ArgumentError("row", count, rule)
        self._episodes += count
        for name in self._totals:
            self._totals[name] += getattr(row, name)
        self._truncated.append(row.truncated / count)
        for text in row.errors:
            kind = text.partition(":")[0]
            self._errors[kind] += 1
            self._examples.setdefault(kind, shortened(text, 1000))
        scores = task_scores(row, self._threshold, self._failed)
        total = scores.rewards["total"]
        self._unusable += scores.unusable
        if not len(total):
            return
        self._without_parts += scores.all_failed  # what the parts would have been named is not known
        self._lowest, self._highest = min(self._lowest, total.min()), max(self._highest, total.max())
        for columns, values in ((self._rewards, scores.rewards), (self._parts, scores.parts)):
            for name, column in values.items():
                columns[name].append(column.mean())
        successes = int(scores.successes.sum())
        for k in self._pass_at:
            if k <= len(total):
                self._pass_at[k].append(pass_at_k(len(total), successes, k))
                self._pass_hat[k].append(pass_hat_k(len(total), successes, k))

    def results(self, *, complete: bool, configuration: Mapping[str, Any] | None = None) -> EvaluationResults:
        """The estimates over the groups so far. `complete` and `configuration` are as in `EvaluationResults`."""
        return EvaluationResults(
            complete=complete,
            tasks=len(self._truncated),
            samples=self._samples,
            episodes=self._episodes,
            failed_episodes=self._failed,
            threshold=self._threshold,
            total_reward=_estimate(self._rewards["total"], reward_of_tasks),
            environment_reward=_estimate(self._rewards["environment"], reward_of_tasks),
            group_reward=_estimate(self._rewards["group"], mean_of_tasks),
            reward_parts={
                name: reward_of_tasks(np.append(self._parts[name], np.zeros(self._without_parts)))
                for name in sorted(self._parts)
            },
            pass_at_k={k: rate_of_tasks(np.array(column)) for k, column in self._pass_at.items() if column},
            pass_hat_k={k: rate_of_tasks(np.array(column)) for k, column in self._pass_hat.items() if column},
            truncated=_estimate(self._truncated, rate_of_tasks),
            failed=self._totals["failed"],
            turns=self._totals["turns"],
            length_stops=self._totals["length_stops"],
            tokens=self._totals["tokens"],
            sampled_tokens=self._totals["sampled_tokens"],
            images=self._totals["images"],
            sounds=self._totals["sounds"],
            errors={
                kind: ErrorCount(episodes=count, example=self._examples[kind])
                for kind, count in self._errors.most_common(10)
            },
            configuration=dict(configuration or {}),
            warnings=list(self._warnings()),
        )

    def _warnings(self) -> Iterable[str]:
        all_alike = self._lowest == self._highest and self._lowest in (0, 1)  # nothing, or everything, is right
        if self._rewards["total"] and not all_alike and not self._lowest <= self._threshold <= self._highest:
            all_or_none = "no episode succeeds" if self._threshold > self._highest else "every episode succeeds"
            yield (
                f"the threshold {self._threshold:g} is outside of the rewards, which are from {self._lowest:g} to "
                f"{self._highest:g}: {all_or_none}; choose another threshold"
            )
        if self._unusable:
            yield unusable_warning(self._unusable)
        without = len(self._truncated) - len(self._rewards["total"])
        if without:
            yield f"{without:,} of {len(self._truncated):,} tasks have no episode that counts, and are in no estimate"
        if warning := length_stops_warning(self._totals["length_stops"], self._totals["turns"]):
            yield warning


def _column() -> array[float]:
    return array("d")


def _estimate(column: array[float], of_tasks: Callable[[np.ndarray], Estimate]) -> Estimate | None:
    return of_tasks(np.array(column)) if column else None


async def evaluate(
    runner: Runner,
    tasks: Iterable[Task] | AsyncIterable[Task],
    *,
    threshold: float = 1.0,
    failed: FailedEpisodes = "zero",
    k: Iterable[int] | None = None,
) -> EvaluationResults:
    """Run the groups of `tasks`, and return the estimates over them.

        async with Runner(make_environment, engine, renderer, sampling=sampling, group_size=4) as runner:
            results = await evaluate(runner, tasks)
        print(results.pass_at_k[1].value, results.pass_at_k[1].low, results.pass_at_k[1].high)

    The runner's `group_size` is the number of samples of each task; its engine may be a `ChatEndpoint`, with None for
    the renderer. No episode is kept: a listener of the runner, or iterating over `runner.stream` and adding each group
    to a `Tally`, sees them. `rollouts eval` stores them.

    - `threshold`: the total reward from which on an episode succeeds.
    - `failed`: "zero": a failed episode has the reward 0, and is no success; "exclude": it does not count.
    - `k`: those of pass@k and pass^k, at most `group_size`; by default the powers of 2 up to it, and it itself.

    Raises `ArgumentError`, before any episode, and what `runner.stream` raises.
    """
    tally = Tally(samples=runner.group_size, threshold=threshold, failed=failed, k=k)
    async for group in runner.stream(tasks):
        tally.add(GroupMetrics.of(group))
    return tally.results(complete=True)
