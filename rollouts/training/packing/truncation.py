"""Samples cut to a number of tokens and vision patches, never inside an image."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from renderers import MediaItem
from rollouts.engines.protocol import WeightSpan
from rollouts.errors import ArgumentError
from rollouts.numbers import whole_number
from rollouts.training.samples import TrainingSample


@dataclass(frozen=True, slots=True)
class Truncation:
    """What was cut off a sample: its tokens, trained tokens and media before and after.

    `lost_last_trained` says whether its last trained token is gone, usually the stop token of the last turn: the sample
    then no longer teaches where a completion ends.
    """

    name: str
    tokens: tuple[int, int]
    trained: tuple[int, int]
    media: tuple[int, int]

    @property
    def lost_last_trained(self) -> bool:
        return self.trained[1] < self.trained[0]


def vision_patches(item: MediaItem) -> int:
    """The number of patches that the vision tower processes for an item: t * h * w of its grid (Qwen-VL).

    For an item without a grid, the number of tokens that stand for its features.
    """
    grid = item.tensors.get(f"{item.modality}_grid_thw")
    if grid is None:
        return item.num_tokens
    array = grid if isinstance(grid, np.ndarray) else grid.unpack()
    return math.prod(array.tolist())


def sample_patches(sample: TrainingSample) -> int:
    """The vision patches of all media of a sample."""
    return sum([vision_patches(item) for item, _ in sample.media]) if sample.media else 0


def truncate_sample(
    sample: TrainingSample, max_tokens: int, max_patches: int | None = None
) -> tuple[TrainingSample, Truncation]:
    """The longest beginning of `sample` with at most `max_tokens` tokens and `max_patches` vision patches.

    It ends before an image or video that does not fit as a whole. Weight spans are cut to the trained tokens that are
    left. The `Truncation` says what was lost.

    Raises `ArgumentError` for what is no sample, `max_tokens` below 1 and `max_patches` below 0.
    """
    if not isinstance(sample, TrainingSample):
        raise ArgumentError("sample", sample, "pass a TrainingSample")
    if (limit := whole_number(max_tokens)) is None or limit < 1:
        raise ArgumentError("max_tokens", max_tokens, "pass an integer of at least 1")
    if max_patches is not None and ((number := whole_number(max_patches)) is None or number < 0):
        raise ArgumentError("max_patches", max_patches, "pass an integer of at least 0, or None for no limit")
    end, patches = min(limit, len(sample)), 0
    for item, placeholder in sample.media:
        patches += vision_patches(item)
        if placeholder.offset < end and (placeholder.end > end or (max_patches is not None and patches > max_patches)):
            end = placeholder.offset
    media = tuple((item, placeholder) for item, placeholder in sample.media if placeholder.end <= end)
    kept, all_trained = int(sample.loss_mask[:end].sum()), int(sample.loss_mask.sum())
    spans = [span for span in sample.weight_spans if span.start < kept]
    truncated = replace(
        sample,
        token_ids=sample.token_ids[:end],
        loss_mask=sample.loss_mask[:end],
        logprobs=sample.logprobs[:end],
        advantages=sample.advantages[:end],
        media=media,
        weight_spans=tuple(WeightSpan(span.version, span.start, min(span.end, kept)) for span in spans),
        routed_experts=None if sample.routed_experts is None else sample.routed_experts[:end],
    )
    return truncated, Truncation(sample.name, (len(sample), end), (all_trained, kept), (len(sample.media), len(media)))
