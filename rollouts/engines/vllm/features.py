"""Features of images and sounds as vLLM's wire has them: tensors, encoded and decoded."""

from __future__ import annotations

import binascii
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import msgpack
import numpy as np

from renderers import MultiModalData
from renderers.media.item import MediaItem, PackedArray, PixelScale, TensorField
from renderers.vision.patches import ScaledPixels, StillPatches, bfloat16_to_float32, float32_to_bfloat16, normalise
from rollouts.engines.http.exchange import Body
from rollouts.errors import MalformedResultError
from rollouts.values import Bfloat16Array

# Types for tensors on vLLM's wire: dtype names, and tensors of a server that numpy cannot represent.


#: The dtype of pixels that a server expects: uint8 where it normalises on its device, else the model's own dtype.
PixelDtype = Literal["uint8", "float32", "bfloat16", "float16"]

_NUMPY_DTYPES = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16")
#: Bytes of an element, by torch's name of the dtype.
ITEM_BYTES: Mapping[str, int] = {
    **{name: np.dtype(name).itemsize for name in (*_NUMPY_DTYPES, "float32", "float64")},
    "bfloat16": 2,
}
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})

#: Tensors that vLLM's models read on the host, such as the sizes that decide how features are split. They stay there,
#: so that they are not copied to the device and back; all other tensors are needed on the device.
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

    `dtype` is torch's name; `keep_on_cpu` and `dim` (the axis along which flat tensors are joined) are options of its
    field. A `PackedArray`: `unpack` returns a read-only numpy array of the same shape; bfloat16 becomes float32.
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
        case Bfloat16Array():
            return TensorType("bfloat16", tensor.bits.shape)
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


# Encodes media for `/inference/v1/generate` as the same bytes that vLLM's own `/render` writes; vllm is not needed.
#
#     features = {"mm_hashes": {"image": [...]}, "mm_placeholders": {"image": [{"offset": 4, "length": 70}]},
#                 "kwargs_data": {"image": ["gq5pbWFn...", null]}}
#
# An entry of kwargs_data is the base64 of a msgpack map: name -> {"data": [dtype, shape, Ext(3, raw bytes)], "field":
# [kind, options for making a batch]}. Source: vLLM 0.31 to 0.33, `mm_serde.encode_mm_kwargs_item`. vLLM writes the
# names of an item in the order of a Python set of strings, which differs between server processes; here they are
# sorted.
#
# Tensors are written block by block: the floats of a uint8 image, or all its unpacked patches, never exist in memory as
# a whole; only their base64 does.


#: Size of a block: small enough to stay in the CPU's cache from the patches to the base64.
_BLOCK_BYTES = 192 * 2**10

_RAW_TENSOR = 3  # vLLM's extension type


def encode_features(
    data: MultiModalData, *, pixel_dtype: PixelDtype, include: Callable[[str], bool] = lambda mm_hash: True
) -> Body:
    """The JSON object `features`, in segments to be sent one after another.

    `pixel_dtype` is `ServerCapabilities.pixel_dtype`. If `include` is False for the hash of an item, its data is null:
    the server holds it. The media must have passed `request_checks.check_request`.
    """
    placeholders = {
        modality: [{"offset": placeholder.offset, "length": placeholder.length} for placeholder in ranges]
        for modality, ranges in data.mm_placeholders.items()
    }
    head = json.dumps({"mm_hashes": data.mm_hashes, "mm_placeholders": placeholders}, separators=(",", ":"))
    # `text` is the JSON not in `segments` yet; after each step it ends as its comment shows.
    segments: list[bytes | memoryview] = []
    text = f'{head[:-1]},"kwargs_data":{{'  # {...,"kwargs_data":{
    for number, (modality, items) in enumerate(data.media_items.items()):
        text += (
            f"{',' if number else ''}{json.dumps(modality)}:["  # "image":[   or, after another modality, ],"video":[
        )
        encoded: dict[int, Body] = {}  # an item that occurs twice is encoded once
        for index, item in enumerate(items):
            text += "," if index else ""  # "image":[   or, after another item, ...",   or null,
            if not include(item.mm_hash):
                text += "null"  # "image":[null
                continue
            if id(item) not in encoded:
                encoded[id(item)] = encode_item(item, pixel_dtype=pixel_dtype, siblings=items)
            segments += [f'{text}"'.encode(), *encoded[id(item)]]  # "image":["gq5pbWFn...
            text = '"'  # closes the base64
        text += "]"  # "image":["gq5pbWFn...",null]
    return [*segments, f"{text}}}}}".encode()]  # ...]}}


