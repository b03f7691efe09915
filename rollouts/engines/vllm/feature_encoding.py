"""Encodes media for `/inference/v1/generate` as the same bytes that vLLM's own `/render` writes; vllm is not needed.

    features = {"mm_hashes": {"image": [...]}, "mm_placeholders": {"image": [{"offset": 4, "length": 70}]},
                "kwargs_data": {"image": ["gq5pbWFn...", null]}}

An entry of kwargs_data is the base64 of a msgpack map: name -> {"data": [dtype, shape, Ext(3, raw bytes)],
"field": [kind, options for making a batch]}. Source: vLLM 0.31 to 0.33, `mm_serde.encode_mm_kwargs_item`.
vLLM writes the names of an item in the order of a Python set of strings, which differs between server
processes; here they are sorted.

Tensors are written block by block: the floats of a uint8 image, or all its unpacked patches, never exist in
memory as a whole; only their base64 does.
"""

import binascii
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgpack
import numpy as np

from renderers import MultiModalData
from renderers.media.item import MediaItem, TensorField
from renderers.vision.patches import StillPatches, float32_to_bfloat16, normalise
from rollouts.engines.http.exchange import Body
from rollouts.engines.vllm.tensors import (
    FLOATS,
    ITEM_BYTES,
    KEPT_ON_CPU,
    RAW_TENSOR,
    PixelDtype,
    RawPixels,
    ServerNumbers,
    ServerTensor,
    Tensor,
    raw_pixels,
    tensor_type,
)

#: Size of a block: small enough to stay in the CPU's cache from the patches to the base64.
_BLOCK_BYTES = 192 * 2**10


def encode_features(
    data: MultiModalData, *, pixel_dtype: PixelDtype, include: Callable[[str], bool] = lambda mm_hash: True
) -> Body:
    """The JSON object `features`, in segments to be sent one after another.

    `pixel_dtype` is `ServerCapabilities.pixel_dtype`. If `include` is False for the hash of an item, its data
    is null: the server holds it. The media must have passed `request_checks.feature_violations`.
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

    uint8 pixels of an item with a scale are converted to `pixel_dtype`, and so are float tensors, which vLLM
    would cast to the model's dtype. Tensors that a server made are written unchanged.
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
        return bytes((0xD3 + nbytes.bit_length(), RAW_TENSOR))  # 1 -> 0xD4, 16 -> 0xD8
    for kind, width in ((0xC7, 1), (0xC8, 2), (0xC9, 4)):
        if nbytes < 1 << 8 * width:
            return bytes((kind,)) + nbytes.to_bytes(width, "big") + bytes((RAW_TENSOR,))
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
            # First the bytes not encoded yet: fewer than 3 of the previous block, and the bytes between
            # tensors.
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
