"""`VLLMEngine` against `rollouts serve` over HTTP: the same requests as to a vLLM server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from renderers import TemplateRenderer
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.local import LocalEngine
from rollouts.engines.protocol import FinishReason
from rollouts.engines.vllm import VLLMEngine
from rollouts.serve.app import create_app
from rollouts.serve.pausable_engine import PausableEngine
from rollouts.serve.served_model import served_model

TEXT = [{"role": "user", "content": "Say something."}]


def image_messages(*seeds: int):
    images = [np.random.default_rng(seed).integers(0, 256, (64 + 32 * seed, 96, 3), dtype=np.uint8) for seed in seeds]
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def request_of(renderer: TemplateRenderer, messages, **sampling) -> GenerateRequest:
    rendered = renderer.render(messages, add_generation_prompt=True)
    params = SamplingParams(**{"max_tokens": 12, "temperature": 1.0, "seed": 7, **sampling})
    return GenerateRequest(
        rendered.token_ids,
        params,
        rendered.multi_modal_data,
        placeholder_token_ids=rendered.placeholder_token_ids,
    )


@pytest.fixture(scope="module")
def local_engine(tiny_model_dir: Path) -> LocalEngine:
    return LocalEngine.from_pretrained(tiny_model_dir)


@pytest.mark.parametrize("messages", [TEXT, image_messages(0), image_messages(1, 2)], ids=["text", "image", "images"])
@pytest.mark.parametrize("media", ["features", "content_parts"])
async def test_a_served_engine_samples_what_the_engine_itself_samples(
    tiny_server, local_engine, renderer, messages, media
):
    request = request_of(renderer, messages, n=2)
    expected = await local_engine.generate(request)
    async with VLLMEngine(tiny_server.base_url, media=media) as engine:
        for _ in range(2):  # the second time, images are named only
            result = await engine.generate(replace(request, request_id="again"))
            for served, own in zip(result.completions, expected.completions, strict=True):
                np.testing.assert_array_equal(served.token_ids, own.token_ids)
                np.testing.assert_allclose(served.logprobs, own.logprobs, atol=1e-5)
                assert served.finish_reason is own.finish_reason


@pytest.mark.parametrize("k", [1, 20])
async def test_a_served_engine_reports_the_likeliest_tokens_of_the_engine_itself(
    tiny_server, local_engine, renderer, k
):
    request = replace(request_of(renderer, image_messages(0), n=2, top_logprobs=k), prompt_top_logprobs=k)
    expected = await local_engine.generate(request)
    deltas = []
    async with VLLMEngine(tiny_server.base_url) as engine:
        result = await engine.generate(request)
        streamed = await engine.generate_streamed(replace(request, prompt_top_logprobs=0), deltas.append)
    pairs = [
        (each.top_logprobs, expected.completions[each.index].top_logprobs)
        for each in (*result.completions, *streamed.completions)
    ]
    for served, own in (*pairs, (result.prompt_top_logprobs, expected.prompt_top_logprobs)):
        np.testing.assert_allclose(served.logprobs, own.logprobs, atol=1e-5)
        assert (served.token_ids == own.token_ids).mean() > 0.95, "but for ties"
    for completion in streamed.completions:
        rows = [each.top_logprobs.token_ids for each in deltas if each.index == completion.index]
        np.testing.assert_array_equal(np.concatenate(rows), completion.top_logprobs.token_ids)


async def test_a_stop_token_of_the_request_ends_a_completion_and_is_named(tiny_server, renderer):
    async with VLLMEngine(tiny_server.base_url) as engine:
        whole = (await engine.generate(request_of(renderer, TEXT))).completions[0]
        stop = int(whole.token_ids[4])
        (completion,) = (await engine.generate(request_of(renderer, TEXT, stop_token_ids=(stop,)))).completions
    first = whole.token_ids.tolist().index(stop)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_token_id == stop
    assert completion.token_ids.tolist() == whole.token_ids[: first + 1].tolist()


async def test_an_aborted_request_returns_the_tokens_that_it_has(tiny_server, renderer):
    request = replace(request_of(renderer, TEXT, max_tokens=3000, extra={"ignore_eos": True}), request_id="long")
    async with VLLMEngine(tiny_server.base_url) as engine:
        started = asyncio.Event()
        task = asyncio.ensure_future(engine.generate_streamed(request, lambda delta: started.set()))
        await asyncio.wait_for(started.wait(), 30)
        await engine.abort(["long"])
        (completion,) = (await asyncio.wait_for(task, 30)).completions
    assert completion.finish_reason is FinishReason.ABORT
    assert 0 < len(completion.token_ids) < 3000


@pytest.mark.slow
@pytest.mark.parametrize("messages", [TEXT, image_messages(0)], ids=["text", "image"])
async def test_a_server_before_a_server_samples_what_that_one_samples(
    tiny_server, tiny_model_dir, renderer, serve_app, messages
):
    async with VLLMEngine(tiny_server.base_url) as asked:
        length = (await asked.capabilities()).max_model_len
    inner = VLLMEngine(tiny_server.base_url)  # the server's own, on its event loop
    model = served_model(tiny_model_dir, renderer, name="tiny", max_model_len=length)
    outer = serve_app(create_app(PausableEngine(inner, max_model_len=length), renderer, model))
    request = request_of(renderer, messages)
    async with VLLMEngine(tiny_server.base_url) as direct, VLLMEngine(outer.base_url) as through:
        (expected,) = (await direct.generate(request)).completions
        (completion,) = (await through.generate(request)).completions
        assert await through.control.health()
    np.testing.assert_array_equal(completion.token_ids, expected.token_ids)
    np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-5)
