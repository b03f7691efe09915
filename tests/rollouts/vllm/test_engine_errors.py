"""`VLLMEngine`: invalid requests, faulty responses and unreachable servers are typed errors."""

from __future__ import annotations

import asyncio
import tracemalloc

import numpy as np
import pytest
from engine_inputs import expected, generate_one, image, request
from fake_responses import (
    answer,
    change,
    clamped_logprob,
    finished_by,
    hold,
    malformed,
    one_choice_short,
    one_logprob_short,
    without_logprobs,
)
from fake_server import GENERATE

from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import (
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    MalformedResultError,
    MissingLogProbsError,
    OverlongPromptError,
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


async def test_an_overlong_prompt_is_refused_before_sending(engine, server):
    with pytest.raises(OverlongPromptError):
        await engine.generate(GenerateRequest([1] * 4096, SamplingParams()))
    assert server.generations == []


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


async def test_a_sampling_option_that_is_not_json_is_refused(engine, server):
    with pytest.raises(InvalidRequestError, match="cannot be written as JSON"):
        await engine.generate(request(sampling={"extra": {"min_p": np.float32(1)}}))
    assert server.generations == []
