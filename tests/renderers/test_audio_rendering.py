"""Prompts with sounds: ids, ranges and features are those of the models' own processors on the whole conversation."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import audio_families
import numpy as np
import pytest
from audio_families import Family
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from processor_outputs import TEXT_KEYS, check_equal
from test_client import Client, run

from renderers import RendererOptions, load_renderer
from renderers.errors import MediaError
from renderers.vision.batching import batch_tensors

pytestmark = pytest.mark.usefixtures("one_torch_thread")

RATE = 16000
#: Their own batches hold exactly the tensors of single sounds. The first counts sounds: "Audio 1: ".
WHOLE_CONVERSATIONS = ("qwen2_audio", "qwen2_5_omni", "inkling")
#: Their own batches hold other last frames of the shorter sounds, so features are compared with those of each alone.
ALONE = ("qwen3_omni", "gemma3n", "nemotron_h_omni")
SEE = ("qwen2_5_omni", "inkling", "qwen3_omni", "gemma3n")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """By the name of a family: a renderer of its directory, and the processor that transformers loads from there."""
    return functools.cache(partial(audio_families.loaded, tmp_path_factory))


def sound(seconds: float) -> np.ndarray:
    count = round(seconds * RATE)
    return np.random.default_rng(count).uniform(-1, 1, count).astype(np.float32)


def hear(samples: np.ndarray) -> dict[str, Any]:
    return {"type": "audio", "audio": samples, "sampling_rate": RATE}


def see(width: int) -> dict[str, Any]:
    values = np.random.default_rng(width).integers(0, 256, (64, width, 3), dtype=np.uint8)
    return {"type": "image", "image": Image.fromarray(values)}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def output_of(reference: Any, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the processor of transformers makes of a conversation, all media together."""
    prompt = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    media: dict[str, Any] = {}
    if sounds := [part["audio"] for part in parts if part["type"] == "audio"]:
        media |= {"audio": sounds, "audio_kwargs": {"sampling_rate": RATE, "return_tensors": "pt"}}
    if images := [part["image"] for part in parts if part["type"] == "image"]:
        media |= {"images": [images], "images_kwargs": {"return_tensors": "pt"}}
    return dict(reference(text=[prompt], text_kwargs={"return_tensors": "pt"}, **media))


# Parts: a text, a sound by its length in seconds, an image by its width.
_TEXTS = st.sampled_from(["Hear\n", "\n  ?", "00:", " "]).map(said)
_SOUNDS = st.sampled_from([0.1, 0.35, 0.61, 1.2]).map(lambda seconds: hear(sound(seconds)))
_IMAGES = st.sampled_from([64, 128, 192]).map(see)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WHOLE_CONVERSATIONS, *ALONE])
def test_conversations_with_sounds_are_those_of_the_models_own_processor(name: str, family: Any) -> None:
    renderer, reference = family(name)
    kinds = [_TEXTS, _SOUNDS, *([_IMAGES] if name in SEE else [])]
    contents = st.lists(st.one_of(kinds), min_size=1, max_size=4)

    @given(st.lists(contents, min_size=1, max_size=2), _SOUNDS)
    @settings(max_examples=2, deadline=None)
    def check(turns: list[list[dict[str, Any]]], last: dict[str, Any]) -> None:
        messages: list[dict[str, Any]] = []
        for turn in turns:
            messages += [user(*turn), {"role": "assistant", "content": [said("It is loud.")]}]
        messages.append(user(last, said("And this?")))
        rendered = renderer.render(messages, add_generation_prompt=True)
        theirs = output_of(reference, messages)
        assert rendered.token_ids == theirs["input_ids"][0].tolist()

        media = rendered.multi_modal_data
        assert media is not None
        sounds = media.media_items["audio"]
        embed_id = reference.tokenizer.convert_tokens_to_ids(renderer.processors["audio"].embed_token)
        types = list(rendered.mm_token_type_ids)
        for item, place in zip(sounds, media.mm_placeholders["audio"], strict=True):
            window = range(place.offset, place.offset + place.length)
            assert sum(types[at] == 3 and rendered.token_ids[at] == embed_id for at in window) == item.num_tokens
        assert types.count(3) == rendered.token_ids.count(embed_id) == sum(item.num_tokens for item in sounds)
        if name in WHOLE_CONVERSATIONS:
            expected = {n: t for n, t in theirs.items() if n in sounds[0]}
            check_equal(batch_tensors(sounds), expected)
        for item, part in zip(sounds, _parts(messages, "audio"), strict=True):
            alone = output_of(reference, [user(part)])
            check_equal(
                {n: t for n, t in batch_tensors([item]).items() if n in alone},
                {n: t for n, t in alone.items() if n in item and n not in TEXT_KEYS},
            )

    check()