def encode_item(item: MediaItem, *, pixel_dtype: PixelDtype, siblings: Sequence[MediaItem]) -> Body:
    """One entry of kwargs_data, base64 in segments. `siblings` are all items of its modality in the prompt, in order.

    uint8 pixels of an item with a scale are converted to `pixel_dtype`, and so are float tensors, which vLLM would cast
    to the model's dtype. Tensors that a server made are written unchanged.
    """
    pieces = list(_pieces(item, pixel_dtype, siblings))
    nbytes = sum(piece.nbytes if isinstance(piece, _Payload) else len(piece) for piece in pieces)
    # One buffer, for which numpy requests huge pages: a fifth faster than many small buffers.
    text = np.empty((nbytes + 2) // 3 * 4, dtype=np.uint8).data
    end = 0
    for part in _base64(pieces):
        start, end = end, end + len(part)
        text[start:end] = part
    return [text.toreadonly()]


# From an item to msgpack.


class _Payload(NamedTuple):
    """The raw bytes of a tensor; `blocks` computes them."""

    nbytes: int
    blocks: Callable[[], Iterator[np.ndarray]]


def _pieces(item: MediaItem, pixel_dtype: PixelDtype, siblings: Sequence[MediaItem]) -> Iterator[bytes | _Payload]:
    """The msgpack of an item."""
    packer = msgpack.Packer()
    yield packer.pack_map_header(len(item.tensors))
    for name in sorted(item.tensors):
        tensor = item.tensors[name]
        yield packer.pack(name) + packer.pack_map_header(2) + packer.pack("data")
        if isinstance(tensor, ServerNumbers):
            yield tensor.packed
        else:
            dtype, shape = tensor_type(tensor)
            converts = dtype in FLOATS and pixel_dtype != "uint8" and not isinstance(tensor, ServerTensor)
            if converts or raw_pixels(item, name) is not None:
                dtype = pixel_dtype
            nbytes = math.prod(shape) * ITEM_BYTES[dtype]
            head = packer.pack_array_header(3) + packer.pack(dtype) + packer.pack(list(shape))
            yield head + _ext_header(nbytes)
            yield _Payload(nbytes, lambda name=name, dtype=dtype: _blocks(item, name, dtype))  # type: ignore[misc]
        yield packer.pack("field") + packer.pack(_field(name, tensor, item.fields[name], siblings))


def _ext_header(nbytes: int) -> bytes:
    """The shortest header for a tensor of `nbytes` bytes, which is also msgspec's choice."""
    if nbytes in (1, 2, 4, 8, 16):
        return bytes((0xD3 + nbytes.bit_length(), _RAW_TENSOR))  # 1 -> 0xD4, 16 -> 0xD8
    for kind, width in ((0xC7, 1), (0xC8, 2), (0xC9, 4)):
        if nbytes < 1 << 8 * width:
            return bytes((kind,)) + nbytes.to_bytes(width, "big") + bytes((_RAW_TENSOR,))
    raise ValueError(f"a tensor of {nbytes} bytes does not fit into msgpack, whose limit is 4 GiB")


def _field(name: str, tensor: Tensor, field: TensorField, siblings: Sequence[MediaItem]) -> list[object]:
    """The kind and options with which the server makes a batch; keys in the order of vLLM's field classes."""
    if isinstance(tensor, ServerTensor | ServerNumbers):
        keep_on_cpu = tensor.keep_on_cpu
    else:
        keep_on_cpu = field.kind == "batched" and name in KEPT_ON_CPU
    match field.kind:
        case "batched":
            return ["batched", {"keep_on_cpu": keep_on_cpu}]
        case "shared":
            return ["shared", {"keep_on_cpu": keep_on_cpu, "batch_size": len(siblings)}]
        case "flat":
            dim = tensor.dim if isinstance(tensor, ServerTensor) else 0
            return ["flat", {"keep_on_cpu": keep_on_cpu, "slices": _slices(name, dim, siblings), "dim": dim}]


def _slices(name: str, dim: int, siblings: Sequence[MediaItem]) -> list[list[list[int | None]]]:
    """For every item of the prompt, the slices of its rows in the joined tensor."""
    rows = [tensor_type(other.tensors[name]).shape[dim] for other in siblings if name in other.tensors]
    whole_axes: list[list[int | None]] = [[None, None, None]] * dim
    return [
        [*whole_axes, [end - count, end, None]] for count, end in zip(rows, itertools.accumulate(rows), strict=True)
    ]


# From a tensor to its raw bytes.


def _blocks(item: MediaItem, name: str, dtype: str) -> Iterator[np.ndarray]:
    """The bytes of a tensor, converted to `dtype`: arrays of uint8 (nbytes of the block,), little-endian, row-major."""
    tensor = item.tensors[name]
    raw = raw_pixels(item, name)
    if raw is not None:
        yield from _pixel_blocks(raw, dtype)
        return
    match tensor:
        case ServerTensor():
            flat, flat_dtype = tensor.raw, "uint8"
        case Bfloat16Array() if dtype == "bfloat16":
            flat, flat_dtype = tensor.bits.reshape(-1).view(np.uint8), "uint8"
        case _:
            flat, flat_dtype = item[name].reshape(-1), dtype
    step = _BLOCK_BYTES // ITEM_BYTES[flat_dtype]
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        yield part if flat_dtype == "uint8" else _to_bytes(part, dtype)


def _pixel_blocks(raw: RawPixels, dtype: str) -> Iterator[np.ndarray]:
    """The blocks of uint8 pixels, normalised unless `dtype` is uint8."""
    tensor, scale = raw
    row_bytes = math.prod(tensor_type(tensor).shape[1:]) * ITEM_BYTES[dtype]
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    if isinstance(tensor, StillPatches):
        parts = (tensor.packed[start : start + step] for start in range(0, len(tensor.packed), step))
        if dtype == "uint8":
            yield from _unpacked(parts, tensor.temporal)
            return
        patches: Iterator[np.ndarray | StillPatches] = (StillPatches(part, tensor.temporal) for part in parts)
    else:
        patches = (tensor[start : start + step] for start in range(0, len(tensor), step))
    for part in patches:
        if dtype == "bfloat16":
            yield normalise(part, scale, dtype="bfloat16").reshape(-1).view(np.uint8)
        else:
            values = part if isinstance(part, np.ndarray) and dtype == "uint8" else normalise(part, scale)
            yield _to_bytes(values, dtype)


def _unpacked(parts: Iterable[np.ndarray], temporal: int) -> Iterator[np.ndarray]:
    """Packed patches repeated for each time slot; every block reuses the same memory."""
    block: np.ndarray | None = None
    for part in parts:
        count, channels, size = part.shape
        if block is None:
            block = np.empty((count, channels, temporal, size), dtype=np.uint8)
        block[:count] = part[:, :, None]
        yield block[:count].reshape(-1)


def _to_bytes(array: np.ndarray, dtype: str) -> np.ndarray:
    """The array converted to a numpy dtype or to bfloat16, as uint8 (nbytes,)."""
    if dtype == "bfloat16":
        return float32_to_bfloat16(array).astype("<u2", copy=False).reshape(-1).view(np.uint8)
    wanted = np.dtype(dtype).newbyteorder("<")
    return np.ascontiguousarray(array, dtype=wanted).reshape(-1).view(np.uint8)


# From bytes to base64.


def _base64(pieces: Iterable[bytes | _Payload]) -> Iterator[bytes]:
    """The base64 of all pieces as one text, in segments."""
    rest = b""
    # One buffer for all blocks: allocating new memory costs more than copying.
    buffer = bytearray(_BLOCK_BYTES)
    for piece in pieces:
        if isinstance(piece, bytes):
            rest += piece
            continue
        for block in piece.blocks():
            # First the bytes not encoded yet: fewer than 3 of the previous block, and the bytes between tensors.
            end = len(rest) + len(block)
            if end > len(buffer):
                buffer = bytearray(end)
            buffer[: len(rest)] = rest
            view = memoryview(buffer)
            view[len(rest) : end] = block.data
            whole = end // 3 * 3
            rest = bytes(view[whole:end])
            yield binascii.b2a_base64(view[:whole], newline=False)
    yield binascii.b2a_base64(rest, newline=False)


# Decodes an entry of kwargs_data as vLLM's `/render` writes it, without trust in its content.
#
# `msgpack.unpackb` builds whatever the bytes describe, and a few megabytes can describe gigabytes of empty lists. Here
# each value is read only after its type was checked; everything unexpected is refused, slices are skipped, and tensors
# are views of the one decoded buffer.


T = TypeVar("T")

_MAX_TENSORS = 256
_MAX_DIMENSIONS = 16
_MAX_ELEMENTS = 2**40  # also of shapes with a 0, which need no bytes
_MAX_NUMBERS = 2**16
_MAX_NAME_BYTES = 256
_MAX_LIST_DEPTH = 8

# Types by first byte, and the bytes before the content of an extension type. Source: the msgpack specification.
_TYPES: Mapping[int, str] = {
    **dict.fromkeys((*range(0x80), *range(0xCC, 0xD4), *range(0xE0, 0x100)), "int"),
    **dict.fromkeys((*range(0x80, 0x90), 0xDE, 0xDF), "map"),
    **dict.fromkeys((*range(0x90, 0xA0), 0xDC, 0xDD), "array"),
    **dict.fromkeys((*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB), "str"),
    **dict.fromkeys((0xC4, 0xC5, 0xC6), "bytes"),
    **dict.fromkeys((0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)), "ext"),
    **{0xC0: "nil", 0xC2: "bool", 0xC3: "bool", 0xCA: "float", 0xCB: "float"},
}
_EXT_HEADER_BYTES = {0xC7: 3, 0xC8: 4, 0xC9: 6, **dict.fromkeys(range(0xD4, 0xD9), 2)}
_ARRAY_HEADER_BYTES = {0xDC: 3, 0xDD: 5, **dict.fromkeys(range(0x90, 0xA0), 1)}


