"""Decoding takes time in proportion to the bytes, whatever they say; so do the words of its errors.

Each takes less than a second; what it is a test against takes minutes, or does not end.
"""

import dataclasses
import enum
from pathlib import Path
from typing import Any

import pytest
from handmade import DATE, INT, ITEM, SCALAR, TIMEDELTA, TUPLE, message, obj, shared

from transport import MalformedError, RecordReader, RecordWriter, decode_frames, wire_type
from transport.records.layout import FileBytes


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
    frames = message(obj(ITEM, *[None] * len(names)), types=(["tests.cost.Known", 1, names],))
    decode_frames(frames)


#: A tuple of twice a tuple of twice a tuple...: its `repr` doubles with every level.
DOUBLING = [obj(TUPLE, 0, 0), *(obj(TUPLE, shared(n), shared(n)) for n in range(60))]
ENDLESS = shared(60)


@pytest.mark.parametrize(
    ("body", "types"),
    [
        pytest.param(obj(DATE, ENDLESS), (), id="part of a date"),
        pytest.param(obj(TIMEDELTA, ENDLESS, 1, 1), (), id="part of a time"),
        pytest.param(obj(INT, ENDLESS), (), id="large integer"),
        pytest.param(obj(SCALAR, ENDLESS, [], b""), (), id="dtype of a scalar"),
        pytest.param(obj(ITEM, ENDLESS), (["tests.cost.Colour", 1, []],), id="member of an enum"),
    ],
)
def test_a_value_whose_repr_does_not_end_is_refused_at_once(body: Any, types: Any) -> None:
    with pytest.raises(MalformedError):
        decode_frames(message([*DOUBLING, body], types=types))


def test_a_file_with_damage_between_all_of_its_records_is_read_in_proportion_to_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "episodes.mmr"
    with RecordWriter(path) as out:
        for number in range(2000):
            out.append(number)
    data = bytearray(path.read_bytes())
    record = (len(data) - 64) // 2000
    for number in range(0, 2000, 2):
        data[64 + number * record] ^= 1
    path.write_bytes(data)
    asked = []
    read = FileBytes.read
    monkeypatch.setattr(FileBytes, "read", lambda self, at, size: asked.append(size) or read(self, at, size))
    with RecordReader(path) as reader:
        assert [reader[number] for number in range(1, 2000, 2)] == list(range(1, 2000, 2))
    assert sum(asked) < 100 * len(data)
