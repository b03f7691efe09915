"""The tensors of media as keyword arguments of a model's forward."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from renderers import MediaItem
from renderers.errors import MediaError
from renderers.vision.batching import batch_tensors
from renderers.vision.patches import normalised
from rollouts.errors import SampleError
from rollouts.models.placed_rows import PlacedRows, RowItem

#: Modality of Qwen-VL -> the model's parameter name for its patches.
PIXELS: Mapping[str, str] = {"image": "pixel_values", "video": "pixel_values_videos"}


def media_inputs(
    rows: PlacedRows,
    placed: Sequence[RowItem],
    *,
    takes: Collection[str],
    model_class: str,
    dtype: torch.dtype,
    device: torch.device,
    pads_sounds: bool = False,
) -> dict[str, torch.Tensor]:
    """The tensors of items of the rows, as `batch_tensors` combines them; floats in `dtype`.

    `takes` are the keyword arguments of the forward of `model_class`. With `pads_sounds`, zeros pad those
    that have no value for it: each is taken out of the batch again (`item_features`). Raises `SampleError`,
    which names the row, for a tensor that is not among them, for patches that contradict their grid, and for
    uint8 pixels without a scale.
    """
    if not placed:
        return {}
    items = [_as_floats(each.item) for each in placed]
    for each, item in zip(placed, items, strict=True):
        _check(rows.sequences[each.sequence].name, item, takes, model_class)
    if pads_sounds:
        # Of videos all in one way, also those without a sound: their own tensors have one shape.
        padded = {item.modality for item in items if item.has_sound}
        items = [_padded_by_zeros(item) if item.modality in padded else item for item in items]
    try:
        tensors = item_tensors(items, dtype)
    except MediaError as error:
        names = ", ".join(dict.fromkeys(rows.sequences[each.sequence].name for each in placed))
        raise SampleError(f"{names:.200}", f"the media of these rows fit no common batch: {error}") from error
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _padded_by_zeros(item: MediaItem) -> MediaItem:
    return replace(item, fields={name: field._replace(pad=field.pad or 0.0) for name, field in item.fields.items()})


def item_tensors(items: Sequence[MediaItem], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of items, in this order, as `batch_tensors` combines them: pixels with a known scale
    normalised, floats in `dtype`, integers in theirs.

    Raises `MediaError` for items that fit no common batch.
    """
    tensors = batch_tensors([_as_floats(item) for item in items])
    return {name: _tensor(array, dtype) for name, array in tensors.items()}


_NO_SCALE = (
    "raw uint8 pixels without a scale that converts them to floats; pass "
    "ServerRenderer(scale=PixelScale(...)) with the numbers of preprocessor_config.json"
)


def _as_floats(item: MediaItem) -> MediaItem:
    """The item with plain arrays; pixels with a known scale are floats."""
    tensors = {name: normalised(item, name) if name.startswith("pixel_values") else item[name] for name in item}
    return replace(item, tensors=tensors, scale=None)


def _check(name: str, item: MediaItem, takes: Collection[str], model_class: str) -> None:
    label = f"{item.modality} {item.mm_hash[:12]}"
    if unknown := sorted(item.keys() - set(takes)):
        raise SampleError(
            name,
            f"{label} has the tensor {unknown[0]!r}, which {model_class}.forward does not take; it takes "
            f"{', '.join(sorted(takes))}. Render the row with the processor of this model",
        )
    pixels = item.get(PIXELS.get(item.modality, ""))
    if pixels is None:
        return
    _check_patches(name, item, len(pixels))
    if pixels.dtype == np.uint8:
        raise SampleError(name, f"{label}: {_NO_SCALE}")


def _check_patches(name: str, item: MediaItem, count: int) -> None:
    """Raise `SampleError` for `count` patches that are not those of the item's grid, if it has one."""
    grid = item.get(f"{item.modality}_grid_thw")
    if grid is not None and count != int(np.prod(grid)):
        raise SampleError(
            name,
            f"{item.modality} {item.mm_hash[:12]} has {count} rows of {PIXELS[item.modality]} for the grid "
            f"{grid.tolist()}, which has {int(np.prod(grid))} patches; process its source again",
        )


def _tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    # torch cannot represent read-only memory; a tensor of one item can be the item's own array.
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
