"""Videos with the sound inside of them: ids, ranges and features are those of the processors of omni models."""

import functools
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import audio_families
import numpy as np
import pytest
import torch
from audio_families import Family
from films import Film, film, inputs_of
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from processor_outputs import TEXT_KEYS, check_equal
from test_audio_rendering import hear, said, see, sound

from renderers import (
    MediaItem,
    MediaSource,
    PlaceholderRange,
    RendererOptions,
    TemplateRenderer,
    load_renderer,
)
from renderers.errors import ConfigError, LoadError, MediaError, MessageError
from renderers.media.item import ExpansionPiece
from renderers.vision import hf_processor
from renderers.vision.batching import batch_tensors
from renderers.vision.hf_processor import VideosWithSound

pytestmark = pytest.mark.usefixtures("one_torch_thread")

OMNI = ("qwen2_5_omni", "qwen3_omni")
WITH_SOUND = {"use_audio_in_video": True}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """By the name of a family: a renderer of videos with their sound, and the processor of transformers."""
    return functools.cache(partial(audio_families.loaded, tmp_path_factory, chat_template_kwargs=WITH_SOUND))


def user(*parts: dict[str, Any] | Film) -> dict[str, Any]:
    return {"role": "user", "content": [part.part if isinstance(part, Film) else part for part in parts]}


def output_of(reference: Any, *turns: Sequence[dict[str, Any] | Film]) -> dict[str, Any]:
    """What the processor of transformers makes of a conversation, all media together."""
    messages = conversation(*turns)
    prompt = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    parts = [part for turn in turns for part in turn]
    images = [part["image"] for part in parts if not isinstance(part, Film) and part["type"] == "image"]
    media = inputs_of(parts) | ({"images": [images], "images_kwargs": {"return_tensors": "pt"}} if images else {})
    output = dict(reference(text=[prompt], text_kwargs={"return_tensors": "pt"}, **media))
    if "video_second_per_grid" in output:  # a list of numbers
        output["video_second_per_grid"] = torch.tensor(output["video_second_per_grid"])
    return output


