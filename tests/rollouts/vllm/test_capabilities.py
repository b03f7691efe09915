"""What the probe makes of servers of every kind."""

import base64

import msgpack
import pytest
from fake_http import Response, error_response, json_response
from fake_model import IMAGE_PAD
from fake_responses import change
from fake_server import GENERATE, RENDER, FakeVLLM

from rollouts.engines.http.connection import HttpLimits, ServerConnection
from rollouts.engines.vllm.capabilities import probe
from rollouts.errors import CapabilityError, MalformedResultError, ServerError

QUICK = HttpLimits(retries=1, backoff_seconds=0, longest_backoff_seconds=0)


async def probed(server, *, api_key=None, **options):
    connection = ServerConnection(server.base_url, api_key=api_key, limits=QUICK)
    try:
        return await probe(connection, **options)
    finally:
        await connection.close()


async def test_every_probe_names_its_media_anew_because_a_known_name_may_be_answered_without_tensors(server):
    for _ in range(3):
        await probed(server)
    parts = [seen.json["messages"][0]["content"][0] for seen in server.requests if seen.path == RENDER]
    assert len({part["uuid"] for part in parts}) == len(parts) == 6
    (url,) = {part["image_url"]["url"] for part in parts if part["type"] == "image_url"}
    assert base64.b64decode(url.partition(",")[2]).startswith(b"\x89PNG")


# Which model.


async def test_an_adapter_has_the_length_of_the_model_that_it_belongs_to(server):
    cards = [{"id": "base", "max_model_len": 777}, {"id": "adapter", "parent": "base", "max_model_len": None}]
    server.script["/v1/models"] += [json_response({"data": cards})] * 2
    assert (await probed(server)).model == "base"
    found = await probed(server, model="adapter")
    assert (found.model, found.max_model_len) == ("adapter", 777)


@pytest.mark.parametrize(
    ("path", "step", "options", "error", "words"),
    [
        ("", None, {"model": "qwen9"}, CapabilityError, r"serves tiny-qwen3vl, not qwen9"),
        ("/v1/models", Response(body=b"<html>hello</html>"), {}, MalformedResultError, "not JSON"),
        ("/v1/models", error_response(404), {}, CapabilityError, "Is this a vLLM"),
        ("/v1/models", json_response({"data": [{"id": "m"}]}), {}, CapabilityError, "max_model_len"),
        (GENERATE, error_response(404), {}, CapabilityError, r"has no /inference/v1/generate \(HTTP 404\)"),
        (GENERATE, error_response(500, "EngineCore encountered an issue"), {}, ServerError, "EngineCore"),
    ],
)
async def test_what_a_server_lacks_is_named(server, path, step, options, error, words):
    server.script[path] += [step]
    with pytest.raises(error, match=words):
        await probed(server, **options)


# Which routes.


async def test_a_server_that_does_not_generate_can_be_looked_at_when_that_is_expected():
    async with FakeVLLM(scale_out=False) as server:
        found = await probed(server, needs_generate=False)
        assert not found.scale_out
        assert found.model == "tiny-qwen3vl"
        assert found.pixel_dtype is None


# Servers that do not render an image.


async def test_patches_that_do_not_share_out_evenly_have_no_merge_area(server):
    def add_image_token(content):
        (placeholder,) = content["features"]["mm_placeholders"]["image"]
        content["token_ids"].insert(placeholder["offset"], IMAGE_PAD)
        placeholder["length"] += 1

    server.script[RENDER] += [change(add_image_token)]
    found = await probed(server)
    assert found.merge_area is None
    assert found.placeholder_ids == {"image": IMAGE_PAD}


async def test_a_server_whose_tensors_cannot_be_read_gets_source_files():
    async with FakeVLLM(pixel_dtype="uint8") as server:

        def list_of_tensors(content):
            tensor = msgpack.packb(["uint8", [1], msgpack.ExtType(3, b"0")])
            entry = b"\x81\xa6images\x82\xa4data\x92" + 2 * tensor + b"\xa5field" + msgpack.packb(["batched", {}])
            content["features"]["kwargs_data"]["image"][0] = base64.b64encode(entry).decode()

        server.script[RENDER] += [change(list_of_tensors)]
        assert (await probed(server)).pixel_dtype is None
