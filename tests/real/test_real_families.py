"""Images and videos of several families on a real server: sampled log-probabilities against transformers float32."""

import functools
import io
import itertools

import numpy as np
import pytest
from PIL import Image
from reference import Reference

from renderers import load_renderer
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import InvalidRequestError

_seeds = itertools.count(5_000_000)

on_gemma3 = pytest.mark.parametrize("vllm_server", ["gemma3"], indirect=True)
on_glm = pytest.mark.parametrize("vllm_server", ["glm-4.5v"], indirect=True)


def noise(*shape):
    """Pixels that no other test uses."""
    return np.random.default_rng(next(_seeds)).integers(0, 256, (*shape, 3), dtype=np.uint8)


@functools.cache
def loaded(directory, causal=False):
    return load_renderer(directory), Reference(directory, causal=causal)


async def check_seen(server, parts, others, *, media="auto", causal=False):
    """Log-probabilities of a server are those of transformers for the sent media, and not for other ones."""
    renderer, reference = loaded(server.model_dir, causal)
    rendered, other = (
        renderer.render(
            [{"role": "user", "content": [*each, {"type": "text", "text": "?"}]}], add_generation_prompt=True
        )
        for each in (parts, others)
    )
    assert rendered.token_ids == other.token_ids
    async with VLLMEngine(server.base_url, media=media) as engine:
        request = GenerateRequest(
            rendered.token_ids,
            SamplingParams(max_tokens=12, seed=1, extra={"ignore_eos": True}),
            rendered.multi_modal_data,
            placeholder_token_ids=rendered.placeholder_token_ids,
        )
        (completion,) = (await engine.generate(request)).completions
    close, far = (
        np.abs(reference.logprobs(shown, completion.token_ids) - completion.logprobs).max()
        for shown in (rendered, other)
    )
    assert close < 1e-4
    assert far > 1e-2


def image(pixels):
    return {"type": "image", "image": pixels}


def video(frames, fps=4.0):
    return {"type": "video", "video": frames, "fps": fps}


def gif(colours):
    frames = [Image.new("RGB", (96, 64), tuple(int(value) for value in colour)) for colour in colours]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=250)
    return {"type": "video", "video": file.getvalue()}


# Qwen3-VL: a video with time stamps.


@pytest.mark.parametrize("kind", ["frames", "array", "file"])
async def test_a_video_of_any_source_reaches_the_server_with_the_pixels_that_training_sees(vllm_server, kind):
    """The server was started with a limit of 0 videos; videos sent as features need no video processor."""
    pixels = [noise(8, 64, 96) for _ in range(2)]
    shown, other = {
        "frames": lambda: [[video(list(frames))] for frames in pixels],
        "array": lambda: [[video(frames)] for frames in pixels],
        "file": lambda: [[gif(frames[:, 0, 0])] for frames in pixels],
    }[kind]()
    await check_seen(vllm_server, shown, other)


async def test_a_video_of_one_step_does_not_kill_the_server(vllm_server):
    """vLLM searches for <|vision_start|> from the beginning of a video's range, and dies if there is none."""
    shown, other = ([video(noise(2, 64, 96))] for _ in range(2))
    await check_seen(vllm_server, shown, other)


async def test_an_image_beside_a_video_keeps_its_place(vllm_server):
    shown = [image(noise(64, 96)), video(noise(6, 64, 96)), image(noise(64, 96))]
    await check_seen(vllm_server, shown, [shown[2], shown[1], shown[0]])


async def test_two_steps_of_a_video_in_the_wrong_order_change_log_probabilities(vllm_server):
    frames = noise(8, 64, 96)
    await check_seen(vllm_server, [video(frames)], [video(frames[[2, 3, 0, 1, 4, 5, 6, 7]])])


# Gemma 3: text around the tokens that carry features.


@on_gemma3
@pytest.mark.parametrize("media", ["auto", "features"])
async def test_images_of_gemma3_are_seen_as_transformers_sees_them(vllm_server, media):
    shown = [image(noise(61, 97)), image(noise(300, 200))]
    await check_seen(vllm_server, shown, [image(noise(61, 97)), shown[1]], media=media, causal=True)


@on_gemma3
async def test_the_error_of_a_mode_that_cannot_serve_gemma3_advises_the_one_that_can(vllm_server):
    shown = [image(noise(61, 97))]
    with pytest.raises(InvalidRequestError, match='Use media="features"'):
        await check_seen(vllm_server, shown, shown, media="content_parts")


# GLM-4V: floats from transformers' processor, a server that wants uint8.


@on_glm
@pytest.mark.parametrize("media", ["auto", "features", "content_parts"])
async def test_images_of_glm_are_seen_as_transformers_sees_them(vllm_server, media):
    shown = [image(noise(61, 97)), image(noise(130, 70))]
    await check_seen(vllm_server, shown, [image(noise(61, 97)), shown[1]], media=media)


@on_glm
@pytest.mark.parametrize("frames", [8, 2], ids=["several steps", "one step"])
async def test_a_video_of_glm_is_seen_as_transformers_sees_it(vllm_server, frames):
    await check_seen(vllm_server, [video(noise(frames, 64, 96))], [video(noise(frames, 64, 96))])