def conversation(*turns: Sequence[dict[str, Any] | Film]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if messages:
            messages.append({"role": "assistant", "content": [said("It is loud.")]})
        messages.append(user(*turn))
    return messages


_TEXTS = st.sampled_from(["Hear\n", "\n  ?", "00:", " "]).map(said)
_SOUNDS = st.sampled_from([0.1, 0.61, 1.2]).map(lambda seconds: hear(sound(seconds)))
_IMAGES = st.sampled_from([64, 128]).map(see)
# Shorter and longer sounds than the frames; a silent one is a video alone.
_FILMS = st.builds(
    film,
    st.sampled_from([2, 5, 8]),
    st.sampled_from([None, 0.2, 1.3, 2.9]),
    st.integers(0, 1),
    fps=st.sampled_from([1, 4]),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", OMNI)
def test_conversations_with_films_are_those_of_the_models_own_processor(name: str, family: Any) -> None:
    renderer, reference = family(name)
    video_id, audio_id = reference.video_token_id, reference.audio_token_id

    @given(st.lists(st.one_of(_TEXTS, _SOUNDS, _IMAGES, _FILMS), max_size=3), st.lists(_FILMS, min_size=1, max_size=2))
    @settings(max_examples=2, deadline=None)
    def check(first: list[Any], films: list[Film]) -> None:
        last = [*films, said("What is it?")]
        turns = [first, last] if first else [last]
        rendered = renderer.render(conversation(*turns), add_generation_prompt=True)
        theirs = output_of(reference, *turns)
        assert rendered.token_ids == theirs["input_ids"][0].tolist()

        media = rendered.multi_modal_data
        assert media is not None
        placed = media.items_with_ranges()
        shown = [part for turn in turns for part in turn if isinstance(part, Film)]
        assert [item.has_sound for item in media.media_items["video"]] == [each.samples is not None for each in shown]
        # Each feature token has the type of its own modality, and no other token has one.
        types, ids = np.array(rendered.mm_token_type_ids), np.array(rendered.token_ids)
        assert (
            types == np.select([ids == reference.image_token_id, ids == video_id, ids == audio_id], [1, 2, 3])
        ).all()
        assert all(item.num_tokens == at.num_embeds for item, at in placed)
        # The batches of Qwen3-Omni change the last frames of shorter sounds: its sounds are compared alone, below.
        ignored = TEXT_KEYS | ({"input_features", "feature_attention_mask"} if name == "qwen3_omni" else set())
        ours = batch_tensors([item for item, _ in placed])
        check_equal(*({key: tensors[key] for key in tensors.keys() - ignored} for tensors in (ours, theirs)))
        for each, item in zip(shown if ignored > TEXT_KEYS else (), media.media_items["video"], strict=False):
            alone = output_of(reference, [each])
            check_equal(batch_tensors([item]), {key: tensor for key, tensor in alone.items() if key not in TEXT_KEYS})

    check()


@pytest.mark.slow
def test_bridges_carry_videos_and_their_sounds_forward(family: Any) -> None:
    renderer, _ = family("qwen2_5_omni")
    history = [user(film(4, 1.0), said("What is it?"))]
    answer = [*renderer.tokenizer.encode_run("A bell.").ids, *renderer.get_stop_token_ids()[:1]]
    first = renderer.render(history, add_generation_prompt=True)
    for new in (user(said("Sure?")), user(film(2, 0.5, seed=1), film(4, None), said("Now?"))):
        bridged = renderer.bridge_to_next_turn(
            first.token_ids, answer, [new], previous_multi_modal_data=first.multi_modal_data
        )
        messages = [*history, {"role": "assistant", "content": "A bell."}, new]
        whole = renderer.render(messages, add_generation_prompt=True)
        assert bridged is not None
        assert bridged.token_ids == whole.token_ids
        assert bridged.multi_modal_data.mm_placeholders == whole.multi_modal_data.mm_placeholders
        assert bridged.multi_modal_data.mm_hashes == whole.multi_modal_data.mm_hashes
        assert bridged.mm_token_type_ids == whole.mm_token_type_ids
    assert renderer.bridge_to_next_turn(first.token_ids, answer, [user(said("Sure?"))]) is None
    video = without_sound(renderer).render(history, add_generation_prompt=True)
    with_other_media = renderer.bridge_to_next_turn(
        first.token_ids, answer, [user(said("Sure?"))], previous_multi_modal_data=video.multi_modal_data
    )
    assert with_other_media is None


def without_sound(renderer: TemplateRenderer, **options: Any) -> TemplateRenderer:
    """A renderer of the same directory and store, without the option."""
    return load_renderer(renderer.files.directory, processors=silent_processors(renderer), **options)


def silent_processors(renderer: TemplateRenderer) -> dict[Any, Any]:
    return {**renderer.processors, "video": renderer.processors["video"]._videos}


@pytest.mark.slow
def test_the_first_sound_whose_sound_is_dropped_is_logged_once_with_the_option(
    family: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard, _ = family("qwen2_5_omni")
    silent = load_renderer(heard.files.directory)
    monkeypatch.setattr(hf_processor, "_first_sound", {"unlogged": True})
    frames = {"type": "video", "video": film(4, None, 7).frames, "fps": 4.0}
    heard.render([user(film(4, 1.0, 7))])
    silent.render([user(film(4, None, 7), frames, hear(sound(0.3)))])
    assert "renderers" not in {each.name for each in caplog.records}
    for sound_seed in (8, 9):
        silent.render([user(film(4, 1.0, 7, sound_seed=sound_seed))])
    (record,) = (each for each in caplog.records if each.name == "renderers")  # transformers logs too, once a process
    assert record.levelname == "WARNING"
    assert "has a sound, which the model does not hear" in record.message
    assert 'chat_template_kwargs={"use_audio_in_video": True}' in record.message


def test_an_animation_has_no_sound_and_frames_cannot_have_one(family: Any) -> None:
    renderer, reference = family("qwen2_5_omni")
    frames = [Image.fromarray(frame) for frame in film(4, None).frames]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=250)
    rendered = renderer.render([user({"type": "video", "video": buffer.getvalue()})])
    assert not rendered.multi_modal_data.media_items["video"][0].has_sound
    assert reference.audio_token_id not in rendered.token_ids
    for value in (film(4, None).frames, frames):
        part = {"type": "video", "video": value, "fps": 4.0}
        with pytest.raises(MediaError, match=r"message 0, part 1: frames have no sound.*pass the file of the video"):
            renderer.render([user(said("See:"), part)])


@pytest.mark.slow
def test_a_sound_without_a_token_or_beyond_the_window_of_the_processor_is_an_error_with_its_place(family: Any) -> None:
    renderer, _ = family("qwen2_5_omni")
    with pytest.raises(MediaError, match=r"message 0, part 0: .*puts no <\|AUDIO\|> in place of video"):
        renderer.render([user(film(2, 0.01))])
    with pytest.raises(MediaError, match=r"message 0, part 0: .*reads the first 30 s.*Split it into several videos"):
        renderer.render([user(film(2, 30.1))])


def test_what_a_server_would_load_is_refused_where_it_would_lose_the_sound(family: Any) -> None:
    renderer, _ = family("qwen2_5_omni")
    messages = [user(said("See:"), film(2, 0.4))]
    with pytest.raises(MessageError, match=r"message 0, part 1: a video with its sound.*process_multimodal=True"):
        renderer.render(messages, process_multimodal=False)
    heard = [user(hear(sound(0.3)))]
    assert renderer.render(heard, process_multimodal=False).multi_modal_data is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen2_audio", "reads only sounds"),
        ("gemma3n", "reads only images and sounds"),
        ("nemotron_h_omni", "NemotronH_Omni_Reasoning_V3Processor does not process videos"),
    ],
)
def test_the_option_is_refused_by_name_for_models_that_do_not_interleave_both(
    name: str, reason: str, tmp_path: Path
) -> None:
    directory = audio_families.save(name, tmp_path)
    with pytest.raises(ConfigError, match=f"use_audio_in_video.*{reason}.*as an audio part beside the video"):
        load_renderer(directory, chat_template_kwargs=WITH_SOUND)


