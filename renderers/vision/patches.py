"""Planes of uint8 pixels -> patches for a vision tower, in the order of Qwen-VL."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
