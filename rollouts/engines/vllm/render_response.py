"""The response of `/render`: token ids, and for each image, video or sound its placeholder and perhaps its tensors."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from renderers import PlaceholderRange
from renderers.placement import placement_error
from rollouts.engines.http.responses import reading
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
    ids = content.get("token_ids") if isinstance(content, dict) else None
    if not isinstance(ids, list) or not ids or any(type(token) is not int or token < 0 for token in ids):
        raise MalformedResultError(name, "/render answered without `token_ids`, a list of ints of at least 0")
    media = [] if content.get("features") is None else _media(content["features"], name)
    if (misplacement := placement_error((item.placeholder for item in media), len(ids))) is not None:
        wrong = media[misplacement.position]
        raise MalformedResultError(name, f"/render: {wrong.modality} {wrong.name[:40]} {misplacement.reason}")
    return RenderResponse(ids, media)


def _media(features: Any, name: str) -> list[RenderedMedia]:
    with reading(name, "/render answered with features of another shape"):
        names, ranges, data = features["mm_hashes"], features["mm_placeholders"], features.get("kwargs_data") or {}
        media = []
        for modality in names.keys() | ranges.keys():
            hashes, encoded = names[modality], data.get(modality)
            rows = zip(hashes, ranges[modality], [None] * len(hashes) if encoded is None else encoded, strict=True)
            for mm_hash, each, text in rows:
                media.append(RenderedMedia(modality, mm_hash, PlaceholderRange(each["offset"], each["length"]), text))
    for item in media:
        offset, length = item.placeholder.offset, item.placeholder.length
        is_placed = type(offset) is int and type(length) is int
        if not is_placed or not isinstance(item.name, str) or not isinstance(item.encoded, str | None):
            described = f"{item.modality} {item.name!r:.40} at {offset!r:.40}, {length!r:.40}"
            raise MalformedResultError(name, f"/render sent {described}; a hash and data are texts, a place two ints")
    return sorted(media, key=lambda item: item.placeholder.offset)


def single_token(token_ids: Sequence[int], placeholder: PlaceholderRange) -> int | None:
    """The token that fills a placeholder, or None if it holds different tokens."""
    tokens = set(token_ids[placeholder.offset : placeholder.end])
    return tokens.pop() if len(tokens) == 1 else None
