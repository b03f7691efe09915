"""Media on vLLM's wire: the very bytes, however they are cut, and back; what is hostile is refused."""

import base64
import json
import math
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from renderers import MediaItem, MediaSource, MultiModalData, PlaceholderRange
from renderers.media.item import PixelScale, TensorField
from renderers.vision.patches import StillPatches, normalise
from rollouts.engines.vllm import feature_encoding
from rollouts.engines.vllm.feature_decoding import decode_item
from rollouts.engines.vllm.feature_encoding import encode_features, encode_item
from rollouts.engines.vllm.tensors import ServerNumbers
from rollouts.errors import MalformedResultError

QWEN = {"pixel_values": TensorField("flat"), "image_grid_thw": TensorField("batched")}
HALF = PixelScale(fused=True)
CLIP = PixelScale(mean=(0.48, 0.46, 0.41), std=(0.27, 0.26, 0.28), fused=True)
DTYPES = ("uint8", "float32", "bfloat16", "float16")


def image(rows=4, columns=6, *, seed=0, scale=HALF, name="hash"):
    """A Qwen-VL image of rows x columns patches of random pixels."""
    packed = np.random.default_rng(seed).integers(0, 256, (rows * columns, 3, 256), dtype=np.uint8)
    tensors = {"pixel_values": StillPatches(packed, 2), "image_grid_thw": np.array([1, rows, columns])}
    return MediaItem("image", name, MediaSource.of(b"%d" % seed), tensors, rows * columns // 4, scale, QWEN)


def other(tensors, fields, modality="image"):
    """An item of another family."""
    return MediaItem(modality, "hash", MediaSource.of(b"other"), tensors, 1, None, fields)


def encode(item, pixel_dtype="uint8", siblings=None):
    return b"".join(encode_item(item, pixel_dtype=pixel_dtype, siblings=siblings or [item]))


def read(encoded):
    """What was encoded, by the msgpack library."""
    return msgpack.unpackb(base64.b64decode(encoded, validate=True))


def tensor(dtype, shape, raw):
    return [dtype, list(shape), msgpack.ExtType(3, raw)]


# The bytes.


def test_an_image_is_the_bytes_that_a_real_server_was_seen_to_write():
    """From the notes of a vLLM 0.32: an image of 256x192, all but its pixels spelt out."""
    item = image(14, 20)
    pixels = item["pixel_values"].tobytes()
    seen = (
        b"\x82\xaeimage_grid_thw\x82\xa4data\x93\xa5int64\x91\x03\xc7\x18\x03"
        b"\x01\0\0\0\0\0\0\0\x0e\0\0\0\0\0\0\0\x14\0\0\0\0\0\0\0"
        b"\xa5field\x92\xa7batched\x81\xabkeep_on_cpu\xc3"
        b"\xacpixel_values\x82\xa4data\x93\xa5uint8\x92\xcd\x01\x18\xcd\x06\x00\xc9\x00\x06\x90\x00\x03"
        + pixels
        + b"\xa5field\x92\xa4flat\x83\xabkeep_on_cpu\xc2\xa6slices\x91\x91\x93\x00\xcd\x01\x18\xc0\xa3dim\x00"
    )
    assert len(seen) == 430252
    assert encode(item) == base64.b64encode(seen)


@pytest.mark.parametrize("scale", [HALF, CLIP], ids=["half", "clip"])
def test_floats_are_the_normalised_pixels_in_the_type_that_the_server_wants(scale):
    item = image(scale=scale)
    whole = normalise(item["pixel_values"], scale)
    rounded = normalise(item["pixel_values"], scale, dtype="bfloat16")
    for dtype, raw in (("float32", whole), ("float16", whole.astype(np.float16)), ("bfloat16", rounded)):
        assert read(encode(item, dtype))["pixel_values"]["data"] == tensor(dtype, (24, 1536), raw.tobytes())


def test_each_kind_of_field_carries_the_options_of_vllms_class_in_their_order():
    item = other(
        {"a": np.zeros((2, 3), np.int32), "b": np.float32(1.5)[None][0:1], "c": np.array(7)},
        {"a": TensorField("flat"), "b": TensorField("batched", 0.0), "c": TensorField("shared")},
    )
    written = read(encode(item, "float32", siblings=[item, item]))
    assert written["a"] == {
        "data": tensor("int32", (2, 3), bytes(24)),
        "field": ["flat", {"keep_on_cpu": False, "slices": [[[0, 2, None]], [[2, 4, None]]], "dim": 0}],
    }
    assert written["b"]["field"] == ["batched", {"keep_on_cpu": False}]
    assert written["c"] == {
        "data": tensor("int64", (), (7).to_bytes(8, "little")),
        "field": ["shared", {"keep_on_cpu": False, "batch_size": 2}],
    }
    assert [list(entry["field"][1]) for entry in written.values()] == [
        ["keep_on_cpu", "slices", "dim"],
        ["keep_on_cpu"],
        ["keep_on_cpu", "batch_size"],
    ]


def test_floats_of_other_families_are_cast_to_the_model_type_and_integers_stay():
    values = np.array([1.0, 1.00390625, -3.0e38, np.inf, np.nan], dtype=np.float64)
    item = other({"x": values, "n": np.arange(3)}, {"x": TensorField("flat"), "n": TensorField("flat")})
    written = read(encode(item, "bfloat16"))
    # 1.00390625 lies half-way between two bfloat16 and goes to the even one.
    expected = bytes.fromhex("803f 803f 62ff 807f c07f")
    assert written["x"]["data"] == tensor("bfloat16", (5,), expected)
    assert written["n"]["data"] == tensor("int64", (3,), np.arange(3).tobytes())


@given(
    st.integers(1, 5000),
    st.sampled_from(DTYPES),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([HALF, CLIP]),
)
def test_the_same_bytes_come_out_however_the_tensors_are_cut(block, dtype, rows, columns, scale):
    item = image(rows, columns, scale=scale)
    expected = base64.b64encode(base64.b64decode(encode(item, dtype)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_encoding, "_BLOCK_BYTES", max(8, block))
        assert encode(item, dtype) == expected


@given(
    arrays.arrays(
        st.sampled_from([np.bool_, np.uint8, np.int64, np.dtype(">i8"), np.float32]),
        arrays.array_shapes(min_dims=0, min_side=0),
    ),
    st.sampled_from([lambda array: array, np.transpose, np.flip, lambda array: array[..., ::2]]),
)
def test_any_array_is_written_as_msgpack_would(array, view):
    array = view(array) if array.ndim else array
    item = other({"tensor": array}, {"tensor": TensorField("batched")})
    packed = msgpack.packb(
        {
            "tensor": {
                "data": tensor(array.dtype.name, array.shape, array.astype(array.dtype.newbyteorder("<")).tobytes()),
                "field": ["batched", {"keep_on_cpu": False}],
            }
        }
    )
    assert encode(item) == base64.b64encode(packed)


# The whole object.


def test_features_of_two_modalities_and_an_image_shown_twice():
    shown = image()
    clip = MediaItem(
        "video",
        "clip",
        MediaSource.of(b"clip"),
        {"pixel_values_videos": np.zeros((8, 1536), np.uint8), "video_grid_thw": np.array([2, 2, 2])},
        2,
        HALF,
        {"pixel_values_videos": TensorField("flat"), "video_grid_thw": TensorField("batched")},
    )
    data = MultiModalData.from_items(
        [(shown, PlaceholderRange(0, 6)), (clip, PlaceholderRange(6, 2)), (shown, PlaceholderRange(9, 6))]
    )
    written = json.loads(b"".join(encode_features(data, pixel_dtype="uint8")))
    assert [len(entries) for entries in written["kwargs_data"].values()] == [2, 1]
    assert written["kwargs_data"]["image"][0] == written["kwargs_data"]["image"][1]
    assert read(written["kwargs_data"]["image"][0])["pixel_values"]["field"][1]["slices"] == [
        [[0, 24, None]],
        [[24, 48, None]],
    ]
    video = read(written["kwargs_data"]["video"][0])
    assert list(video) == ["pixel_values_videos", "video_grid_thw"]
    assert video["video_grid_thw"]["field"] == ["batched", {"keep_on_cpu": True}]


def test_encoding_holds_little_more_than_the_base64_itself():
    data = MultiModalData.from_items([(image(64, 64), PlaceholderRange(0, 1024))])
    nbytes = 4096 * 1536
    tracemalloc.start()
    try:
        segments = encode_features(data, pixel_dtype="uint8")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(map(len, segments)) > nbytes * 4 / 3
    assert peak < 1.6 * nbytes


# And back.


#: Options of fields that we would choose otherwise.
OTHER_OPTIONS = {
    "sizes": {"data": tensor("int64", (2,), bytes(16)), "field": ["batched", {"keep_on_cpu": True}]},
    "wide": {
        "data": tensor("uint8", (3, 4), bytes(12)),
        "field": ["flat", {"keep_on_cpu": False, "slices": [[[None] * 3, [0, 4, None]]], "dim": 1}],
    },
}


@pytest.mark.parametrize(
    ("sent", "dtypes"),
    [
        *((encode(image(), dtype), ["int64", dtype]) for dtype in DTYPES),
        (base64.b64encode(msgpack.packb(OTHER_OPTIONS)), ["int64", "uint8"]),
    ],
)
def test_what_a_server_sent_goes_back_byte_for_byte(sent, dtypes):
    decoded = decode_item(sent)
    item = other({name: entry.tensor for name, entry in decoded.items()}, {n: e.field for n, e in decoded.items()})
    assert [entry.dtype for entry in decoded.values()] == dtypes
    for wanted in DTYPES:  # whatever the engine was told: these are the server's own tensors
        assert encode(item, wanted) == sent


@pytest.mark.parametrize("value", [7, 2.5, [1, 2, 3], [[0.5, 1.0], [2.0, 3.0]], []])
def test_plain_numbers_in_a_tensors_place_are_kept_as_they_are(value):
    sent = base64.b64encode(msgpack.packb({"n": {"data": value, "field": ["batched", {"keep_on_cpu": True}]}}))
    decoded = decode_item(sent)["n"]
    assert isinstance(decoded.tensor, ServerNumbers)
    assert decoded.tensor.unpack().tolist() == value
    assert encode(other({"n": decoded.tensor}, {"n": decoded.field})) == sent


# What is hostile.


def sent(value):
    return base64.b64encode(value if isinstance(value, bytes) else msgpack.packb(value))


def one(data, field=("batched", {"keep_on_cpu": False})):
    return {"x": {"data": data, "field": field}}


GOOD = ["uint8", [2], msgpack.ExtType(3, b"ab")]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (7, "not map"),
        ({1: 2}, "not str"),
        ({"x": {}}, "data and field"),
        ({"x": {"data": 1, "other": 1}}, "no field after"),
        (one(None), "holds nil"),
        (one({}), "holds map"),
        (one([GOOD]), "list of tensors"),
        (one([[1, 2], [3]]), "different lengths"),
        (one(1, ["flat", {}]), "no tensor"),
        (one(["object", [1], msgpack.ExtType(3, b"x")]), "'object'"),
        (one(["uint8", [3], msgpack.ExtType(3, b"ab")]), "has 2 bytes"),
        (one(["uint8", [-2], msgpack.ExtType(3, b"ab")]), "-2"),
        (one(["uint8", [2**50, 0], msgpack.ExtType(3, b"")]), "shape"),
        (one(["uint8", [2.0], msgpack.ExtType(3, b"ab")]), "not int"),
        (one(["uint8", [1] * 17, msgpack.ExtType(3, b"a")]), "17 dimensions"),
        (one(["uint8", [2], msgpack.ExtType(1, b"ab")]), "extension type 1"),  # a pickle, to vLLM
        (one(["uint8", [2], msgpack.ExtType(2, b"ab")]), "extension type 2"),
        (one(["uint8", [2], 1]), "has int instead"),  # an index of a buffer that never comes
        (one(["uint8", [2], b"ab"]), "has bytes instead"),
        (one(["uint8", [2]]), "shape and bytes"),
        (one(GOOD, 3), "not array"),
        (one(GOOD, ["batched"]), "kind and its options"),
        (one(GOOD, ["__class__", {}]), "flat, batched or shared"),
        (one(GOOD, ["batched", {"keep_on_cpu": 1}]), "not bool"),
        (one(GOOD, ["batched", {"else": 1}]), "'else'"),
        (one(GOOD, ["flat", {"dim": 1, "slices": []}]), "axis 1"),
        ({"y" * 300: 1}, "300 exceeds"),
        (dict.fromkeys(map(str, range(300)), 1), "300 tensors"),
        (b"", "end before a value"),
        (b"\xc1", "0xc1"),
        (b"\xdf\xff\xff\xff\xff", "4294967295 tensors"),
        (b"\x81\xdb\xff\xff\xff\xffx", "end within a value"),
        (b"\x81\xa1\xff\x80", "utf-8"),
        (msgpack.packb(one(GOOD)) + b"\0", "after the last"),
        (b"\x82" + msgpack.packb(one(GOOD))[1:] * 2, "twice"),
    ],
)
def test_what_vllm_does_not_write_is_refused_with_its_place(value, said):
    with pytest.raises(MalformedResultError) as refusal:
        decode_item(sent(value), name="render 7")
    assert said in str(refusal.value)
    assert "render 7" in str(refusal.value)


