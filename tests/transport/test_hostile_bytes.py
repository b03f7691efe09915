"""Whatever the bytes are, decoding ends soon, in little memory, with an error of this package."""

from __future__ import annotations

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
from handmade import Item, blob, message, raw, ref, root
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
    assert decode_frames(message([root(5)])) == 5
    assert decode_frames(message([[1, 1, [7]], root([ref(1)])])) == [(7,)]
    array = decode_frames(message([root(blob())], [["array", "<i2", [2]]], (b"\1\0\2\0",)))
    assert array.tolist() == [1, 2]
    assert decode_frames(message([[1, 16, [5, 6]], root(ref(1))])) == Item(5, 6)
    swapped = (["tests.hostile.Item", 1, ["b", "a"]],)
    assert decode_frames(message([[1, 16, [6, 5]], root(ref(1))], types=swapped)) == Item(5, 6)
    assert decode_frames(message([root(blob())], [[1, b"\0\0\x80\x3f"]])).tolist() == [1.0]
    assert decode_frames(message([root(blob())], [["array", ">u2", [1, 2], b"\0\1\0\2"]])).tolist() == [[1, 2]]


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
@given(st.binary(max_size=200), st.integers(0, 4))
def test_random_bytes_are_an_error_or_a_value(body: bytes, count: int) -> None:
    for frames in (raw(body, count), [body]):
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


MALFORMED_STRUCTURE = {
    "no frames": [],
    "empty header": [b""],
    "other magic": [b"XXXX" + encode_frames(1)[0][4:]],
    "no root": message([[1, 1, []]]),
    "two roots": message([root(1), [1, 0, 2]]),
    "one id twice": message([[1, 1, []], [1, 1, []], root(1)]),
    "unhashable id": message([[[1], 1, []], root(1)]),
    "reference to itself": message([[1, 1, [ref(1)]], root(ref(1))]),
    "reference forward": message([[2, 1, [ref(1)]], [1, 1, []], root(ref(2))]),
    "reference to a missing blob": message([root(blob(0))]),
    "reference to a root": message([[1, 0, 5], [0, 0, ref(9)]]),
    "huge reference": message([root(msgpack.ExtType(1, b"\xff" * 100))]),
    "unknown extension": message([root(msgpack.ExtType(77, b"1234"))]),
    "broken timestamp": raw(b"\x93\x00\x00\xc7\x03\xff123"),
    "unknown tag": message([[1, 99, []], root(1)]),
    "negative tag": message([[1, -1, []], root(1)]),
    "tag beyond the type table": message([[1, 17, [1, 2]], root(1)]),
    "tag of another kind": message([[1, {"a": 1}, []], root(1)]),
    "tag true": message([[1, True, []], root(1)]),
    "tuple of no list": message([[1, 1, 5], root(1)]),
    "entry of no list": message([5]),
    "set with a list": message([[1, 2, [[1]]], root(1)]),
    "set with a member twice": message([[1, 2, [1, 1]], root(1)]),
    "unhashable key": raw(b"\x93\x00\x00\x81\x90\x01"),
    "tuple key": message([[1, 1, [1]], root({ref(1): 1})]),
    "key twice": raw(b"\x93\x00\x00\x82\x01\x02\x01\x03"),
    "text that is not utf-8": raw(b"\x93\x00\x00\xa1\xff"),
    "byte that means nothing": raw(b"\x93\x00\x00\xc1"),
    "fewer entries": message([root(1)], count=2),
    "more entries": message([root(1), [1, 1, []]], count=1),
    "four billion entries": message([root(1)], count=2**32 - 1),
    "array of 4 billion": raw(b"\x93\x00\x00\xdd\xff\xff\xff\xff"),
    "map of 4 billion": raw(b"\x93\x00\x00\xdf\xff\xff\xff\xff"),
    "string of 4 GiB": raw(b"\x93\x00\x00\xdb\xff\xff\xff\xff"),
    "nested 100,000 deep": raw(b"\x93\x00\x00" + b"\x91" * 100_000 + b"\xc0"),
    "maps nested 100,000 deep": raw(b"\x93\x00\x00" + b"\x81\x01" * 100_000 + b"\xc0"),
    "values of no list": message([[1, 16, {"a": 1}], root(1)]),
    "fewer values than fields": message([[1, 16, [1]], root(1)]),
    "more values than fields": message([[1, 16, [1, 2, 3]], root(1)]),
    "type table of no list": message([root(1)], types={"tests.hostile.Item": 1}),
    "type of no list": message([root(1)], types=[5]),
    "type of too few values": message([root(1)], types=[["tests.hostile.Item", 1]]),
    "type without a name": message([root(1)], types=[[["unhashable"], 1, []]]),
    "type with a version of no number": message([root(1)], types=[["tests.hostile.Item", True, ["a", "b"]]]),
    "fields of no list": message([root(1)], types=[["tests.hostile.Item", 1, "ab"]]),
    "field of no text": message([root(1)], types=[["tests.hostile.Item", 1, ["a", ["b"]]]]),
    "module of no name": message([root(1)], types=[["acme.Unheard", 1, ["a"], 7]]),
    "field twice": message([root(1)], types=[["tests.hostile.Item", 1, ["a", "b", "a"]]]),
    "reference in the type table": message([root(1)], types=[["tests.hostile.Item", 1, [ref(0)]]]),
    "reference in the blob table": message([root(1)], [[0, b"1234"], [blob(0), b""]]),
    "blob table of no list": message([root(1)], [5]),
    "empty description": message([root(1)], [[]], (b"",)),
    "unknown blob": message([root(1)], [["soup", 1]], (b"",)),
    "unhashable blob kind": message([root(1)], [[["array"], "<f4", [1]]], (b"1234",)),
    "more frames than blobs": message([root(1)], [], (b"1",)),
    "fewer frames than blobs": message([root(1)], [["array", "|u1", [1]]]),
    "vector of an unknown dtype": message([root(1)], [[6, b"12345678"]]),
    "vector of a negative dtype": message([root(1)], [[-1, b"12345678"]]),
    "vector of a dtype of true": message([root(1)], [[True, b"1234"]]),
    "vector that does not fit its dtype": message([root(1)], [[0, b"12345"]]),
    "vector of text": message([root(1)], [[3, "1234"]]),
    "vector of numbers": message([root(1)], [[3, [1, 2]]]),
    "vector without bytes": message([root(1)], [[3]]),
    "vector with a shape": message([root(1)], [[3, [1], b"1"]]),
    "array here and in a frame": message([root(1)], [["array", "|u1", [1], b"1"]], (b"1",)),
    "array of text": message([root(1)], [["array", "|u1", [1], "1"]]),
    "array of too many values": message([root(1)], [["array", "|u1", [1], b"1", b"1"]]),
    "media here": message([root(1)], [["media", MediaSource.of(b"").digest, 0, b""]]),
    "held media with bytes": message([root(1)], [["held", MediaSource.of(b"").digest, 0, b""]]),
    "digest of no text": message([root(1)], [["media", 5]], (b"",)),
    "scalar of nothing": message([[1, 4, []], root(1)]),
    "scalar too short": message([[1, 4, ["<f8", b"1"]], root(1)]),
    "scalar without bytes": message([[1, 4, ["|V0", b""]], root(1)]),
    "builtin value that contains itself": message([[1, 11, [1, 0, 0, 0, 0, ref(1)]], root(ref(1))]),
    "text beyond Unicode in a field": message(
        [root(blob())], [["array", [4, False, [["a", "<U1", 0, []]]], [1], b"\xff" * 4]]
    ),
    "scalar beyond Unicode": message([[1, 4, ["<U1", b"\xff" * 4]], root(1)]),
}


