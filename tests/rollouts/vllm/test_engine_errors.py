"""`VLLMEngine`: what is refused before it is sent, and a response that breaks off."""

from __future__ import annotations

import traceback
from dataclasses import replace

import numpy as np
import pytest
from engine_inputs import connected, expected, generate_one, held, image, request
from fake_http import Response, error_response
from fake_responses import change
from fake_server import GENERATE, FakeVLLM

from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
)


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        (replace(request(), prompt_ids=[1] * 4096), ContextLengthError, "4096"),
        (request(sampling={"extra": {"min_p": np.float32(1)}}), InvalidRequestError, "cannot be written as JSON"),
        (request(prompt_logprobs=True), InvalidRequestError, "prompt_logprobs"),
    ],
    ids=["overlong", "not JSON", "a stream with log-probabilities of the prompt"],
)
async def test_what_no_server_takes_is_refused_before_sending(engine, server, asked, error, words):
    with pytest.raises(error, match=words):
        await engine.generate(asked, print)
    assert server.generations == []


@pytest.mark.parametrize(
    ("asked", "message", "cure"),
    [
        (
            request(prompt_top_logprobs=21),
            "Requested prompt logprobs of 21, which is greater than max allowed: 20",
            "start the server with a larger --max-logprobs",
        ),
        (
            request(sampling={"top_logprobs": 20}),
            "Requested sample logprobs of 21, which is greater than max allowed: 20",
            "start the server with --max-logprobs 21",
        ),
        (
            request(),
            "At most 1 audio(s) may be provided in one prompt.",
            "start the server with more in --limit-mm-per-prompt",
        ),
    ],
    ids=["of the prompt", "of the completion", "sounds"],
)
async def test_a_limit_of_the_server_is_named_with_its_option(engine, server, asked, message, cure):
    await generate_one(engine, request())  # which asks the server what it is
    server.script[GENERATE] = [error_response(400, message)]
    with pytest.raises(EngineError) as caught:
        await engine.generate(asked)
    assert message in str(caught.value)
    assert cure in str(caught.value)
    assert str(caught.value).count("request ") == 1


async def test_two_requests_of_one_id_at_once_are_refused(engine, server):
    first, release = await held(server, GENERATE, engine.generate(request(request_id="same")))
    with pytest.raises(EngineError, match="running already"):
        await engine.generate(request(request_id="same"))
    release.set()
    await first


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


KEY = "plain-0123456789abcdef"
ECHOES = {
    "finish reason": change(lambda content: content["choices"][0].update(finish_reason=KEY)),
    "log-probability": change(lambda content: content["choices"][0]["logprobs"]["content"][0].update(logprob=KEY)),
    "no JSON": Response(body=KEY.encode()),
    "error": error_response(400, f"no such key: {KEY}"),
    "redirect": Response(status=307, body=b"", headers={"location": f"http://other/{KEY}"}),
}


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES)
async def test_no_error_has_the_key_that_the_server_repeats(echo):
    async with FakeVLLM(api_key=KEY) as server, connected(VLLMEngine(server.base_url, api_key=KEY), server) as engine:
        server.script[GENERATE] = [echo]
        for call in (engine.generate(request()), engine.control.metrics()):
            with pytest.raises(EngineError) as raised:
                await call
            assert "0123456" not in "".join(traceback.format_exception(raised.value)) + repr(raised.value)
            server.script["/metrics"] = [Response(body=f"name {KEY}\n".encode())]