@pytest.mark.parametrize("text", ["gq5p*WFn", "gq5", "gq5pb\n==", "ä", b"\xff\xff\xff\xff", "gA==gA=="])
def test_what_is_not_base64_is_refused(text):
    with pytest.raises(MalformedResultError, match="base64"):
        decode_item(text)


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x81\xa1x\x82\xa4data" + b"\x91" * 100_000 + b"\x01",
        b"\x81\xa1x\x82\xa4data\xdd\x00\xff\xff\xff" + b"\x90" * 1_000_000,
        b"\x81\xa1x\x82\xa4data\xdc\x00\x10" + (b"\xdc\xff\xff" + b"\x90" * 65535) * 16,
        msgpack.packb(one(GOOD))[:-13] + b"\x81\xa6slices" + b"\xdd\x00\xff\xff\xff" + b"\x90" * 1_000_000,
    ],
    ids=["deep", "wide", "nested", "slices"],
)
def test_a_bomb_of_lists_costs_no_more_memory_than_its_bytes(bomb):
    encoded = base64.b64encode(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedResultError):
            decode_item(encoded)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(bomb) + 10 * 2**20


@given(st.data())
def test_damaged_items_are_decoded_or_refused_and_nothing_else(data):
    raw = bytearray(base64.b64decode(encode(image(2, 2), data.draw(st.sampled_from(DTYPES)))))
    heads = [*range(120), *range(len(raw) - 60, len(raw))]  # where the structure is
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.sampled_from(heads))] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.none(), st.integers(0, len(raw))))
    try:
        decoded = decode_item(base64.b64encode(raw[:end]))
    except MalformedResultError:
        return
    for entry in decoded.values():
        array = entry.tensor if isinstance(entry.tensor, np.ndarray) else entry.tensor.unpack()
        assert array.size == math.prod(array.shape)
