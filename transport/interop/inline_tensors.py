"""Arrays and tensors inside plain dicts and lists, in the form that other libraries of the field write with msgpack.

    {"__torch_tensor__": True, "dtype": "float32", "shape": [2, 3], "data": b"..."}
    {"__ndarray__": True, "dtype": "float32", "shape": [2, 3], "data": b"..."}

`dtype` is numpy's name for the elements ("float32", ">i2", "datetime64[ns]"), for those that numpy lacks torch's
("bfloat16"); `data` are the elements in C order. verifiers writes the first form for arrays as well as for tensors
(https://github.com/PrimeIntellect-ai/verifiers, `verifiers/utils/serve_utils.py`); for a peer that knows no other, pass
arrays as `RawTensor(str(array.dtype), array.shape, array_bytes)`.

A dict is such a payload if it has exactly these four keys, the tag is `True`, `dtype` a str, `shape` a list or tuple of
ints and `data` bytes. Any other dict is the user's and comes back as it is. Trees encoded here keep even a user's dict
of that very form apart: a dict that holds a tag among its keys travels as `{"__plain_dict__": [[key, value], ...]}`.

Objects of registered types (`wire_type`; the media values of `renderers` among them) and media sources become dicts:

    {"__object__": "renderers.PlaceholderRange", "version": 1, "fields": {"offset": 4, "length": 16, ...}}
    {"__media__": sha256, "data": b"..."}

The fields of an enum are its member's name, and tuples among those of an object, of which msgpack would make lists, are
`{"__tuple__": [...]}`. A decoder makes registered types and nothing else of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

from renderers.media.source import MediaSource
from transport.errors import EncodeError, MalformedError
from transport.wire import registry
from transport.wire.arrays import (
    array_bytes,
    build_array,
    build_raw_tensor,
    build_tensor,
    describe_dtype,
    is_array,
    is_tensor,
    is_tensor_dtype,
    tensor_parts,
)
from transport.wire.errors import NotEncodableError, UnsupportedArrayError
from transport.wire.limits import DecodeLimits
from transport.wire.unpacking import as_bytes, build_dict, build_media
from transport.wire.wire_format import KEY_TYPES

TENSOR_TAG: Final = "__torch_tensor__"
ARRAY_TAG: Final = "__ndarray__"
PLAIN_TAG: Final = "__plain_dict__"
OBJECT_TAG: Final = "__object__"
MEDIA_TAG: Final = "__media__"
TUPLE_TAG: Final = "__tuple__"
_RESERVED: Final = frozenset({TENSOR_TAG, ARRAY_TAG, PLAIN_TAG, OBJECT_TAG, MEDIA_TAG, TUPLE_TAG})
_OBJECT_KEYS: Final = {OBJECT_TAG, "version", "fields"}
_MEDIA_KEYS: Final = {MEDIA_TAG, "data"}
_DEFAULT_LIMITS: Final = DecodeLimits()

# What str(dtype) gives: a word ("bool", "float32", "longdouble"'s own name), a unit in brackets, or dtype.str itself.
_WORDS: Final = re.compile(r"(?:bool|u?int(?:8|16|32|64)|float(?:16|32|64|96|128)|complex(?:64|128|192|256))")
_TIMES: Final = re.compile(r"(datetime|timedelta)64(\[\d{0,9}[a-zA-Zμ]{1,7}\])?")

_Visit: TypeAlias = "Callable[[Any, bool], Any]"  # a value, and whether it is a part of an object


def encode_tensor_payload(obj: Any) -> dict[str, object]:
    """A torch tensor or `RawTensor` as a `__torch_tensor__` payload, a numpy array as an `__ndarray__` one.

    The elements are copied. Raises `EncodeError` for anything else, and for dtypes that have no name of one word
    (structured, of Python objects).
    """
    try:
        if is_tensor(obj):
            name, shape, data = tensor_parts(obj)
            return {TENSOR_TAG: True, "dtype": name, "shape": shape, "data": data.tobytes()}
        if is_array(obj):
            if type(describe_dtype(obj.dtype)) is not str:
                raise UnsupportedArrayError(f"dtype {obj.dtype} is structured", "Send one array per field.")
            shape = list(obj.shape)
            return {ARRAY_TAG: True, "dtype": str(obj.dtype), "shape": shape, "data": array_bytes(obj).tobytes()}
    except UnsupportedArrayError as error:
        raise EncodeError("value", error.reason, error.cure) from error
    raise EncodeError("value", f"{type(obj).__qualname__} is neither an array nor a tensor", "Pass one of these.")


def decode_tensor_payload(payload: Any, to_torch: bool = False, *, limits: DecodeLimits = _DEFAULT_LIMITS) -> Any:
    """The array or tensor of a payload; anything that is no payload, and so one decoded already, as it is.

    An `__ndarray__` payload gives a read-only array that shares the payload's bytes, and so does a `__torch_tensor__`
    one, its dtypes that numpy lacks a `RawTensor`. With `to_torch` the latter gives a tensor of its own memory, or a
    `RawTensor` where torch is not installed. Raises `MalformedError` for a payload whose dtype is unknown or whose data
    does not fit its shape, `LimitError` for more bytes than `limits.max_total_bytes`.
    """
    if not _is_payload(payload):
        return payload
    flat = as_bytes(payload["data"])
    limits.check("max_total_bytes", flat.nbytes)
    name, shape = payload["dtype"].removeprefix("torch."), list(payload["shape"])
    if TENSOR_TAG in payload and not to_torch and not _has_numpy(name):
        return build_raw_tensor(name, shape, flat)
    if ARRAY_TAG in payload or not to_torch:
        return build_array(_dtype_on_the_wire(name), shape, flat)
    if is_tensor_dtype(name):
        return build_tensor(name, shape, flat)
    array = build_array(_dtype_on_the_wire(name), shape, flat)
    native = array.astype(array.dtype.newbyteorder("="))
    return build_tensor(native.dtype.name, shape, array_bytes(native).data)


def walk_encode_tensors(tree: Any, *, limits: DecodeLimits = _DEFAULT_LIMITS) -> Any:
    """`tree` with a payload for each array and tensor, ready for msgpack; what `walk_decode_tensors` reverses.

    Looks into dicts, lists and tuples, which stay what they are (msgpack makes lists of tuples), and into objects of
    registered types, which become tagged dicts as media sources do. A dict with one of the tags among its keys is put
    out of reach of every decoder. Raises `EncodeError` for arrays as above, for objects without one of their fields,
    and for trees more than `limits.max_depth` deep, such as one that contains itself.
    """

    def visit(value: Any, in_object: bool) -> Any:
        if in_object and type(value) is tuple:
            return _Tuple(value)
        if is_array(value) or is_tensor(value):
            return _Leaf(encode_tensor_payload(value))
        if type(value) is MediaSource:
            return _Leaf({MEDIA_TAG: value.digest, "data": bytes(value.data)})
        registered = registry.of_class(type(value))
        if registered is not None:
            return _Fields(registered, value)
        if type(value) is dict and not _RESERVED.isdisjoint(value):
            if not KEY_TYPES.issuperset(map(type, value)):
                raise EncodeError(
                    "value",
                    f"dict with a tag and keys that are no plain values: {list(value)!r:.200}",
                    "Use str or int keys.",
                )
            return _Pairs(value.items())
        return value

    def too_deep(depth: int) -> None:
        if depth > limits.max_depth:
            raise EncodeError(
                "value",
                f"containers nest more than {limits.max_depth} deep",
                "Remove cycles, or send less deep a tree.",
            )

    return _rewrite(tree, visit, too_deep)


def walk_decode_tensors(tree: Any, *, to_torch: bool = False, limits: DecodeLimits = _DEFAULT_LIMITS) -> Any:
    """`tree` with every payload in it decoded as `decode_tensor_payload` does, objects made again, and what was put out
    of reach restored.

    Looks into dicts, lists and tuples and shares all else with `tree`, which is left as it is. Raises as
    `decode_tensor_payload` does, `LimitError` for trees more than `limits.max_depth` deep and for payloads that
    hold more than `limits.max_total_bytes` together, and for objects and media what `decode` raises for them.
    """
    total = 0

    def visit(value: Any, in_object: bool) -> Any:
        nonlocal total
        if type(value) is not dict:
            return value
        if _is_payload(value):
            total += memoryview(value["data"]).nbytes
            limits.check("max_total_bytes", total)
            return _Leaf(decode_tensor_payload(value, to_torch, limits=limits))
        if _is_media(value):
            data = as_bytes(value["data"])
            total += data.nbytes
            limits.check("max_total_bytes", total)
            return _Leaf(build_media(value[MEDIA_TAG], data))
        if _is_object(value):
            return _Object(value)
        if len(value) == 1 and type(value.get(TUPLE_TAG)) is list:
            return tuple(value[TUPLE_TAG])
        if _is_plain(value):
            return build_dict([(key, part) for key, part in value[PLAIN_TAG]])
        return value

    return _rewrite(tree, visit, lambda depth: limits.check("max_depth", depth))


class _Leaf:
    """A value that is not looked into."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _Pairs:
    """A dict that becomes `{PLAIN_TAG: [[key, value], ...]}`."""

    __slots__ = ("pairs",)

    def __init__(self, items: Any) -> None:
        self.pairs = list(items)


