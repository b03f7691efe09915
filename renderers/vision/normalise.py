"""Canonical uint8 pixels -> the floats that a vision tower needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from renderers.bfloat16 import float32_to_bfloat16
from renderers.media.item import MediaItem, PixelScale
from renderers.vision.patches import StillPatches

FloatType = Literal["float32", "bfloat16"]

# Patches per look-up: it widens uint8 indices to 8 bytes each, which then stay in the CPU cache.
_PATCHES_AT_ONCE = 256


def normalise(patches: np.ndarray | StillPatches, scale: PixelScale, *, dtype: FloatType = "float32") -> np.ndarray:
    """uint8 patches (n, channels * k) -> the floats of the transformers processor, bit for bit, of the same shape.

    `dtype` bfloat16 gives uint16, the bit patterns of the float32 rounded to nearest, ties to even, as torch's
    `.to(torch.bfloat16)` rounds (`torch.from_numpy(...).view(torch.bfloat16)` reads them).

    A uint8 has 256 values and a channel has one mean and one deviation, so a table of channels x 256 floats holds
    every result; it is computed with the processor's own arithmetic.
    """
    table = _table(scale)
    if dtype == "bfloat16":
        table = float32_to_bfloat16(table)
    if isinstance(patches, StillPatches):
        packed, slots = patches.packed, patches.temporal
    else:
        packed, slots = patches.reshape(len(patches), len(table), -1), 1
    out = np.empty((len(packed), len(table), slots, packed.shape[2]), dtype=table.dtype)
    for start in range(0, len(packed), _PATCHES_AT_ONCE):
        part = slice(start, start + _PATCHES_AT_ONCE)
        for channel, values in enumerate(table):
            out[part, channel, 0] = values.take(packed[part, channel])
        out[part, :, 1:] = out[part, :, :1]
    return out.reshape(len(packed), -1)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledPixels:
    """Floats that a processor makes of uint8 pixels, stored as those pixels: a quarter of the bytes.

    `pixels` is uint8 (rows, channels * k) or (rows, channels, ...), after the resize and before rescale and normalise;
    `unpack` gives the processor's floats, float32 of the same shape, read-only. The creator of an instance must have
    checked that they are equal bit for bit.
    """

    pixels: np.ndarray
    scale: PixelScale

    @property
    def nbytes(self) -> int:
        return self.pixels.nbytes

    def unpack(self) -> np.ndarray:
        floats = normalise(self.pixels, self.scale).reshape(self.pixels.shape)
        floats.setflags(write=False)
        return floats


def normalised(item: MediaItem, name: str, *, dtype: FloatType = "float32") -> np.ndarray:
    """`normalise` for one tensor of an item; still images are not unpacked first.

    A tensor of an item without a scale is returned unchanged: it is already the model's input.
    """
    if item.scale is None:
        return item[name]
    tensor = item.tensors[name]
    return normalise(tensor if isinstance(tensor, StillPatches) else item[name], item.scale, dtype=dtype)


def _table(scale: PixelScale) -> np.ndarray:
    """float32 (channels, 256)."""
    values = np.arange(256, dtype=np.float64)
    mean = np.array(scale.mean, dtype=np.float32)[:, None]
    std = np.array(scale.std, dtype=np.float32)[:, None]
    if scale.fused:
        inverse = np.float32(1.0 / scale.factor)
        return np.asarray((values.astype(np.float32) - mean * inverse) / (std * inverse))
    return np.asarray(((values * scale.factor).astype(np.float32) - mean) / std)
