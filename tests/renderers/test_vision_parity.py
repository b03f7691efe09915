"""Whole conversations with images and videos: ids, types, grids and pixels equal transformers' own processor."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoProcessor
from transformers.video_utils import VideoMetadata
from vision_models import FAMILIES, vision_model_dir

from renderers import RenderedTokens, TemplateRenderer, load_renderer
from renderers.vision.patches import normalise

Messages = list[dict[str, Any]]


@functools.cache
def renderer_of(family: str) -> TemplateRenderer:
    return load_renderer(vision_model_dir(family))


@functools.cache
def processor_of(family: str) -> Any:
    return AutoProcessor.from_pretrained(vision_model_dir(family))


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng([width, height, seed]).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def clip(frames: int, width: int = 64, height: int = 48, seed: int = 0) -> np.ndarray:
    """uint8 (frames, height, width, 3)."""
    return np.random.default_rng([frames, width, seed]).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def shown(messages: Messages, kind: str) -> Iterator[Any]:
    for message in messages:
        if isinstance(message["content"], list):
            yield from (part for part in message["content"] if part["type"] == kind)


def reference(family: str, messages: Messages) -> dict[str, Any]:
    """What transformers makes of the conversation in one go."""
    processor = processor_of(family)
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    images = [part["image"] for part in shown(messages, "image")]
    videos = [part["video"] for part in shown(messages, "video")]
    metadata = [
        VideoMetadata(total_num_frames=len(frames), fps=part["fps"], frames_indices=list(range(len(frames))))
        for frames, part in zip(videos, shown(messages, "video"), strict=True)
    ]
    given: dict[str, Any] = {"videos": videos, "video_metadata": metadata} if videos else {}
    if images:
        given["images"] = images
    return dict(processor(text=[text], **given, return_tensors="np"))


def check_equal(family: str, messages: Messages) -> RenderedTokens:
    theirs = reference(family, messages)
    rendered = renderer_of(family).render(messages, add_generation_prompt=True)
    assert rendered.token_ids == theirs.pop("input_ids")[0].tolist()
    assert rendered.mm_token_type_ids == theirs.pop("mm_token_type_ids")[0].tolist()
    assert np.all(theirs.pop("attention_mask") == 1)
    assert rendered.multi_modal_data is not None
    for modality, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        items = rendered.multi_modal_data.media_items.get(modality, [])
        if items:
            floats = [normalise(item[pixels], item.scale) for item in items if item.scale is not None]
            np.testing.assert_array_equal(np.concatenate(floats), theirs.pop(pixels))
            name = f"{modality}_grid_thw"
            np.testing.assert_array_equal(np.stack([item[name] for item in items]), theirs.pop(name))
    if "second_per_grid_ts" in theirs:
        ours = [item["second_per_grid_ts"] for item in rendered.multi_modal_data.media_items["video"]]
        # Models take it in float32, in which a tensor of Python floats comes.
        np.testing.assert_array_equal(np.stack(ours), np.asarray(theirs.pop("second_per_grid_ts"), dtype=np.float32))
    assert not theirs, f"not compared: {sorted(theirs)}"
    return rendered


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def image(picture: Image.Image) -> dict[str, Any]:
    return {"type": "image", "image": picture}


def video(frames: np.ndarray, fps: float = 4.0) -> dict[str, Any]:
    return {"type": "video", "video": frames, "fps": fps}


CONVERSATIONS: dict[str, Messages] = {
    "one image": [user(image(noise(300, 200)), text("What is it?"))],
    "the same image twice": [user(image(noise(90, 90)), text("and\n"), image(noise(90, 90)))],
    "images of several turns": [
        {"role": "system", "content": "Look closely."},
        user(image(noise(100, 60)), text("One?")),
        {"role": "assistant", "content": "One."},
        user(text("Two:"), image(noise(60, 100)), text("\n\n")),
        {"role": "assistant", "content": "Two."},
        user(text("Compare.")),
    ],
    "one video": [user(video(clip(8)), text("What happens?"))],
    "an odd number of frames": [user(video(clip(7), 3.0))],
    "videos and images": [
        user(image(noise(70, 50)), video(clip(4), 2.0), text("then"), video(clip(12, 96, 32), 30.0), image(noise(9, 9)))
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_what_the_models_own_processor_makes_of_it(family: str, conversation: str) -> None:
    check_equal(family, CONVERSATIONS[conversation])


sizes = st.tuples(st.integers(1, 400), st.integers(1, 400)).filter(lambda size: max(size) <= 200 * min(size))
parts = st.one_of(
    st.sampled_from(["", "a", "\n", "Look: "]).map(text),
    sizes.map(lambda size: image(noise(*size))),
    st.tuples(st.integers(2, 9), st.sampled_from([1.0, 2.0, 24.0])).map(lambda clip_: video(clip(clip_[0]), clip_[1])),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.lists(st.lists(parts, min_size=1, max_size=4), min_size=1, max_size=2))
def test_any_conversation_is_what_the_models_own_processor_makes_of_it(family: str, turns: Sequence[Any]) -> None:
    messages: Messages = []
    for content in turns:
        messages += [user(*content), {"role": "assistant", "content": "Yes."}]
    check_equal(family, messages[:-1])
