"""The trainer's log-probabilities of the trained tokens."""

from __future__ import annotations

from typing import Any

import torch

from rollouts.models.placement import place_rows
from rollouts.models.qwen3_vl import hidden_states, require_qwen3_vl, vision_features
from rollouts.training.batch import TrainingBatch


def token_logprobs(model: Any, batch: TrainingBatch) -> torch.Tensor:
    """log p(token t | tokens before t) float32 (B, T) where `loss_mask` is True, 0 elsewhere. Differentiable.

    Pictures are placed by range and each distinct one runs through the vision tower once, however many rows show it;
    the output layer runs on trained positions only.
    """
    require_qwen3_vl(model)
    rows = place_rows(
        [sample.token_ids for sample in batch.samples],
        [sample.media for sample in batch.samples],
        pad_id=batch.pad_id,
        merge_size=model.config.vision_config.spatial_merge_size,
        side="right",
    )
    features = vision_features(model, rows.items) if rows.items else []
    hidden = hidden_states(model, rows, features)
    mask = batch.loss_mask.to(hidden.device)
    before = torch.zeros_like(mask)
    before[:, :-1] = mask[:, 1:]  # the position that predicts a trained token is the one before it
    logits = model.lm_head(hidden[before]).float()
    targets = batch.input_ids.to(hidden.device)[mask]
    scored = torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0]
    return torch.zeros(mask.shape, dtype=torch.float32, device=hidden.device).masked_scatter(mask, scored)
