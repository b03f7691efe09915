"""Pixels, grids and floats equal those of the transformers processor, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from renderers import MediaPolicy, MediaSource, MediaStore
from renderers.errors import InvalidFileError, MediaLimitError
from renderers.media.raw import image_to_raw
from renderers.vision.normalise import PixelScale, normalise
from renderers.vision.qwen_vl import QwenVLConfig, QwenVLProcessor, patchify, resized_size

SIZES = [(1, 1), (1, 200), (200, 1), (7, 13), (32, 32), (48, 64), (300, 201), (1000, 700)]
QWEN3_VL: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
QWEN2_VL: dict[str, Any] = {
    **QWEN3_VL,
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "min_pixels": 3136,
    "max_pixels": 200_000,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def processor(config: dict[str, Any]) -> QwenVLProcessor:
    return QwenVLProcessor(QwenVLConfig.from_dict(config, path="c"), policy=MediaPolicy(), store=MediaStore())


def source(image: Image.Image) -> MediaSource:
    return MediaSource.of(image_to_raw(image))


def reference_processor(config: dict[str, Any]) -> Qwen2VLImageProcessorPil:
    arguments = copy.deepcopy(config)  # it writes min_pixels into the `size` that it is given
    del arguments["image_processor_type"]
    return Qwen2VLImageProcessorPil(**arguments)


def check_equal(config: dict[str, Any], reference: Any, image: Image.Image) -> None:
    ours = processor(config).process(source(image))
    theirs = reference(images=[image], return_tensors="np")
    assert ours["image_grid_thw"].tolist() == theirs["image_grid_thw"][0].tolist()
    assert ours["pixel_values"].dtype == np.uint8
    assert ours["image_grid_thw"].dtype == np.int64
    floats = normalise(ours["pixel_values"], ours.scale)
    assert floats.dtype == np.float32
    np.testing.assert_array_equal(floats, theirs["pixel_values"])
    assert ours.num_tokens == int(np.prod(ours["image_grid_thw"])) // config["merge_size"] ** 2


@pytest.mark.parametrize("size", SIZES)
def test_pixels_equal_those_of_the_models_own_processor(tiny_model_dir: Path, size: tuple[int, int]) -> None:
    config = json.loads((tiny_model_dir / "preprocessor_config.json").read_text())
    check_equal(config, AutoImageProcessor.from_pretrained(tiny_model_dir, use_fast=False), noise(*size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["Qwen3-VL", "Qwen2-VL"])
def test_pixels_equal_those_of_real_configurations(name: str, size: tuple[int, int]) -> None:
    config = {"Qwen3-VL": QWEN3_VL, "Qwen2-VL": QWEN2_VL}[name]
    check_equal(config, reference_processor(config), noise(*size))


@pytest.mark.parametrize(
    "change",
    [
        {"image_mean": [0.5, 0.5, 0.49]},
        {"resample": 2},
        {"size": {"shortest_edge": 1024, "longest_edge": 9999}},
        {"image_std": [0.5, 0.51, 0.5]},
    ],
    ids=str,
)
def test_the_comparison_sees_a_planted_fault(change: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check_equal(QWEN3_VL, reference_processor({**QWEN3_VL, **change}), noise(48, 64))


@settings(max_examples=150)
@given(
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    patch=st.sampled_from([8, 14, 16]),
    smallest=st.integers(1, 10**5),
    span=st.integers(0, 10**7),
)
def test_sizes_follow_smart_resize(width: int, height: int, patch: int, smallest: int, span: int) -> None:
    config = QwenVLConfig(patch_size=patch, min_pixels=smallest, max_pixels=smallest + 4 * (2 * patch) ** 2 + span)
    limits = {"factor": 2 * patch, "min_pixels": config.min_pixels, "max_pixels": config.max_pixels}
    if max(width, height) / min(width, height) > 200:
        with pytest.raises(ValueError, match="aspect ratio"):
            smart_resize(height, width, **limits)
        with pytest.raises(MediaLimitError, match="200:1"):
            resized_size(width, height, config)
        return
    assert resized_size(width, height, config)[::-1] == smart_resize(height, width, **limits)


def test_a_picture_past_the_aspect_ratio_limit_is_refused() -> None:
    with pytest.raises(MediaLimitError, match="201x1 picture is longer than 200:1"):
        processor(QWEN3_VL).process(source(noise(201, 1)))


@settings(max_examples=60)
@given(
    mean=st.tuples(*[st.floats(0, 1)] * 3),
    std=st.tuples(*[st.floats(0.01, 2)] * 3),
    factor=st.sampled_from([1 / 255, 1 / 127.5, 1.0, 0.00392]),
)
def test_normalise_is_the_arithmetic_of_the_processor(
    mean: tuple[float, ...], std: tuple[float, ...], factor: float
) -> None:
    # Each channel holds every value of a uint8; no resize at 32x32 with these limits.
    values = np.stack([np.resize(np.roll(np.arange(256, dtype=np.uint8), 50 * c), (32, 32)) for c in range(3)], axis=2)
    reference = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 1024, "longest_edge": 1024},
        patch_size=8,
        image_mean=list(mean),
        image_std=list(std),
        rescale_factor=factor,
    )
    theirs = reference(images=[Image.fromarray(values)], return_tensors="np")["pixel_values"]
    config = QwenVLConfig(patch_size=8, min_pixels=1024, max_pixels=1024)
    np.testing.assert_array_equal(normalise(patchify(values, config), PixelScale(factor, mean, std)), theirs)


def test_patches_of_one_merge_block_are_neighbours() -> None:
    """A 4x4 picture of 1-pixel patches, merged 2x2, each pixel holding its row and column."""
    rows, columns = np.indices((4, 4), dtype=np.uint8)
    pixels = np.stack([rows, columns, np.zeros_like(rows)], axis=2)
    patches = patchify(pixels, QwenVLConfig(patch_size=1, merge_size=2, temporal_patch_size=2))
    assert patches.shape == (16, 3 * 2)
    order = [(int(patch[0]), int(patch[2])) for patch in patches]  # channel, then time
    assert order[:8] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert order[8:] == [(2, 0), (2, 1), (3, 0), (3, 1), (2, 2), (2, 3), (3, 2), (3, 3)]


# The hash names the pixels.

CHANGES: list[dict[str, Any]] = [
    {"patch_size": 14},
    {"temporal_patch_size": 1},
    {"merge_size": 1},
    {"size": {"shortest_edge": 65537, "longest_edge": 16777216}},
    {"size": {"shortest_edge": 65536, "longest_edge": 16777217}},
    {"min_pixels": 1},
    {"max_pixels": 10**6},
    {"resample": 2},
    {"rescale_factor": 1 / 256},
    {"image_mean": [0.5, 0.5, 0.4]},
    {"image_std": [0.5, 0.4, 0.5]},
]


def test_the_hash_changes_with_every_number_of_the_processor_and_with_the_source() -> None:
    picture = source(noise(8, 8))
    hashes = [processor({**QWEN3_VL, **change}).mm_hash(picture) for change in [{}, *CHANGES]]
    hashes.append(processor(QWEN3_VL).mm_hash(source(noise(8, 9))))
    assert len(set(hashes)) == len(CHANGES) + 2
    assert processor(dict(QWEN3_VL)).mm_hash(picture) == hashes[0]


def test_the_list_of_changes_above_has_every_field() -> None:
    base = QwenVLConfig.from_dict(QWEN3_VL, path="c")
    changed: set[str] = set()
    for change in CHANGES:
        other = QwenVLConfig.from_dict({**QWEN3_VL, **change}, path="c")
        changed |= {
            field.name
            for field in (*dataclasses.fields(QwenVLConfig), *dataclasses.fields(PixelScale))
            if getattr(other, field.name, getattr(other.scale, field.name, None))
            != getattr(base, field.name, getattr(base.scale, field.name, None))
        }
    fields = {field.name for field in (*dataclasses.fields(QwenVLConfig), *dataclasses.fields(PixelScale))}
    assert changed == fields


def test_the_hash_changes_with_the_version_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    before = processor(QWEN3_VL).fingerprint
    monkeypatch.setattr("PIL.__version__", "0.0")
    assert processor(QWEN3_VL).fingerprint != before


# Configurations that cannot be followed.


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
        ({"image_processor_type": None}, "image_processor_type"),
        ({"patch_size": None}, "none"),
        ({"patch_size": "many"}, "many"),
        ({"image_mean": 0.5}, "iterable"),
        ({"size": {"shortest_edge": 1}}, "longest_edge"),
        ({"size": None}, "shortest_edge"),
        ({"do_normalize": False}, "do_normalize"),
        ({"do_rescale": False}, "do_rescale"),
        ({"do_resize": False}, "do_resize"),
    ],
)
def test_a_configuration_that_cannot_be_followed_names_what_is_wrong(change: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidFileError, match=rf"(?i)dir/preprocessor_config.json: .*{word}"):
        QwenVLConfig.from_dict({**QWEN3_VL, **change}, path="dir/preprocessor_config.json")


@pytest.mark.parametrize("key", ["patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"])
def test_a_missing_number_is_named(key: str) -> None:
    config = {name: value for name, value in QWEN3_VL.items() if name != key}
    with pytest.raises(InvalidFileError, match=key):
        QwenVLConfig.from_dict(config, path="c")