class _Tuple:
    """A tuple that becomes `{TUPLE_TAG: [...]}`."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = list(parts)


class _Fields:
    """A registered object that becomes `{OBJECT_TAG: name, "version": number, "fields": {...}}`."""

    __slots__ = ("fields", "name", "version")

    def __init__(self, registered: registry.WireType, obj: Any) -> None:
        try:
            packed = registered.pack(obj)
        except NotEncodableError as error:
            raise EncodeError("value", error.reason, error.cure) from error
        self.name, self.version = registered.name, registered.version
        self.fields = packed if isinstance(packed, str) else dict(zip(registered.fields, packed, strict=True))


class _Object:
    """Such a dict that becomes an object, once its fields are what they were."""

    __slots__ = ("fields", "names", "type")

    def __init__(self, value: dict[str, Any]) -> None:
        self.fields = value["fields"]
        self.names = list(self.fields) if type(self.fields) is dict else []
        self.type = registry.of_name(value[OBJECT_TAG]).as_sent(value["version"], self.names)

    def build(self, fields: Any) -> object:
        return self.type.build([fields[name] for name in self.names] if type(fields) is dict else fields)


def _rewrite(tree: Any, visit: _Visit, check_depth: Callable[[int], None]) -> Any:
    """A copy of `tree` in which `visit` had its way with every value, parents first; without recursion."""
    root: list[Any] = [tree]
    # Where a value that is still the old one stands, how deep, and whether in an object.
    stack: list[tuple[Any, Any, int, bool]] = [(root, 0, 0, False)]
    later: list[tuple[Any, Any, Callable[[Any], Any]]] = []  # what can only be made once its parts are
    while stack:
        place, key, depth, inside = stack.pop()
        value = visit(place[key], inside)
        kind = type(value)
        if kind is _Leaf:
            place[key] = value.value
            continue
        if kind is dict:
            place[key] = copy = dict(value)
            stack.extend((copy, part, depth + 1, inside) for part in copy)
        elif kind is list or kind is tuple:
            place[key] = copied = list(value)
            stack.extend((copied, index, depth + 1, inside) for index in range(len(copied)))
            if kind is tuple:
                later.append((place, key, tuple))
        elif kind is _Fields:
            place[key] = {OBJECT_TAG: value.name, "version": value.version, "fields": value.fields}
            if type(value.fields) is dict:
                stack.extend((value.fields, part, depth + 1, True) for part in value.fields)
        elif kind is _Tuple:
            place[key] = {TUPLE_TAG: value.parts}
            stack.extend((value.parts, index, depth + 1, True) for index in range(len(value.parts)))
        elif kind is _Object:
            place[key] = value.fields
            if type(value.fields) is dict:
                place[key] = fields = dict(value.fields)
                stack.extend((fields, part, depth + 1, inside) for part in fields)
            later.append((place, key, value.build))
        elif kind is _Pairs:
            pairs = [[name, part] for name, part in value.pairs]
            place[key] = {PLAIN_TAG: pairs}
            stack.extend((pair, 1, depth + 1, inside) for pair in pairs)
        else:
            continue
        check_depth(depth + 1)
    for place, key, make in reversed(later):  # inner ones first: a tuple cannot be changed once it is one
        place[key] = make(place[key])
    return root[0]


def _is_payload(value: Any) -> bool:
    if type(value) is not dict or len(value) != 4:
        return False
    if value.get(TENSOR_TAG) is not True and value.get(ARRAY_TAG) is not True:
        return False
    shape: Any = value.get("shape")
    return (
        type(value.get("dtype")) is str
        and type(shape) in (list, tuple)
        and all(type(size) is int for size in shape)
        and type(value.get("data")) in (bytes, bytearray, memoryview)
    )


def _is_media(value: dict[Any, Any]) -> bool:
    return (
        value.keys() == _MEDIA_KEYS
        and type(value[MEDIA_TAG]) is str
        and type(value["data"]) in (bytes, bytearray, memoryview)
    )


def _is_object(value: dict[Any, Any]) -> bool:
    return (
        value.keys() == _OBJECT_KEYS
        and type(value[OBJECT_TAG]) is str
        and type(value["version"]) is int
        and type(value["fields"]) in (dict, str)
    )


def _is_plain(value: dict[Any, Any]) -> bool:
    if len(value) != 1 or PLAIN_TAG not in value:
        return False
    pairs = value[PLAIN_TAG]
    return type(pairs) is list and all(type(pair) is list and len(pair) == 2 for pair in pairs)


def _has_numpy(name: str) -> bool:
    return not is_tensor_dtype(name) or _WORDS.fullmatch(name) is not None


def _dtype_on_the_wire(name: str) -> str:
    """`dtype.str` for what str(dtype) gives; names of neither kind are left for the array decoder to refuse."""
    if _WORDS.fullmatch(name):
        try:
            return np.dtype(name).str
        except TypeError as error:
            raise MalformedError(f"array dtype {name} does not exist on this machine") from error
    times = _TIMES.fullmatch(name)
    if times is not None:
        return ("<M8" if times[1] == "datetime" else "<m8") + (times[2] or "")
    return name
