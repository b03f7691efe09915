"""Encoding numpy arrays and torch tensors as a description and raw bytes, and decoding them.

The raw bytes are the elements in C order, in the byte order that the dtype names.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from transport.errors import EncodeError, MalformedError, quoted, unknown_type

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]

# The forms of `dtype.str` for plain element types. np.dtype() accepts many more ("O", "f4,f4", "(9,9)f4"),
# which a message must not use.
_DTYPE = re.compile(r"[<>|](?:[biufcSUV][1-9]\d{0,8}|[mM]8(?:\[\d{0,9}[a-zA-Zμ]{1,7}\])?)")

# Most arrays are vectors of these dtypes; a message holds the position in this tuple. Only append.
COMMON_DTYPES = tuple(np.dtype(name) for name in ("<i4", "<f4", "|b1", "|u1", "<i8", "<f8"))
COMMON_CODES = {dtype: code for code, dtype in enumerate(COMMON_DTYPES)}

TENSOR_ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    "float4_e2m1fn_x2": 1,  # two numbers per element
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """A decoded tensor on a machine without torch or without its dtype: torch's dtype name, shape, bytes.

    `data` is a read-only uint8 array of `prod(shape) * item size` bytes, in C order. A `RawTensor` is encoded
    as the tensor, so that a process which only forwards messages needs no torch.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Bytes = field(repr=False)

    def numpy(self) -> npt.NDArray[Any]:
        """The elements as a view. Raises `TypeError` for a dtype numpy does not have, such as bfloat16."""
        return self.data.view(np.dtype(self.dtype)).reshape(self.shape)


def is_array(obj: object) -> bool:
    """Whether `obj` is a plain numpy array. A subclass holds more than its elements (a mask, field names)."""
    return type(obj) is np.ndarray or type(obj) is np.memmap


def is_tensor(obj: object) -> bool:
    """Whether `obj` is a torch tensor, a torch parameter or a `RawTensor`."""
    if type(obj) is RawTensor:
        return True
    torch = sys.modules.get("torch")  # no tensor exists while torch is not loaded
    return torch is not None and (type(obj) is torch.Tensor or type(obj) is torch.nn.Parameter)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The dtype's name on the wire. Raises `EncodeError`."""
    if dtype.hasobject:
        reason = f"dtype {dtype} holds Python objects"
        raise EncodeError("value", reason, "Convert it to a numeric dtype, or send a list with .tolist().")
    # The name of every third-party element type (ml_dtypes.bfloat16) and of structured ones is '<V2': they
    # would come back as plain bytes.
    if not _DTYPE.fullmatch(dtype.str) or np.dtype(dtype.str) != dtype:
        cure = "Send array.view(numpy.uint8) beside its name, or one array per field."
        raise EncodeError("value", f"dtype {dtype} has no name on the wire", cure)
    return dtype.str


def array_parts(array: npt.NDArray[Any]) -> tuple[str, list[int], Bytes]:
    """dtype name, shape and elements as flat uint8."""
    return dtype_name(array.dtype), list(array.shape), array_bytes(array)


def array_bytes(array: npt.NDArray[Any]) -> Bytes:
    """The elements as flat uint8, sharing memory with a C-contiguous array; any other layout is copied once."""
    if array.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def tensor_parts(tensor: Any) -> tuple[str, list[int], Bytes]:
    """dtype name, shape and elements as flat uint8. For a view only its elements, not its whole storage.

    Shares memory with a contiguous tensor on the CPU. Gradients are left out.
    """
    if isinstance(tensor, RawTensor):
        if min(tensor.shape, default=0) < 0 or (
            math.prod(tensor.shape) * TENSOR_ITEM_BYTES.get(tensor.dtype, -1) != tensor.data.nbytes
        ):
            reason = f"{tensor.data.nbytes} bytes are not a {tensor}"
            raise EncodeError("value", reason, "Give it data of its own size.")
        return tensor.dtype, list(tensor.shape), array_bytes(tensor.data)
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or tensor.is_meta or name not in TENSOR_ITEM_BYTES:
        raise EncodeError(
            "value",
            f"torch tensor with layout {tensor.layout}, dtype {tensor.dtype}, device {tensor.device}",
            "Send a dense tensor that holds data, in one of: " + ", ".join(TENSOR_ITEM_BYTES) + ".",
        )
    # Conjugates and negatives may be marks on a tensor, which its bytes do not have.
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if dense.numel() == 0:
        return name, list(tensor.shape), np.empty(0, np.uint8)
    return name, list(tensor.shape), dense.reshape(-1).view(torch.uint8).numpy()


