"""The media of samples as the keyword arguments that a transformers model takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from renderers import MediaItem
from renderers.errors import MediaError
from renderers.media.item import TensorField
from renderers.rendered import TOKEN_TYPE_IDS
from renderers.vision.batching import combine
from renderers.vision.normalise import normalised
from renderers.vision.patches import StillPatches
from rollouts.training.adapters.errors import AdapterError
from rollouts.training.samples import TrainingSample


def media_arguments(target: str, samples: Sequence[TrainingSample], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of the samples' media by the names of the model's arguments; empty without media.

    Uint8 pixels are normalised; floats have `dtype`, integers (grids) keep theirs. Several items are combined in order,
    as their `fields` describe. Raises `AdapterError` where they cannot be combined or normalised.
    """
    items = [item for sample in samples for item, _ in sample.media]
    row = f"sample {samples[0].name}" if len(samples) == 1 else f"{len(samples)} samples"
    names = list(dict.fromkeys(name for item in items for name in item))
    return {name: _argument(target, row, name, [item for item in items if name in item], dtype) for name in names}


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


def _argument(target: str, row: str, name: str, items: Sequence[MediaItem], dtype: torch.dtype) -> torch.Tensor:
    arrays = [_values(target, row, item, name) for item in items]
    field = items[0].fields.get(name)
    if field is None or any(item.fields.get(name) != field for item in items):
        raise _media_error(target, row, name, "its items do not say alike how the tensors of a batch are combined")
    try:
        array = arrays[0] if len(arrays) == 1 and field == TensorField("flat") else combine(arrays, field)
    except MediaError as error:
        raise _media_error(target, row, name, str(error)) from error
    # An item that was seen before is read-only; torch has no such tensors, and a trainer may write in place.
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _values(target: str, row: str, item: MediaItem, name: str) -> np.ndarray:
    tensor = item.tensors[name]
    is_pixels = isinstance(tensor, StillPatches) or (isinstance(tensor, np.ndarray) and tensor.dtype == np.uint8)
    if not is_pixels:
        return item[name]
    if item.scale is None:
        raise _media_error(target, row, name, "raw uint8 pixels without a scale that makes floats of them")
    return normalised(item, name)


def _media_error(target: str, row: str, name: str, reason: str) -> AdapterError:
    return AdapterError(
        target,
        row,
        "media",
        f"{name}: {reason}",
        "Process all media of a sample with the processors of one renderer",
    )
