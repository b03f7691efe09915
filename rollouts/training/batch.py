"""Training batches: samples padded to one width."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from renderers.rendered import TOKEN_TYPE_IDS
from rollouts.error_texts import short_repr
from rollouts.errors import ArgumentError, SampleError
from rollouts.numbers import finite_number, whole_number
from rollouts.training.samples import TrainingSample

#: The cure in the error for a model that `token_logprobs` and `model_inputs` do not support.
OWN_FORWARD = (
    "Call the model itself with batch.input_ids and batch.attention_mask; its media are in sample.media of "
    "batch.samples, and renderers.vision.normalise.normalised(item, name) makes floats of their pixels"
)


class TensorList(list[torch.Tensor | None]):
    """One tensor per row, such as pixel patches and grids, which cannot be stacked; None for a row without a tensor."""

    def cat(self) -> torch.Tensor | None:
        """The tensors concatenated along dimension 0; None if every row is None."""
        present = [row for row in self if row is not None]
        return torch.cat(present) if present else None


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """B rows, padded on the right to T columns.

    `input_ids` int64, `attention_mask` bool, `loss_mask` bool, `logprobs` float32 and `advantages` float32, all (B, T);
    padding is `pad_id` in `input_ids` and False or 0 elsewhere. Images stay with their samples: they are neither padded
    nor copied.
    """

    samples: tuple[TrainingSample, ...]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    pad_id: int

    @classmethod
    def from_samples(cls, samples: Sequence[TrainingSample], *, pad_id: int) -> TrainingBatch:
        """Raises `SampleError` unless there is at least one sample and each is a `TrainingSample`, and `ArgumentError`
        for a `pad_id` that is no token id.
        """
        if not isinstance(samples, Sequence) or not samples:
            raise SampleError("-", f"a batch needs a list of at least one TrainingSample, not {short_repr(samples)}")
        for index, sample in enumerate(samples):
            if not isinstance(sample, TrainingSample):
                raise SampleError(str(index), f"{short_repr(sample)} is not a TrainingSample")
        if (number := whole_number(pad_id)) is None or number < 0:
            raise ArgumentError("pad_id", pad_id, "pass a token id, for example 0: padding is masked")
        width = max(len(sample) for sample in samples)

        def padded(column: str, dtype: type, fill: int = 0) -> torch.Tensor:
            rows: np.ndarray = np.full((len(samples), width), fill, dtype=dtype)
            for row, sample in zip(rows, samples, strict=True):
                row[: len(sample)] = getattr(sample, column)
            return torch.from_numpy(rows)

        lengths = np.array([len(sample) for sample in samples])
        return cls(
            samples=tuple(samples),
            input_ids=padded("token_ids", np.int64, pad_id),
            attention_mask=torch.from_numpy(np.arange(width) < lengths[:, None]),
            loss_mask=padded("loss_mask", np.bool_),
            logprobs=padded("logprobs", np.float32),
            advantages=padded("advantages", np.float32),
            pad_id=pad_id,
        )

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def has_media(self) -> torch.Tensor:
        """bool (B,): True for rows with an image or a video."""
        return torch.tensor([bool(sample.media) for sample in self.samples])

    @property
    def mm_token_type_ids(self) -> torch.Tensor:
        """int64 (B, T): 1 on tokens of images, 2 on tokens of videos, by range; 0 on a sampled placeholder token."""
        types = torch.zeros_like(self.input_ids)
        for row, sample in zip(types, self.samples, strict=True):
            for item, placeholder in sample.media:
                for start, end in placeholder.runs:
                    row[start:end] = TOKEN_TYPE_IDS[item.modality]
        return types

    def media_tensors(self, name: str) -> TensorList:
        """One tensor per row: the arrays `name` of its media, concatenated; None for a row without such arrays."""
        return TensorList(_row_tensor(sample, name) for sample in self.samples)

    def split(self, rows: int) -> Iterator[TrainingBatch]:
        """Micro-batches of at most `rows` rows, each padded to its own width (see `micro_batches`)."""
        return micro_batches(self.samples, rows=rows, pad_id=self.pad_id)


def micro_batches(
    samples: Sequence[TrainingSample], *, rows: int, pad_id: int, stretch: float = math.inf
) -> Iterator[TrainingBatch]:
    """Batches of at most `rows` samples, in order, each padded to its own width.

    A sample more than `stretch` times as long as the first of its batch starts a new batch: with samples sorted by
    length this limits the padding. Raises `ArgumentError` for `rows` or `stretch` below 1.
    """
    if (whole_number(rows) or 0) < 1:
        raise ArgumentError("rows", rows, "pass an integer of at least 1")
    if stretch != math.inf and (finite_number(stretch) or 0) < 1:
        raise ArgumentError("stretch", stretch, "pass a number of at least 1, or leave it out")
    return _micro_batches(samples, rows, pad_id, stretch)


def _micro_batches(
    samples: Sequence[TrainingSample], rows: int, pad_id: int, stretch: float
) -> Iterator[TrainingBatch]:
    part: list[TrainingSample] = []
    for sample in samples:
        if part and (len(part) == rows or len(sample) > stretch * len(part[0])):
            yield TrainingBatch.from_samples(part, pad_id=pad_id)
            part = []
        part.append(sample)
    if part:
        yield TrainingBatch.from_samples(part, pad_id=pad_id)


def _row_tensor(sample: TrainingSample, name: str) -> torch.Tensor | None:
    # np.atleast_2d: an item has one grid (3,), but many rows of patches.
    arrays = [np.atleast_2d(item[name]) for item, _ in sample.media if name in item]
    return torch.from_numpy(np.concatenate(arrays)) if arrays else None
