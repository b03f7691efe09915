"""How the media of a request are sent: as features, as hashes, as files; which of them a server takes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from renderers import MediaItem, MultiModalData, PlaceholderRange, RenderedTokens
from renderers.media.decoding import is_raw_video, raw_video_size
from renderers.media.item import PackedArray, TensorField
from renderers.media.sniffing import sniff
from renderers.messages import PLURALS
from renderers.placement import PlacedItem
from renderers.vision.patches import ScaledPixels
from rollouts.engines.http.exchange import Body
from rollouts.engines.http.prompt_checks import feature_token, item_name
from rollouts.engines.http.source_files import MIN_VIDEO_FRAMES, source_file
from rollouts.engines.protocol import GenerateRequest
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.features import (
    FLOATS,
    PixelDtype,
    ServerNumbers,
    ServerTensor,
    encode_features,
    raw_pixels,
    tensor_type,
)
from rollouts.engines.vllm.generate import Generation
from rollouts.engines.vllm.sounds import in_server_layout
from rollouts.errors import CapabilityError, EngineError, InvalidRequestError, MalformedResultError

__all__ = ["MediaMode", "MediaPayload", "media_payload", "select_mode"]


# Converts items to items whose placeholder is one run of feature tokens, the only kind that vLLM's API can describe.
#
# `/inference/v1/generate` accepts an offset and a length for each item, but no mask. An image with text around its
# single run of features (Gemma 3) is described by that run. A Qwen3-VL video has one run for each step of its temporal
# grid, each after a time stamp, even with a single step. Its model encodes every step separately and assigns it the
# positions of an image, so each step is sent as an image, with the same patches, grid and tokens. A video described by
# its run alone would crash the server: vLLM searches for <|vision_start|> from the start of the range.
#
# For some models vLLM splits images from one tensor of rows by a row count that transformers does not return; such
# images get the layout and the count of the server's own items.


# Names in vLLM's models for the number of rows of `pixel_values` that belong to an image.
_ROW_COUNTS = frozenset({"num_patches", "patches_per_image"})
_VIDEO_FIELDS = frozenset({"pixel_values_videos", "video_grid_thw"})
_IMAGE_FIELDS = {"pixel_values": TensorField("flat"), "image_grid_thw": TensorField("batched")}


def dense_items(item: MediaItem, placeholder: PlaceholderRange, capabilities: ServerCapabilities) -> list[PlacedItem]:
    """The items to send for one item, each with a range without text; empty if the API cannot describe the item.

    `request_checks.placement_violations` must have found none.
    """
    runs = _joined_runs(placeholder)
    if item.modality == "video" and runs != [(placeholder.offset, placeholder.end)]:
        return _video_steps(item, runs, capabilities)
    if len(runs) > 1:
        return []
    start, end = runs[0]
    if item.modality == "audio":
        sent = None if capabilities.sounds is None else in_server_layout(item, capabilities.sounds)
    else:
        sent = _in_server_layout(item, capabilities)
    return [(sent or item, PlaceholderRange(start, end - start))]


def _in_server_layout(item: MediaItem, capabilities: ServerCapabilities) -> MediaItem:
    """The item, with a batched image (3, height, width) reshaped to one row and a row count if the server has these."""
    expected = capabilities.image_fields
    counts = [] if expected is None else [name for name in expected if name in _ROW_COUNTS and name not in item.tensors]
    pixels = item.fields.get("pixel_values")
    if not counts or expected is None or item.modality != "image" or pixels is None:
        return item
    if expected.get("pixel_values") != "flat" or pixels.kind != "batched" or item["pixel_values"].ndim != 3:
        return item
    tensors: dict[str, np.ndarray | PackedArray] = {**item.tensors, "pixel_values": item["pixel_values"][None]}
    fields = {**item.fields, "pixel_values": TensorField("flat")}
    for name in counts:
        tensors[name] = np.array(1, dtype=np.int64)
        fields[name] = TensorField("batched")
    return replace(item, tensors=tensors, fields=fields)


def _joined_runs(placeholder: PlaceholderRange) -> list[tuple[int, int]]:
    """The runs of feature tokens, adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for start, end in placeholder.runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _video_steps(item: MediaItem, runs: list[tuple[int, int]], capabilities: ServerCapabilities) -> list[PlacedItem]:
    """One image for each step of a video's temporal grid; empty if runs, grid and server do not fit together."""
    if capabilities.merge_area is None or item.tensors.keys() != _VIDEO_FIELDS:
        return []
    grid = item["video_grid_thw"]
    if grid.shape != (3,) or tensor_type(item.tensors["pixel_values_videos"]).shape[:1] != (int(grid.prod()),):
        return []
    steps, height, width = (int(side) for side in grid)
    rows = height * width
    if steps != len(runs) or any((end - start) * capabilities.merge_area != rows for start, end in runs):
        return []
    tensor = item.tensors["pixel_values_videos"]
    scale = tensor.scale if isinstance(tensor, ScaledPixels) else None
    pixels = tensor.pixels if isinstance(tensor, ScaledPixels) else item["pixel_values_videos"]
    placed = []
    for step, (start, end) in enumerate(runs):
        step_pixels = pixels[step * rows : (step + 1) * rows]
        tensors: dict[str, np.ndarray | PackedArray] = {
            "pixel_values": step_pixels if scale is None else ScaledPixels(step_pixels, scale),
            "image_grid_thw": np.array((1, height, width), dtype=np.int64),
        }
        name, num_tokens = f"{item.mm_hash}-{step}", end - start
        image = MediaItem("image", name, item.source, tensors, num_tokens, item.scale, _IMAGE_FIELDS)
        placed.append((image, PlaceholderRange(start, num_tokens)))
    return placed


