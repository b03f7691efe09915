"""Canonical uint8 pixels -> the floats that a vision tower takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PixelScale:
    """float = (uint8 * factor - mean) / std, channel by channel."""

    factor: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


def normalise(patches: np.ndarray, scale: PixelScale) -> np.ndarray:
    """uint8 patches (n, channels * k) -> the float32 of the transformers processor, bit for bit.

    A uint8 has 256 values and a channel one mean and one deviation, so a table of channels x 256 floats holds every
    result; it is filled with the processor's own arithmetic (rescale in float64, round to float32, then normalise).
    """
    rescaled = (np.arange(256, dtype=np.float64) * scale.factor).astype(np.float32)
    table = (rescaled - np.array(scale.mean, dtype=np.float32)[:, None]) / np.array(scale.std, dtype=np.float32)[
        :, None
    ]
    channels = patches.reshape(len(patches), len(table), -1)
    out = np.empty(channels.shape, dtype=np.float32)
    for channel, values in enumerate(table):
        out[:, channel] = values[channels[:, channel]]
    return out.reshape(patches.shape)
