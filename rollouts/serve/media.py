"""Images and sounds of requests: as features, and as sources."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt, prod
from typing import Any, Final, NamedTuple, cast

import numpy as np

from renderers import MediaItem, MediaSource, MultiModalData, PlaceholderRange, RendererError, TemplateRenderer
from renderers.expansion import placed_tokens
from renderers.media.item import TensorField
from renderers.media.reference import load_source
from renderers.messages import Modality
from renderers.process.caches import ByteLRU
from renderers.vision.processor import MediaProcessor
from rollouts.engines.vllm.features import FLOATS, DecodedTensor, decode_item, tensor_type
from rollouts.engines.vllm.sounds import format_of_item, sound_error
from rollouts.errors import MalformedResultError
from rollouts.serve.errors import INTERNAL_ERROR, RequestError
from rollouts.serve.generate_body import ContentPartBody, FeaturesBody
from rollouts.serve.served_model import MediaFormat, ServedModel

#: What an entry of a cache takes besides its name and its arrays.
ENTRY_BYTES: Final = 1000


class MediaCache:
    """The media of earlier requests by the names that clients gave them, at most `max_bytes` of tensors and names.

    `queries` and `hits` count the media of requests, and those that were found by name.
    """

    def __init__(self, max_bytes: int) -> None:
        self._items: ByteLRU[str, MediaItem] = ByteLRU(max_bytes)
        self.queries = 0
        self.hits = 0

    def get(self, name: str) -> MediaItem | None:
        self.queries += 1
        item = self._items.get(name)
        self.hits += item is not None
        return item

    def put(self, name: str, item: MediaItem) -> None:
        self._items.put(name, item, item.nbytes + sys.getsizeof(name) + ENTRY_BYTES)

    def clear(self) -> None:
        self._items.clear()


def media_of_features(
    features: FeaturesBody, prompt_ids: Sequence[int], model: ServedModel, cache: MediaCache
) -> MultiModalData:
    """The images and sounds of a request, from its tensors or from the cache.

    Raises `RequestError`: 400 for media that the model cannot take, and 500, as vLLM does, for a name that the cache
    does not hold. (vLLM takes many wrong media, and dies of some; see docs/serve.md.)
    """
    placed = []
    for modality, names in features.mm_hashes.items():
        if (format := model.media.get(cast(Modality, modality))) is None:
            raise RequestError(400, f"{model.name} takes no {modality} as features")
        data = (features.kwargs_data or {}).get(modality) or [None] * len(names)
        ranges = features.mm_placeholders[modality]
        for name, encoded, placeholder in zip(names, data, ranges, strict=True):
            place = PlaceholderRange(placeholder.offset, placeholder.length)
            item = _item(name, encoded, place, format, cache)
            _check_tokens(name, prompt_ids, place, format)
            placed.append((item, place))
    return MultiModalData.from_items(sorted(placed, key=lambda pair: pair[1].offset))


def _item(name: str, encoded: str | None, place: PlaceholderRange, format: MediaFormat, cache: MediaCache) -> MediaItem:
    cached = cache.get(name)
    if encoded is None:
        if cached is None:
            raise RequestError(500, INTERNAL_ERROR)
        _check_length(name, cached, place, format)
        return replace(cached, num_tokens=place.length)
    try:
        tensors = decode_item(encoded, name=name)
    except MalformedResultError as error:
        raise _wrong(name, format, error.reason) from error
    _check_tensors(name, tensors, format)
    item = _made_item(tensors, place, format)
    _check_length(name, item, place, format)
    if cached is not None and cached.mm_hash != item.mm_hash:
        raise RequestError(
            400,
            f"the {format.example.modality} {name[:80]} has other tensors than what was sent under this name before; a "
            "name must identify the tensors",
        )
    cache.put(name, item)
    return item


def _made_item(tensors: Mapping[str, DecodedTensor], place: PlaceholderRange, format: MediaFormat) -> MediaItem:
    """The item of decoded tensors. Its hash is that of the tensors, whatever name the client gave it."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].tensor
        array = tensor if isinstance(tensor, np.ndarray) else tensor.unpack()
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    pads = {name: each.pad for name, each in format.fields.items()}
    return MediaItem(
        format.example.modality,
        digest.hexdigest(),
        MediaSource(digest.hexdigest(), b""),  # the source stays with the client
        {name: each.tensor for name, each in tensors.items()},
        place.length,
        format.example.scale if format.pixel_dtype == "uint8" else None,
        {name: TensorField(each.field.kind, pads.get(name)) for name, each in tensors.items()},
    )


