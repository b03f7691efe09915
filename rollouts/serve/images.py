"""Images of requests: as features, and as sources."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt, prod
from typing import Any, Final, NamedTuple

import numpy as np

from renderers import MediaItem, MediaSource, MultiModalData, PlaceholderRange, RendererError, TemplateRenderer
from renderers.expansion import placed_tokens
from renderers.media.item import TensorField
from renderers.media.reference import load_source
from renderers.process.caches import ByteLRU
from renderers.vision.processor import MediaProcessor
from rollouts.engines.vllm.features import FLOATS, DecodedTensor, decode_item, tensor_type
from rollouts.errors import MalformedResultError
from rollouts.serve.errors import INTERNAL_ERROR, RequestError
from rollouts.serve.generate_body import ContentPartBody, FeaturesBody
from rollouts.serve.served_model import ImageFormat, ServedModel

#: What an entry of a cache takes besides its name and its arrays.
ENTRY_BYTES: Final = 1000


class ImageCache:
    """The images of earlier requests by the names that clients gave them, at most `max_bytes` of tensors and names.

    `queries` and `hits` count the images of requests, and those that were found by name.
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
    features: FeaturesBody, prompt_ids: Sequence[int], model: ServedModel, cache: ImageCache
) -> MultiModalData:
    """The images of a request, from its tensors or from the cache.

    Raises `RequestError`: 400 for images that the model cannot take, and 500, as vLLM does, for a name that the cache
    does not hold. (vLLM takes many wrong images, and dies of some; see docs/serve.md.)
    """
    placed = []
    for modality, names in features.mm_hashes.items():
        if modality != "image" or model.images is None:
            raise RequestError(400, f"{model.name} takes no {modality} as features")
        data = (features.kwargs_data or {}).get(modality) or [None] * len(names)
        ranges = features.mm_placeholders[modality]
        for name, encoded, placeholder in zip(names, data, ranges, strict=True):
            place = PlaceholderRange(placeholder.offset, placeholder.length)
            item = _item(name, encoded, place, model.images, cache)
            _check_tokens(name, prompt_ids, place, model.images)
            placed.append((item, place))
    return MultiModalData.from_items(sorted(placed, key=lambda pair: pair[1].offset))


def _item(name: str, encoded: str | None, place: PlaceholderRange, images: ImageFormat, cache: ImageCache) -> MediaItem:
    cached = cache.get(name)
    if encoded is None:
        if cached is None:
            raise RequestError(500, INTERNAL_ERROR)
        _check_length(name, cached, place, images)
        return replace(cached, num_tokens=place.length)
    try:
        tensors = decode_item(encoded, name=name)
    except MalformedResultError as error:
        raise RequestError(400, f"image {name[:80]}: {error.reason}") from error
    _check_tensors(name, tensors, images)
    item = _made_item(tensors, place, images)
    _check_length(name, item, place, images)
    if cached is not None and cached.mm_hash != item.mm_hash:
        raise RequestError(
            400,
            f"the image {name[:80]} has other pixels than the image that was sent under this name before; a name must "
            "identify the pixels",
        )
    cache.put(name, item)
    return item


def _made_item(tensors: Mapping[str, DecodedTensor], place: PlaceholderRange, images: ImageFormat) -> MediaItem:
    """The item of decoded tensors. Its hash is that of the tensors, whatever name the client gave it."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].tensor
        array = tensor if isinstance(tensor, np.ndarray) else tensor.unpack()
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    pads = {name: each.pad for name, each in images.fields.items()}
    return MediaItem(
        "image",
        digest.hexdigest(),
        MediaSource(digest.hexdigest(), b""),  # the source stays with the client
        {name: each.tensor for name, each in tensors.items()},
        place.length,
        images.example.scale if images.pixel_dtype == "uint8" else None,
        {name: TensorField(each.field.kind, pads.get(name)) for name, each in tensors.items()},
    )


def _check_tensors(name: str, tensors: Mapping[str, DecodedTensor], images: ImageFormat) -> None:
    """Raise `RequestError` unless names, dtypes and row sizes of the tensors are those of the server's own images."""
    if tensors.keys() != images.fields.keys():
        raise _wrong(name, f"it has the tensors {_listed(tensors)}, this model takes {_listed(images.fields)}")
    for key, each in tensors.items():
        own = tensor_type(images.example.tensors[key])
        dtype, shape = tensor_type(each.tensor)
        if len(shape) != len(own.shape) or (len(shape) == 2 and shape[1] != own.shape[1]):
            raise _wrong(name, f"{key} has the shape {shape}; the server's own of a small image has {own.shape}")
        if not key.startswith("pixel_values"):
            continue
        takes = {"uint8"} if images.pixel_dtype == "uint8" else FLOATS
        if dtype not in takes:
            kind = "before rescaling and normalisation" if images.pixel_dtype == "uint8" else "normalised"
            raise _wrong(name, f"{key} is {dtype}, and this server takes {images.pixel_dtype} pixels, {kind}")


