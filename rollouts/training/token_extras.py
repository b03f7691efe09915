"""Extra tensors of the samples of a batch, with one row for each token: split by sample, and laid out again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollouts.errors import SampleError, short_repr
from rollouts.training.samples import TrainingSample
from rollouts.training.tensor_list import TensorList
from rollouts.trajectory.token_node import TEACHER_LOGPROBS, TEACHER_TOP_IDS


def split_by_sample(
    name: str, values: object, starts: torch.Tensor, lengths: torch.Tensor, shape: tuple[int, int]
) -> TensorList:
    """The tokens of each sample in `values` (B, T, ...), as views.

    Raises `SampleError`, which names the extra `name`, for other values.
    """
    if not isinstance(values, torch.Tensor) or tuple(values.shape[:2]) != shape:
        found = f"of shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else short_repr(values)
        raise SampleError(None, f"extra {name!r} is {found}; pass a tensor {(*shape, '...')}")
    return TensorList(
        values[row, column : column + length]
        for (row, column), length in zip(starts.tolist(), lengths.tolist(), strict=True)
    )


def rows_of_tokens(name: str, extra: TensorList, samples: Sequence[TrainingSample]) -> torch.Tensor:
    """All rows of an extra with one row for each token of each of `samples`, (number of tokens, ...).

    Raises `SampleError`, which names the extra `name` and the sample, for a sample with another number of rows.
    """
    present = [tensor for tensor in extra if tensor is not None]
    for sample, tensor in zip(samples, extra, strict=True):
        if tensor is None or tensor.shape[:1] != (len(sample),) or tensor.shape[1:] != present[0].shape[1:]:
            found = "no values" if tensor is None else f"values of shape {tuple(tensor.shape)}"
            raise SampleError(None, f"extra {name!r}: sample {sample.name:.80} of {len(sample)} tokens has {found}")
    return torch.cat(present) if present else torch.zeros(0)


def teacher_rows(name: str, samples: Sequence[TrainingSample]) -> TensorList:
    """One tensor for each sample: its column `name` of `TEACHER_COLUMNS`, ids as int64.

    Raises `SampleError`, which names the sample, for one that trains tokens and has no such column, and for columns of
    several widths.
    """
    columns = [getattr(sample, name) for sample in samples]
    shapes = {column.shape[1:] for column in columns if column is not None}
    if len(shapes) > 1:
        widths = " and ".join(str(shape[0]) for shape in sorted(shapes))
        raise SampleError(
            None, f"the {name} of the samples have {widths} tokens a row; score all samples with one top_k"
        )
    shape = next(iter(shapes), () if name == TEACHER_LOGPROBS else (0,))
    dtype = np.dtype(np.int64 if name == TEACHER_TOP_IDS else np.float32)
    for index, (sample, column) in enumerate(zip(samples, columns, strict=True)):
        if column is None:
            if sample.loss_mask.any():
                raise SampleError(
                    None,
                    f"sample {sample.name:.80} has no {name}; add it: with_teacher(samples, await score(samples, ...))",
                )
            columns[index] = np.full((len(sample), *shape), 0 if dtype.kind == "i" else np.nan, dtype)
    return TensorList(torch.from_numpy(column.astype(dtype)) for column in columns)
