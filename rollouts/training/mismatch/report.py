"""The mismatch: the difference between the sampler's and the trainer's log-probabilities of the sampled tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rollouts.errors import ArgumentError
from rollouts.numbers import finite_number
from rollouts.training.mismatch.causes import LikelyCause
from rollouts.training.mismatch.compared import ComparedTokens, compare_tokens, concat_tokens
from rollouts.training.mismatch.signatures import likely_causes
from rollouts.training.mismatch.statistics import (
    DifferenceStatistics,
    MismatchGroup,
    by_image,
    by_lag,
    by_modality,
    by_sample,
    by_turn,
    difference_statistics,
)
from transport import wire_type

if TYPE_CHECKING:
    import torch

    from rollouts.training.batch.training_batch import TrainingBatch

_OUTLIERS = 8
_TOKENS_BEFORE, _TOKENS_AFTER = 16, 4


@wire_type("rollouts.MismatchOutlier")
@dataclass(frozen=True, slots=True, eq=False)
class MismatchOutlier:
    """A token with one of the largest differences. `sampler` and `trainer` are its log-probabilities, in nats.

    `sample` is the name of its sample, `position` its position there. `before` and `after` int32 hold the ids of up to
    16 tokens before it and up to 4 after it.
    """

    sample: str
    position: int
    turn: int
    token_id: int
    sampler: float
    trainer: float
    before: np.ndarray
    after: np.ndarray

    @property
    def difference(self) -> float:
        """|trainer - sampler|, infinite where it is not a number."""
        difference = abs(self.trainer - self.sampler)
        return difference if difference == difference else np.inf


@wire_type("rollouts.MismatchReport")
@dataclass(frozen=True, slots=True, eq=False)
class MismatchReport:
    """The differences between the sampler's and the trainer's log-probabilities of sampled tokens, in nats.

    `compared` has both for every token, `outliers` the tokens that differ most. The properties sum them up: over all
    tokens, and by turn, modality, version lag, image and sample. `report_text` and `report_json` print them,
    `plot_mismatch` plots them, `check_mismatch` compares them with thresholds. A log-probability that is not a number
    counts as an infinite difference.

    `noise`, `trainer_version` and `mixture_of_experts` are those of `mismatch_report`.
    """

    compared: ComparedTokens = field(default_factory=ComparedTokens)
    outliers: tuple[MismatchOutlier, ...] = ()
    noise: float = 0.05
    trainer_version: str | None = None
    mixture_of_experts: bool = False

    def __repr__(self) -> str:
        figures = self.statistics
        return (
            f"<MismatchReport: {figures.tokens} tokens, mean {figures.mean_abs:.1e}, max {figures.max_abs:.1e}, "
            f"k3 {figures.k3:.1e} nats>"
        )

    @property
    def statistics(self) -> DifferenceStatistics:
        """The figures over all tokens."""
        return difference_statistics(self.compared.difference)

    @property
    def tokens(self) -> int:
        """The number of compared tokens."""
        return len(self.compared)

    @property
    def max_abs(self) -> float:
        """The largest |difference|; 0 without tokens."""
        return self.statistics.max_abs

    @property
    def mean_abs(self) -> float:
        """The mean |difference|; 0 without tokens."""
        return self.statistics.mean_abs

    @property
    def kl(self) -> float:
        """The k3 estimate of KL(sampler || trainer), see `DifferenceStatistics`."""
        return self.statistics.k3

    @property
    def worst(self) -> str:
        """The name of the sample with the largest |difference|; empty without tokens."""
        if not self.tokens:
            return ""
        largest = int(np.abs(self.compared.difference).argmax())
        return self.compared.names[int(self.compared.sample[largest])]

    @property
    def by_turn(self) -> tuple[MismatchGroup, ...]:
        """Labels "turn 0", "turn 1"...: the runs of trained tokens of each sample, in order."""
        return by_turn(self.compared)

    @property
    def by_modality(self) -> tuple[MismatchGroup, ...]:
        """Labels "text", "image", "video": by the last image or video before a token, text where there is none."""
        return by_modality(self.compared)

    @property
    def by_lag(self) -> tuple[MismatchGroup, ...]:
        """Labels "lag 0", "lag 1"...: by how many versions the weights that sampled a token are behind the trainer's.

        "version ..." instead where versions are no integers; empty where samples have none.
        """
        return by_lag(self.compared, self.trainer_version)

    @property
    def by_image(self) -> tuple[MismatchGroup, ...]:
        """Labels are `mm_hash`es: the tokens after an image or video and before the next, over all samples."""
        return by_image(self.compared)

    @property
    def by_sample(self) -> tuple[MismatchGroup, ...]:
        """Labels are the names of samples."""
        return by_sample(self.compared)

    @property
    def likely_causes(self) -> tuple[LikelyCause, ...]:
        """What the differences suggest (`rollouts.training.mismatch.signatures`); empty where nothing does."""
        return likely_causes(
            self.compared,
            noise=self.noise,
            trainer_version=self.trainer_version,
            mixture_of_experts=self.mixture_of_experts,
        )


def mismatch_report(
    batch: TrainingBatch,
    logprobs: torch.Tensor,
    *,
    noise: float = 0.05,
    trainer_version: str | int | None = None,
    mixture_of_experts: bool = False,
) -> MismatchReport:
    """Compare the sampler's log-probabilities of a batch with the trainer's, `logprobs` floating (B, T).

    The trainer's must be of the weights that sampled the batch, before any optimizer step. The rest is for the likely
    causes: `noise`, the largest median of |difference|, in nats, that is no mismatch (1e-4 where both sides compute in
    float32); `trainer_version`, the version of the trainer's weights, from which the lag of each token is counted (by
    default from the newest version in the batch); `mixture_of_experts`, whether the model routes tokens to experts.

    Raises `ArgumentError` for log-probabilities that are no torch tensor of floats of this shape, and for a `noise`
    that is not above 0.
    """
    number = finite_number(noise)
    if number is None or number <= 0:
        raise ArgumentError("noise", noise, "pass a number of nats above 0, for example 1e-4 for float32")
    version = None if trainer_version is None else str(trainer_version)
    compared = compare_tokens(batch, logprobs)
    return MismatchReport(compared, _outliers(batch, compared), number, version, mixture_of_experts)


def merge_reports(reports: Iterable[MismatchReport]) -> MismatchReport:
    """One report over the tokens of all `reports`, with the settings of the first that has tokens.

    Raises `ArgumentError` for anything but reports.
    """
    if not isinstance(reports, Iterable):
        rule = "pass a list of reports, for example [report]: of one report, there is nothing to merge"
        raise ArgumentError("reports", reports, rule)
    nonempty = []
    for index, report in enumerate(reports):
        if not isinstance(report, MismatchReport):
            raise ArgumentError(f"reports[{index}]", report, "pass what mismatch_report returned")
        if report.tokens:
            nonempty.append(report)
    if not nonempty:
        return MismatchReport()
    outliers = sorted((one for report in nonempty for one in report.outliers), key=lambda one: -one.difference)
    return MismatchReport(
        concat_tokens([report.compared for report in nonempty]),
        tuple(outliers[:_OUTLIERS]),
        nonempty[0].noise,
        nonempty[0].trainer_version,
        nonempty[0].mixture_of_experts,
    )


def _outliers(batch: TrainingBatch, compared: ComparedTokens) -> tuple[MismatchOutlier, ...]:
    absolute = np.abs(compared.difference)
    largest = np.argsort(-absolute, kind="stable")[:_OUTLIERS]
    return tuple(_outlier(batch, compared, int(token)) for token in largest if absolute[token] > 0)


def _outlier(batch: TrainingBatch, compared: ComparedTokens, token: int) -> MismatchOutlier:
    sample, position = batch.samples[compared.sample[token]], int(compared.position[token])
    return MismatchOutlier(
        sample=sample.name,
        position=position,
        turn=int(compared.turn[token]),
        token_id=int(sample.token_ids[position]),
        sampler=float(compared.sampler[token]),
        trainer=float(compared.trainer[token]),
        before=sample.token_ids[max(0, position - _TOKENS_BEFORE) : position].copy(),
        after=sample.token_ids[position + 1 : position + 1 + _TOKENS_AFTER].copy(),
    )
