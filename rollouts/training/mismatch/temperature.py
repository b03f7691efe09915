"""Fits the temperature at which a model gives the log-probabilities that another side reported."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rollouts.training.batch.training_batch import TrainingBatch
from rollouts.training.logprobs import token_logprobs_and_entropy
from rollouts.training.mismatch.compared import compare_tokens

_STEPS = 8
_LARGEST = 20.0


class FittedTemperature(NamedTuple):
    """`temperature`, and the log-probabilities of the trained tokens at it, float64 (n,)."""

    temperature: float
    logprobs: np.ndarray


def fitted_temperature(model: Any, batch: TrainingBatch, reported: np.ndarray) -> FittedTemperature:
    """The temperature T that brings log softmax(z / T) of the trained tokens closest to `reported` float64 (n,).

    Least squares over b = 1 / T by Gauss-Newton: the derivative of log softmax(b z) at the token y is z_y minus the
    mean of z, which is (log-probability + entropy) / b. One forward pass a step, at most 8, between T = 0.05 and 20.
    """
    inverse, best = 1.0, FittedTemperature(1.0, np.empty(0))
    least = np.inf
    for _ in range(_STEPS):
        scored = token_logprobs_and_entropy(model, batch, temperature=1 / inverse)
        logprobs = compare_tokens(batch, scored.logprobs).trainer.astype(np.float64)
        entropy = compare_tokens(batch, scored.entropy).trainer
        rest = reported - logprobs
        if (error := float(rest @ rest)) < least:
            least, best = error, FittedTemperature(1 / inverse, logprobs)
        slope = (logprobs + entropy) / inverse
        if not (curvature := float(slope @ slope)):
            return best
        step = float(slope @ rest) / curvature
        inverse = float(np.clip(inverse + step, max(inverse / 4, 1 / _LARGEST), min(4 * inverse, _LARGEST)))
        if abs(step) < 1e-5 * inverse:
            return best
    return best
