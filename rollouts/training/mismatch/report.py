"""The mismatch: the difference between the sampler's and the trainer's log-probabilities of the sampled tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from rollouts.compared_tokens import ComparedTokens
from rollouts.errors import ArgumentError, RolloutsError
from rollouts.training.batch import TrainingBatch
from rollouts.training.mismatch.compared import compare_tokens, concat_tokens
from rollouts.values import check_positive
from transport import wire_type


class DifferenceStatistics(NamedTuple):
    """Figures of d = log p(trainer) - log p(sampler) over `tokens` sampled tokens, in nats.

    `mean_abs` and `max_abs` are of |d|. `k1`, the mean of -d, and `k3`, the mean of exp(d) - 1 - d, estimate
    KL(sampler || trainer) from tokens that the sampler drew: both without bias, k3 is never negative and
    varies less (Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html).
    """

    tokens: int = 0
    mean_abs: float = 0.0
    max_abs: float = 0.0
    k1: float = 0.0
    k3: float = 0.0


def difference_statistics(difference: np.ndarray) -> DifferenceStatistics:
    """The figures of `difference`, trainer - sampler, float64 (n,); all 0 for no tokens."""
    if not len(difference):
        return DifferenceStatistics()
    absolute = np.abs(difference)
    with np.errstate(over="ignore", invalid="ignore"):
        k1 = -difference.mean()
        k3 = np.expm1(difference) - difference
    return DifferenceStatistics(
        tokens=len(difference),
        mean_abs=float(absolute.mean()),
        max_abs=float(absolute.max()),
        k1=float(k1) + 0.0,  # + 0.0: never -0.0
        k3=float(np.where(np.isnan(k3), np.inf, k3).mean()),
    )


class MismatchGroup(NamedTuple):
    """The statistics of the tokens that `label` names."""

    label: str
    statistics: DifferenceStatistics


def _groups(tokens: ComparedTokens, number: np.ndarray, labels: Sequence[str]) -> tuple[MismatchGroup, ...]:
    """One group for each label with tokens; `number` (n,) is the index of each token's label, -1 for none."""
    order = np.argsort(number, kind="stable")
    difference = tokens.difference[order]
    bounds = np.searchsorted(number[order], np.arange(len(labels) + 1))
    return tuple(
        MismatchGroup(label, difference_statistics(difference[start:end]))
        for label, start, end in zip(labels, bounds[:-1], bounds[1:], strict=True)
        if end > start
    )


_OUTLIERS = 8
_TOKENS_BEFORE, _TOKENS_AFTER = 16, 4


@wire_type("rollouts.MismatchOutlier")
@dataclass(frozen=True, slots=True, eq=False)
class MismatchOutlier:
    """A token with one of the largest differences. `sampler` and `trainer` are its log-probabilities, in nats.

    `sample` is the name of its sample, `position` its position there. `before` and `after` int32 hold the ids
    of up to 16 tokens before it and up to 4 after it.
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

    `compared` has both for every token, `outliers` the tokens that differ most. The properties sum them up:
    over all tokens, and by turn, modality, version lag, image and sample. `report_text`
    prints them, `check_mismatch` compares them with thresholds. A log-probability that is not a number counts
    as an infinite difference.

    `trainer_version` is that of `mismatch_report`. Causes are tested by `diagnose_mismatch`.
    """

    compared: ComparedTokens = field(default_factory=ComparedTokens)
    outliers: tuple[MismatchOutlier, ...] = ()
    trainer_version: str | None = None

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
    def by_turn(self) -> tuple[MismatchGroup, ...]:
        """Labels "turn 0", "turn 1"...: the runs of trained tokens of each sample, in order."""
        turn = self.compared.turn
        return _groups(self.compared, turn, [f"turn {each}" for each in range(int(turn.max(initial=-1)) + 1)])

    @property
    def by_modality(self) -> tuple[MismatchGroup, ...]:
        """Labels "text", "image", "video", "audio": by the last medium before a token, text where there is none."""
        labels = ("text", "image", "video", "audio")
        modality = self.compared.modality()
        number = np.select([modality == label for label in labels], range(len(labels)), default=-1)
        return _groups(self.compared, number, labels)

    @property
    def by_lag(self) -> tuple[MismatchGroup, ...]:
        """Labels "lag 0", "lag 1"...: by how many versions the weights that sampled a token are behind the trainer's.

        "version ..." instead where versions are no integers; empty where samples have none.
        """
        tokens = self.compared
        lag = tokens.lag(self.trainer_version)
        if lag is None:
            return _groups(tokens, tokens.version, [f"version {version}" for version in tokens.versions])
        lags, number = np.unique(lag, return_inverse=True)
        return _groups(tokens, number, [f"lag {each}" for each in lags.tolist()])

    @property
    def by_image(self) -> tuple[MismatchGroup, ...]:
        """Labels are `mm_hash`es: the tokens after an image, video or sound and before the next, over all samples."""
        return _groups(self.compared, self.compared.item, self.compared.media_hashes)

    @property
    def by_sample(self) -> tuple[MismatchGroup, ...]:
        """Labels are the names of samples."""
        return _groups(self.compared, self.compared.sample, self.compared.names)


