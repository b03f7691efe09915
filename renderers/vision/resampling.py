"""Resizing of uint8 pixels as in torch: antialiased, in 16-bit fixed point.

The result equals that of `torch.nn.functional.interpolate(mode="bicubic" or "bilinear", antialias=True)` for a uint8
tensor on a CPU, which torchvision and the processors of transformers use. It is Pillow's algorithm with coarser
weights: a window of the filter for each output pixel, the weights rounded to int16 with as many fractional bits as
the largest one leaves room for (Pillow keeps 22 bits), sums in integers, rounded and clamped after each direction.
(On x86 processors without AVX2, torch resizes bilinearly in floats; everywhere else in fixed point.)

Here each direction is a product with a banded matrix, computed block by block in BLAS. Floats are exact: all terms and
sums are integers below 2**24 for float32, below 2**53 for float64, and the type is selected by that bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

#: Part of the fingerprints: increase it with every change of the pixels that `resize` makes.
VERSION = 1

#: `resample` of a processor's configuration (Pillow's numbers) -> the name of the filter.
FILTERS = {2: "bilinear", 3: "bicubic"}

_MAX_FRACTION_BITS = 22
# Products of 32 rows with a block of at most 32 outputs and about 150 inputs: large enough for BLAS to be fast, small
# enough for it to stay on this thread. BLAS threads wait for each other at every product, which takes many times
# longer on busy processors, and images are processed in parallel on threads already.
_ROWS_PER_PRODUCT = 32
_OUTPUTS_PER_BLOCK = 32
_INPUTS_PER_BLOCK = 128
_STRIP_FLOATS = 1 << 20


def resize(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """uint8 planes (..., h, w) -> uint8 planes (..., height, width). A direction that keeps its size is not resampled.

    `resample` is a key of `FILTERS`.
    """
    planes = np.ascontiguousarray(pixels).reshape(-1, *pixels.shape[-2:])
    if width != pixels.shape[-1]:
        resized = np.empty((*planes.shape[:2], width), dtype=np.uint8)
        weights = _weights(pixels.shape[-1], width, resample)
        _resize_rows(planes.reshape(1, -1, planes.shape[2]), weights, resized.reshape(1, -1, width))
        planes = resized
    if height != pixels.shape[-2]:
        resized = np.empty((len(planes), height, width), dtype=np.uint8)
        weights = _weights(pixels.shape[-2], height, resample)
        _resize_rows(planes.transpose(0, 2, 1), weights, resized.transpose(0, 2, 1))
        planes = resized
    return planes.reshape(*pixels.shape[:-2], height, width)


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Neighbouring outputs: `weights` (inputs, outputs) of the inputs that they depend on, `offset` of the sums."""

    outputs: slice
    inputs: slice
    weights: np.ndarray
    offset: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    outputs: int
    fraction_bits: int
    blocks: tuple[_Block, ...]


def _bilinear(x: np.ndarray) -> np.ndarray:
    return np.maximum(0.0, 1.0 - x)


def _bicubic(x: np.ndarray) -> np.ndarray:
    """Keys' cubic convolution with a = -0.5 (IEEE Trans. ASSP 29, 1981), in the factored form that torch evaluates."""
    a = -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


_KERNELS: dict[int, tuple[Callable[[np.ndarray], np.ndarray], float]] = {2: (_bilinear, 1.0), 3: (_bicubic, 2.0)}


