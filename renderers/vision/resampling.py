"""Resizing of uint8 pixels as in torch: antialiased, in 16-bit fixed point.

The result equals that of `torch.nn.functional.interpolate(mode="bicubic" or "bilinear", antialias=True)` for a uint8
tensor on a CPU, which torchvision and the processors of transformers use. It is Pillow's algorithm with coarser
weights: a window of the filter for each output pixel, the weights rounded to int16 with as many fractional bits as
the largest one leaves room for (Pillow keeps 22 bits), sums in integers, rounded and clamped after each direction.
(On x86 processors without AVX2, torch resizes bilinearly in floats; everywhere else in fixed point.)

Here each direction is a product with a banded matrix, computed block by block in BLAS. Floats are exact:
all terms and sums are multiples of the last fractional bit, fewer than 2**24 of it for float32, than 2**53
for float64, and the type is selected by that bound. A process that has loaded torch resizes with torch's
kernel, where that has AVX2: the pixels are the same, in a third of the time.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

#: Part of the fingerprints: increase it with every change of the pixels that `resize` makes.
VERSION = 1

#: `resample` of a processor's configuration (Pillow's numbers) -> the name of the filter.
FILTERS = {2: "bilinear", 3: "bicubic"}

_MAX_FRACTION_BITS = 22
# An image is resized in tiles of about so many pixels a side, whose floats stay in the CPU cache, and a tile in blocks
# of outputs. OpenBLAS keeps a product of up to 2**18 terms on this thread. BLAS threads wait for each other at every
# product, which takes many times longer on busy processors, and images are processed in parallel on threads already.
_TILE = 384
_OUTPUTS_PER_BLOCK = 16
_INPUTS_PER_BLOCK = 32
_TERMS_PER_PRODUCT = 1 << 18


def resize(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """uint8 (..., 3, h, w) -> uint8 (..., 3, height, width). A direction that keeps its size is not resampled.

    `resample` is a key of `FILTERS`.
    """
    if pixels.shape[-2:] == (height, width):
        return pixels
    if _torch_has_avx2() and height * width > 1:  # torch fails with one pixel
        return _resize_in_torch(pixels, height, width, resample)
    return _resize_in_blas(pixels, height, width, resample)


def _torch_has_avx2() -> bool:
    """Whether torch is loaded, and has the kernel that needs neither floats nor OpenMP."""
    if "torch" not in sys.modules:
        return False
    import torch  # waits for another thread that is loading it

    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def _resize_in_torch(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    from torch import from_numpy
    from torch.nn.functional import interpolate

    images = from_numpy(pixels.copy()).reshape(-1, *pixels.shape[-3:])  # torch takes no read-only memory
    resized = interpolate(images, size=(height, width), mode=FILTERS[resample], antialias=True)
    return resized.numpy().reshape(*pixels.shape[:-2], height, width)


def _resize_in_blas(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    *leading, old_height, old_width = pixels.shape
    rows, columns = _direction(old_height, height, resample), _direction(old_width, width, resample)
    padded = np.zeros((rows.padded, columns.padded), dtype=np.int8)
    inside = padded[rows.before : rows.before + old_height, columns.before : columns.before + old_width]
    resized = np.empty((*leading, height, width), dtype=np.uint8)
    planes = zip(pixels.reshape(-1, old_height, old_width), resized.reshape(-1, height, width), strict=True)
    for plane, out in planes:
        # Flipping the top bit subtracts 128 modulo 256.
        np.bitwise_xor(plane, 0x80, out=inside.view(np.uint8))
        for down, across in product(rows.runs, columns.runs):
            tile = padded[down.inputs, across.inputs]
            if across.weights is not None:
                tile = _resize_lines(tile, across, -128 if down.weights is not None else 0)
            if down.weights is not None:
                tile = _resize_lines(tile.T, down, 0).T
            out[down.outputs, across.outputs] = tile
    return resized


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Neighbouring outputs, in blocks whose windows of inputs follow each other at the distance `stride`.

    `weights` (blocks, inputs of a window, outputs of a block) and `offset` (outputs) make pixels of pixels
    - 128. Without weights, the outputs are the inputs. `inputs` counts from the start of the padded inputs.
    """

    outputs: slice
    inputs: slice
    stride: int = 1
    weights: np.ndarray | None = None
    offset: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Direction:
    """The runs of all outputs, and the number of inputs with padding, `before` of which are in front."""

    runs: list[_Run]
    padded: int
    before: int = 0


def _bilinear(x: np.ndarray) -> np.ndarray:
    return np.maximum(0.0, 1.0 - x)


def _bicubic(x: np.ndarray) -> np.ndarray:
    """Keys' cubic convolution, a = -0.5 (IEEE Trans. ASSP 29, 1981), in the factored form of torch."""
    a = -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


