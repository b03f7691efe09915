"""Arrays and tensors whose description and bytes disagree are refused, in the header and in frames of their own."""

from typing import Any

import pytest
from handmade import ARRAY, TENSOR, message, obj

from transport import DecodeError, MalformedError, decode_frames


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("<f4", [3], b"1234"),
        ("<f4", [2**62, 2**62], b""),
        ("<f4", [2**40], b""),
        ("<f4", [0, 2**62, 2**62], b""),
        ("<f4", [-1], b""),
        ("<f4", [-1, -1], b"1234"),
        ("<f4", [1] * 65, b"1234"),
        ("<f4", [2**63] * 100_000, b"1234"),
        ("<f4", [True], b"1234"),
        ("<f4", 1, b"1234"),
        ("|O8", [1], b"12345678"),
        ("O", [1], b"12345678"),
        ("f4,f4", [1], b"12345678"),
        ("(2,)f4", [1], b"12345678"),
        ("<f3", [1], b"123"),
        ("<U999999999", [0], b""),
        ("<M8[parsec]", [1], b"12345678"),
        ("|V0", [9], b""),
        ("<U1", [1], b"\xff\xff\xff\xff"),
        (">U1", [2], b"\0\0\0a\0\x11\0\0"),
        (None, [1], b"1234"),
    ],
)
def test_arrays_that_do_not_fit_their_bytes_are_refused(dtype: Any, shape: Any, data: bytes) -> None:
    with pytest.raises(MalformedError):
        decode_frames(message(obj(ARRAY, dtype, shape), frames=(data,)))
    with pytest.raises(MalformedError):
        decode_frames(message(obj(ARRAY, dtype, shape, data)))


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "error"),
    [
        ("load", [1], b"1", DecodeError),
        ("float32", [1], b"12345", MalformedError),
        ("float32", [1000], b"", MalformedError),
        ("bfloat16", [2**62], b"", MalformedError),
        ("float32", [0, 2**62, 2**62], b"", MalformedError),
        ("float32", [0, 2**63], b"", MalformedError),
    ],
)
def test_tensors_that_do_not_fit_their_bytes_are_refused(
    dtype: str, shape: list[int], data: bytes, error: type[Exception]
) -> None:
    pytest.importorskip("torch")
    with pytest.raises(error):
        decode_frames(message(obj(TENSOR, dtype, shape), frames=(data,)))
    with pytest.raises(error):
        decode_frames(message(obj(TENSOR, dtype, shape, data)))
