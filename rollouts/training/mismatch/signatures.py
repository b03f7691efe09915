"""Names the likely cause of a mismatch from the log-probabilities alone.

A signature is a property that one cause gives to the differences and noise does not: where they are (after images or
sounds, behind in versions, at the first token of a turn) or what they depend on (the log-probability itself, the next
token). Numerical noise differs with dtype and model, so each signature compares tokens of the same batch with each
other. Few tokens give no cause. Where tokens of one kind only differ, and tokens of another kind are missing, several
causes look alike: each is named, none before the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from rollouts.training.mismatch.compared import ComparedTokens


class Cause(StrEnum):
    """Why log-probabilities of sampler and trainer differ. The value is the name for people."""

    DOUBLED_NORMALISATION = "doubled normalisation"
    MISSING_NORMALISATION = "missing normalisation"
    DROPPED_IMAGE = "dropped image"
    SWAPPED_IMAGE = "swapped image"
    OTHER_FEATURES = "other features of a sound"
    DROPPED_SOUND = "dropped sound"
    SWAPPED_SOUND = "swapped sound"
    WRONG_TEMPLATE = "wrong template"
    STALE_WEIGHTS = "stale weights"
    WRONG_TEMPERATURE = "wrong temperature"
    PROCESSED_LOGPROBS = "processed log-probabilities"
    SHIFTED_LOGPROBS = "shifted log-probabilities"
    MISSING_LOGPROBS = "missing log-probabilities"
    MOE_ROUTING = "MoE routing"

    @property
    def cure(self) -> str:
        return _CURES[self]


class LikelyCause(NamedTuple):
    """A cause that the log-probabilities alone suggest; `diagnose_mismatch` tests causes by computing them again.

    `others` are the causes that show in the same way; `evidence` has the figures. Where none of them is more likely
    than `cause`, each has an entry of its own with the same evidence, and their order says nothing.
    """

    cause: Cause
    evidence: str
    others: tuple[Cause, ...] = ()


_CURES: Mapping[Cause, str] = MappingProxyType(
    {
        Cause.DOUBLED_NORMALISATION: "send raw uint8 pixels to a server that normalises, and floats to one that does "
        "not (`rollouts doctor` checks the server)",
        Cause.MISSING_NORMALISATION: "send the processor's floats to a server that does not normalise "
        "(`rollouts doctor` checks the server)",
        Cause.DROPPED_IMAGE: "check that each request holds its images and that the server's route uses them",
        Cause.SWAPPED_IMAGE: "check the order and the hashes of the images of each request",
        Cause.OTHER_FEATURES: "have one processor make the features on both sides, of the same samples: their rate, "
        "channels, padding and its mask (`rollouts doctor` checks the server)",
        Cause.DROPPED_SOUND: "check that each request holds its sounds and that the server's route uses them",
        Cause.SWAPPED_SOUND: "check the order and the hashes of the sounds of each request",
        Cause.WRONG_TEMPLATE: "send token ids to the sampler, or give sampler and trainer the same chat template and "
        "options, and compare their prompt ids",
        Cause.STALE_WEIGHTS: "update the sampler's weights before it samples, or leave out tokens by their version",
        Cause.WRONG_TEMPERATURE: "have the sampler report log-probabilities before temperature (vLLM: "
        "--logprobs-mode raw_logprobs), or divide the trainer's logits by the same temperature",
        Cause.PROCESSED_LOGPROBS: "have the sampler report log-probabilities before top-k, top-p and penalties (vLLM: "
        "--logprobs-mode raw_logprobs)",
        Cause.SHIFTED_LOGPROBS: "align the log-probabilities with their tokens: that of token t is predicted at t - 1",
        Cause.MISSING_LOGPROBS: "request the log-probability of each sampled token; never replace a missing one by 0",
        Cause.MOE_ROUTING: "replay the sampler's routing in the trainer (`routed_experts` of a completion), or compute "
        "the router in float32 on both sides",
    }
)

#: Differences below this many nats need no cause: float32 on other hardware gives as much.
FLOOR = 1e-4
_MIN_TOKENS = 32
#: As few stretches of tokens (`_Units`) show that they differ, or that they do not.
_MIN_UNITS = 3
#: Standard deviations by which a rank test must exceed chance: about 3 in 100,000.
_SIGNIFICANT = 4.0
#: The largest share of probability, in nats, that top-k and top-p are taken to cut off: half of it, and rounding.
_MOST_CUT_OFF = 0.7
_IMAGES = (Cause.DOUBLED_NORMALISATION, Cause.DROPPED_IMAGE, Cause.SWAPPED_IMAGE)
_ALSO_OLD_WEIGHTS = "; older weights may do the same, and nearly all of the tokens have such"
_OF_SOME = (Cause.SWAPPED_IMAGE, Cause.DROPPED_IMAGE, Cause.SWAPPED_SOUND, Cause.DROPPED_SOUND)
_SOUNDS = (Cause.OTHER_FEATURES, Cause.DROPPED_SOUND, Cause.SWAPPED_SOUND)


def likely_causes(
    tokens: ComparedTokens,
    *,
    noise: float = 0.05,
    trainer_version: str | None = None,
    mixture_of_experts: bool = False,
) -> tuple[LikelyCause, ...]:
    """The causes whose signature the differences have; empty where there is none.

    `noise`: the largest median of |difference|, in nats, that arithmetic of lower precision alone explains; pass 1e-4
    where both sides compute in float32. `mixture_of_experts`: whether the model routes tokens to experts; without it,
    MoE routing is never named. Tokens whose difference is not finite are left out.
    """
    tokens = tokens.select(np.isfinite(tokens.difference))
    if len(tokens) < _MIN_TOKENS or np.abs(tokens.difference).mean() < FLOOR:
        return ()
    if wrongly_reported := _wrongly_reported(tokens, trainer_version):
        return tuple(wrongly_reported)  # where it is wrong says nothing more
    units = _units(tokens, trainer_version)
    media = _media(units, tokens)
    hides = media is None and _without_text_to_compare(units)
    wrong = _of_modalities(tokens, units.item) if hides else _Media((), "", "")
    located = [cause for cause in (media, _stale(units)) if cause is not None] + _turn_start(tokens, wrong)
    if not located and (found := _sparse(tokens) if mixture_of_experts else None) is not None:
        located = [found]
    return tuple(located or _everywhere(units, noise, wrong))


def _alike(evidence: str, causes: Sequence[Cause], reason: str = "") -> list[LikelyCause]:
    """One entry for each of `causes`, which show in the same way: none of them is more likely than another."""
    return [
        LikelyCause(cause, evidence + reason, tuple(other for other in causes if other is not cause))
        for cause in causes
    ]


# What the sampler reported.


def _wrongly_reported(tokens: ComparedTokens, trainer_version: str | None) -> list[LikelyCause]:
    for signature in (_missing, _shifted):
        if (found := signature(tokens)) is not None:
            return [found]
    # Training makes likely tokens likelier, as a lower temperature does: tokens of equal weights tell the two apart.
    lag = tokens.lag(trainer_version)
    of_equal_weights = tokens if lag is None else tokens.select(lag == 0)
    can_tell = len(of_equal_weights) >= _MIN_TOKENS
    for signature in (_temperature, _processed):
        if (found := signature(of_equal_weights if can_tell else tokens)) is None:
            continue
        if can_tell:
            return [found]
        return _alike(found.evidence, (found.cause, *found.others, Cause.STALE_WEIGHTS), _ALSO_OLD_WEIGHTS)
    return []


def _missing(tokens: ComparedTokens) -> LikelyCause | None:
    zeros, trainer = float((tokens.sampler == 0).mean()), float(np.abs(tokens.trainer).mean())
    if zeros < 0.95 or trainer < 0.05:
        return None
    evidence = f"{zeros:.0%} of the sampler's log-probabilities are exactly 0; the trainer's mean is {-trainer:.2f}"
    return LikelyCause(Cause.MISSING_LOGPROBS, evidence, (Cause.PROCESSED_LOGPROBS,))


def _shifted(tokens: ComparedTokens) -> LikelyCause | None:
    """The sampler's value of a token is the trainer's value of the token before or after it in the turn."""
    follows = (np.diff(tokens.turn_position) == 1) & (np.diff(tokens.sample) == 0) & (np.diff(tokens.turn) == 0)
    if follows.sum() < _MIN_TOKENS:
        return None
    before, after = np.append(follows, False), np.insert(follows, 0, False)
    for ours, theirs, neighbour in ((before, after, "next"), (after, before, "previous")):
        sampler, trainer = tokens.sampler[ours].astype(np.float64), tokens.trainer[ours]
        aligned = np.abs(sampler - trainer).mean()
        shifted = np.abs(sampler - tokens.trainer[theirs]).mean()
        if shifted < 0.2 * aligned:
            evidence = (
                f"the sampler's log-probability of a token is the trainer's of the {neighbour} token: mean difference "
                f"{shifted:.1e} nats instead of {aligned:.1e}"
            )
            return LikelyCause(Cause.SHIFTED_LOGPROBS, evidence)
    return None


def _temperature(tokens: ComparedTokens) -> LikelyCause | None:
    """log softmax(z / T) is log softmax(z) / T plus a number that depends on the position's distribution only."""
    trainer, sampler = tokens.trainer.astype(np.float64), tokens.sampler.astype(np.float64)
    centred = trainer - trainer.mean()
    if not (variance := float(centred @ centred)):
        return None
    slope = float(centred @ sampler) / variance
    unexplained = np.abs(sampler - sampler.mean() - slope * centred).mean()
    whole = np.abs(tokens.difference).mean()
    if unexplained > 0.25 * whole or abs(slope - 1) < 0.03 or not 0.1 < slope < 10:
        return None
    evidence = (
        f"the sampler's log-probabilities are about {slope:.2f} times the trainer's plus a constant, as with a "
        f"temperature of {1 / slope:.2f}: this leaves {unexplained:.1e} of {whole:.1e} nats"
    )
    return LikelyCause(Cause.WRONG_TEMPERATURE, evidence, (Cause.PROCESSED_LOGPROBS,))


