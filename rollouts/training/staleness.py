"""How many versions the weights that sampled a token are behind the trainer's."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rollouts.errors import ArgumentError, SampleError
from rollouts.training.batch import TrainingBatch
from rollouts.training.samples import TrainingSample
from rollouts.values import check_integer, whole_number
from rollouts.version_order import VersionOrder


class Staleness(NamedTuple):
    """The oldest and the newest version that sampled trained tokens of a sample, and how far they are behind."""

    oldest: str
    newest: str
    max_lag: int
    min_lag: int


class StalenessSplit(NamedTuple):
    """The samples that are fresh enough, and the others."""

    kept: list[TrainingSample]
    stale: list[TrainingSample]


def sample_staleness(
    sample: TrainingSample, current: str | int, *, versions: Sequence[str] | None = None
) -> Staleness | None:
    """The versions of a sample's trained tokens, compared with the trainer's version `current`; None without any.

    A lag is a difference of versions that are integers in decimal digits ("41"); for other names pass
    `versions`, all names in the order in which they came into use, and a lag is a difference of places in it.
    Raises `SampleError` for a trained token without a version, and for a version that is not known or newer
    than `current`; `ArgumentError` for a `current` that is not known, and for `versions` that are not a list
    of names or have a name twice.
    """
    lags = _trained_lags(sample, current, VersionOrder.of_names(versions))
    if not len(lags):
        return None
    by_lag = {int(lags[span.start]): span.version for span in sample.weight_spans if span.end > span.start}
    return Staleness(by_lag[max(by_lag)], by_lag[min(by_lag)], max(by_lag), min(by_lag))


def split_by_staleness(
    samples: Iterable[TrainingSample], current: str | int, *, max_lag: int, versions: Sequence[str] | None = None
) -> StalenessSplit:
    """The samples whose oldest trained token lags by at most `max_lag` versions, and the stale ones, both in order.

    A sample without trained tokens is kept. Raises as `sample_staleness` does, and `ArgumentError` for a
    negative `max_lag`.
    """
    limit = check_integer("max_lag", max_lag, least=0)
    order = VersionOrder.of_names(versions)
    split = StalenessSplit([], [])
    for sample in samples:
        is_stale = _trained_lags(sample, current, order).max(initial=0) > limit
        (split.stale if is_stale else split.kept).append(sample)
    return split


def token_lags(batch: TrainingBatch, current: str | int, *, versions: Sequence[str] | None = None) -> torch.Tensor:
    """The lag of trained tokens, int64 (B, T), 0 elsewhere. Raises as `sample_staleness` does."""
    order = VersionOrder.of_names(versions)
    lags = torch.zeros(batch.input_ids.shape, dtype=torch.int64)
    for sample, (row, column), length in zip(batch.samples, batch.starts.tolist(), batch.lengths.tolist(), strict=True):
        part = lags[row, column : column + length]
        part[torch.from_numpy(sample.loss_mask)] = torch.from_numpy(_trained_lags(sample, current, order))
    return lags.to(batch.input_ids.device)


def _trained_lags(sample: TrainingSample, current: str | int, order: VersionOrder) -> np.ndarray:
    """The lag of each trained token, int64 (k,)."""
    now = _current_place(current, order)
    lags = np.full(np.count_nonzero(sample.loss_mask), -1, dtype=np.int64)
    for span in sample.weight_spans:
        place = order.place(span.version)
        if place is None:
            cure = "pass versions=, all versions in order" if order.places is None else "add it to versions"
            raise SampleError(sample.name, f"weight version {span.version!r:.80} has no known place; {cure}")
        if place > now:
            reason = f"weight version {span.version!r:.80} is newer than the trainer's, {str(current)!r:.80}"
            raise SampleError(sample.name, f"{reason}; pass the version of the weights that are trained now")
        lags[span.start : span.end] = now - place
    if (lags < 0).any():
        token = int(np.flatnonzero(sample.loss_mask)[int(np.flatnonzero(lags < 0)[0])])
        raise SampleError(
            sample.name,
            f"token {token} is trained and no weight span has it; use an engine that reports weight versions, or leave "
            "the sample out",
        )
    return lags


def _current_place(current: str | int, order: VersionOrder) -> int:
    place = order.place(current if isinstance(current, str) else str(whole_number(current)))
    if place is None:
        expected = "an integer, or pass versions=" if order.places is None else "one of versions"
        raise ArgumentError("current", current, f"pass the version of the trainer's weights: {expected}")
    return place
