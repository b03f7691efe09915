"""`VLLMEngine` before vLLM's Rust frontend, which drops features, samples one at a time and aborts by connection."""

import asyncio
import io
import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from engine_inputs import PAD, SERVER, connected, expected, generate_one, image, request
from fake_http import Response, error_response, event_stream, json_response
from fake_model import logprob_of
from fake_server import GENERATE, FakeVLLM
from PIL import Image

from renderers import MediaSource
from rollouts import FinishReason
from rollouts.engines.vllm import VLLMEngine
from rollouts.engines.vllm.generate import Generation
from rollouts.engines.vllm.media_payload import ContentPartsPayload, media_payload
from rollouts.errors import CapabilityError

RUST = replace(SERVER, pixel_dtype=None, rust_frontend="0.33.0")
HIDDEN = json_response({"detail": "Not Found"}, 404)


class RustVLLM(FakeVLLM):
    """Refuses what vLLM's own frontend does not, or in other words."""

    def __init__(self, **options):
        super().__init__(rust_frontend="0.33.0", **options)

    def refusal(self, body):
        parts, wrong = body.get("content_parts", []), None
        if not isinstance(parts, list):
            wrong = f"content_parts: invalid type: integer `{parts}`, expected a sequence at line 1 column 33"
        elif any(part.get("url") is None for part in parts):
            wrong = "content_parts[0]: invalid type: null, expected a string at line 1 column 544"
        if wrong is not None:
            message = f"Failed to deserialize the JSON body into the target type: {wrong}"
            return error_response(400, message, "Bad Request")
        if (body.get("sampling_params") or {}).get("n", 1) > 1:
            return error_response(400, "Only n=1 is supported.", "BadRequestError", "n")
        return super().refusal(body)


@pytest.fixture
async def server():
    async with RustVLLM() as server:
        yield server


# Features.


async def test_it_is_known_by_how_it_refuses_a_request_where_its_version_is_hidden():
    async with RustVLLM() as server, VLLMEngine(server.base_url) as engine:
        server.script["/version"] = [HIDDEN]
        found = await engine.capabilities()
        assert (found.version, found.rust_frontend) == ("unknown", "unknown")


SHOWN = request(image(), placeholder_token_ids={"image": PAD})


@pytest.mark.parametrize(
    ("options", "call", "words"),
    [
        ({"media": "features"}, lambda engine: engine.generate(SHOWN), r'drops features.*Use media="content_parts"'),
        ({}, lambda engine: engine.control.abort(["mine"]), r"VLLM_SERVER_DEV_MODE=1\..*connection is closed"),
    ],
    ids=["features", "an abort by id"],
)
async def test_what_it_cannot_do_is_an_error_with_its_cure_and_not_sent(options, call, words):
    async with RustVLLM(control=False) as server:
        async with VLLMEngine(server.base_url, **options) as engine:
            with pytest.raises(CapabilityError, match=words):
                await call(engine)
        assert not any("features" in seen.json for seen in server.generations)


# Source files.


def jpeg():
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(3).integers(0, 256, (23, 31, 3), dtype=np.uint8)).save(file, "JPEG")
    return MediaSource.of(file.getvalue())


@pytest.mark.parametrize(
    ("capabilities", "jpeg_as_file", "media_type"),
    [
        (SERVER, False, b"image/png"),
        (SERVER, True, b"image/jpeg"),
        (RUST, False, b"image/png"),
        (RUST, True, b"image/png"),  # its decoder is another one, whatever is expected
    ],
)
def test_jpeg_files_go_unchanged_only_where_that_was_chosen_and_the_decoder_may_be_the_same(
    capabilities, jpeg_as_file, media_type
):
    item = replace(image(), source=jpeg())
    shown = request(item, placeholder_token_ids={"image": PAD})
    payload = media_payload(shown, "content_parts", capabilities, jpeg_as_file=jpeg_as_file)
    assert b"data:" + media_type in b"".join(payload.body_field(payload.names))