def read_dtype(name: object) -> np.dtype[Any]:
    """The dtype a message names. Raises `MalformedError`."""
    if type(name) is not str or not _DTYPE.fullmatch(name):
        raise MalformedError(f"{quoted(name)} is not the name of an array dtype")
    try:
        return np.dtype(name)
    except (TypeError, ValueError, OverflowError) as error:
        what = f"array dtype {name:.80} does not exist on this machine"
        raise MalformedError(what, "Send it as another dtype.") from error


def build_vector(dtype: np.dtype[Any], data: bytes) -> npt.NDArray[Any]:
    """A one-dimensional, read-only view on `data`.

    CPython keeps the contents of `bytes` at multiples of 16, so the view is aligned for every dtype.
    """
    try:
        return np.frombuffer(data, dtype) if data else np.ndarray(0, dtype, buffer=data)
    except ValueError as error:  # the bytes are no multiple of an element
        raise MalformedError(f"array of dtype {dtype} came with {len(data)} bytes") from error


def build_array(name: object, shape: object, data: bytes | memoryview) -> npt.NDArray[Any]:
    """A read-only view on `data`, which is flat bytes."""
    dtype = read_dtype(name)
    dims = _read_shape(shape, dtype.itemsize, len(data))
    try:
        # frombuffer() refuses an empty buffer; ndarray() does not, and allocates nothing.
        flat = np.frombuffer(data, dtype).reshape(dims) if data else np.ndarray(dims, dtype, buffer=data)
    except (TypeError, ValueError, OverflowError) as error:  # more or larger dimensions than this numpy supports
        raise MalformedError(f"array of shape {dims} and dtype {dtype!s:.80} cannot exist here") from error
    _check_text(flat)
    return flat


def build_tensor(name: object, shape: object, data: bytes | memoryview) -> torch.Tensor | RawTensor:
    """A tensor where torch is installed, else a `RawTensor`.

    The tensor has a copy of the data: torch has no read-only tensors, and an in-place operation on a view
    would change the received bytes or, on a mapped file, end the process.
    """
    raw_tensor = build_raw_tensor(name, shape, data)
    try:
        import torch
    except ImportError:
        return raw_tensor
    dtype = getattr(torch, raw_tensor.dtype, None)
    if dtype is None:  # the newest dtypes are not in every version
        return raw_tensor
    raw, dims = raw_tensor.data, raw_tensor.shape
    try:
        return torch.from_numpy(raw.copy()).view(dtype).reshape(dims) if raw.size else torch.empty(dims, dtype=dtype)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise MalformedError(f"tensor of shape {dims} and dtype {name} cannot exist here") from error


def build_raw_tensor(name: object, shape: object, data: bytes | memoryview) -> RawTensor:
    """A `RawTensor` with a read-only view on `data`."""
    if type(name) is not str or name not in TENSOR_ITEM_BYTES:
        raise unknown_type(f"torch.{name:.80}" if type(name) is str else quoted(name))
    dims = _read_shape(shape, TENSOR_ITEM_BYTES[name], len(data))
    raw = np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)
    # `np.empty` is writable, and what is decoded never is.
    raw.setflags(write=False)
    return RawTensor(name, dims, raw)


def scalar_parts(scalar: np.generic) -> tuple[str, list[int], bytes]:
    """dtype name, shape and bytes of a numpy scalar."""
    array = np.asarray(scalar)
    if array.dtype.kind in "SU" and array[()] != scalar:
        raise EncodeError("value", "numpy string with trailing NULs, which numpy drops", "Send a str or bytes.")
    return dtype_name(array.dtype), [], scalar.tobytes()


def build_scalar(parts: list[Any]) -> Any:
    """The numpy scalar of the parts that `scalar_parts` gives."""
    if len(parts) != 3 or parts[1] != [] or type(parts[2]) is not bytes:
        raise MalformedError("numpy scalar is not a dtype, an empty shape and bytes")
    return build_array(parts[0], [], parts[2])[()]


def _check_text(array: npt.NDArray[Any]) -> None:
    """Refuse code points beyond Unicode; reading such an element would fail inside numpy, long after decoding."""
    if array.dtype.kind != "U" or array.size == 0:
        return
    points = np.ascontiguousarray(array).reshape(-1).view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
    if int(points.max()) > sys.maxunicode:
        raise MalformedError(f"text array of dtype {array.dtype.str} holds {int(points.max()):#x}, not a code point")


def _read_shape(shape: object, item_bytes: int, data_bytes: int) -> tuple[int, ...]:
    """The shape, after a check that it describes exactly `data_bytes` bytes."""
    if type(shape) is not list or len(shape) > 64 or any(type(n) is not int or not 0 <= n < 1 << 63 for n in shape):
        raise MalformedError("array shape is not a list of at most 64 sizes")
    dims = tuple(shape)
    if math.prod(dims) * item_bytes != data_bytes:
        raise MalformedError(f"array of shape {dims} with {item_bytes} bytes an element came with {data_bytes} bytes")
    return dims
