"""The media of samples as the keyword arguments that a transformers model takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from renderers.errors import MediaError
from renderers.rendered import TOKEN_TYPE_IDS
from renderers.vision.patches import StillPatches
from rollouts.models.media_inputs import item_tensors
from rollouts.training.adapters.errors import AdapterError
from rollouts.training.samples import TrainingSample


def media_arguments(target: str, samples: Sequence[TrainingSample], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of the samples' media by the names of the model's arguments; empty without media.

    Uint8 pixels are normalised; floats have `dtype`, integers (grids) keep theirs. Several items are combined in order,
    as their `fields` describe. Raises `AdapterError` where they cannot be combined or normalised.
    """
    for sample in samples:
        _refuse_pixels_without_scale(target, sample)
    try:
        return item_tensors([item for sample in samples for item, _ in sample.media], dtype)
    except MediaError as error:
        names = ", ".join(sample.name for sample in samples if sample.media)
        raise AdapterError(
            target, f"{names:.200}", "media", str(error), "Process their media with the processors of one renderer"
        ) from error


def refuse_other_arguments(target: str, samples: Sequence[TrainingSample], supported: Collection[str]) -> None:
    """Raise `AdapterError` for a tensor of the media that the target has no field for."""
    for sample in samples:
        for name in (name for item, _ in sample.media for name in item):
            if name not in supported:
                raise AdapterError(
                    target,
                    f"sample {sample.name}",
                    "media",
                    f"its media have the tensor {name}; the type has fields for {', '.join(supported)} only",
                    "Leave the sample out",
                )


def mm_token_type_ids(sample: TrainingSample) -> np.ndarray:
    """Int64 (n,): 1 on the feature tokens of images, 2 on those of videos, 0 elsewhere; by range, not by token id."""
    types = np.zeros(len(sample), dtype=np.int64)
    for item, placeholder in sample.media:
        for start, end in placeholder.runs:
            types[start:end] = TOKEN_TYPE_IDS[item.modality]
    return types


def _refuse_pixels_without_scale(target: str, sample: TrainingSample) -> None:
    for item, _ in sample.media:
        for name, tensor in item.tensors.items():
            is_pixels = isinstance(tensor, StillPatches) or (
                isinstance(tensor, np.ndarray) and tensor.dtype == np.uint8 and name.startswith("pixel_values")
            )
            if is_pixels and item.scale is None:
                raise AdapterError(
                    target,
                    f"sample {sample.name}",
                    "media",
                    f"{name}: raw uint8 pixels without a scale that makes floats of them",
                    "Pass ServerRenderer(scale=PixelScale(...)) with the numbers of preprocessor_config.json",
                )
