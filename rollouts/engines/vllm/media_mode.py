"""Selects how the media of a request are sent: as processed features, or as source files.

A request uses one mode for all its media. Objections to a mode are collected item by item before anything is
sent; an error recommends the other mode only if there are no objections to that one.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from renderers import MediaItem, PlaceholderRange
from renderers.media.decoding import raw_video_frames
from renderers.media.sniffing import sniff
from renderers.messages import PLURALS
from rollouts.engines.http.prompt_checks import feature_token, item_name, sampled_marker
from rollouts.engines.http.source_files import MIN_VIDEO_FRAMES
from rollouts.engines.protocol import GenerateRequest
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.dense_items import dense_items
from rollouts.engines.vllm.tensors import FLOATS, PixelDtype, ServerNumbers, ServerTensor, raw_pixels, tensor_type
from rollouts.errors import CapabilityError, EngineError, InvalidRequestError

MediaMode = Literal["features", "content_parts", "auto"]
SelectedMode = Literal["features", "content_parts"]
_RENDERER_OF_MODEL = "load the renderer from the directory of the model that is served"


class Objection(NamedTuple):
    """Why one mode cannot send an item, and a cure other than the other mode; None if there is no other cure."""

    item: MediaItem
    reason: str
    cure: str | None
    error: type[EngineError] = CapabilityError

    def __str__(self) -> str:
        return f"{item_name(self.item)}: {self.reason}"


def select_mode(request: GenerateRequest, mode: MediaMode, capabilities: ServerCapabilities) -> SelectedMode:
    """The mode that sends every item of the request; "auto" prefers features.

    The placement of the media must have been checked. Raises `CapabilityError` or `InvalidRequestError` with
    the reasons if the mode does not work. The error says whether the other mode would.
    """
    against_features = features_objections(request, capabilities)
    if mode != "content_parts" and not against_features:
        return "features"
    against_files = content_objections(request, capabilities)
    if mode != "features" and not against_files:
        return "content_parts"
    name = request.request_id
    if against_features and against_files:
        first, second = against_features[0], against_files[0]
        cures = dict.fromkeys(each.cure for each in (first, second) if each.cure)
        error = first.error if first.error is second.error else CapabilityError
        raise error(
            name,
            f"neither mode works for the media of the prompt. As features, {_listed(against_features)}. As "
            f"source files, {_listed(against_files)}. To cure it, "
            f"{', or '.join(cures) or 'leave such media out'}",
        )
    objections, other = (against_features, "content_parts") if mode == "features" else (against_files, "features")
    first = objections[0]
    cure = f", or {first.cure}" if first.cure else ""
    raise first.error(name, f'as {mode}, {_listed(objections)}. Use media="{other}" (or "auto"){cure}')


def features_objections(request: GenerateRequest, capabilities: ServerCapabilities) -> list[Objection]:
    """The objections to sending the items as features, at most one for each."""
    found = (_against_features(request, item, placeholder, capabilities) for item, placeholder in request.media)
    return [objection for objection in found if objection is not None]


def content_objections(request: GenerateRequest, capabilities: ServerCapabilities) -> list[Objection]:
    """The objections to sending the source files of the items, at most one for each."""
    ids, markers = np.asarray(request.prompt_ids), request.placeholder_token_ids
    modalities = {item.modality for item, _ in request.media} & markers.keys()
    sampled_markers = {modality: sampled_marker(request, ids, [markers[modality]]) for modality in modalities}
    found = (
        _against_content(request, item, placeholder, capabilities, sampled_markers.get(item.modality))
        for item, placeholder in request.media
    )
    return [objection for objection in found if objection is not None]


def _against_features(
    request: GenerateRequest, item: MediaItem, placeholder: PlaceholderRange, capabilities: ServerCapabilities
) -> Objection | None:
    if capabilities.rust_frontend is not None:
        server = f"vLLM's Rust frontend ({capabilities.rust_frontend})"
        return Objection(item, f"{server} drops features: the model would not see the {item.modality}", None)
    if item.modality == "audio":
        if (refusal := _against_sounds(item, capabilities)) is not None:
            return refusal
    elif capabilities.pixel_dtype is None:
        return Objection(item, f"{capabilities.model} takes no media as features", None)
    items = dense_items(item, placeholder, capabilities)
    if not items:
        return Objection(
            item,
            f"its {placeholder.length} tokens are {placeholder.num_embeds} features with text in between, "
            "which features cannot describe",
            None,
        )
    if item.expansion is None and feature_token(request, item, capabilities.placeholder_ids) is None:
        return Objection(
            item,
            f"which token stands for a {item.modality} in {capabilities.model} is not known; the server "
            f"names one for {', '.join(capabilities.placeholder_ids) or 'no modality'}",
            "name it in the request's `placeholder_token_ids`",
        )
    for sent, _ in items:
        if sent.modality == "audio" or capabilities.pixel_dtype is None:
            if capabilities.sounds is None or sent.fields.keys() != capabilities.sounds.fields.keys():
                return _unknown_sound(item, capabilities)
            continue
        wanted_fields = capabilities.image_fields if sent.modality == "image" and capabilities.image_fields else {}
        # A missing tensor would crash the server.
        if any(name not in sent.fields or sent.fields[name].kind != kind for name, kind in wanted_fields.items()):
            held_fields = {name: field.kind for name, field in sent.fields.items()}
            held, wanted = (
                ", ".join(f"{name} ({kind})" for name, kind in sorted(each.items()))
                for each in (held_fields, wanted_fields)
            )
            reason = f"it holds the tensors {held}, and {capabilities.model} wants {wanted}"
            return Objection(item, reason, _RENDERER_OF_MODEL)
        grid = f"{sent.modality}_grid_thw"
        if capabilities.merge_area is not None and grid not in sent.tensors:
            held = ", ".join(sent.tensors) or "no tensors"
            return Objection(item, f"it has no {grid}, only {held}", _RENDERER_OF_MODEL, InvalidRequestError)
        if (unfit := _unfit_pixels(sent, capabilities.pixel_dtype)) is not None:
            name, dtype = unfit
            flag = "with" if dtype in FLOATS else "without"
            return Objection(
                item,
                f"its {name} is {dtype} and the server wants {capabilities.pixel_dtype}: the model would see noise",
                f"{_RENDERER_OF_MODEL}, or start the server {flag} --no-mm-device-do-normalize",
            )
    return None


def _against_sounds(item: MediaItem, capabilities: ServerCapabilities) -> Objection | None:
    """The objection to sending any sound, in whatever form."""
    if capabilities.sound_refusal is None:
        return None
    return Objection(
        item,
        f"{capabilities.model} takes no sounds: {capabilities.sound_refusal}",
        "serve a model that hears, with audio in --limit-mm-per-prompt and with the packages of vllm[audio]",
    )


def _unknown_sound(item: MediaItem, capabilities: ServerCapabilities) -> Objection:
    held = ", ".join(sorted(item.tensors)) or "no tensors"
    if capabilities.sounds is None:
        reason = f"which tensors {capabilities.model} takes of a sound is not known"
    else:
        reason = (
            f"it holds the tensors {held}, of which those of {capabilities.model} "
            f"({', '.join(sorted(capabilities.sounds.fields))}) cannot be made"
        )
    return Objection(item, reason, _RENDERER_OF_MODEL)


def _unfit_pixels(item: MediaItem, wanted: PixelDtype) -> tuple[str, str] | None:
    """Name and dtype of pixels that differ from the server's dtype, or None; the server would not report an error."""
    for name, tensor in item.tensors.items():
        if not name.startswith("pixel_values") or isinstance(tensor, ServerNumbers) or raw_pixels(item, name):
            continue
        dtype = tensor_type(tensor).dtype
        # vLLM and the encoder cast floats to the model's dtype; only tensors of a server are sent unchanged.
        castable = dtype in FLOATS and not isinstance(tensor, ServerTensor)
        if dtype != wanted and not (castable and wanted in FLOATS):
            return name, dtype
    return None


