"""The mismatch of sampler and trainer, counted by size, modality and lag."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rollouts.observability.training_log import StepMismatch
from rollouts.trajectory.tree import Trajectory
from rollouts.version_order import VersionOrder
from rollouts.view.token_columns import mismatch

_DECADES: Final = range(-8, 2)
_EDGES: Final = np.array([0.0, *(10.0**power for power in _DECADES)])
#: The names of the bins of |difference|, in nats; the last one holds what is no number.
BINS: Final = ("< 1e-8", *(f"1e{power}" for power in _DECADES[:-1]), ">= 10", "not finite")
#: Larger lags are counted together.
MAX_LAG: Final = 8


@dataclass(slots=True)
class Counted:
    """The compared tokens of one kind. `counts` int64, one for each of `BINS`.

    `sum_abs` is that of the finite |differences|; `max_abs` is infinite if one of them is. Both are in nats.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros(len(BINS), np.int64))
    sum_abs: float = 0.0
    max_abs: float = 0.0

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def mean_abs(self) -> float:
        """Of the finite differences."""
        return self.sum_abs / max(self.tokens - int(self.counts[-1]), 1)

    def add(self, difference: np.ndarray) -> None:
        """Add differences of log-probabilities, float64 (n,), of either sign."""
        absolute = np.abs(difference)
        finite = absolute[np.isfinite(absolute)]
        bins = np.searchsorted(_EDGES, finite, side="right") - 1
        self.counts[: len(_EDGES)] += np.bincount(bins, minlength=len(_EDGES))
        self.counts[-1] += len(absolute) - len(finite)
        if len(absolute):
            self.max_abs = max(self.max_abs, float(absolute.max()))
        self.sum_abs += float(finite.sum())


@dataclass(slots=True)
class MismatchFigures:
    """`by_lag` is empty where the versions of trainer and sampler are not known or have no order."""

    by_modality: dict[str, Counted] = field(default_factory=dict)
    by_lag: dict[int, Counted] = field(default_factory=dict)
    unordered: int = 0  # tokens whose lag is not known

    @property
    def tokens(self) -> int:
        return sum(counted.tokens for counted in self.by_modality.values())


def of_training(steps: Iterable[StepMismatch]) -> MismatchFigures:
    """The figures of `mismatch.mmr`.

    Versions are ordered as integers; other names by the order in which they were the trainer's versions.
    """
    figures = MismatchFigures()
    names: list[str] = []
    for step in steps:
        if step.trainer_version and step.trainer_version not in names:
            names.append(step.trainer_version)
        difference = step.difference
        for modality in np.unique(step.modality):
            figures.by_modality.setdefault(str(modality), Counted()).add(difference[step.modality == modality])
        lag = _lags(step, names)
        for value in np.unique(lag[lag >= 0]):
            figures.by_lag.setdefault(int(value), Counted()).add(difference[lag == value])
        figures.unordered += int((lag < 0).sum())
    return figures


def _lags(step: StepMismatch, names: list[str]) -> np.ndarray:
    """How many versions older than the trainer's the weights of each token are, at most `MAX_LAG`; -1: not known."""
    order = VersionOrder()
    if step.trainer_version and order.place(step.trainer_version) is None:
        order = VersionOrder.of_names(names)
    places = [order.place(version) for version in step.versions]
    known = [place for place in places if place is not None]
    trainer = order.place(step.trainer_version) if step.trainer_version else max(known, default=None)
    if trainer is None:
        return np.full(len(step.version), -1)
    lags = [-1 if place is None or place > trainer else min(trainer - place, MAX_LAG) for place in places]
    of_tokens: np.ndarray = np.array([*lags, -1])[step.version]
    return of_tokens


def add_extras(figures: MismatchFigures, trajectory: Trajectory) -> None:
    """Add the tokens of an episode whose nodes have the extra `trainer_logprobs`. Their lag is not known."""
    for modality, difference in _extras(trajectory):
        if len(difference):
            figures.by_modality.setdefault(modality, Counted()).add(difference)
            figures.unordered += len(difference)


def _extras(trajectory: Trajectory) -> Iterator[tuple[str, np.ndarray]]:
    last: list[str] = []  # the modality of the last item up to and with each node
    for node in trajectory.nodes:
        before = last[node.parent] if node.parent >= 0 else "text"
        last.append(node.media[-1].modality if node.media else before)
        yield last[-1], mismatch(node)
