"""Pixels, grids and floats equal those of the transformers processors, bit for bit, in both of their backends."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from processor_outputs import noise, source
from qwen_vl_reference import (
    BACKENDS,
    CONFIGS,
    QWEN3_VL,
    check_equal,
    processor,
    reference_processor,
    theirs_of,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from renderers import MediaPolicy, MediaStore
from renderers.errors import MediaLimitError
from renderers.media.item import PixelScale
from renderers.vision.patches import (
    StillPatches,
    bfloat16_to_float32,
    float32_to_bfloat16,
    normalise,
    still_patches,
)
from renderers.vision.processor import ImageBackend
from renderers.vision.qwen_vl import QwenVLConfig, QwenVLProcessor, resized_size

SIZES = [(1, 1), (1, 200), (200, 1), (7, 13), (32, 32), (48, 64), (300, 201), (1000, 700)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_equal_those_of_real_configurations(name: str, size: tuple[int, int], backend: ImageBackend) -> None:
    check_equal(CONFIGS[name], reference_processor(CONFIGS[name], backend), noise(*size), backend)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)  # test_resampling covers many more sizes
@given(
    width=st.integers(1, 400),
    height=st.integers(1, 400),
    name=st.sampled_from(list(CONFIGS)),
    resample=st.sampled_from([2, 3]),
    backend=st.sampled_from(list(BACKENDS)),
)
def test_pixels_of_any_size_are_equal(width: int, height: int, name: str, resample: int, backend: ImageBackend) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    config = {**CONFIGS[name], "resample": resample}
    check_equal(config, reference_processor(config, backend), noise(width, height), backend)


RGBA = Image.fromarray(np.random.default_rng(5).integers(0, 256, (37, 41, 4), dtype=np.uint8))
MODES = ("1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "RGBX", "I", "F", "RGBA", "LA", "PA", "LAB")


def in_mode(mode: str) -> Image.Image:
    return RGBA.convert(mode) if mode in ("RGBA", "LA", "PA") else RGBA.convert("RGB").convert(mode)


def keyed(mode: str) -> Image.Image:
    """One of its colours is transparent."""
    image = RGBA.convert("RGB").quantize(16) if mode == "P" else RGBA.convert(mode)
    image.info["transparency"] = 3 if mode == "P" else image.getpixel((3, 3))
    return image


@pytest.mark.parametrize("image", [*map(in_mode, MODES), *map(keyed, ("P", "L", "RGB"))], ids=lambda image: image.mode)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_pillow_mode_is_converted_as_transformers_converts_it(image: Image.Image, backend: ImageBackend) -> None:
    check_equal(QWEN3_VL, reference_processor(QWEN3_VL, backend), image.copy(), backend, source(image))


@pytest.mark.slow
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


@pytest.mark.parametrize(("allowed", "word"), [(10**6, "200:1"), (200, "max_aspect_ratio=200"), (1.5, "=1.5")])
def test_an_image_past_the_aspect_ratio_of_the_processor_or_the_policy_is_refused(allowed: float, word: str) -> None:
    picture = source(noise(201, 1))
    strict = QwenVLProcessor(QwenVLConfig(), policy=MediaPolicy(max_aspect_ratio=allowed), store=MediaStore())
    with pytest.raises(MediaLimitError, match=word) as caught:
        strict.process(picture)
    assert caught.value.digest == picture.digest


SCALES = {
    "mean": st.tuples(*[st.floats(0, 1)] * 3),
    "std": st.tuples(*[st.floats(0.01, 2)] * 3),
    "factor": st.sampled_from([1 / 255, 1 / 127.5, 1.0, 0.00392]),
}
# Each channel holds every value of a uint8.
EVERY_VALUE = np.stack([np.resize(np.roll(np.arange(256, dtype=np.uint8), 50 * c), (32, 32)) for c in range(3)])


def patches_of(planes: np.ndarray, patch: int = 8) -> StillPatches:
    return still_patches(planes, patch_size=patch, merge_size=2, temporal_patch_size=2)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(**SCALES, backend=st.sampled_from(list(BACKENDS)))
def test_normalise_equals_the_arithmetic_of_the_processor(
    mean: tuple[float, ...], std: tuple[float, ...], factor: float, backend: ImageBackend
) -> None:
    reference = BACKENDS[backend](
        size={"shortest_edge": 1024, "longest_edge": 1024},  # no resize at 32x32
        patch_size=8,
        image_mean=list(mean),
        image_std=list(std),
        rescale_factor=factor,
    )
    theirs = theirs_of(reference, Image.fromarray(EVERY_VALUE.transpose(1, 2, 0)))["pixel_values"]
    scale = PixelScale(factor, mean, std, fused=backend == "torchvision")
    packed = patches_of(EVERY_VALUE)
    np.testing.assert_array_equal(normalise(packed, scale), theirs)
    np.testing.assert_array_equal(normalise(packed.unpack(), scale), theirs)


@settings(max_examples=50, deadline=None)
@given(**SCALES, fused=st.booleans())
def test_bfloat16_is_rounded_as_torch_rounds_it(
    mean: tuple[float, ...], std: tuple[float, ...], factor: float, fused: bool
) -> None:
    scale = PixelScale(factor, mean, std, fused)
    expected = torch.from_numpy(normalise(patches_of(EVERY_VALUE), scale)).to(torch.bfloat16)
    bits = normalise(patches_of(EVERY_VALUE), scale, dtype="bfloat16")
    assert bits.dtype == np.uint16
    np.testing.assert_array_equal(bits, expected.view(torch.uint16).numpy())


def test_an_item_holds_the_pixels_of_a_still_image_once_and_read_only() -> None:
    picture = source(noise(1024, 1024))
    item = processor(QWEN3_VL).process(picture)
    assert item["pixel_values"].shape == (4096, 3 * 2 * 16 * 16)
    assert item.nbytes + picture.nbytes <= 6.4e6
    packed = item.tensors["pixel_values"]
    assert isinstance(packed, StillPatches)
    for array in (packed.packed, item["pixel_values"], item["image_grid_thw"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_float32_is_rounded_as_torch_rounds_it() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    floats = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
    expected = torch.from_numpy(floats).to(torch.bfloat16).view(torch.uint16).numpy()
    ours = float32_to_bfloat16(floats)
    assert ours.dtype == np.uint16
    is_nan = np.isnan(floats)
    np.testing.assert_array_equal(ours[~is_nan], expected[~is_nan])
    assert np.isnan(bfloat16_to_float32(ours[is_nan])).all()
    assert np.isnan(torch.from_numpy(expected[is_nan]).view(torch.bfloat16).float().numpy()).all()