class DecodedTensor(NamedTuple):
    """A tensor of an item, its field (how a batch is made of it), and torch's name of its dtype ("" for numbers).

    `tensor` is a read-only array that views the received bytes if `encode_item` writes that array as
    the same bytes again; otherwise (floats, unusual fields) it is a `ServerTensor` or `ServerNumbers`, which
    `encode_item` writes unchanged. Both are valid tensors of a `MediaItem`.
    """

    tensor: Tensor
    field: TensorField
    dtype: str


def decode_item(encoded: str | bytes, *, name: str = "kwargs_data") -> dict[str, DecodedTensor]:
    """The tensors of one entry of kwargs_data by name, in the server's order.

    Raises `MalformedResultError` for request `name`, with the byte position, for anything that vLLM does not write.
    """
    reader = _Reader(encoded, name)
    return {key: _tensor_entry(reader, key) for key in reader.tensor_names()}


def encoded_entries(encoded: str | bytes, *, name: str = "kwargs_data") -> dict[str, bytes]:
    """The msgpack bytes of each tensor with its field, by name.

    Two encoded items are equal if these are: vLLM writes the names in an order that differs between server processes.
    Raises `MalformedResultError`.
    """
    reader = _Reader(encoded, name)
    entries: dict[str, bytes] = {}
    for key in reader.tensor_names():
        start = reader.position
        reader.skip()
        entries[key] = bytes(reader.data[start : reader.position])
    return entries


