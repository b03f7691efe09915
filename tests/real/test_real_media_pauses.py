"""Pauses and new weights while a request runs whose image lies in the part of its prompt that the prefix cache held.

vLLM 0.32 gives its workers no pixels of such an image, and dies if they have to encode it again.
"""

import asyncio
import re
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from vllm_server import LONGEST_SECONDS, VLLMServer

from renderers import RenderedTokens, load_renderer
from rollouts import Completion, GenerateRequest, SamplingParams
from rollouts.engines.vllm import VLLMEngine
from rollouts.engines.vllm.feature_encoding import encode_features
from rollouts.errors import EngineError, ServerError, ServerUnreachableError

LONG = 2000  # tokens: seconds
HITS = "vllm:prefix_cache_hits_total"
MODES = ("abort", "wait", "keep")
_made = iter(range(10**6))


def rendered_prompt(server: VLLMServer, *, side: int = 64, words: int = 150) -> RenderedTokens:
    """A prompt of several blocks of the KV cache, the first of which holds an image that no other test uses."""
    seed = 7_000_000 + next(_made)
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    parts = [{"type": "image", "image": pixels}, {"type": "text", "text": "x " * words}]
    return load_renderer(server.model_dir).render([{"role": "user", "content": parts}], add_generation_prompt=True)


def request_for(rendered: RenderedTokens, tokens: int = LONG, **more: Any) -> GenerateRequest:
    extra = {"ignore_eos": True, **more.pop("extra", {})}
    sampling = SamplingParams(max_tokens=tokens, temperature=more.pop("temperature", 0.0), extra=extra)
    more = {"prompt_ids": rendered.token_ids, "request_id": uuid.uuid4().hex, **more}
    return GenerateRequest(
        sampling=sampling,
        multi_modal_data=rendered.multi_modal_data,
        placeholder_token_ids=rendered.placeholder_token_ids,
        **more,
    )


async def cached_prompt(engine: VLLMEngine, server: VLLMServer) -> RenderedTokens:
    """A prompt with an image that the server has computed before: the next request finds its blocks in the cache."""
    rendered = rendered_prompt(server)
    await engine.generate(request_for(rendered, 4))
    return rendered


