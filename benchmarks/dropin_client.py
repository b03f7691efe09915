"""One side of `benchmarks/dropin.py`: episodes as a client of verifiers plays them, with either `renderers`.

Runs in an environment with PyPI's `renderers` or with this project, so it imports nothing but that package and openai.
Prints CPU seconds and turns as JSON. Arguments: base URL, model, `text` or `image`, turns, episodes.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import struct
import sys
import time
import zlib

from openai import AsyncOpenAI

from renderers import create_renderer
from renderers.base import load_tokenizer
from renderers.client import generate
from renderers.configs import AutoRendererConfig

_WORDS = ["the", "screen", "shows", "a", "list", "of", "files", "opened", "by", "last", "click", "agent"]


def noise_url(seed: int, side: int = 336) -> str:
    """A PNG of random pixels, which does not compress: about 340 kB."""
    rows = b"".join(b"\0" + random.Random(seed * side + row).randbytes(3 * side) for row in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for name, body in ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b"")):
        data += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def observation(episode: int, turn: int, kind: str) -> dict:
    words = random.Random(1000 * episode + turn)
    text = f"Turn {turn}: " + " ".join(words.choices(_WORDS, k=60))
    if kind == "text":
        return {"role": "user", "content": text}
    url = noise_url(1000 * episode + turn)
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


async def play(client: AsyncOpenAI, renderer: object, model: str, observations: list, whole: bool) -> None:
    messages: list[dict] = []
    previous = None
    options = {} if whole else {"process_multimodal": False}
    for observed in observations:
        messages.append(observed)
        prompt = None
        if previous is not None:
            prompt = await asyncio.to_thread(renderer.bridge_to_next_turn, *previous, [observed], **options)
        if prompt is None:
            prompt = await asyncio.to_thread(renderer.render, messages, add_generation_prompt=True, **options)
        result = await generate(
            client=client, renderer=renderer, messages=messages, model=model, prompt_ids=prompt.token_ids,
            prompt_attribution=prompt, sampling_params={"max_tokens": 64}, process_multimodal=whole,
        )  # fmt: skip
        assert len(prompt.is_content) == len(prompt.token_ids)
        previous = list(prompt.token_ids), result["completion_ids"]
        messages.append({"role": "assistant", "content": result["content"]})


async def main() -> None:
    base_url, model, kind, turns, episodes = sys.argv[1:]
    made = [[observation(e, t, kind) for t in range(int(turns))] for e in range(int(episodes) + 1)]
    renderer = create_renderer(load_tokenizer(model), AutoRendererConfig())
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none") as client:
        await play(client, renderer, model, made[0], kind == "text")  # warms up caches and imports
        await client.get("/count", cast_to=dict)  # the server counts from here on
        started = time.process_time()
        for observations in made[1:]:
            await play(client, renderer, model, observations, kind == "text")
        print(json.dumps({"seconds": time.process_time() - started, "turns": int(turns) * int(episodes)}))


if __name__ == "__main__":
    asyncio.run(main())
