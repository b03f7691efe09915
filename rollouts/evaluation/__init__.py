"""Evaluations: estimates of rewards and success rates with intervals clustered by task."""

from rollouts.evaluation.evaluate import evaluate
from rollouts.evaluation.results import EvaluationResults, FailedEpisodes, Tally
from rollouts.evaluation.statistics import (
    Estimate,
    PairedDifference,
    mean_of_tasks,
    paired_difference,
    pass_at_k,
    pass_hat_k,
    rate_of_tasks,
)

__all__ = [
    "Estimate",
    "EvaluationResults",
    "FailedEpisodes",
    "PairedDifference",
    "Tally",
    "evaluate",
    "mean_of_tasks",
    "paired_difference",
    "pass_at_k",
    "pass_hat_k",
    "rate_of_tasks",
]
