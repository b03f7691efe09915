"""Log-probabilities of a mixture-of-experts model with the experts that the sampler took."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rollouts.models.expert_routing import replayed_experts
from rollouts.models.forward_pass import ForwardPass
from rollouts.training.batch.training_batch import TrainingBatch
from rollouts.training.logprobs import token_logprobs
from rollouts.training.mismatch.compared import compare_tokens
from rollouts.training.samples import TrainingSample


class ReplayedRouting(NamedTuple):
    """`logprobs` of the trained tokens, float64 (n,), with the sampler's experts.

    `choices`: the experts of a token in a layer, counted over all; `different`: those for which the model chose others.
    """

    logprobs: np.ndarray
    choices: int
    different: int


def replayed_routing(model: Any, pad_id: int, sample: TrainingSample) -> ReplayedRouting:
    """The log-probabilities of a sample, which has `routed_experts`, in one forward pass with these experts.

    Raises the errors of `replayed_experts` and `token_logprobs`.
    """
    experts = sample.routed_experts
    assert experts is not None
    batch = TrainingBatch.from_samples([sample], pad_id=pad_id)
    forward = ForwardPass(model)  # the first one of a model runs a pass of its own
    with replayed_experts(forward.architecture, experts[1:]) as comparison:
        tokens = compare_tokens(batch, token_logprobs(model, batch))
    return ReplayedRouting(tokens.trainer.astype(np.float64), comparison.choices, comparison.different)