@lru_cache(maxsize=64)
def _weights(inputs: int, outputs: int, resample: int) -> _Weights:
    kernel, radius = _KERNELS[resample]
    scale = inputs / outputs
    stretch = max(scale, 1.0)
    support = radius * stretch
    centre = scale * (np.arange(outputs) + 0.5)
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    count = np.minimum((centre + support + 0.5).astype(np.int64), inputs) - first
    taps = np.arange(int(count.max()))
    weights = kernel(np.abs((taps + (first - centre)[:, None] + 0.5) * (1.0 / stretch)))
    weights[taps >= count[:, None]] = 0.0
    # Sequential sums as in torch; numpy's own sum is pairwise and may differ in the last bit.
    weights /= np.add.accumulate(weights, axis=1)[:, -1:]
    # As many fractional bits as the largest weight leaves in an int16.
    bits, largest = 0, float(weights.max())
    while bits < _MAX_FRACTION_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    fixed = weights * (1 << bits)
    fixed = np.trunc(fixed + np.where(fixed < 0, -0.5, 0.5)).astype(np.int64)
    # float32 if no sum of weight * (pixel - 128) can reach 2**24, whatever order BLAS adds in.
    dtype = np.float32 if 128 * int(np.abs(fixed).sum(axis=1).max()) < 1 << 24 else np.float64
    blocks = []
    step = max(4, min(_OUTPUTS_PER_BLOCK, int(_INPUTS_PER_BLOCK / scale)))
    for start in range(0, outputs, step):
        block = slice(start, min(start + step, outputs))
        low, high = int(first[block].min()), int((first[block] + count[block]).max())
        band = np.zeros((high - low, block.stop - start), dtype=dtype)
        for column, output in enumerate(range(start, block.stop)):
            at = int(first[output]) - low
            band[at : at + count[output], column] = fixed[output, : count[output]]
        # Pixels enter the product as pixel - 128, which halves the sums; half a unit makes the shift round.
        offset = 128 * fixed[block].sum(axis=1) + (1 << bits >> 1)
        blocks.append(_Block(block, slice(low, high), band, offset.astype(np.int32)))
    return _Weights(outputs, bits, tuple(blocks))


def _resize_rows(planes: np.ndarray, weights: _Weights, out: np.ndarray) -> None:
    """uint8 rows (planes, n, inputs) -> uint8 `out` (planes, n, outputs), which may both be views of columns."""
    offset = np.concatenate([block.offset for block in weights.blocks])
    dtype = weights.blocks[0].weights.dtype
    _, rows, inputs = planes.shape
    strip = max(16, _STRIP_FLOATS // inputs)
    order: Literal["C", "F"] = "C" if planes.flags.c_contiguous else "F"
    all_sums = np.empty((min(strip, rows), weights.outputs), dtype, order)
    for plane, resized in zip(planes, out, strict=True):
        for start in range(0, rows, strip):
            # pixel - 128, as floats: flipping the top bit subtracts 128 modulo 256.
            part = (plane[start : start + strip] ^ np.uint8(0x80)).view(np.int8).astype(dtype)
            sums = all_sums[: len(part)]
            for block in weights.blocks:
                _multiply(part[:, block.inputs], block.weights, sums[:, block.outputs])
            _finish(sums, offset, weights.fraction_bits, resized[start : start + strip])


def _finish(sums: np.ndarray, offset: np.ndarray, fraction_bits: int, out: np.ndarray) -> None:
    whole = sums.astype(np.int32)
    whole += offset
    whole >>= fraction_bits
    np.clip(whole, 0, 255, out=whole)
    out[...] = whole


def _multiply(rows: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    """out = rows @ weights, a few rows at a time."""
    whole = len(rows) // _ROWS_PER_PRODUCT * _ROWS_PER_PRODUCT
    np.matmul(_grouped(rows[:whole]), weights, out=_grouped(out[:whole]))
    np.matmul(rows[whole:], weights, out=out[whole:])


def _grouped(rows: np.ndarray) -> np.ndarray:
    """A view of (rows, n) as (groups, rows per product, n), whatever the order in memory."""
    (row, item), count = rows.strides, len(rows) // _ROWS_PER_PRODUCT
    shape = (count, _ROWS_PER_PRODUCT, rows.shape[1])
    return np.lib.stride_tricks.as_strided(rows, shape, (row * _ROWS_PER_PRODUCT, row, item))
