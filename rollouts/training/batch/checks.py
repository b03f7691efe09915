"""Checks of the tensors of a batch against its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rollouts.error_texts import short_repr
from rollouts.errors import ArgumentError, BatchError
from rollouts.numbers import whole_number
from rollouts.training.batch.tensor_list import TensorList
from rollouts.training.samples import TrainingSample

#: The columns of a batch that hold values of its samples: the name of each in a sample, and its dtype in the batch.
COLUMNS: Mapping[str, tuple[str, torch.dtype]] = {
    "input_ids": ("token_ids", torch.int64),
    "loss_mask": ("loss_mask", torch.bool),
    "logprobs": ("logprobs", torch.float32),
    "advantages": ("advantages", torch.float32),
}


def check_columns(columns: Mapping[str, Any], count: int) -> None:
    """Raise `BatchError` unless the columns are tensors of their dtypes, and of one shape (B, T) on one device."""
    first = columns["input_ids"]
    if not isinstance(first, torch.Tensor) or first.ndim != 2:
        raise BatchError(f"input_ids is {short_repr(first)}; pass an int64 tensor (rows, columns)")
    for name, tensor in columns.items():
        dtype, shape = COLUMNS[name][1], tuple(first.shape)
        if (
            not isinstance(tensor, torch.Tensor)
            or (tensor.dtype, tuple(tensor.shape)) != (dtype, shape)
            or tensor.device != first.device
        ):
            raise BatchError(
                f"{name} is {_described(tensor)}; {count} samples in {shape} need {dtype} {shape} on {first.device}"
            )


def check_starts(starts: Any, lengths: Any, samples: Sequence[TrainingSample], shape: tuple[int, int]) -> None:
    """Raise `BatchError` unless every sample has as many tokens as `lengths` says, in its row and apart from others."""
    count = len(samples)
    for name, tensor, size in (("starts", starts, (count, 2)), ("lengths", lengths, (count,))):
        if (
            not isinstance(tensor, torch.Tensor)
            or (tensor.dtype, tuple(tensor.shape)) != (torch.int64, size)
            or tensor.device.type != "cpu"
        ):
            raise BatchError(f"{name} is {_described(tensor)}; {count} samples need torch.int64 {size} on cpu")
    cells, sizes = starts.numpy(), lengths.numpy()
    first = cells @ np.array([shape[1], 1])
    order = np.argsort(first, kind="stable")
    overlapping = np.zeros(count, bool)
    overlapping[order[1:]] = first[order[1:]] < (first + sizes)[order[:-1]]
    outside = (cells < 0).any(axis=1) | (cells[:, 0] >= shape[0]) | (cells[:, 1] + sizes > shape[1]) | overlapping
    for number, sample in enumerate(samples):
        if outside[number] or sizes[number] != len(sample):
            raise BatchError(
                f"sample {number} ({sample.name:.80}) of {len(sample)} tokens is said to have {sizes[number]} at row "
                f"and column {cells[number].tolist()} of {shape}; lay out the samples with from_samples"
            )


def check_trained(
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor,
    sequence_ids: torch.Tensor,
    samples: Sequence[TrainingSample],
) -> None:
    """Raise `BatchError` if `loss_mask` (B, T) trains padding or a first token of a sample: nothing predicts them."""
    if loss_mask.is_meta:  # it has no values
        return
    wrong = loss_mask & (position_ids == 0)
    if not bool(wrong.any()):
        return
    row, column = wrong.nonzero()[0].tolist()
    number = int(sequence_ids[row, column])
    token = "padding" if number < 0 else f"the first token of sample {number} ({samples[number].name:.80})"
    raise BatchError(
        f"loss_mask is True at row {row} and column {column}, which is {token}; no token of a sample predicts it. Set "
        "loss_mask to False wherever position_ids is 0"
    )


def check_pad_id(pad_id: object) -> int:
    """`pad_id` as an int. Raises `ArgumentError` unless it is a token id."""
    if (number := whole_number(pad_id)) is None or number < 0:
        raise ArgumentError("pad_id", pad_id, "pass a token id, for example 0: padding is masked")
    return number


def check_media_dtype(name: object) -> None:
    """Raise `ArgumentError` unless `name` is None or names a floating-point dtype of torch."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if name is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError("media_dtype", name, 'pass the name of a floating-point dtype of torch, such as "bfloat16"')


def check_extras(extras: Any, count: int) -> None:
    """Raise `BatchError` unless the extras are TensorLists with one row for each sample."""
    if not isinstance(extras, Mapping):
        raise BatchError(f"extras is {short_repr(extras)}; pass a dict of TensorLists")
    for name, extra in extras.items():
        if not isinstance(extra, TensorList) or len(extra) != count:
            raise BatchError(f"extra {name!r} is {short_repr(extra)}; pass a TensorList of {count} rows")


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return short_repr(value)
    return f"{value.dtype} {tuple(value.shape)} on {value.device}"
