"""Finds out with two images whether a server passes the features of a request to its model.

A frontend or a proxy that does not know `features` ignores the field, and the response is HTTP 200: the
completion of a model that saw no image. Where a server does not say what it is, its log-probabilities for the
same prompt with two different images tell.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from renderers import MediaItem, MultiModalData
from renderers.media.item import PackedArray
from renderers.placement import PlacedItem
from renderers.vision.patches import ScaledPixels
from rollouts.engines.protocol import GenerateRequest, SamplingParams
from rollouts.engines.vllm.tensors import FLOATS, ITEM_BYTES, ServerTensor, tensor_type

#: Sends a request and returns the log-probabilities of its prompt and of the token that was sampled.
Score = Callable[[GenerateRequest], Awaitable[np.ndarray]]


async def reads_features(request: GenerateRequest, items: Sequence[PlacedItem], score: Score) -> bool:
    """Whether log-probabilities depend on the pixels of the first of `items`, which are the features of the request.

    The prompt up to that item (with the text behind the last one) is scored with the item, with an item of
    other pixels, and with the first one again: what two equal requests differ by is the noise of the server.
    """
    (item, placeholder), *others = items
    # Nothing behind the item where others follow: their tokens without their features could crash the server.
    end = placeholder.end if others else len(request.prompt_ids)
    first, other, again = [
        await score(
            replace(
                request,
                prompt_ids=request.prompt_ids[:end],
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
                multi_modal_data=MultiModalData.from_items([(each, placeholder)]),
                sampled=(),
                request_id=f"features-{uuid.uuid4().hex}",
                prompt_logprobs=True,
                prompt_top_logprobs=0,
            )
        )
        for each in (item, _with_other_pixels(item), item)
    ]
    # Before the item nothing depends on it.
    difference, noise = (np.nanmax(np.abs(each - first)[placeholder.offset :]) for each in (other, again))
    return bool(difference > max(1e-6, 2 * noise))


def _with_other_pixels(item: MediaItem) -> MediaItem:
    """An item of the same shapes under another name; all of its pixels differ from those of `item`."""
    tensors = dict(item.tensors)
    for name in tensors:
        if name.startswith("pixel_values") or (item.modality == "audio" and tensor_type(tensors[name]).dtype in FLOATS):
            tensors[name] = _changed(item, name)
    return replace(item, mm_hash=f"{item.mm_hash}-changed", tensors=tensors)


def _changed(item: MediaItem, name: str) -> np.ndarray | PackedArray:
    tensor = item.tensors[name]
    if isinstance(tensor, ServerTensor):
        return replace(tensor, raw=_flipped(tensor.raw, ITEM_BYTES[tensor.dtype]))
    if isinstance(tensor, ScaledPixels):
        return ScaledPixels(_flipped(tensor.pixels, 1), tensor.scale)
    array = item[name]
    return _flipped(array, array.itemsize)


def _flipped(array: np.ndarray, nbytes: int) -> np.ndarray:
    """A copy in which the highest bit of each number of `nbytes` bytes differs: other brightness, or the other sign."""
    copy = np.ascontiguousarray(array).copy()
    copy.reshape(-1).view(np.uint8)[nbytes - 1 :: nbytes] ^= 0x80
    return copy
