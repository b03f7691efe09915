"""Requests that would kill a server or that it would answer with garbage are not sent, and the server stays alive."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest

from renderers import MultiModalData, load_renderer
from renderers.media.item import MediaItem
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import CapabilityError, InvalidRequestError

_made = itertools.count(3_000_000)


@pytest.fixture
def valid_request(vllm_server):
    """A valid request with one image that no other test uses."""
    pixels = np.random.default_rng(next(_made)).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    message = {"role": "user", "content": [{"type": "image", "image": pixels}, {"type": "text", "text": "What is it?"}]}
    prompt = load_renderer(vllm_server.model_dir).render([message], add_generation_prompt=True)
    return GenerateRequest(prompt.token_ids, SamplingParams(max_tokens=4), prompt.multi_modal_data)


def with_range(request, *, offset=0, length=0):
    ((item, where),) = request.multi_modal_data.items_with_ranges()
    moved = replace(where, offset=where.offset + offset, length=where.length + length)
    return replace(request, multi_modal_data=MultiModalData.from_items([(item, moved)]))


def with_item(request, edit):
    ((item, where),) = request.multi_modal_data.items_with_ranges()
    changed: MediaItem = replace(item, tensors=edit(dict(item)), mm_hash=f"{item.mm_hash}-{next(_made)}")
    return replace(request, multi_modal_data=MultiModalData.from_items([(changed, where)]))


def with_extra_pad(request):
    ((_, where),) = request.multi_modal_data.items_with_ranges()
    ids = list(request.prompt_ids)
    ids.insert(where.end, ids[where.offset])
    return with_range(replace(request, prompt_ids=ids), length=1)


def grid_of(tensors, *sides):
    return tensors | {"image_grid_thw": np.array(sides, dtype=np.int64)}


KILLING = {
    "a range longer than the grid says": with_extra_pad,
    "a grid of more patches than there are rows": lambda r: with_item(r, lambda t: grid_of(t, 1, 16, 16)),
    "pixels missing": lambda r: with_item(r, lambda t: {"image_grid_thw": t["image_grid_thw"]}),
    "patches of another width": lambda r: with_item(r, lambda t: t | {"pixel_values": t["pixel_values"][:, :-1]}),
    "an empty item": lambda r: with_item(r, lambda t: {}),
}
SILENTLY_WRONG = {
    "a range one token short": lambda r: with_range(r, length=-1),
    "a range one token late": lambda r: with_range(r, offset=1),
    "placeholders without an image": lambda r: replace(r, multi_modal_data=None),
    "pixels normalised here": lambda r: with_item(
        r, lambda t: t | {"pixel_values": (t["pixel_values"] / 127.5 - 1).astype(np.float32)}
    ),
}


@pytest.mark.parametrize("name", [*KILLING, *SILENTLY_WRONG])
async def test_requests_that_would_kill_or_mislead_a_server_are_refused(vllm_server, valid_request, name):
    async with VLLMEngine(vllm_server.base_url, media="features") as engine:
        wrong = (KILLING | SILENTLY_WRONG)[name](valid_request)
        with pytest.raises((InvalidRequestError, CapabilityError)):
            await engine.generate(wrong)
        assert await asyncio.to_thread(vllm_server.is_healthy)
        result = await engine.generate(valid_request)  # the valid request succeeds
        assert len(result.completions[0].token_ids) > 0
