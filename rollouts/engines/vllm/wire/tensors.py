"""Tensors as vLLM's wire has them: the names of their types, and what numpy cannot say of those that a server sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from renderers.bfloat16 import bfloat16_to_float32
from renderers.media.item import MediaItem, PackedArray
from renderers.media.pixel_scale import PixelScale
from renderers.vision.normalise import ScaledPixels
from renderers.vision.patches import StillPatches
from rollouts.bfloat16 import Bfloat16Array

#: What a server wants pixels in: raw where it normalises on its device, else normalised, in the model's own type.
PixelDtype = Literal["uint8", "float32", "bfloat16", "float16"]

#: Bytes of an element, by torch's name of the type.
ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})

#: What vLLM's models read on the host, such as sizes that decide how features are cut, and so leave there. Elsewhere it
#: would only be copied back and forth; the others must not be named here, for they are needed on the device.
KEPT_ON_CPU = frozenset(
    {
        "image_grid_thw",
        "image_grid_hws",
        "image_num_patches",
        "image_sizes",
        "num_crops",
        "num_patches",
        "second_per_grid_ts",
        "spatial_shapes",
        "timestamps",
        "video_grid_thw",
        "video_num_patches",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class ServerTensor:
    """A tensor exactly as a server sent it: `raw` is uint8 (nbytes,), little-endian, in row-major order.

    `dtype` is torch's name, `keep_on_cpu` and `dim` (the axis along which flat tensors are joined) are what its field
    said. A `PackedArray`: `unpack` gives numpy's array of the same shape, read-only; bfloat16, which numpy does not
    have, as the float32 of equal value.
    """

    dtype: str
    shape: tuple[int, ...]
    raw: np.ndarray = field(repr=False)
    keep_on_cpu: bool = False
    dim: int = 0

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes

    def unpack(self) -> np.ndarray:
        if self.dtype == "bfloat16":
            array = bfloat16_to_float32(self.raw.view("<u2").reshape(self.shape))
        else:
            array = self.raw.view(np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)
        if not array.flags.aligned:  # it may begin anywhere in what was received
            array = array.copy()
        array.setflags(write=False)
        return array


@dataclass(frozen=True, slots=True, eq=False)
class ServerNumbers:
    """A number, or nested lists of numbers, as a server sent them in a tensor's place; `packed` is their msgpack."""

    packed: bytes
    values: np.ndarray
    keep_on_cpu: bool = False

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def unpack(self) -> np.ndarray:
        return self.values


Tensor = np.ndarray | PackedArray


def tensor_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the array, without unpacking it where that can be had."""
    match tensor:
        case np.ndarray():
            return tensor.shape
        case ServerTensor():
            return tensor.shape
        case StillPatches():
            count, channels, size = tensor.packed.shape
            return count, channels * tensor.temporal * size
        case ScaledPixels():
            return tensor.pixels.shape
        case Bfloat16Array():
            return tensor.bits.shape
        case _:
            return tensor.unpack().shape


def tensor_dtype(tensor: Tensor) -> str:
    """torch's name of the type of the elements."""
    match tensor:
        case np.ndarray():
            return tensor.dtype.name
        case ServerTensor():
            return tensor.dtype
        case StillPatches():
            return "uint8"
        case ScaledPixels():
            return "float32"
        case Bfloat16Array():
            return "bfloat16"
        case _:
            return tensor.unpack().dtype.name


class RawPixels(NamedTuple):
    """uint8 pixels of an item, and what makes floats of them."""

    pixels: np.ndarray | StillPatches
    scale: PixelScale


def raw_pixels(item: MediaItem, name: str) -> RawPixels | None:
    """The pixels of a tensor before rescale and normalise, where the item holds them; None for every other tensor."""
    tensor = item.tensors[name]
    if isinstance(tensor, ScaledPixels):
        return RawPixels(tensor.pixels, tensor.scale)
    if item.scale is None or tensor_dtype(tensor) != "uint8":
        return None
    return RawPixels(tensor if isinstance(tensor, StillPatches) else item[name], item.scale)


def element_count(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
