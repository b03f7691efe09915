"""The likeliest tokens that `LocalEngine` reports against the logits of transformers' own forward."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from likeliest_tokens import all_logprobs, check_top
from transformers import AutoModelForImageTextToText

from rollouts import GenerateRequest, SamplingParams, TopLogprobs
from rollouts.engines.result_checks import check_result
from rollouts.errors import InvalidRequestError

LENGTH = 6
LONG = np.random.default_rng(1).integers(0, 250, 600).tolist()


@pytest.fixture(scope="module")
def reference(tiny_model_dir):
    return AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


def text(**options):
    sampling = {"max_tokens": LENGTH, "seed": 3, **options.pop("sampling", {})}
    return GenerateRequest([5, 6, 7], SamplingParams(**sampling), **options)


def with_image(prompt, **options):
    return replace(text(**options), prompt_ids=prompt.token_ids, multi_modal_data=prompt.multi_modal_data)


async def test_the_likeliest_tokens_of_texts_and_images_are_those_of_the_logits(engine, reference, prompt):
    requests = [
        text(sampling={"top_logprobs": 5, "n": 2, "temperature": 0.5, "top_k": 4}),
        replace(text(prompt_top_logprobs=2, prompt_logprobs=True), prompt_ids=LONG),
        with_image(prompt, prompt_top_logprobs=3, prompt_logprobs=True, sampling={"top_logprobs": 2}),
        text(sampling={"seed": 5}),
    ]
    results = await asyncio.gather(*map(engine.generate, requests))
    for request, result in zip(requests, results, strict=True):
        check_result(request, result, vocab_size=engine.vocab_size)
        count, k = len(request.prompt_ids), request.sampling.top_logprobs
        for completion in result.completions:
            expected = all_logprobs(reference, request, completion.token_ids)
            if k:
                check_top(completion.top_logprobs, expected[count - 1 :], k)
            else:
                assert completion.top_logprobs is None
        if k := request.prompt_top_logprobs:
            assert result.prompt_top_logprobs.token_ids[0].tolist() == [-1] * k
            assert np.isnan(result.prompt_top_logprobs.logprobs[0]).all()
            check_top(TopLogprobs(*(array[1:] for array in result.prompt_top_logprobs)), expected[: count - 1], k)
        else:
            assert result.prompt_top_logprobs is None
        assert (result.prompt_logprobs is None) == (not request.prompt_logprobs)
        if request.prompt_logprobs:
            of_ids = expected[: count - 1].gather(1, torch.tensor(request.prompt_ids)[1:, None].long())[:, 0]
            np.testing.assert_allclose(result.prompt_logprobs[1:], of_ids, atol=1e-4)


async def test_a_stream_has_the_likeliest_tokens_of_the_result(engine):
    deltas = {0: [], 1: []}
    asked = text(sampling={"top_logprobs": 3, "n": 2})
    result = await engine.generate(asked, lambda delta: deltas[delta.index].append(delta.top_logprobs))
    for completion in result.completions:
        for column, whole in zip(zip(*deltas[completion.index], strict=True), completion.top_logprobs, strict=True):
            np.testing.assert_array_equal(np.concatenate(column), whole)
    with pytest.raises(InvalidRequestError, match="a stream cannot return prompt_top_logprobs; use generate"):
        await engine.generate(replace(asked, prompt_top_logprobs=1), print)


async def test_a_vocabulary_with_fewer_tokens_than_are_requested_is_named(engine):
    size = engine.vocab_size
    for asked in (text(sampling={"top_logprobs": size + 1}), text(prompt_top_logprobs=size + 1)):
        with pytest.raises(InvalidRequestError, match=f"{size + 1} likeliest tokens .* vocabulary has {size}"):
            await engine.generate(asked)
    (completion,) = (await engine.generate(text(sampling={"top_logprobs": size, "max_tokens": 1}))).completions
    assert sorted(completion.top_logprobs.token_ids[0].tolist()) == list(range(size))
    assert np.exp(completion.top_logprobs.logprobs[0].astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
