"""`VLLMEngine`: an image is sent once, and again when the server no longer has it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from engine_inputs import PAD, connected, expected, generate_one, held, image, request
from fake_http import error_response, event_stream
from fake_responses import reset
from fake_server import GENERATE

from rollouts.engines.http.source_files import SourceFile
from rollouts.engines.vllm import VLLMEngine, media_payload
from rollouts.engines.vllm.media_payload import ContentPartsPayload
from rollouts.errors import (
    InvalidRequestError,
    ServerError,
)

FAILED = b'data: {"error":{"message":"Internal server error","type":"x","code":500}}\n\ndata: [DONE]\n\n'


async def test_an_image_that_the_server_evicted_is_sent_again(engine, server):
    generate_request = request(image())
    await generate_one(engine, generate_request)
    server.cached.clear()
    assert (await generate_one(engine, replace(generate_request, request_id="second"))).token_ids.tolist() == expected(
        generate_request
    )
    assert [seen.shipped for seen in server.generations] == [["cat"], [], ["cat"]]


async def test_a_group_with_one_image_works_with_a_server_without_a_media_cache(engine, server):
    """As with --mm-processor-cache-gb 0, or where another client clears the cache all the time."""
    take = server._take_images
    server._take_images = lambda body: (take(body), server.cached.clear())[0]
    results = await asyncio.gather(*(generate_one(engine, request(image())) for _ in range(20)))
    assert len(results) == 20


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


async def test_an_image_that_cannot_be_decoded_is_an_error_of_the_request(server):
    async with connected(VLLMEngine(server.base_url, media="content_parts"), server) as engine:
        with pytest.raises(InvalidRequestError, match="not an image"):
            await engine.generate(request(image(), placeholder_token_ids={"image": PAD}))


async def test_an_image_used_twice_in_content_parts_has_its_data_in_both_places(monkeypatch):
    """The server looks each up in its cache before it has taken any."""
    generate_request = request(image(), image(), placeholder_token_ids={"image": PAD})
    payload = ContentPartsPayload(generate_request)
    monkeypatch.setattr(media_payload, "source_file", lambda source, modality, **_: SourceFile(b"", "image/png"))
    parts = json.loads(b"{" + b"".join(payload.body_field(payload.names)) + b"}")["content_parts"]
    assert [part["url"] for part in parts] == ["data:image/png;base64,"] * 2


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