# Selects how the media of a request are sent: as processed features, or as source files.
#
# A request uses one mode for all its media. Objections to a mode are collected item by item before anything is sent; an
# error recommends the other mode only if there are no objections to that one.


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

    The placement of the media must have been checked. Raises `CapabilityError` or `InvalidRequestError` with the
    reasons if the mode does not work. The error says whether the other mode would.
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
            f"neither mode works for the media of the prompt. As features, {_listed(against_features)}. As source "
            f"files, {_listed(against_files)}. To cure it, {', or '.join(cures) or 'leave such media out'}",
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
    sampled_markers = _first_sampled_markers(request)
    found = (
        _against_content(request, item, placeholder, capabilities, sampled_markers.get(item.modality))
        for item, placeholder in request.media
    )
    return [objection for objection in found if objection is not None]


def _against_features(
    request: GenerateRequest, item: MediaItem, placeholder: PlaceholderRange, capabilities: ServerCapabilities
) -> Objection | None:
    if capabilities.reads_features is False:
        server = "the server"
        if capabilities.rust_frontend is not None:
            server = f"vLLM's Rust frontend ({capabilities.rust_frontend})"
        return Objection(item, f"{server} drops features: the model would not see the {item.modality}", None)
    if item.modality == "audio":
        if (refusal := _against_sounds(item, capabilities)) is not None:
            return refusal
    elif capabilities.pixel_dtype is None:
        return Objection(
            item,
            f"{capabilities.model} takes no media as features",
            "set the dtype that it takes in ExpectedCapabilities(pixel_dtype=)",
        )
    items = dense_items(item, placeholder, capabilities)
    if not items:
        return Objection(
            item,
            f"its {placeholder.length} tokens are {placeholder.num_embeds} features with text in between, which "
            "features cannot describe",
            None,
        )
    if item.expansion is None and feature_token(request, item, capabilities.placeholder_ids) is None:
        return Objection(
            item,
            f"which token stands for a {item.modality} in {capabilities.model} is not known; the server names one for "
            f"{', '.join(capabilities.placeholder_ids) or 'no modality'}",
            f"name it in ExpectedCapabilities(placeholder_ids={{{item.modality!r}: ...}}) or in the request's "
            "`placeholder_token_ids`",
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


def _first_sampled_markers(request: GenerateRequest) -> dict[str, int]:
    """By modality, the first position of a marker outside of all placeholders: a policy sampled it as text."""
    ids = np.asarray(request.prompt_ids)
    first: dict[str, int] = {}
    placed = request.media
    for modality in {item.modality for item, _ in placed} & request.placeholder_token_ids.keys():
        is_text = ids == request.placeholder_token_ids[modality]
        for _, placeholder in placed:
            is_text[placeholder.offset : placeholder.end] = False
        if is_text.any():
            first[modality] = int(is_text.argmax())
    return first


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
            "text at an edge of its placeholder may share a token with the text next to it, so that the prompt before "
            "expansion is not known",
            None,
            InvalidRequestError,
        )
    if sampled_marker is not None and sampled_marker < placeholder.offset:
        return Objection(
            item,
            f"token {sampled_marker} of the prompt is {request.prompt_ids[sampled_marker]}, sampled as text before "
            f"this {item.modality}; a server would put the {item.modality} in its place",
            None,
            InvalidRequestError,
        )
    if item.modality == "image":
        return None
    if capabilities.rust_frontend is not None:
        reason = (
            f"vLLM's Rust frontend ({capabilities.rust_frontend}) does not decode {PLURALS[item.modality]} as the "
            "renderer does"
        )
        return Objection(item, reason, "start the server with VLLM_USE_RUST_FRONTEND=0")
    if item.modality == "audio":
        return None
    if is_raw_video(item.source.data):
        if (frames := raw_video_size(item.source.data)[0]) < MIN_VIDEO_FRAMES:
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
    """The first three distinct reasons."""
    texts: dict[str, str] = {}
    for objection in objections:
        texts.setdefault(objection.reason, str(objection))
    more = f" (and {len(texts) - 3} more)" if len(texts) > 3 else ""
    return "; ".join(list(texts.values())[:3]) + more