def _tensor_entry(reader: _Reader, key: str) -> DecodedTensor:
    """{"data": ..., "field": ...}"""
    if (count := reader.count("map", 2, "members")) != 2 or reader.value("str", "a member") != "data":
        reader.refuse(f"{key!r} is not a map of data and field, but of {count} members")
    start = reader.position
    value = _tensor(reader, key) if reader.next_is_tensor() else _numbers(reader, key, _MAX_LIST_DEPTH)
    end = reader.position
    if reader.value("str", "a member") != "field":
        reader.refuse(f"{key!r} has no field after its data")
    field = _decoded_field(reader, key)
    if isinstance(value, ServerTensor):
        if field.kind == "flat" and not 0 <= field.dim < len(value.shape):
            reader.refuse(f"{key!r} of shape {value.shape} is joined along axis {field.dim}")
        tensor = ServerTensor(value.dtype, value.shape, value.raw, field.keep_on_cpu, field.dim)
        is_default = field.dim == 0 and field.keep_on_cpu == (field.kind == "batched" and key in KEPT_ON_CPU)
        as_array = value.dtype not in FLOATS and is_default
        return DecodedTensor(tensor.unpack() if as_array else tensor, TensorField(field.kind), value.dtype)
    if field.kind == "flat":
        reader.refuse(f"{key!r} is flat, but no tensor")
    try:
        array = np.array(value)
    except ValueError:
        reader.refuse(f"{key!r} is a list of lists of different lengths")
    array.setflags(write=False)
    numbers = ServerNumbers(bytes(reader.data[start:end]), array, field.keep_on_cpu)
    return DecodedTensor(numbers, TensorField(field.kind), "")