def mismatch_report(
    batch: TrainingBatch, logprobs: torch.Tensor, *, trainer_version: str | int | None = None
) -> MismatchReport:
    """Compare the sampler's log-probabilities of a batch with the trainer's, `logprobs` floating (B, T).

    The trainer's must be of the weights that sampled the batch, before any optimizer step. `trainer_version`
    is the version of these weights, from which the lag of each token is counted (by default from the newest
    in the batch).

    Raises `ArgumentError` for log-probabilities of another shape.
    """
    version = None if trainer_version is None else str(trainer_version)
    compared = compare_tokens(batch, logprobs)
    return MismatchReport(compared, _outliers(batch, compared), version)


def merge_reports(reports: Iterable[MismatchReport]) -> MismatchReport:
    """One report over the tokens of all `reports`, with the trainer's version of the first that has tokens."""
    nonempty = [report for report in reports if report.tokens]
    if not nonempty:
        return MismatchReport()
    outliers = sorted((one for report in nonempty for one in report.outliers), key=lambda one: -one.difference)
    return MismatchReport(
        concat_tokens([report.compared for report in nonempty]),
        tuple(outliers[:_OUTLIERS]),
        nonempty[0].trainer_version,
    )


def _outliers(batch: TrainingBatch, compared: ComparedTokens) -> tuple[MismatchOutlier, ...]:
    absolute = np.abs(compared.difference)
    largest = [token for token in np.argsort(-absolute, kind="stable")[:_OUTLIERS] if absolute[token] > 0]
    places = [(token, batch.samples[compared.sample[token]], int(compared.position[token])) for token in largest]
    return tuple(
        MismatchOutlier(
            sample=sample.name,
            position=position,
            turn=int(compared.turn[token]),
            token_id=int(sample.token_ids[position]),
            sampler=float(compared.sampler[token]),
            trainer=float(compared.trainer[token]),
            before=sample.token_ids[max(0, position - _TOKENS_BEFORE) : position].copy(),
            after=sample.token_ids[position + 1 : position + 1 + _TOKENS_AFTER].copy(),
        )
        for token, sample, position in places
    )


def check_mismatch(
    report: MismatchReport,
    *,
    max_abs: float | None = None,
    mean_abs: float | None = None,
    k3: float | None = None,
) -> None:
    """Compare figures of the report with thresholds in nats; None is no threshold.

    A figure above its threshold raises `RolloutsError`, whose text names the figure, the threshold and the
    sample with the largest difference. Raises `ArgumentError` for a threshold that is not above 0, and without
    any threshold.
    """
    thresholds = {"max_abs": max_abs, "mean_abs": mean_abs, "k3": k3}
    given = {name: value for name, value in thresholds.items() if value is not None}
    if not given:
        raise ArgumentError("max_abs", max_abs, "pass at least one of max_abs, mean_abs and k3")
    for name, value in given.items():
        check_positive(name, value, "pass a number of nats above 0")
    figures = report.statistics._asdict()
    exceeded = [(name, figures[name], value) for name, value in given.items() if not figures[name] <= value]
    if not exceeded:
        return
    compared = report.compared
    worst = compared.names[int(compared.sample[int(np.abs(compared.difference).argmax())])]
    listed = ", ".join(f"{name} {value:.2e} is above {threshold:.2e} nats" for name, value, threshold in exceeded)
    raise RolloutsError(
        f"mismatch over {report.tokens} tokens: {listed}; largest in sample {worst}. Read report_text(report), "
        "or find the cause with diagnose_mismatch, before training on these tokens"
    )
