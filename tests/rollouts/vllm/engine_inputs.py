"""Requests with images for a `VLLMEngine` under test, and what `FakeVLLM` answers to them."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from fake_model import completion_of
from fake_responses import hold

from renderers import MediaItem, MediaSource, MultiModalData, PlaceholderRange
from renderers.media.item import PixelScale, TensorField
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.vllm import HttpLimits
from rollouts.engines.vllm.capabilities import ServerCapabilities

PAD = 397
FAST_RETRIES = HttpLimits(retries=3, backoff_seconds=0, longest_backoff_seconds=0)
#: The capabilities of a server that computes the pixels of a tiny Qwen3-VL.
SERVER = ServerCapabilities(
    version="0.32.0",
    model="tiny",
    max_model_len=100,
    scale_out=True,
    pixel_dtype="uint8",
    placeholder_ids={"image": PAD},
    merge_area=4,
    control=True,
    patch_values=1536,
)
FIELDS = {"pixel_values": TensorField("flat"), "image_grid_thw": TensorField("batched")}


@asynccontextmanager
async def connected(engine, server):
    """The engine once it has read the capabilities; the requests for them are removed from `server.requests`."""
    async with engine:
        await engine.capabilities()
        server.requests.clear()
        yield engine


def image(name="cat"):
    tensors = {"pixel_values": np.zeros((16, 1536), np.uint8), "image_grid_thw": np.array([1, 4, 4])}
    return MediaItem("image", name, MediaSource.of(name.encode()), tensors, 4, PixelScale(fused=True), FIELDS)


def request(*images, **more):
    ids, placed = [5, 6], []
    for item in images:
        ids.append(394)
        placed.append((item, PlaceholderRange(len(ids), item.num_tokens)))
        ids += [PAD] * item.num_tokens + [395]
    sampling = SamplingParams(**{"max_tokens": 6, "seed": 1, **more.pop("sampling", {})})
    media = MultiModalData.from_items(placed) if placed else None
    return GenerateRequest([*ids, 7], sampling, media, **more)


def capabilities_of(server):
    """What `ServerControl` asks an engine for."""

    async def capabilities():
        return ServerCapabilities("0.32.0", server.model, 4096, True, server.pixel_dtype, {}, 4, server.control)

    return capabilities


async def until(condition):
    """Wait for what can only be asked for."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def held(server, path, call, *, tokens_before=1):
    """The task of a call whose request the server holds, and the event that lets it answer."""
    release, arrived = asyncio.Event(), asyncio.Event()
    server.script[path] += [hold(release, arrived, tokens_before=tokens_before)]
    task = asyncio.ensure_future(call)
    await arrived.wait()
    return task, release


async def generate_one(engine, generate_request):
    (completion,) = (await engine.generate(generate_request)).completions
    return completion


def expected(generate_request, index=0):
    return completion_of(
        generate_request.prompt_ids,
        generate_request.sampling.max_tokens,
        index,
        generate_request.sampling.stop_token_ids,
    )


def write_adapter(directory: Path) -> Path:
    """A directory with the names of the files of an adapter."""
    directory.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (directory / name).touch()
    return directory
