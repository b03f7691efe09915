"""What an evaluation adds up: how failed episodes count, what is warned of, what `results.json` holds."""

import math
from pathlib import Path
from typing import Any

import pytest
from evaluation.compared_runs import line

from rollouts.errors import ArgumentError, CommandFileError
from rollouts.evaluation import EvaluationResults, Tally
from rollouts.observability.group_metrics import GroupMetrics


def row(*group: Any, **values: Any) -> GroupMetrics:
    return GroupMetrics.model_validate(line(*group, **values))


def results_of(*rows: GroupMetrics, samples: int = 4, **options: Any) -> EvaluationResults:
    tally = Tally(samples=samples, **options)
    for one in rows:
        tally.add(one)
    return tally.results(complete=True)


def test_excluded_failures_leave_fewer_samples_and_no_estimate_for_more_k_than_these() -> None:
    results = results_of(row("a", [1, 1, 1, 1], failed=(0, 1)), row("b", [0, 0, 1, 0]), failed="exclude")
    assert results.total_reward is not None
    assert results.total_reward.value == (1.0 + 0.25) / 2
    assert {k: one.tasks for k, one in results.pass_at_k.items()} == {1: 2, 2: 2, 4: 1}
    assert results.failed == 2


def test_a_task_of_nothing_but_excluded_failures_is_named_and_in_no_estimate() -> None:
    results = results_of(row("a", [1, 1, 1, 1]), row("b", [0] * 4, failed=(0, 1, 2, 3)), failed="exclude")
    assert results.pass_at_k[1].tasks == 1
    assert any("1 of 2 tasks have no episode that counts" in warning for warning in results.warnings)


@pytest.mark.parametrize("reward", [math.inf, math.nan, -1e150])
def test_a_reward_that_no_estimate_can_use_is_no_success_and_is_said(reward: float) -> None:
    results = results_of(row("a", [reward, 1, 0, 0]))
    assert "1 episodes have a reward that is not finite, or 1e150 or more" in results.warnings[0]
    assert results.total_reward is not None
    assert results.total_reward.value == 0.25
    assert results.pass_at_k[1].value == 0.25


@pytest.mark.parametrize(("threshold", "said"), [(1.5, "no episode succeeds"), (-0.5, "every episode succeeds")])
def test_a_threshold_outside_of_the_rewards_is_named(threshold: float, said: str) -> None:
    results = results_of(row("a", [0, 0.25, 0.5, 1]), threshold=threshold)
    assert [said in warning for warning in results.warnings] == [True]
    assert not results_of(row("a", [0, 0.25, 0.5, 1]), threshold=0.5).warnings


def test_groups_of_another_size_are_refused() -> None:
    with pytest.raises(ArgumentError, match="task 'a' has so many episodes; pass groups of 4"):
        Tally(samples=4).add(row("a", [1.0]))


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(CommandFileError, match="no results of an evaluation"):
        EvaluationResults.read(path)