# The media of a request as a field of its body: as processed features, or as source files.


class MediaPayload:
    """The media of one request, ready to be sent. This class is that of a prompt without media.

    `names` are their names in the server's cache, with their bytes. `returns_prompt`: the server must return the prompt
    that it ran, for `check`. `sends_all`: the server takes no names without data.
    """

    names: Mapping[str, int] = {}
    returns_prompt = False
    sends_all = False

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self.prompt_ids: Sequence[int] = request.prompt_ids

    def body_field(self, included: Collection[str]) -> Body:
        """The field of the request body that describes the media, with the data of the names in `included`."""
        return []

    def is_cache_miss(self, status: int, body: str) -> bool:
        """Whether an error may mean that the server does not hold media that were sent by name only."""
        return False

    def check(self, generation: Generation) -> None:
        """Raise `MalformedResultError` if the server expanded the media differently than the prompt."""


def media_payload(
    request: GenerateRequest, mode: MediaMode, capabilities: ServerCapabilities, *, jpeg_as_file: bool = False
) -> MediaPayload:
    """The payload of a request that passed `check_request`. Raises `CapabilityError` or `InvalidRequestError`.

    `jpeg_as_file`: see `VLLMEngine`.
    """
    if not (placed := request.media):
        return MediaPayload(request)
    if select_mode(request, mode, capabilities) == "content_parts":
        return ContentPartsPayload(
            request,
            or_features=not features_objections(request, capabilities),
            jpeg_as_file=jpeg_as_file and capabilities.rust_frontend is None,  # which decodes JPEG in another way
            sends_all=capabilities.rust_frontend is not None,
        )
    items = [dense for item, placeholder in placed for dense in dense_items(item, placeholder, capabilities)]
    # A model that only hears has no dtype of pixels; the tensors of sounds have the server's dtype already.
    return FeaturesPayload(request, items, capabilities.pixel_dtype or "float32")


class FeaturesPayload(MediaPayload):
    """Expanded ids and processed tensors, which the server uses unchanged."""

    def __init__(self, request: GenerateRequest, placed: Sequence[PlacedItem], pixel_dtype: PixelDtype) -> None:
        super().__init__(request)
        self.names = {item.mm_hash: item.nbytes for item, _ in placed}
        self.placed = placed
        self._media = MultiModalData.from_items(placed)
        self._pixel_dtype = pixel_dtype

    def of(self, request: GenerateRequest) -> FeaturesPayload:
        """The payload of another request to the same server, whose media are to be sent as they are."""
        return FeaturesPayload(request, request.media, self._pixel_dtype)

    def body_field(self, included: Collection[str]) -> Body:
        segments = encode_features(self._media, pixel_dtype=self._pixel_dtype, include=included.__contains__)
        return [b'"features":', *segments]

    def is_cache_miss(self, status: int, body: str) -> bool:
        # The server writes the reason only into its log; the client receives a general error.
        return status == 500 and "EngineCore" not in body


