"""Requests for a scripted SGLang server."""

import io
from collections.abc import Callable
from typing import Any

from fake_sglang import IMAGE_TOKEN, TOKENS_OF_AN_IMAGE
from PIL import Image

from renderers import MediaItem, MediaSource, MultiModalData, PlaceholderRange
from rollouts import GenerateRequest, SamplingParams


def image(shade: int, modality: str = "image") -> MediaItem:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(file, "PNG")
    return MediaItem(modality, f"image-{shade}", MediaSource.of(file.getvalue()), {}, TOKENS_OF_AN_IMAGE, None)


def request_of(*images: MediaItem, **options: Any) -> GenerateRequest:
    ids, placed = [5, 6], []
    for item in images:
        placed.append((item, PlaceholderRange(len(ids), TOKENS_OF_AN_IMAGE)))
        ids += [IMAGE_TOKEN] * TOKENS_OF_AN_IMAGE + [7]
    media = MultiModalData.from_items(placed) if placed else None
    sampling = options.pop("sampling", SamplingParams(max_tokens=3))
    options.setdefault("placeholder_token_ids", {"image": IMAGE_TOKEN})
    return GenerateRequest(options.pop("prompt_ids", ids), sampling, media, **options)


Spoil = Callable[[dict[str, Any]], None]


def without(*path: Any) -> Spoil:
    """A change of an answer: without the member at a path."""

    def spoil(answer: dict[str, Any]) -> None:
        *parents, last = path
        for name in parents:
            answer = answer[name]
        del answer[last]

    return spoil


def with_value(value: Any, *path: Any) -> Spoil:
    """A change of an answer: with another value at a path."""

    def spoil(answer: dict[str, Any]) -> None:
        *parents, last = path
        for name in parents:
            answer = answer[name]
        answer[last] = value

    return spoil