def _processed(tokens: ComparedTokens) -> LikelyCause | None:
    """After top-k or top-p the kept tokens share the probability of the others: the sampler's are never smaller."""
    difference = tokens.difference
    large = difference[np.abs(difference) > FLOOR]
    if len(large) < 2 * _MIN_TOKENS or (large < 0).mean() < 0.99 or np.quantile(-large, 0.99) > _MOST_CUT_OFF:
        return None
    evidence = (
        f"{(large < 0).mean():.0%} of {len(large)} differences have one sign: the sampler's log-probabilities are "
        f"larger, by at most {-large.min():.2f} nats, as if a share of up to {-np.expm1(large.min()):.0%} was cut off"
    )
    return LikelyCause(Cause.PROCESSED_LOGPROBS, evidence, (Cause.WRONG_TEMPERATURE,))


# Where the differences are.


class _Units(NamedTuple):
    """Stretches of tokens of one sample, after the same medium, from the same weights; those of 8 tokens or more.

    `quartile`, `median` and `decile` float64 (u,): the quantiles 0.25, 0.5 and 0.9 of |difference|; `sample` and `item`
    int64 (u,), as in `ComparedTokens`; `lag` int64 (u,) or None.
    """

    quartile: np.ndarray
    median: np.ndarray
    decile: np.ndarray
    sample: np.ndarray
    item: np.ndarray
    lag: np.ndarray | None