def _check_length(name: str, item: MediaItem, place: PlaceholderRange, images: ImageFormat) -> None:
    """Raise `RequestError` unless the placeholder has as many tokens as the image has rows of features."""
    example = images.example
    if "image_grid_thw" in example.tensors:
        rows, grid = len(item["pixel_values"]), item["image_grid_thw"].tolist()
        # Patches of as many rows and columns are merged into one feature. Python's integers do not wrap around.
        merged = isqrt(len(example["pixel_values"]) // images.example_features)
        is_grid = item["image_grid_thw"].dtype.kind in "iu" and min(grid) > 0 and not any(n % merged for n in grid[1:])
        if not is_grid or prod(grid) != rows:
            raise _wrong(name, f"pixel_values has {rows} rows, and image_grid_thw is {grid}")
        expected = rows * images.example_features / len(example["pixel_values"])
    elif all(_is_like(key, item[key], example[key]) for key in example):
        expected = images.example_features
    else:
        return  # the model itself compares them
    if place.length != expected:
        raise _wrong(name, f"its placeholder has {place.length} tokens, and its tensors make {expected:g} features")


def _is_like(key: str, array: np.ndarray, other: np.ndarray) -> bool:
    """Whether two tensors are equal, or pixels of the same shape: then equally many features are made of them."""
    return array.shape == other.shape and (key.startswith("pixel_values") or np.array_equal(array, other))


def _check_tokens(name: str, prompt_ids: Sequence[int], place: PlaceholderRange, images: ImageFormat) -> None:
    for position in range(place.offset, place.end):
        if prompt_ids[position] != images.token_id:
            raise _wrong(
                name,
                f"token {position} of its placeholder is {prompt_ids[position]}, not {images.token_id}, which stands "
                "for features",
            )


def _wrong(name: str, reason: str) -> RequestError:
    return RequestError(400, f"image {name[:80]}: {reason}")


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names))


# Images of requests as source files: the server processes them and puts their tokens into the prompt.


class ExpandedPrompt(NamedTuple):
    """A prompt with the tokens of its images, and the images."""

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
            source = load_source({"type": "image_url", "image_url": {"url": url}}, processor.policy, processor.store)
            if name is not None:
                self._sources.put(name, source, source.nbytes + sys.getsizeof(name) + ENTRY_BYTES)
            return source
        known = None if name is None else self._sources.get(name)
        if known is None:
            raise RequestError(400, f"Cache miss for the image {str(name)[:80]}: send it with its data URL")
        return known


def named_sources(
    messages: Sequence[Mapping[str, Any]], renderer: TemplateRenderer, cache: SourceCache
) -> list[Mapping[str, Any]]:
    """Messages in which each image with a `uuid` is its source, which is remembered under that name.

    Raises `RequestError` (400) for a part without a URL whose name is not known, and `MediaError`.
    """
    processor = renderer.processors.get("image")
    if processor is None:
        return list(messages)
    return [_with_sources(message, processor, cache) for message in messages]


def _with_sources(message: Mapping[str, Any], processor: MediaProcessor, cache: SourceCache) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "image", "image": cache.source(_url(part), str(part["uuid"]), processor)}
        if isinstance(part, Mapping) and part.get("type") == "image_url" and part.get("uuid") is not None
        else part
        for part in content
    ]
    return {**message, "content": parts}


def _url(part: Mapping[str, Any]) -> str | None:
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    return None if url is None else str(url)


def expand_sources(
    logical_ids: Sequence[int], parts: Sequence[ContentPartBody], renderer: TemplateRenderer, cache: SourceCache
) -> ExpandedPrompt:
    """Process source files, and replace the marker of each in the prompt by its tokens.

    `logical_ids` has one marker for each part, the token that the chat template prints for an image. Raises
    `RequestError` (400).
    """
    processor = renderer.processors.get("image")
    if processor is None or any(part.type != "image_url" for part in parts):
        wrong = next((part.type for part in parts if part.type != "image_url"), "image_url")
        raise RequestError(400, f"this model takes no content part of type {wrong[:80]!r}")
    marker = renderer.tokenizer.require_control_id(processor.marker, "the image processor")
    if (count := list(logical_ids).count(marker)) != len(parts):
        raise RequestError(400, f"the prompt has {count} tokens {marker} for {len(parts)} content_parts")
    try:
        items = [processor.process(cache.source(part.url, part.uuid, processor)) for part in parts]
    except RendererError as error:
        raise RequestError(400, str(error)) from error
    remaining = iter(items)
    ids: list[int] = []
    placed = []
    for token in logical_ids:
        if token != marker:
            ids.append(token)
            continue
        item = next(remaining)
        tokens, placeholder = placed_tokens(item.pieces(processor.marker), len(ids), renderer.tokenizer)
        placed.append((item, placeholder))
        ids += tokens
    return ExpandedPrompt(ids, MultiModalData.from_items(placed))
