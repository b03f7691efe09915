"""Whatever the bytes are, decoding ends soon, in little memory, with an error of this package."""

import contextlib
import datetime
import math
import struct
import tracemalloc
import zlib
from typing import Any

import msgpack
import numpy as np
import pytest
from handmade import (
    ARRAY,
    DATETIME,
    ITEM,
    SCALAR,
    SET,
    TENSOR,
    TUPLE,
    Item,
    kind,
    medium,
    message,
    obj,
    raw,
    shared,
    vector,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers.media.item import MediaSource
from transport import (
    ChecksumError,
    DecodeLimits,
    LimitError,
    MalformedError,
    RawTensor,
    TransportError,
    decode,
    decode_frames,
    encode,
    encode_frames,
)
from transport.errors import DecodeError

SAMPLE = [
    Item(np.arange(6, dtype=">i4").reshape(2, 3), MediaSource.of(b"image")),
    {"text": "é" * 20, 3: (1, 2.5, None)},
    np.float32(1),
    {1, "x"},
    Item(np.array(["ab"]), [True, -1, 2**63]),
    [2**70, datetime.timedelta(1, 2, 3)],
    [datetime.date(2024, 2, 29), datetime.time(1, 2, fold=1), datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC)],
    datetime.timezone(datetime.timedelta(hours=2), "here"),
    np.zeros(2, "U1"),
    RawTensor("bfloat16", (2,), np.arange(4, dtype=np.uint8)),
]
BUFFER = encode(SAMPLE)


def test_the_messages_made_here_are_read_when_they_are_well_formed() -> None:
    assert decode_frames(message(5)) == 5
    one, same = decode_frames(message([obj(TUPLE, 7), shared(0)]))
    assert one is same
    assert one == (7,)
    assert decode_frames(message(obj(ARRAY, "<i2", [2]), frames=(b"\1\0\2\0",))).tolist() == [1, 2]
    assert decode_frames(message(obj(ARRAY, ">u2", [1, 2], b"\0\1\0\2"))).tolist() == [[1, 2]]
    assert decode_frames(message(vector(1, b"\0\0\x80\x3f"))).tolist() == [1.0]
    assert decode_frames(message(obj(ITEM, 5, 6))) == Item(5, 6)
    swapped = (["tests.hostile.Item", 1, ["b", "a"]],)
    assert decode_frames(message(obj(ITEM, 6, 5), types=swapped)) == Item(5, 6)
    image = MediaSource.of(b"image")
    assert decode_frames(message([medium(0), medium(0)], [[image.digest, False]], (b"image",))) == [image, image]


def test_a_message_that_is_cut_off_or_followed_by_bytes_is_an_error() -> None:
    for cut in range(len(BUFFER)):
        with pytest.raises(TransportError):
            decode(BUFFER[:cut])
    with pytest.raises(MalformedError):
        decode(BUFFER + b"\0")
    frames = encode_frames(SAMPLE)
    with pytest.raises(MalformedError):
        decode_frames([*frames, b""])
    with pytest.raises(TransportError):
        decode_frames(frames[:-1])
    with pytest.raises(MalformedError):
        decode_frames([bytes(frames[0]) + b"\xc0", *frames[1:]])


