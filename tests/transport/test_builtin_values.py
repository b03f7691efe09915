"""Values of Python's own classes come back exact: type, zone, fold, every digit."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from handmade import message, ref, root
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


def test_the_comparison_used_here_sees_the_fold() -> None:
    early = dt.datetime(2024, 10, 27, 2, 30, tzinfo=dt.UTC)
    assert early == early.replace(fold=1)
    assert seen(early) != seen(early.replace(fold=1))


HOSTILE: dict[str, tuple[int, Any]] = {
    "int of text": (5, "12"),
    "int of int": (5, 12),
    "date of February 30": (6, [2024, 2, 30]),
    "date of a pickled state": (6, [b"\x07\xe8\x01\x01", 1, 1]),
    "date of true": (6, [True, True, True]),
    "date of huge numbers": (6, [2**64 - 1, 1, 1]),
    "time of hour 25": (7, [25, 0, 0, 0, 0, None]),
    "time of fold 2": (7, [1, 0, 0, 0, 2, None]),
    "time of a zone by name": (7, [1, 0, 0, 0, 0, "UTC"]),
    "datetime of a pickled state": (8, [b"\x07\xe8\x01\x01\x01\x01\x01\x01\x01\x01", None, 1, 1, 1, 1, 1, 0, None]),
    "datetime too short": (8, [2024, 1, 1]),
    "timedelta of floats": (9, [1.5, 0, 0]),
    "timedelta of ages": (9, [2**63, 0, 0]),
    "offset of two days": (10, [2, 0, 0, None]),
    "offset named by a number": (10, [0, 0, 0, 5]),
}


@pytest.mark.parametrize(("tag", "payload"), HOSTILE.values(), ids=HOSTILE.keys())
def test_parts_that_make_no_value_are_malformed(tag: int, payload: Any) -> None:
    with pytest.raises(MalformedError):
        decode_frames(message([[1, tag, payload], root(ref(1))]))


def test_integers_made_to_collide_as_keys_are_refused_before_they_are_hashed() -> None:
    colliding = [[n, 5, (n * (2**61 - 1) << 8).to_bytes(20, "big")] for n in range(1, 200)]
    for holder in ([300, 2, [ref(n) for n in range(1, 200)]], [300, 1, [{ref(n): 1 for n in range(1, 200)}]]):
        with pytest.raises(MalformedError, match="64 bits"):
            decode_frames(message([*colliding, holder, root(ref(300))]))
