"""Whether the media of a request are where the prompt says, and are what the server expects to find there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from renderers import MediaItem, MultiModalData, PlaceholderRange
from rollouts.engines.protocol import GenerateRequest
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.wire_tensors import (
    FLOATS,
    ITEM_BYTES,
    PixelDtype,
    ServerNumbers,
    ServerTensor,
    tensor_dtype,
    tensor_shape,
)
from rollouts.errors import CapabilityError, InvalidRequestError
from rollouts.models.placement import PlacedItem, misplaced

_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
_CONTENT_PARTS = 'let the server process such media itself, with media="content_parts"'


def check_placement(
    request: GenerateRequest, ids: np.ndarray, capabilities: ServerCapabilities
) -> Sequence[PlacedItem]:
    """The media with their ranges in prompt order, once lists, names and ranges agree with each other and the prompt.

    Raises `InvalidRequestError`.
    """
    media = request.multi_modal_data
    if media is None:
        return ()
    _check_lists(request, media)
    _check_hashes(request, media)
    _check_ranges(request, media)
    placed = media.placed()
    if (words := misplaced(placed, len(ids))) is not None:
        raise InvalidRequestError(request.request_id, words)
    for item, where in placed:
        if item.num_tokens < 1:
            raise InvalidRequestError(request.request_id, f"{_name(item)} has {item.num_tokens} tokens in the prompt")
        _check_tokens(request, ids, item, where, _placeholder_id(request, item, capabilities))
    return placed


def check_features(request: GenerateRequest, placed: Sequence[PlacedItem], capabilities: ServerCapabilities) -> None:
    """Raise unless the items can be described on the wire and hold the tensors that this server wants.

    Raises `InvalidRequestError`, or `CapabilityError` where another server or way of sending would do.
    """
    if capabilities.pixel_dtype is None:
        raise CapabilityError(
            request.request_id, f"{capabilities.model} takes no media as features; the prompt shows {len(placed)}"
        )
    for item, where in placed:
        if _placeholder_id(request, item, capabilities) is None:
            raise CapabilityError(
                request.request_id,
                f"which token stands for a {item.modality} in {capabilities.model} is not known, which takes "
                f"{', '.join(capabilities.placeholder_ids) or 'no media'}. Name it in ExpectedCapabilities, or "
                f"{_CONTENT_PARTS}",
            )
        if where.num_embeds != where.length:
            raise CapabilityError(
                request.request_id,
                f"the {where.length} tokens of {_name(item)} are {where.num_embeds} features with text in between, "
                f"which features cannot describe; {_CONTENT_PARTS}",
            )
        _check_tensors(request, item, capabilities)
        _check_pixel_dtype(request, item, capabilities.pixel_dtype)


# Where media are.


def _check_lists(request: GenerateRequest, media: MultiModalData) -> None:
    names = {
        "mm_hashes": media.mm_hashes.keys(),
        "mm_placeholders": media.mm_placeholders.keys(),
        "mm_items": media.mm_items.keys(),
    }
    if len({frozenset(keys) for keys in names.values()}) > 1:
        said = ", ".join(f"{name} {sorted(keys)}" for name, keys in names.items())
        raise InvalidRequestError(request.request_id, f"the lists of media are of different modalities: {said}")
    for modality, items in media.mm_items.items():
        hashes, ranges = media.mm_hashes[modality], media.mm_placeholders[modality]
        if not len(hashes) == len(ranges) == len(items):
            raise InvalidRequestError(
                request.request_id,
                f"{len(items)} {modality}s have {len(hashes)} hashes and {len(ranges)} placeholders",
            )
        for place, (mm_hash, item) in enumerate(zip(hashes, items, strict=True)):
            if mm_hash != item.mm_hash or item.modality != modality:
                raise InvalidRequestError(
                    request.request_id,
                    f"{modality} {place} is listed as {mm_hash!r:.80} and is {item.modality} {item.mm_hash!r:.80}",
                )


def _check_hashes(request: GenerateRequest, media: MultiModalData) -> None:
    """The server answers from the first item that it saw under a hash."""
    seen: dict[str, MediaItem] = {}
    for item in itertools.chain.from_iterable(media.mm_items.values()):
        if not isinstance(item.mm_hash, str) or not item.mm_hash:
            raise InvalidRequestError(request.request_id, f"a {item.modality} has the mm_hash {item.mm_hash!r}")
        first = seen.setdefault(item.mm_hash, item)
        if first is not item and (first.source.digest, first.num_tokens) != (item.source.digest, item.num_tokens):
            raise InvalidRequestError(
                request.request_id,
                f"the mm_hash {item.mm_hash!r:.80} names two different media, of the sources "
                f"{first.source.digest[:12]} and {item.source.digest[:12]}; the server would show the model the first "
                "for both. A hash must cover source and processor settings",
            )


def _check_ranges(request: GenerateRequest, media: MultiModalData) -> None:
    for modality, ranges in media.mm_placeholders.items():
        for where in ranges:
            if type(where.offset) is not int or type(where.length) is not int:
                raise InvalidRequestError(
                    request.request_id, f"a {modality} placeholder is {where.offset!r}, {where.length!r}, not two ints"
                )
        for before, where in itertools.pairwise(ranges):
            if where.offset < before.offset:
                raise InvalidRequestError(
                    request.request_id,
                    f"the {modality}s are not in prompt order: one at {where.offset} follows one at {before.offset}",
                )


def _placeholder_id(request: GenerateRequest, item: MediaItem, capabilities: ServerCapabilities) -> int | None:
    """What the server says; where it tells nothing but that it takes pictures, what the renderer says."""
    token = capabilities.placeholder_ids.get(item.modality)
    if token is None and item.modality == "image" and not capabilities.placeholder_ids:
        return request.marker_ids.get("image")
    return token


def _check_tokens(
    request: GenerateRequest, ids: np.ndarray, item: MediaItem, where: PlaceholderRange, token: int | None
) -> None:
    if token is None:
        return
    for start, end in where.runs:
        wrong = ids[start:end] != token
        if wrong.any():
            place = start + int(wrong.argmax())
            raise InvalidRequestError(
                request.request_id,
                f"token {place} is {ids[place]} and not {token}, which stands for {item.modality} features, within "
                f"the placeholder {start}:{end} of {_name(item)}",
            )


# What media hold.


def _check_tensors(request: GenerateRequest, item: MediaItem, capabilities: ServerCapabilities) -> None:
    if not item.tensors:
        raise InvalidRequestError(request.request_id, f"{_name(item)} holds no tensors")
    for name, tensor in item.tensors.items():
        if name not in item.fields:
            raise InvalidRequestError(
                request.request_id, f"{_name(item)} does not say how {name} is batched (`fields`)"
            )
        if isinstance(tensor, ServerNumbers):
            continue
        if tensor_dtype(tensor) not in ITEM_BYTES:
            raise InvalidRequestError(request.request_id, f"{name} of {_name(item)} is {tensor_dtype(tensor)}")
        if item.fields[name].kind == "flat" and not tensor_shape(tensor):
            raise InvalidRequestError(request.request_id, f"{name} of {_name(item)} is flat and has no rows")
    pixels, grid = _PIXELS[item.modality], f"{item.modality}_grid_thw"
    if grid in item.tensors:
        _check_grid(request, item, pixels, grid, capabilities)
    elif capabilities.merge_area is not None:
        raise InvalidRequestError(
            request.request_id,
            f"{_name(item)} has no {grid}, only {', '.join(item.tensors)}; load the renderer from the directory of the "
            "model that is served",
        )


def _check_grid(
    request: GenerateRequest, item: MediaItem, pixels: str, grid: str, capabilities: ServerCapabilities
) -> None:
    sides = item[grid]
    counts = sides.tolist()
    if sides.shape != (3,) or sides.dtype.kind not in "iu" or min(counts) < 1:
        raise InvalidRequestError(
            request.request_id, f"{grid} of {_name(item)} is {counts}, not three numbers of patches"
        )
    patches = math.prod(counts)
    if pixels not in item.tensors:
        raise InvalidRequestError(request.request_id, f"{_name(item)} has no {pixels}, only {', '.join(item.tensors)}")
    shape = tensor_shape(item.tensors[pixels])
    if len(shape) != 2 or shape[0] != patches:
        raise InvalidRequestError(
            request.request_id,
            f"{pixels} of {_name(item)} is of shape {shape}, its {grid} {counts} means {patches} rows",
        )
    width = capabilities.patch_values
    if width is not None and shape[1] != width:
        raise InvalidRequestError(
            request.request_id,
            f"{pixels} of {_name(item)} has patches of {shape[1]} numbers, the server's model wants {width}: load the "
            "renderer from the directory of the model that is served",
        )
    merge_area = capabilities.merge_area
    if merge_area is not None and item.num_tokens * merge_area != patches:
        raise InvalidRequestError(
            request.request_id,
            f"{_name(item)} has {item.num_tokens} tokens for {patches} patches, of which the model makes one token of "
            f"{merge_area}",
        )


def _check_pixel_dtype(request: GenerateRequest, item: MediaItem, wanted: PixelDtype) -> None:
    """A server takes pixels of the wrong type without a word, and sees noise."""
    for name, tensor in item.tensors.items():
        if not name.startswith("pixel_values") or isinstance(tensor, ServerNumbers):
            continue
        held = tensor_dtype(tensor)
        if item.scale is not None and held == "uint8":
            continue
        # vLLM casts floats to the model's type, as the encoder does; only what a server sent goes back as it came.
        castable = held in FLOATS and not isinstance(tensor, ServerTensor)
        if held != wanted and not (castable and wanted in FLOATS):
            raise CapabilityError(
                request.request_id,
                f"{name} of {_name(item)} is {held}, the server wants {wanted}: it would take the picture for noise. "
                "Load the renderer from the directory of the model that is served, start the server "
                f"{'with' if wanted == 'uint8' else 'without'} --no-mm-device-do-normalize, or {_CONTENT_PARTS}",
            )


def _name(item: MediaItem) -> str:
    return f"{item.modality} {item.mm_hash[:12]}"
