"""The form that peers write inline: what is a payload, what is the user's, and what hostile ones cost."""

import subprocess
import sys
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_list_makers import object_step, on_tokens, turn

from renderers import MultiModalData, PlaceholderRange
from transport import (
    EncodeError,
    MalformedError,
    RawTensor,
    TransportError,
    decode_tensor_payload,
    encode_tensor_payload,
    walk_decode_tensors,
    walk_encode_tensors,
)

FLOATS = {"__torch_tensor__": True, "dtype": "float32", "shape": [2], "data": b"\0\0\x80\x3f\0\0\0\x40"}


def test_the_two_payloads_spelt_out() -> None:
    array = np.array([[1, 2]], ">i2")
    expected = {"__ndarray__": True, "dtype": ">i2", "shape": [1, 2], "data": b"\0\1\0\2"}
    assert encode_tensor_payload(array) == expected
    assert encode_tensor_payload(RawTensor("float32", (2,), np.frombuffer(FLOATS["data"], np.uint8))) == FLOATS
    back = decode_tensor_payload(FLOATS)
    assert back.tolist() == [1.0, 2.0]
    assert back.dtype == np.float32
    assert not back.flags.writeable


def test_the_tensors_of_peers_come_back_as_tensors_where_that_is_asked_for() -> None:
    torch = pytest.importorskip("torch")
    big_endian = {**FLOATS, "dtype": ">f4", "data": b"\x3f\x80\0\0\x40\0\0\0"}
    for payload in (big_endian, {**FLOATS, "dtype": "torch.float32"}):
        back = decode_tensor_payload(payload, to_torch=True)
        assert torch.equal(back, torch.tensor([1.0, 2.0]))
        back.zero_()


def test_where_torch_is_missing_a_tensor_rests_as_its_bytes() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from transport.inline_arrays import *\n"
        "p = {'__torch_tensor__': True, 'dtype': 'bfloat16', 'shape': [1], 'data': b'12'}\n"
        "raw = decode_tensor_payload(p, to_torch=True)\n"
        "assert (raw.dtype, raw.shape, bytes(raw.data)) == ('bfloat16', (1,), b'12')\n"
        "assert encode_tensor_payload(raw) == p\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


NO_PAYLOADS: list[Any] = [
    None,
    5,
    {},
    {**FLOATS, "more": 1},
    {**FLOATS, "__torch_tensor__": 1},
    {**FLOATS, "dtype": None},
    {**FLOATS, "shape": 2},
    {**FLOATS, "shape": [2.0]},
    {**FLOATS, "data": "text"},
    {"__ndarray__": {"__ndarray__": 1}, "dtype": "float32"},
]


@pytest.mark.parametrize("value", NO_PAYLOADS, ids=lambda value: f"{value!r:.50}")
def test_a_dict_that_merely_holds_the_keys_is_the_users(value: Any) -> None:
    assert decode_tensor_payload(value) is value
    assert repr(walk_decode_tensors({"a": [value]})) == repr({"a": [value]})


@pytest.mark.parametrize("tag", ["__torch_tensor__", "__ndarray__"])
def test_a_dict_that_a_peer_could_take_for_an_array_is_refused(tag: str) -> None:
    for value in ({**FLOATS}, {tag: True}, {tag: None, "x": 1}):
        with pytest.raises(EncodeError, match="which marks an array"):
            walk_encode_tensors({"a": [value]})


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "object"},
        {"dtype": "f4,f4"},
        {"dtype": "float1024"},
        {"dtype": "x" * 10**6},
        {"shape": [3]},
        {"shape": [2**64] * 100_000},
        {"data": memoryview(b"12345678" * 2)[::2]},
        {"dtype": "bfloat16", "shape": [-4], "data": b""},
    ],
    ids=lambda value: f"{value!r:.60}".partition(" at 0x")[0],
)
def test_payloads_that_are_not_what_they_say_are_errors(change: dict[str, Any]) -> None:
    for to_torch in (False, True):
        for payload in ({**FLOATS, **change}, [{"a": ({**FLOATS, **change},)}]):
            with pytest.raises(MalformedError):
                walk_decode_tensors(payload, to_torch=to_torch)


def test_depth_is_bounded() -> None:
    deep: Any = np.zeros(2, np.float32)
    for _ in range(100):
        deep = {"a": deep} if type(deep) is list else [deep]
    sent = walk_encode_tensors(deep)
    walk_decode_tensors(sent)
    with pytest.raises(EncodeError, match="100 deep"):
        walk_encode_tensors([deep])
    for _ in range(900):
        sent = [sent]
        with pytest.raises(MalformedError, match="100 deep"):
            walk_decode_tensors(sent)
    loop: list[Any] = [1]
    loop += [loop, loop]
    with pytest.raises(EncodeError, match="cycles"):
        walk_encode_tensors(loop)


@pytest.mark.parametrize("value", [np.array([object()]), np.zeros(1, "i4,f4"), np.ma.zeros(1), [1], None])
def test_what_has_no_inline_form_is_refused(value: Any) -> None:
    with pytest.raises(EncodeError):
        encode_tensor_payload(value)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["dtype", "shape", "data"]), st.text() | st.binary() | st.lists(st.integers())))
def test_whatever_stands_in_a_payload_decoding_ends_with_a_value_or_an_error_of_this_package(change: Any) -> None:
    for to_torch in (False, True):
        try:
            walk_decode_tensors({**FLOATS, **change}, to_torch=to_torch)
        except TransportError:
            continue


# Multi-modal data.


def through_msgpack(tree: Any) -> Any:
    return walk_decode_tensors(msgpack.unpackb(msgpack.packb(walk_encode_tensors(tree))))


def test_multi_modal_data_become_a_dict_of_their_columns() -> None:
    (step,) = through_msgpack([{"tokens": {"multi_modal_data": on_tokens(object_step(*turn("xA")))}}])
    data = step["tokens"]["multi_modal_data"]
    assert (data["mm_hashes"], data["mm_placeholders"]) == ({"image": ["A"]}, {"image": [{"offset": 1, "length": 3}]})
    assert data["mm_items"]["image"][0]["pixel_values"].tolist() == [[65.0] * 6] * 4
    where = PlaceholderRange(5, 3, ((0, 1), (2, 3)))
    sparse = through_msgpack(MultiModalData({"image": ["A"]}, {"image": [where]}, {"image": [{}]}))
    assert sparse["mm_placeholders"] == {"image": [{"offset": 5, "length": 3, "embed_runs": [[0, 1], [2, 3]]}]}


@pytest.mark.parametrize("scalar", [np.float32(0.1), np.int64(-5), np.uint8(7), np.bool_(True), np.str_("a")])
def test_numpy_scalars_become_python_values_that_msgpack_packs(scalar: np.generic) -> None:
    value = walk_encode_tensors({"value": [scalar]})["value"][0]
    assert type(value) in (bool, int, float, str)
    assert value == scalar
    assert msgpack.unpackb(msgpack.packb([value])) == [value]


@pytest.mark.parametrize("scalar", [np.complex64(1j), np.longdouble(1), np.datetime64("2026-01-01")])
def test_numpy_scalars_without_an_equal_msgpack_value_are_refused(scalar: np.generic) -> None:
    with pytest.raises(EncodeError, match="numpy scalar of dtype"):
        walk_encode_tensors([scalar])