async def in_flight(server: VLLMServer, call: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
    """Start a call and return it once its prompt was found in the prefix cache and tokens were generated."""
    before = await server.metrics()
    task = await server.in_flight(call)
    assert (await server.metrics()).total(HITS) > before.total(HITS)
    return task


async def one(engine: VLLMEngine, request: GenerateRequest) -> Completion:
    (completion,) = (await engine.generate(request)).completions
    return completion


# Pauses.


@pytest.mark.parametrize("mode", MODES)
async def test_a_completion_with_a_cached_image_is_the_same_after_a_pause_of_any_mode(engine, vllm_server, mode):
    rendered = await cached_prompt(engine, vllm_server)
    undisturbed = await one(engine, request_for(rendered))
    running = await in_flight(vllm_server, lambda: one(engine, request_for(rendered)))
    await engine.control.pause(mode)
    if mode == "wait":
        await asyncio.wait_for(asyncio.shield(running), LONGEST_SECONDS)
    assert running.done() == (mode == "wait")
    await engine.control.resume()
    ended = await asyncio.wait_for(running, LONGEST_SECONDS)
    assert ended.token_ids.tolist() == undisturbed.token_ids.tolist()
    np.testing.assert_allclose(ended.logprobs, undisturbed.logprobs, atol=1e-4)


async def test_clearing_the_caches_of_kept_requests_is_refused_without_damage(engine, vllm_server):
    rendered = await cached_prompt(engine, vllm_server)
    running = await in_flight(vllm_server, lambda: one(engine, request_for(rendered)))
    with pytest.raises(EngineError, match="vLLM dies"):
        await engine.control.pause("keep", clear_cache=True)
    with pytest.raises(EngineError, match="vLLM dies"):
        await engine.control.reset_prefix_cache(preempt=True)
    assert len((await running).token_ids) == LONG


async def test_the_planted_fault_the_bare_route_kills_vllm(engine, vllm_server):
    vllm_server.restartable()
    rendered = await cached_prompt(engine, vllm_server)
    running = await in_flight(vllm_server, lambda: one(engine, request_for(rendered)))
    for call in ("/pause?mode=keep&clear_cache=true", "/resume"):
        (await asyncio.to_thread(vllm_server.http.post, call)).raise_for_status()
    with pytest.raises((ServerError, ServerUnreachableError)) as caught:
        await asyncio.wait_for(running, LONGEST_SECONDS)
    assert vllm_server.base_url in str(caught.value)
    await vllm_server.until_dead()
    await asyncio.to_thread(vllm_server.restart)


# New weights.


@pytest.mark.parametrize("mode", MODES)
async def test_after_new_weights_a_completion_with_a_cached_image_comes_from_the_weights_that_its_spans_name(
    engine, vllm_server, other, restored, mode
):
    rendered = await cached_prompt(engine, vllm_server)
    undisturbed = await one(engine, request_for(rendered))
    running = await in_flight(vllm_server, lambda: one(engine, request_for(rendered)))
    await engine.control.update_weights(other, "other", mode)
    ended = await asyncio.wait_for(running, LONGEST_SECONDS)
    versions = [span.version for span in ended.weight_spans]
    if mode == "wait":
        assert versions == ["default"]
        assert ended.token_ids.tolist() == undisturbed.token_ids.tolist()
        return
    assert versions == ["default", "other"]
    split = ended.weight_spans[0].end
    assert 0 < split < LONG
    assert ended.token_ids[:split].tolist() == undisturbed.token_ids[:split].tolist()
    np.testing.assert_allclose(ended.logprobs[:split], undisturbed.logprobs[:split], atol=1e-4)
    prompt = [*rendered.token_ids, *ended.token_ids[:split].tolist()]
    sampled = [(len(rendered.token_ids), len(prompt))]
    again = await one(engine, request_for(rendered, LONG - split, prompt_ids=prompt, sampled=sampled))
    assert again.token_ids.tolist() == ended.token_ids[split:].tolist()
    np.testing.assert_allclose(again.logprobs, ended.logprobs[split:], atol=1e-4)


async def test_weights_reloaded_while_an_image_is_frozen_do_not_kill_the_server(engine, vllm_server):
    rendered = await cached_prompt(engine, vllm_server)
    undisturbed = await one(engine, request_for(rendered))
    running = await in_flight(vllm_server, lambda: one(engine, request_for(rendered)))
    await engine.control.pause("keep")
    await engine.update_weights(vllm_server.model_dir, "default")
    await engine.control.resume()
    ended = await asyncio.wait_for(running, LONGEST_SECONDS)
    assert ended.token_ids.tolist() == undisturbed.token_ids.tolist()
    np.testing.assert_allclose(ended.logprobs, undisturbed.logprobs, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
async def test_an_update_during_the_request_of_another_client_does_not_kill_the_server(engine, vllm_server, mode):
    rendered = await cached_prompt(engine, vllm_server)
    features = b"".join(encode_features(rendered.multi_modal_data, pixel_dtype="uint8", include=lambda mm_hash: True))
    ids = ",".join(map(str, rendered.token_ids)).encode()
    # A request that is to be ended is long enough not to finish before.
    sampling = b'{"temperature":0,"logprobs":0,"ignore_eos":true,"max_tokens":%d}' % (LONG if mode == "wait" else 3500)
    body = b'{"token_ids":[%b],"sampling_params":%b,"features":%b}' % (ids, sampling, features)

    async def other_client(body: bytes = body) -> Any:
        headers = {"content-type": "application/json"}
        response = await asyncio.to_thread(
            vllm_server.http.post, "/inference/v1/generate", content=body, headers=headers
        )
        return response.json()["choices"][0]

    await other_client(
        re.sub(rb'"max_tokens":\d+', b'"max_tokens":4', body)
    )  # fills the cache: its blocks have no salt
    running = await in_flight(vllm_server, other_client)
    await engine.control.update_weights(vllm_server.model_dir, "default", mode)
    ended = await asyncio.wait_for(running, LONGEST_SECONDS)
    assert ended["finish_reason"] == ("length" if mode == "wait" else "abort")
    assert await engine.control.health()


# A KV cache that is too small, of which vLLM dies without any control call.


async def run_session(engine: VLLMEngine, rendered: RenderedTokens, extra: dict[str, Any]) -> None:
    """Two turns of a session: the second is long and finds the first in the prefix cache."""
    prompt, sampled = list(rendered.token_ids), []
    session = uuid.uuid4().hex
    for tokens in (8, LONG):
        request = request_for(
            rendered,
            tokens,
            prompt_ids=prompt,
            sampled=list(sampled),
            session_id=session,
            temperature=1.0,
            extra=extra,
        )
        ids = (await one(engine, request)).token_ids.tolist()
        sampled.append((len(prompt), len(prompt) + len(ids)))
        prompt = [*prompt, *ids, 10, 11]


def sessions(
    engine: VLLMEngine, server: VLLMServer, count: int, side: int, extra: dict[str, Any]
) -> list[asyncio.Task[None]]:
    room = asyncio.Semaphore(8)

    async def session() -> None:
        async with room:
            await run_session(engine, rendered_prompt(server, side=side, words=100), extra)

    return [asyncio.ensure_future(session()) for _ in range(count)]


@pytest.mark.parametrize("vllm_server", ["small-cache"], indirect=True)
async def test_the_planted_fault_vllm_dies_of_a_preempted_request_with_a_cached_image(engine, vllm_server):
    vllm_server.restartable()
    tasks = sessions(engine, vllm_server, 24, 256, {})
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION, timeout=LONGEST_SECONDS)
    assert any(task.exception() for task in done), "vLLM survived: say so in docs/vllm.md"
    await vllm_server.until_dead()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await asyncio.to_thread(vllm_server.restart)


@pytest.mark.parametrize("vllm_server", ["small-cache"], indirect=True)
async def test_requests_that_do_not_read_the_prefix_cache_survive_preemption(engine, vllm_server):
    before = (await vllm_server.metrics()).preemptions
    await asyncio.gather(*sessions(engine, vllm_server, 8, 256, {"skip_reading_prefix_cache": True}))
    assert (await vllm_server.metrics()).preemptions > before


@pytest.mark.parametrize("vllm_server", ["small-cache"], indirect=True)
async def test_a_pause_that_waits_ends_queued_requests_before_it_clears_the_caches(engine, vllm_server):
    """The encoder cache holds all of these images, so that preemption alone does no damage."""
    before = (await vllm_server.metrics()).preemptions
    tasks = sessions(engine, vllm_server, 8, 64, {})
    await vllm_server.until(lambda now: now.preemptions > before and now.waiting > 0)
    await engine.control.pause("wait")
    await engine.control.resume()
    await asyncio.wait_for(asyncio.gather(*tasks), LONGEST_SECONDS)
    assert await engine.control.health()
