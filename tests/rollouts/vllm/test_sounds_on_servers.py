"""Sounds at a server over the tiny Qwen2-Audio: by content part, by features, by name."""

import dataclasses

import numpy as np
import pytest
from engine_server import EngineVLLM
from fake_server import FakeVLLM
from server_thread import served
from sounds import sound_file

from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.local import LocalEngine
from rollouts.engines.vllm import ServerRenderer, VLLMEngine, render_server
from rollouts.errors import CapabilityError, ServerError


@pytest.fixture(scope="module")
def server(tiny_audio_dir):
    with served(EngineVLLM(tiny_audio_dir)) as started:
        yield started


def tone(hertz, seconds=0.5, rate=16_000):
    return (np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate) * 0.4).astype(np.float32)


def messages(*hertz, rate=16_000):
    sounds = [{"type": "audio", "audio": tone(each, rate=rate), "sampling_rate": rate} for each in hertz]
    return [{"role": "user", "content": [*sounds, {"type": "text", "text": "?"}]}]


def request_of(renderer, messages, **sampling):
    rendered = renderer.render(messages, add_generation_prompt=True)
    return GenerateRequest(
        rendered.token_ids,
        SamplingParams(**{"max_tokens": 8, "seed": 7, **sampling}),
        rendered.multi_modal_data,
        placeholder_token_ids=rendered.placeholder_token_ids,
    )


@pytest.mark.parametrize("media", ["features", "content_parts"])
@pytest.mark.parametrize("rate", [16_000, 44_100])
async def test_a_served_engine_samples_what_the_engine_itself_samples_of_sounds(
    server, tiny_audio_dir, hearing, media, rate
):
    request = request_of(hearing, messages(220, 330, rate=rate))
    (own,) = (await LocalEngine.from_pretrained(tiny_audio_dir).generate(request)).completions
    async with VLLMEngine(server.base_url, media=media) as engine:
        for _ in range(2):  # the second time, sounds are named only
            (served,) = (await engine.generate(dataclasses.replace(request, request_id="again"))).completions
            np.testing.assert_array_equal(served.token_ids, own.token_ids)
            np.testing.assert_allclose(served.logprobs, own.logprobs, atol=1e-5)
        assert engine.media_cache_counts.included_items == engine.media_cache_counts.omitted_items == 2


async def test_the_server_renders_sounds_as_the_renderer_of_its_directory(server, hearing):
    conversation = [
        *messages(220, 330),
        {"role": "assistant", "content": "a"},
        {
            "role": "user",
            "content": [{"type": "audio", "audio": sound_file(tone(220))}, {"type": "text", "text": "And?"}],
        },
    ]
    own = hearing.render(conversation, add_generation_prompt=True)
    async with ServerRenderer.connect(server.base_url) as rendering:
        for _ in range(2):  # the second time, sounds are named only
            rendered = await rendering.render(conversation, add_generation_prompt=True)
            assert rendered.token_ids == own.token_ids
            assert rendered.placeholder_token_ids == own.placeholder_token_ids
            served_media, own_media = (each.multi_modal_data.items_with_ranges() for each in (rendered, own))
            for (item, place), (own_item, own_place) in zip(served_media, own_media, strict=True):
                assert (place.offset, place.length) == (own_place.offset, own_place.length)
                np.testing.assert_array_equal(item["input_features"], own_item["input_features"])
        async with VLLMEngine(server.base_url) as engine:
            completions = [
                (await engine.generate(dataclasses.replace(request_of(hearing, conversation), **changed))).completions
                for changed in ({"multi_modal_data": rendered.multi_modal_data}, {"request_id": "own"})
            ]
    np.testing.assert_array_equal(completions[0][0].logprobs, completions[1][0].logprobs)


async def test_a_server_that_does_not_hear_renders_no_sound():
    async with FakeVLLM() as seeing, ServerRenderer.connect(seeing.base_url) as rendering:
        with pytest.raises(CapabilityError, match=r"takes no sounds.*--limit-mm-per-prompt"):
            await rendering.render(messages(220))


async def test_a_server_that_is_busy_for_a_moment_is_asked_again_whether_it_hears(server, monkeypatch):
    rendered = render_server.render_probe

    async def busy(connection, model, modality):
        response = await rendered(connection, model, modality)
        return response._replace(status=503) if modality == "audio" else response

    async with ServerRenderer.connect(server.base_url) as rendering:
        monkeypatch.setattr(render_server, "render_probe", busy)
        with pytest.raises(ServerError, match="503"):
            await rendering.render(messages(220))
        monkeypatch.setattr(render_server, "render_probe", rendered)
        assert (await rendering.render(messages(220))).multi_modal_data.mm_placeholders.keys() == {"audio"}