class ContentPartsPayload(MediaPayload):
    """Logical ids and source files; the server decodes and processes the files and expands the ids.

    A server that has a name in its cache does not look at the data. So the name of an item names the pixels that the
    server makes of what is sent: with `jpeg_as_file` they depend on the source and on the server, otherwise on the
    decoders of this process too, as `mm_hash` does. `or_features`: features would also work, so that an error may
    recommend them.
    """

    returns_prompt = True

    def __init__(
        self,
        request: GenerateRequest,
        *,
        or_features: bool = False,
        jpeg_as_file: bool = False,
        sends_all: bool = False,
    ) -> None:
        super().__init__(request)
        self._or_features = or_features
        self._jpeg_as_file = jpeg_as_file
        self.sends_all = sends_all
        self._items = [item for item, _ in request.media]
        rendered = RenderedTokens(
            list(request.prompt_ids),
            multi_modal_data=request.multi_modal_data,
            placeholder_token_ids=request.placeholder_token_ids,
        )
        self.prompt_ids = rendered.logical_ids
        self.names = {self._name(item): item.source.nbytes for item in self._items}

    def body_field(self, included: Collection[str]) -> Body:
        segments: list[bytes | memoryview] = [b'"content_parts":[']
        urls: dict[str, Body] = {}  # an item that occurs twice must be sent twice
        for item in self._items:
            name = self._name(item)
            part = {"type": f"{item.modality}_url", "uuid": name, "url": None}
            separator = b"," if len(segments) > 1 else b""
            if name in included:
                if name not in urls:
                    file = source_file(
                        item.source,
                        item.modality,
                        sampling_rate=item.sampling_rate,
                        jpeg_as_file=self._jpeg_as_file and item.modality == "image",
                    )
                    urls[name] = file.data_url()
                del part["url"]
                opening = json.dumps(part)[:-1].encode()
                segments += [separator, opening, b',"url":"', *urls[name], b'"}']
            else:
                segments += [separator, json.dumps(part).encode()]
        return [*segments, b"]"]

    def _name(self, item: MediaItem) -> str:
        return f"file-{item.source.digest}" if self._jpeg_as_file else f"pixels-{item.mm_hash}"

    def is_cache_miss(self, status: int, body: str) -> bool:
        return is_source_missing(status, body)

    def check(self, generation: Generation) -> None:
        expansion = generation.prompt_expansion()
        assert self._request.multi_modal_data is not None  # otherwise there is nothing to send
        placeholders = self._request.multi_modal_data.mm_placeholders
        if expansion.prompt_ids == list(self._request.prompt_ids) and _agree(expansion.placeholders, placeholders):
            return
        ours = {
            modality: [(placeholder.offset, placeholder.length) for placeholder in ranges]
            for modality, ranges in placeholders.items()
        }
        cure = ', or use media="features"' if self._or_features else ""
        raise MalformedResultError(
            self._request.request_id,
            f"the server expanded the prompt to {len(expansion.prompt_ids)} tokens with media at "
            f"{expansion.placeholders}, the renderer to {len(self._request.prompt_ids)} with {ours}: their processors "
            f"differ. Load the renderer from the directory that the server serves{cure}",
        )


def _agree(
    received: Mapping[str, Sequence[tuple[int, int]]], expected: Mapping[str, Sequence[PlaceholderRange]]
) -> bool:
    """Whether each range of the server, (offset, length), contains all feature tokens of our item with the same index.

    A server may include the tokens around the features in its range or not; the ids are compared separately.
    """
    return received.keys() == expected.keys() and all(
        len(received[modality]) == len(ranges)
        and all(
            offset <= ours.runs[0][0] and ours.runs[-1][1] <= offset + length
            for (offset, length), ours in zip(received[modality], ranges, strict=True)
        )
        for modality, ranges in expected.items()
    )


def is_source_missing(status: int, body: str) -> bool:
    """Whether an error means that the server does not hold a source file that was sent by name only.

    vLLM's Rust frontend holds none: it refuses a part whose URL is null.
    """
    return status == 400 and ("Cache miss" in body or "null, expected a string" in body)
