"""Tensors of samples with a row for each token: taken out of the rows of a batch, and laid out in them."""

from collections.abc import Sequence

import numpy as np
import torch

from rollouts.errors import SampleError
from rollouts.training.samples import TrainingSample
from rollouts.trajectory.token_node import TEACHER_LOGPROBS, TEACHER_TOP_IDS

#: A tensor of each sample of a batch, None for a sample without one.
Extra = tuple[torch.Tensor | None, ...]


def of_samples(values: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tokens of each sample in `values` (B, T, ...), as views."""
    return tuple(
        values[row, column : column + length]
        for (row, column), length in zip(starts.tolist(), lengths.tolist(), strict=True)
    )


def teacher_rows(name: str, samples: Sequence[TrainingSample]) -> Extra:
    """One tensor for each sample: its column `name` of `TEACHER_COLUMNS`, ids as int64.

    Raises `SampleError`, which names the sample, for one that trains tokens and has no such column, and for
    columns of several widths.
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
    return tuple(torch.from_numpy(column.astype(dtype)) for column in columns)
