"""OpenRLHF: the fields of its `Experience` (openrlhf.trainer.ppo_utils.experience), as a dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rollouts.training.adapters.arguments import (
    fitting_samples,
    media_arguments,
    optional_columns,
    padded,
    presence,
    trained_values,
    weight_spans,
)
from rollouts.training.quarantine import Quarantine
from rollouts.training.samples import TrainingSample

_TARGET = "OpenRLHF Experience"


def openrlhf_experience(
    samples: Sequence[TrainingSample],
    *,
    pad_id: int,
    dtype: torch.dtype = torch.float32,
    drop: Quarantine | None = None,
) -> dict[str, Any]:
    """The keyword arguments of an OpenRLHF `Experience` of B rows, padded on the right to T tokens.

    `sequences`, `attention_mask` int64 (B, T). Column i of `action_mask` int64, `rollout_log_probs` and `advantages`
    float32 (B, T - 1) belongs to token i + 1, which the model predicts at position i. `total_length` and
    `response_length` (the trained tokens) are (B,); `mm_train_inputs` has the model's arguments of each row's media
    (floats of `dtype`), None for a row of text; `prompts` has the names of the samples; `info["weight_spans"]` has
    (version, start, end) for each span of a row, `info["routed_experts"]`, if a sample has them, those of
    each. Raises `AdapterError` for a sampled placeholder token, or with `drop` leaves its sample out and records it
    there.
    """
    samples = fitting_samples(_TARGET, samples, drop)
    lengths = [len(sample) for sample in samples]

    def actions(columns: list[np.ndarray], kind: type) -> torch.Tensor:
        return padded([column[1:] for column in columns], 0, kind, "right")

    return {
        "sequences": padded([sample.token_ids for sample in samples], pad_id, np.int64, "right"),
        "attention_mask": presence(lengths, "right"),
        "action_mask": actions([sample.loss_mask for sample in samples], np.int64),
        "rollout_log_probs": actions([trained_values(sample, "logprobs") for sample in samples], np.float32),
        "advantages": actions([trained_values(sample, "advantages") for sample in samples], np.float32),
        "total_length": torch.tensor(lengths, dtype=torch.float32),
        "response_length": torch.tensor([int(sample.loss_mask.sum()) for sample in samples]),
        "prompts": [sample.name for sample in samples],
        "mm_train_inputs": [media_arguments(_TARGET, [sample], dtype) or None for sample in samples],
        "info": {"weight_spans": [weight_spans(sample) for sample in samples], **optional_columns(samples)},
    }
