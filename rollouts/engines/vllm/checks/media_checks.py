"""Checks that the media of a request match its prompt and the tensors that the server expects.

Each check yields what is wrong; its caller stops at the first violation, and later checks rely on the earlier ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from renderers import MediaItem, MultiModalData
from renderers.placement import item_placement_error
from rollouts.engines.protocol import GenerateRequest
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.media.dense_items import dense_items
from rollouts.engines.vllm.media.mode_selection import feature_token, item_name
from rollouts.engines.vllm.wire.tensors import ITEM_BYTES, ServerNumbers, tensor_type

_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


def placement_violations(request: GenerateRequest, ids: np.ndarray, capabilities: ServerCapabilities) -> Iterator[str]:
    """Check the lists, hashes and ranges of the media against each other and the prompt."""
    if request.multi_modal_data is None:
        return
    yield from _list_violations(request.multi_modal_data)
    placed = request.media
    if (error := item_placement_error(placed, len(ids))) is not None:
        yield error
    tokens: dict[str, int] = {}
    for item, placeholder in placed:
        if item.num_tokens < 1:
            yield f"{item_name(item)} has {item.num_tokens} tokens in the prompt"
        known_token = feature_token(request, item, capabilities)
        # If neither server nor renderer names the token, all items of a modality must have the same one.
        first_token = int(ids[placeholder.runs[0][0]])
        token = tokens.setdefault(item.modality, first_token) if known_token is None else known_token
        for start, end in placeholder.runs:
            is_wrong = ids[start:end] != token
            if is_wrong.any():
                position = start + int(is_wrong.argmax())
                yield (
                    f"token {position} is {ids[position]} and not {token}, which stands for {item.modality} features, "
                    f"within the placeholder {start}:{end} of {item_name(item)}"
                )


def _list_violations(media: MultiModalData) -> Iterator[str]:
    hashes, placeholders, items = media.mm_hashes, media.mm_placeholders, media.media_items
    if not hashes.keys() == placeholders.keys() == items.keys():
        yield (
            f"the lists of media are of different modalities: mm_hashes {sorted(hashes)}, mm_placeholders "
            f"{sorted(placeholders)}, mm_items {sorted(items)}"
        )
    first_items: dict[str, MediaItem] = {}
    for modality, ranges in placeholders.items():
        counts = [len(each[modality]) for each in (items, hashes, placeholders)]
        if len(set(counts)) > 1:
            yield f"{counts[0]} {modality}s have {counts[1]} hashes and {counts[2]} placeholders"
        for index, (mm_hash, item) in enumerate(zip(hashes[modality], items[modality], strict=True)):
            if mm_hash != item.mm_hash or item.modality != modality:
                yield f"{modality} {index} is listed as {mm_hash!r:.80} and is {item.modality} {item.mm_hash!r:.80}"
            if not isinstance(mm_hash, str) or not mm_hash:
                yield f"a {modality} has the mm_hash {mm_hash!r}"
            first = first_items.setdefault(mm_hash, item)
            if first is not item and (first.source.digest, first.num_tokens) != (item.source.digest, item.num_tokens):
                yield (
                    f"the mm_hash {mm_hash!r:.80} names two different media, of the sources "
                    f"{first.source.digest[:12]} and {item.source.digest[:12]}; the server would use the first for "
                    "both. A hash must depend on the source and the processor settings"
                )
        for each in ranges:
            if type(each.offset) is not int or type(each.length) is not int:
                yield f"a {modality} placeholder is {each.offset!r}, {each.length!r}, not two ints"
        for previous, each in itertools.pairwise(ranges):
            if each.offset < previous.offset:
                yield f"the {modality}s are not in prompt order: one at {each.offset} follows one at {previous.offset}"


def feature_violations(request: GenerateRequest, capabilities: ServerCapabilities) -> Iterator[str]:
    """Check that the items hold the tensors that this server expects. `select_mode` must have selected features."""
    for item, placeholder in request.media:
        for sent, _ in dense_items(item, placeholder, capabilities):
            yield from _tensor_violations(sent, capabilities)


def _tensor_violations(item: MediaItem, capabilities: ServerCapabilities) -> Iterator[str]:
    item_label = item_name(item)
    if not item.tensors:
        yield f"{item_label} holds no tensors"
    for name, tensor in item.tensors.items():
        if name not in item.fields:
            yield f"{item_label} has no entry in `fields` for {name}"
        if isinstance(tensor, ServerNumbers):
            continue
        dtype, shape = tensor_type(tensor)
        if dtype not in ITEM_BYTES:
            yield f"{name} of {item_label} is {dtype}"
        if item.fields[name].kind == "flat" and not shape:
            yield f"{name} of {item_label} is flat and has no rows"
    pixels, grid = _PIXELS[item.modality], f"{item.modality}_grid_thw"
    if grid not in item.tensors:
        return
    sides = item[grid]
    counts = sides.tolist()
    if sides.shape != (3,) or sides.dtype.kind not in "iu" or min(counts) < 1:
        yield f"{grid} of {item_label} is {counts}, not three patch counts"
    patches = math.prod(counts)
    if pixels not in item.tensors:
        yield f"{item_label} has no {pixels}, only {', '.join(item.tensors)}"
    shape = tensor_type(item.tensors[pixels]).shape
    if len(shape) != 2 or shape[0] != patches:
        yield f"{pixels} of {item_label} is of shape {shape}, but its {grid} {counts} requires {patches} rows"
    width = capabilities.patch_values
    if width is not None and shape[1] != width:
        yield (
            f"{pixels} of {item_label} has patches of {shape[1]} values, the server's model needs {width}: load the "
            "renderer from the directory of the model that is served"
        )
    merge_area = capabilities.merge_area
    if merge_area is not None and item.num_tokens * merge_area != patches:
        yield (
            f"{item_label} has {item.num_tokens} tokens for {patches} patches, of which the model merges {merge_area} "
            "into one token"
        )
