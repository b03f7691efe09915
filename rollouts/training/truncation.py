"""Samples cut to a number of tokens and patches, never inside of a medium."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from renderers import MediaItem
from rollouts.engines.protocol import WeightSpan
from rollouts.models.placed_rows import TokenRow
from rollouts.models.prefix_tree import Tree, tree_of
from rollouts.training.samples import COLUMNS, TrainingSample
from rollouts.values import check_integer


@dataclass(frozen=True, slots=True)
class Truncation:
    """What was cut off a sample: its tokens, trained tokens and media before and after.

    `lost_last_trained` says whether its last trained token is gone, usually the stop token of the last turn:
    the sample then no longer teaches where a completion ends.
    """

    name: str
    tokens: tuple[int, int]
    trained: tuple[int, int]
    media: tuple[int, int]

    @property
    def lost_last_trained(self) -> bool:
        return self.trained[1] < self.trained[0]


def tower_rows(item: MediaItem) -> int:
    """What the tower of an item's modality processes: patches of an image or video, t * h * w of its grid
    (Qwen-VL); frames of a sound, with the padding that its processor added; of a video with its sound both.

    For an item of pixels without a grid, the number of tokens that stand for its features.
    """
    if item.modality == "audio":
        shapes = {name: item[name].shape for name in item}
        masks = [math.prod(shape) for name, shape in shapes.items() if name.endswith("mask")]
        # Without a mask: an axis is that of the frequencies, of which there are fewer than frames.
        return int(max(masks or [math.prod(shape) // min(shape[-2:]) for shape in shapes.values() if len(shape) > 1]))
    grid = item.tensors.get(f"{item.modality}_grid_thw")
    if grid is None:
        return item.num_tokens
    array = grid if isinstance(grid, np.ndarray) else grid.unpack()
    frames = [item[name].size for name in item if item.has_sound and name.endswith("mask")]
    return int(math.prod(array.tolist()) + max(frames, default=0))


def sample_rows(sample: TrainingSample) -> int:
    """The patches and frames of all media of a sample."""
    return sum(tower_rows(item) for item, _ in sample.media)


def trees_within(trees: Sequence[Tree], sequences: Sequence[TokenRow], max_patches: int) -> list[Tree]:
    """Trees divided to at most `max_patches` patches and frames; a larger sequence has its own."""
    found = []
    for tree in trees:
        begins, patches = [0], 0
        for place, (number, shared) in enumerate(zip(tree.numbers, tree.shared, strict=True)):
            sizes = [(at.offset, tower_rows(item)) for item, at in sequences[number].media]
            patches += sum(size for offset, size in sizes if offset >= shared)
            if patches > max_patches and place:
                begins.append(place)
                patches = sum(size for _, size in sizes)
        for begin, end in itertools.pairwise([*begins, len(tree.numbers)]):
            numbers = tree.numbers[begin:end]
            lengths = [len(sequences[number]) for number in numbers]
            found.append(tree_of(numbers, tree.shared[begin:end], lengths))
    return found


def truncate_sample(
    sample: TrainingSample, max_tokens: int, max_patches: int | None = None
) -> tuple[TrainingSample, Truncation]:
    """The longest beginning of `sample` with at most `max_tokens` tokens and `max_patches` patches and frames.

    It ends before an image, video or sound that does not fit as a whole. Weight spans are cut to the trained
    tokens that are left. The `Truncation` says what was lost.

    Raises `ArgumentError` for `max_tokens` below 1 and `max_patches` below 0.
    """
    if max_patches is not None:
        check_integer("max_patches", max_patches, least=0, rule="pass an integer of at least 0, or None for no limit")
    end, patches = min(check_integer("max_tokens", max_tokens), len(sample)), 0
    for item, placeholder in sample.media:
        patches += tower_rows(item)
        if placeholder.offset < end and (placeholder.end > end or (max_patches is not None and patches > max_patches)):
            end = placeholder.offset
    media = tuple((item, placeholder) for item, placeholder in sample.media if placeholder.end <= end)
    kept, all_trained = int(sample.loss_mask[:end].sum()), int(sample.loss_mask.sum())
    spans = [span for span in sample.weight_spans if span.start < kept]
    top = sample.top_logprobs
    columns: dict[str, Any] = {name: column[:end] for name in COLUMNS if (column := getattr(sample, name)) is not None}
    truncated = replace(
        sample,
        **columns,
        media=media,
        weight_spans=tuple(WeightSpan(span.version, span.start, min(span.end, kept)) for span in spans),
        top_logprobs=None if top is None else top.rows(slice(end)),
    )
    return truncated, Truncation(sample.name, (len(sample), end), (all_trained, kept), (len(sample.media), len(media)))