def _units(tokens: ComparedTokens, trainer_version: str | None) -> _Units:
    absolute, lag = np.abs(tokens.difference), tokens.lag(trainer_version)
    # One integer for each triple of sample, item and version; -1 becomes 0.
    items, versions = len(tokens.media_hashes) + 1, len(tokens.versions) + 1
    keys = (tokens.sample.astype(np.int64) * items + tokens.item + 1) * versions + tokens.version + 1
    unique, number, counts = np.unique(keys, return_inverse=True, return_counts=True)
    sample, item = np.divmod(unique // versions, items)
    parts = np.split(absolute[np.argsort(number, kind="stable")], np.cumsum(counts)[:-1])
    enough = counts >= 8
    kept = [part for part, is_kept in zip(parts, enough, strict=True) if is_kept]
    quantiles = np.array([np.quantile(part, (0.25, 0.5, 0.9)) for part in kept]).reshape(-1, 3)
    lag_of_unit = np.zeros(len(counts), dtype=np.int64)
    if lag is not None:
        lag_of_unit[number] = lag
    quartile, median, decile = quantiles.T
    return _Units(
        quartile, median, decile, sample[enough], item[enough] - 1, None if lag is None else lag_of_unit[enough]
    )


class _Media(NamedTuple):
    """`causes` of wrong media, the first where all of them are wrong; the words for `one` and `several` of them."""

    causes: tuple[Cause, ...]
    one: str
    several: str

    @property
    def also(self) -> str:
        return f", and so do wrong {self.several}, because nearly every token has one before it" if self.causes else ""


def _of_modalities(tokens: ComparedTokens, items: np.ndarray) -> _Media:
    """The causes and words for the modalities of `items`, indices into the tables of `tokens`, -1 for none."""
    heard = {tokens.media_modalities[item] == "audio" for item in items[items >= 0].tolist()}
    if heard == {True}:
        return _Media(_SOUNDS, "a sound", "sounds")
    if heard == {True, False}:
        return _Media((*_IMAGES, *_SOUNDS), "an image, video or sound", "images or sounds")
    return _Media(_IMAGES, "an image or video", "images")


def _media(units: _Units, tokens: ComparedTokens) -> LikelyCause | None:
    high, ratio = _above_gap(units.median)
    after_item = units.item >= 0
    if not high.any() or not after_item[high].all():
        return None
    media = _of_modalities(tokens, units.item[high])
    level = f"median {np.median(units.median[high]):.1e} nats; elsewhere {np.median(units.median[~high]):.1e}"
    if (~after_item).sum() >= _MIN_UNITS and high.sum() >= _MIN_UNITS and high[after_item].mean() >= 0.8:
        evidence = (
            f"the tokens after {media.one} differ ({int(high.sum())} of {int(after_item.sum())} stretches of "
            f"tokens, {level}); tokens before the first one and samples without do not"
        )
        return LikelyCause(media.causes[0], evidence, media.causes[1:])
    # One stretch of few tokens with heavy tails can be above a gap; then its smaller differences are not.
    if ratio < 10 or units.quartile[high].min() < np.median(units.decile[~high]):
        return None
    _, first = np.unique(units.sample[high], return_index=True)
    hashes = [f"{tokens.media_hashes[item]:.12}" for item in dict.fromkeys(units.item[high][first].tolist())]
    listed = ", ".join(hashes[:4]) + (", ..." if len(hashes) > 4 else "")
    evidence = (
        f"the tokens after some {media.several} differ ({int(high.sum())} of {int(after_item.sum())} stretches of "
        f"tokens, {level}); it begins at {listed}"
    )
    swapped, *others = (cause for cause in _OF_SOME if cause in media.causes)
    return LikelyCause(swapped, evidence, tuple(others))


def _without_text_to_compare(units: _Units) -> bool:
    """Whether nearly every token has a medium before it, so that other media are like other prompts."""
    after_item = units.item >= 0
    return bool(after_item.any()) and int((~after_item).sum()) < _MIN_UNITS


def _above_gap(values: np.ndarray) -> tuple[np.ndarray, float]:
    """Which values are above the widest gap, as a ratio, between ascending values, bool (n,), and that ratio.

    None is where fewer than 3 are below it, the ratio is less than 5, or the values above it are below `FLOOR`.
    """
    none = np.zeros(len(values), dtype=bool), 1.0
    if len(values) < 4:
        return none
    ordered = np.maximum(np.sort(values), FLOOR / 100)
    ratios = ordered[3:] / ordered[2:-1]
    widest = int(ratios.argmax())
    if ratios[widest] < 5 or ordered[3 + widest] < FLOOR:
        return none
    return values >= ordered[3 + widest], float(ratios[widest])


def _stale(units: _Units) -> LikelyCause | None:
    if units.lag is None or len(lags := np.unique(units.lag)) < 2:
        return None
    medians = [float(np.median(units.median[units.lag == lag])) for lag in lags]
    high, _ = _above_gap(units.median)
    is_behind = units.lag > lags[0]
    separated = high.sum() >= 3 and bool((high == is_behind).all())
    correlated = _rank_correlation_score(units.lag, units.median) > _SIGNIFICANT and medians[-1] > 2 * medians[0]
    if not (separated or correlated) or medians[-1] < FLOOR:
        return None
    listed = ", ".join(f"lag {lag}: {median:.1e}" for lag, median in zip(lags.tolist(), medians, strict=True))
    return LikelyCause(Cause.STALE_WEIGHTS, f"the median difference grows with the version lag ({listed} nats)")


def _rank_correlation_score(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's rank correlation in standard deviations of its distribution without correlation, 1 / sqrt(n - 1)."""
    ranks = []
    for values in (one, other):
        _, number, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[number])  # ties have their mean rank
    deviation = float(ranks[0].std() * ranks[1].std())
    if not deviation:
        return 0.0
    covariance = float(((ranks[0] - ranks[0].mean()) * (ranks[1] - ranks[1].mean())).mean())
    return covariance / deviation * float(np.sqrt(len(one) - 1))


def _turn_start(tokens: ComparedTokens, media: _Media) -> list[LikelyCause]:
    """A prompt that ends in other tokens changes the first token of a turn most. `media`: what looks like it."""
    absolute = np.abs(tokens.difference)
    first, later = absolute[tokens.turn_position == 0], absolute[tokens.turn_position >= 4]
    if len(first) < 16 or len(later) < _MIN_TOKENS:
        return []
    at_start, after = float(np.median(first)), float(np.median(later))
    # A median above the 95 % quantile of the others: of 16 or more, half above it is far beyond chance.
    if at_start < 0.1 or at_start < 3 * after or at_start < np.quantile(later, 0.95):
        return []
    evidence = (
        f"the first token of a turn differs most: median {at_start:.1e} nats over {len(first)} turns, {after:.1e} from "
        "the fifth token on, as if the prompt ended in other tokens"
    )
    return _alike(evidence, (Cause.WRONG_TEMPLATE, *media.causes), media.also)


def _sparse(tokens: ComparedTokens) -> LikelyCause | None:
    absolute = np.abs(tokens.difference)
    middle, top = (float(value) for value in np.quantile(absolute, [0.5, 0.99]))
    if len(absolute) < 4 * _MIN_TOKENS or top < 20 * max(middle, FLOOR / 100) or top < FLOOR:
        return None
    evidence = (
        f"few tokens differ much (median {middle:.1e}, 99 % quantile {top:.1e} nats), in no relation to media, "
        "versions or turns, and the model routes tokens to experts"
    )
    return LikelyCause(Cause.MOE_ROUTING, evidence)


def _everywhere(units: _Units, noise: float, media: _Media) -> list[LikelyCause]:
    if len(units.median) < _MIN_UNITS or np.quantile(units.median, 0.1) < noise:
        return []
    evidence = (
        f"the tokens of all samples differ (median {np.median(units.median):.1e} nats); other prompts and other "
        "weights both do this"
    )
    return _alike(evidence, (Cause.WRONG_TEMPLATE, Cause.STALE_WEIGHTS, *media.causes), media.also)
