"""Samples that train nothing: they fill a batch up to the number of samples that all ranks need."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollouts.training.samples import TrainingSample

_NAME = "padding"


def neutral_sample(token_id: int) -> TrainingSample:
    """A sample of one token `token_id` without loss and without media."""
    return TrainingSample(
        token_ids=np.array([token_id], dtype=np.int32),
        loss_mask=np.zeros(1, dtype=bool),
        logprobs=np.zeros(1, dtype=np.float32),
        advantages=np.zeros(1, dtype=np.float32),
        name=_NAME,
    )


def without_training(sample: TrainingSample) -> TrainingSample:
    """`sample` with the same tokens and the same media objects, but no trained token."""
    count = len(sample)
    return replace(
        sample,
        loss_mask=np.zeros(count, dtype=bool),
        logprobs=np.zeros(count, dtype=np.float32),
        advantages=np.zeros(count, dtype=np.float32),
        weight_spans=(),
        name=_NAME,
        routed_experts=None,
    )
