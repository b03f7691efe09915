"""Evaluating with a runner: the groups of tasks, and what they say."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable

from rollouts.evaluation.results import EvaluationResults, FailedEpisodes, Tally
from rollouts.observability.group_metrics import GroupMetrics
from rollouts.runner import Runner
from rollouts.task import Task


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
