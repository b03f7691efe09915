"""`ServerRenderer` on chunks and single images, and with servers that cannot render."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_server import (
    PAD,
    START,
    RenderingServer,
    _names,
    image,
    letters,
    picture,
    text,
    user,
)

from renderers.errors import (
    MediaPolicyError,
)
from renderers.media.item import PixelScale
from rollouts.engines.http.responses import HttpResponse
from rollouts.engines.vllm import ImageChunk, ServerRenderer, TokenChunk
from rollouts.errors import (
    CapabilityError,
    InvalidRequestError,
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


async def item_of(renderer, pixels, **options):
    """What one image becomes."""
    rendered = await renderer.render_chunks([ImageChunk(pixels, **options)])
    ((item, _),) = rendered.multi_modal_data.items_with_ranges()
    return item


# Chunks.


async def test_token_chunks_are_never_tokenised_again(renderer, server):
    ids = [PAD, START, 7, 7, PAD]  # a policy may sample a literal placeholder
    last = TokenChunk(np.array([9], np.int32))
    rendered = await renderer.render_chunks([TokenChunk(ids), ImageChunk(picture(21)), last])
    assert rendered.token_ids == [*ids, *[PAD] * 6, 9]
    assert all(type(one) is int for one in rendered.token_ids)
    ((_, where),) = rendered.multi_modal_data.items_with_ranges()
    assert (where.offset, where.length) == (5, 6)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.one_of(
            st.lists(st.integers(0, 600), max_size=6),
            st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(1, 40)),
        ),
        max_size=7,
    )
)
def test_chunks_are_concatenated(plan):
    chunks, expected, ranges = [], [], []
    for piece in plan:
        if isinstance(piece, list):
            chunks.append(TokenChunk(piece))
            expected += piece
        else:
            pixels = picture(*piece)
            chunks.append(ImageChunk(pixels))
            count = -(-piece[1] // 16) * -(-piece[2] // 16)
            ranges.append((len(expected), count))
            expected += [PAD] * count
    rendered = asyncio.run(ServerRenderer(RenderingServer()).render_chunks(chunks))
    assert rendered.token_ids == expected
    assert [(where.offset, where.length) for _, where in rendered.multi_modal_data.items_with_ranges()] == ranges


async def test_another_count_than_expected_is_an_error_with_both_numbers(renderer):
    with pytest.raises(InvalidRequestError, match=r"chunk 1 at .*: the image takes 6 tokens .* expected 9"):
        await renderer.render_chunks([TokenChunk([1]), ImageChunk(picture(23), expected_tokens=9)])


async def test_an_image_that_the_policy_does_not_allow_and_ids_that_are_none_are_errors(renderer):
    for chunk in (ImageChunk("/etc/passwd"), ImageChunk("http://x/y")):
        with pytest.raises(MediaPolicyError):
            await renderer.render_chunks([chunk])
    for ids in ([-1], [[1]], [1.5]):
        with pytest.raises(InvalidRequestError):
            await renderer.render_chunks([TokenChunk(ids)])


# Items.


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
        await renderer.render_chunks([ImageChunk(picture(28))])


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
