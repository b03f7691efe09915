"""Puts the log-probabilities of sampler and trainer side by side, for each trained token of a batch."""

from collections.abc import Hashable, Sequence
from dataclasses import fields
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from rollouts.compared_tokens import ComparedTokens
from rollouts.errors import ArgumentError
from rollouts.training.batch import TrainingBatch
from rollouts.training.samples import TrainingSample

Entry = TypeVar("Entry", bound=Hashable)

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
    items, hashes, modalities = _last_items(batch.samples, places, tokens_of)
    version, versions = _token_versions(batch.samples, len(places.sample), tokens_of)
    return ComparedTokens(
        sampler=batch.logprobs.cpu().numpy()[at].astype(np.float32),
        trainer=logprobs.detach().float().cpu().numpy()[at],
        sample=places.sample.astype(np.int32),
        position=places.position.astype(np.int32),
        turn=_turns(places),
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
    # An index of -1 takes the last entry, which is -1.
    renumbered: np.ndarray = np.array([*numbers, -1], dtype=np.int32)[indices]
    return renumbered


def _trained_places(batch: TrainingBatch) -> _Places:
    row, column = batch.loss_mask.cpu().numpy().nonzero()
    sample = batch.sequence_ids.cpu().numpy()[row, column]
    position = batch.position_ids.cpu().numpy()[row, column]
    # Rows of a batch may be packed or padded; samples and positions have one order in both.
    order = np.lexsort((position, sample))
    return _Places(row[order], column[order], sample[order], position[order])


def _turns(places: _Places) -> np.ndarray:
    """The number of each token's turn in its sample, int32 (n,)."""
    count = len(places.sample)
    is_first_of_sample = np.ones(count, dtype=bool)
    is_first_of_sample[1:] = np.diff(places.sample) != 0
    is_first_of_turn = is_first_of_sample.copy()
    is_first_of_turn[1:] |= np.diff(places.position) != 1
    turns = np.cumsum(is_first_of_turn)
    turn: np.ndarray = turns - np.maximum.accumulate(np.where(is_first_of_sample, turns, 0))
    return turn.astype(np.int32)


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
