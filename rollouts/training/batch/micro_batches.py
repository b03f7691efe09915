"""Batches of a limited number of samples, in order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rollouts.errors import ArgumentError
from rollouts.numbers import finite_number, whole_number
from rollouts.training.batch.training_batch import TrainingBatch
from rollouts.training.samples import TrainingSample


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
