"""The media of samples as arguments of a trainer's model: tensors and token types."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from renderers.errors import MediaError
from renderers.rendered import TOKEN_TYPE_IDS
from rollouts.models.media_inputs import item_tensors
from rollouts.training.adapters.errors import LEAVE_OUT, AdapterError
from rollouts.training.samples import TrainingSample


def media_arguments(target: str, samples: Sequence[TrainingSample], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of the samples' media by the names of the model's arguments; empty without media.

    Uint8 pixels are normalised; floats have `dtype`, integers (grids) keep theirs. Several items are combined in order,
    as their `fields` describe. The samples are those of `check_samples`. Raises `AdapterError` where their media cannot
    be combined.
    """
    try:
        return item_tensors([item for sample in samples for item, _ in sample.media], dtype)
    except MediaError as error:
        names = ", ".join(sample.name for sample in samples if sample.media)
        raise AdapterError(
            target, f"{names:.200}", "media", f"{error!s}. Process their media with the processors of one renderer"
        ) from error


def refuse_other_arguments(target: str, sample: TrainingSample, supported: Collection[str]) -> None:
    """Raise `AdapterError` for a tensor of the media that the target has no field for."""
    for name in (name for item, _ in sample.media for name in item):
        if name not in supported:
            raise AdapterError(
                target,
                sample,
                "media",
                f"its media have the tensor {name}; the type has fields for {', '.join(supported)} only. {LEAVE_OUT}",
            )


def mm_token_type_ids(sample: TrainingSample) -> np.ndarray:
    """Int64 (n,): 1 on the feature tokens of images, 2 on those of videos, 3 on those of sounds, 0 elsewhere;
    by range, not by token id."""
    types = np.zeros(len(sample), dtype=np.int64)
    for item, placeholder in sample.media:
        for modality, start, end in placeholder.runs_of(item):
            types[start:end] = TOKEN_TYPE_IDS[modality]
    return types
