"""The mean and the standard deviation of numbers of any size."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.values import mean_and_spread

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(FINITE, min_size=1, max_size=30))
def test_the_mean_and_the_spread_of_finite_numbers_are_finite_and_near_the_exact_ones(values: list[float]) -> None:
    found = mean_and_spread(values)
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    largest = float(max(map(abs, exact)))
    assert found.mean == pytest.approx(float(mean), rel=1e-9, abs=largest * 1e-9)
    variance = sum((value - mean) ** 2 for value in exact) / len(exact)
    assert math.isfinite(found.spread)
    if largest:
        exact_share = math.sqrt(variance / Fraction(largest) ** 2)
        assert found.spread / largest == pytest.approx(exact_share, rel=1e-6, abs=1e-6)


@given(st.lists(st.floats(), max_size=30))
def test_numbers_that_are_not_finite_are_counted_and_left_out(values: list[float]) -> None:
    finite = [value for value in values if math.isfinite(value)]
    found, expected = mean_and_spread(values), mean_and_spread(finite)
    assert (found.used, found.not_finite) == (len(finite), len(values) - len(finite))
    assert str(found[:2]) == str(expected[:2])
    assert math.isnan(found.mean) == (not finite)