def _tensor(reader: _Reader, key: str) -> ServerTensor:
    """[dtype, shape, Ext(3, raw)]"""
    if reader.count("array", 3, "members of a tensor") != 3:
        reader.refuse(f"{key!r} is not a list of dtype, shape and bytes")
    dtype = reader.value("str", "a dtype")
    if dtype not in ITEM_BYTES:
        reader.refuse(f"{key!r} has the dtype {dtype!r}; supported are {', '.join(ITEM_BYTES)}")
    shape = tuple(
        reader.value("int", "a dimension") for _ in range(reader.count("array", _MAX_DIMENSIONS, "dimensions"))
    )
    if any(size < 0 for size in shape) or math.prod(max(1, size) for size in shape) > _MAX_ELEMENTS:
        reader.refuse(f"{key!r} has the shape {shape}")
    if (kind := reader.next_type()) != "ext":
        reader.refuse(f"{key!r} has {kind} instead of its bytes")
    start = reader.position
    reader.skip()
    content = start + _EXT_HEADER_BYTES[reader.data[start]]
    raw = reader.data[content : reader.position]
    if (code := reader.data[content - 1]) != _RAW_TENSOR:
        reader.refuse(f"{key!r} is of extension type {code}, not {_RAW_TENSOR} (raw bytes)")
    if len(raw) != math.prod(shape) * ITEM_BYTES[dtype]:
        reader.refuse(f"{key!r} of {dtype} {shape} has {len(raw)} bytes")
    return ServerTensor(dtype, shape, np.asarray(raw))


class _Field(NamedTuple):
    kind: Literal["flat", "batched", "shared"]
    keep_on_cpu: bool = False
    dim: int = 0


def _decoded_field(reader: _Reader, key: str) -> _Field:
    """[kind, {...}]; slices and batch size are those of the rendered prompt, and skipped."""
    if reader.count("array", 2, "members of a field") != 2:
        reader.refuse(f"the field of {key!r} is not a kind and its options")
    kind = reader.value("str", "a kind")
    keep_on_cpu, dim = False, 0
    for _ in range(reader.count("map", 8, "options")):
        match reader.value("str", "an option"):
            case "keep_on_cpu":
                keep_on_cpu = reader.value("bool", "keep_on_cpu")
            case "dim":
                dim = reader.value("int", "dim")
            case "slices" | "batch_size":
                reader.skip()
            case other:
                reader.refuse(f"the field of {key!r} has the option {other!r}")
    if kind not in ("flat", "batched", "shared"):
        reader.refuse(f"the field of {key!r} is {kind!r}, not flat, batched or shared")
    return _Field(kind, keep_on_cpu, dim)


