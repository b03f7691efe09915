"""The estimates of an evaluation, added up over the groups of its tasks."""

from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from typing import Any

import numpy as np

from rollouts.errors import ArgumentError
from rollouts.evaluation.results import EvaluationResults, FailedEpisodes
from rollouts.evaluation.statistics import Estimate, mean_of_tasks, pass_hat_k, rate_of_tasks, reward_of_tasks
from rollouts.evaluation.task_scores import TaskScores, chosen_k, known
from rollouts.observability.group_metrics import GroupMetrics
from rollouts.runner import Runner
from rollouts.task import Task
from rollouts.values import check_integer


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
        self._k = chosen_k(self._samples, k)
        self._scores = TaskScores(threshold, failed)

    def add(self, row: GroupMetrics) -> None:
        """Add the group of a task. Raises `ArgumentError` for another number of episodes than `samples`."""
        count = len(row.total_rewards)
        if count != self._samples:
            rule = f"the group of task {row.task_id!r:.80} has so many episodes; pass groups of {self._samples}"
            raise ArgumentError("row", count, rule)
        self._scores.add(row)

    def results(self, *, complete: bool, configuration: Mapping[str, Any] | None = None) -> EvaluationResults:
        """The estimates over the groups so far. `complete` and `configuration` are as in `EvaluationResults`."""
        scores = self._scores
        scores.complete()
        rewards, parts = scores.rewards, scores.parts
        truncated = np.array(scores.truncated, np.float64) / np.array(scores.episodes)
        return EvaluationResults(
            complete=complete,
            tasks=len(scores.places),
            samples=self._samples,
            episodes=sum(scores.episodes),
            failed_episodes=scores.failed_episodes,
            threshold=scores.threshold,
            total_reward=_estimate(rewards.get("total", ()), reward_of_tasks),
            environment_reward=_estimate(rewards.get("environment", ()), reward_of_tasks),
            group_reward=_estimate(rewards.get("group", ()), mean_of_tasks),
            reward_parts={name: reward_of_tasks(known(parts[name])) for name in sorted(parts)},
            pass_at_k=self._rates(scores.pass_at),
            pass_hat_k=self._rates(lambda k: scores.pass_at(k, pass_hat_k)),
            truncated=_estimate(truncated, rate_of_tasks),
            **scores.totals,
            errors=scores.errors.most_frequent(),
            configuration=dict(configuration or {}),
            warnings=[*_warnings(scores), *scores.warnings()],
        )

    def _rates(self, column: Callable[[int], np.ndarray]) -> dict[int, Estimate]:
        found = {k: known(column(k)) for k in self._k}
        return {k: rate_of_tasks(values) for k, values in found.items() if len(values)}


def _warnings(scores: TaskScores) -> Iterable[str]:
    low, high, threshold = scores.lowest, scores.highest, scores.threshold
    all_alike = low == high and low in (0, 1)  # nothing, or everything, is right
    if low <= high and not all_alike and not low <= threshold <= high:
        all_or_none = "no episode succeeds" if threshold > high else "every episode succeeds"
        yield (
            f"the threshold {threshold:g} is outside of the rewards, which are from {low:g} to {high:g}: "
            f"{all_or_none}; choose another threshold"
        )
    if without := scores.counts.count(0):
        yield f"{without:,} of {len(scores.places):,} tasks have no episode that counts, and are in no estimate"


def _estimate(column: Iterable[float], of_tasks: Callable[[np.ndarray], Estimate]) -> Estimate | None:
    values = known(column)
    return of_tasks(values) if len(values) else None


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

    The runner's `group_size` is the number of samples of each task; its engine may be a `ChatEndpoint`, with
    None for the renderer. No episode is kept: a listener of the runner, or iterating over `runner.stream` and
    adding each group to a `Tally`, sees them. `rollouts eval` stores them.

    - `threshold`: the total reward from which on an episode succeeds.
    - `failed`: "zero": a failed episode has the reward 0, and is no success; "exclude": it does not count.
    - `k`: those of pass@k and pass^k, at most `group_size`; by default the powers of 2 up to it, and it
      itself.

    Raises `ArgumentError`, before any episode, and what `runner.stream` raises.
    """
    tally = Tally(samples=runner.group_size, threshold=threshold, failed=failed, k=k)
    async for group in runner.stream(tasks):
        tally.add(GroupMetrics.of(group))
    return tally.results(complete=True)
