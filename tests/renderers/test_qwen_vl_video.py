"""Frames, sizes, patches, floats and time stamps equal those of transformers' video processors."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen_vl_reference import QWEN2_PATCHES, QWEN3_PATCHES
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl import video_processing_qwen2_vl as qwen2
from transformers.models.qwen3_vl import video_processing_qwen3_vl as qwen3
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from renderers import MediaPolicy, MediaSource, MediaStore
from renderers.errors import MediaError, MediaLimitError
from renderers.media.decoding import frames_to_raw
from renderers.media.item import MediaItem
from renderers.vision.patches import normalised
from renderers.vision.qwen_vl_video import (
    QwenVLVideoConfig,
    QwenVLVideoProcessor,
    resized_frame_size,
    sampled_indices,
    time_stamps,
)

QWEN3_VL: dict[str, Any] = {
    **QWEN3_PATCHES,
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 4096, "longest_edge": 25165824},
}
QWEN2_VL: dict[str, Any] = {
    **QWEN2_PATCHES,
    "video_processor_type": "Qwen2VLVideoProcessor",
    "min_pixels": 3136,
    "max_pixels": 100_352,
}
CONFIGS = {
    "Qwen3-VL": QWEN3_VL,
    "Qwen2-VL": QWEN2_VL,
    "Qwen2-VL, 2 fps": {**QWEN2_VL, "do_sample_frames": True, "fps": 2},
}
CLASSES: dict[str, Any] = {
    "Qwen3VLVideoProcessor": qwen3.Qwen3VLVideoProcessor,
    "Qwen2VLVideoProcessor": qwen2.Qwen2VLVideoProcessor,
}


def noise(count: int, width: int, height: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def processor(config: dict[str, Any], processor_class: str | None = None) -> QwenVLVideoProcessor:
    read = QwenVLVideoConfig.from_dict(config, path="c", processor_class=processor_class)
    return QwenVLVideoProcessor(read, policy=MediaPolicy(), store=MediaStore())


def processed(config: dict[str, Any], frames: np.ndarray, fps: float | None, family: str | None = None) -> MediaItem:
    return processor(config, family).process(MediaSource.of(frames_to_raw(frames, fps)))


def reference_processor(config: dict[str, Any]) -> Any:
    arguments = copy.deepcopy(config)  # it writes min_pixels into the `size` that it is given
    return CLASSES[arguments.pop("video_processor_type")](**arguments)


def metadata(count: int, fps: float | None) -> dict[str, Any]:
    return {"total_num_frames": count, "fps": fps, "frames_indices": list(range(count))}


def theirs_of(reference: Any, frames: np.ndarray, fps: float | None, **steps: bool) -> Any:
    return reference(
        [frames],
        video_metadata=[metadata(len(frames), fps)],
        input_data_format="channels_last",
        return_metadata=True,
        return_tensors="pt",
        **steps,
    )


def printed(item: MediaItem) -> str:
    assert item.expansion is not None
    return "".join(piece.text * piece.times for piece in item.expansion)


def check_equal(config: dict[str, Any], reference: Any, frames: np.ndarray, fps: float | None) -> None:
    ours = processed(config, frames, fps)
    pixels, floats = ours["pixel_values_videos"], normalised(ours, "pixel_values_videos")
    for steps, mine in (({"do_rescale": False, "do_normalize": False}, pixels), ({}, floats)):
        theirs = theirs_of(reference, frames, fps, **steps)
        assert ours["video_grid_thw"].tolist() == theirs["video_grid_thw"][0].tolist()
        np.testing.assert_array_equal(mine, theirs["pixel_values_videos"].numpy())
    assert (pixels.dtype, floats.dtype, ours["video_grid_thw"].dtype) == (np.uint8, np.float32, np.int64)
    assert ours.num_tokens == int(ours["video_grid_thw"].prod()) // config["merge_size"] ** 2
    if config["video_processor_type"] != "Qwen3VLVideoProcessor":
        assert ours.expansion is None
        return
    assert printed(ours) == Qwen3VLProcessor.replace_video_token(prompt_writer(reference), theirs, 0)
    assert ours.expansion is not None
    assert sum(piece.times for piece in ours.expansion if piece.embed) == ours.num_tokens


def prompt_writer(reference: Any) -> Any:
    """What `Qwen3VLProcessor.replace_video_token` reads of a processor, which is made with a tokenizer only."""
    writer = SimpleNamespace(
        video_processor=reference,
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )
    writer._calculate_timestamps = lambda *args: Qwen3VLProcessor._calculate_timestamps(writer, *args)
    return writer


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 17, 33, 64])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("fps", [2.0, 23.976, 30.0])
def test_videos_equal_those_of_real_configurations(name: str, count: int, fps: float) -> None:
    check_equal(CONFIGS[name], reference_processor(CONFIGS[name]), noise(count, 100, 70), fps)


@pytest.mark.parametrize("size", [(1, 1), (1, 100), (16, 2000), (33, 31), (640, 360), (1280, 720)])
@pytest.mark.parametrize("name", CONFIGS)
def test_frames_of_every_size_are_equal(name: str, size: tuple[int, int]) -> None:
    check_equal(CONFIGS[name], reference_processor(CONFIGS[name]), noise(4, *size), 2.0)


@pytest.mark.parametrize(
    "change",
    [
        {"cap_pixels_per_frame": True},
        {"cap_pixels_per_frame": False},
        {"cap_pixels_per_frame": True, "max_video_tokens": 64},
        {"do_sample_frames": False, "fps": None},
        {"do_sample_frames": True, "fps": 1.5, "max_frames": 5},
        {"do_sample_frames": True, "fps": None, "num_frames": 6},
        {"do_sample_frames": True, "fps": 1, "min_frames": 8},
        {"temporal_patch_size": 3},
        {"merge_size": 1},
        {"resample": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["Qwen3-VL", "Qwen2-VL"])
def test_every_setting_is_followed(name: str, change: dict[str, Any]) -> None:
    config = {**CONFIGS[name], **change}
    check_equal(config, reference_processor(config), noise(18, 160, 120), 12.0)


# Sampling.


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    total=st.integers(1, 5000),
    speed=st.none() | st.floats(0.5, 240),
    fps=st.none() | st.floats(0.1, 30),
    num_frames=st.none() | st.integers(1, 300),
    limits=st.tuples(st.integers(1, 64), st.integers(1, 800)),
    kind=st.sampled_from(list(CLASSES)),
    temporal=st.sampled_from([1, 2, 4]),
)
def test_sampled_frames_are_those_of_the_processor(
    total: int,
    speed: float | None,
    fps: float | None,
    num_frames: int | None,
    limits: tuple[int, int],
    kind: str,
    temporal: int,
) -> None:
    if num_frames is not None:
        fps = None
    elif kind == "Qwen2VLVideoProcessor" and fps is None:
        fps = 2.0
    config = {**QWEN3_VL, "video_processor_type": kind, "do_sample_frames": True, "fps": fps, "num_frames": num_frames}
    config |= {"min_frames": limits[0], "max_frames": limits[1], "temporal_patch_size": temporal}
    read = QwenVLVideoConfig.from_dict(config, path="c")
    try:
        theirs = reference_processor(config).sample_frames(
            VideoMetadata(total_num_frames=total, fps=speed), num_frames=num_frames, fps=fps
        )
    except (ValueError, ZeroDivisionError):
        with pytest.raises((MediaLimitError, MediaError)):
            sampled_indices(total, speed, read)
        return
    indices = [int(index) for index in theirs]
    if indices[-1:] == [total]:  # rounding made one step too many there, past the last frame
        indices.pop()
    assert sampled_indices(total, speed, read) == indices


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    indices=st.lists(st.integers(0, 5000), min_size=1, max_size=40).map(sorted),
    fps=st.floats(0.5, 240),
    temporal=st.sampled_from([1, 2, 4]),
)
def test_time_stamps_are_those_of_the_processor(indices: list[int], fps: float, temporal: int) -> None:
    theirs = Qwen3VLProcessor._calculate_timestamps(SimpleNamespace(), list(indices), fps, temporal)  # type: ignore[arg-type]
    assert time_stamps(indices, fps, temporal) == theirs


# Sizes.


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    size=st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
    frames=st.integers(1, 800),
    smallest=st.integers(1, 10**6),
    span=st.integers(0, 3 * 10**7),
    cap=st.booleans(),
    tokens=st.integers(16, 10**5),
    kind=st.sampled_from(list(CLASSES)),
)
def test_sizes_follow_smart_resize(
    size: tuple[int, int], frames: int, smallest: int, span: int, cap: bool, tokens: int, kind: str
) -> None:
    width, height = size
    config = {
        **QWEN3_VL,
        "video_processor_type": kind,
        "size": {"shortest_edge": smallest, "longest_edge": smallest + span + 10**5},
        "cap_pixels_per_frame": cap,
        "max_video_tokens": tokens,
    }
    reference = reference_processor(config)
    asked: list[Any] = []
    # The size is decided inside `resize`; what it then asks torchvision for is what is compared.
    reference_base = type(reference).__mro__[1]
    original = reference_base.resize
    reference_base.resize = lambda self, image, size, **_: asked.append((size.width, size.height))
    try:
        reference.resize(
            torch.empty((1, frames, 3, height, width), device="meta"),
            size=reference.size,
            resample=3,
            factor=32,
            temporal_factor=2,
            cap_pixels_per_frame=cap,
        )
    except ValueError:
        with pytest.raises(MediaLimitError):
            resized_frame_size(width, height, frames, QwenVLVideoConfig.from_dict(config, path="c"))
        return
    finally:
        reference_base.resize = original
    assert asked == [resized_frame_size(width, height, frames, QwenVLVideoConfig.from_dict(config, path="c"))]


# Qwen2.5-VL.


@pytest.mark.parametrize("fps", [None, 10.0, 29.97])
@pytest.mark.parametrize("sample", [False, True])
def test_qwen25_is_told_the_seconds_that_a_patch_spans(fps: float | None, sample: bool) -> None:
    if fps is None and sample:
        return
    config = {**QWEN2_VL, "do_sample_frames": sample, "fps": 2 if sample else None}
    frames = noise(20, 56, 56)
    reference = reference_processor(config)
    theirs = theirs_of(reference, frames, fps)
    expected = reference.temporal_patch_size / theirs["video_metadata"][0].sampled_fps
    ours = processed(config, frames, fps, Qwen2_5_VLProcessor.__name__)
    assert ours["second_per_grid_ts"].dtype == np.float32
    assert ours["second_per_grid_ts"] == torch.tensor([expected])[0].item()
    assert ours.fields.keys() == ours.tensors.keys()
    assert "second_per_grid_ts" not in processed(config, frames, fps)


# Refusals.


def test_the_sampled_pixels_of_a_video_are_bounded_by_the_policy() -> None:
    config = QwenVLVideoConfig.from_dict(QWEN3_VL, path="c")
    source = MediaSource.of(frames_to_raw(noise(4, 64, 64), 2.0))
    for most, fits in ((4 * 64 * 64, True), (4 * 64 * 64 - 1, False)):
        made = QwenVLVideoProcessor(config, policy=MediaPolicy(max_video_pixels=most), store=MediaStore())
        if fits:
            assert made.process(source).num_tokens == 8
        else:
            with pytest.raises(MediaLimitError, match="max_video_pixels"):
                made.process(source)


# The hash names the pixels.

CHANGES: list[dict[str, Any]] = [
    {"video_processor_type": "Qwen2VLVideoProcessor", "fps": 2, "do_sample_frames": True, "max_video_tokens": 768},
    {"patch_size": 14},
    {"temporal_patch_size": 1},
    {"merge_size": 1},
    {"min_pixels": 1},
    {"max_pixels": 10**6},
    {"resample": 2},
    {"do_sample_frames": False},
    {"fps": 3},
    {"fps": None, "num_frames": 8},
    {"min_frames": 2},
    {"max_frames": 100},
    {"cap_pixels_per_frame": True},
    {"max_video_tokens": 100},
    {"processor_class": "Qwen2_5_VLProcessor"},
    {"rescale_factor": 1 / 256},
    {"image_mean": [0.5, 0.5, 0.4]},
    {"image_std": [0.5, 0.4, 0.5]},
]


def test_the_hash_changes_with_every_setting_and_with_the_source() -> None:
    source = MediaSource.of(frames_to_raw(noise(2, 8, 8)))
    hashes = [processor({**QWEN3_VL, **change}).mm_hash(source) for change in [{}, *CHANGES]]
    hashes.append(processor(QWEN3_VL).mm_hash(MediaSource.of(frames_to_raw(noise(2, 8, 8), 5.0))))
    assert len(set(hashes)) == len(CHANGES) + 2
    assert processor(dict(QWEN3_VL)).mm_hash(source) == hashes[0]


def test_qwen2_cannot_sample_by_time_where_nobody_knows_the_time() -> None:
    with pytest.raises(MediaError, match="fps"):
        processed(CONFIGS["Qwen2-VL, 2 fps"], noise(4, 64, 64), None)


def test_a_video_shorter_than_a_patch_is_refused_for_qwen3_as_it_is_there() -> None:
    frames = noise(1, 64, 64)
    with pytest.raises(ValueError, match="temporal_factor"):
        theirs_of(reference_processor(QWEN3_VL), frames, 2.0)
    source = MediaSource.of(frames_to_raw(frames, 2.0))
    with pytest.raises(MediaLimitError, match=r"1 frame.*2 are needed.*as an image") as caught:
        processor(QWEN3_VL).process(source)
    assert caught.value.digest == source.digest
