"""`VLLMEngine`: requests as sent or refused, completions and streams as returned, errors, cache salts."""

import asyncio
import json
import traceback
from dataclasses import replace

import numpy as np
import pytest
from engine_inputs import connected, expected, generate_one, held, image, request
from fake_http import Response, error_response, event_stream
from fake_responses import change, hold, reset
from fake_server import GENERATE, FakeVLLM

from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    ServerError,
)


async def test_every_sampling_parameter_is_in_the_request(engine, server):
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "n": 2, "stop_token_ids": (9,), "extra": {"min_p": 0.1}}
    await engine.generate(request(sampling=sampling, session_id="s", request_id="mine"))
    (seen,) = server.generations
    sent = seen.json
    assert sent["sampling_params"] == {
        "n": 2,
        "max_tokens": 6,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 1,
        "stop_token_ids": [9],
        "logprobs": 0,
        "detokenize": False,
        "min_p": 0.1,
    }
    assert (sent["model"], sent["request_id"]) == ("tiny-qwen3vl", "mine")
    assert seen.headers["x-session-id"] == "s"


async def test_cache_salts_differ_per_weight_version_and_stay_within_a_session(engine, server):
    await generate_one(engine, request(session_id="a"))
    await engine.control.update_weight_version("v2")
    for session in ("a", "b", None):
        await generate_one(engine, request(session_id=session))
    old, stays, new, without = [seen.json["cache_salt"] for seen in server.generations]
    assert old == stays
    assert new == without != old


async def test_another_event_loop_may_not_use_close_or_abort_an_engine(server, engine):
    await generate_one(engine, request())
    for call in (engine.close, lambda: engine.abort(["r"]), lambda: generate_one(engine, request())):
        with pytest.raises(EngineError, match="belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, call())
    assert (await generate_one(engine, request())).token_ids.size


async def test_an_image_that_a_closed_loop_was_sending_is_sent_again_on_the_next_one(server):
    engine, sent = VLLMEngine(server.base_url), request(image())
    server.script[GENERATE] = [hold(asyncio.Event())]

    def careless():
        loop = asyncio.new_event_loop()
        task = loop.create_task(generate_one(engine, sent))
        while not server.generations:
            loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        task._log_destroy_pending = False  # it is never run again

    await asyncio.to_thread(careless)
    result = await asyncio.wait_for(generate_one(engine, sent), 30)
    assert result.token_ids.tolist() == expected(sent)
    await engine.close()


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


FAILED = b'data: {"error":{"message":"Internal server error","type":"x","code":500}}\n\ndata: [DONE]\n\n'


async def test_an_image_that_the_server_evicted_is_sent_again(engine, server):
    generate_request = request(image())
    await generate_one(engine, generate_request)
    server.cached.clear()
    assert (await generate_one(engine, replace(generate_request, request_id="second"))).token_ids.tolist() == expected(
        generate_request
    )
    assert [seen.shipped for seen in server.generations] == [["cat"], [], ["cat"]]


async def test_a_repeated_500_with_the_image_sent_again_is_an_error(engine, server):
    generate_request = request(image())
    await generate_one(engine, generate_request)
    server.script[GENERATE] = [error_response(500, "Internal server error")] * 10
    with pytest.raises(ServerError, match="Internal server error"):
        await generate_one(engine, replace(generate_request, request_id="second"))
    assert [seen.shipped for seen in server.generations] == [["cat"], [], ["cat"]]


async def test_a_cache_miss_reported_in_a_stream_sends_the_image_again(engine, server):
    await generate_one(engine, request(image()))
    server.script[GENERATE] = [event_stream(FAILED)]
    generate_request = request(image(), image("dog"))
    assert (await generate_one(engine, generate_request)).token_ids.tolist() == expected(generate_request)
    assert [seen.shipped for seen in server.generations] == [["cat"], ["dog"], ["cat", "dog"]]


async def test_capabilities_are_read_again_after_a_quiet_period(engine, server, monkeypatch):
    """Nobody noticed: without asking, its new flag would mean pixels that it normalises twice."""
    await generate_one(engine, request(image()))
    await server.stop()
    server.pixel_dtype = "float32"
    await server.start()
    monkeypatch.setattr("rollouts.engines.http.capability_cache._QUIET_SECONDS", -1)
    await generate_one(engine, request(image()))
    assert server.generations[-1].shipped == ["cat"]
    assert (await engine.capabilities()).pixel_dtype == "float32"


async def test_a_broken_connection_forgets_sent_images_and_capabilities(engine, server):
    await generate_one(engine, request(image()))
    server.script[GENERATE] = [reset()]
    await generate_one(engine, request(image("dog")))
    await generate_one(engine, request(image()))
    assert "/version" in [seen.path for seen in server.requests]
    assert server.generations[-1].shipped == ["cat"]


def stream_event(ids, finish=None):
    logprobs = {"content": [{"token_id": token, "logprob": -1} for token in ids]}
    choice = {"index": 0, "finish_reason": finish, "token_ids": ids, "logprobs": logprobs}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def test_an_error_after_the_first_token_is_no_missing_image(engine, server):
    await generate_one(engine, request(image()))
    server.script[GENERATE] = [event_stream(stream_event([3]), FAILED)]
    deltas = []
    with pytest.raises(ServerError, match="Internal server error"):
        await engine.generate(request(image()), deltas.append)
    assert [each.token_ids.tolist() for each in deltas] == [[3]]


async def test_pixels_are_sent_again_after_a_restart_with_another_pixel_dtype(engine, server):
    """It restarted in the middle of the request, and took what was made for the one before."""

    async def restart(server, seen, channel):
        server.pixel_dtype = "float32"
        channel.reset()

    server.script[GENERATE] = [restart]
    generate_request = request(image())
    assert (await generate_one(engine, generate_request)).token_ids.tolist() == expected(generate_request)
    sizes = [len(seen.body) for seen in server.generations if seen.shipped]
    assert sizes[0] == sizes[1] < sizes[2] / 3


async def test_an_image_of_a_request_aborted_in_the_queue_is_sent_again(engine, server):
    call, _ = await held(server, GENERATE, generate_one(engine, request(image(), request_id="mine")), tokens_before=0)
    await engine.abort(["mine"])
    await call
    await generate_one(engine, request(image()))
    assert [seen.shipped for seen in server.generations] == [["cat"], ["cat"]]
