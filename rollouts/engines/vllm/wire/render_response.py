"""The response of `/render`: token ids, and for each image or video its placeholder and perhaps its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from renderers import PlaceholderRange
from renderers.placement import placement_error
from rollouts.errors import MalformedResultError


class RenderedMedia(NamedTuple):
    """An image or video in a rendered prompt. `encoded` is its `kwargs_data`, None where the server left it out."""

    modality: str
    name: str
    placeholder: PlaceholderRange
    encoded: str | None


class RenderResponse(NamedTuple):
    """A checked response: `media` are in prompt order, with ranges inside the prompt that do not overlap."""

    token_ids: list[int]
    media: list[RenderedMedia]


def parse_render_response(body: bytes, name: str) -> RenderResponse:
    """Decode and check the body of a response. Raises `MalformedResultError` for request `name`."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedResultError(name, f"/render answered with {len(body)} bytes that are not JSON") from error
    if not isinstance(content, dict):
        raise MalformedResultError(name, f"/render answered with a {type(content).__name__}, not an object")
    ids = content.get("token_ids")
    if not isinstance(ids, list) or not ids or any(type(token) is not int or token < 0 for token in ids):
        raise MalformedResultError(name, "/render answered without `token_ids`, a list of ints of at least 0")
    media = [] if content.get("features") is None else _media(content["features"], name)
    if (misplacement := placement_error((item.placeholder for item in media), len(ids))) is not None:
        wrong = media[misplacement.position]
        raise MalformedResultError(name, f"/render: {wrong.modality} {wrong.name[:40]} {misplacement.reason}")
    return RenderResponse(ids, media)


def _media(features: Any, name: str) -> list[RenderedMedia]:
    if not isinstance(features, dict):
        raise MalformedResultError(name, f"/render answered with features that are a {type(features).__name__}")
    names, ranges = features.get("mm_hashes"), features.get("mm_placeholders")
    data = features.get("kwargs_data") or {}
    if not isinstance(names, dict) or not isinstance(ranges, dict) or not isinstance(data, dict):
        raise MalformedResultError(name, "/render answered with features without mm_hashes and mm_placeholders")
    if names.keys() != ranges.keys():
        raise MalformedResultError(name, f"/render named {sorted(names)} and placed {sorted(ranges)}")
    media = [
        item
        for modality in names
        for item in _media_of_modality(modality, names[modality], ranges[modality], data.get(modality), name)
    ]
    return sorted(media, key=lambda item: item.placeholder.offset)


def _media_of_modality(modality: str, names: Any, ranges: Any, data: Any, name: str) -> list[RenderedMedia]:
    if not isinstance(names, list) or not isinstance(ranges, list):
        raise MalformedResultError(
            name, f"/render answered with mm_hashes or mm_placeholders of {modality} not in lists"
        )
    data = [None] * len(names) if data is None else data
    if not isinstance(data, list) or not len(names) == len(ranges) == len(data):
        raise MalformedResultError(
            name,
            f"/render sent {len(names)} hashes of {modality}, {len(ranges)} placeholders and data of another number",
        )
    return [
        _rendered_media(modality, mm_hash, placeholder, encoded, name)
        for mm_hash, placeholder, encoded in zip(names, ranges, data, strict=True)
    ]


def _rendered_media(modality: str, mm_hash: Any, placeholder: Any, encoded: Any, name: str) -> RenderedMedia:
    fields = placeholder if isinstance(placeholder, Mapping) else {}
    offset, length = fields.get("offset"), fields.get("length")
    if type(offset) is not int or type(length) is not int:
        raise MalformedResultError(
            name, f"/render sent the {modality} placeholder {placeholder!r:.80}, not an offset and a length"
        )
    if not isinstance(mm_hash, str) or not isinstance(encoded, str | None):
        raise MalformedResultError(name, f"/render sent a hash or data of {modality} that is no text")
    return RenderedMedia(modality, mm_hash, PlaceholderRange(offset, length), encoded)


def single_token(token_ids: Sequence[int], placeholder: PlaceholderRange) -> int | None:
    """The token that fills a placeholder, or None if it holds different tokens."""
    tokens = set(token_ids[placeholder.offset : placeholder.end])
    return tokens.pop() if len(tokens) == 1 else None
