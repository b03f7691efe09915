"""Types for tensors on vLLM's wire: dtype names, and tensors of a server that numpy cannot represent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from renderers.media.item import MediaItem, PackedArray, PixelScale
from renderers.vision.patches import ScaledPixels, StillPatches, bfloat16_to_float32

#: The dtype of pixels that a server expects: uint8 where it normalises on its device, else the model's own
#: dtype.
PixelDtype = Literal["uint8", "float32", "bfloat16", "float16"]
#: Bytes of an element, by torch's name of the dtype.
ITEM_BYTES: Mapping[str, int] = {
    **{
        name: np.dtype(name).itemsize
        for name in (
            *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16"),
            "float32",
            "float64",
        )
    },
    "bfloat16": 2,
}
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
#: Tensors that vLLM's models read on the host, such as the sizes that decide how features are split. They
#: stay there, so that they are not copied to the device and back; all other tensors are needed on the device.
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

    `dtype` is torch's name; `keep_on_cpu` and `dim` (the axis along which flat tensors are joined) are
    options of its field. A `PackedArray`: `unpack` returns a read-only numpy array of the same shape;
    bfloat16 becomes float32.
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
        if not array.flags.aligned:  # it may begin at any byte of the response
            array = array.copy()
        array.setflags(write=False)
        return array


@dataclass(frozen=True, slots=True, eq=False)
class ServerNumbers:
    """A number, or nested lists of numbers, that a server sent instead of a tensor; `packed` is their msgpack."""

    packed: bytes
    values: np.ndarray
    keep_on_cpu: bool = False

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def unpack(self) -> np.ndarray:
        return self.values


Tensor = np.ndarray | PackedArray


class TensorType(NamedTuple):
    """torch's name of the dtype of a tensor, and its shape."""

    dtype: str
    shape: tuple[int, ...]


def tensor_type(tensor: Tensor) -> TensorType:
    """The type of a tensor, without unpacking those whose type is known."""
    match tensor:
        case np.ndarray():
            return TensorType(tensor.dtype.name, tensor.shape)
        case ServerTensor():
            return TensorType(tensor.dtype, tensor.shape)
        case StillPatches():
            count, channels, size = tensor.packed.shape
            return TensorType("uint8", (count, channels * tensor.temporal * size))
        case ScaledPixels():
            return TensorType("float32", tensor.pixels.shape)
        case _:
            return tensor_type(tensor.unpack())


#: uint8 pixels of an item, and the scale that turns them into floats.
RawPixels = tuple[np.ndarray | StillPatches, PixelScale]


def raw_pixels(item: MediaItem, name: str) -> RawPixels | None:
    """The uint8 pixels before rescale and normalise, if a tensor holds them; None for every other tensor."""
    tensor = item.tensors[name]
    if isinstance(tensor, ScaledPixels):
        return tensor.pixels, tensor.scale
    if item.scale is None or tensor_type(tensor).dtype != "uint8":
        return None
    return tensor if isinstance(tensor, StillPatches) else item[name], item.scale


RAW_TENSOR = 3  # vLLM's extension type
