"""Hypotheses about a mismatch: what one side would have computed on if a certain fault were there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from types import MappingProxyType

import numpy as np

from renderers import MediaItem
from renderers.media.item import PixelScale
from renderers.messages import Modality
from renderers.placement import PlacedItem
from renderers.vision.patches import ScaledPixels, normalised
from rollouts.engines.protocol import NO_TOKEN
from rollouts.errors import ArgumentError
from rollouts.training.samples import TrainingSample


class Cause(StrEnum):
    """Why log-probabilities of sampler and trainer differ. The value is the name for people, `cure` what to do."""

    cure: str

    def __new__(cls, name: str, cure: str) -> Cause:
        cause = str.__new__(cls, name)
        cause._value_, cause.cure = name, cure
        return cause

    DOUBLED_NORMALISATION = (
        "doubled normalisation",
        "send raw uint8 pixels to a server that normalises, and floats to one that does not (`rollouts doctor` checks "
        "the server)",
    )
    MISSING_NORMALISATION = (
        "missing normalisation",
        "send the processor's floats to a server that does not normalise (`rollouts doctor` checks the server)",
    )
    OTHER_NORMALISATION = (
        "other normalisation",
        "give both sides the same image_mean and image_std in preprocessor_config.json (or processor_config.json)",
    )
    DROPPED_IMAGE = "dropped image", "check that each request holds its images and that the server's route uses them"
    SWAPPED_IMAGE = "swapped image", "check the order and the hashes of the images of each request"
    DROPPED_SOUND = "dropped sound", "check that each request holds its sounds and that the server's route uses them"
    SWAPPED_SOUND = "swapped sound", "check the order and the hashes of the sounds of each request"
    WRONG_TEMPLATE = (
        "wrong template",
        "send token ids to the sampler, or give sampler and trainer the same chat template and options, and compare "
        "their prompt ids",
    )
    WRONG_TEMPERATURE = (
        "wrong temperature",
        "have the sampler report log-probabilities before temperature (vLLM: --logprobs-mode raw_logprobs), or divide "
        "the trainer's logits by the same temperature",
    )
    MOE_ROUTING = (
        "MoE routing",
        "compute with the sampler's experts (`token_logprobs(..., routed_experts=True)`), or compute the "
        "router in float32 on both sides",
    )


#: The samples that one side would have computed on instead of a sample; the second argument has the batch's
#: items.
Variants = Callable[[TrainingSample, Sequence[MediaItem]], Sequence[TrainingSample]]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A fault that one side may have.

        without_first = Hypothesis(
            "without the first message", Cause.WRONG_TEMPLATE, lambda sample, items: [replace_tokens(sample, 0, 5)]
        )

    `variants(sample, items)` returns what that side would have computed on instead of `sample`, in each way
    that the fault can have; nothing where the sample cannot have it. `items` are the distinct media of the
    batch. Each variant has as many trained tokens as the sample, and they are the same tokens
    (`replace_tokens` keeps them).
    """

    name: str
    cause: Cause
    variants: Variants


