"""Images of requests as source files: the server processes them and puts their tokens into the prompt."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from renderers import MediaItem, MediaSource, MultiModalData, PlaceholderRange, RendererError, TemplateRenderer
from renderers.byte_lru import ByteLRU
from renderers.media.item import ExpansionPiece
from renderers.media.reference import load_source
from renderers.vision.processor import MediaProcessor
from rollouts.serve.errors import RequestError
from rollouts.serve.generate_body import ContentPartBody
from rollouts.serve.image_features import ENTRY_BYTES


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
        tokens, runs = _expansion(item, marker, renderer)
        placed.append((item, PlaceholderRange(len(ids), len(tokens), runs)))
        ids += tokens
    return ExpandedPrompt(ids, MultiModalData.from_items(placed))


def _expansion(
    item: MediaItem, marker: int, renderer: TemplateRenderer
) -> tuple[list[int], tuple[tuple[int, int], ...] | None]:
    """The tokens of an item, and the runs of those that stand for features (None: all)."""
    if item.expansion is None:
        return [marker] * item.num_tokens, None
    ids: list[int] = []
    runs: list[tuple[int, int]] = []
    text = ""
    for piece in (*item.expansion, ExpansionPiece("")):
        control = renderer.tokenizer.control_id(piece.text)
        if control is None and piece.text:
            text += piece.text * piece.times
            continue
        # Text between two control tokens is encoded in one pass, as in a rendered prompt.
        ids += renderer.tokenizer.encode_run(text).ids if text else []
        text = ""
        if control is None:
            continue
        if piece.embed:
            runs.append((len(ids), len(ids) + piece.times))
        ids += [control] * piece.times
    return ids, tuple(runs)
