"""`ServerRenderer` on single images, and with servers that cannot render."""

from __future__ import annotations

import json

import pytest
from rendering_server import (
    RenderingServer,
    _names,
    image,
    letters,
    picture,
    text,
    user,
)

from renderers.media.item import PixelScale
from rollouts.engines.http.responses import HttpResponse
from rollouts.engines.vllm import ServerRenderer
from rollouts.errors import (
    CapabilityError,
    MalformedResultError,
    ServerError,
    ServerUnreachableError,
)


@pytest.fixture
def server():
    return RenderingServer()


@pytest.fixture
def renderer(server):
    return ServerRenderer(server)


async def item_of(renderer, pixels):
    """What one image becomes."""
    rendered = await renderer.render(user(image(pixels)))
    ((item, _),) = rendered.multi_modal_data.items_with_ranges()
    return item


async def test_a_scale_goes_into_items_of_uint8_pixels(server):
    scale = PixelScale()
    assert (await item_of(ServerRenderer(server, scale=scale), picture(25))).scale is scale
    floats = RenderingServer(dtype="bfloat16")
    assert (await item_of(ServerRenderer(floats, scale=scale), picture(25))).scale is None


async def test_servers_of_other_version_or_processing_give_other_hashes():
    servers = (RenderingServer(), RenderingServer(version="0.33.0"), RenderingServer(dtype="bfloat16"))
    hashes = {(await item_of(ServerRenderer(server), picture(26))).mm_hash for server in servers}
    assert len(hashes) == 3
    # A server process writes the names of an item's tensors in an order of its own; that is no other server.
    reordered = RenderingServer(names=("pixel_values", "image_grid_thw"))
    assert (await item_of(ServerRenderer(reordered), picture(26))).mm_hash in hashes


async def test_a_server_that_restarts_without_end_is_an_error(server):
    renderer = ServerRenderer(server)
    server.before_answer = lambda sent: renderer.forget() if not _names(sent)[0].startswith("render-probe") else None
    with pytest.raises(ServerUnreachableError, match="restarted 4 times"):
        await renderer.render(user(image(picture(28))))


# Servers that cannot render.


@pytest.mark.parametrize("status", [403, 404, 405, 501])
async def test_a_server_that_does_not_render_is_an_error_with_the_cure(server, renderer, status):
    server.status = status
    with pytest.raises(CapabilityError, match="vllm launch render"):
        await renderer.render(user(text("a")))


async def test_a_model_that_only_reads_text_renders_text_and_refuses_images():
    renderer = ServerRenderer(RenderingServer(takes_images=False))
    rendered = await renderer.render(user(text("ok")))
    assert rendered.token_ids == letters("user\nok")
    assert rendered.multi_modal_data is None
    assert rendered.placeholder_token_ids == {}
    with pytest.raises(ServerError, match="no images"):
        await renderer.render(user(image(picture(29))))


def features(names, *ranges, **more):
    """The body of an answer of three tokens."""
    places = [{"offset": offset, "length": length} for offset, length in ranges]
    described = {"mm_hashes": {"image": names}, "mm_placeholders": {"image": places}, **more}
    return json.dumps({"token_ids": [1, 1, 1], "features": described}).encode()


@pytest.mark.parametrize(
    "answer",
    [
        b"not json",
        b"[]",
        b'{"token_ids": []}',
        b'{"token_ids": [-1]}',
        b'{"token_ids": [true]}',
        b'{"token_ids": [1], "features": 3}',
        features(["a"], mm_placeholders={}),
        features(["a"]),
        features(["a"], (3, 1)),
        features(["a"], (2, 2)),
        features(["a"], (0, 0)),
        features(["a"], (-1, 1)),
        features(["a", "b"], (0, 2), (1, 1)),
        features([1], (0, 1)),
        features(["a"], (0, 1), kwargs_data={"image": [7]}),
        features(["a"], (0, 1), kwargs_data={"image": []}),
    ],
)
async def test_an_answer_of_another_shape_is_an_error(server, renderer, answer):
    await renderer.render(user(text("a")))
    server._render = lambda sent: HttpResponse(200, {}, answer)
    with pytest.raises(MalformedResultError):
        await renderer.render(user(text("b")))
