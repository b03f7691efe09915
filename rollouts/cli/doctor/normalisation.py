"""The image_mean and image_std of a server: estimated from its floats, or read from a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from renderers.file_reading import read_json
from rollouts.cli.doctor.finding import Finding, failed

#: The name of the check.
NORMALISATION = "image normalisation"

# A linear map is estimated from at least so many pixels. Pixels that are 0 on both sides may be padding: not counted.
_MIN_PIXELS = 16
# The share of the variance that may remain after the linear map.
_MAX_RESIDUAL = 1e-3
# The largest distance of a factor from 1, and of an offset from 0, for floats that were rounded to a dtype.
_ROUNDING = {"float32": 1e-3, "float16": 3e-3}
_DEFAULT_ROUNDING = 0.02


class Normalisation(NamedTuple):
    """float = (pixel in 0..1 - mean) / std, by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __str__(self) -> str:
        mean, std = ([round(number, 4) for number in numbers] for numbers in self)
        return f"image_mean {mean}, image_std {std}"

    def is_near(self, other: Normalisation) -> bool:
        return bool(np.allclose([*self.mean, *self.std], [*other.mean, *other.std], atol=1e-3))


class LinearMap(NamedTuple):
    """theirs = factor * ours + offset, float64 (channels,) each."""

    factor: np.ndarray
    offset: np.ndarray

    def is_identity(self, dtype: str) -> bool:
        """Whether both sides hold the same floats, as far as torch's `dtype` can tell."""
        tolerance = _ROUNDING.get(dtype, _DEFAULT_ROUNDING)
        return bool(np.allclose(self.factor, 1, atol=tolerance) and np.allclose(self.offset, 0, atol=tolerance))

    def of(self, ours: Normalisation) -> Normalisation:
        """Their normalisation, given ours."""
        std = ours.std / self.factor
        return Normalisation(tuple((ours.mean - self.offset * std).tolist()), tuple(std.tolist()))


def written_normalisation(directory: Path) -> Normalisation | None:
    """The image_mean and image_std in the files of a model directory; None if there are none, or no valid ones."""
    content = read_json(processor_file(directory))
    image = content.get("image_processor") or content
    mean, std = _numbers(image.get("image_mean")), _numbers(image.get("image_std"))
    if not mean or len(mean) != len(std) or image.get("do_normalize") is False:
        return None
    return Normalisation(mean, std)


def processor_file(directory: Path) -> Path:
    """The file of a model directory of which image_mean and image_std are read, as by transformers and servers."""
    joint = directory / "processor_config.json"
    return joint if read_json(joint).get("image_processor") else directory / "preprocessor_config.json"


def wrong_normalisation(directory: Path, written: Normalisation, theirs: Normalisation, evidence: str) -> Finding:
    """`evidence`: the beginning of the sentence that ends with the server's normalisation."""
    return failed(
        f"{evidence} {theirs}; {directory} has {written}",
        f"write the model's own image_mean and image_std into {processor_file(directory)}, or start "
        f"`vllm serve {directory}`",
        check=NORMALISATION,
    )


def _numbers(value: Any) -> tuple[float, ...]:
    """The numbers of a list as floats; empty if the value is not a list of numbers."""
    if not isinstance(value, list) or not all(isinstance(each, int | float) for each in value):
        return ()
    return tuple(map(float, value))


def linear_map(ours: np.ndarray, theirs: np.ndarray, channels: int) -> LinearMap | None:
    """The map from our floats of an image to the server's; None if there is no such map.

    Both of one shape: patches (n, channels * k), or (..., channels, height, width).
    """
    lines = []
    by_channel = (_with_channel_axis(pixels, channels).transpose(1, 0, 2) for pixels in (ours, theirs))
    for x, y in zip(*by_channel, strict=True):
        counted = (x != 0) | (y != 0)
        x, y = x[counted], y[counted]
        if len(x) < _MIN_PIXELS or np.ptp(x) == 0:
            return None
        factor, offset = np.polyfit(x, y, 1)
        if np.var(y - (factor * x + offset)) > _MAX_RESIDUAL * np.var(y) or factor <= 0:
            return None
        lines.append((factor, offset))
    return LinearMap(*np.array(lines).T)


def renormalised(pixels: np.ndarray, used: Normalisation, wanted: Normalisation) -> np.ndarray:
    """Floats with the normalisation `used`, converted to `wanted`: float32, the same shape."""
    mean, std, new_mean, new_std = (np.array(numbers)[:, None] for numbers in (*used, *wanted))
    unit = _with_channel_axis(pixels, len(used.mean)) * std + mean
    converted: np.ndarray = ((unit - new_mean) / new_std).reshape(pixels.shape)
    return converted.astype(np.float32)


def _with_channel_axis(pixels: np.ndarray, channels: int) -> np.ndarray:
    """float64 (n, channels, values)."""
    values = pixels.shape[1] // channels if pixels.ndim == 2 else pixels.shape[-2] * pixels.shape[-1]
    return pixels.reshape(-1, channels, values).astype(np.float64)
