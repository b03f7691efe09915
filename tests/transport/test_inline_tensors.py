"""The form that peers write inline: what is a payload, what is the user's, and what hostile ones cost."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers import MediaItem, MediaSource, MultiModalData, PlaceholderRange
from renderers.media.item import ExpansionPiece, PixelScale, TensorField
from rollouts import FinishReason, WeightSpan
from transport import (
    ChecksumError,
    DecodeLimits,
    EncodeError,
    LimitError,
    MalformedError,
    RawTensor,
    TransportError,
    UnknownTypeError,
    decode,
    drop_intermediate_multi_modal_data,
    encode,
    restore_multi_modal_data,
)
from transport.errors import DecodeError
from transport.interop.inline_tensors import (
    decode_tensor_payload,
    encode_tensor_payload,
    same_value,
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


@pytest.mark.parametrize("name", ["bool", "int64", "float16", ">f4", "<U3", "|S2", "datetime64[ns]", "timedelta64[3D]"])
def test_dtypes_go_by_the_name_that_str_gives_as_a_peer_would_write_it(name: str) -> None:
    array = np.zeros((2, 3), name)
    theirs = {"__torch_tensor__": True, "dtype": str(array.dtype), "shape": (2, 3), "data": array.tobytes()}
    back = walk_decode_tensors([{"x": theirs}])[0]["x"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert encode_tensor_payload(array)["dtype"] == str(array.dtype)


def test_tensors_come_back_as_tensors_where_that_is_asked_for() -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("bfloat16", "float8_e4m3fn", "bool", "complex64", "float32"):
        tensor = torch.ones(2, 3).to(getattr(torch, dtype))
        payload = encode_tensor_payload(tensor)
        back = decode_tensor_payload(payload, to_torch=True)
        assert back.dtype == tensor.dtype
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
        back.zero_()
        at_rest = decode_tensor_payload(payload)
        assert type(at_rest) is (RawTensor if dtype in ("bfloat16", "float8_e4m3fn") else np.ndarray)
    big_endian = {**FLOATS, "dtype": ">f4", "data": b"\x3f\x80\0\0\x40\0\0\0"}
    assert decode_tensor_payload(big_endian, to_torch=True).tolist() == [1.0, 2.0]
    assert decode_tensor_payload({**FLOATS, "dtype": "torch.float32"}, to_torch=True).tolist() == [1.0, 2.0]
    array = {**FLOATS, "__ndarray__": True}
    del array["__torch_tensor__"]
    assert type(decode_tensor_payload(array, to_torch=True)) is np.ndarray


def test_where_torch_is_missing_a_tensor_rests_as_its_bytes() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from transport.interop.inline_tensors import *\n"
        "p = {'__torch_tensor__': True, 'dtype': 'bfloat16', 'shape': [1], 'data': b'12'}\n"
        "raw = decode_tensor_payload(p, to_torch=True)\n"
        "assert (raw.dtype, raw.shape, bytes(raw.data)) == ('bfloat16', (1,), b'12')\n"
        "assert encode_tensor_payload(raw) == p\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


NO_PAYLOADS: list[Any] = [
    None,
    5,
    np.arange(2),
    {},
    {"__torch_tensor__": True},
    {**FLOATS, "more": 1},
    {**FLOATS, "__torch_tensor__": 1},
    {**FLOATS, "__torch_tensor__": False},
    {**FLOATS, "dtype": None},
    {**FLOATS, "shape": 2},
    {**FLOATS, "shape": [2.0]},
    {**FLOATS, "shape": [True]},
    {**FLOATS, "data": "text"},
    {**FLOATS, "data": [1, 2]},
    {"__ndarray__": {"__ndarray__": 1}, "dtype": "float32"},
    {"__plain_dict__": 5},
    {"__plain_dict__": [[1]]},
    {"__plain_dict__": [], "x": 1},
]


@pytest.mark.parametrize("value", NO_PAYLOADS, ids=lambda value: f"{value!r:.50}")
def test_a_dict_that_merely_holds_the_keys_is_the_users_and_survives_both_ways(value: Any) -> None:
    assert decode_tensor_payload(value) is value
    assert repr(walk_decode_tensors({"a": [value]})) == repr({"a": [value]})
    if not isinstance(value, np.ndarray):
        sent = msgpack.packb(walk_encode_tensors({"a": [value]}))
        assert walk_decode_tensors(msgpack.unpackb(sent, strict_map_key=False)) == {"a": [value]}


tagged = st.sampled_from(["__torch_tensor__", "__ndarray__", "__plain_dict__", "dtype", "shape", "data", "x"])
parts = st.sampled_from([True, False, 1, "float32", [1], b"1234", [], [["x", 1]], [[1, 2, 3]]])
lookalikes = st.recursive(parts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(tagged, inner, max_size=4))


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(lookalikes | st.builds(lambda tree: [FLOATS, {"__plain_dict__": [["a", tree]]}], lookalikes))
def test_user_data_of_the_very_form_of_payloads_comes_back_as_it_was(tree: Any) -> None:
    sent = msgpack.packb(walk_encode_tensors(tree))
    assert walk_decode_tensors(msgpack.unpackb(sent, strict_map_key=False)) == tree


def test_a_peer_that_looks_for_the_tag_alone_finds_none_in_a_users_dict() -> None:
    def tags(tree: Any) -> int:
        if isinstance(tree, dict):
            return ("__torch_tensor__" in tree) + sum(map(tags, tree.values()))
        return sum(map(tags, tree)) if isinstance(tree, list) else 0

    assert tags(walk_encode_tensors({"a": [FLOATS, {**FLOATS, "x": 1}]})) == 0
    assert tags([FLOATS]) == 1


def test_the_tree_that_is_walked_is_left_as_it_is() -> None:
    inner = [np.arange(2), ({"k": np.zeros(1)},)]
    walk_encode_tensors({"a": inner})
    assert type(inner[0]) is np.ndarray
    assert type(inner[1]) is tuple
    encoded = {"a": [dict(FLOATS)]}
    decoded = walk_decode_tensors(encoded)
    assert encoded == {"a": [FLOATS]}
    assert decoded["a"][0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"dtype": "object"}, MalformedError),
        ({"dtype": "|O"}, MalformedError),
        ({"dtype": "f4,f4"}, MalformedError),
        ({"dtype": "float1024"}, MalformedError),
        ({"dtype": "os.system"}, MalformedError),
        ({"dtype": ""}, MalformedError),
        ({"dtype": "x" * 10**6}, MalformedError),
        ({"shape": [3]}, MalformedError),
        ({"shape": [-2]}, MalformedError),
        ({"shape": [-1, -2]}, MalformedError),
        ({"shape": [2**62, 2**62]}, MalformedError),
        ({"shape": [2**64] * 100_000}, MalformedError),
        ({"shape": [0, 2**63], "data": b""}, MalformedError),
        ({"data": memoryview(b"12345678" * 2)[::2]}, MalformedError),
        ({"dtype": "<U2", "data": b"\xff" * 8, "shape": [1]}, MalformedError),
        ({"dtype": "bfloat16", "shape": [-4], "data": b""}, MalformedError),
    ],
    ids=lambda value: f"{value!r:.60}".partition(" at 0x")[0],
)
def test_payloads_that_are_not_what_they_say_are_errors(change: dict[str, Any], error: type[Exception]) -> None:
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401  the first import takes seconds
    for to_torch in (False, True):
        for payload in ({**FLOATS, **change}, [{"a": ({**FLOATS, **change},)}]):
            started = time.thread_time()
            with pytest.raises(error):
                walk_decode_tensors(payload, to_torch=to_torch)
            assert time.thread_time() - started < 5


def test_an_array_that_torch_does_not_have_is_named() -> None:
    pytest.importorskip("torch")
    with pytest.raises(UnknownTypeError):
        decode_tensor_payload({**FLOATS, "dtype": "<U2", "shape": [1], "data": b"a\0\0\0b\0\0\0"}, to_torch=True)


def test_sizes_and_depth_are_bounded() -> None:
    with pytest.raises(LimitError, match="max_total_bytes"):
        walk_decode_tensors([FLOATS, FLOATS], limits=DecodeLimits(max_total_bytes=15))
    assert len(walk_decode_tensors([FLOATS, FLOATS], limits=DecodeLimits(max_total_bytes=16))) == 2
    deep: Any = FLOATS
    for _ in range(1000):
        deep = {"a": deep} if type(deep) is list else [deep]
    walk_decode_tensors(deep)
    with pytest.raises(LimitError, match="max_depth"):
        walk_decode_tensors([deep])
    with pytest.raises(EncodeError, match="1000 deep"):
        walk_encode_tensors([deep])
    loop: list[Any] = [1]
    loop += [loop, loop]
    with pytest.raises(EncodeError, match="cycles"):
        walk_encode_tensors(loop)


@pytest.mark.parametrize(
    "pairs", [[[[1], 2]], [[{}, 2]], [[(1,), 2]], [["a", 1], ["a", 2]], [[2**65, 1]]], ids=lambda pairs: f"{pairs!r}"
)
def test_a_hidden_dict_with_keys_that_cannot_be_is_malformed(pairs: Any) -> None:
    with pytest.raises(MalformedError):
        walk_decode_tensors({"__plain_dict__": pairs})


@pytest.mark.parametrize("value", [np.array([object()]), np.zeros(1, "i4,f4"), np.ma.zeros(1), [1], None])
def test_what_has_no_inline_form_is_refused(value: Any) -> None:
    with pytest.raises(EncodeError):
        encode_tensor_payload(value)


def test_a_tagged_dict_whose_keys_could_not_come_back_is_refused() -> None:
    with pytest.raises(EncodeError, match="keys"):
        walk_encode_tensors({"__ndarray__": 1, (1, 2): 3})


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["dtype", "shape", "data"]), st.text() | st.binary() | st.lists(st.integers())))
def test_whatever_stands_in_a_payload_decoding_ends_with_a_value_or_an_error_of_this_package(change: Any) -> None:
    for to_torch in (False, True):
        try:
            walk_decode_tensors({**FLOATS, **change}, to_torch=to_torch)
        except TransportError:
            continue


# Objects of registered types.


def image(name: str) -> MediaItem:
    return MediaItem(
        "image",
        name,
        MediaSource.of(name.encode()),
        {"pixel_values": np.full((4, 6), 7, np.uint8), "image_grid_thw": np.array([1, 2, 2])},
        3,
        PixelScale((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        {"pixel_values": TensorField("flat"), "other": TensorField("batched", 0.0)},
        (ExpansionPiece("<a>"), ExpansionPiece("<i>", 3, True)),
    )


def media_data() -> MultiModalData:
    placed = [(image("A"), PlaceholderRange(1, 3)), (image("B"), PlaceholderRange(5, 3, ((0, 1), (2, 3)), False))]
    return MultiModalData.from_items(placed)


WAYS: dict[str, Callable[[Any], Any]] = {
    "encode": lambda tree: decode(encode(tree)),
    "walk and msgpack": lambda tree: walk_decode_tensors(msgpack.unpackb(msgpack.packb(walk_encode_tensors(tree)))),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_media_values_of_renderers_come_back_as_what_they_were(way: str) -> None:
    data = media_data()
    back = WAYS[way]({"tokens": {"multi_modal_data": data}})["tokens"]["multi_modal_data"]
    assert same_media(back, data)
    assert type(back.media_items["image"][0].expansion[1]) is ExpansionPiece
    assert back.mm_placeholders["image"][1].embed_runs == ((0, 1), (2, 3))


@pytest.mark.parametrize("way", WAYS)
def test_shortened_steps_of_objects_come_back_and_are_restored(way: str) -> None:
    def step(prompt: list[int], *placed: tuple[MediaItem, PlaceholderRange]) -> dict[str, Any]:
        data = MultiModalData.from_items(placed)
        tokens = {"prompt_ids": prompt, "completion_ids": [9], "multi_modal_data": data}
        return {"tokens": tokens, "response": {"message": {"role": "assistant", "tokens": dict(tokens)}}}

    prompt, first = [1, 7, 7, 7, 2], (image("A"), PlaceholderRange(1, 3))
    steps = [step(prompt, first), step([*prompt, 9, 7, 7, 7, 2], first, (image("B"), PlaceholderRange(6, 3)))]
    short = drop_intermediate_multi_modal_data(steps)
    back = WAYS[way](short)
    assert back[1]["tokens"]["multi_modal_data"].mm_hashes == {"image": ["B"]}
    for restored, whole in zip(restore_multi_modal_data(back), steps, strict=True):
        for reach in (lambda step: step, lambda step: step["response"]["message"]):
            assert same_media(reach(restored)["tokens"]["multi_modal_data"], reach(whole)["tokens"]["multi_modal_data"])


def same_media(one: MultiModalData, other: MultiModalData) -> bool:
    """Equal in every part; the bytes of a source may be a view."""
    assert [item.source for item, _ in one.items_with_ranges()] == [
        item.source for item, _ in other.items_with_ranges()
    ]
    without = [
        [(dataclasses.replace(item, source=MediaSource("", b"")), where) for item, where in data.items_with_ranges()]
        for data in (one, other)
    ]
    return type(one) is type(other) and one.mm_hashes == other.mm_hashes and same_value(*without)


def test_registered_objects_of_any_kind_go_as_dicts_that_every_decoder_of_msgpack_reads() -> None:
    trees = [FinishReason.STOP, WeightSpan("7", 0, 3), (WeightSpan("7", 0, 3), [FinishReason.LENGTH])]
    for tree in trees:
        assert walk_decode_tensors(walk_encode_tensors(tree)) == tree
    assert walk_encode_tensors(FinishReason.STOP) == {
        "__object__": "rollouts.FinishReason",
        "version": 1,
        "fields": "STOP",
    }
    assert walk_encode_tensors(WeightSpan("7", 0, 3)) == {
        "__object__": "rollouts.WeightSpan",
        "version": 1,
        "fields": {"version": "7", "start": 0, "end": 3},
    }


def test_the_tree_given_keeps_its_objects() -> None:
    data = media_data()
    tree = {"x": [data]}
    encoded = walk_encode_tensors(tree)
    assert tree["x"][0] is data
    before = copy.deepcopy(encoded)
    walk_decode_tensors(encoded)
    assert encoded == before


@pytest.mark.parametrize(
    "dict_of_the_user",
    [
        {"__object__": "rollouts.WeightSpan", "version": 1, "fields": {"version": "7", "start": 0, "end": 3}},
        {"__media__": "ab" * 32, "data": b"x"},
        {"__object__": 1},
        {"__tuple__": [1]},
    ],
)
def test_a_dict_of_the_user_that_looks_like_an_object_stays_one(dict_of_the_user: dict[str, Any]) -> None:
    assert walk_decode_tensors(walk_encode_tensors([dict_of_the_user])) == [dict_of_the_user]


@pytest.mark.parametrize(
    ("hostile", "error"),
    [
        ({"__object__": "acme.Unheard", "version": 1, "fields": {}}, UnknownTypeError),
        ({"__object__": "rollouts.WeightSpan", "version": 1, "fields": "x"}, TransportError),
        ({"__object__": "rollouts.WeightSpan", "version": 1, "fields": {1: 2, "start": 0}}, MalformedError),
        ({"__object__": "rollouts.FinishReason", "version": 1, "fields": "NEVER"}, MalformedError),
        ({"__object__": "rollouts.FinishReason", "version": 1, "fields": {}}, MalformedError),
        ({"__media__": "ab" * 32, "data": b"other"}, ChecksumError),
    ],
)
def test_objects_that_are_none_are_an_error_of_this_package(hostile: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        walk_decode_tensors([hostile])


@pytest.mark.parametrize(("version", "reason"), [(9, "has version 9"), (1, "was sent without its field")])
def test_objects_of_newer_versions_and_without_a_field_are_named(version: int, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        walk_decode_tensors([{"__object__": "rollouts.WeightSpan", "version": version, "fields": {}}])


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


def test_limits_of_another_type_are_an_error_that_names_them() -> None:
    for call in (walk_encode_tensors, walk_decode_tensors, decode_tensor_payload):
        with pytest.raises(TypeError, match="must be a DecodeLimits"):
            call(encode_tensor_payload(np.zeros(2)), limits=None)  # type: ignore[operator]
