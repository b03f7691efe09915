"""How far the log-probabilities that a sampler gave are from the trainer's own: `--check-mismatch`."""

from collections.abc import Sequence

import numpy as np

from rollouts.training.datums import Datum
from rollouts.training.mismatch.report import difference_statistics
from rollouts.training.trainer import LossResult


def mismatch(data: Sequence[Datum], result: LossResult) -> dict[str, float]:
    """`mismatch:mean` and `mismatch:max` of |log p(trainer) - log p(sampler)| in nats, for metrics of `result`.

    The tokens are those with an advantage whose rows bring the sampler's `logprobs`, without those that a
    `mask` leaves out; empty where there are none. Of tokens that older weights have sampled the difference
    includes the steps since. A log-probability that is not a number counts as an infinite difference.
    """
    differences = []
    for datum, trainer in zip(data, result.logprobs, strict=True):
        if {"logprobs", "advantages"} <= datum.inputs.keys():
            counts = (datum.inputs["advantages"] != 0) & (datum.inputs.get("mask", np.ones(len(datum))) != 0)
            with np.errstate(invalid="ignore"):
                differences.append(trainer[counts].astype(np.float64) - datum.inputs["logprobs"][counts])
    difference = np.concatenate([np.empty(0), *differences])
    if not len(difference):
        return {}
    figures = difference_statistics(np.where(np.isnan(difference), np.inf, difference))
    return {"mismatch:mean": figures.mean_abs, "mismatch:max": figures.max_abs}
