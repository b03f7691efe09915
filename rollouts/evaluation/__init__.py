"""An evaluation estimates rewards and success rates, with intervals clustered by task, and compares runs."""

from rollouts.evaluation.comparing import compare_runs
from rollouts.evaluation.comparison import Comparison
from rollouts.evaluation.results import EvaluationResults, FailedEpisodes
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
from rollouts.evaluation.tally import Tally, evaluate

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