def replace_tokens(sample: TrainingSample, start: int, end: int, ids: Sequence[int] = ()) -> TrainingSample:
    """The sample with `ids` in place of its tokens `start:end`, which the sampler did not sample.

    Log-probabilities, advantages, mask and media after them move along; images and videos that lie wholly
    inside are removed, and so are routed experts. Raises `ArgumentError` for bounds outside of the sample,
    for trained tokens, and for a part of an image.
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

    def edited(column: np.ndarray, new: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.concatenate([column[:start], np.asarray(new, dtype=column.dtype), column[end:]])

    zeros, masks = [0] * len(ids), sample.sampling_mask
    return replace(
        sample,
        token_ids=edited(sample.token_ids, ids),
        loss_mask=edited(sample.loss_mask, zeros),
        logprobs=edited(sample.logprobs, zeros),
        advantages=edited(sample.advantages, zeros),
        media=tuple(media),
        routed_experts=None,  # those of other tokens
        top_logprobs=None,
        sampling_mask=None if masks is None else edited(masks, np.full((len(ids), masks.shape[1]), NO_TOKEN)),
    )


def built_in_hypotheses(pixel_scale: PixelScale | None = None) -> tuple[Hypothesis, ...]:
    """The faults of media and first tokens to test; `pixel_scale` is for items that record none."""

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
        *(
            Hypothesis(
                f"images normalised with {name} image_mean and image_std",
                Cause.OTHER_NORMALISATION,
                of_pixels(f"normalised-with-{name}", partial(_normalised_with, *numbers)),
            )
            for name, numbers in _PUBLISHED.items()
        ),
        *_of_media("images", "an image", _SEEN, Cause.DROPPED_IMAGE, Cause.SWAPPED_IMAGE),
        *_of_media("sounds", "a sound", _HEARD, Cause.DROPPED_SOUND, Cause.SWAPPED_SOUND),
        Hypothesis(
            "the first token twice",
            Cause.WRONG_TEMPLATE,
            lambda sample, items: _first_tokens_replaced(sample, 0, sample.token_ids[:1].tolist()),
        ),
        Hypothesis(
            "without the first token",
            Cause.WRONG_TEMPLATE,
            lambda sample, items: _first_tokens_replaced(sample, 1, []),
        ),
    )


#: image_mean and image_std of published processors, which a side may have in place of those of the model's.
_PUBLISHED: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = MappingProxyType(
    {
        "the common": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        "CLIP's": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
        "ImageNet's": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    }
)


def _normalised_with(
    other_mean: tuple[float, ...],
    other_std: tuple[float, ...],
    values: np.ndarray,
    mean: np.ndarray,
    std: np.ndarray,
    factor: float,
) -> np.ndarray:
    """`values`, normalised with `mean` and `std`, as the others normalise them; unchanged for another channel count."""
    if len(mean) != len(other_mean):
        return values
    new_mean, new_std = (np.array(each, dtype=np.float32)[:, None] for each in (other_mean, other_std))
    changed: np.ndarray = (values * std + mean - new_mean) / new_std
    return changed


_SEEN: tuple[Modality, ...] = ("image", "video")
_HEARD: tuple[Modality, ...] = ("audio",)


def _of_media(
    several: str, one: str, modalities: Collection[Modality], dropped: Cause, swapped: Cause
) -> list[Hypothesis]:
    named = {
        f"{several} dropped, their placeholder tokens kept as text": (dropped, _placeholders_kept),
        f"{several} dropped with their placeholder tokens": (dropped, _placeholders_removed),
        f"{several} replaced by zeros": (dropped, _zeros),
        f"{several} of a sample in another order": (swapped, _other_order),
        f"{one} of another sample": (swapped, _other_item),
    }
    return [Hypothesis(name, cause, partial(make, modalities)) for name, (cause, make) in named.items()]


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


def _zeros(
    modalities: Collection[Modality], sample: TrainingSample, items: Sequence[MediaItem]
) -> list[TrainingSample]:
    """Normalised pixels or features of 0: a server that was sent none may take those."""
    media = []
    for item, at in sample.media:
        of_sound = [name for name in item if item.modality == "audio" and item[name].dtype.kind == "f"]
        names = (of_sound or _pixel_tensors(item)) if item.modality in modalities else []
        zeros = {name: np.zeros(item[name].shape, np.float32) for name in names}
        media.append((_with_tensors(item, "zeros", zeros) if zeros else item, at))
    changed = sum(item is not own for (item, _), (own, _) in zip(media, sample.media, strict=True))
    return [replace(sample, media=tuple(media))] if changed == len(_numbers(modalities, sample)) > 0 else []


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


# Which media.

_MOST_VARIANTS = 16


def _numbers(modalities: Collection[Modality], sample: TrainingSample) -> list[int]:
    """Which media of a sample are of the modalities."""
    return [number for number, (item, _) in enumerate(sample.media) if item.modality in modalities]


def _placeholders_kept(
    modalities: Collection[Modality], sample: TrainingSample, items: Sequence[MediaItem]
) -> list[TrainingSample]:
    return [replace(sample, media=kept) for kept, _ in _without_items(modalities, sample)]


def _placeholders_removed(
    modalities: Collection[Modality], sample: TrainingSample, items: Sequence[MediaItem]
) -> list[TrainingSample]:
    variants = []
    for _, removed in _without_items(modalities, sample):
        shorter = sample
        for _, at in reversed(removed):
            shorter = replace_tokens(shorter, at.offset, at.end)
        variants.append(shorter)
    return variants


def _without_items(
    modalities: Collection[Modality], sample: TrainingSample
) -> Iterator[tuple[tuple[PlacedItem, ...], list[PlacedItem]]]:
    """The items kept and removed: all of the modalities removed, then one of several."""
    numbers = _numbers(modalities, sample)
    one_of_several = [[number] for number in numbers[:_MOST_VARIANTS]] if len(numbers) > 1 else []
    for removed in ([numbers] if numbers else []) + one_of_several:
        kept = tuple(placed for number, placed in enumerate(sample.media) if number not in removed)
        yield kept, [sample.media[number] for number in removed]


def _other_order(
    modalities: Collection[Modality], sample: TrainingSample, items: Sequence[MediaItem]
) -> list[TrainingSample]:
    """Two items exchanged; and all in reverse and rotated order, where each fits the place of the other."""
    numbers = _numbers(modalities, sample)
    orders = [numbers[::-1], numbers[1:] + numbers[:1], numbers[-1:] + numbers[:-1]] if len(numbers) > 2 else []
    for one, other in itertools.combinations(range(len(numbers)), 2):
        order = list(numbers)
        order[one], order[other] = order[other], order[one]
        orders.append(order)
    own = [item for item, _ in sample.media]
    reordered = []
    for order in orders:
        new = list(own)
        for number, source in zip(numbers, order, strict=True):
            new[number] = own[source]
        reordered.append(new)
    fitting = [new for new in reordered if all(map(_fits, own, new)) and new != own]
    return [_with_items(sample, new) for new in fitting[:_MOST_VARIANTS]]


def _other_item(
    modalities: Collection[Modality], sample: TrainingSample, items: Sequence[MediaItem]
) -> list[TrainingSample]:
    """One item replaced by another of the batch that takes as many tokens in the same layout."""
    own = [item for item, _ in sample.media]
    variants = (
        _with_items(sample, [*own[:index], other, *own[index + 1 :]])
        for index in _numbers(modalities, sample)
        for other in items
        if other.mm_hash != own[index].mm_hash and _fits(own[index], other)
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


def _first_tokens_replaced(sample: TrainingSample, count: int, ids: Sequence[int]) -> list[TrainingSample]:
    """The sample with `ids` in place of its first tokens; nothing unless the first two are text of the prompt."""
    begins_with_media = bool(sample.media) and sample.media[0][1].offset == 0
    if len(sample) < 2 or sample.loss_mask[:2].any() or begins_with_media:
        return []
    return [replace_tokens(sample, 0, count, ids)]
