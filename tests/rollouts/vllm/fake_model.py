"""The model of `FakeVLLM`: each token is a function of the tokens before it, and images have zeros as pixels."""

import base64
import hashlib
import io
import struct
from collections.abc import Iterable, Sequence

import msgpack
from fake_http import Json
from PIL import Image

IMAGE_PAD, VISION_START, VISION_END = 397, 394, 395  # of the tiny Qwen3-VL
_WIDTHS = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}


def completion_of(prompt: Sequence[int], count: int, index: int = 0, stop: Iterable[int] = ()) -> list[int]:
    """The first `count` tokens of sample `index`, or up to and with a stop id. Samples differ in their first token."""
    ids: list[int] = []
    stops = set(stop)
    while len(ids) < count and (not ids or ids[-1] not in stops):
        before = [*prompt, *ids]
        ids.append((sum(before) * 31 + 7 * len(before) + (0 if ids else index)) % 384)
    return ids


def logprob_of(token_id: int) -> float:
    """A log-probability that is exact in every float format."""
    return -(1 + token_id % 16) / 8


def rendered(messages: Sequence[Json], pixel_dtype: str) -> Json:
    """The answer of `/render`: text is one token a character; an image is resized to a multiple of 32 pixels."""
    ids: list[int] = []
    hashes, places, data = [], [], []
    for message in messages:
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] != "image_url":
                ids += [ord(character) % 256 for character in part["text"]]
                continue
            file = base64.b64decode(part["image_url"]["url"].partition(",")[2])
            image = Image.open(io.BytesIO(file))
            grid = (1, max(2, round(image.height / 32) * 2), max(2, round(image.width / 32) * 2))
            hashes.append(hashlib.sha256(file).hexdigest())
            ids.append(VISION_START)
            places.append({"offset": len(ids), "length": grid[1] * grid[2] // 4})
            ids += [IMAGE_PAD] * places[-1]["length"] + [VISION_END]
            data.append(_encoded(grid, pixel_dtype))
    lists = (("mm_hashes", hashes), ("mm_placeholders", places), ("kwargs_data", data))
    features = {name: {"image": values} for name, values in lists} if hashes else None
    return {"request_id": "chatcmpl-fake", "token_ids": ids, "features": features}


def _encoded(grid: tuple[int, int, int], dtype: str) -> str:
    """An image of (t, h, w) patches of 16 pixels the way vLLM encodes it."""
    rows = grid[0] * grid[1] * grid[2]
    fields = {
        "image_grid_thw": {
            "data": ["int64", [3], msgpack.ExtType(3, struct.pack("<3q", *grid))],
            "field": ["batched", {"keep_on_cpu": True}],
        },
        "pixel_values": {
            "data": [dtype, [rows, 1536], msgpack.ExtType(3, bytes(rows * 1536 * _WIDTHS[dtype]))],
            "field": ["flat", {"keep_on_cpu": False, "slices": [[[0, rows, None]]], "dim": 0}],
        },
    }
    return base64.b64encode(msgpack.packb(fields)).decode()