def _check_tensors(name: str, tensors: Mapping[str, DecodedTensor], format: MediaFormat) -> None:
    """Raise `RequestError` unless names, dtypes and row sizes of the tensors are those of the server's own media."""
    if tensors.keys() != format.fields.keys():
        raise _wrong(name, format, f"it has the tensors {_listed(tensors)}, this model takes {_listed(format.fields)}")
    for key, each in tensors.items():
        own = tensor_type(format.example.tensors[key])
        dtype, shape = tensor_type(each.tensor)
        if (own.dtype in FLOATS) != (dtype in FLOATS) and not key.startswith("pixel_values"):
            raise _wrong(name, format, f"{key} is {dtype}; the server's own is {own.dtype}")
        if format.example.modality == "audio":
            continue  # `_check_length` compares shapes
        if len(shape) != len(own.shape) or (len(shape) == 2 and shape[1] != own.shape[1]):
            raise _wrong(
                name, format, f"{key} has the shape {shape}; the server's own of a small image has {own.shape}"
            )
        if not key.startswith("pixel_values"):
            continue
        takes = {"uint8"} if format.pixel_dtype == "uint8" else FLOATS
        if dtype not in takes:
            kind = "before rescaling and normalisation" if format.pixel_dtype == "uint8" else "normalised"
            raise _wrong(name, format, f"{key} is {dtype}, and this server takes {format.pixel_dtype} pixels, {kind}")


def _check_length(name: str, item: MediaItem, place: PlaceholderRange, format: MediaFormat) -> None:
    """Raise `RequestError` unless the placeholder has as many tokens as the medium has rows of features."""
    example = format.example
    if example.modality == "audio":
        error = sound_error(replace(item, num_tokens=place.length), format_of_item(example))
        if error is not None:
            raise _wrong(name, format, error)
        return
    if "image_grid_thw" in example.tensors:
        rows, grid = len(item["pixel_values"]), item["image_grid_thw"].tolist()
        # Patches of as many rows and columns are merged into one feature. Python's integers do not wrap around.
        merged = isqrt(len(example["pixel_values"]) // format.example_features)
        is_grid = item["image_grid_thw"].dtype.kind in "iu" and min(grid) > 0 and not any(n % merged for n in grid[1:])
        if not is_grid or prod(grid) != rows:
            raise _wrong(name, format, f"pixel_values has {rows} rows, and image_grid_thw is {grid}")
        expected = rows * format.example_features / len(example["pixel_values"])
    elif all(_is_like(key, item[key], example[key]) for key in example):
        expected = format.example_features
    else:
        return  # the model itself compares them
    if place.length != expected:
        raise _wrong(
            name, format, f"its placeholder has {place.length} tokens, and its tensors make {expected:g} features"
        )


def _is_like(key: str, array: np.ndarray, other: np.ndarray) -> bool:
    """Whether two tensors are equal, or pixels of the same shape: then equally many features are made of them."""
    return array.shape == other.shape and (key.startswith("pixel_values") or np.array_equal(array, other))


def _check_tokens(name: str, prompt_ids: Sequence[int], place: PlaceholderRange, format: MediaFormat) -> None:
    for position in range(place.offset, place.end):
        if prompt_ids[position] != format.token_id:
            raise _wrong(
                name,
                format,
                f"token {position} of its placeholder is {prompt_ids[position]}, not {format.token_id}, which stands "
                "for features",
            )


def _wrong(name: str, format: MediaFormat, reason: str) -> RequestError:
    return RequestError(400, f"{format.example.modality} {name[:80]}: {reason}")


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names))


# Media of requests as source files: the server processes them and puts their tokens into the prompt.


