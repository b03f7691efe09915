"""Decoding takes time in proportion to the bytes, whatever they say; so do the words of its errors.

Each takes less than a second; what it is a test against takes minutes, or does not end.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np
import pytest
from handmade import blob, message, ref, root

from transport import MalformedError, decode, decode_frames, encode, wire_type


@dataclasses.dataclass
class Known:
    x: Any = 0


class Colour(enum.Enum):
    RED = 1


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    from transport.wire import registry

    monkeypatch.setattr(registry, "_by_name", dict(registry._by_name))
    monkeypatch.setattr(registry, "_by_class", dict(registry._by_class))
    wire_type("tests.cost.Known")(Known)
    wire_type("tests.cost.Colour")(Colour)


@pytest.mark.slow
def test_a_structured_dtype_of_many_fields_is_decoded_in_proportion_to_them() -> None:
    array = np.zeros(2, [(f"field{number}", "u1") for number in range(100_000)])
    assert decode(encode(array)).dtype == array.dtype


def test_text_fields_that_all_lie_over_the_same_bytes_are_not_read_once_for_each() -> None:
    size = 4 << 20
    fields = [[f"field{number}", f"<U{size // 4}", 0, []] for number in range(20_000)]
    frames = message([root(blob())], [["array", [size, False, fields], [1]]], (bytes(size),))
    with pytest.raises(MalformedError):
        decode_frames(frames)


def test_an_object_that_came_with_many_unknown_fields_is_decoded_in_proportion_to_them() -> None:
    names = [f"field{number}" for number in range(100_000)]
    frames = message([[1, 16, [None] * len(names)], root(ref(1))], types=(["tests.cost.Known", 1, names],))
    decode_frames(frames)


def doubling(levels: int) -> list[Any]:
    """A tuple of twice a tuple of twice a tuple...: its `repr` doubles with every level."""
    return [[1, 1, [0, 0]], *([n, 1, [ref(n - 1), ref(n - 1)]] for n in range(2, levels + 1))]


ENDLESS = ref(60)


@pytest.mark.parametrize(
    ("entry", "types"),
    [
        pytest.param([61, 6, [ENDLESS, 1, 1]], (), id="part of a date"),
        pytest.param([61, 5, ENDLESS], (), id="large integer"),
        pytest.param([61, ENDLESS, 1], (), id="tag"),
        pytest.param([61, 4, [ENDLESS, b""]], (), id="dtype of a scalar"),
        pytest.param([61, 4, [[1, True, [[ENDLESS, "|u1", 0, []]]], b"1"]], (), id="name of a field"),
        pytest.param([61, 4, [[1, True, [["a", "|u1", ENDLESS, []]]], b"1"]], (), id="offset of a field"),
        pytest.param([61, 4, [[1, True, [["a", "|u1", 0, ENDLESS]]], b"1"]], (), id="shape of a field"),
        pytest.param([61, 16, ENDLESS], (["tests.cost.Colour", 1, []],), id="member of an enum"),
    ],
)
def test_a_value_whose_repr_does_not_end_is_refused_at_once(entry: Any, types: Any) -> None:
    frames = message([*doubling(60), entry, root(ref(61))], types=types)
    with pytest.raises(MalformedError):
        decode_frames(frames)
