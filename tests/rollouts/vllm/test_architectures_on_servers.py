"""Models of several architectures behind a server: what `VLLMEngine` gets is what the trainer computes."""

import asyncio

import numpy as np
import pytest
import torch
from engine_server import EngineVLLM
from family_rows import loaded_family
from server_thread import served

from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.vllm import VLLMEngine
from rollouts.training import TrainingBatch, TrainingSample, token_logprobs

#: Patches and grids; one size for all images; tiles with text between them; pixels of any height and width.
FAMILIES = ("qwen3_vl_moe", "gemma3", "idefics3", "pixtral")
MORE_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma4", "glm4v", "internvl", "llava_next", "mistral3", "smolvlm")

ALL_MODES = ("auto", "content_parts")
#: Text at the edges of an image of Gemma 3 merges with the text beside it, so that its file cannot be sent.
MODES = {"gemma3": ("auto",)}


def largest_difference(model, request, completions):
    """|log p of the server - log p of the trainer| over all completions of a request."""
    prompt = len(request.prompt_ids)
    samples = []
    for completion in completions:
        ids = np.array([*request.prompt_ids, *completion.token_ids], np.int32)
        zeros = np.zeros(len(ids), np.float32)
        samples.append(TrainingSample(ids, np.arange(len(ids)) >= prompt, zeros, zeros, tuple(request.media)))
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    with torch.no_grad():
        scored = token_logprobs(model, batch)[batch.loss_mask].numpy()
    return float(np.abs(scored - np.concatenate([each.logprobs for each in completions])).max())


def requests_of(family):
    """A prompt of text, one with an image, and one with two."""
    requests = []
    for seed, sizes in enumerate([(), ((32, 48),), ((40, 40), (24, 64))]):
        parts = [{"type": "image", "image": family.pixels(*size)} for size in sizes]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what"}]}]
        rendered = family.renderer.render(messages, add_generation_prompt=True)
        sampling = SamplingParams(max_tokens=10, n=2, seed=seed, extra={"ignore_eos": True})
        media, markers = rendered.multi_modal_data, rendered.placeholder_token_ids
        requests.append(GenerateRequest(rendered.token_ids, sampling, media, placeholder_token_ids=markers))
    return requests


async def served_results(server, requests, media="auto"):
    async with VLLMEngine(server.base_url, media=media) as engine:
        return await asyncio.gather(*(engine.generate(request) for request in requests))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_FAMILIES)])
async def test_images_of_many_layouts_reach_the_served_model_unchanged(name):
    family = loaded_family(name)
    requests = requests_of(family)
    with served(EngineVLLM(family.directory, model=family.model)) as server:
        by_mode = [await served_results(server, requests, media) for media in MODES.get(name, ALL_MODES)]
    for results in by_mode:
        for request, result in zip(requests, results, strict=True):
            assert [len(each.token_ids) for each in result.completions] == [10, 10]
            assert largest_difference(family.model, request, result.completions) < 1e-5
