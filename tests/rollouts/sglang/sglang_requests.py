"""Requests for a scripted SGLang server."""

from __future__ import annotations

import io
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
