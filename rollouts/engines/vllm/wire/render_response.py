"""What a server's `/render` answers: token ids, and for each medium its placeholder and perhaps its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from renderers import PlaceholderRange
from renderers.placement import placement_error
from rollouts.errors import MalformedResultError


class RenderedMedia(NamedTuple):
    """A medium in a rendered prompt. `encoded` is its `kwargs_data`, None where the server left it out."""

    modality: str
    name: str
    placeholder: PlaceholderRange
    encoded: str | None


class RenderResponse(NamedTuple):
    """`media` are in prompt order, their ranges apart from each other and inside the prompt."""

    token_ids: list[int]
    media: list[RenderedMedia]


def parse_render_response(body: bytes, name: str) -> RenderResponse:
    """Check an answer's shape. Raises `MalformedResultError` under `name`."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedResultError(name, f"/render answered with {len(body)} bytes that are not JSON") from error
    if not isinstance(answer, dict):
        raise MalformedResultError(name, f"/render answered with a {type(answer).__name__}, not an object")
    ids = answer.get("token_ids")
    if not isinstance(ids, list) or not ids or any(type(one) is not int or one < 0 for one in ids):
        raise MalformedResultError(name, "/render answered without `token_ids`, a list of numbers from 0 on")
    media = [] if answer.get("features") is None else _media(answer["features"], name)
    if (misplacement := placement_error((medium.placeholder for medium in media), len(ids))) is not None:
        medium = media[misplacement.position]
        raise MalformedResultError(name, f"/render: {medium.modality} {medium.name[:40]} {misplacement.reason}")
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
        medium
        for modality in names
        for medium in _of_modality(modality, names[modality], ranges[modality], data.get(modality), name)
    ]
    return sorted(media, key=lambda medium: medium.placeholder.offset)


def _of_modality(modality: str, names: Any, ranges: Any, data: Any, name: str) -> list[RenderedMedia]:
    if not isinstance(names, list) or not isinstance(ranges, list):
        raise MalformedResultError(name, f"/render answered with {modality}s that are no lists")
    data = [None] * len(names) if data is None else data
    if not isinstance(data, list) or not len(names) == len(ranges) == len(data):
        raise MalformedResultError(
            name, f"/render named {len(names)} {modality}s, placed {len(ranges)} and sent other data than those"
        )
    return [
        _medium(modality, each, where, encoded, name) for each, where, encoded in zip(names, ranges, data, strict=True)
    ]


def _medium(modality: str, hashed: Any, where: Any, encoded: Any, name: str) -> RenderedMedia:
    offset, length = (where.get("offset"), where.get("length")) if isinstance(where, Mapping) else (None, None)
    if type(offset) is not int or type(length) is not int:
        raise MalformedResultError(name, f"/render placed a {modality} at {where!r:.80}, not at an offset and a length")
    if not isinstance(hashed, str) or not isinstance(encoded, str | None):
        raise MalformedResultError(name, f"/render named or sent a {modality} as something other than text")
    return RenderedMedia(modality, hashed, PlaceholderRange(offset, length), encoded)


def single_token(token_ids: Sequence[int], medium: RenderedMedia) -> int | None:
    """The token that fills a placeholder, or None where it is not one and the same throughout."""
    filling = set(token_ids[medium.placeholder.offset : medium.placeholder.end])
    return filling.pop() if len(filling) == 1 else None
