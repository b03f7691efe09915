"""The trainer's log-probabilities of the trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollouts.models.placed_rows import place_rows
from rollouts.models.qwen3_vl import hidden_states, require_qwen3_vl, vision_features
from rollouts.training.batch import OWN_FORWARD, TrainingBatch
from rollouts.training.samples import TrainingSample


def token_logprobs(model: Any, batch: TrainingBatch) -> torch.Tensor:
    """log p(token t | tokens before t) float32 (B, T) where `loss_mask` is True, 0 elsewhere. Differentiable.

    Equal rows share one forward pass (episodes of a group often sample the same completion), an image that is in many
    rows passes the vision tower once, and the output layer runs on trained positions only.
    """
    require_qwen3_vl(model, OWN_FORWARD)
    distinct, row_of = _distinct_rows(batch.samples)
    rows = place_rows(
        [sample.token_ids for sample in distinct],
        [sample.media for sample in distinct],
        pad_id=batch.pad_id,
        merge_size=model.config.vision_config.spatial_merge_size,
        side="right",
    )
    features = vision_features(model, rows.items) if rows.items else []
    hidden = hidden_states(model, rows, features)
    mask = batch.loss_mask.to(hidden.device)
    row, column = mask.nonzero(as_tuple=True)
    source = torch.tensor(row_of, device=hidden.device)[row]
    # A token is predicted at the position before it; the first token of a row is never trained.
    logits = model.lm_head(hidden[source, column - 1]).float()
    targets = batch.input_ids.to(hidden.device)[mask]
    scored = torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0]
    return torch.zeros(mask.shape, dtype=torch.float32, device=hidden.device).masked_scatter(mask, scored)


def _distinct_rows(samples: Sequence[TrainingSample]) -> tuple[list[TrainingSample], list[int]]:
    """The samples that differ in ids or images, and for every sample the index of the one that it equals."""
    index_of: dict[tuple[bytes, tuple[str, ...]], int] = {}
    distinct: list[TrainingSample] = []
    row_of = []
    for sample in samples:
        # The key includes offsets: with a sampled placeholder token beside an image, equal ids have two placements.
        images = tuple(f"{item.mm_hash}@{placeholder.offset}" for item, placeholder in sample.media)
        index = index_of.setdefault((sample.token_ids.tobytes(), images), len(distinct))
        if index == len(distinct):
            distinct.append(sample)
        row_of.append(index)
    return distinct, row_of
