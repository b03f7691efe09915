"""Qwen-VL images in numpy and Pillow: size rule, resize, patch order, token count.

Follows `Qwen2VLImageProcessor` of transformers, which Qwen2-VL, 2.5-VL, 3-VL and 3.5 to 3.8 checkpoints name, in both
of its backends, bit for bit: the uint8 pixels after the resize and the floats after rescale and normalise.

- torchvision (what transformers from 5.0 and vLLM run, unless the configuration names the Pillow class): resizes in
  16-bit fixed point (`vision.resampling`), and rescales and normalises in one step in float32.
- pillow (`Qwen2VLImageProcessorPil`): resizes with Pillow (22-bit fixed point), and rescales in float64.

Without a resize, the uint8 pixels of the two are equal. After a resize, 0.05 to 0.4 % of the values differ
by 1, rarely 2, of 255 (photographs of 300 to 1400 pixels a side, Pillow 13). Where an image becomes wider
and lower, Pillow resizes columns first, and 16 % of the values differ, by up to 11. The floats differ in
their last bits. The pixels differ, so the fingerprints do too.

Patches are stored as uint8, after the resize and before rescale and normalise: a quarter of the float32 bytes,
lossless, and the input of a vLLM that normalises on the device. They are stored once, although the model takes a still
image as two equal frames. `vision.normalise` turns them into the processor's floats.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import PIL
from PIL import Image

from renderers.errors import LoadError, MediaLimitError, short_repr
from renderers.media.decoding import decode_planes, decoder_versions, image_planes, plane_image
from renderers.media.item import MediaItem, MediaSource, PackedArray, PixelScale, TensorField
from renderers.media.policy import MediaPolicy
from renderers.media.store import MediaStore
from renderers.messages import Modality
from renderers.vision import resampling
from renderers.vision.patches import still_patches
from renderers.vision.processor import ImageBackend, StoringProcessor

# The processor refuses longer images; resizing them would shrink one side to nothing.
MAX_ASPECT_RATIO = 200
#: Of a resized image. Published settings stay far below; more would exhaust the memory.
MAX_RESIZED_PIXELS = 2**27

_PROCESSOR_TYPES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
_FIELDS = {"pixel_values": TensorField("flat"), "image_grid_thw": TensorField("batched")}


def is_qwen_vl_image_config(config: Mapping[str, Any]) -> bool:
    """Whether `QwenVLConfig` reads this parsed preprocessor_config.json."""
    return config.get("image_processor_type") in _PROCESSOR_TYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelSettings:
    """The settings that the files for images and for videos share.

    min_pixels and max_pixels: of width times height. resample: one of Pillow's filters; the torchvision backend knows 2
    (bilinear) and 3 (bicubic).
    """

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 65536
    max_pixels: int = 16777216
    resample: int = 3
    scale: PixelScale = PixelScale(fused=True)

    @property
    def factor(self) -> int:
        """Width and height after the resize are multiples of this many pixels."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVLConfig(PixelSettings):
    """The settings of preprocessor_config.json that affect pixels."""

    backend: ImageBackend = "torchvision"

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, path: str) -> Self:
        """Read a parsed preprocessor_config.json; `path` names it in errors. Raises `LoadError`."""
        # As transformers 5 chooses it.
        backend: ImageBackend = "pillow" if config["image_processor_type"].endswith("Pil") else "torchvision"
        return cls(backend=backend, **read_pixel_settings(config, path=path, fused=backend == "torchvision"))

    @property
    def fingerprint(self) -> str:
        """16 hex digits of all that affects pixels: settings, versions of resampler and decoders."""
        ours = {"resampler": resampling.VERSION} if self.backend == "torchvision" else {}
        return fingerprint("image", self, **ours, decoders=decoder_versions())


