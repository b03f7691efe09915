"""Which episodes of a task count and which succeed, and the k of pass@k that their number allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from rollouts.errors import ArgumentError
from rollouts.evaluation.results import FailedEpisodes
from rollouts.observability.group_metrics import GroupMetrics
from rollouts.values import check_choice, check_integer, finite_number


class TaskScores(NamedTuple):
    """The episodes of one task that count: rewards float64 (n,) by name, and which succeed, bool (n,).

    `unusable` episodes did not fail, and have a reward that is not finite or too large. `all_failed`: every episode of
    the task failed, so that its rewards have no parts.
    """

    rewards: Mapping[str, np.ndarray]
    parts: Mapping[str, np.ndarray]
    successes: np.ndarray
    unusable: int
    all_failed: bool


def task_scores(row: GroupMetrics, threshold: float, failed: FailedEpisodes) -> TaskScores:
    """The scores of a group.

    A failed episode, or one with a reward that is not finite or 1e150 or more, never succeeds; it has rewards of 0 with
    "zero", and is left out with "exclude".
    """
    rewards = {"total": row.total_rewards, "environment": row.environment_rewards, "group": row.group_rewards}
    columns = np.array([*rewards.values(), *row.reward_parts.values()], np.float64)
    # False for NaN, too, and for rewards whose squares have no float.
    counts = np.logical_and.reduce(np.abs(columns) < 1e150)
    counts[row.failed_episodes] = False
    columns = np.where(counts, columns, 0.0)
    successes = counts & (columns[0] >= threshold)
    unusable = int((~counts).sum()) - row.failed
    if failed == "exclude":
        columns, successes = columns[:, counts], successes[counts]
    return TaskScores(
        dict(zip(rewards, columns, strict=False)),
        dict(zip(row.reward_parts, columns[len(rewards) :], strict=True)),
        successes,
        unusable,
        row.failed == len(counts),
    )


def unusable_warning(episodes: int) -> str:
    """What to say of episodes with rewards that cannot be used."""
    return f"{episodes:,} episodes have a reward that is not finite, or 1e150 or more: they count as failed"


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
