"""Planes of uint8 pixels -> patches for a vision tower, in the order of Qwen-VL."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from renderers.media.item import MediaItem, PixelScale


def float32_to_bfloat16(floats: np.ndarray) -> np.ndarray:
    """Floats of any shape -> uint16 bit patterns of that shape: float32 rounded to nearest, ties to even.

    Equal to torch's `.to(torch.bfloat16)`; every NaN becomes 0x7FC0, as there.
    """
    floats = floats.astype(np.float32, copy=False)
    bits = floats.view(np.uint32)
    rounded = np.asarray((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    # Rounding would carry a NaN whose upper bits are all set into zero or infinity.
    rounded[np.isnan(floats)] = 0x7FC0
    return rounded


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """uint16 bit patterns of any shape -> the float32 values they stand for, of that shape."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class StillPatches:
    """The patches of a still image, whose time slots all hold the same pixels; the pixels are stored once.

    `packed` is uint8 of shape (patches, 3, patch * patch), read-only; `temporal` is the number of time slots.
    """

    packed: np.ndarray
    temporal: int

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    @property
    def shape(self) -> tuple[int, int]:
        """(patches, 3 * temporal * patch * patch), the shape of `unpack()`."""
        count, channels, size = self.packed.shape
        return count, channels * self.temporal * size

    def unpack(self) -> np.ndarray:
        """uint8 (patches, 3 * temporal * patch * patch), read-only."""
        patches: np.ndarray = np.empty(self.shape, dtype=np.uint8)
        self.unpack_into(patches)
        patches.setflags(write=False)
        return patches

    def unpack_into(self, patches: np.ndarray) -> None:
        """Write the patches into a C-contiguous uint8 array of `shape`."""
        count, channels, size = self.packed.shape
        # Each plane of a patch is one element, which numpy then moves as a whole.
        planes = patches.reshape(count * channels, self.temporal, size).view(f"V{size}")
        planes[:] = np.ascontiguousarray(self.packed).reshape(count * channels, 1, size).view(f"V{size}")


def still_patches(planes: np.ndarray, patch_size: int, merge_size: int, temporal_patch_size: int) -> StillPatches:
    """uint8 planes (3, height, width), the sides multiples of patch_size * merge_size -> patches.

    The patches of one merge block (merge x merge) are neighbours; within a patch the order is channel, (time,) row,
    column.
    """
    patches = frame_patches(planes[None], patch_size, merge_size, temporal_patch_size=1)
    return StillPatches(patches.reshape(len(patches), len(planes), -1), temporal_patch_size)


def frame_patches(frames: np.ndarray, patch_size: int, merge_size: int, temporal_patch_size: int) -> np.ndarray:
    """uint8 frames (count, 3, height, width) -> uint8 (patches, 3 * temporal * patch * patch), read-only.

    A patch spans `temporal_patch_size` frames; the last frame is repeated to complete the last group. Within a group of
    frames the order is that of `still_patches`.
    """
    missing = -len(frames) % temporal_patch_size
    if missing:
        frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
    count, channels, height, width = frames.shape
    groups = (count // temporal_patch_size, temporal_patch_size)
    rows, columns = height // patch_size // merge_size, width // patch_size // merge_size
    # Each row of a patch is one element, which numpy then moves as a whole.
    runs = np.ascontiguousarray(frames).view(f"V{patch_size}")
    runs = runs.reshape(*groups, channels, rows, merge_size, patch_size, columns, merge_size)
    # Group, block row, block column, row and column in the block, channel, frame, pixel row.
    ordered = np.ascontiguousarray(runs.transpose(0, 3, 6, 4, 7, 2, 1, 5))
    patches = ordered.reshape(-1).view(np.uint8).reshape(-1, channels * temporal_patch_size * patch_size**2)
    patches.setflags(write=False)
    return patches


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
