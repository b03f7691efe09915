"""Hypotheses about a mismatch: what one side would have computed on if a certain fault were there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from renderers import MediaItem
from renderers.media.item import PixelScale
from renderers.placement import PlacedItem
from renderers.vision.patches import ScaledPixels, normalised
from rollouts.errors import ArgumentError
from rollouts.training.mismatch.signatures import Cause
from rollouts.training.samples import TrainingSample

#: The samples that one side would have computed on instead of a sample; the second argument has the batch's items.
Variants = Callable[[TrainingSample, Sequence[MediaItem]], Sequence[TrainingSample]]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A fault that one side may have.

    `variants(sample, items)` returns what that side would have computed on instead of `sample`, in each way that the
    fault can have; nothing where the sample cannot have it. `items` are the distinct images and videos of the batch.
    Each variant has as many trained tokens as the sample, and they are the same tokens (`replace_tokens` keeps them).
    """

    name: str
    cause: Cause
    variants: Variants


def replace_tokens(sample: TrainingSample, start: int, end: int, ids: Sequence[int] = ()) -> TrainingSample:
    """The sample with `ids` in place of its tokens `start:end`, which the sampler did not sample.

    Log-probabilities, advantages, mask and media after them move along; images and videos that lie wholly inside are
    removed, and so are routed experts. Raises `ArgumentError` for bounds outside of the sample, for trained tokens, and
    for a part of an image.
    """
    if not 0 <= start <= end <= len(sample):
        raise ArgumentError("start, end", (start, end), f"pass bounds inside the {len(sample)} tokens, start first")
    if sample.loss_mask[start:end].any():
        trained = start + int(sample.loss_mask[start:].argmax())
        raise ArgumentError("start, end", (start, end), f"token {trained} of it is trained")
    media = []
    for item, at in sample.media:
        if at.end <= start:
            media.append((item, at))
        elif at.offset >= end:
            media.append((item, at.shifted(len(ids) - (end - start))))
        elif at.offset < start or at.end > end:
            rule = f"it cuts the placeholder {at.offset}:{at.end} of {item.modality} {item.mm_hash:.12}"
            raise ArgumentError("start, end", (start, end), rule)

    def edited(column: np.ndarray, new: Sequence[int]) -> np.ndarray:
        return np.concatenate([column[:start], np.asarray(new, dtype=column.dtype), column[end:]])

    zeros = [0] * len(ids)
    return replace(
        sample,
        token_ids=edited(sample.token_ids, ids),
        loss_mask=edited(sample.loss_mask, zeros),
        logprobs=edited(sample.logprobs, zeros),
        advantages=edited(sample.advantages, zeros),
        media=tuple(media),
        routed_experts=None,  # those of other tokens
    )


def built_in_hypotheses(pixel_scale: PixelScale | None = None) -> tuple[Hypothesis, ...]:
    """The faults of images and of the first token that `diagnose_mismatch` tests.

    `pixel_scale` is that of images and videos whose items do not record theirs.
    """

    def of_pixels(label: str, change: _PixelChange) -> Variants:
        return lambda sample, items: _with_pixels(sample, pixel_scale, label, change)

    return (
        Hypothesis(
            "images normalised twice",
            Cause.DOUBLED_NORMALISATION,
            of_pixels("normalised-twice", lambda values, mean, std, factor: (values - mean) / std),
        ),
        Hypothesis(
            "images rescaled and normalised again",
            Cause.DOUBLED_NORMALISATION,
            of_pixels("rescaled-again", lambda values, mean, std, factor: (values * np.float32(factor) - mean) / std),
        ),
        Hypothesis(
            "images rescaled but not normalised",
            Cause.MISSING_NORMALISATION,
            of_pixels("not-normalised", lambda values, mean, std, factor: values * std + mean),
        ),
        Hypothesis("images dropped, their placeholder tokens kept as text", Cause.DROPPED_IMAGE, _placeholders_kept),
        Hypothesis("images dropped with their placeholder tokens", Cause.DROPPED_IMAGE, _placeholders_removed),
        Hypothesis("images replaced by zeros", Cause.DROPPED_IMAGE, _zeros),
        Hypothesis("images of a sample in another order", Cause.SWAPPED_IMAGE, _other_order),
        Hypothesis("an image of another sample", Cause.SWAPPED_IMAGE, _other_image),
        Hypothesis("the first token twice", Cause.WRONG_TEMPLATE, _first_token_twice),
        Hypothesis("without the first token", Cause.WRONG_TEMPLATE, _without_first_token),
    )


# Pixels.

#: (normalised float32 (n, channels, k), mean and std float32 (channels, 1), factor) -> the changed pixels.
_PixelChange = Callable[[np.ndarray, np.ndarray, np.ndarray, float], np.ndarray]


def _with_pixels(
    sample: TrainingSample, pixel_scale: PixelScale | None, label: str, change: _PixelChange
) -> list[TrainingSample]:
    """The sample with changed pixels; nothing for a sample with an item whose scale or whose channels are not known."""
    media = []
    for item, at in sample.media:
        pixels = {name: _changed(item, name, pixel_scale, change) for name in _pixel_tensors(item)}
        known = {name: values for name, values in pixels.items() if values is not None}
        if not known or len(known) < len(pixels):
            return []
        media.append((_with_tensors(item, label, known), at))
    return [replace(sample, media=tuple(media))] if media else []


