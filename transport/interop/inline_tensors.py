"""Arrays and tensors as dicts inside plain dicts and lists, in the form that other libraries write with msgpack.

    {"__torch_tensor__": True, "dtype": "float32", "shape": [2, 3], "data": b"..."}
    {"__ndarray__": True, "dtype": "float32", "shape": [2, 3], "data": b"..."}

`dtype` is numpy's name of the dtype ("float32", ">i2", "datetime64[ns]"), or torch's for those that numpy does not have
("bfloat16"); `data` are the elements in C order. verifiers writes the first form for arrays and for tensors
(https://github.com/PrimeIntellect-ai/verifiers, `verifiers/utils/serve_utils.py`); for a peer that reads only this
form, pass arrays as `RawTensor(str(array.dtype), array.shape, array_bytes)`.

A dict is such a payload if it has exactly these four keys, the tag is `True`, `dtype` a str, `shape` a list or tuple of
ints and `data` bytes. Any other dict is the user's and is decoded to an equal dict. A user's dict with a tag among its
keys is encoded as `{"__plain_dict__": [[key, value], ...]}`, so that it cannot be mistaken for a payload.

Objects of registered types (`wire_type`; the media values of `renderers` among them) and media sources become dicts:

    {"__object__": "renderers.PlaceholderRange", "version": 1, "fields": {"offset": 4, "length": 16, ...}}
    {"__media__": sha256, "data": b"..."}

The "fields" of an enum are the name of its member. A tuple inside the fields of an object, which msgpack would turn
into a list, is `{"__tuple__": [...]}`. A decoder constructs registered types and nothing else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from renderers.media.item import MediaSource
from transport.errors import EncodeError, MalformedError, NotEncodableError
from transport.wire import registry
from transport.wire.arrays import (
    TENSOR_ITEM_BYTES,
    array_bytes,
    build_array,
    build_raw_tensor,
    build_tensor,
    describe_dtype,
    is_array,
    is_tensor,
    tensor_parts,
)
from transport.wire.decoding import as_bytes, build_dict, build_media
from transport.wire.limits import DEFAULT_LIMITS, DecodeLimits, require_limits
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

# The forms of str(dtype): a name ("bool", "float32", "float128"), a time with a unit in brackets, or dtype.str itself.
_NAMES: Final = re.compile(r"(?:bool|u?int(?:8|16|32|64)|float(?:16|32|64|96|128)|complex(?:64|128|192|256))")
_TIMES: Final = re.compile(r"(datetime|timedelta)64(\[\d{0,9}[a-zA-Zμ]{1,7}\])?")


def encode_tensor_payload(obj: Any) -> dict[str, object]:
    """A torch tensor or `RawTensor` as a `__torch_tensor__` payload, a numpy array as an `__ndarray__` one.

    The elements are copied. Raises `EncodeError` for other values and for dtypes without a name (structured dtypes,
    Python objects).
    """
    try:
        if is_tensor(obj):
            name, shape, data = tensor_parts(obj)
            return {TENSOR_TAG: True, "dtype": name, "shape": shape, "data": data.tobytes()}
        if is_array(obj):
            if type(describe_dtype(obj.dtype)) is not str:
                raise NotEncodableError(f"dtype {obj.dtype} is structured", "Send one array per field.")
            shape = list(obj.shape)
            return {ARRAY_TAG: True, "dtype": str(obj.dtype), "shape": shape, "data": array_bytes(obj).tobytes()}
    except NotEncodableError as error:
        raise EncodeError("value", error.reason, error.cure) from error
    raise EncodeError("value", f"{type(obj).__qualname__} is neither an array nor a tensor", "Pass one of these.")


def decode_tensor_payload(payload: Any, to_torch: bool = False, *, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """The array or tensor of a payload; any other value, such as one decoded already, is returned unchanged.

    Both kinds of payload give a read-only array that shares the payload's bytes; a `__torch_tensor__` payload with a
    dtype that numpy does not have gives a `RawTensor`. With `to_torch` a `__torch_tensor__` payload gives a tensor with
    a copy of the data, or a `RawTensor` if torch is not installed. Raises `MalformedError` for a payload whose dtype is
    unknown or whose data does not fit its shape, `LimitError` for more bytes than `limits.max_total_bytes`.
    """
    if not _is_payload(payload):
        return payload
    flat = as_bytes(payload["data"])
    require_limits(limits).check("max_total_bytes", flat.nbytes)
    name, shape = payload["dtype"].removeprefix("torch."), list(payload["shape"])
    if TENSOR_TAG in payload and not to_torch and name in TENSOR_ITEM_BYTES and not _NAMES.fullmatch(name):
        return build_raw_tensor(name, shape, flat)
    if ARRAY_TAG in payload or not to_torch:
        return build_array(_wire_dtype(name), shape, flat)
    if name in TENSOR_ITEM_BYTES:
        return build_tensor(name, shape, flat)
    array = build_array(_wire_dtype(name), shape, flat)
    native = array.astype(array.dtype.newbyteorder("="))
    return build_tensor(native.dtype.name, shape, array_bytes(native).data)


def walk_encode_tensors(tree: Any, *, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """`tree` with a payload for each array and tensor, ready for msgpack; `walk_decode_tensors` is the inverse.

    Dicts, lists and tuples are copied and keep their type (msgpack makes lists of tuples). Objects of registered types
    and media sources become tagged dicts. numpy's booleans, integers, floats of at most 64 bits, str and bytes become
    Python's. A dict with one of the tags among its keys becomes a list of pairs, so that no decoder mistakes it for a
    payload. Raises `EncodeError` for arrays as above, for other numpy scalars, for objects without one of their fields,
    and for trees more than `limits.max_depth` deep, such as one that contains itself.
    """
    require_limits(limits)

    def replace(value: Any, in_object: bool) -> _Replacement:
        kind = type(value)
        if in_object and kind is tuple:
            parts = list(value)
            return _Replacement({TUPLE_TAG: parts}, [(parts, index) for index in range(len(parts))], True)
        if is_array(value) or is_tensor(value):
            return _Replacement(encode_tensor_payload(value))
        if isinstance(value, np.generic):
            return _Replacement(_python_scalar(value))
        if kind is MediaSource:
            return _Replacement({MEDIA_TAG: value.digest, "data": bytes(value.data)})
        registered = registry.registration_of_class(kind)
        if registered is not None:
            fields = _encode_fields(registered, value)
            places = [(fields, name) for name in fields] if isinstance(fields, dict) else []
            return _Replacement(
                {OBJECT_TAG: registered.name, "version": registered.version, "fields": fields}, places, True
            )
        if kind is dict and not _RESERVED.isdisjoint(value):
            if not KEY_TYPES.issuperset(map(type, value)):
                reason = f"dict with a tag and keys that are not plain values: {list(value)!r:.200}"
                raise EncodeError("value", reason, "Use str or int keys.")
            pairs = [[key, part] for key, part in value.items()]
            return _Replacement({PLAIN_TAG: pairs}, [(pair, 1) for pair in pairs], in_object)
        return _copy_container(value, in_object)

    def check_depth(depth: int) -> None:
        if depth > limits.max_depth:
            reason = f"containers nest more than {limits.max_depth} deep"
            raise EncodeError("value", reason, "Remove cycles, or make the tree less deep.")

    return _rewrite(tree, replace, check_depth)


def walk_decode_tensors(tree: Any, *, to_torch: bool = False, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """`tree` with every payload decoded as by `decode_tensor_payload`, and the tagged dicts turned back into values.

    Copies dicts, lists and tuples, shares all other values with `tree`, and does not change `tree`. Raises as
    `decode_tensor_payload` does, `LimitError` for trees more than `limits.max_depth` deep and for payloads with more
    than `limits.max_total_bytes` in total, and for objects and media the errors of `decode`.
    """
    total = 0
    require_limits(limits)

    def count_bytes(data: Any) -> None:
        nonlocal total
        total += memoryview(data).nbytes
        limits.check("max_total_bytes", total)

    def replace(value: Any, in_object: bool) -> _Replacement:
        if type(value) is not dict:
            return _copy_container(value)
        if _is_payload(value):
            count_bytes(value["data"])
            return _Replacement(decode_tensor_payload(value, to_torch, limits=limits))
        if _is_media(value):
            count_bytes(value["data"])
            return _Replacement(build_media(value[MEDIA_TAG], as_bytes(value["data"])))
        if _is_object(value):
            return _decoded_object(value)
        if len(value) == 1 and type(value.get(TUPLE_TAG)) is list:
            return _copy_container(tuple(value[TUPLE_TAG]))
        if _is_plain(value):
            return _copy_container(build_dict([(key, part) for key, part in value[PLAIN_TAG]]))
        return _copy_container(value)

    return _rewrite(tree, replace, lambda depth: limits.check("max_depth", depth))


@dataclass(frozen=True, slots=True)
class _Replacement:
    """The new value of a node of the tree.

    `places` are the (container, key) inside `value` of the parts that are replaced next; None for a value without
    parts. `parts_in_object` says whether these parts belong to an object. `finish` is applied to `value` when all its
    parts are final.
    """

    value: Any
    places: Sequence[tuple[Any, Any]] | None = None
    parts_in_object: bool = False
    finish: Callable[[Any], Any] | None = None


def _rewrite(tree: Any, replace: Callable[[Any, bool], _Replacement], check_depth: Callable[[int], None]) -> Any:
    """A copy of `tree` with every value replaced, parents first; without recursion."""
    root: list[Any] = [tree]
    stack: list[tuple[Any, Any, int, bool]] = [(root, 0, 0, False)]  # container, key, depth, whether in an object
    unfinished: list[tuple[Any, Any, Callable[[Any], Any]]] = []
    while stack:
        container, key, depth, in_object = stack.pop()
        new = replace(container[key], in_object)
        container[key] = new.value
        if new.finish is not None:
            unfinished.append((container, key, new.finish))
        if new.places is not None:
            check_depth(depth + 1)
            stack.extend(
                (part_container, part_key, depth + 1, new.parts_in_object)
                for part_container, part_key in new.places
                if type(part_container[part_key]) not in KEY_TYPES  # these are never replaced
            )
    for container, key, finish in reversed(unfinished):  # children before parents: a tuple cannot be changed
        container[key] = finish(container[key])
    return root[0]


def _copy_container(value: Any, in_object: bool = False) -> _Replacement:
    """A copy of a dict, list or tuple, whose parts are replaced next; any other value as it is."""
    if type(value) is dict:
        copy = dict(value)
        return _Replacement(copy, [(copy, key) for key in copy], in_object)
    if type(value) is list or type(value) is tuple:
        parts = list(value)
        finish = tuple if type(value) is tuple else None
        return _Replacement(parts, [(parts, index) for index in range(len(parts))], in_object, finish)
    return _Replacement(value)


def _encode_fields(registered: registry.WireType, obj: Any) -> str | dict[str, Any]:
    try:
        packed = registered.encode(obj)
    except NotEncodableError as error:
        raise EncodeError("value", error.reason, error.cure) from error
    return packed if isinstance(packed, str) else dict(zip(registered.fields, packed, strict=True))


def _decoded_object(value: dict[str, Any]) -> _Replacement:
    sent = value["fields"]
    names = list(sent) if type(sent) is dict else []
    sent_type = registry.registration_of_name(value[OBJECT_TAG]).as_sent(value["version"], names)
    if type(sent) is not dict:
        return _Replacement(sent, [], finish=sent_type.build)
    fields = dict(sent)
    return _Replacement(
        fields,
        [(fields, name) for name in names],
        finish=lambda final: sent_type.build([final[name] for name in names]),
    )


def _python_scalar(scalar: np.generic) -> Any:
    value = scalar.item()
    if type(value) not in (bool, int, float, str, bytes):
        raise EncodeError(
            "value", f"numpy scalar of dtype {scalar.dtype}", "Pass an array of it: numpy.asarray(scalar)."
        )
    return value


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


def _wire_dtype(name: str) -> str:
    """`dtype.str` for a str(dtype); any other name is returned unchanged, and the array decoder refuses it."""
    if _NAMES.fullmatch(name):
        try:
            return np.dtype(name).str
        except TypeError as error:
            raise MalformedError(f"array dtype {name} does not exist on this machine") from error
    times = _TIMES.fullmatch(name)
    if times is not None:
        return ("<M8" if times[1] == "datetime" else "<m8") + (times[2] or "")
    return name


_PLAIN = (str, int, bytes, bool, type(None))
_MAX_DEPTH: Final = 100


def same_value(one: Any, other: Any) -> bool:
    """Whether two values have the same type, equal parts in the same order, and bitwise equal numbers.

    Compares the parts of mappings, lists, tuples, dataclasses, numpy arrays and torch tensors, to a depth of 100.
    Objects of any other type, and deeper objects, are the same only if they are one object.
    """
    return _same(one, other, _MAX_DEPTH)


def _same(one: Any, other: Any, depth: int) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _PLAIN):
        return bool(one == other)
    if type(one) is float or type(one) is complex:
        return np.array(one).tobytes() == np.array(other).tobytes()  # zero has a sign, and NaN is not equal to itself
    if type(one) is np.ndarray:  # a subclass holds more than its elements
        return _same_arrays(one, other)
    if is_tensor(one):
        return _same_tensors(one, other)
    if not depth:
        return False
    if dataclasses.is_dataclass(one):
        return all(_same(getattr(one, f.name), getattr(other, f.name), depth - 1) for f in dataclasses.fields(one))
    if isinstance(one, Mapping):
        keys_same = _same(list(one), list(other), depth - 1)
        return keys_same and all(_same(value, other[key], depth - 1) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(
            _same(mine, theirs, depth - 1) for mine, theirs in zip(one, other, strict=True)
        )
    return False


def _same_arrays(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.dtype.hasobject or not one.dtype.itemsize:
        return False
    return np.array_equal(array_bytes(one), array_bytes(other))


def _same_tensors(one: Any, other: Any) -> bool:
    try:
        name, shape, data = tensor_parts(one)
        other_name, other_shape, other_data = tensor_parts(other)
    except NotEncodableError:
        return False
    return name == other_name and shape == other_shape and np.array_equal(data, other_data)
