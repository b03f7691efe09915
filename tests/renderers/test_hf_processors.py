"""Items that HFProcessor makes one at a time equal what the processor of transformers makes of all images together."""

from typing import Any

import pytest
import torch
from hf_families import Family
from hypothesis import given, settings
from hypothesis import strategies as st
from processor_outputs import (
    SIZES,
    TEXT_KEYS,
    batch_output,
    check_equal,
    clip,
    families,
    noise,
    process_each,
    source,
    with_expansions,
)
from transformers.video_utils import VideoMetadata

from renderers import MediaPolicy, MediaSource, MediaStore, load_renderer
from renderers.errors import (
    MediaError,
)
from renderers.media.decoding import frames_to_raw
from renderers.vision.batching import batch_tensors
from renderers.vision.hf_processor import load_hf_processors

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.slow
@families()
def test_prompts_with_inserted_expansions_have_the_token_ids_of_the_models_own_processor(
    family: Family, reference_processor: Any, hf_processors: Any
) -> None:
    reference, ours = reference_processor(family.name), hf_processors(family.name)["image"]
    images = [noise(*size) for size in SIZES]
    # Line breaks beside the markers: tokenizers merge them with what stands at the edge of an expansion.
    parts = [{"type": "text", "text": "See\n"}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "\n  ?"}]
    prompt = reference.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert prompt.count(ours.marker) == 2  # what the template prints is what the processor replaces
    expected = reference(images=images, text=prompt, text_kwargs={"return_tensors": None})["input_ids"][0]

    items = process_each(ours, images)
    assert reference.tokenizer(with_expansions(prompt, items, ours.marker))["input_ids"] == expected
    embed_id = reference.tokenizer.convert_tokens_to_ids(family.embed)
    assert sum(item.num_tokens for item in items) == expected.count(embed_id)
    assert ours.embed_token == family.embed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "idefics3", "internvl3", "kimi-k2.5"])
def test_rendered_ids_are_those_of_the_models_own_processor(
    name: str, reference_processor: Any, processor_directory: Any
) -> None:
    images = [noise(*size) for size in SIZES]
    parts = [{"type": "text", "text": "See\n"}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "\n  ?"}]
    prompt = reference_processor(name).apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    expected = reference_processor(name)(images=images, text=prompt, text_kwargs={"return_tensors": None})["input_ids"][
        0
    ]

    shown = [parts[0], *({"type": "image", "image": image} for image in images), parts[3]]
    rendered = load_renderer(processor_directory(name)).render([{"role": "user", "content": shown}])
    assert rendered.token_ids == expected


@pytest.mark.slow
@families()
def test_a_model_makes_as_many_rows_of_features_as_there_are_embed_tokens(family: Family, hf_processors: Any) -> None:
    items = process_each(hf_processors(family.name)["image"], [noise(*size) for size in SIZES])
    tensors = {name: torch.from_numpy(array) for name, array in batch_tensors(items).items()}
    with torch.no_grad():
        output = family.tower().eval().get_image_features(**tensors)
    features = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    several = features if isinstance(features, (list, tuple)) else [features]
    rows = sum(each.reshape(-1, each.shape[-1]).shape[0] for each in several)
    assert rows == sum(item.num_tokens for item in items)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pixtral", "llava-next", "kimi-k2.5"])
def test_batches_of_any_sizes_are_those_of_the_models_own_processor(
    name: str, reference_processor: Any, hf_processors: Any
) -> None:
    @given(st.lists(st.tuples(st.integers(2, 300), st.integers(2, 300)), min_size=1, max_size=4))
    @settings(max_examples=8, deadline=None)
    def check(sizes: list[tuple[int, int]]) -> None:
        images = [noise(*size) for size in sizes]
        check_equal(
            batch_tensors(process_each(hf_processors(name)["image"], images)),
            batch_output(reference_processor(name), images),
        )

    check()


@families(lambda family: family.video_embed is not None and family.name != "smolvlm")
def test_videos_are_those_of_the_models_own_processor(
    family: Family, reference_processor: Any, hf_processors: Any
) -> None:
    reference, ours = reference_processor(family.name), hf_processors(family.name)["video"]
    clips = [clip(33, 112, 70), clip(40, 64, 84)]
    items = [ours.process(MediaSource.of(frames_to_raw(frames, fps=4.0))) for frames in clips]
    parts = [{"type": "text", "text": "See\n"}, {"type": "video"}, {"type": "video"}, {"type": "text", "text": "0 ?"}]
    prompt = reference.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert prompt.count(ours.marker) == 2
    metadata = [VideoMetadata(len(frames), 4.0, *frames.shape[2:0:-1], len(frames) / 4) for frames in clips]
    for frames, each in zip(clips, metadata, strict=True):
        each.frames_indices = list(range(len(frames)))
    expected = reference(videos=clips, text=prompt, videos_kwargs={"return_tensors": "pt", "video_metadata": metadata})
    ids = expected.pop("input_ids")[0]

    assert reference.tokenizer(with_expansions(prompt, items, ours.marker))["input_ids"] == ids
    embed_id = reference.tokenizer.convert_tokens_to_ids(family.video_embed)
    assert sum(item.num_tokens for item in items) == ids.count(embed_id)
    theirs = {name: tensor for name, tensor in expected.items() if name not in TEXT_KEYS}
    check_equal(batch_tensors(items), theirs)


@pytest.mark.slow
def test_images_that_the_processor_rejects_name_their_digest(processor_directory: Any) -> None:
    # Longer than 200:1, which this policy allows and the processor does not.
    policy = MediaPolicy(max_aspect_ratio=1000)
    processor = load_hf_processors(processor_directory("qwen2-vl"), policy=policy, store=MediaStore())["image"]
    picture = source(noise(601, 2))
    with pytest.raises(MediaError, match=f"{picture.digest[:12]}.*aspect ratio") as caught:
        processor.process(picture)
    assert caught.value.digest == picture.digest