def _zeros(sample: TrainingSample, items: Sequence[MediaItem]) -> list[TrainingSample]:
    """Normalised pixels of 0: a server that was sent no pixels may take those."""
    media = [
        (_with_tensors(item, "zeros", {name: np.zeros(item[name].shape, np.float32) for name in names}), at)
        for item, at in sample.media
        if (names := _pixel_tensors(item))
    ]
    return [replace(sample, media=tuple(media))] if media and len(media) == len(sample.media) else []


def _pixel_tensors(item: MediaItem) -> list[str]:
    return [name for name in item if name.startswith("pixel_values")]


def _with_tensors(item: MediaItem, label: str, tensors: Mapping[str, np.ndarray]) -> MediaItem:
    """The item with other tensors, and with a hash of its own: the forward passes know an item by its hash."""
    return replace(item, tensors={**item, **tensors}, scale=None, mm_hash=f"{item.mm_hash}:{label}")


def _changed(item: MediaItem, name: str, pixel_scale: PixelScale | None, change: _PixelChange) -> np.ndarray | None:
    """The changed pixels of a tensor, float32; None where the scale is not known, or which values are of a channel."""
    tensor = item.tensors[name]
    recorded = tensor.scale if isinstance(tensor, ScaledPixels) else item.scale
    if (scale := recorded or pixel_scale) is None:
        return None
    values = normalised(item, name)
    channels = len(scale.mean)
    if values.ndim >= 3 and values.shape[-3] == channels:  # (..., channels, height, width)
        by_channel = values.reshape(-1, channels, values.shape[-2] * values.shape[-1])
    elif recorded is not None or len({*scale.mean}) == len({*scale.std}) == 1:  # (rows, channels * k)
        by_channel = values.reshape(len(values), channels, -1)
    else:
        return None
    mean, std = (np.array(each, dtype=np.float32)[:, None] for each in (scale.mean, scale.std))
    return change(by_channel, mean, std, scale.factor).astype(np.float32).reshape(values.shape)


# Which images.

_MOST_VARIANTS = 16


def _placeholders_kept(sample: TrainingSample, items: Sequence[MediaItem]) -> list[TrainingSample]:
    return [replace(sample, media=kept) for kept, _ in _without_items(sample)]


def _placeholders_removed(sample: TrainingSample, items: Sequence[MediaItem]) -> list[TrainingSample]:
    variants = []
    for _, removed in _without_items(sample):
        shorter = sample
        for _, at in reversed(removed):
            shorter = replace_tokens(shorter, at.offset, at.end)
        variants.append(shorter)
    return variants


def _without_items(sample: TrainingSample) -> Iterator[tuple[tuple[PlacedItem, ...], list[PlacedItem]]]:
    """The items kept and removed: all removed, then one of several."""
    if sample.media:
        yield (), list(sample.media)
    if len(sample.media) > 1:
        for index, placed in enumerate(sample.media[:_MOST_VARIANTS]):
            yield sample.media[:index] + sample.media[index + 1 :], [placed]


def _other_order(sample: TrainingSample, items: Sequence[MediaItem]) -> list[TrainingSample]:
    """Two items exchanged; and all in reverse and rotated order, where each fits the place of the other."""
    count = len(sample.media)
    orders = [list(range(count))[::-1], [*range(1, count), 0], [count - 1, *range(count - 1)]] if count > 2 else []
    for one, other in itertools.combinations(range(count), 2):
        order = list(range(count))
        order[one], order[other] = other, one
        orders.append(order)
    own = [item for item, _ in sample.media]
    reordered = [[own[index] for index in order] for order in orders]
    fitting = [new for new in reordered if all(map(_fits, own, new)) and new != own]
    return [_with_items(sample, new) for new in fitting[:_MOST_VARIANTS]]


def _other_image(sample: TrainingSample, items: Sequence[MediaItem]) -> list[TrainingSample]:
    """One image replaced by another of the batch that takes as many tokens in the same layout."""
    own = [item for item, _ in sample.media]
    variants = (
        _with_items(sample, [*own[:index], other, *own[index + 1 :]])
        for index, item in enumerate(own)
        for other in items
        if other.mm_hash != item.mm_hash and _fits(item, other)
    )
    return list(itertools.islice(variants, 2 * _MOST_VARIANTS))


def _with_items(sample: TrainingSample, items: Sequence[MediaItem]) -> TrainingSample:
    ranges = [at for _, at in sample.media]
    return replace(sample, media=tuple(zip(items, ranges, strict=True)))


def _fits(item: MediaItem, other: MediaItem) -> bool:
    """Whether `other` takes the same tokens: the same modality, number of tokens and shapes."""
    if (item.modality, item.num_tokens, set(item)) != (other.modality, other.num_tokens, set(other)):
        return False
    grid = f"{item.modality}_grid_thw"
    return grid not in item or np.array_equal(item[grid], other[grid])


# Prompts.


def _first_token_twice(sample: TrainingSample, items: Sequence[MediaItem]) -> list[TrainingSample]:
    return [replace_tokens(sample, 0, 0, sample.token_ids[:1].tolist())] if _begins_with_prompt(sample) else []


def _without_first_token(sample: TrainingSample, items: Sequence[MediaItem]) -> list[TrainingSample]:
    return [replace_tokens(sample, 0, 1)] if _begins_with_prompt(sample) else []


def _begins_with_prompt(sample: TrainingSample) -> bool:
    """Whether the first two tokens are text of the prompt, so that the first can be removed or repeated."""
    begins_with_media = bool(sample.media) and sample.media[0][1].offset == 0
    return len(sample) > 1 and not sample.loss_mask[:2].any() and not begins_with_media
