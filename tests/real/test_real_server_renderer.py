"""Rendering by a real vLLM, against our renderer of the same directory and against the completions of the server."""

import asyncio
import json

import numpy as np
import pytest
from images import png_url
from vllm_server import VLLMServer

from renderers import TemplateRenderer, load_renderer
from rollouts.engines.vllm import ServerRenderer
from rollouts.engines.vllm.feature_decoding import encoded_entries
from rollouts.engines.vllm.feature_encoding import encode_features
from rollouts.engines.vllm.tensors import PixelDtype
from rollouts.errors import CapabilityError

EVERYWHERE = pytest.mark.parametrize(
    "vllm_server", ["float32", "bfloat16", "float32-host-normalise", "bfloat16-host-normalise", "render"], indirect=True
)
PIXELS: dict[str, PixelDtype] = {
    "float32": "uint8",
    "bfloat16": "uint8",
    "render": "uint8",
    "float32-host-normalise": "float32",
    "bfloat16-host-normalise": "bfloat16",
}


@pytest.fixture
def ours(vllm_server: VLLMServer) -> TemplateRenderer:
    return load_renderer(vllm_server.model_dir)


def image(seed: int, height: int = 96, width: int = 128) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def render_response(server: VLLMServer, messages: list[dict], **options) -> dict:
    """The response of the render route, by another client."""
    body = {"model": server.model_name, "messages": messages, **options}
    return server.http.post("/v1/chat/completions/render", json=body).raise_for_status().json()


CONVERSATIONS = [
    [{"role": "user", "content": "  spaces \n\n and 東京 🙂 1234"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image", "image": image(1)}, {"type": "text", "text": "Which?"}]},
        {"role": "assistant", "content": "that\n"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and"},
                {"type": "image", "image": image(2, 40, 200)},
                {"type": "image", "image": image(1)},
            ],
        },
    ],
]


@EVERYWHERE
@pytest.mark.parametrize("conversation", CONVERSATIONS)
async def test_ids_and_ranges_are_those_of_our_own_renderer(vllm_server, ours, conversation):
    async with ServerRenderer.connect(vllm_server.base_url) as renderer:
        for _ in range(2):  # the second time the server knows the images
            rendered = await renderer.render(conversation, add_generation_prompt=True)
            expected = ours.render(conversation, add_generation_prompt=True)
            assert rendered.token_ids == expected.token_ids
            assert rendered.logical_ids == expected.logical_ids
            assert rendered.placeholder_token_ids["image"] == expected.placeholder_token_ids["image"]
            pairs = zip(
                rendered.multi_modal_data.items_with_ranges(),
                expected.multi_modal_data.items_with_ranges(),
                strict=True,
            )
            for (item, where), (own, own_where) in pairs:
                assert where == own_where
                assert item.source == own.source
                assert item.num_tokens == own.num_tokens


@EVERYWHERE
@pytest.mark.parametrize("size", [(28, 28), (64, 96), (37, 301), (480, 640)])
async def test_items_of_the_server_are_encoded_again_byte_for_byte(vllm_server, size):
    pixels = image(sum(size), *size)
    shown = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": png_url(pixels)}}]}]
    theirs = render_response(vllm_server, shown)["features"]["kwargs_data"]["image"]
    async with ServerRenderer.connect(vllm_server.base_url) as renderer:
        rendered = await renderer.render(shown)
    pixel_dtype = PIXELS[vllm_server.mode]
    made = json.loads(b"".join(encode_features(rendered.multi_modal_data, pixel_dtype=pixel_dtype)))
    assert [encoded_entries(one) for one in made["kwargs_data"]["image"]] == [encoded_entries(one) for one in theirs]
    assert pixel_dtype.encode() in encoded_entries(theirs[0])["pixel_values"][:40]


async def test_an_image_that_the_server_has_under_other_hashes_comes_with_its_tensors(vllm_server):
    pixels = image(77)
    for _ in range(2):
        render_response(
            vllm_server, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": png_url(pixels)}}]}]
        )
    for _ in range(2):  # two clients without shared state
        async with ServerRenderer.connect(vllm_server.base_url) as renderer:
            rendered = await renderer.render([{"role": "user", "content": [{"type": "image", "image": pixels}]}])
            assert len(rendered.multi_modal_data) == 1


async def test_many_conversations_are_rendered_concurrently(vllm_server, ours):
    conversations = [
        [{"role": "user", "content": [{"type": "image", "image": image(n % 4)}, {"type": "text", "text": f"{n}"}]}]
        for n in range(24)
    ]
    expected = [ours.render(each).token_ids for each in conversations]
    async with ServerRenderer.connect(vllm_server.base_url) as renderer:
        inside = await asyncio.gather(*(renderer.render(each) for each in conversations))
    assert [rendered.token_ids for rendered in inside] == expected


@pytest.mark.parametrize("vllm_server", ["closed"], indirect=True)
async def test_the_error_of_a_server_without_scale_out_names_the_cure(vllm_server):
    async with ServerRenderer.connect(vllm_server.base_url, api_key=vllm_server.api_key) as renderer:
        with pytest.raises(CapabilityError, match="--enable-scale-out"):
            await renderer.render([{"role": "user", "content": "a"}])
