"""Arrays and tensors inline in msgpack, as dicts inside its dicts and lists, for peers that read plain msgpack.

    {"__torch_tensor__": True, "dtype": "float32", "shape": [2, 3], "data": b"..."}
    {"__ndarray__": True, "dtype": "float32", "shape": [2, 3], "data": b"..."}

`dtype` is numpy's name of the dtype ("float32", ">i2", "datetime64[ns]"), or torch's for those that numpy
does not have ("bfloat16"); `data` are the elements in C order. verifiers writes the first form for arrays and
for tensors (https://github.com/PrimeIntellect-ai/verifiers, `verifiers/utils/serve_utils.py`); for a peer
that reads only this form, pass arrays as `RawTensor(str(array.dtype), array.shape, array_bytes)`. A dict is
such a payload if it has exactly these four keys, the tag is `True`, `dtype` a str, `shape` a list or tuple of
ints and `data` bytes.
"""

import re
from typing import Any, Final

import numpy as np

from renderers.rendered import MultiModalData, PlaceholderRange
from renderers.vision.processor import ProcessorOutput
from transport.errors import EncodeError, MalformedError
from transport.wire.arrays import (
    TENSOR_ITEM_BYTES,
    array_bytes,
    array_parts,
    build_array,
    build_raw_tensor,
    build_tensor,
    is_array,
    is_tensor,
    tensor_parts,
)
from transport.wire.decoding import as_bytes

TENSOR_TAG: Final = "__torch_tensor__"
ARRAY_TAG: Final = "__ndarray__"
COLUMNS: Final = ("mm_hashes", "mm_placeholders", "mm_items")  # of multi-modal data
_MAX_DEPTH: Final = 100

# The forms of str(dtype): a name ("bool", "float32", "float128"), a time with a unit in brackets, or
# dtype.str itself.
_NAMES: Final = re.compile(r"(?:bool|u?int(?:8|16|32|64)|float(?:16|32|64|96|128)|complex(?:64|128|192|256))")
_TIMES: Final = re.compile(r"(datetime|timedelta)64(\[\d{0,9}[a-zA-Zμ]{1,7}\])?")


def encode_tensor_payload(obj: Any) -> dict[str, object]:
    """A torch tensor or `RawTensor` as a `__torch_tensor__` payload, a numpy array as an `__ndarray__` one.

    The elements are copied. Raises `EncodeError` for other values and for dtypes without a name (structured
    dtypes, Python objects).
    """
    if is_tensor(obj):
        name, shape, data = tensor_parts(obj)
        return {TENSOR_TAG: True, "dtype": name, "shape": shape, "data": data.tobytes()}
    if is_array(obj):
        _, shape, data = array_parts(obj)
        return {ARRAY_TAG: True, "dtype": str(obj.dtype), "shape": shape, "data": data.tobytes()}
    raise EncodeError("value", f"{type(obj).__qualname__} is neither an array nor a tensor", "Pass one of these.")


def decode_tensor_payload(payload: Any, to_torch: bool = False) -> Any:
    """The array or tensor of a payload; any other value, such as one decoded already, is returned unchanged.

    Both kinds of payload give a read-only array that shares the payload's bytes; a `__torch_tensor__` payload
    with a dtype that numpy does not have gives a `RawTensor`. With `to_torch` a `__torch_tensor__` payload
    gives a tensor with a copy of the data, or a `RawTensor` if torch is not installed. Raises
    `MalformedError` for a payload whose dtype is unknown or whose data does not fit its shape.
    """
    if not _is_payload(payload):
        return payload
    flat = as_bytes(payload["data"])
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


def walk_encode_tensors(tree: Any) -> Any:
    """`tree` with a payload for each array and tensor, for msgpack; `walk_decode_tensors` is the inverse.

    Dicts, lists and tuples are copied (msgpack makes lists of tuples). numpy's booleans, integers, floats of
    at most 64 bits, str and bytes become Python's, and `MultiModalData` a dict of its three columns. Raises
    `EncodeError` for arrays as above, for other numpy scalars, for a dict that has the tag of a payload among
    its keys, and for trees more than 100 deep, such as one that contains itself.
    """
    return _encoded(tree, _MAX_DEPTH)


def walk_decode_tensors(tree: Any, *, to_torch: bool = False) -> Any:
    """`tree` with every payload decoded as by `decode_tensor_payload`.

    Copies dicts, lists and tuples, and shares all other values with `tree`. Raises as `decode_tensor_payload`
    does, and `MalformedError` for trees more than 100 deep.
    """
    return _decoded(tree, to_torch, _MAX_DEPTH)


def _encoded(value: Any, depth: int) -> Any:
    if is_array(value) or is_tensor(value):
        return encode_tensor_payload(value)
    if isinstance(value, np.generic):
        return _python_scalar(value)
    value = _as_plain(value)
    if type(value) not in (dict, list, tuple):
        return value
    if not depth:
        reason = f"containers nest more than {_MAX_DEPTH} deep"
        raise EncodeError("value", reason, "Remove cycles, or make the tree less deep.")
    if type(value) is not dict:
        return type(value)([_encoded(part, depth - 1) for part in value])
    for tag in (TENSOR_TAG, ARRAY_TAG):
        if tag in value:
            raise EncodeError("value", f"dict with the key {tag!r}, which marks an array", "Give the key another name.")
    return {key: _encoded(part, depth - 1) for key, part in value.items()}


def _decoded(value: Any, to_torch: bool, depth: int) -> Any:
    if type(value) not in (dict, list, tuple):
        return value
    if _is_payload(value):
        return decode_tensor_payload(value, to_torch)
    if not depth:
        raise MalformedError(f"containers nest more than {_MAX_DEPTH} deep", "Make the tree less deep.")
    if type(value) is dict:
        return {key: _decoded(part, to_torch, depth - 1) for key, part in value.items()}
    return type(value)([_decoded(part, to_torch, depth - 1) for part in value])


def _as_plain(value: Any) -> Any:
    """Multi-modal data, a range and an item as dicts; any other value as it is."""
    if isinstance(value, MultiModalData):
        return {name: getattr(value, name) for name in COLUMNS}
    if isinstance(value, PlaceholderRange):
        runs = {} if value.embed_runs is None else {"embed_runs": value.embed_runs}
        return {"offset": value.offset, "length": value.length, **runs}
    return dict(value) if isinstance(value, ProcessorOutput) else value


def _python_scalar(scalar: np.generic) -> Any:
    value = scalar.item()
    if type(value) not in (bool, int, float, str, bytes):
        cure = "Pass an array of it: numpy.asarray(scalar)."
        raise EncodeError("value", f"numpy scalar of dtype {scalar.dtype}", cure)
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