@pytest.mark.parametrize("frames", MALFORMED_STRUCTURE.values(), ids=MALFORMED_STRUCTURE.keys())
def test_malformed_messages_are_errors(frames: list[Any]) -> None:
    with pytest.raises(MalformedError):
        decode_frames(frames)


def test_a_type_that_is_not_registered_is_not_constructed() -> None:
    for name in ("builtins.eval", "os.system", "subprocess.Popen"):
        with pytest.raises(DecodeError, match=f"no type is registered under the wire name '{name}'"):
            decode_frames(message([[1, 16, ["true"]], root(ref(1))], types=[[name, 1, ["command"]]]))


def test_other_formats_are_named_as_such() -> None:
    header = bytearray(encode_frames(1)[0])
    header[4] = 9
    container = bytearray(encode(1))
    container[4] = 9
    for attempt in (lambda: decode_frames([header]), lambda: decode(container)):
        with pytest.raises(DecodeError) as caught:
            attempt()
        assert "has version 9 and this installation reads" in str(caught.value)


@pytest.mark.parametrize(
    ("limit", "value"),
    [("max_frames", 4), ("max_header_bytes", 300), ("max_objects", 2), ("max_total_bytes", 500), ("max_depth", 1)],
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


@pytest.mark.parametrize("value", [math.nan, 1.5, "5", None, True, -1, np.float64(3)], ids=repr)
@pytest.mark.parametrize("name", ["max_total_bytes", "max_depth"])
def test_a_limit_that_is_no_integer_from_0_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"DecodeLimits\.{name} is .* must be"):
        DecodeLimits(**{name: value})


def test_a_chain_of_objects_past_the_limit_is_a_limit_error() -> None:
    chain = [[number, 1, [ref(number - 1)] if number > 1 else []] for number in range(1, 5001)]
    with pytest.raises(LimitError, match="max_depth"):
        decode_frames(message([*chain, root(ref(5000))]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "row"),
    [((), [0, b""]), ((), [3, b"x"]), ((), ["array", "|u1", [0], b""]), (["tests.hostile.Item", 1, ["a"]], None)],
)
def test_tables_of_the_shortest_rows_cost_no_more_memory_than_the_limit_on_headers_promises(
    types: Any, row: Any
) -> None:
    many = 20_000
    frames = message([root(None)], [row] * many if row else [], types=[types] * many if types else [])
    tracemalloc.start()
    try:
        assert decode_frames(frames) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 80 * len(frames[0])


def test_a_frame_count_or_length_beyond_the_buffer_allocates_nothing() -> None:
    def container(count: int, lengths: bytes) -> bytes:
        fixed = struct.pack("<4sHxxI", b"MMRT", 2, count)
        return fixed + struct.pack("<I", zlib.crc32(lengths, zlib.crc32(fixed))) + lengths

    for hostile in (
        container(2**32 - 1, b""),
        container(60_000, b""),
        container(1, struct.pack("<Q", 2**64 - 1)),
        container(2, struct.pack("<QQ", 2**63, 2**63)),
        container(0, b""),
    ):
        with pytest.raises(TransportError):
            decode(hostile)
