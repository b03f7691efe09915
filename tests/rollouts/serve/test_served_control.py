"""Control of `rollouts serve` by `VLLMEngine` and `ServerControl`: pauses, sleep, other weights."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from served_in_thread import serve_directory
from test_served_engine import TEXT, image_messages, request_of

from rollouts import SamplingParams
from rollouts.engines.local import LocalEngine
from rollouts.engines.protocol import FinishReason
from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import EngineError, WeightUpdateError
from rollouts.testing import tiny_qwen3_vl

LENGTH = 200
LONG = {"max_tokens": LENGTH, "extra": {"ignore_eos": True}}
SECONDS = 60


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two checkpoints of one model that a server can load."""
    directories = [tmp_path_factory.mktemp("checkpoint") / str(seed) for seed in (0, 1)]
    for seed, directory in enumerate(directories):
        tiny_qwen3_vl(directory, seed=seed)
    return directories


@pytest.fixture
def server(checkpoints):
    with serve_directory(checkpoints[0], name="tiny") as server:
        yield server


@asynccontextmanager
async def running(engine, request, tokens=3):
    """A request that has sampled some tokens, as a task."""
    begun = asyncio.Event()
    seen = 0

    def listen(delta):
        nonlocal seen
        seen += len(delta.token_ids)
        if seen >= tokens:
            begun.set()

    task = asyncio.ensure_future(engine.generate_streamed(request, listen))
    await asyncio.wait_for(begun.wait(), SECONDS)
    yield task
    task.cancel()


async def scored_difference(directory, request, completion):
    """The largest difference of a completion's log-probabilities from those of the same tokens as a prompt."""
    engine = LocalEngine.from_pretrained(directory)
    ids = [*request.prompt_ids, *completion.token_ids.tolist()]
    scoring = replace(request, prompt_ids=ids, prompt_logprobs=True, sampling=SamplingParams(max_tokens=1))
    scored = (await engine.generate(scoring)).prompt_logprobs
    await engine.close()
    return float(np.abs(scored[len(request.prompt_ids) :] - completion.logprobs).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "messages"), [("abort", TEXT), ("wait", TEXT), ("keep", TEXT), ("keep", image_messages(0))]
)
async def test_a_request_that_a_pause_meets_is_whole_after_it(server, checkpoints, renderer, mode, messages):
    request = request_of(renderer, messages, **LONG)
    async with VLLMEngine(server.base_url) as engine, running(engine, request) as task:
        await engine.control.pause(mode)
        assert await engine.control.is_paused()
        assert (await engine.control.metrics()).running == 0
        assert task.done() == (mode == "wait")
        await engine.control.resume()
        (completion,) = (await asyncio.wait_for(task, SECONDS)).completions
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == LENGTH
    assert await scored_difference(checkpoints[0], request, completion) < 1e-4


async def test_requests_that_come_during_a_pause_wait_for_its_end(server, renderer):
    async with VLLMEngine(server.base_url) as engine:
        await engine.control.pause("abort")
        task = asyncio.ensure_future(engine.generate(request_of(renderer, TEXT)))
        while (await engine.control.metrics()).waiting == 0:  # noqa: ASYNC110 a state that can only be asked for
            await asyncio.sleep(0.01)
        assert not task.done()
        await engine.control.resume()
        (completion,) = (await asyncio.wait_for(task, SECONDS)).completions
    assert len(completion.token_ids) == 12


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["abort", "wait", "keep"])
async def test_new_weights_of_a_directory_continue_the_requests_in_flight(server, checkpoints, renderer, in_flight):
    request = request_of(renderer, TEXT, **LONG)
    async with VLLMEngine(server.base_url) as engine:
        before = (await engine.generate(request_of(renderer, TEXT))).completions[0]
        async with running(engine, request) as task:
            await engine.update_weights(checkpoints[1], "v1", in_flight=in_flight)
            (completion,) = (await asyncio.wait_for(task, SECONDS)).completions
        after = (await engine.generate(request_of(renderer, TEXT))).completions[0]
        assert await engine.control.weight_version() == "v1"
    expected = ["default"] if in_flight == "wait" else ["default", "v1"]
    assert [span.version for span in completion.weight_spans] == expected
    assert completion.weight_spans[-1].end == len(completion.token_ids) == LENGTH
    assert [span.version for span in before.weight_spans + after.weight_spans] == ["default", "v1"]
    assert await scored_difference(checkpoints[0], request_of(renderer, TEXT), before) < 1e-4
    assert await scored_difference(checkpoints[1], request_of(renderer, TEXT), after) < 1e-4


@pytest.mark.slow
async def test_a_directory_with_another_model_leaves_the_weights_as_they_are(server, checkpoints, renderer, tmp_path):
    broken = shutil.copytree(checkpoints[1], tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    async with VLLMEngine(server.base_url) as engine:
        before = (await engine.generate(request_of(renderer, TEXT))).completions[0]
        with pytest.raises(WeightUpdateError, match="were loaded again"):
            await engine.control.update_weights_from_directory(broken, "v1", check=False)
        after = (await engine.generate(request_of(renderer, TEXT))).completions[0]
    np.testing.assert_array_equal(before.token_ids, after.token_ids)
    np.testing.assert_allclose(before.logprobs, after.logprobs, atol=1e-5)
    assert {span.version for span in after.weight_spans} == {"default"}


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
async def test_a_server_that_sleeps_generates_after_it_is_woken_up(server, checkpoints, renderer, level):
    request = request_of(renderer, image_messages(0))
    async with VLLMEngine(server.base_url) as engine:
        before = (await engine.generate(request)).completions[0]
        await engine.control.sleep(level)
        assert await engine.control.is_sleeping()
        with pytest.raises(EngineError, match="the server sleeps"):
            await engine.control.resume()
        task = asyncio.ensure_future(engine.generate(replace(request, request_id="asleep")))
        await engine.control.wake_up(["weights"])
        assert await engine.control.is_sleeping()
        if level == 2:
            await engine.control.reload_weights(checkpoints[0])  # ends the requests that wait, which are continued
        await engine.control.wake_up()
        assert not await engine.control.is_sleeping()
        assert len((await asyncio.wait_for(task, SECONDS)).completions[0].token_ids) == 12
        (after,) = (await engine.generate(request)).completions
    np.testing.assert_array_equal(before.token_ids, after.token_ids)


async def test_the_caches_of_images_can_be_emptied_and_images_are_sent_again(server, renderer):
    request = request_of(renderer, image_messages(0))
    async with VLLMEngine(server.base_url) as engine, VLLMEngine(server.base_url) as other:
        await engine.generate(request)
        await other.control.reset_mm_cache()  # `engine` does not know of it
        await engine.generate(request)
        assert engine.media_cache_counts.included_items == 2
        await other.control.pause("keep")
        await other.control.reset_encoder_cache()
        await other.control.reset_prefix_cache()
        await other.control.resume()
        assert await other.control.world_size() == 1


@pytest.mark.slow
async def test_all_requests_of_all_clients_can_be_ended(server, renderer):
    async with VLLMEngine(server.base_url) as engine, running(engine, request_of(renderer, TEXT, **LONG)) as task:
        answer = await asyncio.to_thread(server.post, "/abort_requests", {})
        # The engine continues a completion that others have ended.
        (completion,) = (await asyncio.wait_for(task, SECONDS)).completions
    assert answer.json == {"status": "aborted", "aborted": 1}
    assert len(completion.token_ids) == LENGTH
