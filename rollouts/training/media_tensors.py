"""The arrays of the media of a batch in one tensor, each pixel copied once."""

from collections.abc import Sequence

import numpy as np
import torch

from renderers import MediaItem
from renderers.errors import MediaError
from renderers.media.item import PackedArray
from renderers.vision.batching import combine
from renderers.vision.patches import StillPatches
from rollouts.errors import SampleError
from rollouts.training.batch import TrainingBatch


def concatenated_media(batch: TrainingBatch, name: str) -> torch.Tensor | None:
    """The arrays `name` of all media of a batch in one tensor, in the order of the samples; None if there are none.

        pixels = concatenated_media(batch, "pixel_values")

    Rows are concatenated, or stacked and padded where the `fields` of an item say batched; an array of one
    axis, such as the grid of an image, is one row. Raises `SampleError`, which names the tensor, for arrays
    that differ in dtype or in the shape of their rows.
    """
    tensor = _combined([item for sample in batch.samples for item, _ in sample.media if name in item], name)
    return None if tensor is None else tensor.to(batch.input_ids.device)


def _combined(items: Sequence[MediaItem], name: str) -> torch.Tensor | None:
    if not items:
        return None
    field = items[0].fields.get(name)
    if field is not None and field.kind == "batched":
        try:
            return torch.from_numpy(combine([item[name] for item in items], field))
        except MediaError as error:
            raise SampleError(
                None, f"{name}: {error.reason}; take the arrays of each item from sample.media"
            ) from error
    arrays = [item.tensors[name] for item in items]
    parts = [array if isinstance(array, StillPatches) else _rows_of(array) for array in arrays]
    kinds = {(np.dtype(np.uint8) if isinstance(part, StillPatches) else part.dtype, part.shape[1:]) for part in parts}
    if len(kinds) > 1:
        found = " and ".join(f"{dtype} rows of shape {shape}" for dtype, shape in sorted(kinds, key=str))
        raise SampleError(None, f"{name} has {found}; take the arrays of each item from sample.media")
    ((dtype, row_shape),) = kinds
    out: np.ndarray = np.empty((sum(part.shape[0] for part in parts), *row_shape), dtype=dtype)
    start = 0
    for part in parts:
        rows = out[start : start + part.shape[0]]
        if isinstance(part, StillPatches):
            part.unpack_into(rows)
        else:
            rows[:] = part
        start += part.shape[0]
    return torch.from_numpy(out)


def _rows_of(array: np.ndarray | PackedArray) -> np.ndarray:
    return np.atleast_2d(array if isinstance(array, np.ndarray) else array.unpack())
