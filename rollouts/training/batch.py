"""Rows with and without images and videos, padded to one width."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from renderers.rendered import TOKEN_TYPE_IDS
from rollouts.errors import SampleError
from rollouts.training.samples import TrainingSample
from rollouts.training.tensor_list import TensorList

#: For models that no function here runs: what a batch has for a forward pass of the model's own.
OWN_FORWARD = (
    "Call the model itself with batch.input_ids and batch.attention_mask; its media are in sample.media of "
    "batch.samples, and renderers.vision.normalise.normalised(item, name) makes floats of their pixels"
)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """B rows, padded on the right to T columns.

    `input_ids` int64, `attention_mask` bool, `loss_mask` bool, `logprobs` float32 and `advantages` float32, all (B, T);
    padding is False or 0 everywhere but in `input_ids`, where it is the pad id. Images stay with their samples: they
    are not padded, not copied, and absent where a row has none.
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
        if not samples:
            raise SampleError("-", "a batch needs at least one sample")
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
        """bool (B,): which rows hold an image or a video."""
        return torch.tensor([bool(sample.media) for sample in self.samples])

    @property
    def mm_token_type_ids(self) -> torch.Tensor:
        """int64 (B, T): 1 on tokens of images, 2 on those of videos, by range: a sampled placeholder stays 0."""
        types = torch.zeros_like(self.input_ids)
        for row, sample in zip(types, self.samples, strict=True):
            for item, where in sample.media:
                for start, end in where.runs:
                    row[start:end] = TOKEN_TYPE_IDS[item.modality]
        return types

    def media_tensors(self, name: str) -> TensorList:
        """One tensor a row: the arrays called `name` of its media, concatenated; None for a row that has none."""
        return TensorList([_row_tensor(sample, name) for sample in self.samples])

    def split(self, rows: int) -> Iterator[TrainingBatch]:
        """Micro-batches of at most `rows` rows, each padded to its own width only."""
        return micro_batches(self.samples, rows=rows, pad_id=self.pad_id)


def micro_batches(
    samples: Sequence[TrainingSample], *, rows: int, pad_id: int, stretch: float = math.inf
) -> Iterator[TrainingBatch]:
    """Batches of at most `rows` samples, in order, each padded to its own width only.

    A sample more than `stretch` times as long as the first of its batch starts a new one: with samples sorted by length
    that bounds what padding costs.
    """
    part: list[TrainingSample] = []
    for sample in samples:
        if part and (len(part) == rows or len(sample) > stretch * len(part[0])):
            yield TrainingBatch.from_samples(part, pad_id=pad_id)
            part = []
        part.append(sample)
    if part:
        yield TrainingBatch.from_samples(part, pad_id=pad_id)


def _row_tensor(sample: TrainingSample, name: str) -> torch.Tensor | None:
    # np.atleast_2d: a grid is one row (3,) an item, patches are many rows an item.
    arrays = [np.atleast_2d(item[name]) for item, _ in sample.media if name in item]
    return torch.from_numpy(np.concatenate(arrays)) if arrays else None