class QwenVLProcessor(StoringProcessor):
    """Turns media sources into `MediaItem`s, each distinct image once."""

    modality: Modality = "image"
    marker = embed_token = "<|image_pad|>"

    def __init__(self, config: QwenVLConfig, *, policy: MediaPolicy, store: MediaStore) -> None:
        super().__init__(config.fingerprint, policy, store)
        self.config = config

    def make_item(self, source: MediaSource) -> MediaItem:
        """Its `pixel_values` are `StillPatches`. Raises `MediaLimitError`, `MediaError`."""
        config = self.config
        planes = decode_planes(source, self.policy)
        width, height = resized_size(planes.shape[2], planes.shape[1], config, digest=source.digest)
        resized = _resized(planes, width, height, config)
        patches = still_patches(resized, config.patch_size, config.merge_size, config.temporal_patch_size)
        grid = np.array((1, height // config.patch_size, width // config.patch_size), dtype=np.int64)
        grid.setflags(write=False)
        tensors: dict[str, np.ndarray | PackedArray] = {"pixel_values": patches, "image_grid_thw": grid}
        num_tokens = int(grid.prod()) // config.merge_size**2
        return MediaItem(self.modality, self.mm_hash(source), source, tensors, num_tokens, config.scale, _FIELDS)


def resized_size(width: int, height: int, config: QwenVLConfig, *, digest: str | None = None) -> tuple[int, int]:
    """(width, height) after the resize: multiples of `factor`, area within the pixel limits, similar aspect ratio.

    Source: `smart_resize` of transformers' Qwen2-VL image processor, banker's rounding included. Raises
    `MediaLimitError` naming `digest` past `MAX_ASPECT_RATIO` and `MAX_RESIZED_PIXELS`.
    """
    resized = fitting_size(width, height, config.factor, config.min_pixels, config.max_pixels, digest=digest)
    if resized[0] * resized[1] > MAX_RESIZED_PIXELS:
        raise MediaLimitError(
            f"a {width}x{height} image would become {resized[0]}x{resized[1]} pixels by patch_size, merge_size "
            "and min_pixels of the model's preprocessor_config.json; correct them, or make the image smaller",
            digest=digest,
        )
    return resized


def fitting_size(
    width: int,
    height: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    *,
    frames: int = 1,
    rounded_frames: int = 1,
    digest: str | None = None,
) -> tuple[int, int]:
    """Round a size to multiples of `factor` so that width * height * frames is within the pixel limits.

    The limits are checked with `rounded_frames`; the scale is computed with `frames`. Raises
    `MediaLimitError` past `MAX_ASPECT_RATIO`.
    """
    if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
        raise MediaLimitError(
            f"{width}x{height} pixels are longer than {MAX_ASPECT_RATIO}:1; crop them first", digest=digest
        )
    new_width, new_height = round(width / factor) * factor, round(height / factor) * factor
    if rounded_frames * new_width * new_height > max_pixels:
        shrink = math.sqrt(frames * width * height / max_pixels)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
    elif rounded_frames * new_width * new_height < min_pixels:
        grow = math.sqrt(min_pixels / (frames * width * height))
        new_width = math.ceil(width * grow / factor) * factor
        new_height = math.ceil(height * grow / factor) * factor
    return new_width, new_height


def _resized(planes: np.ndarray, width: int, height: int, config: QwenVLConfig) -> np.ndarray:
    """uint8 (3, h, w) -> uint8 (3, height, width) with the resampler of the backend."""
    if planes.shape[1:] == (height, width):
        return planes
    if config.backend == "torchvision":
        return resampling.resize(planes, height, width, config.resample)
    # Pillow resizes channels independently, so planes give the same pixels as the whole image.
    images = [plane_image(plane).resize((width, height), Image.Resampling(config.resample)) for plane in planes]
    return np.concatenate([image_planes(image) for image in images])


def require(is_valid: bool, path: str, problem: str) -> None:
    """Raise a `LoadError` with the problem of the settings at `path` unless they are valid."""
    if not is_valid:
        raise LoadError(f"{path}: {problem}")


def read_pixel_settings(config: Mapping[str, Any], *, path: str, fused: bool) -> dict[str, Any]:
    """The settings that files for images and videos share: geometry, pixel limits, filter, scale.

    `fused`: the pixels are those of the torchvision backend, which has fewer filters.
    """
    for step in ("do_resize", "do_rescale", "do_normalize"):
        require(config.get(step) is not False, path, f"{step} is false; only processors that take every step are read")
    numbers = {
        name: read_integer(config, name, maximum=most, path=path)
        for name, most in (("patch_size", 1024), ("temporal_patch_size", 64), ("merge_size", 64))
    }
    # As in transformers, min_pixels and max_pixels take precedence over `size`, which newer files have instead.
    size = config.get("size")
    edges = size if isinstance(size, dict) else {}
    for name, edge, most in (("min_pixels", "shortest_edge", MAX_RESIZED_PIXELS), ("max_pixels", "longest_edge", None)):
        given = config.get(name) is not None
        numbers[name] = read_integer(config if given else edges, name if given else edge, maximum=most, path=path)
    resample = read_integer(config, "resample", minimum=0, maximum=5, default=3, path=path)
    known = " and ".join(f"{number} ({name})" for number, name in resampling.FILTERS.items())
    require(
        not fused or resample in resampling.FILTERS,
        path,
        f"resample is {resample}; as torchvision resizes, {known} are known. Change it, or name "
        "Qwen2VLImageProcessorPil as image_processor_type, which resizes with Pillow",
    )
    mean, std = (_rgb_triple(config, name, path=path) for name in ("image_mean", "image_std"))
    factor = config.get("rescale_factor", 1 / 255)
    require(
        _is_number(factor) and min(factor, *map(abs, std)) >= 1e-6 and max(factor, *map(abs, (*mean, *std))) < 1e6,
        path,
        f"image_mean {list(mean)}, image_std {list(std)} and rescale_factor {short_repr(factor)} cannot scale pixels: "
        "three numbers each for red, green and blue, and none to divide by may be 0",
    )
    return {**numbers, "resample": resample, "scale": PixelScale(float(factor), mean, std, fused)}


def read_integer(
    config: Mapping[str, Any], name: str, *, path: str, minimum: int = 1, maximum: int | None = None, default: Any = ...
) -> Any:
    """The integer of a name, `default` where the file has none. Raises `LoadError` for other values."""
    value = config.get(name)
    if value is None and default is not ...:
        return default
    if type(value) is float and value.is_integer():
        value = int(value)
    is_within = type(value) is int and minimum <= value and (maximum is None or value <= maximum)
    bounds = f"{minimum} or more" if maximum is None else f"from {minimum} to {maximum}"
    require(is_within, path, f"{name} is {short_repr(value)}; it has to be a whole number, {bounds}")
    return value


def _rgb_triple(config: Mapping[str, Any], name: str, *, path: str) -> tuple[float, ...]:
    values: Any = config.get(name)
    is_triple = isinstance(values, list) and len(values) == 3 and all(map(_is_number, values))
    require(is_triple, path, f"{name} is {short_repr(values)}; it has to be three numbers: red, green, blue")
    return tuple(map(float, values))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def fingerprint(modality: str, config: PixelSettings, **versions: object) -> str:
    """16 hex digits of a dataclass of settings and of the versions of the code that applies them."""
    # Pillow resizes in one backend, and converts palettes, CMYK and animations to RGB for both.
    code = {"processor": "qwen_vl", "modality": modality, "pillow": PIL.__version__, **versions}
    description = {**code, **asdict(config)}
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]
