"""Items -> the tensors of a batch, combined as each item's `fields` describe."""

from collections.abc import Sequence

import numpy as np

from renderers.errors import MediaError
from renderers.media.item import MediaItem, TensorField


def batch_tensors(items: Sequence[MediaItem]) -> dict[str, np.ndarray]:
    """The model's input tensors for these items, in this order, by the names of the items.

    They equal what the processor returns for the same media as samples of one batch, padding included; for sounds whose
    last frames depend on the batch, what it returns for each alone, with zeros behind it. A tensor that
    items of one modality lack (`video_grid_thw` among images, features of a sound among videos without one) has rows
    for the others only. Raises `MediaError` where items of one modality have different tensors: they come from
    different processors.
    """
    _check_same_fields(items)
    fields = {name: field for item in items for name, field in item.fields.items()}
    tensors: dict[str, np.ndarray] = {}
    for name, field in fields.items():
        holders = [item for item in items if name in item]
        if any(item.fields[name] != field for item in holders):
            raise MediaError(f"{name}: the modalities of a batch lay it out differently; make batches of one of them")
        try:
            tensors[name] = combine([item[name] for item in holders], field)
        except (MediaError, ValueError) as error:
            raise MediaError(f"{name}: {error}") from error
    return tensors


def combine(arrays: Sequence[np.ndarray], field: TensorField) -> np.ndarray:
    """The tensor of a batch from those of its items. Raises `MediaError` or `ValueError` where they do not fit.

    flat: (n_i, ...) -> (sum of n_i, ...); batched: (...) -> (items, ...), padded to the largest; shared: as it is.
    """
    if len({array.dtype for array in arrays}) > 1:
        raise MediaError(f"tensors of different types in one batch: {sorted({str(array.dtype) for array in arrays})}")
    if field.kind == "shared":
        if any(not same_bits(array, arrays[0]) for array in arrays):
            raise MediaError("a tensor that all items share has different values: they come from different processors")
        return arrays[0]
    if field.kind == "flat":
        return np.concatenate(arrays)
    return _stacked(arrays, field.pad)


def _stacked(arrays: Sequence[np.ndarray], pad: float | None) -> np.ndarray:
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    if pad is None or len({array.ndim for array in arrays}) > 1:
        raise MediaError(
            f"tensors of different shapes in one batch ({_shapes(arrays)}), and the processor was not seen to pad "
            "them; make batches of equal shapes"
        )
    largest = tuple(map(max, zip(*(array.shape for array in arrays), strict=True)))
    batch = np.full((len(arrays), *largest), pad, dtype=arrays[0].dtype)
    for row, array in zip(batch, arrays, strict=True):
        row[tuple(map(slice, array.shape))] = array
    return batch


def _check_same_fields(items: Sequence[MediaItem]) -> None:
    first_of: dict[tuple[str, bool], MediaItem] = {}
    for item in items:
        first = first_of.setdefault((item.modality, item.has_sound), item)
        if item.fields != first.fields or item.keys() != item.fields.keys():
            raise MediaError(
                f"the {item.modality}s of a batch hold different tensors ({_description(first)}; "
                f"{_description(item)}): process them with one processor",
                digest=item.source.digest,
            )


def _description(item: MediaItem) -> str:
    return ", ".join(f"{name}: {field.kind if (field := item.fields.get(name)) else 'unknown'}" for name in item)


def _shapes(arrays: Sequence[np.ndarray]) -> str:
    return ", ".join(dict.fromkeys(str(array.shape) for array in arrays))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal in type, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
