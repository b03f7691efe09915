"""Figures of log-probability differences, over all tokens and over groups of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollouts.training.mismatch.compared import ComparedTokens


class DifferenceStatistics(NamedTuple):
    """Figures of d = log p(trainer) - log p(sampler) over `tokens` sampled tokens, in nats.

    `mean_abs` and `max_abs` are of |d|. `k1`, the mean of -d, and `k3`, the mean of exp(d) - 1 - d, estimate
    KL(sampler || trainer) from tokens that the sampler drew: both without bias, k3 is never negative and varies less
    (Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html).
    """

    tokens: int = 0
    mean_abs: float = 0.0
    max_abs: float = 0.0
    k1: float = 0.0
    k3: float = 0.0


class MismatchGroup(NamedTuple):
    """The statistics of the tokens that `label` names."""

    label: str
    statistics: DifferenceStatistics


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


def by_turn(tokens: ComparedTokens) -> tuple[MismatchGroup, ...]:
    """One group a turn: the first trained turn of every sample, the second..."""
    return _groups(tokens, tokens.turn, [f"turn {turn}" for turn in range(int(tokens.turn.max(initial=-1)) + 1)])


def by_modality(tokens: ComparedTokens) -> tuple[MismatchGroup, ...]:
    """Tokens after an image, after a video, and before any of them ("text"), by the last item before the token."""
    labels = ("text", "image", "video")
    modality = tokens.modality()
    number = np.select([modality == label for label in labels], range(len(labels)), default=-1)
    return _groups(tokens, number, labels)


def by_image(tokens: ComparedTokens) -> tuple[MismatchGroup, ...]:
    """One group an image or video: the tokens between it and the next one. Labels are `mm_hash`es."""
    return _groups(tokens, tokens.item, tokens.media_hashes)


def by_sample(tokens: ComparedTokens) -> tuple[MismatchGroup, ...]:
    """One group a sample that has trained tokens; labels are the names of the samples."""
    return _groups(tokens, tokens.sample, tokens.names)


def by_lag(tokens: ComparedTokens, trainer_version: str | None = None) -> tuple[MismatchGroup, ...]:
    """One group a version lag, ascending; one a version where the lags are not known (see `ComparedTokens.lag`)."""
    lag = tokens.lag(trainer_version)
    if lag is None:
        return _groups(tokens, tokens.version, [f"version {version}" for version in tokens.versions])
    lags, number = np.unique(lag, return_inverse=True)
    return _groups(tokens, number, [f"lag {each}" for each in lags.tolist()])


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
