"""Finding the numbers by which a server normalises pixels: from its floats, or from a directory's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from renderers.model_files import read_json
from rollouts.cli.doctor.finding import Finding, failed

#: The name of the check.
NORMALISATION = "image normalisation"

# What is 0 on both sides may be padding, which no normalisation made.
_LEAST_PIXELS = 16
# Of the variance of one side, what the other does not explain, where one is a linear function of the other.
_UNEXPLAINED = 1e-3
# How far a factor may be from 1, and an offset from 0, where floats of a type were rounded.
_ROUNDED = {"float32": 1e-3, "float16": 3e-3}
_COARSE = 0.02


class Normalisation(NamedTuple):
    """float = (pixel in 0..1 - mean) / std, by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __str__(self) -> str:
        return f"image_mean {_rounded(self.mean)}, image_std {_rounded(self.std)}"

    def is_near(self, other: Normalisation) -> bool:
        return bool(np.allclose([*self.mean, *self.std], [*other.mean, *other.std], atol=1e-3))


class LinearMap(NamedTuple):
    """theirs = factor * ours + offset, by channel."""

    factor: tuple[float, ...]
    offset: tuple[float, ...]

    def is_identity(self, dtype: str) -> bool:
        """Whether both sides hold the same floats, as far as torch's `dtype` can tell."""
        most = _ROUNDED.get(dtype, _COARSE)
        return bool(np.allclose(self.factor, 1, atol=most) and np.allclose(self.offset, 0, atol=most))

    def of(self, ours: Normalisation) -> Normalisation:
        """The normalisation that makes their floats of pixels of which `ours` makes our floats."""
        std = [each / factor for each, factor in zip(ours.std, self.factor, strict=True)]
        mean = [m - offset * s for m, offset, s in zip(ours.mean, self.offset, std, strict=True)]
        return Normalisation(tuple(mean), tuple(std))


def written_normalisation(directory: Path) -> Normalisation | None:
    """What a model directory says of images; None where it says nothing, or nothing that can be read as such."""
    image = read_json(directory / "processor_config.json").get("image_processor") or read_json(
        directory / "preprocessor_config.json"
    )
    mean, std = _numbers(image.get("image_mean")), _numbers(image.get("image_std"))
    if not mean or len(mean) != len(std) or image.get("do_normalize") is False:
        return None
    return Normalisation(mean, std)


def processor_file(directory: Path) -> Path:
    """The file of a model directory that holds the numbers of images."""
    preprocessor = directory / "preprocessor_config.json"
    return preprocessor if preprocessor.exists() else directory / "processor_config.json"


def wrong_normalisation(directory: Path, written: Normalisation, theirs: Normalisation, said: str) -> Finding:
    """`said`: how the server's numbers are known, before which they are named."""
    return failed(
        NORMALISATION,
        f"{said} {theirs}; {directory} has {written}",
        f"write the model's own image_mean and image_std into {processor_file(directory)}, or start "
        f"`vllm serve {directory}`",
    )


def _numbers(value: Any) -> tuple[float, ...]:
    """The numbers of a list; none where it is not one of numbers."""
    if not isinstance(value, list) or not all(isinstance(each, int | float) for each in value):
        return ()
    return tuple(map(float, value))


def linear_map(ours: np.ndarray, theirs: np.ndarray, channels: int) -> LinearMap | None:
    """The map from our floats of an image to the server's; None where no such map explains them.

    Both of one shape: patches (n, channels * k), or (..., channels, height, width).
    """
    factors, offsets = [], []
    for x, y in zip(_by_channel(ours, channels), _by_channel(theirs, channels), strict=True):
        real = (x != 0) | (y != 0)
        x, y = x[real], y[real]
        if len(x) < _LEAST_PIXELS or np.ptp(x) == 0:
            return None
        factor, offset = np.polyfit(x, y, 1)
        if np.var(y - (factor * x + offset)) > _UNEXPLAINED * np.var(y) or factor <= 0:
            return None
        factors.append(float(factor))
        offsets.append(float(offset))
    return LinearMap(tuple(factors), tuple(offsets))


def renormalised(pixels: np.ndarray, used: Normalisation, wanted: Normalisation) -> np.ndarray:
    """Floats that `used` made, as `wanted` would have made them: float32, the same shape."""
    channels = len(used.mean)
    moved = []
    for x, m, s, new_m, new_s in zip(
        _by_channel(pixels, channels), used.mean, used.std, wanted.mean, wanted.std, strict=True
    ):
        moved.append((x * s + m - new_m) / new_s)
    return _from_channels(np.stack(moved), pixels.shape, channels)


def _by_channel(pixels: np.ndarray, channels: int) -> np.ndarray:
    """float64 (channels, values)."""
    if pixels.ndim == 2:
        split = pixels.reshape(len(pixels), channels, -1)
    else:
        split = pixels.reshape(-1, channels, pixels.shape[-2] * pixels.shape[-1])
    return split.transpose(1, 0, 2).reshape(channels, -1).astype(np.float64)


def _from_channels(split: np.ndarray, shape: tuple[int, ...], channels: int) -> np.ndarray:
    """The reverse of `_by_channel`."""
    outer = shape[0] if len(shape) == 2 else int(np.prod(shape[:-3]))
    return split.reshape(channels, outer, -1).transpose(1, 0, 2).reshape(shape).astype(np.float32)


def _rounded(numbers: tuple[float, ...]) -> list[float]:
    return [round(number, 4) for number in numbers]
