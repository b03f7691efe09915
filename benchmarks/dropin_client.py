"""One side of `benchmarks/dropin.py`: episodes as a client of verifiers plays them, with either `renderers`.

Runs in an environment with PyPI's `renderers` or with this project, so it imports nothing but that package and openai.
Prints the CPU seconds of a later turn, for each episode, as a JSON list. Arguments: base URL, model, images, turns,
episodes, and `play` or `post`. The first message of an episode shows the images; the turns behind it, which are
measured, have them in their history. `post` measures what no renderer can avoid: the consumer's hop to a thread, and
its openai client that posts the ids of each prompt, which were rendered before.
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

import httpx
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


def observation(episode: int, turn: int, images: int) -> dict:
    words = random.Random(1000 * episode + turn)
    text = f"Turn {turn}: " + " ".join(words.choices(_WORDS, k=60))
    if turn or not images:
        return {"role": "user", "content": text}
    parts = [{"type": "image_url", "image_url": {"url": noise_url(1000 * episode + n)}} for n in range(images)]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


async def play(client: AsyncOpenAI, renderer: object, model: str, observations: list, images: int) -> float:
    """The CPU seconds of all turns but the first."""
    messages: list[dict] = []
    previous = None
    options = {"process_multimodal": False} if images else {}
    started = 0.0
    for turn, observed in enumerate(observations):
        if turn == 1:
            started = time.process_time()
        messages.append(observed)
        prompt = None
        if previous is not None:
            prompt = await asyncio.to_thread(renderer.bridge_to_next_turn, *previous, [observed], **options)
        if prompt is None:
            prompt = await asyncio.to_thread(renderer.render, messages, add_generation_prompt=True, **options)
        result = await generate(
            client=client,
            renderer=renderer,
            messages=messages,
            model=model,
            prompt_ids=prompt.token_ids,
            prompt_attribution=prompt,
            sampling_params={"max_tokens": 64},
            extra_headers={"X-Turn": str(turn)},
            **options,
        )
        assert len(prompt.is_content) == len(prompt.token_ids)
        previous = list(prompt.token_ids), result["completion_ids"]
        messages.append({"role": "assistant", "content": result["content"]})
    return time.process_time() - started


async def post(client: AsyncOpenAI, renderer: object, model: str, observations: list, images: int) -> float:
    """The CPU seconds of all turns but the first if rendering, parsing and images cost nothing."""
    messages: list[dict] = []
    bodies = []
    options = {"process_multimodal": False} if images else {}
    for observed in observations:
        messages.append(observed)
        rendered = renderer.render(messages, add_generation_prompt=True, **options)
        sampling = {"skip_special_tokens": False, "max_tokens": 64, "stop_token_ids": [0], "logprobs": 1}
        bodies.append({"model": model, "token_ids": list(rendered.token_ids), "sampling_params": sampling})
        messages.append({"role": "assistant", "content": "Done."})
    endpoint = str(client.base_url).removesuffix("/v1/") + "/inference/v1/generate"
    started = time.process_time()
    for turn, body in enumerate(bodies[1:], 1):
        await asyncio.to_thread(len, body)
        await client.post(endpoint, cast_to=httpx.Response, body=body, options={"headers": {"X-Turn": str(turn)}})
    return time.process_time() - started


async def main() -> None:
    base_url, model, images, turns, episodes = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    run = {"play": play, "post": post}[sys.argv[6]]
    renderer = create_renderer(load_tokenizer(model), AutoRendererConfig())
    seconds = []
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none") as client:
        for episode in range(episodes + 1):
            observations = [observation(episode, turn, images) for turn in range(turns)]
            seconds.append(await run(client, renderer, model, observations, images))
            if not episode:  # it has warmed up caches and imports
                await client.get("/count", cast_to=dict[str, object])
    print(json.dumps([episode / (turns - 1) for episode in seconds[1:]]))


if __name__ == "__main__":
    asyncio.run(main())
