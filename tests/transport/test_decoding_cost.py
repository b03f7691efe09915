"""Decoding takes time in proportion to the bytes, whatever they say; so do the words of its errors.

Each takes less than a second; what it is a test against takes minutes, or does not end.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import pytest
from handmade import message, ref, root

from transport import MalformedError, decode_frames, wire_type


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
        pytest.param([61, 16, ENDLESS], (["tests.cost.Colour", 1, []],), id="member of an enum"),
    ],
)
def test_a_value_whose_repr_does_not_end_is_refused_at_once(entry: Any, types: Any) -> None:
    frames = message([*doubling(60), entry, root(ref(61))], types=types)
    with pytest.raises(MalformedError):
        decode_frames(frames)
