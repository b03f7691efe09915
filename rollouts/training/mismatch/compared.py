"""The log-probabilities of sampler and trainer for each trained token, and where in its episode the token is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from rollouts.errors import ArgumentError
from rollouts.training.batch import TrainingBatch
from rollouts.training.samples import TrainingSample
from rollouts.version_order import VersionOrder
from transport import wire_type

Entry = TypeVar("Entry", bound=Hashable)

_no_floats, _no_integers = partial(np.empty, 0, np.float32), partial(np.empty, 0, np.int32)


@wire_type("rollouts.ComparedTokens")
@dataclass(frozen=True, slots=True, eq=False)
class ComparedTokens:
    """The n trained tokens of a batch, in the order of samples and positions. Every array is (n,).

    `sampler` and `trainer` float32, log-probabilities in nats. The others are int32: `sample`, an index into
    `names`; `position` in the sample; `turn`, the number of the run of trained tokens in the sample, from 0;
    `turn_position`, the position in that run; `item`, the last image, video or sound before the token, an
    index into `media_hashes` and `media_modalities`, -1 where there is none; `version`, an index into
    `versions`, -1 where it is not known.
    """

    sampler: np.ndarray = field(default_factory=_no_floats)
    trainer: np.ndarray = field(default_factory=_no_floats)
    sample: np.ndarray = field(default_factory=_no_integers)
    position: np.ndarray = field(default_factory=_no_integers)
    turn: np.ndarray = field(default_factory=_no_integers)
    turn_position: np.ndarray = field(default_factory=_no_integers)
    item: np.ndarray = field(default_factory=_no_integers)
    version: np.ndarray = field(default_factory=_no_integers)
    names: tuple[str, ...] = ()
    media_hashes: tuple[str, ...] = ()
    media_modalities: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sampler)

    @property
    def difference(self) -> np.ndarray:
        """trainer - sampler, float64 (n,). Infinite where it is not a number, so that it exceeds every threshold."""
        with np.errstate(invalid="ignore"):
            difference = self.trainer.astype(np.float64) - self.sampler.astype(np.float64)
        return np.where(np.isnan(difference), np.inf, difference)

    def modality(self) -> np.ndarray:
        """The modality of `item` for each token, text (n,): "text" where no medium is before the token."""
        modality: np.ndarray = np.array([*self.media_modalities, "text"])[self.item]
        return modality

    def lag(self, trainer_version: str | None = None) -> np.ndarray | None:
        """How many versions older than the trainer's weights those of each token are, int64 (n,).

        The trainer's version is `trainer_version`, or the newest of the tokens. None where a version is not
        known or no integer: then the order of the versions is not known.
        """
        if not len(self) or (self.version < 0).any():
            return None
        order = VersionOrder()
        places = [place for version in self.versions if (place := order.place(version)) is not None]
        if len(places) < len(self.versions):
            return None
        sampled = np.array(places, dtype=np.int64)[self.version]
        newest = int(sampled.max()) if trainer_version is None else order.place(trainer_version)
        return None if newest is None else newest - sampled


_TABLES = ("names", "media_hashes", "media_modalities", "versions")
_ARRAYS = tuple(each.name for each in fields(ComparedTokens) if each.name not in _TABLES)


class _Places(NamedTuple):
    """Where the trained tokens of a batch are: row and column in its tensors, sample, position. int64 (n,) each."""

    row: np.ndarray
    column: np.ndarray
    sample: np.ndarray
    position: np.ndarray


def compare_tokens(batch: TrainingBatch, logprobs: torch.Tensor) -> ComparedTokens:
    """Put the sampler's log-probabilities of a batch beside the trainer's, `logprobs` floating (B, T).

    Raises `ArgumentError` for log-probabilities of another shape.
    """
    if tuple(logprobs.shape) != tuple(batch.loss_mask.shape):
        rule = f"pass the log-probabilities of this batch, {tuple(batch.loss_mask.shape)}"
        raise ArgumentError("the shape of logprobs", tuple(logprobs.shape), rule)
    places = _trained_places(batch)
    at = (places.row, places.column)
    count = len(batch.samples)
    ends = np.searchsorted(places.sample, np.arange(count), side="right")
    tokens_of = np.split(np.arange(len(places.sample)), ends[:-1]) if count else []
    turn, turn_position = _turns(places)
    items, hashes, modalities = _last_items(batch.samples, places, tokens_of)
    version, versions = _token_versions(batch.samples, len(places.sample), tokens_of)
    return ComparedTokens(
        sampler=batch.logprobs.cpu().numpy()[at].astype(np.float32),
        trainer=logprobs.detach().float().cpu().numpy()[at],
        sample=places.sample.astype(np.int32),
        position=places.position.astype(np.int32),
        turn=turn,
        turn_position=turn_position,
        item=items,
        version=version,
        names=tuple(sample.name for sample in batch.samples),
        media_hashes=hashes,
        media_modalities=modalities,
        versions=versions,
    )


def concat_tokens(parts: Sequence[ComparedTokens]) -> ComparedTokens:
    """The tokens of all parts, one after another. An image or a version that several parts have is listed once."""
    if not parts:
        return ComparedTokens()
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
    counts = [len(part.names) for part in parts]
    shifts = np.cumsum([0, *counts[:-1]])
    columns["sample"] = np.concatenate(
        [(part.sample + shift).astype(np.int32) for part, shift in zip(parts, shifts, strict=True)]
    )
    media: dict[tuple[str, str], int] = {}
    versions: dict[str, int] = {}
    of_media = [list(zip(part.media_hashes, part.media_modalities, strict=True)) for part in parts]
    columns["item"] = np.concatenate(
        [_renumbered(part.item, own, media) for part, own in zip(parts, of_media, strict=True)]
    )
    columns["version"] = np.concatenate([_renumbered(part.version, part.versions, versions) for part in parts])
    return ComparedTokens(
        **columns,
        names=tuple(name for part in parts for name in part.names),
        media_hashes=tuple(mm_hash for mm_hash, _ in media),
        media_modalities=tuple(modality for _, modality in media),
        versions=tuple(versions),
    )


def _renumbered(indices: np.ndarray, table: Sequence[Entry], whole: dict[Entry, int]) -> np.ndarray:
    """Indices into `table` as indices into `whole`, to which missing entries are added; -1 stays -1."""
    numbers = [whole.setdefault(entry, len(whole)) for entry in table]
    renumbered: np.ndarray = np.array([*numbers, -1], dtype=np.int32)[indices]
    return renumbered


def _trained_places(batch: TrainingBatch) -> _Places:
    row, column = batch.loss_mask.cpu().numpy().nonzero()
    sample = batch.sequence_ids.cpu().numpy()[row, column]
    position = batch.position_ids.cpu().numpy()[row, column]
    order = np.lexsort((position, sample))
    return _Places(row[order], column[order], sample[order], position[order])


def _turns(places: _Places) -> tuple[np.ndarray, np.ndarray]:
    """The number of each token's turn in its sample, and the token's position in the turn, int32 (n,)."""
    count = len(places.sample)
    is_first_of_sample = np.ones(count, dtype=bool)
    is_first_of_sample[1:] = np.diff(places.sample) != 0
    is_first_of_turn = is_first_of_sample.copy()
    is_first_of_turn[1:] |= np.diff(places.position) != 1
    turns = np.cumsum(is_first_of_turn)
    first = np.maximum.accumulate(np.where(is_first_of_turn, np.arange(count), 0))
    turn = turns - np.maximum.accumulate(np.where(is_first_of_sample, turns, 0))
    return turn.astype(np.int32), (np.arange(count) - first).astype(np.int32)


def _last_items(
    samples: Sequence[TrainingSample], places: _Places, tokens_of: Sequence[np.ndarray]
) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    """For each token the index of the last item that ends before it, and hash and modality of the distinct items."""
    indices: dict[tuple[str, str], int] = {}
    last = np.full(len(places.sample), -1, dtype=np.int32)
    for sample, tokens in zip(samples, tokens_of, strict=True):
        own = [indices.setdefault((item.mm_hash, item.modality), len(indices)) for item, _ in sample.media]
        ends = [placeholder.end for _, placeholder in sample.media]
        before = np.searchsorted(ends, places.position[tokens], side="right") - 1
        last[tokens] = np.array([*own, -1])[before]
    return last, tuple(mm_hash for mm_hash, _ in indices), tuple(modality for _, modality in indices)


def _token_versions(
    samples: Sequence[TrainingSample], count: int, tokens_of: Sequence[np.ndarray]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """For each token the index of the version of the weights that sampled it, and the distinct versions."""
    indices: dict[str, int] = {}
    version = np.full(count, -1, dtype=np.int32)
    for sample, tokens in zip(samples, tokens_of, strict=True):
        for span in sample.weight_spans:  # they count the trained tokens of the sample
            version[tokens[span.start : span.end]] = indices.setdefault(span.version, len(indices))
    return version, tuple(indices)
