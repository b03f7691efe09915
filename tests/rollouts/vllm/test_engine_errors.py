"""`VLLMEngine`: invalid requests, faulty responses and unreachable servers are typed errors."""

from __future__ import annotations

import asyncio
import tracemalloc

import numpy as np
import pytest
from engine_inputs import FAST_RETRIES, expected, generate_one, image, request
from fake_http import error_response
from fake_responses import (
    answer,
    busy,
    change,
    clamped_logprob,
    finished_by,
    half,
    hold,
    malformed,
    one_choice_short,
    one_logprob_short,
    reset,
    without_logprobs,
)
from fake_server import GENERATE, FakeVLLM

from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.protocol import EngineLimits
from rollouts.engines.vllm import ExpectedCapabilities, VLLMEngine
from rollouts.errors import (
    CapabilityError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    MalformedResultError,
    MissingLogProbsError,
    OverlongPromptError,
    ServerError,
    ServerUnreachableError,
)


@pytest.mark.parametrize(
    ("faulty_response", "error"),
    [
        (change(without_logprobs), MissingLogProbsError),
        (change(one_logprob_short), MissingLogProbsError),
        (change(clamped_logprob), MissingLogProbsError),
        (change(one_choice_short), MalformedResultError),
        (change(finished_by("tired")), MalformedResultError),
        (malformed(), MalformedResultError),
        (answer({"choices": []}), MalformedResultError),
        (answer({"unrelated": 1}), MalformedResultError),
    ],
)
async def test_a_faulty_response_is_an_error(engine, server, faulty_response, error):
    server.script[GENERATE] = [faulty_response]
    with pytest.raises(error):
        await generate_one(engine, request())


async def test_an_incomplete_response_is_requested_again(engine, server):
    generate_request = request()
    server.script[GENERATE] = [half(), reset(), reset(after_head=True)]
    assert (await generate_one(engine, generate_request)).token_ids.tolist() == expected(generate_request)


async def test_429_and_503_are_retried(engine, server):
    server.script[GENERATE] = [busy(429, retry_after="0"), busy(503), busy(429)]
    generate_request = request()
    assert (await generate_one(engine, generate_request)).token_ids.tolist() == expected(generate_request)


async def test_a_400_is_not_retried_and_keeps_the_message_of_the_server(engine, server):

    async def refuse(server, seen, channel):
        return error_response(400, "Token id 999999 is out of vocabulary", "BadRequestError")

    server.script[GENERATE] = [refuse]
    with pytest.raises(ServerError, match="out of vocabulary") as caught:
        await generate_one(engine, request())
    assert caught.value.status == 400
    assert len(server.generations) == 1


async def test_an_overlong_prompt_is_refused_before_sending(engine, server):
    with pytest.raises(OverlongPromptError):
        await engine.generate(GenerateRequest([1] * 4096, SamplingParams()))
    assert server.generations == []


async def test_disabled_scale_out_is_an_error_that_names_the_flag():
    async with FakeVLLM(scale_out=False) as server, VLLMEngine(server.base_url) as engine:
        with pytest.raises(CapabilityError, match="--enable-scale-out"):
            await engine.generate(request())


async def test_a_server_that_contradicts_the_configuration_is_an_error(server):
    async with VLLMEngine(server.base_url, expected=ExpectedCapabilities(pixel_dtype="float32")) as engine:
        with pytest.raises(CapabilityError, match="uint8"):
            await engine.generate(request(image()))


async def test_an_unreachable_server_is_an_error_for_every_waiting_call():
    async with FakeVLLM() as server:
        url = server.base_url
    async with VLLMEngine(url, limits=FAST_RETRIES) as engine:
        results = await asyncio.gather(*(engine.generate(request()) for _ in range(5)), return_exceptions=True)
    assert all(isinstance(result, ServerUnreachableError) for result in results)


async def test_two_requests_of_one_id_at_once_are_refused(engine, server):
    release, arrived = asyncio.Event(), asyncio.Event()
    server.script[GENERATE] = [hold(release, arrived)]
    first = asyncio.ensure_future(engine.generate(request(request_id="same")))
    await arrived.wait()
    with pytest.raises(EngineError, match="running already"):
        await engine.generate(request(request_id="same"))
    release.set()
    await first


async def test_a_closed_engine_refuses(server):
    engine = VLLMEngine(server.base_url)
    await engine.close()
    with pytest.raises(EngineClosedError):
        await engine.generate(request())


async def test_a_response_that_breaks_after_its_first_token_is_requested_again(engine, server):
    generate_request = request(image())

    async def first_token_only(server, seen, channel):
        server._take_images(seen.json)
        first = server.generated(seen).chunks[0]
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
        channel.write(head + b"%x\r\n%b\r\n" % (len(first), first))
        channel.close()

    server.script[GENERATE] = [first_token_only]
    assert (await generate_one(engine, generate_request)).token_ids.tolist() == expected(generate_request)


async def test_a_stream_with_prompt_log_probabilities_is_refused_before_sending(engine, server):
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        await anext(engine.stream(request(prompt_logprobs=True)))
    assert server.generations == []


@pytest.mark.parametrize("field", ["n", "max_tokens"])
async def test_a_request_past_the_limits_is_refused_before_anything_is_sent_or_reserved(engine, server, field):
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match=rf"{field} is 1000000000 .* EngineLimits\({field}=...\)"):
        await engine.generate(request(sampling={field: 10**9}))
    with pytest.raises(InvalidRequestError, match=field):
        await anext(engine.stream(request(sampling={field: 10**9})))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert server.generations == []


async def test_the_limits_of_a_request_can_be_set(server):
    async with VLLMEngine(server.base_url, request_limits=EngineLimits(n=2)) as engine:
        await engine.generate(request(sampling={"n": 2}))
        with pytest.raises(InvalidRequestError, match="at most 2"):
            await engine.generate(request(sampling={"n": 3}))


async def test_a_sampling_option_that_is_not_json_is_refused(engine, server):
    with pytest.raises(InvalidRequestError, match="cannot be written as JSON"):
        await engine.generate(request(sampling={"extra": {"min_p": np.float32(1)}}))
    assert server.generations == []
