"""The check of placeholder ranges against the tokens that they lie in."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers import PlaceholderRange
from renderers.placement import placement_error


def reason(*placeholders: PlaceholderRange, num_tokens: int = 12) -> str:
    found = placement_error(placeholders, num_tokens)
    assert found is not None
    return found.reason


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6), st.integers(0, 3))
def test_ranges_that_follow_each_other_inside_the_tokens_are_right(pairs: list[tuple[int, int]], rest: int) -> None:
    ends = list(itertools.accumulate(gap + length for gap, length in pairs))
    placeholders = [PlaceholderRange(end - length, length) for end, (_, length) in zip(ends, pairs, strict=True)]
    num_tokens = (ends[-1] if ends else 0) + rest
    assert placement_error(placeholders, num_tokens) is None
    if placeholders:
        assert placement_error(placeholders, ends[-1] - 1) is not None


def test_a_range_outside_of_the_tokens_is_found() -> None:
    assert "outside of the 12 tokens" in reason(PlaceholderRange(7, 6))
    assert "outside of the 12 tokens" in reason(PlaceholderRange(-1, 6))


def test_an_empty_range_is_found() -> None:
    assert "of 0 tokens at 3" in reason(PlaceholderRange(3, 0))


def test_the_second_of_two_overlapping_ranges_is_found() -> None:
    found = placement_error([PlaceholderRange(1, 6), PlaceholderRange(5, 6)], 12)
    assert found is not None
    assert found.position == 1
    assert "before the end of the previous one at 7" in found.reason


@pytest.mark.parametrize("embed_runs", [((0, 7),), ((-1, 2),), ((3, 5), (1, 2)), ((4, 2),), ((0, 3), (2, 5))])
def test_feature_runs_out_of_order_or_range_are_found(
    embed_runs: tuple[tuple[int, int], ...],
) -> None:
    assert "embed_runs" in reason(PlaceholderRange(1, 6, embed_runs))
