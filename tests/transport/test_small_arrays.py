"""Small arrays travel in the header: exact on both sides of the boundary, a few bytes each, in memory of their own."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers.media.item import MediaSource
from renderers.rendered import PlaceholderRange
from rollouts.engines.protocol import FinishReason, WeightSpan
from rollouts.trajectory.token_node import MediaReference, TokenNode, Turn
from rollouts.trajectory.tree import Trajectory
from transport import decode, decode_frames, encode, encode_frames
from transport.wire import wire_format

DTYPES = [
    *("?", "i1", "u1", "<i2", ">i2", "<u4", ">u4", "<i4", "<i8", ">i8", ">u8", "<f2", "<f4", ">f4", "<f8", "<c8"),
    *(">c16", "<U3", ">U3", "S4", "V5", "<M8[ns]", ">M8[D]", "<m8[25s]", np.dtype("longdouble").str),
]


def header_tables(value: Any) -> tuple[Any, Any]:
    """The type table and the blob table of a message, read by msgpack alone."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(bytes(encode_frames(value)[0])[wire_format.PRELUDE.size :])
    return unpacker.unpack(), unpacker.unpack()


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(DTYPES), st.integers(-2, 2), st.sampled_from([(-1,), (1, -1), (-1, 1, 1)]))
def test_arrays_of_every_dtype_are_exact_on_both_sides_of_the_boundary(
    data: st.DataObject, dtype: str, beyond: int, shape: tuple[int, ...]
) -> None:
    kind = np.dtype(dtype)
    count = wire_format.MAX_INLINE_BYTES // kind.itemsize + beyond
    fill = data.draw(st.binary(min_size=kind.itemsize, max_size=kind.itemsize)) if kind.kind not in "Ub?" else None
    raw = fill * count if fill is not None else bytes(count * kind.itemsize)
    array = np.frombuffer(raw, kind).reshape(shape)
    frames = encode_frames([array])
    assert len(frames) == (2 if array.nbytes > wire_format.MAX_INLINE_BYTES else 1)
    for back in (decode(encode([array]))[0], decode_frames(frames)[0]):
        assert type(back) is np.ndarray
        assert back.dtype.str == array.dtype.str
        assert back.shape == array.shape
        assert back.tobytes() == raw
        assert not back.flags.writeable
        assert back.flags.c_contiguous


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 60])
def test_small_arrays_are_aligned_for_their_dtype(dtype: str, count: int) -> None:
    for back in decode(encode([np.zeros(count, dtype) for _ in range(5)])):
        assert back.flags.aligned


def test_a_vector_of_a_common_dtype_is_a_number_and_its_bytes_and_any_other_array_says_more() -> None:
    common = [np.arange(2, dtype=dtype) for dtype in ("<i4", "<f4", "?", "u1", "<i8", "<f8")]
    others = [np.zeros((1, 2), "<i4"), np.zeros(1, ">i4"), np.array(7, "<i8")]
    assert header_tables(common + others)[1] == [
        *([code, array.tobytes()] for code, array in enumerate(common)),
        ["array", "<i4", [1, 2], bytes(8)],
        ["array", ">i4", [1], bytes(4)],
        ["array", "<i8", [], b"\7" + bytes(7)],
    ]


def test_a_strided_small_array_sends_its_own_elements() -> None:
    array = np.arange(40, dtype=np.int32)[::4]
    assert decode(encode(array)).tolist() == array.tolist()


def test_a_small_array_keeps_its_own_bytes_alive_and_not_the_message() -> None:
    for array in decode(encode([np.arange(3), np.zeros((2, 2), ">f4"), np.zeros(5000)]))[:2]:
        assert memoryview(array.base).nbytes <= 32


def test_what_was_encoded_is_let_go_without_the_garbage_collector() -> None:
    small, large = np.arange(3), np.arange(5000)
    seen = [weakref.ref(small), weakref.ref(large)]
    gc.disable()
    try:
        encode([small, (large, {1, 2})])
        del small, large
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()


def small_trajectories(count: int) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        if number % 8 == 0:
            sources = [MediaSource.of(rng.bytes(1024)) for _ in range(2)]
        size = int(rng.integers(2, 80))
        ids, logprobs = rng.integers(0, 150_000, size).astype(np.int32), -rng.random(size).astype(np.float32)
        images = tuple(MediaReference("image", s.digest, s, PlaceholderRange(i, 1)) for i, s in enumerate(sources))
        prompt = TokenNode(-1, ids, np.zeros(size, bool), np.empty(0, np.float32), (), images)
        answer = TokenNode(0, ids[::-1], np.ones(size, bool), logprobs, (WeightSpan("7", 0, size),))
        turn = Turn(1, FinishReason.STOP, {"role": "assistant", "content": "seven"}, 0.5, {"right": True})
        made.append(
            Trajectory(f"episode-{number}", number, f"group-{number // 8}", [prompt, answer], [turn], done=True)
        )
    return made


def test_a_small_trajectory_costs_its_values_and_a_few_bytes_for_each_object_and_array_in_it() -> None:
    objects: dict[int, object] = {}
    arrays: dict[int, object] = {}
    sources: dict[str, MediaSource] = {}

    def bare(value: Any) -> Any:
        """The values alone: no class names, no field names, no dtypes, no images."""
        if isinstance(value, MediaSource):
            sources[value.digest] = value
            return None
        if isinstance(value, np.ndarray):
            arrays[id(value)] = value
            return value.tobytes()
        if isinstance(value, FinishReason):
            return None
        if dataclasses.is_dataclass(value):
            objects[id(value)] = value
            return [bare(getattr(value, field.name)) for field in dataclasses.fields(value)]
        if isinstance(value, tuple):
            objects[id(value)] = value
        return [bare(part) for part in value] if isinstance(value, list | tuple) else value

    trajectories = small_trajectories(256)
    values = len(msgpack.packb(bare(trajectories)))
    header, *frames = encode_frames(trajectories)
    assert len(frames) == len(sources) == 64
    # An entry is three values in a list, of them an id of up to 3 bytes, and a reference of 4 bytes. A row is a list of
    # a dtype number and the bytes, and a reference. An image is a row with its digest once, and references.
    images = 74 * len(sources) + 4 * 2 * len(trajectories)
    finishes = 4 * len(trajectories)
    empties = 4 * 2 * len(trajectories)  # a node without messages has a reference to the one empty tuple
    assert len(header) <= values + 9 * len(objects) + 6 * len(arrays) + images + finishes + empties + 500
    assert len(header) < 1.4 * values