_MODALITIES: Final[Mapping[str, Modality]] = {"image_url": "image", "audio_url": "audio"}


class ExpandedPrompt(NamedTuple):
    """A prompt with the tokens of its media, and the media."""

    token_ids: list[int]
    media: MultiModalData


class SourceCache:
    """Source files of earlier requests by the names that clients gave them, at most `max_bytes` with the names."""

    def __init__(self, max_bytes: int) -> None:
        self._sources: ByteLRU[str, MediaSource] = ByteLRU(max_bytes)

    def clear(self) -> None:
        self._sources.clear()

    def source(self, url: str | None, name: str | None, processor: MediaProcessor) -> MediaSource:
        """The file at a URL, or with the given name where there is no URL.

        Raises `RequestError` (400) for one that is neither sent nor known, and `MediaError`.
        """
        if url is not None:
            part = {"type": processor.modality, processor.modality: url}
            source = load_source(part, processor.policy, processor.store)
            if name is not None:
                self._sources.put(name, source, source.nbytes + sys.getsizeof(name) + ENTRY_BYTES)
            return source
        known = None if name is None else self._sources.get(name)
        if known is None:
            what = f"{processor.modality} {str(name)[:80]}"
            raise RequestError(400, f"Cache miss for the {what}: send it with its data URL")
        return known


def named_sources(
    messages: Sequence[Mapping[str, Any]], renderer: TemplateRenderer, cache: SourceCache
) -> list[Mapping[str, Any]]:
    """Messages in which each image and sound with a `uuid` is its source, which is remembered under that name.

    Raises `RequestError` (400) for a part without a URL whose name is not known, and `MediaError`.
    """
    return [_with_sources(message, renderer, cache) for message in messages]


def _with_sources(message: Mapping[str, Any], renderer: TemplateRenderer, cache: SourceCache) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_with_source(part, renderer, cache) for part in content]}


def _with_source(part: Any, renderer: TemplateRenderer, cache: SourceCache) -> Any:
    modality = _MODALITIES.get(str(part.get("type"))) if isinstance(part, Mapping) else None
    processor = None if modality is None else renderer.processors.get(modality)
    if processor is None or part.get("uuid") is None:
        return part
    value = part.get(part["type"])
    url = value.get("url") if isinstance(value, Mapping) else value
    source = cache.source(None if url is None else str(url), str(part["uuid"]), processor)
    return {"type": processor.modality, processor.modality: source}


def expand_sources(
    logical_ids: Sequence[int], parts: Sequence[ContentPartBody], renderer: TemplateRenderer, cache: SourceCache
) -> ExpandedPrompt:
    """Process source files, and replace the marker of each in the prompt by its tokens.

    `logical_ids` has one marker for each part, the token that the chat template prints for an image or a sound. Raises
    `RequestError` (400).
    """
    remaining: dict[int, list[tuple[MediaProcessor, ContentPartBody]]] = {}  # by marker
    for part in parts:
        modality = _MODALITIES.get(part.type)
        processor = None if modality is None else renderer.processors.get(modality)
        if processor is None:
            raise RequestError(400, f"this model takes no content part of type {part.type[:80]!r}")
        marker = renderer.tokenizer.require_control_id(processor.marker, f"the {modality} processor")
        remaining.setdefault(marker, []).append((processor, part))
    for marker, listed in remaining.items():
        if (count := list(logical_ids).count(marker)) != len(listed):
            kind = listed[0][1].type
            raise RequestError(400, f"the prompt has {count} tokens {marker} for {len(listed)} content_parts of {kind}")
    ids: list[int] = []
    placed = []
    for token in logical_ids:
        if token not in remaining:
            ids.append(token)
            continue
        processor, part = remaining[token].pop(0)
        try:
            item = processor.process(cache.source(part.url, part.uuid, processor))
        except RendererError as error:
            raise RequestError(400, str(error)) from error
        tokens, placeholder = placed_tokens(item.pieces(processor.marker), len(ids), renderer.tokenizer)
        placed.append((item, placeholder))
        ids += tokens
    return ExpandedPrompt(ids, MultiModalData.from_items(placed))