def _against_content(
    request: GenerateRequest,
    item: MediaItem,
    placeholder: PlaceholderRange,
    capabilities: ServerCapabilities,
    sampled_marker: int | None,
) -> Objection | None:
    """The objection to sending a source file. `sampled_marker`: position of the modality's first marker in text."""
    if item.modality == "audio" and (refusal := _against_sounds(item, capabilities)) is not None:
        return refusal
    if item.modality not in request.placeholder_token_ids:
        return Objection(
            item,
            f"content_parts needs `placeholder_token_ids` with the token that stands for one {item.modality}",
            "pass `RenderedTokens.placeholder_token_ids` with the request",
            InvalidRequestError,
        )
    if not placeholder.whole:
        return Objection(
            item,
            "text at an edge of its placeholder may share a token with the text next to it, so that the "
            "prompt before expansion is not known",
            None,
            InvalidRequestError,
        )
    if sampled_marker is not None and sampled_marker < placeholder.offset:
        return Objection(
            item,
            f"token {sampled_marker} of the prompt is {request.prompt_ids[sampled_marker]}, sampled as text "
            f"before this {item.modality}; a server would put the {item.modality} in its place",
            None,
            InvalidRequestError,
        )
    if item.modality == "image":
        return None
    if capabilities.rust_frontend is not None:
        reason = (
            f"vLLM's Rust frontend ({capabilities.rust_frontend}) does not decode {PLURALS[item.modality]} "
            "as the renderer does"
        )
        return Objection(item, reason, "start the server with VLLM_USE_RUST_FRONTEND=0")
    if item.modality == "audio":
        return None
    if item.source.raw_modality == "video":
        if (frames := len(raw_video_frames(item.source.data)[0])) < MIN_VIDEO_FRAMES:
            reason, cure = (
                f"a server cannot decode a video of {frames} frame",
                "pass the frame as an image, or more frames",
            )
            return Objection(item, reason, cure, InvalidRequestError)
    elif sniff(item.source.data) is None:
        reason = "its source is not a file that a server could decode"
        return Objection(item, reason, "pass a video file", InvalidRequestError)
    return None


def _listed(objections: Sequence[Objection]) -> str:
    texts: dict[str, str] = {}
    for objection in objections:
        texts.setdefault(objection.reason, str(objection))
    more = f" (and {len(texts) - 3} more)" if len(texts) > 3 else ""
    return "; ".join(list(texts.values())[:3]) + more
