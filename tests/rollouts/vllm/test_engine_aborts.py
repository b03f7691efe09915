"""`VLLMEngine`: aborts, and completions that continue after a pause of the server."""

import asyncio
import json
from dataclasses import replace

import pytest
from engine_inputs import FAST_RETRIES, connected, expected, generate_one, held, image, request
from fake_http import error_response, json_response
from fake_model import logprob_of
from fake_responses import hold
from fake_server import ABORT, GENERATE

from rollouts import FinishReason
from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import (
    EngineError,
    ServerTimeoutError,
)


async def test_aborts_that_the_server_refuses_are_logged_once_until_one_succeeds(engine, server, caplog):
    def warnings():
        return caplog.text.count("could not abort")

    async def cancelled(count):
        """Cancel a request, and wait until the server has received `count` aborts."""
        call, _ = await held(server, GENERATE, engine.generate(request()))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await server.requests_seen(count, ABORT)

    caplog.set_level("WARNING", logger="rollouts")
    server.script[ABORT] = [json_response({}, 400)] * 3
    for number in range(1, 4):
        await cancelled(number)
        assert warnings() == 1
    await cancelled(4)  # it succeeds
    server.script[ABORT] = [json_response({}, 400)]
    await cancelled(5)
    assert warnings() == 2


async def test_a_completion_cut_off_by_a_pause_continues_with_the_same_tokens(engine, server):
    generate_request = request(image(), sampling={"max_tokens": 9})
    await generate_one(engine, request(image()))
    call, _ = await held(server, GENERATE, generate_one(engine, generate_request), tokens_before=4)
    await engine.control.pause("abort")
    await engine.control.update_weight_version("v2")
    assert not call.done()
    await engine.control.resume()
    completion = await call
    assert completion.token_ids.tolist() == expected(generate_request)
    assert completion.logprobs.tolist() == [logprob_of(token) for token in expected(generate_request)]
    assert [(span.version, span.start, span.end) for span in completion.weight_spans] == [
        ("default", 0, 4),
        ("v2", 4, 9),
    ]
    continued = server.generations[-1].json
    assert continued["token_ids"] == [*generate_request.prompt_ids, *expected(generate_request)[:4]]
    assert continued["sampling_params"]["max_tokens"] == 5


async def test_requests_wait_for_a_server_that_answers_503_while_paused(engine, server):
    """vLLM 0.33 answers 503 where 0.32 queues."""
    server.script[GENERATE] = [error_response(503)] * (1 + FAST_RETRIES.retries)
    await engine.control.pause("abort")
    generate_request = request()
    call = asyncio.ensure_future(generate_one(engine, generate_request))
    await server.requests_seen(1 + FAST_RETRIES.retries, GENERATE)
    await server.requests_seen(1, "/is_paused")
    assert not call.done()
    await engine.control.resume()
    assert (await call).token_ids.tolist() == expected(generate_request)


async def test_an_aborted_request_returns_its_tokens_and_does_not_continue(engine, server):
    generate_request = request(request_id="mine")
    call, _ = await held(server, GENERATE, generate_one(engine, generate_request), tokens_before=2)
    await engine.abort(["mine", "unknown"])
    completion = await call
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.token_ids.tolist() == expected(generate_request)[:2]


async def test_abort_all_ends_every_request_of_this_engine(engine, server):
    never = asyncio.Event()
    server.script[GENERATE] = [hold(never), hold(never)]
    calls = [asyncio.ensure_future(generate_one(engine, request())) for _ in range(2)]
    await server.requests_seen(2, GENERATE)
    await engine.abort_all()
    assert [completion.finish_reason for completion in await asyncio.gather(*calls)] == [FinishReason.ABORT] * 2


async def test_a_request_aborted_in_every_round_is_an_error(engine, server):
    server.script[GENERATE] = [cut(1)] * 65
    with pytest.raises(EngineError, match="64 times"):
        await engine.generate(request(sampling={"max_tokens": 90}))


async def test_a_pause_past_the_wait_limit_is_a_timeout(engine, server, monkeypatch):
    monkeypatch.setattr("rollouts.engines.vllm.engine._WAIT_SECONDS", 0.2)
    call, _ = await held(server, GENERATE, engine.generate(request()))
    await engine.control.pause("abort")
    with pytest.raises(ServerTimeoutError, match="paused"):
        await call


def cut(count, prompt_logprobs=True):
    async def step(server, seen, channel):
        response = server.generated(seen, cut=count)
        if not prompt_logprobs:
            response.body = json.dumps(json.loads(response.body) | {"prompt_logprobs": [None]}).encode()
        return response

    return step


async def test_a_request_that_waits_for_the_end_of_a_pause_can_be_aborted(engine, server):
    call, _ = await held(server, GENERATE, generate_one(engine, request(request_id="mine")), tokens_before=2)
    await engine.control.pause("abort")
    await server.requests_seen(2, "/is_paused")
    await engine.abort(["mine"])
    async with asyncio.timeout(5):
        completion = await call
    assert (completion.finish_reason, len(completion.token_ids)) == (FinishReason.ABORT, 2)


@pytest.mark.slow
@pytest.mark.parametrize("waits_for", ["image", "slot"])
async def test_a_request_that_was_not_sent_yet_can_be_aborted(server, waits_for):
    limits = replace(FAST_RETRIES, concurrency=1 if waits_for == "slot" else 8)
    shown = [image()] if waits_for == "image" else []
    async with connected(VLLMEngine(server.base_url, limits=limits), server) as engine:
        server.script[GENERATE] = [hold(release := asyncio.Event(), arrived := asyncio.Event())]
        first = asyncio.ensure_future(generate_one(engine, request(*shown)))
        await arrived.wait()
        second = asyncio.ensure_future(generate_one(engine, request(*shown, request_id="mine")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.abort(["mine"])
        async with asyncio.timeout(5):
            assert (await second).finish_reason is FinishReason.ABORT
        release.set()
        assert (await first).finish_reason is FinishReason.LENGTH
        assert len(server.generations) == 1


@pytest.mark.parametrize("option", [{"frequency_penalty": 0.5}, {"structured_outputs": {"json": {}}}])
async def test_a_stream_resampled_after_a_cut_holds_the_last_sample_only(engine, server, option):
    generate_request = request(sampling={"extra": option})
    server.script[GENERATE] = [cut(3)]
    deltas = []
    await engine.generate(generate_request, deltas.append)
    assert [token for each in deltas for token in each.token_ids.tolist()] == expected(generate_request)
    assert server.generations[-1].json["token_ids"] == generate_request.prompt_ids


async def test_prompt_log_probabilities_missing_after_a_cut_are_requested_again(engine, server):
    generate_request = request(prompt_logprobs=True)
    server.script[GENERATE] = [cut(0, prompt_logprobs=False)]
    result = await engine.generate(generate_request)
    assert result.prompt_logprobs[1:].tolist() == [logprob_of(token) for token in generate_request.prompt_ids[1:]]
