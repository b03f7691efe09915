"""Checks that the media of a request match its prompt and the tensors that the server expects."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from renderers import MediaItem, MultiModalData, PlaceholderRange
from renderers.placement import PlacedItem, item_placement_error
from rollouts.engines.protocol import GenerateRequest
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.media.dense_items import dense_items
from rollouts.engines.vllm.media.mode_selection import feature_token, item_name
from rollouts.engines.vllm.wire.tensors import (
    ITEM_BYTES,
    ServerNumbers,
    tensor_dtype,
    tensor_shape,
)
from rollouts.errors import InvalidRequestError

_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


def check_placement(
    request: GenerateRequest, ids: np.ndarray, capabilities: ServerCapabilities
) -> Sequence[PlacedItem]:
    """Check the lists, hashes and ranges of the media against each other and the prompt; return them in prompt order.

    Raises `InvalidRequestError`.
    """
    media = request.multi_modal_data
    if media is None:
        return ()
    _check_lists(request, media)
    _check_hashes(request, media)
    _check_ranges(request, media)
    placed = media.items_with_ranges()
    if (error := item_placement_error(placed, len(ids))) is not None:
        raise InvalidRequestError(request.request_id, error)
    for item, _ in placed:
        if item.num_tokens < 1:
            raise InvalidRequestError(
                request.request_id, f"{item_name(item)} has {item.num_tokens} tokens in the prompt"
            )
    tokens: dict[str, int] = {}
    for item, placeholder in placed:
        known_token = feature_token(request, item, capabilities)
        # If neither server nor renderer names the token, all items of a modality must have the same one.
        first_token = int(ids[placeholder.runs[0][0]])
        token = tokens.setdefault(item.modality, first_token) if known_token is None else known_token
        _check_tokens(request, ids, item, placeholder, token)
    return placed


def check_features(request: GenerateRequest, placed: Sequence[PlacedItem], capabilities: ServerCapabilities) -> None:
    """Raise `InvalidRequestError` unless the items hold the tensors that this server expects.

    `select_mode` must have selected features.
    """
    for item, placeholder in placed:
        for sent, _ in dense_items(item, placeholder, capabilities):
            _check_tensors(request, sent, capabilities)


# Placement.


def _check_lists(request: GenerateRequest, media: MultiModalData) -> None:
    names = {
        "mm_hashes": media.mm_hashes.keys(),
        "mm_placeholders": media.mm_placeholders.keys(),
        "mm_items": media.mm_items.keys(),
    }
    if len({frozenset(keys) for keys in names.values()}) > 1:
        listed = ", ".join(f"{name} {sorted(keys)}" for name, keys in names.items())
        raise InvalidRequestError(request.request_id, f"the lists of media are of different modalities: {listed}")
    for modality, items in media.mm_items.items():
        hashes, ranges = media.mm_hashes[modality], media.mm_placeholders[modality]
        if not len(hashes) == len(ranges) == len(items):
            raise InvalidRequestError(
                request.request_id,
                f"{len(items)} {modality}s have {len(hashes)} hashes and {len(ranges)} placeholders",
            )
        for index, (mm_hash, item) in enumerate(zip(hashes, items, strict=True)):
            if mm_hash != item.mm_hash or item.modality != modality:
                raise InvalidRequestError(
                    request.request_id,
                    f"{modality} {index} is listed as {mm_hash!r:.80} and is {item.modality} {item.mm_hash!r:.80}",
                )


def _check_hashes(request: GenerateRequest, media: MultiModalData) -> None:
    """Refuse different items with the same hash: the server would use the first one for both."""
    first_items: dict[str, MediaItem] = {}
    for item in itertools.chain.from_iterable(media.mm_items.values()):
        if not isinstance(item.mm_hash, str) or not item.mm_hash:
            raise InvalidRequestError(request.request_id, f"a {item.modality} has the mm_hash {item.mm_hash!r}")
        first = first_items.setdefault(item.mm_hash, item)
        if first is not item and (first.source.digest, first.num_tokens) != (item.source.digest, item.num_tokens):
            raise InvalidRequestError(
                request.request_id,
                f"the mm_hash {item.mm_hash!r:.80} names two different media, of the sources "
                f"{first.source.digest[:12]} and {item.source.digest[:12]}; the server would use the first for both. A "
                "hash must depend on the source and the processor settings",
            )


def _check_ranges(request: GenerateRequest, media: MultiModalData) -> None:
    for modality, ranges in media.mm_placeholders.items():
        for each in ranges:
            if type(each.offset) is not int or type(each.length) is not int:
                raise InvalidRequestError(
                    request.request_id, f"a {modality} placeholder is {each.offset!r}, {each.length!r}, not two ints"
                )
        for previous, each in itertools.pairwise(ranges):
            if each.offset < previous.offset:
                raise InvalidRequestError(
                    request.request_id,
                    f"the {modality}s are not in prompt order: one at {each.offset} follows one at {previous.offset}",
                )


def _check_tokens(
    request: GenerateRequest, ids: np.ndarray, item: MediaItem, placeholder: PlaceholderRange, token: int
) -> None:
    for start, end in placeholder.runs:
        is_wrong = ids[start:end] != token
        if is_wrong.any():
            position = start + int(is_wrong.argmax())
            raise InvalidRequestError(
                request.request_id,
                f"token {position} is {ids[position]} and not {token}, which stands for {item.modality} features, "
                f"within the placeholder {start}:{end} of {item_name(item)}",
            )


# Tensors.


def _check_tensors(request: GenerateRequest, item: MediaItem, capabilities: ServerCapabilities) -> None:
    if not item.tensors:
        raise InvalidRequestError(request.request_id, f"{item_name(item)} holds no tensors")
    for name, tensor in item.tensors.items():
        if name not in item.fields:
            raise InvalidRequestError(request.request_id, f"{item_name(item)} has no entry in `fields` for {name}")
        if isinstance(tensor, ServerNumbers):
            continue
        if tensor_dtype(tensor) not in ITEM_BYTES:
            raise InvalidRequestError(request.request_id, f"{name} of {item_name(item)} is {tensor_dtype(tensor)}")
        if item.fields[name].kind == "flat" and not tensor_shape(tensor):
            raise InvalidRequestError(request.request_id, f"{name} of {item_name(item)} is flat and has no rows")
    pixels, grid = _PIXELS[item.modality], f"{item.modality}_grid_thw"
    if grid in item.tensors:
        _check_grid(request, item, pixels, grid, capabilities)


def _check_grid(
    request: GenerateRequest, item: MediaItem, pixels: str, grid: str, capabilities: ServerCapabilities
) -> None:
    sides = item[grid]
    counts = sides.tolist()
    if sides.shape != (3,) or sides.dtype.kind not in "iu" or min(counts) < 1:
        raise InvalidRequestError(
            request.request_id, f"{grid} of {item_name(item)} is {counts}, not three patch counts"
        )
    patches = math.prod(counts)
    if pixels not in item.tensors:
        raise InvalidRequestError(
            request.request_id, f"{item_name(item)} has no {pixels}, only {', '.join(item.tensors)}"
        )
    shape = tensor_shape(item.tensors[pixels])
    if len(shape) != 2 or shape[0] != patches:
        raise InvalidRequestError(
            request.request_id,
            f"{pixels} of {item_name(item)} is of shape {shape}, but its {grid} {counts} requires {patches} rows",
        )
    width = capabilities.patch_values
    if width is not None and shape[1] != width:
        raise InvalidRequestError(
            request.request_id,
            f"{pixels} of {item_name(item)} has patches of {shape[1]} values, the server's model needs {width}: load "
            "the renderer from the directory of the model that is served",
        )
    merge_area = capabilities.merge_area
    if merge_area is not None and item.num_tokens * merge_area != patches:
        raise InvalidRequestError(
            request.request_id,
            f"{item_name(item)} has {item.num_tokens} tokens for {patches} patches, of which the model merges "
            f"{merge_area} into one token",
        )