@pytest.mark.parametrize(
    ("fault", "reason"), [(NotImplementedError(), "does not process a video with its sound"), ("<|VIDEO|>", "puts '")]
)
def test_a_processor_that_does_not_put_both_in_place_of_a_video_is_refused(
    fault: Any, reason: str, family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer, reference = family("qwen2_5_omni")
    method = mock.Mock(**({"side_effect": fault} if isinstance(fault, Exception) else {"return_value": fault}))
    monkeypatch.setattr(type(reference), "replace_video_with_audio_token", method)
    with pytest.raises(LoadError, match=f"Qwen2_5OmniProcessor {reason}"):
        VideosWithSound(renderer.processors["video"]._videos, renderer.processors["audio"])
    assert method.called


def test_runs_of_feature_tokens_are_split_by_the_modality_of_their_features() -> None:
    pieces = [
        ("<a>", 1, False),
        ("v", 3, True),
        ("s", 2, "audio"),
        ("v", 1, True),
        ("s", 4, "audio"),
        ("</a>", 1, False),
    ]
    item = made_item(tuple(ExpansionPiece(*piece) for piece in pieces))
    # Text between runs does not shift them.
    place = PlaceholderRange(10, 14, ((1, 5), (7, 13)))
    assert place.runs_of(item) == [
        ("video", 11, 14),
        ("audio", 14, 15),
        ("audio", 17, 18),
        ("video", 18, 19),
        ("audio", 19, 23),
    ]


def made_item(expansion: tuple[ExpansionPiece, ...]) -> MediaItem:
    count = sum(piece.times for piece in expansion if piece.embed)
    return MediaItem("video", "hash", MediaSource.of(b"film"), {}, count, None, {}, expansion)


@pytest.mark.parametrize("option", ["use_audio_in_video", "load_audio_from_video"])
def test_the_option_has_both_names_of_transformers(option: str, family: Any) -> None:
    renderer, _ = family("qwen2_5_omni")
    assert RendererOptions(chat_template_kwargs={option: True}).sound_of_videos == option
    without_sound(renderer, chat_template_kwargs={option: False})
    with pytest.raises(ConfigError, match=f"{option}.*processors= decide"):
        without_sound(renderer, chat_template_kwargs={option: True})
    with pytest.raises(ConfigError, match=f"{option}.* is 'yes'; it can be True, False"):
        RendererOptions(chat_template_kwargs={option: "yes"})
