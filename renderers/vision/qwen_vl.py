"""Qwen-VL pictures in numpy and Pillow: size rule, resize, patch order, token count.

Follows `Qwen2VLImageProcessorPil` of transformers (the Pillow backend, which Qwen3-VL checkpoints name too). Patches
are kept as uint8, after the resize and before rescale and normalise: a quarter of the float32 bytes, lossless, and
what a vLLM that normalises on the device expects. `vision.normalise` makes the processor's floats of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import PIL
from PIL import Image

from renderers.errors import InvalidFileError, MediaLimitError
from renderers.media.decoding import decode_image
from renderers.media.policy import MediaPolicy
from renderers.media.source import MediaSource
from renderers.media.store import MediaStore
from renderers.media.item import MediaItem
from renderers.vision.normalise import PixelScale

# The processor refuses longer pictures; resizing them would squeeze one side to nothing.
MAX_ASPECT_RATIO = 200

_PROCESSOR_TYPES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")


@dataclass(frozen=True, slots=True)
class QwenVLConfig:
    """The numbers of preprocessor_config.json that decide pixels. Pixel limits are products of width and height."""

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 65536
    max_pixels: int = 16777216
    resample: int = 3
    scale: PixelScale = PixelScale()

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, path: str) -> Self:
        """Read a parsed preprocessor_config.json; `path` names it in errors."""
        kind = config.get("image_processor_type")
        if kind not in _PROCESSOR_TYPES:
            raise InvalidFileError(path, f"image_processor_type {kind!r} is not one of {', '.join(_PROCESSOR_TYPES)}")
        for step in ("do_resize", "do_rescale", "do_normalize"):
            if config.get(step) is False:
                raise InvalidFileError(path, f"{step} is false; only processors that take every step are read")
        size = config.get("size") or {}
        try:
            return cls(
                patch_size=int(config["patch_size"]),
                temporal_patch_size=int(config["temporal_patch_size"]),
                merge_size=int(config["merge_size"]),
                min_pixels=int(config.get("min_pixels") or size["shortest_edge"]),
                max_pixels=int(config.get("max_pixels") or size["longest_edge"]),
                resample=int(config.get("resample", 3)),
                scale=PixelScale(
                    factor=float(config.get("rescale_factor", 1 / 255)),
                    mean=tuple(float(value) for value in config["image_mean"]),
                    std=tuple(float(value) for value in config["image_std"]),
                ),
            )
        except KeyError as error:
            raise InvalidFileError(path, f"misses {error.args[0]!r}, which decides the pixels") from error
        except (TypeError, ValueError) as error:
            raise InvalidFileError(path, f"holds a number that is none: {error}") from error

    @property
    def factor(self) -> int:
        """Width and height of a resized picture are multiples of this many pixels."""
        return self.patch_size * self.merge_size

    @property
    def fingerprint(self) -> str:
        """Names everything that changes pixels: these numbers and the resampler's version (16 hex digits)."""
        description = {"processor": "qwen_vl", "backend": f"pillow-{PIL.__version__}", **asdict(self)}
        return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]


class QwenVLProcessor:
    """Turns media sources into `MediaItem`s, each distinct picture once."""

    modality = "image"

    def __init__(self, config: QwenVLConfig, *, policy: MediaPolicy, store: MediaStore) -> None:
        self.config = config
        self.policy = policy
        self.store = store
        self.fingerprint = config.fingerprint

    def mm_hash(self, source: MediaSource) -> str:
        """The digest of the pixels as the model sees them: source digest + processor fingerprint."""
        return f"{source.digest}-{self.fingerprint}"

    def process(self, source: MediaSource) -> MediaItem:
        """The item of a source, from the store when it was seen before."""
        held = self.store.get(self.mm_hash(source))
        if held is not None:
            return held
        image = decode_image(source, self.policy)
        width, height = resized_size(image.width, image.height, self.config)
        pixels = np.asarray(image.resize((width, height), Image.Resampling(self.config.resample)))
        patches = patchify(pixels, self.config)
        grid = (1, height // self.config.patch_size, width // self.config.patch_size)
        tensors = {"pixel_values": patches, "image_grid_thw": np.array(grid, dtype=np.int64)}
        for array in tensors.values():
            array.setflags(write=False)
        num_tokens = math.prod(grid) // self.config.merge_size**2
        item = MediaItem(self.modality, self.mm_hash(source), source, tensors, num_tokens, self.config.scale)
        return self.store.put(item)


def resized_size(width: int, height: int, config: QwenVLConfig) -> tuple[int, int]:
    """(width, height) after the resize: multiples of `factor`, area within the pixel limits, aspect nearly kept.

    Source: `smart_resize` of transformers' Qwen2-VL image processor, banker's rounding included.
    """
    if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
        raise MediaLimitError(f"a {width}x{height} picture is longer than {MAX_ASPECT_RATIO}:1; crop it first")
    factor = config.factor
    new_width, new_height = round(width / factor) * factor, round(height / factor) * factor
    if new_width * new_height > config.max_pixels:
        shrink = math.sqrt(width * height / config.max_pixels)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
    elif new_width * new_height < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (width * height))
        new_width = math.ceil(width * grow / factor) * factor
        new_height = math.ceil(height * grow / factor) * factor
    return new_width, new_height


def patchify(pixels: np.ndarray, config: QwenVLConfig) -> np.ndarray:
    """uint8 pixels (height, width, 3) -> patches (grid_h * grid_w, 3 * temporal * patch * patch), merge-block order.

    Patches of one merge block (merge x merge) are neighbours; within a patch the order is channel, time, row, column.
    A still picture fills every time slot with the same pixels.
    """
    patch, merge, temporal = config.patch_size, config.merge_size, config.temporal_patch_size
    height, width, channels = pixels.shape
    grid_h, grid_w = height // patch, width // patch
    blocks = pixels.reshape(grid_h // merge, merge, patch, grid_w // merge, merge, patch, channels)
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)  # block row, block column, row, column in block, C, y, x
    shape = (*blocks.shape[:5], temporal, patch, patch)
    return np.broadcast_to(blocks[:, :, :, :, :, None], shape).reshape(grid_h * grid_w, -1)
