"""Extra tensors of the samples of a batch, with one row for each token: split by sample, and laid out again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollouts.error_texts import short_repr
from rollouts.errors import BatchError
from rollouts.training.batch.tensor_list import TensorList
from rollouts.training.samples import TrainingSample


def split_by_sample(
    name: str, values: object, starts: torch.Tensor, lengths: torch.Tensor, shape: tuple[int, int]
) -> TensorList:
    """The tokens of each sample in `values` (B, T, ...), as views; a `TensorList` unchanged.

    Raises `BatchError`, which names the extra `name`, for other values.
    """
    if isinstance(values, TensorList):
        return values
    if not isinstance(values, torch.Tensor) or tuple(values.shape[:2]) != shape:
        found = f"of shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else short_repr(values)
        raise BatchError(f"extra {name!r} is {found}; pass a tensor {(*shape, '...')} or a TensorList")
    return TensorList(
        values[row, column : column + length]
        for (row, column), length in zip(starts.tolist(), lengths.tolist(), strict=True)
    )


def rows_of_tokens(name: str, extra: TensorList, samples: Sequence[TrainingSample]) -> torch.Tensor:
    """All rows of an extra with one row for each token of each of `samples`, (number of tokens, ...).

    Raises `BatchError`, which names the extra `name` and the sample, for a sample with another number of rows.
    """
    present = [tensor for tensor in extra if tensor is not None]
    for sample, tensor in zip(samples, extra, strict=True):
        if tensor is None or tensor.shape[:1] != (len(sample),) or tensor.shape[1:] != present[0].shape[1:]:
            found = "no values" if tensor is None else f"values of shape {tuple(tensor.shape)}"
            raise BatchError(f"extra {name!r}: sample {sample.name:.80} of {len(sample)} tokens has {found}")
    return torch.cat(present) if present else torch.zeros(0)


def neutral_extra(extra: TensorList, lengths: torch.Tensor) -> torch.Tensor | None:
    """Zeros (1, ...) for a sample of one token, if the extra has one row for each token of each sample; else None."""
    rows = list(zip(extra, lengths.tolist(), strict=True))
    first = extra[0] if rows else None
    if first is None or any(tensor is None or tensor.shape[:1] != (length,) for tensor, length in rows):
        return None
    return first.new_zeros((1, *first.shape[1:]))
