"""Types of free-form values: every value comes back from a Parquet file, as itself or as text of JSON."""

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.cli.traj.value_types import ValueType

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=3)
VALUES = st.recursive(
    LEAVES, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=2), inside, max_size=3)
)


def stored(values: list[Any]) -> tuple[ValueType, list[Any]]:
    """The type of the values, and what a Parquet file gives back of them."""
    found = ValueType()
    for value in values:
        found.add(value)
    schema = pyarrow.schema({"value": found.arrow(pyarrow), "number": pyarrow.int64()})
    rows = [{"value": found.fitted(value), "number": number} for number, value in enumerate(values)]
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), file)
    return found, parquet.read_table(file).column("value").to_pylist()


def agrees(value: Any, read: Any) -> bool:
    """Whether `read` is `value`: with None for absent keys and empty objects, or as text of JSON."""
    if isinstance(read, str) and not isinstance(value, str):
        return bool(json.loads(read) == value)
    if value is None or value == {}:
        return read is None or not any(read.values())
    if isinstance(value, dict):
        absent = read.keys() - value.keys()
        return all(read[name] is None for name in absent) and all(agrees(value[name], read[name]) for name in value)
    if isinstance(value, list):
        return len(value) == len(read) and all(map(agrees, value, read))
    if isinstance(value, str):
        return read in (value, json.dumps(value))
    return bool(read == value) and isinstance(read, bool) == isinstance(value, bool)


@pytest.mark.slow
@given(st.lists(VALUES, max_size=6))
def test_every_value_is_read_back(values: list[Any]) -> None:
    _, read = stored(values)
    for value, one in zip(values, read, strict=True):
        assert agrees(value, one), (value, one)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([2**63], "value: integer of more than 64 bits"),
        ([{str(key): 0} for key in range(1001)], "value: more keys, object"),
    ],
    ids=["large", "keys"],
)
def test_what_has_no_type_is_text_of_json(values: list[Any], reason: str) -> None:
    found, read = stored(values)
    assert list(found.conflicts("value")) == [reason]
    assert [json.loads(one) for one in read] == values


def test_values_of_more_than_20_levels_are_text_of_json_from_there_on() -> None:
    value: Any = 1
    for _ in range(30):
        value = {"in": value}
    found, (read,) = stored([value])
    (line,) = found.conflicts("value")
    assert line.count(".in") == 20
    assert agrees(value, read)
