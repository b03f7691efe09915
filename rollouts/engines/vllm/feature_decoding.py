"""Decodes an entry of kwargs_data as vLLM's `/render` writes it, without trust in its content.

`msgpack.unpackb` builds whatever the bytes describe, and a few megabytes can describe gigabytes of empty
lists. Here each value is read only after its type was checked; everything unexpected is refused, slices are
skipped, and tensors are views of the one decoded buffer.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import msgpack
import numpy as np

from renderers.media.item import TensorField
from rollouts.engines.vllm.tensors import (
    FLOATS,
    ITEM_BYTES,
    KEPT_ON_CPU,
    RAW_TENSOR,
    ServerNumbers,
    ServerTensor,
    Tensor,
)
from rollouts.errors import MalformedResultError

T = TypeVar("T")
_MAX_NUMBERS = 2**16
# Types by first byte, and the bytes before the content of an extension type. Source: the msgpack
# specification.
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
    """An entry's tensors by name, in order. Raises `MalformedResultError` with the byte position."""
    reader = _Reader(encoded, name)
    return {key: _tensor_entry(reader, key) for key in reader.tensor_names()}


def encoded_entries(encoded: str | bytes, *, name: str = "kwargs_data") -> dict[str, bytes]:
    """The msgpack bytes of each tensor with its field, by name.

    Two encoded items are equal if these are: vLLM writes the names in an order that differs between server
    processes. Raises `MalformedResultError`.
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
    value = _tensor(reader, key) if reader.next_is_tensor() else _numbers(reader, key, max_depth=8)
    end = reader.position
    if reader.value("str", "a member") != "field":
        reader.refuse(f"{key!r} has no field after its data")
    kind, keep_on_cpu, dim = _decoded_field(reader, key)
    if isinstance(value, ServerTensor):
        if kind == "flat" and not 0 <= dim < len(value.shape):
            reader.refuse(f"{key!r} of shape {value.shape} is joined along axis {dim}")
        tensor = ServerTensor(value.dtype, value.shape, value.raw, keep_on_cpu, dim)
        is_default = dim == 0 and keep_on_cpu == (kind == "batched" and key in KEPT_ON_CPU)
        as_array = value.dtype not in FLOATS and is_default
        return DecodedTensor(tensor.unpack() if as_array else tensor, TensorField(kind), value.dtype)
    if kind == "flat":
        reader.refuse(f"{key!r} is flat, but no tensor")
    try:
        array = np.array(value)
    except ValueError:
        reader.refuse(f"{key!r} is a list of lists of different lengths")
    array.setflags(write=False)
    numbers = ServerNumbers(bytes(reader.data[start:end]), array, keep_on_cpu)
    return DecodedTensor(numbers, TensorField(kind), "")


def _tensor(reader: _Reader, key: str) -> ServerTensor:
    """[dtype, shape, Ext(3, raw)]"""
    if reader.count("array", 3, "members of a tensor") != 3:
        reader.refuse(f"{key!r} is not a list of dtype, shape and bytes")
    dtype = reader.value("str", "a dtype")
    if dtype not in ITEM_BYTES:
        reader.refuse(f"{key!r} has the dtype {dtype!r}; supported are {', '.join(ITEM_BYTES)}")
    shape = tuple(reader.value("int", "a dimension") for _ in range(reader.count("array", 16, "dimensions")))
    # The limit holds for shapes with a 0, too, which need no bytes.
    if any(size < 0 for size in shape) or math.prod(max(1, size) for size in shape) > 2**40:
        reader.refuse(f"{key!r} has the shape {shape}")
    if (kind := reader.next_type()) != "ext":
        reader.refuse(f"{key!r} has {kind} instead of its bytes")
    start = reader.position
    reader.skip()
    content = start + _EXT_HEADER_BYTES[reader.data[start]]
    raw = reader.data[content : reader.position]
    if (code := reader.data[content - 1]) != RAW_TENSOR:
        reader.refuse(f"{key!r} is of extension type {code}, not {RAW_TENSOR} (raw bytes)")
    if len(raw) != math.prod(shape) * ITEM_BYTES[dtype]:
        reader.refuse(f"{key!r} of {dtype} {shape} has {len(raw)} bytes")
    return ServerTensor(dtype, shape, np.asarray(raw))


def _decoded_field(reader: _Reader, key: str) -> tuple[Literal["flat", "batched", "shared"], bool, int]:
    """Kind, keep_on_cpu and dim of [kind, {...}]; slices and batch size are of the rendered prompt, and skipped."""
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
    return kind, keep_on_cpu, dim


def _numbers(reader: _Reader, key: str, max_depth: int) -> Any:
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
            # Strict: otherwise characters that are not base64 are skipped in silence.
            self.data = memoryview(binascii.a2b_base64(encoded, strict_mode=True))
        except ValueError as error:  # binascii.Error, and text that is not ASCII
            raise MalformedResultError(name, f"{len(encoded)} characters are not base64: {error}") from error
        self._unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(self.data)), max_str_len=256)
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
        for _ in range(self.count("map", 256, "tensors")):
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
