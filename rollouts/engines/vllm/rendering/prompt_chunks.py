"""The pieces of a prompt that a caller assembles: token ids, images, and references to images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class TokenChunk:
    """Token ids that go into the prompt unchanged."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class ImageChunk:
    """An image: bytes of a file, a PIL image, a uint8 array (height, width[, 1, 3 or 4]) or a data URL.

    `expected_tokens`, if given, is the number of tokens that it must take. Tokens around it (`<|vision_start|>`) belong
    into the neighbouring chunks.
    """

    image: Any
    expected_tokens: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ImagePointer:
    """An image at a URL or path that the `MediaPolicy` must allow; this process fetches it, never the server."""

    location: str | os.PathLike[str]
    expected_tokens: int | None = None


Chunk = TokenChunk | ImageChunk | ImagePointer
