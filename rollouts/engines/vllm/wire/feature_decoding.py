"""Reading an entry of kwargs_data as vLLM's `/render` writes it. Nothing in it is believed.

A msgpack library builds what the bytes describe, and a few megabytes can describe gigabytes of empty lists. Here every
value is read because the format wants one of its kind in that place; everything else is refused or stepped over, and
tensors stay views of the one decoded buffer.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

from renderers.media.item import TensorField
from rollouts.engines.vllm.wire.tensors import (
    FLOATS,
    ITEM_BYTES,
    KEPT_ON_CPU,
    ServerNumbers,
    ServerTensor,
    Tensor,
    count_of,
)
from rollouts.errors import MalformedResultError

_MOST_TENSORS = 256
_MOST_DIMENSIONS = 16
_MOST_ELEMENTS = 2**40  # also of shapes with a 0 in them, which no byte need stand behind
_MOST_NUMBERS = 2**16
_MOST_VALUES = 2**20  # in the slices of one field, which are stepped over
_LONGEST_NAME = 256
_DEEPEST_LIST = 8
_RAW_TENSOR = 3

Kind = Literal["map", "array", "str", "bytes", "ext", "int", "float", "bool", "nil"]


class DecodedTensor(NamedTuple):
    """A tensor of an item, how the server makes a batch of it, and torch's name of its type ("" for plain numbers).

    `tensor` is an array, a read-only view of what was received, where `features.encode_item` writes that again byte for
    byte; else (floats, and unusual fields) a `ServerTensor` or `ServerNumbers`, of which it does. Both can be a tensor
    of a `MediaItem`.
    """

    tensor: Tensor
    field: TensorField
    dtype: str


def decode_item(encoded: str | bytes, *, name: str = "kwargs_data") -> dict[str, DecodedTensor]:
    """The tensors of one entry of kwargs_data by name, in the server's order.

    Raises `MalformedResultError` under `name`, with the place, for everything that vLLM does not write.
    """
    cursor = _Cursor(_from_base64(encoded, name), name)
    tensors: dict[str, DecodedTensor] = {}
    for _ in range(cursor.count("map", _MOST_TENSORS, "tensors")):
        key = cursor.text("the name of a tensor")
        if key in tensors:
            cursor.refuse(f"{key!r} comes twice")
        tensors[key] = _entry(cursor, key)
    cursor.end()
    return tensors


def encoded_entries(encoded: str | bytes, *, name: str = "kwargs_data") -> dict[str, bytes]:
    """The exact msgpack of each tensor with its field, by name.

    What two encoders wrote is the same if these are equal; vLLM writes the names in an order that differs from one
    server process to the next. Raises `MalformedResultError`.
    """
    cursor = _Cursor(_from_base64(encoded, name), name)
    entries: dict[str, bytes] = {}
    for _ in range(cursor.count("map", _MOST_TENSORS, "tensors")):
        key = cursor.text("the name of a tensor")
        start = cursor.position
        cursor.skip(_MOST_VALUES)
        entries[key] = bytes(cursor.data[start : cursor.position])
    cursor.end()
    return entries


def _from_base64(encoded: str | bytes, name: str) -> memoryview:
    try:
        return memoryview(binascii.a2b_base64(encoded, strict_mode=True))
    except ValueError as error:  # binascii.Error, and text that is not ASCII
        raise MalformedResultError(name, f"{len(encoded)} characters are not base64: {error}") from error


def _entry(cursor: _Cursor, key: str) -> DecodedTensor:
    """{"data": ..., "field": ...}"""
    if (count := cursor.count("map", 2, "members")) != 2 or cursor.text("a member") != "data":
        cursor.refuse(f"{key!r} is not a map of data and field, but of {count}")
    start = cursor.position
    value = _tensor(cursor, key) if cursor.is_tensor() else _numbers(cursor, key, _DEEPEST_LIST)
    end = cursor.position
    if cursor.text("a member") != "field":
        cursor.refuse(f"behind the data of {key!r} is no field")
    how = _field(cursor, key)
    if isinstance(value, ServerTensor):
        if how.kind == "flat" and not 0 <= how.dim < len(value.shape):
            cursor.refuse(f"{key!r} of shape {value.shape} is joined along axis {how.dim}")
        tensor = ServerTensor(value.dtype, value.shape, value.raw, how.keep_on_cpu, how.dim)
        ours = how.keep_on_cpu == (how.kind == "batched" and key in KEPT_ON_CPU)
        plain = value.dtype not in FLOATS and ours and how.dim == 0
        return DecodedTensor(tensor.unpack() if plain else tensor, TensorField(how.kind), value.dtype)
    if how.kind == "flat":
        cursor.refuse(f"{key!r} is flat, but no tensor")
    numbers = ServerNumbers(bytes(cursor.data[start:end]), _rectangular(cursor, key, value), how.keep_on_cpu)
    return DecodedTensor(numbers, TensorField(how.kind), "")


def _tensor(cursor: _Cursor, key: str) -> ServerTensor:
    """[dtype, shape, Ext(3, raw)]"""
    if cursor.count("array", 3, "members of a tensor") != 3:
        cursor.refuse(f"{key!r} is not a type, a shape and bytes")
    dtype = cursor.text("a type")
    if dtype not in ITEM_BYTES:
        cursor.refuse(f"{key!r} is of type {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    sides = cursor.count("array", _MOST_DIMENSIONS, "dimensions")
    shape = tuple(cursor.whole_number("a side") for _ in range(sides))
    if count_of(tuple(max(1, side) for side in shape)) > _MOST_ELEMENTS:
        cursor.refuse(f"{key!r} has the shape {shape}")
    kind, payload = cursor.read()
    if kind != "ext":
        cursor.refuse(f"{key!r} has {kind} where its bytes should be")
    code, raw = payload
    if code != _RAW_TENSOR:
        cursor.refuse(f"{key!r} is of extension type {code}, not {_RAW_TENSOR}, raw bytes")
    if len(raw) != count_of(shape) * ITEM_BYTES[dtype]:
        cursor.refuse(f"{key!r} of {dtype} {shape} has {len(raw)} bytes")
    return ServerTensor(dtype, shape, np.asarray(raw))


class _Field(NamedTuple):
    kind: Literal["flat", "batched", "shared"]
    keep_on_cpu: bool = False
    dim: int = 0


def _field(cursor: _Cursor, key: str) -> _Field:
    """[kind, {...}]; the slices and sizes are those of the prompt that was rendered, and stepped over."""
    if cursor.count("array", 2, "members of a field") != 2:
        cursor.refuse(f"the field of {key!r} is not a kind and its options")
    kind = cursor.text("a kind")
    keep_on_cpu, dim = False, 0
    for _ in range(cursor.count("map", 8, "options")):
        match cursor.text("an option"):
            case "keep_on_cpu":
                keep_on_cpu = bool(cursor.value("bool", "keep_on_cpu"))
            case "dim":
                dim = int(cursor.value("int", "dim"))
            case "slices" | "batch_size":
                cursor.skip(_MOST_VALUES)
            case other:
                cursor.refuse(f"the field of {key!r} has the option {other!r}")
    match kind:
        case "flat" | "batched" | "shared":
            return _Field(kind, keep_on_cpu, dim)
        case _:
            cursor.refuse(f"{key!r} is {kind!r}; fields are flat, batched or shared")


def _numbers(cursor: _Cursor, key: str, depth: int) -> Any:
    """A number or nested lists of numbers."""
    if cursor.is_tensor():
        cursor.refuse(
            f"{key!r} is a list of tensors, which are not read: load a renderer from the directory of the model"
        )
    kind, value = cursor.read()
    if kind in ("int", "float"):
        cursor.spend(key)
        return value
    if kind != "array" or depth == 0:
        cursor.refuse(f"{key!r} holds {kind} where a tensor or a number should be")
    if value > _MOST_NUMBERS:
        cursor.refuse(f"{key!r} has {value} numbers; at most {_MOST_NUMBERS} are read")
    cursor.spend(key)
    return [_numbers(cursor, key, depth - 1) for _ in range(value)]


def _rectangular(cursor: _Cursor, key: str, numbers: Any) -> np.ndarray:
    try:
        array = np.array(numbers)
    except ValueError:
        cursor.refuse(f"{key!r} is a list of lists of different lengths")
    array.setflags(write=False)
    return array


class _Cursor:
    """A place in msgpack bytes; every step is checked against their end."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.data = data
        self.position = 0
        self._name = name
        self._numbers = _MOST_NUMBERS

    def refuse(self, reason: str) -> NoReturn:
        raise MalformedResultError(self._name, f"{reason} (byte {self.position} of {len(self.data)})")

    def spend(self, key: str) -> None:
        """Count a number or a list of them."""
        self._numbers -= 1
        if self._numbers < 0:
            self.refuse(f"{key!r} holds more than {_MOST_NUMBERS} numbers and lists")

    def is_tensor(self) -> bool:
        """Whether a list comes that begins with text, as a tensor does."""
        here = self.position
        kind, count = self.read()
        starts_with_text = kind == "array" and count > 0 and self.read()[0] == "str"
        self.position = here
        return starts_with_text

    def value(self, wanted: Kind, what: str) -> Any:
        kind, value = self.read()
        if kind != wanted:
            self.refuse(f"{what} is {kind}, not {wanted}")
        return value

    def count(self, wanted: Literal["map", "array"], most: int, what: str) -> int:
        count = int(self.value(wanted, what))
        if count > most:
            self.refuse(f"{count} {what}; at most {most} are read")
        return count

    def whole_number(self, what: str) -> int:
        number = int(self.value("int", what))
        if number < 0:
            self.refuse(f"{what} is {number}")
        return number

    def text(self, what: str) -> str:
        raw = self.value("str", what)
        if len(raw) > _LONGEST_NAME:
            self.refuse(f"{what} is {len(raw)} bytes long")
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            self.refuse(f"{what} is not UTF-8")

    def skip(self, most: int) -> None:
        """Step over one value, however deep, that consists of `most` values or fewer."""
        left = 1
        while left:
            kind, value = self.read()
            left += {"map": 2, "array": 1}[kind] * value - 1 if kind in ("map", "array") else -1
            most -= 1
            if most < left:
                self.refuse("more values than are read")

    def end(self) -> None:
        if self.position != len(self.data):
            self.refuse("bytes behind the last tensor")

    def read(self) -> tuple[Kind, Any]:
        """The next value; of a list or map only the head: how many values or pairs follow."""
        lead = self._take(1)[0]
        if lead < 0x80:
            return "int", lead
        if lead < 0x90:
            return "map", lead & 0x0F
        if lead < 0xA0:
            return "array", lead & 0x0F
        if lead < 0xC0:
            return "str", self._take(lead & 0x1F)
        if lead >= 0xE0:
            return "int", lead - 0x100
        read = _READERS.get(lead)
        if read is None:
            self.refuse(f"0x{lead:02x} begins nothing")
        return read(self)

    def _take(self, count: int) -> memoryview:
        start, self.position = self.position, self.position + count
        if self.position > len(self.data):
            self.position = start
            self.refuse(f"{count} bytes were announced, {len(self.data) - start} are left")
        return self.data[start : start + count]

    def _size(self, width: int) -> int:
        return int.from_bytes(self._take(width), "big")

    def _ext(self, size: int) -> tuple[Kind, Any]:
        return "ext", (self._take(1)[0], self._take(size))

    def _float(self, layout: str) -> tuple[Kind, Any]:
        return "float", struct.unpack(layout, self._take(struct.calcsize(layout)))[0]


