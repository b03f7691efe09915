"""The endpoint of `FakeVLLM` that renders conversations."""

from __future__ import annotations

import base64
import hashlib
import io
from typing import ClassVar

from fake_http import Json, Response, Seen, error_response, json_response
from fake_model import encoded_image, image_grid
from PIL import Image

RENDER = "/v1/chat/completions/render"
IMAGE_PAD, VISION_START, VISION_END = 397, 394, 395  # of the tiny Qwen3-VL


class Rendering:
    """Renders for a `FakeVLLM`, whose attributes it uses."""

    ROUTES: ClassVar = {RENDER: ("POST", "_render")}

    async def _render(self, seen: Seen) -> Response:
        """Text is one token a character; an image is resized to a multiple of 32 pixels, its patches are zeros."""
        ids: list[int] = []
        images: list[Image.Image] = []
        places: list[Json] = []
        hashes: list[str] = []
        for message in seen.json["messages"]:
            content = message["content"]
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                if part["type"] == "audio_url":
                    message = "At most 0 audio(s) may be provided in one prompt. (parameter=audio)"
                    return error_response(400, message, "BadRequestError", "audio")
                if part["type"] != "image_url":
                    ids += [ord(character) % 256 for character in part["text"]]
                    continue
                data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                images.append(Image.open(io.BytesIO(data)))
                hashes.append(hashlib.sha256(data).hexdigest())
                grid = image_grid(images[-1])
                ids.append(VISION_START)
                places.append({"offset": len(ids), "length": grid[1] * grid[2] // 4})
                ids += [IMAGE_PAD] * places[-1]["length"] + [VISION_END]
        features = None
        if images:
            features = {
                "mm_hashes": {"image": hashes},
                "mm_placeholders": {"image": places},
                "kwargs_data": {"image": [encoded_image(image, self.pixel_dtype) for image in images]},
            }
        return json_response({"request_id": "chatcmpl-fake", "token_ids": ids, "features": features})
