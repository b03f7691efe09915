"""The numbers with which a processor turns uint8 pixels into floats."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PixelScale:
    """float = (uint8 * factor - mean) / std, channel by channel, in the arithmetic of one of transformers' backends.

    fused: that of the torchvision backend, (uint8 - mean / factor) / (std / factor), all in float32. Not fused: that of
    the Pillow backend, the product in float64 and rounded to float32, the rest in float32. The last bits differ.
    """

    factor: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    fused: bool = False