def _parts(messages: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [part for message in messages for part in message["content"] if part["type"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_omni"])
def test_bridges_carry_sounds_forward_and_go_on_counting_them(name: str, family: Any) -> None:
    renderer, _ = family(name)
    shown: list[dict[str, Any]] = []
    if name in SEE:  # "Picture 1: " and "Audio 1: " are counted apart
        counting = RendererOptions(chat_template_kwargs={"add_audio_id": True, "add_vision_id": True})
        renderer, shown = load_renderer(renderer.files.directory, config=counting), [see(64)]
    histories = [
        [user(hear(sound(0.5)), *shown, said("What is it?"))],
        [
            user(hear(sound(0.5)), hear(sound(0.5))),
            {"role": "assistant", "content": "Two."},
            user(*shown, said("And?")),
        ],
    ]
    answer = [*renderer.tokenizer.encode_run("A bell.").ids, *renderer.get_stop_token_ids()[:1]]
    turns = [user(hear(sound(0.7)), said("Now?")), user(*shown, hear(sound(0.5))), user(said("Sure?"))]
    for history, new, is_given in itertools.product(histories, turns, (True, False)):
        first = renderer.render(history, add_generation_prompt=True)
        bridged = renderer.bridge_to_next_turn(
            first.token_ids,
            answer,
            [new],
            previous_messages=history if is_given else None,
            previous_multi_modal_data=first.multi_modal_data,
        )
        messages = [*history, {"role": "assistant", "content": "A bell."}, new]
        whole = renderer.render(messages, add_generation_prompt=True)
        assert bridged is not None
        assert bridged.token_ids == whole.token_ids
        assert bridged.multi_modal_data.mm_placeholders == whole.multi_modal_data.mm_placeholders
        assert bridged.multi_modal_data.mm_hashes == whole.multi_modal_data.mm_hashes
        assert bridged.mm_token_type_ids == whole.mm_token_type_ids
        lost = renderer.bridge_to_next_turn(first.token_ids, answer, [new], previous_messages=history)
        assert lost is None  # the prefix holds sounds, and none were handed over


def test_a_sound_without_a_token_is_an_error_with_its_place(family: Any) -> None:
    renderer, _ = family("qwen2_audio")
    with pytest.raises(MediaError, match=r"message 0, part 1: .*too short: append silence"):
        renderer.render([user(said("Hear:"), hear(sound(0.01)))])


def test_a_client_that_leaves_sounds_to_the_server_sends_their_files_in_order(family: Any) -> None:
    renderer, _ = family("qwen2_audio")
    url = "https://example.org/bell.ogg"
    own = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    client = Client(renderer.get_stop_token_ids()[:1])
    client.expanded = {"prompt_token_ids": [9, 9], "mm_placeholders": {"audio": [{"offset": 0, "length": 1}] * 2}}
    messages = [user({"type": "audio_url", "audio_url": {"url": url}}, own, said("What?"))]
    result = run(client, renderer, messages, process_multimodal=False)
    ((_, body, _),) = client.posted
    assert [(part["type"], part["url"]) for part in body["content_parts"]] == [
        ("audio_url", url),
        ("audio_url", "data:;base64,UklGRg=="),
    ]
    logical = result["renderer_prompt_ids"]
    assert logical.count(next(iter(renderer.mm_token_type_id_map))) == 2  # one token for each sound