def _readers() -> Mapping[int, Callable[[_Cursor], tuple[Kind, Any]]]:
    """What follows each first byte. Source: the msgpack specification."""
    readers: dict[int, Callable[[_Cursor], tuple[Kind, Any]]] = {
        0xC0: lambda c: ("nil", None),
        0xC2: lambda c: ("bool", False),
        0xC3: lambda c: ("bool", True),
        0xCA: lambda c: c._float(">f"),
        0xCB: lambda c: c._float(">d"),
        0xDC: lambda c: ("array", c._size(2)),
        0xDD: lambda c: ("array", c._size(4)),
        0xDE: lambda c: ("map", c._size(2)),
        0xDF: lambda c: ("map", c._size(4)),
    }
    for power in range(3):
        width = 1 << power
        readers[0xC4 + power] = lambda c, w=width: ("bytes", c._take(c._size(w)))  # type: ignore[misc]
        readers[0xC7 + power] = lambda c, w=width: c._ext(c._size(w))  # type: ignore[misc]
        readers[0xD9 + power] = lambda c, w=width: ("str", c._take(c._size(w)))  # type: ignore[misc]
    for power in range(4):
        width = 1 << power
        readers[0xCC + power] = lambda c, w=width: ("int", c._size(w))  # type: ignore[misc]
        readers[0xD0 + power] = lambda c, w=width: (  # type: ignore[misc]
            "int",
            int.from_bytes(c._take(w), "big", signed=True),
        )
    for power in range(5):
        readers[0xD4 + power] = lambda c, w=1 << power: c._ext(w)  # type: ignore[misc]
    return readers


_READERS = _readers()
