"""A scripted server for `/render`, and the images and messages that tests of `ServerRenderer` send to it."""

import asyncio
import base64
import io
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgpack
import numpy as np
from PIL import Image

from rollouts.engines.http.responses import HttpResponse

START, END, PAD = 500, 501, 502
SPECIAL = {"<|vision_start|>": START, "<|vision_end|>": END, "<|image_pad|>": PAD}
SPELLED = {number: text for text, number in SPECIAL.items()}


def picture(seed: int = 0, height: int = 32, width: int = 48) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def file_of(pixels: np.ndarray, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def user(*parts):
    return [{"role": "user", "content": [*parts]}]


def image(value):
    return {"type": "image", "image": value}


def text(value):
    return {"type": "text", "text": value}


@dataclass
class RenderingServer:
    """Answers as vLLM does: a token a character, 16x16 pixels an image token, tensors as in the wire notes.

    `cache`: "processor", which holds tensors and hands them out; "sender", which holds names alone and answers None for
    a name it knows; "silent", which never hands out tensors; "off", which finds nothing by name.
    """

    cache: str = "processor"
    version: str = "0.32.0"
    dtype: str = "uint8"
    takes_images: bool = True
    names: tuple[str, ...] = ("image_grid_thw", "pixel_values")
    status: int = 200
    shift: int = 0
    extra_length: int = 0
    names_ignored: bool = False
    before_answer: Callable[[dict], None] | None = None
    held: dict[str, Image.Image] = field(default_factory=dict)
    rendered: list[dict] = field(default_factory=list)
    files: list[bytes] = field(default_factory=list)
    base_url = "http://rendering.test"
    without_key = str

    async def request(self, method, path, *, name, body=None, params=None, headers=None, **_):
        if path == "/version":
            return self._reply({"version": self.version})
        if path == "/v1/models":
            return self._reply({"data": [{"id": "tiny", "root": "/models/tiny", "max_model_len": 4096}]})
        sent = json.loads(b"".join(bytes(segment) for segment in body))
        if path == "/detokenize":
            return self._reply({"prompt": "".join(SPELLED.get(one, chr(one)) for one in sent["tokens"])})
        assert path == "/v1/chat/completions/render"
        await asyncio.sleep(0)
        if self.before_answer is not None:
            self.before_answer(sent)
        if self.status != 200:
            return refusal("no", self.status)
        return self._render(sent)

    async def close(self):
        pass

    def images_rendered(self) -> Counter:
        """Names of images whose tensors were asked for, probes of ours aside."""
        asked: Counter = Counter()
        for sent in self.rendered:
            if sent.get("mm_payload") != "none":
                asked.update(name for name in _names(sent) if not name.startswith("render-probe"))
        return asked

    def _reply(self, answer, status=200):
        return HttpResponse(status, {}, json.dumps(answer).encode())

    def _render(self, sent):
        ids, names, ranges, data = [], [], [], []
        for message in sent["messages"]:
            ids += [ord(letter) for letter in message["role"]] + [10]
            content = message.get("content", "")
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                if part["type"] == "text":
                    ids += [ord(letter) for letter in part["text"]]
                    continue
                if part["type"] == "audio_url" or not self.takes_images:
                    return refusal("no images", 400)
                shown = self._shown(part)
                if shown is None:
                    return refusal("Cache miss", 400)
                pixels, known = shown
                count = tokens_of(pixels) + self.extra_length * (sent.get("mm_payload") == "none")
                ids.append(START)
                ranges.append({"offset": len(ids) + self.shift, "length": count})
                ids += [PAD] * count + [END]
                names.append("server's own" if self.names_ignored else part["uuid"])
                hidden = self.cache == "silent" or (known and self.cache == "sender")
                data.append(None if hidden else kwargs_of(pixels, self.dtype, self.names))
        if sent.get("add_generation_prompt"):
            ids += [ord(letter) for letter in "assistant:"]
        self.rendered.append(sent)
        features = None
        if names:
            sends = None if sent.get("mm_payload") == "none" else {"image": data}
            features = {"mm_hashes": {"image": names}, "mm_placeholders": {"image": ranges}, "kwargs_data": sends}
        return self._reply({"request_id": "chatcmpl-1", "token_ids": ids, "features": features})

    def _shown(self, part):
        name, url = part["uuid"], part["image_url"]
        known = name in self.held
        if url is None:
            return (self.held[name], True) if known else None
        kind, _, payload = url["url"].partition(";base64,")
        assert kind in ("data:image/png", "data:image/jpeg"), "the server would have to fetch or guess"
        self.files.append(base64.b64decode(payload))
        pixels = Image.open(io.BytesIO(self.files[-1]))
        if self.cache != "off":
            pixels = self.held.setdefault(name, pixels)  # as vLLM: what a name meant first, it means
        return pixels, known


def refusal(message, status):
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return HttpResponse(status, {}, json.dumps({"error": error}).encode())


def _names(sent):
    return [
        part["uuid"]
        for message in sent["messages"]
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]


def tokens_of(pixels: Image.Image) -> int:
    return -(-pixels.height // 16) * -(-pixels.width // 16)


def tensor(array, dtype):
    return [dtype, list(array.shape), msgpack.ExtType(3, array.tobytes())]


def kwargs_of(pixels: Image.Image, dtype: str, names) -> str:
    values = np.asarray(pixels.convert("RGB")).reshape(-1, 3)
    if dtype == "bfloat16":  # of the powers of two, whose bits need no rounding
        values = np.array([0x3F80, 0x4000, 0xC080], dtype=np.uint16).reshape(1, 3)
    rows = len(values)
    item = {
        "image_grid_thw": {
            "data": tensor(np.array([1, pixels.height, pixels.width]), "int64"),
            "field": ["batched", {"keep_on_cpu": True}],
        },
        "pixel_values": {
            "data": tensor(values, dtype),
            "field": ["flat", {"keep_on_cpu": False, "slices": [[[0, rows, None]]], "dim": 0}],
        },
    }
    return base64.b64encode(msgpack.packb({name: item[name] for name in names})).decode()


def letters(word: str) -> list[int]:
    return [ord(letter) for letter in word]
