"""Items that HFProcessor makes one at a time equal what the processor of transformers makes of all images together."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hf_families import Family
from hypothesis import given, settings
from hypothesis import strategies as st
from processor_outputs import (
    BY_NAME,
    SIZES,
    TEXT_KEYS,
    batch_output,
    check_equal,
    clip,
    families,
    load_processors,
    noise,
    process_each,
    source,
    with_expansions,
)
from transformers.video_utils import VideoMetadata

from renderers import MediaPolicy, MediaSource, MediaStore, load_renderer
from renderers.errors import (
    MediaDecodeError,
    MediaError,
)
from renderers.media.decoding import frames_to_raw
from renderers.media.item import MediaItem
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
def test_a_batch_of_items_holds_the_tensors_of_the_models_own_processor(
    family: Family, reference_processor: Any, hf_processors: Any
) -> None:
    images = [noise(*size) for size in SIZES]
    items = process_each(hf_processors(family.name)["image"], images)
    check_equal(batch_tensors(items), batch_output(reference_processor(family.name), images))
    assert all(item.scale is None for item in items)
    assert not any(array.flags.writeable for item in items for array in item.values())


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


def test_tiles_of_two_images_in_one_sample_equal_those_of_two_samples(
    reference_processor: Any, hf_processors: Any
) -> None:
    """Idefics3 lays them out as one row of tiles a sample, and drops what is all zero before its vision tower."""
    reference = reference_processor("idefics3")
    images = [noise(*size) for size in SIZES]
    one_sample = reference(images=images, text=reference.image_token * 2, images_kwargs={"return_tensors": "pt"})
    ours = batch_tensors(process_each(hf_processors("idefics3")["image"], images))["pixel_values"]
    tiles = ours.reshape(-1, *ours.shape[2:])
    kept = tiles[(tiles != 0).any(axis=(1, 2, 3))]
    assert kept.tobytes() == one_sample["pixel_values"].numpy().tobytes()


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
@pytest.mark.skipif(not BY_NAME["smolvlm"].runs_here, reason="SmolVLM's processor needs num2words")
def test_videos_whose_text_depends_on_the_rest_of_the_batch_are_refused(hf_processors: Any) -> None:
    """SmolVLM announces the number of frames after padding: that of the longest video in the batch."""
    video = MediaSource.of(frames_to_raw(clip(9, 32, 32), fps=4.0))
    with pytest.raises(MediaError, match="other text in place of '<video>'") as caught:
        hf_processors("smolvlm")["video"].process(video)
    assert caught.value.digest == video.digest


def test_an_image_is_processed_once(hf_processors: Any) -> None:
    processor = hf_processors("kimi-k2.5")["image"]
    picture = source(noise(33, 44))
    assert processor.process(picture) is processor.process(MediaSource.of(bytes(picture.data)))


def test_items_made_by_several_threads_equal_those_of_one_thread(processor_directory: Any, hf_processors: Any) -> None:
    sizes = [(20 + 7 * index, 150 - 5 * index) for index in range(16)]
    alone = {size: hf_processors("pixtral")["image"].process(source(noise(*size))) for size in sizes}
    processor = load_processors(processor_directory("pixtral"))["image"]
    start = threading.Barrier(8)

    def work(order: int) -> list[tuple[tuple[int, int], MediaItem]]:
        start.wait()
        turned = sizes[order:] + sizes[:order]
        return [(size, processor.process(source(noise(*size)))) for size in turned]

    with ThreadPoolExecutor(8) as threads:
        for size, item in [pair for pairs in threads.map(work, range(8)) for pair in pairs]:
            assert item.expansion == alone[size].expansion
            assert {name: item[name].tobytes() for name in item} == {
                name: array.tobytes() for name, array in alone[size].items()
            }


@pytest.mark.slow
def test_images_that_the_processor_rejects_name_their_digest(processor_directory: Any) -> None:
    # Longer than 200:1, which this policy allows and the processor does not.
    policy = MediaPolicy(max_aspect_ratio=1000)
    processor = load_hf_processors(processor_directory("qwen2-vl"), policy=policy, store=MediaStore())["image"]
    picture = source(noise(601, 2))
    with pytest.raises(MediaError, match=f"{picture.digest[:12]}.*aspect ratio") as caught:
        processor.process(picture)
    assert caught.value.digest == picture.digest


def test_bytes_that_are_no_image_are_refused_before_the_processor_runs(hf_processors: Any) -> None:
    with pytest.raises(MediaDecodeError):
        hf_processors("pixtral")["image"].process(MediaSource.of(b"no image"))