def test_a_flipped_bit_in_the_header_part_is_noticed() -> None:
    lengths_end = 16 + 8 * len(encode_frames(SAMPLE))
    header_at = -(-lengths_end // 64) * 64
    header_end = header_at + len(encode_frames(SAMPLE)[0])
    for offset in [*range(lengths_end), *range(header_at, header_end)]:
        for bit in (0, 3, 7):
            damaged = bytearray(BUFFER)
            damaged[offset] ^= 1 << bit
            if bytes(damaged[6:8]) != b"\0\0":  # two reserved bytes of the fixed part
                continue
            with pytest.raises(TransportError):
                decode(damaged)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_header_changed_under_a_checksum_that_fits_decodes_or_is_an_error(data: st.DataObject) -> None:
    frames = encode_frames(SAMPLE)
    header = bytearray(frames[0])
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(TransportError):
        decode_frames([header, *frames[1:]])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_an_error_or_a_value(body: bytes) -> None:
    for frames in (raw(body), [body]):
        with contextlib.suppress(TransportError):
            decode_frames(frames)
    with pytest.raises(TransportError):
        decode(body)


def test_media_whose_bytes_changed_is_a_checksum_error() -> None:
    damaged = BUFFER.replace(b"image", b"Image")
    assert damaged != BUFFER
    with pytest.raises(ChecksumError, match="of 5 bytes is damaged"):
        decode(damaged)
    with pytest.raises(ChecksumError):
        decode(encode(MediaSource("0" * 64, b"image")))


EMPTY = MediaSource.of(b"").digest

MALFORMED_STRUCTURE = {
    "no frames": [],
    "no object": [raw(b"")[0]],
    "two objects": raw(b"\x01\x02"),
    "shared before it": message([shared(0), obj(TUPLE, 1)]),
    "shared with itself": message(obj(TUPLE, shared(0))),
    "a medium that is not there": message(medium(0)),
    "huge number": message(msgpack.ExtType(2, b"\xff" * 100)),
    "unknown extension": message(msgpack.ExtType(77, b"1234")),
    "unknown extension below zero": message(msgpack.ExtType(5, b"1234")),
    "empty tuple with data": message(msgpack.ExtType(4, b"1")),
    "broken timestamp": raw(b"\xc7\x03\xff123"),
    "unknown kind": message(obj(12, 1)),
    "kind beyond the type table": message(obj(ITEM + 1, 1, 2)),
    "kind without a number": message([1, msgpack.ExtType(1, b"")]),
    "kind outside of a list": message(kind(TUPLE)),
    "kind as a value of a dict": message({"a": kind(TUPLE)}),
    "kind as a value of a dict in an object": message(obj(TUPLE, {"a": kind(TUPLE)})),
    "kind before the last value": message([kind(TUPLE), 1]),
    "kind before a list": message([kind(TUPLE), []]),
    "kind twice": message([1, kind(TUPLE), kind(TUPLE)]),
    "set with a list": message(obj(SET, [1])),
    "set with a member twice": message(obj(SET, 1, 1)),
    "list as a key": raw(b"\x81\x90\x01"),
    "tuple as a key": raw(b"\x81" + msgpack.packb(obj(TUPLE, 1)) + b"\x01"),
    "kind as a key": message({kind(TUPLE): 1}),
    "key twice": raw(b"\x82\x01\x02\x01\x03"),
    "text that is not utf-8": raw(b"\xa1\xff"),
    "byte that means nothing": raw(b"\xc1"),
    "array of 4 billion": raw(b"\xdd\xff\xff\xff\xff"),
    "map of 4 billion": raw(b"\xdf\xff\xff\xff\xff"),
    "string of 4 GiB": raw(b"\xdb\xff\xff\xff\xff"),
    "nested 100,000 deep": raw(b"\x91" * 100_000 + b"\xc0"),
    "maps nested 100,000 deep": raw(b"\x81\x01" * 100_000 + b"\xc0"),
    "fewer values than fields": message(obj(ITEM, 1)),
    "more values than fields": message(obj(ITEM, 1, 2, 3)),
    "type table of no list": message(1, types={"tests.hostile.Item": 1}),
    "type of no list": message(1, types=[5]),
    "type of too few values": message(1, types=[["tests.hostile.Item", 1]]),
    "type without a name": message(1, types=[[["unhashable"], 1, []]]),
    "type with a version of no number": message(1, types=[["tests.hostile.Item", True, ["a", "b"]]]),
    "fields of no list": message(1, types=[["tests.hostile.Item", 1, "ab"]]),
    "field of no text": message(1, types=[["tests.hostile.Item", 1, ["a", ["b"]]]]),
    "module of no name": message(1, types=[["acme.Unheard", 1, ["a"], 7]]),
    "field twice": message(1, types=[["tests.hostile.Item", 1, ["a", "b", "a"]]]),
    "object in the type table": message(1, types=[["tests.hostile.Item", 1, [obj(TUPLE)]]]),
    "kind at the end of the type table": message(1, types=[["tests.hostile.Item", 1, ["a", "b"]], kind(TUPLE)]),
    "media table of no list": message(1, {"a": 1}),
    "medium of no list": message(1, [5]),
    "medium of another number of values": message(1, [[EMPTY]], (b"",)),
    "digest of no text": message(1, [[5, False]], (b"",)),
    "medium without a frame": message(1, [[EMPTY, False]]),
    "array without a frame": message(obj(ARRAY, "|u1", [1])),
    "tensor without a frame": message(obj(TENSOR, "uint8", [1])),
    "more frames than arrays and media": message(1, (), (b"1",)),
    "array here and in a frame": message(obj(ARRAY, "|u1", [1], b"1"), (), (b"1",)),
    "array of text": message(obj(ARRAY, "|u1", [1], "1")),
    "array of too many values": message(obj(ARRAY, "|u1", [1], b"1", b"1")),
    "array of nothing": message(obj(ARRAY)),
    "vector of an unknown dtype": message(vector(6, b"12345678")),
    "vector that does not fit its dtype": message(vector(0, b"12345")),
    "scalar of nothing": message(obj(SCALAR)),
    "scalar with a shape": message(obj(SCALAR, "<f8", [1], bytes(8))),
    "scalar too short": message(obj(SCALAR, "<f8", [], b"1")),
    "scalar without bytes": message(obj(SCALAR, "|V0", [], b"")),
    "scalar beyond Unicode": message(obj(SCALAR, "<U1", [], b"\xff" * 4)),
    "builtin value that contains itself": message(obj(DATETIME, "2024-01-01T00:00:00", 0, shared(0))),
}


@pytest.mark.parametrize("frames", MALFORMED_STRUCTURE.values(), ids=MALFORMED_STRUCTURE.keys())
def test_malformed_messages_are_errors(frames: list[Any]) -> None:
    with pytest.raises(MalformedError):
        decode_frames(frames)


def test_a_type_that_is_not_registered_is_not_constructed() -> None:
    for name in ("builtins.eval", "os.system", "subprocess.Popen"):
        with pytest.raises(DecodeError, match=f"no type is registered under the wire name '{name}'"):
            decode_frames(message(obj(ITEM, "true"), types=[[name, 1, ["command"]]]))


def test_other_formats_are_named_as_such() -> None:
    header = bytearray(encode_frames(1)[0])
    header[0] = 9
    container = bytearray(encode(1))
    container[4] = 9
    for attempt in (lambda: decode_frames([header]), lambda: decode(container)):
        with pytest.raises(DecodeError) as caught:
            attempt()
        assert "has version 9 and this installation reads" in str(caught.value)


@pytest.mark.parametrize(
    ("limit", "value"),
    [("max_frames", 4), ("max_header_bytes", 300), ("max_objects", 2), ("max_total_bytes", 500)],
)
def test_each_limit_holds_and_names_itself(limit: str, value: int) -> None:
    big = [Item((np.zeros(300), np.zeros(300), np.ones(200), np.ones(200)), "x" * 400)]
    limits = DecodeLimits(**{limit: value})
    assert decode(encode(big))[0].b == "x" * 400
    with pytest.raises(LimitError, match=rf"DecodeLimits\({limit}=") as caught:
        decode_frames(encode_frames(big), limits=limits)
    assert caught.value.limit == limit
    assert f"at most {value} allowed" in str(caught.value)
    with pytest.raises(LimitError):
        decode(encode(big), limits=limits)


def test_objects_beyond_the_limit_are_not_built_and_arrays_and_omitted_media_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[object] = []
    monkeypatch.setattr(Item, "__init__", lambda self, *values: built.append(values))
    with pytest.raises(LimitError, match="max_objects"):
        decode_frames(message([obj(ITEM, 1, 2)] * 100), limits=DecodeLimits(max_objects=3))
    assert 0 < len(built) < 100
    with pytest.raises(LimitError, match="max_objects"):
        decode_frames(message([vector(3, b"x")] * 4), limits=DecodeLimits(max_objects=3))
    with pytest.raises(LimitError, match="max_frames"):
        decode_frames(message(1, [[EMPTY, True]] * 4), limits=DecodeLimits(max_frames=3))


@pytest.mark.parametrize("value", [math.nan, 1.5, "5", None, True, -1, np.float64(3)], ids=repr)
@pytest.mark.parametrize("name", ["max_total_bytes", "max_objects"])
def test_a_limit_that_is_no_integer_from_0_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"DecodeLimits\.{name} is .* must be"):
        DecodeLimits(**{name: value})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "part"),
    [
        ((), vector(0, b"")),
        ((), vector(3, b"x")),
        ((), obj(ARRAY, "|u1", [0], b"")),
        ((), obj(SET)),
        (["tests.hostile.Item", 1, ["a"]], None),
    ],
)
def test_the_shortest_parts_cost_no_more_memory_than_the_limit_on_headers_promises(types: Any, part: Any) -> None:
    many = 20_000
    frames = message([part] * many if part else None, types=[types] * many if types else [])
    tracemalloc.start()
    try:
        decode_frames(frames)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(frames[0])


def test_a_frame_count_or_length_beyond_the_buffer_allocates_nothing() -> None:
    def container(count: int, lengths: bytes) -> bytes:
        return struct.pack("<4sHxxII", b"MMRT", 3, count, zlib.crc32(lengths)) + lengths

    for hostile in (
        container(2**32 - 1, b""),
        container(60_000, b""),
        container(1, struct.pack("<Q", 2**64 - 1)),
        container(2, struct.pack("<QQ", 2**63, 2**63)),
        container(0, b""),
    ):
        with pytest.raises(TransportError):
            decode(hostile)
