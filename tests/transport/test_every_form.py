"""Nests of everything that can be sent, through every way of sending it: bytes, frames, peers' dicts, files."""

import dataclasses
import enum
import tempfile
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from test_builtin_values import seen, values

from renderers.media.item import MediaSource
from transport import (
    RecordReader,
    RecordWriter,
    decode,
    decode_frames,
    encode,
    encode_frames,
    wire_type,
)
from transport.inline_arrays import walk_decode_tensors, walk_encode_tensors

torch = pytest.importorskip("torch")


@wire_type("tests.every.Mood")
class Mood(enum.Enum):
    CALM = 1


@wire_type("tests.every.Node")
@dataclasses.dataclass
class Node:
    value: Any
    more: Any = None


FLOATS = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
TORCH_DTYPES = [*FLOATS, "float8_e8m0fnu", "bool", "uint8", "int16", "uint32", "int64", "complex64", "complex128"]
LONG = np.dtype("longdouble").str
dtypes = st.sampled_from(
    ["?", "i1", "<i4", ">u2", "<u8", "<f2", ">f8", "<c16", "S3", "<U2", "V3", "<M8[ms]", "<m8[D]", LONG]
).map(np.dtype)


@st.composite
def arrays(draw: st.DrawFn, of: st.SearchStrategy[np.dtype] = dtypes) -> np.ndarray:
    dtype = draw(of)
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    size = int(np.prod(shape)) * dtype.itemsize
    # Bytes below 3, so that fields of text hold code points; every second element of some, the other order of others.
    raw = bytes(draw(st.integers(0, 2)) * (i % 4 == 0) for i in range(size))
    array = np.ndarray(shape, dtype, buffer=raw) if size else np.empty(shape, dtype)
    step = draw(st.sampled_from([1, -1, 2]))
    return array.T[(*(slice(None, None, step) for _ in array.shape), ...)]


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    dtype = getattr(torch, draw(st.sampled_from(TORCH_DTYPES)))
    shape = draw(st.sampled_from([(), (0,), (3,), (2, 3), (2, 0, 2)]))
    item = torch.empty(0, dtype=dtype).element_size()
    size = int(np.prod(shape)) * item
    raw = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8).reshape(*shape, item)
    if dtype == torch.bool:
        raw %= 2
    return (raw.view(dtype) if size else torch.empty((*shape, 1), dtype=dtype)).reshape(shape)


media = st.binary(max_size=40).map(MediaSource.of)
plain_arrays = arrays(dtypes.filter(lambda dtype: dtype.kind != "V")).filter(lambda array: array.size > 0)
scalars = plain_arrays.map(lambda array: array.reshape(-1)[0])
text = st.text(max_size=6) | st.sampled_from(["dtype", "shape", "data"])
keys = text | st.integers(-(2**63), 2**63)
leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | text | st.binary()
sets = st.sets(keys, max_size=3) | st.frozensets(keys, max_size=3)
nests = st.recursive(
    leaves | values | arrays() | tensors() | media | scalars | sets | st.sampled_from(Mood),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.builds(Node, inner, inner)
    ),
    max_leaves=12,
)


def spelt(value: Any) -> Any:
    """Everything about a nest in plain comparable values: each type, and the bits of each array."""
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().reshape(-1)
        return ["tensor", str(value.dtype), tuple(value.shape), bytes(raw.view(torch.uint8)) if raw.numel() else b""]
    if isinstance(value, np.ndarray | np.generic):
        return [type(value), value.dtype, value.shape, value.tobytes()]
    if isinstance(value, dict):
        return [dict, [(key, spelt(part)) for key, part in value.items()]]
    if isinstance(value, list | tuple | set | frozenset):
        parts = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [type(value), [spelt(part) for part in parts]]
    if isinstance(value, Node):
        return [Node, spelt([value.value, value.more])]
    return seen(value)  # not the value: NaN is not equal to itself


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(nests)
def test_whatever_is_sent_comes_back_the_same_as_bytes_as_frames_and_from_a_file(sent: Any) -> None:
    expected = spelt(sent)
    assert spelt(decode(encode(sent))) == expected
    assert spelt(decode_frames([bytes(frame) for frame in encode_frames(sent)])) == expected
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.mmr"
        with RecordWriter(path) as out:
            out.append(sent)
        with RecordReader(path) as reader:
            assert spelt(reader[0]) == expected


named = arrays()
trees = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | text | st.binary(max_size=8) | named | tensors(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text | st.integers(0, 3), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(trees)
def test_trees_come_back_the_same_through_the_peers_form_and_the_frames(sent: Any) -> None:
    packed = msgpack.packb(walk_encode_tensors(sent))
    inline = walk_decode_tensors(msgpack.unpackb(packed, strict_map_key=False), to_torch=True)
    assert spelt(inline) == spelt(sent) == spelt(decode_frames(encode_frames(sent)))
