"""Values of Python's own classes come back exact: type, zone, fold, every digit."""

import datetime as dt
from typing import Any

import msgpack
import pytest
from handmade import DATE, DATETIME, INT, OFFSET, SET, TIME, TIMEDELTA, message, obj, raw
from hypothesis import strategies as st

from transport import MalformedError, decode_frames

offsets = st.builds(dt.timedelta, seconds=st.integers(-86399, 86399))
fixed = st.builds(dt.timezone, offsets) | st.builds(dt.timezone, offsets, st.text(max_size=5))
zones = st.none() | fixed | st.just(dt.UTC)
folds = st.sampled_from([0, 1])
values: st.SearchStrategy[Any] = st.one_of(
    st.integers(-(2**400), 2**400),
    st.dates(),
    st.builds(lambda t, zone, fold: t.replace(tzinfo=zone, fold=fold), st.times(), zones, folds),
    st.builds(lambda t, zone, fold: t.replace(tzinfo=zone, fold=fold), st.datetimes(), zones, folds),
    st.timedeltas(),
    fixed,
)


def seen(value: Any) -> object:
    """Everything about a value that could differ; == alone takes 01:30 and 01:30 of another fold for one."""
    zone = getattr(value, "tzinfo", None)
    parts = [type(value), repr(value), type(zone), repr(zone)]
    return [*parts, getattr(value, "fold", None), value.tzname(None) if isinstance(value, dt.timezone) else None]


HOSTILE: dict[str, list[Any]] = {
    "int of text": obj(INT, "12"),
    "int of int": obj(INT, 12),
    "int of nothing": obj(INT),
    "date of February 30": obj(DATE, "2024-02-30"),
    "date of a pickled state": obj(DATE, b"\x07\xe8\x01\x01"),
    "date of a moment": obj(DATE, "2024-02-28T01:00"),
    "date of numbers": obj(DATE, 2024, 1, 1),
    "time of hour 25": obj(TIME, "25:00", 0, None),
    "time of fold 2": obj(TIME, "01:00", 2, None),
    "time of fold true": obj(TIME, "01:00", True, None),
    "time of a zone by name": obj(TIME, "01:00", 0, "UTC"),
    "datetime of a pickled state": obj(DATETIME, b"\x07\xe8\x01\x01\x01\x01\x01\x01\x01\x01", 0, None),
    "datetime too short": obj(DATETIME, "2024-01-01"),
    "timedelta of floats": obj(TIMEDELTA, 1.5, 0, 0),
    "timedelta of ages": obj(TIMEDELTA, 2**63, 0, 0),
    "offset of two days": obj(OFFSET, obj(TIMEDELTA, 2, 0, 0), None),
    "offset named by a number": obj(OFFSET, obj(TIMEDELTA, 0, 0, 0), 5),
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_parts_that_make_no_value_are_malformed(body: list[Any]) -> None:
    with pytest.raises(MalformedError):
        decode_frames(message([body]))


def test_integers_made_to_collide_as_keys_are_refused_before_they_are_hashed() -> None:
    colliding = [obj(INT, (n * (2**61 - 1) << 8).to_bytes(20, "big")) for n in range(1, 200)]
    with pytest.raises(MalformedError, match="64 bits"):
        decode_frames(message(obj(SET, *colliding)))
    pairs = b"".join(msgpack.packb(key) + b"\x01" for key in colliding)
    with pytest.raises(MalformedError, match="64 bits"):
        decode_frames(raw(b"\xde" + len(colliding).to_bytes(2, "big") + pairs))
