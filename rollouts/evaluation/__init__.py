"""Evaluations: estimates of rewards and success rates with intervals clustered by task, and comparisons of runs."""

from rollouts.evaluation.comparison import Comparison, compare_runs
from rollouts.evaluation.results import EvaluationResults, FailedEpisodes, Tally, evaluate
from rollouts.evaluation.statistics import (
    Difference,
    Estimate,
    mean_of_tasks,
    paired_difference,
    pass_at_k,
    pass_hat_k,
    rate_of_tasks,
    reward_of_tasks,
    unpaired_difference,
)

__all__ = [
    "Comparison",
    "Difference",
    "Estimate",
    "EvaluationResults",
    "FailedEpisodes",
    "Tally",
    "compare_runs",
    "evaluate",
    "mean_of_tasks",
    "paired_difference",
    "pass_at_k",
    "pass_hat_k",
    "rate_of_tasks",
    "reward_of_tasks",
    "unpaired_difference",
]