_KERNELS: dict[int, tuple[Callable[[np.ndarray], np.ndarray], float]] = {2: (_bilinear, 1.0), 3: (_bicubic, 2.0)}


@lru_cache(maxsize=64)
def _direction(inputs: int, outputs: int, resample: int) -> _Direction:
    if inputs == outputs:
        parts = [slice(start, min(start + _TILE, inputs)) for start in range(0, inputs, _TILE)]
        return _Direction([_Run(part, part) for part in parts], inputs)
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
    fixed = np.trunc(fixed + np.where(fixed < 0, -0.5, 0.5)) / (1 << bits)
    # float32 if no sum of weight * (pixel - 128) can reach 2**24 units, whatever order BLAS adds in.
    dtype = np.float32 if 128 * np.abs(fixed).sum(axis=1).max() < 1 << 24 - bits else np.float64
    # Whole blocks; the outputs added for that are dropped after the product.
    size = max(2, min(_OUTPUTS_PER_BLOCK, int(_INPUTS_PER_BLOCK / scale)))
    missing = -outputs % size
    blocks = np.pad(fixed, ((0, missing), (0, 0))).astype(dtype).reshape(-1, size, len(taps)).transpose(0, 2, 1)
    firsts = np.pad(first, (0, missing), mode="edge").reshape(-1, size)
    # Pixels enter the product as pixel - 128, which halves the sums; with half a unit, rounding down rounds to nearest.
    offset = 128 * blocks.sum(axis=1) + dtype(0.5)
    stride = round(size * scale)
    bounds = _run_bounds(firsts[:, 0], firsts[:, -1] + len(taps), stride, size)
    before = max(0, -min(low for _, low, _ in bounds))
    runs = []
    for part, low, span in bounds:
        steps = stride * np.arange(part.stop - part.start)[:, None]
        band = np.zeros((len(steps), span, size), dtype)
        at = firsts[part] - low - steps
        np.put_along_axis(band, at[:, None] + taps[:, None], blocks[part], axis=1)
        runs.append(
            _Run(
                slice(part.start * size, min(part.stop * size, outputs)),
                slice(before + low, before + low + int(steps[-1, 0]) + span),
                stride,
                band,
                offset[part].reshape(-1),
            )
        )
    return _Direction(runs, max(before + inputs, *(run.inputs.stop for run in runs)), before)


def _run_bounds(lows: np.ndarray, highs: np.ndarray, stride: int, size: int) -> list[tuple[slice, int, int]]:
    """Divide blocks into runs: the blocks, the first input of the first window, and the inputs of each window.

    `lows` and `highs` are the inputs that the blocks depend on. Where these are not `stride` apart, windows
    are wider than needed, by 8 inputs at most.
    """
    widest = int((highs - lows).max()) + 8
    bounds = []
    start = 0
    while start < len(lows):
        most = min(len(lows) - start, 1 + (_TILE - 1) // max(stride, size))
        steps = stride * np.arange(most)
        low = np.minimum.accumulate(lows[start : start + most] - steps)
        span = np.maximum.accumulate(highs[start : start + most] - steps) - low
        count = int(np.searchsorted(span, widest, side="right"))
        bounds.append((slice(start, start + count), int(low[count - 1]), int(span[count - 1])))
        start += count
    return bounds


def _resize_lines(lines: np.ndarray, run: _Run, black: int) -> np.ndarray:
    """Lines of pixel - 128 (n, inputs) -> floats (n, outputs) from `black` to `black` + 255, to be rounded down.

    The same axis is contiguous in memory. Lines of floats are rounded down first.
    """
    weights = run.weights
    assert weights is not None
    blocks, span, size = weights.shape
    floats = (lines if lines.dtype == np.int8 else np.floor(lines)).astype(weights.dtype, copy=False)
    sums: np.ndarray = np.empty_like(floats, shape=(len(lines), blocks * size))
    windows, products = _windows(floats, blocks, span, run.stride), _windows(sums, blocks, size, size)
    step = max(1, _TERMS_PER_PRODUCT // (span * size))
    for start in range(0, len(lines), step):
        np.matmul(windows[:, start : start + step], weights, out=products[:, start : start + step])
    sums += run.offset + weights.dtype.type(black)
    np.clip(sums, black, black + 255, out=sums)
    return sums[:, : run.outputs.stop - run.outputs.start]


def _windows(lines: np.ndarray, count: int, width: int, stride: int) -> np.ndarray:
    """A view of contiguous (n, items) as (count, n, width), `stride` items between the windows."""
    line, item = lines.strides
    buffer = lines if lines.flags.c_contiguous else lines.T
    shape, strides = (count, len(lines), width), (stride * item, line, item)
    return np.ndarray(shape, lines.dtype, buffer, 0, strides)