def test_a_name_in_the_servers_cache_stands_for_pixels():
    """The server does not look at data whose name it knows."""
    first, second = (replace(image(name), source=jpeg()) for name in ("decoder 1", "decoder 2"))
    names = [
        next(iter(ContentPartsPayload(request(item, placeholder_token_ids={"image": PAD}), jpeg_as_file=as_file).names))
        for item, as_file in ((first, False), (second, False), (first, True), (second, True))
    ]
    assert len(set(names)) == 3
    assert names[2] == names[3]  # the server decodes it


# Samples.


async def test_n_samples_are_n_requests_with_the_seeds_that_vllm_gives_to_samples(engine, server):
    deltas = []
    result = await engine.generate(request(sampling={"n": 3, "seed": 7}), deltas.append)
    assert [completion.index for completion in result.completions] == [0, 1, 2]
    sent = [seen.json["sampling_params"] for seen in server.generations]
    assert sorted((each["n"], each["seed"]) for each in sent) == [(1, 7), (1, 8), (1, 9)]
    for completion in result.completions:
        streamed = [each.token_ids.tolist() for each in deltas if each.index == completion.index]
        assert [token for ids in streamed for token in ids] == completion.token_ids.tolist() == expected(request(), 0)


async def test_samples_without_a_seed_have_none_and_one_of_them_scores_the_prompt(engine, server):
    generate_request = request(sampling={"n": 3, "seed": None}, prompt_logprobs=True)
    result = await engine.generate(generate_request)
    assert len(result.completions) == 3
    assert result.prompt_logprobs[1:].tolist() == [logprob_of(each) for each in generate_request.prompt_ids[1:]]
    sent = [seen.json["sampling_params"] for seen in server.generations]
    assert [each["seed"] for each in sent] == [None] * 3
    assert sum("prompt_logprobs" in each for each in sent) == 1


# Aborts.


def first_tokens(*ids):
    logprobs = [{"token_id": token, "logprob": -1} for token in ids]
    choice = {"index": 0, "finish_reason": None, "token_ids": ids, "logprobs": {"content": logprobs}}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def test_without_development_mode_the_connection_is_closed_and_the_received_tokens_are_returned(
    caplog, monkeypatch
):
    received = asyncio.Event()

    class Received(Generation):
        def add_response(self, text):
            deltas = super().add_response(text)
            received.set()
            return deltas

    monkeypatch.setattr("rollouts.engines.vllm.engine.Generation", Received)
    async with (
        RustVLLM(control=False) as server,
        connected(VLLMEngine(server.base_url), server) as engine,
    ):
        server.script[GENERATE] = [event_stream(first_tokens(3, 4), asyncio.Event())]
        call = asyncio.ensure_future(generate_one(engine, request(request_id="mine")))
        await received.wait()
        await engine.abort(["mine"])
        completion = await call
        assert (completion.finish_reason, completion.token_ids.tolist()) == (FinishReason.ABORT, [3, 4])
        (seen,) = server.generations
        async with asyncio.timeout(10):
            await seen.disconnected.wait()
        assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


# Control routes.


@pytest.mark.parametrize(
    ("status", "message", "cure"),
    [
        (
            501,
            "POST /pause is not supported by the Rust frontend yet. Set VLLM_USE_RUST_FRONTEND=0 to ...",
            "FRONTEND=0",
        ),
        (500, "failed to call pause: 'EngineCoreProc' object has no attribute 'pause_generation'", "from one release"),
    ],
)
async def test_a_pause_that_is_not_there_is_an_error_with_its_cure_and_no_pause(engine, server, status, message, cure):
    server.script["/pause"] = [Response(body=error_response(status, message, "x").body, status=status)]
    with pytest.raises(CapabilityError, match=cure):
        await engine.control.pause("abort")
    assert not await engine.control.is_paused()
