"""Which way of sending media serves a request: as processed features, or as source files.

A request takes one way for all its media. What stands against a way is found item by item, before anything is sent;
an error advises the other way only where nothing stands against that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from renderers import MediaItem, PlaceholderRange
from renderers.media.raw_video import is_raw_video, raw_video_size
from renderers.media.sniffing import sniff
from renderers.placement import PlacedItem
from rollouts.engines.protocol import GenerateRequest
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.media.dense_items import dense_items
from rollouts.engines.vllm.media.video_file import FEWEST_FRAMES
from rollouts.engines.vllm.wire.tensors import FLOATS, PixelDtype, ServerNumbers, ServerTensor, raw_pixels, tensor_dtype
from rollouts.errors import CapabilityError, EngineError, InvalidRequestError

MediaMode = Literal["features", "content_parts", "auto"]
SelectedMode = Literal["features", "content_parts"]

_UPGRADE = "upgrade vLLM to 0.29 or later, which takes content_parts"
_RENDERER_OF_MODEL = "load the renderer from the directory of the model that is served"


class Objection(NamedTuple):
    """Why one way cannot take an item, and what would help besides the other way; None where nothing would."""

    item: MediaItem
    reason: str
    cure: str | None
    error: type[EngineError] = CapabilityError

    def __str__(self) -> str:
        return f"{item_name(self.item)}: {self.reason}"


def item_name(item: MediaItem) -> str:
    return f"{item.modality} {item.mm_hash[:12]}"


def select_mode(request: GenerateRequest, mode: MediaMode, capabilities: ServerCapabilities) -> SelectedMode:
    """The way that "auto" comes to: features where they serve every item of the request, else source files.

    The placement of the media must have been checked. Raises `CapabilityError` or `InvalidRequestError` with the
    reason for each item where neither way serves the request.
    """
    if mode != "auto":
        return mode
    placed = _placed(request)
    against_features = features_objections(request, placed, capabilities)
    if not against_features:
        return "features"
    against_files = content_objections(request, placed, capabilities)
    if not against_files:
        return "content_parts"
    raise _neither(request, against_features, against_files)


def check_mode(request: GenerateRequest, mode: SelectedMode, capabilities: ServerCapabilities) -> None:
    """Raise unless a way that was chosen takes every item. The error says whether the other way would."""
    placed = _placed(request)
    if mode == "features":
        against, other, against_other = features_objections, "content_parts", content_objections
    else:
        against, other, against_other = content_objections, "features", features_objections
    objections = against(request, placed, capabilities)
    if not objections:
        return
    remaining = against_other(request, placed, capabilities)
    if remaining:
        by_mode = (objections, remaining) if mode == "features" else (remaining, objections)
        raise _neither(request, *by_mode)
    first = objections[0]
    cures = [f'Use media="{other}" (or "auto")', *([first.cure] if first.cure else [])]
    raise first.error(request.request_id, f"as {mode}, {_listed(objections)}. {', or '.join(cures)}")


def features_objections(
    request: GenerateRequest, placed: Sequence[PlacedItem], capabilities: ServerCapabilities
) -> list[Objection]:
    """What stands against sending the items as features, at most one reason for each."""
    found = (_against_features(request, item, where, capabilities) for item, where in placed)
    return [objection for objection in found if objection is not None]


def content_objections(
    request: GenerateRequest, placed: Sequence[PlacedItem], capabilities: ServerCapabilities
) -> list[Objection]:
    """What stands against sending the source files of the items, at most one reason for each."""
    stray = _first_stray_markers(request, placed)
    found = (_against_content(request, item, where, capabilities, stray.get(item.modality)) for item, where in placed)
    return [objection for objection in found if objection is not None]


def feature_token(request: GenerateRequest, item: MediaItem, capabilities: ServerCapabilities) -> int | None:
    """The token that carries the features of an item, as far as the server or the renderer names it.

    The server's word counts. Where it tells none, the marker of the template is that token only where nothing but the
    marker replaces it; Gemma 3 replaces <start_of_image> by text around <image_soft_token>, which carries the features.
    """
    token = capabilities.placeholder_ids.get(item.modality)
    if token is None and item.expansion is None:
        return request.placeholder_token_ids.get(item.modality)
    return token


def _against_features(
    request: GenerateRequest, item: MediaItem, where: PlaceholderRange, capabilities: ServerCapabilities
) -> Objection | None:
    if capabilities.pixel_dtype is None:
        return Objection(
            item,
            f"{capabilities.model} takes no media as features",
            "say what it takes in ExpectedCapabilities(pixel_dtype=)",
        )
    wire = dense_items(item, where, capabilities)
    if not wire:
        return Objection(
            item,
            f"its {where.length} tokens are {where.num_embeds} features with text in between, which features cannot "
            "describe",
            None if capabilities.content_parts else _UPGRADE,
        )
    if item.expansion is None and feature_token(request, item, capabilities) is None:
        return Objection(
            item,
            f"which token stands for a {item.modality} in {capabilities.model} is not known; the server names one for "
            f"{', '.join(capabilities.placeholder_ids) or 'no modality'}",
            f"name it in ExpectedCapabilities(placeholder_ids={{{item.modality!r}: ...}}) or in the request's "
            "`placeholder_token_ids`",
        )
    for sent, _ in wire:
        if (reason := _other_tensors(sent, capabilities)) is not None:
            return Objection(item, reason, _RENDERER_OF_MODEL)
        grid = f"{sent.modality}_grid_thw"
        if capabilities.merge_area is not None and grid not in sent.tensors:
            held = ", ".join(sent.tensors) or "no tensors"
            return Objection(item, f"it has no {grid}, only {held}", _RENDERER_OF_MODEL, InvalidRequestError)
        if (reason := _other_pixels(sent, capabilities.pixel_dtype)) is not None:
            flag = "with" if _pixel_type(sent) in FLOATS else "without"
            return Objection(
                item, reason, f"{_RENDERER_OF_MODEL}, or start the server {flag} --no-mm-device-do-normalize"
            )
    return None


def _other_tensors(item: MediaItem, capabilities: ServerCapabilities) -> str | None:
    """Whether the server makes other tensors of an image than the item holds; a missing one takes it down."""
    wanted = capabilities.image_fields
    if wanted is None or item.modality != "image":
        return None
    held = {name: field.kind for name, field in item.fields.items()}
    differing = [name for name, kind in wanted.items() if held.get(name) != kind]
    if not differing:
        return None
    return f"it holds the tensors {_described(held)}, and {capabilities.model} wants {_described(wanted)}"


def _described(fields: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in sorted(fields.items()))


def _other_pixels(item: MediaItem, wanted: PixelDtype) -> str | None:
    """A server takes pixels of the wrong type without a word, and sees noise."""
    for name, tensor in item.tensors.items():
        if not name.startswith("pixel_values") or isinstance(tensor, ServerNumbers):
            continue
        held = tensor_dtype(tensor)
        if raw_pixels(item, name) is not None:
            continue
        # vLLM casts floats to the model's type, as the encoder does; only what a server sent goes back as it came.
        castable = held in FLOATS and not isinstance(tensor, ServerTensor)
        if held != wanted and not (castable and wanted in FLOATS):
            return f"its {name} is {held} and the server wants {wanted}: it would take the {item.modality} for noise"
    return None


def _pixel_type(item: MediaItem) -> str:
    """torch's name of the type of an item's pixels."""
    return next(
        (tensor_dtype(tensor) for name, tensor in item.tensors.items() if name.startswith("pixel_values")), "none"
    )


def _first_stray_markers(request: GenerateRequest, placed: Sequence[PlacedItem]) -> dict[str, int]:
    """By modality, the first place where the token that stands for one item is text, which a policy has sampled."""
    ids = np.asarray(request.prompt_ids)
    first: dict[str, int] = {}
    for modality in {item.modality for item, _ in placed} & request.placeholder_token_ids.keys():
        text = ids == request.placeholder_token_ids[modality]
        for _, where in placed:
            text[where.offset : where.end] = False
        if text.any():
            first[modality] = int(text.argmax())
    return first


def _against_content(
    request: GenerateRequest,
    item: MediaItem,
    where: PlaceholderRange,
    capabilities: ServerCapabilities,
    stray: int | None,
) -> Objection | None:
    """`stray`: the place of the first marker of this modality that is text."""
    if not capabilities.content_parts:
        return Objection(item, f"vLLM {capabilities.version} takes no `content_parts`", _UPGRADE)
    if item.modality not in request.placeholder_token_ids:
        return Objection(
            item,
            f"content_parts needs `placeholder_token_ids` with the token that stands for one {item.modality}",
            "pass `RenderedTokens.placeholder_token_ids` with the request",
            InvalidRequestError,
        )
    if not where.whole:
        return Objection(
            item,
            "text at an edge of its placeholder may share a token with what stands beside it, so that the prompt "
            "before expansion is not known",
            None,
            InvalidRequestError,
        )
    if stray is not None and stray < where.offset:
        return Objection(
            item,
            f"token {stray} of the prompt is {request.prompt_ids[stray]}, sampled as text before this {item.modality}; "
            f"a server puts the {item.modality} in its place",
            None,
            InvalidRequestError,
        )
    return _against_file(item) if item.modality == "video" else None


def _against_file(item: MediaItem) -> Objection | None:
    """Whether a server could decode the source of a video."""
    if is_raw_video(item.source.data):
        frames = raw_video_size(item.source.data)[0]
        if frames >= FEWEST_FRAMES:
            return None
        return Objection(
            item,
            f"a server decodes no video of {frames} frame",
            "pass the frame as an image, or more frames",
            InvalidRequestError,
        )
    if sniff(item.source.data) is None:
        return Objection(
            item, "its source is no file that a server could decode", "pass a video file", InvalidRequestError
        )
    return None


def _placed(request: GenerateRequest) -> list[PlacedItem]:
    return [] if request.multi_modal_data is None else request.multi_modal_data.items_with_ranges()


def _neither(
    request: GenerateRequest, against_features: Sequence[Objection], against_files: Sequence[Objection]
) -> EngineError:
    cures = dict.fromkeys(cure for cure in (against_features[0].cure, against_files[0].cure) if cure)
    error = against_features[0].error if against_features[0].error is against_files[0].error else CapabilityError
    return error(
        request.request_id,
        f"this server can take the media of the prompt in no way. As features, {_listed(against_features)}. As source "
        f"files, {_listed(against_files)}. To cure it, {', or '.join(cures) or 'leave such media out'}",
    )


def _listed(objections: Sequence[Objection]) -> str:
    """The first few reasons, each once."""
    shown: dict[str, str] = {}
    for objection in objections:
        shown.setdefault(objection.reason, str(objection))
    more = f" (and {len(shown) - 3} more)" if len(shown) > 3 else ""
    return "; ".join(list(shown.values())[:3]) + more
