"""Pixels, grids and floats equal those of the transformers processors, bit for bit, in both of their backends."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skimage
import sklearn
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor
from transformers.image_transforms import convert_to_rgb
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from renderers import MediaPolicy, MediaSource, MediaStore
from renderers.errors import InvalidFileError, MediaDecodeError, MediaLimitError
from renderers.media.decoding import decoder_versions
from renderers.media.pixel_scale import PixelScale
from renderers.media.raw import image_to_raw
from renderers.vision.normalise import normalise, normalised
from renderers.vision.patches import StillPatches, still_patches
from renderers.vision.processor import ImageBackend
from renderers.vision.qwen_vl import QwenVLConfig, QwenVLProcessor, is_qwen_vl_image_config, resized_size

BACKENDS: dict[ImageBackend, type[Any]] = {"torchvision": Qwen2VLImageProcessor, "pillow": Qwen2VLImageProcessorPil}
SIZES = [(1, 1), (1, 200), (200, 1), (7, 13), (32, 32), (48, 64), (300, 201), (1000, 700)]
LARGE = [(4096, 4096), (4000, 3000), (4096, 21), (1024, 1024), (2049, 1537)]
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
CONFIGS = {"Qwen3-VL": QWEN3_VL, "Qwen2-VL": QWEN2_VL}


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def processor(config: dict[str, Any], backend: ImageBackend | None = None) -> QwenVLProcessor:
    read = QwenVLConfig.from_dict(config, path="c", backend=backend)
    return QwenVLProcessor(read, policy=MediaPolicy(), store=MediaStore())


def source(image: Image.Image) -> MediaSource:
    return MediaSource.of(image_to_raw(image))


def reference_processor(config: dict[str, Any], backend: ImageBackend) -> Any:
    arguments = copy.deepcopy(config)  # it writes min_pixels into the `size` that it is given
    del arguments["image_processor_type"]
    return BACKENDS[backend](**arguments)


def theirs_of(reference: Any, image: Image.Image, **steps: bool) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in reference(images=[image], return_tensors="pt", **steps).items()}


def check_equal(
    config: dict[str, Any], reference: Any, image: Image.Image, backend: ImageBackend, data: MediaSource | None = None
) -> None:
    ours = processor(config, backend).process(data or source(image))
    pixels, floats = ours["pixel_values"], normalised(ours, "pixel_values")
    for steps, mine in (({"do_rescale": False, "do_normalize": False}, pixels), ({}, floats)):
        theirs = theirs_of(reference, image, **steps)
        assert ours["image_grid_thw"].tolist() == theirs["image_grid_thw"][0].tolist()
        np.testing.assert_array_equal(mine, theirs["pixel_values"])
    assert (pixels.dtype, floats.dtype, ours["image_grid_thw"].dtype) == (np.uint8, np.float32, np.int64)
    assert ours.num_tokens == int(np.prod(ours["image_grid_thw"])) // config["merge_size"] ** 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_equal_those_of_the_models_own_processor(
    tiny_model_dir: Path, size: tuple[int, int], backend: ImageBackend
) -> None:
    config = json.loads((tiny_model_dir / "preprocessor_config.json").read_text())
    name = {"torchvision": "torchvision", "pillow": "pil"}[backend]
    reference = AutoImageProcessor.from_pretrained(tiny_model_dir, backend=name)
    assert isinstance(reference, BACKENDS[backend])
    check_equal(config, reference, noise(*size), backend)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_equal_those_of_real_configurations(name: str, size: tuple[int, int], backend: ImageBackend) -> None:
    check_equal(CONFIGS[name], reference_processor(CONFIGS[name], backend), noise(*size), backend)


@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_of_large_images_are_equal(size: tuple[int, int], backend: ImageBackend) -> None:
    config = {**QWEN3_VL, "size": {"shortest_edge": 65536, "longest_edge": 1024 * 768}}
    check_equal(config, reference_processor(config, backend), noise(*size), backend)


def test_the_largest_image_that_is_not_shrunk_is_equal() -> None:
    picture = noise(4096, 4096)
    ours = processor(QWEN3_VL).process(source(picture))
    theirs = theirs_of(reference_processor(QWEN3_VL, "torchvision"), picture, do_rescale=False, do_normalize=False)
    assert ours["image_grid_thw"].tolist() == [1, 256, 256]
    np.testing.assert_array_equal(ours["pixel_values"], theirs["pixel_values"])


@settings(max_examples=60, deadline=None)
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


PHOTOGRAPHS = [
    Path(sklearn.__file__).parent / "datasets" / "images" / "china.jpg",
    Path(sklearn.__file__).parent / "datasets" / "images" / "flower.jpg",
    *(
        Path(skimage.__file__).parent / "data" / name
        for name in ("chelsea.png", "coffee.png", "rocket.jpg", "text.png")
    ),
]


@pytest.mark.parametrize("path", PHOTOGRAPHS, ids=lambda path: path.name)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_photographs_are_equal(path: Path, name: str, backend: ImageBackend) -> None:
    with Image.open(path) as picture:
        check_equal(
            CONFIGS[name],
            reference_processor(CONFIGS[name], backend),
            picture,
            backend,
            MediaSource.of(path.read_bytes()),
        )


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
def test_every_mode_of_pillow_is_seen_as_transformers_sees_it(image: Image.Image, backend: ImageBackend) -> None:
    check_equal(QWEN3_VL, reference_processor(QWEN3_VL, backend), image.copy(), backend, source(image))


def test_16_bit_grey_is_scaled_where_transformers_clips_it() -> None:
    image = Image.fromarray(np.full((64, 64), 0x8000, dtype=np.uint16))
    assert convert_to_rgb(image, return_numpy=True)[0, 0].tolist() == [255] * 3
    assert processor(QWEN3_VL).process(source(image))["pixel_values"][0, 0] == 128


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF"])
def test_files_are_equal_to_what_is_made_of_the_upright_image(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    RGBA.convert("RGB").resize((75, 50)).save(buffer, format, **({} if format == "GIF" else {"exif": exif}))
    with Image.open(buffer) as stored:
        picture = stored.convert("RGB")
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    if orientation in turns and format != "GIF":
        picture = picture.transpose(turns[orientation])
    reference = reference_processor(QWEN3_VL, "torchvision")
    check_equal(QWEN3_VL, reference, picture, "torchvision", MediaSource.of(buffer.getvalue()))


@pytest.mark.parametrize(
    "change",
    [
        {"image_mean": [0.5, 0.5, 0.49]},
        {"resample": 2},
        {"size": {"shortest_edge": 1024, "longest_edge": 9999}},
        {"image_std": [0.5, 0.51, 0.5]},
        {"rescale_factor": 1 / 254},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_comparison_sees_a_planted_fault(change: dict[str, Any], backend: ImageBackend) -> None:
    with pytest.raises(AssertionError):
        check_equal(QWEN3_VL, reference_processor({**QWEN3_VL, **change}, backend), noise(48, 64), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_comparison_sees_the_other_backend(backend: ImageBackend) -> None:
    other = next(name for name in BACKENDS if name != backend)
    with pytest.raises(AssertionError):
        check_equal(QWEN2_VL, reference_processor(QWEN2_VL, other), noise(48, 64), backend)


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


# Floats.

SCALES = {
    "mean": st.tuples(*[st.floats(0, 1)] * 3),
    "std": st.tuples(*[st.floats(0.01, 2)] * 3),
    "factor": st.sampled_from([1 / 255, 1 / 127.5, 1.0, 0.00392]),
}
# Each channel holds every value of a uint8.
EVERY_VALUE = np.stack([np.resize(np.roll(np.arange(256, dtype=np.uint8), 50 * c), (32, 32)) for c in range(3)])


def patches_of(planes: np.ndarray, patch: int = 8) -> StillPatches:
    return still_patches(planes, patch_size=patch, merge_size=2, temporal_patch_size=2)


@settings(max_examples=100, deadline=None)
@given(**SCALES, backend=st.sampled_from(list(BACKENDS)))
def test_normalise_is_the_arithmetic_of_the_processor(
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


def test_the_tensors_of_an_item_that_is_not_scaled_come_as_they_are() -> None:
    item = processor(QWEN3_VL).process(source(noise(64, 64)))
    floats = dataclasses.replace(item, scale=None, tensors={"pixel_values": np.ones((4, 6), dtype=np.float32)})
    assert normalised(floats, "pixel_values") is floats.tensors["pixel_values"]


# Patches.


@pytest.mark.parametrize("merge", [1, 2, 3])
@pytest.mark.parametrize("patch", [1, 8, 14, 16])
def test_patches_of_one_merge_block_are_neighbours(patch: int, merge: int) -> None:
    """Against the definition, pixel by pixel: which patch holds row y and column x of channel c, and where."""
    height, width = 2 * patch * merge, 3 * patch * merge
    planes = np.random.default_rng(0).integers(0, 256, (3, height, width), dtype=np.uint8)
    made = still_patches(planes, patch_size=patch, merge_size=merge, temporal_patch_size=2)
    patches = made.unpack().reshape(-1, 3, 2, patch, patch)
    block = patch * merge
    for y in range(0, height, max(1, patch - 1)):
        for x in range(0, width, max(1, patch - 1)):
            blocks_before = (y // block) * (width // block) + x // block
            inside = (y % block // patch) * merge + x % block // patch
            at = patches[blocks_before * merge**2 + inside, :, :, y % patch, x % patch]
            assert at.tolist() == [[value, value] for value in planes[:, y, x].tolist()]


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


def test_errors_name_the_source() -> None:
    for data in (b"hello", b"mmpxRGB\0" + bytes(8)):
        broken = MediaSource.of(data)
        with pytest.raises(MediaDecodeError) as caught:
            processor(QWEN3_VL).process(broken)
        assert caught.value.digest == broken.digest


def test_the_fields_of_an_item_name_its_tensors() -> None:
    made = processor(QWEN3_VL)
    item = made.process(source(noise(64, 64)))
    assert item.fields.keys() == item.tensors.keys()
    assert (item.expansion, made.marker, made.embed_token) == (None, "<|image_pad|>", "<|image_pad|>")


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
    {"image_processor_type": "Qwen2VLImageProcessorPil"},
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


@pytest.mark.parametrize(
    ("backend", "name", "changes"),
    [
        ("pillow", "PIL.__version__", True),
        ("torchvision", "PIL.__version__", True),  # which turns palettes, CMYK and animations into colours
        ("pillow", "renderers.vision.resampling.VERSION", False),
        ("torchvision", "renderers.vision.resampling.VERSION", True),
    ],
)
def test_the_hash_changes_with_the_version_of_the_backends_resampler(
    monkeypatch: pytest.MonkeyPatch, backend: ImageBackend, name: str, changes: bool
) -> None:
    before = processor(QWEN3_VL, backend).fingerprint
    monkeypatch.setattr(name, "0.0")
    assert (processor(QWEN3_VL, backend).fingerprint != before) == changes


@pytest.mark.parametrize("library", ["jpg", "libjpeg_turbo", "webp", "avif", "jpg_2000"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_hash_changes_with_the_version_of_every_lossy_decoder(
    monkeypatch: pytest.MonkeyPatch, backend: ImageBackend, library: str
) -> None:
    before = processor(QWEN3_VL, backend).fingerprint
    versions = {**decoder_versions(), library: "0.0"}
    monkeypatch.setattr("renderers.vision.qwen_vl.decoder_versions", lambda: versions)
    assert library in decoder_versions()
    assert processor(QWEN3_VL, backend).fingerprint != before


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Qwen2VLImageProcessor", "torchvision"),
        ("Qwen2VLImageProcessorFast", "torchvision"),
        ("Qwen2VLImageProcessorPil", "pillow"),
    ],
)
def test_the_backend_is_the_one_that_transformers_loads(tmp_path: Path, kind: str, expected: ImageBackend) -> None:
    config = {**QWEN3_VL, "image_processor_type": kind}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    assert QwenVLConfig.from_dict(config, path="c").backend == expected
    assert is_qwen_vl_image_config(config)
    if kind != "Qwen2VLImageProcessorPil":  # the automatic class takes that name only with backend="pil"
        assert type(AutoImageProcessor.from_pretrained(tmp_path)) is BACKENDS[expected]
    for backend in BACKENDS:
        assert QwenVLConfig.from_dict(config, path="c", backend=backend).backend == backend


def test_other_processors_are_not_read() -> None:
    assert not is_qwen_vl_image_config({"image_processor_type": "CLIPImageProcessor"})
    assert not is_qwen_vl_image_config({})


# Configurations that cannot be followed.


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
        ({"image_processor_type": None}, "image_processor_type"),
        ({"patch_size": None}, "patch_size"),
        ({"patch_size": "many"}, "many"),
        ({"image_mean": 0.5}, "image_mean is 0.5"),
        ({"size": {"shortest_edge": 1}}, "longest_edge"),
        ({"size": None}, "shortest_edge"),
        ({"do_normalize": False}, "do_normalize"),
        ({"do_rescale": False}, "do_rescale"),
        ({"do_resize": False}, "do_resize"),
        ({"resample": 1}, "resample is 1"),
        ({"resample": 0}, "resample is 0"),
        ({"image_std": [0.5, 0, 0.5]}, "may be 0"),
        ({"image_mean": [0.5]}, "three"),
        ({"patch_size": 0}, "patch_size is 0"),
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


def test_pillow_has_the_other_filters_too() -> None:
    config = {**QWEN3_VL, "resample": 1}
    check_equal(config, reference_processor(config, "pillow"), noise(48, 64), "pillow")
