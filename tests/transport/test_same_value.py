"""Values are the same only if they are equal bit for bit."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.interop.inline_tensors import same_value


@given(st.lists(st.floats(width=32, allow_nan=True), max_size=4), st.lists(st.floats(width=32), max_size=4))
def test_values_are_the_same_only_bit_for_bit(one: list[float], other: list[float]) -> None:
    left, right = np.array(one, np.float32), np.array(other, np.float32)
    assert same_value({"a": (left, [1])}, {"a": (right, [1])}) == (left.tobytes() == right.tobytes())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        ({0.0: 1}, {-0.0: 1}),
        ({1: "a"}, {True: "a"}),
        (complex(0, -0.0), complex(0, 0.0)),
        (np.ma.array([1, 2], mask=[False, True]), np.ma.array([1, 3], mask=[False, True])),
        (np.ma.array([1, 2], mask=[False, True]), np.ma.array([1, 2], mask=[True, False])),
        (np.zeros(1, ">i2"), np.zeros(1, "<i2")),
    ],
    ids=repr,
)
def test_values_that_are_merely_equal_are_not_the_same(one: object, other: object) -> None:
    assert not same_value(one, other)
    assert not same_value([one], [other])


def test_a_nan_is_the_same_as_one_of_the_same_bits() -> None:
    one, other = (struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0] for _ in range(2))
    assert one is not other
    assert same_value([one], [other])
    assert not same_value([one], [float("nan")])


def test_values_too_deep_to_compare_are_not_the_same() -> None:
    def nested() -> list[Any]:
        inside: list[Any] = []
        for _ in range(5000):
            inside = [inside]
        return inside

    one = nested()
    assert same_value(one, one)
    assert not same_value(one, nested())


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), ([1], (1,)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ("a", b"a"), (object(), object())]
)
def test_values_of_other_types_or_orders_are_not_the_same(one: object, other: object) -> None:
    assert not same_value(one, other)
    assert same_value(one, one)
