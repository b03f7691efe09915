"""The likeliest tokens that a real server reports against the logits of transformers, across pauses and new weights."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from likeliest_tokens import all_logprobs, check_top
from transformers import AutoModelForImageTextToText

from rollouts import GenerateRequest, SamplingParams, TopLogprobs
from rollouts.errors import InvalidRequestError

K = 5
LONG = 2000


def request(renderer, image=True, **options):
    parts = [{"type": "text", "text": "What is it?"}]
    if image:
        parts.insert(0, {"type": "image", "image": np.random.default_rng(3).integers(0, 256, (64, 96, 3), np.uint8)})
    rendered = renderer.render([{"role": "user", "content": parts}], add_generation_prompt=True)
    sampling = {"max_tokens": 12, "seed": 5, "top_logprobs": K, **options.pop("sampling", {})}
    return GenerateRequest(rendered.token_ids, SamplingParams(**sampling), rendered.multi_modal_data, **options)


def model_of(directory):
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("image", [False, True])
async def test_the_likeliest_tokens_of_texts_and_images_are_those_of_the_logits(engine, renderer, vllm_server, image):
    asked = request(renderer, image, prompt_top_logprobs=3, sampling={"n": 2})
    result = await engine.generate(asked)
    deltas = []
    streamed = await engine.generate(replace(asked, prompt_top_logprobs=0), deltas.append)
    count = len(asked.prompt_ids)
    for completion in (*result.completions, *streamed.completions):
        expected = all_logprobs(model_of(vllm_server.model_dir), asked, completion.token_ids)
        check_top(completion.top_logprobs, expected[count - 1 :], K)
    assert np.isnan(result.prompt_top_logprobs.logprobs[0]).all()
    check_top(TopLogprobs(*(column[1:] for column in result.prompt_top_logprobs)), expected[: count - 1], 3)
    for completion in streamed.completions:
        parts = [each.top_logprobs.logprobs for each in deltas if each.index == completion.index]
        np.testing.assert_array_equal(np.concatenate(parts), completion.top_logprobs.logprobs)


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_the_likeliest_tokens_across_a_pause_and_new_weights_are_those_of_the_weights_of_each_token(
    engine, renderer, vllm_server, other, restored, mode
):
    asked = request(renderer, sampling={"max_tokens": LONG, "temperature": 0.0, "extra": {"ignore_eos": True}})
    begun = asyncio.Event()
    running = asyncio.ensure_future(engine.generate(asked, lambda delta: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    await engine.update_weights(other, f"new-{mode}", in_flight=mode)
    (completion,) = (await running).completions
    *_, last = completion.weight_spans
    assert (last.version, last.end) == (f"new-{mode}", LONG)
    assert completion.top_logprobs.token_ids.shape == (LONG, K)
    count = len(asked.prompt_ids)
    by_weights = [(vllm_server.model_dir, slice(0, last.start))]
    if mode == "abort":  # with "keep" the new weights read the cache of the old ones
        by_weights.append((other, slice(last.start, None)))
    for directory, rows in by_weights:
        expected = all_logprobs(model_of(directory), asked, completion.token_ids)[count - 1 :][rows]
        check_top(TopLogprobs(*(column[rows] for column in completion.top_logprobs)), expected, K)


async def test_as_many_likeliest_tokens_as_this_version_cannot_show_are_an_error_with_the_cure(engine, renderer):
    (completion,) = (await engine.generate(request(renderer, sampling={"top_logprobs": 19}))).completions
    assert completion.top_logprobs.token_ids.shape == (12, 19)
    with pytest.raises(InvalidRequestError, match="--max-logprobs 21"):
        await engine.generate(request(renderer, sampling={"top_logprobs": 20}))
    result = await engine.generate(request(renderer, prompt_top_logprobs=20, sampling={"top_logprobs": 0}))
    assert result.prompt_top_logprobs.token_ids.shape[1] == 20