def _numbers(reader: _Reader, key: str, max_depth: int) -> Any:
    """A number or nested lists of numbers."""
    if reader.next_is_tensor():
        reader.refuse(
            f"{key!r} is a list of tensors, which is not supported: load a renderer from the directory of the model"
        )
    reader.count_number(key)
    kind = reader.next_type()
    if kind in ("int", "float"):
        return reader.value(kind, key)
    if kind != "array" or max_depth == 0:
        reader.refuse(f"{key!r} holds {kind} instead of a tensor or a number")
    return [_numbers(reader, key, max_depth - 1) for _ in range(reader.count("array", _MAX_NUMBERS, "numbers"))]


class _Reader:
    """Reads msgpack values one at a time, each only if it has the expected type."""

    def __init__(self, encoded: str | bytes, name: str) -> None:
        self._name = name
        try:
            self.data = memoryview(binascii.a2b_base64(encoded, strict_mode=True))
        except ValueError as error:  # binascii.Error, and text that is not ASCII
            raise MalformedResultError(name, f"{len(encoded)} characters are not base64: {error}") from error
        self._unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(self.data)), max_str_len=_MAX_NAME_BYTES)
        self._unpacker.feed(self.data)
        self._numbers = 0

    @property
    def position(self) -> int:
        return int(self._unpacker.tell())

    def refuse(self, reason: str) -> NoReturn:
        raise MalformedResultError(self._name, f"{reason} (byte {self.position} of {len(self.data)})")

    def tensor_names(self) -> Iterator[str]:
        """The keys of the item; the caller reads the value of each before the next one."""
        names: set[str] = set()
        for _ in range(self.count("map", _MAX_TENSORS, "tensors")):
            key = self.value("str", "the name of a tensor")
            if key in names:
                self.refuse(f"{key!r} comes twice")
            names.add(key)
            yield key
        if self.position != len(self.data):
            self.refuse("there are bytes after the last tensor")

    def count_number(self, key: str) -> None:
        """Count a number, or a list of them, against the limit of the item."""
        self._numbers += 1
        if self._numbers > _MAX_NUMBERS:
            self.refuse(f"{key!r} holds more than {_MAX_NUMBERS} numbers and lists")

    def next_type(self, position: int | None = None) -> str:
        """The type of the next value, or of the value at a position."""
        start = self.position if position is None else position
        if start >= len(self.data):
            self.refuse("the data end before a value")
        return _TYPES.get(self.data[start]) or self.refuse(f"0x{self.data[start]:02x} is no msgpack type")

    def next_is_tensor(self) -> bool:
        """Whether the next value is a list that begins with text, as a tensor does."""
        if self.next_type() != "array":
            return False
        start = self.position
        header = _ARRAY_HEADER_BYTES[self.data[start]]
        count = int.from_bytes(self.data[start + 1 : start + header], "big") if header > 1 else self.data[start] & 0x0F
        return count > 0 and self.next_type(start + header) == "str"

    def value(self, wanted: str, what: str) -> Any:
        """The next value, which must be a str, int, float or bool."""
        if (kind := self.next_type()) != wanted:
            self.refuse(f"{what} is {kind}, not {wanted}")
        return self._read(self._unpacker.unpack)

    def count(self, wanted: Literal["map", "array"], most: int, what: str) -> int:
        """The number of entries of the next value, which must be a map or an array; its entries are read next."""
        if (kind := self.next_type()) != wanted:
            self.refuse(f"{what} are {kind}, not {wanted}")
        header = self._unpacker.read_map_header if wanted == "map" else self._unpacker.read_array_header
        if (count := int(self._read(header))) > most:
            self.refuse(f"{count} {what}; at most {most} are read")
        return count

    def skip(self) -> None:
        """Skip the next value; no object is built."""
        self._read(self._unpacker.skip)

    def _read(self, method: Callable[[], T]) -> T:
        try:
            return method()
        except msgpack.OutOfData:
            self.refuse("the data end within a value")
        except ValueError as error:  # text that is too long or not UTF-8, an unknown type, too many nested lists
            self.refuse(f"a value cannot be read: {error}")
