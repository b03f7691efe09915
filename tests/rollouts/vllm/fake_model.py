"""The model of `FakeVLLM`: each token is a function of the tokens before it, and images have zeros as pixels."""

from __future__ import annotations

import binascii
import struct
from collections.abc import Iterable, Sequence

import msgpack
from fake_http import Json
from PIL import Image


def next_token(before: Sequence[int], index: int = 0, *, first: bool = True) -> int:
    """The id that follows `before`. Sample `index` differs from sample 0 in its first token (and so in all others)."""
    return (sum(before) * 31 + 7 * len(before) + (index if first else 0)) % 384


def logprob_of(token_id: int) -> float:
    """A log-probability that is exact in every float format."""
    return -(1 + token_id % 16) / 8


def completion_of(prompt: Sequence[int], count: int, index: int = 0, stop: Iterable[int] = ()) -> list[int]:
    """The first `count` tokens of sample `index`, or up to and with a stop id."""
    ids: list[int] = []
    stops = set(stop)
    while len(ids) < count and (not ids or ids[-1] not in stops):
        ids.append(next_token([*prompt, *ids], index, first=not ids))
    return ids


def prompt_logprobs(prompt: Sequence[int]) -> Json:
    entries = [{str(each): {"logprob": logprob_of(each), "rank": 1, "decoded_token": None}} for each in prompt]
    return [None, *entries[1:]]


def image_grid(image: Image.Image) -> tuple[int, int, int]:
    """(t, h, w) in patches of 16 pixels, sides rounded to whole merged patches."""
    return (1, max(2, round(image.height / 32) * 2), max(2, round(image.width / 32) * 2))


def encoded_image(image: Image.Image, dtype: str) -> str:
    """One image the way vLLM encodes it."""
    grid = image_grid(image)
    rows = grid[0] * grid[1] * grid[2]
    width = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}[dtype]
    fields = {
        "image_grid_thw": {
            "data": ["int64", [3], msgpack.ExtType(3, struct.pack("<3q", *grid))],
            "field": ["batched", {"keep_on_cpu": True}],
        },
        "pixel_values": {
            "data": [dtype, [rows, 1536], msgpack.ExtType(3, bytes(rows * 1536 * width))],
            "field": ["flat", {"keep_on_cpu": False, "slices": [[[0, rows, None]]], "dim": 0}],
        },
    }
    return binascii.b2a_base64(msgpack.packb(fields), newline=False).decode()
