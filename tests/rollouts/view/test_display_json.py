"""Any value of a message or info can be shown: the conversion ends, and its result is JSON."""

import datetime
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers import MediaSource
from rollouts.view.display_json import MAX_VALUES, display_json

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@pytest.mark.slow
@given(PLAIN)
def test_every_plain_value_becomes_json(value):
    json.dumps(display_json(value), allow_nan=False)


def test_a_value_that_contains_shared_values_without_bound_ends():
    shared = ("a",)
    for _ in range(60):
        shared = (shared, shared)
    text = json.dumps(display_json(shared))
    assert "not shown: values more than" in text
    wide = display_json(list(range(MAX_VALUES + 5)))
    assert len(wide) <= MAX_VALUES
    assert wide[-1] == f"[not shown: more than {MAX_VALUES:,} values]"


def test_other_values_are_described():
    assert display_json(MediaSource.of(b"x")) == {"$source": MediaSource.of(b"x").digest}
    assert display_json(np.arange(3)) == "[int64 array (3,)] 0, 1, 2"
    assert display_json(b"abc") == "[3 bytes]"
    assert display_json(float("nan")) == "nan"
    assert display_json(2**60) == str(2**60)
    assert display_json(2**9000) == "[an integer of 9001 bits]"
    assert display_json(datetime.date(2026, 1, 2)) == "2026-01-02"
    assert display_json({(1, 2): 1}) == {"(1, 2)": 1}
