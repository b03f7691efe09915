"""Chunks of a prompt for `ServerRenderer.render_chunks`: token ids, and images between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollouts.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, eq=False)
class TokenChunk:
    """Token ids that go into the prompt unchanged."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class ImageChunk:
    """An image: bytes of a file, a PIL image, a uint8 array (height, width[, 1, 3 or 4]), a data URL, or a URL or path.

    The `MediaPolicy` must allow a URL or path; this process fetches it, never the server. `expected_tokens`, if given,
    is the number of tokens that the image must take. Tokens around it (`<|vision_start|>`) belong into the neighbouring
    chunks.
    """

    image: Any
    expected_tokens: int | None = None


Chunk = TokenChunk | ImageChunk


def chunk_ids(chunk: TokenChunk, index: int) -> list[int]:
    ids = np.asarray(chunk.token_ids)
    if ids.size == 0:
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0:
        raise InvalidRequestError(f"chunk {index}", "token_ids must be a flat list of integers of at least 0")
    return [int(token) for token in ids]
